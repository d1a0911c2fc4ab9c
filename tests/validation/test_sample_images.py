"""Sample images: from cached embeddings exactly the whole pipeline's images, without side effects."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.photo_files import write_photo
from helpers.tensor_bits import bits
from helpers.tiny_configs import tiny_config
from helpers.tiny_models import encode_captions, tiny_pipeline

from latentcache import LatentCache
from latentcache.config import Config, ValidationConfig
from latentcache.errors import DeviceMismatchError, ModelError, SampleError
from latentcache.models.model_loader import LoadedModels
from latentcache.models.tiny import tiny_parts
from latentcache.precache.prompts import cache_prompts
from latentcache.precache.run import run_precache
from latentcache.precache.workspace import Workspace, open_workspace
from latentcache.types import prompt_id
from latentcache.validation.sample_images import (
    PromptEmbeddings,
    PromptPair,
    decode_samples,
    denoise,
    prompt_embeddings,
    scheduler_copy,
)

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
    if vae_dtype is not dtype:  # with statistics too
        pipeline.vae.register_to_config(latents_mean=[0.1, 0.2, 0.3, 0.4], latents_std=[1.0, 2.0, 3.0, 4.0])
    settings = SETTINGS.model_copy(update={"guidance_scale": guidance_scale, "scheduler": scheduler})
    with LatentCache(config.cache.path) as cache:
        embeddings = prompt_embeddings(cache, PROMPTS, negative, device=pipeline.unet)
    assert {tensor.dtype for each in embeddings for tensor in each.tensors().values()} == {dtype}
    latents = denoise(pipeline.unet, pipeline.scheduler, embeddings, settings)
    samples = decode_samples(pipeline.vae, latents, embeddings, settings)
    assert {parameter.dtype for parameter in pipeline.vae.parameters()} == {vae_dtype}
    # diffusers' own images of the prompts, with the encoders in memory.
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
    """Random ones, for tests without a cache."""
    numbers = torch.Generator().manual_seed(0)
    shapes = {"prompt_embeds": (1, 77, 72), "pooled_prompt_embeds": (1, 40)}

    def made() -> dict[str, torch.Tensor]:
        return {name: torch.randn(shape, generator=numbers) for name, shape in shapes.items()}

    return [PromptEmbeddings(prompt, "", made(), made()) for prompt in PROMPTS]


def test_what_draws_globally_is_seeded_and_leaves_no_trace(embeddings: list[PromptEmbeddings]) -> None:
    """Some layers draw globally. The phase restores the rest of the training: test_runner.py."""
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


def test_embeddings_elsewhere_are_named_before_diffusers_runs(embeddings: list[PromptEmbeddings]) -> None:
    pipeline = tiny_pipeline()
    one = embeddings[1]
    moved = PromptEmbeddings(one.prompt, "", {n: t.to("meta") for n, t in one.embeds.items()}, one.negative)
    with pytest.raises(DeviceMismatchError, match=r"embeddings of 'a blue car in the rain'\.prompt_embeds.* is meta"):
        denoise(pipeline.unet, pipeline.scheduler, [embeddings[0], moved], SETTINGS)


# Prompts from the cache, to which single ones are added; the encoders end where they were.

TEXT_PARTS = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
NEW = [("a late idea", False), ("blurry", True)]


@pytest.fixture
def parts() -> dict[str, Any]:
    return tiny_parts()


@pytest.fixture
def models(parts: dict[str, Any]) -> LoadedModels:
    """The text parts only: no VAE."""
    return LoadedModels(**{name: parts[name] for name in TEXT_PARTS})


@pytest.fixture
def workspace(config: Config) -> Iterator[Workspace]:
    with open_workspace(config.cache) as workspace:
        yield workspace


@pytest.fixture
def cache(config: Config) -> Iterator[LatentCache]:
    with LatentCache(config.cache.path) as cache:
        yield cache


def prompts_of(workspace: Workspace) -> Any:
    (name,) = (name for name in workspace.manifests.names() if name.startswith("validation-prompts"))
    return workspace.manifests.read(name)


def test_with_encoders_what_is_missing_is_cached_once(
    config: Config, workspace: Workspace, cache: LatentCache, models: LoadedModels, parts: dict[str, Any]
) -> None:
    encoded, known = [], cache.prompt("a validation prompt", device="cpu")
    for prompts, negative, said in (  # without them
        (["a late idea"], "", r"'prompt: a late idea': is not cached.*validation\.prompts"),
        ([""], "blurry", r"'negative prompt: blurry': is not cached.*validation\.negative_prompt"),
    ):
        with pytest.raises(SampleError, match=said + " and run `latentcache precache CONFIG`"):
            prompt_embeddings(cache, prompts, negative, device="cpu")

    def encode(pairs: list[PromptPair]) -> int:
        encoded.append((pairs, cache_prompts(config, workspace, models, pairs, device="cpu")))
        return encoded[-1][1]

    prompts = ["a validation prompt", "a late idea"]
    for _ in range(2):
        embeddings = prompt_embeddings(cache, prompts, "blurry", device="cpu", encode=encode)
    assert encoded == [(NEW, 2)], "called once, for what was missing"
    text = LoadedModels(**parts).text(torch.float32)
    late, negative = (encode_captions(text, [caption]) for caption in ("a late idea", "blurry"))
    assert torch.equal(embeddings[1].embeds["prompt_embeds"], late["prompt_embeds"])
    assert torch.equal(embeddings[1].negative["pooled_prompt_embeds"], negative["pooled_prompt_embeds"])
    # A lost entry is missing too.
    cache.store.remove([prompts_of(workspace).rows[prompt_id(prompts[0])].captions[0].key])
    (again,) = prompt_embeddings(cache, prompts[:1], "", device="cpu", encode=encode)
    assert torch.equal(again.embeds["prompt_embeds"], known["prompt_embeds"])


@pytest.mark.parametrize("clip_skip", [0, 1])
def test_the_next_precache_has_them_as_hits_with_the_same_bytes(
    make_config: Callable[..., Config], models: LoadedModels, tmp_path: Any, clip_skip: int
) -> None:
    skip = {"encode.clip_skip": clip_skip}
    settings = skip | {"validation.prompts": ["a late idea"], "validation.negative_prompt": "a late idea"}
    before, after, elsewhere = (
        make_config(**each) for each in (skip, settings, settings | {"cache.path": tmp_path / "other"})
    )
    run_precache(before)
    pairs = [("a late idea", False), ("a late idea", True)]
    with open_workspace(before.cache) as workspace:
        num_encoded = cache_prompts(before, workspace, models, pairs, device="cpu")
        assert num_encoded == (1 if clip_skip == 0 else 2), "clip_skip counts for positive prompts only"
        assert cache_prompts(before, workspace, models, pairs, device="cpu") == 0
        assert not workspace.manifests.unfinished()
    assert run_precache(after).num_misses == 0
    run_precache(elsewhere)
    found = []
    for config in (after, elsewhere):
        with open_workspace(config.cache) as workspace:
            rows = prompts_of(workspace).rows
            keys = [rows[prompt_id("a late idea", negative=negative)].captions[0].key for _, negative in pairs]
            entries = [workspace.store.get(key) for key in keys]
            found.append([(each.record.identity, each.record.provenance["num_tokens"]) for each in entries])
            found[-1] += [bits(each.tensors[name]).tolist() for each in entries for name in sorted(each.tensors)]
    assert found[0] == found[1]


def test_other_text_encoders_and_settings_are_refused(
    make_config: Callable[..., Config], config: Config, workspace: Workspace, models: LoadedModels
) -> None:
    others = {**{name: tiny_parts()[name] for name in TEXT_PARTS}, "text_encoder_2": tiny_parts(5)["text_encoder_2"]}
    rows = prompts_of(workspace).rows
    with pytest.raises(ModelError, match=r"captions of dataset photos: text encoder 2 changed") as caught:
        cache_prompts(config, workspace, LoadedModels(**others), NEW, device="cpu")
    assert caught.value.part == "text_encoder_2"
    changed = make_config(**{"encode.text_dtype": "float16", "encode.clip_skip": 1, "cache.salt": "x"})
    said = r"salt changed .*, encoder dtype changed .*, stored dtype changed .*, clip skip changed \(0 -> 1\)"
    with pytest.raises(ModelError, match=said):
        cache_prompts(changed, workspace, models, NEW, device="cpu")
    assert prompts_of(workspace).rows == rows and len(workspace.manifests.names()) == 2
