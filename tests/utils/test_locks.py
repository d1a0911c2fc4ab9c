"""Locks between processes."""

from __future__ import annotations

import errno
import os
import time

import pytest

from latentcache.errors import StoreBusyError, StoreError
from latentcache.utils import file_locks
from latentcache.utils.locks import locked


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.lock"


def test_a_forked_child_does_not_keep_the_lock(path):
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


def test_a_forked_child_does_not_let_go_of_its_parents_lock(path):
    lock = locked(path, "parent", shared=False)
    with lock:
        pid = os.fork()
        if pid == 0:
            lock.__exit__(None, None, None)
            os._exit(0)
        os.waitpid(pid, 0)
        with pytest.raises(StoreBusyError, match="parent"), locked(path, "other", shared=True):
            pass


@pytest.mark.parametrize("failing", ["take", "release"])
def test_a_disk_that_fails_is_our_own_error(path, monkeypatch, failing):
    def refuse(*_, **__):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(file_locks, failing, refuse)
    before = os.listdir("/dev/fd")
    if failing == "release":
        with locked(path, "first", shared=False):
            pass  # the lock ends with the descriptor
    else:
        with pytest.raises(StoreError, match="Input/output error"), locked(path, "first", shared=False):
            pass
    assert os.listdir("/dev/fd") == before
    monkeypatch.undo()
    with locked(path, "second", shared=False):
        pass


def test_one_byte_is_locked_and_closing_another_descriptor_frees_nothing(path):
    one, two, three = (os.open(path, file_locks.OPEN_FLAGS) for _ in range(3))
    assert file_locks.take(one, at=5) and not file_locks.take(two, at=5) and file_locks.take(two, at=6)
    os.close(three)
    assert not file_locks.take(two, shared=True, at=5)
    file_locks.release(one, 5)
    assert file_locks.take(two, shared=True, at=5) and file_locks.take(one, shared=True, at=5)
    assert not file_locks.take(one, at=5), "the other one shares it"
    os.close(two)
    assert file_locks.take(one, at=5)
    os.close(one)


def test_a_disk_without_room_for_the_note_can_be_locked(path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", refuse)
    with locked(path, "this", shared=True), pytest.raises(StoreBusyError, match="another process"):
        locked(path, "that", shared=False).__enter__()
