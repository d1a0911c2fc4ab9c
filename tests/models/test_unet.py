"""A UNet and a scheduler in every form that they can come in. Nothing here reaches the hub."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import DDPMScheduler, EulerDiscreteScheduler, UNet2DConditionModel
from helpers.tiny_models import tiny_pipeline
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from single_file import (
    F16,
    F32,
    TINY,
    adapted_unet,
    check_same,
    frozen_unet,
    output,
    randomise,
    save_unet,
    unet_tensors,
)
from single_file import save_checkpoint as save_parts

from latentcache.checkpoints.checkpoint import save_checkpoint
from latentcache.config import ModelConfig
from latentcache.errors import ModelError
from latentcache.integrations.diffusers import load_unet
from latentcache.models import files
from latentcache.models.denoiser import load_scheduler
from latentcache.models.lora import lora_settings, saved_step
from latentcache.models.tiny import tiny_denoiser

STEM = "diffusion_pytorch_model"
NOWHERE = ModelConfig(path="no/where")


@pytest.fixture(scope="module")
def unet() -> UNet2DConditionModel:
    """A UNet that is not the tiny model's own. Shared: tests do not change it."""
    return frozen_unet(5)


@pytest.fixture(scope="module")
def own_folder(unet, tmp_path_factory) -> Path:
    """The UNet's own folder, as save_pretrained writes it. Shared: tests do not change it."""
    unet.save_pretrained(folder := tmp_path_factory.mktemp("unet") / "own")
    return folder


@pytest.fixture
def whole(folder, own_folder, tmp_path) -> Path:
    """A whole model with this UNet, for a test to change."""
    path = shutil.copytree(folder, tmp_path / "whole", ignore=shutil.ignore_patterns("unet"))
    shutil.copytree(own_folder, path / "unet")
    return path


@pytest.fixture
def hub(whole, own_folder, add_to_hub) -> None:
    """A hub cache with this model as someone/sdxl, and this UNet alone as someone/unet."""
    add_to_hub("sdxl", whole)
    add_to_hub("unet", own_folder)


# Forms.


def test_folders_and_hub_ids(unet, whole, own_folder, hub):
    file = own_folder / f"{STEM}.safetensors"  # by diffusers' names, with a config.json next to it
    for path in (whole, own_folder, file, "someone/sdxl", "someone/unet"):
        # These need nothing of the model, which cannot be had.
        check_same(load_unet(path, dtype=F16, model=NOWHERE), frozen_unet(5, F16))
    for path in (str(whole), "someone/sdxl"):
        check_same(load_unet(dtype=F32, model=ModelConfig(path=path)), unet)


