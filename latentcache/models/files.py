"""The files of a model: finding them locally or on the hub, refusing unsafe ones, and strict loading.

diffusers and transformers initialise missing weights randomly, drop unexpected ones and read pickles, with a warning at
most. Here each of these is a ModelError that names the part, the file and the next step.

Both are imported lazily: this takes seconds, and a run without misses needs neither.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from latentcache.config import ModelConfig
from latentcache.errors import ModelError
from latentcache.families import DEFAULT, FAMILIES, family_named
from latentcache.families.base import Family
from latentcache.utils.extras import outdated

TINY = "tiny"
"""`model.path` of the model of the family DEFAULT with random weights, built in code (`models.tiny`)."""
TINY_PHOTOS = "tiny-photos"
"""`model.path` of the model in `TINY_PHOTOS_FOLDER`."""
TINY_PHOTOS_FOLDER = Path(__file__).with_name("tiny_photos")
"""A diffusers folder in the package with a tiny model trained on the quickstart's photos."""
MODEL_INDEXES = ("model_index.json", "modular_model_index.json")
"""Files that name a model's pipeline; the second is for diffusers' modular pipelines."""
_LOADS = threading.RLock()
_PICKLED = (".bin", ".ckpt", ".pkl", ".pt", ".pth")
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_HUB_STEP = (
    "Download it once while online (hf download NAME), or name a local folder or .safetensors file, e.g. as "
    "model.path; `--model.path tiny` runs without a real model"
)


def refused(part: str, message: str) -> ModelError:
    """The error for a part of a model that cannot be used."""
    return ModelError(f"{part}: {message}", part=part)


def is_tiny(path: str, family: Family) -> bool:
    """Whether `path` names the model built in code. ModelError if it does but `family` is another one."""
    if path == TINY and family.name != DEFAULT:
        step = f"Name a diffusers folder or hub id of a {family.name} model, e.g. {family.repositories[0]}"
        raise refused("model", f"{TINY} is a model of {DEFAULT}, but the family is {family.name}. {step}.")
    return path == TINY


def check_package(part: str, class_name: str, package: str | None) -> None:
    """Raise ModelError if a package that the class needs is not installed."""
    if package is not None and importlib.util.find_spec(package) is None:
        raise refused(part, f"{class_name} needs {package}. Install that package.")


def model_index(folder: Path, name: str) -> dict[str, Any] | None:
    """The parsed index of a model's folder, or None; errors call the folder `name`. ModelError."""
    file = next((folder / each for each in MODEL_INDEXES if (folder / each).is_file()), None)
    if file is None:
        return None
    with readable("model", name):
        return dict(json.loads(file.read_text(encoding="utf-8")))


def weights_name(part: str, variant: str | None = None) -> str:
    """File name prefix of a part's weights in a diffusers folder, e.g. `diffusion_pytorch_model.fp16`."""
    stem = "model" if part.startswith(("text_encoder", "image_encoder")) else "diffusion_pytorch_model"
    return f"{stem}.{variant}" if variant else stem


def is_checkpoint(part: str, path: str) -> bool:
    """Whether `path` is a .safetensors file. ModelError if it is another file, or neither a path nor a hub id."""
    if path == TINY_PHOTOS:
        return False
    suffix, is_file = Path(path).suffix.lower(), os.path.isfile(path)
    if suffix in _PICKLED:
        raise refused(
            part,
            f"{path} is a pickle, which can run arbitrary code when loaded. Name a .safetensors file, or convert this "
            "one in a sandbox.",
        )
    if is_file and suffix != ".safetensors":
        raise refused(part, f"{path} is not a .safetensors file. Name one.")
    if not is_file and (suffix == ".safetensors" or not _HUB_ID.fullmatch(path)):
        raise refused(
            part, f"there is no file or folder {path}, and it is not a hub id (owner/name). Correct the path."
        )
    return is_file


