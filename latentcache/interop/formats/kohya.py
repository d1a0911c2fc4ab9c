"""kohya sd-scripts' caches for SDXL: `.npz` files next to the images.

Its pairs are (width, height): they are swapped here, and nowhere else.
Latents: `<image without suffix>_{W:04d}x{H:04d}_sdxl.npz`, W and H those of the image, or the older `<image without
suffix>.npz`, which kohya prefers where it is there. One draw of the posterior, unscaled, float32 [4, h, w]. There are
two dialects. A: `latents`, `original_size`, `crop_ltrb` and, on request, `latents_flipped` and `alpha_mask`. B, since
2026: the same names with a suffix `_{h}x{w}`, in latent units, so that one file holds several resolutions.
Text: `<image without suffix>_te_outputs.npz` with `hidden_state1` [77, 768], `hidden_state2` [77, 1280] and `pool2`
[1280]. It does not name its caption: that is the first line of the image's caption file, unless it was edited since.

`crop_ltrb` is not the crop that kohya performs: it is where the whole image would lie inside the bucket. The image is
resized to cover the bucket, and cropped in the middle; the geometry follows from that.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np
import torch

from latentcache.bucket_config import BucketsConfig
from latentcache.dataset.buckets import fit
from latentcache.errors import DatasetError, ForeignFileRefused
from latentcache.families.sdxl import FAMILY as SDXL
from latentcache.interop.exporting import Export, ExportSample
from latentcache.interop.foreign_files import NpzFile, corrupt, npz_bytes, open_npz
from latentcache.interop.readers import (
    ForeignImage,
    ForeignItem,
    ForeignText,
    SourceImages,
    pixel_pair,
    refusing,
    walked,
)
from latentcache.interop.reports import ExportReport
from latentcache.loading.cache import LatentCache
from latentcache.types import Bucket, Geometry, Size
from latentcache.utils.progress import Progress

SUFFIX, TEXT_SUFFIX = "_sdxl.npz", "_te_outputs.npz"
NOTE_MASK = "alpha_mask not imported: entries have no mask"
NOTE_LEGACY = "the file has the older name, which does not say for which model it was made"
NOTE_NO_IMAGE = "no image found: the sample_id has no suffix"
NOTE_TURNED = "kohya does not turn images as EXIF says: this latent is of the image lying on its side"
NOTE_CROP = "crop_ltrb does not follow kohya's rule: the crop is not known, a middle one is assumed"
NOTE_NO_UPSCALE = "with bucket_no_upscale the image was cropped, not resized: a resize is assumed"
NOTE_ENCODED_AGAIN = "another bucket than kohya makes: it encodes the image again; precache with `buckets.rule: kohya`"
REMEDY = (
    "kohya would take the file as it is, and end at a batch of several sizes; precache with `buckets.rule: kohya`, or "
    "give the numbers of the training with --buckets"
)
NOTE_OTHERS = "the file holds other resolutions too, which were not imported"
NOTE_FIRST_LINE = "kohya encodes the first line of a caption file, unless it has wildcards"

_LATENT_NAME = re.compile(
    r"(?P<base>.+)_(?P<width>\d{4,6})x(?P<height>\d{4,6})_(?P<arch>[a-z][a-z0-9_]*)\.npz", re.DOTALL
)
_RESOLUTION = re.compile(r"latents_(?P<h>\d{1,5})x(?P<w>\d{1,5})")
_LARGEST_STEP = 64  # of kohya's buckets, in pixels


def contain_rule(original_size: Size, bucket: Bucket) -> tuple[float, float, float, float]:
    """The `crop_ltrb` of kohya: left, top, right and bottom of the whole image inside the bucket, in its pixels."""
    aspect = original_size.width / original_size.height
    if bucket.width / bucket.height > aspect:
        width, height = bucket.height * aspect, float(bucket.height)
    else:
        width, height = float(bucket.width), bucket.width / aspect
    left, top = (bucket.width - width) // 2, (bucket.height - height) // 2
    return left, top, left + width, top + height


class KohyaCache:
    """The `.npz` files below `root`. `images` is the images' folder if they are elsewhere, laid out in the same way.

    Of a file with several resolutions the one nearest to `area` (pixels) is read; by default the largest. Raises
    DatasetError for folders that cannot be read.
    """

    format = "kohya"
    declaration = None

    def __init__(
        self,
        root: str | Path,
        *,
        images: str | Path | None = None,
        caption_extension: str = ".txt",
        area: int | None = None,
    ):
        if not os.path.isdir(root):
            raise DatasetError(root, "is not a folder")
        self._root, self._area = Path(root), area
        try:
            self._images = SourceImages(root if images is None else images, caption_extension=caption_extension)
        except DatasetError:
            if images is not None:
                raise
            self._images = SourceImages(None)  # `root` has no images: the samples of its files have none

    def items(self) -> Iterator[ForeignItem]:
        """Every `.npz` file, in the order of the folders and names."""
        yield from walked(str(self._root), self._folder)

    def _folder(self, folder: str, names: list[str]) -> Iterator[ForeignItem]:
        present = {name for name in names if name.endswith(".npz")}
        for name in sorted(present):
            base = f"{folder}/{name}".lstrip("/")
            yield from refusing(base, self._file(base, self._root / base, present))

    def _file(self, name: str, path: Path, present: set[str]) -> Iterator[ForeignItem]:
        """What one file holds. `name` is its path below the root; `present` are the npz files of its folder."""
        if name.endswith(TEXT_SUFFIX):
            yield self._text(name.removesuffix(TEXT_SUFFIX), path)
            return
        match = _LATENT_NAME.fullmatch(name)
        if match is None or self._images.with_stem(name.removesuffix(".npz")):  # an image may have such a name itself
            yield from self._latents(name.removesuffix(".npz"), path, None)
            return
        if match["arch"] != "sdxl":
            raise ForeignFileRefused(path, "unsupported-format", f"it is of the architecture {match['arch']}, not sdxl")
        legacy = f"{PurePosixPath(match['base']).name}.npz"
        if legacy in present:
            detail = f"kohya uses {legacy} in the same folder in its place; so does the import"
            raise ForeignFileRefused(path, "duplicate", detail)
        yield from self._latents(match["base"], path, Size(int(match["height"]), int(match["width"])))

    # Latents

    def _latents(self, base: str, path: Path, named: Size | None) -> Iterator[ForeignItem]:
        """The latent of a file and its flipped twin. `named` is the original size in the file's name."""
        with open_npz(path) as file:
            stored = _stored(file, path, self._area)
            notes = [NOTE_OTHERS] if stored.has_others else []
            notes += [] if named else [NOTE_LEGACY]
            size = _original_size(file, path, stored, named)
            sample_id, image = self._image(base, path, size, notes)
            geometry = _geometry(file, size, stored, notes)
            if f"alpha_mask{stored.suffix}" in file.names:
                notes.append(NOTE_MASK)
            for flip in (False, True):
                name = f"latents{'_flipped' if flip else ''}{stored.suffix}"
                if name in file.names:
                    latents, flipped = _tensor(file, name, path, ndim=3), replace(geometry, flip=flip)
                    note = "; ".join(notes) or None
                    yield ForeignImage(sample_id, str(path), image, latents, None, "sample", flipped, note)

    def _image(self, base: str, path: Path, size: Size, notes: list[str]) -> tuple[str, Path | None]:
        """The sample that a latent is of, and its image; its sizes must agree."""
        upright = {sample_id: self._images.size(sample_id) for sample_id in self._images.with_stem(base)}
        if not upright:
            notes.append(NOTE_NO_IMAGE)
            return base, None
        fitting = [sample_id for sample_id in upright if upright[sample_id] == size]
        if not fitting:
            # kohya takes the size as the file has it, before the EXIF turn.
            fitting = [sample_id for sample_id in upright if upright[sample_id] == Size(size.width, size.height)]
            notes += [NOTE_TURNED] if fitting else []
        if not fitting:
            met = ", ".join(f"{sample_id} is {size}" for sample_id, size in upright.items())
            raise ForeignFileRefused(path, "changed", f"it is of an image of {size}, but {met}: it was replaced")
        if len(fitting) > 1:
            names = " and ".join(fitting)
            raise ForeignFileRefused(path, "duplicate", f"{names} share this file, so it is of only one of them")
        return fitting[0], self._images.path(fitting[0])

    # Text

    def _text(self, base: str, path: Path) -> ForeignText:
        with open_npz(path) as file:
            first, second = (_tensor(file, f"hidden_state{number}", path, ndim=2) for number in (1, 2))
            pooled = _tensor(file, "pool2", path, ndim=1)
        if first.shape[0] != SDXL.max_length or second.shape[0] != SDXL.max_length:
            detail = f"hidden_state1 is {list(first.shape)}, hidden_state2 {list(second.shape)}: "
            detail += f"{SDXL.max_length} tokens are needed (max_token_length 75)"
            raise ForeignFileRefused(path, "unsupported-format", detail)
        if not first.dtype == second.dtype == pooled.dtype:
            raise corrupt(path, f"its dtypes are {first.dtype}, {second.dtype}, {pooled.dtype}")
        sample_ids = self._images.with_stem(base)
        captions = next(filter(None, map(self._images.captions_of, sample_ids)), ())
        caption, note = captions[0] if captions else None, NOTE_FIRST_LINE if len(captions) > 1 else None
        embeds = torch.cat([first, second], dim=-1)
        return ForeignText(sample_ids or (base,), str(path), caption, embeds, pooled, note)


