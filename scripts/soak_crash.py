"""Interruptions: each operation on a cache is killed, loses its power, or meets errors; afterwards all must be right.

    python scripts/soak_crash.py                              # all parts: hours
    python scripts/soak_crash.py --part kill --n 100
    python scripts/soak_crash.py --tiny

After an interruption the cache opens, and: no entry is wrong, none is lost that was there before and should be there
after, none that was acknowledged, manifests are old or new, nothing half done is left, and running the operation again
gives what an uninterrupted run gives. All parts see the file operations through a preloaded library.

kill    kill -9 of two writers of precache at --n random instants; and of each operation directly after each labelled
        change that it makes: a kind of operation on a kind of path, e.g. the rename of a pack, found by recording an
        uninterrupted run
power   the recorded file operations are replayed up to one of --n cuts, and what was not synced is dropped or
        reordered. Of a file, what was written since its last fsync survives in any part: each sector of each write by
        itself, and each truncation. Of a directory, the names that were made, renamed or removed since its last fsync
        survive in any subset, in half of the cuts; in the others they survive in their order, as a journalling file
        system has it. An fsync of a file says nothing about its name. This is harsher than common file systems are
faults  the k-th file operation fails, k = 1, 2, 3 ... (at most --n, evenly spread) until the operation succeeds: once,
        and for ever, with ENOSPC, EIO, EACCES and EMFILE, each for the system calls that can meet it, also those of
        SQLite, torch and safetensors; a write that fails has written its first half. Each case ends in success or in
        one of latentcache's own errors, and leaves no descriptor open
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
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from file_operations import CHANGES, ERRORS, NEVER, Change, FileOperations, preloaded
from PIL import Image
from soaking import (
    GEOMETRY,
    Goal,
    Soak,
    clone,
    entry_digest,
    leftovers,
    make_parser,
    run_soak,
    sample_entries,
    text_entry,
    write_manifest,
)

from latentcache.config import Config
from latentcache.config_file import parse_config
from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.errors import EntryDamagedError, LatentCacheError
from latentcache.interop.importing import import_cache
from latentcache.interop.readers import ForeignImage, ForeignItem, ForeignText
from latentcache.loading.cache import LatentCache
from latentcache.models.model_loader import LoadedModels
from latentcache.models.tiny import tiny_parts
from latentcache.precache.memo import Memo
from latentcache.precache.run import run_precache
from latentcache.precache.tasks import Shard
from latentcache.precache.workspace import Workspace
from latentcache.store import DiskStore, writer
from latentcache.store.upkeep import compact, prune, rebuild, verify

PACK_ENTRIES = 3
"""Packs are small, so that seals and interruptions meet often."""
NUM_SAMPLES = 6
NUM_PHOTOS = 3
MANY_PHOTOS = 40
KILLS_PER_POINT = 20
KILLS_PER_ROUND = 4
KILLED = ("precache", "add", "import", "verify", "prune", "compact", "rebuild", "open")
CUT = ("precache", "add", "import", "prune", "compact", "rebuild", "open")
SECTOR_BYTES = 512
RERUN_CUTS_EVERY = 4
ALL = 1_000_000
CASE_S = 120
RERUN_FAULTS_EVERY = 10

fork = multiprocessing.get_context("fork")

Note = Callable[[str, Sequence[str]], None]


def nothing_noted(event: str, keys: Sequence[str]) -> None:
    """For runs whose entries nobody follows."""


class NotingStore(DiskStore):
    """Notes the keys of each pack before it is sealed (`begin`) and after it is durable (`sealed`)."""

    def __init__(self, path: Path, note: Note):
        super().__init__(path)
        self._note = note

    def seal(self, entries: Any) -> Any:
        keys = [entry.key for entry in entries]
        self._note("begin", keys)
        sealed = super().seal(entries)
        self._note("sealed", keys)
        return sealed


class NoteFile:
    """Notes of a process that may be killed at any moment: each is one write at the end of a file."""

    def __init__(self, path: Path):
        self.path = path
        path.unlink(missing_ok=True)

    def __call__(self, event: str, keys: Sequence[str]) -> None:
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(fd, json.dumps([event, list(keys)]).encode() + b"\n")
        os.close(fd)

    def keys(self, event: str) -> set[str]:
        """The keys of all notes of this event."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return {key for found, keys in map(json.loads, lines) if found == event for key in keys}


