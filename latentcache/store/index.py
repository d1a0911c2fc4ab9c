"""The index: a durable map of names to bytes in SQLite, by way of diskcache, which only this file imports.

diskcache trusts its database: by default it unpickles what it finds there, runs its settings as SQL, and reads and
deletes files that rows name. So rows are bytes or they are refused, and a database is inspected first.
No connection outlives the call that made it: nothing is carried across a fork, and other processes never wait for an
idle one.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diskcache
from diskcache.core import DBNAME, DEFAULT_SETTINGS, METADATA, MODE_RAW

from latentcache.errors import IndexDamagedError, ReadOnlyError, StoreError
from latentcache.store.connection import TIMEOUT_S, connect, typed_error
from latentcache.utils.locks import locked

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
_SCHEMA = {
    ("table", "Cache"),
    ("table", "Settings"),
    ("index", "Cache_key_raw"),
    ("index", "Cache_expire_time"),
    ("index", "sqlite_autoindex_Settings_1"),
    ("trigger", "Settings_count_insert"),
    ("trigger", "Settings_count_delete"),
    ("trigger", "Settings_size_insert"),
    ("trigger", "Settings_size_update"),
    ("trigger", "Settings_size_delete"),
}
_SUPER_JOURNAL_MAGIC = bytes.fromhex("d9d505f920a163d7")
_SELECT = """
    SELECT key, value, typeof(key) = 'text' AND typeof(value) = 'blob' AND raw = 1 AND mode = 1
        AND filename IS NULL AND expire_time IS NULL
    FROM Cache
"""
"""Name and value of rows, and whether latentcache can have written them."""
GENERATION = "generation"
"""The name of the row that changes whenever another is removed or replaced."""
MAX_VALUE_BYTES = 1 << 23
"""Of a row. That of a pack of 8,192 entries has some 400 KB, and more where all of them are damaged."""
_BEFORE_ALL = -(1 << 63)


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
        return _checked_name(key), True

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

    def drop_tag_index(self) -> None:
        # There is none (_SCHEMA), and this alone is not tried again when another process has the database.
        pass


@dataclass(frozen=True, slots=True)
class Position:
    """How far a reader has read. As long as `generation` is the same, what it read counts, and later rows follow.

    The last row's number and name tell an index that was put back from a copy.
    """

    generation: bytes | None
    last_row: int
    last_name: str


@dataclass(frozen=True, slots=True)
class Reading:
    """Names and values of rows, oldest first, and where they bring their reader.

    `is_whole`: all rows, not only later ones.
    """

    position: Position
    is_whole: bool
    rows: Iterator[tuple[str, bytes]]


class Transaction:
    """Reads and changes that take effect together, or not at all. Made by `Index.transaction`."""

    def __init__(self, cache: diskcache.Cache):
        self._cache = cache
        self.generation: bytes | None = None
        """The index's new generation, if a row was replaced or removed."""
        self.replaced: dict[str, bytes | None] = {}
        """The rows that were replaced, and None for those that were removed."""

    def get(self, name: str) -> bytes | None:
        """The row's value, or None."""
        value: bytes | None = self._cache.get(name)
        return value

    def add(self, name: str, value: bytes) -> bool:
        """Add a row unless there is one of this name. True if it was added."""
        return bool(self._cache.add(_not_reserved(name), value))

    def put(self, name: str, value: bytes) -> None:
        """Add or replace a row."""
        if not self._cache.add(_not_reserved(name), value):
            self._cache.set(name, value)
            self._note(name, value)

    def remove(self, name: str) -> bool:
        """Remove a row. True if there was one."""
        removed = bool(self._cache.delete(_not_reserved(name)))
        if removed:
            self._note(name, None)
        return removed

    def _note(self, name: str, value: bytes | None) -> None:
        self.replaced[name] = value
        if self.generation is None:
            self.generation = uuid.uuid4().bytes
            self._cache.set(GENERATION, self.generation)


