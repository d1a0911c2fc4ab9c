"""OneTrainer's own cache of SDXL: `.pt` files that mgds' `DiskCache` writes.

`<cache_dir>/image/<group>/variation-<k>/<n>.pt` is a dict with `latent_image` [4, h, w], the posterior's mean,
unscaled, and with `original_resolution` and `crop_offset`; `aggregate.pt` next to it is a list of dicts, the n-th with
`crop_resolution` and the absolute `image_path`. `<cache_dir>/text/...` holds `tokens_1`, `text_encoder_1_hidden_state`
[77, 768], `text_encoder_2_hidden_state` [77, 1280] and `text_encoder_2_pooled_state` [1280]. Sizes are (height, width).
(Read in mgds: AspectBucketing scales the image to cover the bucket, ScaleCropImage crops it.)

OneTrainer pairs a text with its image by position alone, and the position shifts when files come or go. Here a text is
paired with the caption that has its tokens, which takes a tokenizer.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from latentcache.dataset.samples import walk
from latentcache.errors import DatasetError, ForeignFileRefused
from latentcache.families.sdxl import NUM_TOKENS
from latentcache.interop.items import (
    ForeignImage,
    ForeignItem,
    ForeignText,
    crop_fits,
    is_pixels,
    item_or_refusal,
    refusal_of,
)
from latentcache.interop.source_images import SourceImages, sample_id_of
from latentcache.interop.torch_files import load_torch, read_file, tensor_in
from latentcache.types import Crop, Geometry, Refusal, Size

AGGREGATE = "aggregate.pt"
NOTE_AUGMENTED = "flips and other augmentations are not recorded: none are assumed"
NOTE_LAYER = "the hidden layer (clip skip) is not recorded"
NOTE_MASK = "its mask or conditioning image is not imported"

_VARIATION = re.compile(r"variation-(\d{1,6})")
_MAX_AGGREGATE_BYTES = 32 << 20  # some 200 for each image
_OUTPUTS = ("text_encoder_1_hidden_state", "text_encoder_2_hidden_state", "text_encoder_2_pooled_state")

Tokenize = Callable[[str], Sequence[int]]
"""Caption -> its tokens by SDXL's first tokenizer, cut and padded to 77."""


def read(
    root: str | Path,
    *,
    images: str | Path | None = None,
    caption_extension: str = ".txt",
    recorded_root: str | None = None,
    variation: int = 0,
    tokenize: Tokenize | None = None,
) -> OneTrainerCache:
    """The cache in OneTrainer's `cache_dir`, with the folders `image` and `text`.

    `images` is the images' folder, with the caption files; `recorded_root` is where it was when the cache was made, if
    it was moved since. Of an image's variations the one with the number `variation` is read. Texts need `tokenize` and
    the caption files; all their variations are read. Raises DatasetError if a folder cannot be read or is no cache.
    """
    folder = os.path.abspath(root)
    if not any(os.path.isdir(os.path.join(folder, kind)) for kind in ("image", "text")):
        raise DatasetError(folder, "holds neither a folder `image` nor `text`: name OneTrainer's cache_dir")
    source_images = SourceImages(images, caption_extension=caption_extension, recorded_root=recorded_root)
    return OneTrainerCache(folder, source_images, variation, tokenize)


def tokenize_with(tokenizer: Any) -> Tokenize:
    """The captions' tokens by the first tokenizer of a model, as mgds makes them."""

    def tokenize(caption: str) -> list[int]:
        return list(tokenizer(caption, padding="max_length", truncation=True, max_length=NUM_TOKENS).input_ids)

    return tokenize


def _pair(value: object, name: str, path: str, *, least: int) -> tuple[int, int]:
    """Two numbers of pixels. Raises ForeignFileRefused."""
    if not isinstance(value, (tuple, list)) or len(value) != 2 or not all(is_pixels(side, least) for side in value):
        raise ForeignFileRefused(path, "corrupt", f"its {name} is {value!r:.100}; it must be two numbers of pixels")
    return value[0], value[1]


