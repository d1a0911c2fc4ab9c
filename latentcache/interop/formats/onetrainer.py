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
from functools import partial
from pathlib import Path
from typing import Any

import torch

from latentcache.errors import DatasetError, ForeignFileRefused
from latentcache.families import DEFAULT
from latentcache.families.sdxl import FAMILY as SDXL
from latentcache.interop.foreign_files import corrupt, load_torch, read_file, tensor_in
from latentcache.interop.readers import (
    ForeignImage,
    ForeignItem,
    ForeignText,
    SourceImages,
    crop_fits,
    pixel_pair,
    refusing,
    sample_id_of,
    walked,
)
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
SamplesOf = dict[tuple[int, ...], list[tuple[str, tuple[str, ...]]]]
"""Tokens -> the captions that have them, with their samples."""


def tokenize_with(tokenizer: Any) -> Tokenize:
    """The captions' tokens by the first tokenizer of a model, as mgds makes them."""

    def tokenize(caption: str) -> list[int]:
        return list(tokenizer(caption, padding="max_length", truncation=True, max_length=SDXL.max_length).input_ids)

    return tokenize


def _pair(values: dict[str, Any], name: str, path: str, least: int = 1) -> tuple[int, int]:
    """Two numbers of pixels. Raises ForeignFileRefused."""
    pair = pixel_pair(values.get(name), least)
    if pair is None:
        raise corrupt(path, f"its {name} is {values.get(name)!r:.100}; it must be two numbers of pixels")
    return pair


def _geometry(original: Size, crop: Crop, target: Size, path: str) -> Geometry:
    """The geometry of a latent. The size before the crop is not recorded: AspectBucketing computes it so."""
    if original.height / original.width > target.height / target.width:
        resized = Size(round(original.height * (target.width / original.width)), target.width)
    else:
        resized = Size(target.height, round(original.width * (target.height / original.height)))
    geometry = Geometry(original, resized, crop, target)
    if not crop_fits(geometry):
        raise corrupt(path, f"its crop of {target} at {tuple(crop)} leaves the image of {original} scaled to {resized}")
    return geometry


def _trimmed(tokens: Sequence[int]) -> tuple[int, ...]:
    """The tokens without the padding, which repeats the last token."""
    length = len(tokens)
    while length > 1 and tokens[length - 1] == tokens[length - 2]:
        length -= 1
    return tuple(tokens[:length])


class OneTrainerCache:
    """The cache in OneTrainer's `cache_dir`, with the folders `image` and `text`.

    `images` is the images' folder, with the caption files; `recorded_root` is where it was when the cache was made, if
    it was moved since. Of an image's variations the one with the number `variation` is read. Texts need `tokenize` and
    the caption files; all their variations are read. Raises DatasetError if a folder cannot be read or is no cache.
    """

    format = "onetrainer"
    family: str = DEFAULT
    keeps_padding = True
    declaration = None

    def __init__(
        self,
        root: str | Path,
        *,
        images: str | Path | None = None,
        caption_extension: str = ".txt",
        recorded_root: str | None = None,
        variation: int = 0,
        tokenize: Tokenize | None = None,
    ):
        self._root, self._variation, self._tokenize = os.path.abspath(root), variation, tokenize
        self._kinds = [kind for kind in ("image", "text") if os.path.isdir(os.path.join(self._root, kind))]
        if not self._kinds:
            raise DatasetError(self._root, "holds neither a folder `image` nor `text`: name OneTrainer's cache_dir")
        self._images = SourceImages(images, caption_extension=caption_extension, recorded_root=recorded_root)

    def items(self) -> Iterator[ForeignItem]:
        """Images, then texts; group by group in the order of names."""
        yield from self._images.refusals
        if "image" in self._kinds:
            yield from walked(os.path.join(self._root, "image"), self._image_folder)
        if "text" in self._kinds:
            yield from walked(os.path.join(self._root, "text"), partial(self._text_folder, self._samples_of(), set()))

    def _samples_of(self) -> SamplesOf | None:
        """Tokens -> the captions that have them, with their samples."""
        if self._tokenize is None:
            return None
        samples_of: SamplesOf = {}
        for caption, sample_ids in self._images.captions():
            samples_of.setdefault(_trimmed(self._tokenize(caption)), []).append((caption, sample_ids))
        return samples_of

    def _image_folder(self, folder: str, names: list[str]) -> Iterator[ForeignItem]:
        """The images of a variation of a group; of another folder nothing."""
        match, path = _VARIATION.fullmatch(os.path.basename(folder)), os.path.join(self._root, "image", folder)
        if match is None:
            return
        if int(match[1]) != self._variation:
            detail = f"a manifest holds one variation of an image, here {self._variation}; choose with --variation"
            yield Refusal("", path, "duplicate", detail)
            return
        for number, shared in enumerate(_aggregate(path)):
            recorded = shared.get("image_path") if isinstance(shared, dict) else None
            name = recorded if isinstance(recorded, str) else f"item {number}"
            yield from refusing(name, self._image(shared, os.path.join(path, f"{number}.pt")))

    def _image(self, shared: Any, path: str) -> Iterator[ForeignImage]:
        content = load_torch(read_file(path), path)
        if not isinstance(content, dict) or not isinstance(shared, dict):
            raise corrupt(path, "it, or its line in aggregate.pt, holds no dict")
        recorded = shared.get("image_path")
        if not isinstance(recorded, str):
            raise corrupt(path, f"its image_path is a {type(recorded).__name__}; it must be a string")
        latents = tensor_in(content.get("latent_image"), "latent_image", path, ndim=3)
        original = Size(*_pair(content, "original_resolution", path))
        crop = Crop(*_pair(content, "crop_offset", path, 0))
        geometry = _geometry(original, crop, Size(*_pair(shared, "crop_resolution", path)), path)
        found = self._images.find(recorded)
        image, size = self._images.image(found)
        if size not in (None, original):
            detail = f"the image is {size} now, but was {original}: it was replaced"
            raise ForeignFileRefused(path, "changed", detail)
        note = NOTE_AUGMENTED
        if any(content.get(name) is not None for name in ("latent_mask", "latent_conditioning_image")):
            note = f"{note}; {NOTE_MASK}"
        sample_id = found or sample_id_of(recorded, path)
        yield ForeignImage(sample_id, path, image, latents, False, "mean", geometry, note)

    def _text_folder(
        self, samples_of: SamplesOf | None, seen: set[tuple[int, ...]], folder: str, names: list[str]
    ) -> Iterator[ForeignItem]:
        """The texts of a variation of a group; of another folder nothing. `seen` are the tokens of those before."""
        path = os.path.join(self._root, "text", folder)
        if _VARIATION.fullmatch(os.path.basename(folder)) is None:
            return
        if samples_of is None:
            detail = "no text names its caption, but its tokens identify it: give --config, for its tokenizer"
            yield Refusal("", path, "missing", detail)
            return
        for number in range(len(_aggregate(path))):
            yield from refusing(f"item {number}", _texts(samples_of, seen, os.path.join(path, f"{number}.pt")))


