"""How long a batch takes to come back: against a copy from memory, and against files as trainers keep them.

    python scripts/bench_retrieve.py              # a table; minutes, 9 GB of disk, as much of page cache
    python scripts/bench_retrieve.py --cold       # the page cache dropped before each pass
    python scripts/bench_retrieve.py --one_file   # peers that keep a whole sample in one file
    python scripts/bench_retrieve.py --json       # one document
    python scripts/bench_retrieve.py --tiny       # for correctness only

The samples are those of 1024x1024: mean latents, prompt_embeds and pooled_prompt_embeds in float16, 438.5 KiB. They are
read in random order, a new order in each round, by `LatentCache.batch(sample_ids, device="cpu")`. The limit copies the
same rows in the same order, in one thread, from anonymous memory into tensors that are there already. The first epoch,
in which each entry is compared with its digest, is timed apart. Peers stack what they read. They keep a file of latents
and a file of text embeddings for each sample, as kohya's sd-scripts, SimpleTuner, ai-toolkit and OneTrainer do, and as
this cache keeps two entries; with --one_file a single file holds both, which none of them does.

Warm: each pass comes directly after an untimed one over the same samples. A pass at the memory's pace takes some 20 ms,
in which a virtual machine is often disturbed, so there are --repetitions_warm rounds of them; what is said against
peers comes from --repetitions rounds of their own. Cold: before each pass the files are dropped from the page cache,
free memory is touched (`take_back` says why), and the cache is opened again, so digests are compared too. The host of a
virtual machine may still hold the files: trust the ratios.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarking import MIN_REPETITIONS, environment, in_turns, make_parser, parse, ratios, run_in_folder, seconds_of
from benchmarking_cold import cold, cold_lines
from benchmarking_samples import (
    PEERS,
    SHAPES,
    TINY_SHAPES,
    Batches,
    Method,
    Rounds,
    Samples,
    check,
    limit,
    make_cache,
    make_peers,
    ours,
    stacked,
)

from latentcache import LatentCache, LatentDataset, LatentLoader
from latentcache.loading.sampler import BucketBatchSampler

WANTED = {"torch_load": 15, "npz": 15, "safetensors_file": 5, "diskcache_pickle": 10}
WANTED_RATIO = {4: 2.0, 16: 1.35, 64: 1.25}
"""Of `batch` and of the loader: a batch is a small part of a training step."""
"""`LatentLoader` without prefetch, and the items of `LatentDataset`."""
WAYS = {"batch": "LatentCache.batch", "loader": "LatentLoader", "dataset": "LatentDataset"}
PEER_BATCH = 16


def first_epoch(path: Path, samples: Samples) -> tuple[LatentCache, dict[str, Any]]:
    """A cache that has verified every entry, and what that took. The page cache is warm, as for the limit."""
    order = list(range(samples.num_samples))
    random.Random(2).shuffle(order)
    batches = [order[at : at + PEER_BATCH] for at in range(0, len(order) // PEER_BATCH * PEER_BATCH, PEER_BATCH)]
    for file in sorted((path / "packs").glob("*/*")):
        file.read_bytes()
    cache = LatentCache(path)
    read = limit(samples, PEER_BATCH)
    read(batches)
    limit_s = seconds_of(lambda: read(batches))
    first_s = seconds_of(lambda: ours(cache, samples)(batches))
    for at in range(0, len(order), PEER_BATCH):
        numbers = order[at : at + PEER_BATCH]
        check(samples, cache.batch([str(number) for number in numbers], device="cpu"), numbers)
    num_read = len(batches) * PEER_BATCH
    figures = {"us_per_sample": first_s / num_read * 1e6, "ratio_to_limit": first_s / limit_s}
    return cache, figures


def loader(dataset: LatentDataset, batch_size: int, prefetch: int) -> tuple[LatentLoader, Method]:
    """Batches in the sampler's own order."""
    made = LatentLoader(BucketBatchSampler(dataset, batch_size, seed=0), device="cpu", prefetch=prefetch)
    batches = made.forever()
    for _ in range(2 * len(made)):
        next(batches)

    def read(wanted: Batches) -> None:
        for _ in wanted:
            next(batches)

    return made, read


