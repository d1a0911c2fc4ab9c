"""Where manifests are kept: a folder, or the memory of a process."""

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

from typing_extensions import override

from latentcache.dataset.manifest import Manifest, manifest_bytes, read_manifest
from latentcache.errors import StoreBusyError, StoreError
from latentcache.identity import digest
from latentcache.provenance import now
from latentcache.utils.durable_files import make_folder, typed_errors, unreadable, write_sealed
from latentcache.utils.locks import locked

NAME_PATTERN = "^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$"
"""How a service names its manifests. A name is never a path."""
UNFINISHED = ".unfinished"
LOCK = ".lock"
"""A file next to the manifests, which is locked while one is replaced."""
SUFFIX = ".safetensors"
"""How the file of a manifest ends."""
_ATTEMPTS = 8
"""To write a manifest that another client replaces in the middle each time."""


def owner_of(source: str = "") -> str:
    """The owner of a run's notes: this machine, and where the run reads. The same run, started again, is the same."""
    return digest(f"{platform.node()} {source}".encode())[:32]


def note_file(name: str, owner: str) -> str:
    """The file that notes that a run of this owner, or of none that is known, works on a manifest."""
    return f"{name}+{owner}{UNFINISHED}" if owner else f"{name}{UNFINISHED}"


def noted_in(file: str) -> str | None:
    """The manifest that a file notes a run of, by the file's name or path; None for another file."""
    name = os.path.basename(file)
    return name.removesuffix(UNFINISHED).partition("+")[0] if name.endswith(UNFINISHED) else None


class Manifests(Protocol):
    """Where manifests are stored: memory, a folder, or elsewhere."""

    def names(self) -> list[str]:
        """The names of all manifests, sorted."""

    def read(self, name: str) -> Manifest | None:
        """The manifest, or None if there is none. DatasetError for one that is damaged."""

    def write(self, manifest: Manifest) -> None:
        """Replace the manifest as a whole, and end what `begin` noted."""

    def update(self, make: Callable[[], Manifest | None]) -> None:
        """Write the manifest that `make` returns, if any. Others do not undo it, nor it theirs.

        StoreBusyError if another client replaced it since it was read: see `update_manifest`.
        """
        if (manifest := make()) is not None:
            self.write(manifest)

    def begin(self, name: str) -> None:
        """Note that a run began to work on the manifest. `write` ends it."""

    def end(self, name: str) -> None:
        """End what `begin` noted here, of a run whose manifest is there: one that died after it had written it."""


class ManifestMemory(Manifests):
    """Manifests of this process, for the CPU store. No unfinished run outlives it: nothing is noted."""

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
    """Manifests as `<name>.safetensors` files in a folder, and notes of the runs that work on them.

    Each run ends its own note alone. `source` is where this run reads, for the owner of its notes (`owner_of`).
    """

    def __init__(self, path: str | Path, *, source: str = ""):
        self.path, self._owner = Path(path), owner_of(source)

    def names(self) -> list[str]:
        """The names of all manifests, sorted. StoreError if the folder cannot be read."""
        return [file.removesuffix(SUFFIX) for file in self._files(SUFFIX)]

    def file(self, name: str) -> Path:
        """Where the manifest of this name is, or would be."""
        return self.path / f"{name}{SUFFIX}"

    def _files(self, suffix: str) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self.path) if name.endswith(suffix))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise unreadable(self.path, error) from error

    def read(self, name: str) -> Manifest | None:
        """The manifest, or None if there is none. DatasetError names the file; StoreError: it cannot be read now.

        Its file is mapped, so that processes share it. Windows replaces no file that is mapped.
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
        if isinstance(data, mmap.mmap):  # checking the digest read every page; few are used again
            data.madvise(mmap.MADV_DONTNEED)
        return manifest

    def write(self, manifest: Manifest) -> None:
        """Replace the manifest's file. ReadOnlyError, StorageFullError or StoreError when that cannot be done."""
        self.update(lambda: manifest)

    def update(self, make: Callable[[], Manifest | None]) -> None:
        """Write the manifest that `make` returns, if any. What it reads is not replaced meanwhile. As `write`."""
        with self.lock():
            if (manifest := make()) is not None:
                write_sealed(self.file(manifest.name), manifest_bytes(manifest))
                self.end(manifest.name)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold what each process and thread waits for before it compares and replaces a manifest of this folder."""
        self._make()
        with locked(self.path / LOCK, "replacing a manifest", shared=False, wait=True):
            yield

    def begin(self, name: str, owner: str | None = None) -> None:
        """Note that a run began to work on the manifest. `write` ends it. `owner`: not this run, but that one."""
        self._make()
        write_sealed(self.path / note_file(name, self._owner if owner is None else owner), now().encode())

    def end(self, name: str, owner: str | None = None) -> None:
        """End what `begin` noted for this owner."""
        self._remove([note_file(name, self._owner if owner is None else owner)])

    def unfinished(self) -> dict[str, str]:
        """The names of runs that began and did not finish, with the time when the first one of each started."""
        times = {name: datetime.fromtimestamp(at, timezone.utc) for at, _, name in sorted(self._notes(), reverse=True)}
        return {name: time.isoformat(timespec="seconds") for name, time in times.items()}

    def give_up(self, before: datetime) -> None:
        """End runs that began before this time and did not finish, of any owner."""
        self._remove([file for at, file, _ in self._notes() if at <= before.timestamp()])

    def _notes(self) -> Iterator[tuple[float, str, str]]:
        """When each run began (seconds since 1970), its note's file, and the manifest."""
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
    """Do as `manifests.update`, and again with a new `make` when another client replaced the manifest meanwhile."""
    for attempt in range(_ATTEMPTS):
        try:
            return manifests.update(make)
        except StoreBusyError:
            if attempt == _ATTEMPTS - 1:
                raise
            time.sleep(random.uniform(0.0, 0.05 * 2**attempt))


def keys_in_use(manifests: ManifestFolder, *, unfinished: bool = False) -> set[str]:
    """The keys of all manifests: what `prune` must keep. StoreError where it cannot be known what is in use.

    That is so without any manifest, and while a run is not finished, unless `unfinished` gives up what it encoded.
    """
    path, names = manifests.path.parent, manifests.names()
    if not names:  # an unfinished first run has entries, and no manifest yet
        raise StoreError(
            f"{path}: has no manifest, so prune would remove every entry; run `latentcache precache CONFIG` first"
        )
    if not unfinished and (runs := manifests.unfinished()):
        begun = ", ".join(f"{name} (begun {time})" for name, time in runs.items())
        raise StoreError(
            f"{path}: not finished: {begun}. What was encoded for them is in no manifest yet, and would be removed: "
            "run precache again to finish, or give --unfinished to remove it"
        )
    return {key for name in names if (manifest := manifests.read(name)) for key in manifest.keys()}
