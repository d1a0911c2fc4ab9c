"""Sample images: from cached embeddings the very images of the whole pipeline, and nothing else has changed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.encoding import generate
from helpers.photo_files import write_photo
from helpers.tiny_configs import tiny_config
from helpers.tiny_models import tiny_pipeline

from latentcache import LatentCache
from latentcache.config import ValidationConfig
from latentcache.errors import ConfigError, DeviceMismatchError
from latentcache.precache.run import run_precache
from latentcache.validation.sample_images import PromptEmbeddings, denoise, prompt_embeddings, scheduler_copy

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
PROMPTS = ["a red house", "a blue car in the rain"]
SIZE: dict[str, Any] = {"height": 64, "width": 96, "num_inference_steps": 3}
SETTINGS = ValidationConfig(**SIZE, seed=7)


@pytest.mark.filterwarnings("ignore:.*upcast_vae:FutureWarning")
@pytest.mark.parametrize(
    ("dtype", "vae_dtype", "negative", "guidance_scale", "scheduler"),
    [
        (F32, F16, "", 1.0, None),
        (F32, F32, None, 5.0, None),
        (F32, F32, "ugly", 5.0, "EulerAncestralDiscreteScheduler"),
        (F32, F32, "ugly", 5.0, "DPMSolverMultistepScheduler"),
        (F16, F16, "ugly", 5.0, None),
        (BF16, BF16, None, 5.0, None),
    ],
)
def test_images_are_those_of_the_whole_pipeline(
    tmp_path: Path,
    dtype: torch.dtype,
    vae_dtype: torch.dtype,
    negative: str | None,
    guidance_scale: float,
    scheduler: str | None,
) -> None:
    write_photo(tmp_path / "photos" / "a.png", 1, (80, 144))
    config = tiny_config(
        tmp_path,
        **{"datasets.0.buckets": {"area": 4096}, "validation.prompts": PROMPTS},
        **{"encode.text_dtype": str(dtype).removeprefix("torch.")},
    )
    run_precache(config)
    pipeline = tiny_pipeline().to(dtype)
    pipeline.vae.to(vae_dtype)
    settings = SETTINGS.model_copy(update={"guidance_scale": guidance_scale, "scheduler": scheduler})
    with LatentCache(config.cache.path) as cache:
        embeddings = prompt_embeddings(cache, PROMPTS, negative, device=pipeline.unet)
    assert {tensor.dtype for each in embeddings for tensor in each.tensors().values()} == {dtype}
    samples = generate(pipeline.unet, pipeline.vae, pipeline.scheduler, embeddings, settings)
    assert {parameter.dtype for parameter in pipeline.vae.parameters()} == {vae_dtype}
    # Those of diffusers itself, from the prompts, with the encoders in memory.
    pipeline.scheduler = scheduler_copy(pipeline.scheduler, scheduler)
    given = {"negative_prompt": negative, "guidance_scale": guidance_scale, **SIZE}
    for number, (sample, prompt) in enumerate(zip(samples, PROMPTS, strict=True)):
        generator = torch.Generator().manual_seed(7 + number)
        image = np.asarray(pipeline(prompt=prompt, generator=generator, **given).images[0])
        assert np.array_equal(np.asarray(sample.image), image) and image.shape == (64, 96, 3)
        assert (sample.prompt, sample.negative_prompt) == (prompt, negative)
        assert (sample.seed, sample.tiled) == (7 + number, False)


@pytest.fixture
def embeddings() -> list[PromptEmbeddings]:
    """Made up: for what needs no cache."""
    numbers = torch.Generator().manual_seed(0)
    shapes = {"prompt_embeds": (1, 77, 72), "pooled_prompt_embeds": (1, 40)}

    def made() -> dict[str, torch.Tensor]:
        return {name: torch.randn(shape, generator=numbers) for name, shape in shapes.items()}

    return [PromptEmbeddings(prompt, "", made(), made()) for prompt in PROMPTS]


def test_what_draws_globally_is_seeded_and_leaves_no_trace(embeddings: list[PromptEmbeddings]) -> None:
    """As some layers do. The rest of training is put back by the phase: test_runner.py."""
    pipeline = tiny_pipeline()
    unet = pipeline.unet.train()

    def draw(module: torch.nn.Module, args: Any, output: Any) -> Any:
        assert not any(part.training for part in module.modules())
        random.random(), np.random.rand()
        return (output[0] + torch.rand_like(output[0]),)

    def state() -> list[Any]:
        return [random.getstate(), str(np.random.get_state(legacy=False)), torch.get_rng_state().tolist()]

    unet.register_forward_hook(draw)
    found = []
    for seed in range(2):
        torch.manual_seed(seed)
        before = state()
        found.append(denoise(unet, pipeline.scheduler, embeddings, SETTINGS))
        assert state() == before and unet.training
    assert all(map(torch.equal, *found))


def test_schedulers_that_cannot_be_used() -> None:
    for name, said in (
        ("AutoencoderKL", r"'AutoencoderKL' is no scheduler class"),
        ("FlowMatchEulerDiscreteScheduler", r"has no .*which StableDiffusionXLPipeline needs"),
    ):
        with pytest.raises(ConfigError, match=said) as caught:
            scheduler_copy(tiny_pipeline().scheduler, name)
        assert caught.value.key == "validation.scheduler"


def test_embeddings_elsewhere_are_named_before_diffusers_runs(embeddings: list[PromptEmbeddings]) -> None:
    pipeline = tiny_pipeline()
    one = embeddings[1]
    moved = PromptEmbeddings(one.prompt, "", {n: t.to("meta") for n, t in one.embeds.items()}, one.negative)
    with pytest.raises(DeviceMismatchError, match=r"embeddings of 'a blue car in the rain'\.prompt_embeds.* is meta"):
        denoise(pipeline.unet, pipeline.scheduler, [embeddings[0], moved], SETTINGS)
