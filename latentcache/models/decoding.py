"""Latents -> images, as SDXL's pipeline decodes them; in tiles where memory is short.

Legend: B images, C latent channels, H and W pixels, h and w latent rows and columns.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from diffusers import AutoencoderKL
from diffusers.image_processor import VaeImageProcessor

from latentcache.devices.placement import device_of, free_memory
from latentcache.errors import EncodeError, ModelError
from latentcache.models.batching import free_cached_memory, is_out_of_memory
from latentcache.models.model_files import first_line
from latentcache.models.model_loader import inference

TILE = 512
"""Side of a tile in pixels, at most. diffusers' own is the VAE's sample_size: 1024 for SDXL, so that an image of
1024x1024 would not be cut at all."""
LIVE_COPIES = 4
"""Copies of the decoder's largest activation that are alive at once: input, normed and activated in a residual block
(three, counted over the live tensors of SDXL's decoder at 512 and 1024 pixels), and one more for the convolution."""
USABLE = 0.8
"""The part of the free memory that can be used: allocators lose some to fragments."""

logger = logging.getLogger("latentcache")


@dataclass(frozen=True, slots=True)
class Decoded:
    """Images, uint8 [B, H, W, 3]; whether they were decoded in tiles, and the reason."""

    images: np.ndarray
    tiled: bool
    reason: str


def decode_latents(vae: AutoencoderKL, latents: torch.Tensor, *, tiled: bool = False) -> np.ndarray:
    """Images uint8 [B, H, W, 3] of latents [B, C, h, w] that are scaled, as the denoising loop leaves them.

    The bits are those of `StableDiffusionXLPipeline` for the same latents, where that has no watermark. The latents go
    to the VAE's device and dtype; the VAE runs where it is, without gradients and without a surrounding autocast. A
    float16 VAE with `force_upcast` computes in float32, as in the pipeline. Unlike there, its own float16 weights are
    restored after an error too, and a `shift_factor` of its config is added. `tiled` cuts images into overlapping tiles
    of at most TILE pixels and blends them: other pixels, less memory. The VAE's tiling settings are restored; without
    `tiled` they apply as they are. A number that is not finite becomes black, with a logged warning.
    """
    device = device_of(vae)
    with ExitStack() as stack:
        stack.enter_context(inference(device))
        if upcasts(vae):
            stack.enter_context(_in_float32(vae))
        stack.enter_context(_tiling(vae, latents.shape[-2:], tiled))
        decoded = vae.decode(_unscaled(vae, latents.to(device, next(vae.parameters()).dtype)), return_dict=False)[0]
        pixels: np.ndarray = VaeImageProcessor().postprocess(decoded, output_type="np")
    finite = np.isfinite(pixels)
    if not finite.all():
        logger.warning("vae: %d of %d decoded numbers are NaN: shown as black", (~finite).sum(), finite.size)
        pixels = np.where(finite, pixels, np.float32(0))
    return (pixels * 255).round().astype(np.uint8)


def decode_fitting(vae: AutoencoderKL, latents: torch.Tensor) -> Decoded:
    """`decode_latents`, whole where that fits into memory and in tiles where it does not.

    Tiles are chosen at once where the free memory of the device is known and `decoding_bytes` exceeds USABLE of it, and
    after the whole decode ran out of memory. Raises EncodeError (problem `out-of-memory`) if tiles do not fit
    either.
    """
    device = device_of(vae)
    needed = decoding_bytes(vae, latents)
    free_bytes = None if device.type == "cpu" else free_memory(device)
    if free_bytes is not None and needed > free_bytes * USABLE:
        # Blocks that the allocator keeps do not count as free, and after training they are nearly all of the memory.
        free_cached_memory(device)
        free_bytes = free_memory(device)
    if free_bytes is not None and needed > free_bytes * USABLE:
        reason = (
            f"tiles: about {needed / 1e9:.1f} GB are needed at once, {free_bytes / 1e9:.1f} GB are free on {device}"
        )
    else:
        shortage = None
        try:
            images = decode_latents(vae, latents)
            if _has_own_tiles(vae, latents):
                return Decoded(images, True, "tiles: the VAE was given with tiling enabled")
            return Decoded(images, False, f"whole: about {needed / 1e9:.1f} GB on {device}")
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            shortage = first_line(error)
        reason = f"tiles: decoding at once ran out of memory on {device} ({shortage})"
    # After the except block, in which the traceback's frames keep the failed call's tensors alive.
    free_cached_memory(device)
    logger.info("vae: %s", reason)
    try:
        return Decoded(decode_latents(vae, latents, tiled=True), True, reason)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise EncodeError(
            f"vae: tiles of {TILE} pixels do not fit into the memory of {device} either ({first_line(error)}). Free "
            "memory there, take a smaller validation.height and validation.width, or decode on the CPU.",
            part="vae",
            problem="out-of-memory",
        ) from error


def decoding_bytes(vae: AutoencoderKL, latents: torch.Tensor) -> int:
    """An estimate of the bytes that decoding all the latents at once takes, beyond the VAE's own weights.

    LIVE_COPIES of the decoder's largest activation: the last residual stage works on full H x W and takes in
    `block_out_channels[1]` channels (256 for SDXL; one stage only: its own). A VAE that is upcast has its weights a
    second time, in float32.
    """
    channels = vae.config.block_out_channels
    num_pixels = latents.shape[0] * math.prod(latents.shape[-2:]) * downscale_factor(vae) ** 2
    upcast = upcasts(vae)
    itemsize = 4 if upcast else next(vae.parameters()).dtype.itemsize
    weights = 4 * sum(parameter.numel() for parameter in vae.parameters()) if upcast else 0
    return int(num_pixels * channels[min(1, len(channels) - 1)] * itemsize * LIVE_COPIES + weights)


def downscale_factor(vae: AutoencoderKL) -> int:
    """Pixels per latent row or column: each stage but the last halves the image."""
    stages: Sequence[int] = vae.config.block_out_channels
    return 1 << len(stages) - 1


def upcasts(vae: AutoencoderKL) -> bool:
    """Whether the VAE has to compute in float32, because it overflows in the float16 that it is in."""
    return bool(vae.config.force_upcast) and next(vae.parameters()).dtype == torch.float16


def _unscaled(vae: AutoencoderKL, latents: torch.Tensor) -> torch.Tensor:
    """What the VAE's decoder takes: the pipeline's formula, in its order of operations."""
    config, factor = vae.config, float(vae.config.scaling_factor)
    statistics = [getattr(config, name, None) for name in ("latents_mean", "latents_std")]
    if None not in statistics:
        mean, deviation = (torch.tensor(value).view(1, -1, 1, 1).to(latents) for value in statistics)
        return latents * deviation / factor + mean
    shift = getattr(config, "shift_factor", None)
    return latents / factor + shift if shift else latents / factor


@contextmanager
def _in_float32(vae: AutoencoderKL) -> Iterator[None]:
    """Half-precision weights as float32 while inside, in the same Parameter objects; then the same memory again.

    The originals are kept meanwhile: restoring them must not need memory, since it may have run out.
    """
    originals = [
        (tensor, tensor.data)
        for tensor in chain(vae.parameters(), vae.buffers())
        if tensor.is_floating_point() and tensor.dtype != torch.float32
    ]
    try:
        for tensor, data in originals:
            tensor.data = data.float()
        yield
    finally:
        for tensor, data in originals:
            tensor.data = data


@contextmanager
def _tiling(vae: AutoencoderKL, size: Sequence[int], tiled: bool) -> Iterator[None]:
    """With `tiled`, tiling while inside: at least two tiles along the longer side of latents of (h, w)."""
    names = ("use_tiling", "tile_latent_min_size", "tile_sample_min_size")
    if not all(hasattr(vae, name) for name in names):
        if tiled:
            raise ModelError(f"vae: {type(vae).__name__} cannot decode in tiles. Use a diffusers.AutoencoderKL.")
        yield
        return
    before = {name: getattr(vae, name) for name in names}
    try:
        if tiled:
            factor = downscale_factor(vae)
            # A multiple of four: tiles overlap by a quarter, and blending needs whole latent rows.
            side = max(4, min(TILE // factor, max(size) // 2) // 4 * 4)
            vae.enable_tiling()
            vae.tile_latent_min_size, vae.tile_sample_min_size = side, side * factor
        yield
    finally:
        for name, value in before.items():
            setattr(vae, name, value)


def _has_own_tiles(vae: AutoencoderKL, latents: torch.Tensor) -> bool:
    return getattr(vae, "use_tiling", False) and max(latents.shape[-2:]) > vae.tile_latent_min_size
