"""The identity of a loaded encoder or tokenizer: its weights, and what in its config changes its outputs.

Nothing here imports diffusers or transformers: the trainers that pass loaded parts have other releases of them.
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
"""First parts of names that some models of a class do not have."""
_TILE_SETTING = re.compile(r"tile_.*|use_framewise_.*|num_(sample|latent)_frames.*")
"""Attributes of a VAE that say how it cuts tiles, which each class names in its own way."""


def _check_no_adapters(part: str, module: torch.nn.Module) -> None:
    """An adapter's scale, and whether it is on, are no weights: two outputs would have one identity."""
    for name, child in module.named_modules():
        if hasattr(child, "active_adapters") and hasattr(child, "scaling"):  # peft's tuner layers
            raise ModelError(
                f"{part}.{name} has adapters ({', '.join(child.active_adapters) or 'none active'}), whose scale is not "
                "part of the weights. Merge them (merge_and_unload) or unload them before this part is cached.",
                part=part,
            )


def _named(part: str, values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The named settings that the config has, but for None: with it a later release may fill in a key.

    ModelError if it has none of those of one of its inner configs.
    """
    found = {}
    for name in names:
        value: Any = values
        for key in name.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(value, Mapping):
            value = {key: each for key, each in value.items() if each is not None}
        if value is not None:
            found[name] = value
    for inner in {name.rpartition(".")[0] for name in names} - {name.rpartition(".")[0] for name in found}:
        raise ModelError(
            f"{part}: its config has none of the settings of {inner or 'its encoder'!r} that its outputs depend on. "
            "Install a release of transformers that latentcache allows (see pyproject.toml).",
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
    """The identity of an encoder that computes in `dtype`: the same on every device, for a folder and a single file.

    Floating weights are digested as they are in `dtype`: those whose names begin with one of `weights`. `settings` are
    those of `Part`; None: all of its config, for a class that no family has. Raises ModelError if weights are offloaded
    (meta tensors), if the module has adapters such as LoRA, or if its config has none of the settings.
    """
    _check_no_adapters(part, module)
    config: Any = module.config
    values = config.to_dict() if hasattr(config, "to_dict") else dict(config)
    if settings is None:
        settings = [name for name in values if not name.startswith("_") and name != "transformers_version"]
    counting = _named(part, values, settings)
    if getattr(module, "use_tiling", False):
        # Tiles are encoded apart and blended: other outputs. Slicing only takes the images one by one.
        names = sorted(filter(_TILE_SETTING.fullmatch, vars(module)))
        counting["tiling"] = {name: getattr(module, name) for name in names}
    found = weights_digest(part, module, dtype, weights)
    return PartIdentity(type(module).__name__, found, digest(canonical_json(counting)))


def tokenizer_identity(part: str, tokenizer: Any, image_settings: Sequence[str] = ()) -> PartIdentity:
    """The identity of a tokenizer: `weights` is its vocabulary, merges and text rules, `config` its special tokens.

    With `image_settings` it is a processor's, and these settings count by which it prepares images. Raises ModelError
    for a tokenizer without a `tokenizers` backend.
    """
    image_processor = getattr(tokenizer, "image_processor", None) if image_settings else None
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # a processor has one, and reads images too
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelError(
            f"{part}: {type(tokenizer).__name__} has no `tokenizers` backend, so its rules cannot be read. "
            "Use a fast tokenizer of transformers.",
            part=part,
        )
    # Padding and truncation are left out: they are the state of the last call. The decoder makes text, not ids.
    state = json.loads(backend.to_str())
    rules = {key: state[key] for key in ("added_tokens", "model", "normalizer", "post_processor", "pre_tokenizer")}
    settings = {
        "model_max_length": tokenizer.model_max_length,
        "padding_side": tokenizer.padding_side,
        "special_tokens": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        "truncation_side": tokenizer.truncation_side,
    }
    if image_processor is not None:
        settings["images"] = _images(part, image_processor, image_settings)
    return PartIdentity(type(tokenizer).__name__, digest(canonical_json(rules)), digest(canonical_json(settings)))


def image_processor_identity(part: str, processor: Any, settings: Sequence[str]) -> PartIdentity:
    """The identity of a processor of images alone, which has no weights: those of its settings that are named."""
    config = digest(canonical_json(_images(part, processor, settings)))
    return PartIdentity("image processor", digest(b""), config)


def _images(part: str, processor: Any, names: Sequence[str]) -> dict[str, Any]:
    # The class too: that of Pillow and that of torchvision resize otherwise.
    return {**_named(part, processor.to_dict(), names), "class": type(processor).__name__}


def weights_digest(
    part: str, module: torch.nn.Module, dtype: torch.dtype | None, weights: Sequence[str] = ("",)
) -> str:
    """Digest of those weights of a module whose names begin with one of `weights`: floating ones as in `dtype`.

    With None each counts in the dtype that it has. Copies on the CPU are digested, and the module stays where it is.
    Raises ModelError for weights on `meta`, and if no name begins with one of `weights`: the digest would leave out
    what counts. A VAE may lack OPTIONAL_WEIGHTS.
    """
    names = list(module.state_dict())
    for prefix in set(weights) - OPTIONAL_WEIGHTS - {""}:
        if not any(name.startswith(prefix) for name in names):
            met = names[0] if names else "none at all"
            raise ModelError(
                f"{part}: no weight of {type(module).__name__} has a name that begins with {prefix!r}; the first is "
                f"{met!r}. Give the module itself without a wrapper, of the class that the family names.",
                part=part,
            )
    rows: list[tuple[str, str, list[int], str]] = []
    prefixes = tuple(weights)
    # transformers before 5.6 has all of a model of CLIP in one module: one model has one key under every release.
    wrapper = {"CLIPTextModel": "text_model.", "CLIPVisionModel": "vision_model."}.get(type(module).__name__, "")
    for name, tensor in sorted((k.removeprefix(wrapper), v) for k, v in module.state_dict().items()):
        if not name.startswith(prefixes):
            continue
        if tensor.device.type == "meta":
            raise ModelError(
                f"{part}.{name} holds no values (it is on the meta device: offloaded, or missing in the file). "
                "Pass the module before offloading is enabled, or name the model's path.",
                part=part,
            )
        digested = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        values = _tensor_digest(tensor.detach().to("cpu", digested))
        rows.append((name, str(digested), list(tensor.shape), values))
    return digest(canonical_json(rows))


def _tensor_digest(tensor: torch.Tensor) -> str:
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    return blake3(data, max_threads=blake3.AUTO if data.nbytes > 1 << 20 else 1).hexdigest()
