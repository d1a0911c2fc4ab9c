"""Connections to the index's database for reading, and what SQLite's errors mean."""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path

from latentcache.errors import IndexDamagedError, ReadOnlyError, StorageFullError, StoreBusyError, StoreError

TIMEOUT_S = 60.0
MAX_ROW_BYTES = 1 << 24
"""What SQLite may make of one row."""
_PAGE_BYTES = 4096
_POLL_S = 0.05
_PASSING_S = 2.0
# What SQLite says when it would have to make or change a file to read.
_NEEDS_WRITING = {
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_READONLY_CANTINIT,
    sqlite3.SQLITE_READONLY_DIRECTORY,
    sqlite3.SQLITE_READONLY_RECOVERY,
    sqlite3.SQLITE_READONLY_ROLLBACK,
}


def connect(database: Path, *, read_only: bool) -> sqlite3.Connection:
    """A connection to the database in a transaction that reads: nothing changes under it any more.

    sqlite3.Error, OSError: `typed_error` says what they mean.
    """
    if not read_only:
        # mode=rw: only so can what a dead writer left half done be rolled back.
        return _connect_as(database, "rw")
    until = time.monotonic() + _PASSING_S
    while True:
        try:
            return _connect_as(database, "ro")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode not in _NEEDS_WRITING or os.access(database.parent, os.W_OK):
                raise
            # A live writer's journal can look like a dead one's for a moment.
            if time.monotonic() >= until:
                raise
        time.sleep(_POLL_S)


def _connect_as(database: Path, mode: str) -> sqlite3.Connection:
    connection = sqlite3.connect(f"{database.as_uri()}?mode={mode}", uri=True, timeout=TIMEOUT_S, isolation_level=None)
    try:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_ROW_BYTES)
        connection.execute("BEGIN")
        connection.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()  # the lock is taken here
    except BaseException:
        connection.close()
        raise
    return connection


def typed_error(error: BaseException, database: Path, *, read_only: bool, timed_out: bool = False) -> StoreError:
    """What an error of SQLite or of the system means for the index. `timed_out`: the database was never free."""
    folder = database.parent
    code = getattr(error, "sqlite_errorcode", None)
    primary = None if code is None else code & 0xFF
    if timed_out or primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return StoreBusyError(folder, f"another process held the index for more than {TIMEOUT_S:.0f} s; try again")
    if primary == sqlite3.SQLITE_FULL:
        return StorageFullError(folder, _PAGE_BYTES)
    if primary == sqlite3.SQLITE_READONLY and not read_only and os.access(database, os.W_OK):
        # The files can be written, so it is the database's header that says no.
        return IndexDamagedError(folder, str(error))
    if primary in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM) or isinstance(error, PermissionError):
        return ReadOnlyError(folder, f"the index cannot be written: {error}")
    if primary in (sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_NOMEM) or isinstance(error, OSError):
        return StoreError(f"{folder}: the index cannot be reached: {error}")
    return IndexDamagedError(folder, str(error))
