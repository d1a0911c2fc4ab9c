"""What the readers of other trainers' caches give, for every format, and what they share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Literal, Protocol

import torch

from latentcache.config import ImagesConfig, SourceConfig
from latentcache.dataset.images import probe
from latentcache.dataset.samples import Sample, walk
from latentcache.dataset.sources import open_source
from latentcache.errors import DatasetError
from latentcache.families import DEFAULT, family_named
from latentcache.families.base import Family
from latentcache.interop.declaration import Declaration
from latentcache.interop.foreign_files import corrupt
from latentcache.types import Geometry, Refusal, Size

MAX_SIDE = 1 << 20
"""A side of an image in pixels is at most this: a larger number is damage."""

_SIZE_POLICY = ImagesConfig(animated="first-frame", max_aspect=float(1 << 20), min_side=1)
"""It refuses no image for its shape: only the size is read, and the other trainer accepted the image already."""


@dataclass(frozen=True, slots=True)
class ForeignImage:
    """One latent of another trainer's cache. A flipped latent is a value of its own, with `geometry.flip`."""

    sample_id: str
    """The image's path relative to the images' folder, with `/`: as `dataset.sources.CaptionFileSource` names it."""
    path: str
    """The file that it was read from, for messages."""
    image_path: Path | None
    """The image that it was made from; None where it is not known or not there."""
    latents: torch.Tensor
    """[C, h, w], with frames [C, F, h, w], floating point, on the CPU, as the file holds them."""
    is_scaled: bool
    """Whether they are scaled as the denoiser expects them: by the family's published scaling, or the declared one."""
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
    """The samples that it is the caption of; () where the format does not say. With a note it is left out then."""
    path: str
    caption: str | None
    """None: the format does not carry it, and none was found."""
    prompt_embeds: torch.Tensor
    """[T, D], or [T, layers, D], floating point, on the CPU, as the family's denoiser gets them."""
    pooled_prompt_embeds: torch.Tensor | None
    """[P], floating point, on the CPU; None for a family without."""
    note: str | None = None


ForeignItem = ForeignImage | ForeignText | Refusal


class ForeignCache(Protocol):
    """A cache of another trainer, for reading."""

    format: str
    """`kohya`, `musubi`, `simpletuner`, `ai-toolkit`, `diffusion-pipe`, `onetrainer`, `webdataset`, `mds`."""
    family: str
    """The name of the model family that it is of."""
    keeps_padding: bool
    """Whether its texts have their padding."""

    @property
    def declaration(self) -> Declaration | None:
        """What the user states of it; None where the format says enough."""

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
    """These items. A DatasetError while they are read becomes a refusal, which is the last."""
    try:
        yield from items
    except DatasetError as error:
        yield refusal_of(sample_id, error)


def walked(root: str, read: Callable[[str, list[str]], Iterable[ForeignItem]]) -> Iterator[ForeignItem]:
    """What `read` gives for each folder in and below `root`, from its path and its files' names, both sorted.

    The path is relative to `root`. A folder that cannot be read is a refusal; for `root` DatasetError is raised.
    """
    for found in walk(root):
        if isinstance(found, Refusal):
            yield found
        else:
            yield from refusing(found[0], read(*found))


def is_pixels(value: object, least: int) -> bool:
    """Whether this is a number of pixels: an integer from `least` to MAX_SIDE."""
    return type(value) is int and least <= value <= MAX_SIDE


def pixel_pair(value: object, least: int) -> tuple[int, int] | None:
    """A list or tuple of two numbers of pixels; None for anything else."""
    if not isinstance(value, (list, tuple)) or len(value) != 2 or not all(is_pixels(side, least) for side in value):
        return None
    return value[0], value[1]


def bucket_of(latents: torch.Tensor, family: str = DEFAULT) -> Size:
    """The bucket, in pixels, of unscaled latents [C, (F,) h, w]."""
    downscale = family_named(family).latent.downscale
    return Size(latents.shape[-2] * downscale, latents.shape[-1] * downscale)


def check_frames(image: ForeignImage, family: Family) -> None:
    """ForeignFileRefused where the geometry is of another number of frames than the latents: batches go by it."""
    num_frames = image.geometry.num_frames
    if num_frames is not None and not family.has_clips:
        detail = f"its geometry has num_frames {num_frames}, but models of {family.name} take no clips"
        raise corrupt(image.path, detail)
    found, needed = image.latents.shape[-3], ((num_frames or 1) - 1) // family.latent.frames_factor + 1
    if family.latent.is_video and found != needed:
        stated = "no num_frames" if num_frames is None else f"num_frames {num_frames}"
        raise corrupt(image.path, f"it has {found} latent frames, but its geometry has {stated}, which makes {needed}")


