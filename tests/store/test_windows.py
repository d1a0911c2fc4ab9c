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
from latentcache.store import directory
from latentcache.store.batch import read_batch

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


@pytest.mark.parametrize("options", [{"local_max_bytes": 1}, {}], ids=["no room", "room"])
def test_a_tier_gives_way_to_what_is_mapped(keeps_mapped: None, tmp_path: Path, options: Any) -> None:
    """It goes on without room, and where there is room it fetches a pack again that was damaged."""
    transport = BucketTransport(LocalStore(make_cache(tmp_path / "cache")), "s3://bucket/cache")
    for _ in range(2):
        with RemoteStore(transport, local=tmp_path / "local", **options) as store:
            for first in (0, 0, 4, 8):
                rows = slice(first, first + 4 if first else None)
                assert read_batch(store, KEYS[rows])["moments"].equal(MOMENTS[rows])
            assert not store.damaged()
        for path in (tmp_path / "local").glob("*/packs/*/*.safetensors"):
            data = path.read_bytes()
            path.write_bytes(data.replace(MOMENTS[0].numpy().tobytes(), bytes(MOMENTS[0].nbytes)))
