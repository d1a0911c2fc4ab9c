"""Parts of a model from one .safetensors file, with diffusers' names or in a layout that diffusers converts.

diffusers' `from_single_file` adds or drops weights with a warning at most. Here every tensor of a part must come from
the file, with the right shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from accelerate import init_empty_weights
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from diffusers.loaders.single_file_utils import (
    is_clip_model_in_single_file,
    is_t5_in_single_file,
    load_single_file_checkpoint,
)

from latentcache.families.base import Family
from latentcache.models.files import loading, refused

State: TypeAlias = Mapping[str, torch.Tensor]


def read_file(part: str, file: Path | str) -> dict[str, torch.Tensor]:
    """The tensors of a file by name, as views of it. ModelError, which names `part`."""
    with loading(part, str(file)):
        found: dict[str, torch.Tensor] = load_single_file_checkpoint(str(file))
        return found


def converted(part: str, layout: str, state: State, settings: Mapping[str, Any], name: str) -> State:
    """Tensors in a class's original layout, converted to diffusers' names; errors call the file `name`. ModelError."""
    if layout not in SINGLE_FILE_LOADABLE_CLASSES:
        step = "Name a diffusers folder, or a file with diffusers' names"
        met = f"{name} does not have diffusers' names, and diffusers cannot convert a {layout}"
        raise refused(part, f"{met}. {step}.")
    with loading(part, name):
        found: State = SINGLE_FILE_LOADABLE_CLASSES[layout]["checkpoint_mapping_fn"](
            checkpoint=dict(state), config=settings
        )
        return found


def empty(model_class: Any, settings: Mapping[str, Any]) -> Any:
    """A model with these settings, whose weights are on the meta device."""
    with init_empty_weights(include_buffers=False):
        return model_class.from_config(settings)


def fill(part: str, module: torch.nn.Module, state: State, dtype: torch.dtype, name: str, next_step: str) -> None:
    """Load exactly these weights into an empty model, in `dtype`.

    Like in `from_pretrained`, a class may keep some modules in float32. Raises ModelError with `next_step`.
    """
    shapes = {key: tuple(value.shape) for key, value in module.state_dict().items()}
    faults = {
        "missing": sorted(shapes.keys() - state.keys()),
        "unexpected": sorted(state.keys() - shapes.keys()),
        "of another shape": [
            f"{key}: {list(state[key].shape)}, not {list(shape)}"
            for key, shape in sorted(shapes.items())
            if key in state and tuple(state[key].shape) != shape
        ],
    }
    met = "; ".join(f"{len(keys)} {what}, e.g. {keys[0]}" for what, keys in faults.items() if keys)
    if met:
        fitting = f"the weights of {name} do not fit this model's {type(module).__name__} ({len(shapes)} tensors)"
        raise refused(part, f"{fitting}: {met}. {next_step}.")
    in_float32 = set(getattr(module, "_keep_in_fp32_modules", None) or ())

    def dtype_of(key: str) -> torch.dtype:
        if not state[key].is_floating_point():
            return state[key].dtype
        return torch.float32 if in_float32 & set(key.split(".")) else dtype

    # Copies: a file's tensors are views of it, and it may be replaced while the model is in use.
    module.load_state_dict({key: state[key].to(dtype_of(key), copy=True) for key in shapes}, assign=True)


def part_of_file(
    family: Family, part: str, file: Path, settings: Mapping[str, Any], dtype: torch.dtype
) -> torch.nn.Module:
    """The VAE from a file that may hold more, or a part inside a denoiser's file. Raises ModelError."""
    described = family.parts[part]
    model_class, inside = described.load_class(), described.inside
    state = read_file(part, file)
    with loading(part, str(file)):
        module: torch.nn.Module = empty(model_class, settings)
    names = module.state_dict().keys()
    if inside is not None:  # after any prefix
        state = {name.partition(inside)[2]: value for name, value in state.items() if inside in name}
        step = f"Set model.path to a denoiser's file of {family.name} that includes {inside}*, or to a diffusers folder"
    else:
        if not names <= state.keys():
            for old, new in described.renamed:
                state |= {new + name.removeprefix(old): state[name] for name in state if name.startswith(old)}
            # Latent statistics have the same name in both layouts.
            state |= converted(part, described.layout or model_class.__name__, state, settings, str(file))
        state = {name: state[name] for name in names if name in state}
        step = (
            "It is incomplete, of another model, or in a layout that diffusers does not convert. Set model.vae to the "
            "vae folder of a diffusers model, or to the file in it"
        )
    fill(part, module, state, dtype, str(file), step)
    return module


def text_encoders_of_file(
    family: Family, file: Path, configs: Path, load_tokenizer: Callable[[str], Any], dtype: torch.dtype
) -> dict[str, torch.nn.Module]:
    """All text encoders in a whole model's checkpoint, with configs from a diffusers folder. Raises ModelError."""
    state = read_file("model", file)
    can_read = hasattr(family.pipeline_class, "from_single_file")
    for name in family.names("text_encoder"):
        encoder_class = family.parts[name].load_class()
        # diffusers would silently load an encoder that is not in the file from `configs`.
        if not can_read or not (is_clip_model_in_single_file(encoder_class, state) or is_t5_in_single_file(state)):
            raise refused(
                name,
                f"{file} has no {encoder_class.__name__} of {family.name} that diffusers can read. Set model.path to a "
                "diffusers folder or hub id. A single file works as model.vae, and as the "
                f"{family.denoiser_word} of a validation or training (--denoiser).",
            )
    # Only the pipeline converts text encoders. Passing the tokenizers keeps it from loading its own.
    options = {"config": str(configs), "torch_dtype": dtype, "local_files_only": True}
    options |= {name: load_tokenizer(name) for name in family.names("tokenizer")}
    options |= dict.fromkeys(("vae", family.denoiser, "scheduler"))
    with loading(family.names("text_encoder")[0], str(file)):
        pipeline = family.pipeline_class.from_single_file(str(file), **family.pipeline_options, **options)
    loaded = {name: getattr(pipeline, name) for name in family.names("text_encoder")}
    for name, module in loaded.items():
        # from_single_file leaves missing weights on the meta device.
        lacking = next((key for key, value in module.state_dict().items() if value.is_meta), None)
        if lacking is not None:
            raise refused(name, f"{file} lacks {lacking}. Use a complete checkpoint.")
    return loaded
