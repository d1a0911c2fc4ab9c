"""The files of a model: which weights are safe to read, where the hub's copies lie, and strict loading of both.

diffusers and transformers fill missing weights with random values, drop what has no place, and read pickles, each with
a warning at most. Here each of these is a ModelError that names the part, the file and the next step.

Both are imported when they load something: it takes seconds, and a run whose entries are all there needs neither.
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
"""The name of the model of the family DEFAULT that is built in code (`models.tiny`), with random weights."""
TINY_PHOTOS = "tiny-photos"
"""The name of the model in `TINY_PHOTOS_FOLDER`."""
TINY_PHOTOS_FOLDER = Path(__file__).with_name("tiny_photos")
"""A diffusers folder in the package: a tiny model that was trained on the quickstart's photos."""
MODEL_INDEXES = ("model_index.json", "modular_model_index.json")
"""What a model's folder has of its pipeline: the second where that is made of diffusers' modular blocks."""
_LOADS = threading.RLock()
_PICKLED = (".bin", ".ckpt", ".pkl", ".pt", ".pth")
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_HUB_STEP = (
    "Download it once while online (hf download NAME), or name a local folder or .safetensors file, "
    "e.g. as model.path; `--model.path tiny` tries it without a model"
)


def refused(part: str, message: str) -> ModelError:
    """The error for a part of a model that cannot be used."""
    return ModelError(f"{part}: {message}", part=part)


def is_tiny(path: str, family: Family) -> bool:
    """Whether `path` names the model that is built in code. ModelError if it does, for a family that it is not of."""
    if path == TINY and family.name != DEFAULT:
        step = f"Name a diffusers folder or hub id of a model of {family.name}, e.g. {family.repositories[0]}"
        raise refused("model", f"{TINY} is a model of {DEFAULT}, but the family is {family.name}. {step}.")
    return path == TINY


def check_package(part: str, class_name: str, package: str | None) -> None:
    """Raise ModelError if this package is not installed, without which the class cannot be used."""
    if package is not None and importlib.util.find_spec(package) is None:
        raise refused(part, f"{class_name} needs {package}. Install that package.")


def model_index(folder: Path, name: str) -> dict[str, Any] | None:
    """The document of a model's folder that names its pipeline, or None; errors call it `name`. ModelError."""
    file = next((folder / each for each in MODEL_INDEXES if (folder / each).is_file()), None)
    if file is None:
        return None
    with readable("model", name):
        return dict(json.loads(file.read_text(encoding="utf-8")))


def weights_name(part: str, variant: str | None = None) -> str:
    """How the names of a part's weights begin in a diffusers folder: `diffusion_pytorch_model`, or with `.fp16`."""
    stem = "model" if part.startswith(("text_encoder", "image_encoder")) else "diffusion_pytorch_model"
    return f"{stem}.{variant}" if variant else stem


def is_checkpoint(part: str, path: str) -> bool:
    """Whether `path` is a .safetensors file. Raises ModelError if it is, or can only be, another kind of file."""
    if path == TINY_PHOTOS:
        return False
    suffix, is_file = Path(path).suffix.lower(), os.path.isfile(path)
    if suffix in _PICKLED:
        raise refused(
            part,
            f"{path} is a pickle, which can run code when it is loaded. Name a .safetensors file, or convert this one "
            "on a machine that you can lose.",
        )
    if is_file and suffix != ".safetensors":
        raise refused(part, f"{path} is a file, but not a .safetensors one. Name a .safetensors file.")
    if not is_file and (suffix == ".safetensors" or not _HUB_ID.fullmatch(path)):
        raise refused(
            part, f"there is no file or folder {path}, and it is not a hub id (owner/name). Correct the path."
        )
    return is_file


