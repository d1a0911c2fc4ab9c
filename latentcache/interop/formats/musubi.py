"""musubi-tuner's caches: one folder of safetensors files, `<name>_{W:04d}x{H:04d}_<arch>` and `<name>_<arch>_te`.

W and H are those of the image, `<name>` its file's name without suffix and folder, `<arch>` the architecture. Latents:
`latents_{F}x{H}x{W}_{dtype}` [C, h, w], of Qwen-Image, Krea 2 and Wan [C, F, h, w]; of Z-Image unscaled, of others
scaled; of FLUX.1 Kontext one draw, of others the mean. Metadata: `architecture`, `width`, `height`. An image was
resized to cover its bucket, and cropped in the middle. Text: `varlen_<what>_{dtype}` has a row for each token, without
padding; FLUX.1's has its padding. Metadata: `architecture`, `caption1`. (Read in musubi-tuner 30c658c.)

Latents of control images (`latents_control_...`) stand next to those of the image. A clip has frames in its name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from latentcache.dataset.buckets import fit
from latentcache.dataset.samples import walk
from latentcache.errors import DatasetError, ForeignFileRefused
from latentcache.families import family_named
from latentcache.interop.exporting import NOTE_UNKNOWN, Export, ExportCaption, ExportSample
from latentcache.interop.family_tensors import keeps_padding
from latentcache.interop.foreign_family import chosen_family
from latentcache.interop.foreign_files import corrupt, read_file, tensor_in
from latentcache.interop.foreign_safetensors import metadata_in, safetensors_bytes, tensors_in
from latentcache.interop.image_match import matched_image
from latentcache.interop.readers import (
    ForeignImage,
    ForeignItem,
    ForeignText,
    SourceImages,
    bucket_of,
    refusing,
    walked,
)
from latentcache.interop.reports import ExportReport
from latentcache.loading.cache import LatentCache
from latentcache.store.entry import dtype_name
from latentcache.types import Refusal, Size
from latentcache.utils.progress import Progress

NOTE_DERIVED = "sizes derived from the image: resized to cover the bucket, cropped in the middle"
NOTE_CONTROL = "latents of its control images are not imported"
NOTE_BUCKETS = (
    "musubi-tuner makes batches by its own buckets: where they are others than those of this cache, train with "
    "batch_size 1"
)
NOTE_FIRST = "several captions: only the first was exported"
NOTE_FLIPPED = "musubi-tuner has no flipped latents: they were not exported"

_VERSION = "1.0.1"
_DTYPE = r"(?:float32|float16|bfloat16|float8_e4m3fn|float8_e5m2)"
_LATENTS = re.compile(rf"latents_(?P<frames>\d+)x(?P<height>\d+)x(?P<width>\d+)_{_DTYPE}")
_NAME = re.compile(r"(?P<base>.+)_(?P<width>\d{4,7})x(?P<height>\d{4,7})_(?P<arch>[a-z0-9]+)\.safetensors", re.DOTALL)
_TEXT_NAME = re.compile(r"(?P<base>.+)_(?P<arch>[a-z0-9]+)_te\.safetensors", re.DOTALL)
_CLIP = re.compile(r".+_\d{5}-\d{3}(-\d+)?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one architecture's files are laid out. `name` is that in metadata; `texts` maps keys to fields."""

    family: str
    name: str
    texts: Mapping[str, str]
    is_scaled: bool = True
    draws: bool = False
    needs_control: bool = False
    """Whether musubi-tuner trains it with a control image only."""


ARCHITECTURES = {
    "fk": Architecture(
        "flux",
        "flux_kontext",
        {"t5_vec": "prompt_embeds", "clip_l_pooler": "pooled_prompt_embeds"},
        draws=True,
        needs_control=True,
    ),
    "zi": Architecture("z-image", "z_image", {"varlen_llm_embed": "prompt_embeds"}, is_scaled=False),
    "qi": Architecture("qwen-image", "qwen_image", {"varlen_vl_embed": "prompt_embeds"}),
    "kr2": Architecture("krea2", "krea2", {"varlen_krea2_vl_embed": "prompt_embeds"}),
    "wan": Architecture("wan", "wan", {"varlen_t5": "prompt_embeds"}),
}
"""By the short name in a file's name."""
_FAMILIES = {short: each.family for short, each in ARCHITECTURES.items()}


