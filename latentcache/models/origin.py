"""Where a model's frozen parts come from: code (`tiny`), a diffusers folder, one checkpoint file, or the hub."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from diffusers import AutoencoderKL, StableDiffusionXLPipeline
from diffusers.loaders.single_file_utils import fetch_diffusers_config, load_single_file_checkpoint
from diffusers.utils import logging as diffusers_logging
from huggingface_hub import snapshot_download
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer
from transformers.utils import logging as transformers_logging

from latentcache.errors import ModelError
from latentcache.models.tiny import tiny_sdxl

TINY = "tiny"
WEIGHTS = {"vae": "diffusion_pytorch_model", "text_encoder": "model", "text_encoder_2": "model"}
TOKENIZERS = ("tokenizer", "tokenizer_2")

_PICKLED = (".bin", ".ckpt", ".pkl", ".pt", ".pth")
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_SETTINGS = [
    "model_index.json",
    *(f"{part}/*.{suffix}" for part in (*WEIGHTS, *TOKENIZERS) for suffix in ("json", "txt")),
]
_CONVERT = {
    "vae": "diffusers.AutoencoderKL",
    "text_encoder": "transformers.CLIPTextModel",
    "text_encoder_2": "transformers.CLIPTextModelWithProjection",
    "unet": "diffusers.UNet2DConditionModel",
}


class Source(Protocol):
    """Loads parts on the CPU. `name` says where from; `files` are those whose change may change the part."""

    name: str

    def files(self, part: str) -> list[Path]: ...

    def vae_settings(self) -> Mapping[str, Any]: ...

    def load_vae(self, dtype: torch.dtype) -> torch.nn.Module: ...

    def load_text_encoders(self, dtype: torch.dtype) -> tuple[torch.nn.Module, torch.nn.Module]: ...

    def load_tokenizers(self) -> tuple[Any, Any]: ...


@dataclass(frozen=True, slots=True)
class TinySource:
    """The tiny SDXL built in code."""

    name: str = TINY

    def files(self, part: str) -> list[Path]:
        return []

    def vae_settings(self) -> Mapping[str, Any]:
        return dict(tiny_sdxl()["vae"].config)

    def load_vae(self, dtype: torch.dtype) -> torch.nn.Module:
        # torch's own `to`: diffusers' warns of modules to keep in float32, of which this VAE has none.
        return torch.nn.Module.to(tiny_sdxl()["vae"], dtype)

    def load_text_encoders(self, dtype: torch.dtype) -> tuple[torch.nn.Module, torch.nn.Module]:
        parts = tiny_sdxl()
        return parts["text_encoder"].to(dtype), parts["text_encoder_2"].to(dtype)

    def load_tokenizers(self) -> tuple[Any, Any]:
        parts = tiny_sdxl()
        return parts["tokenizer"], parts["tokenizer_2"]


@dataclass(frozen=True, slots=True)
class FolderSource:
    """A diffusers folder. `flat`: the folder holds a VAE itself, not in `vae/`."""

    name: str
    folder: Path
    variant: str | None = None
    flat: bool = False

    def files(self, part: str) -> list[Path]:
        return _files_in(self._part(part))

    def vae_settings(self) -> Mapping[str, Any]:
        with loading("vae", self.name):
            settings = AutoencoderKL.load_config(self._part("vae"))
        class_name = settings.get("_class_name", "AutoencoderKL")
        if class_name != "AutoencoderKL":
            raise ModelError(
                f"vae: {self.name} is a {class_name}, but an AutoencoderKL is needed. Name an SDXL VAE.", part="vae"
            )
        return settings

    def load_vae(self, dtype: torch.dtype) -> torch.nn.Module:
        self.vae_settings()  # refuses another class: its weights would only be called incomplete
        return self._load("vae", AutoencoderKL, torch_dtype=dtype)

    def load_text_encoders(self, dtype: torch.dtype) -> tuple[torch.nn.Module, torch.nn.Module]:
        return (
            self._load("text_encoder", CLIPTextModel, dtype=dtype),
            self._load("text_encoder_2", CLIPTextModelWithProjection, dtype=dtype),
        )

    def load_tokenizers(self) -> tuple[Any, Any]:
        return self._tokenizer("tokenizer"), self._tokenizer("tokenizer_2")

    def _part(self, part: str) -> Path:
        return self.folder if self.flat else self.folder / part

    def _tokenizer(self, part: str) -> Any:
        folder = _existing(part, self._part(part), self.name)
        with loading(part, self.name):
            return CLIPTokenizer.from_pretrained(folder, local_files_only=True)

    def _load(self, part: str, model_class: Any, **dtype: torch.dtype) -> torch.nn.Module:
        folder = _existing(part, self._part(part), self.name)
        check_weights(part, folder, WEIGHTS[part], self.variant)
        module, _ = load_pretrained(part, folder, model_class, self.variant, **dtype)
        return module


@dataclass(frozen=True, slots=True)
class FileSource:
    """One checkpoint file in the original SDXL layout; `settings` is the folder of its configs and tokenizers."""

    name: str
    file: Path
    settings: FolderSource

    def files(self, part: str) -> list[Path]:
        own = [] if part in TOKENIZERS else [self.file]
        return own + self.settings.files(part)

    def vae_settings(self) -> Mapping[str, Any]:
        return self.settings.vae_settings()

    def load_vae(self, dtype: torch.dtype) -> torch.nn.Module:
        self.vae_settings()
        where = {} if self.settings.flat else {"subfolder": "vae"}
        with loading("vae", self.name):
            module = AutoencoderKL.from_single_file(
                str(self.file), config=str(self.settings.folder), torch_dtype=dtype, local_files_only=True, **where
            )
        return _complete("vae", module, self.name)

    def load_text_encoders(self, dtype: torch.dtype) -> tuple[torch.nn.Module, torch.nn.Module]:
        tokenizer, tokenizer_2 = self.load_tokenizers()
        with loading("text_encoder", self.name):
            pipeline = StableDiffusionXLPipeline.from_single_file(
                str(self.file),
                config=str(self.settings.folder),
                torch_dtype=dtype,
                local_files_only=True,
                add_watermarker=False,
                tokenizer=tokenizer,
                tokenizer_2=tokenizer_2,
                vae=None,
                unet=None,
                scheduler=None,
            )
        return (
            _complete("text_encoder", pipeline.text_encoder, self.name),
            _complete("text_encoder_2", pipeline.text_encoder_2, self.name),
        )

    def load_tokenizers(self) -> tuple[Any, Any]:
        return self.settings.load_tokenizers()


def load_pretrained(
    part: str, folder: Path, model_class: Any, variant: str | None, **dtype: torch.dtype
) -> tuple[torch.nn.Module, list[str]]:
    """The module in a folder of its own, and the names in the file that it has no place for.

    Raises ModelError for a weight that is missing or has another shape.
    """
    with loading(part, str(folder)):
        module, info = model_class.from_pretrained(
            folder,
            use_safetensors=True,
            variant=variant,
            local_files_only=True,
            output_loading_info=True,
            **dtype,
        )
    # Both libraries fill what is missing with random values and only warn.
    absent = sorted(str(key) for kind in ("missing_keys", "mismatched_keys") for key in info[kind])
    if absent:
        raise ModelError(
            f"{part}: {folder} lacks {len(absent)} of the weights of {model_class.__name__}, or has them in "
            f"another shape, e.g. {absent[0]}. Use a folder written by save_pretrained of that class.",
            part=part,
        )
    return module, sorted(str(key) for key in info["unexpected_keys"])


def find_model(path: str, config: str | None, variant: str | None, revision: str | None) -> Source:
    """The source that `path` names: `tiny`, a folder, a .safetensors file, else a hub id (downloaded if need be)."""
    if path == TINY:
        return TinySource()
    if os.path.isdir(path):
        return FolderSource(path, Path(path), variant)
    if is_checkpoint("model", path):
        return FileSource(path, Path(path), _checkpoint_settings(path, config))
    return _from_hub("model", path, variant, revision)


def find_vae(path: str, model: Source) -> Source:
    """The source of a separate VAE. A file without a config.json beside it takes the config of `model`'s VAE."""
    if os.path.isdir(path):
        return _vae_folder(path, Path(path), None)
    if is_checkpoint("vae", path):
        file = Path(path)
        if (file.parent / "config.json").is_file():
            return FileSource(path, file, FolderSource(path, file.parent, flat=True))
        if isinstance(model, FolderSource):
            return FileSource(path, file, model)
        if isinstance(model, FileSource):
            return FileSource(path, file, model.settings)
        raise ModelError(
            f"vae: {path} has no config.json beside it, and the model {model.name!r} has none to lend. "
            "Put the VAE's config.json beside the file.",
            part="vae",
        )
    return _from_hub("vae", path, None, None)


