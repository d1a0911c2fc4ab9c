"""Columns of a table of rows: texts in one buffer, and the entries of all rows: their keys, geometries and roles."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from operator import attrgetter
from typing import Any, get_args

import numpy as np

from latentcache.dataset.manifest_row import PartRef, PartRole, Trust
from latentcache.identity import is_key
from latentcache.types import Crop, Geometry, Size

KEY_BYTES = 32
CODEC, ERRORS = "utf-8", "surrogatepass"
TRUSTS: tuple[Trust, Trust] = ("verified", "unverified")
GEOMETRY = attrgetter("original_size", "resized_size", "crop_top_left", "target_size", "num_frames", "flip")
SIZES = {"original_size": slice(0, 2), "target_size": slice(6, 8), "extent": slice(6, 9)}
FLIP = 9
"""Where these lie in the ten numbers of a geometry, in the order of GEOMETRY. An image has 0 frames."""
_ROLES: tuple[PartRole, ...] = get_args(PartRole)


class Texts:
    """Texts in one buffer. Names may hold half of a surrogate pair, which plain UTF-8 refuses."""

    def __init__(self, data: bytearray, bounds: array[int]):
        self.data = np.frombuffer(data, np.uint8)
        self.bounds = np.frombuffer(bounds, np.int64)

    def __getitem__(self, number: int) -> str:
        return self.data[self.bounds.item(number) : self.bounds.item(number + 1)].tobytes().decode(CODEC, ERRORS)


class TextsBuilder:
    """Collects texts. After `finish` it is used up."""

    def __init__(self) -> None:
        self._data, self._bounds = bytearray(), array("q", [0])

    def add(self, encoded: Sequence[bytes]) -> None:
        """Add texts, in CODEC."""
        self._bounds.extend(islice(accumulate(map(len, encoded), initial=len(self._data)), 1, None))
        self._data += b"".join(encoded)

    def finish(self) -> Texts:
        """The column."""
        return Texts(self._data, self._bounds)


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """The entries of all rows: those of row i are bounds[i] to bounds[i + 1]."""

    bounds: np.ndarray
    keys: np.ndarray
    is_unverified: np.ndarray

    def rows_with(self, keys: Collection[bytes]) -> np.ndarray:
        """The numbers of the rows with one of these keys, ascending; some may repeat. int64 [m]."""
        heads = _heads_of(self.keys)
        wanted = np.array([int.from_bytes(key[:8], sys.byteorder) for key in keys], np.uint64)
        found = [at for at in np.flatnonzero(np.isin(heads, wanted)).tolist() if self.keys[at].tobytes() in keys]
        return np.searchsorted(self.bounds, np.array(found, np.int64), side="right") - 1

    def unverified_rows(self) -> np.ndarray:
        """The numbers of the rows with an unverified entry, ascending; some may repeat."""
        return np.searchsorted(self.bounds, np.flatnonzero(self.is_unverified), side="right") - 1


class EntriesBuilder:
    """Collects the entries of rows. After `finish` it is used up."""

    def __init__(self) -> None:
        self._bounds, self._keys, self._is_unverified = array("I", [0]), bytearray(), bytearray()

    def add(self, lengths: Iterable[int], keys: bytes, trusts: Iterable[Trust]) -> None:
        """Add the entries of rows with so many each."""
        self._bounds.extend(islice(accumulate(lengths, initial=self._bounds[-1]), 1, None))
        self._keys += keys
        self._is_unverified.extend(trust != "verified" for trust in trusts)

    def finish(self) -> Entries:
        """The column."""
        is_unverified = np.frombuffer(self._is_unverified, np.bool_)
        return Entries(np.frombuffer(self._bounds, np.uint32), as_keys(self._keys), is_unverified)


def _heads_of(keys: np.ndarray) -> np.ndarray:
    """The first eight bytes of each key, to look it up: uint64 [n]."""
    return keys[:, :8].copy().view(np.uint64).reshape(-1)


class DigestOrder:
    """Finds digests of a column, uint8 [n, 32], in 12 bytes a row."""

    def __init__(self, digests: np.ndarray):
        self._digests = digests
        heads = _heads_of(digests)
        self._order = np.argsort(heads, kind="stable").astype(np.uint32)
        self._heads = heads[self._order]

    def find(self, digest: bytes) -> int | None:
        """The number of the last row that has this digest, or None."""
        head, found = np.uint64(int.from_bytes(digest[:8], sys.byteorder)), None
        at = int(self._heads.searchsorted(head))
        while at < len(self._heads) and self._heads[at] == head:
            if self._digests[(number := self._order.item(at))].tobytes() == digest:
                found = number
            at += 1
        return found


def as_keys(data: bytearray) -> np.ndarray:
    """The bytes of digests as uint8 [n, 32]."""
    return np.frombuffer(data, np.uint8).reshape(-1, KEY_BYTES)


def hex_of(keys: np.ndarray) -> list[str]:
    """The digests of uint8 [n, 32]."""
    digits, size = keys.tobytes().hex(), 2 * KEY_BYTES
    return [digits[at : at + size] for at in range(0, len(digits), size)]


def bytes_of(keys: Sequence[str], what: str) -> bytes:
    """The bytes of digests. ValueError for the first that is none."""
    digits = "".join(keys)
    if set(map(len, keys)) <= {2 * KEY_BYTES}:
        try:
            data = bytes.fromhex(digits)
        except ValueError:
            data = b""
        if data.hex() == digits:  # fromhex takes capitals and spaces too
            return data
    wrong = next(key for key in keys if not is_key(key))
    raise ValueError(f"{what} is {wrong!r:.80}, where 64 hexadecimal digits are needed")


def geometry_of(numbers: Sequence[int]) -> Geometry:
    """The geometry of its ten numbers."""
    height, width, resized_height, resized_width, top, left, *target, num_frames, flip = numbers
    sizes = Size(height, width), Size(resized_height, resized_width)
    return Geometry(*sizes, Crop(top, left), Size(*target), bool(flip), num_frames or None)


class Geometries:
    """Collects geometries as columns."""

    def __init__(self) -> None:
        self._numbers = array("i")

    def add(self, geometries: Iterable[tuple[Any, ...]]) -> None:
        """Each as GEOMETRY gives it."""
        for original, resized, crop, target, num_frames, flip in geometries:
            self._numbers.extend((*original, *resized, *crop, *target, num_frames or 0, flip))

    def finish(self) -> np.ndarray:
        """int32 [n, 10]."""
        return np.frombuffer(self._numbers, np.int32).reshape(-1, FLIP + 1)


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """The further parts of all rows."""

    entries: Entries
    geometries: np.ndarray
    sources: np.ndarray
    roles: np.ndarray

    def of(self, number: int) -> tuple[PartRef, ...]:
        """Those of one row."""
        entries = self.entries
        return tuple(
            PartRef(
                _ROLES[self.roles.item(at)],
                entries.keys[at].tobytes().hex(),
                geometry_of(self.geometries[at].tolist()),
                self.sources[at].tobytes().hex(),
                TRUSTS[entries.is_unverified.item(at)],
            )
            for at in range(entries.bounds.item(number), entries.bounds.item(number + 1))
        )

    def target_sizes(self, number: int) -> tuple[int, ...]:
        """Heights and widths of one row's parts, in their order."""
        bounds = self.entries.bounds
        here = self.geometries[bounds.item(number) : bounds.item(number + 1), SIZES["target_size"]]
        return tuple(here.ravel().tolist())


class PartsBuilder:
    """Collects the further parts of rows. After `finish` it is used up."""

    def __init__(self) -> None:
        self._entries, self._geometries = EntriesBuilder(), Geometries()
        self._sources, self._roles = bytearray(), bytearray()

    def add(self, lengths: Sequence[int], refs: Sequence[Any], keys: bytes, sources: bytes) -> None:
        """`refs` are those of all rows, each with a role, a trust and a geometry or its fields."""
        self._entries.add(lengths, keys, [ref.trust for ref in refs])
        self._geometries.add(GEOMETRY(getattr(ref, "geometry", ref)) for ref in refs)
        self._sources += sources
        self._roles.extend(_ROLES.index(ref.role) for ref in refs)

    def finish(self) -> Parts:
        """The columns."""
        roles = np.frombuffer(self._roles, np.uint8)
        return Parts(self._entries.finish(), self._geometries.finish(), as_keys(self._sources), roles)
