"""Manifests as files: sent and taken byte by byte."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latentcache.dataset.manifest import REMEDY, check_manifest
from latentcache.dataset.manifest_folder import NAME_PATTERN, UNFINISHED, ManifestFolder
from latentcache.errors import DatasetError, RequestRefused
from latentcache.utils.durable_files import (
    make_folder,
    open_regular,
    sealed_file,
    typed_errors,
    write_all,
)

_MAX_HEADER_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class ManifestFacts:
    """What the first line of a manifest says. `etag` has the digest of all that it holds."""

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
        return self.folder.path / f"{name}.jsonl"

    def names(self) -> list[str]:
        """The names of all manifests, sorted."""
        return [name for name in self.folder.names() if re.fullmatch(NAME_PATTERN, name)]

    def open(self, name: str) -> tuple[int, ManifestFacts]:
        """A descriptor of a manifest's file, which the caller closes, and its facts."""
        path = self.path(name)
        try:
            fd = open_regular(path, REMEDY)
        except FileNotFoundError:
            known = ", ".join(self.names()) or "none yet"
            raise RequestRefused(f"there is no manifest {name!r}", status=404, met=name, allowed=known) from None
        try:
            with os.fdopen(os.dup(fd), "rb") as file:
                return fd, _facts(file.readline(_MAX_HEADER_BYTES), name, path)
        except BaseException:
            os.close(fd)
            raise

    def facts(self, name: str) -> ManifestFacts:
        """What the first line of a manifest says."""
        fd, facts = self.open(name)
        os.close(fd)
        return facts

    def take(
        self, name: str, chunks: Iterable[bytes], num_bytes: int, allow: Callable[[str | None], None]
    ) -> ManifestFacts:
        """Put a manifest in the place of the one of this name, and end what `begin` noted.

        `chunks` are the bytes of its file. They are checked whole before anything is replaced: RequestRefused. `allow`
        is called with the ETag of the manifest that is there, or None, just before, and raises if it may not be
        replaced.
        """
        path = self.path(name)
        with typed_errors(path, 0):
            make_folder(path.parent)
        with ExitStack() as held:
            with sealed_file(path, num_bytes) as fd:
                for chunk in chunks:
                    write_all(fd, chunk)
                with os.fdopen(os.dup(fd), "rb") as file:
                    file.seek(0)
                    try:
                        check_manifest(file, name, name)
                    except DatasetError as error:
                        raise RequestRefused(str(error), status=422) from error
                    file.seek(0)
                    facts = _facts(file.readline(_MAX_HEADER_BYTES), name, path)
                # Two that replace the same version, also by other processes: only the first may.
                held.enter_context(self.folder.lock())
                allow(self._etag(name))
            note = path.with_name(f"{name}{UNFINISHED}")
            with typed_errors(note, 0):
                note.unlink(missing_ok=True)
        return facts

    def _etag(self, name: str) -> str | None:
        try:
            return self.facts(name).etag
        except RequestRefused:
            return None
        except DatasetError:
            return '"damaged"'  # a client that expects no certain version may replace it

    def begin(self, name: str) -> None:
        """Note that a run began to work on the manifest."""
        self.path(name)
        self.folder.begin(name)


def _facts(line: bytes, name: str, path: Path) -> ManifestFacts:
    try:
        header = json.loads(line)
        digest, role, num_samples = header["digest"], header["role"], header["num_samples"]
        if not re.fullmatch("[0-9a-f]{64}", digest) or type(role) is not str or type(num_samples) is not int:
            raise ValueError("its first line is not a manifest's")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DatasetError(path, f"is no manifest: line 1: {error!r:.200}; {REMEDY}") from error
    return ManifestFacts(name, role, num_samples, f'"{digest}"')