class Operation(NamedTuple):
    """`prepare` makes a cache, and `run` does the operation on it, which it may be called for again."""

    name: str
    prepare: Callable[[Path], None]
    run: Callable[[Path, Note], object]


# Precache ------------------------------------------------------------------------------------------------------------


class Precache:
    """Runs of precache over photos in `folder`, with the tiny models, which are loaded once."""

    def __init__(self, folder: Path, num_photos: int = 2 * NUM_PHOTOS):
        torch.set_num_threads(1)
        self.folder = folder
        self.models = LoadedModels(**tiny_parts())
        for number in range(num_photos):
            self._write_photo(number)

    def _write_photo(self, number: int) -> None:
        pixels = np.random.default_rng(number).integers(0, 256, (64, 64, 3), dtype=np.uint8)
        for role in ("first", "all") if number < NUM_PHOTOS else ("all",):
            path = self.folder / role / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
            path.with_suffix(".txt").write_text(f"photo number {number}")

    def config(self, cache: Path, role: str = "all") -> Config:
        """`first` has the first NUM_PHOTOS photos, `all` has all."""
        settings = {
            "cache": {"path": cache},
            "datasets": [
                {
                    "name": "photos",
                    "source": {"kind": "folder", "path": self.folder / role},
                    "buckets": {"area": 64 * 64, "step": 32},
                    "images": {"min_side": 8},
                }
            ],
            "model": {"path": "tiny"},
            "encode": {"device": "cpu", "num_workers": 1},
            "validation": {"prompts": ["a prompt"]},
        }
        return parse_config(settings)

    def run(self, cache: Path, note: Note = nothing_noted, *, role: str = "all", shard: Shard | None = None) -> None:
        """Encode what is missing."""
        store = NotingStore(cache, note)
        with Workspace(store, ManifestFolder(cache / "manifests"), Memo(cache / "memo"), cache) as workspace:
            run_precache(self.config(cache, role), models=self.models, workspace=workspace, shard=shard)


# The operations ------------------------------------------------------------------------------------------------------


class _ForeignCache:
    """What a reader of another trainer's cache gives, without its files."""

    format = "kohya"
    family = "sdxl"

    def items(self) -> Iterator[ForeignItem]:
        generator = torch.Generator().manual_seed(1)
        for number in range(NUM_SAMPLES):
            name = f"{number}.png"
            latents = torch.randn(4, 8, 8, generator=generator)
            yield ForeignImage(name, f"{name}.npz", None, latents, False, "sample", GEOMETRY)
            embeds, pooled = torch.randn(5, 16, generator=generator), torch.randn(8, generator=generator)
            yield ForeignText((name,), f"{name}.npz", f"caption {number}", embeds, pooled)


def _fill(cache: Path, num_samples: int = NUM_SAMPLES) -> None:
    """Packs of PACK_ENTRIES entries, an index, and a manifest of all samples."""
    with DiskStore(cache) as store:
        store.add(sample_entries(range(num_samples)))
    write_manifest(cache, "train", range(num_samples))


def _fill_with_waste(cache: Path) -> None:
    """As `_fill`, and every third entry was removed since: some packs are mostly dead."""
    _fill(cache)
    with DiskStore(cache) as store:
        store.remove(sorted(store.keys())[::3])


def _fill_with_orphans(cache: Path) -> None:
    """As `_fill`, and half of the samples are in no manifest any more."""
    _fill(cache)
    write_manifest(cache, "train", range(0, NUM_SAMPLES, 2))


def _fill_with_damage(cache: Path) -> None:
    """As `_fill`, and a bit of one entry was flipped."""
    _fill(cache)
    needle = text_entry(1).tensors["prompt_embeds"].numpy().tobytes()
    for pack in sorted(cache.glob("packs/*/*.safetensors")):
        data = bytearray(pack.read_bytes())
        if (at := data.find(needle)) >= 0:
            data[at] ^= 1
            pack.write_bytes(data)


