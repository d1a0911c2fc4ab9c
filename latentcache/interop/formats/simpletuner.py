"""SimpleTuner's caches for SDXL: VAE latents and text embeddings, as files that are named by hashes.

Latents: `<cache_dir_vae>/<sub folders of the images>/<sha256 of the image's name without suffix>.pt`, one draw of the
posterior [4, h, w], multiplied by the VAE's scaling factor. Sizes are in `aspect_ratio_bucket_metadata_<id>.json`.
Text: `<md5 of the prompt>-sdxl.pt`, a dict or (older, and negative prompts) a tuple of prompt_embeds [1, 77, 2048] and
the pooled embeds [1280] or [1, 1280]. Both are `torch.save` files, or gzip of one, or (old ones from S3) a `torch.save`
file that holds the bytes of such a gzip.

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
from typing import Any

import torch

from latentcache.bucket_config import BucketsConfig
from latentcache.dataset.buckets import fit
from latentcache.errors import ConfigError, DatasetError, ForeignFileRefused
from latentcache.families import DEFAULT
from latentcache.families.sdxl import SCALING_FACTOR
from latentcache.interop.exporting import Export
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

NOTE_DERIVED = "sizes derived from the image: resized to cover the bucket, cropped in the middle"
NOTE_ORDER = "the recorded sizes and crop fit as (height, width) and as (width, height): one was assumed"

NOTE_OTHER_BUCKET = (
    "another bucket than SimpleTuner makes: its training ends at a batch of several sizes; precache with "
    "`buckets.rule: simpletuner`, or give the numbers of the training with --buckets"
)
NOTE_LISTS = "delete all_vae_cache_files_<id>.json in SimpleTuner's output_dir: until then it does not see new files"
NOTE_BUCKETS = "sizes and crops are not exported: SimpleTuner must resize and bucket the images as this cache did"

_LATENT_NAME = re.compile(r"[0-9a-f]{64}\.pt")
_TEXT_NAME = re.compile(r"[0-9a-f]{32}-sdxl\.pt")
_METADATA_NAME = "aspect_ratio_bucket_metadata_*.json"
_MAX_METADATA_BYTES = 1 << 30


def latent_name(sample_id: str) -> str:
    """The file of an image's latent, relative to the VAE cache's folder."""
    folder, _, name = sample_id.rpartition("/")
    stem = os.path.splitext(name)[0].encode("utf-8", "surrogateescape")
    return f"{folder}/{hashlib.sha256(stem).hexdigest()}.pt".lstrip("/")


def text_name(caption: str) -> str:
    """The file of a prompt's embeddings, relative to the text cache's folder."""
    return f"{hashlib.md5(caption.encode(), usedforsecurity=False).hexdigest()}-sdxl.pt"


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

    Latents are the mean of the moments, or with `seed` a draw, as SimpleTuner has it, and multiplied by the scaling
    factor; `dtype` is bfloat16 or float32, since SimpleTuner refuses float16. Embeddings keep theirs. Flipped latents,
    sizes and crops are left out. SimpleTuner does not look at the bucket of a file: the report counts the samples of
    which it would make another one (`buckets`: see `Export`). Files that are there are left alone, and listed, unless
    `overwrite`. Raises ConfigError for another dtype, and what `Export` does.
    """
    if dtype not in (torch.bfloat16, torch.float32):
        raise ConfigError(f"dtype is {dtype}; SimpleTuner reads latents of bfloat16 and float32", key="dtype")
    run = Export("simpletuner", cache, name, folder, seed=seed, overwrite=overwrite, buckets=buckets, progress=progress)
    run.report.note(NOTE_LISTS)
    run.report.note(NOTE_BUCKETS)
    for sample in run.samples():
        run.report.note(NOTE_OTHER_BUCKET if run.other_bucket(sample) is not None else None)
        if sample.flipped is not None:
            run.report.note("SimpleTuner has no flipped latents: they were not exported")
        latents = torch_bytes((sample.latents * SCALING_FACTOR).to(dtype))
        run.report.num_images += run.write(Path(folder, "vae", latent_name(sample.sample_id)), latents, sample)
        for caption in sample.captions:
            path = Path(folder, "text", text_name(caption.text))
            if path in run:
                continue  # a caption of several samples
            pooled = caption.pooled_prompt_embeds
            assert pooled is not None, "SDXL has pooled embeddings"
            embeds = {
                "prompt_embeds": caption.prompt_embeds[None].contiguous(),
                "pooled_prompt_embeds": pooled.contiguous(),
            }
            run.report.num_texts += run.write(path, torch_bytes(embeds), sample)
    return run.report


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
    was made, if they were moved since. Raises DatasetError for folders that cannot be read, and ConfigError if there
    are several metadata files.
    """

    format = "simpletuner"
    family: str = DEFAULT
    keeps_padding = True
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
    ):
        self._images = SourceImages(
            images, caption_extension=caption_extension, captions=captions, recorded_root=recorded_root
        )
        found = Path(metadata) if metadata is not None else _find_metadata(Path(images), Path(root))
        self._sizes = RecordedSizes({}) if found is None else RecordedSizes.read(found, self._images)
        self._folders = [os.path.abspath(folder) for folder in (root, text_cache) if folder is not None]

    def items(self) -> Iterator[ForeignItem]:
        """Images in the order of their samples, then texts, then files that belong to no sample, as refusals."""
        yield from self._images.refusals
        used: set[str] = set()
        yield from self._latents(used)
        yield from self._texts(used)
        for folder in self._folders:
            yield from walked(folder, partial(_unknown, used, folder))

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
        latents = tensor_in(_payload(path), "the latent", path, ndim=3)
        geometry, note = self._sizes.geometry(sample_id, self._images.size(sample_id), bucket_of(latents), path)
        image = self._images.path(sample_id)
        yield ForeignImage(sample_id, path, image, latents, True, "sample", geometry, note)

    def _texts(self, used: set[str]) -> Iterator[ForeignItem]:
        for caption, sample_ids in self._images.captions():
            paths = [os.path.join(folder, text_name(caption)) for folder in self._folders]
            path = next((path for path in paths if path not in used and os.path.lexists(path)), None)
            if path is not None:
                used.add(path)
                yield from refusing(sample_ids[0] if sample_ids else "", _text(sample_ids, path, caption))


read = SimpleTunerCache


def _text(sample_ids: tuple[str, ...], path: str, caption: str) -> Iterator[ForeignText]:
    """The embeddings of either payload. Raises ForeignFileRefused."""
    content = _payload(path)
    if isinstance(content, dict) and {"prompt_embeds", "pooled_prompt_embeds"} <= content.keys():
        embeds, pooled = content["prompt_embeds"], content["pooled_prompt_embeds"]
    elif isinstance(content, tuple) and len(content) == 2:
        embeds, pooled = content
    else:
        raise corrupt(path, f"it holds a {type(content).__name__} that is no prompt's embeddings")
    embeds = tensor_in(embeds, "prompt_embeds", path, ndim=3)
    pooled = tensor_in(pooled, "pooled_prompt_embeds", path, ndim=getattr(pooled, "ndim", 1))
    if embeds.shape[0] != 1 or pooled.ndim not in (1, 2) or (pooled.ndim == 2 and pooled.shape[0] != 1):
        shapes = f"{list(embeds.shape)} and {list(pooled.shape)}"
        raise corrupt(path, f"it holds {shapes}; one prompt has [1, T, D] and [P]")
    yield ForeignText(sample_ids, path, caption, embeds[0], pooled.flatten())


def _unknown(used: set[str], root: str, folder: str, names: list[str]) -> Iterator[Refusal]:
    """The files of a folder that belong to no sample."""
    for name in names:
        path = os.path.join(root, folder, name)
        if path in used:
            continue
        if _LATENT_NAME.fullmatch(name):
            used.add(path)
            yield Refusal("", path, "missing", "no image's name has this hash: renamed, removed, or elsewhere")
        elif _TEXT_NAME.fullmatch(name):
            used.add(path)
            yield Refusal("", path, "missing", "no caption has this hash: edited since, or a validation prompt")


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
