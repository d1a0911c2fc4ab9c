"""kohya sd-scripts' caches for SDXL, SD 1.5 and FLUX.1: `.npz` files next to the images.

kohya's pairs are (width, height). Only this module converts them to (height, width).

Latents are in `<image without suffix>_{W:04d}x{H:04d}_sdxl.npz`, with the size of the image, or in the older `<image
without suffix>.npz`, which kohya prefers if both exist: one draw of the posterior, unscaled, float32 [4, h, w]. There
are two dialects. A has `latents`, `original_size`, `crop_ltrb` and, on request, `latents_flipped` and `alpha_mask`. B,
since 2026, appends the resolution in latent units (`_{h}x{w}`) to these names, so one file can hold several. SD 1.5
files end with `_sd.npz`. FLUX.1 files end with `_flux.npz`, are always in dialect B, and hold scaled latents.

Embeddings are in `<image without suffix>_te_outputs.npz`: `hidden_state1` [77, 768], `hidden_state2` [77, 1280] and
`pool2` [1280], with 152 or 227 rows for `max_token_length` 150 or 225. FLUX.1's are in `_flux_te.npz`: `t5_out`
[L, 4096], `l_pooled` [768], `txt_ids` [L, 3] of zeros, `t5_attn_mask` [L] and the flag `apply_t5_attn_mask`, in
float32. If the flag is set, padding was masked in T5: the shapes are those of diffusers' embeddings, the values are
not. No caption is stored. It is taken to be the first line of the image's caption file, which may have been edited
since. Nor is it stored whether `weighted_captions` was on; only `--verify` detects that.

`crop_ltrb` is not the crop that kohya performs, but the place of the whole image inside the bucket. kohya resizes an
image to cover the bucket and crops the centre, so the geometry follows from the sizes alone.
"""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from typing_extensions import Unpack

from latentcache.config import SETTINGS_OF_RULE, BucketsConfig
from latentcache.config_file import parse_buckets
from latentcache.dataset.bucket_rules import BucketRule, fit
from latentcache.dataset.samples import walk
from latentcache.errors import ConfigError, DatasetError, ForeignFileRefused
from latentcache.families.clip import LONG_BY_ROWS
from latentcache.families.parts import TrainerFiles
from latentcache.families.sdxl import FAMILY as SDXL
from latentcache.interop.exporting import NOTE_FIRST_CAPTION, Export, ExportOptions, ExportSample
from latentcache.interop.readers import (
    ForeignImage,
    ForeignItem,
    ForeignText,
    SourceImages,
    chosen_family,
    corrupt,
    layouts_of,
    pixel_pair,
    read_npz,
    refusing,
    tensor_in,
)
from latentcache.interop.reports import ExportReport
from latentcache.loading.cache import LatentCache
from latentcache.types import Bucket, Geometry, Refusal, Size

Tensors = Mapping[str, torch.Tensor]
NOTE_MASK_UNKNOWN = "t5_attn_mask is unknown and was written as all ones: kohya uses it only with apply_t5_attn_mask"
_FLAG, _MASK = "apply_t5_attn_mask", "t5_attn_mask"
_OTHER_TEXT = "_sd3_te.npz"
NOTE_NO_IMAGE = "no image found: the sample_id has no suffix"
NOTE_TURNED = "kohya ignores the EXIF rotation: this latent is of the image as stored, on its side"
NOTE_MASK = "alpha_mask was imported as the sample's mask"
NOTE_LEGACY = "the file has the older name, which does not tell the model it was made for"
NOTE_CROP = "crop_ltrb does not follow kohya's rule: the crop is unknown, a centre crop is assumed"
NOTE_NO_UPSCALE = "with bucket_no_upscale the image was cropped, not resized: a resize is assumed"
NOTE_ENCODED_AGAIN = "the bucket differs from kohya's, so kohya encodes the image again: use `buckets.rule: kohya`"
REMEDY = (
    "kohya would load the file and then fail on a batch of mixed sizes. Precache with `buckets.rule: kohya`, or pass "
    "the bucket settings of the training with --buckets"
)
NOTE_OTHERS = "the file holds further resolutions, which were not imported"
NOTE_FIRST_LINE = "kohya encodes the first line of a caption file, unless it has wildcards"

