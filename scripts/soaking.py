"""What the soak programs share: options, cases that pass or fail, the result, and small caches of real packs.

A soak has one or more goals. Each case of a goal is a `with goal.case("..."):` block: an exception that leaves the
block is a failure, which is kept with its traceback, and the program goes on. Its result is one JSON document with
--json, otherwise a row of the table in docs/reliability.md for each goal.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from benchmarking import environment

import latentcache
from latentcache.dataset.manifest import Manifest
from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.dataset.row_table import Ref, Row, RowTable
from latentcache.families.sdxl import SCALING_FACTOR
from latentcache.identity import digest, key_of
from latentcache.store import Store
from latentcache.types import Crop, Entry, Geometry, Record, Size

MAX_KEPT = 50
"""Failures of a goal that are kept with their text. All are counted."""


@dataclass(slots=True)
class Goal:
    """One goal: how many cases there were, which failed, and figures of its own."""

    goal: str
    n: int = 0
    num_failures: int = 0
    failures: list[str] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """A case, which fails if an exception leaves the block. KeyboardInterrupt and SystemExit end the program."""
        self.n += 1
        try:
            yield
        except Exception as error:
            self.fail(f"{name}: {error!r}\n{traceback.format_exc()}")

    def fail(self, what: str) -> None:
        """Count a failure."""
        self.num_failures += 1
        if len(self.failures) < MAX_KEPT:
            self.failures.append(what)
        else:
            what = what.partition("\n")[0]
        print(f"FAILED {what}", file=sys.stderr, flush=True)

    def count(self, figure: str, by: float = 1) -> None:
        """Add to a figure, which begins at 0."""
        self.figures[figure] = self.figures.get(figure, 0) + by


class Soak:
    """A run of a part: its options and size, a folder that is deleted at the end, its randomness and its goals."""

    def __init__(self, options: argparse.Namespace, folder: Path, n: int):
        self.options, self.folder, self.n = options, folder, n
        self.random = random.Random(options.seed)
        self.goals: list[Goal] = []

    def goal(self, text: str) -> Goal:
        """A further goal of this part."""
        self.goals.append(Goal(text))
        return self.goals[-1]

    def say(self, text: str) -> None:
        """A line of progress, on stderr."""
        print(text, file=sys.stderr, flush=True)


Parts = Mapping[str, tuple[Callable[[Soak], None], int, int]]
"""What each part does, its full size, and the one of --tiny."""


def make_parser(description: str | None, parts: Parts) -> argparse.ArgumentParser:
    """The options of every soak program."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = ", ".join(f"{n:,} of {name}" for name, (_, n, _) in parts.items())
    parser.add_argument("--n", type=int, help=f"size of each part (default: {sizes})")
    parser.add_argument("--part", nargs="+", choices=list(parts), help="only these (default: all)")
    parser.add_argument("--tiny", action="store_true", help="a short run of each")
    parser.add_argument("--seed", type=int, default=0, help="of everything random (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--folder", type=Path, help="where files are made, and deleted (default: the system's)")
    return parser


def run_soak(parts: Parts, parser: argparse.ArgumentParser) -> int:
    """Run the parts, each in a new folder, and print the result.

    Returns the exit code: 1 if a case failed, or a goal had none.
    """
    options = parser.parse_args()
    if options.n is not None and options.n < 1:
        parser.error(f"--n {options.n}: at least 1")
    start, goals = time.monotonic(), []
    for name in options.part or parts:
        part, full, tiny = parts[name]
        with tempfile.TemporaryDirectory(prefix="soak-", dir=options.folder, ignore_cleanup_errors=True) as folder:
            where = environment(folder=folder)
            soak = Soak(options, Path(folder), options.n or (tiny if options.tiny else full))
            part(soak)
        goals += soak.goals
    document = {
        "n": sum(goal.n for goal in goals),
        "failures": sum(goal.num_failures for goal in goals),
        "seed": options.seed,
        "environment": {"latentcache": latentcache.__version__} | where,
        "seconds": round(time.monotonic() - start, 1),
        "goals": [
            {"goal": g.goal, "n": g.n, "failures": g.num_failures, "failed": g.failures, **g.figures} for g in goals
        ],
    }
    print(json.dumps(document, indent=2) if options.json else as_rows(document))
    ran = all(goal.n or "skipped" in goal.figures for goal in goals)
    return 1 if document["failures"] or not ran else 0


def as_rows(document: Mapping[str, Any]) -> str:
    """A row of the table in docs/reliability.md for each goal: goal, n, failures, seed, versions, date."""
    where = document["environment"]
    versions = ", ".join(f"{name} {where[name]}" for name in ("latentcache", "torch", "filesystem"))
    rows = []
    for goal in document["goals"]:
        figures = ", ".join(f"{name} {value}" for name, value in goal.items() if name not in ROW_NAMES)
        text = goal["goal"] + (f" ({figures})" if figures else "")
        cells = (text, f"{goal['n']:,}", f"{goal['failures']:,}", document["seed"], versions, where["date"][:10])
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)


