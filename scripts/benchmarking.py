"""What the benchmarks share: options, rounds, ratios, file formats to compare with, where it ran, and the document."""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import diskcache
import numpy as np
import psutil
import safetensors.torch
import torch

MIN_REPETITIONS = 7

Tensors = Mapping[str, torch.Tensor]


def environment(
    device: torch.device | str | None = None, folder: str | os.PathLike[str] | None = None
) -> dict[str, Any]:
    """Where and when a benchmark runs. `folder` is where it writes, by default the current one."""
    pages = os.sysconf("SC_PHYS_PAGES")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "num_cores": os.cpu_count(),
        "memory_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "filesystem": filesystem_type(Path(folder or ".")),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "safetensors": safetensors.__version__,
        "diskcache": diskcache.__version__,
        "num_threads": torch.get_num_threads(),
        "device": device_name(torch.device("cpu" if device is None else device)),
    }


def filesystem_type(path: Path) -> str | None:
    """The type of the file system that holds a path; None where the system does not list its mounts."""
    path = path.resolve()
    holding = [mount for mount in psutil.disk_partitions(all=True) if path.is_relative_to(mount.mountpoint)]
    return max(holding, key=lambda mount: len(mount.mountpoint)).fstype if holding else None


def cpu_model() -> str:
    """As the kernel calls it; the architecture where it does not tell."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def device_name(device: torch.device) -> str:
    """`cuda:0 NVIDIA H200`; the device alone where its backend gives no names."""
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return str(device) if name is None else f"{device} {name(device)}"


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser that has the options of every benchmark. Parse them with `parse`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--tiny", action="store_true", help="small sizes, for correctness only")
    parser.add_argument("--repetitions", type=int, default=MIN_REPETITIONS, help="rounds (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where files are made, and deleted (default: the system's)")
    return parser


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse, and refuse fewer than MIN_REPETITIONS repetitions unless the sizes are tiny."""
    options = parser.parse_args(arguments)
    least = 1 if options.tiny else MIN_REPETITIONS
    if options.repetitions < least:
        parser.error(f"--repetitions {options.repetitions}: at least {least}; fewer only with --tiny")
    return options


def emit(result: Mapping[str, Any], options: argparse.Namespace, to_text: Callable[[Mapping[str, Any]], str]) -> None:
    """Print the result, its settings being `options`: one JSON document with --json, else what `to_text` makes."""
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    document = {**result, "settings": settings}
    print(json.dumps(document, indent=2, allow_nan=False) if options.json else to_text(document))


def run_in_folder(
    run: Callable[[Path, argparse.Namespace], Mapping[str, Any]],
    options: argparse.Namespace,
    to_text: Callable[[Mapping[str, Any]], str],
) -> None:
    """Run a benchmark in a new folder, which is deleted afterwards, and print its result as `emit` does."""
    with tempfile.TemporaryDirectory(prefix="latentcache-bench-", dir=options.folder) as folder:
        emit(run(Path(folder), options), options, to_text)


def seconds_of(method: Callable[[], Any]) -> float:
    """How long a call takes."""
    start = time.perf_counter()
    method()
    return time.perf_counter() - start


def in_turns(
    methods: Mapping[str, Callable[[], Any]],
    repetitions: int,
    *,
    warm: bool = False,
    clock: Callable[[Callable[[], Any]], float] = seconds_of,
) -> dict[str, list[float]]:
    """Seconds of each method in each round. Each round begins with another method, so that none is always the first.

    `warm` calls a method once untimed directly before each timed call. Garbage is collected before the clock starts,
    and not while it runs. `clock` may measure otherwise: `lambda method: method()` for methods that time themselves.
    """
    order = deque(methods)
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    was_enabled = gc.isenabled()
    try:
        for _ in range(repetitions):
            for name in order:
                if warm:
                    methods[name]()
                gc.collect()
                gc.disable()
                seconds[name].append(clock(methods[name]))
                if was_enabled:
                    gc.enable()
            order.rotate(-1)
    finally:
        if was_enabled:
            gc.enable()
    return seconds


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, min and max."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> dict[str, float]:
    """Median, min and max of the ratios of each round: what both of a round suffer from cancels out."""
    return spread([above / below for above, below in zip(numerators, denominators, strict=True)])


def rate_lines(result: Mapping[str, Any], labels: Mapping[str, str], compared_with: str) -> list[str]:
    """A table of `seconds`, `gb_per_s` and `ratio` in a result: a line for each method that has a label."""
    lines = [f"{'':46}{'[s]':>8}{'GB/s':>8}{'of ' + compared_with:>20}{'min..max':>14}"]
    for name, label in labels.items():
        seconds, rate, ratio = (result[figure][name] for figure in ("seconds", "gb_per_s", "ratio"))
        extent = f"{ratio['min']:.2f}..{ratio['max']:.2f}"
        lines.append(f"{label:46}{seconds['median']:8.3f}{rate:8.2f}{ratio['median']:20.2f}{extent:>14}")
    return lines


class FileFormat(NamedTuple):
    """A file of tensors, as trainers keep them. `save` writes tensors to a path, `load` reads them back."""

    label: str
    suffix: str
    save: Callable[[Tensors, Path], Any]
    load: Callable[[Path], Tensors]


def _save_npz(tensors: Tensors, path: Path) -> None:
    arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in tensors.items()}
    np.savez(path, **arrays)


def _load_npz(path: Path) -> dict[str, torch.Tensor]:
    with np.load(path) as arrays:
        return {name: torch.from_numpy(arrays[name]) for name in arrays.files}


FILE_FORMATS = {
    "torch_load": FileFormat(
        "torch.save files", ".pt", lambda tensors, path: torch.save(dict(tensors), path), torch.load
    ),
    "npz": FileFormat("np.savez files", ".npz", _save_npz, _load_npz),
    "safetensors_file": FileFormat(
        "safetensors files",
        ".safetensors",
        lambda tensors, path: safetensors.torch.save_file(dict(tensors), path),
        safetensors.torch.load_file,
    ),
}


def pickling_diskcache(folder: Path) -> diskcache.Cache:
    """A diskcache with its default pickling. Nothing is ever evicted: by default it drops entries beyond 1 GiB."""
    return diskcache.Cache(str(folder), size_limit=1 << 50, cull_limit=0)
