"""Work in other threads: a bounded map, a background worker, and a prefetching iterator."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, TypeVar

from latentcache.errors import StoreError, add_note

Item = TypeVar("Item")
Result = TypeVar("Result")

logger = logging.getLogger("latentcache")


@contextmanager
def noted_on(first: BaseException | None, problem: str) -> Iterator[None]:
    """Attach an error of the block as a note to `first`, the error that is already propagating, and log it.

    The first error is the one to report; the second must not hide it, nor get lost. Without a first error, the error
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
    """Yield each item with the future of `function(item)`, in order, with at most `size` calls in flight.

    Unlike this, `Executor.map` would submit a whole dataset at once, and its pixels would fill the memory.
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


class BackgroundWorker(AbstractContextManager["BackgroundWorker"]):
    """Calls functions in one background thread, in order. Use it in a `with` block.

    At most `size` calls run or wait: `call` blocks until there is room. The error of a call is raised by the next
    `call`, by `finish` or at the end of the block. The end of the block waits for all calls, even after an exception.
    `name` describes the work in messages, e.g. "sealing".

    With `in_thread=False`, functions run synchronously in the caller's thread. That is for encoders on the CPU: they
    use every core, and once torch's threads outnumber the cores, libgomp makes them sleep at each barrier.
    """

    def __init__(self, size: int, name: str, *, in_thread: bool = True):
        self._size, self._name, self._in_thread = size, name, in_thread
        self._calls: deque[Future[None]] = deque()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"latentcache-{name}")

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Queue `function(*arguments)`."""
        if not self._in_thread:
            function(*arguments)
            return
        while self._calls and (len(self._calls) >= self._size or self._calls[0].done()):
            self._wait()
        self._calls.append(self._executor.submit(function, *arguments))

    def finish(self) -> None:
        """Wait until all queued calls are done. Raises the error of the first one that failed."""
        while self._calls:
            self._wait()

    def _wait(self) -> None:
        error = self._calls[0].exception()  # if this is interrupted the call stays queued, and its error is not lost
        self._calls.popleft()
        if error is not None:
            raise error

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
    """Iterates over `source` in a thread that runs up to `size` items ahead of the consumer.

    An error of the source is raised after the items before it, and again at each further call. The thread ends with
    the source or on `close`. If this object is dropped or the process exits, it first finishes the items in flight.
    After a fork the child gets StoreError, because it does not have the thread.
    """

    def __init__(self, source: Generator[Item, None, None], size: int):
        self._pid, self._source, self._is_closed = os.getpid(), source, False
        # No finalizer: it could run while its thread holds an executor's lock. Python itself joins the thread at exit,
        # since a thread still running in torch then would crash the interpreter.
        self._executor = ThreadPoolExecutor(1, "latentcache-prefetch")
        self._coming = deque(self._executor.submit(next, source) for _ in range(size))

    def __next__(self) -> Item:
        if os.getpid() != self._pid:
            raise StoreError(
                f"this iterator belongs to process {self._pid}, and its fork {os.getpid()} does not have the thread: "
                "make a new iterator there with iter(loader)"
            )
        coming = self._coming
        if self._is_closed:
            raise StopIteration
        try:
            error = coming[0].exception()
            if error is not None:  # it stays queued for the next call
                self._executor.shutdown(wait=False)
                raise error
            item = coming.popleft().result()
            coming.append(self._executor.submit(next, self._source))
        except (CancelledError, RuntimeError):
            if self._is_closed:  # by another thread in the meantime
                raise StopIteration from None
            raise
        return item

    def close(self) -> None:
        """Stop the thread and wait for it. It finishes the current item."""
        self._is_closed = True
        if os.getpid() == self._pid:
            coming, self._coming = self._coming, deque()  # drop unread items, which may be large
            for future in tuple(coming):
                future.cancel()
            with suppress(RuntimeError):  # the thread has ended
                self._executor.submit(self._source.close)
            self._executor.shutdown()
