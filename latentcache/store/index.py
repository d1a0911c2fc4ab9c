"""The index: a durable map of text to text in SQLite, by way of diskcache, which only this file imports.

diskcache trusts its database: by default it unpickles what it finds there, runs its settings as SQL, and reads and
deletes files that rows name. So rows are text or they are refused, and a database is looked through first.
No connection outlives the call that made it: nothing is carried across a fork, and other processes never wait for an
idle one.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import diskcache
from diskcache.core import DBNAME, DEFAULT_SETTINGS, METADATA, MODE_RAW

from latentcache.errors import IndexDamagedError, ReadOnlyError, StoreError
from latentcache.identity import digest
from latentcache.store.connection import JOURNALS, MAX_TEXT_BYTES, TIMEOUT_S, connect, typed_error
from latentcache.store.fork import hold_in_forks
from latentcache.store.history import Point, Reading
from latentcache.store.lock import locked

_CHUNK = 500  # keys in one SELECT; SQLite allows 999 in old builds

# Before 3.51.3, two processes that write and checkpoint at once can corrupt a database in WAL mode.
JOURNAL_MODE = "wal" if sqlite3.sqlite_version_info >= (3, 51, 3) else "delete"
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
    "sqlite_synchronous": 2,  # FULL: a row that was acknowledged survives a power cut
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
_COLUMNS = "key, raw, mode, filename, expire_time, value"
_OURS = (
    "typeof(key) = 'text' AND typeof(value) = 'text' AND raw = 1 AND mode = 1 "
    "AND filename IS NULL AND expire_time IS NULL"
)
_PAGE_ROWS = 4_000
_HISTORY = "latentcache:history"
"""The row that changes whenever another is removed or replaced. No caller sees it, and none may use its name."""
_BEFORE_ALL = -(1 << 63)


class _TextDisk(diskcache.Disk):
    """Text in rows, and nothing else: no pickle, no file."""

    def put(self, key: str) -> tuple[str, bool]:
        return _checked(key), True

    def get(self, key: object, raw: object) -> str:
        if raw != 1 or type(key) is not str:
            raise IndexDamagedError(self._directory, "a key is not text")
        return key

    def store(self, value: str, read: bool, key: object = None) -> tuple[int, int, None, str]:
        return 0, MODE_RAW, None, _checked(value)

    def fetch(self, mode: object, filename: object, value: object, read: bool) -> str:
        if mode != MODE_RAW or filename is not None or type(value) is not str:
            raise IndexDamagedError(self._directory, "a value is not text")
        return value

    def remove(self, file_path: str) -> None:
        # diskcache calls this with the file that a row names. None of ours names one.
        raise IndexDamagedError(self._directory, "a row names a file")


class _Cache(diskcache.Cache):
    """A cache that waits for others in all that it does while it is opened."""

    def drop_tag_index(self) -> None:
        # There is none (_SCHEMA), and this alone is not tried again when another process has the database.
        pass


class Transaction:
    """Reads and changes that take effect together, or not at all. Made by `Index.transaction`."""

    def __init__(self, cache: diskcache.Cache):
        self._cache = cache
        self._noted = False
        if cache.get(_HISTORY) is None:
            self._note_rewrite()

    def _note_rewrite(self) -> None:
        if not self._noted:
            self._cache.set(_HISTORY, uuid.uuid4().hex)
            self._noted = True

    def get(self, key: str) -> str | None:
        return self._cache.get(_checked_name(key))

    def add(self, key: str, value: str) -> bool:
        """Add a row unless the key has one. True if it was added."""
        return self._cache.add(_checked_name(key), value)

    def put(self, key: str, value: str) -> None:
        """Add or replace a row."""
        self._note_rewrite()
        self._cache.set(_checked_name(key), value)

    def remove(self, key: str) -> bool:
        """Remove a row. True if there was one."""
        removed = self._cache.delete(_checked_name(key))
        if removed:
            self._note_rewrite()
        return removed


class Index:
    """A map of text to text, kept in the folder `path`. Safe for threads, for forks, and for many processes.

    Keys and values are UTF-8 of at most MAX_TEXT_BYTES; anything else is a StoreError. IndexDamagedError: the database
    is broken, holds what latentcache did not write, or (read-only) does not exist.
    """

    def __init__(self, path: str | os.PathLike[str], *, read_only: bool = False):
        self.path = Path(path).absolute()
        self.read_only = read_only
        self.lock = threading.RLock()
        """Held during each call. Hold it to make one step of several calls, and of what memory keeps of them."""
        self._closed = False
        self._cache: diskcache.Cache | None = None
        hold_in_forks(self)
        if read_only:
            with self._typed_errors():
                self._inspect()
            return
        with self._typed_errors():
            self.path.mkdir(parents=True, exist_ok=True)
            # One at a time: making the tables is not one transaction.
            with locked(self.path / "open.lock", "opening the index", shared=False, wait=True):
                fresh = not self._database.exists() and not self._database.is_symlink()
                if fresh or self._inspect() != _SCHEMA:
                    self._open_cache().close()

    @property
    def _database(self) -> Path:
        return self.path / DBNAME

    def get(self, key: str) -> str | None:
        """The value, or None."""
        return self.get_many([key]).get(key)

    def get_many(self, keys: Iterable[str]) -> dict[str, str]:
        """The rows of those keys that have one."""
        wanted = [_checked_name(key) for key in dict.fromkeys(keys)]
        found: dict[str, str] = {}
        if not wanted:
            return found
        with self._reading() as connection:
            for start in range(0, len(wanted), _CHUNK):
                chunk = wanted[start : start + _CHUNK]
                marks = ",".join("?" * len(chunk))
                query = f"SELECT {_COLUMNS} FROM Cache WHERE raw = 1 AND key IN ({marks})"
                found.update(self._row(row) for row in connection.execute(query, chunk))
        return found

    def items(self) -> dict[str, str]:
        """All rows, oldest first."""
        with self.reading() as reading:
            assert reading is not None
            return {key: value for page in reading.pages for key, value in page}

    @contextmanager
    def reading(self, since: Point | None = None) -> Iterator[Reading | None]:
        """The rows that came after `since`, or all. None if rows were removed or replaced since then.

        Other processes cannot change the index while the block runs.
        """
        with self._reading() as connection:
            now = self._point(connection)
            if since is not None and (now is None or not self._follows(connection, now, since)):
                yield None
                return
            start = _BEFORE_ALL if since is None else since.last_row
            self._check_rows(connection, "rowid > ?", [start])
            query = "SELECT key, value FROM Cache WHERE rowid > ? AND key != ? ORDER BY rowid"
            rows = connection.execute(query, [start, _HISTORY])
            yield Reading(now, iter(lambda: rows.fetchmany(_PAGE_ROWS), []))

    def _point(self, connection: sqlite3.Connection) -> Point | None:
        query = f"SELECT {_COLUMNS} FROM Cache WHERE raw = 1 AND key = ?"
        row = connection.execute(query, [_HISTORY]).fetchone()
        # Triggers of diskcache keep it: counting a million rows takes longer than reading what is new.
        num_rows = connection.execute("SELECT value FROM Settings WHERE key = 'count'").fetchone()
        if row is None or num_rows is None or type(num_rows[0]) is not int:
            return None
        last_row = connection.execute("SELECT MAX(rowid) FROM Cache").fetchone()[0]
        return Point(self._row(row)[1], last_row, self._row_digest(connection, last_row), num_rows[0])

    def _row_digest(self, connection: sqlite3.Connection, number: int) -> str:
        row = connection.execute(f"SELECT {_COLUMNS} FROM Cache WHERE rowid = ?", [number]).fetchone()
        return "" if row is None else digest("\n".join(self._row(row)).encode())

    def _follows(self, connection: sqlite3.Connection, now: Point, since: Point) -> bool:
        if now.history != since.history or now.last_row < since.last_row:
            return False
        query = "SELECT COUNT(*) FROM Cache WHERE rowid > ?"
        num_new = connection.execute(query, [since.last_row]).fetchone()[0]
        return (
            now.num_rows == since.num_rows + num_new
            and self._row_digest(connection, since.last_row) == since.last_digest
        )

    def _check_rows(self, connection: sqlite3.Connection, condition: str = "TRUE", values: Sequence[int] = ()) -> None:
        # SQLite looks at a million rows in a fraction of the time that Python takes.
        query = f"SELECT {_COLUMNS} FROM Cache WHERE ({condition}) AND ({_OURS}) IS NOT TRUE LIMIT 1"
        for row in connection.execute(query, values):
            self._row(row)
            raise IndexDamagedError(self.path, f"row {row[0]!r:.80} was not written by latentcache")

    def add_many(self, rows: Mapping[str, str], *, remove: Collection[str] = ()) -> set[str]:
        """Add rows in one transaction; keys that have a row keep it. Returns those added. Rows of `remove` go first."""
        with self.transaction() as transaction:
            for key in remove:
                transaction.remove(key)
            return {key for key, value in rows.items() if transaction.add(key, value)}

    def replace_many(self, rows: Mapping[str, str], *, remove: Collection[str] = ()) -> None:
        """Add or replace rows, and remove others, in one transaction."""
        with self.transaction() as transaction:
            for key in remove:
                transaction.remove(key)
            for key, value in rows.items():
                transaction.put(key, value)

    def remove_many(self, keys: Iterable[str]) -> int:
        """Remove rows in one transaction. Returns how many there were."""
        with self.transaction() as transaction:
            return sum([transaction.remove(key) for key in keys])

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
                    yield Transaction(cache)
            finally:
                cache.close()

    def close(self) -> None:
        """Nothing is open between calls; afterwards changes are refused."""
        self._closed = True

    def _open_cache(self) -> diskcache.Cache:
        # As late as possible: opening one writes all its settings, row by row.
        if self._cache is None:
            self._cache = _Cache(str(self.path), timeout=TIMEOUT_S, disk=_TextDisk, **_SETTINGS)
        return self._cache

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self.lock, self._typed_errors():
            connection = connect(self._database, read_only=self.read_only)
            try:
                yield connection
            finally:
                connection.close()

    def _row(self, row: Sequence[Any]) -> tuple[str, str]:
        key, raw, mode, filename, expire_time, value = row
        if type(key) is not str or raw != 1 or mode != MODE_RAW or filename is not None or expire_time is not None:
            raise IndexDamagedError(self.path, f"row {key!r:.80} was not written by latentcache")
        if type(value) is not str:
            raise IndexDamagedError(self.path, f"the value of row {key!r:.80} is not text")
        return key, value

    def _inspect(self) -> set[tuple[str, str]]:
        """Look through a database before diskcache does: it runs stored settings as SQL. Returns (type, name) in it."""
        for name in (DBNAME, *[DBNAME + suffix for suffix in (*JOURNALS, "-shm")]):
            try:
                mode = (self.path / name).lstat().st_mode
            except FileNotFoundError:
                continue  # journals come and go
            if not stat.S_ISREG(mode):
                raise IndexDamagedError(self.path, f"{name} is not a regular file")
        if not self._database.exists():
            raise IndexDamagedError(self.path, "it does not exist")
        self._inspect_journal()
        with self._reading() as connection:
            schema = set(connection.execute("SELECT type, name FROM sqlite_master"))
            if not schema <= _SCHEMA:
                raise IndexDamagedError(self.path, f"it holds {sorted(schema - _SCHEMA)!r:.200}")
            if ("table", "Settings") in schema:
                for name, value in connection.execute("SELECT key, value FROM Settings"):
                    self._inspect_setting(name, value)
        return schema

    def _inspect_setting(self, name: object, value: object) -> None:
        known = type(name) is str and (name in DEFAULT_SETTINGS or name in METADATA)
        if known and not name.startswith("sqlite_"):
            known = type(value) in (int, float) or (type(value) is str and name == "eviction_policy")
        elif known:
            # An index may move between machines with an older and a newer SQLite.
            known = value in (("delete", "wal") if name == "sqlite_journal_mode" else (_SETTINGS[name],))
        if not known:
            raise IndexDamagedError(self.path, f"setting {name!r:.80} = {value!r:.80} was not written by latentcache")

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


def _checked_name(text: str) -> str:
    if text == _HISTORY:
        raise StoreError(f"the index keeps the row {text!r} for itself")
    return _checked(text)


def _checked(text: str) -> str:
    if type(text) is not str:
        raise StoreError(f"the index holds text only, got {type(text).__name__}")
    try:
        num_bytes = len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise StoreError(f"the index holds UTF-8 only: {text!r:.100} ({error.reason}); use its digest") from error
    if num_bytes > MAX_TEXT_BYTES:
        raise StoreError(f"the index holds texts of at most {MAX_TEXT_BYTES:,} bytes, got {num_bytes:,}")
    return text
