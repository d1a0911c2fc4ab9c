"""A family's tiny model with its diffusers pipeline, and a cache filled by a real run."""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from diffusers.pipelines.wan import pipeline_wan
from helpers.family_references import generator
from helpers.photo_files import write_clip, write_photo
from helpers.tiny_configs import config_of_dataset
from helpers.tiny_models import tiny_model, whole_pipeline
from PIL import Image, ImageSequence

from latentcache import LatentCache
from latentcache.config import Config, ImagesConfig
from latentcache.dataset.images import decode, prepare
from latentcache.families import family_named
from latentcache.families.base import CONDITION, PICTURE, Family
from latentcache.families.scaling import latents_from_moments
from latentcache.identity import Preparation
from latentcache.models.model_loader import LoadedModels, Models
from latentcache.precache import encodings
from latentcache.precache.encodings import Encodings, choose_encodings
from latentcache.precache.preparation import Controls
from latentcache.precache.prompts import cache_prompts
from latentcache.precache.run import run_precache
from latentcache.precache.workspace import open_workspace
from latentcache.types import Geometry

SIDE = 64
TEXTS = ("cat", "a red cat on the table", "a photograph of two small cats, one asleep, in warm evening light")
SIZE = {"height": SIDE, "width": SIDE}
ALONE = ("anima", "anima-states", "qwen-image-21", "qwen-image-21-edit")
"""Families whose pipelines let texts of a batch affect each other: Qwen-Image 2.1 places an image after the longest
text, and the last bits of Anima's empty text depend on the batch size (3e-7)."""
CONTROLS = {"controls": (96, SIDE), "controls-2": (SIDE, 96)}
"""The folders of control images and their sizes, which differ from those of the images."""
CONTROL_AREA = 96 * SIDE
NUM_FRAMES = 5
"""Frames of each clip."""


def write_samples(folder: Path, *, with_clips: bool = False) -> Path:
    """Write three photos or clips with captions of different lengths, and control images in the folders of CONTROLS."""
    for number, text in enumerate(TEXTS):
        path = folder / "photos" / f"{number}.png"
        (write_clip if with_clips else write_photo)(path, number, (SIDE, SIDE))
        path.with_suffix(".txt").write_text(text)
        for at, (name, size) in enumerate(CONTROLS.items(), 1):
            write_photo(folder / name / path.name, 10 * at + number, size)
    return folder / "photos"


def family_config(
    folder: Path,
    changes: Mapping[str, Any] | None = None,
    *,
    num_controls: int = 0,
    with_clips: bool = False,
    **encode: Any,
) -> Config:
    """The 64x64 samples of `write_samples` in float32, with `num_controls` control images and changed settings."""
    if not (folder / "photos").exists():
        write_samples(folder, with_clips=with_clips)
    dataset: dict[str, Any] = {"buckets": {"area": SIDE**2, "step": 16}}
    dataset["control"] = [{"path": folder / name, "area": CONTROL_AREA} for name in [*CONTROLS][:num_controls]]
    if with_clips:
        dataset["frames"] = {"count": NUM_FRAMES, "fps": None}
    encode = {"device": "cpu", "num_workers": 1, "batch_size": 1, "text_store_dtype": "float32", **encode}
    return config_of_dataset(folder, {"encode": encode, "validation": {}, **(changes or {})}, **dataset)


def guidance_with_negative(family: Family) -> float:
    """A strong guidance scale, if the family supports guidance."""
    return 1.0 if family.name.startswith("ideogram4") else 4.0


