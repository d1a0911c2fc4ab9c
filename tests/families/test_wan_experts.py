"""Wan 2.2 A14B, both kinds: two denoisers, each trained and validated alone at the timesteps of its pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.family_runs import SIDE, family_config, recorded
from helpers.tiny_models import tiny_model

from latentcache.config import Config, ModelConfig
from latentcache.errors import ConfigError
from latentcache.families import family_named
from latentcache.models.denoiser import load_denoiser, load_scheduler
from latentcache.models.family import denoised_share
from latentcache.models.lora import LORA_FILE
from latentcache.precache.run import run_precache
from latentcache.validation import results
from latentcache.validation.checkpoint_validation import validate
from latentcache.validation.noise_schedule import NoiseSchedule

pytestmark = pytest.mark.families

BOUNDARIES = {"wan": 0.875, "wan-i2v": 0.9}
EXPERTS = ("transformer", "transformer_2")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Path]]:
    """The pipeline of each kind and its folder. The second expert predicts other numbers than the first."""
    made = {}
    for name, boundary in BOUNDARIES.items():
        second = tiny_model(name, seed=4)["transformer"]
        pipeline = family_named(name).pipeline(**tiny_model(name), transformer_2=second, boundary_ratio=boundary)
        pipeline.save_pretrained(folder := tmp_path_factory.mktemp("a14b") / name)
        made[name] = pipeline, folder
    return made


@pytest.mark.parametrize("name", BOUNDARIES)
def test_an_expert_has_the_timesteps_that_the_pipeline_gives_it(name: str, models: dict[str, Any]) -> None:
    family, (pipeline, folder) = family_named(name), models[name]
    size = {"height": 32, "width": 32, "num_frames": 1, "output_type": "latent"}
    size |= {"image": torch.zeros(1, 3, 32, 32)} if family.clip_condition else {}
    with recorded(pipeline.transformer) as first, recorded(pipeline.transformer_2) as second:
        pipeline(prompt_embeds=torch.ones(1, 512, 32), num_inference_steps=12, guidance_scale=1.0, **size)
    scheduler = load_scheduler(model=ModelConfig(path=str(folder)))
    used = []
    for expert, calls in zip(EXPERTS, (first, second), strict=True):
        seen = [call.arguments["timestep"].item() for call in calls]
        model = ModelConfig(path=str(folder), denoiser=expert)
        schedule = NoiseSchedule.of(scheduler, denoised_share(model, family))
        used += schedule.used
        known = schedule.timesteps[list(schedule.used)]
        assert seen and all(known[0] <= each <= known[-1] for each in seen)
        found, expected = load_denoiser(dtype=torch.float32, model=model), getattr(pipeline, expert).state_dict()
        assert all(torch.equal(each, expected[key]) for key, each in found.state_dict().items())
    assert sorted(used) == list(range(1000))


@pytest.fixture(scope="module")
def cached(models: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A training set and a validation set of the same photos, for `wan`."""
    root = tmp_path_factory.mktemp("cached")
    validation = {"path": root / "validation", "num_timesteps": 2, "height": SIDE, "width": SIDE}
    config = family_config(root, {"model.path": str(models["wan"][1]), "validation": validation})
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


def test_the_loss_is_that_of_the_expert_at_its_timesteps(cached: Config) -> None:
    shift, boundary = tiny_model("wan")["scheduler"].config.flow_shift, BOUNDARIES["wan"]
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
    assert len(seen) > 6 and max(seen) < 1000 * BOUNDARIES["wan"]
    plain = validate(config).report.loss
    found = validate(config, lora=str(tmp_path / "lora" / LORA_FILE)).report.loss
    assert plain is not None and found is not None
    assert trained["loss"] == found.loss.mean != plain.loss.mean


def test_images_are_refused_for_one_of_two_experts(cached: Config) -> None:
    validation = cached.validation.model_copy(update={"prompts": ("a cat",)})
    with pytest.raises(ConfigError, match=r"images need all timesteps.*from 0\.875 to 1\.0.*set it to \[\]") as caught:
        validate(cached.model_copy(update={"validation": validation}))
    assert caught.value.key == "validation.prompts"
