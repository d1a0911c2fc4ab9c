"""SimpleTuner's caches: VAE latents and text embeddings, as files that are named by hashes.

Latents: `<cache_dir_vae>/<sub folders of the images>/<sha256 of the image's name without suffix>.pt`, scaled: one draw
of the posterior [C, h, w], of Wan the mean [C, F, h, w]. Sizes are in `aspect_ratio_bucket_metadata_<id>.json`.
Text: `<md5 of the prompt>-<model>.pt`, a dict of prompt_embeds [1, L, ...], of SDXL and FLUX.1 pooled_prompt_embeds
[P] or [1, P], and masks [1, L]; or (older ones of SDXL, and negative prompts) a tuple of both embeds. Wan's mask is
none: it is the embeddings of the empty text, and padding is zeros. Both are `torch.save` files, or gzip of one, or (old
ones from S3) a `torch.save` file that holds the bytes of such a gzip. (Formats read in SimpleTuner bc8e6ab.)

A name gives its hash, but a hash does not give its name: so the images' folder is needed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from latentcache.config import BucketsConfig
from latentcache.dataset.buckets import fit
from latentcache.dataset.samples import walk
from latentcache.errors import ConfigError, DatasetError, ForeignFileRefused
from latentcache.families import family_named
from latentcache.interop.exporting import NOTE_UNKNOWN, Export, ExportCaption
from latentcache.interop.family_tensors import caption_rows, file_latents, image_latents, keeps_padding
from latentcache.interop.foreign_family import chosen_family
from latentcache.interop.foreign_files import (
    corrupt,
    gunzip,
    load_torch,
    read_file,
    tensor_in,
    torch_bytes,
)
from latentcache.interop.readers import (
    ForeignImage,
    ForeignItem,
    ForeignText,
    SourceImages,
    bucket_of,
    crop_fits,
    pixel_pair,
    refusing,
    walked,
)
from latentcache.interop.reports import ExportReport
from latentcache.loading.cache import LatentCache
from latentcache.types import Crop, Geometry, Refusal, Size
from latentcache.utils.progress import Progress

ARCHITECTURES = {
    "sdxl": "sdxl",
    "sd1x": "sd15",
    "flux": "flux",
    "chroma": "chroma",
    "z_image": "z-image",
    "qwen_image": "qwen-image",
    "krea2": "krea2",
    "wan": "wan",
}
"""The model in the name of a text's file -> the family. Names of latents do not say it."""
NOTE_DERIVED = "sizes derived from the image: resized to cover the bucket, cropped in the middle"
NOTE_ORDER = "the recorded sizes and crop fit as (height, width) and as (width, height): one was assumed"

NOTE_OTHER_BUCKET = (
    "another bucket than SimpleTuner makes: its training ends at a batch of several sizes; precache with "
    "`buckets.rule: simpletuner`, or give the numbers of the training with --buckets"
)
NOTE_LISTS = "delete all_vae_cache_files_<id>.json in SimpleTuner's output_dir: until then it does not see new files"
NOTE_TEXTS = "texts of this family are not exported: SimpleTuner encodes them itself"
NOTE_BUCKETS = "sizes and crops are not exported: SimpleTuner must resize and bucket the images as this cache did"

_EXPORTED_TEXTS = ("sdxl", "sd15")
_LATENT_NAME = re.compile(r"[0-9a-f]{64}\.pt")
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


