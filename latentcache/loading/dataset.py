"""torch Datasets over manifests: CPU tensors, ready for a DataLoader in this process or in workers."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from blake3 import blake3
from torch.utils.data import ConcatDataset, Dataset, default_collate
from typing_extensions import Unpack

from latentcache.cache_config import CacheConfig, RemoteOptions, location_of
from latentcache.dataset.row_table import RowTable
from latentcache.devices.placement import DeviceLike
from latentcache.errors import SampleError, StoreError
from latentcache.families.base import MASK
from latentcache.families.scaling import Scaling
from latentcache.loading.batch import to_device
from latentcache.loading.cache import LatentCache
from latentcache.loading.pack_order import Places
from latentcache.loading.sample import PRECACHE, SIZES, SampleRef, bucket_error
from latentcache.loading.sample_facts import SampleFacts
from latentcache.loading.sampler import Visit
from latentcache.store.base import PackedStore
from latentcache.store.stacking import pad_tensors
from latentcache.types import Batch, ClipSize, Extent, Size

Order = Literal["random", "packs"]
ORDERS: tuple[Order, ...] = get_args(Order)


class _OwnCache:
    """Opens a cache once in each process, so that fork and spawn both work."""

    def __init__(self, path: Path | str | CacheConfig, *, unverified: bool, options: RemoteOptions):
        self._options: dict[str, Any] = {"path": path, "unverified": unverified, **options}
        self._opened: tuple[int, LatentCache] | None = None

    def __call__(self) -> LatentCache:
        """This process's own cache."""
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = os.getpid(), LatentCache(**self._options)
        return self._opened[1]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None}


class SampleDataset(Dataset[Batch]):
    """What one manifest and several have in common as a dataset: samples that are read, and placed."""

    facts: SampleFacts
    scaling: Scaling
    own_cache: _OwnCache
    order: Order

    @property
    def cache(self) -> LatentCache:
        """This process's own cache."""
        return self.own_cache()

    def refs(self, indices: Sequence[int]) -> list[SampleRef]:
        """The samples of these items, not read yet. SampleError for one without the caption or image."""
        raise NotImplementedError

    def image_keys(self) -> list[str]:
        """The key of each item's image."""
        raise NotImplementedError

    def places(self) -> Places | None:
        """Where the items' images lie, if their order is that of packs. StoreError if the cache does not say."""
        return None if self.order == "random" else Places.of(self.cache.store, self.image_keys())

    def prefetch(self, indices: Sequence[int]) -> None:
        """These items are read soon, by any process. What is wrong with one is raised when it is read."""
        store = self.cache.store
        if isinstance(store, PackedStore) and store.keeps_packs == "machine":
            with suppress(StoreError):
                self.cache.reader.prefetch(self.refs(indices))

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Batch]:
        """The items of a batch in one read; a DataLoader calls this. StoreError where they lie in several buckets."""
        buckets = {self.bucket(index) for index in indices}
        if len(buckets) > 1:  # torch would say that it cannot stack them
            raise bucket_error(buckets)
        return self._read_items(indices)

    def _read_items(self, indices: Sequence[int]) -> list[Batch]:
        refs = self.refs(indices)
        return _items(self.cache.reader.gather(refs, pad=False), refs)

    def bucket(self, index: int) -> Extent:
        """The bucket of an item, without reading it; of a clip with its number of frames."""
        raise NotImplementedError

    def collate(self, items: Sequence[Batch]) -> Batch:
        """The `collate_fn` of a DataLoader: torch's default, but texts that are stored without padding are padded.

        They are padded as the family demands, and `<field>_mask` (bool [B, L]) says which rows are theirs. For a family
        that stores padding the default does the same.
        """
        rules = {name: rule for name, rule in self.facts.padding if name in items[0]}
        plain = [{name: value for name, value in item.items() if name not in rules} for item in items]
        batch: Batch = default_collate(plain)
        sample_ids = batch["sample_id"]
        for name, rule in rules.items():
            batch[name], batch[f"{name}{MASK}"] = pad_tensors(sample_ids, name, [item[name] for item in items], rule)
        return batch

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
        """A batch of `collate` on the requesting device; the arguments are those of `LatentCache.batch`."""
        sizes = {name: batch[name] for name in SIZES}
        rest = {name: value for name, value in batch.items() if name not in SIZES}
        scaling = self.scaling if scaled else None
        return to_device(rest, device, dtype=dtype, output=output, scaling=scaling, generator=generator) | sizes


def _items(batch: Batch, refs: Sequence[SampleRef]) -> list[Batch]:
    """The rows of a batch that is not padded, each a view of its tensors; sizes as int64 [2]."""
    joined = bytearray().join([ref.layout.sizes for ref in refs])
    sizes = torch.from_numpy(np.ndarray((len(refs), len(SIZES), 2), np.int64, joined))
    batch |= dict(zip(SIZES, sizes.unbind(1), strict=True))
    columns = [value.unbind() if isinstance(value, torch.Tensor) else value for value in batch.values()]
    return [dict(zip(batch, row, strict=True)) for row in zip(*columns, strict=True)]


