"""Buffers entries and seals them in a background thread."""

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
"""A pack is sealed when one of these is reached; its age is checked when an entry is added. Entries of one spec share
columns, and few specs keep the header of a pack below 16 KiB."""


class PackBuffer:
    """Entries that are to be one pack, by key. After PACK_AGE_S seconds they are enough for one."""

    def __init__(self) -> None:
        self.entries: dict[str, OwnedEntry] = {}
        self._num_bytes = 0
        self._specs: set[Any] = set()
        self._first_at = 0.0

    def add(self, entry: OwnedEntry) -> None:
        """Add an entry whose key is not here."""
        self._first_at = self._first_at if self.entries else time.monotonic()
        self.entries[entry.key] = entry
        self._num_bytes += entry.num_bytes + len(entry.record)
        self._specs.add(entry.spec())

    def fill(self, entries: Iterator[OwnedEntry]) -> None:
        """Add entries until it is full, or there are no more."""
        for entry in entries:
            self.add(entry)
            if self.is_full():
                return

    def is_full(self) -> bool:
        """Whether the entries should be sealed, because there are many, or because they wait for long."""
        return (
            self._num_bytes >= PACK_BYTES
            or len(self.entries) >= PACK_ENTRIES
            or len(self._specs) >= PACK_SPECS
            or time.monotonic() - self._first_at >= PACK_AGE_S
        )


SealEntries = Callable[[Sequence[OwnedEntry]], tuple[int, int]]
"""Makes entries durable. Returns how many of them were not there before, and the bytes that it wrote."""


class Writer:
    """Adds entries in the order given: gathers them into packs, which `seal_entries` makes durable in the background.

    Use it in a `with` block; leaving the block seals, on an exception too: what was added is whole. One thread calls
    `add`. An error of the background thread comes up at the next `add`, `seal` or on leaving. At most two packs are in
    memory: one that fills, and one that is being written. The context manager `hold` is entered for that time.
    """

    def __init__(
        self,
        seal_entries: SealEntries,
        hold: AbstractContextManager[None],
        find: Callable[[Iterable[str]], set[str]],
        claims: Path | None = None,
    ):
        self.num_added = 0
        """Entries that are durable and were not there before."""
        self.bytes_written = 0
        """Bytes of the files written."""
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
        """Copy the entry and buffer it. A key that was added before is ignored. StoreError if it cannot be stored."""
        if self._worker is None:
            raise StoreError("the writer is not open: use it in a `with` block")
        if check_key(entry.record.key) in self._buffer.entries:
            return
        self._buffer.add(own_entry(entry))
        if self._buffer.is_full():
            self._start_sealing(self._worker)

    def claim(self, keys: Iterable[str]) -> tuple[set[str], set[str]]:
        """Divide keys that are not there into those that this process should make now and those that another one makes.

        The first are claimed until they are durable or released, or until the writer is left. Of the second, look again
        later: their entries come, or the other process ends. Seal before you wait: it may wait for yours.
        """
        if self._worker is None:
            raise StoreError("the writer is not open: use it in a `with` block")
        if self._claims is None and self._claims_path is not None:
            self._claims = self._open.enter_context(closing(Claims(self._claims_path)))
        wanted = {check_key(key) for key in keys}
        mine = wanted if self._claims is None else self._claims.take(wanted)
        # After the claim: another process may have sealed its entries, and released them, just before.
        there = self._find(wanted)
        self.release(mine & there)
        return mine - there, wanted - mine - there

    def release(self, keys: Iterable[str]) -> None:
        """Give up claims: these entries cannot be made here."""
        if self._claims is not None:
            self._claims.release(keys)

    def seal(self) -> None:
        """Make all that was added durable. Raises the errors of the background thread."""
        if self._worker is not None:
            self._start_sealing(self._worker)
            self._worker.finish()

    def _start_sealing(self, worker: BackgroundWorker) -> None:
        worker.finish()  # before the buffer is emptied: an error of the last seal leaves it as it is
        if self._buffer.entries:
            entries = list(self._buffer.entries.values())
            self._buffer = PackBuffer()
            worker.call(self._seal, entries)

    def _seal(self, entries: Sequence[OwnedEntry]) -> None:
        num_added, bytes_written = self._seal_entries(entries)
        self.release(entry.key for entry in entries)
        self.num_added += num_added
        self.bytes_written += bytes_written
