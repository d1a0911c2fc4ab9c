"""The index: a row for each pack in a diskcache database (SQLite), which only this file imports.

diskcache makes the database, and nothing else: it unpickles what it finds, and reads and deletes files that rows name.
Rows are bytes or they are refused. No connection outlives the call that made it: nothing is carried across a fork, and
other processes never wait for an idle one.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import diskcache
from diskcache.core import DBNAME

from latentcache.errors import IndexDamagedError, ReadOnlyError, StorageFullError, StoreBusyError, StoreError
from latentcache.store.entry import is_pack_id
from latentcache.store.layout import PackRow
from latentcache.utils import sqlite_codes
from latentcache.utils.locks import locked
from latentcache.utils.sqlite_codes import primary_code

TIMEOUT_S = 60.0
_SETTINGS: dict[str, Any] = {
    "statistics": 0,
    "tag_index": 0,
    "eviction_policy": "none",
    "sqlite_auto_vacuum": 1,
    "sqlite_journal_mode": "delete",  # not WAL: that fails on network file systems, and wants a reader to write
    "sqlite_mmap_size": 0,
}
_SELECT = "SELECT key, value, typeof(key) = 'text' AND typeof(value) = 'blob' AND raw = 1 AND mode = 1 FROM Cache "
"""Name and value of rows, and whether latentcache can have written them."""
_INSERT = "INSERT OR IGNORE INTO Cache (key, raw, store_time, size, mode, value) VALUES (?, 1, ?, ?, 1, ?)"
_UPDATE = "UPDATE Cache SET size = ?, value = ? WHERE key = ?"
PACK_PREFIX = "pack:"
"""What the names of packs' rows begin with; the pack's id follows."""
GENERATION = "generation"
"""The name of the row that changes whenever another is removed or replaced."""
MAX_VALUE_BYTES = 1 << 23
"""The largest row. That of a pack of 8,192 entries has some 400 KB, and more where all of them are damaged."""
_BEFORE_ALL = -(1 << 63)
_PAGE_BYTES = 4096
_PASSING_S, _POLL_S = 2.0, 0.05
_UNREACHABLE = (sqlite_codes.IOERR, sqlite_codes.CANTOPEN, sqlite_codes.NOMEM)


process_lock = threading.RLock()
"""One lock for all indexes. A fork of this process waits for it, and both sides find it free.

