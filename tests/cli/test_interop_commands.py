"""The commands import and export, and a training run on what was imported."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.kohya_files import dialect_a, latents_name, text_of, write_npz
from peft import LoraConfig

from latentcache.config import Config
from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.integrations.diffusers import save_lora
from latentcache.interop.formats import kohya
from latentcache.loading.cache import LatentCache
from latentcache.models.tiny import tiny_denoiser
from latentcache.precache.run import run_precache


@pytest.fixture
def foreign(photos: Path) -> Path:
    """kohya's files next to two of the photos."""
    for seed, (stem, width, height, bucket) in enumerate([("a", 144, 80, (128, 64)), ("c", 80, 144, (64, 128))]):
        write_npz(photos / latents_name(stem, width, height), dialect_a(seed, width, height, bucket))
        write_npz(photos / f"{stem}_te_outputs.npz", text_of(seed))
    return photos


@pytest.fixture
def exported(make_config: Any, photos: Path, tmp_path: Path, run_ok: Any) -> Config:
    """A config whose cache holds means of latents and long texts, and kohya's files of it next to the photos."""
    (photos / "a.txt").write_text("a red house\n")  # kohya has one caption for an image
    (photos / "b.txt").write_text("long words " * 60)
    buckets = {"rule": "kohya", "resolution": 96, "step": 32, "min_side": 32}
    changes = {"encode.image_output": "mean", "encode.max_length": 225}
    small = {"validation.height": 64, "validation.width": 64, "validation.num_inference_steps": 1}
    dataset = {"datasets.0.flip": True, "datasets.0.buckets": buckets, "validation.path": tmp_path / "validation"}
    config: Config = make_config(**changes, **small, **dataset)
    run_precache(config)
    report = run_ok("export", "kohya", photos, "--cache", config.cache.path)
    assert (report["num_images"], report["num_texts"], report["num_files"]) == (10, 5, 10)
    return config


def config_file(config: Config, file: Path, **cache: Any) -> Path:
    """The config as a file, its cache elsewhere."""
    value = json.loads(config.model_dump_json())
    value["cache"] |= {"path": str(file.parent / "imported"), **cache}
    file.write_text(json.dumps(value))
    return file


def test_import(foreign, tmp_path, make_config, run, run_ok):
    (foreign / latents_name("d", 80, 144)).write_bytes(b"PK")
    cache = tmp_path / "imported"
    report = run_ok("import", "kohya", foreign, "--cache", cache)
    assert (report["name"], report["num_samples"], report["cache"]) == ("kohya", 2, str(cache))
    assert [refusal["reason"] for refusal in report["refused"]] == ["corrupt"]
    code, out, _ = run("import", "kohya", foreign, "--cache.path", cache, "--name", "again", "--strict")
    assert code == 1 and "2 samples from kohya as again" in out and "d_0080x0144_sdxl.npz: corrupt" in out
    status = run_ok("status", cache)
    named = [(each["name"], each["imported_from"], each["num_unverified"]) for each in status["manifests"]]
    assert named == [("again", "kohya", 2), ("kohya", "kohya", 2)]
    assert status["store"]["num_entries"] == {"image": 2, "text": 2}, "nothing is stored twice"

    # Name, role, repeats and weight are those of the config's dataset.
    config = make_config(**{"datasets.0.role": "validation", "datasets.0.repeats": 3, "datasets.0.loss_weight": 0.5})
    file = config_file(config, tmp_path / "config.json")
    for flags, *expected in ([], "photos", "validation", 3, 0.5), (["--name", "other"], "other", "train", 1, 1.0):
        run_ok("import", "kohya", foreign, "--config", file, *flags)
        found = ManifestFolder(tmp_path / "imported" / "manifests").read(expected[0])
        assert found is not None and [found.name, found.role, found.repeats, found.loss_weight] == expected


