"""SimpleTuner's caches: VAE latents and text embeddings, as files that are named by hashes.

Latents: `<cache_dir_vae>/<sub folders of the images>/<sha256 of the image's name without suffix>.pt`, scaled: one draw
of the posterior [C, h, w], of Wan the mean [C, F, h, w]. Sizes are in `aspect_ratio_bucket_metadata_<id>.json`.
Text: `<md5 of the prompt>-<model>.pt`, a dict of prompt_embeds [1, L, ...], of SDXL and FLUX.1 pooled_prompt_embeds
[P] or [1, P], and masks [1, L]; or (older ones of SDXL, and negative prompts) a tuple of both embeds. Wan's mask is
none: it is the embeddings of the empty text, and padding is zeros. Both are `torch.save` files, or gzip of one.
(Formats read in SimpleTuner bc8e6ab.)

A name gives its hash, but a hash does not give its name: so the images' folder is needed.
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

NOTE_DERIVED = "sizes derived from the image: resized to cover the bucket, cropped in the middle"
NOTE_ORDER = "the recorded crop fits as (left, top) and as (top, left): the first was assumed"

_TEXT_NAME = re.compile(r"[0-9a-f]{32}-(?P<arch>[a-z0-9_]+)\.pt")
_METADATA_NAME = "aspect_ratio_bucket_metadata_*.json"
_MAX_METADATA_BYTES = 1 << 30


def latent_name(sample_id: str) -> str:
    """The file of an image's latent, relative to the VAE cache's folder."""
    folder, _, name = sample_id.rpartition("/")
    stem = os.path.splitext(name)[0].encode("utf-8", "surrogateescape")
    return f"{folder}/{hashlib.sha256(stem).hexdigest()}.pt".lstrip("/")


def text_name(caption: str, architecture: str = "sdxl") -> str:
    """The file of a prompt's embeddings, relative to the text cache's folder."""
    return f"{hashlib.md5(caption.encode(), usedforsecurity=False).hexdigest()}-{architecture}.pt"


def _find_metadata(images: Path, root: Path) -> Path | None:
    found = sorted({path.resolve() for folder in (images, root) for path in folder.glob(_METADATA_NAME)})
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise ConfigError(f"there are several metadata files ({names}); name the one of this dataset", key="metadata")
    return found[0] if found else None


class SimpleTunerCache:
    """The cache of the folder `images`, of which `root` is `cache_dir_vae`; `root` may hold the text cache too.

    `text_cache` is the text cache's folder if it is elsewhere. `metadata` is `aspect_ratio_bucket_metadata_<id>.json`;
    by default the only one in the images' folder or in `root`. Without one the sizes are derived from the images.
    The family follows from the names of texts. Raises DatasetError for folders that cannot be read, and ConfigError if
    there are several metadata files, for a `family` that is not among those that are known here, and where it is not
    given and there are texts of several.
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
        self._architecture = self._layout.architecture

    def items(self) -> Iterator[ForeignItem]:
        """Images in the order of their samples, then texts. Files that belong to no sample are left alone."""
        yield from self._images.refusals
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
                detail = f"it may be of any of {', '.join(sample_ids)}: they have the same stem"
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
            paths = [os.path.join(folder, text_name(caption, self._architecture)) for folder in self._folders]
            path = next(filter(os.path.lexists, paths), None)
            if path is not None:
                yield from refusing(sample_ids[0] if sample_ids else "", self._text(tuple(sample_ids), path, caption))

    def _text(self, sample_ids: tuple[str, ...], path: str, caption: str) -> Iterator[ForeignText]:
        """The embeddings of either payload. Raises ForeignFileRefused."""
        content, fields = read_torch(path), self._family.fields
        if isinstance(content, tuple) and len(content) == len(fields) == 2:
            content = dict(zip(fields, content, strict=True))
        if not isinstance(content, dict) or not fields.keys() <= content.keys():
            raise corrupt(path, f"it holds a {type(content).__name__} that is no prompt's embeddings")
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
    """Latents [C, (1,) h, w] of a file, which have frames if the family's denoiser takes clips.

    Raises ForeignFileRefused, also for several frames and for another number of channels.
    """
    latents = tensor_in(value, "the latent", path, ndim=4 if family.has_clips else 3)
    if len(latents) != family.latent.channels:
        channels = f"{len(latents)} channels, and those of {family.name} have {family.latent.channels}"
        raise corrupt(path, f"its latents have {channels}: name its family (--family), if it is of another")
    if family.has_clips and latents.shape[1] != 1:
        detail = f"it has {latents.shape[1]} latent frames: images alone are imported"
        raise ForeignFileRefused(path, "unsupported-format", detail)
    return latents.unsqueeze(1) if family.latent.is_video and not family.has_clips else latents


