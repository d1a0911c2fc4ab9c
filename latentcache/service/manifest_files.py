"""Manifests as files: sent and taken byte by byte."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latentcache.dataset.manifest import MAX_HEADER_BYTES, read_head, read_manifest
from latentcache.dataset.manifest_folder import NAME_PATTERN, SUFFIX, ManifestFolder
from latentcache.errors import DatasetError, RequestRefused
from latentcache.utils.durable_files import (
    make_folder,
    open_to_read,
    sealed_file,
    typed_errors,
    write_all,
)


@dataclass(frozen=True, slots=True)
class ManifestFacts:
    """What the head of a manifest says. `etag` has the digest of all that it holds."""

    name: str
    role: str
    num_samples: int
    etag: str

    def to_json(self) -> dict[str, Any]:
        """The facts as JSON."""
        return {"name": self.name, "role": self.role, "num_samples": self.num_samples, "etag": self.etag}


class ManifestFiles:
    """The manifests of a folder. Threads may share it.

    DatasetError for a file that is none, RequestRefused for a name of which there is none.
    """

    def __init__(self, folder: ManifestFolder):
        self.folder = folder

    def path(self, name: str) -> Path:
        """The file of a manifest of this name. RequestRefused for what can be no name."""
        if not re.fullmatch(NAME_PATTERN, name):
            raise RequestRefused(
                f"{name!r:.120} is no name of a manifest", status=422, met=name[:120], allowed=NAME_PATTERN
            )
        return self.folder.file(name)

    def names(self) -> list[str]:
        """The names of all manifests, sorted."""
        return [name for name in self.folder.names() if re.fullmatch(NAME_PATTERN, name)]

    def open(self, name: str) -> tuple[int, ManifestFacts]:
        """A descriptor of a manifest's file, which the caller closes, and its facts."""
        path = self.path(name)
        try:
            fd = open_to_read(path)
        except FileNotFoundError:
            known = ", ".join(self.names()) or "none yet"
            raise RequestRefused(f"there is no manifest {name!r}", status=404, met=name, allowed=known) from None
        try:
            num_bytes = min(int.from_bytes(os.pread(fd, 8, 0), "little"), MAX_HEADER_BYTES)
            return fd, _facts(os.pread(fd, 8 + num_bytes, 0), name, path)
        except BaseException:
            os.close(fd)
            raise

    def facts(self, name: str) -> ManifestFacts:
        """What the head of a manifest says."""
        fd, facts = self.open(name)
        os.close(fd)
        return facts

    def take(
        self, name: str, chunks: Iterable[bytes], num_bytes: int, allow: Callable[[str | None], None]
    ) -> ManifestFacts:
        """Put a manifest in the place of the one of this name, and end what `begin` noted for no owner.

        `chunks` are the bytes of its file. They are checked whole before anything is replaced: RequestRefused. `allow`
        is called with the ETag of the manifest that is there, or None, just before, and raises if it may not be
        replaced.
        """
        self.path(name)  # it may be no name
        path = self.folder.path / f"{name}{SUFFIX}"
        with typed_errors(path, 0):
            make_folder(path.parent)
        with ExitStack() as held:
            with sealed_file(path, num_bytes) as fd:
                for chunk in chunks:
                    write_all(fd, chunk)
                try:
                    data = mmap.mmap(fd, 0, access=mmap.ACCESS_READ) if os.fstat(fd).st_size else b""
                    read_manifest(data, name, name, whole_check=True)
                except DatasetError as error:
                    raise RequestRefused(str(error), status=422) from error
                facts = _facts(memoryview(data), name, path)
                # Two that replace the same version, also by other processes: only the first may.
                held.enter_context(self.folder.lock())
                allow(self._etag(name))
            self.folder.end(name, "")
        return facts

    def _etag(self, name: str) -> str | None:
        try:
            return self.facts(name).etag
        except RequestRefused:
            return None
        except DatasetError:
            return '"damaged"'  # a client that expects no certain version may replace it

    def begin(self, name: str, owner: str) -> None:
        """Note that a run of this owner began to work on the manifest."""
        self.path(name)
        self.folder.begin(name, owner)

    def end(self, name: str, owner: str) -> None:
        """End what `begin` noted for this owner."""
        self.path(name)
        self.folder.end(name, owner)


def _facts(data: bytes | memoryview, name: str, path: Path) -> ManifestFacts:
    head = read_head(data, name, path)
    return ManifestFacts(name, head.role, head.num_samples, f'"{head.digest}"')
