"""References to the samples of a batch, made from the columns of manifests."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from latentcache.config import DropoutTo
from latentcache.dataset.manifest import Manifest
from latentcache.dataset.row_table import ROLES, geometry_of
from latentcache.errors import ModelError, SampleError, StoreError
from latentcache.families import DEFAULT, family_named
from latentcache.families.base import Family
from latentcache.families.scaling import Scaling
from latentcache.identity import canonical_json, digest, key_names
from latentcache.loading.batch import CONTROL, MASKED
from latentcache.types import ClipSize, Padding, Size
from latentcache.utils.wording import MAX_NAMED, counted, first_of

PRECACHE: Final = "run `latentcache precache CONFIG` again"
"""The remedy of most errors about a sample."""

SIZES: Final = ("original_size", "resized_size", "crop_top_left", "target_size")
_DTYPES = ("compute_dtype", "store_dtype")
"""Fields of a text recipe that do not change what the embeddings mean to the model."""
_MAX_KNOWN = 1 << 16  # samples of about 500 bytes each
_MAX_LAYOUTS = 1 << 16  # photos have few sizes, but sets of crops can have many


@dataclass(frozen=True, slots=True)
class SampleFacts:
    """Properties shared by all samples of a manifest. `common_facts` checks which samples can be in one batch.

    `dataset` is the manifest's name, and `loss_weight` the weight of each sample in the loss. `scaling` is None for a
    manifest of prompts. `padding` names the fields that are stored without padding. `texts` is a digest of the text
    encoders and their settings, or empty without texts; embeddings with different digests must not be mixed.
    """

    family: Family = field(default_factory=lambda: family_named(DEFAULT))
    scaling: Scaling | None = None
    padding: tuple[tuple[str, Padding], ...] = ()
    texts: str = ""
    dataset: str = ""
    loss_weight: float = 1.0

    @classmethod
    def of(cls, manifest: Manifest) -> SampleFacts:
        """The facts of a manifest. Raises StoreError for a family that this version does not know."""
        common, recipe = manifest.common, manifest.common["text_encoding"]
        try:
            family = manifest.family
            padding = {name: family.padding(name, recipe) for name in family.fields} if manifest.has_texts else {}
        except ModelError as error:
            raise StoreError(f"manifest {manifest.name}: {error}. Update latentcache, or precache again.") from error
        except (LookupError, TypeError, ValueError) as error:
            message = f"its text_encoding is no recipe of {family.name}: {error!r}. Precache again."
            raise StoreError(f"manifest {manifest.name}: {message}") from error
        rules = tuple([(name, rule) for name, rule in padding.items() if rule is not None])
        meant = {name: value for name, value in (recipe or {}).items() if name not in _DTYPES}
        texts = digest(canonical_json(meant)) if manifest.has_texts else ""
        return cls(family, _scaling_of(common), rules, texts, manifest.name, manifest.loss_weight)


def no_texts(what: str) -> StoreError:
    """The error for texts requested from a dataset that has only latents, with its remedies."""
    return StoreError(
        f"{what}: its texts were not encoded (encode.text: none). Encode them live, with the trainer's text encoders, "
        "or set encode.text to all and run `latentcache precache CONFIG` again"
    )


def no_zeros(family: Family) -> StoreError:
    """The error for `dropout_to="zeros"` with a family whose texts vary in length, which zeros cannot express."""
    return StoreError(
        f"dropout_to is 'zeros', but each text of {family.name} has a length of its own, by its rows or by its mask, "
        "and zeros have none: use 'empty'"
    )


def _scaling_of(common: Mapping[str, Any]) -> Scaling | None:
    encoding = common.get("image_encoding")
    if encoding is None:
        return None
    if "scaling" in common:
        return Scaling.from_json(common["scaling"])
    return Scaling(encoding["scaling_factor"], encoding["shift_factor"])


def prompt_identity(common: Mapping[str, Any], *, negative: bool) -> dict[str, Any]:
    """The identity, without the source, of a prompt encoded like the captions of datasets with this `common`."""
    encoding = common["text_encoding"]
    if negative:
        keeps = "keep" if encoding.get("keeps_padding") else "auto"
        settings = {"clip_skip": encoding.get("clip_skip", 0), "max_length": encoding.get("max_length")}
        family = family_named(common.get("family", DEFAULT))
        encoding = {**encoding, **family.text_recipe(negative=True, **settings, padding=keeps)}
    return {"encoding": encoding, "salt": common["salt"], "schema": common["schema"], "kind": "text"}


class Layout(NamedTuple):
    """A geometry in the form that batches use: the pairs of SIZES, and the time ids, which few families have.

    `extent` must be equal within a batch: the target size and, for clips, the number of frames.
    """

    sizes: tuple[tuple[int, ...], ...]
    time_ids: tuple[int, ...]
    extent: tuple[int, ...]


@lru_cache(_MAX_LAYOUTS)
def _layout_of(numbers: bytes, family: Family) -> Layout:
    """The layout of a row of the geometry column. Cached, so equal geometries share one object."""
    geometry = geometry_of(np.frombuffer(numbers, np.int32))
    time_ids = tuple(family.size_conditions(geometry) or ())
    sizes = geometry.original_size, geometry.resized_size, geometry.seen_crop, geometry.target_size  # as SIZES
    # Plain tuples, because batches list them and users compare them.
    return Layout(tuple([(*size,) for size in sizes]), time_ids, geometry.extent)


@lru_cache(_MAX_LAYOUTS)
def _parts_of(numbers: bytes) -> tuple[tuple[str, Size], ...]:
    """Names and sizes of a sample's control images and mask. `numbers`: role, height and width of each, int32."""
    parts = []
    for number, height, width in np.frombuffer(numbers, np.int32).reshape(-1, 3).tolist():
        name = MASKED if ROLES[number] == "masked image" else ROLES[number].replace("control ", CONTROL)
        parts.append((name, Size(height, width)))
    return tuple(parts)


