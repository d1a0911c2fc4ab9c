"""What bench_precache.py encodes, and with what: photographs, captions, and encoders of SDXL's make."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL
from PIL import Image
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from latentcache.families.sdxl import SCALING_FACTOR
from latentcache.models.model_loader import LoadedModels
from latentcache.models.tiny import seeded, tiny_parts

JPEG_QUALITY = 92
WORDS = ("a", "photo", "of", "red", "house", "under", "tall", "trees", "near", "quiet", "river", "at", "dusk", "with")


@dataclass(frozen=True, slots=True)
class VaeShape:
    """The VAE's encoder: SDXL's is the default. Two resnets a level, attention in the middle."""

    channels: tuple[int, ...] = (128, 256, 512, 512)
    norm_num_groups: int = 32


@dataclass(frozen=True, slots=True)
class TextShape:
    """One CLIP text encoder."""

    hidden_size: int
    num_layers: int
    num_heads: int
    hidden_act: str


SDXL_VAE = VaeShape()
CLIP_L = TextShape(768, 12, 12, "quick_gelu")
CLIP_BIG_G = TextShape(1280, 32, 20, "gelu")


def make_vae(shape: VaeShape, dtype: torch.dtype) -> AutoencoderKL:
    """An AutoencoderKL with random weights: CPU, frozen, eval."""
    with seeded(0):
        vae = AutoencoderKL(
            block_out_channels=shape.channels,
            down_block_types=("DownEncoderBlock2D",) * len(shape.channels),
            up_block_types=("UpDecoderBlock2D",) * len(shape.channels),
            layers_per_block=2,
            latent_channels=4,
            norm_num_groups=shape.norm_num_groups,
            scaling_factor=SCALING_FACTOR,
            force_upcast=False,
        )
    return vae.to(dtype).eval().requires_grad_(False)


def make_texts(first: TextShape, second: TextShape, dtype: torch.dtype) -> dict[str, Any]:
    """Both text encoders with random weights, and byte tokenizers: no vocabulary has to be downloaded."""
    tokenizers = [tiny_parts()[name] for name in ("tokenizer", "tokenizer_2")]
    with seeded(0):
        encoders: list[Any] = [
            kind(_text_config(shape, len(tokenizers[0])))
            for kind, shape in ((CLIPTextModel, first), (CLIPTextModelWithProjection, second))
        ]
    ready = [encoder.to(dtype).eval().requires_grad_(False) for encoder in encoders]
    names = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
    return dict(zip(names, [*ready, *tokenizers], strict=True))


def _text_config(shape: TextShape, vocab_size: int) -> CLIPTextConfig:
    return CLIPTextConfig(
        vocab_size=vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.hidden_size * 4,
        projection_dim=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        hidden_act=shape.hidden_act,
        bos_token_id=vocab_size - 2,
        eos_token_id=vocab_size - 1,
        pad_token_id=vocab_size - 1,
    )


def models_of(vae: AutoencoderKL | None = None, texts: Mapping[str, Any] | None = None) -> LoadedModels:
    """These parts, and tiny ones in place of those that are not given."""
    parts = tiny_parts()
    if vae is not None:
        parts["vae"] = vae
    if texts is not None:
        parts |= texts
    return LoadedModels(**parts)


def make_photos(folder: Path, num_photos: int, size: int, num_captions: int = 0) -> list[Path]:
    """Square JPEG files, no two of them alike, with as much detail as photographs have; all captions in the first."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    canvas = _canvas(generator, size)
    paths = []
    for number in range(num_photos):
        # Turned, rolled and tinted: drawing each by itself would take longer than all that is measured.
        pixels = np.roll(np.rot90(canvas, number % 4), int(generator.integers(size)), axis=number % 2)
        tint = generator.integers(0, 24, 3)
        path = folder / f"{number:05d}.jpg"
        Image.fromarray((pixels // 8 * 7 + tint).astype(np.uint8)).save(path, quality=JPEG_QUALITY)
        paths.append(path)
    if num_captions:
        lines = [caption(generator, number) for number in range(num_captions)]
        paths[0].with_suffix(".txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return paths


def _canvas(generator: np.random.Generator, size: int) -> np.ndarray:
    """Noise at every scale, the coarser the stronger, as in natural images. uint8 [size, size, 3]."""
    total = np.zeros((size, size, 3), np.float32)
    step, strength = 2, 60.0
    while step <= size:
        noise = generator.standard_normal((step, step, 3)).astype(np.float32)
        for channel in range(3):
            layer = Image.fromarray(noise[..., channel]).resize((size, size), Image.Resampling.BICUBIC)
            total[..., channel] += strength * np.asarray(layer)
        step, strength = step * 2, strength * 0.6
    return np.clip(total + 128, 0, 255).astype(np.uint8)


def caption(generator: np.random.Generator, number: int) -> str:
    """A caption like no other, of the usual length of some words."""
    return f"{number} " + " ".join(generator.choice(WORDS, size=int(generator.integers(4, 14))))


def narrowed(shape: VaeShape, divisor: int) -> VaeShape:
    """The same levels with fewer channels; as many groups of the norm as fit."""
    channels = tuple(count // divisor for count in shape.channels)
    return replace(shape, channels=channels, norm_num_groups=min(shape.norm_num_groups, channels[0]))
