"""An iterator that runs ahead of its consumer in a thread of its own."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections import deque
from collections.abc import Generator
from typing import Generic, TypeVar

from latentcache.errors import StoreError

Item = TypeVar("Item")

EXIT_TIMEOUT_S = 10.0
"""How long the end of the process waits for a thread that is in the middle of a read."""

_alive: weakref.WeakSet[_Ahead] = weakref.WeakSet()
_registered = False


class _Ahead(Generic[Item]):
    """What the thread and the consumer share. The thread knows nothing of the consumer, so that one can be dropped."""

    def __init__(self, source: Generator[Item, None, None], size: int):
        self.pid = os.getpid()
        self.thread = threading.Thread(target=self._run, args=(source,), name="latentcache-prefetch", daemon=True)
        self._size = size
        self._changed = threading.Condition()  # over an RLock: a finalizer may call `stop` in the middle of `take`
        self._ready: deque[Item] = deque()
        self._stopping = self._finished = False
        self._error: BaseException | None = None

    def _run(self, source: Generator[Item, None, None]) -> None:
        try:
            try:
                while self._has_room():
                    item = next(source, self)
                    if item is self:
                        break
                    self._put(item)
                    del item  # the thread holds no batch while it waits
            finally:
                source.close()
        except BaseException as error:  # whatever it is, it is the consumer's
            self._error = error
        finally:
            with self._changed:
                self._finished = True
                self._changed.notify_all()

    def _has_room(self) -> bool:
        """Wait until something may be made; False when no more is wanted."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopping or len(self._ready) < self._size)
            return not self._stopping

    def _put(self, item: Item) -> None:
        with self._changed:
            if not self._stopping:
                self._ready.append(item)
                self._changed.notify_all()

    def take(self) -> Item:
        """The next item. StopIteration after the last one; an error of the source comes after what it made before."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._finished)
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
            if self._error is not None and not self._stopping:
                raise self._error
            raise StopIteration

    def stop(self) -> None:
        """Ask the thread to end, and drop what it made. Waits for nothing: a finalizer may run in any thread."""
        if os.getpid() != self.pid:
            return  # in a fork there is no such thread, and its lock may be held for ever
        with self._changed:
            self._stopping = True
            self._ready.clear()
            self._changed.notify_all()


def _stop_all() -> None:
    """At the end of the process: a thread that still ran in torch then would bring it down."""
    ahead = [each for each in _alive if each.pid == os.getpid()]
    for each in ahead:
        each.stop()
    for each in ahead:
        each.thread.join(EXIT_TIMEOUT_S)


class Prefetched(Generic[Item]):
    """The items of `source`, made by a thread up to `size` items ahead.

    An error of the source comes up here, after the items that were made before it, and again at each further call.
    The thread ends with the source, with `close`, when this object is dropped, and with the process. The source runs
    in that thread alone and is closed there. A fork of the process gets StoreError: the thread is not in it.
    """

    def __init__(self, source: Generator[Item, None, None], size: int):
        global _registered
        self._ahead = _Ahead(source, size)
        weakref.finalize(self, self._ahead.stop).atexit = False
        if not _registered:
            atexit.register(_stop_all)
            _registered = True
        _alive.add(self._ahead)
        self._ahead.thread.start()

    def __iter__(self) -> Prefetched[Item]:
        return self

    def __next__(self) -> Item:
        if os.getpid() != self._ahead.pid:
            raise StoreError(
                f"this iterator belongs to process {self._ahead.pid}, and its thread is not in the fork {os.getpid()}: "
                "make a new one there with iter(loader)"
            )
        return self._ahead.take()

    def close(self) -> None:
        """End the thread and wait for it. It finishes the item that it is making."""
        self._ahead.stop()
        if os.getpid() == self._ahead.pid and threading.current_thread() is not self._ahead.thread:
            self._ahead.thread.join()
