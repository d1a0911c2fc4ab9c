"""The samples of a manifest: a `Row` each, stored together as columns that can be mapped from the manifest's file.

n samples have m images and m captions; those of sample i are offsets[i] to offsets[i + 1]. Strings are UTF-8.

    sample_id  path  refusal  each has /offsets [n + 1] and /values; a refusal is JSON, or empty for a usable sample;
                              a trailing zero byte in a path stands for the sample_id
    source [n, 32]            digest of the image's bytes; zeros if unknown
    image/offsets [n + 1]     the image, then its companions: control images, a mask, the masked image
    image/keys [m, 32]   image/geometry [m, 10]   image/role [m]   image/crop [m]   image/unverified [m]
    image/source [m, 32]      digest of the bytes that a companion was made from
    caption/offsets [n + 1]
    caption/keys [m, 32]   caption/text/offsets [m + 1]   caption/text/values   caption/unverified [m]

A caption that was not encoded has an all-zero key, which no entry has. A geometry is original, resized, crop and
target (height or top first), the number of frames (0 for an image) and flip.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, islice
from typing import Any, Final, Literal

import msgspec
import numpy as np
from typing_extensions import override

from latentcache.config import MAX_CONTROLS
from latentcache.identity import is_key, sortable
from latentcache.types import MAX_SIDE, Crop, Geometry, Refusal, Size

COLUMNS: Mapping[str, tuple[str, int, str | None]] = {
    "sample_id/offsets": ("q", 0, "source"), "sample_id/values": ("B", 0, None),
    "path/offsets": ("q", 0, "source"), "path/values": ("B", 0, None),
    "refusal/offsets": ("q", 0, "source"), "refusal/values": ("B", 0, None),
    "source": ("B", 32, "source"),
    "image/offsets": ("q", 0, "source"), "image/keys": ("B", 32, "image/keys"),
    "image/geometry": ("i", 10, "image/keys"), "image/role": ("B", 0, "image/keys"),
    "image/crop": ("i", 0, "image/keys"), "image/unverified": ("B", 0, "image/keys"),
    "image/source": ("B", 32, "image/keys"),
    "caption/offsets": ("q", 0, "source"), "caption/keys": ("B", 32, "caption/keys"),
    "caption/text/offsets": ("q", 0, "caption/keys"), "caption/text/values": ("B", 0, None),
    "caption/unverified": ("B", 0, "caption/keys"),
}  # fmt: skip
"""Each column's type code for `array` and numpy, its width (0: one-dimensional), and the column that it is as long as.
Offsets have one element more."""
_TARGET, _EXTENT, _RESIZED, _FLIP = slice(6, 8), slice(6, 9), slice(2, 4), 9
"""Positions within a geometry."""
_LEAST = np.array([1, 1, 1, 1, 0, 0, 1, 1, 0, 0], np.int32)
_MOST = np.array([MAX_SIDE] * 9 + [1], np.int32)
_CODEC, _ERRORS = "utf-8", "surrogatepass"  # a name from a broken archive may contain a lone surrogate
_ITS_ID = "\0"
"""Stands for the sample_id at the end of a path. No real path contains it."""
_DIGEST_BYTES: Final = 32
_NO_DIGEST = "0" * 2 * _DIGEST_BYTES

_CHUNK = 1024
"""Number of keys or strings converted to text at a time, and of rows converted to columns at a time."""

ImageValues = tuple[str, str, bytes, str, int, bool]
"""Column values of an image or a companion: role, key, geometry (`geometry_bytes`), source, crop, unverified."""
CaptionValues = tuple[str, str, bool]
"""Column values of a caption: its key, which is empty if it was not encoded, its text, unverified."""

Trust = Literal["verified", "unverified"]
"""`unverified`: imported, and not shown to equal what encoding gives. Everything else is `verified`."""
_TRUSTS: tuple[Trust, Trust] = ("verified", "unverified")
PartRole = Literal["control", "mask", "masked image"]
"""Kind of companion: a conditioning image, per-pixel loss weights, or the image without its masked area."""
ROLES = ("image", *(f"control {number}" for number in range(1, MAX_CONTROLS + 1)), "mask", "masked image")
"""Role names; `image/role` stores indices into this tuple."""

NO_GEOMETRY = Geometry(Size(0, 0), Size(0, 0), Crop(0, 0), Size(0, 0))
"""Geometry of a text entry."""


@dataclass(frozen=True, slots=True)
class Ref:
    """One entry of a sample: its image, a text, or a companion of the image.

    `role` is one of `ROLES`, or `caption`. `crop` is the index of the image's crop that the entry shows or goes with.
    `key` is empty for a text that was not encoded. `source` is the digest of the bytes that a companion was made from;
    a masked image has the digest of its mask. The digest of the image itself is in the row.
    """

    key: str
    geometry: Geometry = NO_GEOMETRY
    trust: Trust = "verified"
    role: str = "image"
    source: str = ""
    text: str = ""
    crop: int = 0

    @property
    def part(self) -> str:
        """The kind of companion, a `PartRole`: every control image is `control`."""
        return "control" if self.role.startswith("control") else self.role

    @classmethod
    def of_text(cls, text: str, key: str, trust: Trust = "verified") -> Ref:
        """Make the entry of one of a sample's texts."""
        return cls(key, trust=trust, role="caption", text=text)

    def to_json(self) -> dict[str, Any]:
        """The entry as JSON. `trust` is omitted for a verified entry."""
        facts: dict[str, Any] = (
            {"key": self.key} if self.trust == "verified" else {"key": self.key, "trust": self.trust}
        )
        if self.role == "caption":
            return {**facts, "text": self.text}
        return {**facts, "role": self.role, "crop": self.crop, **self.geometry.to_json()}


