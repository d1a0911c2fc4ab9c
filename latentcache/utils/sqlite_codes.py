"""SQLite's primary result codes (https://www.sqlite.org/rescode.html). Python names them since 3.11."""

from __future__ import annotations

ERROR, PERM, BUSY, LOCKED, NOMEM, READONLY, IOERR, CORRUPT = 1, 3, 5, 6, 7, 8, 10, 11
FULL, CANTOPEN, FORMAT, NOTADB = 13, 14, 24, 26

_MESSAGES = {
    "access permission denied": PERM,
    "database is locked": BUSY,
    "database table is locked": LOCKED,
    "out of memory": NOMEM,
    "attempt to write a readonly database": READONLY,
    "disk I/O error": IOERR,
    "database disk image is malformed": CORRUPT,
    "database or disk is full": FULL,
    "unable to open database file": CANTOPEN,
    "auxiliary database format error": FORMAT,
    "file is not a database": NOTADB,
}
"""What sqlite3_errstr says of a code. Errors of Python 3.10 have no code, only this."""


def primary_code(error: BaseException) -> int:
    """The primary code of an error of `sqlite3`; 0 for another error, and for one whose code is not known."""
    code = getattr(error, "sqlite_errorcode", None)
    return _MESSAGES.get(str(error), 0) if code is None else int(code) & 0xFF
