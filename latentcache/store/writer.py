"""Buffers entries and seals them behind the thread that adds them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass

from latentcache.errors import StoreError
from latentcache.store.base import check_key, own_entry
from latentcache.types import Entry

PACK_BYTES = 64 << 20
PACK_RECORD_BYTES = 8 << 20
PACK_ENTRIES = 8192
PACK_AGE_S = 10.0
"""A pack is sealed when one of these is reached; its age is looked at when an entry is added."""

logger = logging.getLogger("latentcache")


@dataclass(frozen=True, slots=True)
class Sealed:
    """What one seal did."""

    num_added: int
    bytes_written: int


class PackWriter:
    """Gathers entries into packs. `seal_entries` makes a list of owned entries durable; it runs in one thread behind.

    At most two packs are in memory: one that fills, and one that is being written. The context manager `hold` is
    entered for the time that the writer is open.
    """

    def __init__(self, seal_entries: Callable[[Sequence[Entry]], Sealed], hold: AbstractContextManager[None]):
        self.num_added = 0
        self.bytes_written = 0
        self._seal_entries = seal_entries
        self._hold = hold
        self._executor: ThreadPoolExecutor | None = None
        self._sealing: Future[Sealed] | None = None
        self._clear()

    def _clear(self) -> None:
        self._buffer: dict[str, Entry] = {}
        self._payload_bytes = self._record_bytes = 0
        self._first_at = 0.0

    def __enter__(self) -> PackWriter:
        self._hold.__enter__()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="latentcache-seal")
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: object) -> None:
        try:
            self._finish(exc)
        finally:
            executor, self._executor = self._executor, None
            if executor is not None:
                executor.shutdown()
            self._hold.__exit__(None, None, None)

    def _finish(self, exc: BaseException | None) -> None:
        try:
            self.seal()
        except StoreError as error:
            if exc is None:
                raise
            # The first error is the one to report; this one must not hide it, nor be lost.
            exc.add_note(f"latentcache: sealing failed too: {error}")
            logger.error("sealing failed: %s", error)

    def add(self, entry: Entry) -> None:
        """Copy the entry and buffer it. A key that was added before is ignored."""
        if self._executor is None:
            raise StoreError("the writer is not open: use it in a `with` block")
        if check_key(entry.record.key) in self._buffer:
            return
        owned, record_bytes = own_entry(entry)
        self._first_at = self._first_at if self._buffer else time.monotonic()
        self._buffer[owned.record.key] = owned
        self._payload_bytes += owned.num_bytes
        self._record_bytes += record_bytes
        if (
            self._payload_bytes >= PACK_BYTES
            or self._record_bytes >= PACK_RECORD_BYTES
            or len(self._buffer) >= PACK_ENTRIES
            or time.monotonic() - self._first_at >= PACK_AGE_S
        ):
            self._hand_over()

    def seal(self) -> None:
        """Make all that was added durable. Errors of the thread behind come up here."""
        self._hand_over()
        self._wait()

    def _hand_over(self) -> None:
        self._wait()
        if self._buffer and self._executor is not None:
            entries = list(self._buffer.values())
            self._clear()
            self._sealing = self._executor.submit(self._seal_entries, entries)

    def _wait(self) -> None:
        if self._sealing is None:
            return
        try:
            sealed = self._sealing.result()
        except StoreError:
            self._sealing = None  # said once
            raise
        self._sealing = None
        self.num_added += sealed.num_added
        self.bytes_written += sealed.bytes_written
