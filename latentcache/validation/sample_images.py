"""Sample images from cached prompt embeddings, by SDXL's own pipeline without its encoders and its VAE."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import diffusers
import torch
from diffusers import SchedulerMixin
from PIL import Image

from latentcache.config import ValidationConfig, suggest
from latentcache.devices.guard import check_same_device
from latentcache.devices.placement import DeviceLike, device_of
from latentcache.devices.tensor_location import offload_hook_of
from latentcache.errors import ConfigError, ModelError, SampleError
from latentcache.families import DEFAULT, family_named
from latentcache.loading.cache import LatentCache
from latentcache.models.running import uncached_autocast
from latentcache.models.vae import decode_fitting, vae_facts
from latentcache.phases.module_state import TrainingModes
from latentcache.phases.process_state import RandomStreams

PIXELS_PER_LATENT = 8
"""Pixels per latent row or column. The pipeline reads it from the VAE's config, and has this value without a VAE."""
NEEDED_OF_SCHEDULER = ("init_noise_sigma", "order", "scale_model_input", "set_timesteps", "step")
"""What the denoising loop of SDXL's pipeline uses of a scheduler."""

PromptPair = tuple[str, bool]
"""A text, and whether it is a negative prompt: with clip_skip the two are encoded differently."""


@dataclass(frozen=True, slots=True)
class PromptEmbeddings:
    """What SDXL's pipeline takes in place of a prompt: embeddings [1, T, D] and pooled embeddings [1, P].

    With `negative_prompt` None the negative ones are zeros, as the pipeline has it with `force_zeros_for_empty_prompt`.
    """

    prompt: str
    negative_prompt: str | None
    prompt_embeds: torch.Tensor
    pooled_prompt_embeds: torch.Tensor
    negative_prompt_embeds: torch.Tensor
    negative_pooled_prompt_embeds: torch.Tensor

    def tensors(self) -> dict[str, torch.Tensor]:
        """The four tensors by the names of the pipeline's arguments."""
        names = ("prompt_embeds", "pooled_prompt_embeds", "negative_prompt_embeds", "negative_pooled_prompt_embeds")
        return {name: getattr(self, name) for name in names}


def prompt_embeddings(
    cache: LatentCache,
    prompts: Sequence[str],
    negative_prompt: str | None,
    *,
    device: DeviceLike,
    dtype: torch.dtype | None = None,
    encode: Callable[[Sequence[PromptPair]], object] | None = None,
) -> list[PromptEmbeddings]:
    """The embeddings of these prompts, in their order, on the requesting device; `dtype` is that of a given module.

    `encode` is called once with all pairs (text, is negative) that the cache cannot return, and has to cache them
    (`precache.prompts.cache_prompts`); then they are read again. It is not called when nothing is missing. Without it
    SampleError names the first such prompt and the command that caches it.
    """
    pairs: list[PromptPair] = [(prompt, False) for prompt in prompts]
    if prompts and negative_prompt is not None:
        pairs.append((negative_prompt, True))
    found, missing = _read_prompts(cache, pairs, device, dtype)
    if missing and encode is not None:
        encode(list(missing))
        cache.refresh()
        again, missing = _read_prompts(cache, missing, device, dtype)
        found |= again
    for error in missing.values():
        raise error
    embeddings = []
    for prompt in prompts:
        positive = found[prompt, False]
        if negative_prompt is None:
            negative = {name: torch.zeros_like(tensor) for name, tensor in positive.items()}
        else:
            negative = found[negative_prompt, True]
        tensors = {f"negative_{name}": tensor for name, tensor in negative.items()} | positive
        embeddings.append(PromptEmbeddings(prompt, negative_prompt, **tensors))
    return embeddings


def _read_prompts(
    cache: LatentCache, pairs: Iterable[PromptPair], device: DeviceLike, dtype: torch.dtype | None
) -> tuple[dict[PromptPair, dict[str, torch.Tensor]], dict[PromptPair, SampleError]]:
    """The tensors of each pair, and why the others cannot be returned: not cached, lost or damaged."""
    found: dict[PromptPair, dict[str, torch.Tensor]] = {}
    missing: dict[PromptPair, SampleError] = {}
    for text, negative in dict.fromkeys(pairs):
        try:
            found[text, negative] = cache.prompt(text, device=device, dtype=dtype, negative=negative)
        except SampleError as error:
            missing[text, negative] = error
    return found, missing


@dataclass(frozen=True, slots=True)
class SampleImage:
    """One generated image and what it was made from. `tiled`: decoded in tiles."""

    prompt: str
    negative_prompt: str | None
    seed: int
    image: Image.Image
    tiled: bool