A new lock in the child would not do: SQLite would roll back there what the parent is writing.
"""
if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(
        before=process_lock.acquire, after_in_parent=process_lock.release, after_in_child=process_lock.release
    )


Position = tuple[bytes | None, int]
"""How far a reader has read: generation and last row. While the generation is the same, later rows are all it lacks."""


class Rows:
    """The rows while a block of `Index.reading` runs: other processes cannot change them."""

    def __init__(self, path: Path, connection: sqlite3.Connection):
        self._path, self._execute = path, connection.execute

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

    def __init__(self, path: Path, connection: sqlite3.Connection):
        super().__init__(path, connection)
        self._is_new_generation = False
        self.changed: dict[str, PackRow | None] = {}
        """By pack the row that was added or replaced, or None if it was removed."""
        # From the first row on: one that replaces another index is known to be another.
        self._insert(GENERATION, uuid.uuid4().bytes)

    def put(self, row: PackRow) -> None:
        """Add or replace the row of a pack."""
        name, value = PACK_PREFIX + row.pack.id, row.to_bytes()
        if len(value) > MAX_VALUE_BYTES:
            raise StoreError(f"a row of the index has at most {MAX_VALUE_BYTES:,} bytes, got {len(value):,}")
        if not self._insert(name, value):
            self._begin_generation()
            self._execute(_UPDATE, (len(value), value, name))
        self.changed[row.pack.id] = row

    def remove(self, pack: str) -> None:
        """Remove the row of a pack, if there is one."""
        if self._execute("DELETE FROM Cache WHERE key = ?", (PACK_PREFIX + pack,)).rowcount:
            self._begin_generation()
            self.changed[pack] = None

    def _insert(self, name: str, value: bytes) -> bool:
        return self._execute(_INSERT, (name, time.time(), len(value), value)).rowcount > 0

    def _begin_generation(self) -> None:
        if not self._is_new_generation:
            value = uuid.uuid4().bytes
            self._execute(_UPDATE, (len(value), value, GENERATION))
            self._is_new_generation = True


class Index:
    """A durable map of packs to their rows, in the folder `path`. Safe for threads, forks, and many processes.

    A row has at most MAX_VALUE_BYTES; else StoreError. IndexDamagedError: the database is broken, holds what
    latentcache did not write, or (read-only) does not exist.
    """

    def __init__(self, path: Path, *, read_only: bool = False):
        self.path, self.read_only = path, read_only
        self._database = path / DBNAME
        if read_only:
            if not self._database.exists():
                raise IndexDamagedError(self.path, "it does not exist")
            return
        with self._typed_errors():
            self.path.mkdir(parents=True, exist_ok=True)
            # One at a time: making the tables is not one transaction. Half of them are a damaged index.
            with process_lock, locked(self.path / "open.lock", "opening the index", shared=False, wait=True):
                if not self._database.exists():
                    diskcache.Cache(str(self.path), timeout=TIMEOUT_S, **_SETTINGS).close()

    @contextmanager
    def reading(self) -> Iterator[Rows]:
        """Read rows. Other processes cannot change the index while the block runs."""
        with process_lock, self._typed_errors(), closing(self._connect("BEGIN")) as connection:
            yield Rows(self.path, connection)

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """Hold the database alone. Inside, use the transaction's methods only. Durable when the block is left."""
        if self.read_only:
            raise ReadOnlyError(self.path)
        with process_lock, self._typed_errors(), closing(self._connect("BEGIN IMMEDIATE")) as connection:
            yield Transaction(self.path, connection)
            connection.execute("COMMIT")

    def _connect(self, begin: str) -> sqlite3.Connection:
        """A connection in a transaction: nothing changes under it any more."""
        # mode=rw: only so can what a dead writer left half done be rolled back.
        uri = f"{self._database.as_uri()}?mode={'ro' if self.read_only else 'rw'}"
        until = time.monotonic() + _PASSING_S
        while True:
            connection = sqlite3.connect(uri, uri=True, timeout=TIMEOUT_S, isolation_level=None)
            try:
                # EXTRA: with FULL, a power cut can bring the journal back, which undoes the change.
                connection.execute("PRAGMA synchronous = EXTRA")
                connection.execute(begin)
                connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()  # the lock is taken here
                return connection
            except BaseException as error:
                connection.close()
                # A live writer's journal can look like a dead one's for a moment, which a reader may not roll back.
                passes = self.read_only and primary_code(error) in (sqlite_codes.READONLY, sqlite_codes.CANTOPEN)
                if not passes or time.monotonic() >= until:
                    raise
            time.sleep(_POLL_S)

    @contextmanager
    def _typed_errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError, OSError) as error:
            raise self._typed(error) from error

    def _typed(self, error: BaseException) -> StoreError:
        """What an error of SQLite or of the system means for the index."""
        code = primary_code(error)
        if code in (sqlite_codes.BUSY, sqlite_codes.LOCKED):
            detail = f"another process held the index for more than {TIMEOUT_S:.0f} s; try again"
            return StoreBusyError(self.path, detail)
        if code == sqlite_codes.FULL:
            return StorageFullError(self.path, _PAGE_BYTES)
        if code in (sqlite_codes.READONLY, sqlite_codes.PERM) or isinstance(error, PermissionError):
            # Where the file can be written it is the database's header that says no.
            if self.read_only or not os.access(self._database, os.W_OK):
                return ReadOnlyError(self.path, f"the index cannot be written: {error}")
        elif isinstance(error, FileExistsError | NotADirectoryError):
            return IndexDamagedError(self.path, "it is no folder")
        elif isinstance(error, OSError) or (code in _UNREACHABLE and self._database.exists()):
            return StoreError(f"{self.path}: the index cannot be reached: {error}")
        return IndexDamagedError(self.path, str(error))
