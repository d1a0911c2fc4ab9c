"""Where an entry's bytes lie: a pack, and an offset per field. This is what the index keeps of an entry."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from latentcache.store.base import DTYPES, KINDS, is_field

_LOCATION = re.compile(r'\{"pack":"([0-9a-f]{32})","kind":"([a-z]+)","digest":"([0-9a-f]{32})","fields":(\{.+\})\}')
_OFFSET = re.compile(r"\],(0|[1-9][0-9]{0,17})\]")
_MAX_BYTES = 10**18  # as many digits as an offset has: far beyond any file, and the system's calls take it
_MAX_SPECS = 4096  # a real cache has some dozens: fields, buckets and dtypes
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


@dataclass(frozen=True, slots=True)
class Spec:
    """What all entries of one kind with equal fields, shapes and dtypes share. `sizes`: bytes of each field in turn."""

    kind: str
    description: Mapping[str, tuple[str, tuple[int, ...]]]
    sizes: tuple[int, ...]
    num_bytes: int


@lru_cache(_MAX_SPECS)
def _spec(kind: str, fields: tuple[tuple[str, str, tuple[int, ...]], ...]) -> Spec:
    sizes = tuple(count_bytes(dtype, shape) for _, dtype, shape in fields)
    return Spec(kind, {name: (dtype, shape) for name, dtype, shape in fields}, sizes, sum(sizes))


def spec_of(kind: str, description: Mapping[str, tuple[str, tuple[int, ...]]]) -> Spec:
    """The one spec of these fields: equal ones are the same object."""
    return _spec(kind, tuple((name, dtype, shape) for name, (dtype, shape) in description.items()))


@lru_cache(_MAX_SPECS)
def _parsed_spec(kind: str, template: str) -> Spec:
    """The spec in a location's text. `template` is its fields without their offsets."""
    try:
        fields = tuple(_field(name, *parts) for name, parts in json.loads(template).items())
    except (TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not fields: {template:.100}") from error
    if kind not in KINDS or not fields:
        raise ValueError(f"not an entry: kind {kind:.50}, fields {template:.100}")
    return _spec(kind, fields)


def _field(name: str, dtype: str, shape: Any) -> tuple[str, str, tuple[int, ...]]:
    if not is_field(name) or dtype not in DTYPES:
        raise ValueError(f"not a field: {name!r:.50}, {dtype!r:.50}")
    if count_bytes(dtype, checked_shape(shape)) >= _MAX_BYTES:
        raise ValueError(f"not a field: {name!r:.50} of shape {shape!r:.100}")
    return name, dtype, tuple(shape)


@dataclass(frozen=True, slots=True)
class Location:
    """One entry's bytes: an offset per field of `spec`, all in one pack, and the digest over them
    (`base.payload_digest`). There may be a million of them in memory."""

    pack: str
    digest: str
    spec: Spec = field(repr=False)
    offsets: tuple[int, ...]

    @property
    def kind(self) -> str:
        return self.spec.kind

    @property
    def places(self) -> dict[str, Place]:
        """Where each field lies, by name."""
        fields = zip(self.spec.description.items(), self.offsets, self.spec.sizes, strict=True)
        return {name: Place(dtype, shape, offset, size) for (name, (dtype, shape)), offset, size in fields}

    @property
    def end(self) -> int:
        """The first byte of the file that the entry does not need."""
        return max(map(sum, zip(self.offsets, self.spec.sizes, strict=True)))

    @property
    def num_bytes(self) -> int:
        return self.spec.num_bytes

    @property
    def description(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Each field's dtype name and shape. It is shared: copy it before it is handed out."""
        return self.spec.description

    def to_text(self) -> str:
        fields = {name: [place.dtype, list(place.shape), place.offset] for name, place in self.places.items()}
        value = {"pack": self.pack, "kind": self.kind, "digest": self.digest, "fields": fields}
        return json.dumps(value, separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> Location:
        """Read what `to_text` wrote. ValueError for anything else."""
        pack, digest, spec, offsets = parse_location(text)
        return cls(sys.intern(pack), digest, spec, tuple(offsets))


def parse_location(text: str) -> tuple[str, str, Spec, list[int]]:
    """Pack, digest, spec and offsets, without making a `Location`. ValueError as for `Location.from_text`."""
    found = _LOCATION.fullmatch(text)
    if found is None:
        raise ValueError(f"not a location: {text:.100}")
    pack, kind, digest, fields = found.groups()
    parts = _OFFSET.split(fields)
    spec = _parsed_spec(kind, "]]".join(parts[::2]))
    offsets = [int(part) for part in parts[1::2]]
    if len(offsets) != len(spec.sizes):
        raise ValueError(f"not a location: {text:.100}")
    return pack, digest, spec, offsets
