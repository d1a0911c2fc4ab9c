"""`latentcache init`, `browse`, `validate` and `precache --ray`: what they leave, and what they name."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.page_server import photo_cache
from helpers.photo_files import write_photo
from helpers.runner_runs import validation_config
from helpers.serving import wait_until

from latentcache.checkpoints.checkpoint import save_checkpoint
from latentcache.config_file import load_config, parse_config
from latentcache.errors import ConfigError
from latentcache.models.tiny import tiny_denoiser
from latentcache.precache.run import run_precache
from latentcache.scaleout.ray import RayCluster, precache


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


def test_a_plain_folder(folder: Path, run: Any, run_json: Any) -> None:
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


def test_captions_that_are_easily_lost(folder: Path, run: Any) -> None:
    """Captions in files of another suffix, and a caption whose image was renamed."""
    for name in ("a", "b"):
        (folder / f"{name}.txt").rename(folder / f"{name}.caption")
    (folder / "sub" / "was c.caption").write_text("a photo")
    (folder / "readme.txt").write_text("no caption")
    code, out, _ = run("init", "photos")
    assert code == 0 and "a caption without an image: was one renamed? (1): sub/was c.caption" in out
    assert load_config("photos.yaml").datasets[0].source.caption_extension == ".caption"


@pytest.mark.parametrize("trainer", ["kohya", "onetrainer"])
def test_folders_with_repeats_are_datasets(folder: Path, run: Any, run_json: Any, trainer: str) -> None:
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


def test_names_that_a_dataset_may_not_have(folder: Path, run_json: Any) -> None:
    """They are reserved, or another folder has them, also among those that are made."""
    for name in ("1_a", "2_a-3", "3_a", "4_validation-prompts", "5_COM1"):
        shutil.copytree(folder, folder.parent / "set" / name)
    assert run_json("init", "set")[0] == 0
    names = [dataset.name for dataset in load_config("set.yaml").datasets]
    assert names == ["a", "a-3", "a-4", "my-validation-prompts", "my-COM1"]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such names")
@pytest.mark.parametrize("name", [r"it's: C:\a #1, {b}", "two\nlines", "a\udcffb"])
def test_odd_names_of_folders_are_quoted(folder: Path, run: Any, name: str) -> None:
    shutil.move(folder, folder.parent / name)
    assert run("init", folder.parent / name, "run.yaml")[0] == 0
    assert load_config("run.yaml").datasets[0].source.path == folder.parent / name


def test_what_is_not_done(folder: Path, run: Any) -> None:
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


# The page


def test_browse_opens_the_page_in_the_browser(tmp_path: Path) -> None:
    photo_cache(tmp_path, 3)
    opened = tmp_path / "opened"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}.part && mv {opened}.part {opened}\n', encoding="ascii")
    browser.chmod(0o755)
    command = [sys.executable, "-m", "latentcache", "browse", str(tmp_path / "cache"), "--json"]
    environment = {**os.environ, "BROWSER": f"{browser} %s"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"]
            assert url.startswith("http://127.0.0.1:")
            wait_until(opened.exists, 30)
            base, _, login = url.partition("/login?")
            argument = opened.read_text(encoding="ascii").strip()
            assert login not in argument, "every account can read the browser's command line"
            file = Path(urllib.request.url2pathname(urllib.parse.urlsplit(argument).path))
            assert f"url={url}" in file.read_text(encoding="ascii")
            assert os.name == "nt" or not file.parent.stat().st_mode & 0o077
            photo = f"{base}/photo?dataset=photos&id=000.png"
            for stranger in (photo, f"{base}/", f"{base}/v1/manifests/photos", f"{base}/login?token=wrong"):
                with pytest.raises(urllib.error.HTTPError, match=r"401|403"):  # any account of this machine
                    urllib.request.urlopen(stranger)
            browser_session = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
            with browser_session.open(url) as answer:
                assert answer.status == 200 and answer.url == f"{base}/", "the token leaves the address"
                assert login.removeprefix("token=") not in answer.read().decode()
            with browser_session.open(photo) as answer:
                assert answer.headers["Content-Type"] == "image/webp"
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 130
            assert not file.parent.exists(), "the token stays on no disk"
        finally:
            process.kill()


# A checkpoint


def test_two_checkpoints_are_compared_sample_by_sample(
    make_config: Any, photos: Path, run: Any, run_json: Any, tmp_path: Path
) -> None:
    """The model's own UNet, and another in a checkpoint; before that, input that is named and leaves nothing."""
    run_precache(config := validation_config(make_config, photos))
    config_file = tmp_path / "config.json"
    config_file.write_text(config.model_dump_json())
    for *arguments, message in (
        ("--unet", "nowhere", "no file or folder nowhere"),
        ("--dtype", "float8", "--dtype is 'float8'"),
        ("--validation.scheduler", "EulerScheduler", "did you mean"),
        ("--cache.store", "cpu", "cache.store is cpu"),
    ):
        code, _, error = run("validate", config_file, *arguments)
        assert code == 2 and message in error, (arguments, error)
    assert not (tmp_path / "validation").exists()
    other = tiny_denoiser()
    with torch.no_grad():
        other.conv_out.weight.mul_(0.5)
        other.conv_out.bias.mul_(0.5)
    checkpoint = save_checkpoint(tmp_path / "run", model=other, step=30, rng=False)
    code, first = run_json("validate", config_file)
    assert code == 0 and first["num_samples"] == 5 and len(first["loss_by_timestep"]) == 2
    assert first["difference"] is None and [Path(image["path"]).is_file() for image in first["images"]] == [True]
    metrics = tmp_path / "validation/000000/metrics.json"
    assert json.loads(metrics.read_text())["loss"] == first["loss"]
    code, second = run_json("validate", config_file, "--unet", checkpoint, "--against", metrics)
    assert code == 0 and second["step"] == 30
    assert second["difference"]["mean"] == pytest.approx(second["loss"] - first["loss"], rel=1e-6)
    assert second["difference"]["num"] == 5
    assert (tmp_path / "validation/000030/loss.png").is_file()


