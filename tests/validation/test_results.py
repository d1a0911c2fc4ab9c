"""Results on disk: whole or not there, replaced whole, and never at the cost of earlier ones."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.report_samples import losses, report
from PIL import Image

from latentcache.errors import ReadOnlyError, StorageFullError, StoreError, UnsafeStoreError
from latentcache.utils import durable_files as files
from latentcache.validation.pictures import loss_plot
from latentcache.validation.results import ValidationReport, write_results

ALL = ["loss.png", "metrics.json", "sample-00.png", "sample-01.png", "samples.png"]


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_a_step_has_metrics_images_grid_and_plot(tmp_path: Path) -> None:
    found = report()
    paths = write_results(found, tmp_path / "deep" / "validation")
    assert paths.folder == tmp_path / "deep" / "validation" / "000100"
    assert names(paths.folder) == ALL
    assert json.loads(paths.metrics.read_text()) == found.to_json()
    for path, sample in zip(paths.images, found.images, strict=True):
        with Image.open(path) as image:
            assert image.tobytes() == sample.image.tobytes()
            assert image.text == {"prompt": sample.prompt, "negative_prompt": "ugly", "seed": str(sample.seed)}
    assert paths.grid is not None and paths.plot is not None
    for path in (paths.grid, paths.plot):
        with Image.open(path) as image:
            image.load()


def test_image_paths_of_the_document_lead_to_the_files(tmp_path: Path) -> None:
    paths = write_results(report(), tmp_path)
    document = report().to_json(paths.folder)
    assert [Path(found["path"]) for found in document["images"]] == list(paths.images)


def test_without_images_or_loss_there_is_no_grid_or_plot(tmp_path: Path) -> None:
    without_images = write_results(report(1, num_images=0), tmp_path)
    assert names(without_images.folder) == ["loss.png", "metrics.json"] and without_images.grid is None
    without_loss = write_results(replace(report(2), loss=None), tmp_path)
    assert names(without_loss.folder) == [name for name in ALL if name != "loss.png"] and without_loss.plot is None
    nothing = write_results(ValidationReport(step=1_234_567), tmp_path)
    assert nothing.folder.name == "1234567" and names(nothing.folder) == ["metrics.json"]


def test_a_second_validation_of_a_step_replaces_the_first_whole(tmp_path: Path) -> None:
    first = write_results(report(num_images=3), tmp_path)
    (first.folder / "my notes.txt").write_text("mine")
    (first.folder / ".metrics.json.0123abcd.tmp").write_text("of a writer that was killed")
    second = replace(report(num_images=1, nan=True), notes=("again",))
    write_results(second, tmp_path)
    assert names(first.folder) == ["loss.png", "metrics.json", "my notes.txt", "sample-00.png", "samples.png"]
    assert json.loads(first.metrics.read_text()) == second.to_json()
    write_results(ValidationReport(step=100), tmp_path)
    assert names(first.folder) == ["metrics.json", "my notes.txt"]


def test_metrics_is_the_first_to_go_and_the_last_to_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_results(report(), tmp_path)
    order: list[str] = []
    rename, unlink = os.replace, Path.unlink

    def renamed(source: Path, target: Path) -> None:
        assert not (tmp_path / "000100" / "metrics.json").exists()
        order.append(Path(target).name)
        rename(source, target)

    def unlinked(path: Path, missing_ok: bool = False) -> None:
        order.append(f"-{path.name}")
        unlink(path, missing_ok)

    monkeypatch.setattr(files.os, "replace", renamed)
    monkeypatch.setattr(Path, "unlink", unlinked)
    write_results(report(num_images=1), tmp_path)
    assert order[:2] == ["-metrics.json", "-sample-01.png"]
    assert sorted(order[2:-1]) == ["loss.png", "sample-00.png", "samples.png"] and order[-1] == "metrics.json"


@pytest.mark.parametrize(
    ("call", "number", "expected"),
    [
        ("write", 28, StorageFullError),
        ("fsync", 28, StorageFullError),
        ("write", 30, ReadOnlyError),
        ("fsync", 5, StoreError),
    ],
)
def test_a_refused_write_names_the_file_and_keeps_the_earlier_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, expected: type[StoreError]
) -> None:
    first = write_results(report(), tmp_path)
    before = {path.name: path.read_bytes() for path in first.folder.iterdir()}
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
    assert {path.name: path.read_bytes() for path in first.folder.iterdir()} == before


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StoreError, match="file"):
        write_results(report(), tmp_path / "file")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, os.strerror(13))

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(ReadOnlyError) as caught:
        write_results(report(), tmp_path / "readonly")
    assert "readonly" in caught.value.path


def test_a_link_in_place_of_a_step_is_refused(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "samples.png").write_text("of others")
    (tmp_path / "000100").symlink_to(elsewhere)
    with pytest.raises(UnsafeStoreError, match="000100"):
        write_results(report(), tmp_path)
    assert names(elsewhere) == ["samples.png"]


def test_the_plot_holds_the_steps_before(tmp_path: Path) -> None:
    write_results(report(1, num_images=0), tmp_path)
    second = write_results(report(2, num_images=0), tmp_path)
    assert second.plot is not None
    assert second.plot.read_bytes() == loss_plot(2, losses(2), {1: losses(1)})
    assert second.plot.read_bytes() != loss_plot(2, losses(2))
