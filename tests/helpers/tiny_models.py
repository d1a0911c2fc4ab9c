"""Tiny random models of all families, as parts and as folders, with uneven latents to reveal scaling errors."""

from __future__ import annotations

import atexit
import copy
import dataclasses
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
import transformers

from latentcache.families import DEFAULT, family_named
from latentcache.families.base import Family
from latentcache.models.tiny import frozen, seeded, tiny_part, tiny_parts

_STATISTICS = {
    "latents_mean": [round(0.9 * (-1) ** i * (i % 5) / 3 - 0.1, 4) for i in range(16)],
    "latents_std": [round(1.1 + 0.37 * ((i * 7) % 5), 4) for i in range(16)],
}
"""Uneven statistics for VAEs with 16 channels."""
_BLOCKS: dict[str, Any] = {"num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2}
_SINGLE_AND_DOUBLE: dict[str, Any] = {**_BLOCKS, "num_layers": 1, "num_single_layers": 1}
_FLUX = {**_SINGLE_AND_DOUBLE, "joint_attention_dim": 32, "axes_dims_rope": (4, 4, 8), "in_channels": 64}
"""Settings of denoisers."""
_FLUX_SCALING = {"scaling_factor": 0.3611, "shift_factor": 0.1159}
_LLM = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
_SHARED_HEADS = {"num_key_value_heads": 1, "max_position_embeddings": 4096}
_ROPE = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
_QWEN3_VL = {"head_dim": 8, "rope_parameters": _ROPE}
"""Settings of language models; the last is for Qwen3-VL."""
_DEEP = {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
"""Settings of its vision encoder."""
_T5_WORDS = ("▁a", "▁cat", "▁red", "▁on", "▁the", "▁table", "▁cats", "▁of", "▁in")
_QWEN_SPECIALS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"),
    "<|video_pad|>",
)
# The system prompts, of which the pipelines drop a fixed number of tokens: 34, or 64 for editing.
_QWEN_TEXT = (
    "system user assistant Describe 's Ġ( ), Ġthe Ġimage Ġby Ġdetailing Ġcolor Ġshape Ġsize Ġtexture "
    "Ġquantity Ġtext Ġspatial Ġrelationships Ġof Ġobjects Ġand Ġbackground color Ġkey Ġfeatures Ġinput "
    "Ġthen Ġexplain Ġhow Ġuser Ġinstruction Ġshould Ġalter Ġor Ġmodify Ġa Ġnew Ġthat Ġmeets "
    "Ġrequirements Ġwhile Ġmaintaining Ġconsistency Ġwith Ġoriginal Ġwhere Ġappropriate ĠGenerate"
)
_CHAT_TEMPLATE = (  # Qwen3's, reduced: the user's turn, the generation prompt, an empty block if thinking is off
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
_BLOCK_TEMPLATE = (  # Mistral's, reduced: messages are lists of blocks
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% for block in message.content %}{{ block.text }}{% endfor %}<|im_end|>\n{% endfor %}"
)


def tiny_model(family: str = DEFAULT, seed: int = 0) -> dict[str, Any]:
    """A copy of the family's tiny model with denoiser and scheduler: float32, CPU, frozen."""
    return copy.deepcopy(_built(family, seed))


def tiny_encoders(family: str, seed: int = 0) -> dict[str, Any]:
    """The parts for `LoadedModels`: VAE, text encoders and tokenizers."""
    made, parts = _built(family, seed), family_named(family).parts
    return copy.deepcopy({name: made[name] for name, part in parts.items() if name in made or not part.optional})


def tiny_denoiser(family: str, seed: int = 0) -> Any:
    """The denoiser alone, trainable."""
    return copy.deepcopy(_built(family, seed)[family_named(family).denoiser]).train().requires_grad_(True)


def save_diffusers_folder(parts: Mapping[str, Any], path: Path, family: str = DEFAULT) -> Path:
    """Write a diffusers folder with these parts and otherwise the tiny model's."""
    whole_pipeline(family_named(family), **{**tiny_model(family), **parts}).save_pretrained(path)
    return path


def whole_pipeline(family: Family, **parts: Any) -> Any:
    """diffusers' pipeline with these parts: those of a whole model, or the denoiser to load a LoRA into."""
    if family.name == "ideogram4-projected":  # its pipeline is ideogram4's, without the projection
        del parts["projection"]
        family = family_named("ideogram4")
    return ModularPipeline(parts) if family.name.startswith("anima") else family.pipeline(**parts)


class ModularPipeline:
    """Anima's blocks, with the interface of other pipelines as far as tests use it."""

    __module__ = "diffusers.modular_pipelines.anima.before_denoise"  # the module that draws noise

    def __init__(self, parts: Mapping[str, Any]):
        self.made = diffusers.AnimaAutoBlocks().init_pipeline()
        self.made.update_components(**parts)
        blocks = self.made._blocks.sub_blocks["denoise"].sub_blocks["text2image"].sub_blocks
        blocks["denoise"].set_progress_bar_config(disable=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.made, name)

    def __call__(
        self,
        *,
        negative_prompt: Any = None,
        max_sequence_length: int = 512,
        guidance_scale: float = 4.0,
        **options: Any,
    ) -> Any:
        self.made.guider.guidance_scale = max(guidance_scale, 1.0)  # below it would be on again
        texts = {"negative_prompt": negative_prompt, "max_sequence_length": max_sequence_length}
        return [self.made(**texts, **options).get("images")]

    def save_pretrained(self, path: Path) -> None:
        self.made.save_pretrained(str(path), overwrite_modular_index=True)


def encode_captions(parts: Mapping[str, Any], captions: Sequence[str], clip_skip: int = 0) -> dict[str, torch.Tensor]:
    """The text fields of these captions by the text encoders of a tiny SDXL."""
    family = family_named(DEFAULT)
    return family.encode_text(parts, family.tokenize(parts, captions), {"clip_skip": clip_skip})


@cache
def tiny_folder(family: str) -> str:
    """The tiny model as a diffusers folder, for `model.path`. Shared in the process: tests must not change it."""
    folder = tempfile.mkdtemp(prefix=f"tiny-{family}-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return str(save_diffusers_folder({}, Path(folder), family))


def without_torchvision(patch: pytest.MonkeyPatch, family: Family) -> None:
    """Load processors with the tiny model's class, which does not need torchvision for videos."""
    for name in family.names("tokenizer"):
        part = family.parts[name]
        if part.needs is not None:
            made = type(_built(family.name, 0)[name])
            patch.setitem(family.parts, name, dataclasses.replace(part, needs=None))  # type: ignore[misc]
            patch.setattr(part.class_name, made)


@cache
def _built(family: str, seed: int) -> dict[str, Any]:
    """Build by the function named after the family. Cached, because copying a model is faster than building it."""
    with seeded(seed):
        return frozen(globals()["_" + family.replace("-", "_")](seed))


def _sdxl(seed: int) -> dict[str, Any]:
    return {**tiny_parts(seed), **{name: tiny_part(name, seed) for name in ("unet", "scheduler")}}


def _sd15(seed: int) -> dict[str, Any]:
    encoder = transformers.CLIPTextModel(tiny_part("text_encoder").config)
    downwards, upwards = ("CrossAttnDownBlock2D", "DownBlock2D"), ("UpBlock2D", "CrossAttnUpBlock2D")
    blocks = {"down_block_types": downwards, "up_block_types": upwards, "block_out_channels": (16, 32)}
    sizes = {"sample_size": 8, "layers_per_block": 1, "attention_head_dim": 4, "cross_attention_dim": 32}
    unet = diffusers.UNet2DConditionModel(**blocks, **sizes, norm_num_groups=8)
    scheduler = diffusers.DDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, steps_offset=1
    )
    parts = {"vae": image_vae(4, scaling_factor=0.18215), "text_encoder": encoder, "tokenizer": tiny_part("tokenizer")}
    return {**parts, "unet": randomised(unet, seed), "scheduler": scheduler}


def _flux(seed: int) -> dict[str, Any]:
    t5, vae = t5_tokenizer(), image_vae(16, **_FLUX_SCALING)
    transformer = diffusers.FluxTransformer2DModel(**_FLUX, pooled_projection_dim=32, guidance_embeds=True)
    clip = transformers.CLIPTextModel(tiny_part("text_encoder").config)
    encoders = {"text_encoder": clip, "text_encoder_2": t5_model(t5)}
    return flow_model(transformer, seed, vae, **encoders, tokenizer=tiny_part("tokenizer"), tokenizer_2=t5)


def _chroma(seed: int) -> dict[str, Any]:
    tokenizer, vae = t5_tokenizer(), image_vae(16, **_FLUX_SCALING)
    approximator = {"num_channels": 32, "hidden_dim": 32, "layers": 1}
    settings = {f"approximator_{name}": value for name, value in approximator.items()}
    transformer = diffusers.ChromaTransformer2DModel(**_FLUX, **settings)
    return flow_model(transformer, seed, vae, text_encoder=t5_model(tokenizer), tokenizer=tokenizer)


def _z_image(seed: int) -> dict[str, Any]:
    tokenizer, vae = qwen_tokenizer(), image_vae(16, **_FLUX_SCALING)
    sizes = {"dim": 32, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2}
    axes = {"axes_dims": [8, 4, 4], "axes_lens": [1024, 64, 64]}
    transformer = diffusers.ZImageTransformer2DModel(in_channels=16, cap_feat_dim=16, **sizes, **axes)
    encoder = qwen3_model(tokenizer, 4, "Qwen3Model")
    return flow_model(transformer, seed, vae, text_encoder=encoder, tokenizer=tokenizer)


def _wan(seed: int, **settings: Any) -> dict[str, Any]:
    tokenizer = t5_tokenizer()
    sizes = {"text_dim": 32, "freq_dim": 16, "ffn_dim": 32, "rope_max_seq_len": 64}
    transformer = diffusers.WanTransformer3DModel(**_BLOCKS, **sizes, **settings)
    schedule = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
    parts = {"text_encoder": t5_model(tokenizer, "UMT5"), "tokenizer": tokenizer}
    vae, scheduler = video_vae("AutoencoderKLWan", seed), diffusers.UniPCMultistepScheduler(**schedule)
    return flow_model(transformer, seed, vae, **parts, scheduler=scheduler)


def _wan_i2v(seed: int) -> dict[str, Any]:
    return _wan(seed, in_channels=36, out_channels=16)


def wan_2_1_i2v(seed: int = 0) -> dict[str, Any]:
    """Wan 2.1: also has an image encoder with a processor, and a denoiser that takes its output."""
    made = tiny_model("wan-i2v")
    denoiser = type(made["transformer"]).from_config(made["transformer"].config, image_dim=24, added_kv_proj_dim=32)
    sizes: dict[str, Any] = {**_LLM, "hidden_size": 24, "image_size": 32, "patch_size": 16, "num_hidden_layers": 3}
    encoder = transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**sizes))
    made |= {"transformer": randomised(denoiser, 5), "image_encoder": randomised(encoder, seed + 6)}
    # The crop keeps part of a 40x40 square, like the crop of a wide frame.
    processor = transformers.CLIPImageProcessor(size={"shortest_edge": 40}, crop_size={"height": 32, "width": 32})
    return frozen({**made, "image_processor": processor})


