"""Entries handed back: gathered from the store, on the asking model's device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from latentcache.config import PROMPTS_PREFIX
from latentcache.dataset.manifest import ImageRef, Manifest, ManifestFolder, Manifests, Row, prompts_name
from latentcache.devices.placement import Asker, device_of, dtype_of
from latentcache.errors import EntryDamagedError, EntryMissingError, SampleError, StoreError
from latentcache.store.base import DTYPES, Store
from latentcache.store.disk import DiskStore
from latentcache.types import Entry, Geometry, prompt_id

Batch = dict[str, Any]
Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Field -> dtype and shape [n, ...] of its rows."""
Allocate = Callable[[Shapes], Mapping[str, torch.Tensor]]
"""Gives a contiguous CPU tensor for each field."""
KeyName = Literal["image_key", "caption_key"]
IMAGE_FIELDS = ("moments", "latents")
TEXT_FIELDS = ("prompt_embeds", "pooled_prompt_embeds")


@dataclass(frozen=True, slots=True)
class Scaling:
    """What the UNet expects: `(latents - shift_factor) * scaling_factor`, as diffusers' training scripts do it."""

    scaling_factor: float
    shift_factor: float | None

    def apply(self, latents: torch.Tensor) -> torch.Tensor:
        shifted = latents if self.shift_factor is None else latents - self.shift_factor
        return shifted * self.scaling_factor


