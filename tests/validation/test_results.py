"""What one validation leaves: its document, its pictures, the files of its step, and the log of its tracker."""

from __future__ import annotations

import io
import json
import logging
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from helpers.report_samples import SETTINGS, image, losses, opened, report
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from latentcache.errors import ConfigError, ReadOnlyError, StorageFullError, StoreError, UnsafeStoreError
from latentcache.utils.json_document import plain, to_bytes
from latentcache.validation.metrics import Estimate
from latentcache.validation.pictures import image_png, loss_plot, sample_grid
from latentcache.validation.results import ValidationReport, log_to, publish, write_results

ALL = ["loss.png", "metrics.json", "sample-00.png", "sample-01.png", "samples.png"]


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


# The document


def read(value: object) -> Any:
    """What a strict reader makes of it: NaN and Infinity are not JSON."""

    def refuse(name: str) -> object:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(to_bytes(value).decode(), parse_constant=refuse)


def test_the_document_holds_what_was_measured() -> None:
    found = report()
    assert found.loss is not None
    document = read(found.to_json())
    values = np.array([loss for samples in found.loss.by_sample.values() for loss in samples.values()])
    assert (document["step"], document["num_samples"], document["num_filled"]) == (100, 5, 3)
    assert document["loss"] == pytest.approx(values.mean())
    assert document["loss_standard_error"] == pytest.approx(values.std(ddof=1) / math.sqrt(5))
    assert document["loss_by_timestep"][0]["loss"] == pytest.approx(2 * values.mean())
    assert document["loss_by_dataset"]["faces"]["loss"] == pytest.approx(values[3:].mean())
    assert document["loss_by_sample"] == found.loss.by_sample
    assert document["measurement_settings"] == found.loss.measurement_settings.model_dump()
    assert document["images"][1] == {
        "prompt": "prompt 1",
        "negative_prompt": "ugly",
        "seed": 41,
        "path": "sample-01.png",
        "tiled": True,
    }
    assert found.to_json(Path("results"))["images"][1]["path"] == "results/sample-01.png"
    assert f"{found.loss.loss.mean:.6g} ± " in found.to_text()


def test_a_loss_that_is_not_finite_is_null_and_still_has_its_settings() -> None:
    document = read(report(nan=True).to_json())
    assert document["loss"] is None and document["loss_by_sample"]["photos"]["0.png"] is None
    assert document["loss_by_dataset"]["faces"]["loss"] > 0 and document["measurement_settings"] is not None


def test_nothing_measured_and_nothing_sampled() -> None:
    document = read(ValidationReport(step=0).to_json())
    assert document["loss"] is None and document["measurement_settings"] is None and document["images"] == []
    with pytest.raises(ConfigError, match="-1"):
        ValidationReport(step=-1)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(st.text(max_size=4), values, max_size=4),
    max_leaves=12,
)


@given(json_values)
def test_any_value_is_written_as_json_and_read_back_equal(value: object) -> None:
    assert read(value) == plain(value)


# The pictures


@pytest.mark.parametrize("num", [1, 2, 5])
def test_the_grid_has_every_image_pixel_for_pixel(num: int) -> None:
    samples = [image(n, (24 + 8 * (n % 2), 32), f"prompt {n}", None if n == 1 else "ugly") for n in range(num)]
    grid = np.array(sample_grid(samples))
    for sample in samples:
        pixels = np.array(sample.image)
        height, width = pixels.shape[:2]
        windows = np.lib.stride_tricks.sliding_window_view(grid[..., 0], (height, width))
        assert (windows == pixels[..., 0]).all((2, 3)).sum() == 1
    with pytest.raises(ValueError, match="at least one"):
        sample_grid([])


def test_captions_differ_with_prompt_negative_prompt_and_seed() -> None:
    shown = (image(), image(prompt="a blue house"), image(negative=None), replace(image(), seed=41))
    assert len({sample_grid([sample]).tobytes() for sample in shown}) == 4


