"""Each family has a config that shows every setting; its tiny model is cached, validated and trained with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.family_runs import SIDE, TEXTS, guidance_with_negative, write_samples
from helpers.tiny_models import tiny_folder, without_torchvision

from latentcache import LatentCache, validate
from latentcache.config import Config
from latentcache.config_file import known_settings, load_config
from latentcache.families import FAMILIES, family_named
from latentcache.models.lora import LORA_FILE
from latentcache.precache.run import run_precache
from latentcache.validation import results
from latentcache.validation.sample_images import MAX_FRAMES

CONFIGS = Path(__file__).parent.parent.parent / "configs"
ALL = pytest.mark.parametrize("name", FAMILIES)
TRAINED = ("sdxl", "flux", "wan-i2v", "anima-states", "qwen-image-21-edit", "ideogram4-projected")
"""Families whose training differs in kind: noise or velocity, clips, a conditioner, control images, layers left out."""


def shown(path: Path) -> set[str]:
    """The settings of a config file by dotted name; items of a list are `N`, and the first one counts."""

    def names(value: object, prefix: str) -> set[str]:
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return {prefix} | names(value[0], f"{prefix}.N")
        if not isinstance(value, dict):
            return {prefix}
        return {prefix}.union(*(names(child, f"{prefix}.{name}" if prefix else name) for name, child in value.items()))

    return names(yaml.safe_load(path.read_text(encoding="utf-8")), "") - {""}


@ALL
def test_each_family_has_a_complete_config(name: str) -> None:
    """It shows every setting; those of further parts and of clips are in `edit_pairs.yaml` and `wan_clips.yaml`."""
    path, family = CONFIGS / f"{name}.yaml", family_named(name)
    settings = shown(path)
    further = {each for each in settings if each.startswith(("datasets.N.control", "datasets.N.frames."))}
    assert settings - further == shown(CONFIGS / "sdxl.yaml")
    assert bool(family.clip_condition) == ("datasets.N.frames.count" in settings)
    assert family.text_reads_control == ("datasets.N.control" in settings)
    shown_there = shown(CONFIGS / "edit_pairs.yaml") | shown(CONFIGS / "wan_clips.yaml")
    assert set(known_settings()) - settings <= shown_there
    config = load_config(path)
    assert config.model.family == name and config.model.path in family.repositories
    assert config.cache.path == Path("cache", name)
    step = family.latent.downscale * family.patch
    validation, buckets = config.validation, config.datasets[0].buckets
    assert validation.height % step == validation.width % step == buckets.step % step == 0
    assert buckets.area == validation.height * validation.width


def small_config(name: str, folder: Path) -> Config:
    """The family's config, for three photos or clips, which both datasets have, and for its tiny model."""
    family = family_named(name)
    photos = write_samples(folder, with_clips=bool(family.clip_condition))
    dataset: dict[str, Any] = {"source": {"path": str(photos)}, "images": {"min_side": 16}}
    dataset["buckets"] = {"area": SIDE * SIDE, "step": 16}
    if family.text_reads_control:
        dataset["control"] = [{"path": str(folder / "controls")}]
    if family.clip_condition:
        dataset["frames"] = {"fps": None}
    validation: dict[str, Any] = {"path": str(folder / "validation"), "num_timesteps": 2, "num_inference_steps": 2}
    validation |= {"height": SIDE, "width": SIDE, "guidance_scale": guidance_with_negative(family)}
    validation["prompts"] = [TEXTS[1]]  # a caption, which is needed where a sample gives the picture
    overrides: dict[str, Any] = {
        "cache": {"path": str(folder / "cache")},
        "datasets": {each.name: dataset for each in load_config(CONFIGS / f"{name}.yaml").datasets},
        "model": {"path": tiny_folder(name)},
        "encode": {"device": "cpu"},
        "validation": validation,
    }
    return load_config(CONFIGS / f"{name}.yaml", overrides=overrides)


@pytest.mark.extended
@ALL
def test_its_tiny_model_is_cached_validated_and_trained(
    name: str, tmp_path: Path, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, config = family_named(name), small_config(name, tmp_path)
    without_torchvision(monkeypatch, family)
    monkeypatch.setattr(results, "loss_plot", lambda *_: None)  # which takes a third of the time
    report = run_precache(config)
    assert not report.refused and report.num_samples == 6
    assert report.placement["family"].startswith(f"{name}: ")
    with LatentCache(config.cache, manifest=config.datasets[0].name) as cache:
        batch = cache.batch(["0.png", "1.png"], device="cpu")
        assert batch["latents"].shape[1] == family.latent.channels and all(field in batch for field in family.fields)
    found = validate(config).report  # without any encoder
    assert found.loss is not None and found.loss.loss.num == 3 and not found.loss.skipped
    half = validate(config, dtype="bfloat16").report.loss
    assert half is not None and half.measurement_settings.dtype == "bfloat16"
    assert half.loss.mean == pytest.approx(found.loss.loss.mean, rel=0.05)
    [sample] = found.images
    width = (MAX_FRAMES if family.clip_condition else 1) * SIDE
    assert sample.image.size == (width, SIDE) and len(sample.image.getcolors(width * SIDE) or ()) > 10
    if name not in TRAINED:
        return
    options = script.Options(steps=2, rank=2, learning_rate=1e-2, batch_size=2, out=tmp_path / "lora", device="cpu")
    result = script.train(config, options)
    assert result["step"] == 2 and len(set(result["losses"])) == 2
    [trained] = result["validations"]
    with_lora = validate(config, lora=str(tmp_path / "lora" / LORA_FILE)).report.loss
    assert with_lora is not None and trained["loss"] == with_lora.loss.mean != found.loss.loss.mean
