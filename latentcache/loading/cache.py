"""Cached batches, entries and prompts, returned on the requesting model's device."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Literal

import torch

from latentcache.dataset.manifest import Manifest, ManifestFolder, Manifests, Row
from latentcache.devices.placement import DeviceLike, device_of, dtype_of
from latentcache.errors import EntryDamagedError, EntryMissingError, StoreError
from latentcache.loading.batch import IMAGE_FIELDS, TEXT_FIELDS, Scaling, copy_into, is_cpu, to_device
from latentcache.loading.sample import SampleMemory, SampleRef
from latentcache.loading.sample_index import SampleIndex, unverified_error
from latentcache.loading.sample_reader import SampleReader
from latentcache.store.base import DTYPES, Store
from latentcache.store.direct import Io
from latentcache.store.disk import DiskStore
from latentcache.store.stacking import read_batch
from latentcache.types import Batch, Entry, prompt_id


class LatentCache:
    """A cache, for reading: `LatentCache("cache/sdxl").batch(sample_ids, device=unet)`.

    Give a path, or a store and manifests (the CPU tier). `manifest` restricts sample ids to one dataset; without it a
    sample_id that occurs in several datasets is an error. `read_only` writes nothing, not even marks of damage; by
    default it is so where the directory cannot be written. `unverified` also returns samples that were imported and
    not verified; without it they are a SampleError. The sizes of a batch are integers; its tensors are on the
    requesting device. The cache never moves the requesting model. `io` is that of `DiskStore`, for a path: "mapped"
    reads through the page cache, "direct" past it, "auto" past it where the packs take more than half of the memory.

    `samples` finds samples in the manifests, and `reader` reads them from `store`.
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
        io: Io = "auto",
    ):
        if (path is None) == (store is None) or (store is None) != (manifests is None):
            raise StoreError("LatentCache needs a path, or a store together with its manifests")
        self.path = None if path is None else Path(path).expanduser()
        if self.path is not None:
            if read_only is None:
                # A reader that may write marks damage at once, so that the next precache fixes it.
                read_only = not os.access(self.path, os.W_OK)
            store = DiskStore(self.path, read_only=read_only, create=False, io=io)
            manifests = ManifestFolder(self.path / "manifests")
        assert store is not None and manifests is not None
        self.store: Store = store
        self.manifests: Manifests = manifests
        self.memory = SampleMemory()
        self.reader = SampleReader(store, self.memory, self.path)
        self.samples = SampleIndex(manifests, only=manifest, unverified=unverified, path=self.path)

    def __enter__(self) -> LatentCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the store. Batches that were returned stay valid."""
        self.memory.forget()  # its arrays keep the store's memory
        self.store.close()

    def refresh(self) -> None:
        """Forget the manifests that were read, so that the next request sees those that were written since.

        Until then `batch` returns a sample as it first found it. Entries need no refresh: the store looks up keys that
        it does not know, and sees at once what it itself removed or found damaged.
        """
        self.samples.refresh()
        self.memory.forget()

    def restricted(self, manifest: str) -> LatentCache:
        """The same cache, restricted to the samples of this manifest. It shares the store; do not close it."""
        view = copy(self)
        view.samples = SampleIndex(self.manifests, only=manifest, unverified=self.samples.unverified, path=self.path)
        return view

    def manifest(self, name: str) -> Manifest:
        """The manifest of this name. StoreError naming those that there are."""
        return self.samples.manifest(name)

    def dataset_names(self) -> list[str]:
        """Names of the manifests that hold samples, not prompts."""
        return self.samples.dataset_names()

    def sample_ids(self) -> list[str]:
        """All samples that may be requested: those that were not refused, in the order of the manifests."""
        return self.samples.sample_ids()

    def row(self, sample_id: str) -> tuple[Manifest, Row]:
        """The sample's manifest and row. SampleError when it is unknown, ambiguous, refused, or may not be read."""
        return self.samples.row(sample_id)

    def text_widths(self) -> tuple[int, int] | None:
        """D and P (see `batch`) of the first caption that is cached; None where there is none."""
        rows = (row for manifest in self.samples.datasets() for row in manifest.rows.values())
        key = next((caption.key for row in rows for caption in row.captions), None)
        if key is None or not self.store.find([key]):
            return None
        fields = self.store.describe(key)
        width, pooled_width = (fields[name][1][-1] for name in TEXT_FIELDS)
        return width, pooled_width

    def get(self, key: str, *, device: DeviceLike = "cpu", dtype: torch.dtype | None = None) -> Entry:
        """One entry, compared with its digest, with its tensors on `device`.

        Raises EntryMissingError, EntryDamagedError, or SampleError for an imported entry that is unverified, unless
        this cache was opened with `unverified`.
        """
        entry = self.store.get(key)
        if not self.samples.unverified and entry.record.identity.get("trust") == "unverified":
            imported_from = entry.record.identity["imported"]["format"]
            raise unverified_error(str(entry.record.provenance.get("sample_id", key)), imported_from)
        target, dtype = device_of(device), dtype or dtype_of(device)
        return Entry(entry.record, {name: tensor.to(target, dtype) for name, tensor in entry.tensors.items()})

    def prompt(
        self, text: str, *, device: DeviceLike, dtype: torch.dtype | None = None, negative: bool = False
    ) -> dict[str, torch.Tensor]:
        """`prompt_embeds` [1, T, D] and `pooled_prompt_embeds` [1, P] of a cached validation prompt.

        They come from the text encoders of this cache's datasets; if these differ, say which with
        `LatentCache(path, manifest=NAME)`. The empty prompt is always there. SampleError names a prompt that is not
        cached.
        """
        key = self.samples.prompt_key(text, negative=negative)
        try:
            found = read_batch(self.store, [key])
        except (EntryMissingError, EntryDamagedError) as error:
            raise self.reader.sample_error(error, prompt_id(text, negative=negative)) from error
        target, dtype = device_of(device), dtype or dtype_of(device)
        return {name: tensor.to(target, dtype) for name, tensor in found.items()}

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

        Returns `latents` [B, C, h, w] (or `moments` [B, 2C, h, w]), `prompt_embeds` [B, T, D], `pooled_prompt_embeds`
        [B, P], `add_time_ids` [B, 6] in float32, and lists: `sample_id`, `caption`, `original_size`, `resized_size`,
        `crop_top_left`, `target_size` (pairs of integers, height or top first). `dtype` follows the requesting module.
        Stored moments give a draw with `generator`, or their mean without one. `scaled` applies the VAE's shift and
        scaling factor; without it latents are as the VAE gave them. `caption` is the number of the caption.

        What is in `out`, by name, is written to and returned in the batch: contiguous tensors of the device, dtype and
        shape that the batch has. On the CPU, and where nothing is converted, the stored bytes are copied only once, and
        the memory of new tensors is numpy's: it cannot be resized.

        Raises SampleError for a sample that is unknown, refused, missing or damaged; StoreError for mixed buckets, and
        for a tensor in `out` that does not fit or that the batch does not have.
        """
        refs = self._refs(sample_ids, caption, flip)
        scaling = _common_scaling(refs) if scaled else None
        direct = out
        if out and refs and (scaled or dtype is not None or not is_cpu(device)):
            direct = self._unconverted(out, refs, device_of(device), dtype or dtype_of(device), scaled=scaled)
        gathered = self.reader.gather(refs, out=direct)
        batch = to_device(gathered, device, dtype=dtype, output=output, scaling=scaling, generator=generator)
        return copy_into(out, batch) if out else batch

    def _refs(self, sample_ids: Sequence[str], caption: int, flip: bool) -> list[SampleRef]:
        known = self.memory.table(self.samples.only, caption, flip)
        try:
            return [known[sample_id] for sample_id in sample_ids]
        except KeyError:
            pass
        known = self.memory.table(self.samples.only, caption, flip, room_for=len(sample_ids))
        missing = [sample_id for sample_id in sample_ids if sample_id not in known]
        found = self.samples.find(missing, caption=caption, flip=flip)
        known.update(found)
        return [found.get(sample_id) or known[sample_id] for sample_id in sample_ids]

    def _unconverted(
        self,
        out: Mapping[str, torch.Tensor],
        refs: Sequence[SampleRef],
        target: torch.device,
        dtype: torch.dtype | None,
        *,
        scaled: bool,
    ) -> dict[str, torch.Tensor]:
        """Those tensors of `out` that the stored bytes can be copied to, because nothing is computed from them."""
        if target.type != "cpu":
            return {}
        stored = {name: DTYPES[stored_dtype] for name, (stored_dtype, _) in self.reader.describe(refs[0]).items()}
        computed = IMAGE_FIELDS if scaled else ()
        return {
            name: tensor
            for name, tensor in out.items()
            if name not in computed and tensor.dtype is stored.get(name) and dtype in (None, tensor.dtype)
        }


def _common_scaling(refs: Sequence[SampleRef]) -> Scaling | None:
    scalings = {ref.scaling for ref in refs}
    if len(scalings) > 1:
        names = sorted(map(str, scalings))
        raise StoreError(f"the batch mixes latents of VAEs that scale differently: {names}")
    return next(iter(scalings), None)
