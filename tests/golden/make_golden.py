"""Makes the golden cache of the format that this latentcache writes, next to this file, with what it must give.

    python tests/golden/make_golden.py

Run it once, when a new format comes. A golden cache that is committed is never made again: the test reads what an
older latentcache wrote. It has real manifests (flips, two captions, prompts), and entries of every dtype.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from golden.golden_contents import contents
from helpers.photo_files import write_photos
from helpers.tiny_configs import tiny_config

from latentcache import DiskStore, run_precache
from latentcache.identity import key_of
from latentcache.store.batch import DTYPES
from latentcache.store.directory import SCHEMA
from latentcache.types import Entry, Record


def entry_of(dtype: str) -> Entry:
    """An entry with a field of fixed shape and a ragged one, of this dtype."""
    identity = {"golden": dtype}
    values = torch.arange(12).reshape(3, 4)
    tensors = {"values": values.to(DTYPES[dtype]), "tokens": values[: 1 + len(dtype) % 3].to(DTYPES[dtype])}
    return Entry(Record(key_of(identity), "text", identity, {"made": "once"}), tensors, frozenset({"tokens"}))


def make(cache: Path) -> None:
    changes = {
        "cache.path": cache,
        "datasets.0.name": "golden",
        "datasets.0.repeats": 2,
        "datasets.0.flip": True,
        "encode.store_dtype": "float16",
        "validation.prompts": ["a prompt"],
    }
    with tempfile.TemporaryDirectory() as folder:
        write_photos(Path(folder, "photos"))
        Path(folder, "photos", "refused.png").write_bytes(b"no image")
        run_precache(tiny_config(Path(folder), **changes))
    with DiskStore(cache) as store:
        store.add(map(entry_of, DTYPES))


if __name__ == "__main__":
    here = Path(__file__).parent
    target = here / f"format{SCHEMA}"
    if target.exists():
        sys.exit(f"{target} exists: it is never made again")
    torch.set_num_threads(1)
    make(target)
    shutil.rmtree(target / "memo")  # disposable, and full of the maker's paths
    for lock in target.rglob("*.lock"):
        lock.unlink()
    (here / f"format{SCHEMA}.json").write_text(json.dumps(contents(target), indent=1) + "\n")