class Index:
    """A map of names to bytes, kept in the folder `path`. Safe for threads, for forks, and for many processes.

    Names are UTF-8, and values have at most MAX_VALUE_BYTES; anything else is a StoreError. IndexDamagedError: the
    database is broken, holds what latentcache did not write, or (read-only) does not exist.
    """

    def __init__(self, path: str | os.PathLike[str], *, read_only: bool = False):
        self.path = Path(path).absolute()
        self._database = self.path / DBNAME
        self.read_only = read_only
        self.lock = process_lock
        """Held during each call. Hold it to make one step of several calls, and of what memory keeps of them."""
        self._closed = False
        self._cache: diskcache.Cache | None = None
        with self._typed_errors():
            if self.path.is_symlink() or (os.path.lexists(self.path) and not self.path.is_dir()):
                raise IndexDamagedError(self.path, "it is no folder")
            if read_only:
                self._inspect()
                return
            self.path.mkdir(parents=True, exist_ok=True)
            # One at a time: making the tables is not one transaction.
            with locked(self.path / "open.lock", "opening the index", shared=False, wait=True):
                fresh = not self._database.exists() and not self._database.is_symlink()
                if fresh or self._inspect() != _SCHEMA:
                    with self.transaction():
                        pass  # it makes the tables, and the first generation

    def get_many(self, names: Iterable[str]) -> dict[str, bytes]:
        """The rows of those names that have one."""
        wanted = [_checked_name(name) for name in names]
        with self._reading() as connection:
            return dict(row for name in wanted for row in self._rows(connection, "WHERE key = ?", name))

    def items(self) -> dict[str, bytes]:
        """All rows, oldest first."""
        with self.reading() as reading:
            return dict(reading.rows)

    @contextmanager
    def reading(self, since: Position | None = None) -> Iterator[Reading]:
        """The rows that came after `since`; all rows where some were removed or replaced since then.

        Other processes cannot change the index while the block runs.
        """
        with self._reading() as connection:
            generation = dict(self._rows(connection, "WHERE key = ?", GENERATION)).get(GENERATION)
            follows = since is not None and since.generation == generation and self._has_row(connection, since)
            start = since.last_row if follows and since is not None else _BEFORE_ALL
            last = connection.execute("SELECT rowid, key FROM Cache ORDER BY rowid DESC LIMIT 1").fetchone()
            position = Position(generation, *(last or (_BEFORE_ALL, "")))
            rows = self._rows(connection, "WHERE rowid > ? AND key IS NOT ? ORDER BY rowid", start, GENERATION)
            yield Reading(position, not follows, rows)

    def _rows(self, connection: sqlite3.Connection, where: str, *values: object) -> Iterator[tuple[str, bytes]]:
        for name, value, is_ours in connection.execute(_SELECT + where, values):
            if is_ours != 1:
                raise IndexDamagedError(self.path, f"row {name!r:.80} was not written by latentcache")
            yield name, value

    def _has_row(self, connection: sqlite3.Connection, position: Position) -> bool:
        if position.last_row == _BEFORE_ALL:
            return True  # it was empty
        query = "SELECT key FROM Cache WHERE rowid = ?"
        return bool(connection.execute(query, [position.last_row]).fetchone() == (position.last_name,))

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
                    yield Transaction(cache)
            finally:
                cache.close()

    def close(self) -> None:
        """Nothing is open between calls; afterwards changes are refused."""
        self._closed = True

    def _open_cache(self) -> diskcache.Cache:
        # As late as possible: opening one writes all its settings, row by row.
        if self._cache is None:
            try:
                self._cache = _Cache(str(self.path), timeout=TIMEOUT_S, disk=_BytesDisk, **_SETTINGS)
            except ValueError as error:  # diskcache looks up each setting, and takes it for granted that it is there
                raise IndexDamagedError(self.path, f"a setting cannot be found: {error}") from error
        return self._cache

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self.lock, self._typed_errors():
            connection = connect(self._database, read_only=self.read_only)
            try:
                yield connection
            finally:
                connection.close()

    def _inspect(self) -> set[tuple[str, str]]:
        """Inspect a database before diskcache reads it: it runs stored settings as SQL. Returns (type, name) in it."""
        self._inspect_files()
        self._inspect_journal()
        with self._reading() as connection:
            schema = set(connection.execute("SELECT type, name FROM sqlite_master"))
            if not schema <= _SCHEMA:
                raise IndexDamagedError(self.path, f"it holds {sorted(schema - _SCHEMA)!r:.200}")
            if ("table", "Settings") in schema:
                for name, value in connection.execute("SELECT key, value FROM Settings"):
                    known = type(name) is str and (name in DEFAULT_SETTINGS or name in METADATA)
                    if known and not name.startswith("sqlite_"):
                        known = type(value) in (int, float) or (type(value) is str and name == "eviction_policy")
                    elif known:
                        known = value == _SETTINGS[name] or (name, value) == (
                            "sqlite_synchronous",
                            2,
                        )  # as it was before
                    if not known:
                        detail = f"setting {name!r:.80} = {value!r:.80} was not written by latentcache"
                        raise IndexDamagedError(self.path, detail)
        return schema

    def _inspect_files(self) -> None:
        for name in (DBNAME, *[DBNAME + suffix for suffix in ("-journal", "-wal", "-shm")]):
            try:
                mode = (self.path / name).lstat().st_mode
            except FileNotFoundError:
                continue  # journals come and go
            if not stat.S_ISREG(mode):
                raise IndexDamagedError(self.path, f"{name} is not a regular file")
        if not self._database.exists():
            raise IndexDamagedError(self.path, "it does not exist")

    def _inspect_journal(self) -> None:
        # A journal may name a super-journal, which SQLite then deletes. Ours never do.
        journal = self.path / f"{DBNAME}-journal"
        try:
            with journal.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - len(_SUPER_JOURNAL_MAGIC)))
                if file.read() == _SUPER_JOURNAL_MAGIC:
                    raise IndexDamagedError(self.path, f"{journal.name} names another file")
        except FileNotFoundError:
            return  # the usual case: no writer died

    @contextmanager
    def _typed_errors(self) -> Iterator[None]:
        try:
            yield
        except diskcache.Timeout as error:
            # diskcache hides why a transaction could not begin behind its Timeout.
            cause = error.__context__
            read_only, timed_out = self.read_only, cause is None
            raise typed_error(cause or error, self._database, read_only=read_only, timed_out=timed_out) from error
        except (sqlite3.Error, UnicodeDecodeError, OSError) as error:
            raise typed_error(error, self._database, read_only=self.read_only) from error


def _not_reserved(name: str) -> str:
    if name == GENERATION:
        raise StoreError(f"the index keeps {GENERATION!r} for itself; give the row another name")
    return name


def _checked_name(name: str) -> str:
    if type(name) is not str:
        raise StoreError(f"a name in the index is text, got {type(name).__name__}")
    try:
        name.encode("utf-8")
    except UnicodeEncodeError as error:
        raise StoreError(f"a name in the index is UTF-8: {name!r:.100} ({error.reason}); use its digest") from error
    return name
