"""Power cuts: the recorded file operations are replayed up to a cut, and what was not synced is dropped or reordered.

    python scripts/soak_power.py            # 200 cuts of each operation
    python scripts/soak_power.py --n 20     # 20 cuts of each

Of a file, what was written since its last fsync survives in any part: each sector of each write by itself, and each
truncation. Of a directory, the names that were made, renamed or removed since its last fsync survive in any subset, in
half of the cuts; in the others they survive in their order, as a journalling file system has it. An fsync of a file
says nothing about its name. This is harsher than common file systems are.

Then the cache opens, no entry is wrong, none is lost that was sealed before the cut, and running the operation again
gives what an uninterrupted run gives.
"""

from __future__ import annotations

import json
import logging
import random
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from file_operations import Change, FileOperations, preloaded
from soak_operations import Precache, Scene, operations
from soaking import Soak, make_parser, run_soak

NAMES = ("precache", "add", "import", "prune", "compact", "rebuild", "open")
SECTOR_BYTES = 512
RERUN_EVERY = 4


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


def program(soak: Soak) -> None:
    logging.disable(logging.CRITICAL)
    chosen = operations(Precache(soak.folder / "photos"))
    goal = soak.goal("power cuts at any moment, unsynced writes dropped and reordered: nothing wrong, nothing lost")
    for name in soak.options.operations or NAMES:
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
                if goal.n % RERUN_EVERY == 0:
                    scene.finish()
        soak.say(f"{name}: {len(changes)} changes")


def main() -> int:
    parser = make_parser(__doc__, 200, "cuts of each operation")
    parser.add_argument("--operations", nargs="+", help=f"default: {' '.join(NAMES)}")
    return preloaded(lambda: run_soak(program, parser))


if __name__ == "__main__":
    sys.exit(main())
