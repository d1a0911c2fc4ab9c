"""Makes the golden cache of the format that this latentcache writes, next to this file, with what it must give.

    python tests/golden/make_golden.py

Run it once, when a new format comes. A golden cache that is committed is never made again: the test reads what an
older latentcache wrote. It has real manifests (flips, two captions, prompts), and entries of every dtype.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from golden.golden_contents import contents
from helpers.photo_files import write_photo

from latentcache import DiskStore, run_precache
from latentcache.config_file import parse_config
from latentcache.identity import key_of
from latentcache.store.batch import DTYPES
from latentcache.store.directory import SCHEMA
from latentcache.types import Entry, Record

PHOTOS = {"a.png": ((64, 96), ["a red house", "a house in the rain"]), "sub/b.png": ((96, 64), ["ein Haus, grün"])}


def entry_of(dtype: str) -> Entry:
    """An entry with a field of fixed shape and a ragged one, of this dtype."""
    identity = {"golden": dtype}
    values = torch.arange(12).reshape(3, 4)
    tensors = {"values": values.to(DTYPES[dtype]), "tokens": values[: 1 + len(dtype) % 3].to(DTYPES[dtype])}
    return Entry(Record(key_of(identity), "text", identity, {"made": "once"}), tensors, frozenset({"tokens"}))


def make(cache: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        photos = Path(folder) / "photos"
        for number, (name, (size, captions)) in enumerate(PHOTOS.items()):
            path = write_photo(photos / name, number, size)
            path.with_suffix(".txt").write_text("\n".join(captions), encoding="utf-8")
        (photos / "refused.png").write_bytes(b"no image")
        dataset = {
            "name": "golden",
            "repeats": 2,
            "flip": True,
            "source": {"path": "photos"},
            "buckets": {"area": 64 * 64, "step": 32},
            "images": {"min_side": 8},
        }
        settings = {
            "cache": {"path": cache},
            "datasets": [dataset],
            "model": {"path": "tiny"},
            "encode": {"device": "cpu", "num_workers": 1, "store_dtype": "float16"},
            "validation": {"prompts": ["a prompt"], "negative_prompt": "ugly"},
        }
        with contextlib.chdir(folder):  # no path of this machine gets into the cache
            run_precache(parse_config(settings))
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
