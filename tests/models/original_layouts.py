"""Weights by the names that the authors of a model gave them: the inverse of diffusers' conversions of single files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers
from helpers.tiny_models import tiny_encoders
from single_file import UNET, unet_tensors, vae_tensors
from single_file import VAE as VAE_PREFIX

State = dict[str, torch.Tensor]

_FLUX_BLOCKS = {
    "single_transformer_blocks.": "single_blocks.",
    "transformer_blocks.": "double_blocks.",
    ".norm1.linear.": ".img_mod.lin.",
    ".norm1_context.linear.": ".txt_mod.lin.",
    ".attn.norm_q.weight": ".img_attn.norm.query_norm.scale",
    ".attn.norm_k.weight": ".img_attn.norm.key_norm.scale",
    ".attn.norm_added_q.weight": ".txt_attn.norm.query_norm.scale",
    ".attn.norm_added_k.weight": ".txt_attn.norm.key_norm.scale",
    ".ff.net.0.proj.": ".img_mlp.0.",
    ".ff.net.2.": ".img_mlp.2.",
    ".ff_context.net.0.proj.": ".txt_mlp.0.",
    ".ff_context.net.2.": ".txt_mlp.2.",
    ".attn.to_out.0.": ".img_attn.proj.",
    ".attn.to_add_out.": ".txt_attn.proj.",
    ".attn.qkv.": ".img_attn.qkv.",
    ".attn.added.": ".txt_attn.qkv.",
    ".norm.linear.": ".modulation.lin.",
    ".proj_out.": ".linear2.",
    "context_embedder.": "txt_in.",
    "x_embedder.": "img_in.",
}
_FLUX_ENDS = {
    "time_text_embed.timestep_embedder.linear_1.": "time_in.in_layer.",
    "time_text_embed.timestep_embedder.linear_2.": "time_in.out_layer.",
    "time_text_embed.text_embedder.linear_1.": "vector_in.in_layer.",
    "time_text_embed.text_embedder.linear_2.": "vector_in.out_layer.",
    "time_text_embed.guidance_embedder.linear_1.": "guidance_in.in_layer.",
    "time_text_embed.guidance_embedder.linear_2.": "guidance_in.out_layer.",
}
_FLUX2 = {
    "time_guidance_embed.timestep_embedder.linear_1.": "time_in.in_layer.",
    "time_guidance_embed.timestep_embedder.linear_2.": "time_in.out_layer.",
    "time_guidance_embed.guidance_embedder.linear_1.": "guidance_in.in_layer.",
    "time_guidance_embed.guidance_embedder.linear_2.": "guidance_in.out_layer.",
    "_modulation_img.linear.": "_modulation_img.lin.",
    "_modulation_txt.linear.": "_modulation_txt.lin.",
    "single_stream_modulation.linear.": "single_stream_modulation.lin.",
    ".ff.linear_in.": ".img_mlp.0.",
    ".ff.linear_out.": ".img_mlp.2.",
    ".ff_context.linear_in.": ".txt_mlp.0.",
    ".ff_context.linear_out.": ".txt_mlp.2.",
    ".attn.to_qkv_mlp_proj.": ".linear1.",
    ".attn.to_out.weight": ".linear2.weight",
}
_CHROMA = {".linear_1.": ".in_layer.", ".linear_2.": ".out_layer."}
_NAMES: Mapping[str, Mapping[str, str]] = {
    "flux": {**_FLUX_BLOCKS, **_FLUX_ENDS},
    "chroma": {**_FLUX_BLOCKS, **_CHROMA},
    "flux2": {**_FLUX_BLOCKS, **_FLUX2},
    "z-image": {
        "all_final_layer.2-1.": "final_layer.",
        "all_x_embedder.2-1.": "x_embedder.",
        ".attention.to_out.0.": ".attention.out.",
        ".attention.norm_k.": ".attention.k_norm.",
        ".attention.norm_q.": ".attention.q_norm.",
    },
    "wan": {
        "condition_embedder.time_embedder.linear_1.": "time_embedding.0.",
        "condition_embedder.time_embedder.linear_2.": "time_embedding.2.",
        "condition_embedder.text_embedder.linear_1.": "text_embedding.0.",
        "condition_embedder.text_embedder.linear_2.": "text_embedding.2.",
        "condition_embedder.time_proj.": "time_projection.1.",
        ".attn1.": ".self_attn.",
        ".attn2.": ".cross_attn.",
        "to_out.0.": "o.",
        "to_q.": "q.",
        "to_k.": "k.",
        "to_v.": "v.",
        ".scale_shift_table": ".modulation",
        "scale_shift_table": "head.modulation",
        "proj_out.": "head.head.",
        ".ffn.net.0.proj.": ".ffn.0.",
        ".ffn.net.2.": ".ffn.2.",
        ".norm2.": ".norm3.",
        ".norm3.": ".norm2.",
    },
    "krea2": {
        "img_in.": "first.",
        "time_embed.linear_1.": "tmlp.0.",
        "time_embed.linear_2.": "tmlp.2.",
        "time_mod_proj.": "tproj.1.",
        "txt_in.norm.weight": "txtmlp.0.scale",
        "txt_in.linear_1.": "txtmlp.1.",
        "txt_in.linear_2.": "txtmlp.3.",
        "text_fusion.": "txtfusion.",
        "transformer_blocks.": "blocks.",
        "final_layer.linear.": "last.linear.",
        "final_layer.norm.weight": "last.norm.scale",
        "final_layer.scale_shift_table": "last.modulation.lin",
        ".attn.to_q.": ".attn.wq.",
        ".attn.to_k.": ".attn.wk.",
        ".attn.to_v.": ".attn.wv.",
        ".attn.to_out.0.": ".attn.wo.",
        ".attn.to_gate.": ".attn.gate.",
        ".attn.norm_q.weight": ".attn.qknorm.qnorm.scale",
        ".attn.norm_k.weight": ".attn.qknorm.knorm.scale",
        ".ff.": ".mlp.",
        ".norm1.weight": ".prenorm.scale",
        ".norm2.weight": ".postnorm.scale",
        ".scale_shift_table": ".mod.lin",
    },
    "anima": {
        "time_embed.t_embedder": "t_embedder.1",
        "time_embed.norm": "t_embedding_norm",
        "transformer_blocks": "blocks",
        "patch_embed.proj": "x_embedder.proj.1",
        "norm_out.linear_1": "final_layer.adaln_modulation.1",
        "norm_out.linear_2": "final_layer.adaln_modulation.2",
        "proj_out": "final_layer.linear",
        "norm1.linear_1": "adaln_modulation_self_attn.1",
        "norm1.linear_2": "adaln_modulation_self_attn.2",
        "norm2.linear_1": "adaln_modulation_cross_attn.1",
        "norm2.linear_2": "adaln_modulation_cross_attn.2",
        "norm3.linear_1": "adaln_modulation_mlp.1",
        "norm3.linear_2": "adaln_modulation_mlp.2",
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
    "qwen-image": {},
    "qwen-image-edit": {},
    "qwen-image-21": {},
    "qwen-image-21-edit": {},
    "ernie-image": {},
    "ideogram4": {},
    "ideogram4-projected": {},
}
_NAMES["wan-i2v"] = _NAMES["wan"]
_JOINED = (
    (("attention.to_q", "attention.to_k", "attention.to_v"), "attention.qkv"),
    (("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"), "attn.added"),
    (("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"), "linear1"),
    (("attn.to_q", "attn.to_k", "attn.to_v"), "attn.qkv"),
)
_SWIGLU = ((("img_mlp.gate_layer", "img_mlp.proj"), "img_mlp.gate_up"),)
"""As ComfyUI's file of Qwen-Image 2.1 has it."""