def load_pretrained(
    part: str, model_class: Any, folder: Path, variant: str | None, dtype: torch.dtype, **changed: Any
) -> tuple[torch.nn.Module, list[str]]:
    """The part in a folder of its own, in `dtype` on the CPU, and the names of its weights that have no place in it.

    `changed` are settings in place of those in its config. Raises ModelError for weights that are pickled, missing or
    of another shape.
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
    # Both libraries fill what is missing with random values and only warn.
    absent = sorted(str(key) for kind in ("missing_keys", "mismatched_keys") for key in info[kind])
    if absent:
        raise refused(
            part,
            f"{folder} lacks {len(absent)} of the weights of {model_class.__name__}, or has them in another shape, "
            f"e.g. {absent[0]}. Use a folder written by save_pretrained of that class.",
        )
    return module, sorted(str(key) for key in info["unexpected_keys"])


def read_config(part: str, folder: Path, config_class: Any, name: str | None = None) -> Mapping[str, Any]:
    """The settings in a part's config file, of a class of diffusers. `name` is what errors call the folder.

    Raises ModelError.
    """
    with loading(part, name or str(folder)):
        settings = config_class.load_config(folder.absolute(), local_files_only=True)  # not `a/b` of the hub
        if not isinstance(settings, Mapping):
            raise ValueError(f"its config holds {type(settings).__name__}, not settings by name")
        return settings


def part_folder(folder: Path, part: str) -> Path:
    """Where a folder holds a part: in the subfolder of that name, else (a VAE or a UNet alone) in itself."""
    return folder / part if (folder / part).is_dir() else folder


def local_part(part: str, path: str, variant: str | None, revision: str | None = None) -> tuple[str, Path]:
    """`local_folder`, with one part's config and weights alone. See `part_folder`."""
    files = ("config.json", f"{weights_name(part, variant)}*.safetensors", f"{weights_name(part)}*.safetensors.index*")
    patterns = [f"{folder}{file}" for folder in ("", f"{part}/") for file in files]
    return local_folder(part, path, patterns, revision=revision, variant=variant)


def local_folder(
    part: str,
    path: str,
    patterns: Sequence[str],
    *,
    revision: str | None = None,
    variant: str | None = None,
    next_step: str = _HUB_STEP,
) -> tuple[str, Path]:
    """A folder as it is, else a hub repository's snapshot folder with these files; before it its name, with the commit.

    `tiny-photos` names the folder in the package. What is in the hub cache is not downloaded again. Raises ModelError.
    """
    if os.path.isdir(path):
        return path, Path(path)
    if path == TINY_PHOTOS:
        return path, TINY_PHOTOS_FOLDER
    # Without a variant, the variants (model.fp16.safetensors) next to the plain files are not needed.
    ignored = None if variant else ["*.*.safetensors"]
    try:
        found = snapshot_download(path, revision=revision, allow_patterns=[*patterns], ignore_patterns=ignored)
    except Exception as error:  # huggingface_hub's errors share no base, and httpx's pass through
        name = path if revision is None else f"{path} at revision {revision!r}"
        problem = f"is no local path, and could not be had from the hub ({first_line(error)})"
        if isinstance(error, LocalEntryNotFoundError):  # its text is about its own settings
            problem = "is not on this machine, and the hub cannot be reached"
        raise refused(part, f"{name} {problem}. {next_step.replace('NAME', path)}.") from error
    return f"{path}@{Path(found).name}", Path(found)


def config_folder(
    path: str, config: str | None, patterns: Sequence[str], revision: str | None = None
) -> tuple[Path, str]:
    """The folder with the configs of a model: `config` if it is given, else `path`, or what diffusers infers from it.

    Returns the folder, and the name of where it comes from. `patterns` are the files to download if it is a hub id, of
    which `revision` is that of `path`. Raises ModelError.
    """
    name, next_step = path if config is None else config, _HUB_STEP
    if config is not None:
        revision = None
        next_step = "It was named by model.config. Name a diffusers folder or a hub id of a model of its family there"
    elif not os.path.isdir(path) and is_checkpoint("model", path):
        from diffusers.loaders.single_file_utils import fetch_diffusers_config, load_single_file_checkpoint

        with loading("model", path):
            name = fetch_diffusers_config(load_single_file_checkpoint(path))["pretrained_model_name_or_path"]
        next_step = f"diffusers infers the configs of {name} for it. Set model.config to a local diffusers folder"
    return local_folder("model", name, patterns, revision=revision, next_step=next_step)[1], name


