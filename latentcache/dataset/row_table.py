"""The samples of a manifest: one as a `Row`, all as columns, which lie in its file as they are and can be mapped.

n samples have m images, captions or parts; those of sample i are offsets[i] to offsets[i + 1]. Texts are UTF-8.

    sample_id/offsets [n + 1]  sample_id/values        source [n, 32]: of the image's bytes; zeros where unknown
    folder/of [n]  folder/offsets  folder/values       the path: a folder, which samples share, and the sample_id,
    folder/is_whole [folders]                          or the folder alone if it is the whole path
    image/offsets [n + 1]    image/keys [m, 32]    image/unverified [m]    image/geometry [m, 10]
    caption/offsets [n + 1]  caption/keys [m, 32]  caption/unverified [m]  caption/text/offsets  caption/text/values
    part/offsets [n + 1]     part/keys [m, 32]     part/unverified [m]     part/geometry [m, 10]
    part/source [m, 32]      part/role [m]
    refusal/rows [k]         refusal/text/offsets  refusal/text/values     k refused samples, ascending; each as JSON

A caption that was not encoded has a key of zeros, which is no key of an entry.

A geometry is original, resized, crop and target (height or top first), the number of frames (0: an image) and flip.
A part is a companion of the image: a control image, a mask or the masked image.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence, ValuesView
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from operator import attrgetter
from typing import Any, Final, Literal, get_args

import msgspec
import numpy as np
from typing_extensions import override

from latentcache.identity import is_key
from latentcache.types import MAX_SIDE, Crop, Geometry, Refusal, Size

KEY_BYTES: Final = 32
COLUMNS: Mapping[str, tuple[str, int, str | None]] = {
    "source": ("B", 32, "source"), "sample_id/offsets": ("q", 0, "source"), "sample_id/values": ("B", 0, None),
    "folder/of": ("I", 0, "source"), "folder/offsets": ("q", 0, "folder/is_whole"), "folder/values": ("B", 0, None),
    "folder/is_whole": ("B", 0, "folder/is_whole"),
    "image/offsets": ("I", 0, "source"), "image/keys": ("B", 32, "image/keys"),
    "image/unverified": ("B", 0, "image/keys"), "image/geometry": ("i", 10, "image/keys"),
    "caption/offsets": ("I", 0, "source"), "caption/keys": ("B", 32, "caption/keys"),
    "caption/unverified": ("B", 0, "caption/keys"), "caption/text/offsets": ("q", 0, "caption/keys"),
    "caption/text/values": ("B", 0, None),
    "part/offsets": ("I", 0, "source"), "part/keys": ("B", 32, "part/keys"), "part/unverified": ("B", 0, "part/keys"),
    "part/geometry": ("i", 10, "part/keys"), "part/source": ("B", 32, "part/keys"), "part/role": ("B", 0, "part/keys"),
    "refusal/rows": ("I", 0, "refusal/rows"), "refusal/text/offsets": ("q", 0, "refusal/rows"),
    "refusal/text/values": ("B", 0, None),
}  # fmt: skip
"""Each column's type, as `array` and numpy name it, the numbers in a row of it (0: one, without a second dimension),
and the column that has as many rows, but for offsets, which have one more."""
_ENTRIES = {"image": "images", "caption": "captions", "part": "parts"}
"""Column prefix -> attribute of a `Row`."""
_SIZES = {"resized_size": slice(2, 4), "target_size": slice(6, 8), "extent": slice(6, 9)}
_FLIP = 9
"""Where these lie in a geometry."""
_LEAST = np.array([1, 1, 1, 1, 0, 0, 1, 1, 0, 0], np.int32)
_MOST = np.array([MAX_SIDE] * 9 + [1], np.int32)
_CODEC, _ERRORS = "utf-8", "surrogatepass"  # a name from a broken archive may hold half of a surrogate pair
_NO_DIGEST = "0" * 2 * KEY_BYTES
_CHUNK = 1024
"""Rows or keys that are made together when all are needed."""

Trust = Literal["verified", "unverified"]
"""`unverified`: imported, and not shown to equal what encoding gives. Everything else is `verified`."""
PartRole = Literal["control", "mask", "masked image"]
"""What a companion of an image is: an image that the model is given with the text, the weights of the loss, or the
image without what the mask covers."""
RefRole = Literal["image", "caption"] | PartRole
_TRUSTS: tuple[Trust, Trust] = ("verified", "unverified")
ROLES: tuple[PartRole, ...] = get_args(PartRole)


NO_GEOMETRY = Geometry(Size(0, 0), Size(0, 0), Crop(0, 0), Size(0, 0))
"""That of a text."""


@dataclass(frozen=True, slots=True)
class Ref:
    """One entry of a sample: of its image, of a text, or of a companion of the image.

    `key` is empty for a text that was not encoded. `source` is the digest of the bytes that a companion was made of;
    for a masked image these are its mask's. The digest of the image itself is the row's.
    """

    key: str
    geometry: Geometry = NO_GEOMETRY
    trust: Trust = "verified"
    role: RefRole = "image"
    source: str = ""
    text: str = ""

    @classmethod
    def of_text(cls, text: str, key: str, trust: Trust = "verified") -> Ref:
        """The entry of a text of a sample."""
        return cls(key, trust=trust, role="caption", text=text)


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

    @property
    def num_crops(self) -> int:
        """The number of crops of its image."""
        return max(1, sum(not ref.geometry.flip for ref in self.images))

    def images_of(self, crop: int) -> tuple[Ref, ...]:
        """The image in this crop and, if the dataset flips, its mirrored twin."""
        num = len(self.images) // self.num_crops
        return self.images[crop * num : (crop + 1) * num]

    def named_parts(self, *, flip: bool | None = None, crop: int | None = None) -> Iterator[tuple[str, Ref]]:
        """Each companion with its name: `control 1`, `control 2`, `mask`, `masked image`.

        With `flip` only those mirrored so, with `crop` only those that go with this crop of the image.
        """
        numbers: dict[tuple[str, bool], int] = {}
        for ref in self.parts:
            which = ref.role, ref.geometry.flip
            number, of_crop = divmod(numbers.get(which, 0), self.num_crops)
            numbers[which] = numbers.get(which, 0) + 1
            if flip in (None, ref.geometry.flip) and crop in (None, of_crop):
                yield f"control {number + 1}" if ref.role == "control" else ref.role, ref

    @property
    def is_verified(self) -> bool:
        """Whether none of its entries was imported and left unverified."""
        return all(ref.trust == "verified" for ref in self.refs())

    def to_json(self, variants: int = 1) -> dict[str, Any]:
        """The row as a JSON object. One without companions has no `parts`, and a verified entry no `trust`.

        Of so many variants of each caption, which the manifest has, it has the caption itself and their number.
        """
        line: dict[str, Any] = {
            "sample_id": self.sample_id,
            "path": self.path,
            "source": self.source,
            "images": [_with_trust(ref, key=ref.key, **ref.geometry.to_json()) for ref in self.images],
            "captions": [_with_trust(ref, key=ref.key, text=ref.text) for ref in self.captions[::variants]],
            "refusal": None if self.refusal is None else self.refusal.to_json(),
        }
        if variants > 1:
            line["variants"] = variants
        if self.parts:
            line["parts"] = [
                _with_trust(ref, role=ref.role, key=ref.key, source=ref.source, **ref.geometry.to_json())
                for ref in self.parts
            ]
        return line


def _with_trust(ref: Ref, **facts: Any) -> dict[str, Any]:
    return facts if ref.trust == "verified" else {**facts, "trust": ref.trust}


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
        data, offsets = self._values.tobytes(), self._offsets.tolist()
        return (data[start:end].decode(_CODEC, _ERRORS) for start, end in pairwise(offsets))

    def take(self, numbers: np.ndarray) -> list[str]:
        """The texts of these numbers."""
        starts, ends = self._offsets[numbers].tolist(), self._offsets[numbers + 1].tolist()
        data = self._values.data
        return [str(data[start:end], _CODEC, _ERRORS) for start, end in zip(starts, ends, strict=True)]


class RowTable(Mapping[str, Row]):
    """The rows of a manifest by sample_id, in their order. A `Row` is made each time that one is requested.

    Rows also have numbers, from 0: who goes by these needs no id. Threads share a table, forks too; it can be pickled.
    `columns` are those of `COLUMNS`, not checked here: see `check`.
    """

    def __init__(self, columns: Mapping[str, np.ndarray]):
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
        """A table of these rows, of different samples. ValueError: see `RowTableBuilder`."""
        builder = RowTableBuilder()
        builder.add(rows)
        return builder.finish()

    def check(self) -> None:
        """ValueError for contents that no builder makes: for a table that comes from elsewhere."""
        columns = self.columns
        _check_structure(columns)
        for name in ("sample_id", "folder", "caption/text", "refusal/text"):
            for _ in self._strings(name):
                pass  # UnicodeDecodeError for what is not UTF-8
        for name in ("image/geometry", "part/geometry"):
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

    def __contains__(self, sample_id: object) -> bool:
        return sample_id in self._numbers

    @override
    def __eq__(self, other: object) -> bool:
        """Whether the samples are the same; those of two tables in the same order."""
        if isinstance(other, RowTable):
            return all(np.array_equal(self.columns[name], other.columns[name]) for name in COLUMNS)
        return Mapping.__eq__(self, other)

    @override
    def values(self) -> ValuesView[Row]:
        return _Values(self)

    # By number

    @cached_property
    def _numbers(self) -> dict[str, int]:
        """sample_id -> number. Made when somebody asks by id, which a loader does not."""
        return {sample_id: number for number, sample_id in enumerate(self.sample_ids)}

    def number(self, sample_id: str) -> int | None:
        """The number of a sample's row; None for an unknown one."""
        return self._numbers.get(sample_id)

    def numbers(self, sample_ids: Sequence[str]) -> np.ndarray:
        """The numbers of these samples' rows: int64 [n], and -1 for one that is unknown."""
        return np.array([self._numbers.get(sample_id, -1) for sample_id in sample_ids], np.int64)

    def row(self, number: int) -> Row:
        """One row: it takes some microseconds."""
        columns, folder = self.columns, self.columns["folder/of"].item(number)
        sample_id, path = self.sample_ids[number], self._folders[folder]
        source = columns["source"][number].tobytes()
        return Row(
            sample_id,
            path if columns["folder/is_whole"].item(folder) else path + sample_id,
            source.hex() if any(source) else None,
            self._refs("image", number),
            self._refs("caption", number),
            self.refusals.get(number),
            self._refs("part", number),
        )

    def _refs(self, name: str, number: int) -> tuple[Ref, ...]:
        """The entries of a row that are in the columns of this prefix."""
        columns, offsets, found = self.columns, self.columns[f"{name}/offsets"], list[Ref]()
        for at in range(offsets.item(number), offsets.item(number + 1)):
            digest, trust = columns[f"{name}/keys"][at].tobytes(), _TRUSTS[columns[f"{name}/unverified"].item(at)]
            key = digest.hex() if any(digest) else ""
            if name == "caption":
                found.append(Ref.of_text(self.caption_texts[at], key, trust))
                continue
            ref = Ref(key, geometry_of(columns[f"{name}/geometry"][at]), trust)
            if name == "part":
                role, source = ROLES[columns["part/role"].item(at)], columns["part/source"][at].tobytes().hex()
                ref = replace(ref, role=role, source=source)
            found.append(ref)
        return tuple(found)

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
        """The keys of all images, then of all captions, then of all companions. Equal ones repeat.

        `usable`: only those of rows that are not refused.
        """
        for name in _ENTRIES:
            keys = self.columns[f"{name}/keys"]
            if usable and self.refusals:
                is_usable = np.ones(len(self), np.bool_)
                is_usable[self.columns["refusal/rows"]] = False
                keys = keys[np.repeat(is_usable, np.diff(self.columns[f"{name}/offsets"]))]
            if name == "caption":
                keys = keys[has_key(keys)]
            yield from _hex_in_turn(keys)

    def first_sizes(self, name: str) -> np.ndarray:
        """For each row a size of its first image, resized_size or target_size: (height, width).

        int32 [n, 2], zeros without images. `extent`: (height, width, num_frames) of the target, int32 [n, 3], with 0
        frames of an image.
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

    def image_places(self, numbers: np.ndarray, flips: np.ndarray, crops: np.ndarray | int = 0) -> np.ndarray:
        """The places of these rows' images in the columns of images: int64 [n], and -1 where there is none.

        `flips`, bool [n], says which of them are the mirrored ones, and `crops`, integers [n], which crops they are.
        """
        starts, ends = self.ranges("image", numbers)
        places = starts + crops * self._num_twins(starts, ends) + flips * (ends - starts > 1)
        found, there = np.full(len(numbers), -1, np.int64), np.flatnonzero(places < ends)
        there = there[self.columns["image/geometry"][places[there], _FLIP] == flips[there]]
        found[there] = places[there]
        return found

    def num_crops(self, numbers: np.ndarray) -> np.ndarray:
        """How many crops these rows have of their images, 1 also where there is no image: int64 [n]."""
        starts, ends = self.ranges("image", numbers)
        found: np.ndarray = np.maximum((ends - starts) // self._num_twins(starts, ends), 1)
        return found

    def _num_twins(self, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """How many entries a crop has in rows whose images lie so: 2 with the mirrored one, else 1. int64 [n]."""
        twins, several = np.ones(len(starts), np.int64), np.flatnonzero(ends - starts > 1)
        twins[several] += self.columns["image/geometry"][starts[several] + 1, _FLIP]
        return twins

    def part_places(
        self, numbers: np.ndarray, flips: np.ndarray, crops: np.ndarray | int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        """The places of these rows' companions, those of a row together: int64 [m], and how many each row has: [n].

        `flips`, bool [n], says of which rows they are the mirrored ones, and `crops` to which crops they belong.
        """
        starts, ends = self.ranges("part", numbers)
        counts = ends - starts
        rows = np.repeat(np.arange(len(numbers)), counts)
        places = np.arange(len(rows)) + np.repeat(starts - (counts.cumsum() - counts), counts)
        wanted = self.columns["part/geometry"][places, _FLIP] == flips[rows]
        places, rows = places[wanted], rows[wanted]
        counts, num_crops = np.bincount(rows, minlength=len(numbers)), self.num_crops(numbers)
        if len(places) and (num_crops > 1).any():
            within = np.arange(len(rows)) - np.repeat(counts.cumsum() - counts, counts)
            wanted = within % num_crops[rows] == np.broadcast_to(crops, len(numbers))[rows]
            places, counts = places[wanted], np.bincount(rows[wanted], minlength=len(numbers))
        return places, counts

    def part_shapes(self, places: np.ndarray) -> np.ndarray:
        """Role (a number of ROLES), height and width of the companions at these places: int32 [m, 3]."""
        sizes = self.columns["part/geometry"][places, _SIZES["target_size"]]
        return np.column_stack([self.columns["part/role"][places].astype(np.int32), sizes])

    def part_sizes(self, numbers: np.ndarray) -> np.ndarray:
        """Heights and widths of the companions of these rows, in their order, then zeros: int32 [n, 2 * most].

        Those of the first crop, and of its mirrored twin: they are the same for all crops.
        """
        (starts, ends), num_crops = self.ranges("part", numbers), self.num_crops(numbers)
        twins = self._num_twins(*self.ranges("image", numbers))
        found = np.zeros((len(numbers), int(((ends - starts) // num_crops).max(initial=0)), 2), np.int32)
        for place in range(found.shape[1]):
            places = starts + place // twins * twins * num_crops + place % twins
            here = np.flatnonzero(places < ends)
            found[here, place] = self.columns["part/geometry"][places[here], _SIZES["target_size"]]
        return found.reshape(len(numbers), 2 * found.shape[1])

    def part_kinds(self, numbers: np.ndarray) -> np.ndarray:
        """A number that says the roles of these rows' companions, in their order, mirrored ones aside: int64 [n]."""
        places, counts = self.part_places(numbers, np.zeros(len(numbers), np.bool_))
        within = np.arange(len(places)) - np.repeat(counts.cumsum() - counts, counts)
        kinds, digits = np.zeros(len(numbers), np.int64), self.columns["part/role"][places].astype(np.int64) + 1
        np.add.at(kinds, np.repeat(np.arange(len(numbers)), counts), digits * (len(ROLES) + 1) ** within)
        return kinds

    def usable(self) -> np.ndarray:
        """The numbers of the rows that are not refused, ascending: uint32 [m]."""
        refused = self.columns["refusal/rows"]
        return np.setdiff1d(np.arange(len(self), dtype=np.uint32), refused, assume_unique=True)

    def without_caption(self) -> np.ndarray:
        """The numbers of the usable rows with no text but the empty one, ascending."""
        ends = self.columns["caption/text/offsets"][self.columns["caption/offsets"]]
        return np.intersect1d(np.flatnonzero(ends[:-1] == ends[1:]), self.usable())

    def mostly_cut(self) -> np.ndarray:
        """The numbers of the usable rows whose first crop keeps less than half of the image, ascending."""
        resized, target = (self.first_sizes(name).astype(np.int64).prod(1) for name in ("resized_size", "target_size"))
        return np.intersect1d(np.flatnonzero(2 * target < resized), self.usable())

    def rows_with_captions(self, flags: np.ndarray) -> np.ndarray:
        """The numbers of the usable rows with a caption whose flag is set, ascending. `flags`: bool [captions]."""
        return np.intersect1d(self.rows_of({"caption": np.flatnonzero(flags)}), self.usable())

    def unverified(self) -> np.ndarray:
        """The numbers of the rows with an entry that was imported and not verified, ascending: int64 [m]."""
        return self.rows_of({name: np.flatnonzero(self.columns[f"{name}/unverified"]) for name in _ENTRIES})

    def rows_with(self, keys: Iterable[str]) -> list[int]:
        """The numbers of the rows with one of these keys, ascending."""
        if not (wanted := set(keys)):
            return []
        found = {}
        for name in _ENTRIES:
            places = (at for at, key in enumerate(_hex_in_turn(self.columns[f"{name}/keys"])) if key in wanted)
            found[name] = np.fromiter(places, np.int64)
        return [*map(int, self.rows_of(found))]

    def rows_of(self, places: Mapping[str, np.ndarray]) -> np.ndarray:
        """The numbers of the rows that have these images, captions and parts, ascending: int64 [m].

        `places`: by `image`, `caption` or `part`, the places of entries in the columns of their kind.
        """
        rows = [self.columns[f"{name}/offsets"].searchsorted(at, side="right") - 1 for name, at in places.items()]
        return np.unique(np.concatenate(rows))

    def row_of_source(self, source: str) -> Row | None:
        """The last row whose image has this digest, or None."""
        order, heads = self._by_source
        wanted = np.frombuffer(bytes.fromhex(source), np.uint8)
        at = int(heads.searchsorted(_heads_of(wanted[None])[0], side="right")) - 1
        if at < 0 or not wanted.any() or not np.array_equal(self.columns["source"][order[at]], wanted):
            return None
        return self.row(int(order[at]))

    @cached_property
    def _by_source(self) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of the rows, sorted by the first eight bytes of their sources, and these."""
        heads = _heads_of(self.columns["source"])
        order = np.argsort(heads, kind="stable").astype(np.uint32)
        return order, heads[order]


class _Values(ValuesView[Row]):
    _mapping: RowTable

    def __iter__(self) -> Iterator[Row]:
        return map(self._mapping.row, range(len(self._mapping)))


class RowTableBuilder:
    """Collects rows, whole or with their entries one by one, and makes a table of them. Then it is used up.

    ValueError for a key or a source that is no digest.
    """

    def __init__(self) -> None:
        self._columns = {name: array(code, [0] * name.endswith("/offsets")) for name, (code, *_) in COLUMNS.items()}
        self._of_entries = {
            name: [self._columns[f"{name}/{column}"] for column in ("offsets", "unverified", "keys")]
            for name in _ENTRIES
        }
        self._last_folder: tuple[str, bool] | None = None

    def add(self, rows: Iterable[Row]) -> None:
        """Add rows of different samples."""
        for row in rows:
            self.start(row.sample_id, row.path, row.source, row.refusal)
            for ref in row.refs():
                self.put(ref.role, ref.key, geometry_bytes(ref.geometry), ref.source, ref.text, ref.trust)

    def start(self, sample_id: str, path: str, source: str | None, refusal: Refusal | None = None) -> None:
        """Begin a row, whose entries follow by `put`."""
        columns = self._columns
        if refusal is not None:
            self.add_refusals([(len(columns["folder/of"]), refusal)])
        columns["source"].frombytes(_bytes_of("source", _NO_DIGEST if source is None else source))
        self._add_text("sample_id", sample_id)
        self._add_path(path, sample_id)
        for offsets, *_ in self._of_entries.values():
            offsets.append(offsets[-1])

    def put(
        self, role: RefRole, key: str, geometry: bytes, source: str = "", text: str = "", trust: Trust = "verified"
    ) -> None:
        """Add an entry to the last row: see `Ref`. `geometry` is that of `geometry_bytes`."""
        columns, name = self._columns, role if role in ("image", "caption") else "part"
        offsets, unverified, keys = self._of_entries[name]
        offsets[-1] += 1
        unverified.append(trust != "verified")
        keys.frombytes(_bytes_of("key", key or _NO_DIGEST if role == "caption" else key))
        if role == "caption":
            self._add_text("caption/text", text)
            return
        columns[f"{name}/geometry"].frombytes(geometry)
        if role != "image":
            columns["part/source"].frombytes(_bytes_of("source", source))
            columns["part/role"].append(ROLES.index(role))

    def add_refusals(self, refusals: Iterable[tuple[int, Refusal]]) -> None:
        """Add refusals of rows, by their numbers, which ascend."""
        for number, refusal in refusals:
            self._columns["refusal/rows"].append(number)
            self._add_text("refusal/text", json.dumps(refusal.to_json()))

    def _add_path(self, path: str, sample_id: str) -> None:
        """Most paths are one folder and the sample_id: the folder is kept once for rows that follow each other."""
        is_whole = not path.endswith(sample_id)
        folder = path if is_whole else path[: len(path) - len(sample_id)]
        if (folder, is_whole) != self._last_folder:
            self._last_folder = folder, is_whole
            self._add_text("folder", folder)
            self._columns["folder/is_whole"].append(is_whole)
        self._columns["folder/of"].append(len(self._columns["folder/is_whole"]) - 1)

    def _add_text(self, name: str, text: str) -> None:
        values = self._columns[f"{name}/values"]
        values.frombytes(text.encode(_CODEC, _ERRORS))
        self._columns[f"{name}/offsets"].append(len(values))

    def finish(self) -> RowTable:
        """The table."""
        made = {name: np.frombuffer(self._columns[name], code) for name, (code, *_) in COLUMNS.items()}
        return RowTable({name: made[name].reshape(-1, width) if width else made[name]
                         for name, (_, width, _) in COLUMNS.items()})  # fmt: skip


def _check_structure(columns: Mapping[str, np.ndarray]) -> None:
    """ValueError unless these are the columns of a table: offsets and lengths that fit to each other."""
    if columns.keys() != COLUMNS.keys():
        raise ValueError(f"its columns differ from those that are needed: {sorted(columns.keys() ^ COLUMNS.keys())}")
    for name, (code, width, like) in COLUMNS.items():
        column, shape = columns[name], (width,) if width else ()
        if column.dtype != np.dtype(code) or column.ndim != 1 + len(shape) or column.shape[1:] != shape:
            raise ValueError(f"{name} is {column.dtype} {list(column.shape)}, not {np.dtype(code)} [n, {shape}]")
        is_offsets = name.endswith("/offsets")
        if like is not None and len(column) != (expected := len(columns[like]) + is_offsets):
            raise ValueError(f"{name} has {len(column):,} rows, where {like} means {expected:,}")
        if is_offsets:
            prefix = name.removesuffix("offsets")
            counted = f"{prefix}{'values' if f'{prefix}values' in COLUMNS else 'keys'}"
            if column[0] != 0 or column[-1] != len(columns[counted]) or (column[1:] < column[:-1]).any():
                raise ValueError(f"{name} does not rise from 0 to the {len(columns[counted]):,} of {counted}")


_GEOMETRY = attrgetter("original_size", "resized_size", "crop_top_left", "target_size", "num_frames", "flip")


def _numbers_of(geometry: Geometry) -> tuple[int, ...]:
    """The row of a geometry in its column."""
    original, resized, crop, target, num_frames, flip = _GEOMETRY(geometry)
    return (*original, *resized, *crop, *target, num_frames or 0, flip)


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
    numbers = _numbers_of(geometry)
    wrong = [number for number, least, most in zip(numbers, _LEAST, _MOST, strict=True) if not least <= number <= most]
    if wrong:
        raise ValueError(f"a geometry has {wrong[0]}, where a side has 1 to {MAX_SIDE} pixels, and a crop 0 or more")


def _heads_of(digests: np.ndarray) -> np.ndarray:
    """The first eight bytes of each digest, to look it up: uint64 [n]."""
    return digests[:, :8].copy().view(np.uint64).reshape(-1)


def has_key(keys: np.ndarray) -> np.ndarray:
    """Which captions of a column of keys were encoded: bool [n]."""
    found: np.ndarray = keys.view("<u8").max(axis=1) > 0
    return found


def hex_of(digests: np.ndarray) -> list[str]:
    """The digests of uint8 [n, 32] as hexadecimal digits."""
    digits = digests.tobytes().hex()
    return [digits[at : at + 2 * KEY_BYTES] for at in range(0, len(digits), 2 * KEY_BYTES)]


def _hex_in_turn(digests: np.ndarray) -> Iterator[str]:
    """As `hex_of`, for very many: some are made at a time."""
    return chain.from_iterable(hex_of(digests[first : first + _CHUNK]) for first in range(0, len(digests), _CHUNK))


def _bytes_of(what: str, digest: str) -> bytes:
    """The bytes of a digest in hexadecimal digits. ValueError for what is none."""
    if not is_key(digest):
        raise ValueError(f"{what} is {digest!r:.80}, where 64 hexadecimal digits are needed")
    return bytes.fromhex(digest)
