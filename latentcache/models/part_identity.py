"""The identity of a loaded encoder or tokenizer: its weights, and the config settings that change its outputs.

Nothing here imports diffusers or transformers: trainers that pass loaded parts may use other releases.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from blake3 import blake3

from latentcache.errors import ModelError
from latentcache.identity import PartIdentity, canonical_json, digest

OPTIONAL_WEIGHTS = frozenset({"quant_conv."})
"""Weight name prefixes that some models of a class lack."""
_IMPLIED = {"vision_config.rope_parameters.rope_theta": 10_000.0}
"""What earlier releases of transformers imply where later ones state it: left out, so that keys stay."""
_TILE_SETTING = re.compile(r"tile_.*|use_framewise_.*|num_(sample|latent)_frames.*")
"""Attributes that configure a VAE's tiling, whose names vary by class."""


def _check_no_adapters(part: str, module: torch.nn.Module) -> None:
    """ModelError for adapters: their scale and state are not weights, so different outputs would share an identity."""
    for name, child in module.named_modules():
        if hasattr(child, "active_adapters") and hasattr(child, "scaling"):  # peft's tuner layers
            raise ModelError(
                f"{part}.{name} has adapters ({', '.join(child.active_adapters) or 'none active'}), whose scale is not "
                "part of the weights. Merge them (merge_and_unload) or unload them before caching.",
                part=part,
            )