class SampleRef(NamedTuple):
    """A sample with one of its images and one of its captions: the keys of its entries, and its metadata for a batch.

    `parts` lists the control images and the mask with their names in a batch and their target sizes; their keys are
    last in `keys`. `facts` are the manifest's. `dropped` says what replaces the caption: the empty text, whose key is
    then in `keys`, or zeros with the shapes of the caption's entry.
    """

    sample_id: str
    keys: tuple[str, ...]
    facts: SampleFacts
    caption: str = ""
    layout: Layout = Layout(((0, 0),) * len(SIZES), (), ())  # the default is for prompts
    parts: tuple[tuple[str, Size], ...] = ()
    dropped: DropoutTo | None = None


class ManifestSamples:
    """The samples of a manifest by row number, many at once.

    With `unverified`, imported samples that are not verified can be read too.
    """

    def __init__(self, manifest: Manifest, *, unverified: bool):
        self.manifest, self.rows = manifest, manifest.rows
        self._readable = np.ones(len(self.rows), np.bool_)
        self._readable[[*self.rows.refusals]] = False
        if not unverified:
            self._readable[self.rows.unverified()] = False
        self._known: dict[tuple[int, bool, int, int], SampleRef] = {}
        """References by row, flip, caption and crop. Making those of a batch takes as long as reading a small batch."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_known": {}}  # a spawned worker fills its own

    @cached_property
    def facts(self) -> SampleFacts:
        """The facts of all samples. Raises StoreError for prompts, and for a family that this version does not know."""
        facts = SampleFacts.of(self.manifest)
        if facts.scaling is None:
            raise StoreError(f"manifest {self.manifest.name} holds prompts, not images: use LatentCache.prompt")
        return facts

    def check(self, numbers: np.ndarray) -> None:
        """Raise SampleError for the first of these rows that was refused, or is unverified and must not be read."""
        for at in (~self._readable[numbers]).nonzero()[0][:1].tolist():
            sample_id, refusal = self.rows.sample_ids[int(numbers[at])], self.rows.refusals.get(int(numbers[at]))
            if refusal is None:
                raise unverified_error(sample_id, self.manifest.imported_from)
            reason = f"was refused ({refusal.reason}): {refusal.detail}"
            raise SampleError(sample_id, reason, f"replace {refusal.path}, then {PRECACHE}")

    def check_untrained(self, tokens: Collection[str]) -> None:
        """Raise StoreError if a cached caption contains one of these tokens, which are being trained.

        Case is ignored, as it is by some tokenizers.
        """
        wanted = [token.casefold() for token in tokens if token]
        if not wanted or not self.facts.texts:
            return
        texts = map(str.casefold, self.rows.caption_texts)
        flags = np.fromiter((any(token in text for token in wanted) for text in texts), np.bool_)
        if len(held := self.rows.usable_with("caption", flags)):
            named = first_of(self.rows.sample_ids.at(held[:MAX_NAMED]), len(held))
            raise StoreError(
                f"{self.manifest.name}: the captions of {counted(len(held), 'sample')} have a token that is trained "
                f"({', '.join(tokens)}): {named}. Its embedding changes, and with it all that follows it in a text: "
                "precache with encode.text none, and encode texts live in each step"
            )

    def places(
        self, numbers: np.ndarray, flips: np.ndarray, crops: np.ndarray | int = 0
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Like `RowTable.places`, preceded by the places of the images alone.

        Raises SampleError for a sample that must not be read, or has no such image.
        """
        self.check(numbers)
        places, counts = self.rows.places(numbers, flips, crops)
        firsts = counts.cumsum() - counts
        images = np.append(places, 0)[firsts]
        roles = np.append(self.rows.columns["image/role"][places], 0)[firsts]
        for at in ((counts == 0) | (roles != 0)).nonzero()[0][:1].tolist():
            what, remedy = "flipped" if flips[at] else "image", f"set `flip: true` for the dataset and {PRECACHE}"
            raise SampleError(self.rows.sample_ids[int(numbers[at])], f"has no {what} entry", remedy)
        return images, places, counts

    def refs(
        self, numbers: np.ndarray, flips: np.ndarray, captions: np.ndarray, crops: np.ndarray | None = None
    ) -> list[SampleRef]:
        """References to samples with a choice of image and caption.

        Args:
            numbers: Row numbers, integers [n].
            flips: Whether to use the flipped image, bool [n].
            captions: Number of the caption entry among all captions and variants of the row, integers [n].
            crops: Number of the crop, below `RowTable.num_crops` of the row, integers [n]. Default: the first.

        Returns:
            One reference per row.

        Raises:
            SampleError: A sample must not be read, or has no such image or caption.
        """
        several = numbers, flips, captions, np.zeros_like(numbers) if crops is None else crops
        wanted = [*zip(*map(np.ndarray.tolist, several), strict=True)]
        refs: list[Any] = [*map(self._known.get, wanted)]
        if lacking := [place for place, ref in enumerate(refs) if ref is None]:
            if len(self._known) > _MAX_KNOWN:
                self._known = {}
            for place, ref in zip(lacking, self._refs(*(each[lacking] for each in several)), strict=True):
                refs[place] = self._known[wanted[place]] = ref
        return refs

    def _refs(self, numbers: np.ndarray, flips: np.ndarray, captions: np.ndarray, crops: np.ndarray) -> list[SampleRef]:
        rows, columns = self.rows, self.rows.columns
        images, places, counts = self.places(numbers, flips, crops)
        starts, ends = rows.ranges("caption", numbers)
        texts = starts + captions
        for at in ((captions < 0) | (texts >= ends)).nonzero()[0][:1].tolist():
            lines, line = np.array([ends[at] - starts[at], captions[at]]) // self.manifest.variants
            reason = f"has {counted(int(lines), 'caption')}, but number {line} was requested"
            raise SampleError(rows.sample_ids[int(numbers[at])], reason, "request a smaller number")
        found = [key_names(columns["image/keys"][images])]
        if self.facts.texts:
            found.append(key_names(columns["caption/keys"][texts]))
        keys = zip(*found, strict=True)
        geometries = columns["image/geometry"][images]
        layouts = [_layout_of(geometry.tobytes(), self.facts.family) for geometry in geometries]
        named = zip(rows.sample_ids.at(numbers), keys, rows.caption_texts.at(texts), layouts, strict=True)
        refs = [SampleRef(sample_id, own, self.facts, text, layout) for sample_id, own, text, layout in named]
        return self._with_parts(refs, places, counts) if len(places) > len(refs) else refs

    def _with_parts(self, refs: list[SampleRef], places: np.ndarray, counts: np.ndarray) -> list[SampleRef]:
        """Add control images and masks. `places` and `counts` locate each sample's image followed by its parts."""
        columns, ends = self.rows.columns, counts.cumsum().tolist()
        keys, roles = key_names(columns["image/keys"][places]), columns["image/role"][places].astype(np.int32)
        shapes = np.column_stack([roles, columns["image/geometry"][places, 6:8]])
        return [
            ref._replace(keys=(*ref.keys, *keys[start + 1 : end]), parts=_parts_of(shapes[start + 1 : end].tobytes()))
            for ref, start, end in zip(refs, [0, *ends], ends, strict=False)
        ]