def _geometry(original: Size, crop: Crop, target: Size, path: str) -> Geometry:
    """The geometry of a latent. The size before the crop is not recorded: AspectBucketing computes it so."""
    if original.height / original.width > target.height / target.width:
        resized = Size(round(original.height * (target.width / original.width)), target.width)
    else:
        resized = Size(target.height, round(original.width * (target.height / original.height)))
    geometry = Geometry(original, resized, crop, target)
    if not crop_fits(geometry):
        raise ForeignFileRefused(
            path, "corrupt", f"its crop of {target} at {tuple(crop)} leaves the image of {original} scaled to {resized}"
        )
    return geometry


def _trimmed(tokens: Sequence[int]) -> tuple[int, ...]:
    """The tokens without the padding, which repeats the last token."""
    length = len(tokens)
    while length > 1 and tokens[length - 1] == tokens[length - 2]:
        length -= 1
    return tuple(tokens[:length])


class OneTrainerCache:
    """See `read`."""

    format = "onetrainer"

    def __init__(self, root: str, images: SourceImages, variation: int, tokenize: Tokenize | None):
        self._root, self._images = root, images
        self._variation, self._tokenize = variation, tokenize

    def items(self) -> Iterator[ForeignItem]:
        """Images, then texts; group by group in the order of names."""
        yield from self._images.refusals
        for found in self._folders("image"):
            if isinstance(found, Refusal):
                yield found
            elif found[1] == self._variation:
                yield from self._variation_images(found[0])
            else:
                detail = f"a manifest holds one variation of an image, here {self._variation}; choose with --variation"
                yield Refusal("", found[0], "duplicate", detail)
        samples_of = self._samples_of()
        seen: set[tuple[int, ...]] = set()
        for found in self._folders("text"):
            if isinstance(found, Refusal):
                yield found
            elif samples_of is None:
                detail = "no text names its caption, but its tokens identify it: give --config, for its tokenizer"
                yield Refusal("", found[0], "missing", detail)
            else:
                yield from self._texts(found[0], samples_of, seen)

    def _folders(self, kind: str) -> Iterator[tuple[str, int] | Refusal]:
        """(path, number) of every variation of every group."""
        root = os.path.join(self._root, kind)
        if not os.path.isdir(root):
            return
        for found in walk(root):
            if isinstance(found, Refusal):
                yield found
            elif (match := _VARIATION.fullmatch(os.path.basename(found[0]))) is not None:
                yield os.path.join(root, found[0]), int(match[1])

    def _samples_of(self) -> dict[tuple[int, ...], list[tuple[str, tuple[str, ...]]]] | None:
        """Tokens -> the captions that have them, with their samples."""
        if self._tokenize is None:
            return None
        samples_of: dict[tuple[int, ...], list[tuple[str, tuple[str, ...]]]] = {}
        for caption, sample_ids in self._images.captions():
            samples_of.setdefault(_trimmed(self._tokenize(caption)), []).append((caption, sample_ids))
        return samples_of

    def _aggregate(self, folder: str) -> list[Any]:
        path = os.path.join(folder, AGGREGATE)
        content = load_torch(read_file(path, 2 * _MAX_AGGREGATE_BYTES), path, _MAX_AGGREGATE_BYTES)
        if not isinstance(content, list):
            raise ForeignFileRefused(path, "corrupt", f"it holds a {type(content).__name__}; it must be a list")
        return content

    def _variation_images(self, folder: str) -> Iterator[ForeignItem]:
        try:
            aggregate = self._aggregate(folder)
        except ForeignFileRefused as error:
            yield refusal_of("", error)
            return
        for number, shared in enumerate(aggregate):
            recorded = shared.get("image_path") if isinstance(shared, dict) else None
            name = recorded if isinstance(recorded, str) else f"item {number}"
            yield item_or_refusal(name, self._image, shared, os.path.join(folder, f"{number}.pt"))

    def _image(self, shared: Any, path: str) -> ForeignImage:
        content = load_torch(read_file(path), path)
        if not isinstance(content, dict) or not isinstance(shared, dict):
            raise ForeignFileRefused(path, "corrupt", "it, or its line in aggregate.pt, holds no dict")
        recorded = shared.get("image_path")
        if not isinstance(recorded, str):
            raise ForeignFileRefused(
                path, "corrupt", f"its image_path is a {type(recorded).__name__}; it must be a string"
            )
        latents = tensor_in(content.get("latent_image"), "latent_image", path, ndim=3)
        original = Size(*_pair(content.get("original_resolution"), "original_resolution", path, least=1))
        crop = Crop(*_pair(content.get("crop_offset"), "crop_offset", path, least=0))
        target = Size(*_pair(shared.get("crop_resolution"), "crop_resolution", path, least=1))
        geometry = _geometry(original, crop, target, path)
        sample_id, image = self._images.find(recorded), None
        if sample_id is None:
            sample_id = sample_id_of(recorded, path)
        else:
            image = self._images.path(sample_id)
            if (size := self._images.size(sample_id)) != original:
                raise ForeignFileRefused(
                    path, "changed", f"the image is {size} now, but was {original}: it was replaced"
                )
        note = NOTE_AUGMENTED
        if any(content.get(name) is not None for name in ("latent_mask", "latent_conditioning_image")):
            note = f"{note}; {NOTE_MASK}"
        return ForeignImage(sample_id, path, image, latents, None, "mean", geometry, note)

    def _texts(
        self,
        folder: str,
        samples_of: dict[tuple[int, ...], list[tuple[str, tuple[str, ...]]]],
        seen: set[tuple[int, ...]],
    ) -> Iterator[ForeignItem]:
        try:
            num_items = len(self._aggregate(folder))
        except ForeignFileRefused as error:
            yield refusal_of("", error)
            return
        for number in range(num_items):
            path = os.path.join(folder, f"{number}.pt")
            try:
                tokens, embeds, pooled = _text(load_torch(read_file(path), path), path)
                if tokens in seen:
                    continue  # another image has the same caption: OneTrainer keeps a copy for each image
                if tokens not in samples_of:
                    raise ForeignFileRefused(path, "missing", "no caption has its tokens: edited since, or augmented")
            except ForeignFileRefused as error:
                yield refusal_of(f"item {number}", error)
                continue
            seen.add(tokens)
            for caption, sample_ids in samples_of[tokens]:
                yield ForeignText(sample_ids, path, caption, embeds, pooled, NOTE_LAYER)