def _fill_as_after_a_death(cache: Path) -> None:
    """As `_fill`, without an index, with a half-written pack, and with an older index that was being replaced."""
    _fill(cache)
    pack = next(cache.glob("packs/*/*.safetensors"))
    pack.with_name(f".{pack.name}.12345678.tmp").write_bytes(pack.read_bytes()[:1000])
    (cache / "index").rename(cache / "index.removed-12345678")


def _add(cache: Path, note: Note) -> None:
    with NotingStore(cache, note) as store:
        store.add(sample_entries(range(NUM_SAMPLES)))
    write_manifest(cache, "train", range(NUM_SAMPLES))


def _import(cache: Path, note: Note) -> None:
    store = NotingStore(cache, note)
    with Workspace(store, ManifestFolder(cache / "manifests"), path=cache) as workspace:
        import_cache(_ForeignCache(), workspace, name="imported", scale_check=False)


def _prune(cache: Path, note: Note) -> None:
    manifest = ManifestFolder(cache / "manifests").read("train")
    assert manifest is not None
    prune(cache, manifest.keys())


def _read(cache: Path, note: Note) -> None:
    """As a trainer does. AssertionError for a batch that is not what was stored."""
    with LatentCache(cache) as opened:
        for name in opened.sample_ids():
            batch = opened.batch([name], device="cpu", output="moments")
            image, text = sample_entries([int(name.removesuffix(".png"))])
            for field, tensor in (*image.tensors.items(), *text.tensors.items()):
                assert torch.equal(batch[field][0], tensor), f"{name} {field} is wrong"


def operations(precache: Precache) -> dict[str, Operation]:
    """All operations by name. Sets the size of packs for this process."""
    writer.PACK_ENTRIES = PACK_ENTRIES
    return {
        operation.name: operation
        for operation in (
            Operation("precache", lambda cache: precache.run(cache, role="first"), precache.run),
            Operation("add", lambda cache: _fill(cache, 2), _add),
            Operation("import", _fill, _import),
            Operation("read", _fill, _read),
            Operation("verify", _fill_with_damage, lambda cache, note: verify(cache)),
            Operation("prune", _fill_with_orphans, _prune),
            Operation("compact", _fill_with_waste, lambda cache, note: compact(cache)),
            Operation("rebuild", _fill, lambda cache, note: rebuild(cache)),
            Operation("open", _fill_as_after_a_death, lambda cache, note: DiskStore(cache).close()),
        )
    }


# What must hold ------------------------------------------------------------------------------------------------------


def values(cache: Path) -> dict[str, str]:
    """The digest of each entry that can be read, by key. Damaged entries are absent."""
    found = {}
    with DiskStore(cache) as store:
        for key in list(store.keys()):
            with suppress(EntryDamagedError):
                found[key] = entry_digest(store.get(key), provenance=False)
    return found


def manifests(cache: Path) -> dict[str, Any]:
    """What each manifest says but for the time of an import. DatasetError for one that cannot be read."""
    folder = ManifestFolder(cache / "manifests")
    found = {}
    for name in folder.names():
        manifest = folder.read(name)
        assert manifest is not None
        common = json.loads(json.dumps(manifest.common))
        common.get("imported", {}).pop("time", None)
        found[name] = replace(manifest, common=common)
    return found


