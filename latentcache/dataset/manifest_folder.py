"""Storage of manifests: a folder, or the memory of a process."""

from __future__ import annotations

import mmap
import os
import platform
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Protocol

import numpy as np
from typing_extensions import override

from latentcache.dataset.manifest import Manifest, manifest_bytes, read_manifest
from latentcache.errors import StoreBusyError, StoreError
from latentcache.identity import digest
from latentcache.provenance import now
from latentcache.utils.durable_files import make_folder, typed_errors, unreadable, write_sealed
from latentcache.utils.locks import locked

NAME_PATTERN = "^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$"
"""Valid manifest names on a service. A name is never a path."""
UNFINISHED = ".unfinished"
LOCK = ".lock"
"""A file next to the manifests that is locked while one is replaced."""
SUFFIX = ".safetensors"
"""Suffix of a manifest's file."""
_ATTEMPTS = 8
"""Attempts to write a manifest that other clients keep replacing meanwhile."""


def owner_of(source: str = "") -> str:
    """The owner of a run's notes, derived from the machine and the run's source. A restarted run has the same owner."""
    return digest(f"{platform.node()} {source}".encode())[:32]


def note_file(name: str, owner: str) -> str:
    """The file that marks a manifest as in work by a run of this owner; empty for an unknown owner."""
    return f"{name}+{owner}{UNFINISHED}" if owner else f"{name}{UNFINISHED}"


def noted_in(file: str) -> str | None:
    """The manifest that a note file marks, given the file's name or path; None for any other file."""
    name = os.path.basename(file)
    return name.removesuffix(UNFINISHED).partition("+")[0] if name.endswith(UNFINISHED) else None


class Manifests(Protocol):
    """Storage of manifests: memory, a folder, or remote."""

    def names(self) -> list[str]:
        """The names of all manifests, sorted."""

    def read(self, name: str) -> Manifest | None:
        """The manifest, or None if there is none. Raises DatasetError for a damaged one."""

    def write(self, manifest: Manifest) -> None:
        """Replace the manifest as a whole, and end what `begin` noted."""

    def update(self, make: Callable[[], Manifest | None]) -> None:
        """Write the manifest that `make` returns, if any, without losing concurrent changes.

        Raises StoreBusyError if another client replaced it since it was read: see `update_manifest`.
        """
        if (manifest := make()) is not None:
            self.write(manifest)

    def begin(self, name: str) -> None:
        """Mark the manifest as in work by a run, until `write`."""

    def end(self, name: str) -> None:
        """Remove this run's mark from a manifest that is complete, after a crash between writing and unmarking."""


class ManifestMemory(Manifests):
    """Manifests in this process's memory, for the CPU store. No run outlives the process, so none is marked."""

    def __init__(self) -> None:
        self._manifests: dict[str, Manifest] = {}

    @override
    def names(self) -> list[str]:
        return sorted(self._manifests)

    @override
    def read(self, name: str) -> Manifest | None:
        return self._manifests.get(name)

    @override
    def write(self, manifest: Manifest) -> None:
        self._manifests[manifest.name] = manifest


