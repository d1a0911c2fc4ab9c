"""Wan: cleaned texts, clips, and the 5B model's own VAE. What all families share is in test_families.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.pipelines.wan import pipeline_wan
from helpers.family_runs import SIDE, family_config, recorded
from helpers.tensor_bits import assert_same_state
from helpers.tiny_models import tiny_folder, tiny_model

from latentcache.config import Config, ModelConfig, ValidationConfig
from latentcache.dataset.samples import Sample
from latentcache.errors import ConfigError
from latentcache.families import family_named
from latentcache.families.scaling import Scaling
from latentcache.models.denoiser import load_denoiser, load_scheduler
from latentcache.models.files import denoised_share
from latentcache.models.lora import LORA_FILE
from latentcache.models.vae import encode_images, vae_facts
from latentcache.precache.encodings import choose_encodings, load_models
from latentcache.precache.preparation import TextKeys
from latentcache.precache.run import run_precache
from latentcache.precache.tasks import Task
from latentcache.scaleout.ray import RayEncoder
from latentcache.validation import results
from latentcache.validation.checkpoint_validation import validate
from latentcache.validation.noise_schedule import NoiseSchedule
from latentcache.validation.sample_images import PromptEmbeddings, check_sampling, decode_samples, denoise

WAN = family_named("wan")
TEXTS = ["cat", "a red cat &amp; a  table "]


@pytest.fixture(scope="module")
def parts() -> dict[str, Any]:
    return tiny_model(WAN.name)


def test_the_key_is_made_of_the_cleaned_text(monkeypatch: pytest.MonkeyPatch) -> None:
    assert WAN.rendered({}, " a  cat &amp;amp; a dog\n") == "a cat & a dog"
    # With ftfy the same text is another one for the tokenizer.
    monkeypatch.setattr(pipeline_wan, "basic_clean", lambda text: text.replace("cafÃ©", "café"))
    assert WAN.rendered({}, "cafÃ©") == "café"


def clip(num_frames: int, num_clips: int = 2) -> np.ndarray:
    shape = (num_clips, num_frames, 32, 48, 3)
    return np.random.default_rng(num_frames).integers(0, 256, shape, dtype=np.uint8)


def test_an_image_is_a_video_of_one_frame_whatever_batch_it_is_in(parts: dict[str, Any]) -> None:
    pixels = clip(1)
    together = encode_images(parts["vae"], pixels[:, 0], WAN)
    assert together.shape == (2, 32, 1, 4, 6)
    assert torch.equal(together, encode_images(parts["vae"], pixels, WAN))
    assert torch.equal(together[1:], encode_images(parts["vae"], pixels[1:, 0], WAN))


def test_images_of_the_5b_model_are_those_of_its_pipeline(parts: dict[str, Any]) -> None:
    names = {"base_dim": 8, "z_dim": 48, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1, "patch_size": 2}
    sizes = {"in_channels": 12, "out_channels": 12, "is_residual": True, "scale_factor_spatial": 16}
    statistics = {"latents_mean": [0.5] * 48, "latents_std": [2.0] * 48}
    vae = diffusers.AutoencoderKLWan(**names, **sizes, **statistics).eval().requires_grad_(False)
    facts = vae_facts(vae)
    assert (facts.latent_channels, facts.downscale_factor, facts.frames_factor) == (48, 16, 4)
    assert facts.scaling == Scaling(rule="mean_std", mean=(0.5,) * 48, std=(2.0,) * 48)
    assert encode_images(vae, clip(5, 1), WAN).shape == (1, 96, 2, 2, 3)

    config = {**parts["transformer"].config, "in_channels": 48, "out_channels": 48}
    config = {name: value for name, value in config.items() if not name.startswith("_")}
    torch.manual_seed(3)
    denoiser = diffusers.WanTransformer3DModel(**config).eval().requires_grad_(False)
    scheduler = tiny_model(WAN.name)["scheduler"]
    given = {**parts, "vae": vae, "transformer": denoiser, "scheduler": scheduler}
    whole = diffusers.WanPipeline(**given, expand_timesteps=True)
    whole.set_progress_bar_config(disable=True)
    options = {"prompt": TEXTS[0], "negative_prompt": TEXTS[1], "num_frames": 1, "output_type": "latent"}
    size = {"height": 64, "width": 96, "num_inference_steps": 2, "guidance_scale": 5.0}
    expected = whole(**options, **size, generator=torch.Generator().manual_seed(7)).frames

    rows = WAN.encode_text(parts, WAN.tokenize(parts, TEXTS), WAN.text_recipe())["prompt_embeds"]
    embeds, negative = {"prompt_embeds": rows[:1]}, {"prompt_embeds": rows[1:]}
    prompt, validation = PromptEmbeddings(*TEXTS, embeds, negative), ValidationConfig(seed=7, **size)
    check_sampling(vae, parts["scheduler"], validation, WAN)
    with pytest.raises(ConfigError, match="multiples of 32"):
        check_sampling(vae, parts["scheduler"], ValidationConfig(height=80), WAN)
    [found] = denoise(denoiser, parts["scheduler"], [prompt], validation, family=WAN)
    assert found.shape == (1, 48, 1, 4, 6) and torch.equal(found, expected)
    # Training gives one timestep for all tokens: the same, but for rounding.
    timesteps = torch.full([1, 6], 400.0)
    live = denoiser(hidden_states=found, timestep=timesteps, encoder_hidden_states=rows[:1]).sample
    torch.testing.assert_close(WAN.predict(denoiser, found, timesteps[:, 0], embeds), live, rtol=0, atol=1e-5)
    [sample] = decode_samples(vae, [found], [prompt], validation)
    assert sample.image.size == (96, 64)


def test_buckets_that_the_denoiser_does_not_take_are_refused(make_config: Callable[..., Config]) -> None:
    buckets = {"area": 96 * 96, "step": 8}
    with pytest.raises(ConfigError, match="sides that are multiples of 16 pixels; change step") as caught:
        run_precache(make_config(**{"model.path": tiny_folder("wan"), "datasets.0.buckets": buckets}))
    assert caught.value.key == "datasets.buckets"
    assert run_precache(make_config(**{"datasets.0.buckets": buckets}), dry_run=True).num_misses > 0, "SDXL takes them"


def test_another_process_that_cleans_a_text_otherwise_than_the_key_says_refuses_it(
    make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An encoder of a cluster without ftfy, of which the driver has one; or with another diffusers."""
    config = make_config(**{"model.path": tiny_folder("wan"), "validation.prompts": [], "encode.device": "cpu"})
    models = load_models(config.model, {})
    planned = choose_encodings(config, models, {})
    texts = TextKeys(WAN, models.tokenizers, planned.text, "")
    with monkeypatch.context() as driver:
        clean = pipeline_wan.basic_clean
        driver.setattr(pipeline_wan, "basic_clean", lambda text: clean(text.replace("cafÃ©", "café")))
        tasks = [
            Task(texts.key(text), texts.identity(text), Sample(text, text), caption=text) for text in ("cafÃ©", "a cat")
        ]
    problems, report = RayEncoder(config, planned, []).encode([[(task, 0) for task in tasks]])
    assert problems.keys() == {tasks[0].key} and report.num_encoded == 1
    failure = problems[tasks[0].key]
    assert failure.reason == "bad-caption" and "'cafÃ©'" in failure.detail and "ftfy" in failure.detail


