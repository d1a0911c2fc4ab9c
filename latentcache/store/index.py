"""The index: a row for each pack in SQLite, by way of diskcache, which only this file imports.

diskcache unpickles what it finds, and reads and deletes files that rows name. So rows are bytes or they are refused.
No connection outlives the call that made it: nothing is carried across a fork, and other processes never wait for an
idle one.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import diskcache
from diskcache.core import DBNAME, MODE_RAW

from latentcache.errors import IndexDamagedError, ReadOnlyError, StorageFullError, StoreBusyError, StoreError
from latentcache.store.entry import is_pack_id
from latentcache.store.layout import PackRow
from latentcache.utils.locks import locked

TIMEOUT_S = 60.0
JOURNAL_MODE = "delete"
"""Not WAL: that fails on network file systems, and a reader without write access could not read it."""
_SETTINGS: dict[str, Any] = {
    "statistics": 0,
    "tag_index": 0,
    "eviction_policy": "none",
    "size_limit": 1 << 60,
    "cull_limit": 0,
    "sqlite_auto_vacuum": 1,
    "sqlite_cache_size": 1 << 13,
    "sqlite_journal_mode": JOURNAL_MODE,
    "sqlite_mmap_size": 0,
    "sqlite_synchronous": 3,  # EXTRA: with FULL, a power cut can bring the journal back, which undoes the change
    "disk_min_file_size": 1 << 60,  # values never go to files
}
_SELECT = "SELECT key, value, typeof(key) = 'text' AND typeof(value) = 'blob' AND raw = 1 AND mode = 1 FROM Cache "
"""Name and value of rows, and whether latentcache can have written them."""
PACK_PREFIX = "pack:"
"""What the names of packs' rows begin with; the pack's id follows."""
GENERATION = "generation"
"""The name of the row that changes whenever another is removed or replaced."""
MAX_VALUE_BYTES = 1 << 23
"""The largest row. That of a pack of 8,192 entries has some 400 KB, and more where all of them are damaged."""
_BEFORE_ALL = -(1 << 63)
_PAGE_BYTES = 4096
_PASSING_S, _POLL_S = 2.0, 0.05
# What SQLite says. Errors of Python 3.10 have no code, only this.
_BUSY = ("database is locked", "database table is locked")
_FULL = "database or disk is full"
_READ_ONLY = ("attempt to write a readonly database", "access permission denied")
_CANNOT_OPEN = "unable to open database file"
_UNREACHABLE = ("disk I/O error", _CANNOT_OPEN, "out of memory")


process_lock = threading.RLock()
"""One lock for all indexes. A fork of this process waits for it, and both sides find it free.

