"""Which family a config's model is of, and what the run says of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path

import diffusers
import pytest
import torch

from latentcache.config import Config, ModelConfig
from latentcache.errors import ModelError
from latentcache.families import DEFAULT, FAMILIES, family_named, family_of_denoiser
from latentcache.models.denoiser import load_denoiser, load_scheduler
from latentcache.models.family import family_of
from latentcache.models.model_loader import ModelLoader
from latentcache.precache.run import run_precache


def folder_of(path: Path, index: object, name: str = "model_index.json") -> Path:
    path.mkdir()
    (path / name).write_text(index if isinstance(index, str) else json.dumps(index), encoding="utf-8")
    return path


SAME_MODEL = {
    "qwen-image-21-edit": "qwen-image-21",
    "anima-states": "anima",
    "ideogram4-projected": "ideogram4",
}
"""Families that have the model of another one, which a folder is taken as."""


@pytest.mark.parametrize("name", FAMILIES)
def test_a_folder_names_its_pipeline(name: str, tmp_path: Path) -> None:
    expected = family_named(name)
    for number, pipeline in enumerate((expected.pipeline_name, *expected.pipeline_names)):
        folder = folder_of(tmp_path / str(number), {"_class_name": pipeline})
        family, reason = family_of(ModelConfig(path=str(folder)))
        assert (
            family is family_named(SAME_MODEL.get(name, expected.name))
            and reason == f"{folder} is a model of {pipeline}"
        )
        # What the config states goes first, and nothing is read.
        assert family_of(ModelConfig(family=DEFAULT, path=str(folder))) == (
            family_named(DEFAULT),
            "model.family says so",
        )


def test_a_folder_of_modular_blocks_names_its_pipeline_too(tmp_path: Path) -> None:
    index = {"_class_name": "AnimaModularPipeline", "_blocks_class_name": "AnimaAutoBlocks"}
    folder = folder_of(tmp_path / "model", index, "modular_model_index.json")
    family, reason = family_of(ModelConfig(path=str(folder)))
    assert family.name == "anima" and reason == f"{folder} is a model of AnimaModularPipeline"
    (folder / "modular_model_index.json").write_text("{")
    with pytest.raises(ModelError, match="could not be loaded"):
        family_of(ModelConfig(path=str(folder)))


KNOWN = [name for name in dir(diffusers) if name.endswith("Pipeline")]


def test_no_pipeline_is_of_two_families() -> None:
    families = [family_named(name) for name in FAMILIES if name not in SAME_MODEL]
    patterns = {each.name: (each.pipeline_name, *each.pipeline_names) for each in families}
    for pipeline in KNOWN:
        found = [name for name in patterns if any(fnmatchcase(pipeline, known) for known in patterns[name])]
        assert len(found) <= 1, pipeline


@pytest.mark.parametrize("pipeline", ["StableDiffusion3Pipeline", "WanVACEPipeline"])
def test_folders_of_other_parts_are_of_no_family(pipeline: str, tmp_path: Path) -> None:
    assert pipeline in KNOWN
    folder = folder_of(tmp_path / "model", {"_class_name": pipeline})
    with pytest.raises(ModelError, match=rf"is a model of {pipeline}, whose family is not known.*: sdxl, sd15"):
        family_of(ModelConfig(path=str(folder)))


def test_the_pipeline_of_a_community_script_is_the_second_that_is_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", {"_class_name": ["lpw", "StableDiffusionXLLongPromptWeightingPipeline"]})
    assert family_of(ModelConfig(path=str(folder)))[0].name == "sdxl"
    with pytest.raises(ModelError, match="is a model of Mine, whose family is not known"):
        family_of(ModelConfig(path=str(folder_of(tmp_path / "other", {"_class_name": ["mine", "Mine"]}))))


def test_a_model_that_is_like_a_family_s_is_refused_by_what_it_is(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", {"_class_name": "QwenImageEditPipeline"})
    met = r"It is the first Qwen-Image-Edit, .*Name a model of QwenImageEditPlusPipeline, as Qwen/Qwen-Image-Edit-2511"
    with pytest.raises(ModelError, match=met):
        family_of(ModelConfig(path=str(folder)))


def test_a_model_with_other_channels_is_encoded_and_its_denoiser_refused(folder: Path, tmp_path: Path) -> None:
    inpaint = Path(shutil.copytree(folder, tmp_path / "inpaint"))
    for name, change in (
        ("model_index.json", {"_class_name": "StableDiffusionXLInpaintPipeline"}),
        ("unet/config.json", {"in_channels": 8}),
    ):
        (inpaint / name).write_text(json.dumps(json.loads((inpaint / name).read_text()) | change))
    model = ModelConfig(path=str(inpaint))
    family, _ = family_of(model)
    loader, expected = ModelLoader(str(inpaint), family=family), ModelLoader(str(folder))
    for part in ("vae", "text_encoder_2"):
        assert loader.identity(part, torch.float32) == expected.identity(part, torch.float32)
    with pytest.raises(ModelError, match="takes 8 channels, as one for inpainting or control does, not 4 or 9"):
        load_denoiser(dtype=torch.float32, model=model)


@pytest.mark.parametrize("index", ["{", "[]", "{}", "", "3"])
def test_a_damaged_index_is_an_error_and_no_guess(index: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", index)
    with pytest.raises(ModelError, match="could not be loaded"):
        family_of(ModelConfig(path=str(folder)))


def test_what_says_nothing_is_of_the_default_family_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    for path, words in (
        (tmp_path / "model.safetensors", "is one file, which does not say it"),
        (tmp_path / "folder", "has no model_index.json"),
    ):
        family, reason = family_of(ModelConfig(path=str(path)))
        assert family.name == DEFAULT
        assert reason == f"{path} {words}: set model.family if it is another one"


def test_a_checkpoint_s_config_says_it(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    config = folder_of(tmp_path / "config", {"_class_name": "FluxPipeline"})
    family, _ = family_of(ModelConfig(path=str(tmp_path / "model.safetensors"), config=str(config)))
    assert family.name == "flux"


def test_tiny_is_refused_for_another_family(make_config: Callable[..., Config]) -> None:
    config = make_config(**{"model.family": "flux"})
    for load in (
        lambda: run_precache(config, dry_run=True),
        lambda: load_denoiser(dtype=torch.float32, model=config.model),
        lambda: load_scheduler(model=config.model),
    ):
        with pytest.raises(ModelError, match=r"tiny is a model of sdxl, but the family is flux\."):
            load()


def denoiser_of(class_name: str, **config: object) -> object:
    return type(class_name, (), {"config": config})()


SDXL_UNET = {"addition_embed_type": "text_time", "in_channels": 4}
DENOISERS = [
    (denoiser_of("UNet2DConditionModel", **SDXL_UNET), "sdxl"),
    (denoiser_of("UNet2DConditionModel", **{**SDXL_UNET, "in_channels": 9}), "sdxl"),
    (denoiser_of("UNet2DConditionModel", in_channels=4, addition_embed_type=None), "sd15"),
    (denoiser_of("UNet2DConditionModel", in_channels=9), "sd15"),
    (denoiser_of("Flux2Transformer2DModel", guidance_embeds=True), "flux2-dev"),
    (denoiser_of("Flux2Transformer2DModel", guidance_embeds=False), "flux2"),
    (denoiser_of("WanTransformer3DModel", in_channels=16), "wan"),
    (denoiser_of("WanTransformer3DModel", in_channels=48), "wan"),
    (denoiser_of("WanTransformer3DModel", in_channels=36), "wan-i2v"),
    (denoiser_of("OptimizedModule"), DEFAULT),
]


@pytest.mark.parametrize(("denoiser", "name"), DENOISERS)
def test_a_denoiser_is_of_the_family_whose_config_it_has(denoiser: object, name: str) -> None:
    assert family_of_denoiser(denoiser).name == name


def test_a_denoiser_that_may_be_of_several_families_is_refused_with_their_names() -> None:
    """load_lora, save_lora and denoise ask this where they are given no family."""
    with pytest.raises(
        ModelError, match=r"transformer: a Flux2Transformer2DModel .* families: flux2, flux2-dev\. Name"
    ):
        family_of_denoiser(denoiser_of("Flux2Transformer2DModel"))
