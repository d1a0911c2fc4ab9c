"""The index: one row per pack in a SQLite database that diskcache manages. Only this file imports diskcache.

diskcache would unpickle values, and read and delete files that rows name, so a row that is not plain bytes is refused.
No connection outlives the call that opened it: nothing is carried across a fork, and other processes never wait for
an idle one.
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
"""Not WAL, which fails on network file systems and requires write access even of readers."""
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
    "sqlite_synchronous": 3,  # EXTRA: with FULL, a power cut can restore the journal and so undo a commit
    "disk_min_file_size": 1 << 60,  # values never go to files
}
PACK_PREFIX = "pack:"
"""Prefix of a pack row's name; the pack's id follows."""
GENERATION = "generation"
"""Name of the row that changes whenever another row is removed or replaced."""
MAX_VALUE_BYTES = 1 << 23
"""Upper bound for a row. A pack of 8,192 entries takes some 400 KB, and more if all of them are damaged."""
_BEFORE_ALL = -(1 << 63)
_PAGE_BYTES = 4096
_PASSING_S, _POLL_S = 2.0, 0.05
# SQLite's error messages: the exceptions of Python 3.10 have no error codes.
_BUSY = ("database is locked", "database table is locked")
_FULL = "database or disk is full"
_READ_ONLY = ("attempt to write a readonly database", "access permission denied")
_CANNOT_OPEN = "unable to open database file"
_UNREACHABLE = ("disk I/O error", _CANNOT_OPEN, "out of memory")


process_lock = threading.RLock()
"""One lock for all indexes. A fork waits for it, and parent and child both find it free afterwards.

A new lock in the child would not be enough: SQLite in the child would roll back the parent's transaction.
"""
if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(
        before=process_lock.acquire, after_in_parent=process_lock.release, after_in_child=process_lock.release
    )


class _BytesDisk(diskcache.Disk):  # type: ignore[misc]  # diskcache has no types
    """Stores bytes in rows only: no pickles, no files."""

    def put(self, key: str) -> tuple[str, bool]:
        return key, True

    def store(self, value: bytes, read: bool, key: object = None) -> tuple[int, int, None, bytes]:
        if len(value) > MAX_VALUE_BYTES:
            raise StoreError(f"a row of the index has {len(value):,} bytes; at most {MAX_VALUE_BYTES:,} are allowed")
        return 0, MODE_RAW, None, value

    def fetch(self, mode: object, filename: object, value: object, read: bool) -> bytes:
        raise IndexDamagedError(self._directory, "diskcache tried to unpickle a value")  # only `Rows` reads values

    def remove(self, file_path: str) -> None:
        # diskcache calls this with the file that a row names, and our rows name none.
        raise IndexDamagedError(self._directory, "a row names a file")


class _Cache(diskcache.Cache):  # type: ignore[misc]  # diskcache has no types
    """A cache that waits for other processes throughout its opening, and closes itself if the opening fails."""

    def __init__(self, *arguments: Any, **settings: Any):
        try:
            super().__init__(*arguments, **settings)
        except BaseException:
            self.close()  # otherwise it keeps its locks until garbage collection
            raise

    def drop_tag_index(self) -> None:
        # A no-op: there is no such index, and diskcache does not retry this statement when the database is locked.
        pass


Position = tuple[bytes | None, int]
"""A reader's cursor: generation and last row id. Within one generation, only rows with later ids are new to it."""


class Rows:
    """The rows inside a block of `Index.reading`, during which other processes cannot change them."""

    def __init__(self, path: Path, execute: Callable[[str, Sequence[object]], sqlite3.Cursor]):
        self._path, self._execute = path, execute

    def get(self, pack: str) -> PackRow | None:
        """The pack's row, or None if there is none."""
        return next((row for row in self._packs("WHERE key = ?", PACK_PREFIX + pack)), None)

    def since(self, position: Position | None = None) -> tuple[Position, bool, Iterator[PackRow]]:
        """Read the rows added after `position`, or all rows if any was removed or replaced since then.

        Returns:
            The new position, whether these are all rows, and the rows, oldest first.
        """
        generation = dict(self._execute("SELECT key, value FROM Cache WHERE key = ?", (GENERATION,))).get(GENERATION)
        is_whole = position is None or position[0] != generation
        first = _BEFORE_ALL if position is None or is_whole else position[1]
        [last] = self._execute("SELECT max(rowid) FROM Cache", ()).fetchone()
        rows = self._packs("WHERE rowid > ? AND key IS NOT ? ORDER BY rowid", first, GENERATION)
        return (generation, _BEFORE_ALL if last is None else last), is_whole, rows

    def _packs(self, where: str, *values: object) -> Iterator[PackRow]:
        for name, value in self._execute(f"SELECT key, value FROM Cache {where}", values):  # both may be of any type
            try:
                pack = name.removeprefix(PACK_PREFIX)
                if pack == name or not is_pack_id(pack):
                    raise ValueError("its name is not that of a pack")
                yield PackRow.from_bytes(pack, value)
            except (ValueError, TypeError, AttributeError) as error:
                raise IndexDamagedError(self._path, f"row {name!r:.80}: {error}") from error


