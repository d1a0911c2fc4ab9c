"""Which captions of a cache are cut: they have more tokens than the text encoders read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from latentcache.errors import PackError
from latentcache.families import DEFAULT, FAMILIES, family_named
from latentcache.store.disk import DiskStore
from latentcache.store.pack import WholePack

_KEYS = 4096
"""Keys that are in memory as text at once: those of a million samples take 100 MB."""
_CLIP_TOKENS = 77
"""What CLIP reads. Texts of every other encoder have a `max_length` in their recipe."""


class _Identity(msgspec.Struct, gc=False):
    encoding: msgspec.Raw = msgspec.Raw(b"null")


class _Provenance(msgspec.Struct, gc=False):
    num_tokens: Any = None


class _Record(msgspec.Struct, gc=False):
    """What counts of the record of a text. Texts of a pack have one recipe or a few: it is decoded once."""

    identity: _Identity
    provenance: _Provenance


_RECORDS = msgspec.json.Decoder(_Record)


class _Recipe:
    """How texts were encoded, by the encoding in their records."""

    def __init__(self, encoding: Any):
        recipe = encoding if isinstance(encoding, Mapping) else {}
        self._family = recipe.get("family", DEFAULT)
        self._numbers = {name: value for name, value in recipe.items() if type(value) is int}

    @cached_property
    def _limit(self) -> float:
        """How many tokens the text encoders read."""
        return family_named(self._family).token_limit({}, self._numbers) if self._family in FAMILIES else math.inf

    def num_above(self, num_tokens: Any) -> int:
        """How many of a text's tokens the text encoders did not read; 0 where nobody knows."""
        # No family reads fewer. Its file imports torch, for which `status` need not wait where no caption is long.
        least = self._numbers.get("max_length", _CLIP_TOKENS)
        return 0 if type(num_tokens) is not int or num_tokens <= least else int(max(0, num_tokens - self._limit))


def num_cut_tokens(identity: Mapping[str, Any], provenance: Mapping[str, Any]) -> int:
    """Tokens of a caption that its text encoders did not read, by the family and the recipe in its record.

    It is 0 where nobody counted the tokens, and for a family that is unknown here.
    """
    return _Recipe(identity.get("encoding")).num_above(provenance.get("num_tokens"))


class CutCaptions:
    """Knows which captions their text encoders did not read to the end. Threads may share it.

    Records say it. Those of a pack are read once: a pack never changes.
    """

    def __init__(self, store: DiskStore):
        self._store = store
        self._by_pack = dict[str, np.ndarray]()  # bool [num_entries]
        self._recipes = dict[bytes, _Recipe]()  # by their JSON

    def flags_of(self, digests: np.ndarray) -> np.ndarray:
        """As `flags`, of the keys in a column: uint8 [n, 32]."""
        flags = np.zeros(len(digests), np.bool_)
        for at in range(0, len(digests), _KEYS):
            flags[at : at + _KEYS] = self.flags([digest.tobytes().hex() for digest in digests[at : at + _KEYS]])
        return flags

    def flags(self, keys: Sequence[str]) -> np.ndarray:
        """Whether each caption was cut off: bool [n]. Those of a damaged pack are not known to be."""
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
        except (FileNotFoundError, PackError):  # compacted or damaged meanwhile: the page of health says which
            return None
        cut = np.zeros(len(whole.row.keys), np.bool_)
        for row in range(len(cut)):
            if whole.row.pack.group_of(row).kind == "text":
                record = _RECORDS.decode(whole.json(row))
                recipe = bytes(record.identity.encoding)
                if recipe not in self._recipes:
                    self._recipes[recipe] = _Recipe(msgspec.json.decode(recipe))
                cut[row] = self._recipes[recipe].num_above(record.provenance.num_tokens) > 0
        self._by_pack[pack] = cut
        return cut
