"""Samples of a batch: what a manifest says of them, and how they are read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from latentcache.dataset.manifest import Manifest
from latentcache.dataset.manifest_row import Row
from latentcache.errors import EntryDamagedError, EntryMissingError, ModelError, SampleError, StoreError
from latentcache.families import DEFAULT, family_named
from latentcache.families.base import MASK, Family
from latentcache.families.scaling import Scaling
from latentcache.loading.batch import CONTROL, BufferPool
from latentcache.store.base import Store
from latentcache.store.batch import Column, columns_of, concatenated, stack_columns
from latentcache.types import Batch, ClipSize, Geometry, Padding, Size

PRECACHE: Final = "run `latentcache precache CONFIG` again"
"""The remedy of most errors about a sample."""

SIZES: Final = ("original_size", "resized_size", "crop_top_left", "target_size")
MAX_REFS = 1 << 17
"""Requested samples that are kept, at some 500 bytes each. Beyond it all are forgotten, and found again."""
_FLOAT32 = np.dtype(np.float32)
_MAX_LAYOUTS = 1 << 16  # photographs have few sizes; a set of crops may have many
_KEYS = attrgetter("keys")


@dataclass(frozen=True, slots=True)
class SampleFacts:
    """What the samples of a manifest have in common: those of equal facts may be in one batch.

    `scaling` is None for a manifest of prompts. `padding` names the fields that its texts store without padding.
    """

    family: Family = field(default_factory=lambda: family_named(DEFAULT))
    scaling: Scaling | None = None
    padding: tuple[tuple[str, Padding], ...] = ()

    @classmethod
    def of(cls, manifest: Manifest) -> SampleFacts:
        """The facts of a manifest. StoreError for one of a family that this version does not know."""
        common = manifest.common
        try:
            family = manifest.family
        except ModelError as error:
            raise StoreError(f"manifest {manifest.name}: {error}. Update latentcache, or precache again.") from error
        padding = []
        for name in family.fields:
            try:
                rule = family.padding(name, common["text_encoding"])
            except (LookupError, TypeError, ValueError) as error:
                message = f"its text_encoding is no recipe of {family.name}: {error!r}. Precache again."
                raise StoreError(f"manifest {manifest.name}: {message}") from error
            if rule is not None:
                padding.append((name, rule))
        return cls(family, _scaling_of(common), tuple(padding))


def _scaling_of(common: Mapping[str, Any]) -> Scaling | None:
    encoding = common.get("image_encoding")
    if encoding is None:
        return None
    if "scaling" in common:
        return Scaling.from_json(common["scaling"])
    return Scaling(encoding["scaling_factor"], encoding["shift_factor"])


def prompt_identity(common: Mapping[str, Any], *, negative: bool) -> dict[str, Any]:
    """The identity, but for its source, of a prompt that is encoded as the captions of datasets with this `common`."""
    encoding = common["text_encoding"]
    if negative:
        keeps = "keep" if encoding.get("keeps_padding") else "auto"
        settings = {"clip_skip": encoding.get("clip_skip", 0), "max_length": encoding.get("max_length")}
        family = family_named(common.get("family", DEFAULT))
        encoding = {**encoding, **family.text_recipe(negative=True, **settings, padding=keeps)}
    return {"encoding": encoding, "salt": common["salt"], "schema": common["schema"], "kind": "text"}


class Layout(NamedTuple):
    """What a batch says of a geometry: the pairs of SIZES, and the time ids.

    Time ids are the bytes of float32: the family's `size_conditions`, which most do not have. `extent` is what all of a
    batch share: the target size, and of a clip its number of frames. Equal layouts are shared.
    """

    sizes: tuple[tuple[int, ...], ...]
    time_ids: bytes
    extent: tuple[int, ...]


_NO_LAYOUT = Layout(((0, 0),) * len(SIZES), b"", ())  # of what is no image


@lru_cache(_MAX_LAYOUTS)
def layout_of(geometry: Geometry, family: Family) -> Layout:
    """The layout of a geometry. Time ids are float32: bfloat16 cannot hold every integer above 256."""
    ids = family.size_conditions(geometry) or []
    sizes = geometry.original_size, geometry.resized_size, geometry.seen_crop, geometry.target_size  # as SIZES
    # Plain tuples: what a batch lists is compared with them.
    return Layout(tuple([(*size,) for size in sizes]), np.array(ids, dtype=np.float32).tobytes(), geometry.extent)


@dataclass(frozen=True, slots=True, eq=False)
class SampleRef:
    """One sample with one of its images and one of its captions: the keys of both entries, and what a batch says of it.

    `parts` are its control images and its mask: the name of each in a batch, and its target size; their keys come last.
    `facts` are those of its manifest.
    """

    sample_id: str
    keys: tuple[str, ...]
    caption: str = ""
    layout: Layout = _NO_LAYOUT
    facts: SampleFacts = field(default_factory=SampleFacts)
    parts: tuple[tuple[str, Size], ...] = ()

    @classmethod
    def of(cls, row: Row, facts: SampleFacts, *, caption: int = 0, flip: bool = False) -> SampleRef:
        """The sample of a row of the manifest that has these facts. SampleError if it has no such caption or image."""
        image = next((image for image in row.images if image.geometry.flip == flip), None)
        if image is None:
            remedy = f"set `flip: true` for the dataset and {PRECACHE}"
            raise SampleError(row.sample_id, "has no flipped entry" if flip else "has no image entry", remedy)
        if not 0 <= caption < len(row.captions):
            reason = f"has {len(row.captions)} captions, but number {caption} was requested"
            raise SampleError(row.sample_id, reason, "request a smaller number")
        text, parts = row.captions[caption], list(row.named_parts(flip=flip))
        return cls(
            row.sample_id,
            (image.key, text.key, *(part.key for _, part in parts)),
            text.text,
            layout_of(image.geometry, facts.family),
            facts,
            tuple((name.replace("control ", CONTROL), part.geometry.target_size) for name, part in parts),
        )


def keep(known: dict[Any, SampleRef], name: Any, ref: SampleRef) -> SampleRef:
    """Add a sample to those that were requested, of which MAX_REFS are known at most, and return it."""
    if len(known) >= MAX_REFS:
        known.clear()
    known[name] = ref
    return ref


class SampleReader:
    """Reads samples from `store`. `path` of the cache is named in errors. Any thread may use a reader."""

    def __init__(self, store: Store, path: Path | str | None = None):
        self.store, self.path = store, path

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
        _check_alike(refs)
        sample_ids, first = [ref.sample_id for ref in refs], refs[0]
        try:
            rows = self.store.rows([*chain.from_iterable(map(_KEYS, refs))])
        except (EntryMissingError, EntryDamagedError) as error:
            raise self._sample_error(error, refs) from error
        num, rules = len(first.keys), dict(first.facts.padding)
        found: dict[str, Column] = {}
        for place in range(num):
            # The entries of all samples at this place: their images, their texts, their first control images ...
            part = place - num + len(first.parts)
            for name, column in columns_of(sample_ids, rows[place::num], rules).items():
                found[first.parts[part][0] if part >= 0 else name] = column  # that of a part goes by the part's name
        columns = {name: found[name] for name in sorted(found)}
        ragged = {name: rule for name, rule in rules.items() if name in columns}
        if not pad:
            apart = {name: concatenated(columns.pop(name)) for name in ragged}
            return {**stack_columns(sample_ids, columns, {}, out)[0], **apart, **metadata_of(refs)}
        batch, masks = stack_columns(sample_ids, columns, ragged, out, None if pool is None else pool.borrow)
        return {**batch, **{f"{name}{MASK}": mask for name, mask in masks.items()}, **metadata_of(refs)}

    def prefetch(self, refs: Sequence[SampleRef]) -> None:
        """These samples are read soon: see `Store.prefetch`."""
        self.store.prefetch(chain.from_iterable(map(_KEYS, refs)))

    def _sample_error(self, error: EntryMissingError | EntryDamagedError, refs: Iterable[SampleRef]) -> SampleError:
        """The error about the first of these samples that needs the entry, with its remedy."""
        sample_id = next((ref.sample_id for ref in refs if error.key in ref.keys), error.key)
        if isinstance(error, EntryMissingError):
            return SampleError(sample_id, f"has no entry: {error.reason}", PRECACHE)
        mark = f"run `latentcache verify {self.path}`, then " if self.store.read_only else ""
        return SampleError(sample_id, f"is damaged: {error.reason}", mark + PRECACHE)


def _check_alike(refs: Sequence[SampleRef]) -> None:
    """StoreError unless these samples can be in one batch, as far as their manifests say."""
    first = refs[0]
    buckets = {ref.layout.extent for ref in refs}
    if len(buckets) > 1:
        shown = sorted(str(Size(*bucket) if len(bucket) == 2 else ClipSize(*bucket)) for bucket in buckets)
        raise StoreError(
            f"a batch has one bucket, but these samples lie in {', '.join(shown)}: "
            "batch them with latentcache.BucketBatchSampler"
        )
    families = sorted({ref.facts.family.name for ref in refs})
    if len(families) > 1:
        names = ", ".join(families)
        raise StoreError(f"a batch has one family, but these samples were cached for {names}: train them apart")
    for ref in refs:
        if ref.facts is not first.facts and ref.facts.padding != first.facts.padding:
            differing = ", ".join(sorted({name for name, _ in {*ref.facts.padding} ^ {*first.facts.padding}}))
            raise StoreError(
                f"samples {first.sample_id!r} and {ref.sample_id!r}: {differing} of each is padded otherwise: "
                "precache both datasets with the same encode.padding and encode.max_length"
            )
        if ref.parts != first.parts:
            here, there = (", ".join(f"{name} {size}" for name, size in each.parts) or "none" for each in (first, ref))
            raise StoreError(
                f"the parts of samples {first.sample_id!r} ({here}) and {ref.sample_id!r} ({there}) differ: batch them "
                "with latentcache.BucketBatchSampler"
            )


def metadata_of(refs: Sequence[SampleRef]) -> dict[str, Any]:
    """What the manifest says of at least one sample: ids, captions, sizes, and time ids where its family has them.

    The lists are new ones. All samples are of one family.
    """
    sizes, time_ids, _ = zip(*[ref.layout for ref in refs], strict=True)
    metadata: dict[str, Any] = {"sample_id": [ref.sample_id for ref in refs], "caption": [ref.caption for ref in refs]}
    metadata |= dict(zip(SIZES, map(list, zip(*sizes, strict=True)), strict=True))
    if num_bytes := len(time_ids[0]):
        # The bytearray is this tensor's own memory. A tensor made of lists takes five times as long.
        ids = np.ndarray((len(time_ids), num_bytes // _FLOAT32.itemsize), _FLOAT32, bytearray().join(time_ids))
        metadata["add_time_ids"] = torch.from_numpy(ids)
    return metadata
