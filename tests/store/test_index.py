from __future__ import annotations

import os
import pickle
import random
import sqlite3
from contextlib import closing

import pytest
from store_samples import fork, spawn

from latentcache.errors import IndexDamagedError, ReadOnlyError
from latentcache.store import Index


@pytest.fixture
def index(tmp_path):
    return Index(tmp_path / "index")


def add(index, rows):
    """Add rows, and give the names of those that were not there."""
    with index.transaction() as transaction:
        new = {name: value for name, value in rows.items() if transaction.get(name) is None}
        for name, value in new.items():
            transaction.put(name, value)
        return new.keys()


def test_rows(index):
    assert add(index, {"a": b"1", "b": b"2"}) == {"a", "b"}
    assert add(index, {"a": b"9", "c": b""}) == {"c"}
    assert index.items() == {"a": b"1", "b": b"2", "c": b""}
    index.replace_many({"a": b"9", "d": b"\0\xff"})
    assert index.get_many(["a", "x", "d", "a"]) == {"a": b"9", "d": b"\0\xff"} and index.get_many([]) == {}
    assert index.remove_many(["a", "a", "zzz", "b"]) == 2
    assert index.items() == {"c": b"", "d": b"\0\xff"}
    assert Index(index.path).items() == {"c": b"", "d": b"\0\xff"}


def test_a_transaction_is_all_or_nothing(index):
    add(index, {"a": b"1"})
    with pytest.raises(KeyboardInterrupt), index.transaction() as rows:
        rows.put("a", b"2")
        rows.put("b", b"3")
        assert rows.get("a") == b"2" and rows.remove("a")
        raise KeyboardInterrupt
    assert index.items() == {"a": b"1"}


def add_rows(path, offset):
    index = Index(path)
    for number in range(40):
        add(index, {f"{offset}-{number}": b"x", f"shared-{number}": b"%d" % offset})


@pytest.mark.parametrize("context", [fork, spawn], ids=["fork", "spawn"])
def test_processes_write_at_once(tmp_path, context):
    path = tmp_path / "index"
    processes = [context.Process(target=add_rows, args=(path, offset)) for offset in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    rows = Index(path).items()
    assert len(rows) == 120 and all(rows[f"{offset}-{number}"] == b"x" for offset in range(2) for number in range(40))


def test_read_only(index):
    add(index, {"a": b"1"})
    before = {file.name: file.stat().st_mtime_ns for file in index.path.iterdir()}
    reader = Index(index.path, read_only=True)
    assert reader.items() == {"a": b"1"}
    with pytest.raises(ReadOnlyError):
        add(reader, {"b": b"2"})
    assert {file.name: file.stat().st_mtime_ns for file in index.path.iterdir()} == before
    with pytest.raises(IndexDamagedError, match="does not exist"):
        Index(index.path / "none", read_only=True)
    assert not (index.path / "none").exists()


def test_damage_is_a_typed_error_and_never_a_wrong_row(index):
    """Flipped bits, and a database cut short, at random places: right rows, or IndexDamagedError."""
    rows = {f"key-{number:03}": b"value-%03d" % number * 5 for number in range(60)}
    add(index, rows)
    database = index.path / "cache.db"
    clean = database.read_bytes()
    source = random.Random(2)
    num_refused = 0
    for attempt in range(150):
        data = bytearray(clean)
        if attempt % 5:
            for _ in range(8):
                data[source.randrange(len(data))] ^= 1 << source.randrange(8)
        else:
            del data[source.randrange(len(data)) :]
        database.write_bytes(data)
        try:
            found = Index(index.path, read_only=True).items()
        except IndexDamagedError:
            num_refused += 1
        else:
            # SQLite has no checksums: a flip inside a value goes through. Rows have checksums of their own.
            assert all(type(key) is str and type(value) is bytes for key, value in found.items())
    assert num_refused > 20


class Bomb:
    """Unpickled, it makes a folder."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("name", ["a", "generation", "new"])
def test_nothing_is_unpickled(index, tmp_path, name):
    add(index, {"a": b"1"})
    with closing(sqlite3.connect(index.path / "cache.db")) as connection, connection:
        row = "INSERT OR REPLACE INTO Cache (key, raw, store_time, size, mode, value) VALUES (?, 1, 0, 0, 4, ?)"
        connection.execute(row, (name, pickle.dumps(Bomb(tmp_path / "exploded"))))
    with pytest.raises(IndexDamagedError):
        Index(index.path).items()
    with pytest.raises(IndexDamagedError):
        add(Index(index.path), {name: b"2"})
    assert not (tmp_path / "exploded").exists()
