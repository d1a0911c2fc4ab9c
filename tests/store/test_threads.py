"""One store, many threads: reading, adding, removing and compacting at once."""

from __future__ import annotations

import random
import sys
import threading
import time

import pytest
from helpers.tensor_bits import read_batch
from store_samples import key, packs, run, same, sample, samples

from latentcache.errors import EntryMissingError
from latentcache.store import DiskStore, reader
from latentcache.store.upkeep import compact

NUMBERS = range(12)


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(reader, "_MAX_RECORDS", 2)
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    with DiskStore(tmp_path / "cache") as store:
        for number in NUMBERS:
            store.add(samples(number))
        yield store
    sys.setswitchinterval(switch)


def together(*works, seconds=0.7):
    """Call each function again and again, in a thread of its own, and raise what any of them raised."""
    errors, until = [], time.monotonic() + seconds

    def repeat(work, seed):
        source = random.Random(seed)
        try:
            while time.monotonic() < until and not errors:
                work(source)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=repeat, args=(work, seed)) for seed, work in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]


def test_threads_read_what_moves_and_comes_and_goes(store):
    expected = {number: sample(number) for number in NUMBERS}

    def record(source):
        number = source.choice(NUMBERS)
        assert store.record(key(number)) == expected[number].record

    def read(source):
        numbers = source.sample(NUMBERS, 3)
        batch = read_batch(store, [key(number) for number in numbers])["moments"]
        for row, number in zip(batch, numbers, strict=True):
            assert row.equal(expected[number].tensors["moments"])

    def move(source):
        compact(store)
        store.release([path.stem for path in packs(store)])

    def look(source):
        assert set(store.keys()) >= {key(number) for number in NUMBERS}
        assert store.stats().num_damaged == 0

    def remove(source):
        """What this thread removes is gone for it, whatever others read."""
        number = 100 + source.randrange(3)
        store.add(samples(number))
        assert same(store.get(key(number)), sample(number))
        store.remove([key(number)])
        assert store.find([key(number)]) == set()
        with pytest.raises(EntryMissingError):
            store.get(key(number))

    together(record, record, read, read, look, move)
    together(record, read, look, look, remove)
    assert store.damaged() == {}


def test_a_fork_while_threads_work_can_use_the_store(store):
    def child():
        assert same(store.get(key(1)), sample(1))
        assert store.find([key(0), key(99)]) == {key(0)}

    def fork(source):
        assert run(child) == 0

    def read(source):
        list(store.keys())
        read_batch(store, [key(2)])

    together(fork, read, read, seconds=0.5)