def _vae_folder(name: str, folder: Path, variant: str | None) -> FolderSource:
    return FolderSource(name, folder, variant, flat=not (folder / "vae").is_dir())


def is_checkpoint(part: str, path: str) -> bool:
    """Whether `path` is a .safetensors file. Raises ModelError if it is, or can only be, another kind of file."""
    suffix = Path(path).suffix.lower()
    if suffix in _PICKLED:
        raise ModelError(
            f"{part}: {path} is a pickle, which can run code when it is loaded. "
            "Name a .safetensors file, or convert this one on a machine that you can lose.",
            part=part,
        )
    if os.path.isfile(path) and suffix != ".safetensors":
        raise ModelError(f"{part}: {path} is a file, but not a .safetensors one. Name a .safetensors file.", part=part)
    if not os.path.isfile(path) and (suffix == ".safetensors" or not _HUB_ID.fullmatch(path)):
        raise ModelError(
            f"{part}: there is no file or folder {path}, and it is not a hub id (owner/name). Correct the path.",
            part=part,
        )
    return os.path.isfile(path)


def _checkpoint_settings(path: str, config: str | None) -> FolderSource:
    """The folder with configs and tokenizers for a checkpoint: `config`, or what diffusers infers from its keys."""
    if config is None:
        config, step = checkpoint_configs(path)
    else:
        step = "It was named by model.config. Name a diffusers folder or a hub id of an SDXL model there"
    name = f"{path} (configs: {config})"
    folder = Path(config) if os.path.isdir(config) else download("model", config, None, _SETTINGS, step)
    lacking = [part for part in ("model_index.json", *WEIGHTS, *TOKENIZERS) if not (folder / part).exists()]
    if lacking:
        raise ModelError(
            f"model: {config} has no {', '.join(lacking)}, which an SDXL checkpoint needs. {path}: {step}.",
            part="model",
        )
    return FolderSource(name, folder)


