"""A torch Dataset over manifests that returns CPU tensors, for a DataLoader with or without workers."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from blake3 import blake3
from torch.utils.data import Dataset, default_collate
from typing_extensions import Unpack

from latentcache.config import CacheConfig, Crops, DropoutTo, RemoteOptions, check_options, location_of
from latentcache.devices.placement import DeviceLike
from latentcache.errors import StoreError
from latentcache.families.base import MASK
from latentcache.families.scaling import Scaling
from latentcache.identity import key_names
from latentcache.loading.batch import to_device, unpadded
from latentcache.loading.cache import LatentCache
from latentcache.loading.choices import Choices, Chooser
from latentcache.loading.sample import PRECACHE, SIZES, ManifestSamples, SampleRef, common_facts, no_zeros
from latentcache.loading.sampler import Places, Visits
from latentcache.location import kind_of
from latentcache.store.batch import stack_columns
from latentcache.store.entry import as_array, dtype_name
from latentcache.types import Batch, ClipSize, Extent, Size

Order = Literal["random", "packs"]
ORDERS: tuple[Order, ...] = get_args(Order)


class _Samples:
    """The items of one manifest: its usable samples, with `flips` then the mirrored ones, all of it `repeats` times."""

    def __init__(self, samples: ManifestSamples, choices: Choices, *, flips: bool):
        self.samples, self.rows, self.chooser = samples, samples.rows, Chooser(samples.manifest, choices)
        self.empty_key = ""
        """Key of the empty text's entry, if captions are dropped to it."""
        self.usable = self.rows.usable()
        self.shapes = self.rows.shapes(self.usable)
        """What each usable sample must share with its batch: see `RowTable.shapes`."""
        self.num_once = len(self.usable) * (1 + flips)
        self.num_items = self.num_once * samples.manifest.repeats
        samples.places(*self.items(np.arange(self.num_once)))  # SampleError for an item that cannot be read
        if choices.flips:
            samples.places(self.usable, np.ones(len(self.usable), np.bool_))
        self.chooser.check(self.num_captions(self.usable))

    def items(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The row numbers of these items, and which items are mirrored: int64 [n], bool [n]."""
        flips, places = np.divmod(numbers % max(1, self.num_once), max(1, len(self.usable)))
        return self.usable[places], flips > 0

    def num_captions(self, numbers: np.ndarray) -> np.ndarray:
        """How many caption entries each of these rows has: int64 [n]."""
        starts, ends = self.rows.ranges("caption", numbers)
        return np.asarray(ends - starts)

    def refs(self, visits: Visits) -> list[SampleRef]:
        """The samples of these visits of this manifest's items. SampleError: see `ManifestSamples.refs`."""
        numbers, flips = self.items(visits.items)
        choices = self.chooser.choices
        if not choices.draws:
            return self.samples.refs(numbers, flips, self.chooser.fixed_captions(len(numbers)))
        repeats, once = np.divmod(visits.items, max(1, self.num_once))
        num_crops = self.rows.num_crops[numbers] if choices.crops == "random" else 1
        counts = self.num_captions(numbers)
        captions, crops, mirrored, dropped = self.chooser.choose(visits, counts, once, repeats, num_crops)
        refs = self.samples.refs(numbers, flips | mirrored, captions, crops)
        for place in np.flatnonzero(dropped).tolist():
            ref, to = refs[place], choices.dropout_to
            if not ref.facts.texts:  # latents alone: the caption is only a string
                refs[place] = ref._replace(caption="")
                continue
            keys = (ref.keys[0], self.empty_key, *ref.keys[2:]) if to == "empty" else ref.keys
            refs[place] = ref._replace(keys=keys, caption="", dropped=to)
        return refs

    def identify(self, hasher: blake3) -> None:
        """Hash the items in order: sample ids, buckets, sizes of companions, repeats, and which are mirrored."""
        ids = self.rows.sample_ids.at(self.usable)
        hasher.update(json.dumps([*self.shapes.shape, ids, self.num_once, self.num_items]).encode())
        hasher.update(self.shapes.tobytes())

    def image_keys(self) -> np.ndarray:
        """The key of each item's image: uint8 [n, 32]."""
        images, _, _ = self.samples.places(*self.items(np.arange(self.num_items)))
        return np.asarray(self.rows.columns["image/keys"][images])


class LatentDataset(Dataset[Batch]):
    """The usable samples of one or several manifests of a cache, each `repeats` times; refused samples are left out.

    An item is a dict of CPU tensors as they are stored: `moments` [2C, h, w] or `latents` [C, h, w], with frames before
    h for a video family; `prompt_embeds` [L, D] and the family's other fields, such as `pooled_prompt_embeds` [P] and
    `add_time_ids` [6] in float32; the sizes as int64 [2]; `loss_weight` in float32; and the strings `sample_id`,
    `dataset` and `caption`. Of a manifest with `encode.text: none` the string `caption` is all there is of the text.
    Samples with companions also have `control_latents_1`, `masked_latents` [C, h, w] and so on, and `mask` uint8
    [1, h, w]; clips of an image-to-video family have `condition` [C, F, h, w], and `image_embeds` [N, D] if the model
    has an image encoder.

    L is the caption's own length if the family stores no padding. Then pass `dataset.collate` to the DataLoader as
    `collate_fn`, which pads; otherwise torch's default does the same. `place` moves a batch to the requesting model,
    and draws latents from moments if it is given a generator. Batches must not mix buckets (StoreError): use
    `BucketBatchSampler`. With it, all choices follow from its seed, the epoch and the position; plain item numbers draw
    from torch's global generator, which a DataLoader seeds in each worker. Each process opens the cache for itself, so
    both fork and spawn work.

    Args:
        path: The cache: see `LatentCache`.
        manifest: A name, or several; may be left out if there is only one. Several must have one family, VAEs that
            scale alike and texts that are padded alike, else StoreError.
        flips: True, or names of manifests, to add the mirrored entries as further items; "random" to draw at each visit
            whether it is mirrored, so that an epoch is not longer. Of several manifests, "random" leaves out those
            without any mirrored entry; otherwise a sample without one is a SampleError.
        caption: The number of the caption, or "random": each visit draws one, by the dataset's weights if it has any,
            and takes its next variant, so that an item's visits see all variants before one repeats.
        caption_dropout: Share of visits without their caption, which is then "".
        dropout_to: "empty" replaces the text by the entry of the empty text; "zeros" by zeros, for families whose texts
            have a fixed length. StoreError if that is not possible.
        crops: "first", or "random": each visit draws one of the image's cached crops (`variations` of the dataset),
            with its mask and control images. StoreError if no image has several.
        unverified: Whether samples that were imported and not verified are used; otherwise they are a SampleError.
        order: What `BucketBatchSampler` follows: "random", or "packs" for a cache that is larger than memory or remote.
            The packs of the images then come in random order, with their rows mixed, and `LatentLoader` requests whole
            packs ahead.
        trained_tokens: Tokens whose embeddings are trained, as in textual inversion. StoreError if a cached text has
            one, since the cache has its embedding from before the training.
        options: As for `LatentCache`.
    """

    def __init__(  # noqa: PLR0913 - one keyword for each choice
        self,
        path: str | Path | CacheConfig,
        manifest: str | Sequence[str] | None = None,
        *,
        flips: bool | Literal["random"] | Collection[str] = False,
        caption: int | Literal["random"] = 0,
        caption_dropout: float = 0.0,
        dropout_to: DropoutTo = "empty",
        crops: Crops = "first",
        unverified: bool = False,
        order: Order = "random",
        trained_tokens: Collection[str] = (),
        **options: Unpack[RemoteOptions],
    ):
        check_options(options, LatentDataset.__init__)
        self.choices = Choices(caption, caption_dropout, dropout_to, flips == "random", crops)
        if order not in ORDERS:
            raise StoreError(f"order is {order!r}; it must be one of {', '.join(ORDERS)}")
        self.path = location_of(path)
        self.order, self.draws = order, self.choices.draws
        self._options: dict[str, Any] = {"path": path, "unverified": unverified, **options}
        self._opened: tuple[int, LatentCache] | None = None
        if kind_of(self.path) == "hub":  # workers must read the same snapshot, even if there is a newer one
            self._options |= {"path": self.cache.path, "read_only": True, "unverified": self.cache.unverified}
        known = self.cache.dataset_names()
        self.names = known if manifest is None else [manifest] if isinstance(manifest, str) else list(manifest)
        """The names of the manifests."""
        if not self.names or (manifest is None and len(known) != 1):
            raise StoreError(f"{self.path}: name the manifest; there are: {', '.join(known) or 'none'}")
        named = False if flips == "random" else [flips] if isinstance(flips, str) else flips
        mirrored = (set(self.names) if named else set()) if isinstance(named, bool) else {*named}
        if unknown := sorted(mirrored - set(self.names)):
            message = f"flips names {', '.join(unknown)}; the manifests are {', '.join(self.names)}"
            raise StoreError(f"{message}: give some of these, or 'random', True or False")
        read = [self.cache.samples(name) for name in self.names]
        self.facts = common_facts([samples.facts for samples in read], ", ".join(self.names), scaled=True)
        self.scaling: Scaling = self.cache.scaling(read[0].manifest)
        for samples in read:
            samples.check_untrained([trained_tokens] if isinstance(trained_tokens, str) else trained_tokens)
        has_flips = [self.choices.flips and each.rows.has_flips for each in read]
        self._parts = list[_Samples]()
        for each, has in zip(read, has_flips, strict=True):
            choices = self.choices if has or not any(has_flips) else replace(self.choices, flips=False)
            self._parts.append(_Samples(each, choices, flips=each.manifest.name in mirrored))
        if caption_dropout and self.facts.texts:
            self._prepare_dropout()
        self._ends = np.array([part.num_items for part in self._parts]).cumsum()
        several = ((part.rows.num_crops[part.usable] > 1).any() for part in self._parts)
        if crops == "random" and len(self) and not any(several):
            reason = f"crops is 'random', but each image of {', '.join(self.names)} has one crop"
            raise StoreError(f"{reason}: set `variations` of the dataset, then {PRECACHE}")

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None}

    @property
    def cache(self) -> LatentCache:
        """This process's own cache. Each process opens it once, so both fork and spawn work."""
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = os.getpid(), LatentCache(**self._options)
        return self._opened[1]

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _prepare_dropout(self) -> None:
        """Look up the entries of the empty text. StoreError if nothing can replace a caption."""
        family = self.facts.family
        for name, part in zip(self.names, self._parts, strict=True):
            view = self.cache.restricted(name)
            if self.choices.dropout_to == "zeros":
                lengths = self.facts.padding if family.reads_lengths else ()
                if lengths or (view.text_shapes() or {}).keys() - family.fields.keys():
                    raise no_zeros(family)
            elif family.text_reads_control:
                message = "reads each text with control images, so it has no empty text: set it to 0"
                raise StoreError(f"caption_dropout is {self.choices.caption_dropout}, but {family.name} {message}")
            else:
                part.empty_key = view.cached_prompt("").keys[0]

    def _items(self, indices: Sequence[int] | np.ndarray) -> Iterator[tuple[_Samples, np.ndarray, np.ndarray]]:
        """For each manifest the positions of its items among `indices`, and their numbers in it: both int64 [n]."""
        items, num = np.array(indices, np.int64), len(self)
        for item in items[(items < -num) | (items >= num)][:1].tolist():
            raise IndexError(f"item {item} of {num}")
        items %= max(1, num)
        parts = self._ends.searchsorted(items, side="right")
        for number, part in enumerate(self._parts):
            if len(places := np.flatnonzero(parts == number)):
                yield part, places, items[places] - (self._ends[number] - part.num_items)

    def bucket(self, index: int) -> Extent:
        """The bucket of an item, without reading its entries; for a clip it includes the number of frames."""
        [(part, _, items)] = self._items([index])
        height, width, num_frames = part.shapes[items[0] % len(part.usable), 1:4].tolist()
        return ClipSize(height, width, num_frames) if num_frames else Size(height, width)

    def groups(self) -> np.ndarray:
        """The number of each item's group, int64 [n]; groups are sorted by size.

        Items of one group can be batched: they share the bucket, and the roles and sizes of companions.
        """
        shapes = [part.shapes for part in self._parts]
        width = max(each.shape[1] for each in shapes)
        alike = np.concatenate([np.pad(each, ((0, 0), (0, width - each.shape[1]))) for each in shapes])
        numbers = np.unique(alike, axis=0, return_inverse=True)[1].reshape(-1)
        once = np.split(numbers, [*accumulate(map(len, shapes))][:-1])
        pairs = zip(once, self._parts, strict=True)
        return np.concatenate([np.tile(own, part.num_items // max(1, len(own))) for own, part in pairs])

    def places(self) -> Places | None:
        """Where the items' images are in the packs, if `order` is "packs". StoreError if the store cannot tell."""
        if self.order == "random":
            return None
        return Places.of(self.cache.store, np.concatenate([part.image_keys() for part in self._parts]))

    def identity(self) -> str:
        """A digest of the items in order, with sample_id, bucket and flip of each: 64 hexadecimal digits."""
        hasher = blake3()
        for part in self._parts:
            part.identify(hasher)
        return hasher.hexdigest()

    def drawn(self) -> dict[str, Any]:
        """What the choices at each visit depend on besides the draw: numbers and strings.

        These are the settings, the manifests that have mirrored entries, and each manifest's number of crops.
        """
        flips = [name for name, part in zip(self.names, self._parts, strict=True) if part.chooser.choices.flips]
        crops = [str(part.rows.num_crops.max(initial=1)) for part in self._parts]
        return self.choices.state() | {
            **({"flips": f"random in {', '.join(flips)}"} if 0 < len(flips) < len(self.names) else {}),
            **({"crops": f"random of {', '.join(crops)}"} if self.choices.crops == "random" else {}),
        }

    def missing(self) -> set[str]:
        """Keys of the entries that the manifests list, but that the cache lacks or knows to be damaged.

        This includes the empty text, if captions are dropped to it.
        """
        store, empty = self.cache.store, {part.empty_key for part in self._parts if part.empty_key}
        listed = (part.rows.entry_keys(usable=True) for part in self._parts)
        return (empty - store.find(empty)).union(*(key_names(keys[~store.has(keys)]) for keys in listed))

    def refs(self, visits: Visits) -> list[SampleRef]:
        """References to the samples of these visits. SampleError for a sample without the caption or image."""
        found: dict[int, SampleRef] = {}
        for part, places, items in self._items(visits.items):
            own = Visits(items, *(column[places] for column in visits[1:]))
            found.update(zip(places.tolist(), part.refs(own), strict=True))
        return [found[place] for place in range(len(visits.items))]

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Batch]:
        """Read the items of a batch at once; a DataLoader calls this. StoreError if they are of several buckets."""
        batch = self.cache.gather(self.refs(Visits.of(indices, are_drawn=self.draws)))
        ragged = {name: unpadded(batch, name) for name, _ in self.facts.padding if name in batch}
        batch = {name: batch[name] for name in batch if name.removesuffix(MASK) not in ragged} | ragged
        batch |= {name: torch.from_numpy(np.array(batch[name], np.int64)) for name in SIZES}
        columns = [value.unbind() if isinstance(value, torch.Tensor) else value for value in batch.values()]
        return [dict(zip(batch, row, strict=True)) for row in zip(*columns, strict=True)]  # views of the batch

    def collate(self, items: Sequence[Batch]) -> Batch:
        """The `collate_fn` for a DataLoader: torch's default, which also pads texts that are stored without padding.

        They are padded by the family's rule, and `<field>_mask` (bool [B, L]) marks the rows that are not padding.
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
        """Move a batch of `collate` to the requesting device; the arguments are those of `LatentCache.batch`."""
        sizes = {name: batch[name] for name in SIZES}
        rest = {name: value for name, value in batch.items() if name not in SIZES}
        scaling = self.scaling if scaled else None
        return to_device(rest, device, dtype=dtype, output=output, scaling=scaling, generator=generator) | sizes
