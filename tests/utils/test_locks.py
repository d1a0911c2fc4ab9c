"""Locks between processes, claims of keys, and marks of readers."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from latentcache.errors import StoreBusyError
from latentcache.identity import key_of
from latentcache.store import DiskStore
from latentcache.utils.locks import ReadersLock, is_read_since, locked

KEYS = [key_of({"number": number}) for number in range(10)]


def claimed_by_another(path: Path, keys: list[str]) -> set[str]:
    """What another store can claim, which is closed at once."""
    with DiskStore(path) as store, store.writer() as writer:
        return writer.claim(keys)[0]


def test_a_writer_that_closes_leaves_the_claims_of_another(tmp_path: Path) -> None:
    with DiskStore(tmp_path / "cache") as store, store.writer() as first:
        assert first.claim(KEYS[:2]) == (set(KEYS[:2]), set())
        with store.writer() as second:
            assert second.claim(KEYS[1:3]) == ({KEYS[2]}, {KEYS[1]})
            assert claimed_by_another(store.path, KEYS[:4]) == {KEYS[3]}
        assert claimed_by_another(store.path, KEYS[:4]) == set(KEYS[2:4])
        assert claimed_by_another(store.path, KEYS[:4]) == set(KEYS[2:4]), "what it claimed is free again"
        first.release(KEYS[:1])
        assert claimed_by_another(store.path, KEYS[:2]) == {KEYS[0]}
    assert claimed_by_another(tmp_path / "cache", KEYS) == set(KEYS)


def test_each_reader_counts_from_when_it_began(tmp_path: Path) -> None:
    path = tmp_path / "readers.lock"

    def begun() -> tuple[ReadersLock, int]:
        time.sleep(0.05)  # by the clock of the file system, which has ticks
        reader = ReadersLock(path)
        return reader, path.stat().st_mtime_ns

    assert not is_read_since(path, time.time_ns())
    first, first_ns = begun()
    second, second_ns = begun()
    assert abs(second_ns - time.time_ns()) < 60e9
    assert not is_read_since(path, first_ns - 1)
    assert is_read_since(path, first_ns) and is_read_since(path, second_ns)
    first.close()
    assert not is_read_since(path, second_ns - 1), "the other one began later"
    if (pid := os.fork()) == 0:
        second.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert is_read_since(path, second_ns), "a fork does not end the reading of its parent"
    second.close()
    second.close()
    assert not is_read_since(path, time.time_ns())
    third, third_ns = begun()
    assert is_read_since(path, third_ns)
    del third
    assert not is_read_since(path, third_ns)


@pytest.mark.parametrize("lives", [True, False])
def test_a_forked_child_neither_keeps_the_lock_nor_lets_go_of_it(tmp_path: Path, lives: bool) -> None:
    path = tmp_path / "a.lock"
    lock = locked(path, "parent", shared=False)
    with lock:
        if (pid := os.fork()) == 0:
            if lives:
                time.sleep(20)
            else:
                lock.__exit__(None, None, None)
            os._exit(0)
        if not lives:
            os.waitpid(pid, 0)
        with pytest.raises(StoreBusyError, match="parent"), locked(path, "other", shared=True):
            pass
    with locked(path, "second", shared=False):
        pass
    if lives:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
