"""Images -> VAE moments -> what is kept of them; and latents -> images, in tiles where memory is short.

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
"""Side of a tile in pixels, at most. By default diffusers takes the VAE's sample_size, which may be 1024: an image of
1024x1024 would not be cut, so that tiling would save no memory just where it is needed."""


@dataclass(frozen=True, slots=True)
class VaeFacts:
    """What is known of a VAE: how its latents are scaled, their channels, pixels per row and frames per latent frame.

    `force_upcast` says whether it overflows in float16; None where nobody says. `Models.vae_facts` gives what the file
    says, `vae_facts` what diffusers made of it, as pipelines go by.
    """

    scaling: Scaling
    force_upcast: bool | None
    latent_channels: int
    downscale_factor: int
    frames_factor: int = 1


def vae_facts(vae: Any, family: Family | None = None) -> VaeFacts:
    """The facts of a VAE of diffusers: an AutoencoderKL, one with batch-norm statistics, or one of video.

    Its weights are read only where they hold the statistics of its latents: these are to be in float32. `family`, by
    default DEFAULT, says how it reads them: its `batch_statistics`.
    Raises ModelError for one that states only a part of its latents' statistics.
    """
    config: Mapping[str, Any] = vae.config
    mean, deviations = config.get("latents_mean"), config.get("latents_std")
    if (mean is None) != (deviations is None):
        raise refused("vae", "its config has one of latents_mean and latents_std, and both are needed. Correct it.")
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

    `auto` is float32 on the CPU, and on an accelerator unless the VAE's config says that it does not need it
    (`force_upcast` false): then float16. The rule is that of diffusers' pipelines: a VAE with `force_upcast` overflows.
    """
    if requested != "auto":
        dtype, reason = DTYPES[requested], f"{requested} was requested (encode.vae_dtype)."
        if dtype is torch.float16 and facts.force_upcast:
            reason += " The VAE has force_upcast, so it may overflow in float16."
        return dtype, reason
    if device.type == "cpu":
        return torch.float32, "The device is a CPU, which computes float16 slowly."
    if facts.force_upcast is None:
        return torch.float32, "The VAE's config does not say whether it overflows in float16."
    if facts.force_upcast:
        return torch.float32, "The VAE has force_upcast: it overflows in float16."
    return torch.float16, f"The VAE has no force_upcast, so it computes in float16 on {device}."