def unverified_error(sample_id: str, imported_from: str | None) -> SampleError:
    """The error for an imported sample that is not verified, with its remedies."""
    reason = f"was imported from {imported_from} and is unverified: nobody knows what its entries are of"
    remedy = (
        f"{PRECACHE}, which encodes it; or take it as it is (import it with --verify to see how it differs), with "
        "`cache.unverified: true` in the config (`unverified=True` here)"
    )
    return SampleError(sample_id, reason, remedy)


def common_facts(facts: Sequence[SampleFacts], what: str, *, scaled: bool) -> SampleFacts:
    """The facts that all of these share. Raises StoreError if they differ; `what` names their samples or datasets."""
    families = sorted({each.family.name for each in facts})
    if len(families) > 1:
        raise StoreError(f"{what} were cached for the families {', '.join(families)}: train them apart")
    scalings = {each.scaling for each in facts}
    if scaled and len(scalings) > 1:
        raise StoreError(f"the VAEs of {what} scale differently ({sorted(map(str, scalings))}): train them apart")
    if len({bool(each.texts) for each in facts}) > 1:
        raise StoreError(f"some of {what} have cached texts, others latents alone: precache all with one encode.text")
    if len({each.padding for each in facts}) > 1:
        raise StoreError(
            f"the texts of {what} are padded differently: precache all with one encode.padding and encode.max_length"
        )
    if len({each.texts for each in facts}) > 1:
        raise StoreError(
            f"the texts of {what} were encoded by other text encoders, or otherwise (clip_skip, max_length): their "
            "embeddings do not mix. Precache all with one model and one encode section"
        )
    return facts[0]