ROW_NAMES = ("goal", "n", "failures", "failed")


# Caches --------------------------------------------------------------------------------------------------------------

COMMON = {
    "schema": 1,
    "salt": "",
    "text_encoding": {"name": "soak"},
    "image_encoding": {"scaling_factor": SCALING_FACTOR, "shift_factor": None},
}
GEOMETRY = Geometry(Size(64, 64), Size(64, 64), Crop(0, 0), Size(64, 64))


def image_entry(number: int) -> Entry:
    """Moments of a 64x64 image, 1 KiB."""
    return _entry("image", number, {"moments": torch.randn(8, 8, 8, generator=_seeded(number)).half()})


def text_entry(number: int) -> Entry:
    """Embeddings of a caption, whose number of tokens differs from caption to caption."""
    generator = _seeded(-1 - number)
    embeds = torch.randn(1 + number % 5, 16, generator=generator)
    pooled = torch.randn(8, generator=generator)
    tensors = {"prompt_embeds": embeds.half(), "pooled_prompt_embeds": pooled.half()}
    return _entry("text", number, tensors, frozenset({"prompt_embeds"}))


def _entry(kind: str, number: int, tensors: Mapping[str, torch.Tensor], ragged: frozenset[str] = frozenset()) -> Entry:
    identity = {"kind": kind, "number": number}
    return Entry(Record(key_of(identity), kind, identity, {"path": f"{number}.png"}), tensors, ragged)


def _seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number & (2**63 - 1))


def sample_entries(numbers: Iterable[int]) -> list[Entry]:
    """Two entries for each sample: its image and its caption."""
    return [entry for number in numbers for entry in (image_entry(number), text_entry(number))]


def write_manifest(cache: Path, name: str, numbers: Iterable[int]) -> None:
    """A manifest of the samples of these numbers."""
    rows = {}
    for number in numbers:
        image = Ref(key_of({"kind": "image", "number": number}), GEOMETRY)
        caption = Ref.of_text(f"caption {number}", key_of({"kind": "text", "number": number}))
        path = f"{number}.png"
        rows[path] = Row(path, path, digest(path.encode()), (image,), (caption,))
    ManifestFolder(cache / "manifests").write(Manifest(name, "train", 1, COMMON, RowTable.of(rows)))


def contents(store: Store, *, provenance: bool = True) -> dict[str, str]:
    """A digest of each entry by key: of its record, and of names, dtypes, shapes and bytes of its tensors.

    It is this program's own: a fault of the store's digests shows. Two runs that make the same entry have equal digests
    without `provenance`, which has times.
    """
    return {key: entry_digest(store.get(key), provenance=provenance) for key in store.keys()}


def entry_digest(entry: Entry, *, provenance: bool = True) -> str:
    """The digest of `contents` for one entry."""
    record = entry.record
    made = record.provenance if provenance else None
    parts = [json.dumps([record.key, record.kind, record.identity, made], sort_keys=True)]
    for name, tensor in sorted(entry.tensors.items()):
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        parts.append(f"{name} {tensor.dtype} {tuple(tensor.shape)} {digest(data)}")
    return digest("\n".join(parts).encode())


def clone(cache: Path, target: Path) -> Path:
    """A copy of the cache, in place of what was there. Packs are hard links, for nobody writes into a sealed pack."""
    shutil.rmtree(target, ignore_errors=True)
    packs = cache / "packs"

    def copy(source: str, destination: str) -> str:
        if Path(source).is_relative_to(packs):
            os.link(source, destination)
            return destination
        return shutil.copy2(source, destination)

    shutil.copytree(cache, target, copy_function=copy, symlinks=True)
    return target


def leftovers(cache: Path) -> list[str]:
    """Files of a cache that no one needs: temporary ones, journals, an index or a memo that was put aside."""
    names = [path.relative_to(cache).as_posix() for path in cache.rglob("*")]
    return sorted(
        name
        for name in names
        if name.endswith((".tmp", "-journal", "-wal", "-shm")) or re.search(r"\.(damaged|replaced|removed)-", name)
    )


def batch_digest(batch: Mapping[str, Any]) -> str:
    """A digest of a batch: its names, and the bytes of its tensors and the text of its other values."""
    parts = []
    for name, value in sorted(batch.items()):
        is_tensor = isinstance(value, torch.Tensor)
        parts.append(name.encode() + (value.cpu().numpy().tobytes() if is_tensor else repr(value).encode()))
    return digest(b"\n".join(parts))
