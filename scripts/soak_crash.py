"""Interruptions: every operation on a cache is killed, cut from power or refused a system call.

    python scripts/soak_crash.py                              # all parts: hours
    python scripts/soak_crash.py --part kill --n 100

After an interruption the cache must open. No entry may be wrong; no acknowledged entry and none that existed before and
after the operation may be lost; each manifest is the old or the new one; nothing half-done remains; and running the
operation again gives the same result as an uninterrupted run. A preloaded library intercepts the file operations.

kill    kill -9 before the k-th change of a file, for k = 1, 2, 3 ... (at most --n of them, evenly spread) of each
        operation. In every second case of precache two processes run it at once, and each is killed at its k-th change
power   replay the recorded file operations up to one of --n cuts, and drop or reorder what was not synced. Any subset
        of the sectors written to a file since its last fsync survives, and any of its truncations. Of the names
        created, renamed or removed in a directory since its last fsync, any subset survives in half of the cuts, and a
        prefix in the others, as on a journalling file system. The fsync of a file does not cover its name. This is
        harsher than common file systems
faults  the k-th file operation fails, for k as above: once and from then on, with ENOSPC, EIO, EACCES and EMFILE, for
        the system calls that can raise each, including those of SQLite, torch and safetensors. A failing write has
        written its first half. Each case must end in success or in one of latentcache's own errors, and leave no
        descriptor open
"""

from __future__ import annotations

import errno
import gc
import json
import logging
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from file_operations import KILL, NEVER, REFUSALS, Change, FileOperations, preloaded
from soaking import Goal, Soak, config_of, digest_of, run_soak, say, write_photo

# isort: split
from helpers.foreign_samples import Foreign, pairs
from helpers.pack_damage import damage
from helpers.ragged_samples import fill, moments_of, text_of

from latentcache.dataset.manifest_folder import ManifestFolder, keys_in_use
from latentcache.errors import EntryDamagedError, LatentCacheError
from latentcache.interop.importing import import_cache
from latentcache.loading.cache import LatentCache
from latentcache.models.model_loader import LoadedModels
from latentcache.models.tiny import tiny_parts
from latentcache.precache.memo import Memo
from latentcache.precache.run import run_precache
from latentcache.precache.workspace import Workspace
from latentcache.store import DiskStore, writer
from latentcache.store.upkeep import compact, prune, rebuild, verify

PACK_ENTRIES = 3
"""Entries per pack: few, so that interruptions often hit a seal."""
LENGTHS = (1, 2, 3, 4, 5, 1)
"""Rows of the captions of the samples."""
NUM_PHOTOS = 3
SECTOR_BYTES = 512
RERUN_CUTS_EVERY, RERUN_FAULTS_EVERY = 4, 10
CASE_S = 120

NOTES = "notes.txt"
"""File in the cache with the keys of each pack that is durable, written once its seal is acknowledged."""


class NotingStore(DiskStore):
    """A DiskStore that notes each pack it seals. A note that fails is not an acknowledgement."""

    def seal(self, entries: Any) -> Any:
        sealed = super().seal(entries)
        with suppress(OSError), (self.path / NOTES).open("a") as file:
            file.write("".join(f"{entry.key}\n" for entry in entries))
        return sealed


class Precache:
    """Runs precache over photos in `folder` with the tiny models, which are loaded once."""

    def __init__(self, folder: Path, num_photos: int = 2 * NUM_PHOTOS):
        torch.set_num_threads(1)
        self.folder, self.models = folder, LoadedModels(**tiny_parts())
        for role, num in (("first", NUM_PHOTOS), ("all", num_photos)):
            for number in range(num):
                write_photo(folder / role / f"{number}.png", number)

    def run(self, cache: Path, *, role: str = "all") -> None:
        """Encode missing entries of the first NUM_PHOTOS photos (role `first`) or of all (`all`)."""
        store, config = NotingStore(cache), config_of(cache, "photos", self.folder / role)
        with Workspace(store, ManifestFolder(cache / "manifests"), Memo(cache / "memo"), cache) as workspace:
            run_precache(config, models=self.models, workspace=workspace)


