"""Reads cached batches, entries and prompts onto the requesting model's device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from typing_extensions import Unpack

from latentcache.config import PROMPTS_PREFIX, CacheConfig, RemoteOptions, check_options, location_of
from latentcache.dataset.manifest import Manifest, prompts_name
from latentcache.dataset.manifest_folder import Manifests
from latentcache.dataset.row_table import Row
from latentcache.devices.placement import DeviceLike
from latentcache.errors import EntryDamagedError, EntryMissingError, SampleError, StoreError
from latentcache.families.base import MASK
from latentcache.families.scaling import Scaling
from latentcache.identity import caption_digest
from latentcache.loading.batch import moved, to_device
from latentcache.loading.sample import (
    PRECACHE,
    ManifestSamples,
    SampleFacts,
    SampleRef,
    check_alike,
    metadata_of,
    no_texts,
    no_zeros,
    prompt_identity,
    unverified_error,
)
from latentcache.remote.store import RemoteStore, open_cache
from latentcache.store.base import Closing, Store
from latentcache.store.batch import Column, Empty, columns_of, stack_columns
from latentcache.store.disk import DiskStore
from latentcache.types import Batch, Entry, prompt_id
from latentcache.utils.locks import ReadersLock


class LatentCache(Closing):
    """A cache opened for reading: `LatentCache("cache/photos").batch(sample_ids, device=unet)`.

    `path` is a path, the URL of a bucket or a service, or the `cache` section of a config; instead of it, give a
    `store` and its `manifests` (the CPU tier). For a URL, `options` are those of `config.RemoteOptions`, such as
    `token` and `local`. `manifest` restricts sample ids to one dataset; without it an id that occurs in several
    datasets is an error. With `read_only` nothing is written to the cache, not even marks of damage; this is the
    default if its directory is not writable. The local copy of a remote cache is written in any case. Samples that were
    imported and not verified are a SampleError unless `unverified` is set. Sizes in a batch are integers; its tensors
    are on the requesting device. The cache never moves the requesting model.
    """

    def __init__(
        self,
        path: str | Path | CacheConfig | None = None,
        *,
        manifest: str | None = None,
        read_only: bool | None = None,
        store: Store | None = None,
        manifests: Manifests | None = None,
        unverified: bool = False,
        **options: Unpack[RemoteOptions],
    ):
        check_options(options, LatentCache.__init__)
        if (path is None) == (store is None) or (store is None) != (manifests is None):
            raise StoreError("LatentCache needs a path, or a store together with its manifests")
        if isinstance(path, CacheConfig):
            options, unverified = {**path.remote_options(), **options}, unverified or path.unverified
        location = None if path is None else location_of(path)
        self._reading: ReadersLock | None = None
        if location is not None:
            store, manifests, location = open_cache(location, read_only=read_only, **options)
            if isinstance(store, DiskStore) and not store.read_only:
                self._reading = ReadersLock(store.directory.readers)
        assert store is not None and manifests is not None
        self.store: Store = store
        self.manifests, self.only, self.unverified, self.path = manifests, manifest, unverified, location
        # By manifest name. Views share the list; `refresh` replaces its dict, so ongoing reads fill only the old one.
        self._known = [dict[str, ManifestSamples]()]
        if manifest is not None:
            self.manifest(manifest)

    def close(self) -> None:
        """Close the store. Batches that were returned stay valid."""
        self.refresh()  # the known manifests keep files mapped
        self.store.close()
        if self._reading is not None:
            self._reading.close()

    def refresh(self) -> None:
        """Forget the manifests read so far, so that the next request sees what was written since.

        Entries need no refresh: the store looks up unknown keys on each request, and keeps track of what it removed or
        found damaged.
        """
        self._known[0] = {}

    def restricted(self, manifest: str) -> LatentCache:
        """A view of the cache with the samples of this manifest only. It shares the store; do not close it."""
        self.manifest(manifest)
        view = copy(self)
        view.only = manifest
        return view

    def manifest(self, name: str) -> Manifest:
        """The manifest of this name. StoreError, listing the manifests there are, if there is none."""
        return self.samples(name).manifest

    def samples(self, name: str) -> ManifestSamples:
        """The samples of the manifest of this name. StoreError, listing the manifests, if it does not exist."""
        known = self._known[0]
        samples = known.get(name)
        if samples is None:
            manifest = self.manifests.read(name)
            if manifest is None:
                names = ", ".join(self.manifests.names()) or "none yet: run `latentcache precache CONFIG` first"
                raise StoreError(f"{self.path or 'cpu store'}: no manifest {name!r}; there are: {names}")
            samples = known[name] = ManifestSamples(manifest, unverified=self.unverified)
        return samples

    def dataset_names(self) -> list[str]:
        """Names of the manifests that hold samples, as opposed to prompts."""
        if self.only is not None:
            return [self.only]
        return [name for name in self.manifests.names() if not name.startswith(PROMPTS_PREFIX)]

    def datasets(self) -> list[Manifest]:
        """The manifests that hold samples."""
        return [self.manifest(name) for name in self.dataset_names()]

    def sample_ids(self) -> list[str]:
        """All samples that can be requested, in the order of the manifests; refused samples are left out."""
        tables = [manifest.rows for manifest in self.datasets()]
        return [sample_id for table in tables for sample_id in table.sample_ids.at(table.usable())]

    def row(self, sample_id: str) -> tuple[Manifest, Row]:
        """The sample's manifest and row. SampleError if it is unknown, ambiguous, refused, or unverified."""
        [(samples, _, numbers)] = self._find([sample_id])
        samples.check(numbers)
        return samples.manifest, samples.rows.row(int(numbers[0]))

    def refs(self, sample_ids: Sequence[str], *, caption: int = 0, flip: bool = False) -> list[SampleRef]:
        """References to these samples, without reading entries. SampleError: see `batch`."""
        found: dict[int, SampleRef] = {}
        for samples, places, numbers in self._find(sample_ids):
            chosen = np.full(len(numbers), flip), np.full(len(numbers), caption * samples.manifest.variants)
            found.update(zip(places.tolist(), samples.refs(numbers, *chosen), strict=True))
        return [found[place] for place in range(len(sample_ids))]

    def _find(self, sample_ids: Sequence[str]) -> list[tuple[ManifestSamples, np.ndarray, np.ndarray]]:
        """The manifests that have these samples, each with positions in the list and the numbers of their rows.

        SampleError for a sample that is in no manifest or in several.
        """
        found, num_found, names = [], np.zeros(len(sample_ids), np.int64), self.dataset_names()
        for samples in map(self.samples, names):
            numbers = samples.rows.numbers(sample_ids)
            if len(places := np.flatnonzero(numbers >= 0)):
                found.append((samples, places, numbers[places]))
                num_found[places] += 1
        for place in np.flatnonzero(num_found != 1)[:1].tolist():
            sample_id = sample_ids[place]
            if not num_found[place]:
                raise SampleError(sample_id, f"is in no manifest ({', '.join(names)})", PRECACHE)
            several = ", ".join(samples.manifest.name for samples, places, _ in found if place in places)
            raise SampleError(sample_id, f"is in several manifests: {several}", "LatentCache(path, manifest=NAME)")
        return found

    def scaling(self, manifest: Manifest) -> Scaling:
        """The scaling of the VAE that encoded this manifest's latents. StoreError for a manifest of prompts."""
        scaling = self.samples(manifest.name).facts.scaling
        assert scaling is not None
        return scaling

    def text_shapes(self) -> dict[str, tuple[int, ...]] | None:
        """The shape of each field of the first cached caption; None if no caption is cached."""
        columns = [manifest.rows.columns["caption/keys"] for manifest in self.datasets() if manifest.has_texts]
        key = next((keys[0].tobytes().hex() for keys in columns if len(keys)), None)
        if key is None or not self.store.find([key]):
            return None
        return {name: shape for name, (_, shape) in self.store.describe(key).items()}

    def get(self, key: str, *, device: DeviceLike = "cpu", dtype: torch.dtype | None = None) -> Entry:
        """One entry, checked against its digest, with its tensors on `device`.

        Raises EntryMissingError or EntryDamagedError; SampleError for an unverified entry, unless this cache was opened
        with `unverified`.
        """
        entry = self.store.get(key)
        if not self.unverified and entry.record.identity.get("trust") == "unverified":
            imported_from = entry.record.identity["imported"]["format"]
            raise unverified_error(str(entry.record.provenance.get("sample_id", key)), imported_from)
        return Entry(entry.record, moved(entry.tensors, device, dtype), entry.ragged)

    def prompt(
        self,
        text: str,
        *,
        device: DeviceLike,
        dtype: torch.dtype | None = None,
        negative: bool = False,
        beside: str = "",
    ) -> dict[str, torch.Tensor]:
        """The embeddings of a validation prompt: `prompt_embeds` [1, T, D] and the family's other text fields.

        They come from the text encoders of this cache's datasets; if these differ, choose with
        `LatentCache(path, manifest=NAME)`. The empty prompt is always cached. A service that encodes also accepts
        prompts that are not cached; otherwise they are a SampleError. StoreError if the service has other encoders, or
        for datasets without texts (`encode.text: none`). `beside` is the key of a caption: the prompt is then the one
        that was read with that caption's control images. Fields are as in `batch`.
        """
        try:
            batch = self.gather([self.cached_prompt(text, negative=negative, beside=beside)])
        except SampleError as missing:
            if beside:
                raise
            batch = self.gather([self._encoded_prompt(text, negative, missing)])
        return moved({name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}, device, dtype)

    def cached_prompt(self, text: str, *, negative: bool = False, beside: str = "") -> SampleRef:
        """A reference to a validation prompt. SampleError if it is not cached; StoreError: see `prompt`."""
        datasets = self.datasets()
        encoded = [manifest for manifest in datasets if manifest.imported_from is None]
        names = {prompts_name(manifest.common) if manifest.has_texts else "" for manifest in encoded}
        if datasets and not names:  # imported datasets do not name their encoders: any prompts of the family may fit
            found = (self.manifest(name) for name in self.manifests.names() if name.startswith(PROMPTS_PREFIX))
            names = {each.name for each in found if each.common.get("family") == datasets[0].common.get("family")}
        if len(names) > 1:
            known = ", ".join(manifest.name for manifest in datasets)
            raise StoreError(
                f"the datasets {known} have different text encoders: choose with LatentCache(path, manifest=NAME)"
            )
        if names == {""}:
            raise no_texts(", ".join(manifest.name for manifest in encoded))
        if not datasets:
            raise StoreError(f"{self.path or 'cpu store'}: no dataset is cached yet; {PRECACHE}")
        sample_id = prompt_id(text, negative=negative, beside=beside)
        for name in names:
            # The manifest of prompts may be missing: no prompt has been cached yet, or it was lost.
            if name in self._known[0] or name in self.manifests.names():
                prompts = self.manifest(name)
                if (row := prompts.rows.get(sample_id)) is not None:
                    return SampleRef(sample_id, (row.captions[0].key,), SampleFacts.of(prompts))
        setting = "negative_prompt" if negative else "prompts"
        raise SampleError(
            sample_id, "is not cached", PRECACHE if beside else f"add it to validation.{setting} and {PRECACHE}"
        )

    def _encoded_prompt(self, text: str, negative: bool, missing: SampleError) -> SampleRef:
        """A prompt that the service encodes on demand. Raises `missing` if there is no such service."""
        far = self.store if isinstance(self.store, RemoteStore) else None
        key = None if far is None else far.transport.encode_prompt(text, negative=negative)
        if key is None:
            raise missing
        datasets, found = self.datasets(), self.store.record(key).identity
        manifests = [manifest for manifest in datasets if manifest.imported_from is None]
        for manifest in manifests:
            family = SampleFacts.of(manifest).family
            # Rendering a text may need the tokenizer, which a reader does not have. The identity says how the text was
            # encoded, including the tokenizer; that it is of this text is left to the service.
            source = found["source"] if family.template_needs_tokenizer else caption_digest(family.rendered({}, text))
            if found != {"source": source, **prompt_identity(manifest.common, negative=negative)}:
                raise StoreError(
                    f"{self.path}: the service does not encode prompts as {manifest.name} was cached: text encoders, "
                    "clip_skip, max_length, dtype or salt differ. Start it with the config of that dataset: serve "
                    "--encode CONFIG"
                ) from missing
        return SampleRef(missing.sample_id, (key,), SampleFacts.of([*manifests, *datasets][0]))

    def batch(
        self,
        sample_ids: Sequence[str],
        *,
        device: DeviceLike,
        dtype: torch.dtype | None = None,
        output: Literal["latents", "moments"] = "latents",
        scaled: bool = False,
        generator: torch.Generator | None = None,
        caption: int = 0,
        flip: bool = False,
    ) -> Batch:
        """A batch of B samples of one bucket on the requesting device.

        Args:
            sample_ids: The samples.
            device: The requesting device: a module, a tensor, a device or its name.
            dtype: Of floating-point tensors, by default the requesting module's. Masks and integers keep theirs.
            output: `latents` or the stored `moments`.
            scaled: Apply the VAE's scaling, which changes the shape if its rule is `batch_norm`. By default latents are
                as the VAE returned them.
            generator: Draws latents from stored moments; without it latents are the moments' mean.
            caption: The number of the caption.
            flip: Whether the images are mirrored.

        Returns:
            `latents` [B, C, h, w] (or `moments` [B, 2C, h, w]), with frames before h for a video family;
            `prompt_embeds` [B, L, D] and the family's other fields, such as `pooled_prompt_embeds` [B, P] and
            `add_time_ids` [B, 6] in float32; `loss_weight` [B] in float32, from each sample's dataset; and lists:
            `sample_id`, `dataset`, `caption`, `original_size`, `resized_size`, `crop_top_left`, `target_size` (pairs of
            integers, height or top first). Texts stored without padding are padded by the family's rule, and
            `prompt_embeds_mask` (bool [B, L]) marks the rows that are not padding.
            Samples with companions also have `control_latents_1`, `control_latents_2` ... [B, C, h, w], the means of
            their control images; `mask` uint8 [B, 1, h, w], 255 for full weight in the loss; and `masked_latents`, like
            control images. Clips of an image-to-video family have `condition` [B, C, F, h, w], the mean of the first
            frame followed by grey ones, and `image_embeds` [B, N, D] of that frame if the model has an image encoder.
            `scaled` applies to all of these latents. On the CPU, tensors that are as stored use NumPy's memory and
            cannot be resized.

        Raises:
            SampleError: A sample is unknown, refused, missing or damaged.
            StoreError: The samples are of several buckets or families.
        """
        refs = self.refs(sample_ids, caption=caption, flip=flip)
        batch = self.gather(refs, scaled=scaled)
        scaling = refs[0].facts.scaling if scaled else None
        return to_device(batch, device, dtype=dtype, output=output, scaling=scaling, generator=generator)

    def gather(self, refs: Sequence[SampleRef], *, memory: Empty = np.empty, scaled: bool = False) -> Batch:
        """The stored tensors of B samples of one bucket, [B, *shape] per field, on the CPU, and their metadata.

        Texts stored without padding are padded, and `<field>_mask` (bool [B, L]) marks their own rows. `memory`
        allocates the tensors' arrays. `scaled` says that the latents will be scaled, so that all must scale alike.
        SampleError for a sample whose entry is missing or damaged; StoreError for mixed buckets or families, and
        unequal shapes.
        """
        check_alike(refs, scaled=scaled)
        sample_ids, first = [ref.sample_id for ref in refs], refs[0]
        try:
            rows = self.store.rows([key for ref in refs for key in ref.keys])
        except (EntryMissingError, EntryDamagedError) as error:
            raise self._sample_error(error, refs) from error
        num, rules = len(first.keys), dict(first.facts.padding)
        found: dict[str, Column] = {}
        for place in range(num):
            # All samples' entries at this position: their images, their texts, their first control images ...
            part = place - num + len(first.parts)
            for name, column in columns_of(sample_ids, rows[place::num], rules).items():
                found[first.parts[part][0] if part >= 0 else name] = column  # a part's column has the part's name
        columns = {name: found[name] for name in sorted(found)}
        batch, masks = stack_columns(sample_ids, columns, rules, memory)
        if zeros := [place for place, ref in enumerate(refs) if ref.dropped == "zeros"]:
            family = first.facts.family
            if rows[1].description.keys() - family.fields.keys():  # the dataset could not check: it had no cached text
                raise no_zeros(family)
            for name in family.fields:
                for place in zeros:  # indexing all at once takes longer than copying the batch
                    batch[name][place].zero_()
                    if name in masks:
                        masks[name][place] = False
        return {**batch, **{f"{name}{MASK}": mask for name, mask in masks.items()}, **metadata_of(refs)}

    def prefetch(self, refs: Iterable[SampleRef], *, whole_packs: bool = False) -> None:
        """Announce that these samples will be read soon: see `Store.prefetch`."""
        self.store.prefetch([key for ref in refs for key in ref.keys], whole_packs=whole_packs)

    def _sample_error(self, error: EntryMissingError | EntryDamagedError, refs: Sequence[SampleRef]) -> SampleError:
        """The error for the first of these samples that needs the entry, with its remedy."""
        ref = next(ref for ref in refs if error.key in ref.keys)
        # The empty text belongs to no sample: no sample must be skipped because of it.
        sample_id = prompt_id("") if ref.dropped == "empty" and error.key == ref.keys[1] else ref.sample_id
        if isinstance(error, EntryMissingError):
            return SampleError(sample_id, "has no entry", PRECACHE)
        mark = f"run `latentcache verify {self.path}`, then " if self.store.read_only else ""
        return SampleError(sample_id, f"is damaged: {error.reason}", mark + PRECACHE)
