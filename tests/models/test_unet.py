"""A UNet and a scheduler in every form that they can come in. Nothing here reaches the hub."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import DDPMScheduler, EulerDiscreteScheduler, UNet2DConditionModel
from helpers.tiny_models import tiny_denoiser as denoiser_of_family
from helpers.tiny_models import tiny_pipeline
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from single_file import save_checkpoint as save_parts
from single_file import save_unet, unet_tensors
from unets import F16, F32, TINY, adapted_unet, check_same, frozen_unet, output, randomise

from latentcache.checkpoints.checkpoint import save_checkpoint
from latentcache.config import ModelConfig
from latentcache.errors import ModelError
from latentcache.integrations.diffusers import load_unet
from latentcache.models import files
from latentcache.models.denoiser import load_scheduler
from latentcache.models.lora import lora_settings
from latentcache.models.tiny import tiny_denoiser

STEM = "diffusion_pytorch_model"


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
def copied(own_folder, tmp_path) -> Path:
    return Path(shutil.copytree(own_folder, tmp_path / "copied"))


# Forms.


def test_without_a_path_it_is_the_models_own(folder, hub):
    for path in (str(folder), "someone/sdxl"):
        check_same(load_unet(dtype=F32, model=ModelConfig(path=path)), frozen_unet(0))


@pytest.mark.parametrize("form", ["diffusers folder", "own folder", "sharded", "hub folder", "hub unet"])
def test_folders(form, unet, own_folder, hub, tmp_path):
    path = own_folder
    if form == "diffusers folder":
        unet.save_pretrained(tmp_path / "model" / "unet")
        path = tmp_path / "model"
    elif form == "sharded":
        unet.save_pretrained(path := tmp_path / "sharded", max_shard_size="2MB")
        assert len(list(path.glob("*.safetensors"))) > 2
    elif form.startswith("hub"):
        path = "someone/other" if form == "hub folder" else "someone/unet"
    # These need nothing of the model, which cannot be had.
    check_same(load_unet(path, dtype=F16, model=ModelConfig(path="no/where")), frozen_unet(5, F16))


@pytest.fixture
def hub(folder, own_folder, tmp_path, add_to_hub) -> None:
    """A hub cache with someone/sdxl (tiny), someone/other (another UNet in it) and someone/unet (that UNet alone)."""
    other = Path(shutil.copytree(folder, tmp_path / "other"))
    shutil.rmtree(other / "unet")
    shutil.copytree(own_folder, other / "unet")
    for name, content in (("sdxl", folder), ("other", other), ("unet", own_folder)):
        add_to_hub(name, content)


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


@pytest.mark.parametrize("model", ["tiny", "folder", "config", "hub", "the file itself"])
def test_one_file_in_the_original_layout(model, unet, parts, folder, hub, tmp_path):
    file = save_parts(parts, tmp_path / "model.safetensors")
    save_file({**load_file(file), **unet_tensors(unet), "denoiser.sigmas": torch.ones(1000)}, file)
    path = {"tiny": "tiny", "folder": str(folder), "hub": "someone/sdxl"}.get(model, str(file))
    config = str(folder) if model in ("config", "the file itself") else None
    found = load_unet(
        None if model == "the file itself" else file, dtype=F32, model=ModelConfig(path=path, config=config)
    )
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


def test_one_file_with_diffusers_names(unet, own_folder, tmp_path):
    state = {name: value.clone() for name, value in unet.state_dict().items()}
    save_file(state, bare := tmp_path / "bare.safetensors")
    check_same(load_unet(bare, dtype=F32, model=TINY), unet)
    # With a config.json next to it the model is not needed.
    check_same(load_unet(own_folder / f"{STEM}.safetensors", dtype=F32, model=ModelConfig(path="no/where")), unet)


def test_a_file_may_be_replaced_while_its_unet_is_in_use(unet, tmp_path):
    file = save_unet(unet, tmp_path / "model.safetensors")
    found = load_unet(file, dtype=F32, model=TINY)
    os.truncate(file, 0)
    check_same(found, unet)


def test_a_checkpoint_of_a_training_run_with_other_parts(unet, tmp_path, caplog):
    save_checkpoint(tmp_path / "step", model={"unet": unet, "text_encoder": torch.nn.Linear(2, 2)}, extra={"note": 1})
    check_same(load_unet(tmp_path / "step", dtype=F16, model=TINY), frozen_unet(5, F16))
    assert "only its unet is loaded, not its text_encoder" in caplog.text


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")
@pytest.mark.parametrize("form", ["add_adapter", "by name", "get_peft_model", "two adapters", "dora"])
def test_a_checkpoint_with_a_lora(form, tmp_path):
    adapted = adapted_unet(use_dora=form == "dora")
    if form == "two adapters":
        adapted.add_adapter(LoraConfig(r=2, target_modules=["to_k", "to_q"], use_rslora=True), "second")
        adapted.set_adapter(["default", "second"])
        randomise(adapted)
    saved = adapted
    if form == "get_peft_model":
        adapted = tiny_denoiser(seed=5).eval()
        saved = get_peft_model(adapted, LoraConfig(r=4, lora_alpha=10, target_modules=["to_q", "conv1"])).eval()
        randomise(adapted)
    extra = {"lora": lora_settings(saved)}
    save_checkpoint(tmp_path / "step", model={"unet": saved} if form == "by name" else saved, extra=extra)
    assert not torch.equal(output(adapted), output(frozen_unet(5)))
    found = load_unet(tmp_path / "step", dtype=F32, model=TINY)
    assert sorted(found.active_adapters()) == (["default", "second"] if form == "two adapters" else ["default"])
    check_same(found, adapted)


def test_a_checkpoint_with_a_lora_without_settings_is_refused(tmp_path):
    save_checkpoint(tmp_path / "step", model=adapted_unet())
    with pytest.raises(ModelError, match=r"LoRA weights, but not their settings.*lora_settings\(unet\)"):
        load_unet(tmp_path / "step", dtype=F32, model=TINY)
    # The settings of another LoRA than the one that is there.
    settings = lora_settings(adapted_unet(r=2))
    save_checkpoint(tmp_path / "step", model=adapted_unet(), extra={"lora": settings})
    with pytest.raises(ModelError, match="of another shape"):
        load_unet(tmp_path / "step", dtype=F32, model=TINY)
    with pytest.raises(ModelError, match="has no adapter"):
        lora_settings(tiny_denoiser())


# Refusals.


def damage(tensors: dict, damage: str, name: str) -> None:
    if damage == "missing":
        del tensors[name]
    elif damage == "mismatched":
        tensors[name] = torch.zeros(3)
    else:
        tensors[name.replace("bias", "extra")] = torch.zeros(3)


@pytest.mark.parametrize("kind", ["missing", "mismatched", "left over"])
@pytest.mark.parametrize("form", ["folder", "original", "names"])
def test_weights_that_do_not_fit_are_refused_and_not_made_up(form, kind, unet, copied, tmp_path):
    name = "mid_block.resnets.0.conv1.bias"
    path = tmp_path / "model.safetensors"
    if form == "original":
        tensors = unet_tensors(unet)
        damage(tensors, kind, "model.diffusion_model.middle_block.0.in_layers.2.bias")
    else:
        tensors = dict(unet.state_dict())
        damage(tensors, kind, name)
    if form == "folder":
        path, file = copied, copied / f"{STEM}.safetensors"
        save_file(tensors, file, metadata={"format": "pt"})
    else:
        save_file(tensors, path)
    with pytest.raises(ModelError) as caught:
        load_unet(path, dtype=F32, model=TINY)
    assert str(path) in str(caught.value)
    assert "mid_block.resnets.0.conv1" in str(caught.value)


@pytest.mark.parametrize("form", ["folder", "original", "checkpoint"])
def test_a_unet_of_stable_diffusion_1_is_refused(form, tmp_path):
    unet, path = denoiser_of_family("sd15"), tmp_path / "sd15.safetensors"
    if form == "folder":
        unet.save_pretrained(path := tmp_path / "sd15" / "unet")
    elif form == "original":
        save_unet(unet, path)
    else:
        save_checkpoint(path := tmp_path / "step", model=unet)
    with pytest.raises(ModelError, match=r"Stable Diffusion 1|could not be loaded|\d+ missing") as caught:
        load_unet(path, dtype=F32, model=TINY)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"in_channels": 8}, "inpainting"),
        ({"_class_name": "UNet3DConditionModel"}, "is a UNet3DConditionModel"),
    ],
)
def test_another_kind_of_unet_is_refused_by_name(change, message, copied):
    config = json.loads((copied / "config.json").read_text()) | change
    (copied / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        load_unet(copied, dtype=F32, model=TINY)


def test_files_without_a_unet_are_refused(checkpoint, parts, tmp_path):
    with pytest.raises(ModelError, match="could not be loaded"):
        load_unet(checkpoint, dtype=F32, model=TINY)
    save_checkpoint(tmp_path / "step", model={"vae": parts["vae"]})
    with pytest.raises(ModelError, match="holds vae, but no UNet"):
        load_unet(tmp_path / "step", dtype=F32, model=TINY)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"no file named config\.json"):
        load_unet(tmp_path / "empty", dtype=F32, model=TINY)


def test_damaged_files_are_refused(unet, tmp_path):
    file = save_unet(unet, tmp_path / "model.safetensors")
    os.truncate(file, 1000)
    with pytest.raises(ModelError, match="could not be loaded"):
        load_unet(file, dtype=F32, model=TINY)
    save_checkpoint(step := tmp_path / "step", model=unet)
    os.truncate(step, 1000)
    with pytest.raises(ModelError, match=r"unet: .* is damaged"):
        load_unet(step, dtype=F32, model=TINY)


def test_a_model_without_a_unet_config_is_refused(unet, folder, tmp_path):
    file = save_unet(unet, tmp_path / "model.safetensors")
    model = Path(shutil.copytree(folder, tmp_path / "model"))
    shutil.rmtree(model / "unet")
    with pytest.raises(ModelError, match=r"model/unet could not be loaded .*config\.json"):
        load_unet(file, dtype=F32, model=ModelConfig(path=str(model)))


# Schedulers.


def test_the_scheduler_is_the_models(folder, own_folder, checkpoint, hub, tmp_path):
    expected = dict(tiny_pipeline().scheduler.config)
    save_checkpoint(tmp_path / "step", model=torch.nn.Linear(1, 1))
    models = [TINY, ModelConfig(path=str(folder)), ModelConfig(path="someone/sdxl")]
    models += [ModelConfig(path=str(checkpoint), config=name) for name in (str(folder), "someone/sdxl")]
    for model in models:
        for path in (None, own_folder, "someone/sdxl") if model is models[0] else (tmp_path / "step", checkpoint):
            found = load_scheduler(path, model=model)
            assert type(found) is EulerDiscreteScheduler
            assert {name: found.config[name] for name in expected if not name.startswith("_")} == {
                name: value for name, value in expected.items() if not name.startswith("_")
            }


def test_a_folder_with_its_own_scheduler(folder, tmp_path):
    model = Path(shutil.copytree(folder, tmp_path / "model"))
    DDPMScheduler(prediction_type="v_prediction", rescale_betas_zero_snr=True).save_pretrained(model / "scheduler")
    found = load_scheduler(model, model=TINY)
    assert type(found) is DDPMScheduler
    assert (found.config.prediction_type, found.config.rescale_betas_zero_snr) == ("v_prediction", True)
    assert load_scheduler(model, model=TINY) is not found


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


@pytest.mark.parametrize(
    ("name", "message"), [("AutoencoderKL", "no scheduler"), ("Nonsense", "no attribute Nonsense")]
)
def test_a_class_that_is_no_scheduler_is_refused(name, message, folder, tmp_path):
    model = Path(shutil.copytree(folder, tmp_path / "model"))
    file = model / "scheduler" / "scheduler_config.json"
    config = json.loads(file.read_text()) | {"_class_name": name}
    file.write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message) as caught:
        load_scheduler(model=ModelConfig(path=str(model)))
    assert caught.value.part == "scheduler"


def test_a_model_without_a_scheduler_is_refused(own_folder, tmp_path):
    with pytest.raises(ModelError, match=r"has a scheduler/scheduler_config\.json"):
        load_scheduler(model=ModelConfig(path=str(own_folder)))