def denoise(
    unet: torch.nn.Module,
    scheduler: Any,
    embeddings: Sequence[PromptEmbeddings],
    settings: ValidationConfig,
    *,
    device: torch.device | None = None,
) -> list[torch.Tensor]:
    """Scaled latents [1, C, h, w] of each image, on the UNet's device: what the pipeline would decode.

    They are `StableDiffusionXLPipeline`'s for the same prompt, seed and device, bit by bit. Each image is one call with
    a CPU generator of its own, and depends on no other prompt. The negative embeddings count only where
    `guidance_scale` is above 1. A surrounding autocast stays in force.

    The UNet runs where it is, in eval mode. Name the `device` where its blocks are swapped, so that it lies on several:
    the pipeline runs on the device of the first parameter. The UNet's training flags, the global random state and
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
        stack.callback(TrainingModes({"unet": unet}).restore)
        unet.eval()
        stack.enter_context(uncached_autocast(device, None))
        for number, each in enumerate(embeddings):
            pipeline: Any = family_named(DEFAULT).pipeline(
                unet=unet, scheduler=scheduler_copy(scheduler, settings.scheduler)
            )
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
    settings: ValidationConfig,
) -> list[SampleImage]:
    """The images of what `denoise` gave for the same embeddings and settings, with the VAE where it is."""
    samples = []
    for number, (latent, each) in enumerate(zip(latents, embeddings, strict=True)):
        images, tiled = decode_fitting(vae, latent)
        image = Image.fromarray(images[0])
        samples.append(SampleImage(each.prompt, each.negative_prompt, settings.seed + number, image, tiled))
    return samples


def scheduler_copy(scheduler: Any, class_name: str | None = None) -> Any:
    """A new scheduler from a copy of the config, of this class of diffusers; by default of its own class.

    Raises ConfigError if there is no such class, or SDXL's pipeline cannot use it, or not with this config.
    """
    if not isinstance(getattr(scheduler, "config", None), Mapping):
        raise ConfigError(f"scheduler is {type(scheduler).__name__}, but a scheduler of diffusers is needed")
    scheduler_class = type(scheduler) if class_name is None else _scheduler_class(class_name)
    try:
        copied = scheduler_class.from_config(_settings_of(scheduler))
    except (ImportError, NotImplementedError, TypeError, ValueError) as error:
        name = scheduler_class.__name__
        raise _refused(f"{name} cannot be made from the model's scheduler config: {error}") from error
    missing = [name for name in NEEDED_OF_SCHEDULER if not hasattr(copied, name)]
    if missing:
        raise _refused(f"{scheduler_class.__name__} has no {', '.join(missing)}, which SDXL's pipeline needs")
    return copied


def check_sampling(vae: torch.nn.Module, scheduler: Any, settings: ValidationConfig) -> None:
    """Raise before any forward what the images would raise: ConfigError for the scheduler, ModelError for the VAE."""
    scheduler_copy(scheduler, settings.scheduler)
    factor = vae_facts(vae).downscale_factor
    if factor != PIXELS_PER_LATENT:
        raise ModelError(f"vae: {factor} pixels per latent, but SDXL's pipeline has {PIXELS_PER_LATENT}", part="vae")


def _settings_of(scheduler: Any) -> dict[str, Any]:
    """A copy of the config that names as defaults only those that nobody changed: `from_config` leaves defaults out."""
    settings = copy.deepcopy(dict(scheduler.config))
    parameters = inspect.signature(type(scheduler).__init__).parameters
    defaults = [name for name in settings.get("_use_default_values", ()) if name in parameters]
    unchanged = [name for name in defaults if repr(settings[name]) == repr(parameters[name].default)]
    return settings | {"_use_default_values": unchanged}


def _scheduler_class(name: str) -> Any:
    found = getattr(diffusers, name, None)
    backends = getattr(found, "_backends", None)
    if backends:  # diffusers' placeholder for a class whose packages are not installed
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


def _check_devices(unet: torch.nn.Module, embeddings: Sequence[PromptEmbeddings], device: torch.device | None) -> None:
    """Checked before diffusers runs: its own error would name neither the tensor nor the prompt."""
    tensors: dict[str, Any] = {f"embeddings of {each.prompt!r}": each.tensors() for each in embeddings}
    if device is not None:
        tensors["unet"] = dict(islice(unet.named_parameters(), 1))
    elif not any(map(offload_hook_of, unet.modules())):
        # Weights that wait elsewhere for their offload hook say nothing about where the UNet will run.
        tensors["unet"] = dict(chain(unet.named_parameters(), unet.named_buffers()))
    check_same_device(**tensors)