def _qwen_image(seed: int) -> dict[str, Any]:
    tokenizer = qwen_tokenizer()
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]}
    vision = {"patch_size": 14, "fullatt_block_indexes": [1], "window_size": 56}
    class_name = "Qwen2_5_VLForConditionalGeneration"
    encoder = qwen_vl_model(tokenizer, 3, "Qwen2_5_VL", class_name, {"rope_parameters": rope}, vision)
    sizes = {"in_channels": 64, "out_channels": 16, "joint_attention_dim": 16, "axes_dims_rope": (8, 4, 4)}
    transformer = diffusers.QwenImageTransformer2DModel(**_BLOCKS, **sizes)
    vae = video_vae("AutoencoderKLQwenImage", seed)
    return flow_model(transformer, seed, vae, text_encoder=encoder, tokenizer=tokenizer)


def _qwen_image_edit(seed: int) -> dict[str, Any]:
    parts = _qwen_image(seed)
    return {**parts, "processor": qwen_vl_processor(parts.pop("tokenizer"))}


def _krea2(seed: int) -> dict[str, Any]:
    tokenizer = qwen_tokenizer()
    encoder = qwen_vl_model(tokenizer, 36, "Qwen3VL", "Qwen3VLModel", _QWEN3_VL, _DEEP)
    sizes = {"in_channels": 64, "num_key_value_heads": 1, "intermediate_size": 32, "timestep_embed_dim": 32}
    text = {"hidden_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 32}
    sizes |= {f"text_{name}": value for name, value in text.items()}
    sizes |= {"num_text_layers": 12, "num_layerwise_text_blocks": 1, "num_refiner_text_blocks": 1}
    transformer = diffusers.Krea2Transformer2DModel(**_BLOCKS, **sizes, axes_dims_rope=(8, 4, 4))
    vae = video_vae("AutoencoderKLQwenImage", seed)
    return flow_model(transformer, seed, vae, text_encoder=encoder, tokenizer=tokenizer)


def _qwen_image_21(seed: int) -> dict[str, Any]:
    tokenizer = qwen_tokenizer(_BLOCK_TEMPLATE)
    class_name = "Qwen3VLForConditionalGeneration"
    encoder = qwen_vl_model(tokenizer, 3, "Qwen3VL", class_name, _QWEN3_VL, {**_DEEP, "patch_size": 16})
    sizes = {"base_dim": 4, "decoder_base_dim": 4, "dim_mult": [1, 1, 1, 1, 1], "num_res_blocks": 1}
    statistics = {name: values * 4 for name, values in _STATISTICS.items()}
    vae = randomised(diffusers.AutoencoderKLQwenImage21(**sizes, **statistics), seed)
    transformer = diffusers.QwenImage21Transformer2DModel(**_BLOCKS, context_in_dim=16, axes_dims_rope=(4, 6, 6))
    processor = qwen_vl_processor(tokenizer, "Qwen3VL", patch_size=16, min_pixels=32 * 32)
    return flow_model(transformer, seed, vae, text_encoder=encoder, processor=processor)


_qwen_image_21_edit = _qwen_image_21


def _ideogram4(seed: int) -> dict[str, Any]:
    """The encoder has one layer more than is read. The second transformer is only for guidance."""
    tokenizer = qwen_tokenizer(_BLOCK_TEMPLATE + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    encoder = qwen_vl_model(tokenizer, 37, "Qwen3VL", "Qwen3VLModel", _QWEN3_VL, _DEEP)
    vae = flux2_vae(seed)
    for values in (vae.bn.running_mean, vae.bn.running_var):
        # By (row, column, channel) of a patch, and nearly equal at its four positions, as in the published model.
        values.copy_(values[:32].repeat(4) * torch.linspace(0.97, 1.03, 128))
    sizes = {"in_channels": 128, "intermediate_size": 64, "adaln_dim": 32, "llm_features_dim": 16 * 13}
    first, second = (
        diffusers.Ideogram4Transformer2DModel(**_BLOCKS, **sizes, mrope_section=(4, 2, 2)) for _ in range(2)
    )
    parts = {"tokenizer": tokenizer, "scheduler": diffusers.FlowMatchEulerDiscreteScheduler()}
    parts["unconditional_transformer"] = randomised(second, seed + 1)
    return flow_model(first, seed, vae, text_encoder=encoder, **parts)


def _ideogram4_projected(seed: int) -> dict[str, Any]:
    parts = _ideogram4(seed)
    projection = diffusers.Ideogram4Transformer2DModel.from_config(parts["transformer"].config, num_layers=0)
    projection.load_state_dict({name: parts["transformer"].state_dict()[name] for name in projection.state_dict()})
    return {**parts, "projection": projection}


def _flux2(seed: int) -> dict[str, Any]:
    """The encoder has one layer more than is read."""
    tokenizer = qwen_tokenizer()
    encoder = qwen3_model(tokenizer, 28, "Qwen3ForCausalLM")
    return flow_model(flux2_transformer(), seed, flux2_vae(seed), text_encoder=encoder, tokenizer=tokenizer)


def _flux2_dev(seed: int) -> dict[str, Any]:
    tokenizer = qwen_tokenizer(_BLOCK_TEMPLATE)
    encoder = mistral3_model(tokenizer, 31, "Mistral3ForConditionalGeneration", "mistral")
    transformer = flux2_transformer(guidance_embeds=True)
    return flow_model(transformer, seed, flux2_vae(seed), text_encoder=encoder, tokenizer=tokenizer)


def _anima(seed: int) -> dict[str, Any]:
    stand_in_for_torchvision()
    tokenizer, t5 = qwen_tokenizer(), t5_tokenizer()
    sizes = {"source_dim": 16, "target_dim": 16, "model_dim": 16, "num_layers": 2, "num_attention_heads": 4}
    conditioner = diffusers.AnimaTextConditioner(**sizes, target_vocab_size=len(t5))
    sizes = {"mlp_ratio": 2, "text_embed_dim": 16, "adaln_lora_dim": 8}
    transformer = diffusers.CosmosTransformer3DModel(
        **_BLOCKS, **sizes, rope_scale=(1.0, 4.0, 4.0), extra_pos_embed_type=None
    )
    encoders = {"text_encoder": qwen3_model(tokenizer, 3, "Qwen3Model"), "text_conditioner": randomised(conditioner, 5)}
    parts = {
        "tokenizer": tokenizer,
        "t5_tokenizer": t5,
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    }
    return flow_model(transformer, seed, video_vae("AutoencoderKLQwenImage", seed), **encoders, **parts)


def _anima_states(seed: int) -> dict[str, Any]:
    parts = _anima(seed)
    parts["transformer"].__dict__["text_conditioner"] = parts["text_conditioner"]
    return parts


def stand_in_for_torchvision() -> None:
    """Let Cosmos resize its padding mask with torch if torchvision is missing."""
    if diffusers.utils.is_torchvision_available():
        return
    from diffusers.models.transformers import transformer_cosmos

    def resize(tensor: torch.Tensor, size: list[int], interpolation: str) -> torch.Tensor:
        return torch.nn.functional.interpolate(tensor, size=size, mode=interpolation)

    transformer_cosmos.transforms = SimpleNamespace(
        functional=SimpleNamespace(resize=resize), InterpolationMode=SimpleNamespace(NEAREST="nearest")
    )
    type(family_named("anima")).denoiser_needs = None


def _ernie_image(seed: int) -> dict[str, Any]:
    tokenizer = qwen_tokenizer()
    encoder = mistral3_model(tokenizer, 4, "Mistral3Model", "ministral3")
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_layers": 2, "ffn_hidden_size": 64, "text_in_dim": 16}
    transformer = diffusers.ErnieImageTransformer2DModel(
        **sizes, in_channels=128, out_channels=128, rope_axes_dim=(8, 4, 4)
    )
    parts = {
        "text_encoder": encoder,
        "tokenizer": tokenizer,
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    }
    return flow_model(transformer, seed, flux2_vae(seed), **parts)


def randomised(module: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Randomise every parameter. Some models initialise gates to zero, which would hide texts and conditions."""
    with torch.no_grad(), seeded(seed):
        for part in module.modules():
            for name, parameter in part.named_parameters(recurse=False):
                if parameter.ndim >= 2:
                    fan_in = 1 if isinstance(part, torch.nn.Embedding) else parameter[0].numel()
                    parameter.normal_(0, fan_in**-0.5)
                else:
                    parameter.normal_(0 if name == "bias" else 1, 0.1)
    return module


def byte_symbols() -> list[str]:
    """The printable symbols of the 256 bytes, in the order of CLIP's vocabulary."""
    return list(tiny_part("tokenizer").convert_ids_to_tokens(list(range(256))))


def image_vae(channels: int, **options: Any) -> Any:
    """An AutoencoderKL like the tiny SDXL's, with other weights and these settings."""
    settings = {**tiny_part("vae").config, "latent_channels": channels, "force_upcast": False, **options}
    return diffusers.AutoencoderKL.from_config(settings)


def t5_tokenizer() -> Any:
    """A T5 tokenizer with letters and a few words, for texts of up to 512 tokens."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -3.0)]
    pieces += [(word, -2.0) for word in _T5_WORDS] + [(chr(code), -5.0) for code in range(33, 127)]
    tokenizer_class: Any = transformers.T5TokenizerFast  # type: ignore[attr-defined]  # created lazily
    return tokenizer_class(vocab=pieces, extra_ids=0, model_max_length=512)


def t5_model(tokenizer: Any, name: str = "T5") -> Any:
    """A T5 encoder of two layers, or one of UMT5."""
    config, model = getattr(transformers, f"{name}Config"), getattr(transformers, f"{name}EncoderModel")
    sizes = {"vocab_size": len(tokenizer), "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    return randomised(model(config(**sizes, **ids, dropout_rate=0.1, feed_forward_proj="gated-gelu")), 2)


def qwen_tokenizer(chat_template: str = _CHAT_TEMPLATE) -> Any:
    """A Qwen tokenizer of bytes, with the words of the system prompts as tokens, as a fixed number is dropped."""
    vocab = {symbol: index for index, symbol in enumerate(byte_symbols())}
    merges: list[tuple[str, str]] = []
    made: Any = transformers.Qwen2Tokenizer  # its type hints are too narrow
    for word in _QWEN_TEXT.split():
        pieces = [token.value for token in made(vocab=vocab, merges=merges).backend_tokenizer.model.tokenize(word)]
        for piece in pieces[1:]:
            merges.append((pieces[0], piece))
            pieces[0] += piece
            vocab.setdefault(pieces[0], len(vocab))
    vocab |= {special: len(vocab) + index for index, special in enumerate(_QWEN_SPECIALS)}
    tokenizer = made(vocab=vocab, merges=merges, model_max_length=4096)
    tokenizer.add_special_tokens({"additional_special_tokens": list(_QWEN_SPECIALS[1:])})
    tokenizer.chat_template = chat_template
    return tokenizer


def qwen3_model(tokenizer: Any, num_layers: int, class_name: str) -> Any:
    """A Qwen3 of this class, as `Qwen3Model`."""
    sizes: dict[str, Any] = {**_LLM, **_SHARED_HEADS, "vocab_size": len(tokenizer), "head_dim": 8}
    config = transformers.Qwen3Config(**sizes, num_hidden_layers=num_layers, tie_word_embeddings=True)
    return randomised(getattr(transformers, class_name)(config), 3)


def mistral3_model(tokenizer: Any, num_layers: int, class_name: str, text_type: str) -> Any:
    """A Mistral 3 of this class, with a language model of this type."""
    sizes = {**_LLM, "head_dim": 8}
    text = {"model_type": text_type, **sizes, **_SHARED_HEADS, "vocab_size": len(tokenizer)}
    if text_type == "ministral3":
        text["max_position_embeddings"] = 262144  # 16 times what it states
    vision = {"model_type": "pixtral", **sizes, "num_hidden_layers": 1, "patch_size": 14, "image_size": 28}
    config = transformers.Mistral3Config(text_config={**text, "num_hidden_layers": num_layers}, vision_config=vision)
    return randomised(getattr(transformers, class_name)(config), 4)


def qwen_vl_model(
    tokenizer: Any, num_layers: int, name: str, class_name: str, text: Mapping[str, Any], vision: Mapping[str, Any]
) -> Any:
    """A Qwen-VL model, such as `Qwen2_5_VL`, with these settings of its text and vision configs."""
    tokens = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    specials = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    ids = {"bos_token_id": None, "pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    sizes = {**_LLM, **_SHARED_HEADS, "vocab_size": len(tokenizer), "num_hidden_layers": num_layers}
    seeing = {"depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 16}
    config = getattr(transformers, f"{name}Config")(
        text_config={**sizes, **ids, **text},
        vision_config={**seeing, **vision},
        **dict(zip(tokens, map(tokenizer.convert_tokens_to_ids, specials), strict=True)),
    )
    return randomised(getattr(transformers, class_name)(config), 4)


def qwen_vl_processor(tokenizer: Any, name: str = "Qwen2VL", **image_settings: Any) -> Any:
    """A processor of texts and images. The library's also has one for videos, which needs torchvision."""
    made_class: Any = getattr(transformers, f"{name}Processor")

    class TinyProcessor(made_class):  # type: ignore[misc]  # chosen by name
        def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str | None = None):
            super().__init__(image_processor, tokenizer, chat_template=chat_template)

        def check_argument_for_proper_class(self, *_: Any) -> None:  # it would need torchvision
            return None

    reader = transformers.Qwen2VLImageProcessor(**image_settings)
    return TinyProcessor(reader, tokenizer, chat_template=tokenizer.chat_template)


def video_vae(class_name: str, seed: int) -> Any:
    """A VAE of this class with uneven statistics of its 16 channels, and 8 pixels per latent row."""
    sizes = {"base_dim": 4, "z_dim": 16, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
    return randomised(getattr(diffusers, class_name)(**sizes, **_STATISTICS), seed)


def flux2_vae(seed: int) -> Any:
    """An AutoencoderKLFlux2 with 8 pixels per latent row, and uneven statistics of its batch norm."""
    vae: Any = diffusers.AutoencoderKLFlux2(
        block_out_channels=(8, 16, 16, 16), latent_channels=32, norm_num_groups=4, sample_size=64
    )
    randomised(vae, seed)
    with seeded(seed):
        vae.bn.running_mean.normal_(0.3, 1)
        vae.bn.running_var.uniform_(0.2, 3)
    return vae


def flux2_transformer(*, guidance_embeds: bool = False) -> Any:
    """A FLUX.2 denoiser with two blocks, for three text encoder layers of 16 features."""
    sizes = {"in_channels": 128, "joint_attention_dim": 48, "axes_dims_rope": (4, 4, 4, 4)}
    return diffusers.Flux2Transformer2DModel(
        **_SINGLE_AND_DOUBLE, **sizes, timestep_guidance_channels=32, guidance_embeds=guidance_embeds
    )


def flow_model(transformer: Any, seed: int, vae: Any, **parts: Any) -> dict[str, Any]:
    """These parts, with a randomised transformer and the scheduler of most flow models."""
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    return {"scheduler": scheduler, "vae": vae, **parts, "transformer": randomised(transformer, seed)}


def tiny_pipeline(parts: Mapping[str, Any] | None = None, *, seed: int = 0) -> Any:
    """A diffusers pipeline with `parts`, and otherwise those of the tiny SDXL."""
    family = family_named(DEFAULT)
    made = {**tiny_model(DEFAULT, seed), family.denoiser: tiny_denoiser(DEFAULT, seed)}
    return family.pipeline(**{**made, **(parts or {})})
