"""The losses of earlier steps: read in order, and never trusted blindly."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
from report_samples import FOOTING, losses, measured, report

from latentcache.utils.json_document import to_bytes
from latentcache.validation.history import MeasuredStep, read_history, same_footing
from latentcache.validation.validation_report import ValidationReport


def equal(found: MeasuredStep, expected: MeasuredStep) -> bool:
    """Equal, where NaN equals NaN: their documents are."""
    return repr(found) == repr(expected)


def write(report: ValidationReport, folder: Path) -> None:
    """The part of `write_results` that a history reads."""
    put(folder, f"{report.step:06d}", to_bytes(report.to_json()))


def put(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name / "metrics.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    return path


def test_steps_come_back_as_they_were_measured_in_order(tmp_path: Path) -> None:
    steps = (2_000_000, 0, 500, 10_000)
    for step in steps:
        write(report(step, num_images=0, nan=step == 500), tmp_path)
    found = read_history(tmp_path)
    assert [one.step for one in found] == sorted(steps)
    for one in found:
        assert equal(one, measured(one.step, nan=one.step == 500))
    assert math.isnan(found[1].loss.mean)


def test_a_folder_that_is_not_there_has_no_history(tmp_path: Path) -> None:
    assert read_history(tmp_path / "none") == ()


def test_a_step_without_a_loss_is_not_in_the_history(tmp_path: Path) -> None:
    write(replace(report(7), loss=None), tmp_path)
    assert read_history(tmp_path) == ()


good = report(5, num_images=0).to_json()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        to_bytes(good)[:-20],
        b"\xff\xfe nonsense",
        b"[" * 100_000,
        b"[1, 2]",
        b'{"step": 5}',
        to_bytes(good | {"step": "5"}),
        to_bytes(good | {"step": -5}),
        to_bytes(good | {"step": 6}),
        to_bytes(good | {"loss": "low"}),
        to_bytes(good | {"loss_by_timestep": [{"first": 0}]}),
        to_bytes(good | {"loss_by_timestep": None}),
        to_bytes(good | {"footing": [1]}),
    ],
)
def test_a_damaged_or_foreign_file_is_logged_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    write(report(1, num_images=0), tmp_path)
    path = put(tmp_path, "000005", content)
    assert [one.step for one in read_history(tmp_path)] == [1]
    assert str(path) in caplog.text and "left out" in caplog.text
    read_history(tmp_path)
    assert path.read_bytes() == content


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
    assert [one.step for one in read_history(tmp_path / "validation")] == [1]
    for name in ("000002", "000003", "000004", "000001 (copy)"):
        assert str(tmp_path / "validation" / name / "metrics.json") in caplog.text
    assert "notes" not in caplog.text and "rebuild" not in caplog.text


def test_only_steps_on_one_footing_belong_together(tmp_path: Path) -> None:
    footing = FOOTING | {"sizes": (1, 2), "shift": math.nan}
    for step in (1, 2):
        write(replace(report(step), loss=losses(step, footing=footing), images=()), tmp_path)
    write(report(3, num_images=0), tmp_path)
    same, others = same_footing(read_history(tmp_path), footing)
    assert [one.step for one in same] == [1, 2] and [one.step for one in others] == [3]
    assert same[0].footing == json.loads(to_bytes(footing))
