"""A directory of this machine that keeps what was read elsewhere, so that it is read from the disk next time."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain
from multiprocessing import util
from pathlib import Path
from typing import TypeVar

from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.errors import (
    EntryDamagedError,
    EntryMissingError,
    PackError,
    RemoteError,
    StoreBusyError,
    StoreError,
)
from latentcache.remote.fetched import FetchedPack
from latentcache.store.base import EntryArrays, OwnedEntry
from latentcache.store.disk import DiskStore
from latentcache.store.exchange import take_pack, take_sealed
from latentcache.store.memory import arrays_of
from latentcache.store.upkeep import prune
from latentcache.store.writer import PackBuffer
from latentcache.utils.concurrency import BackgroundWorker
from latentcache.utils.durable_files import make_folder, typed_errors
from latentcache.utils.locks import locked

PACK_AGE_S = 600.0
"""Entries are in memory until there are enough for a pack, and no longer than this: a slow epoch makes no small packs.
They are lost where a process is killed, and are then fetched again."""
FETCHING = "fetching"
"""A folder of locks, one for each first byte of a pack's id: two processes need not fetch the same pack."""
NOTE_S = 1800.0
"""How often a process notes that it still uses a pack. A note is a look at its file, which is changed once an hour."""

T = TypeVar("T")
logger = logging.getLogger("latentcache")