class Scene:
    """An operation on a cache in `folder`, which each interruption finds as it was."""

    def __init__(self, operation: Operation, folder: Path):
        self.operation, self.cache = operation, folder / operation.name / "cache"
        self.cache.parent.mkdir(parents=True)
        operation.prepare(self.cache)
        self._template = self.cache.rename(self.cache.parent / "template")
        self._spare = self.cache.parent / "spare"
        self.before, self.manifests_before = self._seen(self._template)
        clone(self._template, self.cache)
        operation.run(self.cache, nothing_noted)
        self.after, self.manifests_after = self._seen(self.cache)

    def _seen(self, cache: Path) -> tuple[Mapping[str, str], Mapping[str, Any]]:
        """Entries and manifests of a copy, which is opened and so put in order."""
        clone(cache, self._spare)
        return values(self._spare), manifests(self._spare)

    def new(self) -> Path:
        """The cache before the operation."""
        return clone(self._template, self.cache)

    def run(self, note: Note = nothing_noted) -> None:
        """The operation, on the cache that `new` made."""
        self.operation.run(self.cache, note)

    def check(self, cache: Path | None = None, sealed: Collection[str] = ()) -> None:
        """What must hold when a cache is opened after an interruption. `sealed` are the keys that were acknowledged."""
        cache = cache or self.cache
        found = values(cache)
        wrong = [key for key, value in found.items() if value not in (self.before.get(key), self.after.get(key))]
        assert not wrong, f"{len(wrong)} wrong entries are served: {wrong[:3]}"
        lost = (self.before.keys() & self.after.keys() | set(sealed)) - found.keys()
        assert not lost, f"{len(lost)} entries are lost: {sorted(lost)[:3]}"
        for name, manifest in manifests(cache).items():
            known = [seen[name] for seen in (self.manifests_before, self.manifests_after) if name in seen]
            assert manifest in known, f"manifest {name} is neither the old nor the new one"
        missing = self.manifests_before.keys() & self.manifests_after.keys() - manifests(cache).keys()
        assert not missing, f"manifests are gone: {missing}"
        left = [name for name in _left(cache) if not name.startswith("memo")]  # which precache alone opens
        assert not left, f"the opening left {left}"

    def finish(self, cache: Path | None = None) -> None:
        """Run the operation again: what it gives is what an uninterrupted run gives."""
        cache = cache or self.cache
        self.operation.run(cache, nothing_noted)
        assert values(cache) == self.after, "the rerun gave other entries than an uninterrupted run"
        assert manifests(cache) == self.manifests_after, "the rerun gave other manifests"
        report = verify(cache)
        assert not report.damaged and not report.unreadable, f"after the rerun: {report.damaged} {report.unreadable}"
        assert not _left(cache), f"the rerun left {_left(cache)}"


def _left(cache: Path) -> list[str]:
    """Leftovers, but for SQLite's journals: one that says nothing is removed with the next change."""
    return [name for name in leftovers(cache) if not name.endswith("-journal")]


# Kills ----------------------------------------------------------------------------------------------------------------


def start(function: Callable[[], object]) -> BaseProcess:
    """Call the function in a fork of this process: what it has imported and loaded is there at once."""

    def call() -> None:
        function()
        os._exit(0)  # nothing of the parent's is torn down

    process = fork.Process(target=call)
    process.start()
    return process


# Random instants -----------------------------------------------------------------------------------------------------


class TwoWriters:
    """Precache by two ranks, killed at random instants."""

    def __init__(self, soak: Soak):
        self.precache = Precache(soak.folder / "many-photos", MANY_PHOTOS)
        self.scene = Scene(operations(self.precache)["precache"], soak.folder / "random")
        self.noted = NoteFile(soak.folder / "noted")
        began = time.monotonic()
        self.scene.new()
        self.wait(self.begin())
        self.seconds = time.monotonic() - began

    def begin(self) -> list[BaseProcess]:
        """Start both ranks."""
        cache = self.scene.cache

        def run(rank: int) -> None:
            self.precache.run(cache, self.noted, shard=Shard(rank, 2))

        return [start(lambda rank=rank: run(rank)) for rank in range(2)]  # type: ignore[misc]

    @staticmethod
    def wait(children: list[BaseProcess]) -> list[int | None]:
        """The exit codes."""
        for child in children:
            child.join(120)
        return [child.exitcode for child in children]

    def kill_once(self, generator: random.Random) -> int:
        """Run, kill each rank at an instant of its own, and check. Returns how many were killed."""
        children = self.begin()
        began = time.monotonic()
        instants = sorted((generator.uniform(0, self.seconds), rank) for rank in range(2))
        if generator.random() < 0.5:
            instants = [
                (instants[0][0], rank) for rank in range(2)
            ]  # both at once, as when a machine runs out of memory
        for instant, rank in instants:
            time.sleep(max(0.0, began + instant - time.monotonic()))
            children[rank].kill()
        codes = self.wait(children)
        assert set(codes) <= {0, -signal.SIGKILL}, f"a writer failed: {codes}"
        self.scene.check(sealed=self.noted.keys("sealed"))
        found = values(self.scene.cache).keys()
        unknown = found - self.scene.before.keys() - self.noted.keys("begin")
        assert not unknown, f"{len(unknown)} entries that no writer had begun to seal"
        return codes.count(-signal.SIGKILL)