def denoiser_tensors(family: str, denoiser: torch.nn.Module, prefix: str = "") -> State:
    """A denoiser's weights as its authors name them, with what real files hold besides."""
    if family in ("sdxl", "sd15"):
        return {name.replace(UNET, prefix, 1): value for name, value in unet_tensors(denoiser).items()}
    state = denoiser.state_dict()
    if family == "z-image":
        state["norm_final.weight"] = torch.ones(32)  # diffusers has no such layer
    if family == "anima":  # which has the conditioner of its texts inside
        conditioner = tiny_encoders(family)["text_conditioner"].state_dict()
        state |= {f"llm_adapter.{name}": value for name, value in conditioner.items()}
    if family in ("flux", "chroma", "flux2", "z-image"):
        state = _joined(state)
    if family == "qwen-image-21":
        state = _joined(state, _SWIGLU)
    made = {}
    for name, value in state.items():
        if family in ("flux", "chroma", "flux2") and name.startswith("norm_out.linear."):
            name = name.replace("norm_out.linear.", "final_layer.adaLN_modulation.1.")
            value = torch.cat(value.chunk(2)[::-1])  # shift before scale
        elif family in ("flux", "chroma", "flux2") and name.startswith("proj_out."):
            name = name.replace("proj_out.", "final_layer.linear.")
        elif family == "chroma" and ".norms." in name:
            name = name.replace(".weight", ".scale")
        elif family == "krea2" and name.startswith("transformer_blocks") and name.endswith("scale_shift_table"):
            value = value.flatten()
        name = name if name.startswith("llm_adapter.") else _replaced(name, _NAMES[family])
        if name.startswith("single_blocks."):  # which have one stream
            name = name.replace(".img_attn.norm.", ".norm.")
        made[prefix + name] = value.contiguous().clone()
    return made


