"""Which captions of a cache are truncated, because they have more tokens than the text encoders read."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from latentcache.errors import PackError
from latentcache.families import DEFAULT, FAMILIES, family_named
from latentcache.store.disk import DiskStore
from latentcache.store.pack import WholePack

_CLIP_TOKENS = 77
"""CLIP's token limit. The recipes of all other encoders have a `max_length`."""

_Identity = msgspec.defstruct("_Identity", [("encoding", msgspec.Raw, msgspec.Raw(b"{}"))])
_Counts = msgspec.defstruct("_Counts", [("num_tokens", Any, None), ("token_limit", Any, None)])
_Record = msgspec.defstruct("_Record", [("identity", _Identity), ("provenance", _Counts)])
_RECORDS: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_Record)
"""Parses only the needed part of a caption's record: that is faster, and file names there need not be UTF-8."""
_parsed = lru_cache(64)(msgspec.json.decode)


def num_cut_tokens(encoding: Any, provenance: Mapping[str, Any]) -> int:
    """How many tokens of a caption its text encoders did not read, from the encoding and provenance in its record.

    0 if the tokens were not counted, or if this version does not know the family.
    """
    num_tokens, limit = provenance.get("num_tokens"), provenance.get("token_limit")
    if type(num_tokens) is not int:
        return 0
    if type(limit) is int:  # this tokenizer truncates earlier than the family's usual ones
        return max(0, num_tokens - limit)
    recipe = encoding if isinstance(encoding, Mapping) else {}
    numbers = {name: value for name, value in recipe.items() if type(value) is int}
    # No family reads fewer tokens. Importing one imports torch, which `status` avoids unless a caption is long.
    if num_tokens <= numbers.get("max_length", _CLIP_TOKENS):
        return 0
    family = recipe.get("family", DEFAULT)
    return int(max(0, num_tokens - family_named(family).token_limit({}, numbers))) if family in FAMILIES else 0


class CutCaptions:
    """Finds truncated captions by their records. It is thread-safe.

    The records of a pack are read once, since a pack never changes.
    """

    def __init__(self, store: DiskStore):
        self._store = store
        self._by_pack = dict[str, np.ndarray]()  # bool [num_entries]

    def flags(self, keys: np.ndarray) -> np.ndarray:
        """Whether each of these captions, uint8 [n, 32], was truncated: bool [n]. False for those of a damaged pack."""
        packs, places = self._store.places(keys)
        flags = np.zeros(len(keys), np.bool_)
        for number in np.unique(places[:, 0]).tolist():
            if number >= 0 and (cut := self._cut_in(packs[number])) is not None:
                here = places[:, 0] == number
                flags[here] = cut[places[here, 1]]
        return flags

    def _cut_in(self, pack: str) -> np.ndarray | None:
        if (known := self._by_pack.get(pack)) is not None:
            return known
        try:
            whole = WholePack.in_file(self._store.path_of(pack))
        except (FileNotFoundError, PackError):  # compacted or damaged since: the service's health page tells which
            return None
        cut = np.zeros(len(whole.row.keys), np.bool_)
        for row in range(len(cut)):
            if whole.row.pack.group_of(row).kind == "text":
                record = _RECORDS.decode(whole.json(row))
                counts = msgspec.structs.asdict(record.provenance)
                cut[row] = num_cut_tokens(_parsed(bytes(record.identity.encoding)), counts) > 0
        self._by_pack[pack] = cut
        return cut
