"""metrics.json: what is written is what is read, and a file that does not fit is named with its first wrong field."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from helpers.report_samples import SETTINGS, losses, report

from latentcache.errors import MetricsError
from latentcache.utils.json_document import to_bytes
from latentcache.validation.metrics import LossReport, read_history, read_losses
from latentcache.validation.results import ValidationReport


def equal(found: LossReport | None, expected: LossReport) -> bool:
    """Equal, where NaN equals NaN; one that was read has its step too."""
    return found is not None and repr(LossReport(**found.model_dump(exclude={"step"}))) == repr(expected)


def write(report: ValidationReport, folder: Path) -> Path:
    """The part of `write_results` that is read back."""
    return put(folder, f"{report.step:06d}", to_bytes(report.to_json()))


def put(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name / "metrics.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    return path


def test_steps_come_back_as_they_were_measured_in_order(tmp_path: Path) -> None:
    steps = (2_000_000, 0, 500, 10_000)
    for step in steps:
        write(report(step, num_images=0, nan=step == 500, notes=["of x\udcff.png"]), tmp_path)
    history = read_history(tmp_path)
    assert list(history) == sorted(steps)
    for step, loss in history.items():
        assert equal(loss, losses(step, nan=step == 500))
    assert math.isnan(history[500].loss.mean)
    assert read_losses(write(ValidationReport(step=6), tmp_path)) is None


def test_fields_and_settings_of_a_later_version(tmp_path: Path) -> None:
    document = report(3).to_json() | {"added_later": 1}
    document["measurement_settings"] |= {"min_timestep": 20}
    document["loss_by_timestep"][0]["median"] = 0.1
    found = read_losses(put(tmp_path, "000003", to_bytes(document)))
    assert found is not None and found.by_timestep == losses(3).by_timestep
    assert found.measurement_settings != SETTINGS, "another setting may give other losses"
    assert list(SETTINGS.differences(found.measurement_settings)) == ["min_timestep is None in one and 20 in the other"]


GOOD = report(5, num_images=1).to_json()
BIN = GOOD["loss_by_timestep"][0]


def changed(**fields: Any) -> bytes:
    return to_bytes(GOOD | fields)


DAMAGED: list[tuple[bytes, str | None, str]] = [
    (to_bytes(GOOD)[:-20], None, "line"),
    (b"[" * 100_000, None, "recursion"),
    (b'{"step": 5}', "loss", "Field required"),
    (changed(loss_by_timestep=[BIN | {"first": 500}]), "loss_by_timestep.0", "first is 500, which is not below end"),
    (changed(loss_by_sample={"photos": {"a.png": "0"}}), "loss_by_sample.photos.a.png", r"valid number \(met: '0'\)"),
]


@pytest.mark.parametrize(("content", "field", "message"), DAMAGED, ids=[f"{n}-{d[1]}" for n, d in enumerate(DAMAGED)])
def test_a_damaged_or_foreign_file_is_named_with_its_field_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes, field: str | None, message: str
) -> None:
    write(report(1, num_images=0), tmp_path)
    path = put(tmp_path, "000005", content)
    with pytest.raises(MetricsError, match=message) as caught:
        read_losses(path)
    assert caught.value.path == str(path) and caught.value.field == field
    assert list(read_history(tmp_path)) == [1]
    assert str(path) in caplog.text and "left out" in caplog.text
    assert path.read_bytes() == content
