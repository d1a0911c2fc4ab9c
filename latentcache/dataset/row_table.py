"""The rows of a manifest as columns: arrays that lie in its file as they are, so that processes can map and share them.

n rows have m images, captions or parts; those of row i are offsets[i] to offsets[i + 1]. Texts are UTF-8 with offsets.

    sample_id/offsets [n + 1]  sample_id/values        source [n, 32]: of the image's bytes; zeros where unknown
    folder/of [n]  folder/offsets  folder/values       the path: a folder, which rows share, and the sample_id,
    folder/is_whole [folders]                          or the folder alone if it is the whole path
    image/offsets [n + 1]    image/keys [m, 32]    image/unverified [m]    image/geometry [m, 10]
    caption/offsets [n + 1]  caption/keys [m, 32]  caption/unverified [m]  caption/text/offsets  caption/text/values
    part/offsets [n + 1]     part/keys [m, 32]     part/unverified [m]     part/geometry [m, 10]
    part/source [m, 32]      part/role [m]
    refusal/rows [k]         refusal/text/offsets  refusal/text/values     k refused rows, ascending; each as JSON

A geometry is original, resized, crop and target (height or top first), the number of frames (0: an image) and flip.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence, ValuesView
from functools import cached_property
from itertools import accumulate, chain, islice
from operator import attrgetter
from typing import Any, Final, Literal, NamedTuple, get_args

import msgspec
import numpy as np
import xxhash
from typing_extensions import override

from latentcache.dataset.manifest_row import CaptionRef, ImageRef, PartRef, PartRole, Row, Trust
from latentcache.identity import is_key
from latentcache.types import MAX_SIDE, Crop, Geometry, Refusal, Size

KEY_BYTES: Final = 32
_SCALARS = {
    "sample_id/offsets": "q", "sample_id/values": "B",
    "folder/of": "I", "folder/offsets": "q", "folder/values": "B", "folder/is_whole": "B",
    "image/offsets": "I", "image/unverified": "B",
    "caption/offsets": "I", "caption/unverified": "B", "caption/text/offsets": "q", "caption/text/values": "B",
    "part/offsets": "I", "part/unverified": "B", "part/role": "B",
    "refusal/rows": "I", "refusal/text/offsets": "q", "refusal/text/values": "B",
}  # fmt: skip
_DIGESTS = ("source", "image/keys", "caption/keys", "part/keys", "part/source")
_GEOMETRIES = ("image/geometry", "part/geometry")
COLUMNS: Mapping[str, tuple[str, tuple[int, ...]]] = {
    **{name: (code, ()) for name, code in _SCALARS.items()},
    **dict.fromkeys(_DIGESTS, ("B", (KEY_BYTES,))),
    **dict.fromkeys(_GEOMETRIES, ("i", (10,))),
}
"""Each column's type, as `array` and numpy name it, and the shape of one row."""
_OFFSETS = {
    "sample_id/offsets": "sample_id/values", "folder/offsets": "folder/values", "image/offsets": "image/keys",
    "caption/offsets": "caption/keys", "caption/text/offsets": "caption/text/values", "part/offsets": "part/keys",
    "refusal/text/offsets": "refusal/text/values",
}  # fmt: skip
"""What each column of offsets counts."""
_LENGTHS = {
    "image/offsets": ("sample_id/offsets", 0), "caption/offsets": ("sample_id/offsets", 0),
    "part/offsets": ("sample_id/offsets", 0), "source": ("sample_id/offsets", -1), "folder/of": ("source", 0),
    "folder/is_whole": ("folder/offsets", -1), "image/unverified": ("image/keys", 0),
    "image/geometry": ("image/keys", 0), "caption/unverified": ("caption/keys", 0),
    "caption/text/offsets": ("caption/keys", 1), "part/unverified": ("part/keys", 0),
    "part/geometry": ("part/keys", 0), "part/source": ("part/keys", 0), "part/role": ("part/keys", 0),
    "refusal/text/offsets": ("refusal/rows", 1),
}  # fmt: skip
"""Columns whose length follows from another's, and by how much it differs."""
_ENTRIES = ("image", "caption", "part")
_SIZES = {"original_size": slice(0, 2), "target_size": slice(6, 8), "extent": slice(6, 9)}
_FLIP = 9
"""Where these lie in a geometry."""
_GEOMETRY = attrgetter("original_size", "resized_size", "crop_top_left", "target_size", "num_frames", "flip")
_LEAST = np.array([1, 1, 1, 1, 0, 0, 1, 1, 0, 0], np.int32)
_MOST = np.array([MAX_SIDE] * 9 + [1], np.int32)
_TRUSTS: tuple[Trust, Trust] = ("verified", "unverified")
ROLES: tuple[PartRole, ...] = get_args(PartRole)
_hash_of = xxhash.xxh3_64_intdigest
_CODEC, _ERRORS = "utf-8", "surrogatepass"  # a name from a broken archive may hold half of a surrogate pair
_NO_SOURCE = "0" * 2 * KEY_BYTES
_CHUNK = 1024
"""Rows or keys that are made together when all are wanted."""


