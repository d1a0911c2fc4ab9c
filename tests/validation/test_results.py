"""Results of a validation: metrics.json, the pictures, the files of a step, and the log of a tracker."""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from latentcache.errors import MetricsError, StorageFullError
from latentcache.utils.json_document import to_bytes
from latentcache.validation.metrics import (
    Estimate,
    LossReport,
    MeasurementSettings,
    SkippedSample,
    TimestepBin,
    read_history,
    read_losses,
)
from latentcache.validation.pictures import image_png, loss_plot, sample_grid
from latentcache.validation.results import ValidationReport, publish, write_results
from latentcache.validation.sample_images import SampleImage

SETTINGS = MeasurementSettings(
    prediction_type="epsilon",
    schedule="ab12",
    num_train_timesteps=1000,
    num_timesteps=2,
    seed=0,
    snr_gamma=None,
    dtype="float32",
    autocast=None,
    datasets={"photos": "cd34", "faces": "ef56"},
)


def losses(step: int = 100, *, nan: bool = False) -> LossReport:
    """Five samples of two datasets at two timesteps, and a skipped one."""
    values = np.random.default_rng(step).random(5)
    values[0] = np.nan if nan else values[0]
    found = {"photos": values[:3].tolist(), "faces": values[3:].tolist()}
    by_sample = {name: {f"{n}.png": loss for n, loss in enumerate(each)} for name, each in found.items()}
    return LossReport(
        measurement_settings=SETTINGS,
        by_timestep=(
            TimestepBin.of((values * 2).tolist(), first=0, end=500),
            TimestepBin.of((values / 3).tolist(), first=500, end=1000),
        ),
        by_dataset={name: Estimate.of(each) for name, each in found.items()},
        by_sample=by_sample,
        skipped=(SkippedSample(dataset="photos", sample_id="broken.png", reason="damaged"),),
        **Estimate.of(values.tolist()).model_dump(),
    )


def image(number: int, size: tuple[int, int], prompt: str, negative: str | None) -> SampleImage:
    """Noise of `size` (height, width), so that no two places in a grid look alike."""
    pixels = np.random.default_rng(number).integers(0, 256, (*size, 3), dtype=np.uint8)
    return SampleImage(prompt, negative, 40 + number, Image.fromarray(pixels), tiled=number == 1)


def report(step: int = 100, *, num_images: int = 2, nan: bool = False, notes: Sequence[str] = ()) -> ValidationReport:
    return ValidationReport(
        step=step,
        loss=losses(step, nan=nan),
        images=tuple(image(number, (64, 48), f"prompt {number}", "ugly") for number in range(num_images)),
        seconds={"loss": 1.23456, "sample": 2.0},
        placement={"validate": ("unet",), "sample": ("unet", "vae")},
        notes=tuple(notes),
        num_filled=3,
    )


def opened(data: bytes) -> Any:
    return Image.open(io.BytesIO(data))


ALL = ["loss.png", "metrics.json", "sample-00.png", "sample-01.png", "samples.png"]


def test_any_prompt_can_be_drawn_and_every_image_is_there_pixel_for_pixel() -> None:
    prompts = ["", "x" * 50_000, "日本語の家" * 40, "\x00\x1b[31m", "lone \udcff"]
    samples = [image(n, (24 + 8 * (n % 2), 32), each, None if n == 1 else each) for n, each in enumerate(prompts)]
    grid = np.array(sample_grid(samples))
    for number, (prompt, sample) in enumerate(zip(prompts, samples, strict=True)):
        pixels = np.array(sample.image)
        windows = np.lib.stride_tricks.sliding_window_view(grid[..., 0], pixels.shape[:2])
        assert (windows == pixels[..., 0]).all((2, 3)).sum() == 1
        assert sample_grid([sample]).height < 32 + 150, "a long prompt must be cut"
        single = opened(image_png(sample))
        assert single.text["prompt"] == prompt.encode("utf-8", "backslashreplace").decode()
        assert single.text["seed"] == str(40 + number) and single.tobytes() == sample.image.tobytes()


def test_a_step_has_what_was_measured_its_images_grid_and_plot(tmp_path: Path) -> None:
    found = report()
    paths = write_results(found, tmp_path / "deep" / "validation")
    assert paths.folder == tmp_path / "deep" / "validation" / "000100" and sorted(os.listdir(paths.folder)) == ALL
    document = json.loads(paths.metrics.read_text())
    assert document == found.to_json() and found.loss is not None
    values = np.array([loss for samples in found.loss.by_sample.values() for loss in samples.values()])
    assert (document["step"], document["num_samples"], document["num_filled"]) == (100, 5, 3)
    assert document["loss"] == pytest.approx(values.mean())
    assert document["loss_standard_error"] == pytest.approx(values.std(ddof=1) / math.sqrt(5))
    assert document["loss_by_sample"] == found.loss.by_sample
    assert document["measurement_settings"] == found.loss.measurement_settings.model_dump()
    image = {"prompt": "prompt 1", "negative_prompt": "ugly", "seed": 41, "path": "sample-01.png", "tiled": True}
    assert document["images"][1] == image
    assert [Path(part["path"]) for part in found.to_json(paths.folder)["images"]] == list(paths.images)
    for path, sample in zip(paths.images, found.images, strict=True):
        assert opened(path.read_bytes()).tobytes() == sample.image.tobytes()
    assert paths.grid is not None and opened(paths.grid.read_bytes())
    later = write_results(report(200, num_images=0), paths.folder.parent)
    assert later.plot is not None and later.plot.read_bytes() == loss_plot(200, losses(200), {100: losses(100)})


