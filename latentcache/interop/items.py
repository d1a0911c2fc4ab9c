"""What a reader of another trainer's cache gives, whatever the format."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch

from latentcache.types import Geometry, Refusal


@dataclass(frozen=True, slots=True)
class ForeignImage:
    """One latent of another trainer's cache. A flipped latent is a value of its own, with `geometry.flip`."""

    sample_id: str
    """The image's path relative to the images' folder, with `/`: as `dataset.folders.FolderSource` names it."""
    path: str
    """The file that it was read from, for messages."""
    image_path: Path | None
    """The image that it was made from; None where it is not known or not there."""
    latents: torch.Tensor
    """[C, h, w], floating point, on the CPU, as the file holds them."""
    scaling_factor: float | None
    """What the format multiplied by (SDXL: 0.13025). None: the latents are unscaled."""
    output: Literal["mean", "sample"]
    """Whether the file holds the posterior's mean, or one draw."""
    geometry: Geometry
    note: str | None = None
    """What the format does not tell and was derived."""


@dataclass(frozen=True, slots=True)
class ForeignText:
    """One caption's embeddings in another trainer's cache."""

    sample_ids: tuple[str, ...]
    """The samples that it is the caption of; () where the format does not tell."""
    path: str
    """The file that it was read from, for messages."""
    caption: str | None
    """None: the format does not carry it, and none was found."""
    prompt_embeds: torch.Tensor
    """[T, D], floating point, on the CPU: both encoders' penultimate hidden states, concatenated."""
    pooled_prompt_embeds: torch.Tensor
    """[P], floating point, on the CPU."""
    note: str | None = None
    """What the format does not tell and was derived."""


ForeignItem = ForeignImage | ForeignText | Refusal


class ForeignCache(Protocol):
    """A cache of another trainer, for reading."""

    @property
    def format(self) -> str:
        """`kohya`, `simpletuner`, `ai-toolkit`, `diffusion-pipe`, `onetrainer`."""
        ...

    def items(self) -> Iterator[ForeignItem]:
        """All that it holds, one at a time, in the same order each time.

        What cannot be read or is odd is a Refusal, never an exception. The import itself refuses NaN, Inf, all zeros
        and latents whose shape does not fit their geometry: a reader need not look for these.
        """
        ...
