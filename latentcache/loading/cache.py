"""Cached batches, entries and prompts, returned on the requesting model's device."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from typing_extensions import Unpack

from latentcache.cache_config import CacheConfig, RemoteOptions, location_of
from latentcache.dataset.manifest import Manifest
from latentcache.dataset.manifest_folder import ManifestFolder, Manifests
from latentcache.devices.placement import DeviceLike
from latentcache.errors import EntryDamagedError, EntryMissingError, SampleError, StoreError
from latentcache.identity import caption_digest, key_of
from latentcache.loading.batch import copy_into, is_cpu, moved, to_device
from latentcache.loading.sample import SampleReader, SampleRef, keep
from latentcache.loading.sample_index import SampleFacts, SampleIndex, prompt_identity, unverified_error
from latentcache.store.base import Closing, Store
from latentcache.store.disk import DiskStore
from latentcache.types import Batch, Entry
from latentcache.utils.locks import ReadersLock

if TYPE_CHECKING:
    from latentcache.remote.store import RemoteStore


class LatentCache(SampleIndex, Closing):
    """A cache, for reading: `LatentCache("cache/photos").batch(sample_ids, device=unet)`.

    Give a path, the URL of a bucket or a service, the section `cache` of a config, or a store and manifests (the CPU
    tier). For a URL `options` are those of `cache_config.RemoteOptions`, as `token` and `local`. `manifest` restricts
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
        self._reading: ReadersLock | None = None
        self._remote: RemoteStore | None = None
        if isinstance(location, str):
            from latentcache.remote.locations import open_remote  # needs packages that a directory does not

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
        super().__init__(manifests, only=manifest, unverified=unverified, path=location)

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
        """The same cache, restricted to the samples of this manifest. It shares the store; do not close it."""
        self.manifest(manifest)
        view = copy(self)
        view.only = manifest
        return view

    def text_shapes(self) -> dict[str, tuple[int, ...]] | None:
        """The shape of each field of the first caption that is cached; None where there is none."""
        rows = (row for manifest in self.datasets() for row in manifest.rows.values())
        key = next((caption.key for row in rows for caption in row.captions), None)
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
            manifest, row = self.prompt_row(text, negative=negative)
            tensors = self._prompt(SampleRef(row.sample_id, (row.captions[0].key,), facts=SampleFacts.of(manifest)))
        except SampleError as missing:
            tensors = self._prompt(self._encoded_prompt(text, negative, missing))
        return moved(tensors, device, dtype)

    def _prompt(self, ref: SampleRef) -> Mapping[str, torch.Tensor]:
        try:
            return self.reader.tensors([ref])
        except (EntryMissingError, EntryDamagedError) as error:
            raise self.reader.sample_error(error, [ref]) from error

    def _encoded_prompt(self, text: str, negative: bool, missing: SampleError) -> SampleRef:
        """A prompt that the service has encoded now. `missing` is raised if it encodes nothing."""
        keys = None if self._remote is None else self._remote.encode_prompts([(text, negative)])
        if keys is None:
            raise missing
        datasets = self.datasets()
        manifests = [manifest for manifest in datasets if manifest.imported_from is None]
        if not all(self._is_prompt(keys[0], manifest, text, negative) for manifest in manifests):
            names = ", ".join(manifest.name for manifest in manifests)
            raise StoreError(
                f"{self.path}: the service encodes prompts with other text encoders, or another clip_skip, dtype or "
                f"salt, than {names} was cached with. Start it with the config of that dataset: serve --encode CONFIG"
            ) from missing
        return SampleRef(missing.sample_id, (keys[0],), facts=SampleFacts.of([*manifests, *datasets][0]))

    def _is_prompt(self, key: str, manifest: Manifest, text: str, negative: bool) -> bool:
        """Whether the key is that of this prompt, encoded as the manifest's captions are.

        A family that renders texts needs its tokenizer for that, which a reader has not: then the entry's identity says
        how it was encoded, by which tokenizer too, and the service is believed that it is of this text.
        """
        expected, family = prompt_identity(manifest.common, negative=negative), SampleFacts.of(manifest).family
        if not family.renders:
            return key == key_of({"source": caption_digest(family.rendered({}, text)), **expected})
        found = self.store.record(key).identity
        return found == {"source": found["source"], **expected}

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
            pass
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
