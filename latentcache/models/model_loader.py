"""The frozen parts of a model: loaded lazily, and identified without loading them if possible.

A part's identity is a digest of exactly what can change its outputs.
"""

from __future__ import annotations

import copy
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import TypeAdapter
from typing_extensions import override

from latentcache.errors import ModelError, TrainableEncoderError
from latentcache.families import DEFAULT, family_named
from latentcache.families.base import Family
from latentcache.identity import PartIdentity, canonical_json, digest
from latentcache.models.files import (
    MODEL_INDEXES,
    TINY_PHOTOS_FOLDER,
    check_package,
    config_folder,
    is_checkpoint,
    is_tiny,
    load_pretrained,
    loading,
    local_folder,
    local_part,
    model_index,
    read_config,
    refused,
    weights_name,
)
from latentcache.models.part_identity import image_processor_identity, module_identity, tokenizer_identity, used_dtype
from latentcache.models.tiny import frozen, tiny_part
from latentcache.models.vae import VaeFacts, vae_facts
from latentcache.provenance import installed_versions
from latentcache.utils.json_document import recalled

_ENDINGS = ("json", "txt", "model", "jinja")
"""Extensions of config and tokenizer files."""
_PROCESSORS = ("tokenizer", "image_processor")
"""The roles of parts without weights."""
_MEMO = "part-identity/3"
_Known = TypeVar("_Known")
_IDENTITY, _FACTS = TypeAdapter(PartIdentity), TypeAdapter(VaeFacts)


class Models(ABC):
    """The frozen parts of a model of this family. `ModelLoader` and `LoadedModels` are interchangeable."""

    def __init__(self, family: Family) -> None:
        self.family = family
        self.family_reason = "the caller said so"
        """How the family was chosen, for people."""
        self._loaded: dict[tuple[str, torch.dtype], Any] = {}
        self._tokenizers_ahead: dict[str, Any] | None = None

    @abstractmethod
    def origin(self, part: str) -> str:
        """Where a part comes from, for provenance."""

    @abstractmethod
    def identity(self, part: str, dtype: torch.dtype) -> PartIdentity:
        """The identity of a part that computes in `dtype`."""

    @abstractmethod
    def vae_facts(self) -> VaeFacts:
        """How the VAE's latents are scaled, and their shape."""

    @abstractmethod
    def part(self, name: str, dtype: torch.dtype = torch.float32) -> Any:
        """A VAE or an encoder in `dtype`, frozen, in eval mode, on the CPU unless a caller moved it; or a processor.

        Tokenizers and image processors ignore the dtype.
        """

    @abstractmethod
    def _has(self, part: str) -> bool:
        """Whether the model has this optional part."""

    def vae(self, dtype: torch.dtype) -> torch.nn.Module:
        """The VAE, on the CPU unless a caller moved it."""
        module: torch.nn.Module = self.part("vae", dtype)
        return module

    def text_encoders(self, dtype: torch.dtype) -> dict[str, torch.nn.Module]:
        """The text encoders by name, on the CPU unless a caller moved them."""
        return {name: self.part(name, dtype) for name in self.family.names("text_encoder")}

    def tokenizers(self) -> dict[str, Any]:
        """The tokenizers by name; no text encoder is loaded for them."""
        return {name: self.part(name) for name in self.family.names("tokenizer")}

    def text(self, dtype: torch.dtype) -> dict[str, Any]:
        """The text encoders and the tokenizers, by name."""
        return {**self.text_encoders(dtype), **self.tokenizers()}

    def picture_parts(self, dtype: torch.dtype) -> dict[str, Any]:
        """The image encoder, on the CPU unless a caller moved it, and the image processor; empty if there are none."""
        return {name: self.part(name, dtype) for name in self.picture_names}

    @property
    def picture_names(self) -> tuple[str, ...]:
        """The names of these two parts, or none. ModelError for a model with only one of them."""
        names = (*self.family.names("image_encoder"), *self.family.names("image_processor"))
        found = tuple(name for name in names if self._has(name))
        if found and found != names:
            raise ModelError(f"the model has {found[0]}, but not all of {', '.join(names)}", part=found[0])
        return found

    def tokenizers_ahead(self) -> dict[str, Any]:
        """Copies for another thread: a tokenizer's padding and truncation are state of its last call."""
        if self._tokenizers_ahead is None:  # cached: for the few prompts of a service the copy would dominate
            self._tokenizers_ahead = copy.deepcopy(self.tokenizers())
        return self._tokenizers_ahead

    def release(self, *parts: str) -> None:
        """Drop the loaded or copied parts with these names (default: all) to free their memory."""
        gone = parts or tuple(self.family.parts)
        self._loaded = {key: each for key, each in self._loaded.items() if key[0] not in gone}
        if not set(gone).isdisjoint(self.family.names("tokenizer")):
            self._tokenizers_ahead = None

    def _identity_of(self, part: str, found: Any, dtype: torch.dtype) -> PartIdentity:
        described = self.family.parts[part]
        if described.role == "image_processor":
            return image_processor_identity(part, found, described.settings)
        if described.role != "tokenizer":
            return module_identity(part, found, dtype, described.weights, described.settings)
        made = tokenizer_identity(part, found, described.settings)
        # transformers chooses the class from the files, and the choice may change between releases.
        is_any_class = described.class_name == "transformers.AutoTokenizer"
        return replace(made, class_name="AutoTokenizer") if is_any_class else made

    def _with_stated_upcast(self, facts: VaeFacts, config: Mapping[str, Any]) -> VaeFacts:
        """The facts with the `force_upcast` of the VAE's own config, where diffusers' default is True."""
        filled_in = config.get("_use_default_values", ())
        stated = None if "force_upcast" in filled_in else config.get("force_upcast")
        return replace(facts, force_upcast=self.family.vae_overflows if stated is None else bool(stated))


