"""Buffers new entries and seals them as packs in a background thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path
from typing import Any

from latentcache.errors import StoreError
from latentcache.store.entry import OwnedEntry, check_key, own_entry
from latentcache.types import Entry
from latentcache.utils.concurrency import BackgroundWorker, noted_on
from latentcache.utils.locks import Claims

PACK_BYTES = 64 << 20
PACK_ENTRIES = 8192
PACK_SPECS = 48
PACK_AGE_S = 10.0
"""A pack is sealed when it reaches one of these limits; its age is checked when an entry is added. Entries of one spec
share columns, and the limit on specs keeps a pack's header below 16 KiB."""


class PackBuffer:
    """Entries that will form one pack, by key."""

    def __init__(self) -> None:
        self.entries: dict[str, OwnedEntry] = {}
        self._num_bytes = 0
        self._specs: set[Any] = set()
        self._first_at = 0.0

    def add(self, entry: OwnedEntry) -> None:
        """Add an entry with a new key."""
        self._first_at = self._first_at if self.entries else time.monotonic()
        self.entries[entry.key] = entry
        self._num_bytes += entry.num_bytes + len(entry.record)
        self._specs.add(entry.spec())

    def fill(self, entries: Iterator[OwnedEntry]) -> None:
        """Add entries until the buffer is full or the iterator is exhausted."""
        for entry in entries:
            self.add(entry)
            if self.is_full():
                return

    def is_full(self) -> bool:
        """Whether the entries should be sealed, because they are many or have waited for PACK_AGE_S."""
        return (
            self._num_bytes >= PACK_BYTES
            or len(self.entries) >= PACK_ENTRIES
            or len(self._specs) >= PACK_SPECS
            or time.monotonic() - self._first_at >= PACK_AGE_S
        )


SealEntries = Callable[[Sequence[OwnedEntry]], tuple[int, int]]
"""Makes entries durable. Returns how many of them are new, and the number of bytes written."""


class Writer:
    """Collects entries into packs in the order given, and lets `seal_entries` make them durable in the background.

    Use it in a `with` block. Leaving the block seals all added entries, even on an exception. Only one thread may call
    `add`. An error of the background thread is raised by the next `add` or `seal`, or on leaving the block. At most
    two packs are in memory: one that fills, and one that is being written. The block also holds the context `hold`.
    """

    def __init__(
        self,
        seal_entries: SealEntries,
        hold: AbstractContextManager[None],
        find: Callable[[Iterable[str]], set[str]],
        claims: Path | None = None,
    ):
        self.num_added = 0
        """Number of new entries that are durable."""
        self.bytes_written = 0
        """Total size of the files written."""
        self._seal_entries = seal_entries
        self._hold = hold
        self._find = find
        self._claims_path = claims
        self._claims: Claims | None = None
        self._open = ExitStack()
        self._worker: BackgroundWorker | None = None
        self._buffer = PackBuffer()

    def __enter__(self) -> Writer:
        self._open.enter_context(self._hold)
        self._worker = self._open.enter_context(BackgroundWorker(1, "sealing"))
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: object) -> None:
        with self._open:
            try:
                with noted_on(exc, "sealing failed too"):
                    self.seal()
            finally:
                self._worker = self._claims = None

    def add(self, entry: Entry) -> None:
        """Copy and buffer the entry. A key that is already buffered is ignored. StoreError if it cannot be stored."""
        if self._worker is None:
            raise StoreError("the writer is not open: use it in a `with` block")
        if check_key(entry.record.key) in self._buffer.entries:
            return
        self._buffer.add(own_entry(entry))
        if self._buffer.is_full():
            self._start_sealing(self._worker)

    def claim(self, keys: Iterable[str]) -> tuple[set[str], set[str]]:
        """Split missing keys into those that this process should make now and those that another process is making.

        The first are claimed until they are durable or released, or until the block ends. Look for the second again
        later: they appear, or the other process ends. Call `seal` before waiting, since it may wait for your entries.
        """
        if self._worker is None:
            raise StoreError("the writer is not open: use it in a `with` block")
        if self._claims is None and self._claims_path is not None:
            self._claims = self._open.enter_context(closing(Claims(self._claims_path)))
        wanted = {check_key(key) for key in keys}
        mine = wanted if self._claims is None else self._claims.take(wanted)
        # Looked up after claiming: another process may just have sealed and released its entries.
        there = self._find(wanted)
        self.release(mine & there)
        return mine - there, wanted - mine - there

    def release(self, keys: Iterable[str]) -> None:
        """Give up claims on entries that this process cannot make."""
        if self._claims is not None:
            self._claims.release(keys)

    def seal(self) -> None:
        """Make all added entries durable. Raises errors of the background thread."""
        if self._worker is not None:
            self._start_sealing(self._worker)
            self._worker.finish()

    def _start_sealing(self, worker: BackgroundWorker) -> None:
        worker.finish()  # first, so that the buffer keeps its entries if the previous seal failed
        if self._buffer.entries:
            entries = list(self._buffer.entries.values())
            self._buffer = PackBuffer()
            worker.call(self._seal, entries)

    def _seal(self, entries: Sequence[OwnedEntry]) -> None:
        num_added, bytes_written = self._seal_entries(entries)
        self.release(entry.key for entry in entries)
        self.num_added += num_added
        self.bytes_written += bytes_written
