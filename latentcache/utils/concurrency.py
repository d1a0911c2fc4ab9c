"""Work in other threads: a bounded map, a background worker, and an iterator that is filled in advance."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from latentcache.errors import StoreError, add_note

Item = TypeVar("Item")
Result = TypeVar("Result")

logger = logging.getLogger("latentcache")


@contextmanager
def noted_on(first: BaseException | None, problem: str) -> Iterator[None]:
    """Add an error of the block as a note to `first`, the error that is being raised already. Log it too.

    The first error is the one to report; the second must neither hide it nor be lost. Without a first one the error
    of the block is raised.
    """
    try:
        yield
    except Exception as error:
        if first is None:
            raise
        add_note(first, f"latentcache: {problem}: {error}")
        logger.error("%s: %s", problem, error)


def bounded_map(
    executor: Executor, function: Callable[[Item], Result], items: Iterable[Item], size: int
) -> Generator[tuple[Item, Future[Result]], None, None]:
    """Yield each item with the future of `function(item)`, in order, at most `size` items ahead.

    The future's `result()` waits, and returns the value or raises the error of the call. `Executor.map` would submit a
    whole dataset at once, and its pixels would fill the memory.
    """
    waiting: deque[tuple[Item, Future[Result]]] = deque()
    try:
        for item in items:
            waiting.append((item, executor.submit(function, item)))
            if len(waiting) >= size:
                yield waiting.popleft()
        while waiting:
            yield waiting.popleft()
    finally:
        for _, future in waiting:
            future.cancel()


class BackgroundWorker:
    """Calls functions in one background thread, in the order in which they were given. Use it in a `with` block.

    At most `size` calls run or wait: `call` blocks until there is room. The error of a call is raised by the next
    `call`, by `finish` or at the end of the block. The end of the block waits for all calls, after an exception too.
    `name` names the work, as in "sealing".

    With `in_thread=False` functions are called at once, in the caller's thread. That is for encoders on the CPU: no
    core is free for another thread, and libgomp lets torch's threads sleep at each barrier when they outnumber the
    cores.
    """

    def __init__(self, size: int, name: str, *, in_thread: bool = True):
        self._size, self._name, self._in_thread = size, name, in_thread
        self._calls: deque[Future[None]] = deque()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"latentcache-{name}")

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call `function(*arguments)` in its turn."""
        if not self._in_thread:
            function(*arguments)
            return
        while self._calls and (len(self._calls) >= self._size or self._calls[0].done()):
            self._wait()
        self._calls.append(self._executor.submit(function, *arguments))

    def finish(self) -> None:
        """Wait until every call was made."""
        while self._calls:
            self._wait()

    def _wait(self) -> None:
        error = self._calls[0].exception()  # an interrupt of this leaves the call there: its error is not lost
        self._calls.popleft()
        if error is not None:
            raise error

    def __enter__(self) -> BackgroundWorker:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: object) -> None:
        first = exc
        with self._executor:
            while self._calls:
                try:
                    with noted_on(first, f"{self._name} failed too"):
                        self._wait()
                except Exception as error:
                    first = error
        if first is not None and first is not exc:
            raise first


class Prefetcher(Iterator[Item]):
    """The items of `source`, made by a thread up to `size` items ahead of the consumer.

    An error of the source is raised after the items that were made before it, and again at each further call. The
    thread ends with the source and with `close`; when this object is dropped, and with the process, once it has made
    the items that it is ahead. After a fork the child gets StoreError: it does not have the thread.
    """

    def __init__(self, source: Generator[Item, None, None], size: int):
        self._pid, self._source, self._is_closed = os.getpid(), source, False
        # No finalizer ends it: that could run while its thread holds a lock of an executor. Python itself waits for it
        # at the end of the process: a thread that still ran in torch then would crash the interpreter.
        self._executor = ThreadPoolExecutor(1, "latentcache-prefetch")
        self._coming = deque(self._executor.submit(next, source) for _ in range(size))

    def __next__(self) -> Item:
        if os.getpid() != self._pid:
            raise StoreError(
                f"this iterator belongs to process {self._pid}, and its thread is not in the fork {os.getpid()}: "
                "make a new one there with iter(loader)"
            )
        coming = self._coming
        if self._is_closed:
            raise StopIteration
        try:
            error = coming[0].exception()
            if error is not None:  # it stays there for the next call
                self._executor.shutdown(wait=False)
                raise error
            item = coming.popleft().result()
            coming.append(self._executor.submit(next, self._source))
        except (CancelledError, RuntimeError):
            if self._is_closed:  # by another thread, meanwhile
                raise StopIteration from None
            raise
        return item

    def close(self) -> None:
        """End the thread and wait for it. It finishes the item that it is making."""
        self._is_closed = True
        if os.getpid() == self._pid:
            coming, self._coming = self._coming, deque()  # what nobody takes may be large
            for future in tuple(coming):
                future.cancel()
            with suppress(RuntimeError):  # the thread has ended
                self._executor.submit(self._source.close)
            self._executor.shutdown()
