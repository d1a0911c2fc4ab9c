"""LoRA adapters from files of diffusers and of kohya, onto a tiny UNet."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionXLPipeline, UNet2DConditionModel
from diffusers.training_utils import EMAModel, _collate_lora_metadata
from diffusers.utils import convert_state_dict_to_diffusers
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from single_file import F16, F32, TINY, adapted_unet, frozen_unet, original_unet_name, output

from latentcache import Phases
from latentcache.checkpoints.checkpoint import save_checkpoint
from latentcache.errors import ModelError, StoreError
from latentcache.integrations.diffusers import load_unet
from latentcache.models import lora
from latentcache.models.lora import LORA_FILE, load_lora, save_lora, saved_step

TARGETS = ["to_q", "to_out.0", "conv1", "time_emb_proj", "ff.net.0.proj"]
ALPHAS = {"to_q": 12, "conv1": 2, "to_out.0": 7}
"""Of some layers. The others' is 10."""


def save_diffusers(unet: UNet2DConditionModel, folder: Path, metadata: bool = True, **others) -> Path:
    """As diffusers' training scripts do. Returns the file."""
    layers = convert_state_dict_to_diffusers(get_peft_model_state_dict(unet))
    settings = _collate_lora_metadata({"unet": unet}) if metadata else {}
    StableDiffusionXLPipeline.save_lora_weights(folder, unet_lora_layers=layers, **settings, **others)
    return folder / LORA_FILE


def kohya_tensors(unet: UNet2DConditionModel, original: bool) -> dict[str, torch.Tensor]:
    """As kohya's sd-scripts do: a layer's name with underscores, in Stability's or diffusers' naming."""
    tensors = {}
    for key, value in get_peft_model_state_dict(unet).items():
        layer, kind = key.rsplit(".lora_", 1)
        alpha = next((alpha for name, alpha in ALPHAS.items() if layer.endswith(f".{name}")), 10)
        layer = original_unet_name(unet, layer) if original else layer
        name = "lora_unet_" + layer.replace(".", "_")
        tensors[name + (".lora_down.weight" if kind == "A.weight" else ".lora_up.weight")] = value.contiguous()
        tensors[name + ".alpha"] = torch.tensor(float(alpha))
    return tensors


@pytest.fixture(scope="module")
def adapted() -> UNet2DConditionModel:
    """A UNet with a LoRA whose alpha (10) is not its rank (4). Shared: tests do not change it."""
    return adapted_unet(target_modules=TARGETS).requires_grad_(False)


@pytest.fixture(scope="module")
def file(adapted, tmp_path_factory) -> Path:
    """That LoRA as diffusers saves it. Shared: tests do not change it."""
    return save_diffusers(adapted, tmp_path_factory.mktemp("lora"))


@pytest.mark.parametrize(
    ("form", "settings"),
    [
        ("diffusers", {"use_dora": True}),
        ("diffusers", {"rank_pattern": {"to_q": 2}}),
        ("diffusers", {"use_rslora": True}),
        ("adapter", {}),
        ("without alphas: each is the rank", {"lora_alpha": 4}),
        ("kohya", {"target_modules": TARGETS, "alpha_pattern": ALPHAS}),
        ("kohya, diffusers' names", {"target_modules": TARGETS, "alpha_pattern": ALPHAS}),
    ],
)
def test_every_form_gives_the_same_unet(form, settings, tmp_path):
    adapted = adapted_unet(**settings).requires_grad_(False)
    path = tmp_path / LORA_FILE
    if form.startswith("kohya"):
        save_file(kohya_tensors(adapted, form == "kohya"), path)
    elif form == "adapter":
        adapted.save_lora_adapter(tmp_path)
    else:
        save_diffusers(adapted, tmp_path, metadata=form == "diffusers")
    unet = frozen_unet(5)
    assert not torch.equal(output(unet), output(adapted))
    name = load_lora(unet, tmp_path if form == "diffusers" else path)
    os.truncate(path, 0)  # it may be replaced while its LoRA is in use
    found, weights = get_peft_model_state_dict(unet, adapter_name=name), get_peft_model_state_dict(adapted)
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[key], weights[key]) for key in found)
    assert not any(parameter.requires_grad for parameter in unet.parameters())
    assert not any(module.training for module in unet.modules())
    assert torch.equal(output(unet), output(adapted))


def test_the_scale_and_the_dtype(file):
    half, none, float16 = frozen_unet(5), frozen_unet(5), frozen_unet(5, F16)
    load_lora(half, file, scale=0.5)
    load_lora(none, file, scale=0.0)
    load_lora(float16, file)
    expected = adapted_unet(target_modules=TARGETS)
    expected.set_adapters(["default"], [0.5])
    assert torch.equal(output(half), output(expected.requires_grad_(False)))
    assert torch.equal(output(none), output(frozen_unet(5)))
    assert {parameter.dtype for parameter in float16.parameters()} == {F16}
    expected = torch.nn.Module.to(adapted_unet(target_modules=TARGETS), F16).requires_grad_(False)
    assert torch.equal(output(float16), output(expected))