def _replaced(name: str, table: Mapping[str, str]) -> str:
    if not table:
        return name
    return re.sub("|".join(map(re.escape, sorted(table, key=len, reverse=True))), lambda met: table[met[0]], name)


def _joined(state: State, joined: Sequence[tuple[tuple[str, ...], str]] = _JOINED) -> State:
    """With one tensor where the authors have one, and diffusers several."""
    made = dict(state)
    for parts, whole in joined:
        for name in [name for name in made if f".{parts[0]}." in f".{name}"]:
            names = [name.replace(parts[0], part) for part in parts]
            if all(each in made for each in names):
                made[name.replace(parts[0], whole)] = torch.cat([made.pop(each) for each in names])
    return made


def autoencoder_tensors(family: str, vae: Any) -> State:
    """A VAE's weights as its authors name them: of Stability's type, of Wan's, or of FLUX.2's."""
    if family in ("wan", "qwen-image", "krea2", "anima"):
        return {_wan_names()[name]: value.contiguous() for name, value in vae.state_dict().items()}
    state = {name.removeprefix(VAE_PREFIX): value.contiguous().clone() for name, value in vae_tensors(vae).items()}
    if family.startswith("flux2") or family == "ernie-image":
        moved = {"quant_conv.": "encoder.quant_conv.", "post_quant_conv.": "decoder.post_quant_conv."}
        for old, new in moved.items():
            state = {new + name.removeprefix(old) if name.startswith(old) else name: state[name] for name in state}
    return state


def _wan_names() -> dict[str, str]:
    """diffusers' name of each weight -> Wan's. The conversion maps names alone: it is applied to those there may be."""
    residual = [f"residual.{layer}" for layer in ("0.gamma", "2.weight", "2.bias", "3.gamma", "6.weight", "6.bias")]
    attention = ["norm.gamma", "to_qkv.weight", "to_qkv.bias", "proj.weight", "proj.bias"]
    others = _with_kinds(("shortcut", "resample.1", "time_conv"))
    names = _with_kinds(("conv1", "conv2"))
    for part, blocks in (("encoder", "downsamples"), ("decoder", "upsamples")):
        names += [f"{part}.{each}" for each in (*_with_kinds(("conv1", "head.2")), "head.0.gamma")]
        names += [f"{part}.middle.{block}.{layer}" for block in (0, 2) for layer in residual]
        names += [f"{part}.middle.1.{layer}" for layer in attention]
        names += [f"{part}.{blocks}.{block}.{layer}" for block in range(15) for layer in (*residual, *others)]
    return {ours: theirs for ours, theirs in convert_wan_vae_to_diffusers({name: name for name in names}).items()}


def _with_kinds(layers: Sequence[str]) -> list[str]:
    return [f"{layer}.{kind}" for layer in layers for kind in ("weight", "bias")]
