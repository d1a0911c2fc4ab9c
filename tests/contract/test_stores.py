from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from store_contract import StoreContract, assert_holds, make_entry, same

from latentcache.store import DiskStore, MemoryStore
from latentcache.store.stacking import read_batch, stack
from latentcache.store.upkeep import compact, prune, rebuild, verify


class TestDiskStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path):
        with DiskStore(tmp_path / "cache") as store:
            yield store


@pytest.mark.usefixtures("past_cache")
class TestDirectDiskStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path):
        with DiskStore(tmp_path / "cache", io="direct") as store:
            yield store

    def test_rows_count_as_long_as_the_generation_is_equal(self, store):
        entries = [make_entry(number) for number in range(3)]
        store.add(entries)
        rows = store.rows([entry.record.key for entry in entries])
        assert store.generation is None, "nothing is to be remembered: entries are read each time"
        expected = torch.stack([each.tensors["moments"] for each in entries])
        for number in range(20):  # they keep their values while others are read
            store.add([make_entry(10 + number)])
            store.rows([make_entry(10 + number).record.key])
            assert same(stack([""] * 3, rows)["moments"], expected)


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self):
        with MemoryStore() as store:
            yield store


class StoreMachine(RuleBasedStateMachine):
    """Any order of calls gives what a dict gives. Entries 0-7 have one shape, 8-11 another."""

    numbers = st.lists(st.integers(0, 11), max_size=4)

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.store = self.open()
        self.model = {}

    def open(self):
        return MemoryStore()

    @staticmethod
    def entry(number):
        return make_entry(number, kind="text" if number > 7 else "image", shape=(3, 5) if number < 8 else (9,))

    @rule(numbers=numbers)
    def add(self, numbers):
        new = {number for number in numbers if number not in self.model}
        assert self.store.add([self.entry(number) for number in numbers]) == len(new)
        self.model |= {number: self.entry(number) for number in new}

    @rule(numbers=numbers)
    def remove(self, numbers):
        gone = {number for number in numbers if number in self.model}
        assert self.store.remove([self.entry(number).record.key for number in numbers]) == len(gone)
        for number in gone:
            del self.model[number]

    @rule(order=st.randoms(use_true_random=False))
    def read(self, order):
        numbers = [number for number in self.model if number < 8] * 2
        order.shuffle(numbers)
        batch = read_batch(self.store, [self.model[number].record.key for number in numbers])
        if numbers:
            assert same(batch["moments"], torch.stack([self.model[n].tensors["moments"] for n in numbers]))

    @rule(number=st.integers(0, 11))
    def get(self, number):
        if number in self.model:
            assert_holds(self.store, self.model[number])

    @invariant()
    def holds_the_same_keys(self):
        keys = {entry.record.key for entry in self.model.values()}
        assert set(self.store.keys()) == keys
        assert self.store.find([self.entry(number).record.key for number in range(12)]) == keys

    def teardown(self):
        self.store.close()
        self.folder.cleanup()


class DiskStoreMachine(StoreMachine):
    def open(self):
        return DiskStore(Path(self.folder.name) / "cache")

    @rule()
    def reopen(self):
        self.store.close()
        self.store = self.open()

    @rule()
    def compact(self):
        report = compact(self.store)
        assert report.damaged == {} and report.num_packs_after <= report.num_packs_before

    @rule(numbers=StoreMachine.numbers)
    def prune(self, numbers):
        report = prune(self.store, [self.entry(number).record.key for number in numbers])
        gone = self.model.keys() - set(numbers)
        assert report.num_entries == len(gone)
        for number in gone:
            del self.model[number]

    @rule()
    def rebuild_after_compaction(self):
        # What was removed comes back from packs that were not compacted: so remove it for good first.
        removed = {self.entry(number).record.key for number in range(12) if number not in self.model}
        rebuild(self.store)
        self.store.remove(removed)

    @rule()
    def verify(self):
        report = verify(self.store)
        assert report.ok and report.num_entries == len(self.model)


class DirectDiskStoreMachine(DiskStoreMachine):
    def open(self):
        return DiskStore(Path(self.folder.name) / "cache", io="direct")

    @rule(numbers=StoreMachine.numbers)
    def prefetch(self, numbers):
        self.store.prefetch([self.entry(number).record.key for number in numbers])


quick = settings(
    max_examples=15, stateful_step_count=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
TestMemoryMachine = StoreMachine.TestCase
TestMemoryMachine.settings = quick
TestDiskMachine = DiskStoreMachine.TestCase
TestDiskMachine.settings = settings(quick, max_examples=8)
TestDirectDiskMachine = pytest.mark.usefixtures("past_cache")(DirectDiskStoreMachine.TestCase)
TestDirectDiskMachine.settings = settings(quick, max_examples=8)
