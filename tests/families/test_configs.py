"""Each family has a config that shows every setting, and that runs on its tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.photo_files import write_clip, write_photo
from helpers.tiny_models import tiny_encoders, tiny_folder

from latentcache import LatentCache, LoadedModels
from latentcache.config_file import known_settings, load_config
from latentcache.families import FAMILIES, family_named
from latentcache.precache.run import run_precache

CONFIGS = Path(__file__).parent.parent.parent / "configs"
BASE = "sdxl.yaml"


def shown(value: object, prefix: str = "") -> dict[str, object]:
    """The settings of a document by dotted name; items of a list are `N`, and the first one counts."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return {prefix: value} | shown(value[0], f"{prefix}.N")
    if not isinstance(value, dict):
        return {prefix: value}
    found: dict[str, object] = {prefix: value} if prefix else {}
    for name, child in value.items():
        found |= shown(child, f"{prefix}.{name}" if prefix else name)
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_has_a_complete_config(name: str) -> None:
    """It shows every setting; those of further parts and of clips are in `edit_pairs.yaml` and `wan_clips.yaml`."""
    path, family = CONFIGS / f"{name}.yaml", family_named(name)
    settings = shown(yaml.safe_load(path.read_text(encoding="utf-8")))
    base = shown(yaml.safe_load((CONFIGS / BASE).read_text(encoding="utf-8")))
    assert {
        each for each in settings if not each.startswith(("datasets.N.control", "datasets.N.frames."))
    } == base.keys()
    assert bool(family.clip_condition) == ("datasets.N.frames.count" in settings)
    assert family.text_reads_control == ("datasets.N.control" in settings)
    others = (CONFIGS / f"{other}.yaml" for other in ("edit_pairs", "wan_clips"))
    shown_there = {each for other in others for each in shown(yaml.safe_load(other.read_text(encoding="utf-8")))}
    assert set(known_settings()) - settings.keys() <= shown_there
    config = load_config(path)
    assert config.model.family == name and config.model.path in family.repositories
    assert config.cache.path == Path("cache", name)
    step = family.latent.downscale * family.patch
    validation, buckets = config.validation, config.datasets[0].buckets
    assert validation.height % step == validation.width % step == buckets.step % step == 0
    assert buckets.area == validation.height * validation.width


@pytest.mark.families
@pytest.mark.parametrize(
    ("config_name", "name"), [*((f"{n}.yaml", n) for n in FAMILIES), (BASE, "flux"), (BASE, "wan")]
)
def test_any_config_runs_on_the_tiny_model(config_name: str, name: str, tmp_path: Path) -> None:
    family = family_named(name)
    for number in range(2):
        write = write_clip if family.clip_condition else write_photo
        photo = write(tmp_path / "photos" / f"{number}.png", number, (64, 64))
        photo.with_suffix(".txt").write_text("a red cat on the table")
        write_photo(tmp_path / "controls" / photo.name, 2 + number, (64, 64))
    small: dict[str, Any] = {"source": {"path": str(tmp_path / "photos")}, "buckets": {"area": 64 * 64, "step": 16}}
    if family.text_reads_control:
        small["control"] = [{"path": str(tmp_path / "controls")}]
    if family.clip_condition:
        small["frames"] = {"fps": None}
    datasets = yaml.safe_load((CONFIGS / config_name).read_text(encoding="utf-8"))["datasets"]
    names = [each["name"] for each in datasets]
    overrides: dict[str, Any] = {
        "cache": {"path": str(tmp_path / "cache")},
        "datasets": {each: {**small, "images": {"min_side": 16}} for each in names},
        "model": {"family": name, "path": tiny_folder(name)},
        "encode": {"device": "cpu"},
    }
    if family.text_reads_control:
        overrides["validation"] = {"prompts": []}
    config = load_config(CONFIGS / config_name, overrides=overrides)
    # A processor is loaded by torchvision alone.
    is_lacking = any(part.needs for part in family.parts.values())
    models = LoadedModels(family=family, **tiny_encoders(name)) if is_lacking else None
    report = run_precache(config, models=models)
    assert not report.refused and report.num_samples == 4
    assert report.placement["family"].startswith(f"{name}: ")
    with LatentCache(config.cache.path, manifest=names[0]) as cache:
        batch = cache.batch(["0.png", "1.png"], device="cpu")
    latents = batch["latents"]
    assert latents.shape[1] == family.latent.channels and latents.ndim == (5 if family.latent.is_video else 4)
    assert all(field in batch for field in family.fields)
