"""The loader: what the cache gives, in the sampler's order, whatever the threads do."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from loading import by_hand, ids, lose_image, num_threads, plain, wait_for_no_thread

from latentcache import LatentDataset
from latentcache.config import Config
from latentcache.errors import SampleError, StoreError
from latentcache.loading.loader import LatentLoader
from latentcache.loading.sampler import BucketBatchSampler
from latentcache.precache.run import run_precache

PREFETCH = pytest.mark.parametrize("prefetch", [0, 1, 3])


@pytest.fixture
def dataset(path: Path) -> LatentDataset:
    return LatentDataset(path, flips=True, caption="random")


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    if num_threads():
        gc.collect()
    wait_for_no_thread()


def loader_of(dataset: LatentDataset, **options: object) -> LatentLoader:
    options = {"device": "cpu", "scaled": True, **options}
    return LatentLoader(BucketBatchSampler(dataset, 3, seed=5), **options)


@PREFETCH
def test_batches_are_those_of_the_dataset_bit_for_bit(dataset: LatentDataset, prefetch: int) -> None:
    with loader_of(dataset, prefetch=prefetch) as loader:
        expected = by_hand(loader.sampler)
        assert len(expected) == len(loader) == 7
        assert [plain(batch) for batch in loader] == expected
        loader.set_epoch(1)
        other = [plain(batch) for batch in loader]
        assert other == by_hand(loader.sampler, epoch=1) and other != expected


def test_a_batch_is_what_the_cache_gives(path: Path) -> None:
    dataset = LatentDataset(path)
    unet = torch.nn.Linear(2, 2).to(torch.bfloat16)
    for batch in loader_of(dataset, device=unet, output="mean"):
        direct = dataset.cache.batch(batch["sample_id"], device=unet, scaled=True)
        assert batch["latents"].dtype == torch.bfloat16 and batch["add_time_ids"].dtype == torch.float32
        assert batch.keys() == direct.keys() and plain(batch) == plain(direct)
    for batch in loader_of(dataset, output="moments", scaled=False):
        direct = dataset.cache.batch(batch["sample_id"], device="cpu", output="moments")
        assert torch.equal(batch["moments"], direct["moments"]) and batch.keys() == direct.keys()


@PREFETCH
def test_the_state_counts_what_was_handed_out(dataset: LatentDataset, prefetch: int) -> None:
    whole = loader_of(dataset, prefetch=prefetch)
    expected = [[plain(batch) for batch in whole]]
    whole.set_epoch(1)
    expected.append([plain(batch) for batch in whole])
    for stop in (1, 5, 7):
        first = loader_of(dataset, prefetch=prefetch)
        with iter(first) as batches:
            assert [plain(next(batches)) for _ in range(stop)] == expected[0][:stop]
            time.sleep(0.02)  # time to read ahead
            state = first.state_dict()
        second = loader_of(dataset, prefetch=2 - prefetch if prefetch < 2 else 0)
        second.load_state_dict(state)
        got = []
        for epoch in (0, 1):
            second.set_epoch(epoch)
            got.append([plain(batch) for batch in second])
        assert got == [expected[0][stop:], expected[1]]


def test_forever_goes_on_into_the_next_epochs_and_resumes_there(dataset: LatentDataset) -> None:
    loader = loader_of(dataset)
    batches = loader.forever()
    got = [plain(next(batches)) for _ in range(20)]
    assert got == (by_hand(loader.sampler) + by_hand(loader.sampler, epoch=1) + by_hand(loader.sampler, epoch=2))[:20]
    state = loader.state_dict()
    assert (state["epoch"], state["position"]) == (2, 6)
    following = plain(next(batches))
    batches.close()
    other = loader_of(dataset, prefetch=0)
    other.load_state_dict(state)
    assert plain(next(other.forever())) == following


@PREFETCH
def test_a_lost_sample_is_named_at_its_batch(dataset: LatentDataset, prefetch: int) -> None:
    with loader_of(dataset, prefetch=prefetch) as loader:
        expected = by_hand(loader.sampler)
        bad = next(i for i, batch in enumerate(expected) if "c.png" in batch["sample_id"])
        lose_image(dataset, "c.png")
        got, batches = [], iter(loader)
        with pytest.raises(SampleError, match=r"'c\.png': has no entry.*latentcache precache") as raised:
            while True:
                got.append(plain(next(batches)))
        image = next(i for i, b in enumerate(expected) if i >= len(got))
        assert got == expected[: len(got)] and image == len(got) >= bad
        assert f"batch {len(got)} of epoch 0" in raised.value.__notes__[0]
        assert loader.state_dict()["position"] == len(got)
        with pytest.raises(SampleError, match=r"c\.png"):
            next(batches)  # not the end of the epoch


@PREFETCH
def test_lost_samples_can_be_skipped(path: Path, prefetch: int, caplog: pytest.LogCaptureFixture) -> None:
    dataset = LatentDataset(path)
    lose_image(dataset, "c.png")
    lose_image(dataset, "d.png")  # with it the whole bucket is gone
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


def test_with_several_ranks_no_batch_is_left_out(path: Path) -> None:
    dataset = LatentDataset(path)
    for name in ("c.png", "d.png"):
        lose_image(dataset, name)
    for rank in range(2):
        sampler = BucketBatchSampler(dataset, 1, rank=rank, world_size=2)
        with pytest.raises(SampleError, match=r"no other sample is left in its batch.*no batch can be left out"):
            list(LatentLoader(sampler, device="cpu", damaged="skip"))


def test_any_error_of_the_thread_comes_up_in_the_loop(dataset: LatentDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **options: object) -> None:
        raise MemoryError("no page left")

    monkeypatch.setattr("latentcache.loading.loader.to_device", broken)
    with pytest.raises(MemoryError, match="no page left") as raised:
        list(loader_of(dataset))
    assert "while reading batch 0 of epoch 0" in raised.value.__notes__[0]


def test_an_early_break_an_exception_and_a_dropped_iterator_end_the_thread(dataset: LatentDataset) -> None:
    loader = loader_of(dataset)
    for _ in loader:
        assert num_threads() == 1
        break
    wait_for_no_thread()

    def failing() -> None:
        for _ in loader:
            raise ValueError("the training step")

    with pytest.raises(ValueError, match="the training step"):
        failing()
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


def test_items_of_manifests_that_hold_moments_and_latents_are_refused_by_name(
    path: Path, make_config: Callable[..., Config]
) -> None:
    changes = {"datasets.0.name": "other", "cache.path": path, "encode.image_output": "mean"}
    run_precache(make_config(**changes))
    dataset = LatentDataset(path, ["photos", "other"])
    other = len(LatentDataset(path, "photos"))
    assert "moments" in dataset[0] and "latents" in dataset[other]
    assert torch.equal(dataset[other]["latents"], dataset[0]["moments"].chunk(2)[0])
    with pytest.raises(StoreError, match="must have the same fields"):
        dataset.__getitems__([0, other])


@pytest.mark.filterwarnings("ignore:This process.*is multi-threaded, use of fork:DeprecationWarning")
def test_a_fork_is_told_to_make_its_own_iterator(dataset: LatentDataset) -> None:
    loader = loader_of(dataset)
    expected = by_hand(loader.sampler)
    batches = iter(loader)
    next(batches)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            try:
                next(batches)
            except StoreError as error:
                code = 0 if "not in the fork" in str(error) else 2
            if code == 0 and [plain(batch) for batch in loader] != expected:
                code = 3
            loader.close()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert [plain(batch) for batch in batches] == expected[1:]


SCRIPT = """
    import sys, time
    from latentcache import LatentDataset
    from latentcache.loading.loader import LatentLoader
    from latentcache.loading.sampler import BucketBatchSampler
    loader = LatentLoader(BucketBatchSampler(LatentDataset(sys.argv[1]), 1), device="cpu")
    batches = loader.forever()
    next(batches)
    print("ready", flush=True)
    if sys.argv[2] == "wait":
        while True:
            next(batches)
            time.sleep(0.01)
