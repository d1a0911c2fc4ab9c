"""LoRA adapters on a denoiser: loading and saving them as files, and keeping their settings in a checkpoint."""

from __future__ import annotations

import inspect
import json
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from diffusers.utils import convert_state_dict_to_diffusers, is_peft_available
from diffusers.utils.state_dict_utils import convert_unet_state_dict_to_peft
from safetensors import safe_open
from safetensors.torch import save

from latentcache.checkpoints.checkpoint import is_training_checkpoint, read_checkpoint
from latentcache.checkpoints.parts import unwrapped_module
from latentcache.devices.placement import dtype_of
from latentcache.families import family_of_denoiser
from latentcache.families.base import Family
from latentcache.models.files import is_checkpoint, loading, refused
from latentcache.models.single_file import read_file
from latentcache.utils.durable_files import write_sealed

SETTINGS_KEY = "lora"
"""The name of `lora_settings` in a checkpoint's `extra`."""
LORA_FILE = "pytorch_lora_weights.safetensors"
STEP_KEY = "latentcache_step"
"""The metadata of LORA_FILE that has the training's step."""
_STEP_IN_NAME = re.compile(r"(?:checkpoint|step)[-_]?(\d+)$")

_ENCODERS = ("text_encoder.", "text_encoder_2.", "lora_te_", "lora_te1_", "lora_te2_")
_KINDS = (".lora_A.weight", ".lora_B.weight", ".lora_B.bias", ".lora_magnitude_vector.weight", ".lora_magnitude_vector")


def load_lora(denoiser: Any, path: str | Path, *, scale: float = 1.0, family: Family | None = None) -> str:
    """Add the LoRA in a .safetensors file, or in a folder with LORA_FILE, to the denoiser; returns the adapter's name.

    Files of diffusers (`save_lora_weights`, `save_lora_adapter`) are read, and of kohya and others what the pipeline of
    the `family` reads, by default that of `family_of_denoiser`. The LoRA acts with `scale` (1: as
    trained), next to the adapters that the denoiser has; without alphas in the file each is taken as the rank, as
    diffusers does. The new parameters are frozen. ModelError, and the denoiser as it was, if peft is missing, or if
    anything in the file has no place in the denoiser: names, shapes, weights of text encoders, kinds other than LoRA
    and peft's DoRA.
    """
    family = family or family_of_denoiser(denoiser)
    _need_peft()
    file = _lora_file(str(path))
    names = list(read_file("lora", file))
    _check_names(str(file), names, family)
    state, alphas, metadata = _read(file, denoiser, family)
    # diffusers converts a whole file or nothing, by its first name, and no alphas. Its own save_lora_weights mixes both
    # ways of naming; diffusers then leaves out what it did not convert, or gives it another layer's alpha.
    state, alphas = convert_unet_state_dict_to_peft(state), convert_unet_state_dict_to_peft(alphas or {})
    prefix = family.denoiser if any(key.startswith(f"{family.denoiser}.") for key in state) else None
    _check_fit(str(file), state, prefix, denoiser, family)
    dtype = dtype_of(denoiser)
    requires_grad = {id(parameter): parameter.requires_grad for parameter in denoiser.parameters()}
    had = set(getattr(denoiser, "peft_config", {}))
    active = _active_adapters(denoiser)
    with loading("lora", str(file)), _several_adapters():
        # On meta until the values come: an initialisation would draw from the global random state.
        denoiser.load_lora_adapter(
            state, prefix=prefix, network_alphas=alphas or None, metadata=metadata, low_cpu_mem_usage=True
        )
    name: str = (set(denoiser.peft_config) - had).pop()
    denoiser.set_adapter([*active, name])
    for layer in _adapted(denoiser):
        layer.set_scale(name, scale)
        layer.train(denoiser.training)
    for parameter in denoiser.parameters():
        parameter.requires_grad_(requires_grad.get(id(parameter), False))
        if id(parameter) not in requires_grad:
            # A copy: the file may be replaced while the denoiser is in use.
            parameter.data = parameter.data.to(dtype, copy=True)
    return name


