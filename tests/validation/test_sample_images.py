"""Sample images: from cached embeddings the very images of the whole pipeline, and nothing else has changed."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler, EulerDiscreteScheduler, StableDiffusionXLPipeline
from helpers.encoding import generate

from latentcache import LatentCache
from latentcache.config import ValidationConfig
from latentcache.config_file import parse_config
from latentcache.devices.tensor_location import offload_hook_of
from latentcache.errors import ConfigError, DeviceMismatchError, ModelError
from latentcache.models.tiny import tiny_pipeline
from latentcache.models.vae import decode_latents
from latentcache.precache.run import run_precache
from latentcache.validation.sample_images import (
    PromptEmbeddings,
    check_sampling,
    denoise,
    prompt_embeddings,
    scheduler_copy,
)

PROMPTS = ["a red house", "a blue car in the rain"]


def small(**changes: Any) -> ValidationConfig:
    return ValidationConfig(height=64, width=96, num_inference_steps=3, **changes)


SETTINGS = small(seed=7)


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Callable[[torch.dtype], Path]:
    """A cache of the prompts whose text encoders computed in this dtype. Made once each."""
    from helpers.photo_files import write_photo

    made: dict[torch.dtype, Path] = {}

    def make(dtype: torch.dtype) -> Path:
        if dtype not in made:
            folder = tmp_path_factory.mktemp("cache")
            write_photo(folder / "photos" / "a.png", 1, (80, 144))
            settings = {
                "cache": {"path": folder / "cache"},
                "datasets": [
                    {
                        "name": "photos",
                        "source": {"path": folder / "photos"},
                        "buckets": {"area": 4096},
                        "images": {"min_side": 8},
                    }
                ],
                "model": {"path": "tiny"},
                "encode": {"device": "cpu", "text_dtype": str(dtype).removeprefix("torch."), "num_workers": 1},
                "validation": {"prompts": PROMPTS, "negative_prompt": "ugly"},
            }
            run_precache(parse_config(settings))
            made[dtype] = folder / "cache"
        return made[dtype]

    return make


def pipeline_in(dtype: torch.dtype) -> StableDiffusionXLPipeline:
    return tiny_pipeline().to(dtype)


def cached(path: Path, negative: str | None, unet: torch.nn.Module) -> list[PromptEmbeddings]:
    with LatentCache(path) as cache:
        return prompt_embeddings(cache, PROMPTS, negative, device=unet)


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


@pytest.mark.parametrize("scheduler", [None, "EulerAncestralDiscreteScheduler", "DPMSolverMultistepScheduler"])
@pytest.mark.parametrize("guidance_scale", [1.0, 5.0])
@pytest.mark.parametrize("negative", ["", "ugly", None])
def test_images_are_those_of_the_whole_pipeline(
    caches: Callable[[torch.dtype], Path], negative: str | None, guidance_scale: float, scheduler: str | None
) -> None:
    pipeline = pipeline_in(torch.float32)
    settings = small(seed=7, guidance_scale=guidance_scale, scheduler=scheduler)
    embeddings = cached(caches(torch.float32), negative, pipeline.unet)
    samples = generate(pipeline.unet, pipeline.vae, pipeline.scheduler, embeddings, settings)
    pipeline.scheduler = scheduler_copy(pipeline.scheduler, scheduler)
    expected = reference(pipeline, negative, settings)
    assert len(samples) == 2 and not np.array_equal(expected[0], expected[1])
    for number, (sample, image) in enumerate(zip(samples, expected, strict=True)):
        assert np.array_equal(np.asarray(sample.image), image) and image.shape == (64, 96, 3)
        assert (sample.prompt, sample.negative_prompt) == (PROMPTS[number], negative)
        assert (sample.seed, sample.tiled) == (7 + number, False)


@pytest.mark.filterwarnings("ignore:.*upcast_vae:FutureWarning")
@pytest.mark.parametrize("negative", ["ugly", None])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_half_precision_too(caches: Callable[[torch.dtype], Path], dtype: torch.dtype, negative: str | None) -> None:
    pipeline = pipeline_in(dtype)
    embeddings = cached(caches(dtype), negative, pipeline.unet)
    assert {tensor.dtype for each in embeddings for tensor in each.tensors().values()} == {dtype}
    samples = generate(pipeline.unet, pipeline.vae, pipeline.scheduler, embeddings, SETTINGS)
    assert {parameter.dtype for parameter in pipeline.vae.parameters()} == {dtype}
    for sample, image in zip(samples, reference(pipeline, negative, SETTINGS), strict=True):
        assert np.array_equal(np.asarray(sample.image), image)


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
    assert denoise(pipeline.unet, pipeline.scheduler, [], SETTINGS) == []


class _Drawing(torch.nn.Module):
    """Draws from the global generators, as some layers do."""

    def __init__(self, fail_at: int | None = None):
        super().__init__()
        self.num_calls, self.fail_at, self.training_seen = 0, fail_at, set()

    def __call__(self, module: torch.nn.Module, args: Any, output: Any) -> Any:
        self.num_calls += 1
        self.training_seen |= {part.training for part in module.modules()}
        random.random(), np.random.rand()
        if self.num_calls == self.fail_at:
            raise KeyboardInterrupt
        return (output[0] + torch.rand_like(output[0]),)


@pytest.mark.parametrize("fail_at", [None, 2])
def test_training_is_as_it_was(embeddings: list[PromptEmbeddings], fail_at: int | None) -> None:
    pipeline = tiny_pipeline()
    unet = pipeline.unet.train()
    unet.mid_block.eval()
    scheduler = DDPMScheduler(prediction_type="v_prediction")
    scheduler.set_timesteps(10)
    drawing = _Drawing(fail_at)
    hook = unet.register_forward_hook(drawing)

    def state() -> list[Any]:
        schedule = {name: str(value) for name, value in vars(scheduler).items()}
        python, numpy, cpu = random.getstate(), str(np.random.get_state(legacy=False)), torch.get_rng_state().tolist()
        modes = [part.training for part in unet.modules()]
        autocast = torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled(), torch.is_grad_enabled()
        weights = [(id(p), p.requires_grad, p.grad, p.data_ptr()) for p in unet.parameters()]
        hooks = [len(part._forward_hooks) for part in unet.modules()]
        return [schedule, python, numpy, cpu, modes, autocast, weights, hooks]

    before = state()
    if fail_at:
        with pytest.raises(KeyboardInterrupt):
            denoise(unet, scheduler, embeddings, SETTINGS)
        assert state() == before
        return
    first, second = (denoise(unet, scheduler, embeddings, SETTINGS) for _ in range(2))
    assert state() == before and drawing.training_seen == {False}
    assert all(map(torch.equal, first, second)), "what draws from the global generator is seeded too"
    hook.remove()


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


def test_what_was_set_after_the_scheduler_was_made_counts_too() -> None:
    """diffusers' training scripts set the prediction type so; its from_config goes back to the default then."""
    scheduler = DDPMScheduler()
    scheduler.register_to_config(prediction_type="v_prediction")
    for class_name in (None, "EulerDiscreteScheduler"):
        assert scheduler_copy(scheduler, class_name).config.prediction_type == "v_prediction"
    # A default that nobody changed is the other class's own, as in diffusers.
    assert scheduler_copy(EulerDiscreteScheduler(), "DDIMScheduler").config.timestep_spacing == "leading"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("EulerDiscretScheduler", r"'EulerDiscretScheduler' is no scheduler .*did you mean 'EulerDiscreteScheduler'"),
        ("AutoencoderKL", r"'AutoencoderKL' is no scheduler class"),
        ("no such thing", r"'no such thing' is no scheduler class"),
        ("pipelines", r"'pipelines' is no scheduler class"),
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


