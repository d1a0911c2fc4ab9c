"""Images to VAE moments to what an entry stores; and latents to images, tiled if memory is short.

Legend: B images, C latent channels, H and W pixels, h and w latent rows and columns.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from latentcache.devices.placement import device_of
from latentcache.errors import EncodeError
from latentcache.families import DEFAULT, Rule, family_named, parts_of
from latentcache.families.base import Family, inference
from latentcache.families.scaling import Scaling, latents_from_moments, posterior_std
from latentcache.models.files import first_line, refused
from latentcache.models.running import free_cached_memory, is_out_of_memory, pinned_numerics
from latentcache.types import ImageOutput

logger = logging.getLogger("latentcache")

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
TILE = 512
"""Maximum side of a tile in pixels. diffusers defaults to the VAE's sample_size, which may be 1024: tiling would then
leave a 1024x1024 image whole and save no memory."""


@dataclass(frozen=True, slots=True)
class VaeFacts:
    """A VAE's latent scaling, latent channels, spatial downscale factor and frames per latent frame.

    `force_upcast` says whether it overflows in float16; None if unknown. `Models.vae_facts` reports what the file
    states, `vae_facts` what diffusers made of it, which pipelines follow.
    """

    scaling: Scaling
    force_upcast: bool | None
    latent_channels: int
    downscale_factor: int
    frames_factor: int = 1


def vae_facts(vae: Any, family: Family | None = None) -> VaeFacts:
    """The facts of a diffusers VAE: an AutoencoderKL, one with batch-norm statistics, or a video VAE.

    Weights are read only if they hold latent statistics, which must be in float32. `family` (default: DEFAULT) reads
    these with its `batch_statistics`. Raises ModelError for a config with only one of mean and std.
    """
    config: Mapping[str, Any] = vae.config
    mean, deviations = config.get("latents_mean"), config.get("latents_std")
    if (mean is None) != (deviations is None):
        raise refused("vae", "its config has only one of latents_mean and latents_std. Add the other one.")
    statistics: dict[str, Any] = {}
    if mean is not None and deviations is not None:
        statistics = {"mean": tuple(mean), "std": tuple(deviations)}
    channels = config.get("latent_channels", config.get("z_dim"))
    if hasattr(vae, "temperal_downsample"):  # diffusers spells it so
        spatial = config.get("scale_factor_spatial") or 2 ** len(vae.temperal_downsample)
        frames = config.get("scale_factor_temporal") or 2 ** sum(vae.temperal_downsample)
    else:
        spatial, frames = 2 ** (len(config["block_out_channels"]) - 1), 1
    if hasattr(vae, "bn"):
        means, stds = (family or family_named(DEFAULT)).batch_statistics(vae)
        scaling = Scaling(rule="batch_norm", mean=tuple(means.tolist()), std=tuple(stds.tolist()))
    elif statistics and hasattr(vae, "temperal_downsample"):
        rules: list[Rule] = [part.rule for part in parts_of(type(vae).__name__)]
        scaling = Scaling(rule=next(iter(rules), "mean_std"), **statistics)
    else:
        scaling = Scaling(config["scaling_factor"], config.get("shift_factor"), **statistics)
    upcast = config.get("force_upcast")
    return VaeFacts(scaling, None if upcast is None else bool(upcast), channels, spatial, frames)


def vae_dtype(requested: str, facts: VaeFacts, device: torch.device) -> tuple[torch.dtype, str]:
    """The dtype in which the VAE computes, and the reason as a sentence.

    `auto` is float16 on an accelerator if the VAE's config has `force_upcast` false, and float32 otherwise. Like in
    diffusers' pipelines, a VAE with `force_upcast` is taken to overflow in float16.
    """
    if requested != "auto":
        dtype, reason = DTYPES[requested], f"{requested} was requested (encode.vae_dtype)."
        if dtype is torch.float16 and facts.force_upcast:
            reason += " The VAE has force_upcast, so it may overflow in float16."
        return dtype, reason
    if device.type == "cpu":
        return torch.float32, "The device is a CPU, where float16 is slow."
    if facts.force_upcast is None:
        return torch.float32, "The VAE's config does not say whether it overflows in float16."
    if facts.force_upcast:
        return torch.float32, "The VAE has force_upcast: it overflows in float16."
    return torch.float16, f"The VAE has no force_upcast, so it computes in float16 on {device}."


def text_dtype(requested: str, family: Family, device: torch.device) -> tuple[torch.dtype, str]:
    """The dtype in which the text encoders compute, and the reason. `auto` is float32 on the CPU, else the family's."""
    if requested != "auto":
        return DTYPES[requested], f"{requested} was requested (encode.text_dtype)."
    if device.type == "cpu":
        return torch.float32, "The device is a CPU, where float16 is slow."
    dtype = family.text_dtype
    return DTYPES[dtype], f"The text encoders compute in {dtype} on {device}, as pipelines of {family.name} do."