class LatentDataset(SampleDataset):
    """The samples of one manifest, without the refused ones, each `repeats` times.

    An item is a dict of CPU tensors as they are stored: `moments` [2C, h, w] or `latents` [C, h, w], with frames
    before h for a family of video, `prompt_embeds` [L, D], what else the family has of a text (`pooled_prompt_embeds`
    [P]) and of sizes (`add_time_ids` [6] float32), the sizes as int64 [2], and the strings `sample_id` and `caption`.
    Samples of several parts have `control_latents_1` [C, h, w] and so on, and `mask` uint8 [1, h, w].
    L is a caption's own where the family stores no padding: then a DataLoader's `collate_fn` is `dataset.collate`,
    which pads; elsewhere torch's default does the same. `place` then moves a batch to the requesting model, and draws
    latents from moments if it is given a generator. Batches must not mix buckets, which is a StoreError: use
    `BucketBatchSampler`.

    `flips` adds the mirrored entries as items of their own; a sample without one is a SampleError at once. `caption` is
    the number of the caption, or "random": one drawn at each visit. With `BucketBatchSampler` the draw follows from its
    seed, the epoch and the position; a plain item number draws with torch's global generator, which a DataLoader seeds
    for each worker. Samples that were imported and not verified are a SampleError at once, unless `unverified` takes
    them as they are. Each process opens the cache for itself, so fork and spawn both work. `path` and `options`
    are those of `LatentCache`.

    `order` is what `BucketBatchSampler` follows: "random", or "packs" for a cache that is larger than memory, or far
    away: the packs that hold the images come in random order, and their rows are mixed. Through the page cache they are
    read whole, a pack ahead.
    """

    def __init__(
        self,
        path: str | Path | CacheConfig,
        manifest: str | None = None,
        *,
        flips: bool = False,
        caption: int | Literal["random"] = 0,
        unverified: bool = False,
        order: Order = "random",
        **options: Unpack[RemoteOptions],
    ):
        if caption != "random" and not (isinstance(caption, int) and caption >= 0):
            raise StoreError(f"caption is {caption!r}; it must be a number from 0 on, or 'random'")
        if order not in ORDERS:
            raise StoreError(f"order is {order!r}; it must be one of {', '.join(ORDERS)}")
        self.path = location_of(path)
        self.caption, self.order = caption, order
        self.own_cache = _OwnCache(path, unverified=unverified, options=options)
        names = self.cache.dataset_names()
        if manifest is None and len(names) != 1:
            raise StoreError(f"{self.path}: name the manifest; there are: {', '.join(names) or 'none'}")
        self.manifest_name = manifest or names[0]
        read = self.cache.manifest(self.manifest_name)
        self.scaling, self.facts = self.cache.scaling(read), self.cache.facts(read)
        self._rows = RowTable.of(read.rows)
        self._usable = self._rows.usable()
        for number in np.intersect1d(self._usable, self._rows.unverified())[:1].tolist():
            self.cache.check_trust(read, self._rows.row(number))
        for number in self._usable[~self._rows.has_flip()[self._usable]][:1].tolist() if flips else ():
            SampleRef.of(self._rows.row(number), self.facts, flip=True)  # it raises the error of a sample without one
        self._buckets = self._rows.first_sizes("extent")
        self._num_once = len(self._usable) * (1 + flips)
        self._num_items = self._num_once * read.repeats

    def __len__(self) -> int:
        return self._num_items

    def _item(self, index: int) -> tuple[int, bool]:
        """The number of the item's row, and whether it is the mirrored image."""
        if not -self._num_items <= index < self._num_items:
            raise IndexError(f"item {index} of {self._num_items}")
        flip, place = divmod(int(index) % self._num_once, len(self._usable))
        return self._usable.item(place), bool(flip)

    def bucket(self, index: int) -> Extent:
        """As `SampleDataset.bucket`."""
        return self._bucket(self._item(index)[0])

    def group(self, index: int) -> tuple[int, ...]:
        """What items of one batch share: the bucket, and the target sizes of control images."""
        number = self._item(index)[0]
        return (*self._bucket(number), *self._rows.part_sizes(number))

    def _bucket(self, number: int) -> Extent:
        height, width, num_frames = self._buckets[number].tolist()
        if not height:
            raise SampleError(self._rows.sample_ids[number], "has no image entry", PRECACHE)
        return ClipSize(height, width, num_frames) if num_frames else Size(height, width)

    def image_keys(self) -> list[str]:
        """As `SampleDataset.image_keys`. Of an item without its image, which cannot be read, that of another one."""
        for number in self._usable[self._buckets[self._usable, 0] == 0][:1].tolist():
            self._bucket(number)  # it raises the error of a sample without images
        once = []
        for flip in (False, True)[: self._num_once // max(1, len(self._usable))]:
            once += self._rows.image_keys(self._usable, flip=flip)
        return once * (self._num_items // max(1, len(once)))

    def identity(self) -> str:
        """A digest of the items in their order: sample_id, bucket and flip of each. 64 hexadecimal digits."""
        hasher = blake3()
        for number, flip in map(self._item, range(len(self))):
            sample_id, bucket = self._rows.sample_ids[number], self._bucket(number)
            sizes = "".join(f" {side}" for side in self._rows.part_sizes(number))
            hasher.update(f"{len(sample_id)} {sample_id} {bucket} {flip}{sizes}\n".encode("utf-8", "surrogatepass"))
        return hasher.hexdigest()

    @property
    def draws(self) -> bool:
        """Whether the sample of an item is drawn at each visit."""
        return self.caption == "random"

    def refs(self, indices: Sequence[int]) -> list[SampleRef]:
        """As `SampleDataset.refs`."""
        if self.caption != "random":
            table = self.cache.memory.table("items", self, self.caption)
            try:
                return [table[index] for index in indices]
            except KeyError:
                pass
        return [self._ref(index) for index in indices]

    def _ref(self, index: int) -> SampleRef:
        place, flip = self._item(index)
        row, number = self._rows.row(place), self.caption
        if number == "random":
            num = len(row.captions)
            number = index.draw % num if isinstance(index, Visit) else int(torch.randint(num, (), device="cpu"))
        memory, name, first = self.cache.memory, ("items", self, number), int(index) % self._num_once
        ref = memory.table(*name).get(first)
        if ref is None:
            ref = SampleRef.of(row, self.facts, caption=number, flip=flip)
            memory.table(*name, room_for=1)[first] = ref
        if index != first:
            memory.table(*name, room_for=1)[int(index)] = ref
        return ref


class LatentDatasets(SampleDataset, ConcatDataset[Batch]):
    """Several manifests of one cache as one dataset, of one family. They share one opened cache.

    Raises StoreError if there is none, if they lie in several caches, have several orders or families, if their VAEs
    scale differently, or if their texts are padded differently.
    """

    datasets: list[LatentDataset]  # type: ignore[assignment]  # ConcatDataset says list[Dataset]

    def __init__(self, datasets: Iterable[LatentDataset]):
        parts = list(datasets)
        if not parts:
            raise StoreError("LatentDatasets needs at least one LatentDataset")
        super().__init__(parts)
        paths = {part.path if isinstance(part.path, str) else part.path.resolve() for part in parts}
        if len(paths) > 1:
            raise StoreError(f"the datasets lie in {len(paths)} caches: {', '.join(sorted(map(str, paths)))}; give one")
        names = ", ".join(part.manifest_name for part in parts)
        families = {part.facts.family.name for part in parts}
        if len(families) > 1:
            raise StoreError(f"{names} were cached for the families {', '.join(sorted(families))}: train them apart")
        scalings = {part.scaling for part in parts}
        if len(scalings) > 1:
            raise StoreError(f"the VAEs of {names} scale differently ({sorted(map(str, scalings))}): train them apart")
        if len({part.facts.padding for part in parts}) > 1:
            raise StoreError(
                f"the texts of {names} are padded differently: precache all with one encode.padding and max_length"
            )
        orders = {part.order for part in parts}
        if len(orders) > 1:
            raise StoreError(f"the datasets have the orders {', '.join(sorted(orders))}: give all the same")
        self.scaling, self.facts = parts[0].scaling, parts[0].facts
        self.own_cache, self.order = parts[0].own_cache, parts[0].order
        for part in parts:
            part.own_cache = self.own_cache

    def bucket(self, index: int) -> Extent:
        """The bucket of an item, without reading it."""
        part, inner = self._part(index)
        return part.bucket(inner)

    def group(self, index: int) -> tuple[int, ...]:
        """As `LatentDataset.group`."""
        part, inner = self._part(index)
        return part.group(inner)

    def image_keys(self) -> list[str]:
        """As `SampleDataset.image_keys`."""
        return [key for part in self.datasets for key in part.image_keys()]

    def identity(self) -> str:
        """A digest of the items in their order."""
        return blake3(" ".join(part.identity() for part in self.datasets).encode()).hexdigest()

    @property
    def draws(self) -> bool:
        """Whether the sample of an item is drawn at each visit."""
        return any(part.draws for part in self.datasets)

    def refs(self, indices: Sequence[int]) -> list[SampleRef]:
        """As `SampleDataset.refs`."""
        return [part.refs([inner])[0] for part, inner in map(self._part, indices)]

    def _read_items(self, indices: Sequence[int]) -> list[Batch]:
        """With one read for each manifest: one may hold moments, and another latents."""
        parts: dict[LatentDataset, list[int]] = {}
        for position, index in enumerate(indices):
            parts.setdefault(self._part(index)[0], []).append(position)
        items: list[Batch] = [{} for _ in indices]
        for positions in parts.values():
            read = super()._read_items([indices[position] for position in positions])
            for position, item in zip(positions, read, strict=True):
                items[position] = item
        return items

    def _part(self, index: int) -> tuple[LatentDataset, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"item {index} of {len(self)}")
        place = int(index) % len(self)
        number = bisect_right(self.cumulative_sizes, place)
        inner = place - (self.cumulative_sizes[number - 1] if number else 0)
        return self.datasets[number], Visit.of(inner, index.draw) if isinstance(index, Visit) else inner
