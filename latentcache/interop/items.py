"""What a reader of another trainer's cache gives, for every format, and what the readers share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, ParamSpec, Protocol, TypeVar

import torch

from latentcache.errors import DatasetError
from latentcache.families.sdxl import DOWNSCALE_FACTOR
from latentcache.types import Geometry, Refusal, Size

MAX_SIDE = 1 << 20
"""A side of an image in pixels is at most this: a larger number is damage."""


@dataclass(frozen=True, slots=True)
class ForeignImage:
    """One latent of another trainer's cache. A flipped latent is a value of its own, with `geometry.flip`."""

    sample_id: str
    """The image's path relative to the images' folder, with `/`: as `dataset.folders.CaptionFileSource` names it."""
    path: str
    """The file that it was read from, for messages."""
    image_path: Path | None
    """The image that it was made from; None where it is not known or not there."""
    latents: torch.Tensor
    """[C, h, w], floating point, on the CPU, as the file holds them."""
    scaling_factor: float | None
    """The format multiplied the latents by it (SDXL: 0.13025). None: they are unscaled."""
    output: Literal["mean", "sample"]
    """Whether the file holds the posterior's mean, or one draw."""
    geometry: Geometry
    note: str | None = None
    """What the format does not say and was derived."""


@dataclass(frozen=True, slots=True)
class ForeignText:
    """One caption's embeddings in another trainer's cache."""

    sample_ids: tuple[str, ...]
    """The samples that it is the caption of; () where the format does not say."""
    path: str
    """The file that it was read from, for messages."""
    caption: str | None
    """None: the format does not carry it, and none was found."""
    prompt_embeds: torch.Tensor
    """[T, D], floating point, on the CPU: both encoders' penultimate hidden states, concatenated."""
    pooled_prompt_embeds: torch.Tensor
    """[P], floating point, on the CPU."""
    note: str | None = None
    """What the format does not say and was derived."""


ForeignItem = ForeignImage | ForeignText | Refusal


class ForeignCache(Protocol):
    """A cache of another trainer, for reading."""

    @property
    def format(self) -> str:
        """`kohya`, `simpletuner`, `ai-toolkit`, `diffusion-pipe`, `onetrainer`."""
        ...

    def items(self) -> Iterator[ForeignItem]:
        """All items, one at a time, in the same order each time.

        What cannot be read or is odd is a Refusal, never an exception. The import itself refuses NaN, Inf, all zeros
        and latents whose shape does not fit their geometry: a reader need not look for these.
        """
        ...


_Item = TypeVar("_Item")
_Arguments = ParamSpec("_Arguments")


def item_or_refusal(
    sample_id: str, read: Callable[_Arguments, _Item], *args: _Arguments.args, **kwargs: _Arguments.kwargs
) -> _Item | Refusal:
    """What `read` returns. If it raises a DatasetError, that is the item's refusal."""
    try:
        return read(*args, **kwargs)
    except DatasetError as error:
        return refusal_of(sample_id, error)


def refusal_of(sample_id: str, error: DatasetError) -> Refusal:
    """The refusal of a file or an image, as a report lists it."""
    return Refusal(sample_id, error.path, getattr(error, "reason", "unreadable"), error.detail)


def is_pixels(value: object, least: int) -> bool:
    """Whether this is a number of pixels: an integer from `least` to MAX_SIDE."""
    return type(value) is int and least <= value <= MAX_SIDE


def bucket_of(latents: torch.Tensor) -> Size:
    """The bucket, in pixels, of latents [C, h, w] of SDXL's VAE."""
    return Size(latents.shape[1] * DOWNSCALE_FACTOR, latents.shape[2] * DOWNSCALE_FACTOR)


def crop_fits(geometry: Geometry) -> bool:
    """Whether the crop lies inside the resized image."""
    sides = zip(geometry.crop_top_left, geometry.target_size, geometry.resized_size, strict=True)
    return all(start + side <= whole for start, side, whole in sides)
