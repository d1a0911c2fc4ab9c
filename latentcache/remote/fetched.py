"""Entries that came over the network: packs in memory, compared with their digests, and what is fetched in advance."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from latentcache.errors import PackError, RemoteError, StoreError
from latentcache.store.base import EntryArrays, OwnedEntry
from latentcache.store.pack import PackRecords, read_entry, read_pack_bytes, verified_arrays

MAX_AHEAD = 32
"""Requests whose answers wait to be read: of batches, or of packs, of which pack order has a window and one more. What
comes beyond them is fetched when it is read: they are needed before."""
MAX_READS = 32
"""That a request outlives. A loader is some batches ahead; what was not read by then belongs to one that stopped."""
READS_PER_KEY = 8
"""The same for each of its keys: a pack's rows are read over a window of packs, in the smallest batches by so many."""
NUM_THREADS = 4
"""Requests on their way at once."""


@dataclass(frozen=True, slots=True)
class FetchedPack:
    """The entries of a request, found good: their arrays by key, and the pack that they lie in."""

    rows: Mapping[str, EntryArrays]
    records: PackRecords

    @classmethod
    def read(cls, data: bytes, keys: Sequence[str], url: str) -> FetchedPack:
        """The entries of `keys` in a pack. PackError, naming the `url`, if one is not there or not what was sent."""
        records = read_pack_bytes(data, url)
        numbers = {key: number for number, key in enumerate(records.row.names())}
        whole = np.frombuffer(data, np.uint8)
        rows = {}
        for key in keys:
            if key not in numbers:
                raise PackError(url, f"lacks entry {key}, which was requested")
            found = verified_arrays(whole, key, records.row.location(numbers[key]))
            if isinstance(found, str):
                raise PackError(url, f"entry {key}: {found}")
            rows[key] = found
        return cls(rows, records)

    def owned(self) -> list[OwnedEntry]:
        """Copies of all entries, in the order of the pack."""
        names = self.records.row.names()
        places = ((key, self.records.row.location(at)) for at, key in enumerate(names) if key in self.rows)
        return [read_entry(self.rows[key], self.records, place) for key, place in places]


@dataclass(slots=True, eq=False)
class _Request:
    """A request on its way, or its answer; and how many times each of its keys is still wanted."""

    future: Future[dict[str, EntryArrays]]
    end: int
    """The read after which it is dropped."""
    wanted: Counter[str]
    num_keys: int

    def was_read(self, key: str, num: int, is_found: bool) -> None:
        """`key` was wanted so many times. After the last one its memory is released."""
        self.wanted[key] -= num
        if self.wanted[key] <= 0:
            del self.wanted[key]
            if is_found:
                self.future.result().pop(key, None)


class FetchAhead:
    """Fetches entries before they are read, by `fetch`, in threads of its own.

    Any thread may use it; a fork begins with nothing.
    """

    def __init__(self, fetch: Callable[[Sequence[str]], Mapping[str, EntryArrays]]):
        self._fetch = fetch
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._requests: list[_Request] = []
        self._num_reads = 0
        self._executor: ThreadPoolExecutor | None = None

    def start(self, keys: Iterable[str]) -> None:
        """Begin to fetch those of the keys that are not on their way, if there is room. Waits for nothing.

        A key is there as many times as `take` will have it.
        """
        if self._pid != os.getpid():
            self._begin()
        with self._lock:
            new = Counter[str]()
            for key, num in Counter(keys).items():
                request = self._with(key)
                if request is None:
                    new[key] = num
                else:
                    request.wanted[key] += num
            if not new or not self._has_room():
                return
            if self._executor is None:
                self._executor = ThreadPoolExecutor(NUM_THREADS, "latentcache-fetch")
            future = self._executor.submit(lambda: dict(self._fetch(list(new))))
            end = self._num_reads + max(MAX_READS, READS_PER_KEY * len(new))
            self._requests.append(_Request(future, end, new, len(new)))

    def take(self, keys: Mapping[str, int]) -> dict[str, EntryArrays]:
        """The arrays of those keys that were fetched, or are on their way, for which it waits. RemoteError.

        `keys` says how many times each one is wanted.
        """
        if self._pid != os.getpid():
            return {}
        with self._lock:
            taken = {key: request for key in keys if (request := self._with(key)) is not None}
            self._num_reads += 1
            for request in self._requests:
                if request.end < self._num_reads:
                    request.future.cancel()
        found = {}
        try:
            for key, request in taken.items():
                try:
                    found[key] = request.future.result()[key]
                except RemoteError:
                    raise  # a second attempt would take as long
                except (StoreError, CancelledError, KeyError):
                    continue  # another entry of the request may be the cause: the read that follows says which
        finally:
            with self._lock:
                for key, request in taken.items():
                    request.was_read(key, keys[key], key in found)
                self._requests = [each for each in self._requests if each.wanted and each.end >= self._num_reads]
        return found

    def _has_room(self) -> bool:
        """Whether there is room for a request. The rest of one of which most was read makes room: it may wait for long.

        In pack order that is rows of rare buckets, whose batches take long to fill, and each keeps its pack in memory.
        """
        if len(self._requests) >= MAX_AHEAD:
            most_read = min(self._requests, key=lambda request: len(request.wanted) / request.num_keys)
            if 2 * len(most_read.wanted) > most_read.num_keys:
                return False
            self._requests.remove(most_read)
        return True

    def _with(self, key: str) -> _Request | None:
        return next((request for request in self._requests if key in request.wanted), None)

    def close(self) -> None:
        """Drop all. Requests on their way end by themselves."""
        if self._pid == os.getpid():
            with self._lock:
                self._requests.clear()
                if self._executor is not None:
                    self._executor.shutdown(wait=False, cancel_futures=True)
                    self._executor = None