def test_a_tilde_is_the_home_folder(unet, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(folder, tmp_path / "whole", ignore=shutil.ignore_patterns("unet"))
    save_checkpoint("~/whole/last.pt", model=unet, step=7)
    unet.save_pretrained(tmp_path / "whole/unet")
    for path in ("~/whole", "~/whole/unet", f"~/whole/unet/{STEM}.safetensors", Path("~/whole/last.pt")):
        check_same(load_unet(path, dtype=F32, model=TINY), unet)
    assert load_scheduler("~/whole", model=NOWHERE).config == load_scheduler(folder, model=NOWHERE).config
    assert saved_step("~/whole/last.pt") == 7


def test_a_variant_is_read_where_it_is(unet, own_folder, folder, tmp_path):
    half = frozen_unet(5, F16)
    half.save_pretrained(tmp_path / "model" / "unet", variant="fp16")
    fp16 = ModelConfig(path=str(tmp_path / "model"), variant="fp16")
    for path in (None, tmp_path / "model"):
        check_same(load_unet(path, dtype=F16, model=fp16), half)
    # A trained UNet next to a model of another variant.
    check_same(load_unet(own_folder, dtype=F32, model=fp16), unet)
    with pytest.raises(ModelError, match=r"no file named diffusion_pytorch_model\.fp16\.safetensors"):
        load_unet(dtype=F16, model=ModelConfig(path=str(folder), variant="fp16"))
    with pytest.raises(ModelError, match=r"no file named diffusion_pytorch_model\.safetensors"):
        load_unet(tmp_path / "model", dtype=F16, model=TINY)


@pytest.mark.parametrize("model", ["tiny", "someone/sdxl", "the file itself"])
def test_one_file_in_the_original_layout(model, unet, parts, folder, hub, tmp_path):
    file = save_parts(parts, tmp_path / "model.safetensors")
    save_file({**load_file(file), **unet_tensors(unet), "denoiser.sigmas": torch.ones(1000)}, file)
    if model == "the file itself":
        found = load_unet(dtype=F32, model=ModelConfig(path=str(file), config=str(folder)))
    else:
        found = load_unet(file, dtype=F32, model=ModelConfig(path=model))
    os.truncate(file, 0)  # it may be replaced while its UNet is in use
    check_same(found, unet)


def test_a_checkpoints_configs_are_those_that_diffusers_infers(unet, folder, tmp_path, monkeypatch):
    """Without model.config, diffusers says whose configs they are."""
    # A tiny checkpoint has none of the keys by which diffusers recognises SDXL: this one is the name of SDXL base.
    mark = {"conditioner.embedders.1.model.transformer.resblocks.9.mlp.c_proj.bias": torch.zeros(1)}
    file = save_unet(unet, tmp_path / "model.safetensors", **mark)
    calls = []
    monkeypatch.setattr(files, "snapshot_download", lambda name, **kw: calls.append((name, kw)) or str(folder))
    model = ModelConfig(path=str(file))
    check_same(load_unet(dtype=F32, model=model), unet)
    assert load_scheduler(model=model).config.beta_schedule == "scaled_linear"
    assert [name for name, _ in calls] == ["stabilityai/stable-diffusion-xl-base-1.0"] * 2
    assert [kw["allow_patterns"] for _, kw in calls] == [["unet/config.json"], ["scheduler/scheduler_config.json"]]


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")
@pytest.mark.parametrize("form", ["by name", "get_peft_model", "two adapters"])
def test_a_checkpoint_with_a_lora(form, tmp_path, caplog):
    saved = adapted = adapted_unet(use_dora=form == "by name")
    if form == "two adapters":
        adapted.add_adapter(LoraConfig(r=2, target_modules=["to_k", "to_q"], use_rslora=True), "second")
        adapted.set_adapter(["default", "second"])
        randomise(adapted)
    elif form == "get_peft_model":
        adapted = tiny_denoiser(seed=5).eval()
        saved = get_peft_model(adapted, LoraConfig(r=4, lora_alpha=10, target_modules=["to_q", "conv1"])).eval()
        randomise(adapted)
    model = {"unet": saved, "text_encoder": torch.nn.Linear(2, 2)} if form == "by name" else saved
    save_checkpoint(tmp_path / "step", model=model, extra={"lora": lora_settings(saved)})
    assert not torch.equal(output(adapted), output(frozen_unet(5)))
    found = load_unet(tmp_path / "step", dtype=F32, model=TINY)
    assert sorted(found.active_adapters()) == (["default", "second"] if form == "two adapters" else ["default"])
    check_same(found, adapted)
    assert ("only its unet is loaded, not its text_encoder" in caplog.text) == (form == "by name")


def test_a_checkpoint_with_a_lora_without_settings_is_refused(tmp_path):
    save_checkpoint(tmp_path / "step", model=adapted_unet())
    with pytest.raises(ModelError, match=r"LoRA weights, but not the settings.*lora_settings\(unet\)"):
        load_unet(tmp_path / "step", dtype=F32, model=TINY)
    # The settings of another LoRA than the one that is there.
    save_checkpoint(tmp_path / "step", model=adapted_unet(), extra={"lora": lora_settings(adapted_unet(r=2))})
    with pytest.raises(ModelError, match="of another shape"):
        load_unet(tmp_path / "step", dtype=F32, model=TINY)
    with pytest.raises(ModelError, match="has no adapter"):
        lora_settings(tiny_denoiser())


# Refusals.


@pytest.mark.parametrize("kind", ["missing", "mismatched", "left over"])
@pytest.mark.parametrize("form", ["folder", "original", "names"])
def test_weights_that_do_not_fit_are_refused_and_not_made_up(form, kind, unet, whole, tmp_path):
    tensors, name, path = dict(unet.state_dict()), "mid_block.resnets.0.conv1.bias", tmp_path / "model.safetensors"
    if form == "original":
        tensors, name = unet_tensors(unet), "model.diffusion_model.middle_block.0.in_layers.2.bias"
    if kind == "left over":
        tensors[name.replace("bias", "extra")] = torch.zeros(3)
    elif kind == "mismatched":
        tensors[name] = torch.zeros(3)
    else:
        del tensors[name]
    file = whole / "unet" / f"{STEM}.safetensors" if form == "folder" else path
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"mid_block\.resnets\.0\.conv1") as caught:
        load_unet(whole / "unet" if form == "folder" else file, dtype=F32, model=TINY)
    assert str(file.parent if form == "folder" else file) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"in_channels": 8}, "takes 8 channels, like a model for inpainting"),
        ({"_class_name": "UNet3DConditionModel"}, "is a UNet3DConditionModel"),
        ({"addition_embed_type": None}, "Stable Diffusion 1"),
    ],
)
def test_another_kind_of_unet_is_refused_by_name(change, message, whole):
    config = json.loads((whole / "unet" / "config.json").read_text()) | change
    (whole / "unet" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        load_unet(whole, dtype=F32, model=TINY)


def test_files_that_are_damaged_or_without_a_unet_are_refused(unet, checkpoint, parts, whole, tmp_path):
    save_checkpoint(step := tmp_path / "step", model=unet)
    os.truncate(step, 1000)
    save_checkpoint(other := tmp_path / "other", model={"vae": parts["vae"]})
    os.truncate(save_unet(unet, torn := tmp_path / "torn.safetensors"), 1000)
    for path, message in (
        (checkpoint, "could not be loaded"),
        (other, "holds vae, but no UNet"),
        (step, r"unet: .* is damaged"),
        (torn, "could not be loaded"),
    ):
        with pytest.raises(ModelError, match=message):
            load_unet(path, dtype=F32, model=TINY)
    # A file takes its architecture from the model, which has no UNet.
    file = save_unet(unet, tmp_path / "model.safetensors")
    shutil.rmtree(whole / "unet")
    with pytest.raises(ModelError, match=r"whole/unet could not be loaded .*config\.json"):
        load_unet(file, dtype=F32, model=ModelConfig(path=str(whole)))


# Schedulers.


def test_the_scheduler_is_the_models(folder, own_folder, checkpoint, hub, tmp_path):
    expected = {name: value for name, value in tiny_pipeline().scheduler.config.items() if not name.startswith("_")}
    save_checkpoint(step := tmp_path / "step", model=torch.nn.Linear(1, 1))
    of_folder, of_hub = ModelConfig(path=str(folder)), ModelConfig(path="someone/sdxl")
    of_file = ModelConfig(path=str(checkpoint), config="someone/sdxl")
    for path, model in (
        *((path, TINY) for path in (None, own_folder, "someone/sdxl", "someone/unet")),
        *((path, model) for path in (None, step, checkpoint) for model in (of_folder, of_hub, of_file)),
    ):
        found = load_scheduler(path, model=model)
        assert type(found) is EulerDiscreteScheduler
        assert {name: found.config[name] for name in expected} == expected
    # A folder may have its own.
    DDPMScheduler(prediction_type="v_prediction", rescale_betas_zero_snr=True).save_pretrained(tmp_path / "scheduler")
    found = load_scheduler(tmp_path, model=TINY)
    assert type(found) is DDPMScheduler
    assert (found.config.prediction_type, found.config.rescale_betas_zero_snr) == ("v_prediction", True)
    with pytest.raises(ModelError, match=r"has a scheduler/scheduler_config\.json"):
        load_scheduler(model=ModelConfig(path=str(own_folder)))
    (tmp_path / "scheduler/scheduler_config.json").write_text('{"_class_name": "AutoencoderKL"}')
    with pytest.raises(ModelError, match="is not a diffusers scheduler"):
        load_scheduler(tmp_path, model=TINY)


@pytest.mark.parametrize("zero_snr", [False, True])
def test_a_checkpoint_that_is_marked_as_v_prediction(zero_snr, unet, folder, tmp_path, caplog):
    """No config says so of such a file: trainers and user interfaces go by these two tensors."""
    marks = {"v_pred": torch.empty(0)} | ({"ztsnr": torch.empty(0)} if zero_snr else {})
    file = save_unet(unet, tmp_path / "marked.safetensors", **marks)
    plain = save_unet(unet, tmp_path / "plain.safetensors")
    caplog.set_level("INFO")
    model = ModelConfig(path=str(file), config=str(folder))
    for path, of in ((file, TINY), (None, model), (file, model)):
        found = load_scheduler(path, model=of).config
        assert found["prediction_type"] == "v_prediction"
        assert found["rescale_betas_zero_snr"] == zero_snr
        assert found["timestep_spacing"] == ("trailing" if zero_snr else "leading")
    assert "v_pred" in caplog.text
    assert load_scheduler(plain, model=TINY).config.prediction_type == "epsilon"
    # What was trained from it is as it; a folder with a scheduler of its own is not.
    save_checkpoint(tmp_path / "step", model=unet)
    for path in (plain, tmp_path / "step"):
        assert load_scheduler(path, model=model).config.prediction_type == "v_prediction"
    assert load_scheduler(folder, model=model).config.prediction_type == "epsilon"
    check_same(load_unet(file, dtype=F32, model=TINY), unet)