_LATENT_NAME = re.compile(
    r"(?P<base>.+)_(?P<width>\d{4,6})x(?P<height>\d{4,6})_(?P<arch>[a-z][a-z0-9_]*)\.npz", re.DOTALL
)
_LATENTS = re.compile(r"latents(_\d{1,5}x\d{1,5})?")
_LARGEST_STEP = 64  # of kohya's buckets, in pixels
_PIXELS = SDXL.latent.downscale
_ROWS = (SDXL.max_length, *LONG_BY_ROWS)
"""Rows of an SDXL caption's embeddings: with `max_token_length` 75, 150 and 225."""


def contain_rule(original_size: Size, bucket: Bucket) -> tuple[float, float, float, float]:
    """The `crop_ltrb` of kohya: left, top, right and bottom of the whole image inside the bucket, in bucket pixels."""
    aspect = original_size.width / original_size.height
    if bucket.width / bucket.height > aspect:
        width, height = bucket.height * aspect, float(bucket.height)
    else:
        width, height = float(bucket.width), bucket.width / aspect
    left, top = (bucket.width - width) // 2, (bucket.height - height) // 2
    return left, top, left + width, top + height


class KohyaCache:
    """The `.npz` files below `root`. `images` is the folder of the images if they are not in `root`, with its layout.

    The largest resolution of each file is read. Raises DatasetError for a folder that cannot be read, and ConfigError
    for an unsupported `family`, or if none is given and the files are of several.
    """

    format = "kohya"

    def __init__(
        self,
        root: str | Path,
        *,
        images: str | Path | None = None,
        caption_extension: str = ".txt",
        family: str | None = None,
    ):
        if not os.path.isdir(root):
            raise DatasetError(root, "is not a folder")
        self._root = Path(root)
        self.family = chosen_family(family, [str(root)], _LATENT_NAME, self.format)
        self._layouts = layouts_of(self.format)
        self._layout = self._layouts[self.family]
        try:
            self._images = SourceImages(root if images is None else images, caption_extension=caption_extension)
        except DatasetError:
            if images is not None:
                raise
            self._images = SourceImages(None)  # `root` has no images

    def items(self) -> Iterator[ForeignItem]:
        """The contents of every `.npz` file, by folder and name."""
        for found in walk(str(self._root)):
            if isinstance(found, Refusal):
                yield found
                continue
            folder, present = found[0], {name for name in found[1] if name.endswith(".npz")}
            for name in sorted(present):
                base = f"{folder}/{name}".lstrip("/")
                yield from refusing(base, self._file(base, self._root / base, present))

    def _file(self, name: str, path: Path, present: set[str]) -> Iterator[ForeignItem]:
        """The items of one file. `name` is its path below the root; `present` are the npz files of its folder."""
        texts = (*filter(None, (each.text_suffix for each in self._layouts.values())), _OTHER_TEXT)
        suffix = next((each for each in texts if name.endswith(each)), None)
        if suffix is not None:
            if suffix != self._layout.text_suffix:
                raise ForeignFileRefused(path, "unsupported-format", f"its embeddings are not those of {self.family}")
            yield self._text(name.removesuffix(suffix), path)
            return
        match, stem = _LATENT_NAME.fullmatch(name), name.removesuffix(".npz")
        if match is None or self._images.of_stem(stem, path):  # an image may have such a name itself
            yield from self._latents(stem, path, None)
            return
        if match["arch"] != self._layout.architecture:
            detail = f"its architecture is {match['arch']}, not {self.family}"
            raise ForeignFileRefused(path, "unsupported-format", detail)
        legacy = f"{PurePosixPath(match['base']).name}.npz"
        if legacy in present and not self._layout.has_resolutions:
            detail = f"kohya prefers {legacy} in the same folder, and so does the import"
            raise ForeignFileRefused(path, "duplicate", detail)
        yield from self._latents(match["base"], path, Size(int(match["height"]), int(match["width"])))

    # Latents

    def _latents(self, base: str, path: Path, named: Size | None) -> Iterator[ForeignItem]:
        """The latent of a file and its flipped twin. `named` is the image's size according to the file's name."""
        arrays = read_npz(path)
        suffix, bucket, has_others = _largest(arrays, path)
        notes = [NOTE_OTHERS] if has_others else []
        notes += [] if named else [NOTE_LEGACY]
        values = _array_of(arrays, f"original_size{suffix}", path).tolist()
        if (pair := pixel_pair(values, 1)) is None:
            raise corrupt(path, f"original_size is {values!s:.100}; it must be (width, height)")
        size = Size(pair[1], pair[0])
        if named not in (None, size):
            raise corrupt(path, f"its name says an image of {named}, its content one of {size}")
        sample_id, image = self._image_of(base, size, path, notes)
        geometry = fit(size, bucket)
        notes += _notes_on(geometry, _array_of(arrays, f"crop_ltrb{suffix}", path))
        mask = None
        if (mask_name := f"alpha_mask{suffix}") in arrays:
            mask = _latent_mask(tensor_in(arrays[mask_name], mask_name, path, ndim=2), bucket, path)
            notes.append(NOTE_MASK)
        for flip in (False, True):
            name = f"latents{'_flipped' if flip else ''}{suffix}"
            if name in arrays:
                yield ForeignImage(
                    sample_id=sample_id,
                    path=str(path),
                    image_path=image,
                    latents=tensor_in(arrays[name], name, path, ndim=3),
                    is_scaled=self._layout.is_scaled,
                    output="sample",
                    geometry=replace(geometry, flip=flip),
                    note="; ".join(notes) or None,
                    mask=mask.flip(-1) if mask is not None and flip else mask,
                )

    def _image_of(self, base: str, size: Size, path: Path, notes: list[str]) -> tuple[str, Path | None]:
        """The sample_id and the file of the image with this stem and size; `base` and None if there is no image.

        `size` is before the EXIF rotation, which kohya ignores. Raises ForeignFileRefused if no image has that size or
        several have, and ImageRefused.
        """
        upright = {sample_id: self._images.size(sample_id) for sample_id in self._images.of_stem(base, path)}
        if not upright:
            notes.append(NOTE_NO_IMAGE)
            return base, None
        fitting = [sample_id for sample_id in upright if upright[sample_id] == size]
        if not fitting:
            fitting = [sample_id for sample_id in upright if upright[sample_id] == Size(size.width, size.height)]
            notes.append(NOTE_TURNED)
        if not fitting:
            met = ", ".join(f"{sample_id} is {size}" for sample_id, size in upright.items())
            raise ForeignFileRefused(path, "changed", f"it was made from an image of {size}, but {met} now")
        if len(fitting) > 1:
            names = " and ".join(fitting)
            raise ForeignFileRefused(path, "duplicate", f"it may be of {names}: they have the same stem and size")
        return fitting[0], Path(self._images.samples[fitting[0]].path)

    # Text

    def _text(self, base: str, path: Path) -> ForeignText:
        arrays = read_npz(path)
        embeds, pooled = (_read_flux if self._layout.has_resolutions else _read_sdxl)(arrays, path)
        sample_ids = tuple(self._images.of_stem(base, path))
        samples = [self._images.samples[sample_id] for sample_id in sample_ids]
        captions = next((sample.captions for sample in samples if sample.has_caption), ())
        caption, note = captions[0] if captions else None, NOTE_FIRST_LINE if len(captions) > 1 else None
        length = None if self._layout.has_resolutions else LONG_BY_ROWS.get(len(embeds))
        return ForeignText(sample_ids or (base,), str(path), caption, embeds, pooled, note, length)


