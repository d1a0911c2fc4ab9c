"""A service in place of a path: batches, commands, precache, import and export, and a server that dies."""

from __future__ import annotations

import json
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.relay import Relay
from helpers.remote_samples import make_cache, make_manifest
from helpers.serving import TOKEN, RunningServer, serving, serving_here
from torch.utils.data import DataLoader

from latentcache import (
    BucketBatchSampler,
    Config,
    DiskStore,
    LatentCache,
    LatentDataset,
    LatentLoader,
)
from latentcache.config import CacheConfig
from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.errors import ConfigError, ReadOnlyError, RemoteError, SampleError
from latentcache.models.model_loader import LoadedModels
from latentcache.models.tiny import tiny_parts
from latentcache.precache import plan as planner
from latentcache.precache.run import run_precache
from latentcache.precache.tasks import Shard
from latentcache.store.upkeep import compact

BATCH = 4


def plain(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with its tensors as bytes: equal ones are equal to the last bit."""
    return {n: v.numpy().tobytes() if isinstance(v, torch.Tensor) else v for n, v in batch.items()}


def epochs(where: Any, num: int = 1, **options: Any) -> list[dict[str, Any]]:
    """All batches of some epochs of a loader."""
    sampler = BucketBatchSampler(LatentDataset(where, **options), BATCH, seed=3)
    found = []
    with LatentLoader(sampler, device="cpu", scaled=True) as loader:
        for epoch in range(num):
            loader.set_epoch(epoch)
            found += [plain(batch) for batch in loader]
    sampler.dataset.cache.close()  # type: ignore[attr-defined]
    return found


@pytest.fixture
def token(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """The reading token, also in the environment."""
    assert server.token is not None
    monkeypatch.setenv("LATENTCACHE_TOKEN", server.token)
    return server.token


def test_batches_are_those_of_the_local_cache(
    server: RunningServer, served_cache: Path, token: str, tmp_path: Path
) -> None:
    expected = epochs(served_cache, 3)
    assert epochs(server.url, 3, token=token) == expected
    section = CacheConfig(path=server.url, local=tmp_path / "local", local_max_bytes=10**9)
    assert epochs(section, 3) == expected
    assert epochs(section, 3) == expected, "from the local tier"
    with LatentCache(server.url) as far, LatentCache(served_cache) as near:
        ids = near.sample_ids()[:8:2]
        assert far.sample_ids() == near.sample_ids() and far.text_shapes() == near.text_shapes()
        for options in ({}, {"output": "moments"}, {"scaled": True, "dtype": torch.bfloat16}):
            left, right = (cache.batch(ids, device="cpu", **options) for cache in (far, near))
            assert left.keys() == right.keys()
            assert all(
                torch.equal(left[n], v) if isinstance(v, torch.Tensor) else left[n] == v for n, v in right.items()
            )
        with pytest.raises(SampleError, match="is in no manifest"):
            far.batch(["absent.png"], device="cpu")
    datasets = LatentDataset(section, ["served"])
    assert datasets.bucket(0) == LatentDataset(served_cache).bucket(0)


def test_the_second_epoch_of_a_loader_needs_no_server(
    relay: Relay, served_cache: Path, token: str, tmp_path: Path
) -> None:
    dataset = LatentDataset(relay.url, local=tmp_path / "local")
    expected = epochs(served_cache, 8)
    with LatentLoader(BucketBatchSampler(dataset, BATCH, seed=3), device="cpu", scaled=True) as loader:
        found = [plain(batch) for batch in loader]
        num_requests = len(relay.requests)
        relay.change = lambda path, status, data: None  # from here on it is gone
        for epoch in range(1, 8):
            loader.set_epoch(epoch)
            found += [plain(batch) for batch in loader]
    assert found == expected and len(relay.requests) == num_requests
    dataset.cache.close()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_workers_of_a_data_loader_read_from_the_service(server: RunningServer, served_cache: Path, token: str) -> None:
    def read(where: Any, **options: Any) -> list[dict[str, Any]]:
        dataset = LatentDataset(where)
        loader = DataLoader(dataset, batch_sampler=BucketBatchSampler(dataset, BATCH, seed=3), **options)
        return [plain(batch) for batch in loader]

    workers = {"num_workers": 2, "multiprocessing_context": "fork", "generator": torch.Generator()}
    assert repr(read(server.url, **workers)) == repr(read(served_cache))


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_an_epoch_outlives_a_server_that_is_killed(tmp_path: Path, served_cache: Path) -> None:
    cache, port = make_cache(tmp_path / "cache"), free_port()
    expected = epochs(served_cache, 2)
    with serving(cache, tokens=False, writes=False, port=port) as first:
        dataset = LatentDataset(first.url, retry_s=60.0)
        loader = LatentLoader(BucketBatchSampler(dataset, BATCH, seed=3), device="cpu", scaled=True)
        batches = iter(loader)
        found = [plain(next(batches)) for _ in range(3)]
        first.stop(signal.SIGKILL)
    with serving(cache, tokens=False, writes=False, port=port) as second:
        assert second.url == first.url
        found += [plain(batch) for batch in batches]
        loader.set_epoch(1)
        found += [plain(batch) for batch in loader]
        assert found == expected
        dataset.cache.close()
    with pytest.raises(RemoteError, match="does not answer"):
        LatentDataset(first.url, retry_s=0.5)


# Commands


def test_commands_read_from_a_service(
    server: RunningServer, served_cache: Path, token: str, run: Callable[..., Any], run_json: Callable[..., Any]
) -> None:
    code, far = run_json("status", server.url)
    assert code == 0 and far.pop("path") == server.url
    near = run_json("status", served_cache)[1]
    near.pop("path")
    cut = [[manifest.pop("num_cut") for manifest in found["manifests"]] for found in (far, near)]
    assert cut == [[None], [0]], "the records of texts, which say it, are far away"
    assert far == near and far["manifests"][0]["num_samples"] == 48
    key = next(iter(make_manifest().rows["0.png"].keys()))
    assert run_json("show", "0.png", server.url) == run_json("show", "0.png", served_cache)
    assert run_json("show", key[:12], "--cache.path", server.url) == run_json("show", key[:12], served_cache)
    assert server.url in run("status", server.url)[1]
    code, report = run_json("verify", server.url)
    assert code == 0 and report["ok"] and (report["num_entries"], report["num_packs"]) == (54, 3)
    parts = [run_json("verify", server.url, "--subset", f"{part}/3")[1]["num_packs"] for part in (1, 2, 3)]
    assert sum(parts) == 3
    code, diagnosis = run_json("doctor", "--cache.path", server.url)
    assert f"{server.url} has no disk here" in json.dumps(diagnosis)


@pytest.mark.parametrize("command", ["prune", "compact", "rebuild"])
def test_commands_about_a_directory_say_so(run: Callable[..., Any], command: str) -> None:
    code, _, err = run(command, "http://127.0.0.1:9")
    assert code == 2 and "works on the cache's own directory" in err and "on the machine that serves" in err


def test_verify_finds_damage_over_http(
    tmp_path: Path, run_json: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make_cache(tmp_path / "cache", num_samples=16)
    (pack,) = cache.glob("packs/*/*.safetensors")
    with serving_here(cache, token=TOKEN) as server:
        monkeypatch.setenv("LATENTCACHE_TOKEN", str(server.token))
        assert run_json("verify", server.url)[1]["ok"]
        data = bytearray(pack.read_bytes())
        with DiskStore(cache, read_only=True) as disk:
            key = next(iter(make_manifest().rows["2.png"].keys()))
            data[data.index(disk.get(key).tensors["moments"].numpy().tobytes()) + 7] ^= 1
        pack.write_bytes(data)
        code, report = run_json("verify", server.url)
        assert code == 1 and report["damaged"].keys() == {key}
        monkeypatch.setenv("LATENTCACHE_TOKEN", str(server.write_token))
        # The service finds it too, when it is asked for the entry, and marks it.
        assert run_json("verify", server.url)[1]["damaged"].keys() == {key}
        assert run_json("status", server.url)[1]["num_lost"] == 1, "it is a miss now: precache makes it again"
        pack.write_bytes(b"no pack")
        code, report = run_json("verify", server.url)
        assert code == 1 and len(report["unreadable"]) == 1


@pytest.mark.parametrize("num_damaged", [1, 2])
def test_what_was_damaged_on_its_way_is_not_marked(
    relay: Relay, server: RunningServer, monkeypatch: pytest.MonkeyPatch, run_json: Callable[..., Any], num_damaged: int
) -> None:
    """Neither where the second transfer is good, nor where it is damaged too."""
    left = [num_damaged]

    def damage(path: str, status: int, data: bytes) -> bytes:
        if "/packs/" not in path or not left[0]:
            return data
        left[0] -= 1
        return data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]

    relay.change = damage
    monkeypatch.setenv("LATENTCACHE_TOKEN", str(server.write_token))
    code, report = run_json("verify", relay.url)
    assert (code, report["damaged"], report["num_entries"]) == (0, {}, 54)
    assert run_json("verify", server.url)[1]["num_entries"] == 54


# Filling it


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, Path]]:
    """A server that tests fill, and its directory."""
    cache = tmp_path_factory.mktemp("filled") / "remote"
    DiskStore(cache).close()
    with serving(cache) as server:
        yield server, cache


@pytest.fixture
def empty(filled: tuple[RunningServer, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[RunningServer]:
    """A server of an empty cache, whose writing token is in the environment."""
    server, cache = filled
    monkeypatch.setenv("LATENTCACHE_TOKEN", str(server.write_token))
    with DiskStore(cache) as store:
        store.remove(list(store.keys()))
        compact(store)
    server.get("/v1/packs")  # it looks what is there now
    for manifest in cache.glob("manifests/*"):
        manifest.unlink()
    yield server


def test_precache_fills_a_service(
    empty: RunningServer,
    filled: tuple[RunningServer, Path],
    make_config: Callable[..., Config],
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    near, far = make_config(), make_config(**{"cache.path": empty.url})
    expected = run_precache(near)
    dry = run_precache(far, dry_run=True)
    assert dry.num_misses == expected.num_misses and dry.num_encoded == 0
    report = run_precache(far)
    assert (report.num_encoded, report.num_misses) == (expected.num_encoded, expected.num_misses)
    assert report.cache["path"] == empty.url and report.cache["num_entries"] == expected.cache["num_entries"]
    folder = ManifestFolder(filled[1] / "manifests")
    assert folder.unfinished() == {} and len(folder.names()) == 2
    for name in folder.names():
        left, right = folder.read(name), ManifestFolder(near.cache.path / "manifests").read(name)
        assert left == right
    again = run_precache(far)
    assert again.num_misses == again.num_encoded == 0 and again.num_hits == report.num_misses
    assert list((tmp_path / "xdg" / "latentcache").glob("*/memo")), "files that did not change are not read again"
    assert epochs(far.cache) == epochs(near.cache)
    with LatentCache(far.cache) as cache, LatentCache(near.cache) as local:
        left, right = (each.prompt("a validation prompt", device="cpu") for each in (cache, local))
        assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
    monkeypatch.setenv("LATENTCACHE_TOKEN", str(empty.token))
    (photos / "b.txt").write_text("another caption\n")
    assert run_precache(far, dry_run=True).num_misses == 1
    with pytest.raises(ReadOnlyError, match="writing token"):
        run_precache(far)


def test_two_precaches_at_once_fill_one_service(
    tmp_path: Path, make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on two machines: both encode the same entries, each is stored once, and both end with whole manifests."""
    DiskStore(tmp_path / "shared").close()
    with serving_here(tmp_path / "shared", token=TOKEN) as server, ThreadPoolExecutor(2) as threads:
        monkeypatch.setenv("LATENTCACHE_TOKEN", str(server.write_token))
        config = make_config(**{"cache.path": server.url, "encode.batch_size": 1})
        needed = run_precache(config, dry_run=True).num_misses
        both, make_plan = threading.Barrier(2), planner.make_plan

        def plan_then_wait(*arguments: Any, **options: Any) -> Any:
            plan = make_plan(*arguments, **options)
            both.wait(60)
            return plan

        monkeypatch.setattr("latentcache.precache.run.make_plan", plan_then_wait)
        models = [LoadedModels(**tiny_parts()) for _ in range(2)]
        running = [threads.submit(run_precache, config, models=each) for each in models]
        reports = [each.result() for each in running]
        assert [report.num_misses for report in reports] == [needed] * 2
        assert needed <= sum(report.num_encoded for report in reports) <= 2 * needed
        with LatentCache(config.cache) as cache:
            assert len(list(cache.store.keys())) == needed and cache.store.stats().num_damaged == 0
            assert cache.batch(cache.sample_ids()[:1], device="cpu")["sample_id"]
    assert ManifestFolder(tmp_path / "shared" / "manifests").unfinished() == {}


def test_ranks_share_a_service(
    empty: RunningServer, filled: tuple[RunningServer, Path], make_config: Callable[..., Config]
) -> None:
    config, folder = make_config(**{"cache.path": empty.url}), ManifestFolder(filled[1] / "manifests")
    first, last = (run_precache(config, shard=Shard(rank, 2, local_world_size=2)) for rank in range(2))
    assert first.manifests_waiting and not last.manifests_waiting
    assert first.num_encoded and last.num_encoded and len(folder.names()) == 2 and folder.unfinished() == {}
    with LatentCache(config.cache) as cache:
        assert len(cache.batch(cache.sample_ids()[:1], device="cpu")["sample_id"]) == 1
        assert cache.store.find(cache.manifest("photos").keys()) == cache.manifest("photos").keys()


@pytest.mark.parametrize("local", [None, 1])
def test_ranks_of_several_machines_are_refused_by_a_precache_over_a_service(
    empty: RunningServer, filled: tuple[RunningServer, Path], make_config: Callable[..., Config], local: int | None
) -> None:
    """Neither would learn which images the other refused, and each would wait for the other's entries."""
    config = make_config(**{"cache.path": empty.url})
    with pytest.raises(ConfigError, match=r"WORLD_SIZE: 2 ranks fill .* LOCAL_WORLD_SIZE is (1|not set)"):
        run_precache(config, shard=Shard(0, 2, local_world_size=local))
    assert ManifestFolder(filled[1] / "manifests").unfinished() == {}
    assert run_precache(config, shard=Shard(0, 2), dry_run=True).num_misses
