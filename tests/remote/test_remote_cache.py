"""A service or a bucket in place of a path: batches, commands, precache, and a server that is away."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.far_caches import Far
from helpers.foreign_samples import Foreign, image, pairs
from helpers.pack_damage import damage
from helpers.relay import Relay
from helpers.remote_samples import assert_same, entries_by_key, entries_of, fill, key_of_image
from helpers.serving import TOKEN, RunningServer, served_store, serving_here

from latentcache import BucketBatchSampler, Config, LatentCache, LatentDataset, LatentLoader
from latentcache.config import TOKEN_VARIABLE, CacheConfig
from latentcache.dataset.manifest_folder import ManifestFolder, keys_in_use
from latentcache.errors import ConfigError, DatasetError, SampleError, StoreError
from latentcache.interop.importing import import_cache
from latentcache.interop.readers import ForeignItem
from latentcache.loading.status import status
from latentcache.models.model_loader import LoadedModels
from latentcache.models.tiny import tiny_parts
from latentcache.precache import plan as planner
from latentcache.precache.run import run_precache
from latentcache.precache.tasks import Shard
from latentcache.precache.workspace import open_workspace
from latentcache.store.upkeep import compact, prune

BATCH = 4
MakeConfig = Callable[..., Config]
Run = Callable[..., Any]


def plain(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch with its tensors as bytes: equal ones are equal to the last bit."""
    return {n: v.float().numpy().tobytes() if isinstance(v, torch.Tensor) else v for n, v in batch.items()}


def epochs(where: Any, num: int = 1, **options: Any) -> list[dict[str, Any]]:
    """All batches of some epochs of a loader."""
    dataset = LatentDataset(where, **options)
    found = []
    with LatentLoader(BucketBatchSampler(dataset, BATCH, seed=3), device="cpu", scaled=True) as loader:
        for epoch in range(num):
            loader.set_epoch(epoch)
            found += [plain(batch) for batch in loader]
    dataset.cache.close()
    return found


def test_batches_are_those_of_the_local_cache(server: RunningServer, token: str, tmp_path: Path) -> None:
    expected = epochs(server.cache, 2)
    assert epochs(server.url, 2, token=token) == expected
    section = CacheConfig(path=server.url, local=tmp_path / "local", local_max_bytes=10**9)
    for _ in range(2):  # then from the local tier
        assert epochs(section, 2) == expected
    with LatentCache(server.url) as far, LatentCache(server.cache) as near:
        ids = near.sample_ids()[:8:2]
        assert far.sample_ids() == near.sample_ids() and far.text_shapes() == near.text_shapes()
        for options in ({}, {"output": "moments"}, {"scaled": True, "dtype": torch.bfloat16}):
            left, right = (plain(cache.batch(ids, device="cpu", **options)) for cache in (far, near))
            assert left == right
        with pytest.raises(SampleError, match="is in no manifest"):
            far.batch(["absent.png"], device="cpu")


def test_a_loader_waits_for_a_server_that_is_away_and_its_second_epoch_needs_none(
    relay: Relay, server: RunningServer, token: str, tmp_path: Path
) -> None:
    def set_away(away: bool) -> None:
        relay.change = (lambda path, status, data: None) if away else None

    set_away(True)
    threading.Timer(1.0, set_away, [False]).start()
    dataset = LatentDataset(relay.url, local=tmp_path / "local", retry_s=60.0)
    with LatentLoader(BucketBatchSampler(dataset, BATCH, seed=3), device="cpu", scaled=True) as loader:
        found = [plain(batch) for batch in loader]
        set_away(True)
        num_requests = len(relay.requests)
        loader.set_epoch(1)
        found += [plain(batch) for batch in loader]
    assert found == epochs(server.cache, 2) and len(relay.requests) == num_requests
    dataset.cache.close()


# Commands