def _read(file: Path, denoiser: Any, family: Family) -> tuple[dict[str, Any], dict[str, Any] | None, Any]:
    """The weights in the file, its alphas and its metadata, as the family's pipeline reads them."""
    read = family.pipeline_class.lora_state_dict
    # Pipelines differ in what they need and return. Where none are asked for, alphas are in the weights.
    needed: dict[str, Any] = {}
    if family.denoiser == "unet":
        needed = {"unet_config": denoiser.config}
    elif "return_alphas" in inspect.signature(read).parameters:
        needed = {"return_alphas": True}
    with loading("lora", str(file)):
        # The folder and the name apart: from a path alone diffusers 0.39 loads no local file.
        state, *alphas, metadata = read(
            str(file.parent),
            weight_name=file.name,
            use_safetensors=True,
            local_files_only=True,
            return_lora_metadata=True,
            **needed,
        )
    return state, alphas[0] if alphas else None, metadata


def saved_step(path: Path) -> int | None:
    """The training's step that a LoRA or a checkpoint is of, or None if nothing says it.

    It is in a file of `save_checkpoint`, in the metadata of a file by `save_lora` or kohya's scripts, or in the
    name: `checkpoint-500` of diffusers' scripts, `my-lora-step00000500` of kohya's.
    """
    if is_training_checkpoint(path):
        return int(read_checkpoint(path)["step"])
    file = path / LORA_FILE if path.is_dir() else path
    if file.suffix == ".safetensors" and file.is_file():
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata() or {}
        for said in (metadata.get(STEP_KEY, ""), metadata.get("ss_steps", "")):
            if said.isdecimal():
                return int(said)
    found = _STEP_IN_NAME.search(path.parent.name if path.name == LORA_FILE else path.name.removesuffix(".safetensors"))
    return None if found is None else int(found[1])


def save_lora(
    denoiser: Any,
    folder: str | Path,
    *,
    adapter: str = "default",
    family: Family | None = None,
    step: int | None = None,
) -> Path:
    """Write an adapter of the denoiser to LORA_FILE in a folder, as diffusers does, but whole or not at all.

    `family` is by default that of `family_of_denoiser`. `step` is that of the training: `latentcache validate` finds it
    in the file. Returns the file's path. Raises StoreError where it cannot be written.
    """
    from peft.utils import get_peft_model_state_dict

    family = family or family_of_denoiser(denoiser)
    layers = get_peft_model_state_dict(denoiser, adapter_name=adapter)
    if family.denoiser == "unet":  # as diffusers' scripts have it: other denoisers came after the older names
        layers = convert_state_dict_to_diffusers(layers)
    settings = denoiser.peft_config[adapter].to_dict()
    layers, settings = ({f"{family.denoiser}.{name}": each[name] for name in each} for each in (layers, settings))
    metadata = {"format": "pt", LORA_ADAPTER_METADATA_KEY: json.dumps(settings, indent=2, sort_keys=True, default=list)}
    path = Path(folder, LORA_FILE)
    write_sealed(path, save(layers, metadata | ({} if step is None else {STEP_KEY: str(step)})))
    return path


def lora_settings(denoiser: torch.nn.Module) -> dict[str, Any]:
    """The settings of the denoiser's LoRA adapters, as plain data, for `extra["lora"]` of a checkpoint.

    A state_dict has an adapter's weights, but not its alpha. `denoiser` is one with `add_adapter`, or inside peft's or
    a parallel wrapper. Raises ModelError if it has no adapter.
    """
    denoiser = unwrapped_module(denoiser)
    configs = getattr(denoiser, "peft_config", None)
    if not configs:
        raise refused("lora", "the denoiser has no adapter. Call its add_adapter(LoraConfig(...)) first.")
    # peft's configs hold sets and enums of text: as JSON they are lists and text, which LoraConfig takes as well.
    adapters = {name: json.loads(json.dumps(config.to_dict(), default=sorted)) for name, config in configs.items()}
    return {"adapters": adapters, "active": _active_adapters(denoiser)}


def add_adapters(denoiser: Any, settings: Mapping[str, Any]) -> None:
    """Build the adapters that `lora_settings` describes into a denoiser that has none; their weights are not set."""
    _need_peft()
    from peft import LoraConfig

    with loading("lora", "the checkpoint's extra['lora']"), _several_adapters():
        for name, config in settings["adapters"].items():
            # The weights come from the checkpoint: no initialisation, which some kinds compute from the denoiser's own.
            denoiser.add_adapter(LoraConfig(**{**config, "init_lora_weights": False}), name)
        denoiser.set_adapter(list(settings["active"]))


