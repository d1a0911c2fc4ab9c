"""The rows of a manifest as columns: a million samples take a quarter of a gigabyte."""

from __future__ import annotations

from array import array
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from dataclasses import dataclass
from itertools import accumulate, islice
from operator import attrgetter, eq
from typing import Any, Literal

import numpy as np
import xxhash
from typing_extensions import override

from latentcache.dataset.manifest_row import CaptionRef, ImageRef, Row, RowLine, Trust
from latentcache.identity import is_key
from latentcache.types import Crop, Geometry, Refusal, Size

_CHUNK = 1024
"""Rows or keys that are made together when all are wanted."""
_KEY_BYTES = 32
_NO_SOURCE = "0" * 2 * _KEY_BYTES
_CODEC, _ERRORS = "utf-8", "surrogatepass"
_TRUSTS: tuple[Trust, Trust] = ("verified", "unverified")
_GEOMETRY = attrgetter("original_size", "resized_size", "crop_top_left", "target_size", "flip")
_SIZES = {"original_size": slice(0, 2), "target_size": slice(6, 8)}
_FLIP = 8
"""Where these lie in the nine numbers of a geometry, in the order of _GEOMETRY."""


class _Texts:
    """Texts in one buffer. Names may hold half of a surrogate pair, which plain UTF-8 refuses."""

    def __init__(self, data: bytearray, bounds: array[int]):
        self.data = np.frombuffer(data, np.uint8)
        self.bounds = np.frombuffer(bounds, np.int64)

    def __getitem__(self, number: int) -> str:
        return self.data[self.bounds.item(number) : self.bounds.item(number + 1)].tobytes().decode(_CODEC, _ERRORS)


class _TextsBuilder:
    def __init__(self) -> None:
        self._data, self._bounds = bytearray(), array("q", [0])

    def add(self, encoded: Sequence[bytes]) -> None:
        self._bounds.extend(islice(accumulate(map(len, encoded), initial=len(self._data)), 1, None))
        self._data += b"".join(encoded)

    def finish(self) -> _Texts:
        return _Texts(self._data, self._bounds)


@dataclass(frozen=True, slots=True, eq=False)
class _Entries:
    """The entries of all rows: those of row i are bounds[i] to bounds[i + 1]."""

    bounds: np.ndarray
    keys: np.ndarray
    is_unverified: np.ndarray

    def unverified_rows(self) -> np.ndarray:
        """The numbers of the rows with an unverified entry, ascending; some may repeat."""
        return np.searchsorted(self.bounds, np.flatnonzero(self.is_unverified), side="right") - 1


class _EntriesBuilder:
    def __init__(self) -> None:
        self._bounds, self._keys, self._is_unverified = array("I", [0]), bytearray(), bytearray()

    def add(self, lengths: Iterable[int], keys: bytes, trusts: Iterable[Trust]) -> None:
        self._bounds.extend(islice(accumulate(lengths, initial=self._bounds[-1]), 1, None))
        self._keys += keys
        self._is_unverified.extend(trust != "verified" for trust in trusts)

    def finish(self) -> _Entries:
        is_unverified = np.frombuffer(self._is_unverified, np.bool_)
        return _Entries(np.frombuffer(self._bounds, np.uint32), _as_keys(self._keys), is_unverified)


def _as_keys(data: bytearray) -> np.ndarray:
    return np.frombuffer(data, np.uint8).reshape(-1, _KEY_BYTES)


def _hex_of(keys: np.ndarray) -> list[str]:
    digits, size = keys.tobytes().hex(), 2 * _KEY_BYTES
    return [digits[at : at + size] for at in range(0, len(digits), size)]


def _bytes_of(keys: Sequence[str], what: str) -> bytes:
    """The bytes of digests. ValueError for the first that is none."""
    digits = "".join(keys)
    if set(map(len, keys)) <= {2 * _KEY_BYTES}:
        try:
            data = bytes.fromhex(digits)
        except ValueError:
            data = b""
        if data.hex() == digits:  # fromhex takes capitals and spaces too
            return data
    wrong = next(key for key in keys if not is_key(key))
    raise ValueError(f"{what} is {wrong!r:.80}, where 64 hexadecimal digits are needed")


