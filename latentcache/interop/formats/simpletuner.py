"""SimpleTuner's caches: VAE latents and text embeddings, in files that are named by hashes.

Latents are in `<cache_dir_vae>/<subfolder of the image>/<sha256 of the image's name without suffix>.pt`, scaled: one
draw of the posterior [C, h, w], for Wan the mean [C, F, h, w]. Sizes are in `aspect_ratio_bucket_metadata_<id>.json`.
Embeddings are in `<md5 of the prompt>-<model>.pt`: a dict of prompt_embeds [1, L, ...], for SDXL and FLUX.1
pooled_prompt_embeds [P] or [1, P], and masks [1, L]. Older SDXL files and negative prompts are a tuple of both
embeddings. Wan's "mask" is not a mask but the embeddings of the empty text, and its padding is zeros. All files are
written by `torch.save` and may be gzipped. (Formats read in SimpleTuner bc8e6ab.)

A hash does not reveal the name, so the folder of the images is needed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Literal, NamedTuple

import torch

from latentcache.dataset.bucket_rules import fit
from latentcache.errors import ConfigError, DatasetError, ForeignFileRefused
from latentcache.families import family_named
from latentcache.families.base import Family
from latentcache.interop.readers import (
    ForeignImage,
    ForeignItem,
    ForeignText,
    SourceImages,
    bucket_of,
    chosen_family,
    corrupt,
    keeps_padding,
    layouts_of,
    pixel_pair,
    read_file,
    read_torch,
    refusing,
    tensor_in,
)
from latentcache.types import Crop, Geometry, Refusal, Size

NOTE_DERIVED = "sizes inferred from the image: resized to cover the bucket, centre-cropped"
NOTE_ORDER = "the recorded crop fits as (left, top) and as (top, left): the first was assumed"

_TEXT_NAME = re.compile(r"[0-9a-f]{32}-(?P<arch>[a-z0-9_]+)\.pt")
_METADATA_NAME = "aspect_ratio_bucket_metadata_*.json"
_MAX_METADATA_BYTES = 1 << 30


def latent_name(sample_id: str) -> str:
    """Path of an image's latent, relative to the VAE cache."""
    folder, _, name = sample_id.rpartition("/")
    stem = os.path.splitext(name)[0].encode("utf-8", "surrogateescape")
    return f"{folder}/{hashlib.sha256(stem).hexdigest()}.pt".lstrip("/")


def text_name(caption: str, architecture: str) -> str:
    """Path of a prompt's embeddings, relative to the text cache."""
    return f"{hashlib.md5(caption.encode(), usedforsecurity=False).hexdigest()}-{architecture}.pt"


def _find_metadata(images: Path, root: Path) -> Path | None:
    found = sorted({path.resolve() for folder in (images, root) for path in folder.glob(_METADATA_NAME)})
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise ConfigError(f"there are several metadata files ({names}); choose one with --metadata", key="metadata")
    return found[0] if found else None


