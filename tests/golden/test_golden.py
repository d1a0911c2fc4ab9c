"""A cache that was committed when its format came is read for ever, bit for bit; a newer one is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from golden.golden_contents import contents

from latentcache import DiskStore, LatentCache
from latentcache.errors import DatasetError, PackError
from latentcache.store.directory import SCHEMA
from latentcache.store.pack import read_row
from latentcache.store.upkeep import compact, prune, rebuild, verify

FORMATS = [2]
HERE = Path(__file__).parent


@pytest.fixture(params=FORMATS, ids="format {}".format)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of the committed cache that may be written."""
    cache = shutil.copytree(HERE / f"format{request.param}", tmp_path / "cache")
    shutil.copy(HERE / f"format{request.param}.json", tmp_path / "expected.json")
    return cache


def expected(cache: Path) -> object:
    return json.loads((cache.parent / "expected.json").read_text())


def test_every_format_has_its_golden_cache():
    assert FORMATS[-1] == SCHEMA, "a new format: run tests/golden/make_golden.py once, and commit what it makes"


def test_all_that_was_stored_is_read(golden: Path) -> None:
    assert contents(golden) == expected(golden)
    assert verify(golden).ok


def test_reading_changes_nothing(golden: Path) -> None:
    def files() -> dict[Path, tuple[int, bytes]]:
        return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in golden.rglob("*") if path.is_file()}

    before = files()
    contents(golden)
    assert files() == before


def test_the_index_is_made_from_the_packs(golden: Path) -> None:
    shutil.rmtree(golden / "index")
    rebuild(golden)
    assert contents(golden) == expected(golden)


def test_it_survives_upkeep(golden: Path) -> None:
    with DiskStore(golden) as store:
        keys = set(store.keys())
        assert prune(store, keys).num_entries == 0
        assert compact(store).num_entries == len(keys)
    assert contents(golden) == expected(golden)


def test_a_newer_manifest_is_refused(golden: Path) -> None:
    path = golden / "manifests" / "golden.safetensors"
    data = path.read_bytes()
    assert b'"latentcache_manifest": "5"' in data
    path.write_bytes(data.replace(b'"latentcache_manifest": "5"', b'"latentcache_manifest": "6"', 1))
    with LatentCache(golden) as cache, pytest.raises(DatasetError, match=r"format '6'.*reads 5"):
        cache.sample_ids()


def test_a_newer_pack_is_refused(golden: Path) -> None:
    for path in golden.glob("packs/*/*.safetensors"):
        data = path.read_bytes()
        assert b'"latentcache":"2"' in data
        path.write_bytes(data.replace(b'"latentcache":"2"', b'"latentcache":"3"', 1))
        with pytest.raises(PackError, match=r"format '3'.*reads '2'"):
            read_row(path)
    report = rebuild(golden)
    assert report.num_entries == 0 and len(report.unreadable) == 2
