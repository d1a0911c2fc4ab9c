"""The loader: the cache's values in the sampler's order, whatever the threads do; and whole batches as items."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ragged_samples import fill
from loading import by_hand, ids, lose_image, num_threads, plain, wait_for_no_thread
from torch.utils.data import DataLoader

from latentcache import BucketBatchSampler, CachedBatches, DiskStore, LatentDataset, LatentLoader, unpadded
from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.errors import SampleError, StoreError

PREFETCH = pytest.mark.parametrize("prefetch", [0, 2])


@pytest.fixture
def dataset(path: Path) -> LatentDataset:
    return LatentDataset(path, flips=True, caption="random")


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    if num_threads():
        gc.collect()
    wait_for_no_thread()


def sampler_of(dataset: LatentDataset, rank: int = 0, world_size: int = 1) -> BucketBatchSampler:
    return BucketBatchSampler(dataset, 3, seed=5, rank=rank, world_size=world_size)


def loader_of(dataset: LatentDataset, **options: Any) -> LatentLoader:
    return LatentLoader(sampler_of(dataset), **{"device": "cpu", "scaled": True, **options})


@PREFETCH
def test_a_run_resumes_after_what_was_handed_out(dataset: LatentDataset, prefetch: int) -> None:
    """In this epoch and the following ones, with the dataset's batches bit for bit."""
    sampler = sampler_of(dataset)
    expected = [by_hand(sampler, epoch=epoch) for epoch in range(3)]
    assert len(expected[0]) == len(sampler) == 7 and expected[1] != expected[0]
    for stop in (1, 5, 7):
        first = loader_of(dataset, prefetch=prefetch)
        with iter(first) as batches:
            assert [plain(next(batches)) for _ in range(stop)] == expected[0][:stop]
            time.sleep(0.02)  # time to read ahead
            state = first.state_dict()
        second = loader_of(dataset, prefetch=2 - prefetch)
        second.load_state_dict(state)
        assert [plain(batch) for batch in second] == expected[0][stop:]
        second.set_epoch(1)
        assert [plain(batch) for batch in second] == expected[1]
    with loader_of(dataset, prefetch=prefetch) as loader:
        batches = loader.forever()
        assert [plain(next(batches)) for _ in range(20)] == [*expected[0], *expected[1], *expected[2]][:20]
        state = loader.state_dict()
        assert (state["epoch"], state["position"]) == (2, 6)
        with loader_of(dataset, prefetch=2 - prefetch) as other:
            other.load_state_dict(state)
            following = other.forever()
            for _ in range(2):
                assert plain(next(following)) == plain(next(batches))


@PREFETCH
def test_a_lost_sample_is_named_at_its_batch(dataset: LatentDataset, prefetch: int) -> None:
    with loader_of(dataset, prefetch=prefetch) as loader:
        expected = by_hand(loader.sampler)
        lose_image(dataset, "c.png")
        got, batches = [], iter(loader)
        with pytest.raises(SampleError, match=r"'c\.png': has no entry.*latentcache precache") as raised:
            while True:
                got.append(plain(next(batches)))
        assert got == expected[: len(got)] and "c.png" in expected[len(got)]["sample_id"]
        assert f"batch {len(got)} of epoch 0" in raised.value.__notes__[0]
        assert loader.state_dict()["position"] == len(got)
        with pytest.raises(SampleError, match=r"c\.png"):
            next(batches)  # not the end of the epoch


@PREFETCH
def test_lost_samples_can_be_skipped(path: Path, prefetch: int, caplog: pytest.LogCaptureFixture) -> None:
    dataset = LatentDataset(path)
    lose_image(dataset, "c.png")
    lose_image(dataset, "d.png")  # now its whole bucket is gone
    caplog.set_level(logging.WARNING, logger="latentcache")
    with loader_of(dataset, prefetch=prefetch, damaged="skip") as loader:
        seen = [name for batch in ids(loader) for name in batch]
        assert sorted(seen) == sorted(["a.png", "b.png", "sub/e.png"] * 2)
        assert loader.num_skipped == 4 and loader.skipped.keys() == {"c.png", "d.png"}
        assert loader.state_dict()["position"] >= 2
        loader.set_epoch(1)
        assert len(ids(loader)) == 2
    logged = [record.getMessage() for record in caplog.records]
    assert [sum(name in line for line in logged) for name in ("c.png", "d.png")] == [1, 1]
    for rank in range(2):
        sampler = BucketBatchSampler(dataset, 1, rank=rank, world_size=2)
        with pytest.raises(SampleError, match=r"no other sample is left in its batch.*no batch can be skipped"):
            list(LatentLoader(sampler, device="cpu", damaged="skip", prefetch=prefetch))


def test_only_the_lost_one_of_two_samples_of_one_name_is_left_out(tmp_path: Path) -> None:
    with DiskStore(tmp_path) as store:
        folder = ManifestFolder(tmp_path / "manifests")
        lost = fill(store, folder, "sdxl", [4, 4], name="main").rows["0"].images[0].key
        other = fill(store, folder, "sdxl", [4], name="other", first=3)
        folder.write(other.with_rows({"0": replace(other.rows["3"], sample_id="0")}))
        assert store.remove([lost]) == 1
    loader = loader_of(LatentDataset(tmp_path, ["main", "other"]), damaged="skip")
    rows_read = [row for batch in loader for row in zip(batch["dataset"], batch["sample_id"], strict=True)]
    assert sorted(rows_read) == [("main", "1"), ("other", "0")] and loader.num_skipped == 1


