"""Datasets of several families with all that samples may have, each cached by a real run with the tiny model."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from helpers.photo_files import write_photo
from helpers.tiny_models import tiny_folder
from PIL import Image

from latentcache.config import Config
from latentcache.config_file import parse_config
from latentcache.precache.run import run_precache
from latentcache.store.base import Store

SIZES = ((64, 96), (96, 64), (64, 96))
TEXTS = ("cat", "a red cat on the table", "a photograph of two small cats, one asleep, in warm evening light")
MINIMAL_IMAGES = {"min_side": 8}


def photo(seed: int, size: tuple[int, int]) -> Image.Image:
    small = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((size[1], size[0]), Image.Resampling.BICUBIC)


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def mask(seed: int, size: tuple[int, int]) -> Image.Image:
    return Image.fromarray(np.random.default_rng(50 + seed).integers(0, 256, size, dtype=np.uint8))


def edit_pairs(folder: Path) -> dict[str, Any]:
    """A folder: each image has a control image of another shape and a mask, and is mirrored. One has two captions."""
    for number, (size, text) in enumerate(zip(SIZES, TEXTS, strict=True)):
        write_photo(folder / f"after/{number}.png", number, size).with_suffix(".txt").write_text(text)
        write_photo(folder / f"before/{number}.png", 20 + number, (80, 80))
        (folder / "masks").mkdir(exist_ok=True)
        mask(number, size).save(folder / f"masks/{number}.png")
    (folder / "after/0.txt").write_text(f"{TEXTS[0]}\na kitten")
    source = {"path": folder / "after"}
    return {
        "source": source,
        "flip": True,
        "control": {"path": folder / "before"},
        "mask": {"path": folder / "masks"},
    }


def masked_table(folder: Path) -> dict[str, Any]:
    """A parquet file with a column of masks."""
    rows = [
        {"image": png(photo(number, size)), "mask": png(mask(number, size)), "text": text}
        for number, (size, text) in enumerate(zip(SIZES, TEXTS, strict=True))
    ]
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / "a.parquet")
    return {"source": {"kind": "parquet", "path": folder}, "mask": {"column": "mask"}}


def clips(folder: Path) -> dict[str, Any]:
    """A folder of animations, of which clips of 9, 9 and 5 frames are made, and a still image of the same bucket."""
    folder.mkdir(exist_ok=True)
    for number, (name, kind) in enumerate((("a.gif", "GIF"), ("b.webp", "WEBP"), ("c.png", "PNG"))):
        frames = [photo(100 * number + at, (64, 96)) for at in range(6 if name == "c.png" else 12)]
        options: dict[str, Any] = {"lossless": True} if kind == "WEBP" else {}
        frames[0].save(folder / name, kind, save_all=True, append_images=frames[1:], duration=100, **options)
        (folder / name).with_suffix(".txt").write_text(TEXTS[number])
    write_photo(folder / "still.png", 7, (64, 96)).with_suffix(".txt").write_text("a kitten")
    return {"source": {"path": folder}, "flip": True, "frames": {"count": 9, "fps": 10}}


def videos(folder: Path) -> dict[str, Any]:
    """The same without the still image."""
    settings = clips(folder)
    (folder / "still.png").unlink()
    return settings


WALKS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "flux": edit_pairs,
    "z-image": masked_table,
    "wan": clips,
    "wan-i2v": videos,
}
"""Family -> what makes its dataset in a folder, and returns its settings."""
FEW_WALKS = ("flux", "z-image", "wan-i2v")
"""What differs to a server or a bucket: control images, masks, and clips with their first frame."""


def walk_config(
    folder: Path, family: str, data: Callable[[Path], dict[str, Any]] | None = None, **encode: Any
) -> Config:
    """The dataset `walk` of this family in `folder`, which is made there, and two validation prompts."""
    dataset = (data or WALKS[family])(folder / "data")
    buckets = {"area": 96 * 64, "step": 32}
    return parse_config(
        {
            "cache": {"path": folder / "cache"},
            "datasets": [{"name": "walk", "buckets": buckets, "images": MINIMAL_IMAGES, **dataset}],
            "model": {"path": tiny_folder(family), "family": family},
            "encode": {"device": "cpu", "num_workers": 1, "batch_size": 1, **encode},
            "validation": {"prompts": ["a validation prompt"], "negative_prompt": "ugly"},
        }
    )


def walked(folder: Path, family: str, data: Callable[[Path], dict[str, Any]] | None = None, **encode: Any) -> Config:
    """Its config, and its cache filled."""
    config = walk_config(folder, family, data, **encode)
    report = run_precache(config)
    assert report.num_refused == 0 and report.num_encoded == report.num_misses > 0, report.to_json()
    return config


def assert_same_entry(one: Any, other: Any) -> None:
    """Two entries have one identity, and equal tensors, to the last bit."""
    assert one.record.identity == other.record.identity
    assert one.ragged == other.ragged and one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        assert tensor.dtype == other.tensors[name].dtype and torch.equal(tensor, other.tensors[name]), name


def assert_same_entries(one: Store, other: Store) -> None:
    """Two stores have the same keys, and each entry is the same."""
    keys = set(one.keys())
    assert keys == set(other.keys()) and keys
    for key in keys:
        assert_same_entry(one.get(key), other.get(key))


def batches_of(cache: Any) -> Iterator[dict[str, Any]]:
    """A batch of each sample alone, upright and, where the dataset is mirrored, mirrored; then of the prompts."""
    for row in cache.manifest("walk").rows.values():
        for flip in (False, True)[: len(row.images)]:
            yield cache.batch([row.sample_id], device="cpu", scaled=True, flip=flip)
    yield cache.prompt("a validation prompt", device="cpu")
    yield cache.prompt("ugly", device="cpu", negative=True)


def assert_same_batch(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        same = torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        assert same, name


def assert_same_batches(one: Any, other: Any) -> None:
    """Two caches give equal batches, to the last bit."""
    num_batches = 0
    for left, right in zip(batches_of(one), batches_of(other), strict=True):
        assert_same_batch(left, right)
        num_batches += 1
    assert num_batches > 4