def text_dtype(requested: str, family: Family, device: torch.device) -> tuple[torch.dtype, str]:
    """The dtype in which the text encoders compute, and the reason. `auto`: float32 on the CPU, else the family's."""
    if requested != "auto":
        return DTYPES[requested], f"{requested} was requested (encode.text_dtype)."
    if device.type == "cpu":
        return torch.float32, "The device is a CPU, which computes float16 slowly."
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
    """The posterior's parameters (mean, log-variance), unscaled, on the VAE's device, in its dtype.

    [B, 2C, h, w] of images, uint8 [B, H, W, 3], upright sRGB; [B, 2C, F, h, w] of a family of video, which also takes
    clips: [B, frames, H, W, 3]. Pixels become `pixels / 127.5 - 1` in float32, then the VAE's dtype. `kept`, uint8
    [B, H, W, 1], says how much of each pixel is left: they are multiplied by `kept / 255`; of frames it is
    [B, frames, H or 1, W or 1, 1]. `family` None is DEFAULT. `facts` are the VAE's, where they are known.
    The VAE is used as it stands (device, mode, memory format, slicing, tiling), under no_grad, without autocast, and
    with `pinned_numerics`.
    The same image may differ in the last bits in a batch of another size, in another memory format, and on a CPU with
    another number of threads. Raises ModelError if the pixels are not of this form.
    """
    if isinstance(pixels, np.ndarray):
        # A copy where needed: torch warns of read-only arrays (Pillow's are) and refuses negative strides (a flip's).
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
        # As pipelines have them: for channels-last strides convolutions may take a kernel that rounds otherwise.
        images = images.to(parameter.dtype).contiguous()
        parameters = family.encode_image(vae, images)
    sides = [side // facts.downscale_factor for side in pixels.shape[-3:-1]]
    frames = [(pixels.shape[1] - 1) // facts.frames_factor + 1] if is_video else []
    expected = [len(pixels), 2 * facts.latent_channels, *frames, *sides]
    if list(parameters.shape) != expected:
        raise refused("vae", f"it gave moments of shape {list(parameters.shape)}, but {expected} is needed")
    return parameters


def first_frames(vae: Any, clips: torch.Tensor, family: Family, facts: VaeFacts | None = None) -> torch.Tensor:
    """The condition of clips, uint8 [B, frames, H, W, 3], by the rule "first frame, padded": [B, C, F, h, w], unscaled.

    Where only the first frame is left of a clip, the others are zeros for the VAE, which is grey. Later latent frames
    are not those of a clip of zeros: the first one reaches into them. As `encode_images` in all else.
    """
    kept = torch.zeros(*clips.shape[:2], 1, 1, 1, dtype=torch.uint8)
    kept[:, 0] = 255
    return latents_from_moments(encode_images(vae, clips, family, facts, kept=kept))


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
    mean = latents_from_moments(moments)
    noise = [torch.randn(mean.shape[1:], generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return {"latents": mean + posterior_std(moments) * torch.stack(noise).to(moments)}


def problem_flags(outputs: torch.Tensor, *, may_be_zero: bool = False) -> torch.Tensor:
    """What `problem_names` reads: bool [B, 3] for outputs [B, ...], on their device. The host does not wait."""
    items = outputs.reshape(len(outputs), -1)
    is_zero = items.new_zeros(len(items), dtype=torch.bool) if may_be_zero else (items == 0).all(1)
    return torch.stack([items.isnan().any(1), items.isinf().any(1), is_zero], dim=1)


def problem_names(flags: torch.Tensor) -> list[str | None]:
    """For each row of `problem_flags` what makes the item unusable: `nan`, `inf`, `all-zero` or None."""
    names = ("nan", "inf", "all-zero")
    return [next((name for name, found in zip(names, item, strict=True) if found), None) for item in flags.tolist()]


def problems(outputs: torch.Tensor) -> list[str | None]:
    """For each item of [B, ...] what makes it unusable: `nan`, `inf`, `all-zero` or None. One device sync a call."""
    return problem_names(problem_flags(outputs))


def decode_latents(vae: Any, latents: torch.Tensor, *, tiled: bool = False, family: Family | None = None) -> np.ndarray:
    """Images uint8 [B, H, W, 3] of latents [B, C, h, w] that are scaled, as the denoising loop leaves them.

    Of latents with frames, [B, C, F, h, w], the frames: [B, frames, H, W, 3]. The bits are those of the pipelines for
    the same latents, where these have no watermark. The latents go to the VAE's device and dtype; the VAE runs where it
    is, without gradients and without a surrounding autocast. A float16 VAE with `force_upcast` computes in float32, as
    in the pipelines; unlike there it is a copy that does. `tiled` decodes in the VAE's tiles: other pixels, less
    memory. `family` None is DEFAULT. A number that is not finite becomes black, with a logged warning.
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
            vars(vae).pop("decode", None)  # a compiled one is bound to the caller's VAE, not to the copy
        unscaled = facts.scaling.undo(latents.to(device, next(vae.parameters()).dtype))
        decoded = vae.decode(unscaled, return_dict=False)[0]
        flat = decoded if decoded.ndim == 4 else decoded.movedim(2, 1).flatten(0, 1)
        pixels: np.ndarray = VaeImageProcessor().postprocess(flat, output_type="np")
        if decoded.ndim == 5:
            pixels = pixels.reshape(len(decoded), -1, *pixels.shape[1:])
    finite = np.isfinite(pixels)
    if not finite.all():
        logger.warning("vae: %d of %d decoded numbers are NaN: shown as black", (~finite).sum(), finite.size)
        pixels = np.where(finite, pixels, np.float32(0))
    return (pixels * 255).round().astype(np.uint8)


def decode_fitting(vae: Any, latents: torch.Tensor, family: Family | None = None) -> tuple[np.ndarray, bool]:
    """`decode_latents`, whole where that fits into memory, else in tiles; and whether tiling was on.

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
        # After the except block, in which the traceback's frames keep the failed call's tensors alive.
        free_cached_memory(device)
        if not tiled:
            logger.info("vae: decoding in tiles: at once it ran out of memory on %s (%s)", device, shortage)
    raise EncodeError(
        f"vae: tiles do not fit into the memory of {device} either ({shortage}). Free memory there, "
        "take a smaller validation.height and validation.width, or decode on the CPU.",
        part="vae",
        problem="out-of-memory",
    )


def _tiled(vae: Any) -> Any:
    """The VAE with its own tiling on, in tiles of at most TILE pixels where they are squares: a copy with its parts."""
    vae = copy.copy(vae)
    vae.enable_tiling()
    if getattr(vae, "tile_latent_min_size", None) and vae.tile_sample_min_size > TILE:
        vae.tile_latent_min_size = vae.tile_latent_min_size * TILE // vae.tile_sample_min_size
        vae.tile_sample_min_size = TILE
    return vae
