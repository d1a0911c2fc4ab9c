"""Where a model's frozen parts come from: code (`tiny`), a diffusers folder, one checkpoint file, or the hub."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

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
class ModelOrigin:
    """Loads the frozen parts of a model of this family on the CPU. Every method raises ModelError.

    `name` is the origin for provenance and messages: `tiny`, a path, or a hub id with its commit. `folder` is a
    diffusers folder; None: the tiny model. Weights come from `file` where there is one, in the original layout, and
    only configs and tokenizers from the folder. `variant` is that of the folder's weights. `flat`: the folder holds a
    VAE itself, not in `vae/`.
    """

    name: str
    family: Family
    folder: Path | None = None
    file: Path | None = None
    variant: str | None = None
    flat: bool = False

    def files(self, part: str) -> list[Path]:
        """The files whose change may change the part."""
        own = [] if self.file is None or self.family.parts[part].role == "tokenizer" else [self.file]
        folder = None if self.folder is None else self._folder_of(part, self.folder)
        return own + ([] if folder is None or not folder.is_dir() else sorted(filter(Path.is_file, folder.iterdir())))

    def vae_config(self) -> Mapping[str, Any]:
        """The VAE's config. ModelError for another class than the family's."""
        [part] = self.family.names("vae")
        if self.folder is None:
            return dict(tiny_part(part).config)
        vae_class = self.family.parts[part].load_class()
        settings = read_config(part, self._folder_of(part, self.folder), vae_class, self.name)
        met, needed = settings.get("_class_name", vae_class.__name__), vae_class.__name__
        if met != needed:
            message = f"{self.name} is a {met}, but {self.family.name} has an {needed}. Name a VAE of its models."
            raise refused(part, message)
        return settings

    def load(self, part: str, dtype: torch.dtype) -> Mapping[str, torch.nn.Module]:
        """The encoder by name, in `dtype`. Of a checkpoint file all text encoders come at once: it is read once."""
        if self.folder is None:
            # torch's own `to`: diffusers' warns of modules to keep in float32.
            return {part: torch.nn.Module.to(tiny_part(part), dtype)}
        described = self.family.parts[part]
        # Refuses another class of VAE, of whose weights a load only says that some lack.
        settings = self.vae_config() if described.role == "vae" else {}
        if self.file is None:
            own = self._existing(part, self.folder)
            return {part: load_pretrained(part, described.load_class(), own, self.variant, dtype)[0]}
        from latentcache.models.single_file import text_encoders_of_file, vae_of_file  # they need diffusers' converters

        if described.role == "vae":
            return {part: vae_of_file(self.family, self.file, settings, dtype)}
        return text_encoders_of_file(self.family, self.file, self.folder, self.load_tokenizers, dtype)

    def load_tokenizers(self) -> dict[str, Any]:
        """The tokenizers by name."""
        names = self.family.names("tokenizer")
        if self.folder is None:
            return {name: tiny_part(name) for name in names}
        tokenizers = {}
        for part in names:
            folder, described = self._existing(part, self.folder), self.family.parts[part]
            if described.needs is not None and importlib.util.find_spec(described.needs) is None:
                raise refused(part, f"{described.class_name} needs {described.needs}. Install that package.")
            with loading(part, self.name):
                tokenizers[part] = described.load_class().from_pretrained(folder, local_files_only=True)
        return tokenizers

    def _folder_of(self, part: str, folder: Path) -> Path:
        return folder if self.flat else folder / part

    def _existing(self, part: str, model_folder: Path) -> Path:
        folder = self._folder_of(part, model_folder)
        if not folder.is_dir():
            step = f"Name a diffusers folder of a model of the family {self.family.name}"
            raise refused(part, f"{self.name} has no folder {folder.name}. {step}.")
        return folder


def find_model(family: Family, path: str, config: str | None, variant: str | None, revision: str | None) -> ModelOrigin:
    """What `path` names: `tiny`, a folder, a .safetensors file, else a hub id, which is downloaded if need be."""
    if is_tiny(path, family):
        return ModelOrigin(path, family)
    endings = ("json", "txt", "model", "jinja")
    configs = ["model_index.json", *(f"{part}/*.{ending}" for part in family.parts for ending in endings)]
    if not os.path.isdir(path) and is_checkpoint("model", path):
        # Its configs and tokenizers are those of `config`, or what diffusers infers from its keys.
        folder, name, next_step = config_folder(path, config, configs)
        lacking = [part for part in ("model_index.json", *family.parts) if not (folder / part).exists()]
        if lacking:
            needed = f"{name} has no {', '.join(lacking)}, which a checkpoint of {family.name} needs"
            step = f"{next_step}; or set model.family, if the file is of another one"
            raise refused("model", f"{needed}. {path}: {step}.")
        return ModelOrigin(path, family, folder, Path(path))
    encoders = [name for name, part in family.parts.items() if part.role != "tokenizer"]
    weights = [f"{part}/{weights_name(part, variant)}*.safetensors*" for part in encoders]
    name, folder = local_folder("model", path, [*configs, *weights], revision=revision, variant=variant)
    return ModelOrigin(name, family, folder, variant=variant)


def find_vae(path: str, model: ModelOrigin) -> ModelOrigin:
    """What `path` names as a separate VAE. A file with no config.json next to it takes the config of `model`'s VAE."""
    if os.path.isdir(path) or not is_checkpoint("vae", path):
        name, folder = local_part("vae", path, None)
        return ModelOrigin(name, model.family, folder, flat=part_folder(folder, "vae") == folder)
    file = Path(path)
    if (file.parent / "config.json").is_file():
        return ModelOrigin(path, model.family, file.parent, file, flat=True)
    if model.folder is not None:
        return ModelOrigin(path, model.family, model.folder, file, flat=model.flat)
    raise refused(
        "vae",
        f"{path} has no config.json next to it, and the model {model.name!r} has none either. Put the VAE's "
        "config.json next to the file.",
    )