def _largest(arrays: Tensors, path: Path) -> tuple[str, Bucket, bool]:
    """The name suffix of the largest resolution, its bucket, and whether the file has further resolutions."""
    sides = {
        name.removeprefix("latents"): tuple(tensor_in(array, name, path, ndim=3).shape[1:])
        for name, array in arrays.items()
        if _LATENTS.fullmatch(name)
    }
    if not sides:
        detail = "it holds no latents: it is not a file of kohya's latent cache"
        raise ForeignFileRefused(path, "unsupported-format", detail)
    # Of the names with and without a suffix for one resolution, kohya prefers the one with.
    suffix = max(sides, key=lambda each: (math.prod(sides[each]), each))
    height, width = sides[suffix]
    return suffix, Bucket(height * _PIXELS, width * _PIXELS), len(set(sides.values())) > 1


def _notes_on(geometry: Geometry, crop: torch.Tensor) -> Iterator[str]:
    """Notes on a file whose image may not have been resized and cropped by kohya's usual rule."""
    size, bucket = geometry.original_size, geometry.target_size
    usual = torch.tensor(contain_rule(size, bucket)).double()
    # To within a pixel: releases may round differently.
    if crop.shape != (4,) or not torch.allclose(crop.double(), usual, rtol=0, atol=1.0):
        yield NOTE_CROP
    spare = (size.height - bucket.height, size.width - bucket.width)
    if size != geometry.resized_size and all(0 <= side < _LARGEST_STEP for side in spare):
        yield NOTE_NO_UPSCALE


