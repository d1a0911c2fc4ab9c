"""The rows of a manifest as columns: a million samples take a quarter of a gigabyte."""

from __future__ import annotations

from array import array
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence, ValuesView
from functools import cached_property
from itertools import islice
from operator import eq
from typing import Any, Literal

import numpy as np
import xxhash
from typing_extensions import override

from latentcache.dataset.manifest_row import CaptionRef, ImageRef, Row, RowLine
from latentcache.dataset.row_columns import (
    CODEC,
    ERRORS,
    FLIP,
    GEOMETRY,
    KEY_BYTES,
    SIZES,
    TRUSTS,
    DigestOrder,
    Entries,
    EntriesBuilder,
    Geometries,
    Parts,
    PartsBuilder,
    Texts,
    TextsBuilder,
    as_keys,
    bytes_of,
    hex_of,
)
from latentcache.types import Crop, Geometry, Refusal, Size

_CHUNK = 1024
"""Rows or keys that are made together when all are wanted."""
_NO_SOURCE = "0" * 2 * KEY_BYTES


class RowTable(Mapping[str, Row]):
    """The rows of a manifest by sample_id, in their order. A `Row` is made each time that one is requested.

    A sample with one image takes 195 bytes and its texts, and 105 for each entry of a further part; the folder of its
    path is there once. Threads share it, forks too, and it can be pickled. Rows also have numbers, from 0.
    """

    def __init__(  # noqa: PLR0913 - the columns, which the builder gives by keyword
        self,
        *,
        ids: Texts,
        hashes: np.ndarray,
        heads: Texts,
        head_of: np.ndarray,
        is_joined: np.ndarray,
        sources: np.ndarray,
        has_source: np.ndarray,
        images: Entries,
        geometries: np.ndarray,
        captions: Entries,
        texts: Texts,
        parts: Parts,
        refusals: Mapping[int, Refusal],
    ):
        self._ids, self._heads, self._head_of, self._is_joined = ids, heads, head_of, is_joined
        self._sources, self._has_source = sources, has_source
        self._images, self._geometries, self._captions, self._texts = images, geometries, captions, texts
        self._parts = parts
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
        encoded = sample_id.encode(CODEC, ERRORS)
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
        sample_id = ids.data[ids.bounds.item(number) : ids.bounds.item(number + 1)].tobytes().decode(CODEC, ERRORS)
        path = heads.data[heads.bounds.item(head) : heads.bounds.item(head + 1)].tobytes().decode(CODEC, ERRORS)
        images, captions = [], []
        keys, is_unverified = self._images.keys, self._images.is_unverified
        for at in range(self._images.bounds.item(number), self._images.bounds.item(number + 1)):
            height, width, resized_height, resized_width, *others, num_frames, flip = self._geometries[at].tolist()
            resized, (top, left, *target) = Size(resized_height, resized_width), others
            whole, crop = Size(height, width), Crop(top, left)
            geometry = Geometry(whole, resized, crop, Size(*target), bool(flip), num_frames or None)
            images.append(ImageRef(keys[at].tobytes().hex(), geometry, TRUSTS[is_unverified.item(at)]))
        keys, is_unverified = self._captions.keys, self._captions.is_unverified
        for at in range(self._captions.bounds.item(number), self._captions.bounds.item(number + 1)):
            text = texts.data[texts.bounds.item(at) : texts.bounds.item(at + 1)].tobytes().decode(CODEC, ERRORS)
            captions.append(CaptionRef(text, keys[at].tobytes().hex(), TRUSTS[is_unverified.item(at)]))
        return Row(
            sample_id,
            path + sample_id if self._is_joined.item(head) else path,
            self._sources[number].tobytes().hex() if self._has_source.item(number) else None,
            tuple(images),
            tuple(captions),
            self.refusals.get(number),
            self._parts.of(number) if len(self._parts.roles) else (),
        )

    def rows(self, start: int, stop: int) -> list[Row]:
        """The rows from number `start` to `stop`; fewer at the end."""
        return list(map(self.row, range(start, min(stop, len(self)))))

    # As columns

    def entry_keys(self) -> Iterator[str]:
        """The keys of all images, then of all captions, then of further parts. Equal ones repeat."""
        for entries in (self._images, self._captions, self._parts.entries):
            for at in range(0, len(entries.keys), _CHUNK):
                yield from hex_of(entries.keys[at : at + _CHUNK])

    def first_sizes(self, name: Literal["original_size", "target_size", "extent"]) -> np.ndarray:
        """For each row this size of its first image: (height, width), or zeros without images. int32 [n, 2].

        `extent`: (height, width, num_frames) of the target, with 0 frames of an image. int32 [n, 3].
        """
        numbers = self._geometries[:, SIZES[name]]
        starts, found = self._images.bounds[:-1], np.zeros((len(self), numbers.shape[1]), np.int32)
        has_image = starts < self._images.bounds[1:]
        found[has_image] = numbers[starts[has_image]]
        return found

    def image_keys(self, numbers: np.ndarray, *, flip: bool) -> list[str]:
        """For each of these rows, which have images, the key of the mirrored one or the other; else of its first."""
        starts = self._images.bounds[numbers].astype(np.int64)
        counts = self._images.bounds[numbers.astype(np.int64) + 1] - starts
        chosen, is_open = starts.copy(), np.ones(len(numbers), np.bool_)
        for place in range(int(counts.max(initial=0))):
            here = np.flatnonzero(is_open & (place < counts))
            here = here[self._geometries[starts[here] + place, FLIP] == flip]
            chosen[here], is_open[here] = starts[here] + place, False
        return hex_of(self._images.keys[chosen])

    def has_flip(self) -> np.ndarray:
        """Whether each row has a mirrored image: bool [n]."""
        before = np.concatenate([[0], np.cumsum(self._geometries[:, FLIP])])
        found: np.ndarray = before[self._images.bounds[1:]] > before[self._images.bounds[:-1]]
        return found

    def part_sizes(self, number: int) -> tuple[int, ...]:
        """Heights and widths of a row's further parts, in their order."""
        return self._parts.target_sizes(number) if len(self._parts.roles) else ()

    def usable(self) -> np.ndarray:
        """The numbers of the rows that are not refused, ascending: uint32 [m]."""
        is_usable = np.ones(len(self), np.bool_)
        is_usable[np.fromiter(self.refusals, np.int64, len(self.refusals))] = False
        return np.flatnonzero(is_usable).astype(np.uint32)

    def unverified(self) -> np.ndarray:
        """The numbers of the rows with an entry that was imported and not verified, ascending: int64 [m]."""
        rows = [entries.unverified_rows() for entries in (self._images, self._captions, self._parts.entries)]
        return np.unique(np.concatenate(rows))

    def row_of_source(self, source: str) -> Row | None:
        """The last row whose image has this digest, or None."""
        number = self._source_order.find(bytes.fromhex(source))
        return None if number is None or not self._has_source.item(number) else self.row(number)

    @cached_property
    def _source_order(self) -> DigestOrder:
        return DigestOrder(self._sources)

    def rows_with(self, keys: Iterable[str]) -> list[Row]:
        """The rows with one of these keys, in their order."""
        wanted = set(map(bytes.fromhex, keys))
        found = [each.rows_with(wanted) for each in (self._images, self._captions, self._parts.entries)]
        return list(map(self.row, np.unique(np.concatenate(found)).tolist()))

    def sources(self) -> Iterator[str]:
        """The digests of all images that are known."""
        known = np.flatnonzero(self._has_source)
        for at in range(0, len(known), _CHUNK):
            yield from hex_of(self._sources[known[at : at + _CHUNK]])


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
        self._ids, self._heads, self._texts = TextsBuilder(), TextsBuilder(), TextsBuilder()
        self._hashes, self._head_of, self._is_joined = array("Q"), array("I"), bytearray()
        self._last_head: tuple[str, bool] | None = None
        self._sources, self._has_source = bytearray(), bytearray()
        self._images, self._captions, self._parts = EntriesBuilder(), EntriesBuilder(), PartsBuilder()
        self._geometries = Geometries()
        self._refusals: dict[int, Refusal] = {}

    def __len__(self) -> int:
        return len(self._has_source)

    def add(self, rows: Sequence[Row]) -> None:
        """Add rows. ValueError, adding none, for a key or a source that is no digest."""
        self._add(rows, [GEOMETRY(ref.geometry) for row in rows for ref in row.images])

    def add_lines(self, lines: Sequence[RowLine]) -> None:
        """Add the rows of these lines. As `add`."""
        self._add(lines, [GEOMETRY(ref) for line in lines for ref in line.images])

    def _add(self, rows: Sequence[Row | RowLine], geometries: list[tuple[Any, ...]]) -> None:
        images = [ref for row in rows for ref in row.images]
        captions = [ref for row in rows for ref in row.captions]
        image_keys = bytes_of([ref.key for ref in images], "key")
        caption_keys = bytes_of([ref.key for ref in captions], "key")
        parts = [ref for row in rows for ref in row.parts]
        part_keys = bytes_of([ref.key for ref in parts], "key")
        part_sources = bytes_of([ref.source for ref in parts], "source")
        sources = [row.source for row in rows]
        source_bytes = bytes_of([_NO_SOURCE if source is None else source for source in sources], "source")
        # Nothing raises from here on.
        first = len(self)
        self._refusals |= {first + at: row.refusal for at, row in enumerate(rows) if row.refusal is not None}
        self._sources += source_bytes
        self._has_source.extend(source is not None for source in sources)
        self._images.add([len(row.images) for row in rows], image_keys, [ref.trust for ref in images])
        self._captions.add([len(row.captions) for row in rows], caption_keys, [ref.trust for ref in captions])
        self._geometries.add(geometries)
        self._parts.add([len(row.parts) for row in rows], parts, part_keys, part_sources)
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
            sources=as_keys(self._sources),
            has_source=np.frombuffer(self._has_source, np.bool_),
            images=self._images.finish(),
            geometries=self._geometries.finish(),
            captions=self._captions.finish(),
            texts=self._texts.finish(),
            parts=self._parts.finish(),
            refusals=self._refusals,
        )


def _encoded(text: str) -> bytes:
    return text.encode(CODEC, ERRORS)
