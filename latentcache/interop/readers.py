"""The items that readers of other trainers' caches yield, and safe file reading: bounded in size, no code executed."""

from __future__ import annotations

import gzip
import io
import math
import os
import re
import zipfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch

from latentcache.config import ImagesConfig
from latentcache.dataset.folder import CaptionFileSource, check_extension
from latentcache.dataset.images import probe
from latentcache.dataset.samples import Sample, is_image, read_range, walk
from latentcache.errors import ConfigError, DatasetError, ForeignFileRefused
from latentcache.families import FAMILIES, family_named
from latentcache.families.parts import TrainerFiles
from latentcache.types import Geometry, Refusal, Size
from latentcache.utils.durable_files import expanded

MAX_FILE_BYTES = 256 << 20
"""Largest file that is read, also unpacked. A float32 latent of 16,384 x 16,384 pixels has 67 MB."""

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def corrupt(path: str | Path, detail: str) -> ForeignFileRefused:
    """The refusal of a file that is damaged or violates its format."""
    return ForeignFileRefused(path, "corrupt", detail)


def read_file(path: str | Path, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """All bytes of a regular file. Raises ForeignFileRefused if it is empty or larger than `max_bytes`."""
    try:
        data = read_range(str(path), 0, max_bytes + 1)
    except FileNotFoundError:
        raise ForeignFileRefused(path, "missing", "there is no such file") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise ForeignFileRefused(path, "unreadable", str(error)) from error
    if len(data) > max_bytes:
        raise corrupt(path, f"it has more than {max_bytes:,} bytes, the largest size that is read")
    if not data:
        raise ForeignFileRefused(path, "empty", "the file is empty")
    return data


def read_npz(path: Path) -> dict[str, torch.Tensor]:
    """The arrays of an npz file as tensors, by name. Raises ForeignFileRefused, also for text and structured arrays."""
    data = read_file(path)
    _check_zip(data, path)
    with (
        _refusing(path, "numpy cannot read its arrays"),
        np.load(io.BytesIO(data), allow_pickle=False) as arrays,
    ):
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


def read_torch(path: str | Path) -> Any:
    """The content of a `torch.save` file, which may be gzipped: tensors on the CPU and plain data.

    It is loaded with `weights_only=True`, so nothing in it is executed. Raises ForeignFileRefused.
    """
    data = read_file(path)
    if data.startswith(b"\x1f\x8b"):
        with _refusing(path, "gzip"), gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise corrupt(path, f"it unpacks to more than {MAX_FILE_BYTES:,} bytes")
    _check_zip(data, path)
    with _refusing(path, "torch's restricted reader"):
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


@contextmanager
def _refusing(path: str | Path, what: str) -> Iterator[None]:
    """Turn any error of numpy, torch, gzip or zipfile into the refusal of the file: they raise many types."""
    try:
        yield
    except ForeignFileRefused:
        raise
    except Exception as error:
        # torch wraps the reason in advice to load the file without restrictions.
        inner = error.__context__ if isinstance(error.__context__, type(error)) else error
        detail = f"{what}: {type(error).__name__}: {inner}".partition(". Please use")[0]
        raise corrupt(path, detail.partition("\n")[0]) from error


def tensor_in(value: object, name: str, path: str | Path, *, ndim: int) -> torch.Tensor:
    """A contiguous copy of `value`, a tensor of float32, float16 or bfloat16 with `ndim` dimensions.

    Raises ForeignFileRefused for anything else, and for None: the file lacks it.
    """
    if value is None:
        raise corrupt(path, f"it has no {name}")
    if type(value) is not torch.Tensor or value.layout != torch.strided or value.device.type != "cpu":
        raise corrupt(path, f"{name} is a {type(value).__name__}; it must be a plain tensor")
    shape = tuple(value.shape)
    if value.dtype not in _DTYPES or len(shape) != ndim or 0 in shape:
        allowed = f"float32, float16 or bfloat16 with {ndim} dimensions"
        raise corrupt(path, f"{name} is {value.dtype} {list(shape)}; it must be {allowed}")
    if value.numel() * value.element_size() > value.untyped_storage().nbytes():
        raise corrupt(path, f"{name} of shape {list(shape)} has more values than the file stores")
    return value.detach().clone(memory_format=torch.contiguous_format)


def flaw_of(tensor: torch.Tensor) -> str | None:
    """What makes a tensor unusable: `nan`, `inf` or `all-zero`. Like `models.vae.problem_names`, without diffusers."""
    # If any value is NaN or Inf, an extreme is too. This takes an eighth of the time of `isfinite`.
    extremes = [bound.item() for bound in tensor.aminmax()] if tensor.numel() else []
    if not all(map(math.isfinite, extremes)):
        return "nan" if any(map(math.isnan, extremes)) else "inf"
    return None if any(extremes) else "all-zero"


def _check_zip(data: bytes, path: str | Path) -> None:
    """Check each member's checksum: numpy may stop before a member's end, and torch does not check at all."""
    with _refusing(path, "it is not a whole zip file"), zipfile.ZipFile(io.BytesIO(data)) as archive:
        num_bytes = sum(member.file_size for member in archive.infolist())
        if num_bytes > MAX_FILE_BYTES:
            raise corrupt(path, f"it unpacks to {num_bytes:,} bytes; {MAX_FILE_BYTES:,} are allowed")
        if (damaged := archive.testzip()) is not None:
            raise corrupt(path, f"the checksum of {damaged} is wrong")


_MAX_SIDE = 1 << 20
"""Largest plausible side of an image, in pixels: a larger number means that the file is damaged."""

_SIZE_POLICY = ImagesConfig(animated="first-frame", max_aspect=float(1 << 20), min_side=1)
"""Accepts every shape: only the size is read, and the other trainer has accepted the image already."""


@dataclass(frozen=True, slots=True)
class ForeignImage:
    """One latent of another trainer's cache. A flipped latent is an item of its own, with `geometry.flip`."""

    sample_id: str
    """Path of the image relative to the images' folder, with `/`, as in `dataset.folder.CaptionFileSource`."""
    path: str
    """The file that it was read from, for messages."""
    image_path: Path | None
    """The image that it was made from; None if that is unknown or missing."""
    latents: torch.Tensor
    """[C, h, w], or [C, 1, h, w] for video families, floating point, on the CPU, with the values of the file."""
    is_scaled: bool
    """Whether they are scaled for the denoiser, by the family's published scaling."""
    output: Literal["mean", "sample"]
    """Whether the file holds the posterior's mean or one draw."""
    geometry: Geometry
    note: str | None = None
    """Anything that was inferred because the format does not record it."""
    mask: torch.Tensor | None = None
    """Loss weight of each latent, 0 to 255, if the file has a mask: uint8 [1, h, w], mirrored like the image."""


@dataclass(frozen=True, slots=True)
class ForeignText:
    """One caption's embeddings in another trainer's cache; `path` and `note` as in ForeignImage."""

    sample_ids: tuple[str, ...]
    """The samples that have this caption; may be empty."""
    path: str
    caption: str | None
    """None if the format does not store it and no caption file was found."""
    prompt_embeds: torch.Tensor
    """[T, D], or [T, layers, D], floating point, on the CPU, as the family's denoiser takes them."""
    pooled_prompt_embeds: torch.Tensor | None
    """[P], floating point, on the CPU; None if the family has none."""
    note: str | None = None
    max_length: int | None = None
    """The recipe's `max_length`, if the number of rows shows that it differs from the family's default."""


ForeignItem = ForeignImage | ForeignText | Refusal


class ForeignCache(Protocol):
    """A cache of another trainer, for reading."""

    format: str
    """`kohya` or `simpletuner`."""
    family: str
    """Name of its model family."""

    def items(self) -> Iterator[ForeignItem]:
        """Yield all items, in the same order each time.

        A file that cannot be used is a Refusal, never an exception. Readers need not check for NaN, Inf, all zeros
        or latents whose shape does not match their geometry: the import refuses these.
        """
        ...


def refusal_of(sample_id: str, error: DatasetError) -> Refusal:
    """The Refusal for a report of a file or an image."""
    return Refusal(sample_id, error.path, getattr(error, "reason", "unreadable"), error.detail)


def refusing(sample_id: str, items: Iterable[ForeignItem]) -> Iterator[ForeignItem]:
    """Yield these items. A DatasetError ends them, and is yielded as a Refusal."""
    try:
        yield from items
    except DatasetError as error:
        yield refusal_of(sample_id, error)


def pixel_pair(value: object, least: int) -> tuple[int, int] | None:
    """`value` as a pair if it is a list or tuple of two pixel counts, each at least `least`; otherwise None."""
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        return None
    return (value[0], value[1]) if all(type(side) is int and least <= side <= _MAX_SIDE for side in value) else None


def bucket_of(latents: torch.Tensor, family: str) -> Size:
    """The bucket, in pixels, of latents [C, (F,) h, w]."""
    downscale = family_named(family).latent.downscale
    return Size(latents.shape[-2] * downscale, latents.shape[-1] * downscale)


# Families


def keeps_padding(family: str) -> bool:
    """Whether the family's embeddings are stored with their padding."""
    return all(field.padding is None for field in family_named(family).fields.values())


def layouts_of(format_name: str) -> dict[str, TrainerFiles]:
    """Each family that a format supports, by name, and the layout of its files."""
    # `vars`: a family that inherits from another one does not share its files.
    declared = {name: vars(type(family_named(name))).get("trainer_files", {}) for name in FAMILIES}
    return {name: files[format_name] for name, files in declared.items() if format_name in files}


def chosen_family(requested: str | None, roots: Iterable[str], names: re.Pattern[str], format_name: str) -> str:
    """The family of a format's files: `requested`, or else the only one that file names in and below `roots` mention.

    The group `arch` of `names` matches the architecture. If no name mentions a known family, the format's first one is
    the default. Raises ConfigError if the format does not support the family or the names mention several, and
    DatasetError for a root that cannot be read.
    """
    known = {layout.architecture: name for name, layout in layouts_of(format_name).items()}
    if requested is not None:
        return check_family(requested, known.values(), format_name)
    walks = (found for root in roots for found in walk(root) if not isinstance(found, Refusal))
    matches = (names.fullmatch(name) for _, files in walks for name in files)
    families = {known.get(match["arch"]) for match in matches if match is not None}
    named = [family for family in known.values() if family in families]
    if len(named) > 1:
        raise ConfigError(
            f"the folder holds {format_name} files of {', '.join(named)}; choose one with --family: a manifest holds "
            "a single family",
            key="family",
        )
    return named[0] if named else next(iter(known.values()))


def check_family(family: str, allowed: Collection[str], format_name: str) -> str:
    """`family`, or ConfigError if the format does not support it."""
    if family not in allowed:
        supported = ", ".join(allowed)
        detail = f"{format_name} files of the family {family} are not supported; supported families: {supported}"
        raise ConfigError(detail, key="family")
    return family


# Images


class SourceImages:
    """The images and captions that a foreign cache was made from, as far as they still exist in `folder`.

    `folder` None has none. A name in a foreign file is only looked up among the samples, so no path outside the folder
    is ever opened. Raises DatasetError if the folder cannot be read or has no images.
    """

    def __init__(self, folder: str | Path | None, *, caption_extension: str = ".txt") -> None:
        self.samples: dict[str, Sample] = {}
        """By sample_id, in the folder's order."""
        self.by_caption: dict[str, list[str]] = {"": []}
        """Each caption -> the samples that have it. The empty caption is always the first."""
        self.refused: dict[str, Refusal] = {}
        """Images and folders that cannot be used, by sample_id."""
        self._by_stem: dict[str, list[str]] = {}
        if folder is None:
            return
        folder = expanded(folder)
        if not folder.is_dir():
            raise DatasetError(folder, "is not a folder; give the folder of the images")
        check_extension(caption_extension, "caption_extension")
        self._source = CaptionFileSource(os.path.abspath(folder), caption_extension)
        for sample in self._source.samples():
            if is_image(sample.sample_id):  # a refusal may be of a folder
                self._by_stem.setdefault(os.path.splitext(sample.sample_id)[0], []).append(sample.sample_id)
            if isinstance(sample, Refusal):
                self.refused[sample.sample_id] = sample
                continue
            self.samples[sample.sample_id] = sample
            for caption in sample.captions:
                self.by_caption.setdefault(caption, []).append(sample.sample_id)

    def of_stem(self, stem: str, path: Path) -> list[str]:
        """The samples whose path without suffix is `stem`, for the file `path`; often none.

        Raises ForeignFileRefused if there is such an image, but it cannot be used.
        """
        found = self._by_stem.get(stem, [])
        usable = [sample_id for sample_id in found if sample_id in self.samples]
        if found and not usable:
            refused = self.refused[found[0]]
            raise ForeignFileRefused(path, refused.reason, f"its image cannot be used: {refused.detail}")
        return usable

    def size(self, sample_id: str) -> Size:
        """Size of a sample's image after the EXIF rotation. Raises ImageRefused if it cannot be read."""
        sample = self.samples[sample_id]
        return probe(self._source.read(sample), sample.path, _SIZE_POLICY)