def test_an_early_break_an_exception_and_a_dropped_iterator_end_the_thread(dataset: LatentDataset) -> None:
    loader = loader_of(dataset)
    for _ in loader:
        assert num_threads() == 1
        break
    wait_for_no_thread()
    with pytest.raises(ValueError, match="the training step"):
        for _ in loader:
            raise ValueError("the training step")
    wait_for_no_thread()
    batches = iter(loader)
    next(batches)
    del batches
    wait_for_no_thread()


def test_several_iterations_at_once_and_close(dataset: LatentDataset) -> None:
    loader = loader_of(dataset)
    expected = by_hand(loader.sampler)
    one, two = iter(loader), iter(loader)
    for batch in expected[:4]:
        assert plain(next(one)) == batch and plain(next(two)) == batch
    kept = next(one)
    loader.close()
    assert num_threads() == 0, "close waits for the threads"
    assert plain(kept) == expected[4]
    for use in (lambda: next(one), lambda: iter(loader)):
        with pytest.raises(StoreError, match="closed"):
            use()


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded, use of fork:DeprecationWarning")
def test_a_fork_is_told_to_make_its_own_iterator(dataset: LatentDataset) -> None:
    loader = loader_of(dataset)
    expected = by_hand(loader.sampler)
    batches = iter(loader)
    next(batches)
    if (pid := os.fork()) == 0:
        code = 1
        try:
            with pytest.raises(StoreError, match="does not have the thread"):
                next(batches)
            code = 0 if [plain(batch) for batch in loader] == expected else 2
            loader.close()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert [plain(batch) for batch in batches] == expected[1:]


def test_the_process_ends_in_the_middle_of_an_iteration(path: Path) -> None:
    script = (
        "import sys\n"
        "from latentcache import BucketBatchSampler, LatentDataset, LatentLoader\n"
        "batches = LatentLoader(BucketBatchSampler(LatentDataset(sys.argv[1]), 1), device='cpu').forever()\n"
        "next(batches)\n"
    )
    command = [sys.executable, "-c", script, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr


def test_settings_that_make_no_sense(dataset: LatentDataset) -> None:
    for options, message in (
        ({"prefetch": -1}, "prefetch is -1"),
        ({"output": "pixels"}, "output is 'pixels'; it must be one of latents, mean, moments"),
        ({"damaged": "ignore"}, "damaged is 'ignore'"),
        ({"output": "moments"}, "moments are stored unscaled"),
        ({"encode": "precache"}, r"encode is a str; it must be a function.*partial\(run_precache"),
    ):
        with pytest.raises(StoreError, match=message):
            loader_of(dataset, **options)
    with pytest.raises(StoreError, match="needs a sampler, not a dataset"):
        LatentLoader(dataset, device="cpu")  # type: ignore[arg-type]  # a common mistake
    with pytest.raises(StoreError, match="items has no batch: use a batch_size below 100"):
        BucketBatchSampler(dataset, 100, drop_last=True)


# Whole batches as items ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("output", "scaled"), [("latents", True), ("mean", False), ("moments", False)])
def test_item_n_is_the_nth_batch_of_the_loader_in_each_epoch(dataset: LatentDataset, output: Any, scaled: bool) -> None:
    options: dict[str, Any] = {"output": output, "scaled": scaled, "dtype": torch.float32}
    for rank in range(2):
        batches = CachedBatches(sampler_of(dataset, rank, 2), **options)
        loader = LatentLoader(sampler_of(dataset, rank, 2), device="cpu", prefetch=0, **options)
        for epoch in (0, 2, 1):
            loader.set_epoch(epoch)
            batches.sampler.set_epoch(epoch)  # as if the sampler were shared with another loader
            batches.set_epoch(epoch)
            expected = [plain(batch) for batch in loader]
            assert len(batches) == len(expected) == 3
            assert [plain(batches[number]) for number in (2, 0, 1, -1)] == [*expected[2:], *expected]
    assert unpadded(batches[0], "prompt_embeds")[1].equal(batches[0]["prompt_embeds"][1]), "it was stored with padding"
    with pytest.raises(IndexError):
        batches[len(batches)]


@pytest.mark.parametrize(("method", "num_workers"), [("fork", 2), ("spawn", 1)])
def test_workers_give_each_batch_of_each_epoch_once(dataset: LatentDataset, method: str, num_workers: int) -> None:
    """With a shuffling DataLoader whose workers persist over epochs."""
    batches, loader = CachedBatches(sampler_of(dataset), scaled=True), loader_of(dataset, prefetch=0)
    options: dict[str, Any] = {"multiprocessing_context": method, "num_workers": num_workers, "collate_fn": _first}
    made = DataLoader(batches, batch_size=1, shuffle=True, persistent_workers=True, **options)
    for epoch in (0, 1):
        batches.set_epoch(epoch)
        loader.set_epoch(epoch)
        expected = [plain(batch) for batch in loader]
        assert sorted(repr(plain(batch)) for batch in made) == sorted(map(repr, expected))
    assert plain(pickle.loads(pickle.dumps(batches))[0]) == expected[0]


def _first(batches: list[dict[str, object]]) -> dict[str, object]:
    return batches[0]