def load_pretrained(
    part: str, model_class: Any, folder: Path, variant: str | None, dtype: torch.dtype, **changed: Any
) -> tuple[torch.nn.Module, list[str]]:
    """The part in this folder, in `dtype` on the CPU, and the names of unexpected weights.

    `changed` overrides settings in its config. Raises ModelError for weights that are pickled, missing or of another
    shape.
    """
    with loading(part, str(folder)):
        module, info = model_class.from_pretrained(
            folder,
            use_safetensors=True,
            variant=variant,
            local_files_only=True,
            output_loading_info=True,
            **{"torch_dtype" if model_class.__module__.startswith("diffusers.") else "dtype": dtype},
            **changed,
        )
    # Both libraries only warn about missing weights, and initialise them randomly.
    absent = sorted(str(key) for kind in ("missing_keys", "mismatched_keys") for key in info[kind])
    if absent:
        raise refused(
            part,
            f"{folder} lacks {len(absent)} of the weights of {model_class.__name__}, or has them in another shape, "
            f"e.g. {absent[0]}. Use a folder written by save_pretrained of that class.",
        )
    return module, sorted(str(key) for key in info["unexpected_keys"])


def read_config(part: str, folder: Path, config_class: Any, name: str | None = None) -> Mapping[str, Any]:
    """The settings in the config file of a part with a diffusers class; errors call the folder `name`. ModelError."""
    with loading(part, name or str(folder)):
        settings = config_class.load_config(folder.absolute(), local_files_only=True)  # absolute: no hub id
        if not isinstance(settings, Mapping):
            raise ValueError(f"its config holds a {type(settings).__name__}, not an object")
        return settings


def local_part(part: str, path: str, variant: str | None, revision: str | None = None) -> tuple[str, Path]:
    """`local_folder` for a single part: its subfolder if there is one, else the folder itself (a UNet or VAE alone)."""
    files = ("config.json", f"{weights_name(part, variant)}*.safetensors", f"{weights_name(part)}*.safetensors.index*")
    patterns = [f"{folder}{file}" for folder in ("", f"{part}/") for file in files]
    name, folder = local_folder(part, path, patterns, revision=revision, variant=variant)
    return name, folder / part if (folder / part).is_dir() else folder


def local_folder(
    part: str,
    path: str,
    patterns: Sequence[str],
    *,
    revision: str | None = None,
    variant: str | None = None,
    next_step: str = _HUB_STEP,
) -> tuple[str, Path]:
    """The name and path of a local folder, or of a hub repository's snapshot with files that match `patterns`.

    The name of a snapshot includes the commit. `tiny-photos` is the folder in the package. Files in the hub cache are
    not downloaded again. Raises ModelError.
    """
    if os.path.isdir(path):
        return path, Path(path)
    if path == TINY_PHOTOS:
        return path, TINY_PHOTOS_FOLDER
    # Without a variant, skip variant files (model.fp16.safetensors) next to the plain ones.
    ignored = None if variant else ["*.*.safetensors"]
    try:
        found = snapshot_download(path, revision=revision, allow_patterns=[*patterns], ignore_patterns=ignored)
    except Exception as error:  # huggingface_hub's errors share no base class, and httpx's pass through
        name = path if revision is None else f"{path} at revision {revision!r}"
        problem = f"is not a local path, and could not be downloaded from the hub ({first_line(error)})"
        if isinstance(error, LocalEntryNotFoundError):  # its message is about huggingface_hub's settings
            problem = "is not on this machine, and the hub cannot be reached"
        raise refused(part, f"{name} {problem}. {next_step.replace('NAME', path)}.") from error
    return f"{path}@{Path(found).name}", Path(found)


def config_folder(
    path: str, config: str | None, patterns: Sequence[str], revision: str | None = None
) -> tuple[Path, str]:
    """The folder with a model's configs: `config` if given, else `path`, or what diffusers infers from that file.

    Returns the folder and the name of its origin. `patterns` are the files to download from the hub; `revision` is
    for `path`. Raises ModelError.
    """
    name, next_step = path if config is None else config, _HUB_STEP
    if config is not None:
        revision = None
        next_step = "It comes from model.config. Set that to a diffusers folder or hub id of a model of its family"
    elif not os.path.isdir(path) and is_checkpoint("model", path):
        from diffusers.loaders.single_file_utils import fetch_diffusers_config, load_single_file_checkpoint

        with loading("model", path):
            name = fetch_diffusers_config(load_single_file_checkpoint(path))["pretrained_model_name_or_path"]
        next_step = f"diffusers infers the configs of {name} for it. Set model.config to a local diffusers folder"
    return local_folder("model", name, patterns, revision=revision, next_step=next_step)[1], name