A new lock in the child would not do: SQLite would roll back there what the parent is writing.
"""
if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(
        before=process_lock.acquire, after_in_parent=process_lock.release, after_in_child=process_lock.release
    )


class _BytesDisk(diskcache.Disk):  # type: ignore[misc]  # diskcache has no types
    """Bytes in rows, and nothing else: no pickle, no file."""

    def put(self, key: str) -> tuple[str, bool]:
        return key, True

    def store(self, value: bytes, read: bool, key: object = None) -> tuple[int, int, None, bytes]:
        if len(value) > MAX_VALUE_BYTES:
            raise StoreError(f"a row of the index has at most {MAX_VALUE_BYTES:,} bytes, got {len(value):,}")
        return 0, MODE_RAW, None, value

    def fetch(self, mode: object, filename: object, value: object, read: bool) -> bytes:
        raise IndexDamagedError(self._directory, "diskcache was to unpickle a value")  # `Rows` reads, and nothing else

    def remove(self, file_path: str) -> None:
        # diskcache calls this with the file that a row names. None of ours names one.
        raise IndexDamagedError(self._directory, "a row names a file")


class _Cache(diskcache.Cache):  # type: ignore[misc]  # diskcache has no types
    """A cache that waits for others in all that it does while it is opened, and leaves nothing open if that fails."""

    def __init__(self, *arguments: Any, **settings: Any):
        try:
            super().__init__(*arguments, **settings)
        except BaseException:
            self.close()  # else it keeps its locks until the garbage is collected
            raise

    def drop_tag_index(self) -> None:
        # There is none, and this alone is not tried again when another process has the database.
        pass


Position = tuple[bytes | None, int]
"""How far a reader has read: generation and last row. While the generation is the same, later rows are all it lacks."""


class Rows:
    """The rows while a block of `Index.reading` runs: other processes cannot change them."""

    def __init__(self, path: Path, execute: Callable[[str, Sequence[object]], sqlite3.Cursor]):
        self._path, self._execute = path, execute

    def get(self, pack: str) -> PackRow | None:
        """The pack's row, or None."""
        return next((row for row in self._packs("WHERE key = ?", PACK_PREFIX + pack)), None)

    def since(self, position: Position | None = None) -> tuple[Position, bool, Iterator[PackRow]]:
        """Read the rows that came after `position`; all rows where some were removed or replaced since then.

        Returns:
            Where they bring their reader, whether these are all rows, and the rows, oldest first.
        """
        generation = dict(self._select("WHERE key = ?", GENERATION)).get(GENERATION)
        is_whole = position is None or position[0] != generation
        first = _BEFORE_ALL if position is None or is_whole else position[1]
        [last] = self._execute("SELECT max(rowid) FROM Cache", ()).fetchone()
        rows = self._packs("WHERE rowid > ? AND key IS NOT ? ORDER BY rowid", first, GENERATION)
        return (generation, _BEFORE_ALL if last is None else last), is_whole, rows

    def _packs(self, where: str, *values: object) -> Iterator[PackRow]:
        for name, value in self._select(where, *values):
            pack = name.removeprefix(PACK_PREFIX)
            try:
                if pack == name or not is_pack_id(pack):
                    raise ValueError("it names no pack")
                yield PackRow.from_bytes(pack, value)
            except ValueError as error:
                raise IndexDamagedError(self._path, f"row {name!r:.80}: {error}") from error

    def _select(self, where: str, *values: object) -> Iterator[tuple[str, bytes]]:
        for name, value, is_ours in self._execute(_SELECT + where, values):
            if is_ours != 1:
                raise IndexDamagedError(self._path, f"row {name!r:.80} was not written by latentcache")
            yield name, value


class Transaction(Rows):
    """Reads and changes that take effect together, or not at all, while a block of `Index.transaction` runs."""

    def __init__(self, path: Path, cache: _Cache):
        super().__init__(path, cache._sql)
        self._cache, self._is_new_generation = cache, False
        self.changed: dict[str, PackRow | None] = {}
        """By pack the row that was added or replaced, or None if it was removed."""

    def put(self, row: PackRow) -> None:
        """Add or replace the row of a pack."""
        name, value = PACK_PREFIX + row.pack.id, row.to_bytes()
        if not self._cache.add(name, value):
            self._begin_generation()
            self._cache.set(name, value)
        self.changed[row.pack.id] = row

    def remove(self, pack: str) -> None:
        """Remove the row of a pack, if there is one."""
        if self._cache.delete(PACK_PREFIX + pack):
            self._begin_generation()
            self.changed[pack] = None

    def _begin_generation(self) -> None:
        if not self._is_new_generation:
            self._cache.set(GENERATION, uuid.uuid4().bytes)
            self._is_new_generation = True


