"""How this run encodes: model identities, dtypes and batch sizes, each with its reason."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from pydantic import PositiveInt, TypeAdapter

from latentcache.config import Config, EncodeConfig, ModelConfig
from latentcache.devices.placement import Placement, device_named, vae_batch_size
from latentcache.errors import ConfigError
from latentcache.families import DEFAULT
from latentcache.families.base import Family
from latentcache.identity import ImageEncoding, PartIdentity, TextEncoding, canonical_json, digest
from latentcache.models.files import family_of
from latentcache.models.model_loader import ModelLoader, Models
from latentcache.models.vae import VaeFacts, text_dtype, vae_dtype
from latentcache.precache.tasks import TEXT_BATCH_SIZE, Task
from latentcache.store.batch import DTYPES
from latentcache.store.entry import dtype_name
from latentcache.types import Geometry
from latentcache.utils.json_document import recalled


@dataclass(frozen=True, slots=True)
class TextEncodings:
    """How texts are encoded. Keys depend on the encodings, but only on the dtype of the placement.

    `negative` is the encoding of negative prompts, which some families encode differently.
    """

    family: Family
    text: TextEncoding
    negative: TextEncoding
    text_encoders: Placement
    text_bytes: int
    """Bytes of one text entry."""

    @property
    def has_texts(self) -> bool:
        """Whether texts are encoded. With `encode.text: none` they are not, and the encodings are empty."""
        return bool(self.text.parts)


@dataclass(frozen=True, slots=True)
class Encodings(TextEncodings):
    """How texts and images are encoded."""

    image: ImageEncoding
    vae: Placement
    facts: VaeFacts
    image_group_size: int
    """Images assigned to a rank together. All ranks must agree on it, so it does not depend on a machine's memory; a
    rank may encode a group in several calls."""

    def image_bytes(self, geometry: Geometry, encoding: ImageEncoding) -> int:
        """Bytes of one image entry of this geometry, without an encoded first frame, which is negligible."""
        facts = self.facts
        channels = facts.latent_channels * ((2 if encoding.output == "moments" else 1) + bool(encoding.condition))
        num_frames = ((geometry.num_frames or 1) - 1) // facts.frames_factor + 1
        num_pixels = math.prod(geometry.target_size) // facts.downscale_factor**2
        return channels * num_frames * num_pixels * DTYPES[self.image.store_dtype].itemsize


def text_family_json(encodings: TextEncodings) -> dict[str, Any]:
    """The manifest's entry for the family. The default family has none, because its oldest caches have none."""
    return {} if encodings.family.name == DEFAULT else {"family": encodings.family.name}


def family_json(encodings: Encodings) -> dict[str, Any]:
    """Like `text_family_json`, with the scaling of latents if the image encoding does not contain it."""
    scaling = encodings.facts.scaling
    return text_family_json(encodings) | (
        {} if scaling.rule == "factor" and not scaling.mean else {"scaling": scaling.to_json()}
    )


NO_TEXTS = TextEncoding(parts=(), compute_dtype="", store_dtype="")
"""The encoding with `encode.text: none`."""
AUTO_GROUP_SIZE = 16
TYPICAL_TOKENS = 64
"""Typical number of tokens of a caption that is stored without padding, for estimates."""


def load_models(config: ModelConfig, memo: MutableMapping[str, str]) -> ModelLoader:
    """The models that the config names, loaded lazily, except for the files that identify the family."""
    family, reason = family_of(config)
    named = config.model_dump(include={"path", "vae", "config", "variant", "revision"})
    models = ModelLoader(**named, memo=memo, family=family)
    models.family_reason = reason
    return models


def choose_encodings(
    config: Config, models: Models, memo: MutableMapping[str, str], device: torch.device | None = None
) -> Encodings:
    """Resolve every `auto` of the config for these models.

    `device`, by default that of `encode.device`, may belong to another machine. The VAE's batch size is chosen later,
    by `for_images`. A part is loaded only if the facts needed are not in `memo`. Raises ConfigError, DeviceError or
    ModelError.
    """
    encode = config.encode
    device = device or device_named(encode.device)
    facts = models.vae_facts()
    vae_type, vae_reason = vae_dtype(encode.vae_dtype, facts, device)
    texts = choose_text_encodings(config, models, memo, device)
    output = encode.image_output
    if output == "auto":
        output = "moments" if models.family.latent.draws else "mean"
    # Channel statistics are in the manifest, not in the key: latents are stored unscaled.
    picture: list[tuple[str, PartIdentity | str]] = [
        (name, models.identity(name, vae_type)) for name in models.picture_names
    ]
    if picture:  # the encoder sees the prepared first frame, not the whole frame of the file
        picture.append(("image_pixels", "prepared"))
    image = ImageEncoding(
        vae=models.identity("vae", vae_type),
        compute_dtype=dtype_name(vae_type),
        output=output,
        store_dtype=dtype_name(vae_type) if encode.store_dtype == "auto" else encode.store_dtype,
        scaling_factor=facts.scaling.scaling_factor,
        shift_factor=facts.scaling.shift_factor,
        seed=encode.seed if output == "sample" else 0,
        condition=models.family.clip_condition,
        picture=tuple(picture),
    )
    return Encodings(
        **{name: getattr(texts, name) for name in TextEncodings.__slots__},
        image=image,
        vae=Placement(device, vae_type, 1, vae_reason),
        facts=facts,
        image_group_size=AUTO_GROUP_SIZE if encode.batch_size == "auto" else encode.batch_size,
    )


