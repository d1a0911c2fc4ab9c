"""Write tiny parts as one checkpoint in the original SDXL layout: the inverse of diffusers' `from_single_file`.

The layout is that of sd_xl_base_1.0.safetensors: `first_stage_model.*` (LDM's VAE),
`conditioner.embedders.0.transformer.*` (transformers' CLIP) and `conditioner.embedders.1.model.*` (open_clip).
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from safetensors.torch import save_file

VAE, CLIP, OPEN_CLIP = "first_stage_model.", "conditioner.embedders.0.transformer.", "conditioner.embedders.1.model."


def save_checkpoint(parts: dict, path: Path, dtype: torch.dtype = torch.float32) -> Path:
    tensors = {
        **vae_tensors(parts["vae"]),
        **{CLIP + _with_prefix(name): value for name, value in parts["text_encoder"].state_dict().items()},
        **open_clip_tensors(parts["text_encoder_2"]),
        # Real checkpoints hold these too; nothing may stumble over them.
        CLIP + "text_model.embeddings.position_ids": torch.arange(77)[None],
        OPEN_CLIP + "logit_scale": torch.tensor(4.6),
    }
    return _save(tensors, path, dtype)


def save_vae(vae: torch.nn.Module, path: Path, dtype: torch.dtype = torch.float32) -> Path:
    """The VAE alone, as sdxl_vae.safetensors has it: LDM's names without a prefix."""
    return _save({name.removeprefix(VAE): value for name, value in vae_tensors(vae).items()}, path, dtype)


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
    state = {_with_prefix(name): value for name, value in encoder.state_dict().items()}
    tensors = {
        "positional_embedding": state["text_model.embeddings.position_embedding.weight"],
        "token_embedding.weight": state["text_model.embeddings.token_embedding.weight"],
        "ln_final.weight": state["text_model.final_layer_norm.weight"],
        "ln_final.bias": state["text_model.final_layer_norm.bias"],
        "text_projection": state["text_projection.weight"].T,
    }
    for layer in range(encoder.config.num_hidden_layers):
        ours, theirs = f"text_model.encoder.layers.{layer}.", f"transformer.resblocks.{layer}."
        for kind in ("weight", "bias"):
            fused = [state[f"{ours}self_attn.{name}_proj.{kind}"] for name in "qkv"]
            tensors[f"{theirs}attn.in_proj_{kind}"] = torch.cat(fused)
            for own, other in (
                ("self_attn.out_proj", "attn.out_proj"),
                ("layer_norm1", "ln_1"),
                ("layer_norm2", "ln_2"),
                ("mlp.fc1", "mlp.c_fc"),
                ("mlp.fc2", "mlp.c_proj"),
            ):
                tensors[f"{theirs}{other}.{kind}"] = state[f"{ours}{own}.{kind}"]
    return {OPEN_CLIP + name: value for name, value in tensors.items()}


def _with_prefix(name: str) -> str:
    # transformers 5 dropped `text_model.` from CLIPTextModel; checkpoints keep it.
    return name if name.startswith(("text_model.", "text_projection")) else f"text_model.{name}"


def _save(tensors: dict[str, torch.Tensor], path: Path, dtype: torch.dtype) -> Path:
    save_file(
        {
            name: (value.to(dtype) if value.is_floating_point() else value).contiguous().clone()
            for name, value in tensors.items()
        },
        path,
    )
    return path
