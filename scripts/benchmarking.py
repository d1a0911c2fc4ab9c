"""Shared code of the benchmarks: options, rounds, ratios, the result document and caches of random values."""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import re
import statistics
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from latentcache.dataset.manifest import Manifest
from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.dataset.row_table import Ref, Row, RowTable
from latentcache.families.sdxl import SCALING_FACTOR
from latentcache.identity import key_of
from latentcache.provenance import installed_versions, now, software_versions
from latentcache.store import DiskStore
from latentcache.types import Crop, Entry, Geometry, Record, Size

BUCKETS = (Size(1024, 1024), Size(832, 1216))
Shapes = Mapping[str, tuple[int, ...]]
SHAPES: Mapping[str, Shapes] = {
    "image": {"latents": (4, 128, 128)},
    "text": {"prompt_embeds": (77, 2048), "pooled_prompt_embeds": (1280,)},
}
"""Tensors of an SDXL sample of 1024x1024 with sampled latents."""
TINY_SHAPES: Mapping[str, Shapes] = {
    kind: {name: (*shape[:-1], shape[-1] // 64) for name, shape in shapes.items()} for kind, shapes in SHAPES.items()
}
Tensors = Mapping[str, torch.Tensor]


def environment(device: torch.device | str = "cpu", folder: str | Path | None = None) -> dict[str, Any]:
    """Hardware, versions and date. `folder` is where the benchmark writes (default: the system's temporary folder)."""
    return {
        "date": now(),
        "cpu": cpu_model(),
        "num_cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "filesystem": filesystem_type(Path(folder or tempfile.gettempdir())),
        **software_versions(),
        **installed_versions(["diskcache"]),
        "num_threads": torch.get_num_threads(),
        "device": device_name(torch.device(device)),
    }


def filesystem_type(path: Path) -> str | None:
    """The file system type of a path, or None if the system does not list its mounts."""
    path = path.resolve()
    holding = [mount for mount in psutil.disk_partitions(all=True) if path.is_relative_to(mount.mountpoint)]
    return max(holding, key=lambda mount: len(mount.mountpoint)).fstype if holding else None


def cpu_model() -> str:
    """The CPU model that the kernel reports, or else the architecture."""
    path = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", path.read_text(), re.MULTILINE) if path.exists() else None
    return found[1] if found else platform.processor() or platform.machine()


def device_name(device: torch.device) -> str:
    """The device with its name if it has one: `cuda:0 NVIDIA H200`."""
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(device) if name is None else f"{device} {name(device)}"


def make_parser(description: str | None, parts: Iterable[str]) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks share."""
    parser = program_parser(description, parts)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--repetitions", type=int, default=7, help="rounds (default: %(default)s)")
    return parser


def program_parser(description: str | None, parts: Iterable[str]) -> argparse.ArgumentParser:
    """A parser with the options that all benchmarks and soak programs share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small sizes, for correctness only")
    parser.add_argument("--folder", type=Path, help="parent of the temporary folder (default: the system's)")
    parser.add_argument(
        "--part", nargs="+", choices=[*parts], default=[*parts], help="run only these parts (default: all)"
    )
    return parser


def lines_of(document: Mapping[str, Any], indent: str = "") -> Iterator[str]:
    """The document as text: one line per figure, with its spread or its unit and goal."""
    for name, value in document.items():
        if not isinstance(value, Mapping):
            shown = f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else value
            yield f"{indent + str(name):<36}{shown}"
        elif value.keys() == {"median", "min", "max"}:
            yield f"{indent + str(name):<36}{value['median']:,.4g} ({value['min']:,.4g} .. {value['max']:,.4g})"
        elif value.keys() == {"value", "unit", "goal", "reached"}:
            goal = {None: "", True: f"  {value['goal']}", False: f"  {value['goal']} MISSED"}[value["reached"]]
            yield f"{indent + str(name):<52}{value['value']:>12,.4g} {value['unit']:<11}{goal}".rstrip()
        else:
            yield f"{indent}{name}:"
            yield from lines_of(value, indent + "  ")


def run_parts(parts: Mapping[str, Callable[[Path, argparse.Namespace], Any]], options: argparse.Namespace) -> int:
    """Run the chosen parts, each in a temporary folder, and print their results as one document.

    If a part fails, the others still run. Returns the exit code: 1 if a part failed.
    """
    result: dict[str, Any] = {"environment": environment(getattr(options, "device", "cpu"), options.folder)}
    failed, seconds = {}, {}
    for name in options.part:
        print(f"{name} ...", file=sys.stderr, flush=True)
        start = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="latentcache-bench-", dir=options.folder) as folder:
            try:
                result[name] = parts[name](Path(folder), options)
            except Exception as error:
                traceback.print_exc()
                failed[name] = f"{type(error).__name__}: {error}"
        seconds[name] = time.perf_counter() - start
    result |= {"failed": failed, "seconds": seconds, "settings": vars(options)}
    print(json.dumps(result, indent=2, allow_nan=False, default=str) if options.json else "\n".join(lines_of(result)))
    return 1 if failed else 0


def memory_bytes(name: str) -> int:
    """Memory of this process in bytes: VmRSS (current) or VmHWM (peak)."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def seconds_of(method: Callable[[], Any]) -> float:
    """Duration of a call in seconds."""
    start = time.perf_counter()
    method()
    return time.perf_counter() - start


def in_turns(
    methods: Mapping[str, Callable[[], float]], repetitions: int, *, warm: bool = False
) -> dict[str, list[float]]:
    """The seconds that each method returns, by round. Rounds start with different methods, so none is always first.

    `warm` calls a method directly before each call that counts. Garbage is collected before such a call and not
    during it.
    """
    order = deque(methods)
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(repetitions):
        for name in order:
            if warm:
                methods[name]()
            gc.collect()
            gc.disable()
            try:
                seconds[name].append(methods[name]())
            finally:
                gc.enable()
        order.rotate(-1)
    return seconds


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, min and max."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> dict[str, float]:
    """Median, min and max of the per-round ratios. Disturbances that last a round cancel out."""
    return spread([above / below for above, below in zip(numerators, denominators, strict=True)])


# Caches ---------------------------------------------------------------------------------------------------------------


def write_cache(
    path: Path,
    num_samples: int,
    values: Callable[[int], Mapping[str, Tensors]],
    size_of: Callable[[int], Size] = lambda number: BUCKETS[0],
) -> None:
    """Write a cache of samples 0, 1, ... as precache does: all images, then all captions, and a manifest `bench`.

    `values` returns a sample's tensors by kind.
    """

    def record(kind: str, number: int) -> Record:
        identity = {"bench": kind, "number": number}
        return Record(key_of(identity), kind, identity, {"path": f"{number}.jpg"})

    with DiskStore(path) as store:
        for kind in SHAPES:
            store.add(Entry(record(kind, number), values(number)[kind]) for number in range(num_samples))
    keys = [(record("image", number).key, record("text", number).key) for number in range(num_samples)]
    write_manifest(path, "bench", {str(number): (size_of(number), *found) for number, found in enumerate(keys)})


def write_manifest(cache: Path, name: str, samples: Mapping[str, tuple[Size, str, str]]) -> None:
    """Write a manifest. `samples` maps a sample id to its size and the keys of its image and caption."""
    rows = {}
    for sample_id, (size, image_key, text_key) in samples.items():
        image = Ref(image_key, Geometry(size, size, Crop(0, 0), size))
        caption = Ref.of_text(f"caption of {sample_id}", text_key)
        rows[sample_id] = Row(sample_id, sample_id, None, (image,), (caption,))
    scaling = {"scaling_factor": SCALING_FACTOR, "shift_factor": None}
    common = {"schema": 1, "salt": "", "text_encoding": {}, "image_encoding": scaling}
    ManifestFolder(cache / "manifests").write(Manifest(name, "train", 1, common, RowTable.of(rows)))


def make_cache(path: Path, num_samples: int, *, tiny: bool) -> None:
    """Write a cache of random moments and embeddings, with half of the samples in each of two buckets.

    Shapes are SDXL's, or those of the tiny model with a sixteenth of the image sides.
    """
    generator = torch.Generator().manual_seed(0)
    sizes = [Size(height // 16, width // 16) if tiny else Size(height, width) for height, width in BUCKETS]
    text = {"prompt_embeds": (77, 72), "pooled_prompt_embeds": (40,)} if tiny else SHAPES["text"]

    def values(number: int) -> dict[str, Tensors]:
        height, width = sizes[number % 2]
        shapes = {"image": {"moments": (8, height // 8, width // 8)}, "text": text}
        return {
            kind: {name: torch.randn(shape, generator=generator).half() for name, shape in fields.items()}
            for kind, fields in shapes.items()
        }

    write_cache(path, num_samples, values, lambda number: sizes[number % 2])