read = OneTrainerCache


def _aggregate(folder: str) -> list[Any]:
    """What aggregate.pt says of each item. Raises ForeignFileRefused."""
    path = os.path.join(folder, AGGREGATE)
    content = load_torch(read_file(path, 2 * _MAX_AGGREGATE_BYTES), path, _MAX_AGGREGATE_BYTES)
    if not isinstance(content, list):
        raise corrupt(path, f"it holds a {type(content).__name__}; it must be a list")
    return content


def _texts(samples_of: SamplesOf, seen: set[tuple[int, ...]], path: str) -> Iterator[ForeignText]:
    """A file's text, once for each caption that has its tokens."""
    tokens, embeds, pooled = _text(load_torch(read_file(path), path), path)
    if tokens in seen:
        return  # another image has the same caption: OneTrainer keeps a copy for each image
    if tokens not in samples_of:
        raise ForeignFileRefused(path, "missing", "no caption has its tokens: edited since, or augmented")
    seen.add(tokens)
    for caption, sample_ids in samples_of[tokens]:
        yield ForeignText(sample_ids, path, caption, embeds, pooled, NOTE_LAYER)


def _text(content: Any, path: str) -> tuple[tuple[int, ...], torch.Tensor, torch.Tensor]:
    """Trimmed tokens, prompt_embeds [77, D], pooled embeds [P]. Raises ForeignFileRefused."""
    if not isinstance(content, dict):
        raise corrupt(path, f"it holds a {type(content).__name__}; it must be a dict")
    if lacking := [name for name in ("tokens_1", *_OUTPUTS) if content.get(name) is None]:
        raise ForeignFileRefused(
            path, "missing", f"it has no {', '.join(lacking)}: the outputs of an encoder that is trained are not cached"
        )
    tokens = content["tokens_1"]
    if type(tokens) is not torch.Tensor or tokens.dtype != torch.int64 or tokens.ndim != 1 or not len(tokens):
        raise corrupt(path, "its tokens_1 is no list of tokens")
    if len(tokens) * tokens.element_size() > tokens.untyped_storage().nbytes():
        raise corrupt(path, "its tokens_1 has more values than the file")
    first, second, pooled = (
        tensor_in(content[name], name, path, ndim=ndim) for name, ndim in zip(_OUTPUTS, (2, 2, 1), strict=True)
    )
    if len(first) != len(second):
        raise corrupt(path, f"its hidden states are of {len(first)} and {len(second)} tokens")
    return _trimmed(tokens.tolist()), torch.cat([first, second], dim=-1), pooled
