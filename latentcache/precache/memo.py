"""The memo: what a cache directory remembers, so that it need not be found out again."""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from blake3 import blake3

from latentcache.errors import StoreError
from latentcache.utils import sqlite_codes
from latentcache.utils.durable_files import remove_whole

FLUSH_ROWS = 1000
TIMEOUT_S = 60.0
KEPT_DAYS = 180
"""A row that nobody asked for in so many days is forgotten."""
_NOTED_DAYS = 30
"""How old the note of a row's last use may become: writing it in each run would cost as much as reading it."""
_CHECKSUM_BYTES = 8
_NAMES_AT_ONCE = 500
_DAMAGE = {0, sqlite_codes.ERROR, sqlite_codes.CORRUPT, sqlite_codes.NOTADB, sqlite_codes.FORMAT}
"""Errors that say that the file is no memo; others may pass."""

logger = logging.getLogger("latentcache")


class Memo(MutableMapping[str, str]):
    """Text by name in an SQLite database: digests of files, sizes of entries, ranks' failures.

    Rows are written in groups, and by `flush` and `close`; other processes see them then. Each has a checksum, and one
    that does not fit is none. A damaged memo is removed, whenever that is noticed: then files are read again. What
    nobody asks for in KEPT_DAYS is forgotten. Threads may share one. StoreError where it cannot be read or written now;
    one that was opened for reading is then taken as empty. Without a path it is in memory, until it is closed.
    """

    def __init__(self, path: str | Path | None = None, *, read_only: bool = False):
        self.is_shared = path is not None
        """Whether other processes see it."""
        self._path, self._read_only = Path(path or "").absolute(), read_only
        self._lock = threading.RLock()
        self._new: dict[str, str] = {}
        self._today = int(time.time() / 86400)
        self._database: sqlite3.Connection | None = None
        self._execute("SELECT 1")

    def __getitem__(self, name: str) -> str:
        return self.get_many([name])[name]

    def __setitem__(self, name: str, value: str) -> None:
        with self._lock:
            self._new[name] = value
            if len(self._new) >= FLUSH_ROWS:
                self.flush()

    def __delitem__(self, name: str) -> None:
        with self._lock:
            if name not in self:
                raise KeyError(name)
            self._new.pop(name, None)
            self._execute("DELETE FROM memo WHERE name = ?", [_row_of(name)])

    def __iter__(self) -> Iterator[str]:
        with self._lock:
            return iter(self._new.keys() | {_name_of(row) for (row,) in self._execute("SELECT name FROM memo")})

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def get_many(self, names: Iterable[str]) -> dict[str, str]:
        """The texts of those names that this process has written or, by now, another one."""
        found, wanted = dict[str, str](), list(names)
        with self._lock:
            for start in range(0, len(wanted), _NAMES_AT_ONCE):
                asked = [_row_of(name) for name in wanted[start : start + _NAMES_AT_ONCE]]
                query = f"SELECT name, day, value FROM memo WHERE name IN ({', '.join('?' * len(asked))})"
                for row, day, value in self._execute(query, asked):
                    text = value[_CHECKSUM_BYTES:]
                    if value == _checksum(row, text) + text:
                        name = _name_of(row)
                        found[name] = text.decode()
                        if day < self._today - _NOTED_DAYS:  # written again, with the day of today
                            self._new.setdefault(name, found[name])
                if len(self._new) >= FLUSH_ROWS:
                    self.flush()
            return found | {name: self._new[name] for name in wanted if name in self._new}

    def flush(self) -> None:
        """Write the new rows. A memo that was opened for reading has them in memory only."""
        with self._lock:
            if self._new and not self._read_only:
                rows = [(_row_of(name), text.encode()) for name, text in self._new.items()]
                values = [(name, self._today, _checksum(name, text) + text) for name, text in rows]
                self._execute("REPLACE INTO memo VALUES (?, ?, ?)", *values)
                self._new = {}

    def close(self) -> None:
        """Write the new rows, forget the old ones, and close the database."""
        with self._lock:
            self.flush()
            self._execute("DELETE FROM memo WHERE day < ?", [self._today - KEPT_DAYS])
            self._disconnect()

    def _execute(self, query: str, *values: Sequence[Any], is_again: bool = False) -> list[Any]:
        """What a query gives, in a new database if this one is damaged. One that changes rows takes values of many."""
        try:
            self._database = self._database or self._connected()
            with self._database as database:
                if query.startswith("SELECT"):
                    return database.execute(query, *values).fetchall()
                if not self._read_only:
                    database.executemany(query, values)
                return []
        except sqlite3.Error as error:
            self._disconnect()
            if self._read_only:
                logger.warning("memo of digests not used: %s: %s", self._path, error)
                self._database = self._connected(is_empty=True)
            elif is_again or not self._is_damage(error):
                raise StoreError(
                    f"{self._path}: the memo of digests cannot be used now: {error}. Fix the cause, or remove the "
                    "file, and run the same command: then all files are read again"
                ) from error
            else:
                logger.warning("memo of digests removed, files will be read again: %s: %s", self._path, error)
                remove_whole(self._path)
                remove_whole(self._path.with_name(f"{self._path.name}-journal"))
        return self._execute(query, *values, is_again=True)

    def _is_damage(self, error: sqlite3.Error) -> bool:
        """Whether the error says that the file is no memo. Without a file nothing is there to be removed."""
        return self.is_shared and sqlite_codes.primary_code(error) in _DAMAGE

    def _connected(self, *, is_empty: bool = False) -> sqlite3.Connection:
        """A connection to the file; to an empty database in memory where it is only read, and not there."""
        is_there = os.path.lexists(self._path)
        is_empty = is_empty or not self.is_shared or (self._read_only and not is_there)
        if is_there and not is_empty and not self._path.is_file():  # SQLite would wait for a named pipe
            raise sqlite3.DatabaseError("it is no file")
        uri = "file::memory:" if is_empty else f"{self._path.as_uri()}?mode={'ro' if self._read_only else 'rwc'}"
        database = sqlite3.connect(
            uri, uri=True, timeout=TIMEOUT_S, isolation_level="IMMEDIATE", check_same_thread=False
        )
        if is_empty or not self._read_only:
            # A journal, and not WAL: that fails on network file systems, where ranks of several machines share a memo.
            database.execute("PRAGMA synchronous = NORMAL")
            database.execute(
                "CREATE TABLE IF NOT EXISTS memo (name BLOB PRIMARY KEY, day INTEGER, value BLOB) WITHOUT ROWID"
            )
        return database

    def _disconnect(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None


def _row_of(name: str) -> bytes:
    # Names may be paths with broken encodings.
    return name.encode("utf-8", "surrogatepass")


def _name_of(row: bytes) -> str:
    return row.decode("utf-8", "surrogatepass")


def _checksum(name: bytes, text: bytes) -> bytes:
    return blake3(name + text).digest(_CHECKSUM_BYTES)