class ModelLoader(Models):
    """Loads the frozen parts of a model on the CPU, in eval mode; never its denoiser.

    `path` is `tiny`, a hub id, a diffusers folder or a .safetensors checkpoint. `vae` names a different VAE: a hub id,
    folder or .safetensors file. `config` names a folder or hub id with the configs and tokenizers for a checkpoint
    (default: what diffusers infers from it). `variant` and `revision` apply to `path`. `memo` keeps identities across
    processes. All failures are ModelError, including files that changed since they were first read, which would
    invalidate keys. Nothing is read before the first call.
    """

    def __init__(
        self,
        path: str,
        *,
        vae: str | None = None,
        config: str | None = None,
        variant: str | None = None,
        revision: str | None = None,
        memo: MutableMapping[str, str] | None = None,
        family: Family | None = None,
    ):
        super().__init__(family or family_named(DEFAULT))
        self.path, self.vae_path, self.config, self.variant, self.revision = path, vae, config, variant, revision
        self._memo: MutableMapping[str, str] = {} if memo is None else memo
        self._first_files: dict[str, list[Any]] = {}

    @override
    def origin(self, part: str) -> str:
        return self._origin(part).name

    @override
    def identity(self, part: str, dtype: torch.dtype) -> PartIdentity:
        def computed() -> PartIdentity:
            return self._identity_of(part, self.part(part, dtype), dtype)

        # With a memo entry for its unchanged files the part is not loaded.
        return self._remembered(_MEMO, part, dtype, _IDENTITY, computed)

    @override
    def vae_facts(self) -> VaeFacts:
        kind = f"facts/2 {self.family.name}"
        return self._remembered(kind, "vae", torch.float32, _FACTS, self._vae_facts)

    def _vae_facts(self) -> VaeFacts:
        origin = self._origin("vae")
        settings, vae_class = origin.vae_config(), self.family.parts["vae"].load_class()
        # Without weights: the model class fills in defaults of missing settings.
        with loading("vae", origin.name), torch.device("meta"):
            vae = vae_class.from_config(settings)
        if hasattr(vae, "bn"):  # statistics stored as weights, read in float32: a cast would round them
            vae = self.vae(torch.float32)
        self._files("vae")
        return self._with_stated_upcast(vae_facts(vae, self.family), settings)

    @override
    def part(self, name: str, dtype: torch.dtype = torch.float32) -> Any:
        if self.family.parts[name].role in _PROCESSORS:
            dtype = torch.float32
        if (name, dtype) not in self._loaded:
            self._files(name)
            found = self._origin(name).load(name, dtype)
            for each in found:
                self._files(each)
            self._loaded |= {(each, dtype): part for each, part in found.items()}
        return self._loaded[name, dtype]

    @override
    def _has(self, part: str) -> bool:
        return self._origin(part).folders[part].is_dir()

    @cached_property
    def _model(self) -> ModelOrigin:
        return find_model(self.family, self.path, self.config, self.variant, self.revision)

    @cached_property
    def _own_vae(self) -> ModelOrigin:
        return find_vae(str(self.vae_path), self._model)

    def _origin(self, part: str) -> ModelOrigin:
        return self._own_vae if part == "vae" and self.vae_path is not None else self._model

    def _files(self, part: str) -> list[Any]:
        """Signatures of the part's files, called before and after loading. ModelError if they changed in between."""
        found = [_signature(path) for path in self._origin(part).files(part)]
        if self._first_files.setdefault(part, found) != found:
            raise ModelError(
                f"{part}: the files of {self.origin(part)} changed since they were first read, so keys made from them "
                "are out of date. Start again.",
                part=part,
            )
        return found

    def _remembered(
        self, kind: str, part: str, dtype: torch.dtype, adapter: TypeAdapter[_Known], compute: Callable[[], _Known]
    ) -> _Known:
        """A value for this part from the memo, else computed; always computed for a part without files."""
        files = self._files(part)
        if not files:
            return compute()
        # Library versions are in the memo's key: another one may interpret a config differently.
        versions, described = [*installed_versions(("diffusers", "transformers")).values()], self.family.parts[part]
        counts = [described.class_name, list(described.weights), described.settings]
        key = f"{kind} {digest(canonical_json([part, str(dtype), self.variant, versions, files, counts]))}"
        known = recalled(self._memo, key, adapter.validate_json)
        if known is None:
            known = compute()
            self._memo[key] = adapter.dump_json(known).decode()
        return known


