"""Small pictures of cached images: latents -> pixels -> WebP. Legend: C latent channels, h and w latent rows, columns.

Pixels are uint8 [H, W, 3]. By default they come from the linear approximation of the family, which takes milliseconds
and no model. A `Decoder` is the VAE's own, where the service has one.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
import torch
from PIL import Image

from latentcache.errors import RequestRefused
from latentcache.families import DEFAULT, family_named
from latentcache.families.scaling import Scaling
from latentcache.families.sdxl import SCALING_FACTOR
from latentcache.store.base import Store
from latentcache.types import Entry

Decoder = Callable[[torch.Tensor], np.ndarray]
"""Scaled latents [C, h, w], float32 on the CPU -> pixels. It is called by several threads."""

SIDES = range(32, 2049)
"""Allowed for the longer side of a thumbnail, in pixels."""
DEFAULT_SIDE = 256
QUALITY = 70
"""Of WebP, up to 100."""
_MAX_NUMBER = 1e30  # of a factor or a shift: what float32 holds, with room


@dataclass(frozen=True, slots=True)
class Thumbnails:
    """Makes thumbnails of a store's image entries. Threads may share it: it keeps nothing.

    `name` names the way of decoding: thumbnails of another name may look different.
    """

    store: Store
    decoder: Decoder | None = None

    @property
    def name(self) -> str:
        """`vae` with a decoder, else `linear`."""
        return "linear" if self.decoder is None else "vae"

    def webp(self, key: str, side: int = DEFAULT_SIDE) -> bytes:
        """The entry's picture, at most `side` pixels high and wide; never larger than what was decoded.

        EntryMissingError, EntryDamagedError; RequestRefused for an entry that has no latents, and a side not in SIDES.
        """
        if side not in SIDES:
            allowed = f"{SIDES.start} to {SIDES.stop - 1}"
            raise RequestRefused("a thumbnail has no such side", status=422, met=side, allowed=allowed)
        entry = self.store.get(key)
        latents = scaled_latents(entry)
        if self.decoder is None:
            return webp_of(linear_pixels(latents), side)
        return webp_of(self.decoder(_shrunk(latents, side)), side)


def scaled_latents(entry: Entry) -> torch.Tensor:
    """The mean latents of an image entry, scaled as the denoiser sees them: float32 [C, h, w].

    RequestRefused if it has none.
    """
    tensors, key = entry.tensors, entry.record.key
    if "moments" in tensors:
        latents = tensors["moments"].chunk(2)[0]  # mean, then log-variance
    elif "latents" in tensors:
        latents = tensors["latents"]
    else:
        detail = f"entry {key} is of kind {entry.record.kind}: only entries with latents have a thumbnail"
        raise RequestRefused(detail, status=404)
    channels = family_named(DEFAULT).latent.channels
    if latents.ndim != 3 or len(latents) != channels:
        expected = f"[{channels}, h, w]"
        detail = f"entry {key} has latents {list(latents.shape)}: a thumbnail needs {expected}"
        raise RequestRefused(detail, status=404)
    return scaling_of(entry.record.identity).apply(latents.float())


def scaling_of(identity: Mapping[str, Any]) -> Scaling:
    """The scaling of the VAE that an entry was encoded with. Imported entries name none: they have the family's."""
    encoding = identity.get("encoding")
    if isinstance(encoding, Mapping):
        factor, shift = encoding.get("scaling_factor"), encoding.get("shift_factor")
        if _is_number(factor) and factor != 0 and (shift is None or _is_number(shift)):
            return Scaling(float(factor), shift)
    return Scaling(SCALING_FACTOR)


def _is_number(value: object) -> TypeGuard[float]:
    """Whether it can be a factor or a shift: no NaN, and nothing that float32 cannot hold."""
    return isinstance(value, (int, float)) and abs(value) < _MAX_NUMBER


def _shrunk(latents: torch.Tensor, side: int) -> torch.Tensor:
    """The latents, halved as long as their picture stays larger than `side`: decoding costs the square of the side."""
    while max(latents.shape[1:]) * family_named(DEFAULT).latent.downscale >= 2 * side and min(latents.shape[1:]) >= 2:
        latents = torch.nn.functional.avg_pool2d(latents, 2)
    return latents


def linear_pixels(latents: torch.Tensor) -> np.ndarray:
    """The family's linear approximation of the decoder: a pixel for each latent's row and column."""
    preview = family_named(DEFAULT).latent.preview
    assert preview is not None
    weights, biases = (torch.tensor(values, dtype=torch.float32) for values in preview)
    colours = torch.einsum("chw,rc->hwr", latents, weights) + biases
    pixels: np.ndarray = colours.nan_to_num(0.0).clamp(0, 255).byte().numpy()
    return pixels


def webp_of(pixels: np.ndarray, side: int) -> bytes:
    """The pixels as WebP, made smaller where a side is longer than `side`."""
    image = Image.fromarray(pixels)
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=QUALITY)
    return buffer.getvalue()
