"""Cached batches, entries and prompts, returned on the requesting model's device."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from typing_extensions import Unpack

from latentcache.config import PROMPTS_PREFIX, CacheConfig, RemoteOptions, location_of
from latentcache.dataset.manifest import Manifest, prompts_name
from latentcache.dataset.manifest_folder import ManifestFolder, Manifests
from latentcache.dataset.manifest_row import Row
from latentcache.devices.placement import DeviceLike
from latentcache.errors import SampleError, StoreError
from latentcache.families.scaling import Scaling
from latentcache.identity import caption_digest
from latentcache.loading.batch import copy_into, is_cpu, moved, to_device
from latentcache.loading.sample import PRECACHE, SampleFacts, SampleReader, SampleRef, keep, prompt_identity
from latentcache.remote.locations import kind_of, open_remote, snapshot
from latentcache.store.base import Closing, Store
from latentcache.store.disk import DiskStore
from latentcache.types import Batch, Entry, prompt_id
from latentcache.utils.locks import ReadersLock

if TYPE_CHECKING:
    from latentcache.remote.store import RemoteStore


class _Known:
    """What was read of manifests, which all views of one cache share: by name, and the samples that were requested."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew. What another thread still adds to the old ones is not found any more."""
        self.manifests: dict[str, Manifest] = {}
        self.refs: dict[Any, SampleRef] = {}


