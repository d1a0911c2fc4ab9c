"""Where a model's frozen parts come from: code (`tiny`), a diffusers folder, one checkpoint file, or the hub."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, StableDiffusionXLPipeline
from transformers import CLIPTokenizer
from typing_extensions import override

from latentcache.models.model_files import (
    TINY,
    config_folder,
    is_checkpoint,
    load_pretrained,
    loading,
    local_folder,
    local_part,
    part_folder,
    read_config,
    refused,
    weights_name,
)
from latentcache.models.tiny import tiny_sdxl

TEXT_ENCODERS = ("text_encoder", "text_encoder_2")
ENCODERS = ("vae", *TEXT_ENCODERS)
TOKENIZERS = ("tokenizer", "tokenizer_2")

_CONFIGS = [
    "model_index.json",
    *(f"{part}/*.{suffix}" for part in (*ENCODERS, *TOKENIZERS) for suffix in ("json", "txt")),
]


@dataclass(frozen=True, slots=True)
class ModelOrigin(ABC):
    """Loads the frozen parts of a model on the CPU. Every method raises ModelError.

    `name` is the origin for provenance and messages: `tiny`, a path, or a hub id with its commit.
    """

    name: str

    @abstractmethod
    def files(self, part: str) -> list[Path]:
        """The files whose change may change the part."""

    @abstractmethod
    def vae_config_file(self) -> Mapping[str, Any]:
        """The VAE's config. ModelError for another class than AutoencoderKL."""

    @abstractmethod
    def load(self, part: str, dtype: torch.dtype) -> Mapping[str, torch.nn.Module]:
        """The encoder by name, in `dtype`. With one text encoder come both: a checkpoint file is read once."""

    @abstractmethod
    def load_tokenizers(self) -> tuple[Any, Any]:
        """Both tokenizers."""


@dataclass(frozen=True, slots=True)
class TinyOrigin(ModelOrigin):
    """The tiny SDXL built in code."""

    name: str = TINY

    @override
    def files(self, part: str) -> list[Path]:
        return []

    @override
    def vae_config_file(self) -> Mapping[str, Any]:
        return dict(tiny_sdxl()["vae"].config)

    @override
    def load(self, part: str, dtype: torch.dtype) -> Mapping[str, torch.nn.Module]:
        parts = tiny_sdxl()
        # torch's own `to`: diffusers' warns of modules to keep in float32, of which this VAE has none.
        return {name: torch.nn.Module.to(parts[name], dtype) for name in _loaded_with(part)}

    @override
    def load_tokenizers(self) -> tuple[Any, Any]:
        parts = tiny_sdxl()
        return parts["tokenizer"], parts["tokenizer_2"]


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
        settings = read_config("vae", self._folder_of("vae"), AutoencoderKL, self.name)
        class_name = settings.get("_class_name", "AutoencoderKL")
        if class_name != "AutoencoderKL":
            raise refused("vae", f"{self.name} is a {class_name}, but an AutoencoderKL is needed. Name an SDXL VAE.")
        return settings

    @override
    def load(self, part: str, dtype: torch.dtype) -> Mapping[str, torch.nn.Module]:
        if part == "vae":
            self.vae_config_file()  # refuses another class, of whose weights load_pretrained only says that some lack
        return {
            name: load_pretrained(name, self._existing(name), self.variant, dtype)[0] for name in _loaded_with(part)
        }

    @override
    def load_tokenizers(self) -> tuple[Any, Any]:
        tokenizers = []
        for part in TOKENIZERS:
            folder = self._existing(part)
            with loading(part, self.name):
                tokenizers.append(CLIPTokenizer.from_pretrained(folder, local_files_only=True))
        return tokenizers[0], tokenizers[1]

    def _folder_of(self, part: str) -> Path:
        return self.folder if self.flat else self.folder / part

    def _existing(self, part: str) -> Path:
        folder = self._folder_of(part)
        if not folder.is_dir():
            raise refused(part, f"{self.name} has no folder {folder.name}. Name a diffusers folder of an SDXL model.")
        return folder


