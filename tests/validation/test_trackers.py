"""Trackers: TensorBoard's own files read back, W&B by its documented signature, and trackers that fail."""

from __future__ import annotations

import io
import json
import logging
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from accelerate.tracking import GeneralTracker, TensorBoardTracker, WandBTracker
from helpers.report_samples import report
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from latentcache.errors import ConfigError
from latentcache.validation.pictures import sample_grid
from latentcache.validation.results import ValidationReport, log_to, publish


class Run:
    """A W&B run as far as it is documented: log(data, step=None, commit=None)."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, Any], int | None]] = []

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        self.logged.append((data, step))


class WandbImage:
    def __init__(self, data_or_path: Image.Image, mode: str | None = None, caption: str | None = None) -> None:
        self.image, self.caption = data_or_path, caption


class Failing:
    """A SummaryWriter on a disk that is full."""

    def add_scalar(self, *_: object) -> None:
        raise OSError(28, "No space left on device")

    def add_image(self, *_: object, **__: object) -> None:
        raise AssertionError("not reached")


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("wandb")
    module.Image = WandbImage  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)


def scalars_of(document: dict[str, Any]) -> dict[str, float | None]:
    found = {"validation/loss": document["loss"]}
    found |= {f"validation/loss/{name}": value["loss"] for name, value in document["loss_by_dataset"].items()}
    bins = document["loss_by_timestep"]
    return found | {f"validation/loss_by_timestep/{part['first']}": part["loss"] for part in bins}


def events(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance={"images": 0}).Reload()


def test_tensorboard_holds_the_numbers_of_metrics_and_the_grid(tmp_path: Path) -> None:
    with SummaryWriter(tmp_path / "board") as writer:
        for step in (100, 200):
            logged, paths = publish(report(step), tmp_path / "validation", writer)
            assert logged.notes == ()
    found = events(tmp_path / "board")
    expected = scalars_of(json.loads(paths.metrics.read_text()))
    assert set(found.Tags()["scalars"]) == set(expected) and len(expected) == 5
    for tag, value in expected.items():
        assert [event.step for event in found.Scalars(tag)] == [100, 200]
        assert found.Scalars(tag)[1].value == np.float32(value)
    assert [event.step for event in found.Images("validation/samples")] == [100, 200]
    shown = Image.open(io.BytesIO(found.Images("validation/samples")[1].encoded_image_string))
    assert shown.tobytes() == sample_grid(report(200).images).tobytes()


def test_a_loss_that_is_not_finite_is_nan_in_tensorboard(tmp_path: Path) -> None:
    with SummaryWriter(tmp_path) as writer:
        assert log_to(writer, report(nan=True, num_images=0)).notes == ()
    found = events(tmp_path)
    assert np.isnan(found.Scalars("validation/loss")[0].value)
    assert found.Scalars("validation/loss/faces")[0].value > 0 and found.Tags()["images"] == []


def test_nothing_measured_logs_nothing(tmp_path: Path) -> None:
    with SummaryWriter(tmp_path) as writer:
        log_to(writer, ValidationReport(step=1))
    assert events(tmp_path).Tags()["scalars"] == []


@pytest.mark.usefixtures("wandb")
def test_wandb_gets_one_call_with_numbers_and_captioned_images(tmp_path: Path) -> None:
    run = Run()
    logged, paths = publish(report(300), tmp_path, run)
    assert logged.notes == () and len(run.logged) == 1
    values, step = run.logged[0]
    images = values.pop("validation/samples")
    assert step == 300 and values == scalars_of(json.loads(paths.metrics.read_text()))
    assert [found.caption for found in images] == [
        "prompt 0 | negative: ugly | seed 40",
        "prompt 1 | negative: ugly | seed 41",
    ]
    assert [found.image.tobytes() for found in images] == [sample.image.tobytes() for sample in report().images]


def test_wandb_is_imported_only_for_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it is an ImportError now
    run = Run()
    assert log_to(run, report(num_images=0)).notes == () and len(run.logged) == 1
    assert "ModuleNotFoundError" in log_to(run, report()).notes[0] and len(run.logged) == 1


@pytest.mark.usefixtures("wandb")
def test_trackers_of_accelerate_are_unwrapped(tmp_path: Path) -> None:
    board = TensorBoardTracker("run", tmp_path)
    assert log_to(board, report()) == report(), "not started: as in a process that is not the main one"
    board.start()
    assert log_to(board, report()).notes == ()
    board.finish()
    assert "validation/loss" in events(tmp_path / "run").Tags()["scalars"]

    wandb_tracker = WandBTracker("run")
    assert log_to(wandb_tracker, report()) == report()
    wandb_tracker.run = Run()
    log_to(wandb_tracker, report(5))
    assert wandb_tracker.run.logged[0][1] == 5

    blank = GeneralTracker(_blank=True)
    assert log_to(blank, report()) == report()


@pytest.mark.parametrize(
    "other", [object(), "runs/", logging.getLogger("mine"), print, {}], ids=lambda value: type(value).__name__
)
def test_another_object_is_refused_before_anything_is_written(tmp_path: Path, other: object) -> None:
    with pytest.raises(ConfigError, match="SummaryWriter") as caught:
        publish(report(), tmp_path / "validation", other)
    assert type(other).__name__ in str(caught.value) and not (tmp_path / "validation").exists()


def test_a_tracker_that_fails_loses_no_results_and_ends_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logged, paths = publish(report(notes=["first"]), tmp_path, Failing())
    assert len(logged.notes) == 2 and "Failing" in logged.notes[1] and "No space left" in logged.notes[1]
    assert json.loads(paths.metrics.read_text()) == logged.to_json()
    assert all(path.exists() for path in (*paths.images, paths.grid, paths.plot))
    assert "Traceback" in caplog.text and "step 100" in caplog.text


def test_ctrl_c_inside_a_tracker_is_not_held_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Failing, "add_scalar", interrupt)
    with pytest.raises(KeyboardInterrupt):
        publish(report(), tmp_path, Failing())
    assert (tmp_path / "000100" / "metrics.json").exists()


def test_without_a_tracker_the_results_are_written(tmp_path: Path) -> None:
    logged, paths = publish(report(), tmp_path)
    assert logged == report() and json.loads(paths.metrics.read_text()) == report().to_json()