class LatentCache(Closing):
    """A cache, for reading: `LatentCache("cache/photos").batch(sample_ids, device=unet)`.

    Give a path, the URL of a bucket or a service, the section `cache` of a config, or a store and manifests (the CPU
    tier). For a URL `options` are those of `config.RemoteOptions`, as `token` and `local`. `manifest` restricts
    sample ids to one dataset; without it a sample_id that occurs in several datasets is an error. `read_only` writes
    nothing to the cache, not even marks of damage; by default it is so where the directory cannot be written. What a
    cache elsewhere keeps on this disk it keeps all the same.
    `unverified` also returns samples that were imported and not verified; without it they are a SampleError. The sizes
    of a batch are integers; its tensors are on the requesting device. The cache never moves the requesting model.

    `reader` reads samples from `store`.
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
        if (path is None) == (store is None) or (store is None) != (manifests is None):
            raise StoreError("LatentCache needs a path, or a store together with its manifests")
        if isinstance(path, CacheConfig):
            options, unverified = {**path.remote_options(), **options}, unverified or path.unverified
        location = None if path is None else location_of(path)
        if location is not None and kind_of(location) == "hub":
            location, read_only = snapshot(str(location), options.get("local")), True
        self._reading: ReadersLock | None = None
        self._remote: RemoteStore | None = None
        if isinstance(location, str):
            self._remote, manifests = open_remote(location, read_only=read_only, **options)
            store = self._remote
        elif location is not None:
            if read_only is None:
                # A reader that may write marks damage at once, so that the next precache fixes it.
                read_only = not os.access(location, os.W_OK)
            store = disk = DiskStore(location, read_only=read_only, create=False)
            manifests = ManifestFolder(location / "manifests")
            if not read_only:
                self._reading = ReadersLock(disk.directory.readers)
        assert store is not None and manifests is not None
        self.store: Store = store
        self.reader = SampleReader(store, location)
        self.manifests, self.only, self.unverified, self.path = manifests, manifest, unverified, location
        self.known = _Known()
        if manifest is not None:
            self.manifest(manifest)

    def close(self) -> None:
        """Close the store. Batches that were returned stay valid."""
        self.refresh()  # what is known maps the files of manifests and packs
        self.store.close()
        if self._reading is not None:
            self._reading.close()

    def refresh(self) -> None:
        """Forget the manifests that were read, so that the next request sees those that were written since.

        Until then `batch` returns a sample as it first found it. Entries need no refresh: the store looks up keys that
        it does not know, and sees at once what it itself removed or found damaged.
        """
        self.known.forget()

    def restricted(self, manifest: str) -> LatentCache:
        """Restrict the cache to the samples of this manifest. The result shares the store; do not close it."""
        self.manifest(manifest)
        view = copy(self)
        view.only = manifest
        return view

    def manifest(self, name: str) -> Manifest:
        """The manifest of this name. StoreError naming those that there are."""
        loaded = self.known.manifests
        if name not in loaded:
            manifest = self.manifests.read(name)
            if manifest is None:
                known = ", ".join(self.manifests.names()) or "none yet: run `latentcache precache CONFIG` first"
                raise StoreError(f"{self.path or 'cpu store'}: no manifest {name!r}; there are: {known}")
            loaded[name] = manifest
        return loaded[name]

    def dataset_names(self) -> list[str]:
        """Names of the manifests that hold samples, not prompts."""
        if self.only is not None:
            return [self.only]
        return [name for name in self.manifests.names() if not name.startswith(PROMPTS_PREFIX)]

    def datasets(self) -> list[Manifest]:
        """The manifests that hold samples."""
        return [self.manifest(name) for name in self.dataset_names()]

    def sample_ids(self) -> list[str]:
        """All samples that may be requested: those that were not refused, in the order of the manifests."""
        tables = [manifest.rows for manifest in self.datasets()]
        return [table.sample_ids[number] for table in tables for number in table.usable().tolist()]

    def row(self, sample_id: str, datasets: Sequence[Manifest] | None = None) -> tuple[Manifest, Row]:
        """The sample's manifest, one of `datasets` (default: all), and row.

        SampleError when it is unknown, ambiguous, refused, or may not be read.
        """
        datasets = self.datasets() if datasets is None else datasets
        found = [(manifest, row) for manifest in datasets if (row := manifest.rows.get(sample_id)) is not None]
        if len(found) != 1:
            names = ", ".join(manifest.name for manifest in [each for each, _ in found] or datasets)
            if not found:
                raise SampleError(sample_id, f"is in no manifest ({names})", PRECACHE)
            raise SampleError(sample_id, f"is in several manifests: {names}", "LatentCache(path, manifest=NAME)")
        [(manifest, row)] = found
        if row.refusal is not None:
            reason = f"was refused ({row.refusal.reason}): {row.refusal.detail}"
            raise SampleError(sample_id, reason, f"replace {row.refusal.path}, then {PRECACHE}")
        self.check_trust(manifest, row)
        return manifest, row

    def check_trust(self, manifest: Manifest, row: Row) -> None:
        """SampleError if the sample was imported and is not verified, and such samples may not be read."""
        if not self.unverified and not row.is_verified:
            raise unverified_error(row.sample_id, manifest.imported_from)

    def facts(self, manifest: Manifest) -> SampleFacts:
        """What is said of all samples of this manifest. StoreError for a manifest of prompts."""
        facts = SampleFacts.of(manifest)
        if facts.scaling is None:
            raise StoreError(f"manifest {manifest.name} holds prompts, not images: use LatentCache.prompt")
        return facts

    def scaling(self, manifest: Manifest) -> Scaling:
        """The scaling of the VAE that encoded this manifest's latents. StoreError for a manifest of prompts."""
        scaling = self.facts(manifest).scaling
        assert scaling is not None
        return scaling

    def text_shapes(self) -> dict[str, tuple[int, ...]] | None:
        """The shape of each field of the first caption that is cached; None where there is none."""
        columns = [manifest.rows.columns["caption/keys"] for manifest in self.datasets()]
        key = next((keys[0].tobytes().hex() for keys in columns if len(keys)), None)
        if key is None or not self.store.find([key]):
            return None
        return {name: shape for name, (_, shape) in self.store.describe(key).items()}

    def get(self, key: str, *, device: DeviceLike = "cpu", dtype: torch.dtype | None = None) -> Entry:
        """One entry, compared with its digest, with its tensors on `device`.

        Raises EntryMissingError, EntryDamagedError, or SampleError for an imported entry that is unverified, unless
        this cache was opened with `unverified`.
        """
        entry = self.store.get(key)
        if not self.unverified and entry.record.identity.get("trust") == "unverified":
            imported_from = entry.record.identity["imported"]["format"]
            raise unverified_error(str(entry.record.provenance.get("sample_id", key)), imported_from)
        return Entry(entry.record, moved(entry.tensors, device, dtype), entry.ragged)

    def prompt(
        self, text: str, *, device: DeviceLike, dtype: torch.dtype | None = None, negative: bool = False
    ) -> dict[str, torch.Tensor]:
        """`prompt_embeds` [1, T, D] and what else the family has of a text, of a cached validation prompt: see `batch`.

        They come from the text encoders of this cache's datasets; if these differ, say which with
        `LatentCache(path, manifest=NAME)`. The empty prompt is always there. A service that encodes makes a prompt that
        is not cached, whatever it is; elsewhere SampleError names it. StoreError if the service has other encoders.
        """
        try:
            batch = self.reader.gather([self._cached_prompt(text, negative)])
        except SampleError as missing:
            batch = self.reader.gather([self._encoded_prompt(text, negative, missing)])
        return moved({name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}, device, dtype)

    def _cached_prompt(self, text: str, negative: bool) -> SampleRef:
        datasets = self.datasets()
        names = {prompts_name(manifest.common) for manifest in datasets if manifest.imported_from is None}
        if datasets and not names:  # imported datasets name no encoders: all prompts may be theirs
            names = {name for name in self.manifests.names() if name.startswith(PROMPTS_PREFIX)}
        if len(names) > 1:
            known = ", ".join(manifest.name for manifest in datasets)
            raise StoreError(
                f"the datasets {known} have different text encoders: say whose with LatentCache(path, manifest=NAME)"
            )
        if not datasets:
            raise StoreError(f"{self.path or 'cpu store'}: no dataset is cached yet; {PRECACHE}")
        sample_id = prompt_id(text, negative=negative)
        for name in names:
            # A manifest of prompts may be absent: no prompt was cached yet, or it was lost.
            if name in self.known.manifests or name in self.manifests.names():
                prompts = self.manifest(name)
                if (row := prompts.rows.get(sample_id)) is not None:
                    return SampleRef(sample_id, (row.captions[0].key,), facts=SampleFacts.of(prompts))
        remedy = f"add it to validation.{'negative_prompt' if negative else 'prompts'} and {PRECACHE}"
        raise SampleError(sample_id, "is not cached", remedy)

    def _encoded_prompt(self, text: str, negative: bool, missing: SampleError) -> SampleRef:
        """A prompt that the service has encoded now. `missing` is raised if it encodes nothing."""
        keys = None if self._remote is None else self._remote.encode_prompts([(text, negative)])
        if keys is None:
            raise missing
        datasets, found = self.datasets(), self.store.record(keys[0]).identity
        manifests = [manifest for manifest in datasets if manifest.imported_from is None]
        for manifest in manifests:
            family = SampleFacts.of(manifest).family
            # A family that renders texts needs its tokenizer for that, which a reader has not. The identity says how
            # the text was encoded, by which tokenizer too; the service is believed that it is this one.
            source = found["source"] if family.renders else caption_digest(family.rendered({}, text))
            if found != {"source": source, **prompt_identity(manifest.common, negative=negative)}:
                raise StoreError(
                    f"{self.path}: the service encodes prompts with other text encoders, or another clip_skip, dtype "
                    f"or salt, than {manifest.name} was cached with. Start it with the config of that dataset: serve "
                    "--encode CONFIG"
                ) from missing
        return SampleRef(missing.sample_id, (keys[0],), facts=SampleFacts.of([*manifests, *datasets][0]))

    def batch(  # noqa: PLR0913 - one call is the whole request, by keyword
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
        out: Mapping[str, torch.Tensor] | None = None,
    ) -> Batch:
        """A batch of B samples of one bucket on the requesting device.

        Returns `latents` [B, C, h, w] (or `moments` [B, 2C, h, w]), with frames before h for a family of video;
        `prompt_embeds` [B, L, D]; what else the family has: `pooled_prompt_embeds` [B, P], `add_time_ids` [B, 6] in
        float32; and lists: `sample_id`, `caption`, `original_size`, `resized_size`, `crop_top_left`, `target_size`
        (pairs of integers, height or top first). Texts that the family stores without padding are padded as it demands,
        and `prompt_embeds_mask` (bool [B, L]) says which rows are theirs. `dtype` follows the requesting module, masks
        and integers keep theirs. Stored moments give a draw with `generator`, or their mean without one. `scaled`
        applies the VAE's scaling, which changes the shape where its rule is `batch_norm`; without it latents are as the
        VAE gave them. `caption` is the number of the caption.

        Samples of several parts give `control_latents_1`, `control_latents_2` ... [B, C, h, w] too, the means of their
        control images, which `scaled` scales; and `mask` uint8 [B, 1, h, w], with 255 where the loss counts wholly.

        What is in `out`, by name, is written to and returned in the batch: contiguous tensors of the device, dtype and
        shape that the batch has. On the CPU, and where nothing is converted, the stored bytes are copied only once, and
        the memory of new tensors is numpy's: it cannot be resized.

        Raises SampleError for a sample that is unknown, refused, missing or damaged; StoreError for mixed buckets or
        families, and for a tensor in `out` that does not fit or that the batch does not have.
        """
        refs = self._refs(sample_ids, caption, flip)
        scalings = {ref.facts.scaling for ref in refs} if scaled else {None}
        if len(scalings) > 1:
            raise StoreError(f"the batch mixes latents of VAEs that scale differently: {sorted(map(str, scalings))}")
        scaling = next(iter(scalings), None)
        is_stored = not scaled and dtype is None and is_cpu(device)
        gathered = self.reader.gather(refs, out=out if is_stored else None)
        batch = to_device(gathered, device, dtype=dtype, output=output, scaling=scaling, generator=generator)
        return copy_into(out, batch) if out else batch

    def _refs(self, sample_ids: Sequence[str], caption: int, flip: bool) -> list[SampleRef]:
        known, asked = self.known.refs, (self.only, caption, flip)
        try:
            return [known[(*asked, sample_id)] for sample_id in sample_ids]
        except KeyError:
            datasets, refs = self.datasets(), []
        facts: dict[str, SampleFacts] = {}
        for sample_id in sample_ids:
            ref = known.get((*asked, sample_id))
            if ref is None:
                manifest, row = self.row(sample_id, datasets)
                if manifest.name not in facts:
                    facts[manifest.name] = self.facts(manifest)
                ref = SampleRef.of(row, facts[manifest.name], caption=caption, flip=flip)
                keep(known, (*asked, sample_id), ref)
            refs.append(ref)
        return refs


def unverified_error(sample_id: str, imported_from: str | None) -> SampleError:
    """The error about a sample that was imported and is not verified, with its remedies."""
    reason = f"was imported from {imported_from} and is unverified: nobody knows what its entries are of"
    remedy = (
        f"{PRECACHE}, which encodes it; or import it with --verify, which proves it; or take it as it is, with "
        "`cache.unverified: true` in the config (`unverified=True` here)"
    )
    return SampleError(sample_id, reason, remedy)
