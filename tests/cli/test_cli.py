"""The command line: one JSON document on stdout, everything else on stderr, and correct exit codes."""

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
from unittest.mock import Mock

import pytest
import torch
import yaml
from helpers.page_server import photo_cache
from helpers.photo_files import write_photo, write_photos
from helpers.runner_runs import validation_config
from helpers.serving import wait_until
from helpers.tiny_configs import tiny_config

import latentcache
import latentcache.precache.run
from latentcache.checkpoints.checkpoint import save_checkpoint
from latentcache.config_file import load_config
from latentcache.errors import ConfigError
from latentcache.models.tiny import tiny_denoiser
from latentcache.precache.run import run_precache
from latentcache.scaleout.ray import RayCluster, precache

ROOT = Path(__file__).parents[2]


@pytest.fixture
def config_file(tmp_path: Path, photos: Path) -> Path:
    return written(tmp_path)


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config whose cache is filled. Tests must not change it."""
    folder = tmp_path_factory.mktemp("cached")
    write_photos(folder / "photos")
    path = written(folder)
    run_precache(load_config(path))
    return path


def written(folder: Path) -> Path:
    """Write a config for the photos in this folder."""
    path, config = folder / "run.yaml", tiny_config(folder, validation={})
    path.write_text(yaml.safe_dump(json.loads(config.model_dump_json(exclude_defaults=True))))
    return path


def test_status_and_show_import_no_torch():
    """Importing torch takes longer than everything that they do."""
    code = "import sys; from latentcache.cli.app import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    golden = str(ROOT / "tests" / "golden" / "format2")
    for command in (["status", golden], ["show", "sub/b.png", golden], ["show", "golden", golden]):
        done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "0 False", done.stdout + done.stderr


def test_precache_status_explain_show(config_file, run, run_ok, photos):
    report = run_ok("precache", config_file)
    assert report["num_encoded"] == report["num_misses"] == 10
    report = run_ok("precache", config_file, "--dry-run")
    assert report["dry_run"] and report["num_hits"] == 10
    status = run_ok("status", config_file)
    assert status["store"]["num_entries"] == {"text": 5, "image": 5} and status["num_unused"] == 0
    assert [m["role"] for m in status["manifests"]] == ["train", "prompts"]
    (photos / "b.txt").write_text("a green car")
    found = [(e["kind"], e["reason"]) for e in run_ok("explain", "b.png", config_file)["datasets"][0]["entries"]]
    assert found == [("image", None), ("text", "caption changed")]
    out = run("explain", "b.png", config_file)[1]
    assert "miss: caption changed" in out and "'a green car'" in out
    entries = run_ok("show", "a.png", config_file)["datasets"][0]["entries"]
    assert [entry["kind"] for entry in entries] == ["image", "text", "text"]
    entry = run_ok("show", (key := entries[0]["key"])[:12], config_file)
    assert entry["key"] == key and entry["fields"]["moments"]["shape"] == [8, 8, 16]
    assert entry["provenance"]["sample_id"] == "a.png"
    out = run("show", "a.png", config_file.parent / "cache")[1]
    assert key[:12] in out and "moments: float32 [8, 8, 16]" in out and "'a red house'" in out
    assert run("show", key, config_file.parent / "cache")[1].startswith(key)


def test_the_cache_can_be_named_in_every_way(cached, run_ok, monkeypatch):
    cache = cached.parent / "cache"
    monkeypatch.setenv("HOME", str(cached.parent))
    for arguments in ([cache], [cached], ["--config", cached], ["--cache.path", cache], ["--cache.path=~/cache"]):
        assert run_ok("status", *arguments)["path"] == str(cache), arguments


def test_flags_override_every_scalar_setting(config_file, run_ok, tmp_path, photos):
    """Including those of control images and the mask, even if the file does not set them."""
    settings = yaml.safe_load(config_file.read_text())
    settings["datasets"][0]["control"] = [{"path": "nowhere"}, {"path": str(tmp_path / "second")}]
    config_file.write_text(yaml.safe_dump(settings))
    for name in ("first", "second", "masks"):
        shutil.copytree(photos, tmp_path / name)
    photos.rename(tmp_path / "elsewhere")
    flags = [
        "--cache.path", tmp_path / "other", "--encode.batch_size", "3", "--encode.image-output=mean",
        "--datasets.photos.source.path", tmp_path / "elsewhere", "--datasets.0.flip", "true",
        "--datasets.photos.control.0.path", tmp_path / "first", "--datasets.photos.mask.path", tmp_path / "masks",
        "--datasets.0.control.1.area", "4096",
    ]  # fmt: skip
    report = run_ok("precache", config_file, *flags)
    assert not report["refused"] and report["cache"]["path"] == str(tmp_path / "other")
    assert "batch_size is 3" in report["placement"]["vae"]
    # The first control image is the image itself.
    assert report["misses_by_reason"] == {"new": 15, "control 2: new": 10, "mask: new": 10}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("precache CONFIG --encode.batch-sise 1", "Did you mean --encode.batch-size?"),
        ("precache CONFIG --cache-dir x", "Did you mean --cache.path?"),
        ("precache CONFIG --encode.vae_dtype fp8", "'float16'"),
        ("precache CONFIG --cache x", "flags: cache: give settings by name, such as cache: {path: DIRECTORY}"),
        ("precache CONFIG --datasets.0.resolutions [256,512]", "give a list in the file: a flag cannot"),
        ("precache CONFIG --datasets.0.mask alpha --datasets.0.mask.path x", "exclude each other"),
        ("precache CONFIG --datasets.0.flop true", "datasets.0.flop: unknown setting; did you mean 'datasets.0.flip'"),
        # Reported before the model is loaded, which takes minutes.
        ("precache CONFIG --datasets.0.source.path nowhere --model.path no-model", "nowhere: does not exist"),
        ("precache", '"precache" parameter --config requires an argument'),
        ("explain a.pgn CONFIG", "did you mean 'a.png'?"),
        ("explain a.png", "latentcache explain SAMPLE CONFIG"),
        ("show nothing CONFIG", "is neither a sample_id of this cache nor a key"),
        (f"show {'0' * 64} CONFIG", "0 keys start with"),
        ("status none.yaml --cache.path x", "none.yaml: no such cache directory and no such config"),
        ("verify CONFIG --subset x", "--subset is 'x'"),
        ("import simpletuner . --cache x", "--images"),
        ("import kohya .", "which cache? Give its directory"),
        ("import kohya photos --cache x --verify 3", "--verify encodes entries again: give --config"),
        ("import kohya nowhere --cache x", "is not a folder"),
        (f"status {'x' * 300}", "File name too long"),
    ],
)
def test_what_cannot_run_exits_with_2_and_says_why(cached, run, run_json, command, message):
    words = [str(cached) if word == "CONFIG" else word for word in command.split()]
    code, out, err = run(*words)
    assert (code, out) == (2, "") and message in err
    code, document = run_json(*words)
    assert code == 2 and message in document["error"]


def test_refusals_are_no_failure_unless_strict(config_file, run, run_ok, photos):
    (photos / "bad.png").write_bytes(b"")
    Path(os.fsdecode(os.fsencode(photos) + b"/no\xfftext.png")).write_bytes(b"")
    for number in range(6):
        (photos / f"torn{number}.png").write_bytes((photos / "a.png").read_bytes()[:40])
    report = run_ok("precache", config_file)
    assert report["num_refused"] == 8 and report["missing_captions"] == ["d.png"]
    code, out, _ = run("precache", "--config", config_file)
    assert code == 0 and f"{photos}/bad.png: empty" in out and "torn5.png" not in out and "and 1 more: " in out
    assert "1 sample has no caption, and trains on the empty one: d.png" in out
    assert "ready: 5 of 13 samples in " in out and out.rstrip().endswith(f"Next: latentcache browse {config_file}")
    assert "torn5.png" in run("precache", config_file, "--verbose")[1]
    assert run_ok("status", config_file)
    assert [run(command, config_file, "--strict")[0] for command in ("precache", "status")] == [1, 1]
    assert "no\\udcfftext.png: " in run("show", "photos", config_file)[1], "its name, which is no text, is escaped"
    code, out, _ = run("show", "photos", config_file, "--json")
    rows = {row["sample_id"]: row for row in map(json.loads, out.splitlines())}
    assert code == 0 and rows["bad.png"]["refusal"]["reason"] == "empty"
    for sample_id, command in (("bad.png", "explain"), ("a.png", "show")):
        found = run_ok(command, sample_id, config_file)
        assert found["datasets"][0]["refusal"] == rows[sample_id]["refusal"]


def test_upkeep(config_file, run, run_json, run_ok, tmp_path, photos):
    run_ok("precache", config_file)
    shutil.rmtree(tmp_path / "cache" / "index")
    report = run_ok("rebuild", config_file)
    assert report["num_entries"] == 10 and report["unreadable"] == {}
    (photos / "a.png").unlink()
    run_ok("precache", config_file)
    expected = run_ok("prune", config_file, "--dry-run")
    assert expected["num_entries"] == run_ok("status", config_file)["num_unused"] == 3 and expected["num_bytes"] > 0
    assert "would drop 3 entries (" in run("prune", config_file, "--dry-run")[1]
    done = run_ok("prune", config_file)
    assert (done["num_entries"], done["num_bytes"]) == (expected["num_entries"], expected["num_bytes"])
    before = run_ok("status", config_file)
    assert before["num_unused"] == 0
    planned = run_ok("compact", config_file, "--dry-run")
    assert planned["file_bytes_before"] > planned["file_bytes_after"]
    assert run_ok("status", config_file)["store"] == before["store"]
    assert run("compact", config_file)[1].startswith("rewrote ")
    assert run_ok("status", config_file)["store"]["file_bytes"] < before["store"]["file_bytes"]
    assert run_ok("precache", config_file)["num_misses"] == 0

    report = run_ok("verify", config_file)
    assert report["ok"] and report["num_entries"] == 7
    pack = max(tmp_path.glob("cache/packs/*/*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(pack.read_bytes())
    data[-5] ^= 1
    pack.write_bytes(data)
    code, report = run_json("verify", config_file)
    assert code == 1 and len(report["damaged"]) == 1
    code, again = run_json("verify", config_file)
    assert code == 1 and not again["ok"] and again["known_damaged"] == report["damaged"]
    assert run_json("status", config_file)[0] == 1
    assert run_ok("precache", config_file)["misses_by_reason"] == {"damaged": 1}
    assert run_ok("verify", config_file)["ok"] and "no damage" in run("verify", config_file, "--subset", "1/2")[1]

    for each in tmp_path.glob("cache/packs/*/*.safetensors"):
        each.unlink()
    code, found = run_json("status", config_file)
    assert code == 1 and found["num_lost"] == 6, "four photos, and two prompts of the validation"
    assert run_ok("precache", config_file)["num_encoded"] == 7 and run_ok("status", config_file)


def test_prune_waits_for_a_run_that_was_stopped(config_file, run, run_ok, tmp_path, monkeypatch):
    run_ok("precache", config_file)
    with monkeypatch.context() as patch:
        patch.setattr(latentcache.precache.run, "write_manifests", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            latentcache.run_precache(latentcache.load_config(config_file, overrides={"cache": {"salt": "x"}}))
    code, _, err = run("prune", config_file)
    assert code == 2 and "not finished: photos (begun 20" in err and "--unfinished" in err
    assert run_ok("precache", config_file, "--cache.salt", "x")["num_hits"] == 10
    assert run_ok("prune", config_file)["num_entries"] == 9, "the old entries, but not the old empty prompt"
    note = tmp_path / "cache" / "manifests" / "photos.unfinished"
    for text in ("2026-01-01T00:00:00+00:00", "no time"):  # a damaged note advises to give the work up, too
        note.write_text(text)
        assert run("prune", config_file)[0] == 2
        assert run_ok("prune", config_file, "--unfinished")["num_entries"] == 0
    shutil.rmtree(tmp_path / "cache" / "manifests")
    code, _, err = run("prune", config_file)
    assert code == 2 and "has no manifest" in err, "it does not empty the cache"


def test_faults_of_ours_and_ctrl_c_have_codes_of_their_own(run, run_json, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("latentcache.remote.transfer.transfer", transfer := Mock(side_effect=ZeroDivisionError))
    code, document = run_json("push", tmp_path / "a", tmp_path / "b")
    assert code == 2 and document["type"] == "ZeroDivisionError" and "please report it" in caplog.text
    transfer.side_effect = KeyboardInterrupt
    code, _, err = run("push", tmp_path / "a", tmp_path / "b")
    assert code == 130 and "interrupted; entries that were sealed are safe" in err


def test_ctrl_c_seals_and_the_next_run_goes_on(config_file, run_ok, photos):
    for index in range(20):
        write_photo(photos / f"more{index}.png", index, (300, 520))
    arguments = ["--json", "--datasets.0.buckets.area", "65536", "--datasets.0.buckets.step", "64"]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "scripts" / "precache.py"), str(config_file), *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if "encode captions" in line:
            break
    # Now it encodes images, and has a second or more to go.
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGINT, err
    report = json.loads(out)  # logs and progress are elsewhere
    assert "stopping: " in err and "\r" not in err
    assert report["interrupted"] and 0 < report["num_encoded"] < report["num_misses"] == 30
    after = run_ok("precache", config_file, *arguments[1:])
    assert after["num_hits"] == report["num_encoded"] and after["num_hits"] + after["num_encoded"] == 30


# `latentcache init`: what it leaves, and what it names


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


def test_init_of_a_plain_folder(folder, run, run_ok):
    code, out, _ = run("init", "photos")
    assert code == 0 and "photos: 4 images in photos" in out and "sub/c.png" in out and "bad.png (empty)" in out
    [dataset] = load_config("photos.yaml").datasets
    assert (dataset.name, dataset.repeats, dataset.source.path) == ("photos", 1, Path("photos"))
    told = run_ok("init", folder, "other.yml")
    [found] = told["datasets"].values()
    assert told["config"] == "other.yml" and not told["left_out"] and found["num_samples"] == 4
    assert found["buckets"] == {"1024x1024": 1, "896x1152": 1, "1152x896": 1}
    assert found["refused"] == {"bad.png": "empty"}
    assert found["without_caption"] == ["bad.png", "sub/c.png"] and found["cut_captions"] == ["b.png"]
    report = run_ok("precache", "photos.yaml", "--model.path", "tiny", "--encode.device", "cpu", "--dry-run")
    assert report["num_samples"] == 4 and report["num_refused"] == 1
    # Captions that are easily lost: of another extension, and of an image that was renamed.
    for name in ("a", "b"):
        (folder / f"{name}.txt").rename(folder / f"{name}.caption")
    (folder / "sub" / "was c.caption").write_text("a photo")
    (folder / "readme.txt").write_text("no caption")
    code, out, _ = run("init", "photos", "third.yaml")
    assert code == 0 and "caption without an image: was the image renamed? (1): sub/was c.caption" in out
    assert load_config("third.yaml").datasets[0].source.caption_extension == ".caption"
    (folder.parent / "notes").mkdir()
    before = {path: path.read_text() for path in folder.parent.glob("*.y*ml")}
    for command, message in (
        ("init notes", "notes: holds no images"),
        ("init nowhere", "No such file"),
        ("init photos", "photos.yaml: already exists"),
        ("init photos photos.toml", "does not end in .yaml"),
        ("precache photos", "photos: is a folder, not a config; `latentcache init photos` writes one"),
    ):
        code, _, err = run(*command.split())
        assert code == 2 and message in err, command
    assert {path: path.read_text() for path in folder.parent.iterdir() if path.is_file()} == before


@pytest.mark.parametrize("trainer", ["kohya", "onetrainer"])
def test_folders_with_repeats_are_datasets(folder, run, run_ok, trainer):
    for name in ("10_cats", "5_cats", "3_кот", "dogs"):
        shutil.copytree(folder, folder.parent / "set" / name)
    told = run_ok("init", "set", "--for", trainer)
    assert len(told["left_out"]) == 4 and told["left_out"][0] == "dogs/a.png"
    datasets = {dataset.name: dataset for dataset in load_config("set.yaml").datasets}
    assert {name: dataset.repeats for name, dataset in datasets.items()} == {"cats": 10, "photos": 3, "cats-3": 5}
    assert datasets["photos"].source.path == Path("set/3_кот")
    assert {dataset.buckets.rule for dataset in datasets.values()} == {trainer}
    exports = [step for step in told["next"] if step.startswith("latentcache export kohya set/10_cats ")]
    assert len(exports) == (trainer == "kohya")
    assert "move them into a folder such as 1_rest" in run("init", "set", "again.yaml")[1]


def test_names_that_a_dataset_may_not_have(folder, run_ok):
    """They are reserved, or another folder has them, also among those that are made."""
    for name in ("1_a", "2_a-3", "3_a", "4_validation-prompts", "5_COM1"):
        shutil.copytree(folder, folder.parent / "set" / name)
    run_ok("init", "set")
    names = [dataset.name for dataset in load_config("set.yaml").datasets]
    assert names == ["a", "a-3", "a-4", "my-validation-prompts", "my-COM1"]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such names")
@pytest.mark.parametrize("name", [r"it's: C:\a #1, {b}", "two\nlines", "a\udcffb"])
def test_odd_names_of_folders_are_quoted(folder, run, name):
    shutil.move(folder, folder.parent / name)
    assert run("init", folder.parent / name, "run.yaml")[0] == 0
    assert load_config("run.yaml").datasets[0].source.path == folder.parent / name


# The page


def test_browse_opens_the_page_in_the_browser(tmp_path):
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


def test_two_checkpoints_are_compared_sample_by_sample(make_config, photos, run, run_ok, tmp_path, monkeypatch):
    """The model's own UNet, and another in a checkpoint. A tilde is the home folder, as in the config."""
    monkeypatch.setenv("HOME", str(tmp_path))
    run_precache(config := validation_config(make_config, photos))
    config_file = tmp_path / "config.json"
    config_file.write_text(config.model_dump_json())
    code, _, error = run("validate", config_file, "--unet", "nowhere")
    assert code == 2 and "no file or folder nowhere" in error and not (tmp_path / "validation").exists()
    other = tiny_denoiser()
    with torch.no_grad():
        other.conv_out.weight.mul_(0.5)
        other.conv_out.bias.mul_(0.5)
    save_checkpoint(tmp_path / "run", model=other, step=30, rng=False)
    first = run_ok("validate", config_file)
    assert first["num_samples"] == 5 and len(first["loss_by_timestep"]) == 2
    assert first["difference"] is None and [Path(image["path"]).is_file() for image in first["images"]] == [True]
    metrics = tmp_path / "validation/000000/metrics.json"
    assert json.loads(metrics.read_text())["loss"] == first["loss"]
    second = run_ok("validate", config_file, "--unet=~/run", "--against=~/validation/000000/metrics.json")
    assert second["step"] == 30 and second["difference"]["num"] == 5
    assert second["difference"]["mean"] == pytest.approx(second["loss"] - first["loss"], rel=1e-6)
    assert (tmp_path / "validation/000030/loss.png").is_file()


# A cluster, as far as none is needed


def test_an_address_where_nothing_listens_is_an_error_within_a_minute(make_config, tmp_path, run, monkeypatch):
    """Ray alone tries for a quarter of an hour."""
    config_file = tmp_path / "config.json"
    config_file.write_text(make_config().model_dump_json(exclude_defaults=True), encoding="utf-8")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    for address in ("127.0.0.1:1", "auto"):
        code, _, err = run("precache", config_file, "--ray", address)
        assert code == 2 and f"Ray ({address})" in err and "refused" in err


def test_what_cannot_run_on_a_cluster_is_refused(make_config, monkeypatch):
    with pytest.raises(ConfigError, match="leave out the number"):
        precache(make_config(**{"encode.device": "cuda:1"}))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="start one process"):
        precache(make_config())


def test_keys_are_planned_for_the_device_of_the_encoders(make_config, monkeypatch, tmp_path):
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