# A cluster, as far as none is needed


def test_an_address_where_nothing_listens_is_an_error_within_a_minute(
    make_config: Any, tmp_path: Path, run_json: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray alone tries for a quarter of an hour."""
    config_file = tmp_path / "config.json"
    config_file.write_text(make_config().model_dump_json(exclude_defaults=True), encoding="utf-8")
    code, error = run_json("precache", config_file, "--ray", "127.0.0.1:1")
    assert code == 2 and "127.0.0.1:1" in error["error"] and "refused" in error["error"]
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    code, error = run_json("precache", config_file, "--ray", "auto")
    assert code == 2 and "refused" in error["error"]


def test_what_cannot_run_on_a_cluster_is_refused(make_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no cache of a cluster"):
        precache(make_config(**{"cache.store": "cpu"}))
    with pytest.raises(ConfigError, match="give no number"):
        precache(make_config(**{"encode.device": "cuda:1"}))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="start one process"):
        precache(make_config())


def test_keys_are_planned_for_the_device_of_the_encoders(
    make_config: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A laptop plans for GPUs that it lacks: the text encoders compute in float16 there. Paths are absolute."""
    there = RayCluster(make_config(**{"encode.device": "cuda"}), "auto")
    assert (RayCluster(make_config(), "auto").device.type, there.device.type) == ("cpu", "cuda")
    assert RayCluster(make_config(**{"encode.device": "auto", "ray.num_gpus": 0}), "auto").device.type == "cpu"
    assert RayCluster(make_config(**{"encode.device": "auto", "ray.num_gpus": 0.5}), "auto").device.type != "cpu"
    report = run_precache(there.config, remote_encoders=there, dry_run=True)
    assert report.num_misses == 12 and report.placement["text"].startswith("cuda float16")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    given = make_config(**{"cache.path": "here/cache", "model.path": "model", "model.vae": "someone/a-hub-id"})
    config = RayCluster(given, "auto").config
    assert config.cache.path == tmp_path / "here/cache" and config.model.path == str(tmp_path / "model")
    assert config.model.vae == "someone/a-hub-id"


def test_the_example_of_a_cluster_is_valid() -> None:
    config = load_config(Path(__file__).parents[2] / "examples/cluster/cluster.yaml")
    assert parse_config(config.model_dump(mode="json")).ray.max_encoders == 16