def test_commands_read_from_a_service(server: RunningServer, token: str, run: Run, run_json: Run) -> None:
    code, far = run_json("status", server.url)
    assert code == 0 and far.pop("path") == server.url
    near = run_json("status", server.cache)[1]
    near.pop("path")
    cut = [[manifest.pop("num_cut") for manifest in found["manifests"]] for found in (far, near)]
    assert cut == [[None], [0]], "the records of texts, which say it, are far away"
    assert far == near and far["manifests"][0]["num_samples"] == 48
    assert run_json("show", "0.png", server.url) == run_json("show", "0.png", server.cache)
    key = key_of_image(0)[:12]
    assert run_json("show", key, "--cache.path", server.url) == run_json("show", key, server.cache)
    assert server.url in run("status", server.url)[1]
    code, report = run_json("verify", server.url)
    assert code == 0 and report["ok"] and (report["num_entries"], report["num_packs"]) == (54, 3)
    parts = [run_json("verify", server.url, "--subset", f"{part}/3")[1]["num_packs"] for part in (1, 2, 3)]
    assert sum(parts) == 3
    _, diagnosis = run_json("doctor", "--cache.path", server.url)
    assert f"{server.url} has no disk here" in json.dumps(diagnosis)


@pytest.mark.parametrize("command", ["prune", "compact", "rebuild"])
def test_commands_about_a_directory_say_so(run: Run, command: str) -> None:
    code, _, err = run(command, "http://127.0.0.1:9")
    assert code == 2 and "needs the directory of the cache" in err and "on the machine that serves" in err


def test_verify_marks_damage_there_and_none_on_the_way(service: Far, run_json: Run) -> None:
    """A reader believes the second transfer, and a writer the service, where that is damaged too."""
    left = list[int]()

    def verified(token: str | None) -> tuple[int, Any]:
        with pytest.MonkeyPatch.context() as patched:
            if token is not None:
                patched.setenv(TOKEN_VARIABLE, token)
            return run_json("verify", service.url)  # type: ignore[no-any-return]

    assert service.folder is not None
    fill(service.folder, range(16))
    service.relay.change = lambda path, _, data: (
        data[:-5] + bytes([data[-5] ^ left.pop()]) + data[-4:] if left and "/packs/" in path else data
    )
    for token, num_damaged in ((TOKEN, 1), (None, 2)):
        left += [1] * num_damaged
        code, report = verified(token)
        assert (code, report["damaged"], report["num_entries"], left) == (0, {}, 18, [])
    damage(service.folder, entries_of(2)[0].tensors["moments"].numpy().tobytes())
    for token, num_lost in ((TOKEN, 0), (None, 1)):  # the service finds it too, and marks it for one who may write
        code, report = verified(token)
        assert code == 1 and report["damaged"].keys() == {key_of_image(2)}
        assert run_json("status", service.url)[1]["num_lost"] == num_lost, "a miss: precache makes it again"


@pytest.mark.parametrize("answered", [1, 2])
def test_packs_that_are_compacted_after_they_were_listed(service: Far, tmp_path: Path, answered: int) -> None:
    assert service.folder is not None
    fill(service.folder, range(16), per_pack=2)
    lists: list[int] = []

    def compact_first(path: str, status: int, data: bytes) -> bytes:
        lists.extend([len(data)] if path.endswith("/packs") else [])
        if path.endswith("/packs") and len(lists) <= answered:
            assert service.folder is not None
            fill(service.folder, range(16 + len(lists), 17 + len(lists)), name=None)  # a small pack, to join
            compact(service.folder)
        return data

    service.relay.change = compact_first
    with served_store(service.url, local=tmp_path / "tier") as store:
        for key, entry in entries_by_key(range(16)).items():
            assert_same(store.get(key), entry)
    assert len(lists) > answered


def test_a_prune_on_the_server_leaves_what_is_being_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fill(tmp_path / "far", range(2))
    manifests = ManifestFolder(folder / "manifests")
    for path in (manifests.file("photos"), manifests.path):
        os.utime(path, (0, 0))  # before the server began to read
    found = list[str]()

    class PrunedMeanwhile(Foreign):
        def items(self) -> Iterator[ForeignItem]:
            yield from self.contents[:-1]
            with pytest.raises(StoreError) as refused:
                prune(folder, partial(keys_in_use, manifests))
            found.append(str(refused.value))
            yield self.contents[-1]

    monkeypatch.setattr("latentcache.store.writer.PACK_ENTRIES", 2)
    with serving_here(folder, token=TOKEN) as server:
        monkeypatch.setenv(TOKEN_VARIABLE, str(server.write_token))
        with open_workspace(CacheConfig(path=server.url)) as workspace:
            foreign = PrunedMeanwhile(pairs(*map("{}.png".format, range(8))))
            assert import_cache(foreign, workspace, name="foreign").num_samples == 8
            with pytest.raises(DatasetError):  # not scaled as it says
                import_cache(Foreign([image("a.png", std=0.01)]), workspace, name="other")
        assert "not finished: foreign" in found[0] and not manifests.unfinished()
        assert status(server.url).num_lost == 0


