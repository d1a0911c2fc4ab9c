"""Sample images from cached prompt embeddings, by SDXL's own pipeline without its encoders and its VAE."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import diffusers
import torch
from diffusers import SchedulerMixin, StableDiffusionXLPipeline
from PIL import Image

from latentcache.config import ValidationConfig, suggest
from latentcache.devices.guard import check_same_device
from latentcache.devices.offload import offload_hook_of
from latentcache.devices.placement import device_of, placed
from latentcache.errors import ConfigError, ModelError
from latentcache.models.decoding import Decoded, decode_fitting, downscale_factor
from latentcache.phases.module_state import Modes
from latentcache.phases.process_state import RandomStreams
from latentcache.validation.prompt_set import PromptEmbeddings

PIXELS_PER_LATENT = 8
"""Pixels per latent row or column. The pipeline reads it from the VAE's config, and has this value without a VAE."""
NEEDED_OF_SCHEDULER = ("init_noise_sigma", "order", "scale_model_input", "set_timesteps", "step")
"""What the denoising loop of SDXL's pipeline asks of a scheduler."""


@dataclass(frozen=True, slots=True)
class SampleSettings:
    """How images are sampled: see `validation` in the config. Image n is made from the seed `seed + n`."""

    height: int = 1024
    width: int = 1024
    num_inference_steps: int = 25
    guidance_scale: float = 5.0
    seed: int = 0
    scheduler: str | None = None

    @classmethod
    def of(cls, config: ValidationConfig) -> SampleSettings:
        return cls(
            height=config.height,
            width=config.width,
            num_inference_steps=config.num_inference_steps,
            guidance_scale=config.guidance_scale,
            seed=config.seed,
            scheduler=config.scheduler,
        )


@dataclass(frozen=True, slots=True)
class SampleImage:
    """One generated image and what it was made from. `tiled`: decoded in tiles."""

    prompt: str
    negative_prompt: str | None
    seed: int
    image: Image.Image
    tiled: bool


def generate(
    unet: torch.nn.Module,
    vae: torch.nn.Module,
    scheduler: SchedulerMixin,
    embeddings: Sequence[PromptEmbeddings],
    settings: SampleSettings,
) -> list[SampleImage]:
    """`denoise`, then `decode_samples` with the VAE on the UNet's device; it goes back where it was.

    Raises ModelError for a VAE that does not divide by PIXELS_PER_LATENT, DeviceError where the VAE does not fit.
    """
    factor = downscale_factor(vae)
    if factor != PIXELS_PER_LATENT:
        raise ModelError(f"vae: {factor} pixels per latent, but SDXL's pipeline has {PIXELS_PER_LATENT}", part="vae")
    latents = denoise(unet, scheduler, embeddings, settings)
    with placed(vae, device_of(unet)):
        return decode_samples(vae, latents, embeddings, settings)


def denoise(
    unet: torch.nn.Module,
    scheduler: SchedulerMixin,
    embeddings: Sequence[PromptEmbeddings],
    settings: SampleSettings,
    *,
    device: torch.device | None = None,
) -> list[torch.Tensor]:
    """Scaled latents [1, C, h, w] of each image, on the UNet's device: what the pipeline would decode.

    They are `StableDiffusionXLPipeline`'s for the same prompt, seed and device, bit by bit. One image a call, each from
    a CPU generator of its own: so it depends neither on the other prompts nor, but for the arithmetic, on the device.
    The negative embeddings count only where `guidance_scale` is above 1. A surrounding autocast holds.

    The UNet runs where it is, in eval mode; name the `device` where its blocks are swapped, so that it lies on several
    (the pipeline asks its first parameter, which has to be there). Its training flags, the global random state and
    `scheduler` are afterwards as they were, also after an error: the loop has a copy of the scheduler. Raises
    DeviceMismatchError if UNet and embeddings are on different devices, ConfigError for a scheduler that cannot be
    used, ModelError for a wrapped UNet.
    """
    if not hasattr(unet, "config"):
        raise ModelError(
            f"unet: {type(unet).__name__} has no config, so it is a wrapper. Give the UNet inside of it, as "
            "accelerator.unwrap_model(unet) does.",
            part="unet",
        )
    _check_devices(unet, embeddings, device)
    device = device or device_of(unet)
    latents = []
    with ExitStack() as stack:
        stack.callback(RandomStreams().restore)
        stack.callback(Modes({"unet": unet}).restore)
        unet.eval()
        stack.enter_context(_no_weights_cached(device))
        for number, each in enumerate(embeddings):
            pipeline = _pipeline(unet, scheduler_copy(scheduler, settings.scheduler))
            generator = torch.Generator().manual_seed(settings.seed + number)
            # The few schedulers that draw from the global generator give the same image each time too.
            torch.manual_seed(settings.seed + number)
            tensors = each.tensors()
            if settings.guidance_scale <= 1:
                tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("negative_")}
            (latent,) = pipeline(
                **tensors,
                height=settings.height,
                width=settings.width,
                num_inference_steps=settings.num_inference_steps,
                guidance_scale=settings.guidance_scale,
                generator=generator,
                output_type="latent",
                return_dict=False,
            )
            latents.append(latent)
    return latents


