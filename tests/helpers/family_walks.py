"""Datasets of several families with everything that samples can have, cached by real runs with the tiny model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from helpers.photo_files import write_clip, write_mask, write_photo
from helpers.tensor_bits import same_bits
from helpers.tiny_configs import tiny_config
from helpers.tiny_models import tiny_folder

from latentcache.config import Config
from latentcache.store.base import Store

SIZES = ((64, 96), (96, 64), (64, 96))
TEXTS = ("cat", "a red cat on the table", "a photograph of two small cats, one asleep, in warm evening light")


def edit_pairs(folder: Path) -> dict[str, Any]:
    """A folder with control images of another shape, masks and flips. One image has two captions."""
    for number, (size, text) in enumerate(zip(SIZES, TEXTS, strict=True)):
        write_photo(folder / f"after/{number}.png", number, size).with_suffix(".txt").write_text(text)
        write_photo(folder / f"before/{number}.png", 20 + number, (80, 80))
        write_mask(folder / f"masks/{number}.png", 50 + number, size)
    (folder / "after/0.txt").write_text(f"{TEXTS[0]}\na kitten")
    parts = {"control": {"path": folder / "before"}, "mask": {"path": folder / "masks"}}
    return {"source": {"path": folder / "after"}, "flip": True, **parts}


def masked_table(folder: Path) -> dict[str, Any]:
    """A parquet file with a column of masks."""
    files, rows = folder.with_name("files"), []
    for number, (size, text) in enumerate(zip(SIZES, TEXTS, strict=True)):
        paths = {"image": write_photo(files / f"{number}.png", number, size)}
        paths["mask"] = write_mask(files / f"mask-{number}.png", 50 + number, size)
        rows.append({**{name: path.read_bytes() for name, path in paths.items()}, "text": text})
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), folder / "a.parquet")
    return {"source": {"kind": "parquet", "path": folder}, "mask": {"column": "mask"}}


def clips(folder: Path) -> dict[str, Any]:
    """A folder of animations that give clips of 9, 9 and 5 frames."""
    for number, (name, num_frames) in enumerate((("a.gif", 12), ("b.webp", 12), ("c.png", 6))):
        write_clip(folder / name, 100 * number, (64, 96), num_frames).with_suffix(".txt").write_text(TEXTS[number])
    return {"source": {"path": folder}, "flip": True, "frames": {"count": 9, "fps": 10}}


WALKS: dict[str, Callable[[Path], dict[str, Any]]] = {"flux": edit_pairs, "z-image": masked_table, "wan-i2v": clips}
"""Family -> function that writes its dataset to a folder and returns the settings.

These differ for a server: control images, masks, and clips with their first frame.
"""


def walk_config(folder: Path, family: str) -> Config:
    """Write the family's dataset `walk` to `folder`. Returns a config with it and two validation prompts."""
    dataset = {"name": "walk", "buckets": {"area": 96 * 64, "step": 32}, "images": {"min_side": 8}}
    settings: dict[str, Any] = {"datasets": [dataset | WALKS[family](folder / "data")]}
    settings["model"] = {"path": tiny_folder(family), "family": family}
    settings["encode"] = {"device": "cpu", "num_workers": 1, "batch_size": 1}
    return tiny_config(folder, **settings)


def assert_same_entry(one: Any, other: Any) -> None:
    """Assert that two entries have the same identity and bit-identical tensors."""
    assert one.record.identity == other.record.identity
    assert one.ragged == other.ragged and one.tensors.keys() == other.tensors.keys()
    for name, tensor in one.tensors.items():
        assert same_bits(tensor, other.tensors[name]), name


def assert_served(entries: Mapping[str, Any], cache: Any) -> list[str]:
    """The entries of a service's answer are those of the cache, by key. Returns the keys."""
    for key, entry in entries.items():
        assert_same_entry(entry, cache.get(key))
    return list(entries)


def assert_same_entries(one: Store, other: Store) -> None:
    """Assert that two stores have the same keys and entries."""
    keys = set(one.keys())
    assert keys == set(other.keys()) and keys
    for key in keys:
        assert_same_entry(one.get(key), other.get(key))


def batches_of(cache: Any) -> Iterator[dict[str, Any]]:
    """Yield a batch of each sample, and its flipped twin if there is one; then the prompts."""
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