def crop_fits(geometry: Geometry) -> bool:
    """Whether the crop lies inside the resized image."""
    sides = zip(geometry.crop_top_left, geometry.target_size, geometry.resized_size, strict=True)
    return all(start + side <= whole for start, side, whole in sides)


class SourceImages:
    """The images and captions that a foreign cache was made from, as far as the user still has them.

    They are the samples of a folder; without one there are none. `captions` are further known captions, such as
    validation prompts. Foreign caches name files. Their names are looked up among the samples: a file outside the
    folder is never opened. `recorded_root` is where the folder was when the cache was made, if it was moved since.
    Raises DatasetError if the folder cannot be read.
    """

    def __init__(
        self,
        folder: str | Path | None,
        *,
        caption_extension: str = ".txt",
        captions: Iterable[str] = (),
        recorded_root: str | None = None,
    ) -> None:
        roots = (None if folder is None else os.path.abspath(folder), recorded_root)
        self._roots = [path_parts(root) for root in roots if root is not None]
        self._samples: dict[str, Sample] = {}
        self._by_stem: dict[str, list[str]] = {}
        self.refusals: list[Refusal] = []
        """What cannot be used in the folder."""
        by_caption: dict[str, list[str]] = {caption: [] for caption in ("", *captions)}
        if folder is not None:
            self._source = open_source(SourceConfig(path=Path(folder), caption_extension=caption_extension))
            for sample in self._source.samples():
                if isinstance(sample, Refusal):
                    self.refusals.append(sample)
                    continue
                self._samples[sample.sample_id] = sample
                self._by_stem.setdefault(os.path.splitext(sample.sample_id)[0], []).append(sample.sample_id)
                for caption in sample.captions:
                    by_caption.setdefault(caption, []).append(sample.sample_id)
        self._by_caption = {caption: tuple(sample_ids) for caption, sample_ids in by_caption.items()}

    def __iter__(self) -> Iterator[str]:
        """All sample_ids, in the folder's order."""
        return iter(self._samples)

    def captions(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Each known caption once, with the samples that have it. The first is the empty one, also without samples."""
        yield from self._by_caption.items()

    def captions_of(self, sample_id: str) -> tuple[str, ...]:
        """The captions of a sample; () where it has no caption file."""
        sample = self._samples[sample_id]
        return sample.captions if sample.has_caption else ()

    def with_stem(self, stem: str) -> tuple[str, ...]:
        """The sample_ids that are this path with a suffix."""
        return tuple(self._by_stem.get(stem, ()))

    def path(self, sample_id: str) -> Path:
        """The file of a sample's image."""
        return Path(self._samples[sample_id].path)

    def size(self, sample_id: str) -> Size:
        """The size of a sample's image after the EXIF turn. Raises ImageRefused if it cannot be read."""
        sample = self._samples[sample_id]
        return probe(self._source.read(sample), sample.path, _SIZE_POLICY)

    def image(self, sample_id: str | None) -> tuple[Path | None, Size | None]:
        """File and size of a sample's image; None and None without a sample. Raises ImageRefused."""
        if sample_id is None or sample_id not in self._samples:
            return None, None
        return self.path(sample_id), self.size(sample_id)

    def find(self, recorded: str) -> str | None:
        """The sample that a foreign cache names by a path: relative, below the folder, or below `recorded_root`.

        None if there is no such sample. Equal file names alone are no proof: many folders have a `1.png`.
        """
        if recorded in self._samples:
            return recorded
        parts = path_parts(recorded)
        for root in self._roots:
            if parts[: len(root)] == root and (sample_id := "/".join(parts[len(root) :])) in self._samples:
                return sample_id
        return None


def path_parts(recorded: str) -> tuple[str, ...]:
    """The names in a path that some machine recorded, without its root or drive."""
    pure = PureWindowsPath(recorded) if "\\" in recorded else PurePosixPath(recorded)
    return pure.parts[1:] if pure.anchor else pure.parts


def sample_id_of(recorded: str, path: str | Path) -> str:
    """A sample_id for a recorded path that fits no sample: the path without its root.

    Raises ForeignFileRefused (with `path`, the file that names it) if it names nothing, or leads upwards.
    """
    parts = path_parts(recorded)
    try:
        os.fsencode(recorded)  # a pickle may hold half a surrogate pair, and no file system can
        is_path = bool(parts) and ".." not in parts and "\0" not in recorded
    except UnicodeEncodeError:
        is_path = False
    if not is_path:
        raise corrupt(path, f"it names the image {recorded!r:.200}, which is no path of a file")
    return "/".join(parts)