def test_export_needs_a_dataset_and_trust(foreign, tmp_path, run, run_ok):
    cache, out = tmp_path / "imported", tmp_path / "out"
    for name in ("one", "two"):
        run("import", "kohya", foreign, "--cache", cache, "--name", name)
    code, _, err = run("import", "kohya", foreign, "--cache", cache, "--name", "../x")
    assert code == 2 and "the name is '../x'" in err
    code, _, err = run("export", "kohya", out, "--cache", cache)
    assert code == 2 and "Give --manifest; the cache has: one, two" in err
    for name, message in (("none", "no manifest 'none'"), ("one", "is unverified")):
        code, _, err = run("export", "kohya", out, "--cache", cache, "--manifest", name)
        assert code == 2 and message in err and not out.exists()
    assert run_ok("export", "kohya", out, "--cache", cache, "--manifest", "one", "--unverified")["num_images"] == 2
    code, out_text, _ = run("export", "kohya", out, "--cache", cache, "--manifest", "two", "--unverified", "--strict")
    assert code == 1 and "skipped   4" in out_text


def test_export_skips_what_lies_in_other_buckets_than_those_of_the_training(config, tmp_path, run, run_ok):
    """A released kohya looks at no shape: its training ends when a batch has two."""
    flags = ("export", "kohya", tmp_path / "out", "--cache", config.cache.path, "--buckets")
    training = "resolution=128, step=32, min_side=32"
    report = run_ok(*flags, training)
    assert (report["num_images"], report["num_texts"], report["num_other_buckets"]) == (0, 5, 5)
    assert [each["reason"] for each in report["skipped"]] == ["other-bucket"] * 5
    assert report["buckets"]["resolution"] == 128 and report["buckets"]["upscale"] is True
    # The newer names have the resolution, which kohya looks for: it encodes such images again.
    report = run_ok(*flags, training, "--with-resolution", "--overwrite")
    assert (report["num_images"], report["num_other_buckets"], report["skipped"]) == (5, 5, [])
    assert report["notes"][kohya.NOTE_ENCODED_AGAIN] == 5
    code, _, err = run(*flags, "area=9216")
    assert code == 2 and "--buckets" in err and "area is not a setting of rule kohya" in err


def test_an_export_that_lacks_entries_is_no_success(config, photos, tmp_path, run_json, run_ok):
    """A refused sample is the user's to judge; an entry that cannot be read is damage."""
    (photos / "broken.png").write_bytes(b"\x89PNG")
    run_precache(config)
    flags = ("--cache", config.cache.path)
    report = run_ok("export", "webdataset", tmp_path / "refused", *flags)
    assert [each["sample_id"] for each in report["skipped"]] == ["broken.png"]
    assert run_json("export", "webdataset", tmp_path / "strict", *flags, "--strict")[0] == 1
    with LatentCache(config.cache.path) as cache:
        cache.store.remove([cache.manifest("photos").rows["a.png"].images[0].key])
    code, report = run_json("export", "webdataset", tmp_path / "lacking", *flags)
    assert code == 1 and report["num_unread"] == 1 and len(report["skipped"]) == 2


def test_verify_says_how_entries_differ(exported, photos, tmp_path, run_json):
    file = config_file(exported, tmp_path / "config.json")
    flags = ("import", "kohya", photos, "--config", file, "--no-scale-check", "--verify", "all")
    code, report = run_json(*flags)
    # d.png has no caption file: the caption of its embeddings is not known.
    assert code == 1 and [refusal["sample_id"] for refusal in report["unequal"]] == ["d.png"]
    # Exported means are imported as draws, which kohya's are: these lie on the mean.
    equal = {kind: found["num_equal"] for kind, found in report["differences"].items()}
    assert equal == {"image": 10, "text": 4} and report["differences"]["image"]["largest_share"] <= 1
    found = ManifestFolder(tmp_path / "imported" / "manifests").read("photos")
    assert found is not None and found.common["text_encoding"] == {"max_length": 225}
    with np.load(photos / "b_te_outputs.npz") as arrays:
        assert arrays["hidden_state1"].shape[0] == arrays["hidden_state2"].shape[0] == 227


