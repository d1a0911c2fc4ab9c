"""Work in other threads: a bounded map, a background worker, and an iterator that is filled in advance."""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Generic, TypeVar

from latentcache.errors import StoreError, add_note

Item = TypeVar("Item")
Result = TypeVar("Result")

EXIT_TIMEOUT_S = 10.0
"""How long the end of the process waits for a prefetching thread that is in the middle of a read."""

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


class Prefetcher(Generic[Item]):
    """The items of `source`, made by a thread up to `size` items ahead of the consumer.

    An error of the source is raised after the items that were made before it, and again at each further call. The
    thread ends with the source, with `close`, when this object is dropped, and with the process. The source runs in
    that thread alone and is closed there. After a fork the child gets StoreError: it does not have the thread.

    No executor serves here: it takes no calls once the main thread has ended, though other threads go on.
    """

    def __init__(self, source: Generator[Item, None, None], size: int):
        self._pid = os.getpid()
        self._is_closed = False
        # Simple queues: a finalizer may use them in the middle of any other call of theirs.
        self._made: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._room: SimpleQueue[bool] = SimpleQueue()
        for _ in range(size):
            self._room.put(True)
        # The thread does not know this object, which can be dropped while the thread works.
        self._thread = Thread(
            target=_prefetch, args=(source, self._room, self._made), name="latentcache-prefetch", daemon=True
        )
        _rooms[self._thread] = self._room
        # At the end of the process `_stop_all` stops the thread and also waits for it.
        weakref.finalize(self, _stop, self._room).atexit = False
        self._thread.start()

    def __iter__(self) -> Prefetcher[Item]:
        return self

    def __next__(self) -> Item:
        if os.getpid() != self._pid:
            raise StoreError(
                f"this iterator belongs to process {self._pid}, and its thread is not in the fork {os.getpid()}: "
                "make a new one there with iter(loader)"
            )
        if self._is_closed:
            raise StopIteration
        item: Item
        item, error = self._made.get()
        if error is None:
            self._room.put(True)
            return item
        self._made.put((None, error))  # for the next call
        raise StopIteration if error is _END else error

    def close(self) -> None:
        """End the thread and wait for it. It finishes the item that it is making."""
        self._is_closed = True
        if os.getpid() == self._pid:
            _stop(self._room)
            self._thread.join()
            ended: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()  # what nobody takes may be large
            ended.put((None, _END))
            self._made = ended


_END = StopIteration()
"""In place of an error where the source ends."""
_rooms: weakref.WeakKeyDictionary[Thread, SimpleQueue[bool]] = weakref.WeakKeyDictionary()
"""The threads that prefetch."""


def _prefetch(
    source: Generator[Item, None, None], room: SimpleQueue[bool], made: SimpleQueue[tuple[Any, BaseException | None]]
) -> None:
    """Make an item for each True in `room`. The last one has the error that ends them."""
    ending: BaseException = _END  # a new one would keep its traceback, and by that the last item
    try:
        with closing(source):
            while room.get():
                made.put((next(source), None))  # in no variable: waiting keeps no item alive
    except StopIteration:
        pass
    except BaseException as error:  # raised in the consumer
        ending = error
    made.put((None, ending))


def _stop(room: SimpleQueue[bool]) -> None:
    """Let a thread end after its item. Does not wait: a finalizer may run in any thread."""
    with suppress(Empty):
        while True:
            room.get_nowait()
    room.put(False)


@atexit.register
def _stop_all() -> None:
    """A thread that still ran in torch at the end of the process would crash the interpreter."""
    for room in _rooms.values():
        _stop(room)
    for thread in _rooms:
        thread.join(EXIT_TIMEOUT_S)
