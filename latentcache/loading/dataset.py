"""A torch Dataset over a manifest: CPU tensors, ready for a DataLoader in this process or in workers."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
from blake3 import blake3
from torch.utils.data import ConcatDataset, Dataset

from latentcache.dataset.manifest import Row
from latentcache.devices.placement import DeviceLike
from latentcache.errors import StoreError
from latentcache.loading.batch import place
from latentcache.loading.cache import LatentCache
from latentcache.loading.randomness import Visit
from latentcache.loading.sample import SIZES, Wanted
from latentcache.store.direct import Io
from latentcache.types import Batch, Bucket


class LatentDataset(Dataset[Batch]):
    """The samples of one manifest, without the refused ones, each `repeats` times.

    An item is a dict of CPU tensors as they are stored: `moments` [2C, h, w] or `latents` [C, h, w], `prompt_embeds`
    [T, D], `pooled_prompt_embeds` [P], `add_time_ids` [6] float32, the sizes as int64 [2], and the strings `sample_id`
    and `caption`. torch's default collate stacks them. `place` then moves a batch to the requesting model and draws
    latents from moments. Batches must not mix buckets: use `BucketBatchSampler`.

    `flips` adds the mirrored entries as items of their own. `caption` is the number of the caption, or "random": one
    drawn anew at each visit. With `BucketBatchSampler` the draw follows from its seed, the epoch and the position;
    a plain item number draws with torch's global generator, which a DataLoader seeds for each worker. Samples that
    were imported and not verified are a SampleError at once, unless `unverified` takes them as they are.
    Each process opens the cache for itself, so fork and spawn both work. `io` is that of `LatentCache`.
    """

    def __init__(
        self,
        path: str | Path,
        manifest: str | None = None,
        *,
        flips: bool = False,
        caption: int | Literal["random"] = 0,
        unverified: bool = False,
        io: Io = "auto",
    ):
        self.path = Path(path)
        self._io: Io = io
        self.caption = caption
        self._unverified = unverified
        self._cache: LatentCache | None = None
        self._pid = -1
        names = self.cache.dataset_names()
        if manifest is None and len(names) != 1:
            raise StoreError(f"{path}: name the manifest; there are: {', '.join(names) or 'none'}")
        self.manifest_name = manifest or names[0]
        manifest_ = self.cache.manifest(self.manifest_name)
        self.scaling = self.cache.scaling(manifest_)
        rows = [row for row in manifest_.rows.values() if row.refusal is None]
        for row in rows:
            self.cache.check_trust(manifest_, row)
        once: list[tuple[Row, bool]] = [(row, False) for row in rows]
        if flips:
            once += [(row, True) for row in rows]
        self._items = once * manifest_.repeats

    @property
    def cache(self) -> LatentCache:
        """This process's own cache."""
        if self._cache is None or self._pid != os.getpid():
            self._cache, self._pid = LatentCache(self.path, unverified=self._unverified, io=self._io), os.getpid()
        return self._cache

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_cache": None, "_pid": -1}

    def __len__(self) -> int:
        return len(self._items)

    def bucket(self, index: int) -> Bucket:
        """The bucket of an item, without reading it."""
        row, _ = self._items[index]
        return row.images[0].geometry.target_size

    def identity(self) -> str:
        """A digest of the items in their order: sample_id, bucket and flip of each. 64 hexadecimal digits."""
        hasher = blake3()
        for row, flip in self._items:
            bucket = row.images[0].geometry.target_size
            hasher.update(f"{len(row.sample_id)} {row.sample_id} {bucket} {flip}\n".encode("utf-8", "surrogatepass"))
        return hasher.hexdigest()

    def wanted(self, index: int) -> Wanted:
        """The entries of an item, without reading them."""
        row, flip = self._items[index]
        number = self.caption
        if number == "random":
            drawn = isinstance(index, Visit)
            num = len(row.captions)
            number = index.draw % num if drawn else int(torch.randint(num, (), device="cpu"))
        return Wanted.of(row, caption=number, flip=flip)

    def all_wanted(self) -> Iterator[Wanted]:
        """The entries of all items, with each caption that may be drawn. They may repeat."""
        for row, flip in dict.fromkeys(self._items):
            numbers = range(len(row.captions)) if self.caption == "random" else [self.caption]
            for number in numbers:
                yield Wanted.of(row, caption=number, flip=flip)

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Batch]:
        """Several items in one read; a DataLoader calls this. They may lie in different buckets."""
        wanted = [self.wanted(index) for index in indices]
        groups: dict[Bucket, list[int]] = {}
        for position, index in enumerate(indices):
            groups.setdefault(self.bucket(index), []).append(position)
        items: list[Batch] = [{} for _ in indices]
        for positions in groups.values():
            batch = self.cache.gather([wanted[position] for position in positions])
            for name in SIZES:
                batch[name] = torch.tensor(batch[name], dtype=torch.int64, device="cpu")
            for number, position in enumerate(positions):
                items[position] = {name: values[number] for name, values in batch.items()}
        return items

    def place(
        self,
        batch: Batch,
        *,
        device: DeviceLike,
        dtype: torch.dtype | None = None,
        output: Literal["latents", "moments"] = "latents",
        scaled: bool = False,
        generator: torch.Generator | None = None,
    ) -> Batch:
        """A collated batch on the requesting device; the arguments are those of `LatentCache.batch`."""
        sizes = {name: batch[name] for name in SIZES}
        rest = {name: value for name, value in batch.items() if name not in SIZES}
        scaling = self.scaling if scaled else None
        return place(rest, device, dtype=dtype, output=output, scaling=scaling, generator=generator) | sizes


