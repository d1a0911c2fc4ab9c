"""Entries read past the page cache."""

from __future__ import annotations

import errno
import json
import logging
import mmap
import os
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from page_cache import cached_pages, drop
from store_samples import key, pack_of, packs, payload, run, sample, samples, where

from latentcache.errors import EntryDamagedError, EntryMissingError, StoreError
from latentcache.store import DiskStore, aio, direct
from latentcache.store.aio import Piece, ReadQueue
from latentcache.store.direct import Slabs
from latentcache.store.stacking import read_batch, stack
from latentcache.store.upkeep import compact, verify
from latentcache.utils.durable_files import BLOCK_BYTES

pytestmark = pytest.mark.usefixtures("past_cache")
NUMBERS = range(8)


@pytest.fixture
def root(tmp_path):
    """Eight entries in four packs, none of which is in the page cache."""
    with DiskStore(tmp_path / "cache") as store:
        for start in range(0, 8, 2):
            store.add(samples(start, start + 1))
        drop(packs(store))
    return tmp_path / "cache"


@pytest.fixture
def tmp_path():
    """A folder on the disk: the other tests' temporary files may be in memory, where each file is in the page cache."""
    with tempfile.TemporaryDirectory(prefix="latentcache-test-", dir="/var/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def droppable(root):
    """Skips where the page cache is all that there is, as on tmpfs."""
    path = next(root.glob("packs/*/*"))
    if is_cached(path, 0):
        pytest.skip("files cannot be dropped from the page cache here")
    drop([path])


@pytest.fixture
def begun(monkeypatch):
    """What is begun to be read: (tag, fd, address, bytes, offset)."""
    pieces, real = [], ReadQueue.submit

    def submit(self, new):
        pieces.extend(new)
        real(self, new)

    monkeypatch.setattr(ReadQueue, "submit", submit)
    return pieces


def is_cached(path, offset):
    return bool(cached_pages(path)[offset // mmap.PAGESIZE])


def values(*numbers):
    return torch.stack([sample(number).tensors["moments"] for number in numbers])


def read(store, *numbers, **options):
    return read_batch(store, [key(number) for number in numbers], **options)["moments"]


@pytest.mark.usefixtures("droppable")
def test_what_is_read_does_not_enter_the_page_cache(root):
    for io, cached in (("direct", False), ("mapped", True)):
        with DiskStore(root, io=io) as store:
            places = [where(store, number) for number in NUMBERS]
            drop(packs(store))
            assert read(store, *NUMBERS).equal(values(*NUMBERS))
            assert read(store, 3, 3, 0).equal(values(3, 3, 0))
            assert all(is_cached(*place) is cached for place in places)
            assert store.get(key(5)).tensors["moments"].equal(sample(5).tensors["moments"])
        drop(packs(store))  # records are read through it


def test_auto_reads_directly_what_memory_cannot_hold(root, monkeypatch, begun):
    num_bytes = sum(path.stat().st_size for path in root.glob("packs/*/*"))
    for memory, is_direct in ((2 * num_bytes, False), (2 * num_bytes - 2, True)):
        monkeypatch.setattr(direct, "host_memory", lambda memory=memory: memory)
        begun.clear()
        with DiskStore(root) as store:
            assert read(store, 4, 1).equal(values(4, 1))
            assert bool(begun) is is_direct is (store.generation is None)
    with DiskStore(root, io="mapped") as store:
        begun.clear()
        assert read(store, 4, 1).equal(values(4, 1)) and not begun


def test_a_cache_that_was_empty_is_decided_when_it_is_read(tmp_path, begun):
    with DiskStore(tmp_path / "new", io="direct") as store:
        assert read_batch(store, []) == {} and not begun
        with pytest.raises(EntryMissingError):
            read(store, 1)
        store.add(samples(1))
        assert read(store, 1).equal(values(1)) and begun


def test_each_entry_is_compared_with_its_digest_once(root, monkeypatch):
    compared, real = [], xxhash.xxh3_128
    monkeypatch.setattr(xxhash, "xxh3_128", lambda data: compared.append(json.loads(data)[0]) or real(data))
    with DiskStore(root, io="direct") as store:
        for _ in range(3):
            read(store, 2, 0, 2)
            store.prefetch([key(0), key(6)])
            read(store, 0, 6)
    assert sorted(compared) == sorted(key(number) for number in (0, 2, 6))


def test_what_the_disk_gives_is_compared_until_it_is_good_whatever_the_page_cache_has(root, monkeypatch):
    compared = []
    monkeypatch.setattr(direct, "payload_digest", lambda key, *_: compared.append(key) or b"the disk is bad")
    with DiskStore(root, io="direct") as store:
        for _ in range(3):
            assert read(store, 2).equal(values(2)), "the page cache has it"
        assert compared == 3 * [key(2)]
        monkeypatch.undo()
        compared.clear()
        assert read(store, 2).equal(values(2)) and not store.damaged()


def overwrite(store, number):
    """Overwrite bytes of an entry, on the disk."""
    path, offset = where(store, number)
    with path.open("r+b") as file:
        file.seek(offset + 100)
        file.write(b"\xff" * 32)
        os.fsync(file.fileno())


@pytest.mark.parametrize("asked", [False, True])
def test_damage_is_found_and_nothing_is_written_to_the_callers_tensor(root, asked):
    with DiskStore(root, io="direct") as store:
        overwrite(store, 5)
        if asked:
            store.prefetch([key(4), key(5)])
        out = {"moments": torch.zeros(2, 4, 8, 8, dtype=torch.float16)}
        with pytest.raises(EntryDamagedError):
            read(store, 4, 5, out=out)
        assert not out["moments"].any() and store.damaged().keys() == {key(5)}
        assert read(store, 4, 7).equal(values(4, 7))


def test_what_was_asked_for_and_then_found_damaged_is_not_returned(root):
    with DiskStore(root, io="direct") as store:
        read(store, 5)
        overwrite(store, 5)
        store.prefetch([key(5)])
        assert verify(store).damaged.keys() == {key(5)}
        assert store.find([key(5)]) == set()
        for call in (lambda: store.rows([key(5)]), lambda: read(store, 5)):
            with pytest.raises(EntryDamagedError):
                call()


def test_a_pack_that_was_cut_short_is_damage_and_not_the_end_of_the_process(root):
    with DiskStore(root, io="direct") as store:
        path, offset = where(store, 5)
        os.truncate(path, offset + len(payload(5)) - 1)
        with pytest.raises(EntryDamagedError, match=r"has .* bytes"):
            read(store, 4, 5)
        assert read(store, 4).equal(values(4))


def test_entries_that_another_process_moved_are_found(root):
    with DiskStore(root, io="direct") as store, DiskStore(root) as other:
        keys = [key(number) for number in NUMBERS]
        rows = store.rows(keys)
        store.prefetch([key(1)])
        assert compact(other).num_packs_after == 1
        assert stack(keys, rows)["moments"].equal(values(*NUMBERS))
        assert read(store, *NUMBERS).equal(values(*NUMBERS))


@pytest.mark.parametrize("where", ["begin", "end", "open"])
def test_a_disk_that_fails_says_nothing_about_the_entries(root, monkeypatch, where):
    with DiskStore(root, io="direct") as store:
        read(store, 0)
        with monkeypatch.context() as patch:
            if where == "begin":
                patch.setattr(ReadQueue, "submit", fail(OSError(errno.EAGAIN, "no more requests")))
            elif where == "end":
                patch.setattr(ReadQueue, "reap", reap_as(-errno.EIO))
            else:
                patch.setattr(direct, "open_regular", fail(StoreError("cannot be read now: too many open files")))
            store.prefetch([key(2), key(3)])
            for _ in range(2):
                with pytest.raises(StoreError, match=r"cannot be read now: .*(no more requests|Input/output|too many)"):
                    read(store, 2, 3)
        assert not store.damaged() and read(store, 2, 3).equal(values(2, 3))


def fail(error):
    def call(*args, **kwargs):
        raise error

    return call


def reap_as(result):
    real = ReadQueue.reap
    return lambda self, at_least: [(tag, result) for tag, _ in real(self, at_least)]


@pytest.mark.parametrize("call", ["submit", "reap"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_reads_that_were_interrupted_leave_nothing_wrong(root, monkeypatch, call, when):
    real = getattr(ReadQueue, call)

    def interrupted(self, *args):
        if when == "after":
            real(self, *args)
        raise KeyboardInterrupt

    with DiskStore(root, io="direct") as store:
        read(store, *NUMBERS)  # verified: nobody would see wrong bytes
        for ask in (True, False):
            with monkeypatch.context() as patch:
                patch.setattr(ReadQueue, call, interrupted)
                with pytest.raises(KeyboardInterrupt):
                    if ask:
                        store.prefetch([key(number) for number in NUMBERS])
                    read(store, *NUMBERS)
            assert read(store, *reversed(NUMBERS)).equal(values(*reversed(NUMBERS)))


def test_a_passing_error_while_asking_is_no_error_of_the_read(root, monkeypatch):
    with DiskStore(root, io="direct") as store:
        read(store, 0)
        with monkeypatch.context() as patch:
            patch.setattr(direct, "open_regular", fail(StoreError("cannot be read now: too many open files")))
            store.prefetch([key(2), key(3)])
        assert read(store, 2, 3).equal(values(2, 3))


def test_no_memory_is_an_error_of_the_read_and_none_of_the_asking(root, monkeypatch):
    with DiskStore(root, io="direct") as store:
        read(store, 0)
        monkeypatch.setattr(Slabs, "take", fail(OSError(errno.ENOMEM, "no memory")))
        store.prefetch([key(2)])
        with pytest.raises(StoreError, match=r"cannot be read now: .*no memory"):
            read(store, 2)
        monkeypatch.undo()
        assert read(store, 2).equal(values(2)) and not store.damaged()


def test_a_pipe_in_a_packs_place_is_damage_and_others_are_read(root, begun):
    with DiskStore(root, io="direct") as store:
        path = pack_of(store, 0)
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(EntryDamagedError, match="not a regular file"):
            read(store, 0)
        assert read(store, *NUMBERS[2:]).equal(values(*NUMBERS[2:])) and begun, "the first pack decides nothing"


def test_what_is_asked_for_is_read_once(root, begun):
    with DiskStore(root, io="direct") as store:
        read(store, 7)
        begun.clear()
        store.prefetch([key(0), key(1)])
        store.prefetch([key(1), key(2), "0" * 64])
        assert len(begun) == 3
        assert read(store, 2, 0).equal(values(2, 0)) and read(store, 1, 1).equal(values(1, 1)) and len(begun) == 3
        assert read(store, 0).equal(values(0)) and len(begun) == 4, "it is not remembered"


def test_what_is_asked_for_is_bounded_and_forgotten(root, begun, monkeypatch):
    monkeypatch.setattr(direct, "MAX_ASKED_BYTES", 1)
    with DiskStore(root, io="direct") as store:
        read(store, 7)
        begun.clear()
        store.prefetch([key(number) for number in NUMBERS])
        assert len(begun) == 1
        for _ in range(direct.MAX_WAITING_READS - 1):
            read(store, 7)
        begun.clear()
        store.prefetch([key(3)])
        assert not begun, "what was asked for first may still be read"
        read(store, 7)
        begun.clear()
        store.prefetch([key(3)])
        assert len(begun) == 1
        assert read(store, *NUMBERS).equal(values(*NUMBERS))


def test_more_fields_than_a_queue_holds(root, monkeypatch):
    monkeypatch.setattr(direct, "DEPTH", 3)
    fields = {f"field_{number}": torch.full((number + 1,), number) for number in range(7)}
    entries = [sample(number, **fields) for number in range(100, 104)]
    with DiskStore(root, io="direct") as store:
        store.add(entries)
        store.prefetch([entry.record.key for entry in entries])
        for _ in range(2):
            batch = read_batch(store, [entry.record.key for entry in entries])
            for name in ("moments", *fields):
                assert batch[name].equal(torch.stack([entry.tensors[name] for entry in entries]))


def test_no_descriptor_stays_open(root):
    with DiskStore(root, io="direct") as store:
        read(store, 0)
        before = len(os.listdir("/dev/fd"))
        store.prefetch([key(1), key(2)])
        read(store, *NUMBERS)
        assert len(os.listdir("/dev/fd")) == before


def test_a_fork_reads_for_itself(root):
    with DiskStore(root, io="direct") as store:
        read(store, 0)
        store.prefetch([key(1), key(2)])

        def child():
            assert read(store, 2, 1, 0).equal(values(2, 1, 0))
            store.close()

        assert run(child) == 0
        assert read(store, 2, 1).equal(values(2, 1))


def test_threads_read_at_once(root):
    wrong = []

    def look(seed):
        order = np.random.default_rng(seed)
        for _ in range(50):
            numbers = order.integers(0, 8, size=order.integers(1, 6)).tolist()
            if seed % 2:
                store.prefetch([key(number) for number in order.permutation(8)[:3].tolist()])
            if not read(store, *numbers).equal(values(*numbers)):
                wrong.append(numbers)

    with DiskStore(root, io="direct") as store:
        threads = [threading.Thread(target=look, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_an_unknown_io_is_refused(root):
    with pytest.raises(StoreError, match="io is 'fast'; it must be one of auto, mapped, direct"):
        DiskStore(root, io="fast")


@pytest.mark.parametrize("why", ["file system", "first read", "machine"])
def test_where_it_cannot_be_done_direct_says_so_and_auto_does_without(root, monkeypatch, caplog, why):
    if why == "file system":
        monkeypatch.setattr(direct, "set_past_cache", lambda fd, on: False)
    elif why == "first read":
        monkeypatch.setattr(ReadQueue, "reap", reap_as(-errno.EINVAL))
    else:
        monkeypatch.setattr(aio.platform, "machine", lambda: "abacus")
    monkeypatch.setattr(direct, "host_memory", lambda: 1)
    with DiskStore(root, io="direct") as store:
        for _ in range(2):
            with pytest.raises(StoreError, match=r"past the page cache: .*io='mapped'"):
                read(store, 1)
    caplog.set_level(logging.INFO, "latentcache")
    with DiskStore(root) as store:
        assert read(store, 1, 2).equal(values(1, 2)) and store.generation is not None
    assert "page cache" in caplog.text


def test_a_thread_without_a_queue_reads_through_the_page_cache(root, monkeypatch, caplog):
    monkeypatch.setattr(direct, "host_memory", lambda: 1)
    found = []
    with DiskStore(root) as store, DiskStore(root, io="direct") as strict:
        read(store, 0)
        read(strict, 0)
        monkeypatch.setattr(ReadQueue, "_call", fail(OSError(errno.EAGAIN, "io_setup: no more")))

        def look():
            found.append(read(store, 1, 2))
            try:
                read(strict, 1)
            except StoreError as error:
                found.append(str(error))

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        monkeypatch.undo()
        assert store.generation is None and read(store, 3).equal(values(3))
    assert found[0].equal(values(1, 2)) and "fs.aio-max-nr" in found[1]
    assert caplog.text.count("It reads through the page cache") == 1


# The queue, and memory to read into ----------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "blocks"
    path.write_bytes(bytes(range(256)) * (BLOCK_BYTES // 256) * 3 + b"end")
    return path


def test_the_queue_reads_what_is_there(file):
    buffer = Slabs().take(8 * BLOCK_BYTES)
    fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
    queue = ReadQueue(3)
    wanted = [(0, 2 * BLOCK_BYTES), (2 * BLOCK_BYTES, 2 * BLOCK_BYTES), (9 * BLOCK_BYTES, BLOCK_BYTES)]
    address = buffer.ctypes.data
    queue.submit(
        [
            Piece(7 + at, fd, address + offset % (8 * BLOCK_BYTES), size, offset)
            for at, (offset, size) in enumerate(wanted)
        ]
    )
    os.close(fd)  # the kernel keeps it
    assert queue.room == 0
    ended = {}
    while queue.num_under_way:
        ended |= queue.reap(1)
    assert ended == {7: 2 * BLOCK_BYTES, 8: BLOCK_BYTES + 3, 9: 0} and queue.room == 3
    assert queue.reap(0) == []
    assert bytes(buffer[: 3 * BLOCK_BYTES + 3]) == file.read_bytes()
    queue.close()
    queue.close()


def test_a_queue_refuses_what_is_no_file(file):
    queue = ReadQueue(2)
    buffer = Slabs().take(BLOCK_BYTES)
    with pytest.raises(OSError, match="io_submit") as caught:
        queue.submit([Piece(0, 1 << 20, buffer.ctypes.data, BLOCK_BYTES, 0)])
    assert caught.value.errno == errno.EBADF and queue.room == 2
    queue.close()


def test_buffers_are_used_again():
    slabs = Slabs()
    first, second = slabs.take(5000), slabs.take(5000)
    assert first.nbytes >= 5000 and first.ctypes.data % mmap.PAGESIZE == 0
    assert not np.shares_memory(first, second)
    place = first.ctypes.data
    view = first[7:].view(np.int8)[3:5].reshape(2, 1)
    del first
    assert slabs.take(4000).ctypes.data != place, "a view still shares it"
    del view
    assert slabs.take(4000).ctypes.data == place, "almost as large"


def test_idle_buffers_are_bounded(monkeypatch):
    monkeypatch.setattr(direct, "MAX_IDLE_BYTES", 5 << 14)
    slabs = Slabs()
    small, large = [slabs.take(1 << 14) for _ in range(8)], [slabs.take(3 << 14) for _ in range(2)]
    too_large, place = slabs.take(6 << 14), large[0].ctypes.data
    del small, too_large
    kept = [slabs.take(2 << 14)]
    assert slabs._idle_bytes == 5 << 14
    large.pop(0)
    large.pop()
    kept.append(slabs.take(4 << 14))
    assert slabs._idle_bytes == 3 << 14, "those of another size went, and no more than fits was kept"
    assert slabs.take(3 << 14).ctypes.data == place and not slabs._idle_bytes