def checkpoint_configs(path: str) -> tuple[str, str]:
    """The hub id whose configs diffusers infers from a checkpoint's keys, and the next step if it cannot be had."""
    with loading("model", path):
        config = fetch_diffusers_config(load_single_file_checkpoint(path))["pretrained_model_name_or_path"]
    return config, f"diffusers infers the configs of {config} for it. Set model.config to a local diffusers folder"


def _from_hub(part: str, path: str, variant: str | None, revision: str | None) -> FolderSource:
    infix = f".{variant}" if variant else ""
    weights = [f"{name}/{stem}{infix}*.safetensors" for name, stem in WEIGHTS.items()]
    if part == "vae":
        stem = WEIGHTS["vae"]
        patterns = ["config.json", "vae/config.json", f"{stem}{infix}*.safetensors", weights[0], "*.safetensors.index*"]
    else:
        patterns = _SETTINGS + weights
    folder = download(part, path, revision, patterns, "Download it once while online, or name a local folder", variant)
    name = f"{path}@{folder.name}"  # a snapshot's folder is named by its commit
    return _vae_folder(name, folder, variant) if part == "vae" else FolderSource(name, folder, variant)


def download(
    part: str, repository: str, revision: str | None, patterns: list[str], step: str, variant: str | None = None
) -> Path:
    """The snapshot folder of these files of a hub repository, from the hub cache if it is there. Raises ModelError."""
    # Without a variant, the variants (model.fp16.safetensors) beside the plain files are not needed.
    ignored = None if variant else ["*.*.safetensors"]
    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=patterns, ignore_patterns=ignored))
    except Exception as error:  # huggingface_hub's errors share no base, and httpx's pass through
        raise ModelError(
            f"{part}: {repository} is no local path, and could not be had from the hub ({first_line(error)}). {step}.",
            part=part,
        ) from error


