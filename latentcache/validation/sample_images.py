"""Sample images from cached prompt embeddings, made by the family's own pipeline without its encoders."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import diffusers
import numpy as np
import torch
from diffusers import SchedulerMixin
from PIL import Image

from latentcache.config import ValidationConfig
from latentcache.config_file import suggest
from latentcache.devices.audit import audit
from latentcache.devices.placement import DeviceLike, device_of, in_eval_mode
from latentcache.errors import ConfigError, ModelError, SampleError
from latentcache.families import DEFAULT, family_named, family_of_denoiser
from latentcache.families.base import Family
from latentcache.loading.cache import LatentCache
from latentcache.models.running import uncached_autocast
from latentcache.models.vae import decode_fitting, vae_facts
from latentcache.phases.state import RandomStreams
from latentcache.validation.noise_schedule import is_flow

MAX_FRAMES = 4
"""Maximum number of frames in the image of a clip."""

PromptPair = tuple[str, bool]
"""A text, and whether it is a negative prompt. Some families encode negative prompts differently."""


@dataclass(frozen=True, slots=True)
class PromptEmbeddings:
    """Inputs of a pipeline in place of a prompt: the fields of a cached text, [1, ...], with their masks.

    If `negative_prompt` is None, `negative` is what the family's pipeline uses by default: zeros for
    `force_zeros_for_empty_prompt`, else the empty text.
    """

    prompt: str
    negative_prompt: str | None
    embeds: Mapping[str, torch.Tensor]
    negative: Mapping[str, torch.Tensor]

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by name. Those of the negative prompt start with `negative_`."""
        return {**self.embeds, **{f"negative_{name}": tensor for name, tensor in self.negative.items()}}


def prompt_embeddings(
    cache: LatentCache,
    prompts: Sequence[str],
    negative_prompt: str | None,
    *,
    device: DeviceLike,
    dtype: torch.dtype | None = None,
    encode: Callable[[Sequence[PromptPair]], object] | None = None,
    datasets: Sequence[str] = (),
) -> list[PromptEmbeddings]:
    """The embeddings of these prompts, in order, on the requesting device; by default in a given module's dtype.

    A family whose pipeline needs a picture takes it from a sample of `datasets` that has the prompt as a caption.

    If the cache lacks any pair (text, is negative), `encode` is called with these pairs and must cache them
    (`precache.prompts.cache_prompts`). Without `encode`, SampleError names the first missing prompt and the remedy.
    """
    family = next((manifest.family for manifest in cache.datasets()), family_named(DEFAULT))
    text = "" if negative_prompt is None and not family.has_zero_negative else negative_prompt
    if family.needed_picture:
        views = [*map(cache.restricted, datasets)]
        return _with_pictures(views, prompts, text or "", family, device, dtype, encode)
    pairs: list[PromptPair] = [(prompt, False) for prompt in prompts]
    if prompts and text is not None:
        pairs.append((text, True))
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
        zeros = {name: torch.zeros_like(tensor) for name, tensor in positive.items()}
        negative = zeros if text is None else found[text, True]
        embeddings.append(PromptEmbeddings(prompt, negative_prompt, positive, negative))
    return embeddings


class Picture(NamedTuple):
    """A sample with the picture for a prompt: its cache (restricted to one dataset), and the number of the caption."""

    cache: LatentCache
    sample_id: str
    caption: int
    beside: str
    """The key of the caption if the family reads negative prompts with its control images, else empty."""


def pictures_of(
    caches: Iterable[LatentCache], prompts: Iterable[str], negative_prompt: str, family: Family
) -> dict[str, list[Picture]]:
    """The samples that have each prompt as a caption. Each cache is restricted to one dataset.

    Raises ConfigError for a prompt that is no caption, and SampleError if the negative prompt was not cached with the
    control images of such a sample: a validation cannot encode it.
    """
    found: dict[str, list[Picture]] = {prompt: [] for prompt in prompts}
    for cache in caches:
        [manifest] = cache.datasets()
        flags = np.fromiter((text in found for text in manifest.rows.caption_texts), np.bool_)
        for row in map(manifest.rows.row, manifest.rows.usable_with("caption", flags).tolist()):
            for number, caption in enumerate(row.captions[:: manifest.variants]):
                if caption.text in found:
                    beside = caption.key if family.text_reads_control else ""
                    found[caption.text].append(Picture(cache, row.sample_id, number, beside))
                    if beside:
                        cache.cached_prompt(negative_prompt, negative=True, beside=beside)
    for prompt, pictures in found.items():
        if not pictures:
            raise ConfigError(
                f"{prompt!r} is not a caption in the validation sets, but {family.name} generates from a prompt and "
                f"{family.needed_picture}: name captions of their samples",
                key="validation.prompts",
            )
    return found