class MusubiCache:
    """The cache in musubi-tuner's `cache_directory`. `images` is the images' folder, with the caption files.

    The family follows from the files' names. Raises DatasetError for folders that cannot be read, and ConfigError for a
    `family` that is not among those that are known here, and where it is not given and the files are of several.
    """

    format = "musubi"
    declaration = None

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
        self._root = os.path.abspath(root)
        self.family = chosen_family(family, _architectures(self._root), _FAMILIES, self.format)
        self._short = next(short for short, named in _FAMILIES.items() if named == self.family)
        self._architecture = ARCHITECTURES[self._short]
        self.keeps_padding = keeps_padding(self.family)
        self._images = SourceImages(images, caption_extension=caption_extension)

    def items(self) -> Iterator[ForeignItem]:
        """Every safetensors file, in the order of names."""
        yield from self._images.refusals
        yield from walked(self._root, self._folder)

    def _folder(self, folder: str, names: list[str]) -> Iterator[ForeignItem]:
        for name in names:
            path = os.path.join(self._root, folder, name)
            if match := _TEXT_NAME.fullmatch(name):
                yield from refusing(match["base"], self._text(match["base"], match["arch"], path))
            elif match := _NAME.fullmatch(name):
                size = Size(int(match["height"]), int(match["width"]))
                yield from refusing(match["base"], self._image(match["base"], match["arch"], size, path))

    def _open(self, short: str, path: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """The tensors and metadata of a file. Raises ForeignFileRefused."""
        if short != self._short:
            detail = f"it is of the architecture {short}, not of {self._short} ({self.family})"
            raise ForeignFileRefused(path, "unsupported-format", detail)
        data = read_file(path)
        metadata = metadata_in(data, path)
        if metadata.get("architecture") != self._architecture.name:
            said = f"{metadata.get('architecture')!r:.100}"
            raise corrupt(path, f"its metadata say the architecture {said}, its name {self._architecture.name}")
        return tensors_in(data, path), metadata

    def _image(self, base: str, short: str, size: Size, path: str) -> Iterator[ForeignImage]:
        if _CLIP.fullmatch(base):
            raise ForeignFileRefused(path, "unsupported-format", "it is of a clip: images alone are imported")
        tensors, metadata = self._open(short, path)
        if not all(size):
            raise corrupt(path, f"its name says an image of {size}")
        if (metadata.get("width"), metadata.get("height")) != (str(size.width), str(size.height)):
            raise corrupt(path, f"its name says an image of {size}, its metadata another one")
        found = [name for name in tensors if _LATENTS.fullmatch(name)]
        if len(found) != 1:
            raise corrupt(path, f"it holds {len(found)} latents of the image, under names as latents_1x64x64_float32")
        latents = self._latents(tensors[found[0]], found[0], path)
        sample_id, image, matched = matched_image(self._images, base, size, path, self.format)
        others = sorted(tensors.keys() - set(found))
        note = "; ".join(filter(None, (matched, NOTE_DERIVED, _left_out(others, path))))
        geometry = fit(size, bucket_of(latents, self.family))
        architecture = self._architecture
        output: Literal["mean", "sample"] = "sample" if architecture.draws else "mean"
        yield ForeignImage(sample_id, path, image, latents, architecture.is_scaled, output, geometry, note)

    def _latents(self, value: torch.Tensor, name: str, path: str) -> torch.Tensor:
        is_video = family_named(self.family).latent.is_video
        latents = tensor_in(value, name, path, ndim=4 if is_video else 3)
        match = _LATENTS.fullmatch(name)
        assert match is not None, "it was found by this pattern"
        sides = tuple(int(match[side]) for side in ("frames", "height", "width"))
        if sides != (latents.shape[1] if is_video else 1, *latents.shape[-2:]):
            raise corrupt(path, f"{name} has the shape {list(latents.shape)}, which its name denies")
        if sides[0] != 1:
            detail = f"it has {sides[0]} latent frames: images alone are imported"
            raise ForeignFileRefused(path, "unsupported-format", detail)
        return latents

    def _text(self, base: str, short: str, path: str) -> Iterator[ForeignText]:
        tensors, metadata = self._open(short, path)
        caption = metadata.get("caption1")
        if caption is None:
            raise corrupt(path, "its metadata have no caption1, the caption")
        named = {re.sub(rf"_{_DTYPE}$", "", name): tensor for name, tensor in tensors.items()}
        texts = self._architecture.texts
        if named.keys() != texts.keys() or len(named) != len(tensors):
            raise corrupt(path, f"it holds {', '.join(sorted(tensors)) or 'nothing'}; needed are {', '.join(texts)}")
        fields = {
            field: tensor_in(named[name], name, path, ndim=None if field == "prompt_embeds" else 1)
            for name, field in texts.items()
        }
        sample_ids = self._images.with_stem(base)
        own = [self._own_caption(sample_id, caption, path) for sample_id in sample_ids]
        embeds, pooled = fields["prompt_embeds"], fields.get("pooled_prompt_embeds")
        yield ForeignText(sample_ids or (base,), path, own[0] if own else caption, embeds, pooled)

    def _own_caption(self, sample_id: str, caption: str, path: str) -> str:
        """The caption as the sample has it. Raises ForeignFileRefused if it was edited since."""
        captions, words = self._images.captions_of(sample_id), caption.split()
        own = next((each for each in captions if each.split() == words), None)
        if own is None and captions and " ".join(captions).split() != words:
            raise ForeignFileRefused(path, "changed", f"the caption of {sample_id} was edited since")
        return caption if own is None else own


read = MusubiCache


def _architectures(root: str) -> set[str]:
    """Find what the names of files in and below `root` say."""
    folders = (found for found in walk(root) if not isinstance(found, Refusal))
    matches = (_TEXT_NAME.fullmatch(name) or _NAME.fullmatch(name) for _, names in folders for name in names)
    return {match["arch"] for match in matches if match is not None}


def _left_out(names: list[str], path: str) -> str | None:
    """A note on what else a file holds. Raises ForeignFileRefused where the latents are of no plain image."""
    if odd := [name for name in names if not name.startswith("latents_control_")]:
        detail = f"it holds {', '.join(odd)}: no plain image's latent"
        raise ForeignFileRefused(path, "unsupported-format", detail)
    return NOTE_CONTROL if names else None


def export(
    cache: LatentCache,
    name: str,
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ExportReport:
    """Write musubi-tuner's files for the manifest `name` to `folder`, a `cache_directory`.

    Latents are the mean of the moments, or with `seed` a draw, and scaled where musubi-tuner has them so, in `dtype`;
    embeddings keep theirs. A sample has one caption there: its first. Files that exist are listed and not replaced,
    unless `overwrite`. FLUX.1 is trained there with one control image (Kontext): samples without are skipped, and
    listed. Raises what `Export` does.
    """
    run = Export(
        "musubi", cache, name, folder, seed=seed, overwrite=overwrite, families=_FAMILIES.values(), progress=progress
    )
    short = next(short for short, family in _FAMILIES.items() if family == run.family.name)
    architecture = ARCHITECTURES[short]
    run.takes = ("control",) if architecture.needs_control else ()
    run.report.note(NOTE_BUCKETS)
    written: dict[str, str] = {}
    for sample in run.samples():
        if why := _why_left_out(sample, written):
            run.skip(sample.sample_id, sample.path, *why)
            continue
        controls = run.parts(sample, "control") if architecture.needs_control else []
        if controls is None:
            continue
        if len(controls) != int(architecture.needs_control):
            detail = f"musubi-tuner trains {run.family.name} with one control image (Kontext): this sample has "
            run.skip(sample.sample_id, sample.path, "unsupported-format", f"{detail}{len(controls)}")
            continue
        base = Path(folder, sample.stem.name)
        height, width = sample.geometry.original_size
        tensors = {}
        for kind, latents in (("latents", sample.latents), *(("latents_control", control) for control in controls)):
            values = (run.scaling.apply(latents) if architecture.is_scaled else latents).to(dtype)
            sides = (1, *values.shape[1:]) if values.ndim == 3 else tuple(values.shape[1:])
            tensors[f"{kind}_{'x'.join(map(str, sides))}_{dtype_name(values)}"] = values
        metadata = {"width": str(width), "height": str(height)}
        path = base.with_name(f"{base.name}_{width:04d}x{height:04d}_{short}.safetensors")
        data = _file(tensors, architecture, metadata)
        run.report.num_images += run.write(path, data, sample)
        run.report.note(None if sample.flipped is None else NOTE_FLIPPED)
        _export_text(sample, base.with_name(f"{base.name}_{short}_te.safetensors"), architecture, run)
    return run.report


def _why_left_out(sample: ExportSample, written: dict[str, str]) -> tuple[str, str] | None:
    """Reason and detail of a sample that its files cannot hold. `written`: base name -> the sample that has it."""
    other = written.setdefault(sample.stem.name, sample.sample_id)
    if other != sample.sample_id:
        # Texts have no size in their names: both would be trained with one caption.
        return "duplicate", f"{other} has the same name in another folder, and one folder has the files of both"
    return None


def _export_text(sample: ExportSample, path: Path, architecture: Architecture, run: Export) -> None:
    if not sample.captions:
        return
    caption = sample.captions[0]
    if caption.text is None:
        run.report.note(NOTE_UNKNOWN)
        return
    data = _file(_text_tensors(caption, architecture), architecture, {"caption1": caption.text})
    run.report.num_texts += run.write(path, data, sample)
    run.report.note(NOTE_FIRST if len(sample.captions) > 1 else None)


def _text_tensors(caption: ExportCaption, architecture: Architecture) -> dict[str, torch.Tensor]:
    fields = {name: getattr(caption, field) for name, field in architecture.texts.items()}
    return {f"{name}_{dtype_name(tensor)}": tensor for name, tensor in fields.items()}


def _file(tensors: Mapping[str, torch.Tensor], architecture: Architecture, metadata: Mapping[str, str]) -> bytes:
    common = {"architecture": architecture.name, "format_version": _VERSION}
    return safetensors_bytes(tensors, common | dict(metadata))
