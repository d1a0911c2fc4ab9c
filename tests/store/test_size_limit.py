"""`prune` with `max_bytes`: the longest unused goes first, and never what a manifest or a running reader needs.

The machine below does the same to a cache and to a dict. LATENTCACHE_LIMIT_STEPS=10000 is the full size.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from store_samples import same

from latentcache import LatentCache
from latentcache.dataset.manifest import Manifest
from latentcache.dataset.manifest_folder import ManifestFolder, keys_in_use
from latentcache.dataset.row_table import Ref, Row
from latentcache.errors import StoreBusyError
from latentcache.identity import key_of
from latentcache.store import DiskStore
from latentcache.store.upkeep import prune
from latentcache.types import Crop, Entry, Geometry, Record, Size

STEPS = int(os.environ.get("LATENTCACHE_LIMIT_STEPS", "300"))
STEPS_PER_RUN = 50
LONG_AGO = 1_000_000_000.0
COMMON = {
    "schema": 1,
    "salt": "",
    "image_encoding": {"scaling_factor": 1.0, "shift_factor": None},
    "text_encoding": {"name": "x"},
}
GEOMETRY = Geometry(Size(64, 64), Size(64, 64), Crop(0, 0), Size(64, 64))


def entry(number: int) -> Entry:
    """Large enough that the header of a pack does not count for much."""
    identity = {"number": number}
    return Entry(Record(key_of(identity), "image", identity, {}), {"moments": torch.full((8, 64, 64), float(number))})


def key(number: int) -> str:
    return entry(number).record.key


def write_manifest(cache: Path, numbers: set[int]) -> None:

    rows = {}
    for number in sorted(numbers):
        row = Row(str(number), str(number), None, (Ref(key(number), GEOMETRY),), ())
        rows[row.sample_id] = row
    ManifestFolder(cache / "manifests").write(Manifest("all", "train", 1, COMMON, rows))


def pack_of(store: DiskStore, number: int) -> Path:
    (location,) = store.look_up([key(number)])
    assert location is not None
    return store.directory.pack_path(location.pack.id)


def packs_bytes(cache: Path) -> int:
    return sum(path.stat().st_size for path in cache.glob("packs/*/*.safetensors"))


def shrink(cache: Path, max_bytes: int | None, **options: bool):
    manifests = ManifestFolder(cache / "manifests")
    return prune(cache, lambda: keys_in_use(manifests), max_bytes=max_bytes, **options)


class SizeLimit(RuleBasedStateMachine):
    """The model: which numbers are there, when the pack of each was last used, and which the manifest has."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = Path(tempfile.mkdtemp(prefix="limit-")) / "cache"
        self.used: dict[int, float] = {}
        self.in_use: set[int] = set()
        self.clock = LONG_AGO
        self.reader: LatentCache | None = None
        self.reader_is_old = False
        DiskStore(self.cache).close()
        write_manifest(self.cache, set())

    def teardown(self) -> None:
        if self.reader is not None:
            self.reader.close()
        shutil.rmtree(self.cache.parent)

    def tick(self) -> float:
        self.clock += 10_000.0
        return self.clock

    def set_use(self, store: DiskStore, number: int) -> None:
        """The pack of this entry was used now, by the model's clock."""
        path, now = pack_of(store, number), self.tick()
        os.utime(path, (now, now))
        for other in self.used:
            if pack_of(store, other) == path:
                self.used[other] = now

    @rule(numbers=st.sets(st.integers(0, 30), min_size=1, max_size=5))
    def add_a_pack(self, numbers: set[int]) -> None:
        new = numbers - self.used.keys()
        with DiskStore(self.cache) as store:
            assert store.add(map(entry, numbers)) == len(new)
            self.used |= dict.fromkeys(new, 0.0)
            if new:
                self.set_use(store, min(new))

    @rule(data=st.data())
    def change_the_manifest(self, data: st.DataObject) -> None:
        self.in_use = data.draw(st.sets(st.sampled_from(sorted(self.used)), max_size=12)) if self.used else set()
        write_manifest(self.cache, self.in_use)
        self.reader_is_old = self.reader is not None

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.used)))
        before = time.time()
        with LatentCache(self.cache) as cache:
            assert same(cache.get(key(number)), entry(number))
            # Every use of this machine is long ago, so that the use is noted.
            assert pack_of(cache.store, number).stat().st_mtime >= before - 1
            self.set_use(cache.store, number)

    @precondition(lambda self: self.reader is None)
    @rule()
    def begin_to_read(self) -> None:
        time.sleep(0.02)  # a file system's clock is coarse
        self.reader, self.reader_is_old = LatentCache(self.cache), False

    @precondition(lambda self: self.reader is not None)
    @rule()
    def end_reading(self) -> None:
        self.reader.close()
        self.reader, self.reader_is_old = None, False

    @rule(share=st.floats(0.0, 1.2), dry_run=st.booleans())
    def limit(self, share: float, dry_run: bool) -> None:
        before = packs_bytes(self.cache)
        max_bytes = int(share * before)
        if self.reader_is_old and not dry_run:
            with pytest.raises(StoreBusyError, match="began before the manifests"):
                shrink(self.cache, max_bytes, dry_run=dry_run)
            return
        report = shrink(self.cache, max_bytes, dry_run=dry_run)
        after = packs_bytes(self.cache)
        with DiskStore(self.cache, read_only=True) as store:
            there = {number for number in self.used if store.find([key(number)])}
            gone = self.used.keys() - there
            if dry_run:
                assert not gone and after == before
                return
            assert report.num_entries == len(gone) and report.file_bytes_left == after
            assert not gone & self.in_use, "an entry of a manifest was removed"
            assert not gone or before > max_bytes, "nothing had to go"
            unused = there - self.in_use
            assert after <= max_bytes or not unused, "more could have been removed"
            if gone and unused:
                assert max(self.used[n] for n in gone) < min(self.used[n] for n in unused), "not the longest unused"
            self.used = {number: self.used[number] for number in there}
            # Packs of which something stayed were rewritten: the copies are as new.
            for number in there:
                if pack_of(store, number).stat().st_mtime > self.clock:
                    self.set_use(store, number)

    @invariant()
    def all_that_is_in_use_is_there(self) -> None:
        with DiskStore(self.cache, read_only=True) as store:
            assert store.find(map(key, self.used)) == set(map(key, self.used))


