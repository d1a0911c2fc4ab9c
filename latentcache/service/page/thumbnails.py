"""Thumbnails of cached images: latents -> pixels -> WebP. Legend: C latent channels, h and w latent rows, columns.

Pixels are uint8 [H, W, 3]. They come from a VAE if the service has a quick one. Otherwise they come from the family's
linear approximation of its decoder, or, if it has none, show the three channels that vary most. Both take milliseconds
and need no model.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from PIL import Image

from latentcache.errors import RequestRefused
from latentcache.families import FAMILIES, family_named
from latentcache.families.base import Preview
from latentcache.store.base import Store
from latentcache.store.entry import Description
from latentcache.types import Entry

if TYPE_CHECKING:
    from latentcache.service.page.vae_decoder import VaeDecoder  # imports diffusers

SIDES = range(32, 2049)
"""Allowed longer sides of a thumbnail, in pixels."""
DEFAULT_SIDE = 256
QUALITY = 70
"""WebP quality, up to 100."""
_FIELDS = ("moments", "latents")
_SPREAD = 50.0
"""Shades per standard deviation of a channel: nearly all values then fit into the 256 shades."""

Way = Literal["vae", "linear", "channels"]
WAYS: Mapping[Way, str] = {
    "vae": "by the VAE",
    "linear": "by a linear approximation: colours and shapes, no details",
    "channels": "into the three channels that vary most: shapes, in colours that are not the photo's",
}
"""The ways to make a picture of latents, in words."""


@dataclass(frozen=True, slots=True)
class Thumbnails:
    """Makes thumbnails of a store's image entries. It is thread-safe, and keeps nothing in memory."""

    store: Store
    decoder: VaeDecoder | None = None

    def way(self, identity: Mapping[str, Any], fields: Description) -> Way | None:
        """How an entry with this identity and these fields becomes a picture; None for one without latents."""
        shape = next((fields[name][1] for name in _FIELDS if name in fields), None)
        if not shape:
            return None
        channels = shape[0] // (2 if "moments" in fields else 1)
        if self.decoder is not None and self.decoder.takes(identity, (channels, *shape[1:])):
            return "vae"
        return "channels" if preview_of(channels, identity) is None else "linear"

    def webp(self, key: str, side: int = DEFAULT_SIDE) -> tuple[bytes, Way]:
        """The entry's picture, at most `side` pixels high and wide and never enlarged, and how it was made.

        EntryMissingError, EntryDamagedError; RequestRefused for an entry without latents.
        """
        entry = self.store.get(key)
        latents, identity = first_frame(entry), entry.record.identity
        way = self.way(identity, self.store.describe(key))
        if self.decoder is not None and way == "vae":
            return webp_of(self.decoder(_shrunk(latents, side, self.decoder.downscale)), side), way
        preview = preview_of(len(latents), identity)
        if preview is None:
            return webp_of(channel_pixels(latents), side), "channels"
        return webp_of(linear_pixels(latents * preview.scaling_factor, preview), side), "linear"


def first_frame(entry: Entry) -> torch.Tensor:
    """The mean latents of an image, or of a video's first frame: unscaled, float32 [C, h, w].

    RequestRefused for an entry without latents.
    """
    tensors, key = entry.tensors, entry.record.key
    field = next((name for name in _FIELDS if name in tensors), None)
    if field is None:
        detail = f"entry {key} is of kind {entry.record.kind}; only entries with latents have a thumbnail"
        raise RequestRefused(detail, status=404)
    latents = tensors[field]
    if latents.ndim not in (3, 4) or latents.numel() == 0:
        detail = f"the {field} of entry {key} are {list(latents.shape)}; a thumbnail needs [C, h, w] or [C, F, h, w]"
        raise RequestRefused(detail, status=404)
    if field == "moments":
        latents = latents.chunk(2)[0]  # mean, then log-variance
    return (latents[:, 0] if latents.ndim == 4 else latents).float()


def preview_of(channels: int, identity: Mapping[str, Any]) -> Preview | None:
    """The linear approximation for latents with these channels and this identity's scaling factor; None without one.

    Imported entries state no factor, so for them the number of channels decides.
    """
    encoding = identity.get("encoding")
    stated = encoding.get("scaling_factor") if isinstance(encoding, Mapping) else None
    for name in FAMILIES:
        preview = family_named(name).latent.preview
        if preview is not None and len(preview.weights[0]) == channels and stated in (None, preview.scaling_factor):
            return preview
    return None


def _shrunk(latents: torch.Tensor, side: int, downscale: int) -> torch.Tensor:
    """The latents, halved while their picture stays larger than `side`: decoding costs the square of the side."""
    while max(latents.shape[1:]) * downscale >= 2 * side and min(latents.shape[1:]) >= 2:
        latents = torch.nn.functional.avg_pool2d(latents, 2)
    return latents


def linear_pixels(latents: torch.Tensor, preview: Preview) -> np.ndarray:
    """The linear approximation of the decoder for scaled latents, one pixel per row and column."""
    weights, biases = (torch.tensor(values, dtype=torch.float32) for values in (preview.weights, preview.biases))
    return _pixels(torch.einsum("chw,rc->hwr", latents, weights) + biases)


def channel_pixels(latents: torch.Tensor) -> np.ndarray:
    """The three channels that vary most as red, green and blue, one pixel per row and column.

    They show the shapes in the photo, but not its colours.
    """
    values = latents.nan_to_num(0.0, 0.0, 0.0).double()
    deviations, means = torch.std_mean(values, (1, 2), correction=0, keepdim=True)
    chosen = deviations.flatten().argsort(descending=True, stable=True)[[0, 1, 2] if len(values) > 2 else [0, 0, 0]]
    shades = 128 + _SPREAD * (values - means)[chosen] / deviations[chosen].clamp_min(1e-12)
    return _pixels(shades.permute(1, 2, 0))


def _pixels(colours: torch.Tensor) -> np.ndarray:
    pixels: np.ndarray = colours.nan_to_num(0.0).clamp(0, 255).byte().numpy()
    return pixels


def webp_of(pixels: np.ndarray, side: int) -> bytes:
    """The pixels as WebP, shrunk if a side is longer than `side`."""
    image = Image.fromarray(pixels)
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "WEBP", quality=QUALITY)
    return buffer.getvalue()
