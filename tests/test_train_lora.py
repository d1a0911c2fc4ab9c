"""The training script trains, validates and resumes bit by bit. tests/families/test_configs.py uses its LoRA."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from diffusers import DDPMScheduler
from helpers.photo_files import write_photo
from helpers.tiny_configs import tiny_config
from torch.utils._pytree import tree_leaves_with_path

from latentcache import LatentCache
from latentcache.config import Config
from latentcache.config_file import parse_config
from latentcache.errors import CheckpointError, ConfigError, StoreError
from latentcache.integrations.diffusers import load_unet
from latentcache.precache.run import run_precache
from latentcache.validation.noise_schedule import NoiseSchedule

ROOT = Path(__file__).parent.parent
NUM_STEPS = 6
FLAGS = {"steps": NUM_STEPS, "rank": 2, "learning_rate": 1e-2, "batch_size": 2, "seed": 3, "device": "cpu"}


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Two cached training sets, and a held-out set that is not cached. Tests must not write to the cache."""
    folder = tmp_path_factory.mktemp("photos")
    for number in range(7):
        size = (80, 144) if number % 3 else (144, 80)
        photo = write_photo(folder / ("first", "second", "held-out")[number % 3] / f"{number}.png", number, size)
        photo.with_suffix(".txt").write_text(f"photo {number}, a tag, a last one\nanother caption of {number}\n")
    common = {"buckets": {"area": 64 * 64, "step": 32}, "images": {"min_side": 8}}
    datasets = [
        {"name": name, "role": role, "source": {"path": folder / name}, "flip": name == "first", **common}
        for name, role in (("held-out", "validation"), ("first", "train"), ("second", "train"))
    ]
    validation = {"prompts": ["a tree"], "height": 64, "width": 64, "num_inference_steps": 2, "num_timesteps": 2}
    config = tiny_config(folder, datasets=datasets, validation=validation | {"path": folder / "validation"})
    run_precache(config.model_copy(update={"datasets": config.datasets[1:]}))
    return config


def training_only(config: Config) -> Config:
    """The same config, with nothing to validate."""
    validation = config.validation.model_copy(update={"prompts": ()})
    datasets = tuple(dataset for dataset in config.datasets if dataset.role == "train")
    return config.model_copy(update={"datasets": datasets, "validation": validation})


@pytest.fixture
def cold(cached: Config, tmp_path: Path) -> Config:
    """The same config, with a copy of the cache to fill."""
    shutil.copytree(cached.cache.path, tmp_path / "cache")
    validation = cached.validation.model_copy(update={"path": tmp_path / "validation"})
    cache = cached.cache.model_copy(update={"path": tmp_path / "cache"})
    return cached.model_copy(update={"cache": cache, "validation": validation})


@pytest.fixture
def options(script: ModuleType, tmp_path: Path) -> Any:
    return script.Options(**FLAGS, out=tmp_path / "run")


class Outcome:
    """A run: its result, and everything that it trained and drew."""

    def __init__(self, script: ModuleType, config: Config, options: Any):
        make = script.Training

        def kept(*arguments: Any) -> Any:
            self.training = make(*arguments)
            return self.training

        with patch.object(script, "Training", kept):
            self.result = script.train(config, options)
        parts = (self.training.denoiser, self.training.optimizer, self.training.scaler)
        drawn = [torch.get_rng_state(), self.training.generator.get_state()]
        self.leaves = dict(tree_leaves_with_path([[part.state_dict() for part in parts], drawn]))


def assert_equal(found: Outcome, expected: Outcome) -> None:
    """Weights, optimizer, scaler and RNGs are bit-identical."""
    assert found.leaves.keys() == expected.leaves.keys()
    for path, ours in found.leaves.items():
        theirs = expected.leaves[path]
        assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs, path