def random_kills(goal: Goal, soak: Soak) -> None:
    writers = TwoWriters(soak)
    soak.say(f"an uninterrupted run of two writers takes {writers.seconds:.2f} s")
    # On a machine that was busy when it was measured, a run may be over before the kill comes: then some more follow.
    while goal.n < soak.n or (goal.figures.get("killed_writers", 0) < 2 and goal.n < 10 * soak.n):
        writers.noted.path.unlink(missing_ok=True)
        writers.scene.new()
        for _ in range(max(1, min(KILLS_PER_ROUND, soak.n - goal.n))):
            with goal.case(f"random kill {goal.n}"):
                goal.count("killed_writers", writers.kill_once(soak.random))
        with goal.case("rerun"):
            goal.n -= 1  # the rerun is a part of the cases before it
            writers.scene.finish()
        if goal.n % 100 < KILLS_PER_ROUND:
            soak.say(f"{goal.n} random kills, {goal.num_failures} failures")
    assert goal.figures.get("killed_writers"), "no writer was killed"


# Labelled changes ----------------------------------------------------------------------------------------------------


def label_of(change: Change) -> tuple[str, str]:
    """The kind of operation and the kind of path, as a pattern: names of packs and temporary files are random."""
    path = re.sub(r"[0-9a-f]{8,}", "*", change.path_2 or change.path)
    return change.operation, re.sub(r"^packs/[0-9a-f]{2}(?=/|$)", "packs/??", path)


def kills_after_changes(goal: Goal, soak: Soak, scene: Scene, kills_per_point: float) -> None:
    """Each label is tried `kills_per_point` times; with a fraction, some labels once."""
    scene.new()
    files = FileOperations(scene.cache)
    with files.recording() as changes:
        scene.run()
    counts = Counter(label_of(change) for change in changes if change.operation in CHANGES)
    noted = NoteFile(soak.folder / "noted-point")
    for (operation, pattern), count in counts.items():
        goal.count("labels")
        for _ in range(int(kills_per_point) + (soak.random.random() < kills_per_point % 1)):
            occurrence = soak.random.randint(1, count)
            with goal.case(f"{scene.operation.name}: killed after {operation} {pattern} number {occurrence}"):
                noted.path.unlink(missing_ok=True)
                scene.new()

                def run(occurrence: int = occurrence, operation: str = operation, pattern: str = pattern) -> None:
                    files.kill_after(occurrence, operation, pattern)
                    scene.run(noted)

                child = start(run)
                child.join(120)
                assert child.exitcode in (0, -signal.SIGKILL), f"exit code {child.exitcode}"
                goal.count("killed", child.exitcode != 0)
                scene.check(sealed=noted.keys("sealed"))
                scene.finish()
    soak.say(f"{scene.operation.name}: {len(counts)} labels, {goal.n} kills, {goal.num_failures} failures")


def kill(soak: Soak) -> None:
    random_kills(soak.goal("kill -9 of two writers at random instants: 0 lost, torn, wrong or left over"), soak)
    goal = soak.goal("kill -9 after each labelled change: 0 lost, torn, wrong or left over; the rerun equals")
    chosen = operations(Precache(soak.folder / "photos"))
    for name in KILLED:
        kills_per_point = min(KILLS_PER_POINT, KILLS_PER_POINT * soak.n / 500)
        kills_after_changes(goal, soak, Scene(chosen[name], soak.folder), kills_per_point)
    assert goal.figures["killed"] >= goal.n * 0.9, "most kills must hit"


