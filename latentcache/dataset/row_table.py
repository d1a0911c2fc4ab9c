"""The samples of a manifest: one as a `Row`, all as columns, which lie in its file as they are and can be mapped.

n samples have m images and captions; those of sample i are offsets[i] to offsets[i + 1]. Strings are UTF-8.

    sample_id  path  refusal  each has /offsets [n + 1] and /values; a refusal is JSON, and empty where there is none;
                              a byte of 0 at the end of a path stands for the sample_id
    source [n, 32]            of the image's bytes; zeros where it is unknown
    image/offsets [n + 1]     the image, then its companions: control images, a mask, the masked image
    image/keys [m, 32]   image/geometry [m, 10]   image/role [m]   image/crop [m]   image/unverified [m]
    image/source [m, 32]      of the bytes that a companion was made of
    caption/offsets [n + 1]
    caption/keys [m, 32]   caption/text/offsets [m + 1]   caption/text/values   caption/unverified [m]

A caption that was not encoded has a key of zeros, which is no key of an entry. A geometry is original, resized, crop
and target (height or top first), the number of frames (0: an image) and flip.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, islice, pairwise
from typing import Any, Final, Literal

import msgspec
import numpy as np
from typing_extensions import override

from latentcache.config import MAX_CONTROLS
from latentcache.identity import is_key, key_names
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
"""Each column's type, as `array` and numpy name it, the numbers in a row of it (0: one, without a second dimension),
and the column that has as many rows; offsets have one more."""
_TARGET, _EXTENT, _RESIZED, _FLIP = slice(6, 8), slice(6, 9), slice(2, 4), 9
"""Where these lie in a geometry."""
_LEAST = np.array([1, 1, 1, 1, 0, 0, 1, 1, 0, 0], np.int32)
_MOST = np.array([MAX_SIDE] * 9 + [1], np.int32)
_CODEC, _ERRORS = "utf-8", "surrogatepass"  # a name from a broken archive may hold half of a surrogate pair
_ITS_ID = "\0"
"""What stands for the sample_id at the end of a path, where no path has it."""
_DIGEST_BYTES: Final = 32
_NO_DIGEST = "0" * 2 * _DIGEST_BYTES
_CHUNK = 1024
"""Keys that are made together when all are needed, and rows that are put into columns together."""

Trust = Literal["verified", "unverified"]
"""`unverified`: imported, and not shown to equal what encoding gives. Everything else is `verified`."""
_TRUSTS: tuple[Trust, Trust] = ("verified", "unverified")
PartRole = Literal["control", "mask", "masked image"]
"""What a companion of an image is: an image that the model is given with the text, the weights of the loss, or the
image without what the mask covers."""
ROLES = ("image", *(f"control {number}" for number in range(1, MAX_CONTROLS + 1)), "mask", "masked image")
"""What `image/role` has the numbers of."""

NO_GEOMETRY = Geometry(Size(0, 0), Size(0, 0), Crop(0, 0), Size(0, 0))
"""That of a text."""


@dataclass(frozen=True, slots=True)
class Ref:
    """One entry of a sample: of its image, of a text, or of a companion of the image.

    `role` is one of `ROLES`, or `caption`. `crop` is the number of the image's crop that it is, or goes with. `key` is
    empty for a text that was not encoded. `source` is the digest of the bytes that a companion was made of; for a
    masked image these are its mask's. The digest of the image itself is the row's.
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
        """What kind of companion it is, a `PartRole`: all control images are `control`."""
        return "control" if self.role.startswith("control") else self.role

    @classmethod
    def of_text(cls, text: str, key: str, trust: Trust = "verified") -> Ref:
        """The entry of a text of a sample."""
        return cls(key, trust=trust, role="caption", text=text)

    def to_json(self) -> dict[str, Any]:
        """The entry as JSON; a verified one has no `trust`."""
        facts: dict[str, Any] = (
            {"key": self.key} if self.trust == "verified" else {"key": self.key, "trust": self.trust}
        )
        if self.role == "caption":
            return {**facts, "text": self.text}
        return {**facts, "role": self.role, "crop": self.crop, **self.geometry.to_json()}