def test_training_on_an_import_is_as_on_what_was_exported(script, exported, photos, tmp_path, run, monkeypatch, capsys):
    """Prompts of its validation are encoded next to the import, and its LoRA is validated under its own step."""
    imported = tmp_path / "imported"
    assert run("import", "kohya", photos, "--cache", imported, "--name", "photos", "--no-scale-check")[0] == 0

    def train(name: str, path: Path, unverified: bool) -> tuple[int, dict[str, Any], str]:
        file = config_file(exported, tmp_path / f"{name}.json", path=str(path), unverified=unverified)
        flags = ["--steps", "2", "--batch_size", "2", "--rank", "2", "--device", "cpu", "--json", "--out"]
        monkeypatch.setattr(sys, "argv", ["train_lora", str(file), *flags, str(tmp_path / name)])
        code = script.main()
        captured = capsys.readouterr()
        return code, json.loads(captured.out), captured.err

    code, result, err = train("careful", imported, False)
    assert code == 2 and "was imported from kohya and is unverified" in err and "SampleError" in result["type"]
    code, here, _ = train("trusting", imported, True)
    assert code == 0 and Path(here["validations"][0]["grid"]).exists()
    code, there, _ = train("origin", exported.cache.path, False)
    assert code == 0 and here["losses"] == there["losses"] and len(here["losses"]) == 2
    shutil.rmtree(tmp_path / "validation")
    code, out, err = run("validate", tmp_path / "trusting.json", "--lora", here["lora"], "--json")
    assert code == 0, err
    assert json.loads(out)["step"] == 2 and (tmp_path / "validation" / "000002").is_dir(), "as its file says"


def test_the_step_of_a_lora_is_never_guessed(exported, tmp_path, run_json, run_ok):
    """Results of other steps than those of their LoRA would make a curve that is wrong."""
    file = config_file(exported, tmp_path / "config.json", path=str(exported.cache.path))
    unet = tiny_denoiser()
    unet.add_adapter(LoraConfig(r=2, target_modules=["to_q"]))
    lora = save_lora(unet, tmp_path)
    for name, flags, step in (
        ("pytorch_lora_weights", (), None),
        ("checkpoint-70/pytorch_lora_weights", (), 70),
        ("mine-step00000030", (), 30),
        ("mine-step00000030", ("--step", "5"), 5),
        ("my-step7/best", (), None),  # its folder is that of a stage of the training
    ):
        named = tmp_path / f"named/{name}.safetensors"
        named.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(lora, named)
        code, found = run_json("validate", file, "--lora", named, *flags)
        if step is None:
            assert code == 2 and "give --step" in found["error"], name
        else:
            assert found["step"] == step, name
    assert {folder.name for folder in (tmp_path / "validation").iterdir()} == {"000005", "000030", "000070"}
    assert run_ok("validate", file)["step"] == 0, "the model's own denoiser is not trained"


def test_other_formats_take_their_own_options(make_config, photos, tmp_path, run, run_ok):
    run_precache(config := make_config(**{"encode.image_output": "mean"}))
    export, flags = ("export", "webdataset", tmp_path / "shards"), ("--cache", config.cache.path)
    report = run_ok(*export, *flags, "--shard-bytes", "64KiB", "--dtype", "float16")
    assert (report["num_images"], report["num_texts"], report["skipped"]) == (5, 6, [])
    code, _, err = run(*export, *flags)
    assert code == 2 and "is not empty. Shards are written to a new folder" in err
    code, _, err = run("export", "musubi", tmp_path / "x", *flags)
    assert code == 2 and "musubi files of the family sdxl are not supported" in err
    # SimpleTuner's names are hashes of the image's name and of the caption: `printf %s c | sha256sum`.
    latents = "2e7d2c03a9507ae265ecf5b5356885a53393a2029d241394997265a1a25aefc6.pt"
    (tmp_path / "vae").mkdir()
    torch.save(torch.randn(4, 18, 10), tmp_path / "vae" / latents)
    flags = ("--images", photos, "--cache", tmp_path / "imported")
    report = run_ok("import", "simpletuner", tmp_path / "vae", *flags)
    assert (report["num_images"], report["refused"]) == (1, [])
    assert [each["sample_id"] for each in report["incomplete"]] == ["c.png"], "it has no text"
