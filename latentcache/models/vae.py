"""Images -> VAE moments -> what is kept of them.

Legend: B images, C latent channels, H and W pixels, h and w latent rows and columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

from latentcache.errors import ConfigError, ModelError
from latentcache.models.model_loader import inference
from latentcache.types import ImageOutput

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


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
        raise ModelError(
            f"vae: pixels are {pixels.dtype} {list(pixels.shape)}, but uint8 [B, H, W, 3] is needed", part="vae"
        )
    parameter = next(vae.parameters())
    with inference(parameter.device):
        images = pixels.to(parameter.device).permute(0, 3, 1, 2).float().div(127.5).sub(1.0)
        # Laid out as the weights: for channels-last strides convolutions may take a kernel that rounds otherwise.
        images = images.to(parameter.dtype).contiguous(memory_format=memory_format_of(vae))
        posterior = getattr(vae.encode(images), "latent_dist", None)
    if not isinstance(posterior, DiagonalGaussianDistribution):
        raise ModelError(
            f"vae: {type(vae).__name__} has no Gaussian posterior. Use a diffusers.AutoencoderKL.", part="vae"
        )
    parameters: torch.Tensor = posterior.parameters
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


def _requested(setting: str, requested: str) -> tuple[torch.dtype, str]:
    if requested not in DTYPES:
        raise ConfigError(
            f"{setting} is {requested!r}, but one of auto, {', '.join(DTYPES)} is needed", key=f"encode.{setting}"
        )
    return DTYPES[requested], f"{requested} was requested (encode.{setting})."
