"""BucketManifests: manifests in a bucket, which several machines may replace at once."""

from __future__ import annotations

import logging
import platform
import re
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime

from latentcache.dataset.manifest import Manifest, manifest_parts, merged_rows, read_manifest
from latentcache.dataset.manifest_folder import OLD_SUFFIX, SUFFIX, UNFINISHED
from latentcache.errors import DatasetError, ReadOnlyError, StoreBusyError
from latentcache.identity import digest
from latentcache.provenance import now
from latentcache.remote.bucket import Bucket, StoredObject, Version, in_threads

FOLDER = "manifests"
ATTEMPTS = 20
"""To read what others replace all the time."""
logger = logging.getLogger("latentcache")

_OBJECT = re.compile(rf"{FOLDER}/([^/]+?)(\+[0-9a-f]{{32}})?({re.escape(SUFFIX)}|{re.escape(OLD_SUFFIX)})")
_NOTE = re.compile(rf"{FOLDER}/([^/]+?)(\+[0-9a-f]{{32}})?{re.escape(UNFINISHED)}")


class BucketManifests:
    """Manifests in a bucket: nothing that another writer wrote meanwhile is lost.

    A store that compares (`Bucket.can_replace`) has one object for each, `manifests/<name>.safetensors`, which is
    replaced only if it is the one that was read. In another store each writer puts an object of its own,
    `manifests/<name>+<unique>.safetensors`, and removes those that it had read; readers merge those that are there.
    RemoteError; ReadOnlyError if it was opened for reading.
    """

    def __init__(self, bucket: Bucket, *, read_only: bool = False, source: str = ""):
        """`source`: what is pushed. Each machine and source has a note of its own, which the same run ends later."""
        self._bucket, self._read_only = bucket, read_only
        self._owner = digest(f"{platform.node()} {source}".encode())[:32]
        self._seen: dict[str, dict[str, Version | None]] = {}
        """Of what was read last: the version of each object, by its name, by the manifest's name."""

    def names(self) -> list[str]:
        """The names of all manifests, sorted."""
        return sorted(self._objects())

    def _objects(self) -> dict[str, list[str]]:
        """The objects of each manifest."""
        found: dict[str, list[str]] = {}
        for name in self._bucket.names(FOLDER):
            if match := _OBJECT.fullmatch(name):
                found.setdefault(match[1], []).append(name)
        return found

    def read(self, name: str) -> Manifest | None:
        """The manifest, or None if there is none. DatasetError for one that is damaged."""
        for _ in range(ATTEMPTS):
            names = self._objects().get(name, [])
            found = dict(zip(names, in_threads(self._bucket.read, names), strict=True))
            objects = {each: part for each, part in found.items() if part is not None}
            if len(objects) == len(names):  # else a writer removed what it had merged: look again
                self._seen[name] = {each: part.version for each, part in objects.items()}
                return merged_manifests(self._parsed(name, objects))
        raise StoreBusyError(self._bucket.url, f"the manifest {name} is replaced all the time: run the same again")

    def _parsed(self, name: str, objects: dict[str, StoredObject]) -> Iterable[Manifest]:
        """The manifests in these objects, the newest first."""
        for each, part in sorted(objects.items(), key=lambda pair: (pair[1].modified, pair[0]), reverse=True):
            yield read_manifest(part.data, name, f"{self._bucket.url}/{each}", whole_check=True)

    def write(self, manifest: Manifest) -> None:
        """Replace what this object read of the manifest, or all that is there now; end what `begin` noted.

        StoreBusyError if another writer replaced it since it was read: then the next call replaces that.
        """
        self._check_writable()
        name = manifest.name
        if name not in self._seen:
            with suppress(DatasetError):  # a damaged one is replaced
                self.read(name)
        seen = self._seen.pop(name)
        written = self._written(manifest, seen)
        if written is None:
            raise StoreBusyError(
                self._bucket.url, f"another client replaced the manifest {name} since it was read: run the same again"
            )
        self._bucket.remove([*(seen.keys() - {written}), self._note(name)])

    def _written(self, manifest: Manifest, seen: dict[str, Version | None]) -> str | None:
        """The name of the object that was written, or None if another writer came between."""
        data = b"".join(manifest_parts(manifest))
        if self._bucket.can_replace:
            name = f"{FOLDER}/{manifest.name}{SUFFIX}"
            return name if self._bucket.replace(name, data, seen.get(name)) else None
        # In the order of time, for those that a store calls equally old.
        name = f"{FOLDER}/{manifest.name}+{time.time_ns():016x}{uuid.uuid4().hex[:16]}{SUFFIX}"
        self._bucket.put(name, data)
        return name

    def update(self, make: Callable[[], Manifest | None]) -> None:
        """Write the manifest that `make` returns, if any. As `write`."""
        if (manifest := make()) is not None:
            self.write(manifest)

    def begin(self, name: str) -> None:
        """Note that a run began to work on the manifest. `write` ends it."""
        self._check_writable()
        self._bucket.put(self._note(name), now().encode())

    def end(self, name: str) -> None:
        """End what this machine noted for this source, also in a run that died. Not what others noted."""
        self._check_writable()
        self._bucket.remove([self._note(name)])

    def _note(self, name: str) -> str:
        return f"{FOLDER}/{name}+{self._owner}{UNFINISHED}"

    def unfinished(self) -> list[str]:
        """The names of runs that began and did not finish."""
        return sorted({match[1] for name in self._bucket.names(FOLDER) if (match := _NOTE.fullmatch(name))})

    def give_up(self, before: datetime) -> None:
        """End runs that began before this time and did not finish, on any machine."""
        self._check_writable()
        times = self._bucket.times(FOLDER)
        self._bucket.remove([name for name, begun in times.items() if _NOTE.fullmatch(name) and begun <= before])

    def _check_writable(self) -> None:
        if self._read_only:
            raise ReadOnlyError(self._bucket.url)


def merged_manifests(manifests: Iterable[Manifest]) -> Manifest | None:
    """One manifest of several with one name, the newest first, by the rule of `merged_rows`.

    Only those count that were encoded as the newest was: samples of another encoding would not fit to it.
    """
    found = list(manifests)
    alike = [each for each in found if _kind(each) == _kind(found[0])]
    if len(alike) < len(found):
        logger.warning(
            "manifest %s: another machine wrote one of another role or encoding at the same time. The newest counts: "
            "push the other again with --replace, if it is the right one.",
            found[0].name,
        )
    if len(alike) < 2:
        return found[0] if found else None  # as it is: the rows of a manifest that was read take little memory
    rows = alike[-1].rows
    for newer in alike[-2::-1]:
        rows = merged_rows(rows, newer.rows)
    return replace(alike[0], rows=rows)


def _kind(manifest: Manifest) -> tuple[object, ...]:
    return manifest.role, manifest.repeats, manifest.common