def export(
    cache: LatentCache,
    name: str,
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    buckets: BucketsConfig | None = None,
    seed: int | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ExportReport:
    """Write SimpleTuner's files for the manifest `name`: `folder`/vae is a `cache_dir_vae`, `folder`/text a text cache.

    Latents are the mean of the moments, or with `seed` a draw, as SimpleTuner has it, and scaled; `dtype` is bfloat16
    or float32, since SimpleTuner refuses float16. Embeddings, of SDXL and SD 1.5 alone, keep theirs. Flipped latents,
    sizes and crops are left out. SimpleTuner does not look at the bucket of a file: the report counts the samples of
    which it would make another one (`buckets`: see `Export`). Files that are there are left alone, and listed, unless
    `overwrite`. Raises ConfigError for another dtype, and what `Export` does.
    """
    if dtype not in (torch.bfloat16, torch.float32):
        raise ConfigError(f"dtype is {dtype}; SimpleTuner reads latents of bfloat16 and float32", key="dtype")
    run = Export(
        "simpletuner",
        cache,
        name,
        folder,
        seed=seed,
        overwrite=overwrite,
        buckets=buckets,
        families=ARCHITECTURES.values(),
        progress=progress,
    )
    run.report.note(NOTE_LISTS)
    run.report.note(NOTE_BUCKETS)
    architecture = next(each for each, family in ARCHITECTURES.items() if family == run.family.name)
    takes_texts = run.family.name in _EXPORTED_TEXTS
    run.report.note(None if takes_texts else NOTE_TEXTS)
    for sample in run.samples():
        run.report.note(NOTE_OTHER_BUCKET if run.other_bucket(sample) is not None else None)
        if sample.flipped is not None:
            run.report.note("SimpleTuner has no flipped latents: they were not exported")
        latents = torch_bytes(file_latents(run.family, run.scaling.apply(sample.latents)).to(dtype))
        run.report.num_images += run.write(Path(folder, "vae", latent_name(sample.sample_id)), latents, sample)
        for caption in sample.captions if takes_texts else ():
            if caption.text is None:
                run.report.note(NOTE_UNKNOWN)
                continue
            path = Path(folder, "text", text_name(caption.text, architecture))
            if path not in run:  # a caption of several samples
                run.report.num_texts += run.write(path, _text_bytes(caption), sample)
    return run.report


def _text_bytes(caption: ExportCaption) -> bytes:
    embeds, pooled = caption.prompt_embeds[None].contiguous(), caption.pooled_prompt_embeds
    return torch_bytes(
        {"prompt_embeds": embeds} | ({} if pooled is None else {"pooled_prompt_embeds": pooled.contiguous()})
    )


def _find_metadata(images: Path, root: Path) -> Path | None:
    found = sorted({path.resolve() for folder in (images, root) for path in folder.glob(_METADATA_NAME)})
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise ConfigError(f"there are several metadata files ({names}); name the one of this dataset", key="metadata")
    return found[0] if found else None


def _payload(path: str) -> Any:
    """The file's content: a `torch.save` file, a gzip of one, or one that holds such a gzip. ForeignFileRefused."""
    data = read_file(path)
    content = data if data.startswith(b"\x1f\x8b") else load_torch(data, path)
    return load_torch(gunzip(content, path), path) if isinstance(content, bytes) else content


class SimpleTunerCache:
    """The cache of the folder `images`, of which `root` is `cache_dir_vae`; `root` may hold the text cache too.

    `text_cache` is the text cache's folder if it is elsewhere. `metadata` is `aspect_ratio_bucket_metadata_<id>.json`;
    by default the only one in the images' folder or in `root`. Without one the sizes are derived from the images.
    `captions` are prompts beyond those of the caption files. `recorded_root` is where the images were when the cache
    was made, if they were moved since. The family follows from the names of texts. Raises DatasetError for folders that
    cannot be read, and ConfigError if there are several metadata files, for a `family` that is not among those that are
    known here, and where it is not given and there are texts of several.
    """

    format = "simpletuner"
    declaration = None

    def __init__(
        self,
        root: str | Path,
        *,
        images: str | Path,
        text_cache: str | Path | None = None,
        metadata: str | Path | None = None,
        caption_extension: str = ".txt",
        captions: Iterable[str] = (),
        recorded_root: str | None = None,
        family: str | None = None,
    ):
        self._images = SourceImages(
            images, caption_extension=caption_extension, captions=captions, recorded_root=recorded_root
        )
        found = Path(metadata) if metadata is not None else _find_metadata(Path(images), Path(root))
        self._sizes = RecordedSizes({}) if found is None else RecordedSizes.read(found, self._images)
        self._folders = [os.path.abspath(folder) for folder in (root, text_cache) if folder is not None]
        named = set().union(*map(_architectures, self._folders)) if family is None else set()
        self.family = chosen_family(family, named, ARCHITECTURES, self.format)
        self._architecture = next(each for each, known in ARCHITECTURES.items() if known == self.family)
        self._family, self.keeps_padding = family_named(self.family), keeps_padding(self.family)

    def items(self) -> Iterator[ForeignItem]:
        """Images in the order of their samples, then texts, then files that belong to no sample, as refusals."""
        yield from self._images.refusals
        used: set[str] = set()
        yield from self._latents(used)
        yield from self._texts(used)
        for folder in self._folders:
            yield from walked(folder, partial(self._unknown, used, folder))

    def _latents(self, used: set[str]) -> Iterator[ForeignItem]:
        samples_of: dict[str, list[str]] = {}
        for sample_id in self._images:
            samples_of.setdefault(os.path.join(self._folders[0], latent_name(sample_id)), []).append(sample_id)
        for path, sample_ids in samples_of.items():
            if not os.path.lexists(path):
                continue
            used.add(path)
            if len(sample_ids) == 1:
                yield from refusing(sample_ids[0], self._latent(sample_ids[0], path))
            else:
                detail = f"it may be of any of {', '.join(sample_ids)}: they have the same stem"
                yield Refusal(sample_ids[0], path, "duplicate", detail)

    def _latent(self, sample_id: str, path: str) -> Iterator[ForeignImage]:
        latents = image_latents(self._family, _payload(path), path)
        size, bucket = self._images.size(sample_id), bucket_of(latents, self.family)
        geometry, note = self._sizes.geometry(sample_id, size, bucket, path)
        image = self._images.path(sample_id)
        output: Literal["mean", "sample"] = "mean" if self._family.has_clips else "sample"
        yield ForeignImage(sample_id, path, image, latents, True, output, geometry, note)

    def _texts(self, used: set[str]) -> Iterator[ForeignItem]:
        for caption, sample_ids in self._images.captions():
            paths = [os.path.join(folder, text_name(caption, self._architecture)) for folder in self._folders]
            path = next((path for path in paths if path not in used and os.path.lexists(path)), None)
            if path is not None:
                used.add(path)
                yield from refusing(sample_ids[0] if sample_ids else "", self._text(sample_ids, path, caption))

    def _text(self, sample_ids: tuple[str, ...], path: str, caption: str) -> Iterator[ForeignText]:
        """The embeddings of either payload. Raises ForeignFileRefused."""
        content, fields = _payload(path), self._family.fields
        if isinstance(content, tuple) and len(content) == len(fields) == 2:
            content = dict(zip(fields, content, strict=True))
        if not isinstance(content, dict) or not fields.keys() <= content.keys():
            raise corrupt(path, f"it holds a {type(content).__name__} that is no prompt's embeddings")
        num_dimensions = 2 + len(fields["prompt_embeds"].features)
        embeds = tensor_in(content["prompt_embeds"], "prompt_embeds", path, ndim=num_dimensions)
        mask = None if self.family == "wan" else content.get("attention_masks", content.get("attention_mask"))
        pooled = content.get("pooled_prompt_embeds") if "pooled_prompt_embeds" in fields else None
        if pooled is not None:
            pooled = tensor_in(pooled, "pooled_prompt_embeds", path, ndim=getattr(pooled, "ndim", 1))
            if pooled.ndim not in (1, 2) or (pooled.ndim == 2 and len(pooled) != 1):
                raise corrupt(path, f"its pooled_prompt_embeds are {list(pooled.shape)}; one prompt has [P]")
            pooled = pooled.flatten()
        yield ForeignText(sample_ids, path, caption, caption_rows(self._family, embeds, mask, path), pooled)

    def _unknown(self, used: set[str], root: str, folder: str, names: list[str]) -> Iterator[Refusal]:
        """The files of a folder that belong to no sample."""
        for name in names:
            path, text = os.path.join(root, folder, name), _TEXT_NAME.fullmatch(name)
            if path in used or (text is None and not _LATENT_NAME.fullmatch(name)):
                continue
            used.add(path)
            if text is not None and text["arch"] != self._architecture:
                detail = f"it is a text of {text['arch']}, not of {self._architecture} ({self.family})"
                yield Refusal("", path, "unsupported-format", detail)
            elif text is not None:
                yield Refusal("", path, "missing", "no caption has this hash: edited since, or a validation prompt")
            else:
                yield Refusal("", path, "missing", "no image's name has this hash: renamed, removed, or elsewhere")


read = SimpleTunerCache


def _architectures(root: str) -> set[str]:
    """The models that the names of texts in and below `root` say."""
    folders = (found for found in walk(root) if not isinstance(found, Refusal))
    matches = (_TEXT_NAME.fullmatch(name) for _, names in folders for name in names)
    return {match["arch"] for match in matches if match is not None}


class RecordedSizes:
    """`aspect_ratio_bucket_metadata_<id>.json`: original, intermediary and target size, and crop, of each image.

    The format does not say which of two numbers is the height. It follows from the image, the latents and the room
    for the crop; a record that fits in neither order is refused.
    """

    def __init__(self, records: Mapping[str, Any]):
        """`records`: by sample_id."""
        self._records = {sample_id: _pairs(record) for sample_id, record in records.items()}
        # Whether crops and sizes have opposite orders, by the records that fit in one order only; None: unknown.
        votes = {vote for pairs in self._records.values() if pairs and (vote := _crossed(pairs)) is not None}
        self._crossed = votes.pop() if len(votes) == 1 else None

    @classmethod
    def read(cls, path: Path, images: SourceImages) -> RecordedSizes:
        """Raises DatasetError. Records of images that are not there are left out."""
        try:
            content = json.loads(read_file(path, _MAX_METADATA_BYTES))
        except (ValueError, RecursionError) as error:
            detail = f"is no JSON document: {error}; leave it out to derive sizes from images"
            raise DatasetError(path, detail) from error
        if not isinstance(content, dict):
            raise DatasetError(path, f"holds a {type(content).__name__}; it must map image paths to their sizes")
        found = ((images.find(recorded), record) for recorded, record in content.items())
        return cls({sample_id: record for sample_id, record in found if sample_id is not None})

    def geometry(self, sample_id: str, size: Size, target: Size, path: str) -> tuple[Geometry, str | None]:
        """The geometry of a latent for `target`, made from an image of `size`, and a note on what was derived.

        Raises ForeignFileRefused if the record does not fit: the image was replaced, or the latent is an old one.
        """
        if sample_id not in self._records:
            return fit(size, target), NOTE_DERIVED
        pairs = self._records[sample_id]
        if pairs is None:
            raise corrupt(path, f"the metadata of {sample_id} has no sizes and crop in integers")
        original, resized, recorded_target, crop = pairs
        if tuple(size) not in (original, original[::-1]):
            detail = f"the image is {size} now, but was {original[0]}x{original[1]} (in either order)"
            raise ForeignFileRefused(path, "changed", detail)
        found: dict[Geometry, bool] = {}
        for turn in (1, -1):
            if original[::turn] != tuple(size) or recorded_target[::turn] != tuple(target):
                continue
            for crossed in (False, True):
                top_left = Crop(*crop[:: -turn if crossed else turn])
                geometry = Geometry(size, Size(*resized[::turn]), top_left, target)
                if crop_fits(geometry):
                    found.setdefault(geometry, crossed)
        if not found:
            raise corrupt(path, f"the metadata of {sample_id} does not fit a latent for {target} of an image of {size}")
        likely = [geometry for geometry, crossed in found.items() if crossed == self._crossed] or list(found)
        return likely[0], NOTE_ORDER if len(likely) > 1 else None


def _crossed(pairs: list[tuple[int, int]]) -> bool | None:
    """Whether the crop has the opposite order of the sizes, by its room; None if it fits in both orders, or none."""
    _, resized, target, crop = pairs
    straight, crossed = (
        all(start + side <= whole for start, side, whole in zip(starts, target, resized, strict=True))
        for starts in (crop, crop[::-1])
    )
    return crossed if straight != crossed else None


def _pairs(record: Any) -> list[tuple[int, int]] | None:
    """original_size, intermediary_size, target_size and crop_coordinates in the record's own order."""
    names = {"original_size": 1, "intermediary_size": 1, "target_size": 1, "crop_coordinates": 0}
    values = record if isinstance(record, dict) else {}
    pairs = [pixel_pair(values.get(name), least) for name, least in names.items()]
    found = [pair for pair in pairs if pair is not None]
    return found if len(found) == len(names) else None