def _caption_rows(family: Family, embeds: torch.Tensor, mask: object, path: str) -> torch.Tensor:
    """The rows of a caption's embeddings [1, L, ...] that are stored: all, or for most families those of its own text.

    `mask` has a number for each row. Without one (None) padding is zeros. Raises ForeignFileRefused, also for zeros in
    place of padding that the family's denoiser attends to: that is another recipe than diffusers'.
    """
    if len(embeds) != 1:
        raise corrupt(path, f"it holds {len(embeds)} captions; one is expected")
    rows: torch.Tensor = embeds[0]
    if keeps_padding(family.name):
        if not family.can_drop_padding and rows.any() and not rows[-1].any():
            detail = f"its padding is zeros, which diffusers' {family.name} does not make: cache texts without a mask"
            raise ForeignFileRefused(path, "unsupported-format", detail)
        return rows
    if mask is None:
        kept = rows.flatten(1).any(dim=1)
        return rows[: int(kept.nonzero().max()) + 1 if kept.any() else 0]
    if not isinstance(mask, torch.Tensor) or mask.numel() != len(rows):
        said = list(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise corrupt(path, f"its mask is {said}, for {len(rows)} rows")
    return rows[mask.flatten().bool()]


class _Record(NamedTuple):
    """The sizes of an image, and its crop in the record's own order."""

    original: Size
    resized: Size
    target: Size
    crop: tuple[int, int]

    def crops(self) -> dict[bool, Crop]:
        """The crops that lie inside the resized image, by whether they are recorded as (left, top)."""
        room = self.resized.height - self.target.height, self.resized.width - self.target.width
        found = {True: Crop(*self.crop[::-1]), False: Crop(*self.crop)}
        return {order: crop for order, crop in found.items() if crop.top <= room[0] and crop.left <= room[1]}


class RecordedSizes:
    """`aspect_ratio_bucket_metadata_<id>.json`: original, intermediary and target size, and crop, of each image.

    Sizes are (width, height). The crop is (left, top) or (top, left), by release and way of cropping: the room for it
    says which, that of this image or of others. A record whose crop has room in neither order is refused.
    """

    def __init__(self, path: Path | None, images: SourceImages):
        """Records of images that are not there are left out; without a file there are none. Raises DatasetError."""
        try:
            content = {} if path is None else json.loads(read_file(path, _MAX_METADATA_BYTES))
        except (ValueError, RecursionError) as error:
            detail = f"is no JSON document: {error}; leave it out to derive sizes from images"
            raise DatasetError(str(path), detail) from error
        if not isinstance(content, dict):
            raise DatasetError(str(path), f"holds a {type(content).__name__}; it must map image paths to their sizes")
        sample_ids = images.samples.keys()
        found = [(_split(recorded, sample_ids), record) for recorded, record in content.items()]
        # The images' folder when the cache was made. Equal file names alone are no proof: many folders have a `1.png`.
        [(root, _)] = Counter(root for (root, sample_id), _ in found if sample_id).most_common(1) or [((), 0)]
        self._records = {sample_id: _record(record) for (at, sample_id), record in found if sample_id and at == root}
        crops = [record.crops() for record in self._records.values() if record is not None]
        orders = {order for found in crops if len(found) == 1 for order in found}
        self._order = orders.pop() if len(orders) == 1 else None

    def geometry(self, sample_id: str, size: Size, target: Size, path: str) -> tuple[Geometry, str | None]:
        """The geometry of a latent for `target`, made from an image of `size`, and a note on what was derived.

        Raises ForeignFileRefused if the record does not fit: the image was replaced, or the latent is an old one.
        """
        if sample_id not in self._records:
            return fit(size, target), NOTE_DERIVED
        record = self._records[sample_id]
        if record is None:
            raise corrupt(path, f"the metadata of {sample_id} has no sizes and crop in integers")
        if sorted(size) != sorted(record.original):  # some are recorded before the EXIF turn
            detail = f"the image is {size} now, but was {record.original}"
            raise ForeignFileRefused(path, "changed", detail)
        crops = record.crops()
        if record.target != target or not crops:
            raise corrupt(path, f"the metadata of {sample_id} does not fit a latent for {target} of an image of {size}")
        order = self._order if self._order in crops else next(iter(crops))
        is_assumed = self._order is None and len(set(crops.values())) > 1
        return Geometry(size, record.resized, crops[order], target), NOTE_ORDER if is_assumed else None


def _split(recorded: str, sample_ids: Collection[str]) -> tuple[tuple[str, ...], str]:
    """A path that some machine recorded, as a folder and the sample_id below it, which is empty if there is none."""
    parts = (PureWindowsPath if "\\" in recorded else PurePosixPath)(recorded).parts
    for at in range(len(parts)):
        if (sample_id := "/".join(parts[at:])) in sample_ids:
            return parts[:at], sample_id
    return parts, ""


def _record(value: Any) -> _Record | None:
    """A record; None for anything else."""
    names = {"original_size": 1, "intermediary_size": 1, "target_size": 1, "crop_coordinates": 0}
    values = value if isinstance(value, dict) else {}
    pairs = [pixel_pair(values.get(name), least) for name, least in names.items()]
    found = [pair for pair in pairs if pair is not None]
    if len(found) < len(names):
        return None
    original, resized, target = (Size(height, width) for width, height in found[:3])
    return _Record(original, resized, target, found[3])
