"""Where a model's frozen parts come from: code (`tiny`), a diffusers folder, one checkpoint file, or the hub."""

from __future__ import annotations

import importlib.util
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from diffusers.loaders.single_file_utils import (
    is_clip_model_in_single_file,
    is_t5_in_single_file,
    load_single_file_checkpoint,
)
from typing_extensions import override

from latentcache.families.base import Family
from latentcache.models.files import (
    config_folder,
    is_checkpoint,
    is_tiny,
    load_pretrained,
    loading,
    local_folder,
    local_part,
    part_folder,
    read_config,
    refused,
    weights_name,
)
from latentcache.models.tiny import tiny_part


@dataclass(frozen=True, slots=True)
class ModelOrigin(ABC):
    """Loads the frozen parts of a model of this family on the CPU. Every method raises ModelError.

    `name` is the origin for provenance and messages: `tiny`, a path, or a hub id with its commit.
    """

    name: str
    family: Family

    @abstractmethod
    def files(self, part: str) -> list[Path]:
        """The files whose change may change the part."""

    @abstractmethod
    def vae_config_file(self) -> Mapping[str, Any]:
        """The VAE's config. ModelError for another class than the family's."""

    @abstractmethod
    def load(self, part: str, dtype: torch.dtype) -> Mapping[str, torch.nn.Module]:
        """The encoder by name, in `dtype`. Of a checkpoint file all text encoders come at once: it is read once."""

    @abstractmethod
    def load_tokenizers(self) -> dict[str, Any]:
        """The tokenizers by name."""


@dataclass(frozen=True, slots=True)
class TinyOrigin(ModelOrigin):
    """The family's tiny model, built in code."""

    @override
    def files(self, part: str) -> list[Path]:
        return []

    @override
    def vae_config_file(self) -> Mapping[str, Any]:
        [name] = self.family.names("vae")
        return dict(tiny_part(name).config)

    @override
    def load(self, part: str, dtype: torch.dtype) -> Mapping[str, torch.nn.Module]:
        # torch's own `to`: diffusers' warns of modules to keep in float32.
        return {part: torch.nn.Module.to(tiny_part(part), dtype)}

    @override
    def load_tokenizers(self) -> dict[str, Any]:
        return {name: tiny_part(name) for name in self.family.names("tokenizer")}


@dataclass(frozen=True, slots=True)
class FolderOrigin(ModelOrigin):
    """A diffusers folder. `flat`: the folder holds a VAE itself, not in `vae/`."""

    folder: Path
    variant: str | None = None
    flat: bool = False

    @override
    def files(self, part: str) -> list[Path]:
        folder = self._folder_of(part)
        return sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []

    @override
    def vae_config_file(self) -> Mapping[str, Any]:
        [part] = self.family.names("vae")
        vae_class = self.family.parts[part].load_class()
        settings = read_config(part, self._folder_of(part), vae_class, self.name)
        met, needed = settings.get("_class_name", vae_class.__name__), vae_class.__name__
        if met != needed:
            message = f"{self.name} is a {met}, but {self.family.name} has an {needed}. Name a VAE of its models."
            raise refused(part, message)
        return settings

    @override
    def load(self, part: str, dtype: torch.dtype) -> Mapping[str, torch.nn.Module]:
        described = self.family.parts[part]
        if described.role == "vae":
            self.vae_config_file()  # refuses another class, of whose weights load_pretrained only says that some lack
        model_class = described.load_class()
        return {part: load_pretrained(part, model_class, self._existing(part), self.variant, dtype)[0]}

    @override
    def load_tokenizers(self) -> dict[str, Any]:
        tokenizers = {}
        for part in self.family.names("tokenizer"):
            folder, described = self._existing(part), self.family.parts[part]
            if described.needs is not None and importlib.util.find_spec(described.needs) is None:
                raise refused(part, f"{described.class_name} needs {described.needs}. Install that package.")
            with loading(part, self.name):
                tokenizers[part] = described.load_class().from_pretrained(folder, local_files_only=True)
        return tokenizers

    def _folder_of(self, part: str) -> Path:
        return self.folder if self.flat else self.folder / part

    def _existing(self, part: str) -> Path:
        folder = self._folder_of(part)
        if not folder.is_dir():
            step = f"Name a diffusers folder of a model of the family {self.family.name}"
            raise refused(part, f"{self.name} has no folder {folder.name}. {step}.")
        return folder