# The operations ------------------------------------------------------------------------------------------------------


def _add(cache: Path, lengths: Sequence[int] = LENGTHS) -> None:
    """Add packs of PACK_ENTRIES entries and a manifest of samples whose captions have these numbers of rows."""
    with NotingStore(cache) as store:
        fill(store, ManifestFolder(cache / "manifests"), "chroma", lengths, name="train")


def _add_waste(cache: Path) -> None:
    """Like `_add`, then remove every third entry, so that some packs are mostly dead."""
    _add(cache)
    with DiskStore(cache) as store:
        store.remove(sorted(store.keys())[::3])


def _add_orphans(cache: Path) -> None:
    """Like `_add`, then drop half of the samples from the manifest."""
    _add(cache)
    _add(cache, lengths=LENGTHS[: len(LENGTHS) // 2])


def _add_damage(cache: Path) -> None:
    """Like `_add`, then flip a bit of one entry."""
    _add(cache)
    damage(cache, text_of(1, LENGTHS[1]).view(torch.uint8).numpy().tobytes())


def _add_and_die(cache: Path) -> None:
    """Like `_add`, then leave a half-written pack and, in place of the index, one that was being removed."""
    _add(cache)
    pack = next(cache.glob("packs/*/*.safetensors"))
    pack.with_name(f".{pack.name}.12345678.tmp").write_bytes(pack.read_bytes()[:1000])
    (cache / "index").rename(cache / "index.removed-12345678")


def _import(cache: Path) -> None:
    foreign = Foreign(pairs(*(f"{number}.png" for number in range(len(LENGTHS)))), format="kohya")
    with Workspace(NotingStore(cache), ManifestFolder(cache / "manifests"), path=cache) as workspace:
        import_cache(foreign, workspace, name="imported", scale_check=False)


def _prune(cache: Path) -> None:
    prune(cache, partial(keys_in_use, ManifestFolder(cache / "manifests")))


def _read(cache: Path) -> None:
    """Read as a trainer does. AssertionError if a batch differs from what was stored."""
    with LatentCache(cache) as opened:
        for number in map(int, opened.sample_ids()):
            batch = opened.batch([str(number)], device="cpu", output="moments")
            assert torch.equal(batch["moments"][0], moments_of("chroma", number)), f"moments of {number} are wrong"
            [embeds], text = batch["prompt_embeds"], text_of(number, LENGTHS[number])
            assert torch.equal(embeds[: len(text)], text) and not embeds[len(text) :].any(), f"text {number} is wrong"


def operations(precache: Precache) -> dict[str, tuple[Callable[[Path], object], Callable[[Path], object]]]:
    """All operations by name: what prepares a cache, and the operation on it, which may be repeated.

    Sets the pack size of this process.
    """
    writer.PACK_ENTRIES = PACK_ENTRIES
    return {
        "precache": (partial(precache.run, role="first"), precache.run),
        "add": (partial(_add, lengths=LENGTHS[:2]), _add),
        "import": (_add, _import),
        "read": (_add, _read),
        "verify": (_add_damage, verify),
        "prune": (_add_orphans, _prune),
        "compact": (_add_waste, compact),
        "rebuild": (_add, rebuild),
        "open": (_add_and_die, lambda cache: DiskStore(cache).close()),
    }


# What must hold ------------------------------------------------------------------------------------------------------


def state(cache: Path) -> dict[str, Any]:
    """Digests of the readable entries by key, and the manifests by name, without import times.

    Damaged entries are left out. DatasetError if a manifest cannot be read.
    """
    found: dict[str, Any] = {}
    with DiskStore(cache) as store:
        for key in list(store.keys()):
            with suppress(EntryDamagedError):
                entry = store.get(key)
                record = entry.record.kind, json.dumps(dict(entry.record.identity), sort_keys=True)
                found[key] = digest_of({**entry.tensors, "record": record})
    folder = ManifestFolder(cache / "manifests")
    for name in folder.names():
        manifest = folder.read(name)
        assert manifest is not None
        common = json.loads(json.dumps(manifest.common))
        common.get("imported", {}).pop("time", None)
        found[name] = replace(manifest, common=common)
    return found


class Scene:
    """An operation on a cache in `folder`. Each interruption starts from the same state."""

    def __init__(self, name: str, prepare: Callable[[Path], object], run: Callable[[Path], object], folder: Path):
        self.name, self._run, self.cache = name, run, folder / name / "cache"
        self.cache.parent.mkdir(parents=True)
        prepare(self.cache)
        self._template = self.cache.rename(self.cache.parent / "template")
        self.before = state(self.new())
        self.new()
        self.run()
        self.after = state(self.cache)

    def new(self) -> Path:
        """Reset the cache to its state before the operation."""
        shutil.rmtree(self.cache, ignore_errors=True)
        return Path(shutil.copytree(self._template, self.cache))

    def run(self) -> None:
        """Run the operation on the cache that `new` prepared."""
        self._run(self.cache)

    def check(self) -> None:
        """Check the cache after an interruption."""
        found = state(self.cache)
        wrong = [key for key, value in found.items() if value not in (self.before.get(key), self.after.get(key))]
        assert not wrong, f"{len(wrong)} entries or manifests are neither old nor new: {wrong[:3]}"
        durable = self.before.keys() | set((self.cache / NOTES).read_text().split())
        lost = (durable & self.after.keys()) - found.keys()
        assert not lost, f"{len(lost)} entries or manifests are lost: {sorted(lost)[:3]}"
        left = [name for name in leftovers(self.cache) if not name.startswith("memo")]  # only precache opens the memo
        assert not left, f"opening left {left}"

    def finish(self) -> None:
        """Run the operation again and compare the result with that of an uninterrupted run."""
        self.run()
        assert state(self.cache) == self.after, "the rerun differs from an uninterrupted run"
        report = verify(self.cache)
        assert not report.damaged and not report.unreadable, f"after the rerun: {report.damaged} {report.unreadable}"
        assert not leftovers(self.cache), f"the rerun left {leftovers(self.cache)}"


def leftovers(cache: Path) -> list[str]:
    """Temporary files of a cache, and indexes or memos that were set aside.

    SQLite's empty journals do not count: the next change removes them.
    """
    names = sorted(path.relative_to(cache).as_posix() for path in cache.rglob("*"))
    return [name for name in names if re.search(r"(\.tmp|-wal|-shm)$|\.(damaged|replaced|removed)-", name)]


def scenes(soak: Soak, names: Collection[str] = ()) -> Iterator[Scene]:
    """The named operations, or all, each with its own caches."""
    for name, (prepare, run) in operations(Precache(soak.folder / "photos")).items():
        if not names or name in names:
            yield Scene(name, prepare, run, soak.folder)


# Kills ----------------------------------------------------------------------------------------------------------------


def moments(soak: Soak, scene: Scene, files: FileOperations, error: int) -> list[int]:
    """At most `soak.n` of the file operations that can meet this error, evenly spread."""
    scene.new()
    with files.refusing(NEVER, error):
        scene.run()
    total, most = files.num_seen, min(files.num_seen, soak.n)
    say(f"{scene.name}: {total} operations can meet {errno.errorcode.get(error, 'a kill')}")
    return sorted({1 + number * total // most for number in range(most)})


def num_killed(function: Callable[[], object], num_processes: int) -> int:
    """Call the function in forks, which have the models and imports of this process. Returns how many were killed."""
    new = partial(multiprocessing.get_context("fork").Process, target=function, daemon=True)  # one that hangs ends too
    children = [new() for _ in range(num_processes)]
    for child in children:
        child.start()
    for child in children:
        child.join(CASE_S)
    codes = [child.exitcode for child in children]
    assert set(codes) <= {0, -signal.SIGKILL}, f"a process failed: {codes}"
    return codes.count(-signal.SIGKILL)


def kill(soak: Soak) -> None:
    goal = soak.goal("kill -9 before the k-th change: 0 lost, torn, wrong or left over; the rerun equals")
    for scene in scenes(soak):
        files = FileOperations(scene.cache)
        for moment in moments(soak, scene, files, KILL):
            num_processes = 1 + (scene.name == "precache" and goal.n % 2)
            with goal.case(f"{scene.name}: {num_processes} killed at change {moment}"):
                scene.new()
                dying = files.refusing(moment, KILL)(scene.run)  # a context manager is a decorator as well
                goal.count("killed", num_killed(dying, num_processes))
                scene.check()
                scene.finish()
    assert goal.figures["killed"] >= goal.n * 0.9, "most kills must hit a running operation"


# Power cuts -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class File:
    """A file or a folder: its durable content and the changes since, which a power cut may lose.

    `durable` is the bytes of a file or the names of a folder. A change of a file is (offset, a sector's bytes), or
    (length, None) for a truncation. A change of a folder is {name: file}, with None for a removed name.
    """

    durable: bytes | dict[str, File]
    changes: list[Any] = field(default_factory=list)

    def after(self, changes: Sequence[Any]) -> Any:
        """Apply these changes to the durable content. Holes in a file are zeros."""
        if isinstance(self.durable, dict):
            names = self.durable | {name: file for change in changes for name, file in change.items()}
            return {name: file for name, file in names.items() if file is not None}
        found = bytearray(self.durable)
        for offset, written in changes:
            found += bytes(max(0, offset + len(written or b"") - len(found)))
            found[offset : None if written is None else offset + len(written)] = written or b""
        return bytes(found)

    def names(self) -> dict[str, File]:
        """The names of a folder as a process sees them."""
        return dict(self.after(self.changes))

    def write_out(self, path: Path, dice: random.Random, *, ordered: bool) -> None:
        """Write what a power cut leaves: a prefix of the changes, or a random share of them."""
        is_folder = isinstance(self.durable, dict)
        kept = self.changes[: dice.randint(0, len(self.changes))]
        if not (ordered if is_folder else dice.random() < 0.25):
            share = 0.5 if is_folder else dice.choice([0.0, 0.5, 1.0])
            kept = [change for change in self.changes if dice.random() < share]
        left = self.after(kept)
        if isinstance(left, bytes):
            path.write_bytes(left)
            return
        path.mkdir()
        for name, child in left.items():
            child.write_out(path / name, dice, ordered=ordered)


class Disk:
    """A folder tree that recorded changes are applied to."""

    def __init__(self, root: Path):
        self._by_number: dict[int, File] = {}
        self.root = self._read(root)

    def _read(self, path: Path) -> File:
        file = File({child.name: self._read(child) for child in path.iterdir()} if path.is_dir() else path.read_bytes())
        self._by_number[path.stat().st_ino] = file
        return file

    def apply(self, change: Change) -> None:
        """Apply one recorded change."""
        folder, name = self._place(change.path)
        # The name comes first: the inode number of a new folder is not recorded.
        file: Any = folder.names().get(name) or self._by_number.get(change.ino)
        match change.operation:
            case "create" | "mkdir":
                made = self._by_number[change.ino] = File({} if change.operation == "mkdir" else b"")
                folder.changes.append({name: made})
            case "unlink" | "rmdir":
                folder.changes.append({name: None})
            case "rename":
                target, new_name = self._place(change.path_2)
                if target is folder:
                    folder.changes.append({name: None, new_name: file})
                else:
                    folder.changes.append({name: None})
                    target.changes.append({new_name: file})
            case "truncate":
                file.changes.append((change.offset, None))
            case "write":
                for at in range(0, len(change.data), SECTOR_BYTES):  # parts that survive independently
                    file.changes.append((change.offset + at, change.data[at : at + SECTOR_BYTES]))
        if change.operation == "sync" or change.path == NOTES:  # what was acknowledged is not forgotten
            file.durable, file.changes = file.after(file.changes), []

    def _place(self, path: str) -> tuple[File, str]:
        """The folder of a path, and its name there. KeyError if there is no such folder."""
        *folders, name = path.split("/")
        place = self.root
        for each in folders:
            place = place.names()[each]
        return place, name


def power(soak: Soak) -> None:
    goal = soak.goal("power cuts at any moment, unsynced writes dropped and reordered: nothing wrong, nothing lost")
    for scene in scenes(soak):
        disk, files = Disk(scene.new()), FileOperations(scene.cache)
        with files.recording() as changes:
            scene.run()
        done = 0
        for moment in sorted(soak.random.randint(0, len(changes)) for _ in range(soak.n)):
            for change in changes[done:moment]:
                disk.apply(change)
            done, ordered = moment, soak.random.random() < 0.5
            dice = random.Random(soak.random.random())
            with goal.case(f"{scene.name}: cut after {moment} of {len(changes)}, {ordered=}"):
                shutil.rmtree(scene.cache, ignore_errors=True)
                disk.root.write_out(scene.cache, dice, ordered=ordered)
                scene.check()
                if goal.n % RERUN_CUTS_EVERY == 0:
                    scene.finish()
        say(f"{scene.name}: {len(changes)} changes")


# Faults ---------------------------------------------------------------------------------------------------------------


def too_long(*_: object) -> None:
    # Not a TimeoutError: it is an OSError, which the package would turn into an error of its own.
    raise AssertionError(f"not done after {CASE_S} s")


def open_descriptors(root: Path) -> set[tuple[str, str]]:
    """Open file descriptors below `root`, with their paths."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found.add((fd, os.readlink(f"/proc/self/fd/{fd}")))
    return {(fd, name) for fd, name in found if name.startswith(str(root))}


def refuse(goal: Goal, scene: Scene, files: FileOperations, moment: int, error: int, *, for_ever: bool) -> None:
    """One case: the operation's `moment`-th file operation fails with this error."""
    scene.new()
    before = open_descriptors(scene.cache)
    with files.refusing(moment, error, for_ever=for_ever):
        try:
            scene.run()
            goal.count("succeeded")
        except LatentCacheError:
            goal.count("typed_errors")
    gc.collect()  # frames of an error may keep a manifest mapped
    left = open_descriptors(scene.cache) - before
    assert not left, f"left open: {left}"
    scene.check()
    if goal.n % RERUN_FAULTS_EVERY == 0:
        scene.finish()


def faults(soak: Soak) -> None:
    signal.signal(signal.SIGALRM, too_long)
    goal = soak.goal("the k-th file operation fails: a typed error or success, nothing lost, wrong or half done")
    chosen = ("add", "read", "compact") if soak.options.tiny else ()
    for scene, error in product(scenes(soak, chosen), sorted(REFUSALS.keys() - {KILL})):
        gc.freeze()  # later collections skip what exists already
        files = FileOperations(scene.cache)
        for for_ever, moment in product((False, True), moments(soak, scene, files, error)):
            with goal.case(f"{scene.name}: {errno.errorcode[error]} {'from' if for_ever else 'at'} {moment}"):
                signal.alarm(CASE_S)
                refuse(goal, scene, files, moment, error, for_ever=for_ever)
            signal.alarm(0)


PARTS = {"kill": (kill, 500, 4), "power": (power, 200, 3), "faults": (faults, 1_000_000, 5)}


def main() -> int:
    logging.disable(logging.CRITICAL)
    return preloaded(lambda: run_soak(PARTS, __doc__))


if __name__ == "__main__":
    sys.exit(main())