class ManifestFolder:
    """Manifests as `<name>.safetensors` files in a folder, with a note file for each run that works on one.

    A run removes only its own notes. `source` is the run's source, for the owner of its notes (`owner_of`).
    """

    def __init__(self, path: str | Path, *, source: str = ""):
        self.path, self._owner = Path(path), owner_of(source)

    def names(self) -> list[str]:
        """The names of all manifests, sorted. Raises StoreError if the folder is unreadable."""
        return [file.removesuffix(SUFFIX) for file in self._files(SUFFIX)]

    def file(self, name: str) -> Path:
        """The path of the manifest of this name, which need not exist."""
        return self.path / f"{name}{SUFFIX}"

    def _files(self, suffix: str) -> list[str]:
        try:
            return sorted([name for name in os.listdir(self.path) if name.endswith(suffix)])
        except FileNotFoundError:
            return []
        except OSError as error:
            raise unreadable(self.path, error) from error

    def read(self, name: str) -> Manifest | None:
        """The manifest, or None if there is none. Raises DatasetError if it is invalid, StoreError if unreadable.

        The file is mapped, so that processes share its memory; not on Windows, which cannot replace a mapped file.
        """
        file = self.file(name)
        try:
            with file.open("rb") as opened:
                is_mapped = os.name != "nt" and os.fstat(opened.fileno()).st_size
                data = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) if is_mapped else opened.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise unreadable(file, error) from error
        manifest = read_manifest(data, name, file)
        if isinstance(data, mmap.mmap):
            with suppress(OSError):  # a hint: verifying the digest touched every page, and few are used again
                data.madvise(mmap.MADV_DONTNEED)
        return manifest

    def write(self, manifest: Manifest) -> None:
        """Replace the manifest's file. Raises ReadOnlyError, StorageFullError or StoreError."""
        self.update(lambda: manifest)

    def update(self, make: Callable[[], Manifest | None]) -> None:
        """Write the manifest that `make` returns, if any. No manifest is replaced meanwhile. Raises as `write` does."""
        with self.lock():
            if (manifest := make()) is not None:
                write_sealed(self.file(manifest.name), manifest_bytes(manifest))
                self.end(manifest.name)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the lock under which processes and threads compare and replace manifests of this folder."""
        self._make()
        with locked(self.path / LOCK, "replacing a manifest", shared=False, wait=True):
            yield

    def begin(self, name: str, owner: str | None = None) -> None:
        """Mark the manifest as in work by this run, or by `owner`, until `write`."""
        self._make()
        write_sealed(self.path / note_file(name, self._owner if owner is None else owner), now().encode())

    def end(self, name: str, owner: str | None = None) -> None:
        """Remove the mark of this run, or of `owner`."""
        self._remove([note_file(name, self._owner if owner is None else owner)])

    def unfinished(self) -> dict[str, str]:
        """The names of manifests with unfinished runs, each with the time when the first of these began."""
        times = {name: datetime.fromtimestamp(at, timezone.utc) for at, _, name in sorted(self._notes(), reverse=True)}
        return {name: time.isoformat(timespec="seconds") for name, time in times.items()}

    def give_up(self, before: datetime) -> None:
        """Remove the marks of all unfinished runs, of any owner, that began before this time."""
        self._remove([file for at, file, _ in self._notes() if at <= before.timestamp()])

    def _notes(self) -> Iterator[tuple[float, str, str]]:
        """The start (Unix time), note file and manifest of each unfinished run."""
        for file in self._files(UNFINISHED):
            with suppress(FileNotFoundError):  # it may have ended since it was listed
                yield (self.path / file).lstat().st_mtime, file, str(noted_in(file))

    def _remove(self, files: Iterable[str]) -> None:
        with typed_errors(self.path, 0):
            for file in files:
                (self.path / file).unlink(missing_ok=True)

    def _make(self) -> None:
        with typed_errors(self.path, 0):
            make_folder(self.path)


def update_manifest(manifests: Manifests, make: Callable[[], Manifest | None]) -> None:
    """Call `manifests.update`, and retry with backoff if another client replaced the manifest meanwhile."""
    for attempt in range(_ATTEMPTS):
        try:
            return manifests.update(make)
        except StoreBusyError:
            if attempt == _ATTEMPTS - 1:
                raise
            time.sleep(random.uniform(0.0, 0.05 * 2**attempt))


def keys_in_use(manifests: ManifestFolder, *, unfinished: bool = False) -> np.ndarray:
    """The keys of all manifests, which `prune` must keep: uint8 [n, 32].

    Raises StoreError without any manifest, and while a run is unfinished: `unfinished` gives up what such runs encoded.
    """
    path, names = manifests.path.parent, manifests.names()
    if not names:  # an unfinished first run has entries, and no manifest yet
        raise StoreError(
            f"{path}: has no manifest, so prune would remove every entry; run `latentcache precache CONFIG` first"
        )
    if not unfinished and (runs := manifests.unfinished()):
        begun = ", ".join(f"{name} (begun {time})" for name, time in runs.items())
        raise StoreError(
            f"{path}: not finished: {begun}. Their entries are in no manifest yet and would be removed: run precache "
            "again to finish them, or pass --unfinished to remove their entries"
        )
    return np.concatenate([manifest.rows.entry_keys() for manifest in map(manifests.read, names) if manifest])