def is_lora(names: Iterable[str]) -> bool:
    """Whether tensors of these names are a LoRA alone: none belongs to a whole model."""
    return all(map(_looks_like_lora, names))


def _looks_like_lora(name: str) -> bool:
    return "lora" in name or "lokr_" in name or "hada_" in name or name.endswith((".alpha", ".dora_scale"))


def _need_peft() -> None:
    if not is_peft_available():
        raise refused("lora", "LoRA adapters need peft, which is not installed. Run: pip install peft")


def _lora_file(path: str) -> Path:
    if is_training_checkpoint(path):
        raise refused("lora", f"{path} is a checkpoint of a whole denoiser with its LoRA. Name it as the denoiser.")
    file = Path(path)
    if file.is_dir():
        file /= LORA_FILE
        if not file.is_file():
            raise refused("lora", f"{path} has no {LORA_FILE}. Name the file itself.")
    elif not is_checkpoint("lora", path):
        raise refused("lora", f"there is no file or folder {path}. Download a LoRA of the hub, and name its file.")
    return file


def _check_names(file: str, names: list[str], family: Family) -> None:
    encoders = [name for name in names if name.startswith(_ENCODERS)]
    if encoders:
        raise refused(
            "lora",
            f"{file} changes the text encoders too ({len(encoders)} tensors, e.g. {encoders[0]}), which cannot "
            "act on cached embeddings. Save the LoRA without them, or merge them into the text encoders, name that "
            "model as model.path and run precache.",
        )
    # diffusers drops dora_scale with a warning, and the file then means something else; of LoHa and LoKr it names none.
    kinds = ("dora_scale", "hada_", "lokr_")
    others = [name for name in names if not _looks_like_lora(name) or any(kind in name for kind in kinds)]
    if others or not names:
        raise refused(
            "lora",
            f"{file} holds {len(others)} tensors that are not LoRA weights of a {family.denoiser_word}, e.g. "
            f"{others[0] if others else 'nothing at all'}. Name a LoRA in diffusers' or kohya's format.",
        )


def _check_fit(
    file: str, state: Mapping[str, torch.Tensor], prefix: str | None, denoiser: torch.nn.Module, family: Family
) -> None:
    """ModelError unless every tensor has its place: peft leaves out what has none, at most with a warning."""
    own = {key.removeprefix(f"{prefix}."): value for key, value in state.items()}
    layers = {name.removesuffix(".base_layer"): module for name, module in denoiser.named_modules()}

    def has_place(key: str, shape: torch.Size) -> bool:
        kind = next((kind for kind in _KINDS if key.endswith(kind)), "")
        layer = key.removesuffix(kind)
        weight = getattr(layers.get(layer), "weight", None)
        if not kind or weight is None or weight.ndim < 2:
            return False
        if kind == ".lora_A.weight":
            return shape[1:] == weight.shape[1:] and f"{layer}.lora_B.weight" in own
        return kind != ".lora_B.weight" or (shape[0] == weight.shape[0] and f"{layer}.lora_A.weight" in own)

    faults = [key for key, tensor in own.items() if not has_place(key, tensor.shape)]
    if faults or not own:
        met = f"of {len(own)} tensors {len(faults)} have no place in it"
        example = f", e.g. {faults[0]} {list(own[faults[0]].shape)}" if faults else ""
        step = f"Name a complete LoRA of a model of {family.name}"
        raise refused("lora", f"{file} does not fit this {family.denoiser_word}: {met}{example}. {step}.")


@contextmanager
def _several_adapters() -> Iterator[None]:
    """Silence peft's warning of a second adapter: here it is on purpose."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute")
        yield


def _adapted(denoiser: torch.nn.Module) -> list[Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [module for module in denoiser.modules() if isinstance(module, BaseTunerLayer)]


def _active_adapters(denoiser: torch.nn.Module) -> list[str]:
    layer = next(iter(_adapted(denoiser)), None)
    return [] if layer is None else list(layer.active_adapters)