class RowTable(Mapping[str, Row]):
    """The rows of a manifest by sample_id, in their order. A `Row` is made each time that one is requested.

    A sample with one image takes 190 bytes and its texts; the folder of its path is there once. Threads share it, forks
    too, and it can be pickled. Rows also have numbers, from 0.
    """

    def __init__(  # noqa: PLR0913 - the columns, which the builder gives by keyword
        self,
        *,
        ids: _Texts,
        hashes: np.ndarray,
        heads: _Texts,
        head_of: np.ndarray,
        is_joined: np.ndarray,
        sources: np.ndarray,
        has_source: np.ndarray,
        images: _Entries,
        geometries: np.ndarray,
        captions: _Entries,
        texts: _Texts,
        refusals: Mapping[int, Refusal],
    ):
        self._ids, self._heads, self._head_of, self._is_joined = ids, heads, head_of, is_joined
        self._sources, self._has_source = sources, has_source
        self._images, self._geometries, self._captions, self._texts = images, geometries, captions, texts
        self._order = np.argsort(hashes, kind="stable").astype(np.uint32)
        self._hashes = hashes[self._order]
        self.refusals = refusals
        """By its number, each row that is refused."""

    @classmethod
    def of(cls, rows: Mapping[str, Row]) -> RowTable:
        """These rows as a table: the same object if they are one."""
        return rows if isinstance(rows, RowTable) else cls.from_rows(rows.values())

    @classmethod
    def from_rows(cls, rows: Iterable[Row]) -> RowTable:
        """A table of these rows, of different samples. ValueError: see `RowTableBuilder.add`."""
        builder, values = RowTableBuilder(), iter(rows)
        while chunk := list(islice(values, _CHUNK)):
            builder.add(chunk)
        return builder.finish()

    # As a mapping

    def __len__(self) -> int:
        return len(self._has_source)

    def __iter__(self) -> Iterator[str]:
        return map(self.sample_id, range(len(self)))

    def __getitem__(self, sample_id: str) -> Row:
        number = self.number(sample_id)
        if number is None:
            raise KeyError(sample_id)
        return self.row(number)

    def __contains__(self, sample_id: object) -> bool:
        return isinstance(sample_id, str) and self.number(sample_id) is not None

    @override
    def __eq__(self, other: object) -> bool:
        """Whether the samples are the same, in any order. All rows are never in memory at once."""
        if not isinstance(other, Mapping):
            return NotImplemented
        if len(self) != len(other):
            return False
        if all(map(eq, self.values(), other.values())):
            return True
        return all(other.get(sample_id) == row for sample_id, row in self.items())

    @override
    def values(self) -> ValuesView[Row]:
        return _Values(self)

    @override
    def items(self) -> ItemsView[str, Row]:
        return _Items(self)

    # By number

    def number(self, sample_id: str) -> int | None:
        """The number of a sample's row; of the last one if it has several. None for an unknown one."""
        encoded = sample_id.encode(_CODEC, _ERRORS)
        hashes, found = self._hashes, None
        wanted = np.uint64(_hash_of(encoded))
        at = int(hashes.searchsorted(wanted))
        while at < len(hashes) and hashes[at] == wanted:
            number = self._order.item(at)
            if self._ids.data[self._ids.bounds[number] : self._ids.bounds[number + 1]].tobytes() == encoded:
                found = number
            at += 1
        return found

    def repeated(self) -> int | None:
        """The number of a row whose sample_id is that of a row before; None if no two are equal."""
        alike = np.flatnonzero(self._hashes[1:] == self._hashes[:-1])
        for number in sorted(self._order[alike].tolist()):
            if (last := self.number(self.sample_id(number))) != number:
                return last
        return None

    def sample_id(self, number: int) -> str:
        """The sample_id of a row."""
        return self._ids[number]

    def row(self, number: int) -> Row:
        """One row: it takes some microseconds."""
        # Written out, so that no function of ours runs for its parts: a trainer waits for its first batches.
        ids, heads, texts, head = self._ids, self._heads, self._texts, self._head_of.item(number)
        sample_id = ids.data[ids.bounds.item(number) : ids.bounds.item(number + 1)].tobytes().decode(_CODEC, _ERRORS)
        path = heads.data[heads.bounds.item(head) : heads.bounds.item(head + 1)].tobytes().decode(_CODEC, _ERRORS)
        images, captions = [], []
        keys, is_unverified = self._images.keys, self._images.is_unverified
        for at in range(self._images.bounds.item(number), self._images.bounds.item(number + 1)):
            height, width, resized_height, resized_width, top, left, *target, flip = self._geometries[at].tolist()
            resized = Size(resized_height, resized_width)
            geometry = Geometry(Size(height, width), resized, Crop(top, left), Size(*target), bool(flip))
            images.append(ImageRef(keys[at].tobytes().hex(), geometry, _TRUSTS[is_unverified.item(at)]))
        keys, is_unverified = self._captions.keys, self._captions.is_unverified
        for at in range(self._captions.bounds.item(number), self._captions.bounds.item(number + 1)):
            text = texts.data[texts.bounds.item(at) : texts.bounds.item(at + 1)].tobytes().decode(_CODEC, _ERRORS)
            captions.append(CaptionRef(text, keys[at].tobytes().hex(), _TRUSTS[is_unverified.item(at)]))
        return Row(
            sample_id,
            path + sample_id if self._is_joined.item(head) else path,
            self._sources[number].tobytes().hex() if self._has_source.item(number) else None,
            tuple(images),
            tuple(captions),
            self.refusals.get(number),
        )

    def rows(self, start: int, stop: int) -> list[Row]:
        """The rows from number `start` to `stop`; fewer at the end."""
        return list(map(self.row, range(start, min(stop, len(self)))))

    # As columns

    def entry_keys(self) -> Iterator[str]:
        """The keys of all images, then of all captions. Equal ones repeat."""
        for entries in (self._images, self._captions):
            for at in range(0, len(entries.keys), _CHUNK):
                yield from _hex_of(entries.keys[at : at + _CHUNK])

    def first_sizes(self, name: Literal["original_size", "target_size"]) -> np.ndarray:
        """For each row this size of its first image: (height, width), or zeros without images. int32 [n, 2]."""
        starts, found = self._images.bounds[:-1], np.zeros((len(self), 2), np.int32)
        has_image = starts < self._images.bounds[1:]
        found[has_image] = self._geometries[starts[has_image], _SIZES[name]]
        return found

    def image_keys(self, numbers: np.ndarray, *, flip: bool) -> list[str]:
        """For each of these rows, which have images, the key of the mirrored one or the other; else of its first."""
        starts = self._images.bounds[numbers].astype(np.int64)
        counts = self._images.bounds[numbers.astype(np.int64) + 1] - starts
        chosen, is_open = starts.copy(), np.ones(len(numbers), np.bool_)
        for place in range(int(counts.max(initial=0))):
            here = np.flatnonzero(is_open & (place < counts))
            here = here[self._geometries[starts[here] + place, _FLIP] == flip]
            chosen[here], is_open[here] = starts[here] + place, False
        return _hex_of(self._images.keys[chosen])

    def usable(self) -> np.ndarray:
        """The numbers of the rows that are not refused, ascending: uint32 [m]."""
        is_usable = np.ones(len(self), np.bool_)
        is_usable[np.fromiter(self.refusals, np.int64, len(self.refusals))] = False
        return np.flatnonzero(is_usable).astype(np.uint32)

    def unverified(self) -> np.ndarray:
        """The numbers of the rows with an entry that was imported and not verified, ascending: int64 [m]."""
        return np.union1d(self._images.unverified_rows(), self._captions.unverified_rows())

    def sources(self) -> Iterator[str]:
        """The digests of all images that are known."""
        known = np.flatnonzero(self._has_source)
        for at in range(0, len(known), _CHUNK):
            yield from _hex_of(self._sources[known[at : at + _CHUNK]])


