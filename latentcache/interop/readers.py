"""What a reader of another trainer's cache gives, and what the readers share: files are read within limits, not run."""

from __future__ import annotations

import gzip
import io
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

from latentcache.config import ImagesConfig, SourceConfig
from latentcache.dataset.images import probe
from latentcache.dataset.samples import Sample, read_range, walk
from latentcache.dataset.sources import open_source
from latentcache.errors import ConfigError, DatasetError, ForeignFileRefused
from latentcache.families import FAMILIES, family_named
from latentcache.families.parts import TrainerFiles
from latentcache.types import Geometry, Refusal, Size

MAX_FILE_BYTES = 256 << 20
"""A latent of 16,384 x 16,384 pixels has 67 MB in float32."""

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def corrupt(path: str | Path, detail: str) -> ForeignFileRefused:
    """The refusal of a file that is damaged, or is not what its format says."""
    return ForeignFileRefused(path, "corrupt", detail)


def read_file(path: str | Path, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """All bytes of a regular file: some, and at most `max_bytes`. Raises ForeignFileRefused."""
    try:
        data = read_range(str(path), 0, max_bytes + 1)
    except FileNotFoundError:
        raise ForeignFileRefused(path, "missing", "there is no such file") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise ForeignFileRefused(path, "unreadable", str(error)) from error
    if len(data) > max_bytes:
        raise corrupt(path, f"it has more than {max_bytes:,} bytes, which no such file has")
    if not data:
        raise ForeignFileRefused(path, "empty", "the file has no bytes")
    return data


def read_npz(path: Path) -> dict[str, torch.Tensor]:
    """The arrays of an npz file as tensors, by name. Raises ForeignFileRefused, also for text and structures."""
    data = read_file(path)
    _check_zip(data, path)
    with (
        _refusing(path, "numpy cannot read its arrays"),
        np.load(io.BytesIO(data), allow_pickle=False) as arrays,
    ):
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


def read_torch(path: str | Path) -> Any:
    """What `torch.save` wrote, plainly or as a gzip: tensors on the CPU, and plain data.

    Only torch's restricted reader is used. Raises ForeignFileRefused.
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
    """Refuse a file that a library cannot read: numpy, torch and zipfile raise many kinds of errors."""
    try:
        yield
    except ForeignFileRefused:
        raise
    except Exception as error:
        # torch wraps the reason in advice to read the file without restrictions.
        inner = error.__context__ if isinstance(error.__context__, type(error)) else error
        detail = f"{what}: {type(error).__name__}: {inner}".partition(". Please use")[0]
        raise corrupt(path, detail.partition("\n")[0]) from error


def tensor_in(value: object, name: str, path: str | Path, *, ndim: int) -> torch.Tensor:
    """`value` as a tensor of float32, float16 or bfloat16 with `ndim` dimensions and memory of its own.

    Raises ForeignFileRefused, also for None: there is none.
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
        raise corrupt(path, f"{name} of shape {list(shape)} has more values than the file")
    return value.detach().clone(memory_format=torch.contiguous_format)


def flaw_of(tensor: torch.Tensor) -> str | None:
    """What makes a tensor unusable: `nan`, `inf` or `all-zero`. As `models.vae.problems`, which imports diffusers."""
    if not tensor.isfinite().all():
        return "nan" if tensor.isnan().any() else "inf"
    return None if tensor.any() else "all-zero"


def _check_zip(data: bytes, path: str | Path) -> None:
    """Compare each member with its checksum: numpy may not read to its end, and torch compares none."""
    with _refusing(path, "it is not a whole zip file"), zipfile.ZipFile(io.BytesIO(data)) as archive:
        num_bytes = sum(member.file_size for member in archive.infolist())
        if num_bytes > MAX_FILE_BYTES:
            raise corrupt(path, f"it unpacks to {num_bytes:,} bytes; {MAX_FILE_BYTES:,} are allowed")
        if (damaged := archive.testzip()) is not None:
            raise corrupt(path, f"{damaged} does not have its checksum")


_MAX_SIDE = 1 << 20
"""A side of an image in pixels is at most this: a larger number is damage."""

_SIZE_POLICY = ImagesConfig(animated="first-frame", max_aspect=float(1 << 20), min_side=1)
"""It refuses no image for its shape: only the size is read, and the other trainer accepted the image already."""


@dataclass(frozen=True, slots=True)
class ForeignImage:
    """One latent of another trainer's cache. A flipped latent is a value of its own, with `geometry.flip`."""

    sample_id: str
    """The image's path relative to the images' folder, with `/`: as `dataset.folder.CaptionFileSource` names it."""
    path: str
    """The file that it was read from, for messages."""
    image_path: Path | None
    """The image that it was made from; None where it is not known or not there."""
    latents: torch.Tensor
    """[C, h, w], with frames [C, 1, h, w], floating point, on the CPU, as the file holds them."""
    is_scaled: bool
    """Whether they are scaled as the denoiser expects them: by the family's published scaling."""
    output: Literal["mean", "sample"]
    """Whether the file holds the posterior's mean, or one draw."""
    geometry: Geometry
    note: str | None = None
    """What the format does not say and was derived."""
    mask: torch.Tensor | None = None
    """The weight of each latent's error, of 255, where the file has them: uint8 [1, h, w], mirrored as the image is."""


@dataclass(frozen=True, slots=True)
class ForeignText:
    """One caption's embeddings in another trainer's cache; `path` and `note` as in a ForeignImage."""

    sample_ids: tuple[str, ...]
    """The samples that it is the caption of; () where there is none."""
    path: str
    caption: str | None
    """None: the format does not carry it, and none was found."""
    prompt_embeds: torch.Tensor
    """[T, D], or [T, layers, D], floating point, on the CPU, as the family's denoiser gets them."""
    pooled_prompt_embeds: torch.Tensor | None
    """[P], floating point, on the CPU; None for a family without."""
    note: str | None = None
    max_length: int | None = None
    """What its recipe has as that, where the number of its rows says that it is not the family's own."""


ForeignItem = ForeignImage | ForeignText | Refusal


class ForeignCache(Protocol):
    """A cache of another trainer, for reading."""

    format: str
    """`kohya` or `simpletuner`."""
    family: str
    """The name of the model family that it is of."""

    def items(self) -> Iterator[ForeignItem]:
        """All items, one at a time, in the same order each time.

        What cannot be read or is odd is a Refusal, never an exception. The import itself refuses NaN, Inf, all zeros
        and latents whose shape does not fit their geometry: a reader need not look for these.
        """
        ...


def refusal_of(sample_id: str, error: DatasetError) -> Refusal:
    """The refusal of a file or an image, as a report lists it."""
    return Refusal(sample_id, error.path, getattr(error, "reason", "unreadable"), error.detail)


def refusing(sample_id: str, items: Iterable[ForeignItem]) -> Iterator[ForeignItem]:
    """Yield these items. A DatasetError while they are read becomes a refusal, which is the last."""
    try:
        yield from items
    except DatasetError as error:
        yield refusal_of(sample_id, error)


def pixel_pair(value: object, least: int) -> tuple[int, int] | None:
    """A list or tuple of two numbers of pixels, each at least `least`; None for anything else."""
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        return None
    return (value[0], value[1]) if all(type(side) is int and least <= side <= _MAX_SIDE for side in value) else None


def bucket_of(latents: torch.Tensor, family: str) -> Size:
    """The bucket, in pixels, of unscaled latents [C, (F,) h, w]."""
    downscale = family_named(family).latent.downscale
    return Size(latents.shape[-2] * downscale, latents.shape[-1] * downscale)


# Families


def keeps_padding(family: str) -> bool:
    """Whether texts of the family are stored with their padding."""
    return all(field.padding is None for field in family_named(family).fields.values())


def layouts_of(format_name: str) -> dict[str, TrainerFiles]:
    """How a format has each of the families that it has, by their names."""
    # Their own: one that inherits from another family has other files.
    declared = {name: vars(type(family_named(name))).get("trainer_files", {}) for name in FAMILIES}
    return {name: files[format_name] for name, files in declared.items() if format_name in files}


def chosen_family(asked: str | None, roots: Iterable[str], names: re.Pattern[str], format_name: str) -> str:
    """The family of a format's files: `asked`, else the only one that the names of files in and below `roots` say.

    The group `arch` of `names` is an architecture. Without any of a known family the first known one is taken.
    ConfigError for a family that the format does not have, and where files of several lie side by side. DatasetError
    for a root that cannot be read.
    """
    known = {layout.architecture: name for name, layout in layouts_of(format_name).items()}
    if asked is not None:
        return check_family(asked, known.values(), format_name)
    walks = (found for root in roots for found in walk(root) if not isinstance(found, Refusal))
    matches = (names.fullmatch(name) for _, files in walks for name in files)
    families = {known.get(match["arch"]) for match in matches if match is not None}
    named = [family for family in known.values() if family in families]
    if len(named) > 1:
        raise ConfigError(
            f"the files of {format_name} are of {', '.join(named)}, and a manifest holds one family: give --family",
            key="family",
        )
    return named[0] if named else next(iter(known.values()))


def check_family(family: str, allowed: Collection[str], format_name: str) -> str:
    """The family. ConfigError where the layout of the format's files of this family is not known."""
    if family not in allowed:
        raise ConfigError(
            f"how {format_name} lays out files of the family {family} is not known; it is for {', '.join(allowed)}",
            key="family",
        )
    return family


# Images


class SourceImages:
    """The images and captions that a foreign cache was made from, as far as the user still has them.

    They are the samples of a folder; without one there are none. Foreign caches name files. Their names are looked up
    among the samples: a file outside the folder is never opened. Raises DatasetError if the folder cannot be read.
    """

    def __init__(self, folder: str | Path | None, *, caption_extension: str = ".txt") -> None:
        self.samples: dict[str, Sample] = {}
        """By sample_id, in the folder's order."""
        self.by_stem: dict[str, list[str]] = {}
        """Paths without their suffix -> sample_ids."""
        self.by_caption: dict[str, list[str]] = {"": []}
        """Each caption -> the samples that have it. The first is the empty one, also without samples."""
        self.refusals: list[Refusal] = []
        """What cannot be used in the folder."""
        if folder is None:
            return
        self._source = open_source(SourceConfig(path=Path(folder), caption_extension=caption_extension))
        for sample in self._source.samples():
            if isinstance(sample, Refusal):
                self.refusals.append(sample)
                continue
            self.samples[sample.sample_id] = sample
            self.by_stem.setdefault(os.path.splitext(sample.sample_id)[0], []).append(sample.sample_id)
            for caption in sample.captions:
                self.by_caption.setdefault(caption, []).append(sample.sample_id)

    def size(self, sample_id: str) -> Size:
        """The size of a sample's image after the EXIF turn. Raises ImageRefused if it cannot be read."""
        sample = self.samples[sample_id]
        return probe(self._source.read(sample), sample.path, _SIZE_POLICY)
