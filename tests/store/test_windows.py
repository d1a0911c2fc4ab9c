"""What Windows lacks and refuses, as far as another system can show it."""

from __future__ import annotations

import os
import subprocess
import sys
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

SCRIPT = """
import os, shutil, sys
from pathlib import Path
import diskcache, numpy, torch.utils.data  # what they need of the system is their own affair
for name in ("register_at_fork", "pread", "posix_fadvise", "fork", "O_CLOEXEC", "O_NONBLOCK"):
    delattr(os, name) if hasattr(os, name) else None
from helpers.remote_samples import make_cache
from latentcache import BucketBatchSampler, LatentCache, LatentDataset, LatentLoader
from latentcache.store.upkeep import compact, rebuild, verify
path = make_cache(Path(sys.argv[1]) / "cache")
with LatentLoader(BucketBatchSampler(LatentDataset(path), 4), device="cpu") as loader:
    assert len(list(loader)) == 12
assert verify(path).ok and rebuild(path).num_entries == 54 and compact(path).num_packs_after == 1
shutil.rmtree(path / "index")
assert len(LatentCache(path, read_only=True).batch(["0.png"], device="cpu")["latents"]) == 1
"""


def test_it_needs_nothing_of_the_system_that_windows_lacks(tmp_path: Path) -> None:
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=found, check=False)
    assert done.returncode == 0, done.stderr


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
