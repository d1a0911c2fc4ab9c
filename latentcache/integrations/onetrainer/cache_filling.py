"""Encodes what is missing, in the pipeline's own threads, and stores it as it comes."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, wait
from contextlib import contextmanager

import numpy as np
import torch
from tqdm import tqdm

from latentcache.errors import ItemsError, PipelineStopped
from latentcache.identity import canonical_json, digest
from latentcache.integrations.onetrainer.items import Item
from latentcache.phases.interrupts import uninterrupted
from latentcache.phases.process_state import RandomStreams
from latentcache.store.base import Store, Writer
from latentcache.types import Entry

WINDOW = 32
"""Items that are with the threads at once. Finished ones wait in memory until it is their turn to be stored."""
HOPELESS = 20
"""Failures without one success after which the rest is not tried: it is not the item that is to blame."""

TIDY_ITEMS = 250
"""Items between two times that memory is freed; as mgds does."""

Encode = Callable[[Item], Entry]
Failure = tuple[str, Exception]
"""An item, by a name for messages, and why it cannot be cached."""


class Filling:
    """One refresh of a cache. Items that another process has stored meanwhile are left out.

    `failures` are the items that could not be encoded; `is_hopeless` says that the rest was not tried. `tidy` is called
    now and then between items, to free memory of the device.
    """

    def __init__(
        self,
        store: Store,
        executor: Executor,
        encode: Encode,
        should_stop: Callable[[], bool],
        tidy: Callable[[], None],
    ):
        self._store, self._executor, self._encode = store, executor, encode
        self._should_stop, self._tidy = should_stop, tidy
        self.num_encoded = 0
        self.failures: list[Failure] = []

    @property
    def is_hopeless(self) -> bool:
        return not self.num_encoded and len(self.failures) >= HOPELESS

    def run(self, items: Sequence[Item]) -> None:
        """Encode and store these items. What was encoded is stored whatever ends this. Raises PipelineStopped."""
        waiting: deque[tuple[Item, Future[Entry]]] = deque()
        stopped = False
        stored: set[str] = set()
        with (
            self._store.writer() as writer,
            tqdm(total=len(items), desc="caching", smoothing=0.1, disable=None) as bar,
        ):
            try:
                for number, item in enumerate(items):
                    if (stopped := self._should_stop()) or self.is_hopeless:
                        break
                    if number % WINDOW == 0:  # each look-up opens the index
                        stored = self._store.find([item.key for item in items[number : number + WINDOW]])
                    if item.key not in stored:
                        with uninterrupted():  # what a thread was given must be in `waiting`
                            waiting.append((item, self._executor.submit(self._encode, item)))
                    if len(waiting) >= WINDOW:
                        self._take_first(waiting, writer)
                    bar.update(number + 1 - len(waiting) - bar.n)
                while waiting and not (stopped := stopped or self._should_stop()):
                    self._take_first(waiting, writer)
                    bar.update()
            finally:
                # Models must not be moved while a thread still uses them; what is under way is kept.
                for _, future in waiting:
                    future.cancel()
                wait([future for _, future in waiting])
                for item, future in waiting:
                    if not future.cancelled() and isinstance(future.exception(), Exception | None):
                        self._take(item, future, writer)
        if stopped:
            raise PipelineStopped(self.num_encoded, len(items))

    def _take_first(self, waiting: deque[tuple[Item, Future[Entry]]], writer: Writer) -> None:
        self._take(*waiting[0], writer)
        waiting.popleft()  # not before: Ctrl-C may have come while it was waited for

    def _take(self, item: Item, future: Future[Entry], writer: Writer) -> None:
        try:
            entry = future.result()
        except Exception as error:  # the pipeline's modules may raise anything; it is raised again when all are done
            self.failures.append((item.name, error))
            return
        writer.add(entry)
        self.num_encoded += 1
        if self.num_encoded % TIDY_ITEMS == 0:
            self._tidy()


def items_error(failures: Iterable[Failure], num_items: int, detail: str = "") -> ItemsError:
    """The error that names each item that failed, and why."""
    return ItemsError(tuple(f"{name}: {type(e).__name__}: {e}" for name, e in failures), num_items, detail)


@contextmanager
def own_random_streams(items: Iterable[Item]) -> Iterator[None]:
    """Random numbers of its own for what is drawn while these items are encoded: other items, other numbers.

    Training then goes on with the streams as they were, on a cold cache as on a warm one.
    """
    streams = RandomStreams()
    try:
        seed = int(digest(canonical_json([item.key for item in items]))[:8], 16)
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
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