class LoadedModels(Models):
    """Parts that the caller, e.g. a trainer, has already loaded, with the interface of `ModelLoader`.

    A part in the requested dtype is returned itself; move it with `devices.placement.placed`, which moves it back. For
    another dtype a CPU copy is made and kept until `release()`, because a cast there and back would change the caller's
    weights. Each use checks that the part is frozen (TrainableEncoderError). Identities are not cached, as weights may
    change between calls.
    """

    def __init__(self, *, family: Family | None = None, **parts: Any):
        super().__init__(family or family_named(DEFAULT))
        if unknown := sorted(parts.keys() - self.family.parts.keys()):
            known = ", ".join(self.family.parts)
            raise ModelError(f"{unknown[0]!r} is not a part of {self.family.name}: it has {known}", part=unknown[0])
        self._parts = {name: part for name, part in parts.items() if part is not None}

    @override
    def origin(self, part: str) -> str:
        name = getattr(getattr(self._given(part), "config", None), "_name_or_path", None)
        return f"loaded by the caller ({name})" if name else "loaded by the caller"

    @override
    def identity(self, part: str, dtype: torch.dtype) -> PartIdentity:
        found = self._given(part)
        own = {child: name for name, child in found.named_modules()} if isinstance(found, torch.nn.Module) else {}
        for child, name in own.items():
            # kohya's and LyCORIS' adapters are modules outside, with weights of their own.
            owner = getattr(vars(child).get("forward"), "__self__", child)
            if owner not in own:
                met = f"{name or 'its module'} runs the forward of a {type(owner).__name__}, which is no part of it"
                raise ModelError(f"{part}: {met}. Merge that, or remove it before caching.", part=part)
        return self._identity_of(part, found, dtype)

    @override
    def vae_facts(self) -> VaeFacts:
        vae = self._given("vae")
        dtype = vae.bn.running_var.dtype if hasattr(vae, "bn") else torch.float32
        if dtype != torch.float32:
            raise ModelError(
                f"vae: its statistics for scaling latents (bn) are {dtype}, but they must be float32. Load "
                "the VAE in float32: casting back does not restore rounded values.",
                part="vae",
            )
        return self._with_stated_upcast(vae_facts(vae, self.family), vae.config)

    @override
    def part(self, name: str, dtype: torch.dtype = torch.float32) -> Any:
        found = self._given(name)
        if not isinstance(found, torch.nn.Module):
            return found
        if all(each.dtype == used_dtype(found, key, each, dtype) for key, each in found.named_parameters()):
            return found
        if (name, dtype) not in self._loaded:  # which has only copies, as the caller's parts cannot be released
            self._loaded[name, dtype] = made = copy.deepcopy(found).to("cpu").eval()
            # Not `to(dtype)`, which would also round what is not a weight, such as rotary frequencies.
            for key, each in made.state_dict(keep_vars=True).items():
                each.data = each.data.to(used_dtype(found, key, each, dtype))
        return self._loaded[name, dtype]

    @override
    def _has(self, part: str) -> bool:
        return part in self._parts

    def _given(self, part: str) -> Any:
        if part not in self._parts:
            given = ", ".join(self._parts) or "none"
            raise ModelError(f"{part} was not given (given: {given}). Pass LoadedModels({part}=...).", part=part)
        found = self._parts[part]
        if self.family.parts[part].role not in _PROCESSORS:
            check_frozen(part, found)
        return found


