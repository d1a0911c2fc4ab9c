"""BucketManifests: manifests in a bucket, which several machines may replace at once."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from io import BytesIO

from latentcache.dataset.manifest import Manifest, manifest_lines, read_manifest
from latentcache.dataset.manifest_folder import UNFINISHED
from latentcache.dataset.manifest_row import Row
from latentcache.errors import DatasetError, ReadOnlyError, StoreBusyError
from latentcache.provenance import now
from latentcache.remote.bucket import Bucket, StoredObject, Version, in_threads

FOLDER = "manifests"
ATTEMPTS = 20
"""To replace a manifest that others replace all the time, or to read what they remove."""
_OBJECT = re.compile(rf"{FOLDER}/([^/]+?)(\+[0-9a-f]{{32}})?\.jsonl")


class BucketManifests:
    """Manifests in a bucket: nothing that another writer wrote meanwhile is lost.

    A store that compares (`Bucket.can_replace`) has one object for each, `manifests/<name>.jsonl`, which is replaced
    only if it is the one that was read; otherwise both are merged. In another store each writer puts an object of its
    own, `manifests/<name>+<unique>.jsonl`, and removes those that it had read; readers merge those that are there.
    RemoteError; ReadOnlyError if it was opened for reading.
    """

    def __init__(self, bucket: Bucket, *, read_only: bool = False):
        self._bucket, self._read_only = bucket, read_only
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
            yield read_manifest(BytesIO(part.data), name, f"{self._bucket.url}/{each}")

    def write(self, manifest: Manifest) -> None:
        """Replace what this object read of the manifest, or all that is there now. See the class for the rest."""
        self._check_writable()
        name = manifest.name
        if name not in self._seen:
            with suppress(DatasetError):  # a damaged one is replaced
                self.read(name)
        for _ in range(ATTEMPTS):
            seen = self._seen[name]
            written = self._written(manifest, seen)
            if written is not None:
                self._bucket.remove([*(seen.keys() - {written}), f"{FOLDER}/{name}{UNFINISHED}"])
                del self._seen[name]
                return
            with suppress(DatasetError):
                manifest = merged_manifests(filter(None, [manifest, self.read(name)])) or manifest
        raise StoreBusyError(self._bucket.url, f"the manifest {name} is replaced all the time: run the same again")

    def _written(self, manifest: Manifest, seen: dict[str, Version | None]) -> str | None:
        """The name of the object that was written, or None if another writer came between."""
        data = b"".join(manifest_lines(manifest))
        if self._bucket.can_replace:
            name = f"{FOLDER}/{manifest.name}.jsonl"
            return name if self._bucket.replace(name, data, seen.get(name)) else None
        # In the order of time, for those that a store calls equally old.
        name = f"{FOLDER}/{manifest.name}+{time.time_ns():016x}{uuid.uuid4().hex[:16]}.jsonl"
        self._bucket.put(name, data)
        return name

    def update(self, make: Callable[[], Manifest | None]) -> None:
        """Write the manifest that `make` returns, if any. As `write`: what others wrote since `make` read is merged."""
        if (manifest := make()) is not None:
            self.write(manifest)

    def begin(self, name: str) -> None:
        """Note that a run began to work on the manifest. `write` ends it."""
        self._check_writable()
        self._bucket.put(f"{FOLDER}/{name}{UNFINISHED}", now().encode())

    def unfinished(self) -> list[str]:
        """The names of runs that began and did not finish."""
        names = [name.removeprefix(f"{FOLDER}/") for name in self._bucket.names(FOLDER)]
        return sorted(name.removesuffix(UNFINISHED) for name in names if name.endswith(UNFINISHED))

    def _check_writable(self) -> None:
        if self._read_only:
            raise ReadOnlyError(self._bucket.url)


def merged_manifests(manifests: Iterable[Manifest]) -> Manifest | None:
    """One manifest of several with one name, the newest first: of a sample that several have, the newest row.

    Only those count that were encoded as the newest was: samples of another encoding would not fit to it.
    """
    found = list(manifests)
    alike = [each for each in found if (each.role, each.common) == (found[0].role, found[0].common)]
    if len(alike) < 2:
        return found[0] if found else None  # as it is: the rows of a manifest that was read take little memory
    rows: dict[str, Row] = {}
    for manifest in reversed(alike):
        rows |= manifest.rows
    return replace(alike[0], rows=rows)
