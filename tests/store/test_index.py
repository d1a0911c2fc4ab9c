from __future__ import annotations

import os
import random
import sqlite3
import threading
import time

import diskcache
import pytest
from helpers.other_users import open_to_others
from hypothesis import given, settings
from hypothesis import strategies as st
from store_samples import fork, run, spawn

from latentcache.errors import IndexDamagedError, ReadOnlyError, StoreBusyError, StoreError
from latentcache.store import Index
from latentcache.store import connection as connection_module
from latentcache.store import index as index_module


@pytest.fixture
def index(tmp_path):
    return Index(tmp_path / "index")


def test_rows(index):
    assert index.add_many({"a": "1", "b": "2"}) == {"a", "b"}
    assert index.add_many({"a": "9", "c": "3"}) == {"c"}
    assert index.items() == {"a": "1", "b": "2", "c": "3"}
    index.replace_many({"a": "9", "d": "4"}, remove=["b"])
    assert index.get("a") == "9" and index.get("b") is None
    assert index.get_many(["a", "b", "d", "a"]) == {"a": "9", "d": "4"}
    assert index.remove_many(["a", "a", "zzz"]) == 1
    assert index.items() == {"c": "3", "d": "4"}
    assert Index(index.path).items() == {"c": "3", "d": "4"}


def test_more_keys_than_one_statement_takes(index):
    rows = {str(number): str(-number) for number in range(2500)}
    index.add_many(rows)
    assert index.get_many(rows) == rows == index.items()


@given(text=st.text())
@settings(deadline=None, max_examples=20)
def test_any_text_comes_back_or_is_refused(text, tmp_path_factory):
    index = Index(tmp_path_factory.getbasetemp() / "texts")
    try:
        index.replace_many({text: text})
    except StoreError:
        with pytest.raises(UnicodeEncodeError):
            text.encode()
    else:
        assert index.get(text) == text


@pytest.mark.parametrize("value", ["\ud800", "x" * (1 << 20) + "x", b"bytes", 7, None])
def test_other_values_are_refused(index, value):
    with pytest.raises(StoreError, match="the index holds"):
        index.add_many({"a": "1", "b": value})
    assert index.items() == {}


def test_a_transaction_is_all_or_nothing(index):
    index.add_many({"a": "1"})
    with pytest.raises(KeyboardInterrupt), index.transaction() as rows:
        rows.put("a", "2")
        rows.add("b", "3")
        assert rows.get("a") == "2" and rows.remove("a")
        raise KeyboardInterrupt
    assert index.items() == {"a": "1"}


