"""The k-th file operation fails, k = 1, 2, 3 ... until the operation succeeds: once, and for ever.

    python scripts/soak_faults.py                        # every k: 43,000 cases, half an hour to some hours
    python scripts/soak_faults.py --n 100                # 100 evenly spread k for each operation, error and mode
    python scripts/soak_faults.py --operations add read  # some operations only

Errors are ENOSPC, EIO, EACCES and EMFILE, each for the system calls that can meet it, also those of SQLite, torch and
safetensors; a write that fails has written its first half. Each case ends in success or in one of latentcache's own
errors. Then the cache opens, nothing is lost, wrong or half done, no descriptor is left open, and in every tenth case
the operation is run again and gives what an uninterrupted run gives.

The second goal is a tmpfs of 64 MiB that is really full. It needs a user namespace in which a tmpfs may be mounted.
"""

from __future__ import annotations

import argparse
import errno
import gc
import logging
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from file_operations import ERRORS, NEVER, FileOperations, preloaded
from soak_operations import Precache, Scene, operations
from soaking import Goal, Soak, contents, leftovers, make_parser, run_soak

from latentcache.errors import LatentCacheError, StorageFullError
from latentcache.identity import key_of
from latentcache.store import DiskStore
from latentcache.store.upkeep import compact, prune, verify
from latentcache.types import Entry, Record

ALL = 1_000_000
CASE_S = 120
RERUN_EVERY = 10
TMPFS_BYTES = 64 << 20
FULL_DISK = "--full_disk"


@contextmanager
def in_time(seconds: int) -> Iterator[None]:
    """TimeoutError for a block that takes longer."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def open_descriptors(root: Path) -> set[tuple[str, str]]:
    """What this process has open below `root`: numbers and names."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found.add((fd, os.readlink(f"/proc/self/fd/{fd}")))
    return {(fd, name) for fd, name in found if name.startswith(str(root))}