@pytest.fixture(scope="module")
def whole(script: ModuleType, cached: Config, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A run without validation or interruption."""
    return Outcome(script, training_only(cached), script.Options(**FLAGS, out=tmp_path_factory.mktemp("whole")))


def test_a_run_trains_the_lora_alone(whole):
    result = whole.result
    assert (result["step"], result["resumed_from"], result["interrupted"]) == (NUM_STEPS, 0, False)
    assert len(result["losses"]) == len(set(result["losses"])) == NUM_STEPS
    assert result["validations"] == []
    fresh = load_unet(dtype=torch.float32, model=whole.training.config.model).state_dict()
    for name, value in whole.training.denoiser.state_dict().items():
        if "lora_B" in name:
            assert value.dtype == torch.float32 and value.abs().max() > 0, name
        elif "lora_A" not in name:
            assert torch.equal(value, fresh[name.replace(".base_layer", "")]), name


@pytest.mark.parametrize("mixed_precision", ["no", "fp16"])
def test_a_resumed_run_is_as_one_without_a_break(script, cached, options, tmp_path, mixed_precision, whole):
    config, options, stop = training_only(cached), replace(options, mixed_precision=mixed_precision), threading.Event()
    if mixed_precision == "no":
        stop.set()
        first = script.train(config, options, stop=stop)
        assert (first["step"], first["interrupted"], first["lora"]) == (1, True, None)
    else:
        whole = Outcome(script, config, replace(options, out=tmp_path / "whole"))
        first = script.train(config, replace(options, steps=3))
    # Other code in the process leaves the RNGs in another state.
    torch.manual_seed(99)
    resumed = Outcome(script, config, replace(options, resume=True))
    assert resumed.result["resumed_from"] == first["step"]
    assert first["losses"] + resumed.result["losses"] == whole.result["losses"]
    assert_equal(resumed, whole)


def test_validation_in_the_middle_changes_no_bit(script, cold, options, whole):
    validated = Outcome(script, cold, replace(options, validate_every=3))
    assert_equal(validated, whole)
    assert validated.result["losses"] == whole.result["losses"]
    found = validated.result["validations"]
    assert [each["step"] for each in found] == [3, 6]
    assert [each["num_filled"] > 0 for each in found] == [True, False]
    assert {each["num_samples"] for each in found} == {2}
    assert found[0]["loss"] != found[1]["loss"]
    for each in found:
        assert Path(each["grid"]).is_file() and Path(each["plot"]).is_file()
    # Everything is cached now, so that no encoder is loaded.
    training = script.Training(cold, replace(options, out=options.out / "again"))
    assert training.parts.keys() - {"optimizer", "scaler", "scheduler"} == {"unet", "vae"}
    assert training.phases.current == "train"


def test_a_failed_last_validation_does_not_cost_the_lora(script, cold, options, monkeypatch):
    monkeypatch.setattr(script, "validate", Mock(side_effect=StoreError("the disk is full")))
    with pytest.raises(StoreError, match="the disk is full"):
        script.train(cold, replace(options, steps=1))
    assert (options.out / "pytorch_lora_weights.safetensors").is_file()


def test_a_tilde_is_the_home_folder(script, cached, options, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    once = replace(options, steps=1, out=Path("~/lora"))
    script.train(training_only(cached), once)
    made = {path.name for path in (tmp_path / "home/lora").iterdir()}
    assert made == {"checkpoint.pt", "pytorch_lora_weights.safetensors"} and not Path("~").exists()
    with pytest.raises(CheckpointError, match="belongs to an earlier run"):
        script.train(training_only(cached), once)


def test_the_loss(script, cached, options):
    training, seen = script.Training(training_only(cached), options), {}
    with training.loader as loader:
        batch = next(batch for batch in loader if len(batch["sample_id"]) == 2)
    state, latents, generator = training.generator.get_state(), batch["latents"], torch.Generator()

    def loss(*weights: float) -> float:
        training.generator.set_state(state)
        return float(training.loss(batch | {"loss_weight": torch.tensor(weights)}).item())

    # Rows are weighted by their datasets' loss_weight.
    assert loss(1.0, 0.0) > 0 and loss(1.0, 0.0) + loss(0.0, 1.0) == pytest.approx(loss(1.0, 1.0))
    # The target follows the scheduler's config.
    training.denoiser.register_forward_hook(lambda module, given, output: seen.update(output=output[0]))
    for prediction_type in ("epsilon", "v_prediction"):
        scheduler = DDPMScheduler.from_config(training.scheduler.config, prediction_type=prediction_type)
        training.schedule = NoiseSchedule.of(scheduler)
        found = loss(1.0, 1.0)
        generator.set_state(state)
        noise = torch.randn(latents.shape, generator=generator)
        steps = torch.randint(1000, (len(latents),), generator=generator)
        target = noise if prediction_type == "epsilon" else scheduler.get_velocity(latents, noise, steps)
        assert found == pytest.approx((seen["output"] - target).square().mean().item())


def test_the_choices_of_a_config_are_those_of_the_training(script, cold, options, monkeypatch):
    """Captions, flips, crops and long prompts; a dropped caption is zeros."""
    settings = training_only(cold).model_dump(mode="json", exclude_unset=True)
    settings["datasets"][1] |= {"flip": True, "variations": 3, "buckets": {"area": 64 * 64, "step": 64}, "repeats": 8}
    settings["encode"] |= {"max_length": 150}
    train = {"flips": "random", "crops": "random", "caption": 1, "caption_dropout": 0.5, "dropout_to": "zeros"}
    config = parse_config(settings | {"train": train})
    run_precache(config)
    seen: list[tuple[str, torch.Tensor, str, Any]] = []
    loss = script.Training.loss

    def watched(training: Any, batch: dict[str, Any]) -> Any:
        assert len(training.dataset) == 3 + 8 * 2, "not twice as many, as with both flips"
        seen.extend(zip(*(batch[name] for name in names), strict=True))
        return loss(training, batch)

    names = ("caption", "prompt_embeds", "sample_id", "crop_top_left")
    monkeypatch.setattr(script.Training, "loss", watched)
    result = script.train(config, options)
    assert result["step"] == NUM_STEPS and all(map(math.isfinite, result["losses"]))
    captions = {caption for caption, *_ in seen}
    assert "" in captions and all(each.startswith("another caption") for each in captions - {""})
    assert all((caption == "") == (not texts.any()) and len(texts) == 152 for caption, texts, *_ in seen)
    crops = {(sample_id, crop) for *_, sample_id, crop in seen}
    assert len(crops) > len({sample_id for sample_id, _ in crops})


def test_what_is_missing_is_encoded(script, cold, options):
    config = training_only(cold)
    run_precache(config)
    with LatentCache(config.cache) as cache:
        keys = [*cache.manifest("second").keys()]
        assert cache.store.remove(keys) >= 4
    assert script.train(config, replace(options, steps=1, encode=True))["step"] == 1
    with LatentCache(config.cache) as cache:
        assert cache.store.find(keys) == set(keys)


def test_settings_that_do_not_fit_are_refused(script, cached, options, tmp_path, make_config):
    def refused(config: Config, error: type[Exception], message: str, **changes: Any) -> None:
        with pytest.raises(error, match=message):
            script.train(config, replace(options, **changes))

    config = training_only(cached)
    other = make_config(**{"cache.path": cached.cache.path})
    refused(other, StoreError, r"photos is not cached: run `latentcache precache CONFIG`")
    refused(make_config(**{"datasets.0.role": "validation"}), ConfigError, "role: train")
    alone = make_config(**{"cache.path": tmp_path / "alone", "encode.text": "none", "validation.prompts": []})
    run_precache(alone)
    refused(alone, ConfigError, r"encode\.text is none")
    refused(config, ConfigError, "nothing to validate", validate_every=1)
    refused(config, ConfigError, "at least 1", steps=0)
    with patch.dict(os.environ, WORLD_SIZE="2"):
        refused(config, ConfigError, "without torchrun")
    refused(config, CheckpointError, "there is no such file", resume=True)
    script.train(config, replace(options, steps=1))
    refused(config, CheckpointError, "--resume")
    refused(
        config, CheckpointError, r"learning_rate: 0\.01 when the run started, 0\.1 now", resume=True, learning_rate=0.1
    )


def test_the_command_line_stops_on_a_signal_and_goes_on(script, cached, tmp_path, monkeypatch, capsys):
    (file := tmp_path / "config.json").write_text(training_only(cached).model_dump_json())
    command = [str(script.__file__), str(file), "--out", str(tmp_path / "run"), "--device", "cpu", "--rank=2", "--json"]
    endless, pipe = [sys.executable, *command, "--steps", str(10**6)], subprocess.PIPE
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(endless, env=environment, stdout=pipe, stderr=pipe, text=True)
    assert process.stderr is not None
    try:
        seen = ""
        while "loss=" not in seen:
            character = process.stderr.read(1)
            assert character, seen
            seen += character
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 143, err
    stopped = json.loads(out)
    assert stopped["interrupted"] and stopped["lora"] is None and stopped["step"] == len(stopped["losses"])
    monkeypatch.setattr(sys, "argv", [*command, "--steps", str(stopped["step"] + 1), "--resume"])
    assert script.main() == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["resumed_from"], document["step"]) == (stopped["step"], stopped["step"] + 1)
    assert Path(document["lora"]).is_file()
    monkeypatch.setattr(sys, "argv", command)
    assert script.main() == 2  # without --resume the earlier run is left alone
    assert json.loads(capsys.readouterr().out)["type"] == "CheckpointError"
