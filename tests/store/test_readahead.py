from __future__ import annotations

import errno
import os
import threading
from types import SimpleNamespace

import pytest
from store_samples import key, packs, samples

from latentcache.store import DiskStore, readahead
from latentcache.store.readahead import QUIET_READS, UNSEEN_READS, ReadAhead

on_linux = pytest.mark.skipif(not hasattr(readahead.resource, "RUSAGE_THREAD"), reason="needs counts per thread")


@pytest.fixture
def usage(monkeypatch):
    """What the system would tell of this thread."""
    values = SimpleNamespace(ru_majflt=7, ru_inblock=100)
    monkeypatch.setattr(readahead.resource, "getrusage", lambda who: values)
    return values


def until_quiet(ahead):
    answers = [ahead.wanted() for _ in range(QUIET_READS + 1)]
    assert answers == [True] * QUIET_READS + [False] and not ahead.wanted_lately()


@on_linux
@pytest.mark.parametrize("name", ["ru_majflt", "ru_inblock"])
def test_it_is_asked_while_reads_come_from_the_disk(usage, name):
    ahead = ReadAhead()
    assert ahead.wanted_lately(), "nothing is known yet"
    until_quiet(ahead)
    assert not any(ahead.wanted() for _ in range(20))
    setattr(usage, name, getattr(usage, name) + 1)
    assert any(ahead.wanted() for _ in range(UNSEEN_READS + 1)) and ahead.wanted_lately()
    for _ in range(3 * QUIET_READS):  # while it goes on
        setattr(usage, name, getattr(usage, name) + 1)
        assert ahead.wanted()


@on_linux
def test_each_thread_decides_for_itself(usage):
    ahead, answers = ReadAhead(), []
    until_quiet(ahead)
    thread = threading.Thread(target=lambda: answers.append((ahead.wanted_lately(), ahead.wanted())))
    thread.start()
    thread.join()
    assert answers == [(True, True)] and not ahead.wanted()


def test_always_and_never_look_at_nothing(monkeypatch):
    monkeypatch.delattr(readahead.resource, "getrusage")
    assert all(ReadAhead("always").wanted() == readahead.CAN_ASK for _ in range(20))
    assert not any(ReadAhead("never").wanted() for _ in range(20))
    assert not ReadAhead("never").wanted_lately()


def test_where_the_system_tells_or_takes_nothing_nothing_is_asked(monkeypatch):
    monkeypatch.delattr(readahead.resource, "RUSAGE_THREAD", raising=False)
    assert not ReadAhead("missing").wanted()
    monkeypatch.setattr(readahead, "CAN_ASK", False)
    assert not ReadAhead("always").wanted() and ReadAhead("always").mode == "never"


# In a store ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch):
    """The ranges that are asked for: (file, offset, bytes)."""
    if not readahead.CAN_ASK:
        pytest.skip("this system cannot be asked")
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
    locations = [store.catalog.locate(key(number)) for number in numbers]
    return sorted((f"{each.pack}.safetensors", each.places["moments"].offset, each.num_bytes) for each in locations)


def test_exactly_what_is_read_is_asked_for(root, asked):
    with DiskStore(root, ask_ahead="always") as store:
        for numbers in ((0, 2), (2, 0), (1,)):
            asked.clear()
            store.read_batch([key(number) for number in numbers])
            assert sorted(asked) == ranges_of(store, *numbers)
        rows = store.resolve([key(1)])
        asked.clear()
        store.read_rows(rows)
        assert sorted(asked) == ranges_of(store, 1)
        asked.clear()
        before = len(os.listdir("/dev/fd"))
        store.ask_ahead(key(number) for number in (2, 1, 99))
        assert sorted(asked) == ranges_of(store, 1, 2)
        assert len(os.listdir("/dev/fd")) == before


def test_what_was_asked_for_is_not_asked_for_again_when_it_is_read(root, asked):
    with DiskStore(root, ask_ahead="always") as store:
        store.ask_ahead([key(0), key(1)])
        store.ask_ahead([key(1), key(2)])
        assert sorted(asked) == ranges_of(store, 0, 1, 2)
        asked.clear()
        store.read_batch([key(1), key(0)])
        assert asked == []
        store.read_batch([key(1), key(2)])
        assert asked == ranges_of(store, 1), "it may have left the memory since"


@pytest.mark.parametrize("num_files", [1, 64])
def test_ranges_come_in_the_order_in_which_they_are_read(root, asked, monkeypatch, num_files):
    monkeypatch.setattr(readahead, "_MAX_FILES", num_files)
    with DiskStore(root, ask_ahead="always") as store:
        for order in ([2, 0, 1], [1, 2, 0]):
            asked.clear()
            before = len(os.listdir("/dev/fd"))
            store.ask_ahead([key(number) for number in order])
            assert asked == [found for number in order for found in ranges_of(store, number)]
            assert len(os.listdir("/dev/fd")) == before
            store.read_batch([key(number) for number in order])


def test_what_is_asked_for_and_never_read_is_forgotten(monkeypatch):
    monkeypatch.setattr(readahead, "MAX_ASKED", 3)
    ahead = ReadAhead("always")
    for number in range(20):
        assert ahead.to_ask([str(number)]) == [str(number)]
        assert len(ahead._thread.asked) <= 4


def test_never_is_never(root, asked):
    with DiskStore(root, ask_ahead="never") as store:
        store.read_batch([key(0)])
        store.ask_ahead([key(1)])
        assert asked == []


@on_linux
def test_the_first_batch_asks_and_warm_ones_do_not(root, asked, usage):
    with DiskStore(root) as store:
        store.read_batch([key(0), key(2)])
        assert sorted(asked) == ranges_of(store, 0, 2)
        for _ in range(QUIET_READS):
            store.read_batch([key(0), key(2)])
        asked.clear()
        store.ask_ahead(pytest.fail(f"looked at {number}") for number in range(3))
        store.read_batch([key(0), key(2)])
        assert asked == []


def test_a_file_system_that_takes_no_advice_is_no_matter(root, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EINVAL, "refused")

    monkeypatch.setattr(os, "posix_fadvise", refuse, raising=False)
    with DiskStore(root, ask_ahead="always") as store:
        assert store.read_batch([key(0), key(2)])["moments"].shape[0] == 2


def test_a_pack_that_is_gone_or_unreadable_is_no_matter(root, asked):
    with DiskStore(root, ask_ahead="always") as store:
        store.read_batch([key(2)])
        store.directory.pack_path(store.catalog.locate(key(2)).pack).unlink()
        asked.clear()
        assert store.read_batch([key(2)])["moments"].shape[0] == 1, "a mapped pack stays readable"
        store.ask_ahead([key(2)])
        assert asked == []
        (path,) = packs(store)
        target = path.with_name("elsewhere")
        path.rename(target)
        path.symlink_to(target)
        store.ask_ahead([key(0)])
        assert asked == []
