"""`prune` with `max_bytes`: the longest unused goes first, and never what a manifest or a running reader needs."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import pytest
import torch

from latentcache import LatentCache
from latentcache.dataset.manifest import Manifest
from latentcache.dataset.manifest_folder import ManifestFolder, keys_in_use
from latentcache.dataset.row_table import Ref, Row
from latentcache.errors import StoreBusyError
from latentcache.identity import key_of
from latentcache.store import DiskStore
from latentcache.store.upkeep import prune
from latentcache.types import Crop, Entry, Geometry, Record, Size

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


def test_the_longest_unused_goes_first_and_what_is_in_use_stays(cache: Path) -> None:
    def one_less(num: int) -> None:
        """Free the bytes of so many entries."""
        limit = packs_bytes(cache) - num * entry(0).num_bytes
        planned = shrink(cache, limit, dry_run=True)
        there = left(cache)
        report = shrink(cache, limit)
        assert report.num_entries == planned.num_entries == len(there - left(cache))
        assert report.file_bytes_left == packs_bytes(cache) <= limit

    one_less(2)  # the header of the pack that stays counts too, so that the next one goes as a whole
    assert left(cache) == {0, 4, 5, 6, 7}
    with LatentCache(cache) as reader:  # this is a use
        assert torch.equal(reader.get(key(5)).tensors["moments"], entry(5).tensors["moments"])
    one_less(1)
    assert left(cache) == {0, 4, 5}
    shrink(cache, 1 << 40)
    assert left(cache) == {0, 4, 5}
    assert shrink(cache, 0).file_bytes_left > 0 and left(cache) == {0, 4}


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


def test_a_reader_of_another_process_counts_until_it_is_killed(cache: Path) -> None:
    context = multiprocessing.get_context("fork")
    ready, done = context.Event(), context.Event()
    process = context.Process(target=hold_a_reader, args=(str(cache), ready, done))
    process.start()
    assert ready.wait(60)
    write_manifest(cache, {0})
    with pytest.raises(StoreBusyError):
        shrink(cache, 0)
    process.kill()
    process.join(60)
    shrink(cache, 0)
    assert left(cache) == {0}


def test_a_caption_ref_counts_too(cache: Path) -> None:
    row = Row("a", "a", None, (), (Ref.of_text("a", key(7)),))
    ManifestFolder(cache / "manifests").write(Manifest("texts", "train", 1, COMMON, {"a": row}))
    shrink(cache, 0)
    assert left(cache) == {0, 4, 7}


def test_packs_in_which_nothing_is_live_go_with_the_others(tmp_path: Path) -> None:
    with DiskStore(tmp_path / "cache") as store:
        for first in range(0, 6, 2):
            store.add([entry(first), entry(first + 1)])
            os.utime(pack_of(store, first), (LONG_AGO + first, LONG_AGO + first))
        store.remove([key(2), key(3)])
        assert prune(store, {key(1), key(5)}, max_bytes=1000).num_entries == 2
        assert store.find([key(number) for number in range(6)]) == {key(1), key(5)}


def test_what_another_process_has_stored_is_not_kept_twice(tmp_path: Path) -> None:
    with DiskStore(tmp_path / "cache") as store, DiskStore(tmp_path / "cache") as other:
        other.add([entry(0), entry(1)])
        with store.writer() as writer:
            writer.add(entry(0))
            writer.add(entry(1))
            writer.seal()
            assert (writer.num_added, writer.bytes_written) == (0, 0)
        assert store.stats().num_packs == 1
