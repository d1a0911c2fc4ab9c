"""ai-toolkit's caches: safetensors files in the folders `_latent_cache` and `_t_e_cache`, next to the images.

Latents: `<stem>_<hash>.safetensors`, tensor `latent` [C, h, w], of Wan [C, F, h, w]: one draw, scaled. The file's
metadata are the facts that are hashed: the image's name, the size that it was scaled to, the crop, flips, the model.
ai-toolkit mirrors an image before it scales and crops; a `Geometry` crops before, so that its crop is mirrored here.
Text: `<stem>_<hash>.safetensors` (`ai_toolkit_texts`), mostly without metadata. What is hashed is the caption as it was
encoded, the whole caption file with the trigger word in it, and the model. With caption dropout each image has a second
text, of the trigger word alone or of nothing, which stands for the dropped caption.

A hash is the MD5 of sorted JSON, in URL-safe base64 without padding. (Read in ai-toolkit, which has the MIT license.)
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from latentcache.config import BucketsConfig
from latentcache.dataset.samples import MAX_CAPTION_BYTES, walk
from latentcache.errors import ForeignFileRefused
from latentcache.families import family_named
from latentcache.interop.exporting import NOTE_UNKNOWN, Export, ExportSample
from latentcache.interop.family_tensors import file_latents, image_latents, keeps_padding
from latentcache.interop.foreign_family import chosen_family
from latentcache.interop.foreign_files import corrupt, read_file
from latentcache.interop.foreign_safetensors import metadata_in, metadata_of, safetensors_bytes, tensors_in
from latentcache.interop.formats.ai_toolkit_texts import WHY_NOT, read_text, text_bytes
from latentcache.interop.readers import (
    ForeignImage,
    ForeignItem,
    ForeignText,
    SourceImages,
    crop_fits,
    is_pixels,
    refusing,
    walked,
)
from latentcache.interop.reports import ExportReport
from latentcache.loading.cache import LatentCache
from latentcache.types import Crop, Geometry, Refusal, Size
from latentcache.utils.progress import Progress

LATENT_FOLDER, TEXT_FOLDER = "_latent_cache", "_t_e_cache"
ARCHITECTURES = {
    "sdxl": "sdxl",
    **dict.fromkeys(("sd15", "sd1"), "sd15"),
    **dict.fromkeys(("flux1", "flux_kontext"), "flux"),
    "chroma": "chroma",
    "zimage": "z-image",
    "qwen_image": "qwen-image",
    "krea2": "krea2",
    **dict.fromkeys(("wan21", "wan22_14b"), "wan"),
}
"""ai-toolkit's word for a latent space -> the family. An export has the family's first."""
NOTE_DROPPED = "it stands for dropped captions, and is left out: precache caches the empty caption for that"
NOTE_LINES = (
    "several captions, which ai-toolkit encodes as one: to export that, precache with source.caption_lines: joined"
)
NOTE_PLACEHOLDER = "the caption holds [trigger] or [name], for which ai-toolkit encodes its trigger word"
NOTE_NO_IMAGE = "the image is not there: the size that it was scaled to stands for its own"
NOTE_UNUSUAL = (
    "ai-toolkit makes another bucket, or resizes or crops otherwise: it does not find the latent, and encodes it "
    "again; precache with `buckets.rule: ai-toolkit`"
)

_PLACEHOLDERS = ("[name]", "[trigger]")
_VERSION = 1
_SUFFIX = ".safetensors"
_NOT_HASHED = ("software", "format")
_STRINGS = ("filename", "latent_space_version")
_SIDES = ("scale_to_height", "scale_to_width", "crop_height", "crop_width")
_STARTS = ("crop_y", "crop_x")
_KNOWN = {*_STRINGS, *_SIDES, *_STARTS, "latent_version", "flip_x", "flip_y", "cache_tensors_to_disk"}
_TAIL = len("_") + 22 + len(_SUFFIX)
"""Characters of a name after the image's stem: 16 bytes are 22 characters of base64."""
_SLACK = 2
"""Pixels by which the scaled size may miss the computed one: ai-toolkit rounds up, after an optional factor."""