def first_line(error: BaseException) -> str:
    """The first line of the error's message, or its type if that is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def loading(part: str, name: str) -> Iterator[None]:
    """Turn errors of diffusers and transformers into ModelError, and silence progress bars and diffusers' log.

    What diffusers logs about weights is raised here instead. These settings are global, so threads load one at a time.
    """
    from diffusers.utils import logging as of_diffusers
    from transformers.utils import logging as of_transformers

    with _LOADS:
        verbosity = of_diffusers.get_verbosity()
        libraries = [(library, library.is_progress_bar_enabled()) for library in (of_diffusers, of_transformers)]
        for library, _ in libraries:
            library.disable_progress_bar()
        of_diffusers.set_verbosity(logging.CRITICAL)
        try:
            with readable(part, name):
                yield
        finally:
            of_diffusers.set_verbosity(verbosity)
            for library, was_enabled in libraries:
                if was_enabled:
                    library.enable_progress_bar()


@contextmanager
def readable(part: str, name: str) -> Iterator[None]:
    """Turn any error about a damaged or foreign file into ModelError."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # the libraries raise nearly anything
        step = "Check that the files are complete .safetensors files of a model of this family"
        if older := ", ".join(outdated("encode")):
            step = f"This environment has {older}. Encode in another one (pip install 'latentcache[encode]'), read here"
        problem = f"{name} could not be loaded ({type(error).__name__}: {first_line(error)})"
        raise refused(part, f"{problem}. {step}.") from error


# Families


def family_of(config: ModelConfig) -> tuple[Family, str]:
    """The family of the config's model, and the reason, for people.

    It is `model.family`, else that of the pipeline in the model's model_index.json or modular_model_index.json. A
    single file, and a folder without either index, count as the family DEFAULT.
    Raises ModelError for an unknown or unsupported pipeline, and for a hub id that cannot be read.
    """
    if config.family is not None:
        return family_named(config.family), "model.family says so"
    name = config.config or config.path
    if name in (TINY, TINY_PHOTOS):
        return family_named(DEFAULT), f"{name} is of this family"
    index = _index_of(config)
    if index is None:
        reason = "has no model_index.json" if os.path.isdir(name) else "is a single file"
        return family_named(DEFAULT), f"{name} {reason}, so {DEFAULT} is assumed: set model.family if it is another one"
    with readable("model", name):
        named = index["_class_name"]
        class_name = str(named[-1] if isinstance(named, list) else named)  # a list has the pipeline's own module first
    for family in map(family_named, FAMILIES):
        if any(fnmatchcase(class_name, known) for known in (family.pipeline_name, *family.pipeline_names)):
            return family, f"{name} is a model of {class_name}"
        if met := family.refused_pipelines.get(class_name):
            step = f"Name a model of {family.pipeline_name}, as {family.repositories[0]}"
            raise ModelError(f"model: {name} is a model of {class_name}. It {met}. {step}.", part="model")
    raise ModelError(
        f"model: {name} is a model of {class_name}, whose family is unknown. Set model.family to the one whose parts "
        f"it has: {', '.join(FAMILIES)}.",
        part="model",
    )


def pipeline_settings(config: ModelConfig, family: Family) -> dict[str, Any]:
    """The `family.pipeline_settings` that the model's model_index.json states. ModelError as from `family_of`."""
    index = _index_of(config) if family.pipeline_settings else None
    return {name: index[name] for name in family.pipeline_settings if name in index} if index else {}


def denoised_share(config: ModelConfig, family: Family) -> tuple[float, float]:
    """The range of timesteps that the model's denoiser is for, as fractions: (0.0, 1.0), or a part of it.

    If model_index.json has a `boundary_ratio`, the family's second denoiser (by `model.denoiser`) has the timesteps
    below it, and the first one the rest. ModelError as from `family_of`.
    """
    index = _index_of(config) if family.second_denoiser else None
    boundary = (index or {}).get("boundary_ratio")
    if boundary is None:
        return 0.0, 1.0
    return (0.0, boundary) if config.denoiser == family.second_denoiser else (boundary, 1.0)


def _index_of(config: ModelConfig) -> dict[str, Any] | None:
    """The parsed index that names the pipeline; None for a tiny model, a single file, and a folder without one."""
    name, revision = config.config or config.path, None if config.config else config.revision
    if name in (TINY, TINY_PHOTOS) or (not os.path.isdir(name) and is_checkpoint("model", name)):
        return None
    return model_index(local_folder("model", name, MODEL_INDEXES, revision=revision)[1], name)
