"""The values of items: encoded in the pipeline's threads, stored as the fields of entries, and read back.

Each tensor is a field, and all other values of an item together are one JSON field.
"""

from __future__ import annotations

import json
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from latentcache.errors import PipelineError, PipelineStopped
from latentcache.identity import canonical_json, digest
from latentcache.integrations.onetrainer.items import Item
from latentcache.interop.readers import flaw_of
from latentcache.phases.state import RandomStreams
from latentcache.store.base import Store
from latentcache.store.entry import is_field
from latentcache.store.writer import Writer
from latentcache.types import Entry
from latentcache.utils.signals import uninterrupted

PLAIN_FIELD = "plain_values"
"""The field with the values that are not tensors: UTF-8 JSON, padded with spaces."""
PADDING = 256
"""The JSON is padded to a multiple of this many bytes: entries of equal length are read together."""
WINDOW = 32
"""How many items are in flight. Finished ones wait in memory until it is their turn to be stored."""
HOPELESS = 20
"""After this many failures without a success, encoding stops: the items are not the cause."""
CLAIM_WAIT_S = 0.2
"""Seconds between two checks whether another process has stored the items that it claimed."""
TIDY_ITEMS = 250
"""How often memory is freed, in items, as in mgds."""

Failure = tuple[str, Exception]
"""An item's name for messages, and why it cannot be cached."""
_Waiting = deque[tuple[Item, Future[Entry]]]

# Encoding


class ItemEncoding:
    """One refresh of a cache. Items that another process has claimed are left to it.

    `failures` are the items that could not be encoded. `tidy` frees device memory, after every TIDY_ITEMS items.
    """

    def __init__(
        self,
        store: Store,
        executor: Executor,
        encode: Callable[[Item], Entry],
        should_stop: Callable[[], bool],
        tidy: Callable[[], None],
    ):
        self._store, self._executor, self._encode = store, executor, encode
        self._should_stop, self._tidy = should_stop, tidy
        self._is_stopped = False
        self.num_encoded = 0
        self.failures: list[Failure] = []

    @property
    def is_hopeless(self) -> bool:
        """Whether encoding stopped because HOPELESS items failed and none succeeded."""
        return not self.num_encoded and len(self.failures) >= HOPELESS

    def run(self, items: Sequence[Item]) -> None:
        """Encode and store these items. After an error, finished ones are stored too. Raises PipelineStopped."""
        left, waiting = list(items), _Waiting()
        with (
            self._store.writer() as writer,
            tqdm(total=len(items), desc="caching", smoothing=0.1, disable=None) as bar,
        ):
            try:
                while left and self._goes_on():
                    theirs = self._encode_in_order(left, waiting, writer, bar)
                    if theirs:
                        writer.seal()  # the other process may be waiting for items of this one
                    if len(theirs) == len(left):
                        time.sleep(CLAIM_WAIT_S)
                    left = theirs
            finally:
                self._finish(waiting, writer)
        if self._is_stopped:
            raise PipelineStopped(self.num_encoded, len(items))

    def _goes_on(self) -> bool:
        self._is_stopped = self._is_stopped or self._should_stop()
        return not (self._is_stopped or self.is_hopeless)

    def _encode_in_order(self, items: Sequence[Item], waiting: _Waiting, writer: Writer, bar: Any) -> list[Item]:
        """Encode the items, WINDOW at a time, and return those that another process is encoding."""
        theirs: list[Item] = []
        for start in range(0, len(items), WINDOW):
            window = items[start : start + WINDOW]
            mine, others = writer.claim(item.key for item in window)
            theirs += [item for item in window if item.key in others]
            bar.update(len(window) - len(mine) - len(others))
            for item in window:
                if item.key not in mine:
                    continue
                if not self._goes_on():
                    return []
                with uninterrupted():  # every submitted item must be in `waiting`
                    waiting.append((item, self._executor.submit(self._encode, item)))
                if len(waiting) >= WINDOW:
                    self._take_first(waiting, writer, bar)
        while waiting and self._goes_on():
            self._take_first(waiting, writer, bar)
        return theirs

    def _finish(self, waiting: _Waiting, writer: Writer) -> None:
        """Store what the threads had begun. They must be done before the caller moves the models."""
        for _, future in waiting:
            future.cancel()
        wait([future for _, future in waiting])
        for item, future in waiting:
            if not future.cancelled() and isinstance(future.exception(), Exception | None):
                self._take(item, future, writer)

    def _take_first(self, waiting: _Waiting, writer: Writer, bar: Any) -> None:
        self._take(*waiting[0], writer)
        waiting.popleft()  # last, because Ctrl-C may interrupt the wait for the item
        bar.update()

    def _take(self, item: Item, future: Future[Entry], writer: Writer) -> None:
        try:
            entry = future.result()
        except Exception as error:  # the pipeline's modules may raise anything; `start` raises it at the end
            self.failures.append((item.name, error))
            writer.release([item.key])
            return
        writer.add(entry)
        self.num_encoded += 1
        if self.num_encoded % TIDY_ITEMS == 0:
            self._tidy()