def warm(folder: Path, samples: Samples, options: argparse.Namespace) -> dict[str, Any]:
    make_cache(folder / "cache", samples)
    loads = make_peers(folder, samples, list(PEERS), one_file=options.one_file)
    cache, first = first_epoch(folder / "cache", samples)
    dataset = LatentDataset(folder / "cache")
    at_pace = {size: at_memory_pace(cache, dataset, samples, options, size) for size in options.batch_sizes}
    rounds = Rounds(samples.num_samples, options.num_read, options.repetitions)
    loaders = {f"loader_{prefetch}": loader(dataset, PEER_BATCH, prefetch) for prefetch in (0, 2)}
    ways = ways_of(cache, samples, PEER_BATCH)
    ways |= {name: stacked(load) for name, load in loads.items()} | {name: read for name, (_, read) in loaders.items()}
    methods = {name: rounds.method(read, PEER_BATCH, calls=2) for name, read in ways.items()}
    beside_peers = in_turns(methods, options.repetitions, warm=True)
    for made, _ in loaders.values():
        made.close()
    cache.close()
    return warm_result(at_pace, beside_peers, first, options)


def ways_of(cache: LatentCache, samples: Samples, size: int) -> dict[str, Method]:
    """What reads at the memory's pace."""
    return {"limit": limit(samples, size), "ours_batch": ours(cache, samples)}


def items_of(dataset: LatentDataset) -> Method:
    """What a DataLoader calls, without its collate."""

    def read(batches: Batches) -> None:
        for numbers in batches:
            dataset.__getitems__(numbers)

    return read


def at_memory_pace(
    cache: LatentCache, dataset: LatentDataset, samples: Samples, options: argparse.Namespace, size: int
) -> dict[str, list[float]]:
    """Seconds of each of `ways_of`, of the loader and of the dataset in each of many rounds."""
    rounds = Rounds(samples.num_samples, options.num_read, options.repetitions_warm)
    numbers = rounds.orders[0][:size]
    check(samples, cache.batch([str(number) for number in numbers], device="cpu"), numbers)
    made, read_loader = loader(dataset, size, 0)
    ways = ways_of(cache, samples, size) | {"ours_loader": read_loader, "ours_dataset": items_of(dataset)}
    methods = {name: rounds.method(read, size, calls=2) for name, read in ways.items()}
    seconds = in_turns(methods, options.repetitions_warm, warm=True)
    made.close()
    return seconds


def warm_result(
    at_pace: Mapping[int, Mapping[str, Sequence[float]]],
    beside_peers: Mapping[str, Sequence[float]],
    first: Mapping[str, Any],
    options: argparse.Namespace,
) -> dict[str, Any]:
    ratio = {
        way: {size: ratios(seconds[f"ours_{way}"], seconds["limit"]) for size, seconds in at_pace.items()}
        for way in WAYS
    }
    faster, limit_faster = (
        {name: ratios(beside_peers[name], beside_peers[way]) for name in PEERS} for way in ("ours_batch", "limit")
    )
    times = {f"{name}_{size}": values for size, seconds in at_pace.items() for name, values in seconds.items()}
    times |= {name: values for name, values in beside_peers.items() if name not in at_pace[PEER_BATCH]}

    def medians(values: Mapping[Any, Mapping[str, float]]) -> dict[str, float]:
        return {str(name): value["median"] for name, value in values.items()}

    return {
        "ratio_to_limit": medians(ratio["batch"]),
        "ratio_to_limit_loader": medians(ratio["loader"]),
        "ratio_to_limit_dataset": medians(ratio["dataset"]),
        "times_faster": medians(faster),
        "times_faster_limit": medians(limit_faster),
        "first_epoch": dict(first),
        "us_per_sample": {name: statistics.median(values) / options.num_read * 1e6 for name, values in times.items()},
        "spread": {
            "ratio_to_limit": {str(size): value for size, value in ratio["batch"].items()},
            "ratio_to_limit_loader": {str(size): value for size, value in ratio["loader"].items()},
            "ratio_to_limit_dataset": {str(size): value for size, value in ratio["dataset"].items()},
            "times_faster": faster,
        },
        "wanted": {"ratio_to_limit": {str(size): WANTED_RATIO[size] for size in at_pace}, "times_faster": WANTED},
    }