def test_precache_fills_a_cache_elsewhere(far: Far, make_config: MakeConfig, tmp_path: Path, run: Run) -> None:
    here, there = make_config(), make_config(**{"cache.path": far.url})
    expected = run_precache(here)
    dry = run_precache(there, dry_run=True)
    assert dry.num_misses == expected.num_misses and dry.num_encoded == 0 and far.transport().list("") == {}
    report = run_precache(there)
    assert (report.num_encoded, report.num_misses) == (expected.num_encoded, expected.num_misses)
    assert report.cache["path"] == far.url and report.cache["num_entries"] == expected.cache["num_entries"]
    assert isinstance(here.cache.path, Path)
    names = far.manifests().names()
    assert far.unfinished() == [] and len(names) == 2
    for name in names:
        assert far.manifests().read(name) == ManifestFolder(here.cache.path / "manifests").read(name)
    again = run_precache(there)
    assert again.num_misses == again.num_encoded == 0 and again.num_hits == report.num_misses
    assert list((tmp_path / "xdg" / "latentcache").glob("*/memo")), "files that did not change are not read again"
    assert epochs(there.cache) == epochs(here.cache)
    with LatentCache(there.cache) as cache, LatentCache(here.cache) as local:
        assert set(cache.store.keys()) == set(local.store.keys())
        left, right = (plain(each.prompt("a validation prompt", device="cpu")) for each in (cache, local))
        assert left == right
    code, out, _ = run("status", far.url)
    assert code == 0 and far.url in out and status(far.url).num_lost == status(far.url).num_unused == 0


def test_two_precaches_at_once_fill_one_service(
    service: Far, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on two machines: both encode the same entries, each is stored once, and both end with whole manifests."""
    config = make_config(**{"cache.path": service.url, "encode.batch_size": 1})
    needed = run_precache(config, dry_run=True).num_misses
    both, make_plan = threading.Barrier(2), planner.make_plan

    def plan_then_wait(*arguments: Any, **options: Any) -> Any:
        plan = make_plan(*arguments, **options)
        both.wait(60)
        return plan

    monkeypatch.setattr("latentcache.precache.run.make_plan", plan_then_wait)
    models = [LoadedModels(**tiny_parts()) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        reports = list(threads.map(lambda each: run_precache(config, models=each), models))
    assert [report.num_misses for report in reports] == [needed] * 2
    assert needed <= sum(report.num_encoded for report in reports) <= 2 * needed
    with LatentCache(config.cache) as cache:
        assert len(list(cache.store.keys())) == needed and cache.store.stats().num_damaged == 0
        assert cache.batch(cache.sample_ids()[:1], device="cpu")["sample_id"]
    assert service.unfinished() == []


def test_ranks_of_one_machine_share_a_service(service: Far, make_config: MakeConfig) -> None:
    """Of several machines neither would learn which images the other refused, and each would wait for the other."""
    config = make_config(**{"cache.path": service.url})
    for local in (None, 1):
        with pytest.raises(ConfigError, match=r"WORLD_SIZE: 2 ranks fill .* LOCAL_WORLD_SIZE is (1|not set)"):
            run_precache(config, shard=Shard(0, 2, local_world_size=local))
    assert service.unfinished() == [] and run_precache(config, shard=Shard(0, 2), dry_run=True).num_misses
    first, last = (run_precache(config, shard=Shard(rank, 2, local_world_size=2)) for rank in range(2))
    assert first.manifests_waiting and not last.manifests_waiting
    assert first.num_encoded and last.num_encoded
    assert len(service.manifests().names()) == 2 and service.unfinished() == []
    with LatentCache(config.cache) as cache:
        assert len(cache.batch(cache.sample_ids()[:1], device="cpu")["sample_id"]) == 1
        assert cache.store.find(cache.manifest("photos").keys()) == cache.manifest("photos").keys()
