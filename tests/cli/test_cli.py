"""The command line: one JSON document on stdout, everything else on stderr, honest exit codes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.photo_files import write_photo

import latentcache
import latentcache.precache.run

ROOT = Path(__file__).parents[2]


@pytest.fixture
def config_file(tmp_path: Path, photos: Path) -> Path:
    path = tmp_path / "run.yaml"
    settings = {
        "cache": {"path": str(tmp_path / "cache")},
        "datasets": [
            {
                "name": "photos",
                "source": {"path": str(photos)},
                "buckets": {"area": 9216, "step": 32},
                "images": {"min_side": 8},
            }
        ],
        "model": {"path": "tiny"},
        "encode": {"device": "cpu"},
    }
    path.write_text(yaml.safe_dump(settings))
    return path


def test_precache_status_explain_show(config_file: Path, run: Any, run_json: Any, photos: Path) -> None:
    code, report = run_json("precache", config_file)
    assert code == 0 and report["num_encoded"] == report["num_misses"] == 10
    code, report = run_json("precache", config_file, "--dry-run")
    assert code == 0 and report["dry_run"] and report["num_hits"] == 10

    code, status = run_json("status", config_file)
    assert code == 0 and status["store"]["num_entries"] == {"text": 5, "image": 5} and status["num_unused"] == 0
    assert [m["role"] for m in status["manifests"]] == ["train", "prompts"]

    code, found = run_json("explain", "b.png", config_file)
    assert code == 0 and [e["status"] for e in found["datasets"][0]["entries"]] == ["hit", "hit"]
    (photos / "b.txt").write_text("a green car")
    code, found = run_json("explain", "b.png", config_file)
    entries = found["datasets"][0]["entries"]
    assert [(e["kind"], e["status"], e["reason"]) for e in entries] == [
        ("image", "hit", None),
        ("text", "miss", "caption changed"),
    ]
    code, out, _ = run("explain", "b.png", config_file)
    assert code == 0 and "miss: caption changed" in out and "'a green car'" in out

    code, shown = run_json("show", "a.png", config_file)
    assert code == 0 and [e["kind"] for e in shown["datasets"][0]["entries"]] == ["image", "text", "text"]
    key = shown["datasets"][0]["entries"][0]["key"]
    code, entry = run_json("show", key[:12], config_file)
    assert code == 0 and entry["key"] == key and entry["fields"]["moments"]["shape"] == [8, 8, 16]
    assert entry["provenance"]["sample_id"] == "a.png"
    code, out, _ = run("show", "a.png", config_file.parent / "cache")
    assert code == 0 and "a.png in photos: " in out and key[:12] in out and "moments: float32 [8, 8, 16]" in out
    assert "'a red house'" in out and "tiny, cpu" in out
    code, out, _ = run("show", key, config_file.parent / "cache")
    assert code == 0 and out.startswith(key) and "a.png)" in out


def test_flags_override_every_scalar_setting(config_file: Path, run_json: Any, tmp_path: Path, photos: Path) -> None:
    photos.rename(tmp_path / "elsewhere")
    code, report = run_json(
        "precache", config_file, "--cache.path", tmp_path / "other", "--encode.batch_size", "3",
        "--encode.image-output=mean", "--datasets.photos.source.path", tmp_path / "elsewhere",
        "--datasets.0.flip", "true",
    )  # fmt: skip
    assert code == 0 and report["cache"]["path"] == str(tmp_path / "other") and report["num_encoded"] == 15
    assert "batch_size is 3" in report["placement"]["vae"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--encode.batch-sise", "1"], "Did you mean --encode.batch-size?"),
        (["--dryrun"], "Did you mean --dry-run?"),
        (["--encode.vae_dtype", "fp8"], "'float16'"),
        (["--datasets.cats.flip", "true"], "no such dataset; there are photos, 0"),
        (["--datasets.0.flop", "true"], "flop"),
        (["--model.path", "nowhere.safetensors"], "nowhere.safetensors"),
        (["--encode.device", "gpu"], "device 'gpu' is unknown"),
    ],
)
def test_what_cannot_run_exits_with_2_and_says_why(
    config_file: Path, run: Any, run_json: Any, arguments: list[str], message: str
) -> None:
    code, out, err = run("precache", config_file, *arguments)
    assert (code, out) == (2, "") and message in err
    code, document = run_json("precache", config_file, *arguments)
    assert code == 2 and message in document["error"]


def test_a_manifest_is_shown_as_lines(config_file: Path, run: Any, photos: Path) -> None:
    (photos / "bad.png").write_bytes(b"")
    run("precache", config_file)
    code, out, _ = run("show", "photos", config_file, "--json")
    rows = {row["sample_id"]: row for row in map(json.loads, out.splitlines())}
    assert code == 0 and "a.png" in rows and rows["bad.png"]["refusal"]["reason"] == "empty"
    shown = json.loads(run("show", "a.png", config_file, "--json")[1])["datasets"][0]
    assert rows["a.png"] == {name: shown[name] for name in rows["a.png"]}


def test_refusals_are_no_failure_unless_strict(config_file: Path, run: Any, run_json: Any, photos: Path) -> None:
    (photos / "bad.png").write_bytes(b"")
    for number in range(6):
        (photos / f"torn{number}.png").write_bytes((photos / "a.png").read_bytes()[:40])
    code, report = run_json("precache", config_file)
    assert code == 0 and report["num_refused"] == 7 and report["missing_captions"] == ["d.png"]
    code, out, _ = run("precache", "--config", config_file)
    assert code == 0 and f"{photos}/bad.png: empty" in out and "torn5.png" not in out and "and 1 more: " in out
    assert "1 sample has no caption, and trains on the empty one: d.png" in out
    assert out.splitlines()[-1].startswith("ready: 5 of 12 samples in ")
    assert "torn5.png" in run("precache", config_file, "--verbose")[1]
    assert [run_json(command, config_file)[0] for command in ("precache", "status")] == [0, 0]
    assert [run_json(command, config_file, "--strict")[0] for command in ("precache", "status")] == [1, 1]
    code, found = run_json("explain", "bad.png", config_file)
    assert code == 0 and found["datasets"][0]["refusal"]["reason"] == "empty"


def test_verify_finds_damage_and_precache_mends_it(config_file: Path, run: Any, run_json: Any, tmp_path: Path) -> None:
    run("precache", config_file)
    code, report = run_json("verify", config_file)
    assert code == 0 and report["ok"] and report["num_entries"] == 10
    pack = max(tmp_path.glob("cache/packs/*/*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(pack.read_bytes())
    data[-5] ^= 1
    pack.write_bytes(data)
    code, report = run_json("verify", config_file)
    assert code == 1 and len(report["damaged"]) == 1
    code, again = run_json("verify", config_file)
    assert code == 1 and not again["ok"] and again["known_damaged"] == report["damaged"]
    assert run_json("status", config_file)[0] == 1
    code, report = run_json("precache", config_file)
    assert code == 0 and report["misses_by_reason"] == {"damaged": 1}
    assert run_json("verify", config_file)[1]["ok"]
    code, out, _ = run("verify", config_file, "--subset", "1/2")
    assert code == 0 and "the cache is whole" in out
    assert run("verify", config_file, "--subset", "x")[0] == 2


def test_prune_and_compact(config_file: Path, run: Any, run_json: Any, photos: Path) -> None:
    run_json("precache", config_file)
    (photos / "a.png").unlink()
    run_json("precache", config_file)
    code, expected = run_json("prune", config_file, "--dry-run")
    assert code == 0 and expected["num_entries"] == 3 and expected["num_bytes"] > 0 and expected["dry_run"]
    assert run_json("status", config_file)[1]["num_unused"] == 3
    assert f"would drop {expected['num_entries']} entries (" in run("prune", config_file, "--dry-run")[1]
    code, done = run_json("prune", config_file)
    assert (done["num_entries"], done["num_bytes"]) == (expected["num_entries"], expected["num_bytes"])
    assert run_json("status", config_file)[1]["num_unused"] == 0
    before = run_json("status", config_file)[1]["store"]["file_bytes"]
    code, report = run_json("compact", config_file)
    assert code == 0 and report["file_bytes_after"] < before
    assert run_json("precache", config_file)[1]["num_misses"] == 0
    assert run_json("verify", config_file)[1]["ok"]


def test_prune_does_not_empty_a_cache_without_a_manifest(config_file: Path, run: Any, tmp_path: Path) -> None:
    run("precache", config_file)
    shutil.rmtree(tmp_path / "cache" / "manifests")
    code, _, err = run("prune", config_file)
    assert code == 2 and "has no manifest" in err


def test_prune_waits_for_a_run_that_was_stopped(
    config_file: Path, run: Any, run_json: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("precache", config_file)
    with monkeypatch.context() as patch:
        patch.setattr(latentcache.precache.run, "write_manifests", stopped)
        with pytest.raises(KeyboardInterrupt):
            latentcache.run_precache(latentcache.load_config(config_file, overrides={"cache": {"salt": "x"}}))
    code, error = run_json("prune", config_file)
    assert code == 2 and "not finished: photos (begun 20" in error["error"] and "--unfinished" in error["error"]
    assert run_json("precache", config_file, "--cache.salt", "x")[1]["num_hits"] == 10
    code, report = run_json("prune", config_file)
    assert code == 0 and report["num_entries"] == 9, "the old images and captions, but not the old empty prompt"


def stopped(*arguments: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_seals_and_the_next_run_goes_on(config_file: Path, run_json: Any, photos: Path, number: int) -> None:
    for index in range(20):
        write_photo(photos / f"more{index}.png", index, (300, 520))
    arguments = ["--json", "--datasets.0.buckets.area", "65536", "--datasets.0.buckets.step", "64"]
    process = subprocess.Popen(
        [sys.executable, "-m", "latentcache", "precache", str(config_file), *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert process.stderr is not None
    for line in process.stderr:
        if "encode captions" in line:
            break
    # Now it encodes images, and has a second or more to go.
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + number, err
    report = json.loads(out)
    assert report["interrupted"] and 0 < report["num_encoded"] < report["num_misses"] == 30
    code, after = run_json("precache", config_file, *arguments[1:])
    assert code == 0 and after["num_hits"] == report["num_encoded"]
    assert after["num_hits"] + after["num_encoded"] == 30


def test_rebuild_brings_everything_back(config_file: Path, run_json: Any, tmp_path: Path) -> None:
    run_json("precache", config_file)
    shutil.rmtree(tmp_path / "cache" / "index")
    code, report = run_json("rebuild", config_file)
    assert code == 0 and report["num_entries"] == 10 and report["unreadable"] == {}
    assert run_json("precache", config_file)[1]["num_hits"] == 10


def test_packs_that_somebody_removed_are_said_and_encoded_again(
    config_file: Path, run: Any, run_json: Any, tmp_path: Path
) -> None:
    run("precache", config_file)
    for pack in tmp_path.glob("cache/packs/*/*.safetensors"):
        pack.unlink()
    code, found = run_json("status", config_file)
    assert code == 1 and found["num_lost"] == 7  # five photos, and two prompts of the validation
    code, report = run_json("precache", config_file)
    assert code == 0 and report["num_encoded"] == 10
    code, found = run_json("status", config_file)
    assert code == 0 and found["num_lost"] == 0
