"""The memo: facts that a cache directory remembers instead of recomputing them."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from blake3 import blake3

from latentcache.errors import StoreError

FLUSH_ROWS = 1000
TIMEOUT_S = 60.0
_CHECKSUM_BYTES = 8
_NAMES_AT_ONCE = 500
_CODEC = "utf-8", "surrogatepass"  # names may be paths in a broken encoding
_TABLE = "CREATE TABLE IF NOT EXISTS memo (name BLOB PRIMARY KEY, value BLOB) WITHOUT ROWID"


class Memo(MutableMapping[str, str]):
    """Text by name in an SQLite database: digests of files, sizes of entries, failures of ranks.

    Rows are written in groups, and by `flush` and `close`; only then do other processes see them. Each row has a
    checksum; a damaged row counts as absent. Rows of files that are gone stay: the memo's file can be removed at any
    time. Thread-safe. Raises StoreError if the file cannot be read or written; a damaged file is also removed. Without
    a path, the memo is in memory only.
    """

    def __init__(self, path: str | Path | None = None, *, read_only: bool = False):
        self.is_shared = path is not None
        """Whether other processes can see the memo."""
        self._path, self._read_only = Path(path or "").absolute(), read_only
        self._lock = threading.RLock()
        self._new: dict[str, str] = {}
        is_file = self.is_shared and (not read_only or os.path.lexists(self._path))
        uri = f"{self._path.as_uri()}?mode={'ro' if read_only else 'rwc'}" if is_file else "file::memory:"
        with self._errors():
            # A rollback journal, because WAL fails on network file systems, where machines share a memo.
            self._database = sqlite3.connect(uri, uri=True, timeout=TIMEOUT_S, check_same_thread=False)
            if not (is_file and read_only):
                self._database.execute(_TABLE)

    def __getitem__(self, name: str) -> str:
        return self.get_many([name])[name]

    def __setitem__(self, name: str, value: str) -> None:
        with self._lock:
            self._new[name] = value
            if len(self._new) >= FLUSH_ROWS:
                self.flush()

    def __delitem__(self, name: str) -> None:
        with self._lock:
            self._new.pop(name, None)
            self._write("DELETE FROM memo WHERE name = ?", [(name.encode(*_CODEC),)])

    def __iter__(self) -> Iterator[str]:
        with self._lock:
            rows = self._select("SELECT name FROM memo")
            return iter(self._new.keys() | {row.decode(*_CODEC) for (row,) in rows})

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def get_many(self, names: Iterable[str]) -> dict[str, str]:
        """The texts of those names that this process or, by now, another one has written."""
        found, wanted = dict[str, str](), list(names)
        with self._lock:
            for start in range(0, len(wanted), _NAMES_AT_ONCE):
                asked = {name.encode(*_CODEC): name for name in wanted[start : start + _NAMES_AT_ONCE]}
                query = f"SELECT name, value FROM memo WHERE name IN ({', '.join('?' * len(asked))})"
                for row, value in self._select(query, [*asked]):
                    name = asked.get(row)  # a damaged file may return other names, and values of any type
                    text = value[_CHECKSUM_BYTES:] if isinstance(value, bytes) else b""
                    if name is not None and value == _checked(row, text):
                        found[name] = text.decode()
            return found | {name: self._new[name] for name in wanted if name in self._new}

    def flush(self) -> None:
        """Write the new rows. A read-only memo keeps them in memory."""
        with self._lock:
            if self._new and not self._read_only:
                rows = [(name.encode(*_CODEC), text.encode()) for name, text in self._new.items()]
                values = [(row, _checked(row, text)) for row, text in rows]
                self._write("REPLACE INTO memo (name, value) VALUES (?, ?)", values)
                self._new = {}

    def close(self) -> None:
        """Write the new rows, and close the database."""
        with self._lock:
            self.flush()
            self._database.close()

    def _select(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        with self._errors():
            return self._database.execute(query, values).fetchall()

    def _write(self, query: str, rows: Sequence[Sequence[Any]]) -> None:
        if not self._read_only:
            with self._errors(), self._database as database:
                database.executemany(query, rows)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter from a damaged schema
            remedy = "Fix the cause, or remove the file, which makes the next run read all files again"
            if type(error) in (sqlite3.DatabaseError, UnicodeDecodeError) and not self._read_only:
                # The file is not a database, or damaged.
                self._database.close()
                self._read_only = True  # so that closing the memo writes nothing
                with suppress(OSError):  # Windows cannot remove a file that another process has open
                    self._path.unlink(missing_ok=True)
                    remedy = "It has been removed: run precache again, which reads all files again"
            raise StoreError(f"{self._path}: the memo of digests is unusable: {error}. {remedy}") from error


def _checked(row: bytes, text: bytes) -> bytes:
    """The value of a row: a checksum of name and text, then the text."""
    return blake3(row + text).digest(_CHECKSUM_BYTES) + text