class LatentDatasets(ConcatDataset[Batch]):
    """Several manifests of one cache as one dataset. Their latents must be scaled alike.

    Raises StoreError if there is none, if they lie in several caches, or if their VAEs scale differently.
    """

    datasets: list[LatentDataset]

    def __init__(self, datasets: Iterable[LatentDataset]):
        parts = list(datasets)
        if not parts:
            raise StoreError("LatentDatasets needs at least one LatentDataset")
        super().__init__(parts)
        paths = {part.path.resolve() for part in parts}
        if len(paths) > 1:
            raise StoreError(f"the datasets lie in {len(paths)} caches: {', '.join(sorted(map(str, paths)))}; give one")
        scalings = {part.scaling for part in parts}
        if len(scalings) > 1:
            names = ", ".join(part.manifest_name for part in parts)
            raise StoreError(f"the VAEs of {names} scale differently ({sorted(map(str, scalings))}): train them apart")
        self.scaling = parts[0].scaling

    @property
    def cache(self) -> LatentCache:
        """This process's own cache."""
        return self.datasets[0].cache

    def bucket(self, index: int) -> Bucket:
        part, inner = self._part(index)
        return part.bucket(inner)

    def identity(self) -> str:
        """A digest of the items in their order."""
        return blake3(" ".join(part.identity() for part in self.datasets).encode()).hexdigest()

    def wanted(self, index: int) -> Wanted:
        part, inner = self._part(index)
        return part.wanted(inner)

    def all_wanted(self) -> Iterator[Wanted]:
        """The entries of all items, with each caption that may be drawn. They may repeat."""
        return chain.from_iterable(part.all_wanted() for part in self.datasets)

    def __getitem__(self, index: int) -> Batch:
        part, inner = self._part(index)
        return part[inner]

    def __getitems__(self, indices: list[int]) -> list[Batch]:
        """Several items, with one read for each manifest and bucket among them."""
        parts: dict[LatentDataset, list[tuple[int, int]]] = {}
        for position, index in enumerate(indices):
            part, inner = self._part(index)
            parts.setdefault(part, []).append((position, inner))
        items: list[Batch] = [{} for _ in indices]
        for part, wanted in parts.items():
            read = part.__getitems__([inner for _, inner in wanted])
            for (position, _), item in zip(wanted, read, strict=True):
                items[position] = item
        return items

    def place(self, batch: Batch, **options: Any) -> Batch:
        """As `LatentDataset.place`."""
        return self.datasets[0].place(batch, **options)

    def _part(self, index: int) -> tuple[LatentDataset, int]:
        number = bisect_right(self.cumulative_sizes, index)
        inner = int(index) - (self.cumulative_sizes[number - 1] if number else 0)
        return self.datasets[number], Visit.of(inner, index.draw) if isinstance(index, Visit) else inner
