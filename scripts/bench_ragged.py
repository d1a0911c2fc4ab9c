"""How long a warm batch with texts of natural length takes: against a copy of the same bytes from memory.

    python scripts/bench_ragged.py            # a table; a minute or two, 1 GB of disk, 2 GB of memory
    python scripts/bench_ragged.py --json     # one document
    python scripts/bench_ragged.py --tiny     # for correctness only

The samples are as those of Qwen-Image at 1024x1024: mean latents [16, 1, 128, 128] in float16, and prompt_embeds in
bfloat16, 3,584 wide, of 20 to 80 rows each. A batch of 16 is padded to its longest caption. The limit copies the same
batch, its padding too, row by row in one thread from anonymous memory into tensors that are there already. Reading goes
by `LatentCache.batch`, and by `LatentLoader` without prefetch.
All orders are random, a new one in each round; each pass comes directly after an untimed one.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarking import MIN_REPETITIONS, environment, in_turns, make_parser, parse, ratios, run_in_folder

from latentcache import BucketBatchSampler, LatentCache, LatentDataset, LatentLoader
from latentcache.dataset.manifest import Manifest
from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.dataset.row_table import CaptionRef, ImageRef, Row
from latentcache.families import family_named
from latentcache.identity import key_of
from latentcache.store import DiskStore
from latentcache.store.entry import as_array
from latentcache.types import Crop, Entry, Geometry, Record, Size

FAMILY = "qwen-image"
BATCH = 16
WANTED = 1.25
WAYS = {
    "batch": "LatentCache.batch",
    "loader": "LatentLoader",
}

Batches = Sequence[Sequence[int]]


class Samples:
    """The values: latents [n, *shape], and texts [n, longest, width] with zeros after the rows of each."""

    def __init__(self, num_samples: int, shape: tuple[int, ...], width: int, lengths: range):
        generator, source = torch.Generator().manual_seed(0), random.Random(0)
        self.lengths = [source.choice(lengths) for _ in range(num_samples)]
        self.latents = torch.empty((num_samples, *shape), dtype=torch.float16)
        self.texts = torch.zeros((num_samples, lengths[-1], width), dtype=torch.bfloat16)
        for number, length in enumerate(self.lengths):
            self.latents[number] = torch.randn(shape, generator=generator)
            self.texts[number, :length] = torch.randn((length, width), generator=generator)

    def batch_tensors(self, numbers: Sequence[int], memory: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors for this batch, which lie in `memory`."""
        longest = max(self.lengths[number] for number in numbers)
        shapes = {
            "latents": (len(numbers), *self.latents.shape[1:]),
            "prompt_embeds": (len(numbers), longest, self.texts.shape[-1]),
        }
        return {name: memory[name][: torch.Size(shape).numel()].view(shape) for name, shape in shapes.items()}

    def memory(self) -> dict[str, torch.Tensor]:
        """Memory for any batch, touched."""
        latents, texts = (BATCH * field[0].numel() for field in (self.latents, self.texts))
        return {
            "latents": torch.zeros(latents, dtype=torch.float16),
            "prompt_embeds": torch.zeros(texts, dtype=torch.bfloat16),
        }

    def check(self, batch: Mapping[str, Any], numbers: Sequence[int]) -> None:
        """A benchmark of wrong values is worth nothing."""
        longest = max(self.lengths[number] for number in numbers)
        assert torch.equal(batch["latents"], self.latents[list(numbers)])
        assert torch.equal(batch["prompt_embeds"], self.texts[list(numbers), :longest])
        assert batch["prompt_embeds_mask"].sum(1).tolist() == [self.lengths[number] for number in numbers]


def make_cache(path: Path, samples: Samples) -> None:
    rows: dict[str, Row] = {}
    size = Size(1024, 1024)

    def entries() -> Iterator[Entry]:
        for number, length in enumerate(samples.lengths):
            tensors = {"image": {"latents": samples.latents[number]}}
            tensors["text"] = {"prompt_embeds": samples.texts[number, :length]}
            keys = {}
            for kind, values in tensors.items():
                identity = {"number": number, "kind": kind}
                keys[kind] = key_of(identity)
                ragged = frozenset({"prompt_embeds"} & values.keys())
                yield Entry(Record(keys[kind], kind, identity, {}), values, ragged)
            images = (ImageRef(keys["image"], Geometry(size, size, Crop(0, 0), size)),)
            captions = (CaptionRef(f"photo {number}", keys["text"]),)
            rows[str(number)] = Row(str(number), str(number), None, images, captions)

    with DiskStore(path) as store:
        store.add(entries())
    common = {
        "schema": 1,
        "salt": "",
        "family": FAMILY,
        "text_encoding": family_named(FAMILY).text_recipe(),
        "image_encoding": {"scaling_factor": 1.0, "shift_factor": None},
    }
    ManifestFolder(path / "manifests").write(Manifest("bench", "train", 1, common, rows))