def first_line(error: BaseException) -> str:
    """The error's first line, or its type where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def loading(part: str, name: str) -> Iterator[None]:
    """Turn what diffusers and transformers raise into ModelError, and keep their progress bars off the terminal.

    And what diffusers logs of weights: it is raised here, or callers say what it means. These settings are the
    process's, so that threads load one after the other.
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
    """Turn whatever is raised for a damaged or foreign file into ModelError."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # they raise nearly anything for a damaged or foreign file
        step = "Check that the files are whole .safetensors ones, and belong to a model of this family"
        if older := ", ".join(outdated("encode")):
            step = f"This environment has {older}. Encode in another one (pip install 'latentcache[encode]'), read here"
        problem = f"{name} could not be loaded ({type(error).__name__}: {first_line(error)})"
        raise refused(part, f"{problem}. {step}.") from error


# Families


def family_of(config: ModelConfig) -> tuple[Family, str]:
    """The family of the config's model, and where that is stated, for people.

    It is `model.family`, else that of the pipeline which the model's model_index.json names, or its
    modular_model_index.json. A file and a folder without either say nothing: they are taken as of the family DEFAULT.
    Raises ModelError for a pipeline of a family that is not known or that the family refuses, and for a hub id that
    cannot be read.
    """
    if config.family is not None:
        return family_named(config.family), "model.family says so"
    name = config.config or config.path
    if name in (TINY, TINY_PHOTOS):
        return family_named(DEFAULT), f"{name} is of this family"
    index = _index_of(config)
    if index is None:
        reason = "has no model_index.json" if os.path.isdir(name) else "is one file, which does not say it"
        return family_named(DEFAULT), f"{name} {reason}: set model.family if it is another one"
    with readable("model", name):
        named = index["_class_name"]
        class_name = str(named[-1] if isinstance(named, list) else named)  # a list: the pipeline's own file, its class
    for family in map(family_named, FAMILIES):
        if any(fnmatchcase(class_name, known) for known in (family.pipeline_name, *family.pipeline_names)):
            return family, f"{name} is a model of {class_name}"
        if met := family.refused_pipelines.get(class_name):
            step = f"Name a model of {family.pipeline_name}, as {family.repositories[0]}"
            raise ModelError(f"model: {name} is a model of {class_name}. It {met}. {step}.", part="model")
    raise ModelError(
        f"model: {name} is a model of {class_name}, whose family is not known. Set model.family to the one whose parts "
        f"it has: {', '.join(FAMILIES)}.",
        part="model",
    )


def pipeline_settings(config: ModelConfig, family: Family) -> dict[str, Any]:
    """What the model's model_index.json says of `family.pipeline_settings`: nothing where there is none.

    ModelError as from `family_of`.
    """
    index = _index_of(config) if family.pipeline_settings else None
    return {name: index[name] for name in family.pipeline_settings if name in index} if index else {}


def denoised_share(config: ModelConfig, family: Family) -> tuple[float, float]:
    """Which of the timesteps the model's denoiser is for, as fractions of their number: from 0.0 to 1.0, or a part.

    A part where `boundary_ratio` in model_index.json divides them: `model.denoiser` has those below it if it is the
    family's second denoiser. ModelError as from `family_of`.
    """
    index = _index_of(config) if family.second_denoiser else None
    boundary = (index or {}).get("boundary_ratio")
    if boundary is None:
        return 0.0, 1.0
    return (0.0, boundary) if config.denoiser == family.second_denoiser else (boundary, 1.0)


def _index_of(config: ModelConfig) -> dict[str, Any] | None:
    """The document that names the pipeline; None for a tiny model, one file, and a folder without it."""
    name, revision = config.config or config.path, None if config.config else config.revision
    if name in (TINY, TINY_PHOTOS) or (not os.path.isdir(name) and is_checkpoint("model", name)):
        return None
    return model_index(local_folder("model", name, MODEL_INDEXES, revision=revision)[1], name)
