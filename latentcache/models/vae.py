"""Images -> VAE moments -> what is kept of them; and latents -> images, in tiles where memory is short.

Legend: B images, C latent channels, H and W pixels, h and w latent rows and columns.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL
from diffusers.image_processor import VaeImageProcessor
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

from latentcache.devices.placement import device_of
from latentcache.errors import ConfigError, EncodeError
from latentcache.models.model_files import first_line, refused
from latentcache.models.model_loader import inference
from latentcache.models.running import free_cached_memory, is_out_of_memory
from latentcache.types import ImageOutput

logger = logging.getLogger("latentcache")

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
TILE = 512
"""Side of a tile in pixels, at most. diffusers' own is the VAE's sample_size: 1024 for SDXL, so that an image of
1024x1024 would not be cut at all."""


def vae_dtype(requested: str, config: Mapping[str, Any], device: torch.device) -> tuple[torch.dtype, str]:
    """The dtype in which the VAE computes, and the reason as a sentence. `config` is `ModelLoader.vae_config()`.

    `auto` is float32 on the CPU, and on an accelerator where `force_upcast` is set, else float16. The rule is that of
    diffusers' SDXL pipelines: a VAE with `force_upcast` overflows in float16.
    """
    if requested != "auto":
        dtype, reason = _requested("vae_dtype", requested)
        if dtype is torch.float16 and config["force_upcast"]:
            reason += " The VAE has force_upcast, so it may overflow in float16."
        return dtype, reason
    if device.type == "cpu":
        return torch.float32, "The device is a CPU, which computes float16 slowly."
    if config["force_upcast"]:
        return torch.float32, "The VAE has force_upcast: it overflows in float16."
    return torch.float16, f"The VAE has no force_upcast, so it computes in float16 on {device}."


def text_dtype(requested: str, device: torch.device) -> tuple[torch.dtype, str]:
    """The dtype in which the text encoders compute, and the reason. `auto`: float32 on the CPU, else float16."""
    if requested != "auto":
        return _requested("text_dtype", requested)
    if device.type == "cpu":
        return torch.float32, "The device is a CPU, which computes float16 slowly."
    return torch.float16, f"The text encoders compute in float16 on {device}, as SDXL's pipelines do."


def _requested(setting: str, requested: str) -> tuple[torch.dtype, str]:
    if requested not in DTYPES:
        raise ConfigError(
            f"{setting} is {requested!r}, but one of auto, {', '.join(DTYPES)} is needed", key=f"encode.{setting}"
        )
    return DTYPES[requested], f"{requested} was requested (encode.{setting})."


def encode_images(vae: AutoencoderKL, pixels: np.ndarray | torch.Tensor) -> torch.Tensor:
    """The posterior's parameters (mean, log-variance), unscaled: [B, 2*C, h, w], on the VAE's device, in its dtype.

    `pixels` are uint8 [B, H, W, 3], upright sRGB. They become `pixels / 127.5 - 1` in float32, then the VAE's dtype.
    The VAE is used as it stands (device, mode, memory format, slicing, tiling), under no_grad and without autocast.
    The same image may differ in the last bits in a batch of another size, in another memory format, and on a CPU with
    another number of threads. Raises ModelError if the pixels are not of this form, or the VAE has no Gaussian
    posterior.
    """
    if isinstance(pixels, np.ndarray):
        # A copy where needed: torch warns of read-only arrays (Pillow's are) and refuses negative strides (a flip's).
        pixels = torch.from_numpy(np.require(pixels, requirements=["C", "W"]))
    if pixels.dtype != torch.uint8 or pixels.ndim != 4 or pixels.shape[-1] != 3:
        raise refused("vae", f"pixels are {pixels.dtype} {list(pixels.shape)}, but uint8 [B, H, W, 3] is needed")
    parameter = next(vae.parameters())
    with inference(parameter.device):
        images = pixels.to(parameter.device).permute(0, 3, 1, 2).float().div(127.5).sub(1.0)
        # Laid out as the weights: for channels-last strides convolutions may take a kernel that rounds otherwise.
        images = images.to(parameter.dtype).contiguous(memory_format=memory_format_of(vae))
        posterior = getattr(vae.encode(images), "latent_dist", None)
    if not isinstance(posterior, DiagonalGaussianDistribution):
        raise refused("vae", f"{type(vae).__name__} has no Gaussian posterior. Use a diffusers.AutoencoderKL.")
    parameters: torch.Tensor = posterior.parameters
    sides = [side // downscale_factor(vae) for side in pixels.shape[1:3]]
    expected = [len(pixels), 2 * vae.config.latent_channels, *sides]
    if list(parameters.shape) != expected:
        raise refused("vae", f"it gave moments of shape {list(parameters.shape)}, but {expected} is needed")
    return parameters


def memory_format_of(module: torch.nn.Module) -> torch.memory_format:
    """`channels_last` if a convolution's weight is in that format alone, else `contiguous_format`."""
    weights = (parameter for parameter in module.parameters() if parameter.ndim == 4)
    if any(w.is_contiguous(memory_format=torch.channels_last) and not w.is_contiguous() for w in weights):
        return torch.channels_last
    return torch.contiguous_format


