"""The index: a durable map of names to bytes in SQLite, by way of diskcache, which only this file imports.

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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import diskcache
from diskcache.core import DBNAME, MODE_RAW

from latentcache.errors import IndexDamagedError, ReadOnlyError, StorageFullError, StoreBusyError, StoreError
from latentcache.utils.locks import locked

TIMEOUT_S = 60.0
JOURNAL_MODE = "delete"
"""Not WAL: that fails on network file systems, and a reader without write access could not read it."""
SQLITE_VERSION = sqlite3.sqlite_version
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
GENERATION = "generation"
"""The name of the row that changes whenever another is removed or replaced."""
MAX_VALUE_BYTES = 1 << 23
"""The largest row. That of a pack of 8,192 entries has some 400 KB, and more where all of them are damaged."""
_MADE_LAST = "Settings_size_delete"
"""The last of the tables and triggers that diskcache makes in a new database."""
_BEFORE_ALL = -(1 << 63)
_PAGE_BYTES = 4096
_PASSING_S, _POLL_S = 2.0, 0.05
_UNREACHABLE = (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_NOMEM)


Execute = Callable[..., sqlite3.Cursor]
"""Runs a statement with its values: `execute(statement, *values)`."""

process_lock = threading.RLock()
"""One lock for all indexes. A fork of this process waits for it, and both sides find it free.

A new lock in the child would not do: SQLite would roll back there what the parent is writing.
"""
os.register_at_fork(
    before=process_lock.acquire, after_in_parent=process_lock.release, after_in_child=process_lock.release
)


class _BytesDisk(diskcache.Disk):  # type: ignore[misc]  # diskcache has no types
    """Bytes in rows, and nothing else: no pickle, no file."""

    def put(self, key: str) -> tuple[str, bool]:
        return key, True

    def get(self, key: object, raw: object) -> str:
        if raw != 1 or type(key) is not str:
            raise IndexDamagedError(self._directory, "a key is not text")
        return key

    def store(self, value: bytes, read: bool, key: object = None) -> tuple[int, int, None, bytes]:
        if type(value) is not bytes:
            raise StoreError(f"a row of the index is bytes, got {type(value).__name__}")
        if len(value) > MAX_VALUE_BYTES:
            raise StoreError(f"a row of the index has at most {MAX_VALUE_BYTES:,} bytes, got {len(value):,}")
        return 0, MODE_RAW, None, value

    def fetch(self, mode: object, filename: object, value: object, read: bool) -> bytes:
        if mode != MODE_RAW or filename is not None or type(value) is not bytes:
            raise IndexDamagedError(self._directory, "a value is not bytes")
        return value

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

    def execute(self, statement: str, *values: object) -> sqlite3.Cursor:
        """Run a statement on the connection that a transaction has."""
        cursor: sqlite3.Cursor = self._sql(statement, values)
        return cursor

    def drop_tag_index(self) -> None:
        # There is none, and this alone is not tried again when another process has the database.
        pass


class Position(NamedTuple):
    """How far a reader has read. As long as `generation` is the same, what it read counts, and later rows follow."""

    generation: bytes | None
    last_row: int


class Reading(NamedTuple):
    """Names and values of rows, oldest first, and where they bring their reader. `is_whole`: these are all rows."""

    position: Position
    is_whole: bool
    rows: Iterator[tuple[str, bytes]]


class Transaction:
    """Reads and changes that take effect together, or not at all. Made by `Index.transaction`."""

    def __init__(self, index: Index, cache: _Cache):
        self._index, self._cache, self._is_new_generation = index, cache, False
        self.changed: dict[str, bytes | None] = {}
        """The rows that were added or replaced, and None for those that were removed."""

    def reading(self, since: Position | None = None) -> Reading:
        """Read rows with the changes of this transaction: see `Index.reading`."""
        return self._index.read_with(self._cache.execute, since)

    def get(self, name: str) -> bytes | None:
        """The row's value, or None."""
        value: bytes | None = self._cache.get(name)
        return value

    def put(self, name: str, value: bytes) -> None:
        """Add or replace a row."""
        if self._cache.add(name, value):
            self.changed[name] = value
        else:
            self._cache.set(name, value)
            self._replaced(name, value)

    def remove(self, name: str) -> bool:
        """Remove a row. True if there was one."""
        removed = bool(self._cache.delete(name))
        if removed:
            self._replaced(name, None)
        return removed

    def _replaced(self, name: str, value: bytes | None) -> None:
        self.changed[name] = value
        if not self._is_new_generation:
            self._cache.set(GENERATION, uuid.uuid4().bytes)
            self._is_new_generation = True