def export(  # noqa: PLR0913 - the options of the format, by keyword
    cache: LatentCache,
    name: str,
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    buckets: BucketsConfig | None = None,
    seed: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    caption_extension: str = ".txt",
) -> ExportReport:
    """Write ai-toolkit's files for the manifest `name` below `folder`: the images' own folder, or a copy of its layout.

    Latents are the mean of the moments, or with `seed` a draw, as ai-toolkit has it, and scaled, in `dtype`; embeddings
    keep theirs. ai-toolkit encodes a whole caption file as one text, and the text's name follows
    from that file, line ends included: a text is exported only for samples with one caption. ai-toolkit uses a latent
    only if its own buckets, which round sizes up, give the image the same size and crop; the report counts the others.
    Files that exist are listed and not replaced, unless `overwrite`. Raises what `Export` does.
    """
    run = Export(
        "ai-toolkit",
        cache,
        name,
        folder,
        seed=seed,
        overwrite=overwrite,
        buckets=buckets,
        families=ARCHITECTURES.values(),
        progress=progress,
    )
    family, (space, *others) = run.family, _spaces(run.family.name)
    run.report.note(f"the names are those for {space}: {', '.join(others)} does not find them" if others else None)
    run.report.note(f"texts are not exported: {WHY_NOT[family.name]}" if family.name in WHY_NOT else None)
    for sample in run.samples():
        base = Path(folder, sample.stem)
        try:
            sample.sample_id.encode()
        except UnicodeEncodeError:
            detail = "its name is not UTF-8, as the metadata of a safetensors file must be"
            run.skip(sample.sample_id, sample.path, "unreadable", detail)
            continue
        run.report.note(NOTE_UNUSUAL if run.other_bucket(sample, exact=True) is not None else None)
        for geometry, latents in ((sample.geometry, sample.latents), (sample.flipped_geometry, sample.flipped)):
            if latents is None or geometry is None:
                continue
            facts = _facts_of(PurePosixPath(sample.sample_id).name, geometry, space)
            scaled = file_latents(family, run.scaling.apply(latents)).to(dtype)
            data = safetensors_bytes({"latent": scaled}, _metadata(facts))
            run.report.num_images += run.write(base.parent / LATENT_FOLDER / latent_name(facts), data, sample)
        if family.name not in WHY_NOT:
            _export_text(sample, base, run, caption_extension)
    return run.report


def _export_text(sample: ExportSample, base: Path, run: Export, caption_extension: str) -> None:
    if len(sample.captions) != 1:
        run.report.note(NOTE_LINES)
        return
    (caption,) = sample.captions
    if caption.text is None:
        run.report.note(NOTE_UNKNOWN)
        return
    caption_file = os.path.splitext(sample.path)[0] + caption_extension
    try:
        text = _caption_text(caption_file) if os.path.lexists(caption_file) else caption.text
    except ForeignFileRefused as error:
        run.skip(sample.sample_id, error.path, error.reason, error.detail)
        return
    if text.split() != caption.text.split():
        run.report.note("the caption file was edited since: its text is not in the cache")
        return
    if any(placeholder in text for placeholder in _PLACEHOLDERS):
        run.report.note(NOTE_PLACEHOLDER)
        return
    name = text_name(base.name, _encoded(text, None), _spaces(run.family.name)[0])
    path = base.parent / TEXT_FOLDER / name
    if path in run:
        return  # an image with the same stem has it
    run.report.num_texts += run.write(path, text_bytes(run.family, caption), sample)


def _spaces(family: str) -> list[str]:
    """ai-toolkit's words for the latent spaces of a family."""
    return [space for space, named in ARCHITECTURES.items() if named == family]


def _facts_of(filename: str, geometry: Geometry, space: str) -> dict[str, Any]:
    """The facts about a latent: their hash is in its file's name."""
    (top, left), resized, target = geometry.crop_top_left, geometry.resized_size, geometry.target_size
    facts: dict[str, Any] = {
        "filename": filename,
        "scale_to_width": resized.width,
        "scale_to_height": resized.height,
        "crop_x": resized.width - target.width - left if geometry.flip else left,
        "crop_y": top,
        "crop_width": target.width,
        "crop_height": target.height,
        "latent_space_version": space,
        "latent_version": _VERSION,
    }
    return facts | {"flip_x": True} if geometry.flip else facts


def _metadata(facts: Mapping[str, Any]) -> dict[str, str]:
    strings = {name: value if isinstance(value, str) else json.dumps(value) for name, value in facts.items()}
    return strings | {"software": json.dumps({"name": "latentcache"}), "format": "pt"}


def latent_name(facts: Mapping[str, Any]) -> str:
    """The file's name for the facts about a latent, in its `_latent_cache` folder."""
    return _name(os.path.splitext(facts["filename"])[0], facts)


