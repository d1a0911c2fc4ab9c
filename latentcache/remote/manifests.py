"""RemoteManifests: the manifests of a remote cache, which several machines may replace concurrently."""

from __future__ import annotations

import logging
import re
from contextlib import suppress
from datetime import datetime

from latentcache.dataset.manifest import Manifest, manifest_bytes, read_manifest
from latentcache.dataset.manifest_folder import NAME_PATTERN, SUFFIX, Manifests, note_file, noted_in, owner_of
from latentcache.errors import DatasetError, ReadOnlyError, RemoteError, StoreBusyError
from latentcache.provenance import now
from latentcache.remote.transport import ANY_VERSION, Transport

_FOLDER = "manifests"

logger = logging.getLogger("latentcache")


class RemoteManifests(Manifests):
    """The manifests behind a transport: one file each, replaced only if it is still the version that was read.

    So no concurrent write is lost. RemoteError; ReadOnlyError if it was opened for reading.
    """

    def __init__(self, transport: Transport, *, read_only: bool = False, source: str = ""):
        """`source`: where this run reads from; part of the owner of its notes (`owner_of`)."""
        self._transport, self._read_only, self._owner = transport, read_only, owner_of(source)
        self._versions: dict[str, str | None] = {}
        """The version of each manifest that was read last; None if there was none."""

    def names(self) -> list[str]:
        """The sorted names of all manifests."""
        files = [name.removeprefix(f"{_FOLDER}/") for name in self._transport.list(_FOLDER)]
        names = sorted(file.removesuffix(SUFFIX) for file in files if file.endswith(SUFFIX))
        if odd := [name for name in names if not re.fullmatch(NAME_PATTERN, name)]:  # a pull turns names into paths
            step = f"Names must match {NAME_PATTERN}. Remove or rename that file there."
            raise RemoteError(self._transport.url, f"{odd[0]!r:.120} is not a valid name of a manifest", step)
        return names

    def read(self, name: str) -> Manifest | None:
        """The manifest, or None if there is none. DatasetError if it is damaged on the second attempt too."""
        try:
            return self._read(name)
        except DatasetError as error:
            logger.warning("%s. Fetching it again.", error)
            return self._read(name)

    def _read(self, name: str) -> Manifest | None:
        self._versions.pop(name, None)
        try:
            data, version = self._transport.read(_file(name))
        except FileNotFoundError:
            self._versions[name] = None
            return None
        self._versions[name] = version
        return read_manifest(data, name, f"{self._transport.url}/{_file(name)}", whole_check=True)

    def write(self, manifest: Manifest) -> None:
        """Replace the version of the manifest that this object read, or else the current one; end the note of `begin`.

        A damaged manifest that a service refuses to return is replaced in any version.

        StoreBusyError if another writer replaced the manifest since it was read; read it again before retrying.
        """
        self._check_writable()
        self._transport.check_compares()
        name, data = manifest.name, manifest_bytes(manifest)
        if name not in self._versions:
            with suppress(DatasetError):  # a damaged one is replaced
                self._read(name)
        is_written = self._transport.write(_file(name), data, version=self._versions.get(name, ANY_VERSION))
        # If the first attempt got through but its response was lost, the manifest already has these bytes.
        if not is_written and not self._has(name, data):
            raise StoreBusyError(
                self._transport.url,
                f"another client replaced the manifest {name} since this one read it. Nothing that was encoded is "
                "lost: run the same command again",
            )
        self._versions.pop(name, None)
        self._transport.remove([self._note(name)])

    def _has(self, name: str, data: bytes) -> bool:
        with suppress(FileNotFoundError, DatasetError):
            return bytes(self._transport.read(_file(name))[0]) == data
        return False

    def begin(self, name: str) -> None:
        """Note that a run works on the manifest. `write` removes the note."""
        self._check_writable()
        self._transport.check_compares()
        self._transport.write(self._note(name), now().encode(), version=ANY_VERSION)

    def end(self, name: str) -> None:
        """Remove this machine's note for this source, even one of a run that died, but no notes of other machines."""
        self._check_writable()
        self._transport.remove([self._note(name)])

    def _note(self, name: str) -> str:
        return f"{_FOLDER}/{note_file(name, self._owner)}"

    def unfinished(self) -> list[str]:
        """The manifests of runs that began and did not finish."""
        return sorted({noted for file in self._transport.list(_FOLDER) if (noted := noted_in(file))})

    def give_up(self, before: datetime) -> None:
        """Remove the notes of unfinished runs, on any machine, that began before this time."""
        self._check_writable()
        listed = self._transport.list(_FOLDER).items()
        old = [name for name, each in listed if noted_in(name) and each.modified <= before.timestamp()]
        self._transport.remove(old)

    def _check_writable(self) -> None:
        if self._read_only:
            raise ReadOnlyError(self._transport.url)


def _file(name: str) -> str:
    return f"{_FOLDER}/{name}{SUFFIX}"