def limit(samples: Samples) -> Callable[[Batches], None]:
    memory = samples.memory()
    latents, texts = as_array(samples.latents), as_array(samples.texts)

    def read(batches: Batches) -> None:
        for numbers in batches:
            targets = {name: as_array(tensor) for name, tensor in samples.batch_tensors(numbers, memory).items()}
            longest = targets["prompt_embeds"].shape[1]
            for place, number in enumerate(numbers):
                np.copyto(targets["latents"][place], latents[number])
                np.copyto(targets["prompt_embeds"][place], texts[number, :longest])

    return read


def ours(cache: LatentCache) -> Callable[[Batches], None]:
    def read(batches: Batches) -> None:
        for numbers in batches:
            cache.batch([str(number) for number in numbers], device="cpu")

    return read


def loader(dataset: LatentDataset, samples: Samples) -> Callable[[Batches], None]:
    """Batches in the sampler's own order, each checked once."""
    made = LatentLoader(BucketBatchSampler(dataset, BATCH, drop_last=True), device="cpu", prefetch=0)
    batches = made.forever()
    for _ in range(2 * len(made)):
        batch = next(batches)
        samples.check(batch, [int(name) for name in batch["sample_id"]])

    def read(wanted: Batches) -> None:
        for _ in wanted:
            next(batches)

    return read


def run(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    shape, width, lengths = (
        ((4, 1, 8, 8), 16, range(2, 9)) if options.tiny else ((16, 1, 128, 128), 3584, range(20, 81))
    )
    samples = Samples(options.num_samples, shape, width, lengths)
    make_cache(folder / "cache", samples)
    dataset = LatentDataset(folder / "cache")
    source = random.Random(1)
    num_read = options.num_samples // BATCH * BATCH
    orders = [source.sample(range(options.num_samples), num_read) for _ in range(options.repetitions)]
    for number in range(0, num_read, BATCH):
        numbers = orders[0][number : number + BATCH]
        samples.check(dataset.cache.batch([str(each) for each in numbers], device="cpu"), numbers)
    ways = {
        "limit": limit(samples),
        "batch": ours(dataset.cache),
        "loader": loader(dataset, samples),
    }

    def in_rounds(read: Callable[[Batches], None]) -> Callable[[], None]:
        rounds = iter([order for order in orders for _ in range(2)])  # each is read once untimed, then timed

        def one() -> None:
            order = next(rounds)
            read([order[at : at + BATCH] for at in range(0, num_read, BATCH)])

        return one

    seconds = in_turns({name: in_rounds(read) for name, read in ways.items()}, options.repetitions, warm=True)
    dataset.cache.close()
    ratio = {name: ratios(seconds[name], seconds["limit"]) for name in WAYS}
    padded_rows = statistics.mean(
        max(samples.lengths[each] for each in order[at : at + BATCH])
        for order in orders
        for at in range(0, num_read, BATCH)
    )
    return {
        "ratio_to_limit": {name: value["median"] for name, value in ratio.items()},
        "spread": ratio,
        "us_per_batch": {
            name: statistics.median(values) / (num_read // BATCH) * 1e6 for name, values in seconds.items()
        },
        "mean_rows": statistics.mean(samples.lengths),
        "mean_rows_padded": padded_rows,
        "wanted": WANTED,
        "environment": environment(folder=folder),
    }


def to_text(result: Mapping[str, Any]) -> str:
    lines = [f"{'warm, batches of ' + str(BATCH):32}{'us/batch':>10}{'x limit':>9}{'wanted':>8}"]
    lines.append(f"{'limit':32}{result['us_per_batch']['limit']:10.0f}{1:9.2f}")
    for name, label in WAYS.items():
        times, ratio = result["us_per_batch"][name], result["ratio_to_limit"][name]
        lines.append(f"{label:32}{times:10.0f}{ratio:9.2f}{result['wanted']:8.2f}")
    lines.append(f"captions of {result['mean_rows']:.0f} rows, padded to {result['mean_rows_padded']:.0f}")
    return "\n".join(lines)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--num_samples", type=int, default=512)
    parser.set_defaults(repetitions=3 * MIN_REPETITIONS)
    options = parse(parser)
    options.num_samples = 64 if options.tiny else options.num_samples
    torch.set_num_threads(1)  # as the limit's copy
    run_in_folder(run, options, to_text)


if __name__ == "__main__":
    main()