class _Stored(NamedTuple):
    """One resolution of a file: the suffix of its names, and its latent's height and width."""

    suffix: str
    height: int
    width: int
    has_others: bool = False


def _stored(file: NpzFile, path: Path, area: int | None) -> _Stored:
    """The resolution to read, by the headers alone."""
    found: dict[tuple[int, int], _Stored] = {}
    for name in sorted(file.names):
        match = _RESOLUTION.fullmatch(name)
        if match is None and name != "latents":
            continue
        shape = file.shape(name)
        if len(shape) != 3 or min(shape) < 1:
            raise corrupt(path, f"{name} has the shape {list(shape)}; it must be [4, h, w]")
        if match is not None and (int(match["h"]), int(match["w"])) != shape[1:]:
            raise corrupt(path, f"{name} has the shape {list(shape)}, which its name denies")
        # kohya looks for the name with a suffix first.
        if match is not None or shape[1:] not in found:
            found[shape[1:]] = _Stored(name.removeprefix("latents"), shape[1], shape[2])
    if not found:
        detail = "it holds no latents: it is no file of kohya's latent cache"
        raise ForeignFileRefused(path, "unsupported-format", detail)
    sizes = sorted(found, key=lambda size: -size[0] * size[1])
    if area is not None:
        sizes.sort(key=lambda size: abs(size[0] * size[1] * SDXL.latent.downscale**2 - area))
    return found[sizes[0]]._replace(has_others=len(found) > 1)