@pytest.mark.parametrize("prompt", ["", " \n\t ", "x" * 50_000, "日本語の家" * 40, "\x00\x1b[31m", "lone \udcff"])
def test_any_prompt_can_be_drawn_and_stored(prompt: str) -> None:
    sample = image(0, prompt=prompt, negative=prompt)
    assert sample_grid([sample]).height < 64 + 150, "a long prompt must be cut, not make the grid tall"
    single = opened(image_png(sample))
    assert single.text["prompt"] == prompt.encode("utf-8", "backslashreplace").decode()
    assert single.text["seed"] == "40" and single.tobytes() == sample.image.tobytes()


def test_the_curve_has_every_step_of_these_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *args, **kw: (figures.append(figure), save(figure, *args, **kw))
    )
    stale = losses(200).model_copy(update={"loss": Estimate(mean=99.0, standard_error=None, num=1)})
    elsewhere = losses(50, settings=SETTINGS.model_copy(update={"seed": 1}))
    assert loss_plot(200, losses(200), {300: losses(300), 100: losses(100), 200: stale, 50: elsewhere})
    over_steps, over_timesteps = figures[0].axes
    expected = [[step, losses(step).loss.mean] for step in (100, 200, 300)]
    assert over_steps.containers[0].lines[0].get_xydata().tolist() == expected
    drawn = [container.lines[0].get_xydata().tolist() for container in over_timesteps.containers]
    for points, found in zip(drawn, (losses(100), losses(200)), strict=True):
        assert points == [[(part.first + part.end) / 2, part.mean] for part in found.by_timestep]


def test_any_loss_can_be_drawn_with_a_users_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    monkeypatch.setitem(matplotlib.rcParams, "text.usetex", True)
    monkeypatch.setenv("PATH", "")
    for mean, error in ((math.nan, None), (math.inf, None), (3e38, 1e38), (0.0, 0.0), (3e7, 1e-9)):
        found = losses(1).model_copy(update={"loss": Estimate(mean=mean, standard_error=error, num=2)})
        opened(loss_plot(1, found, {0: losses(0, nan=True), 123_456_789: losses(123_456_789)}) or b"")
    assert matplotlib.rcParams["text.usetex"]


# The files


def test_a_step_has_metrics_images_grid_and_plot(tmp_path: Path) -> None:
    found = report()
    paths = write_results(found, tmp_path / "deep" / "validation")
    assert paths.folder == tmp_path / "deep" / "validation" / "000100" and names(paths.folder) == ALL
    assert json.loads(paths.metrics.read_text()) == found.to_json()
    assert [Path(part["path"]) for part in found.to_json(paths.folder)["images"]] == list(paths.images)
    for path, sample in zip(paths.images, found.images, strict=True):
        assert opened(path.read_bytes()).tobytes() == sample.image.tobytes()
    assert paths.grid is not None and opened(paths.grid.read_bytes())
    later = write_results(report(200, num_images=0), paths.folder.parent)
    assert later.plot is not None and later.plot.read_bytes() == loss_plot(200, losses(200), {100: losses(100)})


def test_what_was_not_made_has_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert names(write_results(report(1, num_images=0), tmp_path).folder) == ["loss.png", "metrics.json"]
    without_loss = write_results(replace(report(2), loss=None), tmp_path)
    assert names(without_loss.folder) == [name for name in ALL if name != "loss.png"] and without_loss.plot is None
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # importing it is an ImportError now
    without_plots = write_results(report(1_234_567, num_images=0), tmp_path)
    assert without_plots.folder.name == "1234567" and names(without_plots.folder) == ["metrics.json"]
    assert without_plots.plot is None


def test_a_second_validation_of_a_step_replaces_the_first_whole(tmp_path: Path) -> None:
    first = write_results(report(num_images=3), tmp_path)
    (first.folder / "my notes.txt").write_text("mine")
    (first.folder / ".metrics.json.0123abcd.tmp").write_text("of a writer that was killed")
    second = replace(report(num_images=1, nan=True), notes=("again",))
    write_results(second, tmp_path)
    assert names(first.folder) == ["loss.png", "metrics.json", "my notes.txt", "sample-00.png", "samples.png"]
    assert json.loads(first.metrics.read_text()) == second.to_json()


