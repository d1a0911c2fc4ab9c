"""No fork in the middle of a call: the child would inherit a lock, or a database in a half-done change."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol


class Lockable(Protocol):
    """Something whose `lock` is held during its calls. The thread that forks may hold it already."""

    lock: threading.RLock


_alive: weakref.WeakSet[Lockable] = weakref.WeakSet()
_guard = threading.Lock()
_registered = False
_held: list[Lockable] = []


def hold_in_forks(owner: Lockable) -> None:
    """From now on a fork of this process waits for `owner.lock`, and both sides find it free."""
    global _registered
    with _guard:
        if not _registered:
            os.register_at_fork(before=_hold_all, after_in_parent=_release_all, after_in_child=_release_all)
            _registered = True
        _alive.add(owner)


def _hold_all() -> None:
    _guard.acquire()
    _held.extend(sorted(_alive, key=id))
    for owner in _held:
        owner.lock.acquire()


def _release_all() -> None:
    for owner in _held:
        owner.lock.release()
    _held.clear()
    _guard.release()