class _Values(ValuesView[Row]):
    _mapping: RowTable

    def __iter__(self) -> Iterator[Row]:
        return map(self._mapping.row, range(len(self._mapping)))


class _Items(ItemsView[str, Row]):
    _mapping: RowTable

    def __iter__(self) -> Iterator[tuple[str, Row]]:
        return ((row.sample_id, row) for row in self._mapping.values())


_hash_of: Callable[[bytes], int] = xxhash.xxh3_64_intdigest


class RowTableBuilder:
    """Collects rows, some at a time, and makes a table of them. After `finish` it is used up."""

    def __init__(self) -> None:
        self._ids, self._heads, self._texts = _TextsBuilder(), _TextsBuilder(), _TextsBuilder()
        self._hashes, self._head_of, self._is_joined = array("Q"), array("I"), bytearray()
        self._last_head: tuple[str, bool] | None = None
        self._sources, self._has_source = bytearray(), bytearray()
        self._images, self._captions = _EntriesBuilder(), _EntriesBuilder()
        self._geometries = array("i")
        self._refusals: dict[int, Refusal] = {}

    def __len__(self) -> int:
        return len(self._has_source)

    def add(self, rows: Sequence[Row]) -> None:
        """Add rows. ValueError, adding none, for a key or a source that is no digest."""
        self._add(rows, [_GEOMETRY(ref.geometry) for row in rows for ref in row.images])

    def add_lines(self, lines: Sequence[RowLine]) -> None:
        """Add the rows of these lines. As `add`."""
        self._add(lines, [_GEOMETRY(ref) for line in lines for ref in line.images])

    def _add(self, rows: Sequence[Row | RowLine], geometries: list[tuple[Any, ...]]) -> None:
        images = [ref for row in rows for ref in row.images]
        captions = [ref for row in rows for ref in row.captions]
        image_keys = _bytes_of([ref.key for ref in images], "key")
        caption_keys = _bytes_of([ref.key for ref in captions], "key")
        sources = [row.source for row in rows]
        source_bytes = _bytes_of([_NO_SOURCE if source is None else source for source in sources], "source")
        numbers = array("i")
        for original, resized, crop, target, flip in geometries:
            numbers.extend((*original, *resized, *crop, *target, flip))
        # Nothing raises from here on.
        first = len(self)
        self._refusals |= {first + at: row.refusal for at, row in enumerate(rows) if row.refusal is not None}
        self._sources += source_bytes
        self._has_source.extend(source is not None for source in sources)
        self._images.add([len(row.images) for row in rows], image_keys, [ref.trust for ref in images])
        self._captions.add([len(row.captions) for row in rows], caption_keys, [ref.trust for ref in captions])
        self._geometries += numbers
        self._texts.add([_encoded(ref.text) for ref in captions])
        ids = [_encoded(row.sample_id) for row in rows]
        self._ids.add(ids)
        self._hashes.extend(map(_hash_of, ids))
        self._add_paths(rows)

    def _add_paths(self, rows: Sequence[Row | RowLine]) -> None:
        """Most paths are one folder and the sample_id: the folder is kept once for rows that follow each other."""
        last, heads = self._last_head, []
        for row in rows:
            is_joined = row.path.endswith(row.sample_id)
            head = row.path[: len(row.path) - len(row.sample_id)] if is_joined else row.path
            if (head, is_joined) != last:
                last = head, is_joined
                self._heads.add([_encoded(head)])
                self._is_joined.append(is_joined)
            heads.append(len(self._is_joined) - 1)
        self._last_head = last
        self._head_of.extend(heads)

    def finish(self) -> RowTable:
        """The table."""
        return RowTable(
            ids=self._ids.finish(),
            hashes=np.frombuffer(self._hashes, np.uint64),
            heads=self._heads.finish(),
            head_of=np.frombuffer(self._head_of, np.uint32),
            is_joined=np.frombuffer(self._is_joined, np.bool_),
            sources=_as_keys(self._sources),
            has_source=np.frombuffer(self._has_source, np.bool_),
            images=self._images.finish(),
            geometries=np.frombuffer(self._geometries, np.int32).reshape(-1, _FLIP + 1),
            captions=self._captions.finish(),
            texts=self._texts.finish(),
            refusals=self._refusals,
        )


def _encoded(text: str) -> bytes:
    return text.encode(_CODEC, _ERRORS)