@dataclass(frozen=True, slots=True)
class Row:
    """One sample. A refused sample has a refusal, and keeps what was known before it was refused.

    `images` is the image and, if the dataset flips, its mirrored twin; then further crops of it, each in the same way.
    `source` is the digest of the image's bytes. `parts` are its control images in their order, then its mask, then the
    masked image; each has as many entries as the image, in the same order. So for two crops of a dataset that flips:

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
        """Its companions as they go with this crop of the image, mirrored or not."""
        return [ref for ref in self.parts if (ref.crop, ref.geometry.flip) == (crop, flip)]

    @property
    def is_verified(self) -> bool:
        """Whether none of its entries was imported and left unverified."""
        return all(ref.trust == "verified" for ref in self.refs())

    def to_json(self, variants: int = 1) -> dict[str, Any]:
        """The row as a JSON object. One without companions has no `parts`.

        Of so many variants of each caption, which the manifest has, it has the caption itself and their number.
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
        data, offsets = self._values.tobytes(), self._offsets.tolist()
        return (data[start:end].decode(_CODEC, _ERRORS) for start, end in pairwise(offsets))


class RowTable(Mapping[str, Row]):
    """The rows of a manifest by sample_id, in their order. A `Row` is made each time that one is requested.

    Rows also have numbers, from 0: who goes by these needs no id. Threads share a table, forks too; it can be pickled.
    `columns` are those of `COLUMNS`, not checked here: see `check`.
    """

    def __init__(self, columns: Mapping[str, np.ndarray]):
        self.columns = columns
        self.sample_ids, self.caption_texts = self._strings("sample_id"), self._strings("caption/text")
        self._paths, self._refusals = self._strings("path"), self._strings("refusal")

    def _strings(self, name: str) -> Strings:
        return Strings(self.columns[f"{name}/values"], self.columns[f"{name}/offsets"])

    @classmethod
    def of(cls, rows: Mapping[str, Row] | Iterable[Row]) -> RowTable:
        """These rows, of different samples, as a table: the same object if they are one.

        ValueError: see `RowTableBuilder`.
        """
        if isinstance(rows, RowTable):
            return rows
        builder = RowTableBuilder()
        for row in rows.values() if isinstance(rows, Mapping) else rows:
            builder.add(row)
        return builder.finish()

    def check(self) -> None:
        """ValueError for contents that no builder makes: for a table that comes from elsewhere."""
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
                raise ValueError(f"{name} has {columns[name][wrong][0]}, which is out of its bounds")
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
        """Whether the samples are the same; those of two tables in the same order."""
        if isinstance(other, RowTable):
            return all(np.array_equal(self.columns[name], other.columns[name]) for name in COLUMNS)
        return Mapping.__eq__(self, other)

    # By number

    @cached_property
    def _numbers(self) -> dict[str, int]:
        """sample_id -> number. Made when somebody asks by id, which a loader does not."""
        return {sample_id: number for number, sample_id in enumerate(self.sample_ids)}

    def number(self, sample_id: str) -> int:
        """The number of a sample's row; -1 for an unknown one."""
        return self._numbers.get(sample_id, -1)

    def row(self, number: int) -> Row:
        """One row: it takes some microseconds."""
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
        """The entry at this place of the images and companions, or of the captions (`name`)."""
        columns, key = self.columns, _hex(self.columns[f"{name}/keys"][at])
        trust = _TRUSTS[columns[f"{name}/unverified"].item(at)]
        if name == "caption":
            return Ref.of_text(self.caption_texts[at], key, trust)
        geometry, role = geometry_of(columns["image/geometry"][at]), ROLES[columns["image/role"].item(at)]
        return Ref(key, geometry, trust, role, _hex(columns["image/source"][at]), crop=columns["image/crop"].item(at))

    @cached_property
    def refusals(self) -> Mapping[int, Refusal]:
        """By its number, each row that is refused. ValueError for a text that is no refusal."""
        numbers = np.flatnonzero(np.diff(self.columns["refusal/offsets"])).tolist()
        return {number: msgspec.convert(json.loads(self._refusals[number]), Refusal) for number in numbers}

    def with_refusals(self, refusals: Mapping[int, Refusal]) -> RowTable:
        """A table of these rows in which those of these numbers are refused too."""
        both, builder = {**self.refusals, **refusals}, RowTableBuilder()
        for number in range(len(self)):
            builder.add_refusal(both.get(number))
        return RowTable({**self.columns, **builder.columns("refusal/offsets", "refusal/values")})

    # As columns

    def entry_keys(self, *, usable: bool = False) -> Iterator[str]:
        """The keys of all images and their companions, then of all captions. Equal ones repeat.

        `usable`: only those of rows that are not refused.
        """
        for name in ("image", "caption"):
            keys = self.columns[f"{name}/keys"]
            if usable:
                is_usable = np.diff(self.columns["refusal/offsets"]) == 0
                keys = keys[np.repeat(is_usable, np.diff(self.columns[f"{name}/offsets"]))]
            keys = keys[keys.any(1)]
            # Few at a time: of all of them the digits would take 100 bytes each.
            yield from chain.from_iterable(key_names(keys[at : at + _CHUNK]) for at in range(0, len(keys), _CHUNK))

    def ranges(self, name: str, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The places where the images or captions (`name`: image or caption) of these rows begin and end: int64 [n]."""
        offsets = self.columns[f"{name}/offsets"]
        return offsets[numbers], offsets[numbers + 1]

    def places(
        self, numbers: np.ndarray, flips: np.ndarray | bool = False, crops: np.ndarray | int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        """The places of these rows' images and companions: int64 [m], and how many each row has: int64 [n].

        Those of a row lie together, its image first. `flips`, bool [n], says of which rows they are the mirrored ones,
        and `crops` to which crops they belong.
        """
        starts, ends = self.ranges("image", numbers)
        counts = ends - starts
        rows = np.repeat(np.arange(len(numbers)), counts)
        places = np.arange(len(rows)) + np.repeat(starts - (counts.cumsum() - counts), counts)
        wanted = self.columns["image/geometry"][places, _FLIP] == np.broadcast_to(flips, len(numbers))[rows]
        wanted &= self.columns["image/crop"][places] == np.broadcast_to(crops, len(numbers))[rows]
        return places[wanted], np.bincount(rows[wanted], minlength=len(numbers))

    def shapes(self, numbers: np.ndarray) -> np.ndarray:
        """What samples in a batch share: role, height, width and number of frames of the image and each companion.

        Those of the first crop, unmirrored; others have the same. int32 [n, 4 * most], filled up with zeros.
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
        """How many crops each row has of its image, 1 also where there is no image: int64 [n]."""
        found, counts = np.ones(len(self), np.int64), np.diff(self.columns["image/offsets"])
        np.maximum.at(found, np.repeat(np.arange(len(self)), counts), self.columns["image/crop"] + 1)
        return found

    def usable(self) -> np.ndarray:
        """The numbers of the rows that are not refused, ascending: int64 [m]."""
        return np.flatnonzero(np.diff(self.columns["refusal/offsets"]) == 0)

    def usable_with(self, name: str, flags: np.ndarray) -> np.ndarray:
        """The numbers of the usable rows with an image or caption (`name`) whose flag is set, ascending.

        `flags` is bool [m], in the order of the column; companions count as images.
        """
        return np.intersect1d(self._rows_of(name, np.flatnonzero(flags)), self.usable())

    def unverified(self) -> np.ndarray:
        """The numbers of the usable rows with an entry that was imported and not verified, ascending."""
        flagged = [self.usable_with(name, self.columns[f"{name}/unverified"]) for name in ("image", "caption")]
        return np.union1d(*flagged)

    def without_caption(self) -> np.ndarray:
        """The numbers of the usable rows with no text but the empty one, ascending."""
        return np.setdiff1d(self.usable(), self.usable_with("caption", np.diff(self.columns["caption/text/offsets"])))

    def mostly_cut(self) -> np.ndarray:
        """The numbers of the usable rows whose first crop keeps less than half of the image, ascending."""
        geometry, is_first = self.columns["image/geometry"].astype(np.int64), self.columns["image/crop"] == 0
        is_cut = 2 * geometry[:, _TARGET].prod(1) < geometry[:, _RESIZED].prod(1)
        return self.usable_with("image", is_cut & is_first & (self.columns["image/role"] == 0))

    def rows_with(self, keys: Iterable[str]) -> list[int]:
        """The numbers of the rows with one of these keys, ascending."""
        wanted = _sortable(np.frombuffer(bytes.fromhex("".join(keys)), np.uint8).reshape(-1, _DIGEST_BYTES))
        places = {name: np.isin(_sortable(self.columns[f"{name}/keys"]), wanted) for name in ("image", "caption")}
        rows = [self._rows_of(name, np.flatnonzero(found)) for name, found in places.items()]
        return [*map(int, np.union1d(*rows))]

    def _rows_of(self, name: str, places: np.ndarray) -> np.ndarray:
        """The numbers of the rows that have these images or captions, ascending: int64 [m]."""
        return np.unique(self.columns[f"{name}/offsets"].searchsorted(places, side="right") - 1)


class RowTableBuilder:
    """Collects rows, whole or with their entries one by one, and makes a table of them. Then it is used up.

    ValueError, not always at once, for a key or a source that is no digest.
    """

    def __init__(self) -> None:
        self._columns = {name: array(code, [0] * name.endswith("/offsets")) for name, (code, *_) in COLUMNS.items()}
        names = {name.removesuffix("/offsets") for name in COLUMNS if not name.endswith("/values")}
        self._waiting: dict[str, list[Any]] = {name: [] for name in names}
        """Rows that are in no column yet: texts, digests, numbers of entries. Many at once take a third of the time."""

    def add(self, row: Row) -> None:
        """Add the row of another sample."""
        self.start(row.sample_id, row.path, row.source, row.refusal)
        for ref in row.refs():
            self.put(ref.role, ref.key, geometry_bytes(ref.geometry), ref.source, ref.text, ref.trust, ref.crop)

    def start(self, sample_id: str, path: str, source: str | None, refusal: Refusal | None = None) -> None:
        """Begin a row, whose entries follow by `put`."""
        self.add_refusal(refusal)
        waiting, folder = self._waiting, path.removesuffix(sample_id)
        waiting["sample_id"].append(sample_id)
        waiting["path"].append(path if folder == path else folder + _ITS_ID)
        waiting["source"].append(_NO_DIGEST if source is None else source)
        waiting["image"].append(0)
        waiting["caption"].append(0)

    def put(
        self,
        role: str,
        key: str,
        geometry: bytes,
        source: str = "",
        text: str = "",
        trust: Trust = "verified",
        crop: int = 0,
    ) -> None:
        """Add an entry to the last row: see `Ref`. `geometry` is that of `geometry_bytes`."""
        waiting = self._waiting
        if role == "caption":
            waiting["caption"][-1] += 1
            waiting["caption/keys"].append(key or _NO_DIGEST)
            waiting["caption/text"].append(text)
            waiting["caption/unverified"].append(trust != "verified")
            return
        waiting["image"][-1] += 1
        waiting["image/keys"].append(key)
        waiting["image/geometry"].append(geometry)
        waiting["image/source"].append(source or _NO_DIGEST)
        waiting["image/role"].append(ROLES.index(role))
        waiting["image/crop"].append(crop)
        waiting["image/unverified"].append(trust != "verified")

    def add_refusal(self, refusal: Refusal | None) -> None:
        """Add the refusal of the next row, if it has one, and nothing else."""
        if len(self._waiting["refusal"]) >= _CHUNK:
            self._put_waiting()
        self._waiting["refusal"].append("" if refusal is None else json.dumps(refusal.to_json()))

    def _put_waiting(self) -> None:
        for name, values in self._waiting.items():
            if f"{name}/values" in COLUMNS:
                encoded = [text.encode(_CODEC, _ERRORS) for text in values]
                self._columns[f"{name}/values"].frombytes(b"".join(encoded))
                self._add_lengths(f"{name}/offsets", map(len, encoded))
            elif name not in COLUMNS:
                self._add_lengths(f"{name}/offsets", values)
            elif COLUMNS[name][1] == _DIGEST_BYTES:
                self._columns[name].frombytes(_bytes_of(name, values))
            elif name == "image/geometry":
                self._columns[name].frombytes(b"".join(values))
            else:
                self._columns[name].extend(values)
            values.clear()

    def _add_lengths(self, name: str, lengths: Iterable[int]) -> None:
        offsets = self._columns[name]
        offsets.extend(islice(accumulate(lengths, initial=offsets[-1]), 1, None))

    def columns(self, *names: str) -> dict[str, np.ndarray]:
        """These columns."""
        self._put_waiting()
        made = {name: np.frombuffer(self._columns[name], COLUMNS[name][0]) for name in names}
        return {name: made[name].reshape(-1, COLUMNS[name][1]) if COLUMNS[name][1] else made[name] for name in names}

    def finish(self) -> RowTable:
        """The table."""
        return RowTable(self.columns(*COLUMNS))


def _check_structure(columns: Mapping[str, np.ndarray]) -> None:
    """ValueError unless these are the columns of a table, with lengths and offsets that fit to each other."""
    if columns.keys() != COLUMNS.keys():
        raise ValueError(f"its columns differ from those that are needed: {sorted(columns.keys() ^ COLUMNS.keys())}")
    for name, (code, width, like) in COLUMNS.items():
        column, is_offsets = columns[name], name.endswith("/offsets")
        num_rows = len(column) if like is None else len(columns[like]) + is_offsets
        shape = (num_rows, width) if width else (num_rows,)
        if column.dtype != np.dtype(code) or column.shape != shape:
            raise ValueError(f"{name} is {column.dtype} {column.shape}, where {np.dtype(code)} {shape} is needed")
        if is_offsets:
            values = name.replace("offsets", "values")
            num_values = len(columns[values if values in COLUMNS else name.replace("offsets", "keys")])
            if column[0] != 0 or column[-1] != num_values or (column[1:] < column[:-1]).any():
                raise ValueError(f"{name} does not rise from 0 to {num_values:,}")


def _numbers_of(geometry: Geometry) -> tuple[int, ...]:
    """The row of a geometry in its column."""
    sizes = (geometry.original_size, geometry.resized_size, geometry.crop_top_left, geometry.target_size)
    return (*chain.from_iterable(sizes), geometry.num_frames or 0, geometry.flip)


def geometry_bytes(geometry: Geometry) -> bytes:
    """The row of a geometry in its column, as `RowTableBuilder.put` takes it."""
    return array("i", _numbers_of(geometry)).tobytes()


def geometry_of(numbers: np.ndarray) -> Geometry:
    """The geometry of a row of a column of geometries, int32 [10]."""
    height, width, resized_height, resized_width, top, left, *target, num_frames, flip = numbers.tolist()
    sizes = Size(height, width), Size(resized_height, resized_width)
    return Geometry(*sizes, Crop(top, left), Size(*target), bool(flip), num_frames or None)


def check_geometry(geometry: Geometry) -> None:
    """ValueError for one that no row of a manifest may have: sizes and a crop have their bounds."""
    numbers = np.array(_numbers_of(geometry))
    if len(wrong := numbers[(numbers < _LEAST) | (numbers > _MOST)]):
        raise ValueError(f"a geometry has {wrong[0]}, where a side has 1 to {MAX_SIDE} pixels, and a crop 0 or more")


def _sortable(digests: np.ndarray) -> np.ndarray:
    """The digests of uint8 [n, 32] as one value each, which numpy can sort: it pads shorter ones with zeros."""
    found: np.ndarray = np.ascontiguousarray(digests).view(f"S{_DIGEST_BYTES}").reshape(-1)
    return found


def _hex(digest: np.ndarray) -> str:
    """A digest of 32 bytes as hexadecimal digits; empty for zeros."""
    return digest.tobytes().hex() if digest.any() else ""


def _bytes_of(what: str, digests: Sequence[str]) -> bytes:
    """The bytes of digests in hexadecimal digits. ValueError for what is none."""
    for digest in digests:
        if not is_key(digest):
            raise ValueError(f"{what} is {digest!r:.80}, where 64 hexadecimal digits are needed")
    return bytes.fromhex("".join(digests))
