"""What Windows refuses, as far as another system can show it; what it lacks is shown by the lane `windows`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.remote_samples import entries_of, make_cache
from obstore.store import LocalStore

from latentcache.remote import tier
from latentcache.remote.bucket import BucketTransport
from latentcache.remote.store import RemoteStore
from latentcache.store import DiskStore, directory
from latentcache.store.batch import read_batch
from latentcache.store.upkeep import compact

MAPS = Path("/proc/self/maps")
IMAGES = [entries_of(number)[0] for number in range(0, 48, 2)]  # one bucket
KEYS = [entry.record.key for entry in IMAGES]
MOMENTS = torch.stack([entry.tensors["moments"] for entry in IMAGES])


@pytest.fixture
def keeps_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that this process has mapped can be renamed, but neither removed nor replaced."""
    if not MAPS.exists():
        pytest.skip("nothing says which files are mapped")

    def refusing(call: Any, target: int) -> Any:
        def replaced(*paths: Any, **options: Any) -> Any:
            if f"{os.path.realpath(paths[target])}\n" in MAPS.read_text():
                raise PermissionError(13, "in use", str(paths[target]))
            return call(*paths, **options)

        return replaced

    for place, name, target in ((Path, "unlink", 0), (Path, "replace", 1), (os, "replace", 1)):
        monkeypatch.setattr(place, name, refusing(getattr(place, name), target))
    for module in (directory, tier):
        monkeypatch.setattr(module, "KEEPS_MAPPED", True)


def test_a_tier_without_room_goes_on(keeps_mapped: None, tmp_path: Path) -> None:
    transport = BucketTransport(LocalStore(make_cache(tmp_path / "cache")), "s3://bucket/cache")
    with RemoteStore(transport, local=tmp_path / "local", local_max_bytes=1) as store:
        for _ in range(2):
            assert read_batch(store, KEYS)["moments"].equal(MOMENTS)
            for first in range(0, len(KEYS), 4):
                assert read_batch(store, KEYS[first : first + 4])["moments"].equal(MOMENTS[first : first + 4])


def test_a_pack_that_was_damaged_in_the_tier_is_fetched_again(keeps_mapped: None, tmp_path: Path) -> None:
    transport = BucketTransport(LocalStore(make_cache(tmp_path / "cache")), "s3://bucket/cache")
    for _ in range(2):
        with RemoteStore(transport, local=tmp_path / "local") as store:
            assert read_batch(store, KEYS)["moments"].equal(MOMENTS)
            assert not store.damaged()
        for path in (tmp_path / "local").glob("*/packs/*/*.safetensors"):
            data = path.read_bytes()
            path.write_bytes(data.replace(MOMENTS[0].numpy().tobytes(), bytes(MOMENTS[0].nbytes)))


def test_compact_removes_what_this_process_has_read(keeps_mapped: None, tmp_path: Path) -> None:
    with DiskStore(make_cache(tmp_path / "cache")) as store:
        assert read_batch(store, KEYS)["moments"].equal(MOMENTS)
        assert compact(store).num_packs_after == 1
        assert read_batch(store, KEYS)["moments"].equal(MOMENTS)
