"""Tiny parts by the names that their authors gave weights: the inverse of diffusers' conversions of single files.

The layout of SDXL is that of sd_xl_base_1.0.safetensors: `first_stage_model.*` (LDM's VAE),
`conditioner.embedders.0.transformer.*` (transformers' CLIP) and `conditioner.embedders.1.model.*` (open_clip).

Also what it means that two UNets, or two models, are the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import UNet2DConditionModel
from diffusers.loaders.single_file_utils import DIFFUSERS_TO_LDM_MAPPING
from helpers.tensor_bits import assert_same_state
from peft import LoraConfig
from safetensors.torch import save_file

from latentcache.config import ModelConfig
from latentcache.identity import PartIdentity
from latentcache.models.tiny import tiny_denoiser

VAE, CLIP, OPEN_CLIP = "first_stage_model.", "conditioner.embedders.0.transformer.", "conditioner.embedders.1.model."
UNET = "model.diffusion_model."
_NAMES = DIFFUSERS_TO_LDM_MAPPING
_UNET_NAMES = _NAMES["unet"]["layers"] | _NAMES["unet"]["addition_embed_type"]


def save_checkpoint(parts: dict, path: Path, dtype: torch.dtype = torch.float32) -> Path:
    tensors = {
        **vae_tensors(parts["vae"]),
        **{CLIP + with_prefix(name): value for name, value in parts["text_encoder"].state_dict().items()},
        **open_clip_tensors(parts["text_encoder_2"]),
        # Real checkpoints hold these too; nothing may stumble over them.
        CLIP + "text_model.embeddings.position_ids": torch.arange(77)[None],
        OPEN_CLIP + "logit_scale": torch.tensor(4.6),
    }
    return save(tensors, path, dtype)


def save_vae(vae: torch.nn.Module, path: Path, dtype: torch.dtype = torch.float32) -> Path:
    """The VAE alone, as sdxl_vae.safetensors has it: LDM's names without a prefix."""
    return save({name.removeprefix(VAE): value for name, value in vae_tensors(vae).items()}, path, dtype)


def vae_tensors(vae: torch.nn.Module) -> dict[str, torch.Tensor]:
    num_blocks = len(vae.config.block_out_channels)
    return {VAE + _ldm_name(name, num_blocks): _as_conv(name, value) for name, value in vae.state_dict().items()}


def _ldm_name(name: str, num_blocks: int) -> str:
    name = re.sub(r"down_blocks\.(\d+)\.resnets\.(\d+)", r"down.\1.block.\2", name)
    name = re.sub(r"down_blocks\.(\d+)\.downsamplers\.0", r"down.\1.downsample", name)
    # LDM counts the decoder's blocks from the output.
    name = re.sub(r"up_blocks\.(\d+)\.resnets\.(\d+)", lambda m: f"up.{num_blocks - 1 - int(m[1])}.block.{m[2]}", name)
    name = re.sub(r"up_blocks\.(\d+)\.upsamplers\.0", lambda m: f"up.{num_blocks - 1 - int(m[1])}.upsample", name)
    name = re.sub(r"mid_block\.resnets\.(\d+)", lambda m: f"mid.block_{int(m[1]) + 1}", name)
    name = name.replace("mid_block.attentions.0", "mid.attn_1").replace("conv_shortcut", "nin_shortcut")
    for ours, ldm in (("group_norm", "norm"), ("to_q", "q"), ("to_k", "k"), ("to_v", "v"), ("to_out.0", "proj_out")):
        name = name.replace(f"attn_1.{ours}.", f"attn_1.{ldm}.")
    return name.replace("conv_norm_out", "norm_out")


def _as_conv(name: str, value: torch.Tensor) -> torch.Tensor:
    """LDM's attention projections are 1x1 convolutions."""
    is_projection = "attentions" in name and name.endswith("weight") and value.ndim == 2
    return value[:, :, None, None] if is_projection else value


