"""Locks between processes."""

from __future__ import annotations

import errno
import fcntl
import os
import time

import pytest

from latentcache.errors import StoreBusyError, StoreError, UnsafeStoreError
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


@pytest.mark.parametrize("what", ["hard link", "link", "loop", "pipe", "folder"])
def test_a_lock_overwrites_nothing_else(path, tmp_path, what):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    if what == "hard link":
        os.link(victim, path)
    elif what == "link":
        path.symlink_to(victim)
    elif what == "loop":
        path.symlink_to(path)
    elif what == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    with pytest.raises(UnsafeStoreError, match=r"[Rr]emove"), locked(path, "attack", shared=False):
        pass
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("failing", [fcntl.LOCK_EX | fcntl.LOCK_NB, fcntl.LOCK_UN])
def test_a_disk_that_fails_is_our_own_error(path, monkeypatch, failing):
    real = fcntl.flock

    def flock(fd, mode):
        if mode == failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(fd, mode)

    monkeypatch.setattr(fcntl, "flock", flock)
    before = os.listdir("/dev/fd")
    if failing == fcntl.LOCK_UN:
        with locked(path, "first", shared=False):
            pass  # the lock ends with the descriptor
    else:
        with pytest.raises(StoreError, match="Input/output error"), locked(path, "first", shared=False):
            pass
    assert os.listdir("/dev/fd") == before
    monkeypatch.undo()
    with locked(path, "second", shared=False):
        pass


def test_a_disk_without_room_for_the_note_can_be_locked(path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", refuse)
    with locked(path, "this", shared=True), pytest.raises(StoreBusyError, match="another process"):
        locked(path, "that", shared=False).__enter__()