class SimpleTunerCache:
    """The cache of the images in the folder `images`.

    `root` is `cache_dir_vae`, and `text_cache` the folder of the text cache if it is another one. `metadata` is
    `aspect_ratio_bucket_metadata_<id>.json`. It defaults to the only one in `images` or `root`; without any, sizes are
    inferred from the images. `family` defaults to the one in the names of the texts. Raises DatasetError for a folder
    that cannot be read, and ConfigError for several metadata files, an unsupported `family`, or texts of several
    families if none is given.
    """

    format = "simpletuner"

    def __init__(
        self,
        root: str | Path,
        *,
        images: str | Path,
        text_cache: str | Path | None = None,
        metadata: str | Path | None = None,
        caption_extension: str = ".txt",
        family: str | None = None,
    ):
        self._images = SourceImages(images, caption_extension=caption_extension)
        found = Path(metadata) if metadata is not None else _find_metadata(Path(images), Path(root))
        self._sizes = RecordedSizes(found, self._images)
        self._folders = [os.path.abspath(folder) for folder in (root, text_cache) if folder is not None]
        self.family = chosen_family(family, self._folders, _TEXT_NAME, self.format)
        self._family, self._layout = family_named(self.family), layouts_of(self.format)[self.family]

    def items(self) -> Iterator[ForeignItem]:
        """Yield images in the order of their samples, then texts. Files that belong to no sample are ignored."""
        yield from self._images.refused.values()
        yield from self._latents()
        yield from self._texts()

    def _latents(self) -> Iterator[ForeignItem]:
        samples_of: dict[str, list[str]] = {}
        for sample_id in self._images.samples:
            samples_of.setdefault(os.path.join(self._folders[0], latent_name(sample_id)), []).append(sample_id)
        for path, sample_ids in samples_of.items():
            if not os.path.lexists(path):
                continue
            if len(sample_ids) == 1:
                yield from refusing(sample_ids[0], self._latent(sample_ids[0], path))
            else:
                detail = f"it may be of {' or '.join(sample_ids)}: they have the same stem"
                yield Refusal(sample_ids[0], path, "duplicate", detail)

    def _latent(self, sample_id: str, path: str) -> Iterator[ForeignImage]:
        latents = _image_latents(self._family, read_torch(path), path)
        size, bucket = self._images.size(sample_id), bucket_of(latents, self.family)
        geometry, note = self._sizes.geometry(sample_id, size, bucket, path)
        image = Path(self._images.samples[sample_id].path)
        output: Literal["mean", "sample"] = "mean" if self._family.has_clips else "sample"
        yield ForeignImage(sample_id, path, image, latents, True, output, geometry, note)

    def _texts(self) -> Iterator[ForeignItem]:
        for caption, sample_ids in self._images.by_caption.items():
            paths = [os.path.join(folder, text_name(caption, self._layout.architecture)) for folder in self._folders]
            path = next(filter(os.path.lexists, paths), None)
            if path is not None:
                yield from refusing(sample_ids[0] if sample_ids else "", self._text(tuple(sample_ids), path, caption))

    def _text(self, sample_ids: tuple[str, ...], path: str, caption: str) -> Iterator[ForeignText]:
        """The embeddings in a file, a dict or a tuple. Raises ForeignFileRefused."""
        content, fields = read_torch(path), self._family.fields
        if isinstance(content, tuple) and len(content) == len(fields) == 2:
            content = dict(zip(fields, content, strict=True))
        if not isinstance(content, dict) or not fields.keys() <= content.keys():
            raise corrupt(path, f"it holds a {type(content).__name__}, not the embeddings of a prompt")
        num_dimensions = 2 + len(fields["prompt_embeds"].features)
        embeds = tensor_in(content["prompt_embeds"], "prompt_embeds", path, ndim=num_dimensions)
        mask = content.get("attention_masks", content.get("attention_mask")) if self._layout.has_mask else None
        pooled = content.get("pooled_prompt_embeds") if "pooled_prompt_embeds" in fields else None
        if pooled is not None:
            pooled = tensor_in(pooled, "pooled_prompt_embeds", path, ndim=getattr(pooled, "ndim", 1))
            if pooled.ndim not in (1, 2) or (pooled.ndim == 2 and len(pooled) != 1):
                raise corrupt(path, f"its pooled_prompt_embeds are {list(pooled.shape)}; one prompt has [P]")
            pooled = pooled.flatten()
        yield ForeignText(sample_ids, path, caption, _caption_rows(self._family, embeds, mask, path), pooled)


def _image_latents(family: Family, value: object, path: str) -> torch.Tensor:
    """The latents [C, (1,) h, w] in a file. Raises ForeignFileRefused, also for several frames or wrong channels."""
    latents = tensor_in(value, "the latent", path, ndim=4 if family.has_clips else 3)
    if len(latents) != family.latent.channels:
        channels = f"{len(latents)} channels, but those of {family.name} have {family.latent.channels}"
        raise corrupt(path, f"its latents have {channels}: give --family if the cache is of another family")
    if family.has_clips and latents.shape[1] != 1:
        detail = f"it has {latents.shape[1]} latent frames: only still images can be imported"
        raise ForeignFileRefused(path, "unsupported-format", detail)
    return latents.unsqueeze(1) if family.latent.is_video and not family.has_clips else latents


