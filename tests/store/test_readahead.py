from __future__ import annotations

import errno
import os
import threading
from types import SimpleNamespace

import pytest
from store_samples import key, pack_of, payload, samples, where

from latentcache.store import DiskStore, mapped
from latentcache.store.mapped import MAX_IDLE_READS, SKIPPED_READS, ReadAhead
from latentcache.store.stacking import read_batch

on_linux = pytest.mark.skipif(not hasattr(mapped.resource, "RUSAGE_THREAD"), reason="needs counts per thread")


@pytest.fixture
def usage(monkeypatch):
    """What the system would report of this thread."""
    values = SimpleNamespace(ru_majflt=7, ru_inblock=100)
    monkeypatch.setattr(mapped.resource, "getrusage", lambda who: values)
    return values


def until_idle(ahead):
    answers = [ahead.should_prefetch() for _ in range(MAX_IDLE_READS + 1)]
    assert answers == [True] * MAX_IDLE_READS + [False]


@on_linux
@pytest.mark.parametrize("name", ["ru_majflt", "ru_inblock"])
def test_it_advises_while_reads_come_from_the_disk(usage, name):
    ahead = ReadAhead()
    until_idle(ahead)
    assert not any(ahead.should_prefetch() for _ in range(20))
    setattr(usage, name, getattr(usage, name) + 1)
    assert any(ahead.should_prefetch() for _ in range(SKIPPED_READS + 1))
    for _ in range(3 * MAX_IDLE_READS):  # while it goes on
        setattr(usage, name, getattr(usage, name) + 1)
        assert ahead.should_prefetch()


@on_linux
def test_each_thread_decides_for_itself(usage):
    ahead, answers = ReadAhead(), []
    until_idle(ahead)
    thread = threading.Thread(target=lambda: answers.append(ahead.should_prefetch()))
    thread.start()
    thread.join()
    assert answers == [True] and not ahead.should_prefetch()


def test_where_the_system_counts_or_takes_nothing_nothing_is_advised(monkeypatch):
    monkeypatch.setattr(mapped, "CAN_ADVISE", False)
    assert not ReadAhead().should_prefetch()


@pytest.fixture
def always(monkeypatch):
    monkeypatch.setattr(ReadAhead, "should_prefetch", lambda _: True)


# In a store ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def advised(monkeypatch):
    """The ranges that are advised: (file, offset, bytes)."""
    if not mapped.CAN_ADVISE:
        pytest.skip("this system takes no advice")
    ranges, real = [], os.posix_fadvise

    def record(fd, offset, num_bytes, advice):
        assert advice == os.POSIX_FADV_WILLNEED
        ranges.append((os.path.basename(os.readlink(f"/dev/fd/{fd}")), offset, num_bytes))
        return real(fd, offset, num_bytes, advice)

    monkeypatch.setattr(os, "posix_fadvise", record)
    return ranges


@pytest.fixture
def root(tmp_path):
    with DiskStore(tmp_path / "cache") as store:
        store.add(samples(0, 1))
        store.add(samples(2))
    return tmp_path / "cache"


def ranges_of(store, *numbers):
    places = [where(store, number) for number in numbers]
    return sorted((path.name, offset, len(payload(0))) for path, offset in places)


def test_exactly_what_is_read_is_advised(root, advised, always):
    with DiskStore(root) as store:
        for numbers in ((0, 2), (2, 0), (1,)):
            advised.clear()
            read_batch(store, [key(number) for number in numbers])
            assert sorted(advised) == ranges_of(store, *numbers)
        advised.clear()
        before = len(os.listdir("/dev/fd"))
        store.prefetch(key(number) for number in (2, 1, 99))
        assert sorted(advised) == ranges_of(store, 1, 2)
        assert len(os.listdir("/dev/fd")) == before


def test_ranges_come_in_the_order_in_which_they_are_read(root, advised, always):
    with DiskStore(root) as store:
        for order in ([2, 0, 1], [1, 2, 0]):
            advised.clear()
            before = len(os.listdir("/dev/fd"))
            store.prefetch([key(number) for number in order])
            assert advised == [found for number in order for found in ranges_of(store, number)]
            assert len(os.listdir("/dev/fd")) == before
            read_batch(store, [key(number) for number in order])


def test_a_pack_is_opened_once_however_often_the_order_returns_to_it(root, advised, always, monkeypatch):
    opened, real = [], mapped.open_regular

    def record(path):
        opened.append(path)
        return real(path)

    with DiskStore(root) as store:
        monkeypatch.setattr(mapped, "open_regular", record)
        store.prefetch([key(number) for number in (0, 2, 1, 2, 0)])
    assert len(opened) == len(set(opened)) == 2


@on_linux
def test_the_first_batch_advises_and_warm_ones_do_not(root, advised, usage):
    with DiskStore(root) as store:
        read_batch(store, [key(0), key(2)])
        assert sorted(advised) == ranges_of(store, 0, 2)
        for _ in range(MAX_IDLE_READS):
            read_batch(store, [key(0), key(2)])
        advised.clear()
        store.prefetch(pytest.fail(f"looked at {number}") for number in range(3))
        read_batch(store, [key(0), key(2)])
        assert advised == []


def test_a_file_system_that_takes_no_advice_is_no_matter(root, monkeypatch, always):
    def refuse(*_):
        raise OSError(errno.EINVAL, "refused")

    monkeypatch.setattr(os, "posix_fadvise", refuse, raising=False)
    with DiskStore(root) as store:
        assert read_batch(store, [key(0), key(2)])["moments"].shape[0] == 2


def test_a_pack_that_is_gone_or_unreadable_is_no_matter(root, advised, always):
    with DiskStore(root) as store:
        read_batch(store, [key(2)])
        other = pack_of(store, 0)
        pack_of(store, 2).unlink()
        advised.clear()
        assert read_batch(store, [key(2)])["moments"].shape[0] == 1, "a mapped pack stays readable"
        store.prefetch([key(2)])
        assert advised == []
        other.unlink()
        other.mkdir()
        store.prefetch([key(0)])
        assert advised == []