def open_clip_tensors(encoder: torch.nn.Module) -> dict[str, torch.Tensor]:
    state, names = {with_prefix(name): value for name, value in encoder.state_dict().items()}, _NAMES["openclip"]
    tensors = {theirs: state.pop(ours) for ours, theirs in names["layers"].items()}
    tensors["text_projection"] = tensors["text_projection"].T
    for layer in range(encoder.config.num_hidden_layers):
        for kind in ("weight", "bias"):
            parts = [f"text_model.encoder.layers.{layer}.self_attn.{name}_proj.{kind}" for name in "qkv"]
            tensors[f"transformer.resblocks.{layer}.attn.in_proj_{kind}"] = torch.cat(
                [state.pop(each) for each in parts]
            )
    for name, value in state.items():
        for ours, theirs in names["transformer"].items():
            name = name.replace(ours, theirs)
        tensors[f"transformer.{name}"] = value
    return {OPEN_CLIP + name: value for name, value in tensors.items()}


def with_prefix(name: str) -> str:
    # transformers 5 dropped `text_model.` from CLIPTextModel; checkpoints keep it.
    return name if name.startswith(("text_model.", "text_projection")) else f"text_model.{name}"


def save(tensors: Mapping[str, torch.Tensor], path: Path, dtype: torch.dtype | None = None) -> Path:
    """Write copies of these, in their dtype or in this one."""
    copies = {name: value.contiguous().clone() for name, value in tensors.items()}
    save_file({name: value.to(dtype) if value.is_floating_point() else value for name, value in copies.items()}, path)
    return path


_RESNET_LAYERS = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "time_emb_proj": "emb_layers.1",
    "conv_shortcut": "skip_connection",
}


