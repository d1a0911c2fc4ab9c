"""A bounded map over threads: results in order, never more than `size` items ahead of the consumer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def windowed(
    executor: Executor,
    function: Callable[[Item], Result],
    items: Iterable[Item],
    size: int,
    known: Callable[[Item], Result | None] = lambda item: None,
) -> Iterator[tuple[Item, Future[Result]]]:
    """Yield each item with the finished future of `function(item)`; `.result()` gives its value or its error.

    Where `known(item)` has the result already, no thread is asked. `Executor.map` would submit a whole dataset at once,
    and its pixels would fill the memory.
    """
    waiting: deque[tuple[Item, Future[Result]]] = deque()
    try:
        for item in items:
            result = known(item)
            if result is None:
                waiting.append((item, executor.submit(function, item)))
            else:
                future: Future[Result] = Future()
                future.set_result(result)
                waiting.append((item, future))
            if len(waiting) >= size:
                yield _finished(waiting)
        while waiting:
            yield _finished(waiting)
    finally:
        for _, future in waiting:
            future.cancel()


def _finished(waiting: deque[tuple[Item, Future[Result]]]) -> tuple[Item, Future[Result]]:
    item, future = waiting.popleft()
    future.exception()  # waits; the error itself is the consumer's
    return item, future
