"""Wan against diffusers' own pipelines: texts, latents and the denoiser's calls, equal to the last bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.wan import pipeline_wan
from helpers.tiny_models import tiny_folder, tiny_model

from latentcache.config import Config, ModelConfig, ValidationConfig
from latentcache.dataset.samples import Sample
from latentcache.errors import ConfigError, ModelError
from latentcache.families import family_named
from latentcache.families.scaling import Scaling
from latentcache.models.denoiser import load_denoiser
from latentcache.models.vae import encode_images, vae_facts
from latentcache.precache.encodings import choose_encodings, load_models
from latentcache.precache.preparation import TextKeys
from latentcache.precache.run import run_precache
from latentcache.precache.tasks import Task
from latentcache.scaleout.encoder import RayEncoder
from latentcache.types import Padding
from latentcache.validation.sample_images import PromptEmbeddings, check_sampling, decode_samples, denoise

WAN = family_named("wan")
TEXTS = ["cat", "a red cat &amp; a  table ", ""]


@pytest.fixture(scope="module")
def parts() -> dict[str, Any]:
    return tiny_model(WAN.name)


def encoded(parts: Mapping[str, Any], texts: list[str], **settings: Any) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return WAN.encode_text(parts, WAN.tokenize(parts, texts), WAN.text_recipe(**settings))


def padded_again(made: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The rows that are stored, in a batch."""
    rule = WAN.padding("prompt_embeds", WAN.text_recipe())
    assert rule == Padding(length=512)
    rows = [rows[mask] for rows, mask in zip(made["prompt_embeds"], made["prompt_embeds_mask"], strict=True)]
    return torch.stack([torch.cat([each, each.new_zeros(512 - len(each), each.shape[1])]) for each in rows])


def test_a_lower_max_length_cuts_texts_and_keeps_the_zeros_to_512(parts):
    made = encoded(parts, [TEXTS[1]], max_length=4)
    assert made["prompt_embeds"].shape == (1, 512, 32)
    assert made["prompt_embeds_mask"].sum() == 4 and not made["prompt_embeds"][0, 4:].any()
    with pytest.raises(ConfigError, match="takes 512 tokens"):
        WAN.text_recipe(max_length=513)


def test_the_key_is_made_of_the_cleaned_text(monkeypatch):
    assert WAN.rendered({}, " a  cat &amp;amp; a dog\n") == "a cat & a dog"
    # With ftfy the same text is another one for the tokenizer.
    monkeypatch.setattr(pipeline_wan, "basic_clean", lambda text: text.replace("cafÃ©", "café"))
    assert WAN.rendered({}, "cafÃ©") == "café"


def clip(num_frames: int, num_clips: int = 2) -> np.ndarray:
    shape = (num_clips, num_frames, 32, 48, 3)
    return np.random.default_rng(num_frames).integers(0, 256, shape, dtype=np.uint8)


def test_an_image_is_a_video_of_one_frame_whatever_batch_it_is_in(parts):
    pixels = clip(1)
    together = encode_images(parts["vae"], pixels[:, 0], WAN)
    assert together.shape == (2, 32, 1, 4, 6)
    assert torch.equal(together, encode_images(parts["vae"], pixels, WAN))
    assert torch.equal(together[1:], encode_images(parts["vae"], pixels[1:, 0], WAN))
    # The VAE is causal: the first latent frame of a clip is that of its first image.
    longer = encode_images(parts["vae"], np.concatenate([pixels, clip(4)], axis=1), WAN)
    assert torch.equal(longer[:, :, :1], together)


@pytest.fixture(scope="module")
def vae_of_5b() -> Any:
    names = {"base_dim": 8, "z_dim": 48, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1, "patch_size": 2}
    sizes = {"in_channels": 12, "out_channels": 12, "is_residual": True, "scale_factor_spatial": 16}
    statistics = {"latents_mean": [0.5] * 48, "latents_std": [2.0] * 48}
    return diffusers.AutoencoderKLWan(**names, **sizes, **statistics).eval().requires_grad_(False)


def test_the_vae_of_the_5b_model_is_read_from_its_config(vae_of_5b):
    vae = vae_of_5b
    facts = vae_facts(vae)
    assert (facts.latent_channels, facts.downscale_factor, facts.frames_factor) == (48, 16, 4)
    assert facts.scaling == Scaling(rule="mean_std", mean=(0.5,) * 48, std=(2.0,) * 48)
    assert encode_images(vae, clip(5, 1), WAN).shape == (1, 96, 2, 2, 3)