def text_name(stem: str, caption: str, space: str = "sdxl") -> str:
    """The file's name for the caption of the image with this stem, in its `_t_e_cache` folder.

    `space` is the word for the model's latents. Texts have the same, but for FLUX.1.
    """
    space = "flux" if space == "flux1" else space
    facts = {"caption": caption, "text_embedding_space_version": space, "text_embedding_version": _VERSION}
    return _name(stem, facts)


def _name(stem: str, facts: Mapping[str, Any]) -> str:
    document = json.dumps(facts, sort_keys=True).encode()
    code = base64.urlsafe_b64encode(hashlib.md5(document, usedforsecurity=False).digest()).decode().rstrip("=")
    return f"{stem}_{code}{_SUFFIX}"


def _caption_text(path: str) -> str:
    """All of a caption file. Raises ForeignFileRefused."""
    try:
        text = read_file(path, MAX_CAPTION_BYTES).decode()
    except UnicodeDecodeError as error:
        raise ForeignFileRefused(path, "bad-caption", f"it is not UTF-8: {error}") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _encoded(text: str, trigger: str | None) -> str:
    """What ai-toolkit makes of a caption: a space after every comma, and no placeholders."""
    text = ", ".join(text.split(","))
    for placeholder in _PLACEHOLDERS:
        text = text.replace(placeholder, trigger or "")
    return text


def _facts(data: bytes, path: str) -> dict[str, Any]:
    """The metadata of a latent's file, with numbers as numbers. Raises ForeignFileRefused."""
    metadata = metadata_in(data, path)
    if not metadata:
        raise corrupt(path, "it has no metadata, from which sizes and crop would follow")
    try:
        return {
            name: value if name in _STRINGS else json.loads(value)
            for name, value in metadata.items()
            if name not in _NOT_HASHED
        }
    except (ValueError, RecursionError) as error:
        raise corrupt(path, f"its metadata cannot be read: {error}") from error


def _check_facts(facts: Mapping[str, Any], family: str, path: str) -> None:
    """Raises ForeignFileRefused unless they describe one image of `family`, and the file's name follows from them."""
    if unknown := sorted(facts.keys() - _KNOWN):
        raise corrupt(path, f"its metadata has {', '.join(unknown)}: no plain image's latent")
    space, version = facts.get("latent_space_version"), facts.get("latent_version")
    if ARCHITECTURES.get(str(space)) != family or version != _VERSION:
        detail = f"its latent is of {space!r}, version {version!r}; not of {family}, version {_VERSION}"
        raise ForeignFileRefused(path, "unsupported-format", detail)
    for name in (*_SIDES, *_STARTS):
        if not is_pixels(facts.get(name), 1 if name in _SIDES else 0):
            raise corrupt(path, f"its {name} is {facts.get(name)!r}, which is no number of pixels")
    if facts.get("filename") in (None, "", ".", "..") or "/" in facts["filename"]:
        raise corrupt(path, f"its filename is {facts.get('filename')!r}, which names no file")
    if latent_name(facts) != os.path.basename(path):
        detail = "its name does not follow from its metadata: it was renamed, or is of another version"
        raise ForeignFileRefused(path, "changed", detail)
    if facts.get("flip_y", False):
        raise corrupt(path, "it is upside down (flip_y), which no geometry here says")


def _geometry(facts: Mapping[str, Any], size: Size | None, path: str) -> Geometry:
    """The geometry of a latent. `size` is the image's, if it is there. Raises ForeignFileRefused."""
    resized = Size(facts["scale_to_height"], facts["scale_to_width"])
    target = Size(facts["crop_height"], facts["crop_width"])
    top, left = facts["crop_y"], facts["crop_x"]
    if not crop_fits(Geometry(resized, resized, Crop(top, left), target)):
        raise corrupt(path, f"its crop of {target} at {(top, left)} leaves the image of {resized}")
    if size is not None:
        # By the side that must be enlarged most, as in ai-toolkit.
        scale = max(target.height / size.height, target.width / size.width)
        if any(abs(side * scale - there) > _SLACK for side, there in zip(size, resized, strict=True)):
            detail = f"the image is {size} now, which is not scaled to {resized} for {target}: it was replaced"
            raise ForeignFileRefused(path, "changed", detail)
    flip = facts.get("flip_x", False) is True
    left = resized.width - target.width - left if flip else left
    return Geometry(size or resized, resized, Crop(top, left), target, flip)


