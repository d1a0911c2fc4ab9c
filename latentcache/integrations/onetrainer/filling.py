"""Encodes what is missing, in the pipeline's own threads, and stores it as it comes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, Future
from contextlib import contextmanager

import torch
from tqdm import tqdm

from latentcache.errors import ItemsError, PipelineStopped
from latentcache.integrations.onetrainer.items import Item
from latentcache.store.base import Store, Writer
from latentcache.types import Entry
from latentcache.validation.process_state import RandomStreams

WINDOW = 32
"""Items that are with the threads at once. Finished ones wait in memory until it is their turn to be stored."""
HOPELESS = 20
"""Failures without one success after which the rest is not tried: it is not the item that is to blame."""

Encode = Callable[[Item], Sequence[Entry]]


class Filling:
    """One refresh of a cache. Items that another process has stored meanwhile are left out."""

    def __init__(self, store: Store, executor: Executor, encode: Encode, should_stop: Callable[[], bool]):
        self._store, self._executor, self._encode, self._should_stop = store, executor, encode, should_stop
        self.num_encoded = 0
        self.failures: list[tuple[Item, Exception]] = []

    def run(self, items: Sequence[Item]) -> None:
        """Encode and store these items. What was encoded is stored whatever ends this.

        Raises PipelineStopped, and ItemsError when all others are stored.
        """
        waiting: deque[tuple[Item, Future[Sequence[Entry]]]] = deque()
        hopeless = stopped = False
        with (
            self._store.writer() as writer,
            tqdm(total=len(items), desc="caching", smoothing=0.1, disable=None) as bar,
        ):
            try:
                for item in items:
                    if (stopped := self._should_stop()) or (hopeless := self._is_hopeless()):
                        break
                    if self._store.find(item.keys.values()) < set(item.keys.values()):
                        waiting.append((item, self._executor.submit(self._encode, item)))
                    bar.update(1)
                    if len(waiting) >= WINDOW:
                        self._take(*waiting.popleft(), writer)
                while waiting and not (stopped := stopped or self._should_stop()):
                    self._take(*waiting.popleft(), writer)
            finally:
                # Models must not be moved while a thread still uses them; what is under way is kept.
                for _, future in waiting:
                    future.cancel()
                for item, future in waiting:
                    self._take(item, future, writer)
        if self.failures:
            self._raise(len(items), ", and the rest was not tried" if hopeless else "")
        if stopped:
            raise PipelineStopped(self.num_encoded, len(items))

    def _take(self, item: Item, future: Future[Sequence[Entry]], writer: Writer) -> None:
        try:
            entries = future.result()
        except CancelledError:
            return  # it was never begun
        except Exception as error:  # the pipeline's modules may raise anything; it is raised again when all are done
            self.failures.append((item, error))
            return
        for entry in entries:
            writer.add(entry)
        self.num_encoded += 1

    def _is_hopeless(self) -> bool:
        return not self.num_encoded and len(self.failures) >= HOPELESS

    def _raise(self, num_items: int, detail: str) -> None:
        raise items_error(self.failures, num_items, detail) from self.failures[0][1]


def items_error(failures: Iterable[tuple[Item | str, Exception]], num_items: int, detail: str = "") -> ItemsError:
    """The error that names each item that failed, and why."""
    lines = tuple(
        f"{item if isinstance(item, str) else item.name}: {type(error).__name__}: {error}" for item, error in failures
    )
    return ItemsError(lines, num_items, detail)


@contextmanager
def as_found() -> Iterator[None]:
    """The random streams are put back: training goes on with the same numbers on a cold and on a warm cache."""
    streams = RandomStreams()
    try:
        yield
    finally:
        streams.restore()


def current_device(device: torch.device) -> int | None:
    """The number of the calling thread's current device of this type, or None where there is none to set."""
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    return module.current_device() if hasattr(module, "set_device") else None


def set_current_device(device: torch.device, index: int | None) -> None:
    """Make the calling thread's current device that of the thread that asked: torch keeps one for each thread."""
    if index is not None:
        torch.get_device_module(device).set_device(index)