def _with_pictures(
    caches: Sequence[LatentCache],
    prompts: Sequence[str],
    negative_prompt: str,
    family: Family,
    device: DeviceLike,
    dtype: torch.dtype | None,
    encode: Callable[[Sequence[PromptPair]], object] | None,
) -> list[PromptEmbeddings]:
    """Embeddings of captions, with the control images or the condition of a sample that has the caption.

    A prompt that is given several times takes its samples in turn. A sample that is lost or damaged is passed over.
    """
    pictures, embeddings = pictures_of(caches, prompts, negative_prompt, family), []
    for number, prompt in enumerate(prompts):
        found = pictures[prompt]
        first = prompts[:number].count(prompt) % len(found)
        for picture in (in_turn := [*found[first:], *found[:first]]):
            cache, sample_id, caption, beside = picture
            try:
                batch = cache.batch([sample_id], device=device, dtype=dtype, scaled=True, caption=caption)
                break
            except SampleError:
                if picture is in_turn[-1]:
                    raise
        positive = {name: each for name, each in batch.items() if isinstance(each, torch.Tensor) and name != "latents"}
        read = partial(cache.prompt, negative_prompt, device=device, dtype=dtype, negative=True, beside=beside)
        try:
            negative = read()
        except SampleError:
            if encode is None or beside:
                raise
            encode([(negative_prompt, True)])
            cache.refresh()
            negative = read()
        embeddings.append(PromptEmbeddings(prompt, negative_prompt, positive, positive | negative))
    return embeddings


def _read_prompts(
    cache: LatentCache, pairs: Iterable[PromptPair], device: DeviceLike, dtype: torch.dtype | None
) -> tuple[dict[PromptPair, dict[str, torch.Tensor]], dict[PromptPair, SampleError]]:
    """The tensors of each pair that can be read, and the errors of those that are not cached, lost or damaged."""
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
    denoiser: torch.nn.Module,
    scheduler: Any,
    embeddings: Sequence[PromptEmbeddings],
    settings: ValidationConfig,
    *,
    device: torch.device | None = None,
    family: Family | None = None,
    pipeline_settings: Mapping[str, Any] | None = None,
) -> list[torch.Tensor]:
    """The scaled latents [1, C, (F,) h, w] of each image, on the denoiser's device, ready to be decoded.

    They are bit-identical to the latents of the family's pipeline for the same prompt, seed and device. Each image is
    one call with its own CPU generator, so it does not depend on the other prompts. The denoiser runs where it is, in
    eval mode and under a surrounding autocast. Its training flags, the global random state and `scheduler` are
    restored, even after an error.

    Args:
        denoiser: The unwrapped denoiser.
        scheduler: A scheduler of diffusers. The loop uses a copy.
        embeddings: One per image. Negative ones count only if the pipeline uses them at this `guidance_scale`.
        settings: Steps, guidance, size, seed and scheduler class.
        device: Needed if the denoiser's blocks are swapped, so that its parameters are on several devices.
        family: Default: that of `family_of_denoiser`.
        pipeline_settings: Of the model, from `models.files.pipeline_settings`, such as whether it is distilled.

    Raises:
        DeviceMismatchError: The denoiser and the embeddings are on different devices.
        ConfigError, ModelError: The scheduler cannot be used; the denoiser is wrapped.
    """
    family = family or family_of_denoiser(denoiser)
    check_denoiser(denoiser, family)
    if not hasattr(denoiser, "config"):
        name, word = family.denoiser, family.denoiser_word
        raise ModelError(
            f"{name}: {type(denoiser).__name__} has no config, so it is a wrapper. Give the {word} inside of it, as "
            f"accelerator.unwrap_model({name}) does.",
            part=name,
        )
    _check_devices(denoiser, family.denoiser, embeddings, device)
    device = device or device_of(denoiser)
    guidance = settings.guidance_scale
    latents = []
    with ExitStack() as stack:
        stack.callback(RandomStreams().restore)
        stack.enter_context(in_eval_mode(denoiser))
        stack.enter_context(uncached_autocast(device, None))
        for number, each in enumerate(embeddings):
            copied = scheduler_copy(scheduler, settings.scheduler, family)
            pipeline = family.sampler(**{family.denoiser: denoiser, "scheduler": copied}, **(pipeline_settings or {}))
            generator = torch.Generator().manual_seed(settings.seed + number)
            # A few schedulers draw from the global generator.
            torch.manual_seed(settings.seed + number)
            latent, *_ = pipeline(
                **family.pipeline_kwargs(each.embeds, each.negative if family.uses_negative(guidance) else None),
                **family.guidance_kwargs(guidance),
                height=settings.height,
                width=settings.width,
                num_inference_steps=settings.num_inference_steps,
                generator=generator,
                output_type="latent",
                return_dict=False,
            )
            latents.append(family.final_latents(latent, settings.height, settings.width))
    return latents