@contextmanager
def own_random_streams(items: Iterable[Item]) -> Iterator[None]:
    """Seed the global random generators from the items' keys, and restore them afterwards.

    So a training draws the same numbers on a cold and on a warm cache.
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


def on_current_device(device: torch.device, encode: Callable[[Item], Entry]) -> Callable[[Item], Entry]:
    """Wrap `encode` for other threads: torch's current device, set per thread, is that of the calling thread."""
    module: Any = None if device.type == "cpu" else torch.get_device_module(device)
    if not hasattr(module, "set_device"):
        return encode
    number = module.current_device()

    def encode_there(item: Item) -> Entry:
        module.set_device(number)
        return encode(item)

    return encode_there


# Fields


def fields_of(values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The fields of an entry with these values, on the CPU.

    A value is a tensor or plain: bool, int, float, str, or a tuple, list or dict (with str keys) of these and None.
    Raises PipelineError for anything else, and for tensors with NaN or Inf.
    """
    fields: dict[str, torch.Tensor] = {}
    plain: dict[str, Any] = {}
    for name, value in values.items():
        if value is None:
            raise PipelineError(f"the pipeline returned None for {name!r}, which cannot be cached")
        if not isinstance(value, torch.Tensor):
            plain[name] = _encoded(name, value)
            continue
        if not is_field(name) or name == PLAIN_FIELD:
            raise PipelineError(f"{name!r} cannot name a tensor: use only letters, digits and _ . -")
        tensor = value.detach().to("cpu").contiguous()
        if tensor.is_floating_point() and flaw_of(tensor.float()) in ("nan", "inf"):
            raise PipelineError(f"{name!r} has NaN or Inf; if the encoder overflows, use another dtype")
        fields[name] = tensor
    if plain or not fields:
        data = json.dumps(plain, separators=(",", ":"), allow_nan=False).encode("ascii")
        data += b" " * (-len(data) % PADDING)
        fields[PLAIN_FIELD] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return fields


def values_of(fields: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The inverse of `fields_of`: tensors on the CPU, other values with their original types."""
    values: dict[str, Any] = dict(fields)
    data = values.pop(PLAIN_FIELD, None)
    return values if data is None else values | plain_values(data.numpy().tobytes())


def plain_values(data: str | bytes) -> dict[str, Any]:
    """The values in the JSON of an entry's PLAIN_FIELD, with their original types."""
    return {name: _decoded(value) for name, value in json.loads(data).items()}


def _encoded(name: str, value: Any) -> Any:
    """A plain value as JSON: a container is an object whose only key names its type."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (tuple, list):
        return {"tuple" if type(value) is tuple else "list": [_encoded(name, item) for item in value]}
    if type(value) is dict and all(type(key) is str for key in value):
        return {"dict": [[key, _encoded(name, item)] for key, item in value.items()]}
    raise PipelineError(
        f"{name!r} is a {type(value).__name__}; only tensors, numbers, strings, tuples, lists and dicts can be cached"
    )


def _decoded(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "dict":
        return {key: _decoded(item) for key, item in content}
    items = [_decoded(item) for item in content]
    return tuple(items) if kind == "tuple" else items