def test_a_second_validation_of_a_step_replaces_the_first_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = write_results(report(num_images=3), tmp_path)
    (first.folder / "my notes.txt").write_text("mine")
    (first.folder / ".metrics.json.0123abcd.tmp").write_text("left by a killed writer")
    second = report(num_images=1, nan=True, notes=["again"])
    write_results(second, tmp_path)
    assert {*os.listdir(first.folder)} == {"loss.png", "metrics.json", "my notes.txt", "sample-00.png", "samples.png"}
    assert json.loads(first.metrics.read_text()) == second.to_json()
    real, numbers = os.write, itertools.count(1)

    def refuse_the_fourth(*arguments: Any) -> int:
        if next(numbers) == 4:
            raise OSError(28, os.strerror(28))
        return real(*arguments)

    monkeypatch.setattr(os, "write", refuse_the_fourth)
    with pytest.raises(StorageFullError, match=str(first.folder)):
        write_results(report(num_images=3), tmp_path)
    assert "metrics.json" not in os.listdir(first.folder), "a folder that has one is complete"


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
        for last in (report(300, nan=True, num_images=0), ValidationReport(step=400)):
            assert publish(last, tmp_path / "others", writer)[0].notes == ()
    found = EventAccumulator(str(tmp_path / "board"), size_guidance={"images": 0}).Reload()
    expected = scalars_of(json.loads(paths.metrics.read_text()))
    assert set(found.Tags()["scalars"]) == set(expected) and len(expected) == 5
    for tag, value in expected.items():
        assert [event.step for event in found.Scalars(tag)] == [100, 200, 300]
        assert found.Scalars(tag)[1].value == np.float32(value)
    assert np.isnan(found.Scalars("validation/loss")[2].value)
    shown = opened(found.Images("validation/samples")[1].encoded_image_string)
    assert shown.tobytes() == sample_grid(report(200).images).tobytes()


def test_wandb_gets_one_call_with_numbers_and_captioned_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = type(sys)("wandb")
    module.Image = lambda data, caption: (data, caption)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    run = Mock(spec=["log"])  # W&B documents log(data, step=None, commit=None)
    logged, paths = publish(report(300), tmp_path, run)
    assert logged.notes == ()
    [((values,), options)] = run.log.call_args_list
    images = values.pop("validation/samples")
    assert options == {"step": 300} and values == scalars_of(json.loads(paths.metrics.read_text()))
    assert [caption for _, caption in images] == [f"prompt {n} | negative: ugly | seed {40 + n}" for n in (0, 1)]
    assert [data.tobytes() for data, _ in images] == [sample.image.tobytes() for sample in report().images]


def test_a_tracker_that_fails_ends_no_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    full = Mock(spec=["add_scalar", "add_image"])
    full.add_scalar.side_effect = OSError(28, "No space left on device")
    logged, paths = publish(report(notes=["first"]), tmp_path, full)
    assert len(logged.notes) == 2 and "No space left" in logged.notes[1] and "Traceback" in caplog.text
    assert json.loads(paths.metrics.read_text()) == logged.to_json() and sorted(os.listdir(paths.folder)) == ALL


# metrics.json is read back as it was written; a damaged one is named with its first wrong field


def put(folder: Path, step: int, content: ValidationReport | bytes) -> Path:
    """Write the metrics.json of a step."""
    path = folder / f"{step:06d}" / "metrics.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(content if isinstance(content, bytes) else to_bytes(content.to_json()))
    return path


def test_steps_come_back_as_they_were_measured_in_order(tmp_path: Path) -> None:
    steps = (2_000_000, 0, 500, 10_000)
    for step in steps:
        put(tmp_path, step, report(step, num_images=0, nan=step == 500, notes=["of x\udcff.png"]))
    history = read_history(tmp_path)
    assert list(history) == sorted(steps)
    for step, loss in history.items():  # as texts, in which NaN equals NaN
        assert str(loss.model_dump(exclude={"step"})) == str(losses(step, nan=step == 500).model_dump())
    assert math.isnan(history[500].loss.mean)
    assert read_losses(put(tmp_path, 6, ValidationReport(step=6))) is None


def test_fields_and_settings_of_a_later_version(tmp_path: Path) -> None:
    document = report(3).to_json() | {"added_later": 1}
    document["measurement_settings"] |= {"min_timestep": 20}
    document["loss_by_timestep"][0]["median"] = 0.1
    found = read_losses(put(tmp_path, 3, to_bytes(document)))
    assert found is not None and found.by_timestep == losses(3).by_timestep
    assert found.measurement_settings != SETTINGS, "another setting may give other losses"
    assert list(SETTINGS.differences(found.measurement_settings)) == ["min_timestep is None in one and 20 in the other"]


def test_a_damaged_or_foreign_file_is_named_with_its_field_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(tmp_path, 1, report(1, num_images=0))
    good = report(5, num_images=1).to_json()
    late, text = good["loss_by_timestep"][0] | {"first": 500}, {"photos": {"a.png": "0"}}
    for step, (content, field, message) in enumerate(
        [
            (to_bytes(good)[:-20], None, "line"),
            (b"[" * 100_000, None, "recursion"),
            (b'{"step": 5}', "loss", "Field required"),
            (to_bytes(good | {"loss_by_timestep": [late]}), "loss_by_timestep.0", "first is 500, which is not below"),
            (to_bytes(good | {"loss_by_sample": text}), "loss_by_sample.photos.a.png", r"number \(met: '0'\)"),
        ],
        start=2,
    ):
        path = put(tmp_path, step, content)
        with pytest.raises(MetricsError, match=message) as caught:
            read_losses(path)
        assert caught.value.path == str(path) and caught.value.field == field
        assert list(read_history(tmp_path)) == [1]
        assert str(path) in caplog.text and "left out" in caplog.text
