"""metrics.json: what is written is what is read, and a file that does not fit is named with its first wrong field."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.report_samples import SETTINGS, losses, report
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from latentcache.errors import MetricsError
from latentcache.utils.json_document import to_bytes
from latentcache.validation import metrics as metrics_module
from latentcache.validation.metrics import Estimate, LossReport, Metrics, TimestepBin, read_history
from latentcache.validation.results import ValidationReport


def equal(found: LossReport | None, expected: LossReport) -> bool:
    """Equal, where NaN equals NaN."""
    return repr(found) == repr(expected)


def write(report: ValidationReport, folder: Path) -> Path:
    """The part of `write_results` that is read back."""
    return put(folder, f"{report.step:06d}", to_bytes(report.to_json()))


def put(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name / "metrics.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    return path


# What is written is what is read


@pytest.mark.parametrize("nan", [False, True])
def test_metrics_come_back_as_they_were_written(tmp_path: Path, nan: bool) -> None:
    written = replace(report(5, nan=nan, notes=["of x\udcff.png"]), seconds={"loss": 2})
    found = Metrics.read(write(written, tmp_path))
    assert repr(found) == repr(written.metrics())
    assert equal(found.loss_report, losses(5, nan=nan)) and found.to_json() == written.to_json()


def test_metrics_without_a_loss_have_no_report(tmp_path: Path) -> None:
    found = Metrics.read(write(ValidationReport(step=7), tmp_path))
    assert found.loss_report is None and math.isnan(found.loss) and found.num_samples == 0


names = st.text(st.characters(exclude_categories=()), max_size=6)
values = st.floats(width=32)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(names, st.dictionaries(names, values, max_size=3), max_size=3))
def test_any_losses_of_any_samples_come_back(by_sample: dict[str, dict[str, float]]) -> None:
    written = replace(report(num_images=0), loss=losses().model_copy(update={"by_sample": by_sample}))
    found = Metrics.model_validate(json.loads(to_bytes(written.to_json())))
    finite = {
        name: {key: loss if math.isfinite(loss) else math.nan for key, loss in samples.items()}
        for name, samples in by_sample.items()
    }
    assert repr(found.loss_by_sample) == repr(finite)


def test_fields_and_settings_of_a_later_version(tmp_path: Path) -> None:
    document = report(3).to_json() | {"added_later": 1}
    document["measurement_settings"] |= {"min_timestep": 20}
    document["loss_by_timestep"][0]["median"] = 0.1
    found = Metrics.read(put(tmp_path, "000003", to_bytes(document))).loss_report
    assert found is not None and found.by_timestep == losses(3).by_timestep
    assert found.measurement_settings != SETTINGS, "another setting may give other losses"
    assert list(SETTINGS.differences(found.measurement_settings)) == ["min_timestep is None in one and 20 in the other"]


def test_estimates() -> None:
    assert Estimate.of([1.0, 3.0]) == Estimate(mean=2.0, standard_error=1.0, num=2)
    assert Estimate.of([1.0]) == Estimate(mean=1.0, standard_error=None, num=1)
    for values in ([], [1.0, math.inf], [math.nan, 1.0]):
        estimate = Estimate.of(values)
        assert math.isnan(estimate.mean) and estimate.standard_error is None and estimate.num == len(values)
    part = TimestepBin.of([0.5], first=0, end=10)
    assert part.model_dump(by_alias=True) == {"loss": 0.5, "standard_error": None, "num": 1, "first": 0, "end": 10}


# What does not fit

GOOD = report(5, num_images=1).to_json()
BIN = GOOD["loss_by_timestep"][0]


def changed(**fields: Any) -> bytes:
    return to_bytes(GOOD | fields)


DAMAGED: list[tuple[bytes, str | None, str]] = [
    (b"", None, "Expecting value"),
    (to_bytes(GOOD)[:-20], None, "line"),
    (b"\xff\xfe nonsense", None, "codec"),
    (b"[" * 100_000, None, "recursion"),
    (b"[1, 2]", "", "the document: Input should be a valid dictionary"),
    (b'{"step": 5}', "folder", "Field required"),
    (changed(step="5"), "step", r"Input should be a valid integer \(met: '5'\)"),
    (changed(step=-5), "step", r"greater than or equal to 0 \(met: -5\)"),
    (changed(step=2**60), "step", "less than or equal to"),
    (changed(step=True), "step", "valid integer"),
    (changed(loss="low"), "loss", r"valid number \(met: 'low'\)"),
    (changed(loss=10**400), "loss", r"valid number \(met: 10+\.\.\.0+\)"),
    (changed(loss_standard_error=-1.0), "loss_standard_error", "greater than or equal to 0"),
    (changed(loss_by_timestep=[{"first": 0}]), "loss_by_timestep.0.loss", "Field required"),
    (changed(loss_by_timestep=[BIN | {"first": 500}]), "loss_by_timestep.0", "first is 500, which is not below end"),
    (changed(loss_by_timestep=[BIN | {"standard_error": -1}]), "loss_by_timestep.0.standard_error", "greater than"),
    (changed(loss_by_timestep=None), "loss_by_timestep", "valid tuple"),
    (changed(loss_by_sample={"photos": {"a.png": "0"}}), "loss_by_sample.photos.a.png", r"valid number \(met: '0'\)"),
    (changed(images=[{"prompt": 1}]), "images.0.prompt", "valid string"),
    (changed(measurement_settings=[1]), "measurement_settings", r"met: \[1\]"),
    (changed(measurement_settings={}), "measurement_settings.prediction_type", "Field required"),
    (
        changed(measurement_settings=GOOD["measurement_settings"] | {"datasets": {"photos": 3}}),
        "measurement_settings.datasets.photos",
        r"valid string \(met: 3\)",
    ),
]


@pytest.mark.parametrize(("content", "field", "message"), DAMAGED, ids=[f"{n}-{d[1]}" for n, d in enumerate(DAMAGED)])
def test_a_damaged_or_foreign_file_is_named_with_its_field_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes, field: str | None, message: str
) -> None:
    write(report(1, num_images=0), tmp_path)
    path = put(tmp_path, "000005", content)
    with pytest.raises(MetricsError, match=message) as caught:
        Metrics.read(path)
    assert caught.value.path == str(path) and caught.value.field == field and len(str(caught.value)) < 500
    assert str(caught.value).endswith("Name one in validation.path/<step>/, or run that validation again")
    assert list(read_history(tmp_path)) == [1]
    assert str(path) in caplog.text and "left out" in caplog.text
    assert path.read_bytes() == content


def test_a_file_that_is_far_too_large_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(report(1), tmp_path)
    monkeypatch.setattr(metrics_module, "MAX_BYTES", 100)
    with pytest.raises(MetricsError, match="more than 100 bytes"):
        Metrics.read(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(MetricsError, match="No such file"):
        Metrics.read(tmp_path / "metrics.json")
    (tmp_path / "folder" / "metrics.json").mkdir(parents=True)
    with pytest.raises(MetricsError, match="cannot be read now"):
        Metrics.read(tmp_path / "folder" / "metrics.json")


# The steps before


def test_steps_come_back_as_they_were_measured_in_order(tmp_path: Path) -> None:
    steps = (2_000_000, 0, 500, 10_000)
    for step in steps:
        write(report(step, num_images=0, nan=step == 500), tmp_path)
    history = read_history(tmp_path)
    assert list(history) == sorted(steps)
    for step, loss in history.items():
        assert equal(loss, losses(step, nan=step == 500))
    assert math.isnan(history[500].loss.mean)


def test_a_folder_that_is_not_there_has_no_history(tmp_path: Path) -> None:
    assert read_history(tmp_path / "none") == {}


def test_a_step_without_a_loss_is_not_in_the_history(tmp_path: Path) -> None:
    write(replace(report(7), loss=None), tmp_path)
    assert read_history(tmp_path) == {}


def test_a_step_in_the_folder_of_another_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(tmp_path, "000005", changed(step=6))
    assert read_history(tmp_path) == {} and "it is of step 6, whose folder is 000006" in caplog.text


def test_links_pipes_copies_and_other_folders_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(report(1, num_images=0), tmp_path / "validation")
    (tmp_path / "validation" / "000002").symlink_to(tmp_path / "validation" / "000001")
    (tmp_path / "validation" / "000003").mkdir()
    (tmp_path / "validation" / "000003" / "metrics.json").symlink_to(tmp_path / "validation/000001/metrics.json")
    (tmp_path / "validation" / "000004").mkdir()
    os.mkfifo(tmp_path / "validation" / "000004" / "metrics.json")
    put(tmp_path / "validation", "000001 (copy)", (tmp_path / "validation/000001/metrics.json").read_bytes())
    (tmp_path / "validation" / "notes").mkdir()
    (tmp_path / "validation" / "file").write_text("not a folder")
    assert list(read_history(tmp_path / "validation")) == [1]
    for name in ("000002", "000003", "000004", "000001 (copy)"):
        assert str(tmp_path / "validation" / name / "metrics.json") in caplog.text
    assert "notes" not in caplog.text and "rebuild" not in caplog.text