class LocalTier:
    """A `DiskStore` in `path`, into which a background thread puts the entries that were fetched, pack by pack.

    Processes may share the directory, and so may caches of several services: keys follow from contents. Where the packs
    have more than `max_bytes`, those go that were not used for the longest time. Any thread may use it; a fork begins
    with what is on the disk. StoreError if the directory is a cache of its own, with manifests; errors of `DiskStore`.
    """

    def __init__(self, path: str | os.PathLike[str], max_bytes: int | None = None):
        self.path, self._max_bytes = Path(path).expanduser(), max_bytes
        manifests = ManifestFolder(self.path / "manifests")
        # Unfinished: those of a cache whose first run has not ended. DiskStore refuses what is no directory.
        if self.path.is_dir() and (names := [*manifests.names(), *manifests.unfinished()]):
            raise StoreError(
                f"{self.path}: is a cache of its own, with the manifest {names[0]!r}; cache.local needs a directory "
                "that holds nothing else"
            )
        self.disk = DiskStore(self.path)
        self._is_broken = self._is_closed = False
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._adding, self._lock = threading.Lock(), threading.Lock()
        self._buffer, self._sealing = PackBuffer(PACK_AGE_S), dict[str, OwnedEntry]()
        self._noted: dict[str, float] = {}
        """When this process noted the use of a pack, by its id."""
        self._open = ExitStack()
        self._worker: BackgroundWorker | None = None
        # Not atexit: a DataLoader's worker ends without it.
        util.Finalize(self, _keep, (weakref.ref(self),), exitpriority=1)

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            self._begin()

    def rows(self, keys: Iterable[str]) -> tuple[dict[str, EntryArrays], bool]:
        """The verified arrays of those keys that are here, and whether all of these came from the disk."""
        self._check_process()
        with self._lock:
            waiting = self._waiting(keys)
        found = {key: arrays_of(entry) for key, entry in waiting.items()}
        rest = [key for key in keys if key not in found]
        try:
            present = self.disk.find(rest)
            rest = [key for key in rest if key in present]
            while rest:
                try:
                    found |= zip(rest, self.disk.rows(rest), strict=True)
                    break
                except (EntryMissingError, EntryDamagedError) as error:
                    # Another process has removed it, or its bytes were damaged, which is marked: it is fetched again.
                    rest.remove(error.key)
            self._note_use(rest)
        except StoreError as error:
            self._give_up(error)
        return found, not waiting

    def prefetch(self, keys: Iterable[str]) -> None:
        """These entries, which are on the disk, are read soon, or what is remembered of them is used."""
        self._check_process()
        keys = list(keys)
        self._note_use(keys)
        self.disk.prefetch(keys)

    def _note_use(self, keys: Sequence[str]) -> None:
        """Note on the disk that the packs of these entries are used: the store notes only that reading began."""
        now = time.monotonic()
        packs = {place.pack.id for place in self.disk.catalog.look_up(keys) if place is not None}
        for pack in packs:
            if now - self._noted.get(pack, -math.inf) >= NOTE_S:
                self._noted[pack] = now
                self.disk.directory.note_use(pack)

    def missing(self, keys: Sequence[str]) -> list[str]:
        """Those of the keys that are not here."""
        self._check_process()
        with self._lock:
            waiting = self._waiting(keys)
        rest = [key for key in keys if key not in waiting]
        present = self.disk.find(rest)
        return [key for key in rest if key not in present]

    def local(self, key: str, read: Callable[[DiskStore, str], T]) -> T | None:
        """What `read` gives of an entry on the disk, or None if it is not there."""
        try:
            return read(self.disk, key) if self.disk.find([key]) else None
        except (EntryMissingError, EntryDamagedError):
            return None

    def _waiting(self, keys: Iterable[str]) -> Mapping[str, OwnedEntry]:
        """Those of the keys that are in memory."""
        buffer, sealing = self._buffer.entries, self._sealing
        if not buffer and not sealing:
            return {}
        found = ((key, buffer.get(key) or sealing.get(key)) for key in keys)
        return {key: entry for key, entry in found if entry is not None}

    def add(self, pack: FetchedPack) -> None:
        """Keep the entries. Where packs are fetched faster than they are written, it waits for the disk."""
        self._check_process()
        if self._is_broken or self._is_closed:
            return
        entries = pack.owned()
        with self._adding:
            with self._lock:
                for entry in entries:
                    if entry.key not in self._buffer.entries and entry.key not in self._sealing:
                        self._buffer.add(entry)
            if self._buffer.is_full():
                self._start_sealing()

    def has_room(self, num_bytes: int) -> bool:
        """Whether packs of so many bytes may be kept here at the same time."""
        return not self._is_broken and (self._max_bytes is None or num_bytes <= self._max_bytes)

    def take(self, pack: str, chunks: Callable[[], Iterable[bytes | memoryview]], num_bytes: int) -> bool:
        """Keep a whole pack, which is fetched by one process at a time. False if nothing can be kept any more.

        PackError if it is not what was stored; errors of `chunks`, which gives its bytes.
        """
        self._check_process()
        if self._is_broken or self._is_closed:
            return False
        folder = self.path / FETCHING
        try:
            with typed_errors(folder, 0):
                make_folder(folder)
            with locked(folder / f"{pack[:2]}.lock", "fetching a pack", shared=False, wait=True):
                self.disk.catalog.reload()
                if pack in self.disk.catalog.table.packs:
                    return True
                try:
                    parts = iter(chunks())
                    first = next(parts, b"")  # an error of a pack that is gone is none of the disk's
                    take_pack(self.disk, pack, chain([first], parts), num_bytes)
                    # Each entry was compared with its digest, in the page cache: it need not be when it is read.
                    if (layout := self.disk.catalog.table.packs.get(pack)) is not None:  # else another process pruned
                        self.disk.mapped.note_good(layout)
                except StoreBusyError:  # its file is there; who works on the directory ends soon
                    with locked(self.disk.directory.lock, "keeping a pack", shared=True, wait=True):
                        take_sealed(self.disk, pack)
            self._prune()
        except (PackError, RemoteError):
            raise
        except StoreError as error:
            self._give_up(error)
            return False
        return True

    def seal_soon(self) -> None:
        """Put what is in memory on the disk, in the background: it is read again."""
        self._check_process()
        if self._adding.acquire(blocking=False):  # else a thread does it already
            try:
                if not self._sealing:
                    self._start_sealing()
            finally:
                self._adding.release()

    def _start_sealing(self) -> None:
        if self._worker is None:
            self._worker = self._open.enter_context(BackgroundWorker(1, "keeping fetched entries"))
        self._worker.finish()
        with self._lock:
            if not self._buffer.entries:
                return
            self._sealing, self._buffer = self._buffer.entries, PackBuffer(PACK_AGE_S)
        self._worker.call(self._seal, list(self._sealing.values()))

    def _seal(self, entries: Sequence[OwnedEntry]) -> None:
        try:
            with locked(self.disk.directory.lock, "keeping fetched entries", shared=True, wait=True):
                self.disk.seal(entries)
            self._prune()
        except StoreError as error:
            self._give_up(error)
        with self._lock:
            self._sealing = {}

    def _give_up(self, error: StoreError) -> None:
        """Training goes on, as fast as the network is."""
        if not self._is_broken and not self._is_closed:
            logger.warning("%s. What is read from now on is not kept there.", error)
        self._is_broken = True

    def _prune(self) -> None:
        if self._max_bytes is None or sum(self.disk.directory.pack_sizes().values()) <= self._max_bytes:
            return
        try:
            report = prune(self.disk, (), max_bytes=self._max_bytes)
            logger.info("%s: removed %d entries, the longest unused", self.path, report.num_entries)
        except StoreBusyError as error:
            logger.debug("%s: left to the next pack: %s", self.path, error)

    def forget(self, keys: Iterable[str]) -> None:
        """Remove entries."""
        self._check_process()
        keys = list(keys)
        with self._adding:
            if self._worker is not None:
                self._worker.finish()
            with self._lock:
                left, self._buffer = self._buffer.entries, PackBuffer(PACK_AGE_S)
                for key in left.keys() - set(keys):
                    self._buffer.add(left[key])
            self.disk.remove(keys)

    def close(self) -> None:
        """Put what is in memory on the disk, and release all."""
        self._check_process()
        if not self._is_closed:
            with self._adding, self._open:
                self._start_sealing()
            self._is_closed = True
            self.disk.close()

    def keep_at_exit(self) -> None:
        """Put on the disk what a process has in memory that ends without having closed this. Its threads have ended."""
        if self._pid == os.getpid() and not self._is_closed and not self._is_broken and self._buffer.entries:
            self._seal(list(self._buffer.entries.values()))


def _keep(tier: weakref.ref[LocalTier]) -> None:
    if (alive := tier()) is not None:
        alive.keep_at_exit()
