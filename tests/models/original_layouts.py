"""Weights by the names that the authors of a model gave them: the inverse of diffusers' conversions of single files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from single_file import UNET, unet_tensors, vae_tensors
from single_file import VAE as VAE_PREFIX

State = dict[str, torch.Tensor]

_NAMES: Mapping[str, Mapping[str, str]] = {
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
_JOINED = {
    "z-image": (("attention.to_q", "attention.to_k", "attention.to_v"), "attention.qkv"),
    "qwen-image-21": (("img_mlp.gate_layer", "img_mlp.proj"), "img_mlp.gate_up"),
}
"""One tensor of the authors (of ComfyUI's file) where diffusers has several."""


def denoiser_tensors(family: str, denoiser: torch.nn.Module, prefix: str = "") -> State:
    """A denoiser's weights as its authors name them, with what real files hold besides."""
    if family == "sd15":
        return {name.replace(UNET, prefix, 1): value for name, value in unet_tensors(denoiser).items()}
    state = denoiser.state_dict()
    if family == "z-image":
        state["norm_final.weight"] = torch.ones(32)  # diffusers has no such layer
    parts, whole = _JOINED.get(family, ((), ""))
    for name in [name for name in state if parts and f".{parts[0]}." in f".{name}"]:
        values = [state.pop(name.replace(parts[0], part)) for part in parts]
        state[name.replace(parts[0], whole)] = torch.cat(values)
    for ours, theirs in _NAMES.get(family, {}).items():
        state = {name.replace(ours, theirs): value for name, value in state.items()}
    return {prefix + name: value for name, value in state.items()}


def autoencoder_tensors(family: str, vae: Any) -> State:
    """A VAE's weights as its authors name them: of Stability's type, or of FLUX.2's."""
    state = {name.removeprefix(VAE_PREFIX): value for name, value in vae_tensors(vae).items()}
    if family == "flux2":
        moved = {"quant_conv.": "encoder.quant_conv.", "post_quant_conv.": "decoder.post_quant_conv."}
        for old, new in moved.items():
            state = {new + name.removeprefix(old) if name.startswith(old) else name: state[name] for name in state}
    return state