def keep_output(
    moments: torch.Tensor, output: ImageOutput, seeds: Sequence[int] | None = None
) -> dict[str, torch.Tensor]:
    """What an entry stores of the moments [B, 2*C, h, w]: field -> tensor, unscaled, in the moments' dtype.

    `moments`: the field `moments`, as they are. `mean`: `latents` [B, C, h, w]. `sample`: `latents`, one draw for each
    item from a CPU generator with its own seed, noise in float32. A draw therefore depends on its seed and moments
    alone, neither on the device nor on the batch. Raises ValueError if `sample` has not one seed for each item.
    """
    if output == "moments":
        return {"moments": moments}
    if output == "mean":
        return {"latents": latents_from_moments(moments)}
    if output != "sample":
        raise ValueError(f"output is {output!r}, but moments, mean or sample is needed")
    if seeds is None or len(seeds) != len(moments):
        given = "no seeds" if seeds is None else f"{len(seeds)} seeds"
        raise ValueError(f"{given} for {len(moments)} items: output `sample` needs one seed for each")
    posterior = DiagonalGaussianDistribution(moments)
    noise = [torch.randn(posterior.mean.shape[1:], generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return {"latents": posterior.mean + posterior.std * torch.stack(noise).to(moments)}


def latents_from_moments(moments: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    """Unscaled latents [B, C, h, w]: the mean, or with a generator one draw, as `latent_dist.sample(generator)` does.

    The clamp of the log-variance and the deviation are those of diffusers' DiagonalGaussianDistribution.
    """
    posterior = DiagonalGaussianDistribution(moments)
    latents: torch.Tensor = posterior.mode().contiguous() if generator is None else posterior.sample(generator)
    return latents


def posterior_std(moments: torch.Tensor) -> torch.Tensor:
    """The standard deviation of a draw at each place, unscaled: [B, C, h, w]."""
    std: torch.Tensor = DiagonalGaussianDistribution(moments).std
    return std


def problem_flags(outputs: torch.Tensor) -> torch.Tensor:
    """What `problem_names` reads: bool [B, 3] for outputs [B, ...], on their device. The host does not wait."""
    items = outputs.reshape(len(outputs), -1)
    return torch.stack([items.isnan().any(1), items.isinf().any(1), (items == 0).all(1)], dim=1)


def problem_names(flags: torch.Tensor) -> list[str | None]:
    """For each row of `problem_flags` what makes the item unusable: `nan`, `inf`, `all-zero` or None."""
    names = ("nan", "inf", "all-zero")
    return [next((name for name, found in zip(names, item, strict=True) if found), None) for item in flags.tolist()]


def problems(outputs: torch.Tensor) -> list[str | None]:
    """For each item of [B, ...] what makes it unusable: `nan`, `inf`, `all-zero` or None. One device sync a call."""
    return problem_names(problem_flags(outputs))


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
        if vae.config.force_upcast and next(vae.parameters()).dtype == torch.float16:
            stack.enter_context(_in_float32(vae))
        stack.enter_context(_tiling(vae, latents.shape[-2:], tiled))
        decoded = vae.decode(_unscaled(vae, latents.to(device, next(vae.parameters()).dtype)), return_dict=False)[0]
        pixels: np.ndarray = VaeImageProcessor().postprocess(decoded, output_type="np")
    finite = np.isfinite(pixels)
    if not finite.all():
        logger.warning("vae: %d of %d decoded numbers are NaN: shown as black", (~finite).sum(), finite.size)
        pixels = np.where(finite, pixels, np.float32(0))
    return (pixels * 255).round().astype(np.uint8)


def decode_fitting(vae: AutoencoderKL, latents: torch.Tensor) -> tuple[np.ndarray, bool]:
    """`decode_latents`, whole where that fits into memory and in tiles where it does not; and whether it was in tiles.

    Raises EncodeError (problem `out-of-memory`) if tiles do not fit either.
    """
    device, shortage = device_of(vae), ""
    for tiled in (False, True):
        try:
            images = decode_latents(vae, latents, tiled=tiled)
            has_own_tiles = getattr(vae, "use_tiling", False) and max(latents.shape[-2:]) > vae.tile_latent_min_size
            return images, tiled or has_own_tiles
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            shortage = first_line(error)
        # After the except block, in which the traceback's frames keep the failed call's tensors alive.
        free_cached_memory(device)
        if not tiled:
            logger.info("vae: decoding in tiles: at once it ran out of memory on %s (%s)", device, shortage)
    raise EncodeError(
        f"vae: tiles of {TILE} pixels do not fit into the memory of {device} either ({shortage}). Free memory there, "
        "take a smaller validation.height and validation.width, or decode on the CPU.",
        part="vae",
        problem="out-of-memory",
    )


def downscale_factor(vae: AutoencoderKL) -> int:
    """Pixels per latent row or column: each stage but the last halves the image."""
    stages: Sequence[int] = vae.config.block_out_channels
    return 1 << len(stages) - 1


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
            raise refused("vae", f"{type(vae).__name__} cannot decode in tiles. Use a diffusers.AutoencoderKL.")
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
