"""Encodes the missing items in the pipeline's own threads, and stores each when it is its turn."""

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
from latentcache.integrations.onetrainer.item_identity import Item
from latentcache.phases.process_state import RandomStreams
from latentcache.store.base import Store, Writer
from latentcache.types import Entry
from latentcache.utils.signals import uninterrupted

WINDOW = 32
"""Items that the threads have at once. Finished ones wait in memory until it is their turn to be stored."""
HOPELESS = 20
"""After so many failures and no success the rest is not tried: then the items are not the cause."""

TIDY_ITEMS = 250
"""After so many items memory is freed, as mgds does."""

Encode = Callable[[Item], Entry]
_Waiting = deque[tuple[Item, Future[Entry]]]
Failure = tuple[str, Exception]
"""An item, by a name for messages, and why it cannot be cached."""


class ItemEncoding:
    """One refresh of a cache. Items that another process stored meanwhile are left out.

    `failures` are the items that could not be encoded. `tidy` is called after every TIDY_ITEMS items, to free memory of
    the device.
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
        """Whether so many items failed, and none was encoded, that the rest is not tried."""
        return not self.num_encoded and len(self.failures) >= HOPELESS

    def run(self, items: Sequence[Item]) -> None:
        """Encode and store these items. Encoded ones are stored also after an error. Raises PipelineStopped."""
        waiting: _Waiting = deque()
        with self._store.writer() as writer:
            try:
                stopped = self._encode_in_order(items, waiting, writer)
            finally:
                self._finish(waiting, writer)
        if stopped:
            raise PipelineStopped(self.num_encoded, len(items))

    def _encode_in_order(self, items: Sequence[Item], waiting: _Waiting, writer: Writer) -> bool:
        """Encode the items, WINDOW at a time. Returns whether `should_stop` ended it before the last."""
        stored: set[str] = set()
        with tqdm(total=len(items), desc="caching", smoothing=0.1, disable=None) as bar:
            for number, item in enumerate(items):
                if self._should_stop():
                    return True
                if self.is_hopeless:
                    break
                if number % WINDOW == 0:  # each look-up opens the index
                    stored = self._store.find([item.key for item in items[number : number + WINDOW]])
                if item.key not in stored:
                    with uninterrupted():  # an item that a thread has must be in `waiting`
                        waiting.append((item, self._executor.submit(self._encode, item)))
                if len(waiting) >= WINDOW:
                    self._take_first(waiting, writer)
                bar.update(number + 1 - len(waiting) - bar.n)
            while waiting:
                if self._should_stop():
                    return True
                self._take_first(waiting, writer)
                bar.update()
        return False

    def _finish(self, waiting: _Waiting, writer: Writer) -> None:
        """Wait for the threads, which must not use models that are moved, and store what they had begun."""
        for _, future in waiting:
            future.cancel()
        wait([future for _, future in waiting])
        for item, future in waiting:
            if not future.cancelled() and isinstance(future.exception(), Exception | None):
                self._take(item, future, writer)

    def _take_first(self, waiting: _Waiting, writer: Writer) -> None:
        self._take(*waiting[0], writer)
        waiting.popleft()  # only now: Ctrl-C may come during the wait for the item

    def _take(self, item: Item, future: Future[Entry], writer: Writer) -> None:
        try:
            entry = future.result()
        except Exception as error:  # the pipeline's modules may raise anything; the caller raises it at the end
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
    """Random streams for the encoding of these items, which their keys seed.

    Afterwards the streams of the training are as before: it draws the same numbers on a cold and on a warm cache.
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
    """Set the calling thread's current device, which torch keeps for each thread; None sets nothing."""
    if index is not None:
        torch.get_device_module(device).set_device(index)