class LatentCache:
    """A cache, for reading: `LatentCache("cache/sdxl").batch(sample_ids, device=unet)`.

    Give a path, or a store and manifests (the CPU tier). `manifest` restricts sample ids to one dataset; without it a
    sample_id that occurs in several datasets is an error. `read_only` writes nothing, not even marks of damage; by
    default it is so where the directory cannot be written. `unverified` also hands back samples that were imported and
    not verified; without it they are a SampleError. The sizes of a batch are integers; its tensors are on the
    asking device. The cache never moves the model that asks.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        manifest: str | None = None,
        read_only: bool | None = None,
        store: Store | None = None,
        manifests: Manifests | None = None,
        unverified: bool = False,
    ):
        if (path is None) == (store is None) or (store is None) != (manifests is None):
            raise StoreError("LatentCache needs a path, or a store together with its manifests")
        self.path = None if path is None else Path(path).expanduser()
        if self.path is not None:
            if read_only is None:
                # A reader that may write marks damage at once, so that the next precache mends it.
                read_only = not os.access(self.path, os.W_OK)
            store = DiskStore(self.path, read_only=read_only, create=False)
            manifests = ManifestFolder(self.path / "manifests")
        assert store is not None and manifests is not None
        self.store: Store = store
        self.manifests: Manifests = manifests
        self.unverified = unverified
        self._only = manifest
        self._loaded: dict[str, Manifest] = {}
        if manifest is not None:
            self.manifest(manifest)

    def __enter__(self) -> LatentCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.store.close()

    def refresh(self) -> None:
        """Forget the manifests that were read, so that the next question sees those that were written since.

        Entries need none of it: the store looks up what it does not know, whoever sealed it.
        """
        self._loaded.clear()

    def restricted(self, manifest: str) -> LatentCache:
        """The same cache, of which only this manifest's samples are seen. It shares the store, and is not closed."""
        view = LatentCache(store=self.store, manifests=self.manifests, manifest=manifest, unverified=self.unverified)
        view.path = self.path  # messages name it
        return view

    # Samples

    def manifest(self, name: str) -> Manifest:
        """The manifest of this name. Raises StoreError naming those that there are."""
        if name not in self._loaded:
            manifest = self.manifests.read(name)
            if manifest is None:
                known = ", ".join(self.manifests.names()) or "none yet: run latentcache precache first"
                raise StoreError(f"{self.path or 'cpu store'}: no manifest {name!r}; there are: {known}")
            self._loaded[name] = manifest
        return self._loaded[name]

    def dataset_names(self) -> list[str]:
        """Names of the manifests that hold samples."""
        if self._only is not None:
            return [self._only]
        return [name for name in self.manifests.names() if not name.startswith(PROMPTS_PREFIX)]

    def sample_ids(self) -> list[str]:
        """All samples that can be asked for: those that were not refused, in the order of the manifests."""
        manifests = (self.manifest(name) for name in self.dataset_names())
        return [row.sample_id for manifest in manifests for row in manifest.rows.values() if row.refusal is None]

    def row(self, sample_id: str) -> tuple[Manifest, Row]:
        """The sample's row and its manifest. Raises SampleError when it is unknown, ambiguous, or was refused."""
        found = [m for m in map(self.manifest, self.dataset_names()) if sample_id in m.rows]
        if not found:
            raise SampleError(sample_id, f"is in no manifest ({', '.join(self.dataset_names())})", self._precache)
        if len(found) > 1:
            names = ", ".join(manifest.name for manifest in found)
            raise SampleError(sample_id, f"is in several manifests: {names}", "LatentCache(path, manifest=NAME)")
        row = found[0].rows[sample_id]
        if row.refusal is not None:
            reason = f"was refused ({row.refusal.reason}): {row.refusal.detail}"
            raise SampleError(sample_id, reason, f"replace {row.refusal.path}, then {self._precache}")
        self.check_trust(found[0], row)
        return found[0], row

    def check_trust(self, manifest: Manifest, row: Row) -> None:
        """Raises SampleError if the sample was imported, is not verified, and such samples were not asked for."""
        if not self.unverified and not row.is_verified:
            reason = (
                f"was imported from {manifest.imported_from} and is unverified: nobody knows what its entries are of"
            )
            remedy = (
                f"{self._precache}, which encodes it; or import it with --verify, which proves it; or take it as it "
                "is, with `cache.unverified: true` in the config (`unverified=True` here)"
            )
            raise SampleError(row.sample_id, reason, remedy)

    def scaling(self, manifest: Manifest) -> Scaling:
        """The scaling of the VAE that this manifest's latents come from."""
        encoding = manifest.common.get("image_encoding")
        if encoding is None:
            raise StoreError(f"manifest {manifest.name} holds prompts, not images: use LatentCache.prompt")
        return Scaling(encoding["scaling_factor"], encoding["shift_factor"])

    def text_widths(self) -> tuple[int, int] | None:
        """D and P of the first caption that is cached; None where there is none."""
        rows = (row for name in self.dataset_names() for row in self.manifest(name).rows.values())
        key = next((caption.key for row in rows for caption in row.captions), None)
        if key is None or not self.store.find([key]):
            return None
        shapes = [self.store.describe(key)[name][1] for name in TEXT_FIELDS]
        return shapes[0][-1], shapes[1][-1]

    # Tensors

    def get(self, key: str, *, device: Asker = "cpu", dtype: torch.dtype | None = None) -> Entry:
        """One entry, verified, with its tensors on `device`. EntryMissingError or EntryDamagedError otherwise."""
        entry = self.store.get(key)
        target, dtype = device_of(device), dtype or dtype_of(device)
        return Entry(entry.record, {name: tensor.to(target, dtype) for name, tensor in entry.tensors.items()})

    def batch(
        self,
        sample_ids: Sequence[str],
        *,
        device: Asker,
        dtype: torch.dtype | None = None,
        output: Literal["latents", "moments"] = "latents",
        scaled: bool = False,
        generator: torch.Generator | None = None,
        caption: int = 0,
        flip: bool = False,
    ) -> Batch:
        """A batch of B samples of one bucket on the asking device.

        Returns `latents` [B, C, h, w] (or `moments` [B, 2C, h, w]), `prompt_embeds` [B, T, D], `pooled_prompt_embeds`
        [B, P], `add_time_ids` [B, 6] in float32, and lists: `sample_id`, `caption`, `original_size`, `resized_size`,
        `crop_top_left`, `target_size` (pairs of integers, height or top first). `dtype` follows the asking module.
        Stored moments give a draw with `generator`, or their mean without one. `scaled` applies the VAE's shift and
        scaling factor; without it latents are as the VAE gave them. `caption` is the number of the caption.

        Raises SampleError for a sample that is unknown, refused, missing or damaged; StoreError for mixed buckets.
        """
        found = [self.row(sample_id) for sample_id in sample_ids]
        wanted = [Wanted.of(row, caption=caption, flip=flip) for _, row in found]
        gathered = self.gather(wanted)
        scalings = {self.scaling(manifest) for manifest, _ in found}
        if scaled and len(scalings) > 1:
            raise StoreError(f"the batch mixes latents of VAEs that scale differently: {sorted(map(str, scalings))}")
        scaling = next(iter(scalings)) if scaled else None
        return place(gathered, device, dtype=dtype, output=output, scaling=scaling, generator=generator)

    def prompt(
        self, text: str, *, device: Asker, dtype: torch.dtype | None = None, negative: bool = False
    ) -> dict[str, torch.Tensor]:
        """`prompt_embeds` [1, T, D] and `pooled_prompt_embeds` [1, P] of a cached validation prompt.

        It comes from the text encoders of this cache's datasets; if they differ, say which with
        `LatentCache(path, manifest=NAME)`. The empty prompt is always there. SampleError names a prompt that is not
        cached.
        """
        names = self._prompts_names()
        if len(names) > 1:
            datasets = ", ".join(self.dataset_names())
            raise StoreError(
                f"the datasets {datasets} have different text encoders: say whose with LatentCache(path, manifest=NAME)"
            )
        if not self.dataset_names():
            raise StoreError(f"{self.path or 'cpu store'}: no dataset is cached yet; {self._precache}")
        sample_id = prompt_id(text, negative=negative)
        manifest = self.manifest(next(iter(names))) if names else None
        if manifest is None or sample_id not in manifest.rows:
            remedy = f"add it to validation.{'negative_prompt' if negative else 'prompts'} and {self._precache}"
            raise SampleError(sample_id, "is not cached", remedy)
        wanted = Wanted(sample_id, None, None, text, manifest.rows[sample_id].captions[0].key)
        target, dtype = device_of(device), dtype or dtype_of(device)
        return {name: tensor.to(target, dtype) for name, tensor in self._gather([wanted], "caption_key").items()}

    def _prompts_names(self) -> set[str]:
        """The manifests of prompts of this cache's datasets; of an imported one's, which names no encoders, all."""
        datasets = [self.manifest(name) for name in self.dataset_names()]
        known = {prompts_name(manifest.common) for manifest in datasets if manifest.imported_from is None}
        if known or not datasets:
            return known
        return {name for name in self.manifests.names() if name.startswith(PROMPTS_PREFIX)}

    def gather(self, wanted: Sequence[Wanted], *, allocate: Allocate | None = None) -> Batch:
        """The stored tensors of these samples on the CPU, stacked, with their sizes. One bucket only.

        `allocate` gives the tensors that they are written to; without it they are new ones.
        """
        if not wanted:
            raise StoreError("no samples were asked for: a batch has at least one")
        buckets = {item.geometry.target_size for item in wanted if item.geometry is not None}
        if len(buckets) > 1:
            raise StoreError(
                f"a batch has one bucket, but these samples lie in {', '.join(sorted(map(str, buckets)))}: "
                "batch them with latentcache.retrieve.sampler.BucketBatchSampler"
            )
        out = None if allocate is None else allocate(self.shapes(wanted))
        tensors = self._gather(wanted, "image_key", out) | self._gather(wanted, "caption_key", out)
        return tensors | facts(wanted)

    def shapes(self, wanted: Sequence[Wanted]) -> Shapes:
        """dtype and shape of each field of a batch of these samples, read off the first one's entries."""
        shapes: Shapes = {}
        for key in (wanted[0].image_key, wanted[0].caption_key):
            with self.naming(wanted):
                described = self.store.describe(key)
            shapes |= {name: (DTYPES[dtype], (len(wanted), *shape)) for name, (dtype, shape) in described.items()}
        return shapes

    def _gather(
        self, wanted: Sequence[Wanted], which: KeyName, out: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        with self.naming(wanted):
            return self.store.read_batch([getattr(item, which) for item in wanted], out=out)

    @contextmanager
    def naming(self, wanted: Sequence[Wanted]) -> Iterator[None]:
        """Errors about an entry become errors about the first of these samples that needs it."""
        try:
            yield
        except (EntryMissingError, EntryDamagedError) as error:
            users = (item.sample_id for item in wanted if error.key in (item.image_key, item.caption_key))
            sample_id = next(users, error.key)
            if isinstance(error, EntryMissingError):
                raise SampleError(sample_id, f"has no entry: {error.reason}", self._precache) from error
            mark = f"run `latentcache verify {self.path}`, then " if self.store.read_only else ""
            raise SampleError(sample_id, f"is damaged: {error.reason}", mark + self._precache) from error

    @property
    def _precache(self) -> str:
        return "run `latentcache precache CONFIG` again"


@dataclass(frozen=True, slots=True)
class Wanted:
    """One sample of a batch: which image entry and which text entry."""

    sample_id: str
    image_key: str | None
    geometry: Geometry | None
    caption: str
    caption_key: str

    @classmethod
    def of(cls, row: Row, *, caption: int = 0, flip: bool = False) -> Wanted:
        image = _image_of(row, flip)
        if not 0 <= caption < len(row.captions):
            met = f"has {len(row.captions)} captions, but number {caption} was asked for"
            raise SampleError(row.sample_id, met, "ask for a smaller number")
        text = row.captions[caption]
        return cls(row.sample_id, image.key, image.geometry, text.text, text.key)


def _image_of(row: Row, flip: bool) -> ImageRef:
    for ref in row.images:
        if ref.geometry.flip == flip:
            return ref
    remedy = "set `flip: true` for the dataset and run `latentcache precache CONFIG` again"
    raise SampleError(row.sample_id, "has no flipped entry" if flip else "has no image entry", remedy)


def facts(wanted: Sequence[Wanted]) -> Batch:
    """What the manifest says of these samples: ids, captions, sizes, and the time ids that follow from them."""
    geometries = [item.geometry for item in wanted if item.geometry is not None]
    facts: Batch = {"sample_id": [item.sample_id for item in wanted], "caption": [item.caption for item in wanted]}
    for name in ("original_size", "resized_size", "crop_top_left", "target_size"):
        facts[name] = [tuple(getattr(geometry, name)) for geometry in geometries]
    facts["add_time_ids"] = add_time_ids(geometries)
    return facts


def add_time_ids(geometries: Sequence[Geometry]) -> torch.Tensor:
    """original_size + crop_top_left + target_size of each image: float32 [B, 6].

    The order is that of diffusers' `StableDiffusionXLPipeline._get_add_time_ids`. float32, because bfloat16 cannot
    hold every integer above 256.
    """
    rows = [[*g.original_size, *g.crop_top_left, *g.target_size] for g in geometries]
    return torch.tensor(rows, dtype=torch.float32).reshape(-1, 6)


def place(
    batch: Mapping[str, Any],
    device: Asker,
    *,
    dtype: torch.dtype | None = None,
    output: Literal["latents", "moments"] = "latents",
    scaling: Scaling | None = None,
    generator: torch.Generator | None = None,
) -> Batch:
    """A gathered batch moved to the asking device: see `LatentCache.batch`. `scaling` None leaves latents unscaled."""
    target, dtype = device_of(device), dtype or dtype_of(device)
    placed: Batch = {}
    for name, value in batch.items():
        if name == "add_time_ids":
            placed[name] = value.to(target, torch.float32)
        elif name not in IMAGE_FIELDS:
            placed[name] = value.to(target, dtype) if isinstance(value, torch.Tensor) else value
    moments, latents = batch.get("moments"), batch.get("latents")
    if output == "moments":
        if moments is None:
            raise StoreError("this cache holds latents, not moments: set encode.image_output to moments and precache")
        if scaling is not None:
            raise StoreError("moments are stored unscaled: ask for latents, or leave out scaled=True")
        return {"moments": moments.to(target, dtype), **placed}
    if moments is not None:
        latents = _draw(moments.to(target), generator)
    elif latents is None:
        raise StoreError("the batch holds neither moments nor latents")
    elif generator is not None:
        raise StoreError("this cache holds latents, which are drawn already: a generator has no effect on them")
    latents = latents.to(target)
    if scaling is not None:
        latents = scaling.apply(latents.float())
    return {"latents": latents.to(dtype or batch_dtype(batch)), **placed}


def _draw(moments: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    from latentcache.encoders.vae import (
        latents_from_moments,
    )  # imports diffusers, which a reader of latents never needs

    return latents_from_moments(moments.float(), generator)


def batch_dtype(batch: Mapping[str, Any]) -> torch.dtype:
    """The dtype that the image field of a batch is stored in."""
    return next(batch[name].dtype for name in IMAGE_FIELDS if name in batch)
