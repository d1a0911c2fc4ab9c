"""How this run encodes: the models' identities, dtypes and batch sizes, each with its reason."""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from pydantic import PositiveInt, TypeAdapter

from latentcache.config import Config, ModelConfig
from latentcache.devices.placement import Placement, device_named, vae_batch_size
from latentcache.identity import ImageEncoding, TextEncoding
from latentcache.models.model_loader import ModelLoader, Models
from latentcache.models.vae import DTYPES, text_dtype, vae_dtype
from latentcache.precache.plan import TEXT_BATCH_SIZE
from latentcache.types import Bucket
from latentcache.utils.json_document import recalled


@dataclass(frozen=True, slots=True)
class TextEncodings:
    """How texts are encoded: the encodings, which are in the keys, and the placement, of which only the dtype is.

    `negative` is the encoding of negative prompts: diffusers applies clip_skip to positive prompts only.
    """

    text: TextEncoding
    negative: TextEncoding
    text_encoders: Placement
    text_bytes: int
    """Bytes of one text entry."""


@dataclass(frozen=True, slots=True)
class Encodings(TextEncodings):
    """How texts and images are encoded."""

    image: ImageEncoding
    vae: Placement
    latent_channels: int
    downscale: int
    image_group_size: int
    """Images that one rank gets together. Ranks must agree on it, so it does not depend on a machine's memory; each
    rank encodes a group in as many calls as it needs."""

    def image_bytes(self, bucket: Bucket) -> int:
        """Bytes of one image entry of this bucket."""
        channels = self.latent_channels * (2 if self.image.output == "moments" else 1)
        num_pixels = math.prod(bucket) // self.downscale**2
        return channels * num_pixels * DTYPES[self.image.store_dtype].itemsize


AUTO_GROUP_SIZE = 16


def load_models(config: ModelConfig, memo: MutableMapping[str, str]) -> ModelLoader:
    """The models that the config names; nothing is loaded before it is needed."""
    return ModelLoader(config.path, vae=config.vae, config=config.config, variant=config.variant, memo=memo)


def choose_encodings(
    config: Config,
    models: Models,
    memo: MutableMapping[str, str],
    local_rank: int | None = None,
    *,
    elsewhere: torch.device | None = None,
) -> Encodings:
    """Resolve every `auto` of the config for these models and this machine, or for a device that is `elsewhere`.

    A part is loaded only if what is needed of it is not in `memo`. Raises ConfigError, DeviceError or ModelError.
    """
    encode = config.encode
    device = elsewhere or device_named(encode.device, local_rank)
    vae_config = models.vae_config()
    vae_type, vae_reason = vae_dtype(encode.vae_dtype, vae_config, device)
    if elsewhere is not None:
        image_batch_size, batch_reason = 1, "each encoder chooses its batch size"
    elif encode.batch_size == "auto":
        largest = max(dataset.buckets.area for dataset in config.datasets)
        image_batch_size, batch_reason = vae_batch_size(device, vae_type, largest)
    else:
        image_batch_size, batch_reason = encode.batch_size, f"batch_size is {encode.batch_size}"
    texts = choose_text_encodings(config, models, memo, local_rank, elsewhere=elsewhere)
    image = ImageEncoding(
        vae=models.identity("vae", vae_type),
        compute_dtype=dtype_name(vae_type),
        output=encode.image_output,
        store_dtype=dtype_name(vae_type) if encode.store_dtype == "auto" else encode.store_dtype,
        scaling_factor=vae_config["scaling_factor"],
        shift_factor=vae_config["shift_factor"],
        seed=encode.seed if encode.image_output == "sample" else 0,
    )
    return Encodings(
        **{name: getattr(texts, name) for name in TextEncodings.__slots__},
        image=image,
        vae=Placement(device, vae_type, image_batch_size, f"{vae_reason} {batch_reason}"),
        latent_channels=vae_config["latent_channels"],
        downscale=vae_config["downscale_factor"],
        image_group_size=AUTO_GROUP_SIZE if encode.batch_size == "auto" else encode.batch_size,
    )


def choose_text_encodings(
    config: Config,
    models: Models,
    memo: MutableMapping[str, str],
    local_rank: int | None = None,
    *,
    elsewhere: torch.device | None = None,
) -> TextEncodings:
    """The part of `choose_encodings` that texts need, without the VAE."""
    encode = config.encode
    device = elsewhere or device_named(encode.device, local_rank)
    text_type, reason = text_dtype(encode.text_dtype, device)
    text = TextEncoding(
        text_encoder=models.identity("text_encoder", text_type),
        text_encoder_2=models.identity("text_encoder_2", text_type),
        tokenizer=models.identity("tokenizer", text_type),
        tokenizer_2=models.identity("tokenizer_2", text_type),
        compute_dtype=dtype_name(text_type),
        store_dtype=dtype_name(text_type) if encode.store_dtype == "auto" else encode.store_dtype,
        clip_skip=encode.clip_skip,
    )
    return TextEncodings(
        text=text,
        negative=replace(text, clip_skip=0),
        text_encoders=Placement(device, text_type, text_batch_size(device), reason),
        text_bytes=_text_width(models, text_type, text, memo) * DTYPES[text.store_dtype].itemsize,
    )


def text_batch_size(device: torch.device) -> int:
    """How many captions are encoded at once: see TEXT_BATCH_SIZE."""
    return 1 if device.type == "cpu" else TEXT_BATCH_SIZE


def _text_width(models: Models, dtype: torch.dtype, encoding: TextEncoding, memo: MutableMapping[str, str]) -> int:
    """Numbers in one text entry: prompt_embeds [T, D] and pooled_prompt_embeds [P]."""
    name = f"text width {encoding.text_encoder.name} {encoding.text_encoder_2.name} {encoding.tokenizer.name}"
    width = recalled(memo, name, TypeAdapter(PositiveInt).validate_json)
    if width is None:
        parts = models.text(dtype)
        first: Any = parts.text_encoder.config
        second: Any = parts.text_encoder_2.config
        hidden_size = first.hidden_size + second.hidden_size
        width = parts.tokenizer.model_max_length * hidden_size + second.projection_dim
        memo[name] = str(width)
    return width


def dtype_name(dtype: torch.dtype) -> str:
    """`float16` for torch.float16."""
    return str(dtype).removeprefix("torch.")
