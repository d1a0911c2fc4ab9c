"""A cache that was committed when its format came is read for ever, bit for bit; a newer one is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from golden.golden_contents import contents

from latentcache import DiskStore, LatentCache
from latentcache.errors import DatasetError
from latentcache.store.directory import SCHEMA
from latentcache.store.upkeep import compact, prune, rebuild, verify

FORMATS = [2]
HERE = Path(__file__).parent


def test_every_format_has_its_golden_cache() -> None:
    assert FORMATS[-1] == SCHEMA, "a new format: run tests/golden/make_golden.py once, and commit what it makes"


@pytest.mark.parametrize("number", FORMATS)
def test_all_that_was_stored_is_read_and_survives_upkeep(tmp_path: Path, number: int) -> None:
    cache = shutil.copytree(HERE / f"format{number}", tmp_path / "cache")
    expected = json.loads((HERE / f"format{number}.json").read_text())

    def files() -> dict[Path, tuple[int, bytes]]:
        return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in cache.rglob("*") if path.is_file()}

    before = files()
    assert contents(cache) == expected
    assert files() == before, "reading changes nothing"
    assert verify(cache).ok
    shutil.rmtree(cache / "index")
    rebuild(cache)
    assert contents(cache) == expected
    with DiskStore(cache) as store:
        keys = [*store.keys()]
        assert prune(store, np.frombuffer(bytes.fromhex("".join(keys)), np.uint8).reshape(-1, 32)).num_entries == 0
        assert compact(store).num_entries == len(keys)
    assert contents(cache) == expected


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    cache = shutil.copytree(HERE / f"format{SCHEMA}", tmp_path / "cache")
    for path in cache.glob("packs/*/*.safetensors"):
        data = path.read_bytes()
        assert b'"latentcache":"2"' in data
        path.write_bytes(data.replace(b'"latentcache":"2"', b'"latentcache":"3"', 1))
    report = rebuild(cache)
    assert report.num_entries == 0 and len(report.unreadable) == 2
    assert all("format '3', this version reads '2'" in reason for reason in report.unreadable.values())
    path = cache / "manifests" / "golden.safetensors"
    data = path.read_bytes()
    assert b'"latentcache_manifest": "5"' in data
    path.write_bytes(data.replace(b'"latentcache_manifest": "5"', b'"latentcache_manifest": "6"', 1))
    with LatentCache(cache) as opened, pytest.raises(DatasetError, match=r"format is '6'.*reads 5"):
        opened.sample_ids()
