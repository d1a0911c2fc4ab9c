from __future__ import annotations

import os
import random
import shutil
import sqlite3
import threading
import time
from contextlib import closing

import diskcache
import pytest
from helpers.other_users import open_to_others
from store_samples import fork, run, spawn

from latentcache.errors import IndexDamagedError, ReadOnlyError, StoreBusyError, StoreError
from latentcache.store import Index
from latentcache.store import index as index_module
from latentcache.store.index import MAX_VALUE_BYTES


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


def test_more_keys_than_one_statement_takes(index):
    rows = {str(number): b"%d" % -number for number in range(2500)}
    index.replace_many(rows)
    assert index.get_many(rows) == rows == index.items()


@pytest.mark.parametrize("value", ["text", bytes(MAX_VALUE_BYTES + 1), bytearray(b"1"), 7, None])
def test_other_values_are_refused(index, value):
    with pytest.raises(StoreError, match="a row of the index"):
        add(index, {"a": b"1", "b": value})
    assert index.items() == {}


def test_the_largest_row_is_read(index):
    value = bytes(MAX_VALUE_BYTES)
    index.replace_many({"a": value})
    assert index.items() == index.get_many(["a"]) == {"a": value}


def test_a_transaction_is_all_or_nothing(index):
    add(index, {"a": b"1"})
    with pytest.raises(KeyboardInterrupt), index.transaction() as rows:
        rows.put("a", b"2")
        rows.put("b", b"3")
        assert rows.get("a") == b"2" and rows.remove("a")
        raise KeyboardInterrupt
    assert index.items() == {"a": b"1"}


