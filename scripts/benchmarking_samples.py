"""Samples as those of 1024x1024, for the benchmarks of reading: their values, a cache and files that hold them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import diskcache
import numpy as np
import torch
from benchmarking import FILE_FORMATS, Tensors, pickling_diskcache

from latentcache import LatentCache
from latentcache.dataset.manifest import Manifest
from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.dataset.row_table import CaptionRef, ImageRef, Row
from latentcache.families.sdxl import SCALING_FACTOR
from latentcache.identity import key_of
from latentcache.store import DiskStore
from latentcache.types import Crop, Entry, Geometry, Record, Size

KINDS = {"image": ("latents",), "text": ("prompt_embeds", "pooled_prompt_embeds")}
SHAPES = {"latents": (4, 128, 128), "prompt_embeds": (77, 2048), "pooled_prompt_embeds": (1280,)}
PEERS = {name: form.label for name, form in FILE_FORMATS.items()} | {"diskcache_pickle": "diskcache, default pickling"}
TINY_SHAPES = {"latents": (4, 8, 8), "prompt_embeds": (7, 16), "pooled_prompt_embeds": (8,)}

Batches = Sequence[Sequence[int]]
Method = Callable[[Batches], None]


class Samples:
    """The values, as the limit reads them: for each field a tensor [n, *shape], and a view of each row's bytes."""

    def __init__(self, num_samples: int, shapes: Mapping[str, tuple[int, ...]]):
        self.num_samples, self.shapes = num_samples, shapes
        generator = torch.Generator().manual_seed(0)
        self.fields = {name: torch.empty((num_samples, *shape), dtype=torch.float16) for name, shape in shapes.items()}
        for field in self.fields.values():
            for row in field:
                row.copy_(torch.randn(row.shape, generator=generator))
        self.rows = {name: list(as_rows(field)) for name, field in self.fields.items()}

    @property
    def row_bytes(self) -> int:
        return sum(rows[0].nbytes for rows in self.rows.values())

    def tensors(self, number: int) -> dict[str, torch.Tensor]:
        return {name: field[number] for name, field in self.fields.items()}

    def out(self, batch_size: int) -> dict[str, torch.Tensor]:
        """Tensors to read a batch into, touched."""
        return {name: torch.zeros((batch_size, *shape), dtype=torch.float16) for name, shape in self.shapes.items()}


def as_rows(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(torch.uint8).numpy().reshape(len(tensor), -1)


def make_cache(path: Path, samples: Samples) -> None:
    rows: dict[str, Row] = {}

    def entries() -> Iterator[Entry]:
        for number in range(samples.num_samples):
            values, keys = samples.tensors(number), {}
            for kind, names in KINDS.items():
                identity = {"bench": kind, "number": number}
                keys[kind] = key_of(identity)
                yield Entry(Record(keys[kind], kind, identity, {}), {name: values[name] for name in names})
            geometry = Geometry(Size(1536, 2048), Size(1024, 1365), Crop(0, 170), Size(1024, 1024))
            images, captions = (ImageRef(keys["image"], geometry),), (CaptionRef(f"photo {number}", keys["text"]),)
            rows[str(number)] = Row(str(number), str(number), None, images, captions)

    with DiskStore(path) as store:
        store.add(entries())
    write_manifest(path, rows)


def write_manifest(path: Path, rows: Mapping[str, Row]) -> None:
    """Name these samples of the cache at `path` in a manifest, `bench`."""
    scaling = {"scaling_factor": SCALING_FACTOR, "shift_factor": None}
    common = {"schema": 1, "salt": "", "text_encoding": {}, "image_encoding": scaling}
    ManifestFolder(path / "manifests").write(Manifest("bench", "train", 1, common, rows))


def check(samples: Samples, batch: Mapping[str, Any], numbers: Sequence[int]) -> None:
    """A benchmark of wrong values is worth nothing."""
    for name, field in samples.fields.items():
        assert torch.equal(batch[name], field[list(numbers)]), name


def limit(samples: Samples, batch_size: int) -> Method:
    out = samples.out(batch_size)
    fields = [(as_rows(out[name]), samples.rows[name]) for name in samples.shapes]

    def read(batches: Batches) -> None:
        for numbers in batches:
            for target, rows in fields:
                for place, number in enumerate(numbers):
                    target[place] = rows[number]

    return read


def ours(cache: LatentCache, samples: Samples) -> Method:
    names = [str(number) for number in range(samples.num_samples)]

    def read(batches: Batches) -> None:
        for numbers in batches:
            cache.batch([names[number] for number in numbers], device="cpu")

    return read


def stacked(load: Callable[[int], Tensors]) -> Method:
    def read(batches: Batches) -> None:
        for numbers in batches:
            loaded = [load(number) for number in numbers]
            for name in loaded[0]:
                torch.stack([tensors[name] for tensors in loaded])

    return read


def make_peers(
    folder: Path, samples: Samples, names: Sequence[str], *, one_file: bool
) -> dict[str, Callable[[int], Tensors]]:
    """The samples as peers keep them; gives what loads one.

    A file for the latents and one for the text embeddings, or one file for both. In a diskcache likewise: two values
    or one.
    """
    groups = [tuple(SHAPES)] if one_file else list(KINDS.values())
    labels = [[f"{number}.{group}" for group in range(len(groups))] for number in range(samples.num_samples)]
    loads: dict[str, Callable[[int], Tensors]] = {}
    for name in names:
        place = folder / name
        place.mkdir()
        places: list[list[Any]] = labels
        if name == "diskcache_pickle":
            cache = pickling_diskcache(place)
            save: Callable[[Any, Any], Any]
            save, load = partial(_set, cache), cache.__getitem__
        else:
            form = FILE_FORMATS[name]
            save, load = form.save, form.load
            places = [[place / f"{label}{form.suffix}" for label in row] for row in labels]
        for number, row in enumerate(places):
            tensors = samples.tensors(number)
            for fields, where in zip(groups, row, strict=True):
                # A view would be saved with all that it is a view of.
                save({field: tensors[field].clone() for field in fields}, where)
        loads[name] = partial(_joined, load, places)
    return loads


def _set(cache: diskcache.Cache, values: Tensors, key: str) -> None:
    cache[key] = values


def _joined(load: Callable[[Any], Tensors], places: Sequence[Sequence[Any]], number: int) -> Tensors:
    return {name: value for place in places[number] for name, value in load(place).items()}


class Rounds:
    """The samples of each round, the same for all methods: random ones, none twice, in whole batches."""

    def __init__(self, num_samples: int, num_read: int, num_rounds: int):
        source = random.Random(1)
        self.orders = [source.sample(range(num_samples), num_read) for _ in range(num_rounds)]

    def batches(self, number: int, batch_size: int) -> Batches:
        order = self.orders[number]
        return [order[at : at + batch_size] for at in range(0, len(order), batch_size)]

    def method(self, read: Method, batch_size: int, *, calls: int) -> Callable[[], None]:
        """`read` for `in_turns`, which calls it `calls` times in a round."""
        numbers = iter([number for number in range(len(self.orders)) for _ in range(calls)])
        return lambda: read(self.batches(next(numbers), batch_size))