def _caption_rows(family: Family, embeds: torch.Tensor, mask: object, path: str) -> torch.Tensor:
    """The rows of a caption's embeddings [1, L, ...] to store: without padding, for families that do not keep it.

    `mask` has a number for each row; if it is None, padding is zeros. Raises ForeignFileRefused, also if padding that
    the denoiser attends to was zeroed, which diffusers does not do.
    """
    if len(embeds) != 1:
        raise corrupt(path, f"it holds {len(embeds)} captions; one is expected")
    rows: torch.Tensor = embeds[0]
    if keeps_padding(family.name):
        if not family.can_drop_padding and rows.any() and not rows[-1].any():
            detail = f"its padding is zeros, unlike in diffusers' {family.name}: cache texts with unmasked padding"
            raise ForeignFileRefused(path, "unsupported-format", detail)
        return rows
    if mask is None:
        kept = rows.flatten(1).any(dim=1)
        return rows[: int(kept.nonzero().max()) + 1 if kept.any() else 0]
    if not isinstance(mask, torch.Tensor) or mask.numel() != len(rows):
        met = list(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise corrupt(path, f"its mask is {met}, for {len(rows)} rows")
    return rows[mask.flatten().bool()]


class _Record(NamedTuple):
    """The sizes of an image, and its crop in the order of the file."""

    original: Size
    resized: Size
    target: Size
    crop: tuple[int, int]

    def crops(self) -> dict[bool, Crop]:
        """The readings of `crop` that lie inside the resized image: True reads it as (left, top)."""
        room = self.resized.height - self.target.height, self.resized.width - self.target.width
        found = {True: Crop(*self.crop[::-1]), False: Crop(*self.crop)}
        return {order: crop for order, crop in found.items() if crop.top <= room[0] and crop.left <= room[1]}


class RecordedSizes:
    """`aspect_ratio_bucket_metadata_<id>.json`: original, intermediary and target size, and crop, of each image.

    Sizes are (width, height). The crop is (left, top) or (top, left), depending on release and crop mode. The order is
    inferred from the crops that fit in only one. A crop that fits in neither order is refused.
    """

    def __init__(self, path: Path | None, images: SourceImages):
        """Read the records of existing images; `path` None has none. Raises DatasetError."""
        try:
            content = {} if path is None else json.loads(read_file(path, _MAX_METADATA_BYTES))
        except (ValueError, RecursionError) as error:
            detail = f"is not a JSON document: {error}; remove it to have sizes inferred from the images"
            raise DatasetError(str(path), detail) from error
        if not isinstance(content, dict):
            raise DatasetError(str(path), f"holds a {type(content).__name__}; it must map image paths to their sizes")
        sample_ids = images.samples.keys()
        found = [(_split(recorded, sample_ids), record) for recorded, record in content.items()]
        # The images' folder when the cache was made. An equal file name is not enough: many folders have a `1.png`.
        [(root, _)] = Counter(root for (root, sample_id), _ in found if sample_id).most_common(1) or [((), 0)]
        self._records = {sample_id: _record(record) for (at, sample_id), record in found if sample_id and at == root}
        crops = [record.crops() for record in self._records.values() if record is not None]
        orders = {order for found in crops if len(found) == 1 for order in found}
        self._order = orders.pop() if len(orders) == 1 else None

    def geometry(self, sample_id: str, size: Size, target: Size, path: str) -> tuple[Geometry, str | None]:
        """The geometry of a latent for `target`, made from an image of `size`, and a note on what was inferred.

        Raises ForeignFileRefused if the record does not match: the image was replaced, or the latent is outdated.
        """
        if sample_id not in self._records:
            return fit(size, target), NOTE_DERIVED
        record = self._records[sample_id]
        if record is None:
            raise corrupt(path, f"the metadata of {sample_id} has no integer sizes and crop")
        if sorted(size) != sorted(record.original):  # some are recorded before the EXIF rotation
            detail = f"the image is {size} now, but was {record.original}"
            raise ForeignFileRefused(path, "changed", detail)
        crops = record.crops()
        if record.target != target or not crops:
            raise corrupt(path, f"the metadata of {sample_id} does not fit a latent for {target} of an image of {size}")
        order = self._order if self._order in crops else next(iter(crops))
        is_assumed = self._order is None and len(set(crops.values())) > 1
        return Geometry(size, record.resized, crops[order], target), NOTE_ORDER if is_assumed else None


def _split(recorded: str, sample_ids: Collection[str]) -> tuple[tuple[str, ...], str]:
    """A path recorded on any system as (folder, sample_id below it). The sample_id is "" if no sample matches."""
    parts = (PureWindowsPath if "\\" in recorded else PurePosixPath)(recorded).parts
    for at in range(len(parts)):
        if (sample_id := "/".join(parts[at:])) in sample_ids:
            return parts[:at], sample_id
    return parts, ""


def _record(value: Any) -> _Record | None:
    """The record in a JSON value; None if it is not one."""
    names = {"original_size": 1, "intermediary_size": 1, "target_size": 1, "crop_coordinates": 0}
    values = value if isinstance(value, dict) else {}
    pairs = [pixel_pair(values.get(name), least) for name, least in names.items()]
    found = [pair for pair in pairs if pair is not None]
    if len(found) < len(names):
        return None
    original, resized, target = (Size(height, width) for width, height in found[:3])
    return _Record(original, resized, target, found[3])