# Power cuts -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class File:
    """A file or a folder: what is on the disk, and the changes since, which a cut may lose.

    `durable` is bytes, or the names of a folder. A change of a file is (offset, bytes), or (length, None) for a
    truncation; one of a folder is {name: file, or None for a name that is gone}.
    """

    durable: bytes | dict[str, File]
    changes: list[Any] = field(default_factory=list)

    def now(self) -> bytes | dict[str, File]:
        """As a process sees it."""
        if isinstance(self.durable, dict):
            return with_names(self.durable, self.changes)
        return with_writes(self.durable, self.changes)

    def sync(self) -> None:
        """All that changed is on the disk."""
        self.durable, self.changes = self.now(), []


def with_names(names: dict[str, File], changes: Sequence[dict[str, File | None]]) -> dict[str, File]:
    """The names of a folder after these changes."""
    found = dict(names)
    for change in changes:
        for name, file in change.items():
            if file is None:
                found.pop(name, None)
            else:
                found[name] = file
    return found


def with_writes(data: bytes, changes: Sequence[tuple[int, bytes | None]]) -> bytes:
    """The bytes of a file after these changes. A hole has zeros."""
    found = bytearray(data)
    for offset, written in changes:
        end = offset + len(written or b"")
        if len(found) < end:
            found += bytes(end - len(found))
        if written is None:
            del found[offset:]
        else:
            found[offset:end] = written
    return bytes(found)


class Disk:
    """What lies below a folder, as the recorded changes make it."""

    def __init__(self, root: Path):
        self._by_number: dict[int, File] = {}
        self.root = self._read(root)

    def _read(self, path: Path) -> File:
        if path.is_dir():
            file = File({child.name: self._read(child) for child in path.iterdir()})
        else:
            file = File(path.read_bytes())
        self._by_number[path.stat().st_ino] = file
        return file

    def apply(self, change: Change) -> None:
        """Do what a process did."""
        if change.operation in ("create", "mkdir"):
            file = File({} if change.operation == "mkdir" else b"")
            self._by_number[change.ino] = file
            self._folder(change.path).changes.append({self._name(change.path): file})
        elif change.operation in ("unlink", "rmdir"):
            self._folder(change.path).changes.append({self._name(change.path): None})
        elif change.operation == "rename":
            self._rename(change.path, change.path_2)
        elif change.operation == "sync":
            self._found(change).sync()
        elif change.operation == "write":
            self._found(change).changes.append((change.offset, change.data))
        elif change.operation == "truncate":
            self._found(change).changes.append((change.offset, None))

    def _rename(self, path: str, path_2: str) -> None:
        source, target = self._folder(path), self._folder(path_2)
        names = source.now()
        assert isinstance(names, dict), f"{path} lies in no folder"
        file = names[self._name(path)]
        if source is target:
            source.changes.append({self._name(path): None, self._name(path_2): file})
        else:
            source.changes.append({self._name(path): None})
            target.changes.append({self._name(path_2): file})

    def _found(self, change: Change) -> File:
        # By its path where it has one: a folder's number is not recorded when it is made.
        file = self._at(change.path)
        return self._by_number[change.ino] if file is None else file

    def _at(self, path: str) -> File | None:
        file: File | None = self.root
        for name in filter(None, path.split("/")):
            names = file.now() if file is not None else None
            file = names.get(name) if isinstance(names, dict) else None
        return file

    def _folder(self, path: str) -> File:
        folder = self._at(path.rpartition("/")[0])
        assert folder is not None, f"{path}: its folder is not known"
        return folder

    @staticmethod
    def _name(path: str) -> str:
        return path.rpartition("/")[2]