def _original_size(file: NpzFile, path: Path, stored: _Stored, named: Size | None) -> Size:
    values = file.read(f"original_size{stored.suffix}").tolist()
    pair = pixel_pair(values, 1)
    if pair is None:
        raise corrupt(path, f"original_size is {values!s:.100}; it must be (width, height)")
    size = Size(pair[1], pair[0])
    if named is not None and named != size:
        raise corrupt(path, f"its name says an image of {named}, its content one of {size}")
    return size


def _geometry(file: NpzFile, size: Size, stored: _Stored, notes: list[str]) -> Geometry:
    """What kohya did to the image. A note says where `crop_ltrb` does not follow its rule."""
    bucket = Bucket(stored.height * SDXL.latent.downscale, stored.width * SDXL.latent.downscale)
    geometry = fit(size, bucket)
    crop = file.read(f"crop_ltrb{stored.suffix}")
    # Within a pixel: releases may round otherwise.
    if crop.shape != (4,) or not np.allclose(crop.astype(np.float64), contain_rule(size, bucket), rtol=0, atol=1.0):
        notes.append(NOTE_CROP)
    spare = (size.height - bucket.height, size.width - bucket.width)
    if size != geometry.resized_size and all(0 <= side < _LARGEST_STEP for side in spare):
        notes.append(NOTE_NO_UPSCALE)
    return geometry