def _latent_mask(pixels: torch.Tensor, bucket: Bucket, path: Path) -> torch.Tensor:
    """The mask [h*8, w*8] of pixels, 0 to 1, averaged over each latent: uint8 [1, h, w]."""
    if tuple(pixels.shape) != bucket or not bool(((pixels >= 0) & (pixels <= 1)).all()):
        raise corrupt(path, f"its mask is {list(pixels.shape)}; it must be {list(bucket)} of numbers from 0 to 1")
    return (torch.nn.functional.avg_pool2d(pixels.float()[None], _PIXELS) * 255 + 0.5).to(torch.uint8)


def _array_of(arrays: Tensors, name: str, path: Path) -> torch.Tensor:
    """`arrays[name]`. Raises ForeignFileRefused if the file lacks it."""
    if name not in arrays:
        raise corrupt(path, f"it has no {name}")
    return arrays[name]


def _read_sdxl(arrays: Tensors, path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """The caption's prompt_embeds [L, D] and pooled_prompt_embeds [P]. Raises ForeignFileRefused."""
    first, second = (tensor_in(arrays.get(each), each, path, ndim=2) for each in ("hidden_state1", "hidden_state2"))
    pooled = tensor_in(arrays.get("pool2"), "pool2", path, ndim=1)
    if len(first) not in _ROWS or len(second) != len(first):
        detail = f"hidden_state1 is {list(first.shape)}, hidden_state2 {list(second.shape)}: both need "
        detail += f"{' or '.join(map(str, _ROWS))} rows (max_token_length 75, 150 or 225)"
        raise ForeignFileRefused(path, "unsupported-format", detail)
    if not first.dtype == second.dtype == pooled.dtype:
        raise corrupt(path, f"its dtypes are {first.dtype}, {second.dtype}, {pooled.dtype}")
    return torch.cat([first, second], dim=-1), pooled


def _read_flux(arrays: Tensors, path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Like `_read_sdxl`, for FLUX.1."""
    flag, mask = _array_of(arrays, _FLAG, path), _array_of(arrays, _MASK, path)
    if flag.shape != () or flag.dtype is not torch.bool:
        raise corrupt(path, f"{_FLAG} is {flag.dtype} {list(flag.shape)}; it must be one bool")
    if flag:
        detail = f"it was made with {_FLAG}; diffusers' FLUX.1 does not mask padding: cache the texts without it"
        raise ForeignFileRefused(path, "unsupported-format", detail)
    embeds, pooled = (tensor_in(arrays.get(each), each, path, ndim=n) for each, n in (("t5_out", 2), ("l_pooled", 1)))
    if embeds.dtype != pooled.dtype or mask.shape != embeds.shape[:1]:
        shapes = f"t5_out {embeds.dtype} {list(embeds.shape)}, l_pooled {pooled.dtype}, {_MASK} {list(mask.shape)}"
        raise corrupt(path, f"its arrays do not match: {shapes}")
    return embeds, pooled


# Writing


def export(
    cache: LatentCache,
    name: str,
    folder: str | Path,
    *,
    with_resolution: bool = False,
    buckets: BucketsConfig | None = None,
    **options: Unpack[ExportOptions],
) -> ExportReport:
    """Write kohya's files for the manifest `name` below `folder`: the images' own folder, or one with its layout.

    Files are in dialect A, which every release reads, or, `with_resolution` and for FLUX.1, in B. kohya loads a file
    of A unchecked: a latent whose bucket differs from kohya's makes the training fail, so such samples are skipped
    and listed. `buckets` are those of the training. The default is the cache's, if made with kohya's rule, otherwise
    kohya's own defaults for the same area. A mask becomes `alpha_mask`, one value for all pixels of a latent. Only
    the first caption is written. An image with an EXIF rotation is not found by kohya, which ignores the rotation.
    Raises what `Export` raises, and ConfigError for buckets of another rule.
    """
    if buckets is not None and buckets.rule != "kohya":
        raise ConfigError(f"buckets.rule is {buckets.rule}; an export to kohya needs kohya's", key="buckets.rule")
    run = Export("kohya", cache, name, folder, options, families=layouts_of("kohya"), takes={"mask"})
    rule, layout = _rule_of(run, buckets), layouts_of("kohya")[run.family.name]
    with_resolution = with_resolution or layout.has_resolutions
    for sample in run.samples():
        base = Path(folder, sample.stem)
        height, width = sample.geometry.original_size
        other = _other_bucket(sample, rule)
        run.report.num_other_buckets += other is not None
        if other is not None and not with_resolution:
            run.skip(sample.row, "other-bucket", f"{other}: {REMEDY}")
        else:
            run.report.note(NOTE_ENCODED_AGAIN if other is not None else None)
            latents = base.with_name(f"{base.name}_{width:04d}x{height:04d}_{layout.architecture}.npz")
            arrays = _latent_arrays(sample, with_resolution, layout, run)
            if run.write(latents, _npz_bytes(arrays), sample):
                run.report.num_images += 1 if sample.flipped is None else 2
        if not layout.text_suffix:
            run.report.note(f"kohya does not cache texts for {run.family.name}: it encodes captions while training")
        elif sample.captions:
            _export_text(sample, base.with_name(base.name + layout.text_suffix), layout, run)
    return run.report


def _rule_of(run: Export, chosen: BucketsConfig | None) -> BucketRule | None:
    """The bucket rule of the training; None for an import from kohya, which has kohya's buckets already."""
    if chosen is None:
        if run.manifest.imported_from == "kohya":
            return None
        source = f"manifest {run.manifest.name}"
        chosen = parse_buckets(run.manifest.common.get("buckets") or {}, source=source)
        if chosen.rule != "kohya":
            side = math.isqrt(chosen.area) if chosen.rule == "latentcache" else chosen.resolution
            likely = {"rule": "kohya", "resolution": side, "step": chosen.step}
            likely |= {"max_side": side} if side > 1024 else {}
            likely |= {"min_side": chosen.step} if side < 256 else {}
            chosen = parse_buckets(likely, source=source)
    run.report.buckets = {name: getattr(chosen, name) for name in sorted({"rule", *SETTINGS_OF_RULE["kohya"]})}
    return BucketRule(chosen)


def _other_bucket(sample: ExportSample, rule: BucketRule | None) -> str | None:
    """How the sample's bucket differs from the one that kohya chooses, for messages; None if it does not."""
    if rule is None:
        return None
    geometry, usual = sample.geometry, rule.geometry(sample.geometry.original_size)
    if usual is not None and usual.target_size == geometry.target_size:
        return None
    would = "none" if usual is None else f"{usual.target_size}, cropped from {usual.resized_size}"
    return f"its bucket is {geometry.target_size}, cropped from {geometry.resized_size}; {rule} chooses {would}"


def _export_text(sample: ExportSample, path: Path, layout: TrainerFiles, run: Export) -> None:
    _, entry = sample.captions[0]
    embeds, pooled = (entry.tensors[name] for name in ("prompt_embeds", "pooled_prompt_embeds"))
    if embeds.dtype is not torch.float16:
        embeds, pooled = embeds.float(), pooled.float()  # npz has no bfloat16
    if layout.has_resolutions:
        num_tokens = entry.record.provenance.get("num_tokens")
        run.report.note(NOTE_MASK_UNKNOWN if num_tokens is None else None)
        arrays = {
            "l_pooled": pooled.to(embeds.dtype).numpy(),
            "t5_out": embeds.contiguous().numpy(),
            "txt_ids": np.zeros((len(embeds), 3), np.float32),
            _MASK: (np.arange(len(embeds)) < (len(embeds) if num_tokens is None else num_tokens)).astype(np.int64),
            _FLAG: np.array(False),
        }
    else:
        # The second encoder's hidden states are as wide as its pooled output.
        width = embeds.shape[1] - pooled.shape[0]
        if len(embeds) not in _ROWS or width < 1:
            met = f"embeddings of the shapes {list(embeds.shape)} and {list(pooled.shape)}"
            detail = f"{met} do not fit kohya's SDXL files, which have {' or '.join(map(str, _ROWS))} rows"
            run.skip(sample.row, "unsupported-format", detail)
            return
        first, second = embeds[:, :width].contiguous(), embeds[:, width:].contiguous()
        arrays = {"hidden_state1": first.numpy(), "hidden_state2": second.numpy(), "pool2": pooled.numpy()}
    run.report.num_texts += run.write(path, _npz_bytes(arrays), sample)
    run.report.note(NOTE_FIRST_CAPTION if len(sample.captions) > 1 else None)


def _latent_arrays(
    sample: ExportSample, with_resolution: bool, layout: TrainerFiles, run: Export
) -> dict[str, np.ndarray]:
    geometry, report = sample.geometry, run.report

    def written(latents: torch.Tensor) -> np.ndarray:
        return (run.scaling.apply(latents) if layout.is_scaled else latents).contiguous().numpy()

    spare = Size(*(whole - side for whole, side in zip(geometry.resized_size, geometry.target_size, strict=True)))
    if geometry.crop_top_left != (spare.height // 2, spare.width // 2):
        report.note("the crop is not in the centre as kohya's is, so kohya will compute wrong time ids")
    arrays = {
        "latents": written(sample.latents),
        "original_size": np.array([geometry.original_size.width, geometry.original_size.height], dtype=np.int64),
        "crop_ltrb": np.array(contain_rule(geometry.original_size, geometry.target_size), dtype=np.float64),
    }
    if sample.flipped is not None:
        arrays["latents_flipped"] = written(sample.flipped)
    for mask in sample.parts["mask"]:  # at most one
        arrays["alpha_mask"] = mask[0].numpy().repeat(_PIXELS, axis=0).repeat(_PIXELS, axis=1) / np.float32(255)
    height, width = sample.latents.shape[1:]
    return {f"{name}_{height}x{width}": array for name, array in arrays.items()} if with_resolution else arrays


def _npz_bytes(arrays: Mapping[str, np.ndarray]) -> bytes:
    """These arrays as an uncompressed npz file."""
    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]  # the stub confuses the arrays with `allow_pickle`
    return file.getvalue()