class Index:
    """A durable map of packs to their rows, in the folder `path`. Safe for threads, forks, and many processes.

    A row has at most MAX_VALUE_BYTES; else StoreError. IndexDamagedError: the database is broken, holds what
    latentcache did not write, or (read-only) does not exist.
    """

    def __init__(self, path: Path, *, read_only: bool = False):
        self.path, self.read_only = path, read_only
        self._database = path / DBNAME
        self._cache: _Cache | None = None
        if read_only:
            self._check_exists()
            return
        with self._typed_errors():
            self.path.mkdir(parents=True, exist_ok=True)
            # One at a time: making the tables is not one transaction. Half of them are a damaged index.
            with process_lock, locked(self.path / "open.lock", "opening the index", shared=False, wait=True):
                if not self._database.exists():
                    with self._begun():
                        pass  # it makes the tables, and the first generation

    def _check_exists(self) -> None:
        if self._is_gone():
            raise IndexDamagedError(self.path, "it does not exist")

    @contextmanager
    def reading(self) -> Iterator[Rows]:
        """Read rows. Other processes cannot change the index while the block runs."""
        with process_lock, self._typed_errors(), closing(self._connect()) as connection:
            yield Rows(self.path, connection.execute)

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """Hold the database alone. Inside, use the transaction's methods only. Durable when the block is left."""
        if self.read_only:
            raise ReadOnlyError(self.path)
        self._check_exists()  # else diskcache makes another one, in which no pack is known
        with self._begun() as transaction:
            yield transaction

    @contextmanager
    def _begun(self) -> Iterator[Transaction]:
        with process_lock, self._typed_errors():
            if self._cache is None:  # as late as possible: opening one writes all its settings, row by row
                try:
                    self._cache = _Cache(str(self.path), timeout=TIMEOUT_S, disk=_BytesDisk, **_SETTINGS)
                except ValueError as error:  # diskcache looks up each setting, and takes it for granted
                    raise IndexDamagedError(self.path, f"a setting cannot be found: {error}") from error
            with closing(self._cache) as cache, cache.transact():
                # From the first row on: one that replaces another index is known to be another.
                cache.add(GENERATION, uuid.uuid4().bytes)
                yield Transaction(self.path, cache)

    def _connect(self) -> sqlite3.Connection:
        """A connection in a transaction that reads: nothing changes under it any more."""
        # mode=rw: only so can what a dead writer left half done be rolled back.
        uri = f"{self._database.as_uri()}?mode={'ro' if self.read_only else 'rw'}"
        until = time.monotonic() + _PASSING_S
        while True:
            connection = sqlite3.connect(uri, uri=True, timeout=TIMEOUT_S, isolation_level=None)
            try:
                connection.execute("BEGIN")
                connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()  # the lock is taken here
                return connection
            except BaseException as error:
                connection.close()
                # A live writer's journal can look like a dead one's for a moment, which a reader may not roll back.
                passes = self.read_only and str(error).startswith((*_READ_ONLY, _CANNOT_OPEN))
                if not passes or time.monotonic() >= until:
                    raise
            time.sleep(_POLL_S)

    @contextmanager
    def _typed_errors(self) -> Iterator[None]:
        try:
            yield
        except (diskcache.Timeout, sqlite3.Error, UnicodeDecodeError, OSError) as error:
            # diskcache hides why a transaction could not begin, and rolls back what SQLite has rolled back already, on
            # a full disk: the first error counts.
            first = error.__context__ if isinstance(error.__context__, sqlite3.Error) else error
            raise self._typed(first) from error

    def _typed(self, error: BaseException) -> StoreError:
        """What an error of SQLite, of diskcache or of the system means for the index."""
        text = str(error)
        if isinstance(error, diskcache.Timeout) or text.startswith(_BUSY):
            detail = f"another process held the index for more than {TIMEOUT_S:.0f} s; try again"
            return StoreBusyError(self.path, detail)
        if text.startswith(_FULL):
            return StorageFullError(self.path, _PAGE_BYTES)
        if text.startswith(_READ_ONLY) or isinstance(error, PermissionError):
            # Where the file can be written it is the database's header that says no.
            if self.read_only or not os.access(self._database, os.W_OK):
                return ReadOnlyError(self.path, f"the index cannot be written: {error}")
        elif not self._is_gone() and (isinstance(error, OSError) or text.startswith(_UNREACHABLE)):
            return StoreError(f"{self.path}: the index cannot be reached: {error}")
        return IndexDamagedError(self.path, str(error))

    def _is_gone(self) -> bool:
        """Whether there is no database. One that cannot even be looked at may be there."""
        try:
            self._database.stat()
        except OSError as error:
            return isinstance(error, FileNotFoundError)
        return False