def test_the_database_is_set_up_as_it_must_be(index):
    add(index, {"a": b"1"})
    connection = sqlite3.connect(index.path / "cache.db")
    stored = dict(connection.execute("SELECT key, value FROM Settings"))
    (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
    connection.close()
    assert mode == "delete"
    assert stored["eviction_policy"] == "none" and stored["sqlite_synchronous"] == 3
    assert stored["sqlite_mmap_size"] == stored["cull_limit"] == stored["statistics"] == 0


def test_no_connection_stays_open(index):
    add(index, {"a": b"1"})
    index.items()
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    names = [os.readlink(link) for link in links if os.path.islink(link)]
    assert not [name for name in names if str(index.path) in name]


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


def test_threads_write_at_once(index):
    threads = [
        threading.Thread(
            target=add,
            args=(
                index,
                {f"{t}-{n}": b"x" for n in range(50)},
            ),
        )
        for t in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(index.items()) == 200


def test_forks_share_an_index(index):
    add(index, {"a": b"1"})

    def child():
        assert index.get_many(["a"]) == {"a": b"1"}
        add(index, {"b": b"2"})

    assert run(child) == 0
    add(index, {"c": b"3"})
    assert index.items() == {"a": b"1", "b": b"2", "c": b"3"}


def test_a_fork_waits_for_a_thread_in_the_middle_of_a_change(index):
    inside, leave = threading.Event(), threading.Event()

    def change():
        with index.transaction() as rows:
            rows.put("thread", b"1")
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=change)
    thread.start()
    inside.wait(60)
    threading.Timer(0.2, leave.set).start()
    assert run(lambda: add(index, {"child": b"2"})) == 0
    thread.join(60)
    assert index.items() == {"thread": b"1", "child": b"2"}


def test_a_lock_held_elsewhere_is_busy(index, monkeypatch):
    monkeypatch.setattr(index_module, "TIMEOUT_S", 0.05)
    other = sqlite3.connect(index.path / "cache.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    busy = Index(index.path)
    monkeypatch.setattr("diskcache.Cache._sql_retry", property(lambda self: self._sql))
    with pytest.raises(StoreBusyError):
        add(busy, {"a": b"1"})
    other.execute("ROLLBACK")
    other.close()
    add(busy, {"a": b"1"})
    assert index.items() == {"a": b"1"}


def test_opening_waits_for_a_change_that_is_made_elsewhere(index, monkeypatch):
    """diskcache has no timeout while it opens a database, and tries all its statements again but the last one."""
    add(index, {"a": b"1"})
    other = sqlite3.connect(index._database, isolation_level=None, check_same_thread=False)
    retried = diskcache.Cache._sql_retry.fget
    timers = []

    def then_locked(cache):
        execute = retried(cache)

        def executed(statement, *args):
            found = execute(statement, *args)
            if "Settings_size_delete" in statement:  # the last but one
                other.execute("BEGIN EXCLUSIVE")
                timers.append(threading.Timer(0.1, other.execute, ("ROLLBACK",)))
                timers[-1].start()
            return found

        return executed

    monkeypatch.setattr(diskcache.Cache, "_sql_retry", property(then_locked))
    try:
        assert add(Index(index.path), {"b": b"2"}) == {"b"}
    finally:
        for timer in timers:
            timer.join()
        other.close()
    assert len(timers) == 1


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


def test_a_closed_index_takes_no_changes(index):
    index.close()
    with pytest.raises(StoreError, match="closed"):
        add(index, {"a": b"1"})


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


def test_a_setting_that_cannot_be_found_is_damage(index):
    """diskcache looks up each of its settings, and ends in a ValueError of its own where it does not find one."""
    add(index, {"a": b"1"})
    database = index.path / "cache.db"
    with closing(sqlite3.connect(database)) as connection:
        query = "SELECT rootpage FROM sqlite_master WHERE name = 'sqlite_autoindex_Settings_1'"
        [[page]], [[page_bytes]] = connection.execute(query), connection.execute("PRAGMA page_size")
    clean = database.read_bytes()
    cells = clean[(page - 1) * page_bytes + 64 : page * page_bytes].lstrip(b"\0")
    num_refused = 0
    for at in range(page * page_bytes - len(cells), page * page_bytes - 16, 4):
        database.write_bytes(clean[:at] + bytes(16) + clean[at + 16 :])
        try:
            other = Index(index.path)
            other.replace_many({"b": b"2"})
            assert other.items() == {"a": b"1", "b": b"2"}, f"byte {at}"
        except IndexDamagedError:
            num_refused += 1
    assert num_refused > 0


@pytest.mark.parametrize("data", [b"", b"not a database" * 500, bytes(8192)], ids=["empty", "garbage", "zeros"])
def test_a_file_that_is_no_database(index, data):
    add(index, {"a": b"1"})
    (index.path / "cache.db").write_bytes(data)
    if data:
        with pytest.raises(IndexDamagedError):
            Index(index.path)
    else:
        assert Index(index.path).items() == {}


def read(index, since=None):
    """The rows that came after `since`, where they bring the reader, and whether they are all rows."""
    with index.reading(since) as reading:
        return list(reading.rows), reading.position, reading.is_whole


def test_no_row_of_others_passes(index):
    rows = {f"key {number}": b"%d" % number for number in range(25)}
    index.replace_many(rows)
    index.remove_many(["key 3", "key 10"])
    del rows["key 3"], rows["key 10"]
    assert read(index)[::2] == (list(rows.items()), True)
    connection = sqlite3.connect(index.path / "cache.db")
    with connection:
        connection.execute("UPDATE Cache SET raw = NULL WHERE key = 'key 20'")
    connection.close()
    for call in (index.items, lambda: read(index)):
        with pytest.raises(IndexDamagedError, match="key 20"):
            call()


def test_what_was_added_later_is_read_alone(index):
    rows, empty, _ = read(index)
    assert rows == [] and empty.generation is not None
    assert read(index, empty) == ([], empty, False)
    add(index, {"a": b"1"})
    assert read(index, empty)[::2] == ([("a", b"1")], False)
    _, position, _ = read(index)
    assert read(index, position) == ([], position, False)
    add(index, {"a": b"9", "b": b"2"})
    rows, later, is_whole = read(index, position)
    assert rows == [("b", b"2")] and not is_whole
    assert read(index, later) == ([], later, False)
    assert index.remove_many(["zzz"]) == 0
    assert read(index, later) == ([], later, False)


CHANGES = {
    "remove": lambda index: index.remove_many(["b"]),
    "replace": lambda index: index.replace_many({"a": b"1"}),
    "add and remove": lambda index: (add(index, {"c": b"3"}), index.remove_many(["a"])),
    "remove and add": lambda index: (index.remove_many(["b"]), add(index, {"b": b"2"})),
}


@pytest.mark.parametrize("by", ["this process", "another process"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_after_a_removal_or_a_replacement_all_is_read(index, change, by):
    add(index, {"a": b"1", "b": b"2"})
    _, position, _ = read(index)
    if by == "this process":
        change(index)
    else:
        assert run(change, index) == 0
    rows, later, is_whole = read(index, position)
    assert is_whole and dict(rows) == index.items() and later.generation != position.generation
    assert read(index, later) == ([], later, False)


def test_a_transaction_says_what_it_changed(index):
    add(index, {"a": b"1", "b": b"2"})
    with index.transaction() as rows:
        rows.put("c", b"3")
        rows.put("a", b"4")
        rows.put("a", b"5")
        assert rows.remove("b") and not rows.remove("b")
    assert rows.changed == {"a": b"5", "b": None, "c": b"3"}
    assert index.items() == {"a": b"5", "c": b"3"}, "the row of the generation is not among them"


def test_a_change_that_was_rolled_back_is_none(index):
    add(index, {"a": b"1"})
    _, position, _ = read(index)
    with pytest.raises(KeyboardInterrupt), index.transaction() as rows:
        rows.remove("a")
        raise KeyboardInterrupt
    assert read(index, position) == ([], position, False)


def test_another_index_in_its_place_is_noticed(index):
    """As after a rebuild: it has the same rows in the same order, with other values, and never had any others."""
    add(index, {"a": b"1", "b": b"2"})
    _, position, _ = read(index)
    shutil.rmtree(index.path)
    add(Index(index.path), {"a": b"3", "b": b"4"})
    assert read(index, position)[::2] == ([("a", b"3"), ("b", b"4")], True)


def test_nothing_changes_while_rows_are_read(index):
    rows = {str(number): b"1" for number in range(200)}
    index.replace_many(rows)
    begun = fork.Event()

    def change():
        begun.wait(60)
        add(index, {"later": b"1"})

    process = fork.Process(target=change)
    process.start()
    with index.reading() as reading:
        begun.set()
        time.sleep(0.3)
        assert dict(reading.rows) == rows
    process.join(60)
    assert process.exitcode == 0
    assert read(index, reading.position)[::2] == ([("later", b"1")], False)


# Readers that may not write ----------------------------------------------------------------------------------------


def read_while_a_writer_writes(path, num_reads):
    os.setgid(65534)
    os.setuid(65534)
    index = Index(path, read_only=True)
    for _ in range(num_reads):
        rows = index.items()
        assert len(rows) % 10 == 0 and rows["0"] == b"0"  # a transaction is seen whole, or not at all


@pytest.mark.skipif(os.getuid() != 0, reason="needs another user")
def test_a_reader_without_rights_reads_while_a_writer_writes(index):
    add(index, {str(number): b"%d" % number for number in range(10)})
    connection = sqlite3.connect(index.path / "cache.db")
    open_to_others(index.path)
    process = fork.Process(target=read_while_a_writer_writes, args=(index.path, 60))
    process.start()
    start = 10
    while process.is_alive():
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            row = "INSERT INTO Cache (key, raw, store_time, size, mode, value) VALUES (?, 1, 0, 0, 1, x'30')"
            connection.executemany(row, [(str(number),) for number in range(start, start + 10)])
        start += 10
        time.sleep(0.005)  # SQLite's locks are not fair
    connection.close()
    process.join(60)
    assert process.exitcode == 0 and start > 20


def read_a_database_at_rest(path, expected):
    os.setgid(65534)
    os.setuid(65534)
    index_module._PASSING_S = 0.2
    try:
        assert Index(path, read_only=True).items() == {"a": b"1"}
    except StoreError as error:
        assert type(error) is expected, repr(error)
    else:
        assert expected is None


@pytest.mark.skipif(os.getuid() != 0, reason="needs another user")
def test_a_dead_writers_journal_is_not_damage(index):
    """It must be rolled back, which is a write."""
    add(index, {"a": b"1"})

    def die():
        connection = sqlite3.connect(index.path / "cache.db")
        connection.execute("PRAGMA cache_size = 1")
        connection.execute("BEGIN IMMEDIATE")
        row = "INSERT INTO Cache (key, raw, store_time, size, mode, value) VALUES (?, 1, 0, 0, 1, ?)"
        connection.executemany(row, [(str(number), "x" * 4000) for number in range(100)])
        os._exit(0)

    assert run(die) == 0 and (index.path / "cache.db-journal").stat().st_size
    open_to_others(index.path)
    assert run(read_a_database_at_rest, index.path, ReadOnlyError) == 0
    assert index.items() == {"a": b"1"}