def moments_to_try(total: int, most: int) -> Sequence[int]:
    """1 to `total`, or `most` of them, evenly spread."""
    return range(1, total + 1) if total <= most else sorted({1 + number * total // most for number in range(most)})


def refuse_each(goal: Goal, scene: Scene, soak: Soak) -> None:
    files = FileOperations(scene.cache)
    for error in ERRORS:
        scene.new()
        with files.refusing(NEVER, error):
            scene.run()
        total = files.num_seen
        for for_ever in (False, True):
            for moment in moments_to_try(total, soak.n):
                name = f"{scene.operation.name}: {errno.errorcode[error]} {'from' if for_ever else 'at'} {moment}"
                with goal.case(name), in_time(CASE_S):
                    scene.new()
                    before = open_descriptors(scene.cache)
                    with files.refusing(moment, error, for_ever=for_ever):
                        try:
                            scene.run()
                            goal.count("succeeded")
                        except LatentCacheError:
                            goal.count("typed_errors")
                    if open_descriptors(scene.cache) - before:
                        gc.collect()  # a manifest that an error's frames hold is mapped as long as they live
                    if left := open_descriptors(scene.cache) - before:
                        raise AssertionError(f"left open: {left}")
                    scene.check()
                    if goal.n % RERUN_EVERY == 0:
                        scene.finish()
            soak.say(f"{scene.operation.name} {errno.errorcode[error]} for_ever={for_ever}: {total} operations")


# A full disk ---------------------------------------------------------------------------------------------------------


def fill_the_disk(folder: Path, seed: int) -> None:
    """In a folder on a small tmpfs: fill it, and do what a user does then."""
    generator = random.Random(seed)
    filler = folder / "filler"
    # What it has is the room that `compact` needs for copies when it is gone.
    filler.write_bytes(bytes(generator.randrange(TMPFS_BYTES * 3 // 8, TMPFS_BYTES // 2)))
    cache, stored = folder / "cache", []
    with DiskStore(cache) as store:
        try:
            for number in range(10_000):
                store.add([large_entry(4 * number + more) for more in range(4)])
                stored += [large_key(4 * number + more) for more in range(4)]
            raise AssertionError("the disk did not fill up")
        except StorageFullError:
            pass
    assert len(stored) >= 4, "the disk was full from the beginning"
    fd = os.open(filler, os.O_WRONLY | os.O_APPEND)
    with suppress(OSError):  # now it is full to the last byte
        while True:
            os.write(fd, bytes(1 << 12))
    os.close(fd)
    with DiskStore(cache) as store:
        expected = contents(store)
        assert set(stored) <= expected.keys(), "a sealed entry was lost"
        assert verify(store).ok
        with suppress(StorageFullError):  # it needs room for a copy
            compact(store)
        assert contents(store) == expected
    assert leftovers(cache) == []
    # SQLite's journal needs a few pages: "free some space", as the message says.
    os.truncate(filler, max(0, filler.stat().st_size - (1 << 17)))
    keep = stored[::4]
    prune(cache, keep)
    with DiskStore(cache) as store:
        assert set(store.keys()) == set(keep) and contents(store) == {key: expected[key] for key in keep}
    filler.unlink()
    compact(cache)
    with DiskStore(cache) as store:
        assert store.add([large_entry(number) for number in range(8)]) == 6
        assert verify(store).ok and set(stored[:8]) <= set(store.keys())


def large_entry(number: int) -> Entry:
    """128 KiB, as the moments of a 512x512 image."""
    identity = {"kind": "image", "number": number}
    values = torch.randn(16, 64, 64, generator=torch.Generator().manual_seed(number)).half()
    return Entry(Record(key_of(identity), "image", identity, {}), {"moments": values})


def large_key(number: int) -> str:
    """The key of `large_entry(number)`."""
    return key_of({"kind": "image", "number": number})


def full_disk(goal: Goal, soak: Soak, num_cases: int) -> None:
    """Each case in a process of its own, in a namespace of its own, on a tmpfs of its own."""
    for number in range(num_cases):
        folder = soak.folder / f"tmpfs-{number}"
        folder.mkdir()
        mount = (
            f'mount -t tmpfs -o size={TMPFS_BYTES} none "$1" || exit 78; exec "$2" "$3" {FULL_DISK} "$1" --seed "$4"'
        )
        arguments = [str(folder), sys.executable, __file__, str(soak.options.seed + number)]
        command = ["unshare", "-rm", "sh", "-c", mount, "sh", *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            done = subprocess.CompletedProcess(command, 78, "", "there is no `unshare`")
        if done.returncode == 78 or "unshare" in done.stderr.partition("\n")[0]:
            goal.figures["skipped"] = done.stderr.strip()
            return
        with goal.case(f"full tmpfs, seed {soak.options.seed + number}"):
            assert done.returncode == 0, done.stderr


def program(soak: Soak) -> None:
    logging.disable(logging.CRITICAL)
    precache = Precache(soak.folder / "photos")
    chosen = operations(precache)
    gc.freeze()  # a collection looks at what this program makes from here on
    goal = soak.goal("the k-th file operation fails: a typed error or success, nothing lost, wrong or half done")
    for name in soak.options.operations or chosen:
        refuse_each(goal, Scene(chosen[name], soak.folder), soak)
    full_disk(soak.goal("a full tmpfs of 64 MiB: stops, keeps, prunes, goes on"), soak, min(soak.n, 10))


def main() -> int:
    parser = make_parser(__doc__, ALL, "so many k at most, evenly spread, for each operation, error and mode")
    parser.add_argument("--operations", nargs="+", help="default: all")
    parser.add_argument(FULL_DISK, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.full_disk is not None:
        fill_the_disk(options.full_disk, options.seed)
        return 0
    return preloaded(lambda: run_soak(program, parser))


if __name__ == "__main__":
    sys.exit(main())