def decode_samples(
    vae: torch.nn.Module,
    latents: Sequence[torch.Tensor],
    embeddings: Sequence[PromptEmbeddings],
    settings: SampleSettings,
) -> list[SampleImage]:
    """The images of what `denoise` gave for the same embeddings and settings, with the VAE where it is."""
    samples = []
    for number, (latent, each) in enumerate(zip(latents, embeddings, strict=True)):
        decoded: Decoded = decode_fitting(vae, latent)
        image = Image.fromarray(decoded.images[0])
        samples.append(SampleImage(each.prompt, each.negative_prompt, settings.seed + number, image, decoded.tiled))
    return samples


def scheduler_copy(scheduler: SchedulerMixin, class_name: str | None = None) -> SchedulerMixin:
    """A new scheduler from a copy of the config, of this class of diffusers; by default of its own class.

    Raises ConfigError if there is no such class, or SDXL's pipeline cannot use it, or not with this config.
    """
    if not isinstance(getattr(scheduler, "config", None), Mapping):
        raise ConfigError(f"scheduler is {type(scheduler).__name__}, but a scheduler of diffusers is needed")
    found = type(scheduler) if class_name is None else _scheduler_class(class_name)
    try:
        made = found.from_config(_settings_of(scheduler))
    except (ImportError, NotImplementedError, TypeError, ValueError) as error:
        raise _refused(f"{found.__name__} cannot be made from the model's scheduler config: {error}") from error
    lacking = [name for name in NEEDED_OF_SCHEDULER if not hasattr(made, name)]
    if lacking:
        raise _refused(f"{found.__name__} has no {', '.join(lacking)}, which SDXL's pipeline needs")
    return made


def _settings_of(scheduler: SchedulerMixin) -> dict[str, Any]:
    """A copy of the config in which only what still is a default is called one: `from_config` leaves those out."""
    settings = copy.deepcopy(dict(scheduler.config))
    parameters = inspect.signature(type(scheduler).__init__).parameters
    called = [name for name in settings.get("_use_default_values", ()) if name in parameters]
    unchanged = [name for name in called if repr(settings[name]) == repr(parameters[name].default)]
    return settings | {"_use_default_values": unchanged}


def _scheduler_class(name: str) -> Any:
    found = getattr(diffusers, name, None)
    backends = getattr(found, "_backends", None)
    if backends:  # diffusers' stand-in for a class whose packages are not installed
        raise _refused(f"{name} needs {' and '.join(backends)}: install what is missing")
    if isinstance(found, type) and issubclass(found, SchedulerMixin):
        return found
    known = [known for known in dir(diffusers) if known.endswith("Scheduler")]
    raise _refused(f"{name!r} is no scheduler class of diffusers {diffusers.__version__}{suggest(name, known)}")


def _refused(detail: str) -> ConfigError:
    return ConfigError(
        f"validation.scheduler: {detail}. Name one such as EulerDiscreteScheduler, or null for the model's own.",
        key="validation.scheduler",
    )


def _pipeline(unet: torch.nn.Module, scheduler: SchedulerMixin) -> StableDiffusionXLPipeline:
    pipeline = StableDiffusionXLPipeline(
        vae=None,
        text_encoder=None,
        text_encoder_2=None,
        tokenizer=None,
        tokenizer_2=None,
        unet=unet,
        scheduler=scheduler,
        add_watermarker=False,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _check_devices(unet: torch.nn.Module, embeddings: Sequence[PromptEmbeddings], device: torch.device | None) -> None:
    """Before diffusers: there a tensor that is elsewhere ends in an error that names neither it nor the prompt."""
    tensors: dict[str, Any] = {f"embeddings of {each.prompt!r}": each.tensors() for each in embeddings}
    if device is not None:
        tensors["unet"] = dict(islice(unet.named_parameters(), 1))
    elif not any(map(offload_hook_of, unet.modules())):
        # Weights that wait elsewhere for their offload hook say nothing about where the UNet will run.
        tensors["unet"] = dict(chain(unet.named_parameters(), unet.named_buffers()))
    check_same_device(**tensors)


@contextmanager
def _no_weights_cached(device: torch.device) -> Iterator[None]:
    """A surrounding autocast goes on without its cache: weights cast without gradients must not reach training."""
    if not torch.is_autocast_enabled(device.type):
        yield
        return
    dtype = torch.get_autocast_dtype(device.type)
    with torch.autocast(device.type, dtype=dtype, cache_enabled=False):
        yield
