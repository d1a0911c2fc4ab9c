"""Where an entry's bytes lie: a pack, and an offset per field. This is what the index keeps of an entry."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from latentcache.store.base import DTYPES, KINDS

_LOCATION = re.compile(r'\{"pack":"[0-9a-f]{32}","kind":"[a-z]+","digest":"[0-9a-f]{32}","fields":\{.+\}\}')
_HEX_32 = re.compile(r"[0-9a-f]{32}")


def is_pack_id(value: object) -> bool:
    """Whether the value can name a pack: 32 lower-case hexadecimal digits. So it can never be a path."""
    return isinstance(value, str) and _HEX_32.fullmatch(value) is not None


def looks_like_location(text: str) -> bool:
    """A quick look that misses little. `Location.from_text` has the last word."""
    return _LOCATION.fullmatch(text) is not None


def count_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a dense tensor."""
    return DTYPES[dtype].itemsize * math.prod(shape)


def checked_shape(value: Any) -> tuple[int, ...]:
    """A shape read from JSON. ValueError unless it is a list of positive integers."""
    if not isinstance(value, list) or not all(type(size) is int and size > 0 for size in value):
        raise ValueError(f"not a shape: {value!r:.100}")
    return tuple(value)


@dataclass(frozen=True, slots=True)
class PackSize:
    """Bytes of a pack's file, and of the payload of all entries that were written to it. The index keeps this too."""

    file_bytes: int
    payload_bytes: int

    def to_text(self) -> str:
        return f"{self.file_bytes} {self.payload_bytes}"

    @classmethod
    def from_text(cls, text: str) -> PackSize:
        """Read what `to_text` wrote. ValueError for anything else."""
        if re.fullmatch(r"[0-9]{1,18} [0-9]{1,18}", text, re.ASCII) is None:
            raise ValueError(f"not the sizes of a pack: {text:.100}")
        return cls(*map(int, text.split()))


@dataclass(frozen=True, slots=True)
class Place:
    """One field's bytes: `num_bytes` from `offset`, counted from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class Location:
    """One entry's bytes: places by field, all in one pack, and the digest over them (`base.payload_digest`)."""

    pack: str
    kind: str
    digest: str
    places: Mapping[str, Place]

    @cached_property
    def end(self) -> int:
        """The first byte of the file that the entry does not need."""
        return max(place.offset + place.num_bytes for place in self.places.values())

    @cached_property
    def num_bytes(self) -> int:
        return sum(place.num_bytes for place in self.places.values())

    @cached_property
    def description(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        return {name: (place.dtype, place.shape) for name, place in self.places.items()}

    def to_text(self) -> str:
        fields = {name: [place.dtype, list(place.shape), place.offset] for name, place in self.places.items()}
        value = {"pack": self.pack, "kind": self.kind, "digest": self.digest, "fields": fields}
        return json.dumps(value, separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> Location:
        """Read what `to_text` wrote. ValueError for anything else."""
        try:
            value = json.loads(text)
            places = {name: _place(*parts) for name, parts in value["fields"].items()}
            pack, kind, digest = value["pack"], value["kind"], value["digest"]
        except (TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"not a location: {text:.100}") from error
        if not is_pack_id(pack) or kind not in KINDS or not is_pack_id(digest) or not places:
            raise ValueError(f"not a location: {text:.100}")
        return cls(pack, kind, digest, places)


def _place(dtype: str, shape: Any, offset: Any) -> Place:
    if dtype not in DTYPES or type(offset) is not int or offset < 0:
        raise ValueError(f"not a place: {dtype!r:.50}, offset {offset!r:.50}")
    checked = checked_shape(shape)
    return Place(dtype, checked, offset, count_bytes(dtype, checked))
