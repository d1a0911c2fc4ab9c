"""The system is asked for exactly what is read soon, and a system that takes no advice is no matter."""

from __future__ import annotations

import errno
import os

import pytest
from store_samples import key, packs, payload, samples, where

from latentcache.store import DiskStore
from latentcache.store.batch import read_batch


@pytest.fixture
def advised(monkeypatch):
    """The ranges that are advised: (file, offset, bytes)."""
    if not hasattr(os, "posix_fadvise"):
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


def assert_advised(advised, store, *numbers):
    """These entries were advised, no byte more; rows that follow each other may be one range."""
    found = {(name, at) for name, offset, num in advised for at in range(offset, offset + num)}
    places = [where(store, number) for number in numbers]
    assert found == {(path.name, at) for path, offset in places for at in range(offset, offset + len(payload(0)))}


def test_what_is_read_first_or_soon_is_advised(root, advised):
    with DiskStore(root) as store:
        read_batch(store, [key(0), key(2)])
        assert_advised(advised, store, 0, 2)
        advised.clear()
        read_batch(store, [key(0), key(1)])
        assert_advised(advised, store, 1)
        advised.clear()
        read_batch(store, [key(0), key(2)])
        assert advised == []
        before = len(os.listdir("/dev/fd"))
        store.prefetch(key(number) for number in (2, 1, 99, 0, 2))
        assert_advised(advised, store, 0, 1, 2)
        assert len(os.listdir("/dev/fd")) == before
        advised.clear()
        for _ in range(2):
            store.prefetch([key(2), key(1), key(0)], whole_packs=True)
        assert sorted(advised) == sorted((path.name, 0, 0) for path in packs(store)), "each pack once, to its end"


def test_a_file_system_that_takes_no_advice_is_no_matter(root, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EINVAL, "refused")

    monkeypatch.setattr(os, "posix_fadvise", refuse, raising=False)
    with DiskStore(root) as store:
        assert read_batch(store, [key(0), key(2)])["moments"].shape[0] == 2
    monkeypatch.delattr(os, "posix_fadvise")
    with DiskStore(root) as store:
        assert read_batch(store, [key(0), key(2)])["moments"].shape[0] == 2