class Index:
    """A map of names to bytes, kept in the folder `path`. Safe for threads, for forks, and for many processes.

    Values have at most MAX_VALUE_BYTES; anything else is a StoreError. IndexDamagedError: the
    database is broken, holds what latentcache did not write, or (read-only) does not exist.
    """

    def __init__(self, path: str | os.PathLike[str], *, read_only: bool = False):
        self.path = Path(path).absolute()
        self._database = self.path / DBNAME
        self.read_only = read_only
        self.lock = process_lock
        """Held during each call. Hold it to make one step of several calls, and of what memory keeps of them."""
        self._closed = False
        self._cache: _Cache | None = None
        with self._typed_errors():
            if read_only:
                if not self._database.exists():
                    raise IndexDamagedError(self.path, "it does not exist")
                return
            self.path.mkdir(parents=True, exist_ok=True)
            # One at a time: making the tables is not one transaction.
            with self.lock, locked(self.path / "open.lock", "opening the index", shared=False, wait=True):
                if not self._has_tables():
                    with self.transaction():
                        pass  # it makes the tables, and the first generation

    def _has_tables(self) -> bool:
        if not self._database.exists():
            return False
        with self._reading() as execute:
            return bool(execute("SELECT COUNT(*) FROM sqlite_master WHERE name = ?", _MADE_LAST).fetchone()[0])

    def get_many(self, names: Iterable[str]) -> dict[str, bytes]:
        """The rows of those names that have one."""
        with self._reading() as execute:
            return dict(row for name in names for row in self._rows(execute, "WHERE key = ?", name))

    def items(self) -> dict[str, bytes]:
        """All rows, oldest first."""
        with self.reading() as reading:
            return dict(reading.rows)

    @contextmanager
    def reading(self, since: Position | None = None) -> Iterator[Reading]:
        """The rows that came after `since`; all rows where some were removed or replaced since then.

        Other processes cannot change the index while the block runs.
        """
        with self._reading() as execute:
            yield self.read_with(execute, since)

    def read_with(self, execute: Execute, since: Position | None) -> Reading:
        """Read rows by a connection that has begun to read, which `execute` uses: see `reading`."""
        generation = dict(self._rows(execute, "WHERE key = ?", GENERATION)).get(GENERATION)
        if since is None or since.generation != generation:
            since = Position(None, _BEFORE_ALL)
        last = execute("SELECT max(rowid) FROM Cache").fetchone()[0]
        rows = self._rows(execute, "WHERE rowid > ? AND key IS NOT ? ORDER BY rowid", since.last_row, GENERATION)
        is_whole = since.last_row == _BEFORE_ALL
        return Reading(Position(generation, _BEFORE_ALL if last is None else last), is_whole, rows)

    def _rows(self, execute: Execute, where: str, *values: object) -> Iterator[tuple[str, bytes]]:
        for name, value, is_ours in execute(_SELECT + where, *values):
            if is_ours != 1:
                raise IndexDamagedError(self.path, f"row {name!r:.80} was not written by latentcache")
            yield name, value

    def replace_many(self, rows: Mapping[str, bytes]) -> None:
        """Add or replace rows in one transaction."""
        with self.transaction() as transaction:
            for name, value in rows.items():
                transaction.put(name, value)

    def remove_many(self, names: Iterable[str]) -> int:
        """Remove rows in one transaction. Returns how many there were."""
        with self.transaction() as transaction:
            return sum([transaction.remove(name) for name in names])

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """Hold the database alone. Inside, use the transaction's methods only. Durable when the block is left."""
        with self.lock, self._typed_errors():
            if self.read_only:
                raise ReadOnlyError(self.path)
            if self._closed:
                raise StoreError(f"{self.path}: the index is closed")
            cache = self._open_cache()
            try:
                with cache.transact():
                    # From the first row on: one that replaces another index is known to be another.
                    cache.add(GENERATION, uuid.uuid4().bytes)
                    yield Transaction(self, cache)
            finally:
                cache.close()

    def close(self) -> None:
        """Nothing is open between calls; afterwards changes are refused."""
        self._closed = True

    def _open_cache(self) -> _Cache:
        # As late as possible: opening one writes all its settings, row by row.
        if self._cache is None:
            try:
                self._cache = _Cache(str(self.path), timeout=TIMEOUT_S, disk=_BytesDisk, **_SETTINGS)
            except ValueError as error:  # diskcache looks up each setting, and takes it for granted that it is there
                raise IndexDamagedError(self.path, f"a setting cannot be found: {error}") from error
        return self._cache

    @contextmanager
    def _reading(self) -> Iterator[Execute]:
        """Run statements in a transaction that reads: nothing changes under it any more."""
        with self.lock, self._typed_errors(), closing(self._connect()) as connection:
            yield lambda statement, *values: connection.execute(statement, values)

    def _connect(self) -> sqlite3.Connection:
        # A live writer's journal can look like a dead one's for a moment, which is rolled back by writing.
        until = time.monotonic() + _PASSING_S
        while True:
            # mode=rw: only so can what a dead writer left half done be rolled back.
            uri = f"{self._database.as_uri()}?mode={'ro' if self.read_only else 'rw'}"
            connection = sqlite3.connect(uri, uri=True, timeout=TIMEOUT_S, isolation_level=None)
            try:
                connection.execute("BEGIN")
                connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()  # the lock is taken here
                return connection
            except sqlite3.OperationalError as error:
                connection.close()
                passes = _primary(error) in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN)
                if not (self.read_only and passes) or time.monotonic() >= until or os.access(self.path, os.W_OK):
                    raise
            except BaseException:
                connection.close()
                raise
            time.sleep(_POLL_S)

    @contextmanager
    def _typed_errors(self) -> Iterator[None]:
        try:
            yield
        except diskcache.Timeout as error:
            # diskcache hides why a transaction could not begin behind its Timeout. Without a cause it was never free.
            raise self._busy() if error.__context__ is None else self._typed(error.__context__) from error
        except (sqlite3.Error, UnicodeDecodeError, OSError) as error:
            # diskcache rolls back what SQLite has rolled back already, on a full disk: the first error counts.
            first = error.__context__ if isinstance(error.__context__, sqlite3.Error) else error
            raise self._typed(first) from error

    def _busy(self) -> StoreBusyError:
        return StoreBusyError(self.path, f"another process held the index for more than {TIMEOUT_S:.0f} s; try again")

    def _typed(self, error: BaseException) -> StoreError:
        """What an error of SQLite or of the system means for the index."""
        code = _primary(error)
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return self._busy()
        if code == sqlite3.SQLITE_FULL:
            return StorageFullError(self.path, _PAGE_BYTES)
        if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM) or isinstance(error, PermissionError):
            # Where the files can be written it is the database's header that says no.
            if code is None or self.read_only or not os.access(self._database, os.W_OK):
                return ReadOnlyError(self.path, f"the index cannot be written: {error}")
        elif isinstance(error, FileExistsError | NotADirectoryError):
            return IndexDamagedError(self.path, "it is no folder")
        elif isinstance(error, OSError) or code in _UNREACHABLE:
            return StoreError(f"{self.path}: the index cannot be reached: {error}")
        return IndexDamagedError(self.path, str(error))


def _primary(error: BaseException) -> int | None:
    code = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF
