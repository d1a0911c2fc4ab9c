"""The example of a training script: it trains, validates, resumes bit by bit, and its LoRA can be used."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from diffusers import DDPMScheduler
from helpers.photo_files import write_photo
from torch.utils._pytree import tree_leaves_with_path

from latentcache import LatentCache
from latentcache.config import Config, TrainConfig
from latentcache.config_file import parse_config
from latentcache.errors import CheckpointError, ConfigError, SampleError, StoreError
from latentcache.integrations.diffusers import load_unet
from latentcache.models.lora import load_lora
from latentcache.precache.run import run_precache
from latentcache.validation.noise_schedule import NoiseSchedule

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "scripts" / "train_lora.py"
NUM_STEPS = 6


@pytest.fixture(scope="module")
def script() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))
        import train_lora

        yield train_lora
        sys.modules.pop("train_lora")


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Two training sets and a held-out one, of which only the training sets are cached. Tests read the cache only."""
    folder = tmp_path_factory.mktemp("photos")
    for number in range(7):
        size = (80, 144) if number % 3 else (144, 80)
        photo = write_photo(folder / ("first", "second", "held-out")[number % 3] / f"{number}.png", number, size)
        photo.with_suffix(".txt").write_text(f"photo {number}, a tag, a last one\nanother caption of {number}\n")
    datasets = [
        {
            "name": name,
            "role": "validation" if name == "held-out" else "train",
            "source": {"path": folder / name},
            "buckets": {"area": 64 * 64, "step": 32},
            "images": {"min_side": 8},
            "flip": name == "first",
        }
        for name in ("held-out", "first", "second")
    ]
    validation = {"prompts": ["a tree"], "height": 64, "width": 64, "num_inference_steps": 2, "num_timesteps": 2}
    config = parse_config(
        {
            "cache": {"path": folder / "cache"},
            "datasets": datasets,
            "model": {"path": "tiny"},
            "encode": {"device": "cpu", "num_workers": 2},
            "validation": validation | {"path": folder / "validation"},
        }
    )
    run_precache(config.model_copy(update={"datasets": config.datasets[1:]}))
    return config


def training_only(config: Config) -> Config:
    """The same without anything to validate."""
    validation = config.validation.model_copy(update={"prompts": ()})
    datasets = tuple(dataset for dataset in config.datasets if dataset.role == "train")
    return config.model_copy(update={"datasets": datasets, "validation": validation})


@pytest.fixture
def cold(cached: Config, tmp_path: Path) -> Config:
    """The same with a copy of the cache, to fill."""
    shutil.copytree(cached.cache.path, tmp_path / "cache")
    validation = cached.validation.model_copy(update={"path": tmp_path / "validation"})
    cache = cached.cache.model_copy(update={"path": tmp_path / "cache"})
    return cached.model_copy(update={"cache": cache, "validation": validation})


@pytest.fixture
def options(script: ModuleType, tmp_path: Path) -> Any:
    return script.Options(
        steps=NUM_STEPS, rank=2, learning_rate=1e-2, batch_size=2, out=tmp_path / "run", device="cpu", seed=3
    )


class Outcome:
    """A run: its result, the LoRA's weights, and everything of the checkpoint."""

    def __init__(self, script: ModuleType, config: Config, options: Any, **others: Any):
        built: list[Any] = []

        class Kept(script.Training):  # type: ignore[misc, name-defined]
            def __init__(self, *arguments: Any):
                super().__init__(*arguments)
                built.append(self)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(script, "Training", Kept)
            self.result = script.train(config, options, **others)
        self.training = built[0]
        unet, optimizer, scaler = self.training.denoiser, self.training.optimizer, self.training.scaler
        state = [unet.state_dict(), optimizer.state_dict(), scaler.state_dict()]
        drawn = [torch.get_rng_state(), self.training.generator.get_state()]
        self.leaves = {str(path): leaf for path, leaf in tree_leaves_with_path([state, drawn])}


