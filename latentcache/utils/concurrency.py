"""Work in other threads: a bounded map, a background worker, and an iterator that is filled in advance."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeAlias, TypeVar

from latentcache.errors import StoreError

Item = TypeVar("Item")
Result = TypeVar("Result")

NICENESS = 10
"""By how many steps of `nice` `lower_priority` lowers a thread's priority."""
EXIT_TIMEOUT_S = 10.0
"""How long the end of the process waits for a prefetching thread that is in the middle of a read."""

logger = logging.getLogger("latentcache")


def lower_priority() -> None:
    """Lower the calling thread's priority below that of the encoder's threads. Only Linux has priorities of threads."""
    if sys.platform != "linux":
        return
    thread = threading.get_native_id()
    try:
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)
    except OSError as error:  # a sandbox may forbid it, and only speed depends on it
        logger.debug("a decoding thread keeps its priority: %s", error)


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
        first.add_note(f"latentcache: {problem}: {error}")
        logger.error("%s: %s", problem, error)


@dataclass(frozen=True, slots=True)
class Known(Generic[Result]):
    """In place of a future where no call is made: a plan meets millions, and a future has a lock."""

    value: Result

    def result(self) -> Result:
        """The value."""
        return self.value


Outcome: TypeAlias = Future[Result] | Known[Result]


def bounded_map(
    executor: Executor,
    function: Callable[[Item], Result],
    items: Iterable[Item],
    size: int,
    known: Callable[[Item], Result | None] = lambda item: None,
) -> Generator[tuple[Item, Outcome[Result]], None, None]:
    """Yield each item with the finished future of `function(item)`, in order, at most `size` items ahead.

    The future's `result()` returns the value or raises the error of the call. No call is made where `known(item)`
    returns the result. `Executor.map` would submit a whole dataset at once, and its pixels would fill the memory.
    """
    waiting: deque[tuple[Item, Outcome[Result]]] = deque()
    try:
        for item in items:
            result = known(item)
            waiting.append((item, executor.submit(function, item) if result is None else Known(result)))
            if len(waiting) >= size:
                yield _finished(waiting)
        while waiting:
            yield _finished(waiting)
    finally:
        for _, future in waiting:
            if isinstance(future, Future):
                future.cancel()


def _finished(waiting: deque[tuple[Item, Outcome[Result]]]) -> tuple[Item, Outcome[Result]]:
    item, future = waiting.popleft()
    if isinstance(future, Future):
        future.exception()  # waits; the consumer raises the error
    return item, future