def for_images(encodings: Encodings, encode: EncodeConfig, batches: Iterable[Sequence[Task]]) -> Encodings:
    """The encodings with the VAE's batch size for the largest of these images. Each clip is encoded alone."""
    shapes = (shape for batch in batches for task in batch if (shape := task.geometry) and shape.num_frames is None)
    largest = max((math.prod(shape.target_size) for shape in shapes), default=0)
    if not largest:
        return encodings
    vae, requested = encodings.vae, None if encode.batch_size == "auto" else encode.batch_size
    size, reason = vae_batch_size(vae.device, vae.dtype, largest, requested)
    return replace(encodings, vae=replace(vae, batch_size=size, reason=f"{vae.reason} {reason}"))


def choose_text_encodings(
    config: Config, models: Models, memo: MutableMapping[str, str], device: torch.device | None = None
) -> TextEncodings:
    """Like `choose_encodings`, for texts only, without the VAE. With `encode.text: none`, reads no encoder."""
    encode = config.encode
    device = device or device_named(encode.device)
    family = models.family
    text_type, reason = text_dtype(encode.text_dtype, family, device)
    if encode.text == "none":
        placement = Placement(device, text_type, 1, "not used: encode.text is none")
        return TextEncodings(family, NO_TEXTS, NO_TEXTS, placement, 0)
    names = (*family.names("text_encoder"), *family.names("tokenizer"))
    settings: dict[str, Any] = {name: getattr(encode, name) for name in ("clip_skip", "max_length", "padding")}
    store_dtype, kept = _text_store_dtype(encode, family, text_type), dict[str, Any]()
    if DTYPES[store_dtype].itemsize == 1:  # for fields without rows float8 would save less than 1 %
        kept = {f"{name}_dtype": "bfloat16" for name, field in family.fields.items() if not field.has_rows}
    text = TextEncoding(
        parts=tuple((name, models.identity(name, text_type)) for name in names),
        compute_dtype=dtype_name(text_type),
        store_dtype=store_dtype,
    )
    kept |= _parts_recipe(models, text_type, text, memo)
    text = replace(text, recipe=tuple({**family.text_recipe(**settings), **kept}.items()))
    return TextEncodings(
        family=family,
        text=text,
        negative=replace(text, recipe=tuple({**family.text_recipe(negative=True, **settings), **kept}.items())),
        text_encoders=Placement(device, text_type, text_batch_size(device), reason),
        text_bytes=_text_numbers(models, text_type, text, memo) * DTYPES[text.store_dtype].itemsize,
    )


def _text_store_dtype(encode: EncodeConfig, family: Family, compute_dtype: torch.dtype) -> str:
    """The dtype of stored texts. Raises ConfigError for float8 if padding can be dropped, which saves more."""
    name: str = encode.text_store_dtype
    if name == "float8_e4m3fn" and family.can_drop_padding:
        message = f"text_store_dtype is {name}, but {family.name} stores no padding, which saves more; use bfloat16"
        raise ConfigError(message, key="encode.text_store_dtype")
    if name == "auto":
        name = encode.store_dtype
    if name == "auto":
        # Also for float32 computation on a CPU: texts would take eight times as many bytes as latents.
        name = "bfloat16" if family.text_dtype == "bfloat16" else dtype_name(compute_dtype)
    return name


def text_dtypes(encoding: TextEncoding, fields: Iterable[str]) -> dict[str, torch.dtype]:
    """The stored dtype of each field: the encoding's, unless its recipe names another."""
    recipe = encoding.settings
    return {name: DTYPES[recipe.get(f"{name}_dtype", encoding.store_dtype)] for name in fields}


def text_batch_size(device: torch.device) -> int:
    """Captions per encoder call: see TEXT_BATCH_SIZE."""
    return 1 if device.type == "cpu" else TEXT_BATCH_SIZE


def _parts_recipe(
    models: Models, dtype: torch.dtype, encoding: TextEncoding, memo: MutableMapping[str, str]
) -> dict[str, Any]:
    """The recipe settings that depend on the encoders and tokenizers, which are loaded if the memo lacks these."""
    if type(models.family).parts_recipe is Family.parts_recipe:
        return {}  # do not load encoders for nothing
    name = f"recipe {models.family.name} {digest(canonical_json(encoding.to_json()))}"
    found = recalled(memo, name, TypeAdapter(dict[str, Literal["first eos"]]).validate_json)
    if found is None:
        found = models.family.parts_recipe(models.text(dtype))
        memo[name] = json.dumps(found)
    return found


def _text_numbers(models: Models, dtype: torch.dtype, encoding: TextEncoding, memo: MutableMapping[str, str]) -> int:
    """Number of elements in one text entry, with TYPICAL_TOKENS rows for a field that is stored without padding."""
    name = f"text numbers {digest(canonical_json(encoding.to_json()))}"
    number = recalled(memo, name, TypeAdapter(PositiveInt).validate_json)
    if number is None:
        family, recipe = models.family, encoding.settings
        number = 0
        for field, (first, *rest) in family.text_shapes(models.text(dtype), recipe).items():
            is_ragged = family.padding(field, recipe) is not None and not family.text_reads_control
            number += math.prod(rest) * (min(first, TYPICAL_TOKENS) if is_ragged else first)
        memo[name] = str(number)
    return number