def check_alike(refs: Sequence[SampleRef], *, scaled: bool) -> None:
    """Raise StoreError unless these samples can be in one batch, according to their manifests."""
    if not refs:
        raise StoreError("no samples were requested: a batch has at least one")
    first = refs[0]
    buckets = {ref.layout.extent for ref in refs}
    if len(buckets) > 1:
        shown = sorted(str(Size(*bucket) if len(bucket) == 2 else ClipSize(*bucket)) for bucket in buckets)
        raise StoreError(
            f"a batch has one bucket, but these samples lie in {', '.join(shown)}: "
            "batch them with latentcache.BucketBatchSampler"
        )
    for ref in refs:
        if ref.facts is not first.facts:
            common_facts([first.facts, ref.facts], f"samples {first.sample_id!r} and {ref.sample_id!r}", scaled=scaled)
        if ref.parts != first.parts:
            here, there = (", ".join(f"{name} {size}" for name, size in each.parts) or "none" for each in (first, ref))
            raise StoreError(
                f"the parts of samples {first.sample_id!r} ({here}) and {ref.sample_id!r} ({there}) differ: batch them "
                "with latentcache.BucketBatchSampler"
            )


def metadata_of(refs: Sequence[SampleRef]) -> dict[str, Any]:
    """The metadata of a batch: ids, captions, sizes, and time ids if the family has them.

    For images it also has the dataset and loss weight of each. There is at least one sample, and all are of one family.
    """
    sizes, time_ids, _ = zip(*[ref.layout for ref in refs], strict=True)
    metadata: dict[str, Any] = {"sample_id": [ref.sample_id for ref in refs], "caption": [ref.caption for ref in refs]}
    metadata |= dict(zip(SIZES, map(list, zip(*sizes, strict=True)), strict=True))
    if refs[0].layout.extent:  # prompts are of no dataset
        metadata["dataset"] = [ref.facts.dataset for ref in refs]
        metadata["loss_weight"] = torch.from_numpy(np.array([ref.facts.loss_weight for ref in refs], np.float32))
    if time_ids[0]:
        metadata["add_time_ids"] = torch.from_numpy(np.array(time_ids, np.float32))
    return metadata
