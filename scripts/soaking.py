"""Shared code of the soak programs: options, cases that pass or fail, the result, and small caches.

A soak has one or more goals. Each case of a goal is a `with goal.case("..."):` block. An exception in the block is
recorded as a failure with its traceback, and the program continues. The result is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from benchmarking import environment, program_parser

from latentcache.config import Config
from latentcache.identity import digest

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from helpers import photo_files
from helpers.tiny_configs import config_of_dataset

MAX_KEPT = 50
"""Failures per goal that are reported with a traceback. All of them are counted."""


def say(text: str) -> None:
    """Print a line of progress to stderr."""
    print(text, file=sys.stderr, flush=True)


@dataclass(slots=True)
class Goal:
    """One goal: the number of cases, the failures, and figures."""

    goal: str
    n: int = 0
    failures: int = 0
    failed: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """One case, which fails on any exception but KeyboardInterrupt and SystemExit."""
        self.n += 1
        try:
            yield
        except Exception as error:
            self.failures += 1
            say(f"FAILED {name}: {error!r}")
            if self.failures <= MAX_KEPT:
                self.failed.append(f"{name}: {error!r}\n{traceback.format_exc()}")

    def count(self, figure: str, by: float = 1) -> None:
        """Add to a figure, which starts at 0."""
        self.figures[figure] = self.figures.get(figure, 0) + by


class Soak:
    """One run of a part: options, size, a temporary folder, a random generator and the goals."""

    def __init__(self, options: argparse.Namespace, folder: Path, n: int):
        self.options, self.folder, self.n = options, folder, n
        self.random = random.Random(options.seed)
        self.goals: list[Goal] = []

    def goal(self, text: str) -> Goal:
        """Add a goal to this part."""
        self.goals.append(Goal(text))
        return self.goals[-1]


Parts = Mapping[str, tuple[Callable[[Soak], None], int, int]]
"""Function, full size and tiny size of each part, by name."""


def run_soak(parts: Parts, description: str | None) -> int:
    """Run the parts, each in a temporary folder, and print the result.

    Returns the exit code: 1 if a case failed or a goal had no case.
    """
    parser = program_parser(description, parts)
    sizes = ", ".join(f"{n:,} of {name}" for name, (_, n, _) in parts.items())
    parser.add_argument("--n", type=int, help=f"size of each part (default: {sizes})")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: %(default)s)")
    options = parser.parse_args()
    start, goals = time.monotonic(), []
    for name in options.part:
        part, full, tiny = parts[name]
        with tempfile.TemporaryDirectory(prefix="soak-", dir=options.folder, ignore_cleanup_errors=True) as folder:
            where = environment(folder=folder)
            soak = Soak(options, Path(folder), options.n or (tiny if options.tiny else full))
            part(soak)
        goals += soak.goals
    failures, seconds = sum(goal.failures for goal in goals), round(time.monotonic() - start, 1)
    found = {"n": sum(goal.n for goal in goals), "failures": failures, "seed": options.seed, "seconds": seconds}
    print(json.dumps(found | {"environment": where, "goals": [asdict(goal) for goal in goals]}, indent=2))
    return 1 if failures or not all(goal.n for goal in goals) else 0


# Caches --------------------------------------------------------------------------------------------------------------


def write_photo(path: Path, seed: int) -> None:
    """Write a photo of 64x64 pixels with a caption."""
    photo_files.write_photo(path, seed, (64, 64)).with_suffix(".txt").write_text(f"photo {seed}")


def config_of(cache: Path, name: str, photos: Path) -> Config:
    """A config that precaches photos and a prompt with the tiny SDXL."""
    settings = {"cache.path": cache, "encode.num_workers": 1}
    dataset = {"name": name, "source": {"path": photos}, "buckets": {"area": 64 * 64, "step": 32}}
    return config_of_dataset(cache.parent, settings, **dataset)


def digest_of(values: Mapping[str, Any]) -> str:
    """A digest of the names, dtypes, shapes and bytes of tensors and the repr of other values.

    It is independent of the store's digests, so that a fault in those shows.
    """
    tensors = {name: value.contiguous() for name, value in values.items() if isinstance(value, torch.Tensor)}
    others = sorted((name, repr(value)) for name, value in values.items() if name not in tensors)
    return digest(safetensors.torch.save(tensors) + repr(others).encode())