def test_the_database_is_set_up_as_it_must_be(index):
    index.add_many({"a": "1"})
    connection = sqlite3.connect(index.path / "cache.db")
    stored = dict(connection.execute("SELECT key, value FROM Settings"))
    (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
    connection.close()
    assert mode == ("wal" if sqlite3.sqlite_version_info >= (3, 51, 3) else "delete")
    assert stored["eviction_policy"] == "none" and stored["sqlite_synchronous"] == 2
    assert stored["sqlite_mmap_size"] == stored["cull_limit"] == stored["statistics"] == 0


def test_no_connection_stays_open(index):
    index.add_many({"a": "1"})
    index.items()
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    names = [os.readlink(link) for link in links if os.path.islink(link)]
    assert not [name for name in names if str(index.path) in name]


def add_rows(path, offset):
    index = Index(path)
    for number in range(40):
        index.add_many({f"{offset}-{number}": "x", f"shared-{number}": str(offset)})


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
    assert len(rows) == 120 and all(rows[f"{offset}-{number}"] == "x" for offset in range(2) for number in range(40))


def test_threads_write_at_once(index):
    threads = [threading.Thread(target=index.add_many, args=({f"{t}-{n}": "x" for n in range(50)},)) for t in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(index.items()) == 200


def test_forks_share_an_index(index):
    index.add_many({"a": "1"})

    def child():
        assert index.get("a") == "1"
        index.add_many({"b": "2"})

    assert run(child) == 0
    index.add_many({"c": "3"})
    assert index.items() == {"a": "1", "b": "2", "c": "3"}


def test_a_fork_waits_for_a_thread_in_the_middle_of_a_change(index):
    inside, leave = threading.Event(), threading.Event()

    def change():
        with index.transaction() as rows:
            rows.put("thread", "1")
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=change)
    thread.start()
    inside.wait(60)
    threading.Timer(0.2, leave.set).start()
    assert run(lambda: index.add_many({"child": "2"})) == 0
    thread.join(60)
    assert index.items() == {"thread": "1", "child": "2"}


def test_a_lock_held_elsewhere_is_busy(index, monkeypatch):
    monkeypatch.setattr(index_module, "TIMEOUT_S", 0.05)
    other = sqlite3.connect(index.path / "cache.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    busy = Index(index.path)
    monkeypatch.setattr("diskcache.Cache._sql_retry", property(lambda self: self._sql))
    with pytest.raises(StoreBusyError):
        busy.add_many({"a": "1"})
    other.execute("ROLLBACK")
    other.close()
    busy.add_many({"a": "1"})
    assert index.items() == {"a": "1"}


def test_opening_waits_for_a_change_that_is_made_elsewhere(index, monkeypatch):
    """diskcache has no timeout while it opens a database, and tries all its statements again but the last one."""
    index.add_many({"a": "1"})
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
        assert Index(index.path).add_many({"b": "2"}) == {"b"}
    finally:
        for timer in timers:
            timer.join()
        other.close()
    assert len(timers) == 1


def test_read_only(index):
    index.add_many({"a": "1"})
    before = {file.name: file.stat().st_mtime_ns for file in index.path.iterdir()}
    reader = Index(index.path, read_only=True)
    assert reader.items() == {"a": "1"}
    with pytest.raises(ReadOnlyError):
        reader.add_many({"b": "2"})
    assert {file.name: file.stat().st_mtime_ns for file in index.path.iterdir()} == before
    with pytest.raises(IndexDamagedError, match="does not exist"):
        Index(index.path / "none", read_only=True)
    assert not (index.path / "none").exists()


def test_a_closed_index_takes_no_changes(index):
    index.close()
    with pytest.raises(StoreError, match="closed"):
        index.add_many({"a": "1"})


def test_damage_is_a_typed_error_and_never_a_wrong_row(index):
    """Flipped bits, and a database cut short, at random places: right rows, or IndexDamagedError."""
    rows = {f"key-{number:03}": f"value-{number:03}" * 5 for number in range(60)}
    index.add_many(rows)
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
            # SQLite has no checksums: a flip inside a text goes through. What rests on a row checks its digest.
            assert all(type(key) is str and type(value) is str for key, value in found.items())
    assert num_refused > 20


@pytest.mark.parametrize("data", [b"", b"not a database" * 500, bytes(8192)], ids=["empty", "garbage", "zeros"])
def test_a_file_that_is_no_database(index, data):
    index.add_many({"a": "1"})
    (index.path / "cache.db").write_bytes(data)
    if data:
        with pytest.raises(IndexDamagedError):
            Index(index.path)
    else:
        assert Index(index.path).items() == {}


def pages_of(index, since=None):
    with index.reading(since) as reading:
        return None if reading is None else (list(reading.pages), reading.point)


def test_pages_are_all_rows_and_no_row_of_others_passes(index, monkeypatch):
    rows = {f"key {number}": str(number) for number in range(25)}
    index.add_many(rows)
    index.remove_many(["key 3", "key 10"])
    del rows["key 3"], rows["key 10"]
    for size in (1, 7, 23, 100):
        monkeypatch.setattr(index_module, "_PAGE_ROWS", size)
        pages, _ = pages_of(index)
        assert [row for page in pages for row in page] == list(rows.items())
        assert max(map(len, pages)) <= size
    connection = sqlite3.connect(index.path / "cache.db")
    with connection:
        connection.execute("UPDATE Cache SET raw = NULL WHERE key = 'key 20'")
    connection.close()
    for call in (index.items, lambda: pages_of(index)):
        with pytest.raises(IndexDamagedError, match="key 20"):
            call()


def test_what_was_added_later_is_read_alone(index):
    assert pages_of(index) == ([], None)
    index.add_many({"a": "1"})
    _, point = pages_of(index)
    assert pages_of(index, point) == ([], point)
    index.add_many({"a": "9", "b": "2"}, remove=["zzz"])
    (page,), later = pages_of(index, point)
    assert page == [("b", "2")]
    assert pages_of(index, later) == ([], later)
    assert index.remove_many(["zzz"]) == 0
    assert pages_of(index, later) == ([], later)


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index.remove_many(["b"]),
        lambda index: index.replace_many({"a": "1"}),
        lambda index: index.add_many({"c": "3"}, remove=["a"]),
        lambda index: (index.remove_many(["b"]), index.add_many({"b": "2"})),
    ],
    ids=["remove", "replace", "add and remove", "remove and add"],
)
def test_after_a_removal_or_a_replacement_all_is_read(index, change):
    index.add_many({"a": "1", "b": "2"})
    _, point = pages_of(index)
    change(index)
    assert pages_of(index, point) is None


def test_a_change_that_was_rolled_back_is_none(index):
    index.add_many({"a": "1"})
    _, point = pages_of(index)
    with pytest.raises(KeyboardInterrupt), index.transaction() as rows:
        rows.remove("a")
        raise KeyboardInterrupt
    assert pages_of(index, point) == ([], point)