def _signature(path: Path) -> list[Any]:
    try:
        stat = path.stat()
    except OSError as error:
        raise ModelError(f"{path}: can no longer be read ({error.strerror}). Name the model again.") from error
    return [str(path.absolute()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def check_frozen(part: str, module: torch.nn.Module) -> None:
    """Raise TrainableEncoderError, naming the first parameter that requires grad, unless all are frozen."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            raise TrainableEncoderError(part, name)


# Where the parts come from: code (`tiny`), a diffusers folder, one checkpoint file, or the hub.


@dataclass(frozen=True, slots=True)
class ModelOrigin:
    """Loads the frozen parts of a model of this family on the CPU. Every method raises ModelError.

    `name` is the origin for provenance and messages: `tiny`, a path, or a hub id with its commit. `folders` maps parts
    to folders. The weights of `tiny` are built `in_code`. With a `file` in the original layout, weights come from it,
    and the folders only provide configs, tokenizers and parts that a denoiser's file does not include. `variant`
    applies to the folders' weights.
    """

    name: str
    family: Family
    folders: Mapping[str, Path]
    file: Path | None = None
    in_code: bool = False
    variant: str | None = None

    def files(self, part: str) -> list[Path]:
        """The files that the part depends on."""
        if self.in_code:
            return []
        own = [] if self.file is None or self.family.parts[part].role == "tokenizer" else [self.file]
        folder = self.folders[part]
        return own + (sorted(filter(Path.is_file, folder.iterdir())) if folder.is_dir() else [])

    def vae_config(self) -> Mapping[str, Any]:
        """The VAE's config. ModelError if its class is not the family's."""
        vae_class = self.family.parts["vae"].load_class()
        settings = read_config("vae", self.folders["vae"], vae_class, self.name)
        met, needed = settings.get("_class_name", vae_class.__name__), vae_class.__name__
        if met != needed:
            message = f"{self.name} is a {met}, but {self.family.name} has an {needed}. Name a VAE of that class."
            raise refused("vae", message)
        return settings

    def load(self, part: str, dtype: torch.dtype) -> Mapping[str, Any]:
        """The part by name: a processor, or a module in `dtype`, frozen and in eval mode.

        A checkpoint file is read once, so it returns all of its text encoders.
        """
        return frozen(self._load(part, dtype))

    def _load(self, part: str, dtype: torch.dtype) -> Mapping[str, Any]:
        described = self.family.parts[part]
        if described.role in _PROCESSORS:
            return {part: self._processor(part)}
        if self.in_code:
            # torch's own `to`: diffusers' warns about modules kept in float32.
            return {part: torch.nn.Module.to(tiny_part(part), dtype)}
        # Refuses a VAE of another class, whose load would only report missing weights.
        settings = self.vae_config() if described.role == "vae" else {}
        if self.file is None or part in _outside(self.family):
            own, model_class = self._existing(part), described.load_class()
            found, unused = load_pretrained(part, model_class, own, self.variant, dtype, **described.changed)
            # A part of another part leaves weights over. One with its own prefix is a scale of quantised weights.
            if left := next((name for name in unused if described.folder and name.startswith(described.weights)), None):
                step = f"Name a folder of {self.family.name} in bfloat16 or float16"
                raise refused(part, f"{own} has {left}, so its weights are quantised, which is not supported. {step}.")
            return {part: found}
        # Imported here, as these need diffusers' converters.
        from latentcache.models.single_file import part_of_file, text_encoders_of_file

        if described.role == "vae":
            return {part: part_of_file(self.family, part, self.file, settings, dtype)}
        if described.inside is not None:
            settings = read_config(part, self._existing(part), described.load_class())
            return {part: part_of_file(self.family, part, self.file, settings, dtype)}
        configs = [self._existing(name).parent for name in self.family.names("text_encoder")]
        return text_encoders_of_file(self.family, self.file, configs[0], self._processor, dtype)

    def _processor(self, part: str) -> Any:
        folder, described = self._existing(part), self.family.parts[part]
        check_package(part, described.class_name, described.needs)
        with loading(part, self.name):
            return described.load_class().from_pretrained(folder, local_files_only=True)

    def _existing(self, part: str) -> Path:
        folder = self.folders[part]
        if not folder.is_dir():
            step = f"Name a diffusers folder of a {self.family.name} model (for a checkpoint file, as model.config)"
            step += "; or set model.family, if it is of another family"
            raise refused(part, f"{self.name} has no folder {folder.name}. {step}.")
        return folder


def find_model(family: Family, path: str, config: str | None, variant: str | None, revision: str | None) -> ModelOrigin:
    """What `path` names: `tiny`, a folder, a .safetensors file, or a hub id, which is downloaded if necessary."""
    if is_tiny(path, family):
        return ModelOrigin(path, family, _folders(family, TINY_PHOTOS_FOLDER, path), in_code=True)
    names = [family.folder_of(part) for part in family.parts]
    configs = [*MODEL_INDEXES, *(f"{name}/*.{ending}" for name in names for ending in _ENDINGS)]
    if not os.path.isdir(path) and is_checkpoint("model", path):
        # Configs and tokenizers come from `config`, or from what diffusers infers from the file's keys.
        configs += [f"{part}/{weights_name(part)}*.safetensors*" for part in _outside(family)]
        folder, name = config_folder(path, config, configs)
        return ModelOrigin(path, family, _folders(family, folder, name), Path(path))
    weights = [f"{name}/{weights_name(name, variant)}*.safetensors*" for name in names]
    name, folder = local_folder("model", path, [*configs, *weights], revision=revision, variant=variant)
    return ModelOrigin(name, family, _folders(family, folder, name), variant=variant)


def _outside(family: Family) -> list[str]:
    """If a family's denoiser files include text-encoding parts: the text encoders that they do not include."""
    encoders, whole = family.names("text_encoder"), family_named(family.whole or family.name)
    inside = [name for name, part in whole.parts.items() if part.inside is not None]
    return [name for name in encoders if name not in inside] if inside else []


def _folders(family: Family, folder: Path, name: str) -> dict[str, Path]:
    """The folders of the parts: subfolders of this one, or the places that its modular index gives for missing ones."""
    found = {part: folder / family.folder_of(part) for part in family.parts}
    lacking = [part for part, own in found.items() if not own.is_dir()]
    index = (model_index(folder, name) if lacking else None) or {}
    for part in lacking:
        place = index[part][-1] if isinstance(index.get(part), list) else None
        # Modular indexes may name another repository or folder here; other indexes name a class.
        if isinstance(place, Mapping) and isinstance(given := place.get("pretrained_model_name_or_path"), str):
            own = f"{place['subfolder']}/" if place.get("subfolder") else ""
            patterns = [f"{own}*.{ending}" for ending in (*_ENDINGS, "safetensors")]
            found[part] = local_folder(part, given, patterns, revision=place.get("revision"))[1] / own
    return found


def find_vae(path: str, model: ModelOrigin) -> ModelOrigin:
    """What `path` names as a separate VAE. A file without a config.json next to it uses the config of `model`'s VAE."""
    if os.path.isdir(path) or not is_checkpoint("vae", path):
        name, folder = local_part("vae", path, None)
        return ModelOrigin(name, model.family, {"vae": folder})
    file = Path(path)
    has_config = (file.parent / "config.json").is_file()
    return ModelOrigin(path, model.family, {"vae": file.parent} if has_config else model.folders, file)