@dataclass(frozen=True, slots=True)
class FileOrigin(ModelOrigin):
    """One checkpoint file in the original SDXL layout; `configs` is the folder of its configs and tokenizers."""

    file: Path
    configs: FolderOrigin

    @override
    def files(self, part: str) -> list[Path]:
        own = [] if part in TOKENIZERS else [self.file]
        return own + self.configs.files(part)

    @override
    def vae_config_file(self) -> Mapping[str, Any]:
        return self.configs.vae_config_file()

    @override
    def load(self, part: str, dtype: torch.dtype) -> Mapping[str, torch.nn.Module]:
        options = {"config": str(self.configs.folder), "torch_dtype": dtype, "local_files_only": True}
        if part == "vae":
            self.vae_config_file()
            subfolder = {} if self.configs.flat else {"subfolder": "vae"}
            with loading("vae", self.name):
                loaded = {"vae": AutoencoderKL.from_single_file(str(self.file), **options, **subfolder)}
        else:
            # Only the pipeline converts text encoders; the tokenizers are given so that it does not load its own.
            options |= dict(zip(TOKENIZERS, self.load_tokenizers(), strict=True))
            options |= dict.fromkeys(("vae", "unet", "scheduler"))
            with loading("text_encoder", self.name):
                pipeline = StableDiffusionXLPipeline.from_single_file(str(self.file), add_watermarker=False, **options)
            loaded = {name: getattr(pipeline, name) for name in TEXT_ENCODERS}
        for name, module in loaded.items():
            # from_single_file leaves on the meta device what the file lacks.
            lacking = next((key for key, value in module.state_dict().items() if value.is_meta), None)
            if lacking is not None:
                raise refused(name, f"{self.name} lacks {lacking}. Use a complete SDXL checkpoint.")
        return loaded

    @override
    def load_tokenizers(self) -> tuple[Any, Any]:
        return self.configs.load_tokenizers()


def find_model(path: str, config: str | None, variant: str | None, revision: str | None) -> ModelOrigin:
    """What `path` names: `tiny`, a folder, a .safetensors file, else a hub id, which is downloaded if need be."""
    if path == TINY:
        return TinyOrigin()
    if not os.path.isdir(path) and is_checkpoint("model", path):
        return FileOrigin(path, Path(path), _configs_of(path, config))
    weights = [f"{part}/{weights_name(part, variant)}*.safetensors" for part in ENCODERS]
    name, folder = local_folder("model", path, _CONFIGS + weights, revision=revision, variant=variant)
    return FolderOrigin(name, folder, variant)


def find_vae(path: str, model: ModelOrigin) -> ModelOrigin:
    """What `path` names as a separate VAE. A file with no config.json next to it takes the config of `model`'s VAE."""
    if os.path.isdir(path) or not is_checkpoint("vae", path):
        name, folder = local_part("vae", path, None)
        return FolderOrigin(name, folder, flat=part_folder(folder, "vae") == folder)
    file = Path(path)
    if (file.parent / "config.json").is_file():
        return FileOrigin(path, file, FolderOrigin(path, file.parent, flat=True))
    configs = model.configs if isinstance(model, FileOrigin) else model
    if isinstance(configs, FolderOrigin):
        return FileOrigin(path, file, configs)
    raise refused(
        "vae",
        f"{path} has no config.json next to it, and the model {model.name!r} has none either. Put the VAE's "
        "config.json next to the file.",
    )


def _configs_of(path: str, config: str | None) -> FolderOrigin:
    """The folder with configs and tokenizers for a checkpoint: `config`, or what diffusers infers from its keys."""
    folder, name, next_step = config_folder(path, config, _CONFIGS)
    lacking = [part for part in ("model_index.json", *ENCODERS, *TOKENIZERS) if not (folder / part).exists()]
    if lacking:
        raise refused(
            "model", f"{name} has no {', '.join(lacking)}, which an SDXL checkpoint needs. {path}: {next_step}."
        )
    return FolderOrigin(f"{path} (configs: {name})", folder)


def _loaded_with(part: str) -> tuple[str, ...]:
    return TEXT_ENCODERS if part in TEXT_ENCODERS else (part,)