def _existing(part: str, folder: Path, name: str) -> Path:
    if not folder.is_dir():
        raise ModelError(
            f"{part}: {name} has no folder {folder.name}. Name a diffusers folder of an SDXL model.", part=part
        )
    return folder


def has_weights(folder: Path, stem: str, variant: str | None) -> bool:
    """Whether the folder has the variant's .safetensors weights, in one file or in several with an index."""
    infix = f".{variant}" if variant else ""
    # Where an index has its variant depends on the version of the library that wrote it.
    names = (f"{infix}.safetensors", f"{infix}*.safetensors.index*.json", f".safetensors.index{infix}.json")
    return any(any(folder.glob(f"{stem}{name}")) for name in names)


def check_weights(part: str, folder: Path, stem: str, variant: str | None) -> None:
    """ModelError if the folder has no such weights: a pickle is named as one, and the weights that are there."""
    if has_weights(folder, stem, variant):
        return
    stem += f".{variant}" if variant else ""
    names = sorted(path.name for path in folder.iterdir() if path.suffix in (".safetensors", *_PICKLED))
    pickled = [name for name in names if not name.endswith(".safetensors")]
    if pickled and len(pickled) == len(names):
        raise ModelError(
            f"{part}: {folder} has its weights only as a pickle ({pickled[0]}), which can run code when it is loaded. "
            f"Convert it where that is safe: {_CONVERT[part]}.from_pretrained({str(folder)!r}, "
            f"use_safetensors=False).save_pretrained({str(folder)!r}).",
            part=part,
        )
    raise ModelError(
        f"{part}: {folder} has no {stem}.safetensors (it has {', '.join(names) or 'no weights'}). "
        "Name a folder that has it, or the variant whose weights are there.",
        part=part,
    )


def _complete(part: str, module: torch.nn.Module, name: str) -> torch.nn.Module:
    # from_single_file leaves what the file lacks on the meta device.
    for key, tensor in module.state_dict().items():
        if tensor.device.type == "meta":
            raise ModelError(f"{part}: {name} lacks {key}. Use a complete SDXL checkpoint.", part=part)
    return module


def _files_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []


def first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def loading(part: str, name: str) -> Iterator[None]:
    """Turn what diffusers and transformers raise into ModelError, and keep their progress bars off the terminal."""
    libraries = [(library, library.is_progress_bar_enabled()) for library in (diffusers_logging, transformers_logging)]
    for library, _ in libraries:
        library.disable_progress_bar()
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # they raise nearly anything for a damaged or foreign file
        raise ModelError(
            f"{part}: {name} could not be loaded ({type(error).__name__}: {first_line(error)}). "
            "Check that the files are whole and belong to an SDXL model.",
            part=part,
        ) from error
    finally:
        for library, was_enabled in libraries:
            if was_enabled:
                library.enable_progress_bar()