@dataclass(frozen=True, slots=True)
class FileOrigin(ModelOrigin):
    """One checkpoint file in the original layout; `configs` is the folder of its configs and tokenizers."""

    file: Path
    configs: FolderOrigin

    @override
    def files(self, part: str) -> list[Path]:
        own = [] if self.family.parts[part].role == "tokenizer" else [self.file]
        return own + self.configs.files(part)

    @override
    def vae_config_file(self) -> Mapping[str, Any]:
        return self.configs.vae_config_file()

    @override
    def load(self, part: str, dtype: torch.dtype) -> Mapping[str, torch.nn.Module]:
        family = self.family
        if family.parts[part].role == "vae":
            return {part: self._vae(part, dtype)}
        self._check_text_encoders()
        # Only the pipeline converts text encoders; the tokenizers are given so that it does not load its own.
        options = {"config": str(self.configs.folder), "torch_dtype": dtype, "local_files_only": True}
        options |= self.load_tokenizers() | dict.fromkeys((*family.names("vae"), family.denoiser, "scheduler"))
        with loading(part, self.name):
            pipeline = family.pipeline_class.from_single_file(str(self.file), **family.pipeline_options, **options)
        loaded = {name: getattr(pipeline, name) for name in family.names("text_encoder")}
        for name, module in loaded.items():
            # from_single_file leaves on the meta device what the file lacks.
            lacking = next((key for key, value in module.state_dict().items() if value.is_meta), None)
            if lacking is not None:
                raise refused(name, f"{self.name} lacks {lacking}. Use a complete checkpoint.")
        return loaded

    @override
    def load_tokenizers(self) -> dict[str, Any]:
        return self.configs.load_tokenizers()

    def _check_text_encoders(self) -> None:
        """ModelError unless diffusers reads them from the file. It would take them from `configs`, if that has any."""
        with loading("model", self.name):
            state = load_single_file_checkpoint(str(self.file))
        can_read = hasattr(self.family.pipeline_class, "from_single_file")
        for name in self.family.names("text_encoder"):
            encoder_class = self.family.parts[name].load_class()
            if not can_read or not (is_clip_model_in_single_file(encoder_class, state) or is_t5_in_single_file(state)):
                raise refused(
                    name,
                    f"{self.name} has no {encoder_class.__name__} of {self.family.name} that diffusers can read. Name "
                    "a diffusers folder or hub id as model.path. A file can be model.vae, and the "
                    f"{self.family.denoiser_word} of a validation or training (--denoiser).",
                )

    def _vae(self, part: str, dtype: torch.dtype) -> torch.nn.Module:
        """Of weights by diffusers' names, or in a layout that diffusers converts; other parts may be in the file."""
        described, settings = self.family.parts[part], self.vae_config_file()
        vae_class = described.load_class()
        with loading(part, self.name):
            state = load_single_file_checkpoint(str(self.file))
            with init_empty_weights(include_buffers=False):
                vae: torch.nn.Module = vae_class.from_config(settings)
            names = vae.state_dict().keys()
            if not names <= state.keys():
                convert = SINGLE_FILE_LOADABLE_CLASSES[described.layout or vae_class.__name__]["checkpoint_mapping_fn"]
                for old, new in described.renamed:
                    state |= {new + name.removeprefix(old): state[name] for name in state if name.startswith(old)}
                # Statistics of latents have one name in both layouts.
                state = {**state, **convert(checkpoint=dict(state), config=settings)}
            lacking = sorted(names - state.keys())
            if lacking:
                raise refused(
                    part,
                    f"{self.name} lacks {len(lacking)} of the {len(names)} weights of an {vae_class.__name__}, e.g. "
                    f"{lacking[0]}: it is incomplete, of another model, or in a layout that diffusers does not "
                    "convert. Name the vae folder of a diffusers model, or the file in it, as model.vae.",
                )
            # Copies: the tensors of a file are views of it, and it may be replaced while the VAE is in use.
            found = {name: state[name] for name in names}
            dtypes = {name: dtype if each.is_floating_point() else each.dtype for name, each in found.items()}
            vae.load_state_dict({name: each.to(dtypes[name], copy=True) for name, each in found.items()}, assign=True)
        return vae


def find_model(family: Family, path: str, config: str | None, variant: str | None, revision: str | None) -> ModelOrigin:
    """What `path` names: `tiny`, a folder, a .safetensors file, else a hub id, which is downloaded if need be."""
    if is_tiny(path, family):
        return TinyOrigin(path, family)
    if not os.path.isdir(path) and is_checkpoint("model", path):
        return FileOrigin(path, family, Path(path), _configs_of(family, path, config))
    encoders = [name for name, part in family.parts.items() if part.role != "tokenizer"]
    weights = [f"{part}/{weights_name(part, variant)}*.safetensors*" for part in encoders]
    name, folder = local_folder("model", path, [*_configs(family), *weights], revision=revision, variant=variant)
    return FolderOrigin(name, family, folder, variant)


def _configs(family: Family) -> list[str]:
    """Patterns of the files of a diffusers folder that say how its parts are made."""
    endings = ("json", "txt", "model", "jinja")
    return ["model_index.json", *(f"{part}/*.{ending}" for part in family.parts for ending in endings)]


def find_vae(path: str, model: ModelOrigin) -> ModelOrigin:
    """What `path` names as a separate VAE. A file with no config.json next to it takes the config of `model`'s VAE."""
    if os.path.isdir(path) or not is_checkpoint("vae", path):
        name, folder = local_part("vae", path, None)
        return FolderOrigin(name, model.family, folder, flat=part_folder(folder, "vae") == folder)
    file = Path(path)
    if (file.parent / "config.json").is_file():
        return FileOrigin(path, model.family, file, FolderOrigin(path, model.family, file.parent, flat=True))
    configs = model.configs if isinstance(model, FileOrigin) else model
    if isinstance(configs, FolderOrigin):
        return FileOrigin(path, model.family, file, configs)
    raise refused(
        "vae",
        f"{path} has no config.json next to it, and the model {model.name!r} has none either. Put the VAE's "
        "config.json next to the file.",
    )


def _configs_of(family: Family, path: str, config: str | None) -> FolderOrigin:
    """The folder with configs and tokenizers for a checkpoint: `config`, or what diffusers infers from its keys."""
    folder, name, next_step = config_folder(path, config, _configs(family))
    lacking = [part for part in ("model_index.json", *family.parts) if not (folder / part).exists()]
    if lacking:
        needed = f"{name} has no {', '.join(lacking)}, which a checkpoint of {family.name} needs"
        raise refused("model", f"{needed}. {path}: {next_step}; or set model.family, if the file is of another one.")
    return FolderOrigin(f"{path} (configs: {name})", family, folder)
