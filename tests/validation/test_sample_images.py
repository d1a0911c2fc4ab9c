"""Sample images: from cached embeddings the very images of the whole pipeline, and nothing else has changed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler, StableDiffusionXLPipeline
from helpers.encoding import generate
from helpers.photo_files import write_photo
from helpers.tiny_configs import tiny_config
from helpers.tiny_models import tiny_pipeline

from latentcache import LatentCache
from latentcache.config import ValidationConfig
from latentcache.errors import ConfigError, DeviceMismatchError
from latentcache.precache.run import run_precache
from latentcache.validation.sample_images import (
    PromptEmbeddings,
    denoise,
    prompt_embeddings,
    scheduler_copy,
)

PROMPTS = ["a red house", "a blue car in the rain"]


def small(**changes: Any) -> ValidationConfig:
    return ValidationConfig(height=64, width=96, num_inference_steps=3, **changes)


SETTINGS = small(seed=7)


def reference(
    pipeline: StableDiffusionXLPipeline, negative: str | None, settings: ValidationConfig
) -> list[np.ndarray]:
    """The images of diffusers itself, from the prompts, with the encoders in memory."""
    images = []
    for number, prompt in enumerate(PROMPTS):
        result = pipeline(
            prompt=prompt,
            negative_prompt=negative,
            height=settings.height,
            width=settings.width,
            num_inference_steps=settings.num_inference_steps,
            guidance_scale=settings.guidance_scale,
            generator=torch.Generator().manual_seed(settings.seed + number),
        )
        images.append(np.asarray(result.images[0]))
    return images


@pytest.mark.filterwarnings("ignore:.*upcast_vae:FutureWarning")
@pytest.mark.parametrize(
    ("dtype", "negative", "guidance_scale", "scheduler"),
    [
        (torch.float32, "", 1.0, None),
        (torch.float32, None, 5.0, None),
        (torch.float32, "ugly", 5.0, "EulerAncestralDiscreteScheduler"),
        (torch.float32, "ugly", 5.0, "DPMSolverMultistepScheduler"),
        (torch.float16, "ugly", 5.0, None),
        (torch.bfloat16, None, 5.0, None),
    ],
)
def test_images_are_those_of_the_whole_pipeline(
    tmp_path: Path, dtype: torch.dtype, negative: str | None, guidance_scale: float, scheduler: str | None
) -> None:
    write_photo(tmp_path / "photos" / "a.png", 1, (80, 144))
    config = tiny_config(
        tmp_path,
        **{"datasets.0.buckets": {"area": 4096}, "validation.prompts": PROMPTS},
        **{"encode.text_dtype": str(dtype).removeprefix("torch.")},
    )
    run_precache(config)
    pipeline = tiny_pipeline().to(dtype)
    settings = small(seed=7, guidance_scale=guidance_scale, scheduler=scheduler)
    with LatentCache(config.cache.path) as cache:
        embeddings = prompt_embeddings(cache, PROMPTS, negative, device=pipeline.unet)
    assert {tensor.dtype for each in embeddings for tensor in each.tensors().values()} == {dtype}
    samples = generate(pipeline.unet, pipeline.vae, pipeline.scheduler, embeddings, settings)
    assert {parameter.dtype for parameter in pipeline.vae.parameters()} == {dtype}
    pipeline.scheduler = scheduler_copy(pipeline.scheduler, scheduler)
    expected = reference(pipeline, negative, settings)
    assert len(samples) == 2 and not np.array_equal(expected[0], expected[1])
    for number, (sample, image) in enumerate(zip(samples, expected, strict=True)):
        assert np.array_equal(np.asarray(sample.image), image) and image.shape == (64, 96, 3)
        assert (sample.prompt, sample.negative_prompt) == (PROMPTS[number], negative)
        assert (sample.seed, sample.tiled) == (7 + number, False)


@pytest.fixture
def embeddings() -> list[PromptEmbeddings]:
    """Made up: for what needs no cache."""
    numbers = torch.Generator().manual_seed(0)
    shapes = {"prompt_embeds": (1, 77, 72), "pooled_prompt_embeds": (1, 40)}

    def made() -> dict[str, torch.Tensor]:
        return {name: torch.randn(shape, generator=numbers) for name, shape in shapes.items()}

    return [PromptEmbeddings(prompt, "", made(), made()) for prompt in PROMPTS]


def test_an_image_does_not_depend_on_the_other_prompts(embeddings: list[PromptEmbeddings]) -> None:
    pipeline = tiny_pipeline()
    both = denoise(pipeline.unet, pipeline.scheduler, embeddings, SETTINGS)
    second = small(seed=8)
    assert torch.equal(both[1], denoise(pipeline.unet, pipeline.scheduler, embeddings[1:], second)[0])
    assert both[0].shape == (1, 4, 8, 12)


@pytest.mark.parametrize("fails", [False, True])
def test_training_is_as_it_was(embeddings: list[PromptEmbeddings], fails: bool) -> None:
    """Also where layers draw from the global generators, as some do."""
    pipeline = tiny_pipeline()
    unet, scheduler = pipeline.unet.train(), DDPMScheduler(prediction_type="v_prediction")
    unet.mid_block.eval()
    scheduler.set_timesteps(10)

    def draw(module: torch.nn.Module, args: Any, output: Any) -> Any:
        assert not any(part.training for part in module.modules())
        random.random(), np.random.rand()
        if fails:
            raise KeyboardInterrupt
        return (output[0] + torch.rand_like(output[0]),)

    def state() -> list[Any]:
        draws = random.getstate(), str(np.random.get_state(legacy=False)), torch.get_rng_state().tolist()
        modes = [part.training for part in unet.modules()], torch.is_grad_enabled()
        weights = [(id(p), p.requires_grad, p.grad, p.data_ptr()) for p in unet.parameters()]
        return [{name: str(value) for name, value in vars(scheduler).items()}, draws, modes, weights]

    unet.register_forward_hook(draw)
    before = state()
    if fails:
        with pytest.raises(KeyboardInterrupt):
            denoise(unet, scheduler, embeddings, SETTINGS)
    else:
        first, second = (denoise(unet, scheduler, embeddings, SETTINGS) for _ in range(2))
        assert all(map(torch.equal, first, second)), "what draws from the global generator is seeded too"
    assert state() == before


def test_weights_cast_for_sampling_do_not_reach_training(embeddings: list[PromptEmbeddings]) -> None:
    """Autocast keeps casts of weights until it ends; those made without gradients would cut training off from them."""
    pipeline = tiny_pipeline()
    unet = pipeline.unet.requires_grad_(True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        sampled = denoise(unet, pipeline.scheduler, embeddings, SETTINGS)[0]
        conditions = {"text_embeds": torch.zeros(1, 40), "time_ids": torch.zeros(1, 6)}
        predicted = unet(torch.ones(1, 4, 8, 8), 1, torch.zeros(1, 77, 72), added_cond_kwargs=conditions).sample
        assert torch.is_autocast_cache_enabled()
    predicted.float().sum().backward()
    assert all(parameter.grad is not None for parameter in unet.parameters())
    plain = denoise(unet, pipeline.scheduler, embeddings, SETTINGS)[0]
    assert not torch.equal(sampled, plain), "the surrounding autocast stays in force"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("EulerDiscretScheduler", r"'EulerDiscretScheduler' is no scheduler .*did you mean 'EulerDiscreteScheduler'"),
        ("AutoencoderKL", r"'AutoencoderKL' is no scheduler class"),
        ("FlowMatchEulerDiscreteScheduler", r"has no .*which StableDiffusionXLPipeline needs"),
    ],
)
def test_schedulers_that_cannot_be_used(name: str, said: str, embeddings: list[PromptEmbeddings]) -> None:
    pipeline = tiny_pipeline()
    with pytest.raises(ConfigError, match=said) as caught:
        denoise(pipeline.unet, pipeline.scheduler, embeddings, small(scheduler=name))
    assert caught.value.key == "validation.scheduler"


def test_embeddings_elsewhere_are_named_before_diffusers_runs(embeddings: list[PromptEmbeddings]) -> None:
    pipeline = tiny_pipeline()
    one = embeddings[1]
    moved = PromptEmbeddings(one.prompt, "", {n: t.to("meta") for n, t in one.embeds.items()}, one.negative)
    with pytest.raises(DeviceMismatchError, match=r"embeddings of 'a blue car in the rain'\.prompt_embeds.* is meta"):
        denoise(pipeline.unet, pipeline.scheduler, [embeddings[0], moved], SETTINGS)