@pytest.mark.parametrize(
    ("call", "number", "expected"),
    [("write", 28, StorageFullError), ("fsync", 28, StorageFullError), ("write", 30, ReadOnlyError)],
)
def test_a_refused_write_names_the_file_and_leaves_no_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, expected: type[StoreError]
) -> None:
    first = write_results(report(), tmp_path)
    real, calls = getattr(os, call), []

    def refuse_the_fourth(*arguments: object) -> object:
        calls.append(arguments)
        if len(calls) == 4:
            raise OSError(number, os.strerror(number))
        return real(*arguments)

    monkeypatch.setattr(os, call, refuse_the_fourth)
    with pytest.raises(expected, match=str(first.folder)):
        write_results(report(num_images=3), tmp_path)
    monkeypatch.undo()
    assert "metrics.json" not in names(first.folder), "a folder that has one is complete"


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StoreError, match="file"):
        write_results(report(), tmp_path / "file")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "000100").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafeStoreError, match="000100"):
        write_results(report(), tmp_path)


# The tracker


class Run:
    """A W&B run as far as it is documented: log(data, step=None, commit=None)."""

    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, Any], int | None]] = []

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        self.logged.append((data, step))


class Failing:
    """A SummaryWriter on a disk that is full."""

    def add_scalar(self, *_: object) -> None:
        raise OSError(28, "No space left on device")

    add_image = add_scalar


def scalars_of(document: dict[str, Any]) -> dict[str, float | None]:
    found = {"validation/loss": document["loss"]}
    found |= {f"validation/loss/{name}": value["loss"] for name, value in document["loss_by_dataset"].items()}
    bins = document["loss_by_timestep"]
    return found | {f"validation/loss_by_timestep/{part['first']}": part["loss"] for part in bins}


def test_tensorboard_holds_the_numbers_of_metrics_and_the_grid(tmp_path: Path) -> None:
    with SummaryWriter(tmp_path / "board") as writer:
        for step in (100, 200):
            logged, paths = publish(report(step), tmp_path / "validation", writer)
            assert logged.notes == ()
        assert log_to(writer, report(300, nan=True, num_images=0)).notes == ()
        log_to(writer, ValidationReport(step=400))
    found = EventAccumulator(str(tmp_path / "board"), size_guidance={"images": 0}).Reload()
    expected = scalars_of(json.loads(paths.metrics.read_text()))
    assert set(found.Tags()["scalars"]) == set(expected) and len(expected) == 5
    for tag, value in expected.items():
        assert [event.step for event in found.Scalars(tag)] == [100, 200, 300]
        assert found.Scalars(tag)[1].value == np.float32(value)
    assert np.isnan(found.Scalars("validation/loss")[2].value)
    shown = Image.open(io.BytesIO(found.Images("validation/samples")[1].encoded_image_string))
    assert shown.tobytes() == sample_grid(report(200).images).tobytes()


def test_wandb_gets_one_call_with_numbers_and_captioned_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = type(sys)("wandb")
    module.Image = lambda data, caption: (data, caption)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    run = Run()
    logged, paths = publish(report(300), tmp_path, run)
    assert logged.notes == () and len(run.logged) == 1
    values, step = run.logged[0]
    images = values.pop("validation/samples")
    assert step == 300 and values == scalars_of(json.loads(paths.metrics.read_text()))
    assert [caption for _, caption in images] == [f"prompt {n} | negative: ugly | seed {40 + n}" for n in (0, 1)]
    assert [data.tobytes() for data, _ in images] == [sample.image.tobytes() for sample in report().images]


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
    assert json.loads(paths.metrics.read_text()) == logged.to_json() and names(paths.folder) == ALL
    assert "Traceback" in caplog.text and "step 100" in caplog.text
