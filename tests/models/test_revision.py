"""`model.revision`: a hub model as it was at a commit, a tag or a branch. Nothing here reaches the hub."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.tiny_models import tiny_denoiser, tiny_folder

from latentcache import LatentCache
from latentcache.config import Config, ModelConfig
from latentcache.errors import ModelError
from latentcache.models.denoiser import load_denoiser, load_scheduler
from latentcache.precache.run import run_precache

OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture
def hub(tmp_path: Path, add_to_hub: Callable[..., None]) -> str:
    """A hub cache with two commits of one model, of other weights: `main` is NEW, and the tag `v1` is OLD."""
    for number, family, commit, ref in ((1, "sd15", OLD, "v1"), (2, "sdxl", NEW, "main")):
        folder, unet = Path(shutil.copytree(tiny_folder(family), tmp_path / commit)), tiny_denoiser(family)
        torch.nn.init.constant_(unet.conv_in.bias, number)
        unet.save_pretrained(folder / "unet")
        settings = {"_class_name": "DDIMScheduler", "beta_start": number / 1000}
        (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(settings))
        add_to_hub("model", folder, commit, ref)
    return "someone/model"


@pytest.mark.parametrize(("revision", "commit"), [(None, NEW), ("v1", OLD)])
def test_every_part_is_that_of_the_revision(
    make_config: Callable[..., Config], hub: str, tmp_path: Path, revision: str | None, commit: str
) -> None:
    config = make_config(**{"model.path": hub, "model.revision": revision})
    report = run_precache(config)
    assert report.placement["family"].startswith("sd15:" if commit == OLD else "sdxl:")
    with LatentCache(config.cache.path) as cache:
        records = [cache.store.record(key) for key in cache.store.keys()]
    assert {name for each in records for name in each.provenance["models"].values()} == {f"{hub}@{commit}"}
    number = 1 if commit == OLD else 2
    unet = load_denoiser(dtype=torch.float32, model=config.model)
    assert set(unet.conv_in.bias.tolist()) == {number}
    assert load_scheduler(model=config.model).config.beta_start == number / 1000
    # Weights of a training take their architecture from the model: that of the other family does not fit.
    unet.save_pretrained(tmp_path / "trained")
    (tmp_path / "trained" / "config.json").unlink()
    file = tmp_path / "trained" / "diffusion_pytorch_model.safetensors"
    again = load_denoiser(file, dtype=torch.float32, model=config.model)
    assert again.config.cross_attention_dim == unet.config.cross_attention_dim


def test_a_revision_that_there_is_not_is_an_error(make_config: Callable[..., Config], hub: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="someone/model at revision 'v9'"):
        run_precache(make_config(**{"model.path": hub, "model.revision": "v9"}))
    (file := tmp_path / "model.safetensors").touch()
    for path in ("tiny", "tiny-photos", str(tmp_path), str(file), "missing.safetensors"):
        with pytest.raises(ValueError, match=r"revision is 'v1', but .* is no hub id"):
            ModelConfig(path=path, revision="v1")