def transformer_like(other: Any, **changes: Any) -> Any:
    settings = {name: value for name, value in other.config.items() if not name.startswith("_")}
    return diffusers.WanTransformer3DModel(**{**settings, **changes}).eval().requires_grad_(False)


def test_images_of_the_5b_model_are_those_of_its_pipeline(parts, vae_of_5b):
    torch.manual_seed(3)
    denoiser = transformer_like(parts["transformer"], in_channels=48, out_channels=48)
    whole = diffusers.WanPipeline(
        **{**parts, "vae": vae_of_5b, "transformer": denoiser, "scheduler": copy.deepcopy(parts["scheduler"])},
        expand_timesteps=True,
    )
    whole.set_progress_bar_config(disable=True)
    options = {"prompt": TEXTS[0], "negative_prompt": TEXTS[1], "num_frames": 1, "output_type": "latent"}
    size = {"height": 64, "width": 96, "num_inference_steps": 2, "guidance_scale": 5.0}
    expected = whole(**options, **size, generator=torch.Generator().manual_seed(7)).frames
    embeds, negative = ({"prompt_embeds": padded_again(encoded(parts, [text]))} for text in (TEXTS[0], TEXTS[1]))
    validation = ValidationConfig(seed=7, **size)
    check_sampling(vae_of_5b, parts["scheduler"], validation, WAN)
    with pytest.raises(ConfigError, match="multiples of 32"):
        check_sampling(vae_of_5b, parts["scheduler"], ValidationConfig(height=80), WAN)
    prompt = PromptEmbeddings(TEXTS[0], TEXTS[1], embeds, negative)
    [found] = denoise(denoiser, parts["scheduler"], [prompt], validation, family=WAN)
    assert found.shape == (1, 48, 1, 4, 6) and torch.equal(found, expected)
    # Training gives one timestep for all tokens: the same, but for rounding.
    given = {
        "hidden_states": found,
        "timestep": torch.full([1, 6], 400.0),
        "encoder_hidden_states": embeds["prompt_embeds"],
    }
    predicted = WAN.predict(denoiser, found, torch.tensor([400.0]), embeds)
    assert torch.allclose(predicted, denoiser(**given).sample, atol=1e-5)
    [sample] = decode_samples(vae_of_5b, [found], [prompt], validation)
    assert sample.image.size == (96, 64)


def test_a_denoiser_of_image_to_video_is_refused(parts, tmp_path):
    transformer_like(parts["transformer"], in_channels=36).save_pretrained(path := tmp_path / "transformer")
    with pytest.raises(ModelError, match="takes 36 channels"):
        load_denoiser(path, dtype=torch.float32, model=ModelConfig(path=tiny_folder("wan"), family="wan"))


def test_buckets_that_the_denoiser_does_not_take_are_refused(make_config: Callable[..., Config]) -> None:
    buckets = {"area": 96 * 96, "step": 8}
    with pytest.raises(ConfigError, match="sides that are multiples of 16 pixels; set step") as caught:
        run_precache(make_config(**{"model.path": tiny_folder("wan"), "datasets.0.buckets": buckets}))
    assert caught.value.key == "datasets.buckets"
    with_sdxl = make_config(**{"datasets.0.buckets": buckets})
    assert run_precache(with_sdxl, dry_run=True).num_misses > 0


def test_another_process_that_cleans_a_text_otherwise_than_the_key_says_refuses_it(
    make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An encoder of a cluster without ftfy, of which the driver has one; or with another diffusers."""
    config = make_config(**{"model.path": tiny_folder("wan"), "validation.prompts": [], "encode.device": "cpu"})
    models = load_models(config.model, {})
    planned = choose_encodings(config, models, {})
    texts = TextKeys(WAN, models.tokenizers, planned.text, "")
    clean = pipeline_wan.basic_clean
    monkeypatch.setattr(pipeline_wan, "basic_clean", lambda text: clean(text.replace("cafÃ©", "café")))
    tasks = [
        Task(texts.key(text), texts.identity(text), Sample(text, text), caption=text) for text in ("cafÃ©", "a cat")
    ]
    monkeypatch.setattr(pipeline_wan, "basic_clean", clean)
    encoder = RayEncoder(config, planned, [])
    problems, report = encoder.encode([[(task, 0) for task in tasks]])
    assert problems.keys() == {tasks[0].key} and report.num_encoded == 1
    failure = problems[tasks[0].key]
    assert failure.reason == "bad-caption" and "'cafÃ©'" in failure.detail and "ftfy on all nodes" in failure.detail
