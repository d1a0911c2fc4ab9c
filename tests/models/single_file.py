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
        **{CLIP + with_prefix(name): value for name, value in parts["text_encoder"].state_dict().items()},
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
    state = {with_prefix(name): value for name, value in encoder.state_dict().items()}
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


def with_prefix(name: str) -> str:
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


UNET = "model.diffusion_model."

_UNET_LAYERS = {
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
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
    return _save({**unet_tensors(unet), **others}, path, dtype)


def original_unet_name(unet: torch.nn.Module, name: str) -> str:
    """Stability's name of a diffusers UNet's tensor or layer.

    Stability counts all blocks from the input: `input_blocks` are conv_in, then each level's resnets and its
    downsampler; `output_blocks` are each level's resnets, the last of which has the upsampler too.
    """
    for ours, theirs in _UNET_LAYERS.items():
        if name == ours or name.startswith(ours + "."):
            return theirs + name.removeprefix(ours)
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
