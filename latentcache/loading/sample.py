"""Samples of a batch: what a manifest says of them, a memory of those that were requested, and how they are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, islice
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from latentcache.dataset.manifest_row import Row
from latentcache.errors import EntryDamagedError, EntryMissingError, SampleError, StoreError
from latentcache.families.base import MASK, Family
from latentcache.loading.batch import CONTROL, BufferPool
from latentcache.loading.sample_facts import SampleFacts
from latentcache.store.base import MANY_KEYS, Description, EntryArrays, Store
from latentcache.store.stacking import Padded, common_fields, concatenated, stack_columns, without_lengths
from latentcache.types import Batch, Extent, Geometry, Padding, Size

PRECACHE: Final = "run `latentcache precache CONFIG` again"
"""The remedy of most errors about a sample."""
SIZES: Final = ("original_size", "resized_size", "crop_top_left", "target_size")
MAX_REFS = 1 << 17
"""Samples that a `SampleMemory` keeps, at some 1,000 bytes each. Beyond it all are forgotten, and found again."""
UNREAD: Final = (-1, None, None, None, None)
"""`SampleRef.rows` of a sample that was not read. No store has this generation."""
FIELDS: Final = 4
"""Where the `Fields` are in `SampleRef.rows`."""

_FLOAT32 = np.dtype(np.float32)
_MAX_LAYOUTS = 1 << 16  # photographs have few sizes; a set of crops may have many
_MAX_DESCRIPTIONS = 1024
# No Python function runs for a sample: a small batch is copied in the time of some calls.
_ROWS, _KEYS, _joined = attrgetter("rows"), attrgetter("keys"), chain.from_iterable

Pair = tuple[int, int]


class Layout(NamedTuple):
    """What a batch says of a geometry: the pairs of SIZES, the same as int64 [4, 2], and the time ids.

    Those are float32: the family's `size_conditions`, which most do not have. `extent` is what all of a batch share:
    the target size, and of a clip its number of frames. Equal layouts are shared.
    """

    original_size: Pair
    resized_size: Pair
    crop_top_left: Pair
    target_size: Pair
    sizes: bytes
    time_ids: bytes
    extent: tuple[int, ...]


_NO_LAYOUT = Layout((0, 0), (0, 0), (0, 0), (0, 0), b"", b"", ())  # of what is no image


@lru_cache(_MAX_LAYOUTS)
def layout_of(geometry: Geometry, family: Family) -> Layout:
    """The layout of a geometry. Time ids are float32: bfloat16 cannot hold every integer above 256."""
    ids = family.size_conditions(geometry) or []
    original, resized, crop = geometry.original_size, geometry.resized_size, geometry.seen_crop
    target = geometry.target_size
    sizes = np.array([original, resized, crop, target], dtype=np.int64).tobytes()  # in the order of SIZES
    plain = (*original,), (*resized,), (*crop,), (*target,)  # tuples: what a batch lists is compared with them
    return Layout(*plain, sizes, np.array(ids, dtype=np.float32).tobytes(), geometry.extent)


@dataclass(frozen=True, slots=True)
class Fields:
    """What samples of one batch have in common: the family, all fields, and which of them are padded.

    `description` has those without the length, which is each sample's own. Equal ones are shared.
    """

    description: Description
    family: Family
    padding: Mapping[str, Padding]


@dataclass(slots=True, eq=False)
class SampleRef:
    """One sample with one of its images and one of its captions: the keys of both entries, and what a batch says of it.

    `parts` are its control images and its mask: the name of each in a batch, and its target size; their keys come last.
    `facts` are those of its manifest. `rows` belongs to `SampleReader`: the generation of the store in which the
    entries were read, `sample_id`, `caption`, `layout`, the fields, and an array [1, *shape] of each. They are one
    tuple because the time of a batch that is not copying is cache misses, one for each object that is met.
    """

    sample_id: str
    keys: tuple[str, ...]
    caption: str = ""
    layout: Layout = _NO_LAYOUT
    facts: SampleFacts = field(default_factory=SampleFacts)
    parts: tuple[tuple[str, Size], ...] = ()
    rows: tuple[Any, ...] = UNREAD

    @classmethod
    def of(cls, row: Row, facts: SampleFacts, *, caption: int = 0, flip: bool = False) -> SampleRef:
        """The sample of a row of the manifest that has these facts. SampleError if it has no such caption or image."""
        for image in row.images:
            if image.geometry.flip == flip:
                break
        else:
            remedy = f"set `flip: true` for the dataset and {PRECACHE}"
            raise SampleError(row.sample_id, "has no flipped entry" if flip else "has no image entry", remedy)
        if not 0 <= caption < len(row.captions):
            reason = f"has {len(row.captions)} captions, but number {caption} was requested"
            raise SampleError(row.sample_id, reason, "request a smaller number")
        text = row.captions[caption]
        layout = layout_of(image.geometry, facts.family)
        ref = cls(row.sample_id, (image.key, text.key), text.text, layout, facts)
        if row.parts:
            found = list(row.named_parts(flip=flip))
            ref.keys += tuple(part.key for _, part in found)
            ref.parts = tuple((part_field(name), part.geometry.target_size) for name, part in found)
        return ref


class SampleMemory:
    """The samples that were requested, in tables of any names, and with them what was read of them.

    At most MAX_REFS are kept; a sample that is forgotten stays valid where it is in use. Any thread may use it.
    """

    def __init__(self) -> None:
        self._tables: dict[tuple[Any, ...], dict[Any, SampleRef]] = {}

    def __len__(self) -> int:
        return sum(map(len, list(self._tables.values())))

    def table(self, *name: Any, room_for: int = 0) -> dict[Any, SampleRef]:
        """The table of this name, for reading and for adding at most `room_for` samples."""
        if room_for and len(self) + room_for > MAX_REFS:
            self.forget()
        found = self._tables.get(name)
        return self._tables.setdefault(name, {}) if found is None else found

    def forget(self) -> None:
        """Forget all samples. A thread that still fills an old table does no harm."""
        self._tables = {}

    def release_rows(self) -> None:
        """Release the arrays of all samples."""
        for table in list(self._tables.values()):
            for ref in list(table.values()):
                ref.rows = UNREAD


class SampleReader:
    """Reads samples from `store`, each from its entries when it is first requested, and then from its `SampleRef.rows`.

    `memory` has the samples whose arrays are to be released when the store's generation changes, so that packs that
    were compacted away do not stay mapped. `path` of the cache is named in errors. Any thread may use a reader.
    """

    def __init__(self, store: Store, memory: SampleMemory, path: Path | str | None = None):
        self.store, self.path = store, path
        self._memory = memory
        self._generation: int | None = None

    def gather(
        self,
        refs: Sequence[SampleRef],
        *,
        pool: BufferPool | None = None,
        out: Mapping[str, torch.Tensor] | None = None,
        pad: bool = True,
    ) -> Batch:
        """The stored tensors of B samples of one bucket, [B, *shape] for each field, on the CPU, and their metadata.

        Texts that are stored without padding are padded, and `<field>_mask` (bool [B, L]) says which rows are theirs;
        without `pad` such a field is a list of B tensors [L, *rest], and has no mask. Tensors are written to those of
        `out`, and others to a buffer of `pool` or to new memory. SampleError for a sample whose entry is missing or
        damaged; StoreError for mixed buckets or families, unequal shapes, and a tensor in `out` that does not fit.
        """
        if not refs:
            raise StoreError("no samples were requested: a batch has at least one")
        try:
            sample_ids, captions, layouts, fields, *columns = self._columns(refs)
        except (EntryMissingError, EntryDamagedError) as error:
            raise self.sample_error(error, refs) from error
        metadata = metadata_of(sample_ids, captions, layouts)
        buckets = metadata["target_size"]
        if buckets.count(buckets[0]) != len(buckets):
            raise bucket_error(buckets)
        batch: Batch = _stacked(sample_ids, fields[0], columns, pool, out, pad)
        batch.update(metadata)
        return batch

    def entries(
        self, refs: Sequence[SampleRef], *, out: Mapping[str, torch.Tensor] | None = None, pad: bool = True
    ) -> Batch:
        """The tensors of `gather` alone, of at least one sample. EntryMissingError, EntryDamagedError, StoreError."""
        sample_ids, _, _, fields, *columns = self._columns(refs)
        return _stacked(sample_ids, fields[0], columns, None, out, pad)

    def _columns(self, refs: Sequence[SampleRef]) -> list[tuple[Any, ...]]:
        """The columns of these samples' `rows`, without the generation. StoreError unless their fields are equal."""
        generation = self.store.generation
        # Rows that were not read are shorter: then there are no columns.
        generations, *found = zip(*map(_ROWS, refs), strict=False)
        if generation is None or generations.count(generation) != len(refs):
            _, *found = zip(*self._read(refs, generation), strict=False)
        fields = found[FIELDS - 1]
        if fields.count(fields[0]) != len(refs):
            _check_alike(found[0], found[2], fields)
        return found

    def _read(self, refs: Sequence[SampleRef], generation: int | None) -> list[tuple[Any, ...]]:
        """The rows of these samples. They are remembered unless the store's entries are read each time."""
        if generation != self._generation:
            self._generation = generation
            self._memory.release_rows()
        rows: dict[SampleRef, tuple[Any, ...]] = {}
        if generation is not None:
            rows = {ref: known for ref in refs if (known := ref.rows)[0] == generation}
        new = [ref for ref in dict.fromkeys(refs) if ref not in rows]
        found = iter(self.store.rows(list(_joined(map(_KEYS, new)))))
        for ref in new:
            own = tuple(islice(found, len(ref.keys) - len(ref.parts)))
            fields = _fields_of(own, ref.facts, dict(zip(dict(ref.parts), found, strict=False)))
            rows[ref] = (generation, ref.sample_id, ref.caption, ref.layout, *fields)
            if generation is not None:
                ref.rows = rows[ref]
        return [rows[ref] for ref in refs]

    def prefetch(self, refs: Sequence[SampleRef]) -> None:
        """These samples are read soon: see `Store.prefetch`."""
        keys = _joined(map(_KEYS, refs))
        self.store.prefetch(keys if len(refs) < MANY_KEYS // 2 else list(keys))

    def sample_error(self, error: EntryMissingError | EntryDamagedError, refs: Iterable[SampleRef]) -> SampleError:
        """The error about the first of these samples that needs the entry, with its remedy."""
        sample_id = next((ref.sample_id for ref in refs if error.key in ref.keys), error.key)
        if isinstance(error, EntryMissingError):
            return SampleError(sample_id, f"has no entry: {error.reason}", PRECACHE)
        mark = f"run `latentcache verify {self.path}`, then " if self.store.read_only else ""
        return SampleError(sample_id, f"is damaged: {error.reason}", mark + PRECACHE)


def _stacked(
    sample_ids: Sequence[str],
    fields: Fields,
    columns: Sequence[Sequence[np.ndarray]],
    pool: BufferPool | None,
    out: Mapping[str, torch.Tensor] | None,
    pad: bool,
) -> Batch:
    """See `SampleReader.gather`."""
    num_rows, description, padding = len(sample_ids), fields.description, fields.padding
    if padding and not pad:
        named = dict(zip(description, columns, strict=True))
        plain = {name: spec for name, spec in description.items() if name not in padding}
        batch = stack_columns(plain, [named[name] for name in plain], num_rows, out)
        return {**batch, **{name: concatenated(description[name][0], named[name]) for name in padding}}
    padded = Padded.of(sample_ids, description, columns, padding) if padding else None
    empty = None
    if pool is not None:
        row_bytes = [column[0].nbytes for column in columns] if padded is None else padded.row_bytes()
        empty = pool.borrow([num_bytes * num_rows for num_bytes in row_bytes])
    if padded is None:
        return stack_columns(description, columns, num_rows, out, empty)
    batch = stack_columns(padded.fields, columns, num_rows, out, empty, padded)
    return {**batch, **{f"{name}{MASK}": mask for name, mask in padded.masks().items()}}


def bucket_error(buckets: Iterable[Extent | tuple[int, int]]) -> StoreError:
    """The error of a batch whose samples lie in these buckets."""
    names = sorted(str(Size(*bucket) if len(bucket) == 2 else bucket) for bucket in buckets)
    return StoreError(
        f"a batch has one bucket, but these samples lie in {', '.join(dict.fromkeys(names))}: "
        "batch them with latentcache.BucketBatchSampler"
    )


def _check_alike(sample_ids: Sequence[str], layouts: Sequence[Layout], found: Sequence[Fields]) -> None:
    """StoreError unless these samples can be in one batch."""
    buckets = {layout.target_size for layout in layouts}
    if len(buckets) > 1:
        raise bucket_error(buckets)
    families = sorted({fields.family.name for fields in found})
    if len(families) > 1:
        names = ", ".join(families)
        raise StoreError(f"a batch has one family, but these samples were cached for {names}: train them apart")
    for sample_id, fields in zip(sample_ids, found, strict=True):
        differing = sorted({name for name, _ in fields.padding.items() ^ found[0].padding.items()})
        if differing:
            raise StoreError(
                f"samples {sample_ids[0]!r} and {sample_id!r}: {', '.join(differing)} of each is padded otherwise: "
                "precache both datasets with the same encode.padding and encode.max_length"
            )
    common_fields(sample_ids, [fields.description for fields in found], None)


def part_field(name: str) -> str:
    """The name that a part has in a batch: `control_latents_1` for `control 1`."""
    return name.replace("control ", CONTROL)


def _fields_of(entries: Iterable[EntryArrays], facts: SampleFacts, parts: Mapping[str, EntryArrays]) -> tuple[Any, ...]:
    """The `Fields` of these entries, in the order of their names, and the array of each.

    `parts` have one field each, which is known by the part's name.
    """
    found: dict[str, tuple[Any, Any]] = {}
    for entry in entries:
        found.update(zip(entry.description, zip(entry.description.values(), entry.arrays, strict=True), strict=True))
    for name, entry in parts.items():
        [spec], [array] = entry.description.values(), entry.arrays
        found[name] = spec, array
    names = tuple(sorted(found))
    specs, arrays = zip(*map(found.__getitem__, names), strict=True)
    padding = facts.padding
    if padding:
        described = dict(zip(names, specs, strict=True))
        padding = tuple((name, rule) for name, rule in padding if name in described)
        specs = tuple(without_lengths(described, dict(padding)).values())
    return _shared_fields(names, specs, facts.family, padding), *arrays


@lru_cache(_MAX_DESCRIPTIONS)
def _shared_fields(
    names: tuple[str, ...],
    specs: tuple[tuple[str, tuple[int, ...]], ...],
    family: Family,
    padding: tuple[tuple[str, Padding], ...],
) -> Fields:
    """Equal ones are the same object."""
    return Fields(dict(zip(names, specs, strict=True)), family, dict(padding))


def metadata_of(sample_ids: Iterable[str], captions: Iterable[str], layouts: Iterable[Layout]) -> dict[str, Any]:
    """What the manifest says of at least one sample: ids, captions, sizes, and time ids where its family has them.

    The lists are new ones. All samples are of one family.
    """
    original_size, resized_size, crop_top_left, target_size, _, time_ids, _ = zip(*layouts, strict=True)
    metadata: dict[str, Any] = {
        "sample_id": list(sample_ids),
        "caption": list(captions),
        "original_size": list(original_size),
        "resized_size": list(resized_size),
        "crop_top_left": list(crop_top_left),
        "target_size": list(target_size),
    }
    if num_bytes := len(time_ids[0]):
        # The bytearray is this tensor's own memory. A tensor made of lists takes five times as long.
        ids = np.ndarray((len(time_ids), num_bytes // _FLOAT32.itemsize), _FLOAT32, bytearray().join(time_ids))
        metadata["add_time_ids"] = torch.from_numpy(ids)
    return metadata