def equal(one: Any, other: Any) -> bool:
    """Whether two arguments of a denoiser are bit-identical. A scalar equals a batch of itself."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        wide = one if one.ndim >= other.ndim else other
        return bool(torch.equal(one.expand_as(wide).to(wide.dtype), other.expand_as(wide).to(wide.dtype)))
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


class StopDenoising(Exception):
    """Raised after the first call of the denoiser."""


@dataclass
class DenoiserCall:
    """The arguments by name, and the output."""

    arguments: dict[str, Any]
    output: Any


@contextmanager
def recorded(denoiser: torch.nn.Module, *, stop: bool = False) -> Iterator[list[DenoiserCall]]:
    """Record the calls of a denoiser. With `stop` the block ends after the first one."""
    calls: list[DenoiserCall] = []
    signature = inspect.signature(denoiser.forward)

    def note(_: Any, arguments: Any, options: Any, output: Any) -> None:
        bound = {
            name: value
            for name, value in signature.bind(*arguments, **options).arguments.items()
            # Empty arguments may be omitted.
            if name != "return_dict" and value is not None and value != {}
        }
        calls.append(DenoiserCall(bound, output))
        if stop:
            raise StopDenoising

    handle = denoiser.register_forward_hook(note, with_kwargs=True)
    try:
        yield calls
    except StopDenoising:
        pass
    finally:
        handle.remove()


@dataclass
class FamilyRun:
    """A family's tiny model with a filled cache."""

    family: Family
    parts: dict[str, Any]
    config: Config
    cache: LatentCache

    @property
    def denoiser(self) -> Any:
        return self.parts[self.family.denoiser]

    @cached_property
    def pipeline(self) -> Any:
        """diffusers' own, with all parts."""
        return whole_pipeline(self.family, **self.parts)

    @property
    def models(self) -> Models:
        return loaded_models(self.family, self.parts)

    @cached_property
    def encodings(self) -> Encodings:
        return choose_encodings(self.config, self.models, {})

    @cached_property
    def rows(self) -> dict[str, Any]:
        """The samples by caption."""
        rows = self.cache.manifest("photos").rows.values()
        return {row.captions[0].text: row for row in rows}

    @property
    def scaling(self) -> Any:
        return self.cache.scaling(self.cache.manifest("photos"))

    def pixels(self, text: str) -> torch.Tensor:
        """The VAE's input for the photo or clip of this caption: [1, 3, (F,) H, W]."""
        row = self.rows[text]
        path, geometry = self.config.datasets[0].source.path / row.sample_id, row.images[0].geometry  # type: ignore[union-attr]
        if geometry.num_frames is None:
            return self.vae_input(prepared(path, geometry))
        with Image.open(path) as file:
            frames = [prepare(np.array(frame.convert("RGB")), geometry) for frame in ImageSequence.Iterator(file)]
        assert len(frames) == geometry.num_frames == NUM_FRAMES
        return torch.cat([self.vae_input(frame) for frame in frames], dim=2)

    def vae_input(self, image: np.ndarray) -> torch.Tensor:
        """Pixels [1, 3, (1,) H, W] of an image [H, W, 3]."""
        pixels = torch.from_numpy(image).permute(2, 0, 1)[None].float().div(127.5).sub(1.0).contiguous()
        return pixels.unsqueeze(2) if self.family.latent.is_video else pixels

    def groups(self, texts: Sequence[str]) -> list[list[str]]:
        """The texts in groups that the pipeline takes at once: one by one for ALONE and for families with pictures."""
        is_alone = self.has_pictures or self.family.name in ALONE
        return [[text] for text in texts] if is_alone else [list(texts)]

    @property
    def has_pictures(self) -> bool:
        """Whether the pipeline takes control images or a first frame."""
        return self.family.text_reads_control or bool(self.family.clip_condition)

    def controls(self, text: str) -> list[np.ndarray]:
        """The control images of this caption, prepared as for the cache, [H, W, 3]."""
        row, photos = self.rows[text], self.config.datasets[0].source.path  # type: ignore[union-attr]
        parts = zip(CONTROLS, row.parts, strict=True)
        return [prepared(photos.with_name(name) / row.sample_id, part.geometry) for name, part in parts]

    def key_controls(self, text: str) -> Controls:
        """The control images' part of the caption's key."""
        parts = self.cache.manifest("photos").common.get("parts", [])
        pairs = zip(parts, self.rows[text].parts, strict=True)
        return tuple((ref.source, Preparation(**part["policy"], geometry=ref.geometry)) for part, ref in pairs)

    def tokenized(self, texts: Sequence[str], captions: Sequence[str] | None = None) -> Sequence[Any]:
        """The input of `encode_text` for these texts, or for `captions`, with the texts' control images."""
        if not self.family.text_reads_control:
            return self.family.tokenize(self.parts, captions or texts)
        return self.family.tokenize_with_control(self.parts, captions or texts, [self.controls(each) for each in texts])

    def live_pictures(self, text: str) -> dict[str, torch.Tensor]:
        """Encode this caption's control images or first frame, as they are in `batch`."""
        if self.family.clip_condition:
            shape = (1, self.family.latent.channels, SIDE, SIDE, NUM_FRAMES)
            with torch.no_grad():
                first = self.pictures([text])["image"]
                _, made = self.pipeline.prepare_latents(first, *shape, first.dtype, first.device, generator())
            found = {CONDITION: made[:, -self.family.latent.channels :]}  # after the mask
            if "image_encoder" in self.parts:
                with torch.no_grad():
                    found[PICTURE] = self.pipeline.encode_image(as_picture(first), "cpu")
            return found
        found = {}
        for number, image in enumerate(self.controls(text), 1):
            with torch.no_grad():
                moments = self.family.encode_image(self.parts["vae"], self.vae_input(image))
            found[f"control_latents_{number}"] = self.scaling.apply(latents_from_moments(moments))
        return found

    def batch(self, texts: Sequence[str]) -> dict[str, Any]:
        """The samples of these captions, with scaled latents."""
        return dict(self.cache.batch([self.rows[text].sample_id for text in texts], device="cpu", scaled=True))

    def negative(self, texts: Sequence[str]) -> dict[str, Any]:
        """The empty text as the negative prompt of these samples."""
        if self.family.text_reads_control:  # cached prompts have no control images
            tokens = self.tokenized(texts, [""] * len(texts))
            with torch.no_grad():
                return dict(self.family.encode_text(self.parts, tokens, self.encodings.text.settings))
        found = self.cache.prompt("", device="cpu", negative=True)
        return {name: tensor.expand(len(texts), *tensor.shape[1:]) for name, tensor in found.items()}

    def latents(self, text: str) -> torch.Tensor:
        """Scaled latents of this caption's photo, sampled with `generator()` if the family samples: [1, ...]."""
        draw = generator() if self.family.latent.draws else None
        batch = self.cache.batch([self.rows[text].sample_id], device="cpu", scaled=True, generator=draw)
        latents: torch.Tensor = batch["latents"]
        return latents

    def prompts(self, texts: Sequence[str], negative: Sequence[str] | None = None) -> dict[str, Any]:
        """The pipeline's arguments for texts, with its encoding changed to recipes that it does not support itself."""
        accepted = inspect.signature(self.pipeline.__call__).parameters
        kwargs: dict[str, Any] = {"prompt": list(texts), **self.pictures(texts)}
        if negative is not None and "negative_prompt" in accepted:
            kwargs["negative_prompt"] = list(negative)
        if "max_sequence_length" in accepted and "max_length" in self.encodings.text.settings:
            kwargs["max_sequence_length"] = self.encodings.text.settings["max_length"]
        if self.family.name == "ideogram4":
            kwargs["max_sequence_length"] = 128  # padding changes nothing, and 2048 rows take long
        return kwargs if self.family.name != "chroma" else self._masked(kwargs)

    def pictures(self, texts: Sequence[str]) -> dict[str, Any]:
        """The pipeline's arguments for the control images or first frame of a text, if it takes any."""
        if self.family.clip_condition:
            [text] = texts
            return {
                "image": self.pixels(text)[:, :, 0]
            }  # as pixels: from a picture it makes slightly different ones (1e-7)
        if not self.family.text_reads_control:
            return {}
        [text] = texts
        resolution = {"output_resolution": CONTROL_AREA**0.5} if self.family.name in ALONE else {}
        return {"image": [Image.fromarray(image) for image in self.controls(text)], **resolution}

    def _masked(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments for Chroma's pipeline with a boolean mask, unless its padding is kept."""
        if self.encodings.text.settings["keeps_padding"]:
            return kwargs
        embeds, _, mask, negative, _, negative_mask = self.pipeline.encode_prompt(
            **kwargs, do_classifier_free_guidance="negative_prompt" in kwargs
        )
        found = {"prompt_embeds": embeds, "prompt_attention_mask": mask.bool()}
        if negative is not None:
            found |= {"negative_prompt_embeds": negative, "negative_prompt_attention_mask": negative_mask.bool()}
        return found

    def first_call(self, texts: Sequence[str]) -> tuple[DenoiserCall, torch.Tensor, torch.Tensor]:
        """The pipeline's first call of the denoiser for these texts, without guidance.

        Also returns the noise, as scaled latents in the family's layout, and the timestep [B].
        """
        noise: list[torch.Tensor] = []
        module = sys.modules[type(self.pipeline).__module__]
        draw = module.randn_tensor

        def noted(*arguments: Any, **options: Any) -> torch.Tensor:
            noise.append(draw(*arguments, **options))
            return noise[-1]

        # With these the denoiser gets only the positive prompt, as in training.
        scales = [each for each in (3.5, 1.0, 0.0) if each <= guidance_with_negative(self.family)]
        guidance = self.family.guidance_kwargs(next(each for each in scales if not self.family.uses_negative(each)))
        prompts = self.prompts(texts)
        with patch.object(module, "randn_tensor", noted), recorded(self.denoiser, stop=True) as calls:
            # Keys and values that it keeps are no condition.
            uncached = {"use_kv_cache": False} if self.family.name.startswith("qwen-image-21") else {}
            self.generate(self.pipeline, **prompts, **guidance, **uncached)
        [call] = calls
        latents = call.arguments.get("sample")
        if noise[0].ndim == 3:  # tokens
            latents = self.family.final_latents(noise[0], SIDE, SIDE)
        elif latents is None:
            latents = noise[0].reshape(self.latent_shape(len(texts)))
        return call, latents, self.pipeline.scheduler.timesteps[0].float().expand(len(texts))

    def latent_shape(self, num: int) -> tuple[int, ...]:
        """The shape of `num` scaled latents."""
        latent, patch = self.family.latent, 2 if self.scaling.rule == "batch_norm" else 1
        frames = (2 if self.family.clip_condition else 1,) if latent.is_video else ()
        side = SIDE // latent.downscale // patch
        return (num, latent.channels * patch**2, *frames, side, side)

    def generate(self, pipeline: Any, **kwargs: Any) -> Any:
        """Two steps of a pipeline; one frame of a video, where it takes a picture to begin with NUM_FRAMES."""
        accepted = inspect.signature(pipeline.__call__).parameters
        frames = {"num_frames": NUM_FRAMES if self.family.clip_condition else 1} if "num_frames" in accepted else {}
        settings: dict[str, Any] = {"num_inference_steps": 2, "output_type": "pt", **SIZE, **frames, **kwargs}
        # Copies, because some pipelines modify the lists that they get.
        settings = {name: list(value) if isinstance(value, list) else value for name, value in settings.items()}
        with self._pictures_as_cached(pipeline):
            return pipeline(**{"generator": generator(), **settings})[0]

    @contextmanager
    def _pictures_as_cached(self, pipeline: Any) -> Iterator[None]:
        """Patch the pipeline to resize control images like the cache, not to a megapixel.

        It also scales them like images, as its `(z - mean) / std` differs in the last bits. Pipelines for a first frame
        clean texts with ftfy even if it is not installed, and CLIP reads the frame as a picture.
        """
        if self.family.clip_condition:
            module, encode = sys.modules[type(pipeline).__module__], pipeline.encode_image
            with (
                patch.object(module, "prompt_clean", pipeline_wan.prompt_clean),
                patch.object(pipeline, "encode_image", lambda pixels, device: encode(as_picture(pixels), device)),
                warnings.catch_warnings(),
            ):
                warnings.filterwarnings("ignore", "Passing `image` as torch tensor", FutureWarning)
                yield
            return
        if not self.family.text_reads_control:
            yield
            return

        def encoded(image: torch.Tensor, generator: Any) -> torch.Tensor:
            latents: torch.Tensor = self.scaling.apply(pipeline.vae.encode(image.contiguous()).latent_dist.mode())
            return latents

        module = sys.modules[type(pipeline).__module__]
        with (
            patch.object(module, "VAE_IMAGE_SIZE", CONTROL_AREA, create=True),
            patch.object(pipeline, "_encode_vae_image", encoded),
        ):
            yield


def as_picture(pixels: torch.Tensor) -> Image.Image:
    """Convert pixels [1, 3, H, W] in -1..1 to a picture."""
    return Image.fromarray(((pixels[0] + 1) * 127.5).round().byte().permute(1, 2, 0).numpy())


def prepared(path: Path, geometry: Geometry) -> np.ndarray:
    """Decode and prepare the image in a file, [H, W, 3]."""
    image: np.ndarray = prepare(decode(path.read_bytes(), path.name, ImagesConfig(min_side=8)), geometry)
    return image


def loaded_models(family: Family, parts: Mapping[str, Any]) -> Models:
    return LoadedModels(family=family, **{name: part for name, part in parts.items() if name in family.parts})


def family_run(folder: Path, name: str, parts: dict[str, Any] | None = None, **settings: Any) -> FamilyRun:
    """Fill a cache with a family's tiny model, or with these parts. `settings` are those of `encode`."""
    family, parts = family_named(name), parts or tiny_model(name)
    num_controls = len(CONTROLS) if family.text_reads_control else 0
    changes = {"datasets.0.role": "validation", "validation": {"prompts": [TEXTS[1]]}} if num_controls else {}
    config = family_config(
        folder, changes, num_controls=num_controls, with_clips=bool(family.clip_condition), **settings
    )
    models = loaded_models(family, parts)
    num_empty = 0
    if name == "qwen-image":  # alone, as in the pipeline below: the last bits depend on the longest text of a batch
        with open_workspace(config.cache) as workspace:
            num_empty = cache_prompts(config, workspace, models, [("", False), ("", True)], device="cpu")
    # Two texts at once, as most pipelines below.
    num_texts = 1 if name in ALONE else 2
    with patch.object(encodings, "text_batch_size", lambda device: num_texts):
        report = run_precache(config, models=models)
    # Images, control images, texts, and the empty one.
    expected = (2 + num_controls) * len(TEXTS) + 1
    assert report.num_refused == 0 and report.num_encoded + num_empty == expected, report.to_json()
    return FamilyRun(family, parts, config, LatentCache(config.cache.path))
