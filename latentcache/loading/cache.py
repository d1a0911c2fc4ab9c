"""Entries handed back: gathered from the store, on the requesting model's device."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import Literal

import torch

from latentcache.config import PROMPTS_PREFIX
from latentcache.dataset.manifest import Manifest, ManifestFolder, Manifests, Row, prompts_name
from latentcache.devices.placement import DeviceLike, device_of, dtype_of
from latentcache.errors import EntryDamagedError, EntryMissingError, SampleError, StoreError
from latentcache.loading.batch import IMAGE_FIELDS, Scaling, fill, is_cpu, place
from latentcache.loading.held import HeldSamples
from latentcache.loading.sample import Wanted, facts
from latentcache.store.base import DTYPES, Store
from latentcache.store.direct import Io
from latentcache.store.disk import DiskStore
from latentcache.store.stacking import read_batch
from latentcache.types import Batch, Entry, prompt_id

Shapes = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Field -> dtype and shape [n, ...] of its rows."""
Allocate = Callable[[Shapes], Mapping[str, torch.Tensor]]
"""Gives a contiguous CPU tensor for each field."""
TEXT_FIELDS = ("prompt_embeds", "pooled_prompt_embeds")
MAX_REMEMBERED = 1 << 17
"""Samples that `LatentCache.batch` remembers the entries of, at some 300 bytes each. Beyond it all are forgotten, and
looked up in the manifests again."""