def survivors(file: File, generator: random.Random, *, ordered: bool) -> bytes | dict[str, File]:
    """What a cut leaves of a file or a folder."""
    if isinstance(file.durable, dict):
        if ordered:
            return with_names(file.durable, file.changes[: generator.randint(0, len(file.changes))])
        return with_names(file.durable, [change for change in file.changes if generator.random() < 0.5])
    fate = generator.choice(["none", "all", "some", "prefix"])
    changes = file.changes
    if fate == "prefix":
        changes = changes[: generator.randint(0, len(changes))]
    if fate in ("all", "prefix"):
        return with_writes(file.durable, changes)
    if fate == "none":
        return file.durable
    kept = []
    for offset, written in changes:
        if written is None:
            kept += [(offset, None)] if generator.random() < 0.5 else []
            continue
        for start in range(0, len(written), SECTOR_BYTES):
            if generator.random() < 0.5:
                kept.append((offset + start, written[start : start + SECTOR_BYTES]))
    return with_writes(file.durable, kept)


def write_out(file: File, path: Path, generator: random.Random, *, ordered: bool) -> None:
    """Make the files that a cut leaves."""
    left = survivors(file, generator, ordered=ordered)
    if isinstance(left, bytes):
        path.write_bytes(left)
        return
    path.mkdir()
    for name, child in left.items():
        write_out(child, path / name, generator, ordered=ordered)


def recorded(scene: Scene) -> tuple[Disk, list[Change]]:
    """The disk before a run of the operation, and the changes of the run, with marks where entries are acknowledged."""
    disk, files = Disk(scene.new()), FileOperations(scene.cache)
    with files.recording() as changes:
        scene.run(lambda event, keys: files.mark(json.dumps([event, list(keys)])))
    return disk, changes


def replay(disk: Disk, changes: Sequence[Change]) -> set[str]:
    """Replay changes. Returns the keys that were acknowledged."""
    sealed: set[str] = set()
    for change in changes:
        if change.operation == "mark":
            event, keys = json.loads(change.data)
            sealed |= set(keys) if event == "sealed" else set()
        else:
            disk.apply(change)
    return sealed


def power(soak: Soak) -> None:
    chosen = operations(Precache(soak.folder / "photos"))
    goal = soak.goal("power cuts at any moment, unsynced writes dropped and reordered: nothing wrong, nothing lost")
    for name in CUT:
        scene = Scene(chosen[name], soak.folder)
        disk, changes = recorded(scene)
        done, sealed = 0, set()
        for moment in sorted(soak.random.randint(0, len(changes)) for _ in range(soak.n)):
            sealed |= replay(disk, changes[done:moment])
            done, ordered = moment, soak.random.random() < 0.5
            generator = random.Random(soak.random.random())
            with goal.case(f"{name}: cut after {moment} of {len(changes)}, {'ordered' if ordered else 'any'} names"):
                shutil.rmtree(scene.cache, ignore_errors=True)
                write_out(disk.root, scene.cache, generator, ordered=ordered)
                scene.check(sealed=sealed)
                if goal.n % RERUN_CUTS_EVERY == 0:
                    scene.finish()
        soak.say(f"{name}: {len(changes)} changes")


# Faults ---------------------------------------------------------------------------------------------------------------


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
                    if goal.n % RERUN_FAULTS_EVERY == 0:
                        scene.finish()
            soak.say(f"{scene.operation.name} {errno.errorcode[error]} for_ever={for_ever}: {total} operations")


def faults(soak: Soak) -> None:
    chosen = operations(Precache(soak.folder / "photos"))
    gc.freeze()  # a collection looks at what this program makes from here on
    goal = soak.goal("the k-th file operation fails: a typed error or success, nothing lost, wrong or half done")
    for name in ("add", "read", "compact") if soak.options.tiny else chosen:
        refuse_each(goal, Scene(chosen[name], soak.folder), soak)


PARTS = {"kill": (kill, 500, 4), "power": (power, 200, 3), "faults": (faults, ALL, 1)}


def main() -> int:
    logging.disable(logging.CRITICAL)
    return preloaded(lambda: run_soak(PARTS, make_parser(__doc__, PARTS)))


if __name__ == "__main__":
    sys.exit(main())
