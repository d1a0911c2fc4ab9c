"""A store that is reopened, or that catches up with another, knows what a store that was never closed knows."""

from __future__ import annotations

import errno
import os
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule
from store_samples import assert_holds, digests, key, payload, sample, samples

from latentcache.errors import EntryDamagedError, EntryMissingError, IndexDamagedError, StoreBusyError, StoreError
from latentcache.store import DiskStore, disk
from latentcache.store.upkeep import compact, prune, rebuild, verify
from latentcache.utils.durable_files import remove_whole

NUMBERS = range(14)


def assert_knows(store, present, damaged=()):
    """The store has these entries and knows of no others, once it has looked at the index.

    It may have forgotten which were damaged: what is said of entries goes with their packs.
    """
    keys = {key(number) for number in present}
    assert sorted(store.keys()) == sorted(keys), "each once"
    known = store.damaged().keys()
    assert known <= {key(number) for number in damaged}
    assert store.find([key(number) for number in NUMBERS]) == keys
    stats = store.stats()
    assert sum(stats.num_entries.values()) == len(keys) and stats.num_damaged == len(known)
    assert stats.payload_bytes == len(keys) * sample(0).num_bytes
    for number in NUMBERS:
        if number in present:
            assert store.describe(key(number)) == {"moments": ("float16", (4, 8, 8))}
        else:
            with pytest.raises(EntryDamagedError if key(number) in known else EntryMissingError):
                store.describe(key(number))


class TwoStores(RuleBasedStateMachine):
    """Two stores and a reader on one directory. Each finds out what the others did, as a reopened one does."""

    which = st.integers(0, 1)
    some = st.lists(st.sampled_from(NUMBERS), min_size=1, max_size=4)

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.root = Path(self.folder.name) / "cache"
        self.stores = [DiskStore(self.root), DiskStore(self.root)]
        self.reader = DiskStore(self.root, read_only=True)
        self.present, self.damaged = set(), set()
        for number in range(4):  # a pack each
            self.add(0, [number])

    def teardown(self):
        self.know_the_same(0, True)
        for store in (*self.stores, self.reader):
            store.close()
        self.folder.cleanup()

    @rule(which=which, numbers=some)
    def add(self, which, numbers):
        assert self.stores[which].add(samples(*numbers)) == len(set(numbers) - self.present)
        self.present |= set(numbers)
        self.damaged -= set(numbers)

    @rule(which=which, numbers=some)
    def remove(self, which, numbers):
        removed = self.stores[which].remove([key(number) for number in numbers])
        assert removed == len(set(numbers) & self.present)
        self.present -= set(numbers)
        self.damaged -= set(numbers)

    @rule(which=which, number=st.sampled_from(NUMBERS))
    def damage(self, which, number):
        """For a moment, in every copy that there is."""
        good = payload(number)
        bad = bytes(byte ^ 1 for byte in good)
        for old, new in ((good, bad), (bad, good)):
            for path in self.root.glob("packs/*/*.safetensors"):
                if (at := path.read_bytes().find(old)) >= 0:
                    with path.open("r+b") as file:
                        file.seek(at)
                        file.write(new)
            if new is bad:
                assert verify(self.stores[which]).damaged.keys() == {key(n) for n in {number} & self.present}
        self.damaged |= {number} & self.present
        self.present.discard(number)

    @rule(which=which)
    def move(self, which):
        assert not compact(self.stores[which]).damaged

    @rule(which=which, numbers=some)
    def prune(self, which, numbers):
        prune(self.stores[which], digests(*numbers))
        self.present &= set(numbers)
        self.damaged &= set(numbers)

    @rule(which=which)
    def rebuild(self, which):
        """What was removed may come back from packs that were not compacted: so it is removed again."""
        store = self.stores[which]
        assert rebuild(store).num_entries >= len(self.present)
        store.remove([key(number) for number in NUMBERS if number not in self.present])
        self.damaged.clear()

    @rule(which=which, read=st.booleans())
    def know_the_same(self, which, read):
        for store in (self.stores[which], self.reader):
            assert_knows(store, self.present, self.damaged)
            if read:
                assert_holds(store, *self.present)
        assert self.stores[which].damaged() == self.reader.damaged()

    @rule(which=which, read_only=st.booleans())
    def reopen(self, which, read_only):
        self.stores[which].close()
        with DiskStore(self.root, read_only=read_only) as store:
            assert_knows(store, self.present, self.damaged)
            assert_holds(store, *self.present)
        self.stores[which] = DiskStore(self.root)
        assert_knows(self.stores[which], self.present, self.damaged)


TestTwoStores = TwoStores.TestCase
TestTwoStores.settings = settings(max_examples=10, stateful_step_count=16)


def test_readers_see_all_entries_while_the_index_is_rebuilt(root, monkeypatch):
    """Those of the same store, of others, and openings of both kinds."""
    with DiskStore(root) as store:
        store.add(samples(*range(8)))
        real, seen = disk.read_rows, []

        def looking(directory, packs):
            found = real(directory, packs)
            for read_only in (False, True) if found[0] else ():  # an opening finds no pack that the index lacks
                with DiskStore(root, read_only=read_only) as other:
                    seen.append(set(other.keys()))
            return found

        with DiskStore(root, read_only=True) as reader:
            monkeypatch.setattr(disk, "read_rows", looking)
            assert rebuild(root).num_entries == 8
            assert_knows(reader, range(8))
        assert seen and all(each == {key(number) for number in range(8)} for each in seen)
        assert_holds(store, *range(8))


def test_a_damaged_index_is_not_replaced_while_upkeep_works(root):
    with DiskStore(root) as store:
        store.add(samples(*range(4)))
        with store.lock("prune", shared=False):
            (root / "index" / "cache.db").write_bytes(b"no database")
            with pytest.raises(StoreBusyError, match="prune"):
                DiskStore(root)
    with DiskStore(root) as again:
        assert_knows(again, range(4))


def test_an_index_that_is_deleted_under_a_store_is_not_replaced_by_an_empty_one(root):
    with DiskStore(root) as store:
        store.add(samples(0, 1))
        remove_whole(root / "index")
        for change in (lambda: store.add(samples(2)), lambda: store.remove([key(1)])):
            with pytest.raises(IndexDamagedError, match="latentcache rebuild"):
                change()
        assert_holds(store, 0)  # what is known is read all the same
        rebuild(store)
        assert_knows(store, [0, 1, 2])  # that pack was whole before the index was asked


def test_packs_that_the_system_refuses_to_look_at_once_are_not_lost(root, monkeypatch):
    with DiskStore(root) as store:
        store.add(samples(*range(4)))
        store.remove([key(0)])

    real = os.lstat

    def refuse(path, **options):
        if Path(path) == root / "packs":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, **options)

    with monkeypatch.context() as patch, suppress(StoreError):
        patch.setattr(os, "lstat", refuse)
        DiskStore(root).close()
    with DiskStore(root) as store:
        assert_knows(store, {1, 2, 3})


def test_keys_are_those_of_the_call_whatever_changes_while_they_are_read(root):
    with DiskStore(root) as store:
        for numbers in (range(10), [10, 11]):
            store.add(samples(*numbers))
        keys = store.keys()
        first = next(keys)
        store.remove([key(10)])
        assert sorted([first, *keys]) == sorted(map(key, range(12)))