def _text(content: Any, path: str) -> tuple[tuple[int, ...], torch.Tensor, torch.Tensor]:
    """Trimmed tokens, prompt_embeds [77, D], pooled embeds [P]. Raises ForeignFileRefused."""
    if not isinstance(content, dict):
        raise ForeignFileRefused(path, "corrupt", f"it holds a {type(content).__name__}; it must be a dict")
    if lacking := [name for name in ("tokens_1", *_OUTPUTS) if content.get(name) is None]:
        raise ForeignFileRefused(
            path, "missing", f"it has no {', '.join(lacking)}: the outputs of an encoder that is trained are not cached"
        )
    tokens = content["tokens_1"]
    if type(tokens) is not torch.Tensor or tokens.dtype != torch.int64 or tokens.ndim != 1 or not len(tokens):
        raise ForeignFileRefused(path, "corrupt", "its tokens_1 is no list of tokens")
    if len(tokens) * tokens.element_size() > tokens.untyped_storage().nbytes():
        raise ForeignFileRefused(path, "corrupt", "its tokens_1 has more values than the file")
    first, second, pooled = (
        tensor_in(content[name], name, path, ndim=ndim) for name, ndim in zip(_OUTPUTS, (2, 2, 1), strict=True)
    )
    if len(first) != len(second):
        raise ForeignFileRefused(path, "corrupt", f"its hidden states are of {len(first)} and {len(second)} tokens")
    return _trimmed(tokens.tolist()), torch.cat([first, second], dim=-1), pooled
