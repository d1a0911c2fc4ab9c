"""MosaicML streaming and litdata, for `bench_pack_order.py`: it runs in an environment that has them, not in ours.

    python benchmarking_streams.py write mds|litdata FOLDER --num_samples N
    python benchmarking_streams.py read mds|litdata FOLDER --num_workers W     # one epoch; prints what it took
    python benchmarking_streams.py order ALGORITHM FOLDER --num_samples N --num_per_pack P --mixed M

Each writes with its own writer, reads with its own loader, and shuffles as its own code does.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

SHAPES = {"latents": (4, 128, 128), "prompt_embeds": (77, 2048), "pooled_prompt_embeds": (1280,)}
TINY_SHAPES = {"latents": (4, 8, 8), "prompt_embeds": (7, 16), "pooled_prompt_embeds": (8,)}
PACK_BYTES = 64 << 20
NUM_VALUES = 256
BATCH = 16


class Values:
    """The samples of the benchmark: random bytes as float16, of NUM_VALUES samples, and in front each one's number."""

    def __init__(self, tiny: bool):
        source, shapes = np.random.default_rng(0), TINY_SHAPES if tiny else SHAPES
        self._values = {
            name: source.standard_normal((NUM_VALUES, *shape), np.float32).astype(np.float16)
            for name, shape in shapes.items()
        }

    def sample(self, number: int) -> dict[str, np.ndarray]:
        """Copies of its fields."""
        fields = {name: values[number % NUM_VALUES].copy() for name, values in self._values.items()}
        for values in fields.values():
            values.reshape(-1)[:2].view(np.uint32)[0] = number
        return fields

    @property
    def sample_bytes(self) -> int:
        return sum(values[0].nbytes for values in self._values.values())


def number_of(latents: np.ndarray) -> int:
    """The number of the sample with these latents."""
    return int(np.ascontiguousarray(latents).reshape(-1)[:2].view(np.uint32)[0])


def streaming() -> Any:
    """MosaicML streaming, which wants torchvision for other things than these."""
    sys.modules.setdefault("streaming.vision", types.ModuleType("streaming.vision"))
    import streaming

    return streaming


def write_mds(folder: Path, samples: Iterable[dict[str, Any]], columns: dict[str, str]) -> None:
    with streaming().MDSWriter(out=str(folder), columns=columns, size_limit=PACK_BYTES) as writer:
        for sample in samples:
            writer.write(sample)


def _litdata_sample(task: tuple[int, bool], kept: dict[bool, Values] = {}) -> dict[str, Any]:  # noqa: B006 - a memory
    import torch

    number, tiny = task
    values = kept.setdefault(tiny, kept.get(tiny) or Values(tiny))
    return {name: torch.from_numpy(value) for name, value in values.sample(number).items()}


def write(options: argparse.Namespace) -> dict[str, Any]:
    folder, tiny = options.folder, options.tiny
    if options.name == "mds":
        values = Values(tiny)
        shapes = TINY_SHAPES if tiny else SHAPES
        columns = {name: f"ndarray:float16:{','.join(map(str, shape))}" for name, shape in shapes.items()}
        write_mds(folder, map(values.sample, range(options.num_samples)), columns)
    else:
        import litdata

        tasks = [(number, tiny) for number in range(options.num_samples)]
        litdata.optimize(
            fn=_litdata_sample,
            inputs=tasks,
            output_dir=str(folder),
            chunk_bytes=PACK_BYTES,
            num_workers=1,
            verbose=False,
            start_method="fork",
        )
    return {"num_files": len(list(folder.iterdir()))}


def loader_of(name: str, folder: Path, num_workers: int, seed: int) -> Iterable[dict[str, Any]]:
    """Batches of the peer's own loader, shuffled, in float16 tensors."""
    if name == "mds":
        dataset = streaming().StreamingDataset(
            local=str(folder), shuffle=True, shuffle_seed=seed, batch_size=BATCH, num_canonical_nodes=1
        )
        loader_class = streaming().StreamingDataLoader
    else:
        import litdata

        dataset = litdata.StreamingDataset(str(folder), shuffle=True, drop_last=False, seed=seed)
        loader_class = litdata.StreamingDataLoader
    loader: Iterable[dict[str, Any]] = loader_class(dataset, batch_size=BATCH, num_workers=num_workers)
    return loader


def read(options: argparse.Namespace) -> dict[str, Any]:
    """One epoch: seconds from the first batch's request on, and whether all samples came, as they were written."""
    values, numbers, is_right = Values(options.tiny), [], True
    loader = loader_of(options.name, options.folder, options.num_workers, options.seed)
    start = time.perf_counter()
    for batch in loader:
        numbers += [number_of(latents.numpy()) for latents in batch["latents"]]
    seconds = time.perf_counter() - start
    last = values.sample(numbers[-1])
    for name, value in last.items():
        is_right &= batch[name][-1].numpy().tobytes() == value.tobytes()
    return {"seconds": seconds, "num_samples": len(set(numbers)), "num_read": len(numbers), "is_right": is_right}


def order(options: argparse.Namespace) -> dict[str, Any]:
    """The order of samples 0, 1 ... in an epoch, which lie `num_per_pack` in a file, written to `folder` as npy."""
    num, per = options.num_samples, options.num_per_pack
    if options.name == "litdata":
        import litdata

        tasks = list(range(num))
        folder = options.folder / f"ints-{per}"
        litdata.optimize(fn=_same, inputs=tasks, output_dir=str(folder), chunk_size=per, num_workers=1, verbose=False)
        dataset = litdata.StreamingDataset(str(folder), shuffle=True, drop_last=False)
        loader: Iterator[Any] = iter(
            litdata.StreamingDataLoader(dataset, batch_size=BATCH, num_workers=options.num_workers)
        )
        found = np.concatenate([np.asarray(batch) for batch in loader])
    else:
        streaming()
        from streaming.base.shuffle import get_shuffle

        sizes = np.array([min(per, num - at) for at in range(0, num, per)], np.int64)
        block = {} if options.mixed is None else {"block_size": options.mixed}
        found = get_shuffle(options.name, sizes, 1, 0, 0, **block)
    assert len(set(found.tolist())) == num
    np.save(options.folder / "order.npy", found)
    return {"num_samples": num}


def _same(number: int) -> int:
    return number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["write", "read", "order"])
    parser.add_argument("name")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--num_samples", type=int, default=0)
    parser.add_argument("--num_per_pack", type=int, default=0)
    parser.add_argument("--mixed", type=int)
    parser.add_argument("--num_workers", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    found = {"write": write, "read": read, "order": order}[options.what](options)
    print(json.dumps(found), file=sys.__stdout__, flush=True)


if __name__ == "__main__":
    main()