class BackgroundWorker:
    """Calls functions in one background thread, in the order in which they were given. Use it in a `with` block.

    At most `size` calls run or wait: `call` blocks until there is room. The error of a call is raised by the next
    `call`, by `finish` or at the end of the block, and the calls that waited after it are dropped. The end of the
    block waits for all calls, after an exception too. `name` names the work, as in "sealing".

    With `in_thread=False` functions are called at once, in the caller's thread. That is for encoders on the CPU: no
    core is free for a background thread, and torch's threads for a second caller would slow down those of the first.
    (libgomp counts them all; when they outnumber the cores, it lets them sleep at each barrier.) The caller then gets
    an error at once, and an interrupt can stop a call in its middle.
    """

    def __init__(self, size: int, name: str, *, in_thread: bool = True):
        if size < 1:
            raise ValueError(f"size is {size}, but at least 1 is needed")
        self._size, self._name, self._in_thread = size, name, in_thread
        self._calls: deque[Future[None]] = deque()
        self._has_failed = False
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"latentcache-{name}")

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call `function(*arguments)` in its turn."""
        if not self._in_thread:
            function(*arguments)
            return
        while self._calls and (len(self._calls) >= self._size or self._calls[0].done()):
            self._wait()
        self._calls.append(self._executor.submit(self._make, function, arguments))

    def finish(self) -> None:
        """Wait until every call was made."""
        while self._calls:
            self._wait()

    def _wait(self) -> None:
        """Wait for the first call. An interrupt leaves the call in the queue, so that its error is not lost."""
        try:
            self._calls[0].result()
        except Exception:
            wait(self._calls)  # the calls after it are being dropped
            self._calls.clear()
            self._has_failed = False
            raise
        self._calls.popleft()

    def _make(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if self._has_failed:
            return
        try:
            function(*arguments)
        except BaseException:
            self._has_failed = True
            raise

    def __enter__(self) -> BackgroundWorker:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: object) -> None:
        try:
            with noted_on(exc, f"{self._name} failed too"):
                self.finish()
        finally:
            self._executor.shutdown()


class Prefetcher(Generic[Item]):
    """The items of `source`, made by a thread up to `size` items ahead of the consumer.

    An error of the source is raised after the items that were made before it, and again at each further call. The
    thread ends with the source, with `close`, when this object is dropped, and with the process. The source runs in
    that thread alone and is closed there. After a fork the child gets StoreError: it does not have the thread.
    """

    def __init__(self, source: Generator[Item, None, None], size: int):
        self._thread = _PrefetchThread(source, size)
        # At the end of the process `_stop_all` stops the thread and also waits for it.
        # The thread by a weak reference: an error that it keeps refers to its consumers, and to this object by that.
        weakref.finalize(self, _stop, weakref.ref(self._thread)).atexit = False
        _prefetching.add(self._thread)
        self._thread.start()

    def __iter__(self) -> Prefetcher[Item]:
        return self

    def __next__(self) -> Item:
        if os.getpid() != self._thread.pid:
            raise StoreError(
                f"this iterator belongs to process {self._thread.pid}, and its thread is not in the fork "
                f"{os.getpid()}: make a new one there with iter(loader)"
            )
        return self._thread.take()

    def close(self) -> None:
        """End the thread and wait for it. It finishes the item that it is making."""
        self._thread.stop()
        if os.getpid() == self._thread.pid:
            self._thread.join()


def _stop(thread: weakref.ref[_PrefetchThread[Any]]) -> None:
    alive = thread()
    if alive is not None:
        alive.stop()


class _PrefetchThread(threading.Thread, Generic[Item]):
    """Makes the items. It does not know the consumer, so that the consumer can be dropped while the thread works.

    No executor serves here: its thread would live until its consumer is dropped, and takes no calls once the main
    thread has ended, though other threads go on.
    """

    def __init__(self, source: Generator[Item, None, None], size: int):
        super().__init__(name="latentcache-prefetch", daemon=True)
        self.pid = os.getpid()
        self._source = source
        # Simple queues: `stop` may run as a finalizer, in the middle of any other call of theirs.
        self._made: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._room: SimpleQueue[bool] = SimpleQueue()
        self._is_stopped = False
        for _ in range(size):
            self._room.put(True)

    def run(self) -> None:
        ending: BaseException = StopIteration()
        try:
            try:
                while self._room.get() and not self._is_stopped:
                    self._made.put((next(self._source), None))  # in no variable: waiting keeps no item alive
            finally:
                self._source.close()
        except StopIteration:
            pass  # the usual end keeps no traceback, and so no frame and no last batch
        except BaseException as error:  # `take` raises it in the consumer
            ending = error
        if self._is_stopped:
            with suppress(Empty):  # no one takes what is left, and it may be large
                while True:
                    self._made.get_nowait()
        self._made.put((None, ending))

    def take(self) -> Item:
        """The next item. StopIteration after the last one; an error of the source is raised after the last item."""
        item: Item
        item, error = self._made.get()
        if error is not None or self._is_stopped:
            self._made.put((None, error))  # for the next call
            raise StopIteration if self._is_stopped or error is None or isinstance(error, StopIteration) else error
        self._room.put(True)
        return item

    def stop(self) -> None:
        """Let the thread end after its item. Does not wait: a finalizer may run in any thread. A fork has no thread."""
        if os.getpid() == self.pid:
            self._is_stopped = True
            self._room.put(True)


_prefetching: weakref.WeakSet[_PrefetchThread[Any]] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """A thread that still ran in torch at the end of the process would crash the interpreter."""
    threads = [thread for thread in _prefetching if thread.pid == os.getpid()]
    for thread in threads:
        thread.stop()
    for thread in threads:
        thread.join(EXIT_TIMEOUT_S)
