"""Tiny models that need no download: one with random weights, of the family DEFAULT, and one that was trained.

The images of the first are noise: it is for trials and tests. The second knows the quickstart's photos.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

from latentcache.families import DEFAULT, family_named
from latentcache.models.files import TINY_PHOTOS_FOLDER, loading

_SIDE = 64
"""Pixels of the images that tiny models are made for."""
_WIDTHS, _TIME_EMBED_DIM = (32, 40), 8


def tiny_parts(seed: int = 0) -> dict[str, Any]:
    """The frozen parts of the tiny model by name: float32, CPU, eval. One seed gives one set of weights."""
    return {name: tiny_part(name, seed) for name in family_named(DEFAULT).parts}


def tiny_part(name: str, seed: int = 0) -> Any:
    """One part of the tiny model, the denoiser and the scheduler too: a copy of its own, which a caller may change."""
    return copy.deepcopy(_built(seed)[name])


def tiny_denoiser(seed: int = 0) -> Any:
    """A denoiser that fits these parts: float32, CPU, trainable."""
    return tiny_part(family_named(DEFAULT).denoiser, seed).train().requires_grad_(True)


def tiny_photos_pipeline() -> Any:
    """The tiny model that was trained on the quickstart's photos: float32, CPU, eval, frozen; v-prediction.

    It is what `model.path: tiny-photos` names. It returns these photos for their captions, in 256x256 pixels, and
    little else.
    """
    family = family_named(DEFAULT)
    with loading("model", str(TINY_PHOTOS_FOLDER)):
        made = family.pipeline_class.from_pretrained(
            TINY_PHOTOS_FOLDER, local_files_only=True, **family.pipeline_options
        )
    parts = {name: part for name, part in made.components.items() if part is not None}
    for part in parts.values():
        if isinstance(part, torch.nn.Module):
            torch.nn.Module.float(part)
    return family.pipeline(**frozen(parts))


@lru_cache(maxsize=4)
def _built(seed: int) -> dict[str, Any]:
    """All parts, frozen. Building them takes longer than copying one, and they are requested one by one.

    The topology is the family's, with 0.4 M parameters besides the denoiser. The second tokenizer pads with `!`.
    """
    import diffusers

    family = family_named(DEFAULT)
    tokenizers = clip_tokenizer(), clip_tokenizer(pad_token="!")
    with seeded(seed):
        encoders = (
            clip_text_model(tokenizers[0], _WIDTHS[0], "CLIPTextModel", hidden_act="quick_gelu"),
            clip_text_model(tokenizers[1], _WIDTHS[1], "CLIPTextModelWithProjection", hidden_act="gelu"),
        )
        vae = image_vae(family.latent.channels, scaling_factor=0.13025, force_upcast=True)
    with seeded(seed):
        unet = diffusers.UNet2DConditionModel(
            sample_size=8,
            in_channels=family.latent.channels,
            out_channels=family.latent.channels,
            layers_per_block=1,
            block_out_channels=(32, 64, 64),
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=(2, 4, 8),
            transformer_layers_per_block=(1, 1, 2),
            use_linear_projection=True,
            cross_attention_dim=sum(_WIDTHS),
            addition_embed_type="text_time",
            addition_time_embed_dim=_TIME_EMBED_DIM,
            projection_class_embeddings_input_dim=6 * _TIME_EMBED_DIM + _WIDTHS[1],
            norm_num_groups=8,
        )
    scheduler = diffusers.EulerDiscreteScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", timestep_spacing="leading", steps_offset=1
    )
    names = ("vae", *family.names("text_encoder"), *family.names("tokenizer"), "unet", "scheduler")
    return frozen(dict(zip(names, (vae, *encoders, *tokenizers, unet, scheduler), strict=True)))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The global generator of the CPU begins with this seed inside, and is as it was afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def frozen(parts: Mapping[str, Any]) -> dict[str, Any]:
    """The parts with all modules in eval mode and frozen."""
    for part in parts.values():
        if isinstance(part, torch.nn.Module):
            part.eval().requires_grad_(False)
    return dict(parts)


def byte_symbols() -> list[str]:
    """The printable stand-ins for the 256 bytes, in the order of CLIP's vocabulary (OpenAI's `bytes_to_unicode`)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    num_others = 256 - len(printable)
    return [chr(code) for code in printable] + [chr(256 + index) for index in range(num_others)]


def clip_tokenizer(**options: Any) -> Any:
    """A CLIP tokenizer over 512 byte tokens and two special ones, of 77 tokens a text."""
    from transformers import CLIPTokenizer

    symbols = byte_symbols()
    tokens = [*symbols, *(symbol + "</w>" for symbol in symbols), "<|startoftext|>", "<|endoftext|>"]
    vocab = {token: index for index, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocab, merges=[], model_max_length=77, **options)


def clip_text_model(tokenizer: Any, width: int, class_name: str = "CLIPTextModel", **options: Any) -> Any:
    """A CLIP text encoder of two layers."""
    import transformers

    size = len(tokenizer)
    config = transformers.CLIPTextConfig(
        vocab_size=size,
        hidden_size=width,
        intermediate_size=width * 2,
        projection_dim=width,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=77,
        bos_token_id=size - 2,
        eos_token_id=size - 1,
        pad_token_id=size - 1,
        **options,
    )
    return getattr(transformers, class_name)(config)


def image_vae(channels: int, **options: Any) -> Any:
    """An AutoencoderKL of 8 pixels per latent row."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(16, 32, 32, 32),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=channels,
        norm_num_groups=8,
        sample_size=_SIDE,
        **({"force_upcast": False} | options),
    )
