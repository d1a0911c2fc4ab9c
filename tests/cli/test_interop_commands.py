"""The commands import and export, and a training run on what was imported."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.kohya_files import dialect_a, latents_name, text_of, write_npz
from peft import LoraConfig

from latentcache.config import Config
from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.integrations.diffusers import save_lora
from latentcache.models.tiny import tiny_denoiser
from latentcache.precache.run import run_precache

ROOT = Path(__file__).parents[2]


@pytest.fixture
def foreign(photos: Path) -> Path:
    """kohya's files next to two of the photos."""
    for seed, (stem, width, height, bucket) in enumerate([("a", 144, 80, (128, 64)), ("c", 80, 144, (64, 128))]):
        write_npz(photos / latents_name(stem, width, height), dialect_a(seed, width, height, bucket))
        write_npz(photos / f"{stem}_te_outputs.npz", text_of(seed))
    return photos


@pytest.fixture
def exported(make_config: Callable[..., Config], photos: Path, tmp_path: Path, run_json: Callable[..., Any]) -> Config:
    """A config whose cache holds the mean of the latents, and kohya's files of it next to the photos."""
    (photos / "a.txt").write_text("a red house\n")  # kohya has one caption for an image
    config = make_config(**{"encode.image_output": "mean", "datasets.0.flip": True})
    run_precache(config)
    code, report = run_json("export", photos, "--to", "kohya", "--cache", config.cache.path)
    assert code == 0 and (report["num_images"], report["num_texts"], report["num_files"]) == (10, 5, 10)
    return config


def config_file(config: Config, file: Path, **cache: Any) -> Path:
    """The config as a file, its cache elsewhere."""
    value = json.loads(config.model_dump_json())
    value["cache"] |= {"path": str(file.parent / "imported"), **cache}
    file.write_text(json.dumps(value))
    return file


def test_import_tells_what_it_did(
    foreign: Path, tmp_path: Path, run: Callable[..., Any], run_json: Callable[..., Any]
) -> None:
    (foreign / latents_name("d", 80, 144)).write_bytes(b"PK")
    cache = tmp_path / "imported"
    code, report = run_json("import", foreign, "--from", "kohya", "--cache", cache)
    assert code == 1 and report["name"] == "kohya" and report["cache"] == str(cache)
    assert (report["num_samples"], report["num_unverified"], report["num_verified"]) == (2, 4, 0)
    assert [refusal["reason"] for refusal in report["refused"]] == ["corrupt"]
    code, out, _ = run("import", foreign, "--from", "kohya", "--cache.path", cache, "--name", "again")
    assert code == 1 and "imported  2 samples from kohya as again" in out
    assert "d_0080x0144_sdxl.npz: corrupt" in out
    code, status = run_json("status", cache)
    assert [manifest["name"] for manifest in status["manifests"]] == ["again", "kohya"]
    assert {(manifest["imported_from"], manifest["num_unverified"]) for manifest in status["manifests"]} == {
        ("kohya", 2)
    }
    assert "imported from kohya, 2 unverified" in run("status", cache)[1]
    # One import's entries are another's: nothing is stored twice.
    assert status["store"]["num_entries"] == {"image": 2, "text": 2}