class LatentCache:
    """A cache, for reading: `LatentCache("cache/sdxl").batch(sample_ids, device=unet)`.

    Give a path, or a store and manifests (the CPU tier). `manifest` restricts sample ids to one dataset; without it a
    sample_id that occurs in several datasets is an error. `read_only` writes nothing, not even marks of damage; by
    default it is so where the directory cannot be written. `unverified` also hands back samples that were imported and
    not verified; without it they are a SampleError. The sizes of a batch are integers; its tensors are on the
    requesting device. The cache never moves the requesting model. `io` is that of `DiskStore`, for a path: "mapped"
    reads through the page cache, "direct" past it, "auto" past it where the packs take more than half of the memory.
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
                # A reader that may write marks damage at once, so that the next precache mends it.
                read_only = not os.access(self.path, os.W_OK)
            store = DiskStore(self.path, read_only=read_only, create=False, io=io)
            manifests = ManifestFolder(self.path / "manifests")
        assert store is not None and manifests is not None
        self.store: Store = store
        self.manifests: Manifests = manifests
        self.unverified = unverified
        self._only = manifest
        self._loaded: dict[str, Manifest] = {}
        # Samples that were asked for, by caption and flip, then by sample_id; and the scaling of each one's latents.
        self._asked: dict[tuple[int, bool], dict[str, tuple[Wanted, Scaling]]] = {}
        self._held = HeldSamples(store)
        if manifest is not None:
            self.manifest(manifest)

    def __enter__(self) -> LatentCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._held.forget()  # its arrays keep the store's memory
        self.store.close()

    def refresh(self) -> None:
        """Forget the manifests that were read, so that the next question sees those that were written since.

        Until then `batch` gives a sample as it found it first. Entries need none of it: the store looks up what it
        does not know, whoever sealed it, and sees at once what it itself removed or found damaged.
        """
        self._loaded.clear()
        self._asked = {}  # a new one: a thread that fills the old one does no harm
        self._held.forget()

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
        return self._row(sample_id, [self.manifest(name) for name in self.dataset_names()])

    def _row(self, sample_id: str, manifests: Sequence[Manifest]) -> tuple[Manifest, Row]:
        found = [manifest for manifest in manifests if sample_id in manifest.rows]
        if not found:
            raise SampleError(sample_id, f"is in no manifest ({', '.join(m.name for m in manifests)})", self._precache)
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
            raise self._unverified_error(row.sample_id, manifest.imported_from)

    def _unverified_error(self, sample_id: str, imported_from: str | None) -> SampleError:
        reason = f"was imported from {imported_from} and is unverified: nobody knows what its entries are of"
        remedy = (
            f"{self._precache}, which encodes it; or import it with --verify, which proves it; or take it as it "
            "is, with `cache.unverified: true` in the config (`unverified=True` here)"
        )
        return SampleError(sample_id, reason, remedy)

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

    def get(self, key: str, *, device: DeviceLike = "cpu", dtype: torch.dtype | None = None) -> Entry:
        """One entry, compared with its digest, with its tensors on `device`.

        Raises EntryMissingError, EntryDamagedError, or SampleError for an imported entry that is unverified, unless
        this cache was opened with `unverified`.
        """
        entry = self.store.get(key)
        if not self.unverified and entry.record.identity.get("trust") == "unverified":
            imported_from = entry.record.identity["imported"]["format"]
            raise self._unverified_error(str(entry.record.provenance.get("sample_id", key)), imported_from)
        target, dtype = device_of(device), dtype or dtype_of(device)
        return Entry(entry.record, {name: tensor.to(target, dtype) for name, tensor in entry.tensors.items()})

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
        scaling, direct = None, out
        converts = scaled or dtype is not None or not is_cpu(device)
        found = self._find(sample_ids, caption, flip) if scaled or (out and converts) else []
        if scaled:
            scalings = {scaling for _, scaling in found}
            if len(scalings) > 1:
                names = sorted(map(str, scalings))
                raise StoreError(f"the batch mixes latents of VAEs that scale differently: {names}")
            (scaling,) = scalings or (None,)
        if out and converts:
            wanted = [item for item, _ in found]
            direct = self._direct(out, wanted, device_of(device), dtype or dtype_of(device), scaled=scaled)
        gathered = self._gathered(sample_ids, caption, flip, direct)
        batch = place(gathered, device, dtype=dtype, output=output, scaling=scaling, generator=generator)
        return fill(out, batch) if out else batch

    def _gathered(
        self, sample_ids: Sequence[str], caption: int, flip: bool, out: Mapping[str, torch.Tensor] | None
    ) -> Batch:
        wanted = [item for item, _ in self._find(sample_ids, caption, flip)]
        self.prefetch(wanted)
        held = self._held.read(sample_ids, caption, flip, out)
        if held is not None:
            return held
        since = self._held.now()
        batch = self.gather(wanted, out=out)
        with suppress(StoreError):  # an entry went meanwhile: whoever asks for it next is told
            self._held.keep(since, wanted, caption, flip)
        return batch

    def _find(self, sample_ids: Sequence[str], caption: int, flip: bool) -> list[tuple[Wanted, Scaling]]:
        asked = self._asked
        known = asked.get((caption, flip))
        if known is None:
            known = asked[caption, flip] = {}
        try:
            return [known[sample_id] for sample_id in sample_ids]
        except KeyError:
            pass
        if sum(map(len, asked.values())) + len(sample_ids) > MAX_REMEMBERED:
            self._asked = {(caption, flip): (known := {})}
        manifests = [self.manifest(name) for name in self.dataset_names()]
        found = []
        for sample_id in sample_ids:
            item = known.get(sample_id)
            if item is None:
                manifest, row = self._row(sample_id, manifests)
                item = Wanted.of(row, caption=caption, flip=flip), self.scaling(manifest)
                known[sample_id] = item
            found.append(item)
        return found

    def _direct(
        self,
        out: Mapping[str, torch.Tensor],
        wanted: Sequence[Wanted],
        target: torch.device,
        dtype: torch.dtype | None,
        *,
        scaled: bool,
    ) -> Mapping[str, torch.Tensor] | None:
        """Those tensors of `out` that the stored bytes can be copied to, because nothing is computed from them."""
        if target.type != "cpu" or not wanted:
            return None
        stored = {name: stored_dtype for name, (stored_dtype, _) in self.shapes(wanted).items()}
        computed = IMAGE_FIELDS if scaled else ()
        return {
            name: tensor
            for name, tensor in out.items()
            if name not in computed and tensor.dtype is stored.get(name) and dtype in (None, tensor.dtype)
        }

    def prompt(
        self, text: str, *, device: DeviceLike, dtype: torch.dtype | None = None, negative: bool = False
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
        target, dtype = device_of(device), dtype or dtype_of(device)
        key = manifest.rows[sample_id].captions[0].key
        try:
            found = read_batch(self.store, [key])
        except (EntryMissingError, EntryDamagedError) as error:
            raise self._named(error, sample_id) from error
        return {name: tensor.to(target, dtype) for name, tensor in found.items()}

    def _prompts_names(self) -> set[str]:
        """The manifests of prompts of this cache's datasets; of an imported one's, which names no encoders, all."""
        datasets = [self.manifest(name) for name in self.dataset_names()]
        known = {prompts_name(manifest.common) for manifest in datasets if manifest.imported_from is None}
        if known or not datasets:
            return known
        return {name for name in self.manifests.names() if name.startswith(PROMPTS_PREFIX)}

    def gather(
        self,
        wanted: Sequence[Wanted],
        *,
        allocate: Allocate | None = None,
        out: Mapping[str, torch.Tensor] | None = None,
    ) -> Batch:
        """The stored tensors of these samples on the CPU, stacked, with their sizes. One bucket only.

        They are written to the tensors of `out`, or to those that `allocate` gives; without them to new ones.
        """
        if not wanted:
            raise StoreError("no samples were asked for: a batch has at least one")
        told = facts(wanted)
        if len(set(told["target_size"])) > 1:
            buckets = sorted({str(item.geometry.target_size) for item in wanted})
            raise StoreError(
                f"a batch has one bucket, but these samples lie in {', '.join(buckets)}: "
                "batch them with latentcache.loading.sampler.BucketBatchSampler"
            )
        if allocate is not None:
            out = allocate(self.shapes(wanted))
        image_keys, text_keys = [item.image_key for item in wanted], [item.caption_key for item in wanted]
        self.store.prefetch(chain(image_keys, text_keys))  # so that the texts come while the images are copied
        return self._read(image_keys, wanted, out) | self._read(text_keys, wanted, out) | told

    def prefetch(self, wanted: Iterable[Wanted]) -> None:
        """These samples are read soon: see `Store.prefetch`."""
        self.store.prefetch(key for item in wanted for key in (item.image_key, item.caption_key))

    def shapes(self, wanted: Sequence[Wanted]) -> Shapes:
        """dtype and shape of each field of a batch of these samples, read off the first one's entries."""
        shapes: Shapes = {}
        with self.naming(wanted):
            for key in (wanted[0].image_key, wanted[0].caption_key):
                for name, (dtype, shape) in self.store.describe(key).items():
                    shapes[name] = DTYPES[dtype], (len(wanted), *shape)
        return shapes

    def _read(
        self, keys: Sequence[str], wanted: Sequence[Wanted], out: Mapping[str, torch.Tensor] | None
    ) -> dict[str, torch.Tensor]:
        try:
            return read_batch(self.store, keys, out=out)
        except (EntryMissingError, EntryDamagedError) as error:
            raise self._named(error, _user(error.key, wanted)) from error

    @contextmanager
    def naming(self, wanted: Sequence[Wanted]) -> Iterator[None]:
        """Errors about an entry become errors about the first of these samples that needs it."""
        try:
            yield
        except (EntryMissingError, EntryDamagedError) as error:
            raise self._named(error, _user(error.key, wanted)) from error

    def _named(self, error: EntryMissingError | EntryDamagedError, sample_id: str) -> SampleError:
        if isinstance(error, EntryMissingError):
            return SampleError(sample_id, f"has no entry: {error.reason}", self._precache)
        mark = f"run `latentcache verify {self.path}`, then " if self.store.read_only else ""
        return SampleError(sample_id, f"is damaged: {error.reason}", mark + self._precache)

    @property
    def _precache(self) -> str:
        return "run `latentcache precache CONFIG` again"


def _user(key: str, wanted: Sequence[Wanted]) -> str:
    """The first of these samples that needs the entry."""
    return next((item.sample_id for item in wanted if key in (item.image_key, item.caption_key)), key)