def encode_images(
    vae: Any,
    pixels: np.ndarray | torch.Tensor,
    family: Family | None = None,
    facts: VaeFacts | None = None,
    *,
    kept: torch.Tensor | None = None,
) -> torch.Tensor:
    """The posterior's unscaled parameters (mean, log-variance) on the VAE's device, in its dtype.

    Images are upright sRGB, uint8 [B, H, W, 3], and give [B, 2C, h, w]. Video families give [B, 2C, F, h, w], and also
    take clips [B, frames, H, W, 3]. Pixels become `pixels / 127.5 - 1` in float32, then the VAE's dtype. `kept`, uint8
    [B, H, W, 1] or [B, frames, H or 1, W or 1, 1], scales them by `kept / 255`. `family` None is DEFAULT. Pass the
    VAE's `facts` if they are known.
    The VAE is used as it is (device, mode, memory format, slicing, tiling), with no_grad, without autocast, and with
    `pinned_numerics`. Batch size, memory format and the number of CPU threads may change the last bits. Raises
    ModelError if the pixels do not have this form.
    """
    if isinstance(pixels, np.ndarray):
        # Copies if needed: torch warns about read-only arrays (from Pillow) and rejects negative strides (from flips).
        pixels = torch.from_numpy(np.require(pixels, requirements=["C", "W"]))
    family = family or family_named(DEFAULT)
    is_video = family.latent.is_video
    if pixels.dtype != torch.uint8 or pixels.ndim not in ((4, 5) if is_video else (4,)) or pixels.shape[-1] != 3:
        needed = "uint8 [B, H, W, 3]" + (" or [B, frames, H, W, 3]" if is_video else "")
        raise refused("vae", f"pixels are {pixels.dtype} {list(pixels.shape)}, but {needed} is needed")
    facts = facts or vae_facts(vae, family)
    parameter = next(vae.parameters())
    with inference(parameter.device), pinned_numerics():
        if is_video and pixels.ndim == 4:
            pixels = pixels[:, None]
        images = pixels.to(parameter.device).movedim(-1, 1).float().div(127.5).sub(1.0)
        if kept is not None:
            shares = kept.to(parameter.device).movedim(-1, 1).float().div(255)
            images *= shares[:, :, None] if shares.ndim < images.ndim else shares
        # Contiguous like in pipelines: channels-last strides may select a kernel that rounds differently.
        images = images.to(parameter.dtype).contiguous()
        parameters = family.encode_image(vae, images)
    sides = [side // facts.downscale_factor for side in pixels.shape[-3:-1]]
    frames = [(pixels.shape[1] - 1) // facts.frames_factor + 1] if is_video else []
    expected = [len(pixels), 2 * facts.latent_channels, *frames, *sides]
    if list(parameters.shape) != expected:
        raise refused("vae", f"it returned moments of shape {list(parameters.shape)}, but {expected} is needed")
    return parameters


def first_frames(vae: Any, clips: torch.Tensor, family: Family, facts: VaeFacts | None = None) -> torch.Tensor:
    """The condition of clips, uint8 [B, frames, H, W, 3], by the rule "first frame, padded": unscaled [B, C, F, h, w].

    All other frames are zero (grey) for the VAE. Their latent frames still depend on the first one. Otherwise like
    `encode_images`.
    """
    kept = torch.zeros(*clips.shape[:2], 1, 1, 1, dtype=torch.uint8)
    kept[:, 0] = 255
    return latents_from_moments(encode_images(vae, clips, family, facts, kept=kept))


def keep_output(moments: torch.Tensor, output: ImageOutput, seeds: Sequence[int]) -> dict[str, torch.Tensor]:
    """The tensors that an entry stores of moments [B, 2C, h, w]: unscaled, in the moments' dtype, by field.

    `moments` keeps them unchanged. `mean` gives `latents` [B, C, h, w]. `sample` gives `latents` sampled with float32
    noise from a CPU generator per item, so a sample depends only on its seed and moments, not on device or batch.
    """
    if output == "moments":
        return {"moments": moments}
    mean = latents_from_moments(moments)
    if output == "mean":
        return {"latents": mean}
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    noise = [torch.randn(mean.shape[1:], generator=each, dtype=torch.float32) for each in generators]
    return {"latents": mean + posterior_std(moments) * torch.stack(noise).to(moments)}


def problem_flags(outputs: torch.Tensor, *, may_be_zero: bool = False) -> torch.Tensor:
    """Flags for `problem_names`: bool [B, 3] for outputs [B, ...], on their device, without synchronising."""
    items = outputs.reshape(len(outputs), -1)
    is_zero = items.new_zeros(len(items), dtype=torch.bool) if may_be_zero else (items == 0).all(1)
    return torch.stack([items.isnan().any(1), items.isinf().any(1), is_zero], dim=1)


def problem_names(flags: torch.Tensor) -> list[str | None]:
    """What makes each item unusable, from `problem_flags`: `nan`, `inf`, `all-zero` or None."""
    names = ("nan", "inf", "all-zero")
    return [next((name for name, found in zip(names, item, strict=True) if found), None) for item in flags.tolist()]


def decode_latents(vae: Any, latents: torch.Tensor, *, tiled: bool = False, family: Family | None = None) -> np.ndarray:
    """Images uint8 [B, H, W, 3] from scaled latents [B, C, h, w], or frames [B, frames, H, W, 3] from [B, C, F, h, w].

    Bit for bit what diffusers' pipelines decode, without a watermark. Latents move to the VAE's device and dtype; the
    VAE stays in place, and runs without gradients or autocast. A float16 VAE with `force_upcast` computes in float32
    like in the pipelines, but as a copy. `tiled` decodes in the VAE's tiles, which changes pixels and saves memory.
    `family` None is DEFAULT. Non-finite values become black, with a logged warning.
    """
    from diffusers.image_processor import VaeImageProcessor

    device = device_of(vae)
    facts = vae_facts(vae, family)
    with inference(device):
        own = vae
        if facts.force_upcast and next(vae.parameters()).dtype == torch.float16:
            vae = copy.deepcopy(vae).float()
        if tiled:
            vae = _tiled(vae)
        if vae is not own:
            vars(vae).pop("decode", None)  # a compiled decode is bound to the caller's VAE, not to the copy
        unscaled = facts.scaling.undo(latents.to(device, next(vae.parameters()).dtype))
        decoded = vae.decode(unscaled, return_dict=False)[0]
        flat = decoded if decoded.ndim == 4 else decoded.movedim(2, 1).flatten(0, 1)
        pixels: np.ndarray = VaeImageProcessor().postprocess(flat, output_type="np")
        if decoded.ndim == 5:
            pixels = pixels.reshape(len(decoded), -1, *pixels.shape[1:])
    finite = np.isfinite(pixels)
    if not finite.all():
        logger.warning("vae: %d of %d decoded values are not finite: shown as black", (~finite).sum(), finite.size)
        pixels = np.where(finite, pixels, np.float32(0))
    return (pixels * 255).round().astype(np.uint8)


def decode_fitting(vae: Any, latents: torch.Tensor, family: Family | None = None) -> tuple[np.ndarray, bool]:
    """`decode_latents`, falling back to tiles if memory runs out; and whether the result is tiled.

    Raises EncodeError (problem `out-of-memory`) if tiles do not fit either.
    """
    device, shortage = device_of(vae), ""
    for tiled in (False, True):
        try:
            images = decode_latents(vae, latents, tiled=tiled, family=family)
            return images, tiled or bool(getattr(vae, "use_tiling", False))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            shortage = first_line(error)
        # Outside the except block, where the traceback would keep the failed call's tensors alive.
        free_cached_memory(device)
        if not tiled:
            logger.info("vae: out of memory on %s (%s): decoding in tiles", device, shortage)
    raise EncodeError(
        f"vae: even tiles do not fit into the memory of {device} ({shortage}). Free memory there, reduce "
        "validation.height and validation.width, or decode on the CPU.",
        part="vae",
        problem="out-of-memory",
    )


def _tiled(vae: Any) -> Any:
    """A shallow copy of the VAE with tiling on; square tiles have at most TILE pixels a side."""
    vae = copy.copy(vae)
    vae.enable_tiling()
    if getattr(vae, "tile_latent_min_size", None) and vae.tile_sample_min_size > TILE:
        vae.tile_latent_min_size = vae.tile_latent_min_size * TILE // vae.tile_sample_min_size
        vae.tile_sample_min_size = TILE
    return vae
