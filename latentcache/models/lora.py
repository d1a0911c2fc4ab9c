"""LoRA adapters on a denoiser: loading and saving files, and their settings in a checkpoint."""

from __future__ import annotations

import inspect
import json
import re
import warnings
from collections.abc import Iterator, Mapping
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
from latentcache.utils.durable_files import expanded, make_folder, typed_errors, write_sealed

SETTINGS_KEY = "lora"
"""Key of `lora_settings` in a checkpoint's `extra`."""
LORA_FILE = "pytorch_lora_weights.safetensors"
STEP_KEY = "latentcache_step"
"""Metadata key of the training step in LORA_FILE."""
_STEP_IN_NAME = re.compile(r"(?:checkpoint|step)[-_]?(\d+)$")

_ENCODERS = ("text_encoder.", "text_encoder_2.", "lora_te_", "lora_te1_", "lora_te2_")
_KINDS = (".lora_A.weight", ".lora_B.weight", ".lora_B.bias", ".lora_magnitude_vector.weight", ".lora_magnitude_vector")


def load_lora(denoiser: Any, path: str | Path, *, scale: float = 1.0, family: Family | None = None) -> str:
    """Add the LoRA in a .safetensors file, or in a folder with LORA_FILE, to the denoiser; returns the adapter's name.

    Reads files of diffusers (`save_lora_weights`, `save_lora_adapter`), and other formats, such as kohya's, that the
    pipeline of `family` (default: `family_of_denoiser`) reads. The LoRA is applied with `scale`, next to existing
    adapters. Missing alphas equal the rank, as in diffusers. The new parameters are frozen. ModelError, with the
    denoiser unchanged, if peft is missing or if anything in the file does not fit: unknown names, wrong shapes, text
    encoder weights, and kinds other than LoRA and peft's DoRA.
    """
    family = family or family_of_denoiser(denoiser)
    _need_peft()
    file = _lora_file(str(expanded(path)))
    names = list(read_file("lora", file))
    _check_names(str(file), names, family)
    state, alphas, metadata = _read(file, denoiser, family)
    # diffusers decides by the first name whether to convert a file, and converts no alphas. Its own save_lora_weights
    # mixes naming schemes; diffusers would then drop unconverted names, or give them another layer's alpha.
    state, alphas = convert_unet_state_dict_to_peft(state), convert_unet_state_dict_to_peft(alphas or {})
    prefix = family.denoiser if any(key.startswith(f"{family.denoiser}.") for key in state) else None
    _check_fit(str(file), state, prefix, denoiser, family)
    dtype = dtype_of(denoiser)
    requires_grad = {id(parameter): parameter.requires_grad for parameter in denoiser.parameters()}
    had = set(getattr(denoiser, "peft_config", {}))
    active = _active_adapters(denoiser)
    with loading("lora", str(file)), _several_adapters():
        # low_cpu_mem_usage: random initialisation would advance the global random state.
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
    """The file's weights, alphas and metadata, as the family's pipeline reads them."""
    read = family.pipeline_class.lora_state_dict
    # Pipelines differ in arguments and results. Without return_alphas, alphas stay among the weights.
    needed: dict[str, Any] = {}
    if family.denoiser == "unet":
        needed = {"unet_config": denoiser.config}
    elif "return_alphas" in inspect.signature(read).parameters:
        needed = {"return_alphas": True}
    with loading("lora", str(file)):
        # Folder and name separately: diffusers 0.39 loads no local file from a path alone.
        state, *alphas, metadata = read(
            str(file.parent),
            weight_name=file.name,
            use_safetensors=True,
            local_files_only=True,
            return_lora_metadata=True,
            **needed,
        )
    return state, alphas[0] if alphas else None, metadata


def saved_step(path: str | Path) -> int | None:
    """The training step of a LoRA or a checkpoint, or None if unknown.

    It is read from a file of `save_checkpoint`, from the metadata of `save_lora` or kohya's scripts, or from the name:
    `checkpoint-500` (diffusers' scripts), `my-lora-step00000500` (kohya's).
    """
    path = expanded(path)
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
    """Write an adapter of the denoiser to LORA_FILE in a folder, like diffusers, but atomically.

    A missing folder is made. `family` defaults to `family_of_denoiser`. The training `step` is stored for `latentcache
    validate`. Within a phase with averaged weights it writes the averages. Returns the file's path. Raises StoreError
    if it cannot be written.
    """
    from peft.utils import get_peft_model_state_dict

    family = family or family_of_denoiser(denoiser)
    layers = get_peft_model_state_dict(denoiser, adapter_name=adapter)
    if family.denoiser == "unet":  # like diffusers' scripts: only UNets use the older names
        layers = convert_state_dict_to_diffusers(layers)
    settings = denoiser.peft_config[adapter].to_dict()
    layers, settings = ({f"{family.denoiser}.{name}": each[name] for name in each} for each in (layers, settings))
    metadata = {"format": "pt", LORA_ADAPTER_METADATA_KEY: json.dumps(settings, indent=2, sort_keys=True, default=list)}
    path = expanded(folder) / LORA_FILE
    with typed_errors(path, 0):
        make_folder(path.parent)
    write_sealed(path, save(layers, metadata | ({} if step is None else {STEP_KEY: str(step)})))
    return path