@dataclass(frozen=True, slots=True)
class Row:
    """One sample. A refused sample has a refusal, and keeps what was known before it was refused.

    `images` holds the image and, if the dataset flips, its mirrored copy; then the same for each further crop.
    `source` is the digest of the image's bytes. `parts` holds the control images in order, then the mask, then the
    masked image. Each has as many entries as the image, in the same order. With two crops and flips:

        images  0  0 mirrored  1  1 mirrored      parts  control 1: the same four   mask: the same four
    """

    sample_id: str
    path: str
    source: str | None
    images: tuple[Ref, ...]
    captions: tuple[Ref, ...]
    refusal: Refusal | None = None
    parts: tuple[Ref, ...] = ()

    def refs(self) -> tuple[Ref, ...]:
        """All entries: images, then captions, then companions."""
        return (*self.images, *self.captions, *self.parts)

    def keys(self) -> list[str]:
        """The keys of all entries, in the order of `refs`."""
        return [ref.key for ref in self.refs() if ref.key]

    def parts_of(self, crop: int = 0, *, flip: bool = False) -> list[Ref]:
        """The companions that go with this crop of the image, mirrored or not."""
        return [ref for ref in self.parts if (ref.crop, ref.geometry.flip) == (crop, flip)]

    @property
    def is_verified(self) -> bool:
        """Whether no entry is an unverified import."""
        return all(ref.trust == "verified" for ref in self.refs())

    def to_json(self, variants: int = 1) -> dict[str, Any]:
        """The row as a JSON object. `parts` is omitted if there are no companions.

        `variants` is the manifest's number of variants per caption; only the caption itself and this number are listed.
        """
        line: dict[str, Any] = {"sample_id": self.sample_id, "path": self.path, "source": self.source}
        line["images"] = [ref.to_json() for ref in self.images]
        line["captions"] = [ref.to_json() for ref in self.captions[::variants]]
        line["refusal"] = None if self.refusal is None else self.refusal.to_json()
        if variants > 1:
            line["variants"] = variants
        if self.parts:
            line["parts"] = [{**ref.to_json(), "source": ref.source} for ref in self.parts]
        return line