class Strings:
    """A column of texts, each decoded when it is read."""

    def __init__(self, values: np.ndarray, offsets: np.ndarray):
        self._values, self._offsets = values, offsets

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, number: int) -> str:
        start, end = self._offsets.item(number), self._offsets.item(number + 1)
        return str(self._values.data[start:end], _CODEC, _ERRORS)

    def __iter__(self) -> Iterator[str]:
        return (text.decode(_CODEC, _ERRORS) for text in self.encoded())

    def encoded(self) -> Iterator[bytes]:
        """The bytes of each."""
        offsets = self._offsets.tolist()
        return map(self._values.tobytes().__getitem__, map(slice, offsets, offsets[1:]))

    def take(self, numbers: np.ndarray) -> list[str]:
        """Those of these numbers."""
        starts, ends = self._offsets[numbers].tolist(), self._offsets[numbers + 1].tolist()
        data = self._values.data
        return [str(data[start:end], _CODEC, _ERRORS) for start, end in zip(starts, ends, strict=True)]

    def check(self) -> None:
        """ValueError unless all are UTF-8."""
        str(self._values.tobytes(), _CODEC, _ERRORS)
        starts = self._values[self._offsets[:-1][self._offsets[:-1] < len(self._values)]]
        if ((starts & 0xC0) == 0x80).any():
            raise ValueError("a text begins in the middle of a character")