# Wan 2.2 A14B: two denoisers, each trained and validated alone at the timesteps of its pipeline.

BOUNDARY = 0.875
EXPERTS = ("transformer", "transformer_2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """The pipeline and its folder. The second expert predicts other numbers than the first."""
    second = tiny_model("wan", seed=4)["transformer"]
    pipeline = family_named("wan").pipeline(**tiny_model("wan"), transformer_2=second, boundary_ratio=BOUNDARY)
    pipeline.save_pretrained(folder := tmp_path_factory.mktemp("a14b") / "wan")
    return pipeline, folder


@pytest.mark.extended
def test_an_expert_has_the_timesteps_that_the_pipeline_gives_it(model: tuple[Any, Path]) -> None:
    pipeline, folder = model
    size = {"height": 32, "width": 32, "num_frames": 1, "output_type": "latent"}
    with recorded(pipeline.transformer) as first, recorded(pipeline.transformer_2) as second:
        pipeline(prompt_embeds=torch.ones(1, 512, 32), num_inference_steps=12, guidance_scale=1.0, **size)
    scheduler = load_scheduler(model=ModelConfig(path=str(folder)))
    used = []
    for expert, calls in zip(EXPERTS, (first, second), strict=True):
        seen = [call.arguments["timestep"].item() for call in calls]
        config = ModelConfig(path=str(folder), denoiser=expert)
        schedule = NoiseSchedule.of(scheduler, denoised_share(config, family_named("wan")))
        used += schedule.used
        known = schedule.timesteps[list(schedule.used)]
        assert seen and all(known[0] <= each <= known[-1] for each in seen)
        assert_same_state(load_denoiser(dtype=torch.float32, model=config), getattr(pipeline, expert).state_dict())
    assert sorted(used) == list(range(1000))


@pytest.fixture(scope="module")
def cached(model: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A training set and a validation set of the same photos, for `wan`."""
    root = tmp_path_factory.mktemp("cached")
    validation = {"path": root / "validation", "num_timesteps": 2, "height": SIDE, "width": SIDE}
    config = family_config(root, {"model.path": str(model[1]), "validation": validation})
    held_out = config.datasets[0].model_copy(update={"name": "held-out", "role": "validation"})
    config = config.model_copy(update={"datasets": (*config.datasets, held_out)})
    assert run_precache(config).num_refused == 0
    return config


@pytest.fixture(autouse=True)
def _no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which take longer than a validation."""
    monkeypatch.setattr(results, "loss_plot", lambda *_: None)


def of_expert(config: Config, name: str) -> Config:
    return config.model_copy(update={"model": config.model.model_copy(update={"denoiser": name})})


@pytest.mark.extended
def test_the_loss_is_that_of_the_expert_at_its_timesteps(cached: Config) -> None:
    shift, boundary = tiny_model("wan")["scheduler"].config.flow_shift, BOUNDARY
    first = 1000 * boundary / (shift - (shift - 1) * boundary)  # of the unshifted schedule
    high, low = (validate(of_expert(cached, name)).report.loss for name in EXPERTS)
    assert high is not None and low is not None and high == validate(cached).report.loss
    bins = [(part.first, part.end) for part in (*low.by_timestep, *high.by_timestep)]
    assert [end for _, end in bins[:-1]] == [start for start, _ in bins[1:]]
    assert bins[0][0] == 0 and bins[-1][1] == 1000 and abs(bins[2][0] - first) <= 1
    assert high.measurement_settings.schedule != low.measurement_settings.schedule
    # The other expert's weights at these timesteps have another loss.
    other = validate(cached, denoiser=str(Path(cached.model.path) / "transformer_2"), step=1).report.loss
    assert other is not None and other.loss.mean != high.loss.mean


@pytest.mark.extended
def test_an_expert_is_trained_at_its_timesteps(cached: Config, script: Any, tmp_path: Path, monkeypatch: Any) -> None:
    config, seen = of_expert(cached, "transformer_2"), []
    wan = type(family_named("wan"))
    predict = wan.predict

    def recorded(family: Any, denoiser: Any, noisy: Any, timesteps: torch.Tensor, batch: Any) -> torch.Tensor:
        seen.extend(timesteps.tolist())
        return predict(family, denoiser, noisy, timesteps, batch)

    monkeypatch.setattr(wan, "predict", recorded)
    options = script.Options(steps=3, rank=2, learning_rate=1e-2, batch_size=2, out=tmp_path / "lora", device="cpu")
    [trained] = script.train(config, options)["validations"]
    assert len(seen) > 6 and max(seen) < 1000 * BOUNDARY
    plain = validate(config).report.loss
    found = validate(config, lora=str(tmp_path / "lora" / LORA_FILE)).report.loss
    assert plain is not None and found is not None
    assert trained["loss"] == found.loss.mean != plain.loss.mean


@pytest.mark.extended
def test_images_are_refused_for_one_of_two_experts(cached: Config) -> None:
    validation = cached.validation.model_copy(update={"prompts": ("a cat",)})
    with pytest.raises(ConfigError, match=r"images need all timesteps.*from 0\.875 to 1\.0.*set it to \[\]") as caught:
        validate(cached.model_copy(update={"validation": validation}))
    assert caught.value.key == "validation.prompts"