class Strings(Sequence[str]):
    """A column of strings, each decoded when it is read."""

    def __init__(self, values: np.ndarray, offsets: np.ndarray):
        self._values, self._offsets = values, offsets

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, number: Any) -> Any:
        start, end = self._offsets.item(number), self._offsets.item(number + 1)
        return str(self._values.data[start:end], _CODEC, _ERRORS)

    def __iter__(self) -> Iterator[str]:
        # In chunks: a million captions at once would take too much memory.
        chunks = (np.arange(at, min(at + _CHUNK, len(self))) for at in range(0, len(self), _CHUNK))
        return chain.from_iterable(map(self.at, chunks))

    def at(self, numbers: np.ndarray) -> list[str]:
        """The strings with these numbers."""
        data, starts, ends = self._values.data, self._offsets[numbers].tolist(), self._offsets[numbers + 1].tolist()
        return [str(data[start:end], _CODEC, _ERRORS) for start, end in zip(starts, ends, strict=True)]


class RowTable(Mapping[str, Row]):
    """The rows of a manifest by sample_id, in order. A `Row` is built on each access.

    Rows are also numbered from 0, and access by number needs no ids. A table is immutable: threads and forked processes
    can share it, and it can be pickled. `columns` are those of `COLUMNS`; only `check` validates them.
    """

    def __init__(self, columns: Mapping[str, np.ndarray]):
        self.columns = columns
        self.sample_ids, self.caption_texts = self._strings("sample_id"), self._strings("caption/text")
        self._paths, self._refusals = self._strings("path"), self._strings("refusal")

    def _strings(self, name: str) -> Strings:
        return Strings(self.columns[f"{name}/values"], self.columns[f"{name}/offsets"])

    @classmethod
    def of(cls, rows: Mapping[str, Row] | Iterable[Row]) -> RowTable:
        """A table of these rows, whose samples must differ. A table is returned as is.

        Raises ValueError: see `RowTableBuilder`.
        """
        if isinstance(rows, RowTable):
            return rows
        builder = RowTableBuilder()
        for row in rows.values() if isinstance(rows, Mapping) else rows:
            builder.add(row)
        return builder.finish()

    def check(self) -> None:
        """Raise ValueError for contents that no builder makes. For tables from an untrusted source."""
        columns = self.columns
        _check_structure(columns)
        for strings in (self.sample_ids, self.caption_texts, self._paths):
            for _ in strings:
                pass  # UnicodeDecodeError for what is not UTF-8
        _ = self.refusals
        bounds = {"image/geometry": (_LEAST, _MOST), "image/role": (0, len(ROLES) - 1), "image/crop": (0, MAX_SIDE)}
        bounds |= {"image/unverified": (0, 1), "caption/unverified": (0, 1)}
        for name, (least, most) in bounds.items():
            if (wrong := (columns[name] < least) | (columns[name] > most)).any():
                raise ValueError(f"{name} contains {columns[name][wrong][0]}, which is out of range")
        if len(self._numbers) < len(self):
            again = next(name for number, name in enumerate(self.sample_ids) if self._numbers[name] != number)
            raise ValueError(f"sample {again!r:.80} is listed twice")

    # As a mapping

    def __len__(self) -> int:
        return len(self.sample_ids)

    def __iter__(self) -> Iterator[str]:
        return iter(self.sample_ids)

    def __getitem__(self, sample_id: str) -> Row:
        return self.row(self._numbers[sample_id])

    @override
    def __contains__(self, sample_id: object) -> bool:
        return sample_id in self._numbers

    @override
    def __eq__(self, other: object) -> bool:
        """Whether the samples are equal. Two tables must also have them in the same order."""
        if isinstance(other, RowTable):
            return all(np.array_equal(self.columns[name], other.columns[name]) for name in COLUMNS)
        return Mapping.__eq__(self, other)

    # By number

    @cached_property
    def _numbers(self) -> dict[str, int]:
        """sample_id -> number. Built on the first access by id; a loader never needs it."""
        return {sample_id: number for number, sample_id in enumerate(self.sample_ids)}

    def numbers(self, sample_ids: Iterable[str]) -> np.ndarray:
        """The numbers of samples' rows: int64 [n]; -1 for an unknown sample."""
        return np.array([self._numbers.get(sample_id, -1) for sample_id in sample_ids], np.int64)

    def row(self, number: int) -> Row:
        """Build one row, which takes some microseconds."""
        captions, images = (
            tuple(self._ref(name, at) for at in range(*self.columns[f"{name}/offsets"][number : number + 2].tolist()))
            for name in ("caption", "image")
        )
        sample_id, path = self.sample_ids[number], self._paths[number]
        return Row(
            sample_id,
            path[:-1] + sample_id if path.endswith(_ITS_ID) else path,
            _hex(self.columns["source"][number]) or None,
            tuple(ref for ref in images if ref.role == "image"),
            captions,
            self.refusals.get(number),
            tuple(ref for ref in images if ref.role != "image"),
        )

    def _ref(self, name: str, at: int) -> Ref:
        """The entry at position `at` of the images and companions (`name`: image), or of the captions (caption)."""
        columns, key = self.columns, _hex(self.columns[f"{name}/keys"][at])
        trust = _TRUSTS[columns[f"{name}/unverified"].item(at)]
        if name == "caption":
            return Ref.of_text(self.caption_texts[at], key, trust)
        geometry, role = geometry_of(columns["image/geometry"][at]), ROLES[columns["image/role"].item(at)]
        return Ref(key, geometry, trust, role, _hex(columns["image/source"][at]), crop=columns["image/crop"].item(at))

    @cached_property
    def refusals(self) -> Mapping[int, Refusal]:
        """Row number -> refusal, for each refused row. Raises ValueError for malformed JSON."""
        numbers = np.flatnonzero(np.diff(self.columns["refusal/offsets"])).tolist()
        return {number: msgspec.convert(json.loads(self._refusals[number]), Refusal) for number in numbers}

    def with_refusals(self, refusals: Mapping[int, Refusal]) -> RowTable:
        """A copy of this table with these refusals added, by row number."""
        both = {**self.refusals, **refusals}
        texts = [_refusal_json(both.get(number)).encode(_CODEC, _ERRORS) for number in range(len(self))]
        values = np.frombuffer(b"".join(texts), np.uint8)
        offsets = np.fromiter(accumulate(map(len, texts), initial=0), np.int64, len(self) + 1)
        return RowTable({**self.columns, "refusal/offsets": offsets, "refusal/values": values})

    # As columns

    def entry_keys(self, *, usable: bool = False) -> np.ndarray:
        """The key of each image and companion, then of each caption: uint8 [n, 32]. `usable`: not of refused rows."""
        names = ("image", "caption")
        return np.concatenate([self.columns[f"{name}/keys"][self._has_key(name, usable)] for name in names])

    def ranges(self, name: str, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The first and the end position of these rows' images or captions (`name`: image or caption): int64 [n]."""
        offsets = self.columns[f"{name}/offsets"]
        return offsets[numbers], offsets[numbers + 1]

    def places(
        self, numbers: np.ndarray, flips: np.ndarray | bool = False, crops: np.ndarray | int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        """The positions of these rows' images and companions: int64 [m], and how many each row has: int64 [n].

        Those of a row are adjacent, the image first. `flips`, bool [n], selects the mirrored entries of a row, and
        `crops` its crop.
        """
        starts, ends = self.ranges("image", numbers)
        counts = ends - starts
        rows = np.repeat(np.arange(len(numbers)), counts)
        places = np.arange(len(rows)) + np.repeat(starts - (counts.cumsum() - counts), counts)
        wanted = self.columns["image/geometry"][places, _FLIP] == np.broadcast_to(flips, len(numbers))[rows]
        wanted &= self.columns["image/crop"][places] == np.broadcast_to(crops, len(numbers))[rows]
        return places[wanted], np.bincount(rows[wanted], minlength=len(numbers))

    def shapes(self, numbers: np.ndarray) -> np.ndarray:
        """What samples in a batch must share: role, height, width and number of frames of the image and each companion.

        Taken from the first crop, unmirrored; all crops have the same. int32 [n, 4 * most], padded with zeros.
        """
        places, counts = self.places(numbers)
        rows = np.repeat(np.arange(len(numbers)), counts)
        within = np.arange(len(places)) - np.repeat(counts.cumsum() - counts, counts)
        found = np.zeros((len(numbers), int(counts.max(initial=1)), 4), np.int32)
        found[rows, within, 0] = self.columns["image/role"][places]
        found[rows, within, 1:] = self.columns["image/geometry"][places, _EXTENT]
        return found.reshape(len(numbers), 4 * found.shape[1])

    @cached_property
    def num_crops(self) -> np.ndarray:
        """How many crops of its image each row has, 1 if it has no image: int64 [n]."""
        found, counts = np.ones(len(self), np.int64), np.diff(self.columns["image/offsets"])
        np.maximum.at(found, np.repeat(np.arange(len(self)), counts), self.columns["image/crop"] + 1)
        return found

    @property
    def has_flips(self) -> bool:
        """Whether any image has a mirrored entry."""
        return bool(self.columns["image/geometry"][:, _FLIP].any())

    @property
    def _is_usable(self) -> np.ndarray:
        """Which rows are not refused: bool [n]."""
        return np.asarray(np.diff(self.columns["refusal/offsets"]) == 0)

    def _has(self, name: str, flags: np.ndarray) -> np.ndarray:
        """Which rows have an image or caption (`name`) whose flag is set: bool [n]."""
        num_before = np.append(0, np.cumsum(flags != 0))
        return np.asarray(np.diff(num_before[self.columns[f"{name}/offsets"]]) > 0)

    def _has_key(self, name: str, usable: bool) -> np.ndarray:
        """Which images or captions (`name`) have a key; `usable` leaves out those of refused rows: bool [n]."""
        rows = self._is_usable | (not usable)
        return self.columns[f"{name}/keys"].any(1) & np.repeat(rows, np.diff(self.columns[f"{name}/offsets"]))

    def _has_any(self, flags_of: Callable[[str], np.ndarray]) -> np.ndarray:
        """Which rows have an image or caption whose flag is set: bool [n]. `flags_of` gives the flags of each."""
        return np.asarray(self._has("image", flags_of("image")) | self._has("caption", flags_of("caption")))

    def usable(self) -> np.ndarray:
        """The numbers of the rows that are not refused, ascending: int64 [m]."""
        return np.flatnonzero(self._is_usable)

    def usable_with(self, name: str, flags: np.ndarray) -> np.ndarray:
        """The numbers of the usable rows with an image or caption (`name`) whose flag is set, ascending.

        `flags` is bool [m], in the order of the column; companions count as images.
        """
        return np.flatnonzero(self._has(name, flags) & self._is_usable)

    def unverified(self) -> np.ndarray:
        """The numbers of the usable rows with an entry that was imported and not verified, ascending."""
        return np.flatnonzero(self._has_any(lambda name: self.columns[f"{name}/unverified"]) & self._is_usable)

    def lacking(self, has: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """The numbers of the usable rows that lack an entry, ascending. `has` is that of a store."""

        def lost(name: str) -> np.ndarray:
            flags, keys = self._has_key(name, usable=True), self.columns[f"{name}/keys"]
            flags[flags] = ~has(keys[flags])  # of no others: for an unknown key, a far store lists its packs again
            return flags

        return np.flatnonzero(self._has_any(lost))

    def without_caption(self) -> np.ndarray:
        """The numbers of the usable rows whose only text is empty, ascending."""
        has_text = self._has("caption", np.diff(self.columns["caption/text/offsets"]))
        return np.flatnonzero(~has_text & self._is_usable)

    def mostly_cut(self) -> np.ndarray:
        """The numbers of the usable rows whose first crop keeps less than half of the image, ascending."""
        geometry, is_first = self.columns["image/geometry"], self.columns["image/crop"] == 0
        is_cut = 2 * geometry[:, _TARGET].prod(1, dtype=np.int64) < geometry[:, _RESIZED].prod(1, dtype=np.int64)
        return self.usable_with("image", is_cut & is_first & (self.columns["image/role"] == 0))

    def rows_with(self, keys: Iterable[str]) -> list[int]:
        """The numbers of the rows that have any of these keys, ascending."""
        wanted = sortable(np.frombuffer(bytes.fromhex("".join(keys)), np.uint8).reshape(-1, _DIGEST_BYTES))
        found = self._has_any(lambda name: np.isin(sortable(self.columns[f"{name}/keys"]), wanted))
        return [*map(int, np.flatnonzero(found))]


class RowTableBuilder:
    """Collects rows into one table. Cannot be reused after `finish`.

    Raises ValueError for a key or a source that is not a digest, possibly only when later rows are added.
    """

    def __init__(self) -> None:
        self._columns = {name: array(code, [0] * name.endswith("/offsets")) for name, (code, *_) in COLUMNS.items()}
        # Rows are converted to columns in chunks, which takes a third of the time.
        self._rows: list[tuple[Any, ...]] = []
        self._images: list[ImageValues] = []
        self._captions: list[CaptionValues] = []

    def add(self, row: Row) -> None:
        """Add a sample."""
        images = [
            (ref.role, ref.key, geometry_bytes(ref.geometry), ref.source, ref.crop, ref.trust != "verified")
            for ref in (*row.images, *row.parts)
        ]
        captions = [(ref.key, ref.text, ref.trust != "verified") for ref in row.captions]
        self.put(row.sample_id, row.path, row.source, images, captions, row.refusal)

    def put(
        self,
        sample_id: str,
        path: str,
        source: str | None,
        images: Sequence[ImageValues] = (),
        captions: Sequence[CaptionValues] = (),
        refusal: Refusal | None = None,
    ) -> None:
        """Add a sample whose entries are already column values. Faster than `add`."""
        folder, source = path.removesuffix(sample_id), _NO_DIGEST if source is None else source
        path = path if folder == path else folder + _ITS_ID
        self._rows.append((sample_id, path, source, len(images), len(captions), _refusal_json(refusal)))
        self._images += images
        self._captions += captions
        if len(self._rows) >= _CHUNK:
            self._flush()

    def _flush(self) -> None:
        waiting: tuple[tuple[str, list[Any]], ...] = (
            ("sample_id path source image caption refusal", self._rows),
            ("image/role image/keys image/geometry image/source image/crop image/unverified", self._images),
            ("caption/keys caption/text caption/unverified", self._captions),
        )
        for names, rows in waiting:
            for name, values in zip(names.split(), zip(*rows, strict=True), strict=False):  # nothing without rows
                self._extend(name, values)
            rows.clear()

    def _extend(self, name: str, values: Sequence[Any]) -> None:
        if f"{name}/values" in COLUMNS:
            encoded = [text.encode(_CODEC, _ERRORS) for text in values]
            self._columns[f"{name}/values"].frombytes(b"".join(encoded))
            self._add_lengths(f"{name}/offsets", map(len, encoded))
        elif name not in COLUMNS:
            self._add_lengths(f"{name}/offsets", values)
        elif COLUMNS[name][1] == _DIGEST_BYTES:
            if name in ("image/source", "caption/keys"):  # these may be empty
                values = [digest or _NO_DIGEST for digest in values]
            self._columns[name].frombytes(_bytes_of(name, values))
        elif name == "image/geometry":
            self._columns[name].frombytes(b"".join(values))
        else:
            self._columns[name].extend(map(ROLES.index, values) if name == "image/role" else values)

    def _add_lengths(self, name: str, lengths: Iterable[int]) -> None:
        offsets = self._columns[name]
        offsets.extend(islice(accumulate(lengths, initial=offsets[-1]), 1, None))

    def finish(self) -> RowTable:
        """Return the table."""
        self._flush()
        columns = {name: np.frombuffer(self._columns[name], code) for name, (code, *_) in COLUMNS.items()}
        wide = {name: columns[name].reshape(-1, width) for name, (_, width, _) in COLUMNS.items() if width}
        return RowTable({**columns, **wide})


def _check_structure(columns: Mapping[str, np.ndarray]) -> None:
    """Raise ValueError unless these are the columns of a table, with consistent lengths and offsets."""
    if columns.keys() != COLUMNS.keys():
        raise ValueError(f"missing or unexpected columns: {sorted(columns.keys() ^ COLUMNS.keys())}")
    for name, (code, width, like) in COLUMNS.items():
        column, is_offsets = columns[name], name.endswith("/offsets")
        num_rows = len(column) if like is None else len(columns[like]) + is_offsets
        shape = (num_rows, width) if width else (num_rows,)
        if column.dtype != np.dtype(code) or column.shape != shape:
            raise ValueError(f"{name} is {column.dtype} {column.shape}; expected {np.dtype(code)} {shape}")
        if is_offsets:
            values = name.replace("offsets", "values")
            num_values = len(columns[values if values in COLUMNS else name.replace("offsets", "keys")])
            if column[0] != 0 or column[-1] != num_values or (column[1:] < column[:-1]).any():
                raise ValueError(f"{name} does not ascend from 0 to {num_values:,}")


def _numbers_of(geometry: Geometry) -> tuple[int, ...]:
    """A geometry as numbers, in the order of its column."""
    sizes = (geometry.original_size, geometry.resized_size, geometry.crop_top_left, geometry.target_size)
    return (*chain.from_iterable(sizes), geometry.num_frames or 0, geometry.flip)


def geometry_bytes(geometry: Geometry) -> bytes:
    """A geometry as bytes of its column, for `RowTableBuilder.put`."""
    return array("i", _numbers_of(geometry)).tobytes()


def geometry_of(numbers: np.ndarray) -> Geometry:
    """The geometry in one row of its column, int32 [10]."""
    height, width, resized_height, resized_width, top, left, *target, num_frames, flip = numbers.tolist()
    sizes = Size(height, width), Size(resized_height, resized_width)
    return Geometry(*sizes, Crop(top, left), Size(*target), bool(flip), num_frames or None)


def check_geometry(geometry: Geometry) -> None:
    """Raise ValueError for a geometry that a manifest may not contain: sizes and crop are bounded."""
    numbers = np.array(_numbers_of(geometry))
    if len(wrong := numbers[(numbers < _LEAST) | (numbers > _MOST)]):
        raise ValueError(f"a geometry contains {wrong[0]}; sides must be 1 to {MAX_SIDE} pixels, crops 0 or more")


def _hex(digest: np.ndarray) -> str:
    """A digest of 32 bytes as hexadecimal digits; empty for zeros."""
    return digest.tobytes().hex() if digest.any() else ""


def _bytes_of(what: str, digests: Sequence[str]) -> bytes:
    """Convert digests from hexadecimal. Raises ValueError for anything else."""
    digits = "".join(digests)
    with suppress(ValueError):
        data = bytes.fromhex(digits)
        if data.hex() == digits and {*map(len, digests)} <= {2 * _DIGEST_BYTES}:
            return data
    odd = next(digest for digest in digests if not is_key(digest))
    raise ValueError(f"{what} is {odd!r:.80}; expected 64 lower-case hexadecimal digits")


def _refusal_json(refusal: Refusal | None) -> str:
    return "" if refusal is None else json.dumps(refusal.to_json())
