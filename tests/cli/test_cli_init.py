"""`latentcache init`: the config that it writes is one, and it says what is in the folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.photo_files import write_photo

from latentcache.config_file import load_config

RunJson = Callable[..., tuple[int, Any]]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three photos in the working directory's `photos`: a caption, one that is too long, none; and an empty file."""
    monkeypatch.chdir(tmp_path)
    photos = tmp_path / "photos"
    write_photo(photos / "a.png", 1, (512, 512)).with_suffix(".txt").write_text("a red house")
    write_photo(photos / "b.png", 2, (512, 640)).with_suffix(".txt").write_text("tag, " * 40)
    write_photo(photos / "sub" / "c.png", 3, (640, 512))
    (photos / "bad.png").write_bytes(b"")
    return photos


def test_a_plain_folder(folder: Path, run: Run, run_json: RunJson) -> None:
    code, out, _ = run("init", "photos")
    assert code == 0 and "photos: 4 images in photos" in out and "sub/c.png" in out and "bad.png (empty)" in out
    [dataset] = load_config("photos.yaml").datasets
    assert (dataset.name, dataset.repeats, dataset.source.path) == ("photos", 1, Path("photos"))
    code, told = run_json("init", folder, "other.yml")
    [found] = told["datasets"].values()
    assert code == 0 and told["config"] == "other.yml" and not told["left_out"] and found["num_samples"] == 4
    assert found["buckets"] == {"1024x1024": 1, "896x1152": 1, "1152x896": 1}
    assert found["refused"] == {"bad.png": "empty"}
    assert found["without_caption"] == ["bad.png", "sub/c.png"] and found["cut_captions"] == ["b.png"]
    code, report = run_json("precache", "photos.yaml", "--model.path", "tiny", "--encode.device", "cpu", "--dry-run")
    assert code == 0 and report["num_samples"] == 4 and report["num_refused"] == 1


def test_captions_that_are_easily_lost(folder: Path, run: Run) -> None:
    """Captions in files of another suffix, and a caption whose image was renamed."""
    for name in ("a", "b"):
        (folder / f"{name}.txt").rename(folder / f"{name}.caption")
    (folder / "sub" / "was c.caption").write_text("a photo")
    (folder / "readme.txt").write_text("no caption")
    code, out, _ = run("init", "photos")
    assert code == 0 and "a caption without an image: was one renamed? (1): sub/was c.caption" in out
    assert load_config("photos.yaml").datasets[0].source.caption_extension == ".caption"


@pytest.mark.parametrize("trainer", ["kohya", "onetrainer"])
def test_folders_with_repeats_are_datasets(folder: Path, run: Run, run_json: RunJson, trainer: str) -> None:
    for name in ("10_cats", "5_cats", "3_кот", "dogs"):
        shutil.copytree(folder, folder.parent / "set" / name)
    code, told = run_json("init", "set", "--for", trainer)
    assert code == 0 and len(told["left_out"]) == 4 and told["left_out"][0] == "dogs/a.png"
    datasets = {dataset.name: dataset for dataset in load_config("set.yaml").datasets}
    assert {name: dataset.repeats for name, dataset in datasets.items()} == {"cats": 10, "photos": 3, "cats-3": 5}
    assert datasets["photos"].source.path == Path("set/3_кот")
    assert {dataset.buckets.rule for dataset in datasets.values()} == {trainer}
    exports = [step for step in told["next"] if step.startswith("latentcache export kohya set/10_cats ")]
    assert len(exports) == (trainer == "kohya")
    assert "move them into a folder such as 1_rest" in run("init", "set", "again.yaml")[1]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such names")
@pytest.mark.parametrize("name", [r"it's: C:\a #1, {b}", "two\nlines", "a\udcffb"])
def test_odd_names_of_folders_are_quoted(folder: Path, run: Run, name: str) -> None:
    shutil.move(folder, folder.parent / name)
    assert run("init", folder.parent / name, "run.yaml")[0] == 0
    assert load_config("run.yaml").datasets[0].source.path == folder.parent / name


def test_what_is_not_done(folder: Path, run: Run) -> None:
    (folder.parent / "notes").mkdir()
    (folder.parent / "notes" / "a.txt").write_text("a caption without an image")
    Path("photos.yaml").write_text("mine")
    for command, message in (
        ("init notes", "notes: holds no images"),
        ("init nowhere", "No such file"),
        ("init photos", "photos.yaml: exists, and is left as it is"),
        ("init photos photos.toml", "does not end in .yaml"),
        ("precache photos", "photos: is a folder, not a config; `latentcache init photos` writes one"),
    ):
        code, _, err = run(*command.split())
        assert code == 2 and message in err, command
    assert Path("photos.yaml").read_text() == "mine"
    assert {path.name for path in folder.parent.iterdir()} == {"notes", "photos", "photos.yaml"}