def test_a_wrapped_unet_is_named(embeddings: list[PromptEmbeddings]) -> None:
    class Wrapper(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = tiny_pipeline().unet

    with pytest.raises(ModelError, match=r"unet: Wrapper has no config, so it is a wrapper\. Give the UNet inside"):
        denoise(Wrapper(), tiny_pipeline().scheduler, embeddings, SETTINGS)


def test_an_offloaded_unet_runs(embeddings: list[PromptEmbeddings]) -> None:
    from accelerate import cpu_offload_with_hook

    pipeline = tiny_pipeline()
    expected = denoise(pipeline.unet, pipeline.scheduler, embeddings, SETTINGS)
    unet, _ = cpu_offload_with_hook(tiny_pipeline().unet, "cpu")
    assert offload_hook_of(unet) is not None
    assert all(map(torch.equal, denoise(unet, pipeline.scheduler, embeddings, SETTINGS), expected))


def test_a_vae_of_another_factor_is_refused() -> None:
    pipeline = tiny_pipeline()
    pipeline.vae.register_to_config(block_out_channels=(16, 32, 32))
    with pytest.raises(ModelError, match="vae: 4 pixels per latent, but StableDiffusionXLPipeline has 8"):
        check_sampling(pipeline.vae, pipeline.scheduler, SETTINGS)


def test_tiles_are_reported(embeddings: list[PromptEmbeddings], monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = tiny_pipeline()
    vae, decode = pipeline.vae, pipeline.vae.decode
    whole = generate(pipeline.unet, vae, pipeline.scheduler, embeddings[:1], SETTINGS)[0]

    def short(latents: torch.Tensor, **kwargs: Any) -> Any:
        if not vae.use_tiling:
            raise torch.OutOfMemoryError("simulated")
        return decode(latents, **kwargs)

    monkeypatch.setattr(vae, "decode", short)
    tiles = generate(pipeline.unet, vae, pipeline.scheduler, embeddings[:1], SETTINGS)[0]
    assert (whole.tiled, tiles.tiled) == (False, True)
    assert not np.array_equal(np.asarray(whole.image), np.asarray(tiles.image))
    latents = denoise(pipeline.unet, pipeline.scheduler, embeddings[:1], SETTINGS)[0]
    assert np.array_equal(np.asarray(tiles.image), decode_latents(vae, latents, tiled=True)[0])
    assert not vae.use_tiling
