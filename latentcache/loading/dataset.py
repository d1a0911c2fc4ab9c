"""A torch Dataset over manifests: CPU tensors, ready for a DataLoader in this process or in workers."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Collection, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from blake3 import blake3
from torch.utils.data import Dataset, default_collate
from typing_extensions import Unpack

from latentcache.config import CacheConfig, RemoteOptions, location_of
from latentcache.dataset.manifest import Manifest
from latentcache.devices.placement import DeviceLike
from latentcache.errors import StoreError
from latentcache.families.base import MASK
from latentcache.families.scaling import Scaling
from latentcache.identity import canonical_json
from latentcache.loading.batch import to_device
from latentcache.loading.cache import LatentCache
from latentcache.loading.pack_order import Places
from latentcache.loading.sample import SIZES, SampleRef, keep
from latentcache.loading.sampler import Visit
from latentcache.store.batch import stack_columns
from latentcache.store.entry import as_array, dtype_name
from latentcache.types import Batch, ClipSize, Extent, Size

Order = Literal["random", "packs"]
ORDERS: tuple[Order, ...] = get_args(Order)


class _Samples:
    """The samples of one manifest without the refused ones, by numbers: each once, then those mirrored if asked for."""

    def __init__(self, cache: LatentCache, manifest: Manifest, *, flips: bool):
        self.name, self.rows, self.facts = manifest.name, manifest.rows, cache.facts(manifest)
        self.usable = usable = manifest.rows.usable()
        self.buckets = manifest.rows.first_sizes("extent")
        self.flips, self.num_once = flips, len(usable) * (1 + flips)
        self.num_items = self.num_once * manifest.repeats
        # Each of these raises the error of the first sample that cannot be read.
        for number in np.intersect1d(usable, self.rows.unverified())[:1].tolist():
            cache.check_trust(manifest, self.rows.row(number))
        whole = (self.buckets[:, 0] > 0) & (self.rows.has_flip() | (not flips))
        for number in usable[~whole[usable]][:1].tolist():
            SampleRef.of(self.rows.row(number), self.facts, flip=flips)

    def item(self, index: int) -> tuple[int, bool]:
        """The number of an item's row, and whether it is the mirrored image."""
        flip, place = divmod(index % self.num_once, len(self.usable))
        return self.usable.item(place), bool(flip)

    def shapes(self) -> np.ndarray:
        """What each usable sample shares with others of its batch: the bucket, and the sizes of control images.

        int32 [n, 3 + 2 * parts]; the third number is that of frames.
        """
        return np.concatenate([self.buckets[self.usable], self.rows.part_sizes(self.usable)], axis=1)

    def identify(self, hasher: blake3) -> None:
        """Hash what the items are, in their order: id, bucket, sizes of parts, how often, and which are mirrored."""
        shapes, offsets = self.shapes(), self.rows.columns["sample_id/offsets"]
        is_usable, lengths = np.zeros(len(self.rows), np.bool_), np.diff(offsets)
        is_usable[self.usable] = True
        ids = self.rows.columns["sample_id/values"][np.repeat(is_usable, lengths)]
        hasher.update(canonical_json([*shapes.shape, len(ids), self.num_once, self.num_items]))
        for column in (lengths[is_usable], ids, shapes):
            hasher.update(column.tobytes())

    def image_keys(self) -> list[str]:
        """The key of each item's image."""
        once = []
        for flip in (False, True)[: 1 + self.flips]:
            once += self.rows.image_keys(self.usable, flip=flip)
        return once * (self.num_items // max(1, len(once)))


class LatentDataset(Dataset[Batch]):
    """The samples of one manifest, or of several of one cache, without the refused ones, each `repeats` times.

    `manifest` is a name, or several; it may be left out where there is one. Several must be of one family, have VAEs
    that scale alike and texts that are padded alike: else StoreError.

    An item is a dict of CPU tensors as they are stored: `moments` [2C, h, w] or `latents` [C, h, w], with frames
    before h for a family of video, `prompt_embeds` [L, D], what else the family has of a text (`pooled_prompt_embeds`
    [P]) and of sizes (`add_time_ids` [6] float32), the sizes as int64 [2], and the strings `sample_id` and `caption`.
    Samples of several parts have `control_latents_1` [C, h, w] and so on, and `mask` uint8 [1, h, w].
    L is a caption's own where the family stores no padding: then a DataLoader's `collate_fn` is `dataset.collate`,
    which pads; elsewhere torch's default does the same. `place` then moves a batch to the requesting model, and draws
    latents from moments if it is given a generator. Batches must not mix buckets, which is a StoreError: use
    `BucketBatchSampler`.

    `flips` adds the mirrored entries as items of their own, of all manifests or of those that are named; a sample
    without one is a SampleError at once. `caption` is the number of the caption, or "random": one drawn at each visit.
    With `BucketBatchSampler` the draw follows from its seed, the epoch and the position; a plain item number draws with
    torch's global generator, which a DataLoader seeds for each worker. Samples that were imported and not verified are
    a SampleError at once, unless `unverified` takes them as they are. Each process opens the cache for itself, so fork
    and spawn both work. `path` and `options` are those of `LatentCache`.

    `order` is what `BucketBatchSampler` follows: "random", or "packs" for a cache that is larger than memory, or far
    away: the packs that hold the images come in random order, and their rows are mixed. Through the page cache they are
    read whole, a pack ahead.
    """

    def __init__(
        self,
        path: str | Path | CacheConfig,
        manifest: str | Sequence[str] | None = None,
        *,
        flips: bool | Collection[str] = False,
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
        self.order, self.draws = order, caption == "random"
        self.caption = caption if isinstance(caption, int) else 0
        """The number of the caption, where it is not drawn at each visit (`draws`)."""
        self._options: dict[str, Any] = {"path": path, "unverified": unverified, **options}
        self._opened: tuple[int, LatentCache] | None = None
        known = self.cache.dataset_names()
        self.names = known if manifest is None else [manifest] if isinstance(manifest, str) else list(manifest)
        """The names of the manifests."""
        if not self.names or (manifest is None and len(known) != 1):
            raise StoreError(f"{self.path}: name the manifest; there are: {', '.join(known) or 'none'}")
        named = [flips] if isinstance(flips, str) else flips
        mirrored = (set(self.names) if named else set()) if isinstance(named, bool) else {*named}
        if unknown := sorted(mirrored - set(self.names)):
            raise StoreError(f"flips names {', '.join(unknown)}; the manifests are {', '.join(self.names)}")
        read = {name: self.cache.manifest(name) for name in self.names}
        self._parts = [_Samples(self.cache, read[name], flips=name in mirrored) for name in self.names]
        self._check_alike()
        self.facts = self._parts[0].facts
        self.scaling: Scaling = self.cache.scaling(read[self.names[0]])
        self._ends = [*accumulate(part.num_items for part in self._parts)]
        self._refs: dict[tuple[int, int], SampleRef] = {}

    def _check_alike(self) -> None:
        names, facts = ", ".join(self.names), [part.facts for part in self._parts]
        families = {each.family.name for each in facts}
        if len(families) > 1:
            raise StoreError(f"{names} were cached for the families {', '.join(sorted(families))}: train them apart")
        scalings = {each.scaling for each in facts}
        if len(scalings) > 1:
            raise StoreError(f"the VAEs of {names} scale differently ({sorted(map(str, scalings))}): train them apart")
        if len({each.padding for each in facts}) > 1:
            raise StoreError(
                f"the texts of {names} are padded differently: precache all with one encode.padding and max_length"
            )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None, "_refs": {}}

    @property
    def cache(self) -> LatentCache:
        """This process's own cache: each opens it once, so that fork and spawn both work."""
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = os.getpid(), LatentCache(**self._options)
        return self._opened[1]

    def __len__(self) -> int:
        return self._ends[-1]

    def _item(self, index: int) -> tuple[int, int, bool]:
        """The number of the item's manifest, that of its row, and whether it is the mirrored image."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"item {index} of {len(self)}")
        place = int(index) % len(self)
        part = bisect_right(self._ends, place)
        return part, *self._parts[part].item(place - (self._ends[part - 1] if part else 0))

    def bucket(self, index: int) -> Extent:
        """The bucket of an item, without reading it; of a clip with its number of frames."""
        part, number, _ = self._item(index)
        height, width, num_frames = self._parts[part].buckets[number].tolist()
        return ClipSize(height, width, num_frames) if num_frames else Size(height, width)

    def groups(self) -> np.ndarray:
        """The number of each item's group, int64 [n], in the order of their sizes.

        Items of one group can be in one batch: they share the bucket, and the sizes of control images.
        """
        shapes = [part.shapes() for part in self._parts]
        width = max(each.shape[1] for each in shapes)
        padded = [np.pad(each, ((0, 0), (0, width - each.shape[1]))) for each in shapes]
        numbers = np.unique(np.concatenate(padded), axis=0, return_inverse=True)[1].reshape(-1)
        once = np.split(numbers, [*accumulate(map(len, shapes))][:-1])
        pairs = zip(once, self._parts, strict=True)
        return np.concatenate([np.tile(own, part.num_items // max(1, len(own))) for own, part in pairs])

    def image_keys(self) -> list[str]:
        """The key of each item's image."""
        return [key for part in self._parts for key in part.image_keys()]

    def places(self) -> Places | None:
        """Where the items' images lie, if their order is that of packs. StoreError if the cache does not say."""
        return None if self.order == "random" else Places.of(self.cache.store, self.image_keys())

    def identity(self) -> str:
        """A digest of the items in their order: sample_id, bucket and flip of each. 64 hexadecimal digits."""
        hasher = blake3()
        for part in self._parts:
            part.identify(hasher)
        return hasher.hexdigest()

    def refs(self, indices: Sequence[int]) -> list[SampleRef]:
        """The samples of these items, not read yet. SampleError for one without the caption or image."""
        found, known = [], self._refs
        for index in indices:
            caption = self._drawn_caption(index) if self.draws else self.caption
            ref = known.get((index, caption))
            found.append(self._new_ref(index, caption) if ref is None else ref)
        return found

    def _new_ref(self, index: int, caption: int) -> SampleRef:
        part, number, flip = self._item(index)
        samples = self._parts[part]
        ref = SampleRef.of(samples.rows.row(number), samples.facts, caption=caption, flip=flip)
        return keep(self._refs, (int(index), caption), ref)

    def _drawn_caption(self, index: int) -> int:
        part, number, _ = self._item(index)
        num = self._parts[part].rows.num_captions(number)
        return index.draw % num if isinstance(index, Visit) else int(torch.randint(num, (), device="cpu"))

    def prefetch(self, indices: Sequence[int]) -> None:
        """These items are read soon, by any process. What is wrong with one is raised when it is read."""
        with suppress(StoreError):
            self.cache.reader.prefetch(self.refs(indices))

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Batch]:
        """The items of a batch in one read; a DataLoader calls this. StoreError where they lie in several buckets."""
        batch = self.cache.reader.gather(self.refs(indices), pad=False)
        batch |= {name: torch.from_numpy(np.array(batch[name], np.int64)) for name in SIZES}
        columns = [value.unbind() if isinstance(value, torch.Tensor) else value for value in batch.values()]
        return [dict(zip(batch, row, strict=True)) for row in zip(*columns, strict=True)]  # views of its tensors

    def collate(self, items: Sequence[Batch]) -> Batch:
        """The `collate_fn` of a DataLoader: torch's default, but texts that are stored without padding are padded.

        They are padded as the family demands, and `<field>_mask` (bool [B, L]) says which rows are theirs. For a family
        that stores padding the default does the same.
        """
        rules = {name: rule for name, rule in self.facts.padding if name in items[0]}
        plain = [{name: value for name, value in item.items() if name not in rules} for item in items]
        batch: Batch = default_collate(plain)
        ragged = {name: [item[name] for item in items] for name in rules}
        columns = {name: (dtype_name(rows[0]), [as_array(row)[None] for row in rows]) for name, rows in ragged.items()}
        tensors, masks = stack_columns(batch["sample_id"], columns, rules)
        return {**batch, **tensors, **{f"{name}{MASK}": mask for name, mask in masks.items()}}

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
