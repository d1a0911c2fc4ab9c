"""A cache on the Hugging Face hub: its snapshot has links, no index, and cannot be written. It opens as a cache."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import huggingface_hub
import pytest
import torch
from helpers.remote_samples import make_cache, make_manifest, packs_of
from torch.utils.data import DataLoader

from latentcache import BucketBatchSampler, LatentCache, LatentDataset
from latentcache.config import CacheConfig
from latentcache.errors import ReadOnlyError, RemoteError, StoreError
from latentcache.loading.status import status, verify
from latentcache.remote.transfer import transfer

URL = "hf://datasets/someone/photos"


def snapshot_of(cache: Path, folder: Path) -> Path:
    """What `snapshot_download` makes of a cache that `hf upload` sent: links to files that are named by digests."""
    blobs, snapshot = folder / "blobs", folder / "snapshots" / ("0" * 40)
    blobs.mkdir(parents=True)
    for number, path in enumerate(sorted(cache.rglob("*"))):
        name = path.relative_to(cache)
        if path.is_file() and (name.name == "CACHE.json" or name.parts[0] in ("packs", "manifests")):
            shutil.copy(path, blobs / str(number))
            (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
            (snapshot / name).symlink_to(os.path.relpath(blobs / str(number), (snapshot / name).parent))
    for path in folder.rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    return snapshot


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return make_cache(tmp_path / "cache")


@pytest.fixture
def asked(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the hub was asked for; it has a snapshot of the cache."""
    requests: list[dict[str, Any]] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))

    def download(repository: str, **options: Any) -> str:
        requests.append({"repository": repository, **options})
        folder = Path(options["cache_dir"]) / "datasets--someone--photos"
        return str(folder / "snapshots" / ("0" * 40) if folder.exists() else snapshot_of(cache, folder))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return requests


def test_a_snapshot_is_read_as_a_cache(
    cache: Path, asked: list[dict[str, Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with LatentCache(URL) as there, LatentCache(cache) as here:
        assert there.sample_ids() == here.sample_ids() and there.manifests.read("served") == make_manifest()
        left, right = (each.batch(here.sample_ids()[0::2], device="cpu", output="moments") for each in (there, here))
        assert all(torch.equal(left[name], right[name]) for name in ("moments", "prompt_embeds"))
        with pytest.raises(ReadOnlyError):
            there.store.writer()
    assert not caplog.records, "nothing is wrong"
    [request] = asked
    assert request["repository"] == "someone/photos" and request["repo_type"] == "dataset"
    folder = tmp_path / "xdg" / "latentcache"
    assert request["cache_dir"].is_relative_to(folder) and request["revision"] is None
    assert not list(folder.glob("*/packs/*/*")), "they are here already"


def test_workers_read_the_snapshot_that_the_dataset_was_made_with(
    asked: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = LatentDataset(URL)
    newer = snapshot_of(make_cache(tmp_path / "newer", num_samples=16), tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repository, **options: str(newer))
    batches = DataLoader(dataset, batch_sampler=BucketBatchSampler(dataset, 4), num_workers=1)
    assert sorted(name for batch in batches for name in batch["sample_id"]) == sorted(dataset.cache.sample_ids())


def test_it_is_verified_pulled_and_not_written(
    cache: Path, asked: list[dict[str, Any]], tmp_path: Path, run: Callable[..., Any]
) -> None:
    assert verify(URL).ok and status(URL).num_lost == 0
    assert verify(CacheConfig(path=URL, local=tmp_path / "local")).ok
    assert asked[-1]["cache_dir"].is_relative_to(tmp_path / "local"), "what is fetched there is not fetched again"
    assert transfer(URL, tmp_path / "back").manifests == ["served"]
    assert packs_of(tmp_path / "back") == packs_of(cache)
    with pytest.raises(ReadOnlyError, match="hf upload"):
        transfer(cache, URL)
    code, _, err = run("compact", URL)
    assert code == 2 and f"`latentcache pull {URL} DIRECTORY`" in err


def test_what_the_hub_refuses_is_an_error_with_a_next_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # As httpx raises when a file stops to come: it is no OSError.
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Mock(side_effect=Exception("The read timed out")))
    with pytest.raises(RemoteError, match=r"timed out.*hf auth login"):
        LatentCache(URL, local=tmp_path)
    for wrong in ("hf://someone/photos", "hf://models/a/b"):
        with pytest.raises(StoreError, match="hf://datasets/USER/NAME"):
            LatentCache(wrong)