def decode_samples(
    vae: torch.nn.Module,
    latents: Sequence[torch.Tensor],
    embeddings: Sequence[PromptEmbeddings],
    settings: ValidationConfig,
    family: Family | None = None,
) -> list[SampleImage]:
    """Decode what `denoise` returned, with the VAE where it is. A clip becomes MAX_FRAMES frames side by side."""
    samples = []
    for number, (latent, each) in enumerate(zip(latents, embeddings, strict=True)):
        images, tiled = decode_fitting(vae, latent, family)
        frames = images if images.ndim == 4 else images[0]
        places = np.linspace(0, len(frames) - 1, min(len(frames), MAX_FRAMES)).round().astype(int)
        image = Image.fromarray(np.concatenate(frames[places], axis=1))
        samples.append(SampleImage(each.prompt, each.negative_prompt, settings.seed + number, image, tiled))
    return samples


def scheduler_copy(scheduler: Any, class_name: str | None = None, family: Family | None = None) -> Any:
    """A new scheduler with a copy of the config, of the named diffusers class or by default of its own class.

    `family` defaults to DEFAULT. Raises ConfigError if there is no such class, or if the family's pipeline cannot use
    it with this config.
    """
    family = family or family_named(DEFAULT)
    if not isinstance(getattr(scheduler, "config", None), Mapping):
        raise ConfigError(f"scheduler is {type(scheduler).__name__}, but a scheduler of diffusers is needed")
    scheduler_class = type(scheduler) if class_name is None else _scheduler_class(class_name)
    try:
        copied = scheduler_class.from_config(_settings_of(scheduler))
    except (ImportError, NotImplementedError, TypeError, ValueError) as error:
        name = scheduler_class.__name__
        raise _refused(f"{name} cannot be made from the model's scheduler config: {error}") from error
    missing = [name for name in family.needed_of_scheduler if not hasattr(copied, name)]
    if missing:
        pipeline = family.pipeline_name
        raise _refused(f"{scheduler_class.__name__} has no {', '.join(missing)}, which {pipeline} needs")
    if is_flow(scheduler) and not is_flow(copied):
        raise _refused(f"{scheduler_class.__name__} with the model's scheduler config is not one of flow matching")
    return copied


def check_denoiser(denoiser: torch.nn.Module, family: Family) -> None:
    """Raise ConfigError for a denoiser that generates with a mask and a masked image, which prompts do not have."""
    if family.inpaints(denoiser):
        raise ConfigError(
            f"this {family.denoiser_word} inpaints: it generates with a mask and a masked image, and prompts have none "
            "here; set them to [] (a validation set has its masks: its loss is measured)",
            key="validation.prompts",
        )


def check_sampling(
    vae: torch.nn.Module, scheduler: Any, settings: ValidationConfig, family: Family | None = None
) -> None:
    """Raise, before any forward, ConfigError for settings and ModelError for a VAE that sampling cannot use."""
    family = family or family_named(DEFAULT)
    family.guidance_kwargs(settings.guidance_scale)
    scheduler_copy(scheduler, settings.scheduler, family)
    facts = vae_facts(vae, family)
    factor, expected = facts.downscale_factor, family.latent.others.get(facts.latent_channels, family.latent.downscale)
    step = factor * family.patch
    if factor != expected:
        raise ModelError(f"vae: {factor} pixels per latent, but {family.pipeline_name} has {expected}", part="vae")
    for name, side in (("height", settings.height), ("width", settings.width)):
        if side % step and not family.clip_condition:  # else the first frame has the size
            raise ConfigError(
                f"{name} is {side}, but images of {family.name} have sides that are multiples of {step}",
                key=f"validation.{name}",
            )


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


def _check_devices(
    denoiser: torch.nn.Module, name: str, embeddings: Sequence[PromptEmbeddings], device: torch.device | None
) -> None:
    """Checked before diffusers runs: its own error would name neither the tensor nor the prompt."""
    tensors: dict[str, Any] = {f"embeddings of {each.prompt!r}": each.tensors() for each in embeddings}
    # Swapped blocks lie on several devices: only the one where they run is known.
    parts = tensors if device is not None else {name: denoiser, **tensors}
    audit(parts, device=device).raise_for_errors()