def run(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    samples = Samples(options.num_samples, TINY_SHAPES if options.tiny else SHAPES)
    measured = cold(folder, samples, options) if options.cold else warm(folder, samples, options)
    return measured | {"sample_bytes": samples.row_bytes, "environment": environment(folder=folder)}


def to_text(result: Mapping[str, Any]) -> str:
    lines = [f"{result['settings']['num_samples']:,} samples of {result['sample_bytes']:,} bytes"]
    return "\n".join(lines + (cold_lines(result["cold"]) if "cold" in result else warm_lines(result)))


def warm_lines(result: Mapping[str, Any]) -> list[str]:
    times, wanted = result["us_per_sample"], result["wanted"]
    lines = [f"{'warm':32}{'us/sample':>10}{'x limit':>9}{'wanted':>8}"]
    for size, goal in wanted["ratio_to_limit"].items():
        lines.append(f"{'limit, B=' + size:32}{times['limit_' + size]:10.1f}{1:9.2f}")
        for way, label in WAYS.items():
            key = "ratio_to_limit" if way == "batch" else f"ratio_to_limit_{way}"
            lines.append(
                f"{f'B={size}, {label}':32}{times[f'ours_{way}_{size}']:10.1f}{result[key][size]:9.2f}{goal:8.2f}"
            )
    lines.append(f"{'LatentLoader, prefetch=0':32}{times['loader_0']:10.1f}")
    lines.append(f"{'LatentLoader, prefetch=2':32}{times['loader_2']:10.1f}")
    first = result["first_epoch"]
    lines.append(f"{'first epoch, with digests':32}{first['us_per_sample']:10.1f}{first['ratio_to_limit']:9.2f}")
    kept = "one file a sample" if result["settings"]["one_file"] else "two files a sample"
    lines.append(f"\n{f'B={PEER_BATCH}, {kept}':32}{'us/sample':>10}{'x ours':>9}{'wanted':>8}{'x limit':>9}")
    for name, label in PEERS.items():
        faster, most = (result[key][name] for key in ("times_faster", "times_faster_limit"))
        goal = wanted["times_faster"][name]
        lines.append(f"{label:32}{times[name]:10.1f}{faster:9.1f}{goal:8}{most:9.1f}")
    return lines


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--num_samples", type=int, default=4000)
    parser.add_argument("--num_read", type=int, default=1024, help="samples read in each pass (default: %(default)s)")
    parser.add_argument(
        "--repetitions_warm",
        type=int,
        default=5 * MIN_REPETITIONS,
        help="rounds of what reads at the memory's pace (default: %(default)s, and at least --repetitions)",
    )
    parser.add_argument("--one_file", action="store_true", help="peers keep a whole sample in one file")
    parser.add_argument("--cold", action="store_true", help="drop the page cache before each pass")
    options = parse(parser)
    options.repetitions_warm = max(options.repetitions_warm, options.repetitions)
    options.batch_sizes = [4, 16, 64]
    if options.tiny:
        options.num_samples, options.num_read, options.batch_sizes = 64, 32, [4, 16]
        options.repetitions_warm = options.repetitions
    run_in_folder(run, options, to_text)


if __name__ == "__main__":
    main()