def assert_equal(found: Outcome, expected: Outcome) -> None:
    """To the last bit: weights, optimizer, scaler, random streams."""
    assert found.leaves.keys() == expected.leaves.keys()

    def equal(path: str) -> bool:
        ours, theirs = found.leaves[path], expected.leaves[path]
        return torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else bool(ours == theirs)

    differing = [path for path in found.leaves if not equal(path)]
    assert differing == []


@pytest.fixture(scope="module")
def whole(script: ModuleType, cached: Config, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """A run without validation and without a break."""
    out = tmp_path_factory.mktemp("whole")
    flags = {"steps": NUM_STEPS, "rank": 2, "learning_rate": 1e-2, "batch_size": 2, "seed": 3}
    return Outcome(script, training_only(cached), script.Options(**flags, out=out, device="cpu"))


def test_a_run_trains_the_lora_alone(whole: Outcome) -> None:
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
def test_a_resumed_run_is_as_one_without_a_break(
    script: ModuleType, cached: Config, options: Any, tmp_path: Path, mixed_precision: str, whole: Outcome
) -> None:
    config, options = training_only(cached), replace(options, mixed_precision=mixed_precision)
    if mixed_precision != "no":
        whole = Outcome(script, config, replace(options, out=tmp_path / "whole"))
    first = script.train(config, replace(options, steps=3))
    # Another use of the process in between leaves other random streams.
    torch.manual_seed(99)
    resumed = Outcome(script, config, replace(options, resume=True))
    assert resumed.result["resumed_from"] == 3
    assert first["losses"] + resumed.result["losses"] == whole.result["losses"]
    assert_equal(resumed, whole)


def test_validation_in_the_middle_changes_no_bit(
    script: ModuleType, cold: Config, options: Any, whole: Outcome
) -> None:
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


def test_the_lora_can_be_loaded_and_changes_the_unet(script: ModuleType, whole: Outcome) -> None:
    def predict(unet: Any) -> torch.Tensor:
        torch.manual_seed(0)  # of the random caption
        batch = next(iter(torch.utils.data.DataLoader(whole.training.dataset, batch_size=1)))
        placed = whole.training.dataset.place(batch, device="cpu", scaled=True)
        added = {"text_embeds": placed["pooled_prompt_embeds"], "time_ids": placed["add_time_ids"]}
        with torch.no_grad():
            return unet(placed["latents"], 5, placed["prompt_embeds"], added_cond_kwargs=added).sample

    unet = load_unet(dtype=torch.float32, model=whole.training.config.model)
    without = predict(unet)
    load_lora(unet, Path(whole.result["lora"]).parent)
    trained = predict(whole.training.denoiser.eval())
    whole.training.denoiser.train()
    assert torch.equal(predict(unet), trained)
    assert not torch.equal(without, trained)


def test_a_stopped_run_leaves_a_checkpoint_and_goes_on_from_it(
    script: ModuleType, cached: Config, options: Any, whole: Outcome
) -> None:
    stop = threading.Event()
    stop.set()
    first = script.train(training_only(cached), options, stop=stop)
    assert (first["step"], first["interrupted"], first["lora"]) == (1, True, None)
    assert_equal(Outcome(script, training_only(cached), replace(options, resume=True)), whole)


def test_no_encoder_is_loaded_where_everything_is_cached(script: ModuleType, cold: Config, options: Any) -> None:
    run_precache(cold)
    training = script.Training(cold, options)
    assert {name for name in training.parts if name not in ("optimizer", "scaler", "scheduler")} == {"unet", "vae"}
    assert training.phases.current == "train"


def test_a_failed_last_validation_does_not_cost_the_lora(
    script: ModuleType, cold: Config, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(runner: Any, step: int) -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr(script, "validate", fail)
    with pytest.raises(StoreError, match="the disk is full"):
        script.train(cold, replace(options, steps=1))
    assert (options.out / "pytorch_lora_weights.safetensors").is_file()


@pytest.mark.parametrize(
    ("prediction_type", "target"),
    [("epsilon", lambda scheduler, latents, noise, steps: noise), ("v_prediction", None)],
)
def test_the_target_follows_the_schedulers_config(
    script: ModuleType, cached: Config, options: Any, prediction_type: str, target: Callable[..., Any] | None
) -> None:
    training = script.Training(training_only(cached), options)
    scheduler = DDPMScheduler.from_config(training.scheduler.config, prediction_type=prediction_type)
    training.schedule = NoiseSchedule.of(scheduler)
    target = target or DDPMScheduler.get_velocity
    with training.loader as loader:
        batch = next(iter(loader))
    seen = {}
    hook = training.denoiser.register_forward_hook(lambda module, given, output: seen.update(output=output[0]))
    state = training.generator.get_state()
    loss = training.loss(batch)
    hook.remove()
    generator = torch.Generator()
    generator.set_state(state)
    latents = batch["latents"]
    noise = torch.randn(latents.shape, generator=generator)
    steps = torch.randint(1000, (len(latents),), generator=generator)
    expected = (seen["output"] - target(scheduler, latents, noise, steps)).square().mean()
    torch.testing.assert_close(loss, expected)


class Recipe(NamedTuple):
    """Changes of the second dataset, of `encode` and of `train`, and what must be true of all batches."""

    dataset: dict[str, Any]
    encode: dict[str, Any]
    train: dict[str, Any]
    holds: Callable[[list[dict[str, Any]]], bool]


def captions_of(batches: list[dict[str, Any]]) -> set[str]:
    return {caption for batch in batches for caption in batch["caption"]}


RECIPES = {
    "the second caption": Recipe(
        {},
        {},
        {"caption": 1},
        lambda batches: all(each.startswith("another caption") for each in captions_of(batches)),
    ),
    "dropout to zeros": Recipe(
        {},
        {},
        {"caption_dropout": 0.5, "dropout_to": "zeros"},
        lambda batches: all(
            (caption == "") == (not texts.any())
            for batch in batches
            for caption, texts in zip(batch["caption"], batch["prompt_embeds"], strict=True)
        ),
    ),
    "long prompts, dropped to the empty text": Recipe(
        {},
        {"max_length": 150},
        {"caption_dropout": 0.5},
        lambda batches: (
            {batch["prompt_embeds"].shape[1] for batch in batches} == {152}
            and {texts.any().item() for batch in batches for texts in batch["prompt_embeds"]} == {True}
            and "" in captions_of(batches)
        ),
    ),
    "several crops": Recipe(
        {"variations": 3, "buckets": {"area": 64 * 64, "step": 64}, "repeats": 8},
        {},
        {"crops": "random"},
        lambda batches: (
            len({crop for batch in batches for crop in zip(batch["sample_id"], batch["crop_top_left"], strict=True)})
            > len({name for batch in batches for name in batch["sample_id"]})
        ),
    ),
    "random flips": Recipe(
        {"flip": True},
        {},
        {"flips": "random"},
        lambda batches: {batch["num_items"] for batch in batches} == {5},  # and not 10, of both sides
    ),
    "variants of captions": Recipe(
        {"captions": {"variants": 8, "shuffle": True, "drop": 0.5}},
        {},
        {},
        lambda batches: any(
            not re.fullmatch(r"photo \d, a tag, a last one|another caption of \d", text)
            for text in captions_of(batches)
        ),
    ),
    "several resolutions": Recipe(
        {"resolutions": [64, 96], "buckets": {"step": 32}},
        {},
        {},
        lambda batches: {name for batch in batches for name in batch["dataset"]} == {"first", "second-64", "second-96"},
    ),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains(script: ModuleType, cold: Config, options: Any, name: str) -> None:
    recipe, config = RECIPES[name], training_only(cold)
    settings = config.model_dump(mode="json", exclude_unset=True)
    settings["datasets"][1] |= recipe.dataset
    settings["encode"] |= recipe.encode
    config = parse_config(settings | {"train": recipe.train})
    run_precache(config)
    batches: list[dict[str, Any]] = []
    loss = script.Training.loss

    def watched(training: Any, batch: dict[str, Any]) -> Any:
        batches.append(batch | {"num_items": len(training.dataset)})
        return loss(training, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script.Training, "loss", watched)
        result = script.train(config, options)
    assert result["step"] == NUM_STEPS and all(map(math.isfinite, result["losses"]))
    assert recipe.holds(batches)


def test_what_is_missing_is_encoded(script: ModuleType, cold: Config, options: Any) -> None:
    config = training_only(cold)
    run_precache(config)
    with LatentCache(config.cache) as cache:
        keys = [*cache.manifest("second").rows.entry_keys()]
        assert cache.store.remove(keys) >= 4
    assert script.train(config, replace(options, encode=True))["step"] == NUM_STEPS
    with LatentCache(config.cache) as cache:
        assert cache.store.find(keys) == set(keys)


def test_rows_count_in_the_loss_as_their_datasets_say(script: ModuleType, cached: Config, options: Any) -> None:
    training = script.Training(training_only(cached), options)
    with training.loader as loader:
        batch = next(batch for batch in loader if len(batch["sample_id"]) == 2)
    state = training.generator.get_state()

    def loss(*weights: float) -> float:
        training.generator.set_state(state)
        return float(training.loss(batch | {"loss_weight": torch.tensor(weights)}).item())

    whole, first, second = loss(1.0, 1.0), loss(1.0, 0.0), loss(0.0, 1.0)
    assert first > 0 and second > 0 and first + second == pytest.approx(whole)
    assert loss(0.5, 0.5) == pytest.approx(whole / 2)


def test_settings_that_do_not_fit_are_refused(
    script: ModuleType, cached: Config, options: Any, tmp_path: Path, make_config: Callable[..., Config]
) -> None:
    config = training_only(cached)
    with pytest.raises(StoreError, match=r"there is no cache here\. `latentcache precache` makes one"):
        script.train(make_config(), options)
    with pytest.raises(StoreError, match=r"photos is not cached: run `latentcache precache CONFIG`"):
        script.train(make_config(**{"cache.path": cached.cache.path}), options)
    with pytest.raises(ConfigError, match="role: train"):
        script.train(make_config(**{"datasets.0.role": "validation"}), options)
    run_precache(make_config())
    with pytest.raises(ConfigError, match="nothing to validate"):
        script.train(training_only(make_config()), replace(options, validate_every=1))
    alone = make_config(**{"cache.path": tmp_path / "alone", "encode.text": "none"})
    run_precache(alone)
    with pytest.raises(ConfigError, match=r"encode\.text is none, so that no caption was encoded"):
        script.train(training_only(alone), options)
    with pytest.raises(ConfigError, match="at least 1"):
        script.train(config, replace(options, steps=0))
    with pytest.raises(SampleError, match=r"has no flipped entry.*`flip: true`"):
        script.train(config.model_copy(update={"train": TrainConfig(flips="random")}), options)  # one set has no flips
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigError, match="in one process"):
        patch.setenv("WORLD_SIZE", "2")
        script.train(config, options)
    with pytest.raises(CheckpointError, match="there is no such file"):
        script.train(config, replace(options, resume=True))
    script.train(config, replace(options, steps=1))
    with pytest.raises(CheckpointError, match="--resume"):
        script.train(config, options)
    with pytest.raises(CheckpointError, match=r"learning_rate: 0\.01 when it began, 0\.1 now"):
        script.train(config, replace(options, resume=True, learning_rate=0.1))
    with pytest.raises(CheckpointError, match="lora_A"):
        script.train(config, replace(options, resume=True, rank=3))


def test_the_command_line_stops_on_a_signal_and_goes_on(
    script: ModuleType,
    cached: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "config.json"
    file.write_text(training_only(cached).model_dump_json())
    command = [str(SCRIPT), str(file), "--out", str(tmp_path / "run"), "--device", "cpu", "--rank", "2", "--json"]
    process = subprocess.Popen(
        [sys.executable, *command, "--steps", str(10**6)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
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