def test_a_cache_does_as_a_dict() -> None:
    run_state_machine_as_test(
        SizeLimit,
        settings=settings(
            max_examples=max(1, STEPS // STEPS_PER_RUN),
            stateful_step_count=STEPS_PER_RUN,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """Packs of two entries each: 0 and 1 were used first, 6 and 7 last. The manifest has 0 and 4."""
    path = tmp_path / "cache"
    with DiskStore(path) as store:
        for first in range(0, 8, 2):
            store.add([entry(first), entry(first + 1)])
            os.utime(pack_of(store, first), (LONG_AGO + first, LONG_AGO + first))
    write_manifest(path, {0, 4})
    time.sleep(0.02)
    return path


def left(cache: Path) -> set[int]:
    with DiskStore(cache, read_only=True) as store:
        return {number for number in range(8) if store.find([key(number)])}


@pytest.mark.parametrize("max_bytes", [0, None], ids=["to a limit", "all"])
def test_what_a_running_reader_may_need_stays(cache: Path, max_bytes: int | None) -> None:
    with LatentCache(cache) as reader:
        shrink(cache, 1 << 40)  # it began after the manifest: nothing that it needs can go
        write_manifest(cache, {0})
        with pytest.raises(StoreBusyError, match="began before the manifests"):
            shrink(cache, max_bytes)
        assert shrink(cache, max_bytes, dry_run=True).num_entries > 0, "what would go once it has ended"
        assert torch.equal(reader.get(key(4)).tensors["moments"], entry(4).tensors["moments"])
    shrink(cache, max_bytes)
    assert left(cache) == {0}


def hold_a_reader(path: str, ready, done) -> None:
    with LatentCache(path):
        ready.set()
        done.wait(60)


@pytest.mark.parametrize("kill", [False, True], ids=["ends", "is killed"])
def test_a_reader_of_another_process(cache: Path, kill: bool) -> None:
    context = multiprocessing.get_context("fork")
    ready, done = context.Event(), context.Event()
    process = context.Process(target=hold_a_reader, args=(str(cache), ready, done))
    process.start()
    assert ready.wait(60)
    write_manifest(cache, {0})
    with pytest.raises(StoreBusyError):
        shrink(cache, 0)
    process.kill() if kill else done.set()
    process.join(60)
    shrink(cache, 0)
    assert left(cache) == {0}


def test_a_caption_ref_counts_too(cache: Path) -> None:
    row = Row("a", "a", None, (), (Ref.of_text("a", key(7)),))
    ManifestFolder(cache / "manifests").write(Manifest("texts", "train", 1, COMMON, {"a": row}))
    shrink(cache, 0)
    assert left(cache) == {0, 4, 7}