def lora_settings(denoiser: torch.nn.Module) -> dict[str, Any]:
    """The settings of the denoiser's LoRA adapters, as plain data, for `extra["lora"]` of a checkpoint.

    A state_dict has an adapter's weights but not its alpha. `denoiser` may be in peft's or a parallel wrapper. Raises
    ModelError if it has no adapter.
    """
    denoiser = unwrapped_module(denoiser)
    configs = getattr(denoiser, "peft_config", None)
    if not configs:
        raise refused("lora", "the denoiser has no adapter. Call its add_adapter(LoraConfig(...)) first.")
    # peft's configs hold sets and string enums. LoraConfig also accepts their JSON forms, lists and strings.
    adapters = {name: json.loads(json.dumps(config.to_dict(), default=sorted)) for name, config in configs.items()}
    return {"adapters": adapters, "active": _active_adapters(denoiser)}


def add_adapters(denoiser: Any, settings: Mapping[str, Any]) -> None:
    """Add the adapters that `lora_settings` describes to a denoiser without any; their weights are not set."""
    _need_peft()
    from peft import LoraConfig

    with loading("lora", "the checkpoint's extra['lora']"), _several_adapters():
        for name, config in settings["adapters"].items():
            # No initialisation, which some kinds compute from the denoiser's weights: the checkpoint has them.
            denoiser.add_adapter(LoraConfig(**{**config, "init_lora_weights": False}), name)
        denoiser.set_adapter(list(settings["active"]))


def is_lora(name: str) -> bool:
    """Whether a tensor of this name belongs to a LoRA, and not to a whole model."""
    return "lora" in name or "lokr_" in name or "hada_" in name or name.endswith((".alpha", ".dora_scale"))


def _need_peft() -> None:
    if not is_peft_available():
        raise refused("lora", "LoRA adapters need peft, which is not installed. Run: pip install peft")


def _lora_file(path: str) -> Path:
    if is_training_checkpoint(path):
        raise refused("lora", f"{path} is a checkpoint of a whole denoiser with its LoRA. Pass it as the denoiser.")
    file = Path(path)
    if file.is_dir():
        file /= LORA_FILE
        if not file.is_file():
            raise refused("lora", f"{path} has no {LORA_FILE}. Name the file itself.")
    elif not is_checkpoint("lora", path):
        raise refused("lora", f"there is no file or folder {path}. Download a LoRA from the hub, and name its file.")
    return file


def _check_names(file: str, names: list[str], family: Family) -> None:
    encoders = [name for name in names if name.startswith(_ENCODERS)]
    if encoders:
        raise refused(
            "lora",
            f"{file} also changes the text encoders ({len(encoders)} tensors, e.g. {encoders[0]}), which has no effect "
            "on cached embeddings. Save the LoRA without them, or merge them into the text encoders, set model.path to "
            "that model and run precache.",
        )
    # diffusers drops dora_scale with a warning, which changes the result, and ignores LoHa and LoKr.
    kinds = ("dora_scale", "hada_", "lokr_")
    others = [name for name in names if not is_lora(name) or any(kind in name for kind in kinds)]
    if others or not names:
        raise refused(
            "lora",
            f"{file} holds {len(others)} tensors that are not LoRA weights of a {family.denoiser_word}, e.g. "
            f"{others[0] if others else 'nothing at all'}. Name a LoRA in diffusers' or kohya's format.",
        )


def _check_fit(
    file: str, state: Mapping[str, torch.Tensor], prefix: str | None, denoiser: torch.nn.Module, family: Family
) -> None:
    """ModelError if any tensor does not fit: peft drops it with a warning at most."""
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
        met = f"{len(faults)} of {len(own)} tensors have no counterpart"
        example = f", e.g. {faults[0]} {list(own[faults[0]].shape)}" if faults else ""
        step = f"Name a complete LoRA of a model of {family.name}"
        raise refused("lora", f"{file} does not fit this {family.denoiser_word}: {met}{example}. {step}.")


@contextmanager
def _several_adapters() -> Iterator[None]:
    """Silence peft's warning about a second adapter, which is intended here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute")
        yield


def _adapted(denoiser: torch.nn.Module) -> list[Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [module for module in denoiser.modules() if isinstance(module, BaseTunerLayer)]


def _active_adapters(denoiser: torch.nn.Module) -> list[str]:
    layer = next(iter(_adapted(denoiser)), None)
    return [] if layer is None else list(layer.active_adapters)
