"""Which captions of a cache are truncated, because they have more tokens than the text encoders read."""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import astuple

import latentcache
from latentcache.errors import PackError
from latentcache.families import DEFAULT, FAMILIES, family_named
from latentcache.store.disk import DiskStore
from latentcache.store.pack import WholePack
from latentcache.utils.json_document import recalled

_CLIP_TOKENS = 77
"""CLIP's token limit. The recipes of all other encoders have a `max_length`."""

_Identity = msgspec.defstruct("_Identity", [("encoding", msgspec.Raw, msgspec.Raw(b"{}"))])
_NULL = msgspec.Raw(b"null")
_Counts = msgspec.defstruct("_Counts", [("num_tokens", msgspec.Raw, _NULL), ("token_limit", msgspec.Raw, _NULL)])
_Record = msgspec.defstruct("_Record", [("identity", _Identity), ("provenance", _Counts)])
_RECORDS: msgspec.json.Decoder[Any] = msgspec.json.Decoder(_Record)
"""Parses only the needed part of a caption's record: that is faster, and file names there need not be UTF-8."""
_ROWS = msgspec.json.Decoder(list[int])


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


@lru_cache(1024)
def _is_cut(encoding: bytes, num_tokens: bytes, token_limit: bytes) -> bool:
    """Whether the numbers in a record, as JSON, say that its caption was truncated. Few records have others."""
    decode = msgspec.json.decode
    return num_cut_tokens(decode(encoding), {"num_tokens": decode(num_tokens), "token_limit": decode(token_limit)}) > 0


class CutCaptions:
    """Finds truncated captions by their records. It is thread-safe.

    The records of a pack are read once, since a pack never changes; `memo` remembers what they say.
    """

    def __init__(self, store: DiskStore, memo: MutableMapping[str, str] | None = None):
        self._store = store
        self._memo = {} if memo is None else memo

    def flags(self, keys: np.ndarray) -> np.ndarray:
        """Whether each of these captions, uint8 [n, 32], was truncated: bool [n]. False for those of a damaged pack."""
        packs, places = self._store.places(keys)
        flags = np.zeros(len(keys), np.bool_)
        for number in np.unique(places[:, 0]).tolist():
            if number >= 0 and (cut := self._cut_in(packs[number])):
                here = places[:, 0] == number
                flags[here] = np.isin(places[here, 1], cut)
        return flags

    def _cut_in(self, pack: str) -> list[int]:
        """The rows of a pack's truncated captions."""
        name = f"cut captions {latentcache.__version__} {pack}"  # another version may know more families
        if (known := recalled(self._memo, name, _ROWS.decode)) is not None:
            return known
        try:
            whole = WholePack.in_file(self._store.path_of(pack))
        except (FileNotFoundError, PackError):  # compacted or damaged since: the service's health page tells which
            return []
        cut = list[int]()
        for group in whole.row.pack.groups:
            if group.kind == "text":
                for row in range(group.first, group.first + group.num):
                    record = _RECORDS.decode(whole.json(row))
                    if _is_cut(bytes(record.identity.encoding), *map(bytes, astuple(record.provenance))):
                        cut.append(row)
        self._memo[name] = json.dumps(cut)
        return cut