class AiToolkitCache:
    """The caches in and below the images' folder `root`. `trigger` is the trigger word of the run that made them.

    The family follows from the latents' metadata. Raises DatasetError if the folder cannot be read, and ConfigError for
    a `family` that is not among those that are known here, and where it is not given and there are several.
    """

    format = "ai-toolkit"
    declaration = None

    def __init__(
        self,
        root: str | Path,
        *,
        caption_extension: str = ".txt",
        trigger: str | None = None,
        family: str | None = None,
    ):
        self._root, self._images = os.path.abspath(root), SourceImages(root, caption_extension=caption_extension)
        self._caption_extension, self._trigger = caption_extension, trigger
        found = _spaces_below(self._root) if family is None else set()
        self.family = chosen_family(family, found, ARCHITECTURES, self.format)
        self.keeps_padding, self._family = keeps_padding(self.family), family_named(self.family)

    def items(self) -> Iterator[ForeignItem]:
        """Folder by folder, in the order of names."""
        yield from self._images.refusals
        yield from walked(self._root, self._folder)

    def _folder(self, folder: str, names: list[str]) -> Iterator[ForeignItem]:
        parent, _, last = folder.rpartition("/")
        for name in names:
            path = os.path.join(self._root, folder, name)
            stem = f"{parent}/{name[:-_TAIL]}".lstrip("/")
            if name.endswith(_SUFFIX) and last == LATENT_FOLDER:
                yield from refusing(stem, self._image(parent, path))
            elif name.endswith(_SUFFIX) and last == TEXT_FOLDER:
                yield from refusing(stem, self._text(stem, path))

    def _image(self, folder: str, path: str) -> Iterator[ForeignImage]:
        data = read_file(path)
        facts = _facts(data, path)
        _check_facts(facts, self.family, path)
        sample_id = f"{folder}/{facts['filename']}".lstrip("/")
        image, size = self._images.image(sample_id)
        geometry = _geometry(facts, size, path)
        latents = image_latents(self._family, tensors_in(data, path).get("latent"), path)
        note = NOTE_NO_IMAGE if image is None else None
        yield ForeignImage(sample_id, path, image, latents, True, "sample", geometry, note)

    def _text(self, stem: str, path: str) -> Iterator[ForeignText]:
        """The text of the images with this stem, the sample_id without suffix: they share their caption."""
        sample_ids = self._images.with_stem(stem)
        if not sample_ids:
            raise ForeignFileRefused(path, "missing", "there is no image of this name next to its folder")
        name, image_stem, spaces = os.path.basename(path), os.path.basename(stem), _spaces(self.family)
        encoded = self._encoded_captions(stem)
        made = ((each, drop) for each, drop in encoded if name in {text_name(image_stem, each, one) for one in spaces})
        match = next(made, None)
        if match is None:
            detail = "its name does not follow from the caption: edited since, or made with a trigger word (--trigger)"
            raise ForeignFileRefused(path, "missing", detail)
        embeds, pooled = read_text(self._family, tensors_in(read_file(path), path), path)
        caption, is_dropped = " ".join(match[0].split()), match[1]
        own = next((own for own in self._images.captions_of(sample_ids[0]) if " ".join(own.split()) == caption), None)
        # The embedding that stands for a dropped caption is not one of the sample's captions.
        captioned, note = ((), NOTE_DROPPED) if is_dropped and own is None else (sample_ids, None)
        yield ForeignText(captioned, path, caption if own is None else own, embeds, pooled, note)

    def _encoded_captions(self, stem: str) -> Iterator[tuple[str, bool]]:
        """What ai-toolkit may have encoded for a sample, and whether that stands for its dropped caption.

        It encodes the whole caption file; a trigger word that is not in the caption goes before it.
        """
        path = os.path.join(self._root, stem + self._caption_extension)
        text = _caption_text(path) if os.path.lexists(path) else ""
        for base, is_dropped in ((text, False), (text.strip(), False), ("", bool(text.strip()))):
            for trigger in dict.fromkeys((self._trigger, None)):
                caption = _encoded(base, trigger)
                if trigger and trigger not in caption:
                    yield f"{trigger} {caption}", is_dropped
                yield caption, is_dropped


def _spaces_below(root: str) -> set[str]:
    """The words for latent spaces in the metadata of files in and below `root`."""
    found = set()
    for each in walk(root):
        if isinstance(each, Refusal) or PurePosixPath(each[0]).name != LATENT_FOLDER:
            continue
        for name in each[1]:
            with suppress(ForeignFileRefused):  # `items` refuses it
                found.add(metadata_of(os.path.join(root, each[0], name)).get("latent_space_version", ""))
    return found


read = AiToolkitCache
