"""A store with a snapshot of its index is, to the last detail, one without: whatever happens to the file."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.other_users import open_to_others
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from store_samples import fork, key, run, same, sample, samples

from latentcache.store import DiskStore
from latentcache.store import mirror as mirror_module
from latentcache.store import snapshot as snapshot_module
from latentcache.store.upkeep import compact, prune, rebuild

NUMBERS = range(14)


@pytest.fixture(autouse=True)
def _snapshots_of_small_caches(monkeypatch):
    monkeypatch.setattr(mirror_module, "SNAPSHOT_MIN_ROWS", 0)


@pytest.fixture
def root(tmp_path):
    return tmp_path / "cache"


def plain(store):
    """What the index says, read row by row, without anything that memory holds."""
    rows = store.catalog.index.items()
    return {name: text for name, text in rows.items() if ":" not in name}


def assert_in_step(store):
    rows = plain(store)
    assert {key: location.to_text() for key, location in store.catalog.locations().items()} == rows
    assert sum(store.stats().num_entries.values()) == len(rows)
    if rows:
        locations = store.catalog.look_up(list(rows))
        assert [location.to_text() for location in locations] == list(rows.values())


def used_snapshot(root, **options):
    """A store, and whether it was opened without reading all rows."""
    calls = []
    real = mirror_module.read_table
    try:
        mirror_module.read_table = lambda *arguments: (calls.append(1), real(*arguments))[1]
        store = DiskStore(root, **options)
    finally:
        mirror_module.read_table = real
    return store, not calls


def filled(root, *numbers):
    with DiskStore(root) as store:
        for number in numbers:
            store.add(samples(number))
    assert (root / "index" / "entries.snapshot").exists()


def test_an_opening_reads_the_snapshot_and_what_is_new(root):
    filled(root, *range(4))
    with DiskStore(root) as store:
        store.catalog.save = lambda: None
        store.add(samples(4, 5))
    for read_only in (True, False):
        store, used = used_snapshot(root, read_only=read_only)
        with store:
            assert used and set(store.keys()) == {key(number) for number in range(6)}
            assert [same(store.get(key(number)), sample(number)) for number in range(6)] == [True] * 6
            assert list(store.keys()) == list(plain(store))  # oldest first
            assert_in_step(store)


@pytest.mark.parametrize("what", ["remove", "mark", "compact", "prune", "rebuild"])
def test_a_change_makes_the_snapshot_old(root, what):
    filled(root, *range(6))
    old = (root / "index" / "entries.snapshot").read_bytes()
    with DiskStore(root) as store:
        if what == "remove":
            store.remove([key(0)])
        elif what == "mark":
            store.mark_damaged({key(0): (store.catalog.locate(key(0)), "a test")})
        elif what == "compact":
            compact(store)
        elif what == "prune":
            prune(store, [key(number) for number in range(1, 6)])
        else:
            rebuild(store)
        expected = set(store.keys())
    store, used = used_snapshot(root)
    with store:
        assert used and set(store.keys()) == expected
        assert_in_step(store)
    (root / "index" / "entries.snapshot").write_bytes(old)
    store, used = used_snapshot(root)
    with store:
        assert not used and set(store.keys()) == expected
        assert_in_step(store)


def test_a_snapshot_of_another_cache_is_not_used(root, tmp_path):
    filled(root, *range(4))
    filled(tmp_path / "other", *range(4))
    shutil.copy(tmp_path / "other" / "index" / "entries.snapshot", root / "index" / "entries.snapshot")
    store, used = used_snapshot(root)
    with store:
        assert not used
        assert_in_step(store)
    assert used_snapshot(root)[1]


def test_a_flip_or_a_cut_at_any_byte_is_noticed_and_mended(root, caplog):
    filled(root, *range(3))
    path = root / "index" / "entries.snapshot"
    clean, source = path.read_bytes(), random.Random(1)
    assert snapshot_module.read_snapshot(path, len(clean)) is not None
    for at in range(len(clean)):
        data = bytearray(clean)
        data[at] ^= 1 << source.randrange(8)
        path.write_bytes(data)
        with pytest.raises(snapshot_module.SnapshotDamagedError):
            snapshot_module.read_snapshot(path, len(clean))
        if at % 7 == 0:
            path.write_bytes(clean[:at])
            with pytest.raises(snapshot_module.SnapshotDamagedError):
                snapshot_module.read_snapshot(path, len(clean))
    path.write_bytes(data)
    store, used = used_snapshot(root)
    with store:
        assert not used and "The index is read instead" in caplog.text
        assert_in_step(store)
    assert used_snapshot(root)[1] and path.stat().st_size == len(clean)


def forged(path, change):
    """Write the snapshot with changed arrays or header values, and a digest that fits."""
    snapshot = snapshot_module.read_snapshot(path, 1 << 20)
    values = {name: getattr(snapshot.table, name) for name in snapshot.table.__slots__}
    values = {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in values.items()}
    change(values)
    table = type(snapshot.table)(**values)
    snapshot_module.write_snapshot(path, snapshot_module.Snapshot(snapshot.point, table, snapshot.packs, {}))


def set_to(name, value):
    def change(values):
        values[name][0] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        set_to("packs", 7),
        set_to("specs", 1 << 31),
        set_to("starts", -1),
        set_to("starts", 1 << 62),
        set_to("starts", (1 << 63) - 1),
        set_to("offsets", -1),
        lambda values: values.update(keys=values["keys"][::-1]),
        lambda values: values.update(offsets=values["offsets"][:1]),
        lambda values: values.update(digests=values["digests"][:0]),
        lambda values: values.update(pack_ids=("../../etc/passwd", *values["pack_ids"][1:])),
        lambda values: values["keys"].__setitem__(0, values["keys"][1]),
    ],
    ids=[
        *("pack", "spec", "start below", "start above", "start wraps", "offset", "order", "too few offsets"),
        *("too few digests", "pack id", "twice"),
    ],
)
def test_what_has_a_good_digest_is_still_not_believed(root, change):
    filled(root, 0, 1, 2)
    path = root / "index" / "entries.snapshot"
    forged(path, lambda values: None)
    assert used_snapshot(root)[1]
    forged(path, change)
    with pytest.raises(snapshot_module.SnapshotDamagedError):
        snapshot_module.read_snapshot(path, 1 << 20)
    store, used = used_snapshot(root)
    with store:
        assert not used
        assert_in_step(store)


@pytest.mark.parametrize(("name", "value"), [("last_row", -(1 << 70)), ("last_row", 1 << 70), ("num_rows", -1)])
def test_a_moment_that_no_database_has_is_not_asked_for(root, name, value):
    filled(root, 0, 1)
    path = root / "index" / "entries.snapshot"
    snapshot = snapshot_module.read_snapshot(path, 1 << 20)
    snapshot_module.write_snapshot(path, replace(snapshot, point=replace(snapshot.point, **{name: value})))
    for read_only in (True, False):
        store, used = used_snapshot(root, read_only=read_only)
        with store:
            assert not used
            assert_in_step(store)


def test_a_snapshot_that_is_too_old_and_will_not_be_replaced_goes(root, monkeypatch, caplog):
    filled(root, *range(6))
    path = root / "index" / "entries.snapshot"
    monkeypatch.setattr(mirror_module, "SNAPSHOT_MIN_ROWS", 5)
    with DiskStore(root) as early:
        with DiskStore(root) as store:
            prune(store, [key(0)])
            assert not path.exists(), "it would be read, and warned of, at each opening"
            store.add(samples(*range(1, 8)))
        assert path.exists()
    assert path.exists(), "the earlier store knows nothing of it"
    with DiskStore(root) as store:
        store.remove([key(number) for number in range(1, 7)])
    assert not path.exists()
    assert early.read_only is False and "snapshot" not in caplog.text


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda values: values["offsets"].__iadd__(64),
        lambda values: values["offsets"].fill(1 << 62),
        lambda values: values["digests"].fill(7),
        lambda values: values["packs"].sort(),
    ],
    ids=["near", "far", "digest", "other packs"],
)
def test_wrong_places_are_never_a_wrong_tensor(root, change, read_only):
    """The bytes do not have the digest, so the index is asked again, and it knows better."""
    filled(root, 0, 1, 2)
    forged(root / "index" / "entries.snapshot", change)
    store, used = used_snapshot(root, read_only=read_only)
    with store:
        assert used
        assert [same(store.get(key(number)), sample(number)) for number in range(3)] == [True] * 3
        assert store.damaged() == {}


@pytest.mark.parametrize("kind", ["link", "folder", "pipe", "large", "sparse"])
def test_what_is_no_snapshot_is_left_alone(root, kind, tmp_path):
    filled(root, 0, 1)
    path = root / "index" / "entries.snapshot"
    clean = path.read_bytes()
    path.unlink()
    if kind == "link":
        (tmp_path / "outside").write_bytes(clean)
        path.symlink_to(tmp_path / "outside")
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "large":
        path.write_bytes(clean + bytes(8 << 20))
    else:
        path.touch()
        os.truncate(path, 1 << 42)
    store, used = used_snapshot(root)
    with store:
        assert not used
        assert_in_step(store)
    if kind == "link":
        assert (tmp_path / "outside").read_bytes() == clean


# Deaths and refusals -------------------------------------------------------------------------------------------------


def die_in(root, name, call):
    real, calls = getattr(os, name), itertools.count(1)

    def deadly(*args, **kwargs):
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)

    store = DiskStore(root)
    store.catalog.forget_snapshot()
    setattr(os, name, deadly)
    store.close()


@pytest.mark.parametrize(("name", "call"), [("writev", 1), ("fsync", 1), ("rename", 1), ("fsync", 2)])
@pytest.mark.parametrize("before", [False, True])
def test_a_death_while_it_is_written(root, name, call, before):
    filled(root, *range(4))
    path = root / "index" / "entries.snapshot"
    if not before:
        path.unlink()
    assert run(die_in, root, name, call) == -signal.SIGKILL
    store, used = used_snapshot(root)
    with store:
        assert used == (before or path.exists())
        assert_in_step(store)
    assert [file for file in os.listdir(root / "index") if file.endswith(".tmp")] == []


def write_and_close(root, source):
    for number in itertools.count(source):
        with DiskStore(root) as store:
            store.add(samples(number))
            store.remove([key(number - 3)])


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_kills_at_random(root):
    source = random.Random(6)
    for attempt in range(5):
        process = fork.Process(target=write_and_close, args=(root, attempt * 100))
        process.start()
        until = time.monotonic() + 30
        while not (root / "index" / "entries.snapshot").exists() and time.monotonic() < until:
            time.sleep(0.01)
        process.join(source.uniform(0.1, 0.5))
        process.kill()
        process.join(60)
        with DiskStore(root) as store:
            assert_in_step(store)
            numbers = {key(number): number for number in range(attempt * 100, attempt * 100 + 100)}
            assert all(same(store.get(name), sample(numbers[name])) for name in store.keys() if name in numbers)


def read_as_nobody(root, with_snapshot):
    os.setgid(65534)
    os.setuid(65534)
    store, used = used_snapshot(root, read_only=True)
    with store:
        assert used == with_snapshot
        assert_in_step(store)
        assert same(store.get(key(1)), sample(1))


@pytest.mark.skipif(os.getuid() != 0, reason="needs another user")
@pytest.mark.parametrize("kind", ["there", "none", "old", "forbidden"])
def test_another_user_reads_what_there_is_and_writes_nothing(root, kind):
    filled(root, *range(4))
    path = root / "index" / "entries.snapshot"
    if kind == "none":
        path.unlink()
    elif kind == "forbidden":
        path.chmod(0o600)
    elif kind == "old":
        with DiskStore(root) as store:
            store.catalog.save = lambda: None
            store.remove([key(0)])
    open_to_others(root)
    before = {file: file.stat().st_mtime_ns for file in root.rglob("*")}
    assert run(read_as_nobody, root, kind == "there") == 0
    assert {file: file.stat().st_mtime_ns for file in root.rglob("*")} == before


def test_a_full_disk_is_no_error(root, monkeypatch, caplog):
    with DiskStore(root) as store:
        store.add(samples(0, 1))
        monkeypatch.setattr(os, "writev", lambda fd, views: (_ for _ in ()).throw(OSError(28, "full")))
    monkeypatch.undo()
    assert "no snapshot of the index was written" in caplog.text
    with DiskStore(root) as store:
        assert_in_step(store)


def test_forks_share_the_table_and_see_changes(root):
    filled(root, *range(4))
    store, used = used_snapshot(root)
    with store:
        assert used

        def child():
            assert same(store.get(key(2)), sample(2))
            store.remove([key(2)])
            store.add(samples(7))
            assert_in_step(store)

        assert run(child) == 0
        assert same(store.get(key(7)), sample(7))
        assert set(store.keys()) == {key(number) for number in (0, 1, 3, 7)}
        assert_in_step(store)


# Whatever happens, in any order --------------------------------------------------------------------------------------


def test_keys_to_forget_may_repeat(tmp_path):
    with DiskStore(tmp_path / "cache") as store:
        store.add(samples(0, 1))
        store.catalog.forget([key(0), key(0), key(7)])
        assert store.find([key(0), key(1)]) == {key(0), key(1)}, "the index has it still"


class TwoStores(RuleBasedStateMachine):
    """Two stores on one directory; one sees what the other does, and the snapshot may be lost or spoilt between."""

    @initialize(num=st.integers(0, 6))
    def start(self, num):
        self.folder = tempfile.TemporaryDirectory()
        self.root = Path(self.folder.name) / "cache"
        self.path = self.root / "index" / "entries.snapshot"
        self.old = []
        mirror_module.SNAPSHOT_MIN_ROWS = 1
        self.stores = [DiskStore(self.root), DiskStore(self.root)]
        self.present = set()
        for number in range(num):
            self.add(0, [number])

    def teardown(self):
        mirror_module.SNAPSHOT_MIN_ROWS = 0
        for store in getattr(self, "stores", ()):
            store.close()
        if hasattr(self, "folder"):
            self.folder.cleanup()

    @rule(which=st.integers(0, 1), numbers=st.lists(st.sampled_from(NUMBERS), min_size=1, max_size=4))
    def add(self, which, numbers):
        numbers = list(dict.fromkeys(numbers))
        assert self.stores[which].add(samples(*numbers)) == len(set(numbers) - self.present)
        self.present |= set(numbers)

    @rule(which=st.integers(0, 1), numbers=st.lists(st.sampled_from(NUMBERS), min_size=1, max_size=3))
    def remove(self, which, numbers):
        removed = self.stores[which].remove([key(number) for number in numbers])
        assert removed == len(set(numbers) & self.present)
        self.present -= set(numbers)

    @rule(which=st.integers(0, 1), number=st.sampled_from(NUMBERS))
    def damage(self, which, number):
        if number in self.present:
            store = self.stores[which]
            store.mark_damaged({key(number): (store.catalog.relocate(key(number)), "a test")})
            self.present.discard(number)

    @rule(which=st.integers(0, 1), numbers=st.lists(st.sampled_from(NUMBERS), max_size=3))
    def forget(self, which, numbers):
        self.stores[which].catalog.forget([key(number) for number in numbers])

    @rule(which=st.integers(0, 1))
    def move(self, which):
        compact(self.stores[which])

    @rule(which=st.integers(0, 1), fold=st.booleans())
    def look(self, which, fold):
        store = self.stores[which]
        assert set(store.keys()) == {key(number) for number in self.present}
        if fold:
            store.catalog.mirror.entries.fold()
        assert_in_step(store)

    @rule(which=st.integers(0, 1), read_only=st.booleans())
    def reopen(self, which, read_only):
        self.stores[which].close()
        with DiskStore(self.root, read_only=read_only) as store:
            assert_in_step(store)
        self.stores[which] = DiskStore(self.root)
        assert_in_step(self.stores[which])

    @rule(how=st.sampled_from(["delete", "keep", "put back", "spoil", "cut"]), at=st.floats(0, 0.999))
    def meddle(self, how, at):
        if how == "put back" and self.old:
            self.path.write_bytes(self.old[int(at * len(self.old))])
        if not self.path.exists():
            return
        data = bytearray(self.path.read_bytes())
        if how == "keep":
            self.old.append(bytes(data))
        elif how == "delete":
            self.path.unlink()
        elif how == "spoil" and data:
            data[int(at * len(data))] ^= 1
            self.path.write_bytes(data)
        elif how == "cut":
            self.path.write_bytes(data[: int(at * len(data))])

    @rule(which=st.integers(0, 1))
    def read(self, which):
        for number in self.present:
            assert same(self.stores[which].get(key(number)), sample(number))

    @invariant()
    def the_index_is_right(self):
        if hasattr(self, "stores"):
            assert set(plain(self.stores[0])) == {key(number) for number in self.present}


TestTwoStores = TwoStores.TestCase
TestTwoStores.settings = settings(max_examples=20, stateful_step_count=16, deadline=None)