"""


@pytest.mark.parametrize("how", ["end", "wait"])
def test_the_process_ends_in_the_middle_of_an_iteration(path: Path, how: str) -> None:
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), str(path), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        if how == "wait":
            process.send_signal(signal.SIGINT)
        errors = process.communicate(timeout=60)[1]
    if how == "end":
        assert process.returncode == 0 and "Traceback" not in errors and "atal" not in errors, errors
    else:
        assert process.returncode in (-signal.SIGINT, 130) and errors.rstrip().endswith("KeyboardInterrupt")


def test_settings_that_make_no_sense(dataset: LatentDataset) -> None:
    for options, message in (
        ({"prefetch": -1}, "prefetch is -1"),
        ({"output": "pixels"}, "output is 'pixels'; it must be one of latents, mean, moments"),
        ({"damaged": "ignore"}, "damaged is 'ignore'"),
        ({"output": "moments"}, "moments are stored unscaled"),
    ):
        with pytest.raises(StoreError, match=message):
            loader_of(dataset, **options)
    with pytest.raises(StoreError, match="takes a sampler, which says what a batch is"):
        LatentLoader(dataset, device="cpu")  # type: ignore[arg-type]  # what one tries first
    empty = LatentLoader(BucketBatchSampler(dataset, 100, drop_last=True), device="cpu")
    for begin in (empty.forever, empty.__iter__):
        with pytest.raises(StoreError, match="an epoch has no batch"):
            begin()