def _named(part: str, values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The named settings that the config has, without None values, which later releases may add.

    ModelError if it has none of the settings of one of its nested configs.
    """
    found = {}
    for name in names:
        value: Any = values
        for key in name.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(value, Mapping):
            value = {key: each for key, each in value.items() if each is not None}
        if value is not None and value != _IMPLIED.get(name):
            found[name] = value
    nested = [{name.rpartition(".")[0] for name in some} for some in ({*names} - _IMPLIED.keys(), found)]
    for inner in nested[0] - nested[1]:
        raise ModelError(
            f"{part}: its config has none of the settings of {inner or 'its encoder'!r} that its outputs depend on. "
            "Install a release of transformers that latentcache supports (see pyproject.toml).",
            part=part,
        )
    return found


def module_identity(
    part: str,
    module: torch.nn.Module,
    dtype: torch.dtype,
    weights: Sequence[str],
    settings: Sequence[str] | None,
) -> PartIdentity:
    """The identity of an encoder that computes in `dtype`, the same on every device, for folders and single files.

    It covers weights with one of the prefixes `weights`, cast to `dtype`, and `settings` as in `Part`; None means the
    whole config, for a class that no family has. Raises ModelError for offloaded weights (meta tensors), for adapters
    such as LoRA, and for a config with none of the settings.
    """
    _check_no_adapters(part, module)
    config: Any = module.config
    values = config.to_dict() if hasattr(config, "to_dict") else dict(config)
    if settings is None:
        settings = [name for name in values if not name.startswith("_") and name != "transformers_version"]
    counting = _named(part, values, settings)
    if getattr(module, "use_tiling", False):
        # Tiling changes outputs: tiles are encoded separately and blended. Slicing, one image at a time, does not.
        names = sorted(filter(_TILE_SETTING.fullmatch, vars(module)))
        counting["tiling"] = {name: getattr(module, name) for name in names}
    found, state = weights_digest(part, module, dtype, weights), module.state_dict()
    stacks = {prefix.partition(".")[0] for prefix in weights}
    # Buffers outside the state are computed in float32, such as rotary frequencies. A cast of the module rounds them.
    rounded = {
        name: _tensor_digest(each.cpu())
        for name, each in module.named_buffers()
        if name not in state and each.is_floating_point() and each.itemsize < 4 and stacks & {"", name.split(".")[0]}
    }
    if rounded:
        counting["rounded"] = rounded
    return PartIdentity(type(module).__name__, found, digest(canonical_json(counting)))


def tokenizer_identity(part: str, tokenizer: Any, image_settings: Sequence[str] = ()) -> PartIdentity:
    """The identity of a tokenizer: `weights` is its vocabulary, merges and text rules, `config` its special tokens.

    With `image_settings` it is a processor's, and includes these settings for images. Raises ModelError for a
    tokenizer without a `tokenizers` backend.
    """
    image_processor = getattr(tokenizer, "image_processor", None) if image_settings else None
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a processor contains one
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelError(
            f"{part}: {type(tokenizer).__name__} has no `tokenizers` backend, so its rules cannot be read. "
            "Use one of transformers' fast tokenizers.",
            part=part,
        )
    # Without padding and truncation, the state of the last call, and the decoder, which does not affect ids.
    state = json.loads(backend.to_str())
    rules = {key: state[key] for key in ("added_tokens", "model", "normalizer", "post_processor", "pre_tokenizer")}
    settings = {
        "model_max_length": tokenizer.model_max_length,
        "padding_side": tokenizer.padding_side,
        "special_tokens": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "truncation_side": tokenizer.truncation_side,
    }
    if getattr(tokenizer, "split_special_tokens", False):  # by default a special token in a text is one token
        settings["split_special_tokens"] = True
    if image_processor is not None:
        settings["images"] = _images(part, image_processor, image_settings)
    return PartIdentity(type(tokenizer).__name__, digest(canonical_json(rules)), digest(canonical_json(settings)))


def image_processor_identity(part: str, processor: Any, settings: Sequence[str]) -> PartIdentity:
    """The identity of an image processor: the named settings."""
    config = digest(canonical_json(_images(part, processor, settings)))
    return PartIdentity("image processor", digest(b""), config)


def _images(part: str, processor: Any, names: Sequence[str]) -> dict[str, Any]:
    # Including the class: Pillow's and torchvision's resize differently.
    return {**_named(part, processor.to_dict(), names), "class": type(processor).__name__}


def weights_digest(
    part: str, module: torch.nn.Module, dtype: torch.dtype | None, weights: Sequence[str] = ("",)
) -> str:
    """Digest of a module's weights with one of the name prefixes `weights`, floating ones cast to `dtype`.

    With `dtype` None, each keeps its own. The module stays in place; CPU copies are digested. Raises ModelError for
    weights on `meta`, and for a prefix without any weights, as the digest would be incomplete. A VAE may lack
    OPTIONAL_WEIGHTS.
    """
    names = list(module.state_dict())
    for prefix in set(weights) - OPTIONAL_WEIGHTS - {""}:
        if not any(name.startswith(prefix) for name in names):
            met = names[0] if names else "none at all"
            raise ModelError(
                f"{part}: no weight of {type(module).__name__} has a name that begins with {prefix!r}; the first is "
                f"{met!r}. Pass the module without a wrapper, of the class that the family names.",
                part=part,
            )
    rows: list[tuple[str, str, list[int], str]] = []
    # transformers before 5.6 wraps CLIP models in one more module. Keys must not depend on the release.
    wrapper = {"CLIPTextModel": "text_model.", "CLIPVisionModel": "vision_model."}.get(type(module).__name__, "")
    for name, tensor in sorted((k.removeprefix(wrapper), v) for k, v in module.state_dict().items()):
        if not name.startswith(tuple(weights)):
            continue
        if tensor.device.type == "meta":
            raise ModelError(
                f"{part}.{name} has no values (it is on the meta device: offloaded, or missing in the file). "
                "Pass the module before enabling offloading, or the model's path.",
                part=part,
            )
        digested = used_dtype(module, name, tensor, dtype)
        values = _tensor_digest(tensor.detach().to("cpu", digested))
        rows.append((name, str(digested), list(tensor.shape), values))
    return digest(canonical_json(rows))


def used_dtype(module: torch.nn.Module, name: str, weight: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of a weight of a module that computes in `dtype`. Integers keep theirs, and so do all with None.

    transformers keeps weights that overflow in float16, such as T5's `wo`, in float32. A module that was cast as a
    whole has them in float16.
    """
    if dtype is None or not weight.is_floating_point():
        return weight.dtype
    kept = set(getattr(module, "_keep_in_fp32_modules", None) or ()) & set(name.split("."))
    return torch.float32 if kept and dtype == torch.float16 != weight.dtype else dtype


def _tensor_digest(tensor: torch.Tensor) -> str:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return blake3(data, max_threads=blake3.AUTO if data.nbytes > 1 << 20 else 1).hexdigest()
