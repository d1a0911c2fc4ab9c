"""RemoteManifests: the manifests of a service."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import quote

from latentcache.dataset.manifest import Manifest, manifest_parts, read_manifest
from latentcache.dataset.manifest_folder import NAME_PATTERN
from latentcache.errors import DatasetError, StoreBusyError
from latentcache.remote.http import UPLOAD_ANSWER_S, ServiceConnection, understood

_MISSING, _CHANGED = 404, 412

logger = logging.getLogger("latentcache")


class RemoteManifests:
    """Manifests of the service at the other end of a connection, which the store of that service closes.

    A manifest that this object read is replaced only if it is still the one that was read: another client's work is
    never undone. RemoteError, ReadOnlyError.
    """

    def __init__(self, http: ServiceConnection):
        self._http = http
        self._etags: dict[str, str | None] = {}
        """Of what was read last, by name; None where there was none."""

    def names(self) -> list[str]:
        """The names of all manifests, sorted."""
        with understood(self._http.request("GET", "manifests")) as document:
            names = sorted(str(each["name"]) for each in document["manifests"])
            if odd := [name for name in names if not re.fullmatch(NAME_PATTERN, name)]:  # a pull makes it a path
                raise ValueError(f"{odd[0]!r:.120} is no name of a manifest")
            return names

    def read(self, name: str) -> Manifest | None:
        """The manifest, or None if there is none. DatasetError for one that is damaged."""
        route = _route(name)
        for is_last in (False, True):
            answer = self._http.request("GET", route, also=[_MISSING])
            if answer.status == _MISSING:
                self._etags[name] = None
                return None
            self._etags[name] = answer.headers.get("ETag")
            try:
                return read_manifest(answer.data, name, answer.url, whole_check=True)
            except DatasetError as error:
                if is_last:
                    raise
                logger.warning("%s. It is fetched again.", error)
        raise AssertionError("the loop ends by return or raise")

    def write(self, manifest: Manifest) -> None:
        """Replace the manifest as a whole. StoreBusyError if another client replaced it by another one meanwhile."""
        name, parts = manifest.name, [bytes(part) for part in manifest_parts(manifest)]
        if name not in self._etags:
            with suppress(DatasetError):  # a damaged one is replaced
                self.read(name)
        etag = self._etags.get(name, "*")
        condition = {"If-None-Match": "*"} if etag is None else {"If-Match": etag}
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(sum(map(len, parts))), **condition}
        answer = self._http.request(
            "PUT", _route(name), body=lambda: parts, headers=headers, also=[_CHANGED], answer_s=UPLOAD_ANSWER_S
        )
        # Also where a first attempt arrived, and its answer was lost: then what is there is what was sent.
        if answer.status == _CHANGED and not self._has(name, parts):
            raise StoreBusyError(
                self._http.url,
                f"another client replaced the manifest {name} since this one read it. What was encoded is stored: run "
                "the same command again",
            )
        self._etags.pop(name, None)  # and the service has ended what `begin` noted

    def update(self, make: Callable[[], Manifest | None]) -> None:
        """Write the manifest that `make` returns, if any. As `write`: the server compares what `make` read."""
        if (manifest := make()) is not None:
            self.write(manifest)

    def _has(self, name: str, parts: list[bytes]) -> bool:
        manifest = self.read(name)
        return manifest is not None and manifest_parts(manifest) == parts

    def begin(self, name: str) -> None:
        """Note that a run began to work on the manifest. `write` ends it."""
        self._http.request("PUT", f"{_route(name)}/unfinished")

    def end(self, name: str) -> None:
        """Nothing: other clients may work on it, and share the note. The next `write` ends it."""


def _route(name: str) -> str:
    return f"manifests/{quote(name, safe='')}"
