"""A tiny SDXL, built from configs: no download, real topology, random weights that a seed determines.

It has SDXL's parts and wiring (two CLIP text encoders, pooled output of the second, `text_time` conditioning, a VAE
with `force_upcast`), about 0.4 M parameters without the UNet, and builds in a fraction of a second. Its images are
noise: it is for trials and tests. `tiny_photos_pipeline` has trained weights: it knows the quickstart's photos.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, EulerDiscreteScheduler, StableDiffusionXLPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

from latentcache.families.sdxl import LATENT_CHANNELS, NUM_TOKENS, SCALING_FACTOR
from latentcache.models.model_files import TINY_PHOTOS_FOLDER, loading, sdxl_pipeline

HIDDEN_SIZE, HIDDEN_SIZE_2 = 32, 40
TIME_EMBED_DIM = 8


def tiny_sdxl(seed: int = 0) -> dict[str, Any]:
    """The parts `vae`, `text_encoder`, `text_encoder_2`, `tokenizer` and `tokenizer_2`: float32, CPU, eval, frozen.

    One seed gives one set of weights. The global random state is left as it was.
    """
    tokenizer, tokenizer_2 = tiny_tokenizers()
    with _seeded(seed):
        text_encoder = CLIPTextModel(_text_config(len(tokenizer), HIDDEN_SIZE, "quick_gelu"))
        text_encoder_2 = CLIPTextModelWithProjection(_text_config(len(tokenizer), HIDDEN_SIZE_2, "gelu"))
        vae = AutoencoderKL(
            block_out_channels=(16, 32, 32, 32),
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            latent_channels=LATENT_CHANNELS,
            norm_num_groups=8,
            sample_size=64,
            scaling_factor=SCALING_FACTOR,
            force_upcast=True,
        )
    for module in (text_encoder, text_encoder_2, vae):
        module.eval().requires_grad_(False)
    return {
        "vae": vae,
        "text_encoder": text_encoder,
        "text_encoder_2": text_encoder_2,
        "tokenizer": tokenizer,
        "tokenizer_2": tokenizer_2,
    }


def tiny_tokenizers() -> tuple[CLIPTokenizer, CLIPTokenizer]:
    """Two CLIP tokenizers over 512 byte tokens and two special ones. As in SDXL, the second pads with `!` (id 0)."""
    symbols = _byte_symbols()
    tokens = [*symbols, *(symbol + "</w>" for symbol in symbols), "<|startoftext|>", "<|endoftext|>"]
    vocab = {token: index for index, token in enumerate(tokens)}
    return (
        CLIPTokenizer(vocab=vocab, merges=[], model_max_length=NUM_TOKENS),
        CLIPTokenizer(vocab=vocab, merges=[], model_max_length=NUM_TOKENS, pad_token="!"),
    )


def tiny_unet(seed: int = 0) -> UNet2DConditionModel:
    """A UNet that fits the parts of `tiny_sdxl`: float32, CPU, trainable. Latents are [B, 4, h, w]."""
    with _seeded(seed):
        return UNet2DConditionModel(
            sample_size=8,
            in_channels=LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            layers_per_block=1,
            block_out_channels=(32, 64, 64),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=(2, 4, 8),
            transformer_layers_per_block=(1, 1, 2),
            use_linear_projection=True,
            cross_attention_dim=HIDDEN_SIZE + HIDDEN_SIZE_2,
            addition_embed_type="text_time",
            addition_time_embed_dim=TIME_EMBED_DIM,
            projection_class_embeddings_input_dim=6 * TIME_EMBED_DIM + HIDDEN_SIZE_2,
            norm_num_groups=8,
        )


def tiny_pipeline(parts: Mapping[str, Any] | None = None, *, seed: int = 0) -> StableDiffusionXLPipeline:
    """A whole pipeline over `parts` (default: `tiny_sdxl(seed)`), with a UNet and a scheduler of SDXL's settings."""
    scheduler = EulerDiscreteScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        timestep_spacing="leading",
        steps_offset=1,
    )
    parts = tiny_sdxl(seed) if parts is None else dict(parts)
    return sdxl_pipeline(**{"unet": tiny_unet(seed), "scheduler": scheduler, **parts})


def tiny_photos_pipeline() -> StableDiffusionXLPipeline:
    """The tiny SDXL that was trained on the quickstart's photos: float32, CPU, eval, frozen; v-prediction.

    It is what `model.path: tiny-photos` names. It returns these photos for their captions, in 256x256 pixels, and
    little else. `scripts/train_tiny.py` makes it.
    """
    pipeline_class: Any = StableDiffusionXLPipeline  # diffusers has no types
    with loading("model", str(TINY_PHOTOS_FOLDER)):
        made = pipeline_class.from_pretrained(TINY_PHOTOS_FOLDER, add_watermarker=False, local_files_only=True)
    parts = {name: part for name, part in made.components.items() if part is not None}
    for part in parts.values():
        if isinstance(part, torch.nn.Module):
            torch.nn.Module.float(part).eval().requires_grad_(False)
    return sdxl_pipeline(**parts)


def save_diffusers_folder(parts: Mapping[str, Any], path: str | Path) -> Path:
    """Write the parts as a diffusers folder that `ModelLoader` and diffusers read. `path` must not exist yet."""
    path = Path(path)
    if path.exists():
        raise FileExistsError(f"{path} exists: name a folder that does not, the model is not written over it")
    tiny_pipeline(parts).save_pretrained(path, safe_serialization=True)
    return path


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def _text_config(vocab_size: int, hidden_size: int, hidden_act: str) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 2,
        projection_dim=hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=NUM_TOKENS,
        hidden_act=hidden_act,
        bos_token_id=vocab_size - 2,
        eos_token_id=vocab_size - 1,
        pad_token_id=vocab_size - 1,
    )


def _byte_symbols() -> list[str]:
    """The printable stand-ins for the 256 bytes, in the order of CLIP's vocabulary (OpenAI's `bytes_to_unicode`)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    num_others = 256 - len(printable)
    return [chr(code) for code in printable] + [chr(256 + index) for index in range(num_others)]