class RowTable(Mapping[str, Row]):
    """The rows of a manifest by sample_id, in their order. A `Row` is made each time that one is requested.

    Rows also have numbers, from 0: who goes by these needs no id. Threads share a table, forks too; it can be pickled.
    `columns` are those of `COLUMNS`. ValueError where they do not fit to each other.
    """

    def __init__(self, columns: Mapping[str, np.ndarray]):
        _check_structure(columns)
        self.columns = columns
        self.sample_ids = self._strings("sample_id")
        self._folders, self.caption_texts = self._strings("folder"), self._strings("caption/text")

    def __reduce__(self) -> tuple[Any, ...]:
        return RowTable, (dict(self.columns),)

    def _strings(self, name: str) -> Strings:
        return Strings(self.columns[f"{name}/values"], self.columns[f"{name}/offsets"])

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

    def check(self) -> None:
        """ValueError for contents that no builder makes: for a table that comes from elsewhere."""
        columns = self.columns
        for name in ("sample_id", "folder", "caption/text", "refusal/text"):
            self._strings(name).check()
        for name in _GEOMETRIES:
            wrong = (columns[name] < _LEAST) | (columns[name] > _MOST)
            if wrong.any():
                raise ValueError(f"{name} has {columns[name][wrong][0]}: a side has 1 to {MAX_SIDE}, flip is 0 or 1")
        bounds = {f"{name}/unverified": 2 for name in _ENTRIES} | {"part/role": len(ROLES), "folder/is_whole": 2}
        bounds |= {"folder/of": len(self._folders), "refusal/rows": len(self)}
        for name, bound in bounds.items():
            if (columns[name] >= bound).any():
                raise ValueError(f"{name} has {columns[name].max()}, where less than {bound} is needed")
        if (columns["refusal/rows"][1:] <= columns["refusal/rows"][:-1]).any():
            raise ValueError("refusal/rows is not ascending")
        _ = self.refusals
        alike = self._by_id.alike()
        names = [self.sample_ids[number] for number in alike]
        if len(set(names)) < len(names):
            again = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"sample {again!r:.80} is listed twice")

    # As a mapping

    def __len__(self) -> int:
        return len(self.sample_ids)

    def __iter__(self) -> Iterator[str]:
        return iter(self.sample_ids)

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
        if isinstance(other, RowTable) and all(
            np.array_equal(self.columns[name], other.columns[name]) for name in COLUMNS
        ):
            return True
        return len(self) == len(other) and all(other.get(row.sample_id) == row for row in self.values())

    @override
    def values(self) -> ValuesView[Row]:
        return _Values(self)

    # By number

    @cached_property
    def _by_id(self) -> _Order:
        """Made when somebody asks by id, which a loader does not."""
        return _Order(np.fromiter(map(_hash_of, self.sample_ids.encoded()), np.uint64, len(self)))

    def number(self, sample_id: str) -> int | None:
        """The number of a sample's row; None for an unknown one."""
        [found] = self.numbers([sample_id]).tolist()
        return None if found < 0 else found

    def numbers(self, sample_ids: Sequence[str]) -> np.ndarray:
        """The numbers of these samples' rows: int64 [n], and -1 for one that is unknown."""
        hashes = [_hash_of(sample_id.encode(_CODEC, _ERRORS)) for sample_id in sample_ids]
        found = np.full(len(sample_ids), -1, np.int64)
        for places, numbers in self._by_id.alternatives(np.array(hashes, np.uint64)):
            names = self.sample_ids.take(numbers)
            for place, number, name in zip(places.tolist(), numbers.tolist(), names, strict=True):
                if name == sample_ids[place] and found[place] < 0:
                    found[place] = number
        return found

    def row(self, number: int) -> Row:
        """One row: it takes some microseconds."""
        columns, folder = self.columns, self.columns["folder/of"].item(number)
        sample_id, path = self.sample_ids[number], self._folders[folder]
        source = columns["source"][number].tobytes()
        return Row(
            sample_id,
            path if columns["folder/is_whole"].item(folder) else path + sample_id,
            source.hex() if any(source) else None,
            tuple(ImageRef(key, geometry_of(columns["image/geometry"][at]), trust)
                  for at, key, trust in self._entries("image", number)),
            tuple(CaptionRef(self.caption_texts[at], key, trust)
                  for at, key, trust in self._entries("caption", number)),
            self.refusals.get(number),
            tuple(self._part(at, key, trust) for at, key, trust in self._entries("part", number)),
        )  # fmt: skip

    def _entries(self, name: str, number: int) -> Iterator[tuple[int, str, Trust]]:
        """Place, key and trust of each entry of a row."""
        columns, offsets = self.columns, self.columns[f"{name}/offsets"]
        keys, unverified = columns[f"{name}/keys"], columns[f"{name}/unverified"]
        for at in range(offsets.item(number), offsets.item(number + 1)):
            yield at, keys[at].tobytes().hex(), _TRUSTS[unverified.item(at)]

    def _part(self, at: int, key: str, trust: Trust) -> PartRef:
        columns = self.columns
        geometry, source = geometry_of(columns["part/geometry"][at]), columns["part/source"][at].tobytes().hex()
        return PartRef(ROLES[columns["part/role"].item(at)], key, geometry, source, trust)

    def rows(self, start: int, stop: int) -> list[Row]:
        """The rows from number `start` to `stop`; fewer at the end."""
        return list(map(self.row, range(start, min(stop, len(self)))))

    @cached_property
    def refusals(self) -> Mapping[int, Refusal]:
        """By its number, each row that is refused. ValueError for a text that is no refusal."""
        texts = map(json.loads, self._strings("refusal/text"))
        refusals = (msgspec.convert(text, Refusal) for text in texts)
        return dict(zip(self.columns["refusal/rows"].tolist(), refusals, strict=True))

    def with_refusals(self, refusals: Mapping[int, Refusal]) -> RowTable:
        """A table of these rows in which those of these numbers are refused too."""
        both = sorted({**self.refusals, **refusals}.items())
        builder = RowTableBuilder()
        builder.add_refusals(both)
        new = builder.finish().columns
        return RowTable({name: new[name] if name.startswith("refusal/") else self.columns[name] for name in COLUMNS})

    # As columns

    def entry_keys(self, *, usable: bool = False) -> Iterator[str]:
        """The keys of all images, then of all captions, then of further parts. Equal ones repeat.

        `usable`: only those of rows that are not refused.
        """
        for name in _ENTRIES:
            keys = self.columns[f"{name}/keys"]
            if usable and self.refusals:
                is_usable = np.ones(len(self), np.bool_)
                is_usable[self.columns["refusal/rows"]] = False
                keys = keys[np.repeat(is_usable, np.diff(self.columns[f"{name}/offsets"]))]
            yield from _hex_in_turn(keys)

    def first_sizes(self, name: Literal["original_size", "target_size", "extent"]) -> np.ndarray:
        """For each row this size of its first image: (height, width), or zeros without images. int32 [n, 2].

        `extent`: (height, width, num_frames) of the target, with 0 frames of an image. int32 [n, 3].
        """
        numbers, offsets = self.columns["image/geometry"][:, _SIZES[name]], self.columns["image/offsets"]
        found = np.zeros((len(self), numbers.shape[1]), np.int32)
        has_image = offsets[:-1] < offsets[1:]
        found[has_image] = numbers[offsets[:-1][has_image]]
        return found

    def ranges(self, name: str, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The places where the images, captions or parts (`name`: image ...) of these rows begin and end: int64 [n]."""
        offsets, numbers = self.columns[f"{name}/offsets"], numbers.astype(np.int64)
        return offsets[numbers].astype(np.int64), offsets[numbers + 1].astype(np.int64)

    def image_places(self, numbers: np.ndarray, flips: np.ndarray) -> np.ndarray:
        """The places of these rows' images in the columns of images: int64 [n], and -1 where there is none.

        `flips`, bool [n], says which of them are the mirrored ones.
        """
        starts, ends = self.ranges("image", numbers)
        found, is_flipped = np.full(len(numbers), -1, np.int64), self.columns["image/geometry"][:, _FLIP]
        for place in range(int((ends - starts).max(initial=0))):
            here = np.flatnonzero((found < 0) & (starts + place < ends))
            here = here[is_flipped[starts[here] + place] == flips[here]]
            found[here] = starts[here] + place
        return found

    def part_places(self, numbers: np.ndarray, flips: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The places of these rows' further parts, those of a row together: int64 [m], and how many each row has: [n].

        `flips`, bool [n], says of which rows they are the mirrored ones.
        """
        starts, ends = self.ranges("part", numbers)
        counts = ends - starts
        rows = np.repeat(np.arange(len(numbers)), counts)
        places = np.arange(len(rows)) + np.repeat(starts - (counts.cumsum() - counts), counts)
        wanted = self.columns["part/geometry"][places, _FLIP] == flips[rows]
        return places[wanted], np.bincount(rows[wanted], minlength=len(numbers))

    def part_shapes(self, places: np.ndarray) -> np.ndarray:
        """Role (a number of ROLES), height and width of the further parts at these places: int32 [m, 3]."""
        sizes = self.columns["part/geometry"][places, _SIZES["target_size"]]
        return np.column_stack([self.columns["part/role"][places].astype(np.int32), sizes])

    def part_sizes(self, numbers: np.ndarray) -> np.ndarray:
        """Heights and widths of the further parts of these rows, in their order, then zeros: int32 [n, 2 * most]."""
        starts, ends = self.ranges("part", numbers)
        found = np.zeros((len(numbers), int((ends - starts).max(initial=0)), 2), np.int32)
        for place in range(found.shape[1]):
            here = np.flatnonzero(starts + place < ends)
            found[here, place] = self.columns["part/geometry"][starts[here] + place, _SIZES["target_size"]]
        return found.reshape(len(numbers), -1)

    def usable(self) -> np.ndarray:
        """The numbers of the rows that are not refused, ascending: uint32 [m]."""
        refused = self.columns["refusal/rows"]
        return np.setdiff1d(np.arange(len(self), dtype=np.uint32), refused, assume_unique=True)

    def unverified(self) -> np.ndarray:
        """The numbers of the rows with an entry that was imported and not verified, ascending: int64 [m]."""
        return self._rows_of([np.flatnonzero(self.columns[f"{name}/unverified"]) for name in _ENTRIES])

    def rows_with(self, keys: Iterable[str]) -> list[int]:
        """The numbers of the rows with one of these keys, ascending."""
        wanted = set(map(bytes.fromhex, keys))
        heads, found = np.array([_head(key) for key in wanted], np.uint64), []
        for name in _ENTRIES:
            column = self.columns[f"{name}/keys"]
            likely = np.flatnonzero(np.isin(_heads_of(column), heads)).tolist()
            found.append(np.array([at for at in likely if column[at].tobytes() in wanted], np.int64))
        return [*map(int, self._rows_of(found))]

    def _rows_of(self, entries: Sequence[np.ndarray]) -> np.ndarray:
        """The numbers of the rows that have these images, captions and parts, ascending."""
        offsets = (self.columns[f"{name}/offsets"] for name in _ENTRIES)
        rows = [of.searchsorted(at, side="right") - 1 for of, at in zip(offsets, entries, strict=True)]
        return np.unique(np.concatenate(rows))

    def row_of_source(self, source: str) -> Row | None:
        """The last row whose image has this digest, or None."""
        wanted, sources = bytes.fromhex(source), self.columns["source"]
        alternatives = self._by_source.alternatives(np.array([_head(wanted)], np.uint64))
        found = [numbers[0] for _, numbers in alternatives if sources[numbers[0]].tobytes() == wanted]
        return self.row(int(found[-1])) if found and any(wanted) else None

    @cached_property
    def _by_source(self) -> _Order:
        return _Order(_heads_of(self.columns["source"]))


class _Order:
    """Finds rows by a number of eight bytes that each has, in 12 bytes a row."""

    def __init__(self, numbers: np.ndarray):
        self._order = np.argsort(numbers, kind="stable").astype(np.uint32)
        self._numbers = numbers[self._order]

    def alternatives(self, numbers: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """The rows that have these numbers (uint64 [n]): places among them, and a row for each of these, ascending.

        Once, or more often where several rows have one number.
        """
        first, end = (self._numbers.searchsorted(numbers, side) for side in ("left", "right"))
        for step in range(int((end - first).max(initial=0))):
            places = np.flatnonzero(first + step < end)
            yield places, self._order[first[places] + step]

    def alike(self) -> list[int]:
        """Rows whose number another one has too."""
        same = np.flatnonzero(self._numbers[1:] == self._numbers[:-1])
        found: list[int] = self._order[np.union1d(same, same + 1)].tolist()
        return found


class _Values(ValuesView[Row]):
    _mapping: RowTable

    def __iter__(self) -> Iterator[Row]:
        return map(self._mapping.row, range(len(self._mapping)))


class PlainRow(NamedTuple):
    """A row as a plan has it, whose entries are no objects: keys with geometries, or with texts.

    A part also has its role and the digest of its file.
    """

    sample_id: str
    path: str
    source: str | None
    images: Sequence[tuple[str, Geometry]] = ()
    captions: Sequence[tuple[str, str]] = ()
    parts: Sequence[tuple[str, Geometry, PartRole, str]] = ()
    refusal: Refusal | None = None

    def keys(self) -> list[str]:
        """The keys of all its entries."""
        return [key for key, _ in self.images] + [key for key, _ in self.captions] + [key for key, *_ in self.parts]


class RowTableBuilder:
    """Collects rows, some at a time, and makes a table of them. After `finish` it is used up."""

    def __init__(self) -> None:
        self._columns = {name: array(code, [0] * (name in _OFFSETS)) for name, (code, _) in COLUMNS.items()}
        self._last_folder: tuple[str, bool] | None = None
        self._num_rows = 0

    def add(self, rows: Sequence[Row]) -> None:
        """Add rows. ValueError, adding none, for a key or a source that is no digest."""
        for row in rows:
            sources = [] if row.source is None else [row.source]
            _check_digests("key", row.keys())
            _check_digests("source", [*sources, *(ref.source for ref in row.parts)])
        self.add_plain(
            [
                PlainRow(
                    row.sample_id,
                    row.path,
                    row.source,
                    [(ref.key, ref.geometry) for ref in row.images],
                    [(ref.key, ref.text) for ref in row.captions],
                    [(ref.key, ref.geometry, ref.role, ref.source) for ref in row.parts],
                    row.refusal,
                )
                for row in rows
            ]
        )
        for name, plural in zip(_ENTRIES, ("images", "captions", "parts"), strict=True):
            flags = array("B", [ref.trust != "verified" for row in rows for ref in getattr(row, plural)])
            if any(flags):
                self._columns[f"{name}/unverified"][-len(flags) :] = flags

    def add_plain(self, rows: Sequence[PlainRow]) -> None:
        """Add rows of entries that are verified. Their digests are not checked."""
        columns = self._columns
        images = [ref for row in rows for ref in row.images]
        captions = [ref for row in rows for ref in row.captions]
        parts = [ref for row in rows for ref in row.parts]
        keys = {"image": [key for key, _ in images], "caption": [key for key, _ in captions]}
        for name, found in {**keys, "part": [key for key, *_ in parts]}.items():
            columns[f"{name}/keys"].frombytes(bytes.fromhex("".join(found)))
            columns[f"{name}/unverified"].frombytes(bytes(len(found)))
        self._add_offsets("image/offsets", [len(row.images) for row in rows])
        self._add_offsets("caption/offsets", [len(row.captions) for row in rows])
        self._add_offsets("part/offsets", [len(row.parts) for row in rows])
        columns["source"].frombytes(bytes.fromhex("".join([row.source or _NO_SOURCE for row in rows])))
        columns["part/source"].frombytes(bytes.fromhex("".join([source for *_, source in parts])))
        for name, refs in (("image", images), ("part", parts)):
            column = columns[f"{name}/geometry"]
            for _, geometry, *_ in refs:
                original, resized, crop, target, num_frames, flip = _GEOMETRY(geometry)
                column.extend((*original, *resized, *crop, *target, num_frames or 0, flip))
        columns["part/role"].extend([ROLES.index(role) for _, _, role, _ in parts])
        self._add_texts("caption/text", [text for _, text in captions])
        self._add_texts("sample_id", [row.sample_id for row in rows])
        for row in rows:
            self._add_path(row.path, row.sample_id)
        first = self._num_rows
        self.add_refusals((first + at, row.refusal) for at, row in enumerate(rows) if row.refusal is not None)
        self._num_rows += len(rows)

    def add_refusals(self, refusals: Iterable[tuple[int, Refusal]]) -> None:
        """Add refusals of rows, by their numbers, which ascend."""
        for number, refusal in refusals:
            self._columns["refusal/rows"].append(number)
            self._add_texts("refusal/text", [json.dumps(refusal.to_json())])

    def _add_path(self, path: str, sample_id: str) -> None:
        """Most paths are one folder and the sample_id: the folder is kept once for rows that follow each other."""
        is_whole = not path.endswith(sample_id)
        folder = path if is_whole else path[: len(path) - len(sample_id)]
        if (folder, is_whole) != self._last_folder:
            self._last_folder = folder, is_whole
            self._add_texts("folder", [folder])
            self._columns["folder/is_whole"].append(is_whole)
        self._columns["folder/of"].append(len(self._columns["folder/is_whole"]) - 1)

    def _add_texts(self, name: str, texts: Sequence[str]) -> None:
        encoded = [text.encode(_CODEC, _ERRORS) for text in texts]
        self._add_offsets(f"{name}/offsets", map(len, encoded))
        self._columns[f"{name}/values"].frombytes(b"".join(encoded))

    def _add_offsets(self, name: str, lengths: Iterable[int]) -> None:
        column = self._columns[name]
        column.extend(islice(accumulate(lengths, initial=column[-1]), 1, None))

    def finish(self) -> RowTable:
        """The table."""
        return RowTable(
            {name: np.frombuffer(self._columns[name], code).reshape(-1, *shape)
             for name, (code, shape) in COLUMNS.items()}
        )  # fmt: skip


def check_geometry(geometry: Geometry) -> None:
    """ValueError for one that no row of a manifest may have: sizes and a crop have their bounds."""
    original, resized, crop, target, num_frames, flip = _GEOMETRY(geometry)
    numbers = (*original, *resized, *crop, *target, num_frames or 0, flip)
    wrong = [number for number, least, most in zip(numbers, _LEAST, _MOST, strict=True) if not least <= number <= most]
    if wrong:
        raise ValueError(f"a geometry has {wrong[0]}, where a side has 1 to {MAX_SIDE} pixels, and a crop 0 or more")


def _check_structure(columns: Mapping[str, np.ndarray]) -> None:
    """ValueError unless these are the columns of a table: offsets and lengths that fit to each other."""
    if columns.keys() != COLUMNS.keys():
        raise ValueError(f"its columns differ from those that are needed: {sorted(columns.keys() ^ COLUMNS.keys())}")
    for name, (code, shape) in COLUMNS.items():
        column = columns[name]
        if column.dtype != np.dtype(code) or column.shape[1:] != shape or column.ndim != 1 + len(shape):
            raise ValueError(f"{name} is {column.dtype} {list(column.shape)}, not {np.dtype(code)} [n, {shape}]")
    for name, of in _OFFSETS.items():
        offsets, num = columns[name], len(columns[of])
        if not len(offsets) or offsets[0] != 0 or offsets[-1] != num or (offsets[1:] < offsets[:-1]).any():
            raise ValueError(f"{name} does not rise from 0 to the {num:,} of {of}")
    for name, (other, difference) in _LENGTHS.items():
        if len(columns[name]) != (expected := len(columns[other]) + difference):
            raise ValueError(f"{name} has {len(columns[name]):,} rows, where {other} means {expected:,}")


def geometry_of(numbers: np.ndarray) -> Geometry:
    """The geometry of a row of a column of geometries, int32 [10]."""
    height, width, resized_height, resized_width, top, left, *target, num_frames, flip = numbers.tolist()
    sizes = Size(height, width), Size(resized_height, resized_width)
    return Geometry(*sizes, Crop(top, left), Size(*target), bool(flip), num_frames or None)


def _head(digest: bytes) -> int:
    return int.from_bytes(digest[:8], sys.byteorder)


def _heads_of(digests: np.ndarray) -> np.ndarray:
    """The first eight bytes of each digest, to look it up: uint64 [n]."""
    return digests[:, :8].copy().view(np.uint64).reshape(-1)


def hex_of(digests: np.ndarray) -> list[str]:
    """The digests of uint8 [n, 32] as hexadecimal digits."""
    digits = digests.tobytes().hex()
    return [digits[at : at + 2 * KEY_BYTES] for at in range(0, len(digits), 2 * KEY_BYTES)]


def _hex_in_turn(digests: np.ndarray) -> Iterator[str]:
    """As `hex_of`, for very many: some are made at a time."""
    return chain.from_iterable(hex_of(digests[first : first + _CHUNK]) for first in range(0, len(digests), _CHUNK))


def _check_digests(what: str, digests: Iterable[str]) -> None:
    """ValueError for the first that is no digest."""
    wrong = next((digest for digest in digests if not is_key(digest)), None)
    if wrong is not None:
        raise ValueError(f"{what} is {wrong!r:.80}, where 64 hexadecimal digits are needed")