def unet_tensors(unet: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The UNet in the original layout, under `model.diffusion_model.`."""
    return {UNET + original_unet_name(unet, name): value for name, value in unet.state_dict().items()}


def save_unet(unet: torch.nn.Module, path: Path, dtype: torch.dtype = torch.float32, **others: torch.Tensor) -> Path:
    """The UNet in the original layout, with tensors of other parts next to it."""
    return save({**unet_tensors(unet), **others}, path, dtype)


def original_unet_name(unet: torch.nn.Module, name: str) -> str:
    """Stability's name of a diffusers UNet's tensor or layer.

    Stability counts all blocks from the input: `input_blocks` are conv_in, then each level's resnets and its
    downsampler; `output_blocks` are each level's resnets, the last of which has the upsampler too.
    """
    if name in _UNET_NAMES:
        return _UNET_NAMES[name]
    num_layers = unet.config.layers_per_block
    parts = name.split(".")
    block = 0 if parts[0] == "mid_block" else int(parts.pop(1))
    kind, index, rest = parts[1], int(parts[2]), ".".join(parts[3:])
    if kind == "resnets":
        layer = next(layer for layer in _RESNET_LAYERS if rest == layer or rest.startswith(layer + "."))
        rest = _RESNET_LAYERS[layer] + rest.removeprefix(layer)
    if parts[0] == "mid_block":
        return f"middle_block.{2 * index if kind == 'resnets' else 1}.{rest}"
    if parts[0] == "down_blocks":
        if kind == "downsamplers":
            return f"input_blocks.{(block + 1) * (num_layers + 1)}.0.op{rest.removeprefix('conv')}"
        return f"input_blocks.{1 + block * (num_layers + 1) + index}.{int(kind == 'attentions')}.{rest}"
    if kind == "upsamplers":
        has_attention = "CrossAttn" in unet.config.up_block_types[block]
        return f"output_blocks.{block * (num_layers + 1) + num_layers}.{1 + has_attention}.{rest}"
    return f"output_blocks.{block * (num_layers + 1) + index}.{int(kind == 'attentions')}.{rest}"


# Other families

_AUTHORS_NAMES: dict[str, dict[str, str]] = {
    "z-image": {
        "all_final_layer.2-1.": "final_layer.",
        "all_x_embedder.2-1.": "x_embedder.",
        ".attention.to_out.0.": ".attention.out.",
        ".attention.norm_k.": ".attention.k_norm.",
        ".attention.norm_q.": ".attention.q_norm.",
    },
    "anima": {
        "time_embed.t_embedder": "t_embedder.1",
        "time_embed.norm": "t_embedding_norm",
        "transformer_blocks": "blocks",
        "patch_embed.proj": "x_embedder.proj.1",
        "norm_out.linear_": "final_layer.adaln_modulation.",
        "proj_out": "final_layer.linear",
        "norm1.linear_": "adaln_modulation_self_attn.",
        "norm2.linear_": "adaln_modulation_cross_attn.",
        "norm3.linear_": "adaln_modulation_mlp.",
        "attn1": "self_attn",
        "attn2": "cross_attn",
        "to_q": "q_proj",
        "to_k": "k_proj",
        "to_v": "v_proj",
        "to_out.0": "output_proj",
        "norm_q": "q_norm",
        "norm_k": "k_norm",
        "ff.net.0.proj": "mlp.layer1",
        "ff.net.2": "mlp.layer2",
    },
}


def denoiser_tensors(family: str, denoiser: torch.nn.Module, prefix: str = "") -> dict[str, torch.Tensor]:
    """A denoiser's weights as its authors name them, with what real files hold besides."""
    if family == "sd15":
        return {name.replace(UNET, prefix, 1): value for name, value in unet_tensors(denoiser).items()}
    state = denoiser.state_dict()
    if family == "z-image":
        state["norm_final.weight"] = torch.ones(32)  # diffusers has no such layer
        for name in [name for name in state if ".attention.to_q." in name]:
            values = [state.pop(name.replace("to_q", each)) for each in ("to_q", "to_k", "to_v")]
            state[name.replace("to_q", "qkv")] = torch.cat(values)
    for ours, theirs in _AUTHORS_NAMES.get(family, {}).items():
        state = {name.replace(ours, theirs): value for name, value in state.items()}
    return {prefix + name: value for name, value in state.items()}


def autoencoder_tensors(family: str, vae: Any) -> dict[str, torch.Tensor]:
    """A VAE's weights as its authors name them: of Stability's type, or of FLUX.2's."""
    state = {name.removeprefix(VAE): value for name, value in vae_tensors(vae).items()}
    if family == "flux2":
        moved = {"quant_conv.": "encoder.quant_conv.", "post_quant_conv.": "decoder.post_quant_conv."}
        for old, new in moved.items():
            state = {new + name.removeprefix(old) if name.startswith(old) else name: state[name] for name in state}
    return state


# What it means that two are the same


F16, F32 = torch.float16, torch.float32
TINY = ModelConfig(path="tiny")
PIXELS = torch.arange(2 * 32 * 32 * 3).remainder(251).to(torch.uint8).reshape(2, 32, 32, 3)


def identities(models, dtype: torch.dtype = F32) -> dict[str, PartIdentity]:
    """Of all parts of a model."""
    return {part: models.identity(part, dtype) for part in models.family.parts}


def output(unet: torch.nn.Module) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    dtype = next(unet.parameters()).dtype
    latents, embeds, pooled = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((2, 4, 8, 8), (2, 77, 72), (2, 40))
    )
    conditions = {"text_embeds": pooled, "time_ids": torch.tensor([[64, 64, 0, 0, 64, 64]] * 2)}
    with torch.no_grad():
        return unet(latents, torch.tensor([10, 900]), embeds, added_cond_kwargs=conditions).sample


def check_same(found: torch.nn.Module, expected: torch.nn.Module) -> None:
    """Bit-equal weights and output; on the CPU, in eval mode, frozen."""
    assert not any(module.training for module in found.modules())
    assert not any(parameter.requires_grad for parameter in found.parameters())
    assert all(value.device.type == "cpu" for value in found.state_dict().values())
    assert_same_state(found, expected.state_dict())
    assert torch.equal(output(found), output(expected))


def frozen_unet(seed: int, dtype: torch.dtype = F32) -> UNet2DConditionModel:
    """Frozen, as a loaded one: on the CPU torch takes other float16 kernels for parameters that require grad."""
    return torch.nn.Module.to(tiny_denoiser(seed), dtype).eval().requires_grad_(False)


def adapted_unet(seed: int = 5, **settings) -> UNet2DConditionModel:
    """A UNet with a trained LoRA: both its matrices are random, and alpha is not the rank."""
    unet = frozen_unet(seed)
    unet.add_adapter(LoraConfig(**{"r": 4, "lora_alpha": 10, "target_modules": ["to_q", "conv1"], **settings}))
    randomise(unet)
    return unet


def randomise(unet: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(11)
    for name, parameter in unet.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