class Transaction(Rows):
    """Reads and changes inside a block of `Index.transaction`, which are committed together or not at all."""

    def __init__(self, path: Path, cache: _Cache):
        super().__init__(path, cache._sql)
        self._cache, self._is_new_generation = cache, False
        self.changed: dict[str, PackRow | None] = {}
        """For each changed pack its new row, or None if the row was removed."""

    def put(self, row: PackRow) -> None:
        """Add or replace a pack's row."""
        name, value = PACK_PREFIX + row.pack.id, row.to_bytes()
        if not self._cache.add(name, value):
            self._begin_generation()
            self._cache.set(name, value)
        self.changed[row.pack.id] = row

    def remove(self, pack: str) -> None:
        """Remove a pack's row if there is one."""
        if self._cache.delete(PACK_PREFIX + pack):
            self._begin_generation()
            self.changed[pack] = None

    def _begin_generation(self) -> None:
        if not self._is_new_generation:
            self._cache.set(GENERATION, uuid.uuid4().bytes)
            self._is_new_generation = True


class Index:
    """A durable map from packs to their rows, in the folder `path`. Safe for threads, forks and many processes.

    StoreError for a row of more than MAX_VALUE_BYTES. IndexDamagedError: the database is corrupt, holds rows that
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
            # One process at a time: the tables are not created in one transaction, and a part of them counts as damage.
            with process_lock, locked(self.path / "open.lock", "opening the index", shared=False, wait=True):
                if not self._database.exists():
                    with self._begun():
                        pass  # creates the tables and the first generation

    def _check_exists(self) -> None:
        if self._is_gone():
            raise IndexDamagedError(self.path, "it does not exist")

    @contextmanager
    def reading(self) -> Iterator[Rows]:
        """Read rows. Other processes cannot change the index during the block."""
        with process_lock, self._typed_errors(), closing(self._connect()) as connection:
            yield Rows(self.path, connection.execute)

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """Lock the database for writing. Use only the transaction's methods inside. Durable after the block."""
        if self.read_only:
            raise ReadOnlyError(self.path)
        self._check_exists()  # otherwise diskcache would create a new, empty one
        with self._begun() as transaction:
            yield transaction

    @contextmanager
    def _begun(self) -> Iterator[Transaction]:
        with process_lock, self._typed_errors():
            if self._cache is None:  # opened lazily, since that writes every setting as a row of its own
                try:
                    self._cache = _Cache(str(self.path), timeout=TIMEOUT_S, disk=_BytesDisk, **_SETTINGS)
                except ValueError as error:  # raised by diskcache if the database lacks a setting
                    raise IndexDamagedError(self.path, f"a setting is missing: {error}") from error
            with closing(self._cache) as cache, cache.transact():
                # A generation from the start, so that readers notice when an index is replaced by another.
                cache.add(GENERATION, uuid.uuid4().bytes)
                yield Transaction(self.path, cache)

    def _connect(self) -> sqlite3.Connection:
        """A connection in a read transaction, which sees a consistent snapshot."""
        # mode=rw so that a dead writer's transaction can be rolled back.
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
                # A live writer's journal can briefly look like a dead one's, which a reader may not roll back.
                passes = self.read_only and str(error).startswith((*_READ_ONLY, _CANNOT_OPEN))
                if not passes or time.monotonic() >= until:
                    raise
            time.sleep(_POLL_S)

    @contextmanager
    def _typed_errors(self) -> Iterator[None]:
        try:
            yield
        except (diskcache.Timeout, sqlite3.Error, UnicodeDecodeError, OSError) as error:
            # diskcache hides why a transaction could not begin, and on a full disk it rolls back again what SQLite
            # has rolled back: the first error counts.
            first = error.__context__ if isinstance(error.__context__, sqlite3.Error) else error
            raise self._typed(first) from error

    def _typed(self, error: BaseException) -> StoreError:
        """Translate an error of SQLite, diskcache or the operating system."""
        text = str(error)
        if isinstance(error, diskcache.Timeout) or text.startswith(_BUSY):
            detail = f"another process held the index for more than {TIMEOUT_S:.0f} s; try again"
            return StoreBusyError(self.path, detail)
        if text.startswith(_FULL):
            return StorageFullError(self.path, _PAGE_BYTES)
        if text.startswith(_READ_ONLY) or isinstance(error, PermissionError):
            # If the file is writable, the refusal comes from the database's header: it is damaged.
            if self.read_only or not os.access(self._database, os.W_OK):
                return ReadOnlyError(self.path, f"the index cannot be written: {error}")
        elif not self._is_gone() and (isinstance(error, OSError) or text.startswith(_UNREACHABLE)):
            return StoreError(f"{self.path}: the index cannot be reached: {error}")
        return IndexDamagedError(self.path, str(error))

    def _is_gone(self) -> bool:
        """Whether the database certainly does not exist. False if that cannot be determined."""
        try:
            self._database.stat()
        except OSError as error:
            return isinstance(error, FileNotFoundError)
        return False