def test_a_database_that_was_put_back_is_told(index):
    """From a copy: its history is the same, and rows may have been added since, as many or more."""
    index.add_many({"a": "1"})
    copy = (index.path / "cache.db").read_bytes()
    index.add_many({"b": "2"})
    _, point = pages_of(index)
    (index.path / "cache.db").write_bytes(copy)
    assert pages_of(index, point) is None
    for name in ("c", "d"):
        index.add_many({name: "2"})
        assert pages_of(index, point) is None
    (index.path / "cache.db").write_bytes(copy)
    index.add_many({"b": "2"})
    assert pages_of(index, point) == ([], point)  # the very same rows


def test_rows_that_an_older_version_removed_are_told(index):
    """It notes no history, but diskcache's triggers count."""
    index.add_many({"a": "1", "b": "2", "c": "3"})
    _, point = pages_of(index)
    connection = sqlite3.connect(index.path / "cache.db")
    with connection:
        connection.execute("DELETE FROM Cache WHERE key = 'b'")
    connection.close()
    assert pages_of(index, point) is None
    assert [row for page in pages_of(index)[0] for row in page] == [("a", "1"), ("c", "3")]


def test_the_row_of_the_history_is_out_of_reach(index):
    name = index_module._HISTORY
    calls = [
        lambda: index.get(name),
        lambda: index.add_many({name: "1"}),
        lambda: index.replace_many({name: "1"}),
        lambda: index.remove_many([name]),
    ]
    index.add_many({"a": "1"})
    for call in calls:
        with pytest.raises(StoreError, match="for itself"):
            call()
    assert index.items() == {"a": "1"}


# Readers that may not write ----------------------------------------------------------------------------------------


def read_while_a_writer_writes(path, num_reads):
    os.setgid(65534)
    os.setuid(65534)
    index = Index(path, read_only=True)
    for _ in range(num_reads):
        rows = index.items()
        assert len(rows) % 10 == 0 and rows["0"] == "0"  # a transaction is seen whole, or not at all


@pytest.mark.skipif(os.getuid() != 0, reason="needs another user")
@pytest.mark.parametrize("mode", ["delete", "wal"])
def test_a_reader_without_rights_reads_while_a_writer_writes(index, mode):
    index.add_many({str(number): str(number) for number in range(10)})
    connection = sqlite3.connect(index.path / "cache.db")
    connection.execute(f"PRAGMA journal_mode = {mode}")
    connection.execute("UPDATE Settings SET value = ? WHERE key = 'sqlite_journal_mode'", [mode])
    connection.commit()
    connection.execute("SELECT COUNT(*) FROM Cache").fetchone()  # in WAL mode its files stay while this is open
    open_to_others(index.path)
    process = fork.Process(target=read_while_a_writer_writes, args=(index.path, 60))
    process.start()
    start = 10
    while process.is_alive():
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            row = "INSERT INTO Cache (key, raw, store_time, size, mode, value) VALUES (?, 1, 0, 0, 1, '0')"
            connection.executemany(row, [(str(number),) for number in range(start, start + 10)])
        start += 10
        time.sleep(0.005)  # SQLite's locks are not fair
    connection.close()
    process.join(60)
    assert process.exitcode == 0 and start > 20


def read_a_database_at_rest(path, expected):
    os.setgid(65534)
    os.setuid(65534)
    connection_module.TIMEOUT_S = connection_module._PASSING_S = 0.2
    try:
        assert Index(path, read_only=True).items() == {"a": "1"}
    except StoreError as error:
        assert type(error) is expected, repr(error)
    else:
        assert expected is None


@pytest.mark.skipif(os.getuid() != 0, reason="needs another user")
@pytest.mark.parametrize(("leftover", "expected"), [(None, None), ("cache.db-wal", StoreBusyError)])
def test_a_database_in_wal_mode_that_nobody_has_open(index, leftover, expected):
    index.add_many({"a": "1"})
    connection = sqlite3.connect(index.path / "cache.db")
    connection.execute("PRAGMA journal_mode = wal")
    connection.execute("UPDATE Settings SET value = 'wal' WHERE key = 'sqlite_journal_mode'")
    connection.commit()
    connection.close()
    if leftover:
        (index.path / leftover).write_bytes(bytes(100))
    open_to_others(index.path)
    assert run(read_a_database_at_rest, index.path, expected) == 0


@pytest.mark.skipif(os.getuid() != 0, reason="needs another user")
def test_a_dead_writers_journal_is_not_damage(index):
    """It must be rolled back, which is a write."""
    index.add_many({"a": "1"})

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
    assert index.items() == {"a": "1"}
