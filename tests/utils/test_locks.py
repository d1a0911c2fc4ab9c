"""Locks between processes, claims of keys, and marks of readers."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from latentcache.errors import StoreBusyError
from latentcache.identity import key_of
from latentcache.store import DiskStore
from latentcache.utils import file_locks
from latentcache.utils.locks import Claims, ReadersLock, locked, readers_since

KEYS = [key_of({"number": number}) for number in range(10)]
context = multiprocessing.get_context("fork")


def claim_elsewhere(path: Path, keys: list[str]) -> set[str]:
    """What a writer of another process could claim, which ends at once."""
    queue = context.Queue()

    def claim() -> None:
        with DiskStore(path) as store, store.writer() as writer:
            queue.put(writer.claim(keys)[0])

    process = context.Process(target=claim)
    process.start()
    found = queue.get(timeout=60)
    process.join()
    return found


def test_a_writer_that_closes_leaves_the_claims_of_another(tmp_path: Path) -> None:
    with DiskStore(tmp_path / "cache") as store, store.writer() as first:
        assert first.claim(KEYS[:2]) == (set(KEYS[:2]), set())
        with store.writer() as second:
            assert second.claim(KEYS[1:3]) == ({KEYS[2]}, {KEYS[1]})
            assert claim_elsewhere(store.path, KEYS[:4]) == {KEYS[3]}
        assert claim_elsewhere(store.path, KEYS[:4]) == set(KEYS[2:4])
        assert claim_elsewhere(store.path, KEYS[:4]) == set(KEYS[2:4]), "the claims of the dead are free"
        first.release(KEYS[:1])
        assert claim_elsewhere(store.path, KEYS[:2]) == {KEYS[0]}
    assert claim_elsewhere(tmp_path / "cache", KEYS) == set(KEYS)


def test_without_such_locks_every_key_is_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(95, "Operation not supported")

    claims = Claims(tmp_path / "claims.lock")
    for name in ("take", "release"):
        monkeypatch.setattr(file_locks, name, refuse)
    assert claims.take(KEYS) == set(KEYS)
    claims.release(KEYS)
    claims.close()


def test_readers_are_seen_from_the_first_to_the_last(tmp_path: Path) -> None:
    path = tmp_path / "readers.lock"
    assert readers_since(path) is None
    first = ReadersLock(path)
    began = readers_since(path)
    assert began is not None and abs(began - time.time()) < 60
    time.sleep(0.05)
    second = ReadersLock(path)
    first.close()
    assert readers_since(path) == began, "they overlap"
    second.close()
    second.close()
    assert readers_since(path) is None
    third = ReadersLock(path)
    assert readers_since(path) > began
    del third
    assert readers_since(path) is None


def test_a_fork_reads_on_when_its_parent_has_closed(tmp_path: Path) -> None:
    path = tmp_path / "readers.lock"
    reading = ReadersLock(path)
    ready, done = context.Event(), context.Event()

    def wait() -> None:
        ready.set()
        done.wait(60)

    process = context.Process(target=wait)
    process.start()
    assert ready.wait(60)
    done.set()
    process.join()
    assert readers_since(path) is not None, "the end of a fork ends nothing here"
    reading.close()
    assert readers_since(path) is None


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    with locked(path, "first", shared=False):
        pid = os.fork()
        if pid == 0:
            time.sleep(20)
            os._exit(0)
    try:
        with locked(path, "second", shared=False):
            pass
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def test_a_forked_child_does_not_let_go_of_its_parents_lock(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    lock = locked(path, "parent", shared=False)
    with lock:
        pid = os.fork()
        if pid == 0:
            lock.__exit__(None, None, None)
            os._exit(0)
        os.waitpid(pid, 0)
        with pytest.raises(StoreBusyError, match="parent"), locked(path, "other", shared=True):
            pass