def test_import_takes_name_role_and_repeats_from_the_config(
    foreign: Path, tmp_path: Path, make_config: Callable[..., Config], run_json: Callable[..., Any]
) -> None:
    config = make_config(**{"datasets.0.role": "validation", "datasets.0.repeats": 3})
    file = config_file(config, tmp_path / "config.json")
    for flags, expected in [
        ((), ("photos", "validation", 3)),
        (("--name", "other"), ("other", "train", 1)),
        (("--name", "mine", "--role", "validation", "--repeats", "2"), ("mine", "validation", 2)),
    ]:
        code, _ = run_json("import", foreign, "--from", "kohya", "--config", file, *flags)
        assert code == 0
        found = ManifestFolder(tmp_path / "imported" / "manifests").read(expected[0])
        assert found is not None and (found.name, found.role, found.repeats) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--from", "nothing", "--cache", "x"), "--from is 'nothing'; use one of kohya, musubi, simpletuner"),
        (("--from", "kohya", "--trigger", "t", "--cache", "x"), "--trigger is no option of --from kohya"),
        (("--from", "simpletuner", "--cache", "x"), "--from simpletuner needs --images"),
        (("--from", "kohya"), "which cache? Give --cache DIR"),
        (("--from", "kohya", "--cache", "x", "--verify", "3"), "--verify encodes entries again, and needs --config"),
        (("--from", "kohya", "--cache", "x", "--name", "../x"), "the name is '../x'"),
        (("--from", "kohya", "--cache", "x", "--images", "none"), "does not exist"),
        (("--from", "kohya", "--cache", "x", "--repeats", "0"), "repeats is 0; it must be at least 1"),
        (("--from", "simpletuner", "--images", ".", "--captions", "none", "--cache", "x"), "--captions none"),
    ],
    ids=["format", "option", "needed", "cache", "config", "name", "images", "repeats", "captions"],
)
def test_what_cannot_be_imported_says_what_to_do(
    foreign: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run: Callable[..., Any],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, err = run("import", foreign, *arguments)
    assert code == 2 and message in err


@pytest.mark.parametrize("source", ["kohya", "ai-toolkit", "simpletuner"])
def test_a_folder_without_a_cache_is_an_error(
    photos: Path, tmp_path: Path, run: Callable[..., Any], run_json: Callable[..., Any], source: str
) -> None:
    flags = ("--images", photos) if source == "simpletuner" else ()
    code, _, err = run("import", photos, "--from", source, "--cache", tmp_path / "imported", *flags)
    assert code == 2 and f"nothing was imported: there are no files of {source}'s cache" in err
    assert run_json("status", tmp_path / "imported")[1]["manifests"] == []


@pytest.mark.parametrize("number", ["0", "-1", "x"])
def test_how_many_to_verify_is_a_number(
    foreign: Path, tmp_path: Path, config: Config, run: Callable[..., Any], number: str
) -> None:
    file = config_file(config, tmp_path / "config.json")
    code, _, err = run("import", foreign, "--from", "kohya", "--config", file, f"--verify={number}")
    assert code == 2 and f"--verify is {number!r}; give a number of entries, or all" in err


def test_another_scale_is_refused_with_both_numbers(foreign: Path, tmp_path: Path, run: Callable[..., Any]) -> None:
    for stem, width, height in (("a", 144, 80), ("c", 80, 144)):
        path = foreign / latents_name(stem, width, height)
        with np.load(path) as arrays:
            scaled = {name: arrays[name] * 0.13025 if name == "latents" else arrays[name] for name in arrays}
        write_npz(path, {name: array.astype("f4") if name == "latents" else array for name, array in scaled.items()})
    flags = ("import", foreign, "--from", "kohya", "--cache", tmp_path / "imported")
    code, _, err = run(*flags)
    assert code == 2 and re.search(r"standard deviation is (1|0\.9)", err) and "about 7.7" in err
    assert run(*flags, "--no-scale-check")[0] == 0


def test_export_needs_a_dataset_and_trust(
    foreign: Path, tmp_path: Path, run: Callable[..., Any], run_json: Callable[..., Any]
) -> None:
    cache, out = tmp_path / "imported", tmp_path / "out"
    for name in ("one", "two"):
        run("import", foreign, "--from", "kohya", "--cache", cache, "--name", name)
    code, _, err = run("export", out, "--to", "kohya", "--cache", cache)
    assert code == 2 and "Give --manifest; there are: one, two" in err
    code, _, err = run("export", out, "--to", "kohya", "--cache", cache, "--manifest", "one")
    assert code == 2 and "is unverified" in err
    code, report = run_json("export", out, "--to", "kohya", "--cache", cache, "--manifest", "one", "--unverified")
    assert code == 0 and report["num_images"] == 2
    with np.load(out / latents_name("a", 144, 80)) as after, np.load(foreign / latents_name("a", 144, 80)) as before:
        assert all(np.array_equal(before[name], after[name]) for name in before)
    code, out_text, _ = run("export", out, "--to", "kohya", "--cache", cache, "--manifest", "two", "--unverified")
    assert code == 1 and "skipped   4" in out_text
    code, _, err = run("export", out, "--to", "diffusion-pipe", "--cache", cache)
    assert code == 2 and "--to is 'diffusion-pipe'; use one of kohya" in err


def test_export_compares_with_the_buckets_of_the_training(
    config: Config, tmp_path: Path, run: Callable[..., Any], run_json: Callable[..., Any]
) -> None:
    flags = ("export", tmp_path / "out", "--to", "kohya", "--cache", config.cache.path, "--buckets")
    code, report = run_json(*flags, "resolution=128, step=32, min_side=32")
    assert code == 1 and (report["num_images"], report["num_texts"], report["num_other_buckets"]) == (0, 5, 5)
    assert report["buckets"]["resolution"] == 128 and report["buckets"]["upscale"] is True
    code, _, err = run(*flags, "area=9216")
    assert code == 2 and "--buckets" in err and "area is no setting of rule kohya" in err
    code, _, err = run(*flags, "resolution")
    assert code == 2 and "resolution: Input should be a valid integer" in err
    code, report = run_json("export", tmp_path / "st", "--to", "simpletuner", "--cache", config.cache.path)
    assert code == 0 and report["num_images"] == 5
    assert report["num_other_buckets"] == sum(
        count for note, count in report["notes"].items() if note.startswith("another bucket than SimpleTuner makes")
    )


def test_verify_makes_precache_hit(
    exported: Config, photos: Path, tmp_path: Path, run_json: Callable[..., Any], run: Callable[..., Any]
) -> None:
    file = config_file(exported, tmp_path / "config.json")
    flags = ("import", photos, "--from", "kohya", "--config", file, "--no-scale-check", "--verify", "all")
    code, report = run_json(*flags)
    # d.png has no caption file: the caption of its embeddings is not known.
    assert code == 1 and [refusal["sample_id"] for refusal in report["unequal"]] == ["d.png"]
    assert (report["num_verified"], report["num_unverified"]) == (14, 1)
    assert report["differences"]["image"]["num_equal"] == 10 and report["differences"]["image"]["largest_share"] <= 1
    # Exported means are imported as draws, which kohya's are: these lie on the mean.
    assert report["differences"]["image"]["largest_deviations"] < 0.01
    code, planned = run_json("precache", file, "--dry-run")
    assert code == 0 and planned["num_hits"] == 13  # 10 latents, 3 captions that differ
    assert run_json("precache", file)[0] == 0
    assert run("verify", tmp_path / "imported")[0] == 0


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import train_lora

    yield train_lora
    sys.modules.pop("train_lora")


def test_training_on_an_import_is_training_on_what_was_exported(
    script: Any,
    exported: Config,
    photos: Path,
    tmp_path: Path,
    run: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ("import", photos, "--from", "kohya", "--cache", tmp_path / "imported", "--name", "photos")
    assert run(*flags, "--no-scale-check")[0] == 0

    def train(file: Path, out: str) -> tuple[int, dict[str, Any], str]:
        flags = ["--steps", "3", "--batch_size", "2", "--rank", "2", "--device", "cpu", "--json", "--out"]
        monkeypatch.setattr(sys, "argv", ["train_lora", str(file), *flags, str(tmp_path / out)])
        code = script.main()
        captured = capsys.readouterr()
        return code, json.loads(captured.out), captured.err

    def file(name: str, path: Path, unverified: bool) -> Path:
        config = exported.model_copy(update={"validation": exported.validation.model_copy(update={"prompts": ()})})
        return config_file(config, tmp_path / name, path=str(path), unverified=unverified)

    code, result, err = train(file("careful.json", tmp_path / "imported", False), "careful")
    assert code == 2 and "was imported from kohya and is unverified" in err and "SampleError" in result["type"]
    code, here, _ = train(file("trusting.json", tmp_path / "imported", True), "trusting")
    assert code == 0 and len(here["losses"]) == 3
    code, there, _ = train(file("origin.json", exported.cache.path, False), "origin")
    assert code == 0 and here["losses"] == there["losses"]
    assert Path(here["lora"]).exists()


def test_validation_prompts_are_encoded_next_to_an_import(
    script: Any,
    exported: Config,
    photos: Path,
    tmp_path: Path,
    run: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cache = tmp_path / "imported"
    assert run("import", photos, "--from", "kohya", "--cache", cache, "--name", "photos", "--no-scale-check")[0] == 0
    small = {"height": 64, "width": 64, "num_inference_steps": 1, "path": tmp_path / "validation"}
    config = exported.model_copy(update={"validation": exported.validation.model_copy(update=small)})
    file = config_file(config, tmp_path / "config.json", path=str(cache), unverified=True)
    flags = ["--steps", "1", "--batch_size", "2", "--rank", "2", "--device", "cpu", "--json", "--out"]
    monkeypatch.setattr(sys, "argv", ["train_lora", str(file), *flags, str(tmp_path / "out")])
    assert script.main() == 0
    assert Path(json.loads(capsys.readouterr().out)["validations"][0]["grid"]).exists()
    shutil.rmtree(tmp_path / "validation")
    lora = tmp_path / "out" / "pytorch_lora_weights.safetensors"
    code, out, err = run("validate", file, "--lora", lora, "--json")
    assert code == 0, err
    assert json.loads(out)["step"] == 1 and (tmp_path / "validation" / "000001").is_dir(), "as its file says"


def test_the_step_of_a_lora_is_never_guessed(
    exported: Config, tmp_path: Path, run: Callable[..., Any], run_json: Callable[..., Any]
) -> None:
    """Results of other steps than those of their LoRA would make a curve that is wrong."""
    small = {"height": 64, "width": 64, "num_inference_steps": 1, "path": tmp_path / "validation"}
    config = exported.model_copy(update={"validation": exported.validation.model_copy(update=small)})
    file = config_file(config, tmp_path / "config.json", path=str(exported.cache.path))
    unet = tiny_denoiser()
    unet.add_adapter(LoraConfig(r=2, target_modules=["to_q"]))
    lora = save_lora(unet, tmp_path)
    code, _, err = run("validate", file, "--lora", lora)
    assert code == 2 and f"{lora}" in err and "give --step" in err
    assert not (tmp_path / "validation").exists()
    for name, step in (("checkpoint-70/pytorch_lora_weights", 70), ("mine-step00000030", 30)):
        named = tmp_path / f"{name}.safetensors"
        named.parent.mkdir(exist_ok=True)
        shutil.copy(lora, named)
        assert run_json("validate", file, "--lora", named)[1]["step"] == step
    assert run_json("validate", file, "--lora", named, "--step", "5")[1]["step"] == 5
    for name in ("step-3/final", "my-step7/best"):
        of_a_stage = tmp_path / f"{name}.safetensors"
        of_a_stage.parent.mkdir()
        shutil.copy(lora, of_a_stage)
        code, _, err = run("validate", file, "--lora", of_a_stage)
        assert code == 2 and "give --step" in err, "the folder is that of a stage of the training"
    assert run_json("validate", file)[1]["step"] == 0, "the model's own denoiser is not trained"


@pytest.mark.parametrize("name", ["webdataset", "mds"])
def test_shards_are_exported_imported_and_verified(
    make_config: Callable[..., Config],
    photos: Path,
    tmp_path: Path,
    run: Callable[..., Any],
    run_json: Callable[..., Any],
    name: str,
) -> None:
    config = make_config(**{"encode.image_output": "mean"})
    run_precache(config)
    export = ("export", tmp_path / "shards", "--to", name, "--cache", config.cache.path)
    code, report = run_json(*export, "--shard-bytes", "64KiB")
    assert code == 0 and (report["num_images"], report["num_texts"], report["skipped"]) == (5, 6, [])
    code, _, err = run(*export)
    assert code == 2 and "is not empty. Shards are written to a new folder" in err
    code, _, err = run("export", tmp_path / "shards/latentcache.json", *export[2:])
    assert code == 2 and "is no folder. Shards are written to a new one: name another" in err
    code, _, err = run("export", tmp_path / "x", "--to", name, "--cache", config.cache.path, "--dtype", "bfloat16")
    assert code == 2 and "numpy has no others" in err
    stated = json.loads((tmp_path / "shards/latentcache.json").read_text())["declaration"]
    assert len(stated["vae"]["weights"]) == 64 and stated["preparation"]["resample"] and not stated["scaled"]
    # The tiny VAE has another scale than SDXL's.
    file, flags = config_file(config, tmp_path / "config.json"), ("--from", name, "--no-scale-check")
    images = ("--images", photos, "--config", file, "--verify", "all")
    code, report = run_json("import", tmp_path / "shards", *flags, *images)
    assert code == 0 and (report["num_samples"], report["num_unverified"], report["num_verified"]) == (5, 0, 11)
    assert report["declared"]["vae"] == stated["vae"]
    (tmp_path / "shards/latentcache.json").unlink()
    code, _, err = run("import", tmp_path / "shards", *flags, "--cache", tmp_path / "other")
    assert code == 2 and "does not say what its latents are. State vae, scaled, " in err
    code, _, err = run("import", tmp_path / "none", *flags, "--cache", tmp_path / "other")
    assert code == 2 and "none: there is no such folder" in err