def test_a_saved_lora_is_what_the_unet_holds_and_its_folder_is_made(tmp_path):
    """Within a phase the averages, outside of it the trained weights."""
    unet = adapted_unet(target_modules=["to_q"])
    trained = [parameter for parameter in unet.parameters() if parameter.requires_grad]
    ema = EMAModel(trained)
    for average in ema.shadow_params:
        average.fill_(0.25)
    with Phases({"unet": unet, "ema": ema}, device="cpu").enter("validate"):
        averages = load_file(save_lora(unet, tmp_path / "a" / "averages", step=3))
    assert averages and all((tensor == 0.25).all() for tensor in averages.values())
    found = load_file(save_lora(unet, tmp_path / "trained"))
    assert found.keys() == averages.keys() and not any((tensor == 0.25).all() for tensor in found.values())
    assert saved_step(tmp_path / "a" / "averages") == 3
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot be written"):
        save_lora(unet, tmp_path / "file" / "folder")


def test_next_to_the_adapter_of_a_checkpoint(adapted, file, tmp_path):
    save_checkpoint(tmp_path / "step", model=adapted, extra={"lora": lora.lora_settings(adapted)})
    unet, twice = load_unet(tmp_path / "step", dtype=F32, model=TINY), frozen_unet(5)
    load_lora(unet, file)
    load_lora(twice, file, scale=2.0)
    torch.testing.assert_close(output(unet), output(twice))


def test_nothing_else_changes(file):
    unet = frozen_unet(5)
    unet.train()
    unet.conv_in.requires_grad_(True)
    before = {id(parameter): parameter.clone() for parameter in unet.parameters()}
    state = torch.get_rng_state()
    load_lora(unet, file)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in unet.modules())
    after = {id(parameter): parameter for parameter in unet.parameters()}
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert [name for name, p in unet.named_parameters() if p.requires_grad] == ["conv_in.weight", "conv_in.bias"]


# Refusals.


def refused(path: Path | str, message: str) -> None:
    unet = frozen_unet(5)
    names = list(unet.state_dict())
    with pytest.raises(ModelError, match=message) as caught:
        load_lora(unet, path)
    assert caught.value.part == "lora"
    assert list(unet.state_dict()) == names
    assert not getattr(unet, "peft_config", None)


def renamed(old, new):
    return lambda tensors: {name.replace(old, new): value for name, value in tensors.items()}


def added(name):
    return lambda tensors: tensors | {name: torch.ones(1, 64)}


def damaged(which, shape):
    def damage(tensors):
        name = next(name for name in tensors if f"to_q.{which}" in name)
        rest = {key: tensors[key] for key in tensors if key != name}
        return rest if shape is None else rest | {name: torch.ones(shape)}

    return damage


OF_ENCODERS = r"also changes the text encoders \(1 tensors.*cached embeddings"
NO_FIT = r"does not fit this UNet.*to_q"


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("diffusers", renamed("transformer_blocks.0", "transformer_blocks.7"), "have no counterpart, e.g. .*s.7."),
        ("diffusers", renamed("lora_A", "lokr_w1"), r"not LoRA weights of a UNet, e\.g\. .*lokr_w1"),
        ("diffusers", renamed("lora_A", "lora_embedding_A"), "does not fit"),
        ("diffusers", added("text_encoder_2.layers.0.self_attn.q_proj.lora_A.weight"), OF_ENCODERS),
        ("kohya", added("lora_te1_text_model_encoder_layers_0_mlp_fc1.lora_down.weight"), OF_ENCODERS),
        ("kohya", added("lora_unet_middle_block_0_to_q.hada_w1_a"), "hada_w1_a"),
        ("kohya", added("lora_unet_middle_block_0_to_q.dora_scale"), "dora_scale"),
        *(("peft", damaged("lora_A", shape), NO_FIT) for shape in (None, (4, 7))),
        *(("peft", damaged("lora_B", shape), NO_FIT) for shape in (None, (7, 4))),
    ],
)
def test_what_does_not_fit_is_an_error_and_not_a_silent_nothing(form, change, message, adapted, file, tmp_path):
    """Of another model, for the cached text encoders, of another kind than LoRA, incomplete."""
    tensors = {"diffusers": load_file(file), "kohya": kohya_tensors(adapted, True)}.get(form)
    if tensors is None:
        tensors = {f"unet.{name}": value for name, value in get_peft_model_state_dict(adapted).items()}
    save_file({name: value.clone() for name, value in change(tensors).items()}, path := tmp_path / "x.safetensors")
    refused(path, message)


def test_what_is_no_lora_file_is_refused(adapted, tmp_path):
    (tmp_path / "lora.bin").write_bytes(b"")
    refused(tmp_path / "lora.bin", "is a pickle")
    (tmp_path / "torn.safetensors").write_bytes(b"\0" * 100)
    refused(tmp_path / "torn.safetensors", "could not be loaded")
    save_checkpoint(tmp_path / "step", model=adapted)
    refused(tmp_path / "step", "Pass it as the denoiser")
    frozen_unet(5).save_pretrained(tmp_path / "unet")
    refused(tmp_path / "unet" / "diffusion_pytorch_model.safetensors", "not LoRA weights of a UNet")
    # And a LoRA is no UNet.
    save_file(kohya_tensors(adapted, True), kohya := tmp_path / "kohya.safetensors")
    with pytest.raises(ModelError, match=r"kohya\.safetensors is a LoRA\. Pass it as the LoRA"):
        load_unet(kohya, dtype=F32, model=TINY)