def _tensor(file: NpzFile, name: str, path: Path, *, ndim: int) -> torch.Tensor:
    array = file.read(name)
    if array.dtype not in (np.float32, np.float16) or array.ndim != ndim or array.size == 0:
        raise corrupt(path, f"{name} is {array.dtype} {list(array.shape)}; it must be float with {ndim} dimensions")
    return torch.from_numpy(array)


read = KohyaCache


def export(
    cache: LatentCache,
    name: str,
    folder: str | Path,
    *,
    with_resolution: bool = False,
    buckets: BucketsConfig | None = None,
    seed: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ExportReport:
    """Write kohya's files for the manifest `name` below `folder`: the images' own folder, or a copy of its layout.

    Dialect A, which every release reads; or, `with_resolution`, B. kohya takes a file of A as it is: a latent of
    another bucket than kohya makes of that image ends the training. Such ones are skipped, and listed. `buckets` are
    those of the training (`Export`). Latents are the mean of the moments, or with `seed` a draw, as kohya has it. A
    sample has one caption in kohya: its first. Files that exist are listed and not replaced, unless `overwrite`. Images
    that EXIF turns have another name in kohya, which does not turn them. Raises what `Export` does.
    """
    run = Export("kohya", cache, name, folder, seed=seed, overwrite=overwrite, buckets=buckets, progress=progress)
    for sample in run.samples():
        base = Path(folder, sample.stem)
        height, width = sample.geometry.original_size
        other = run.other_bucket(sample)
        if other is not None and not with_resolution:
            run.skip(sample.sample_id, sample.path, "other-bucket", f"{other}: {REMEDY}")
        else:
            run.report.note(NOTE_ENCODED_AGAIN if other is not None else None)
            latents = base.with_name(f"{base.name}_{width:04d}x{height:04d}{SUFFIX}")
            if run.write(latents, npz_bytes(_latent_arrays(sample, with_resolution, run.report)), sample):
                run.report.num_images += 1 if sample.flipped is None else 2
        arrays = _text_arrays(sample, run) if sample.captions else None
        if arrays is not None:
            run.report.num_texts += run.write(base.with_name(base.name + TEXT_SUFFIX), npz_bytes(arrays), sample)
        if len(sample.captions) > 1:
            run.report.note("several captions: only the first was exported")
    return run.report


def _latent_arrays(sample: ExportSample, with_resolution: bool, report: ExportReport) -> dict[str, np.ndarray]:
    geometry = sample.geometry
    spare = Size(*(whole - side for whole, side in zip(geometry.resized_size, geometry.target_size, strict=True)))
    if geometry.crop_top_left != (spare.height // 2, spare.width // 2):
        report.note("the crop is not kohya's: its time ids will not say what was done")
    arrays = {
        "latents": sample.latents.numpy(),
        "original_size": np.array([geometry.original_size.width, geometry.original_size.height], dtype=np.int64),
        "crop_ltrb": np.array(contain_rule(geometry.original_size, geometry.target_size), dtype=np.float64),
    }
    if sample.flipped is not None:
        arrays["latents_flipped"] = sample.flipped.numpy()
    height, width = sample.latents.shape[1:]
    return {f"{name}_{height}x{width}": array for name, array in arrays.items()} if with_resolution else arrays


def _text_arrays(sample: ExportSample, run: Export) -> dict[str, np.ndarray] | None:
    """The first caption's arrays; None, and reported, if they are not SDXL's."""
    embeds, pooled = sample.captions[0].prompt_embeds, sample.captions[0].pooled_prompt_embeds
    # The second encoder's hidden states are as wide as its pooled output.
    width = embeds.shape[1] - pooled.shape[0]
    if embeds.shape[0] != SDXL.max_length or width < 1:
        detail = f"embeddings of the shapes {list(embeds.shape)} and {list(pooled.shape)} are not SDXL's"
        run.skip(sample.sample_id, sample.path, "unsupported-format", detail)
        return None
    if embeds.dtype is not torch.float16:
        embeds, pooled = embeds.float(), pooled.float()  # npz has no bfloat16
    return {
        "hidden_state1": embeds[:, :width].contiguous().numpy(),
        "hidden_state2": embeds[:, width:].contiguous().numpy(),
        "pool2": pooled.numpy(),
    }
