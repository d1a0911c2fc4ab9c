"""What the routes of one server share: its settings and limits, the cache, threads for what blocks, and counters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import anyio
from anyio.to_thread import run_sync
from fastapi import Request
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from typing_extensions import TypeVarTuple, Unpack

from latentcache.config import Config
from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.errors import EntryDamagedError, EntryMissingError, RequestRefused
from latentcache.precache.workspace import Workspace
from latentcache.service.auth import Access, Role
from latentcache.store.disk import DiskStore
from latentcache.utils.locks import ReadersLock

_Result = TypeVar("_Result")
_Arguments = TypeVarTuple("_Arguments")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one request may take, and all of them together."""

    max_body_bytes: int = 4 << 20
    """Max size of a JSON body, or of a form."""
    max_images_bytes: int = 128 << 20
    """Max size of an image to encode."""
    max_upload_bytes: int = 2 << 30
    """Max size of a pack or a manifest."""
    max_requests: int = 64
    """Requests under way at once. Others wait their turn."""
    max_uploads: int = 4
    """Threads that take uploads."""
    queue_s: float = 5.0
    """Time for which a request waits its turn: less than that after which a client asks again."""
    stall_s: float = 30.0
    """Time in which at least one byte of a body has to come: a client may be gone without a word."""
    num_threads: int = 8
    """Threads that read the store."""
    num_view_threads: int = 2
    """Threads that make pages and pictures, and count for `status`. A photo of 100 megapixels takes 300 MB in each."""


@dataclass(frozen=True, kw_only=True)
class ServiceSettings:
    """What a server is started with."""

    cache: Path
    """The cache's directory."""
    access: Access = field(default_factory=Access)
    limits: Limits = field(default_factory=Limits)
    writes: bool = False
    """Whether the cache is opened for writing: it is needed for uploads, and for encoding."""
    encode: Config | None = None
    """With whose models prompts and images are encoded that are not cached. None: they are not."""
    idle_s: float = 300.0
    """After so many seconds without such a miss the models leave the device."""
    config: Config | None = None
    """Gives the page the reasons of hits and misses, and a VAE for its pictures where that is quick."""
    show_photos: bool = False
    """Whether the page shows the photos, by their paths in the manifests: a client that may write chooses these."""


class ServiceState:
    """The cache of a server, and how its routes use it. StoreError and others if the cache cannot be opened."""

    def __init__(self, settings: ServiceSettings):
        self.settings, self.access, self.limits = settings, settings.access, settings.limits
        self.store = DiskStore(settings.cache, read_only=not settings.writes, create=settings.writes)
        self.manifests = ManifestFolder(self.store.path / "manifests")
        if settings.encode is not None and settings.encode.cache.max_bytes is not None:
            # Before there are clients. Later it can only be done as long as no manifest changes.
            Workspace(self.store, self.manifests).prune(settings.encode.cache.max_bytes)
        # Its clients are readers: `prune` may not remove what they may need.
        self._reading = None if self.store.read_only else ReadersLock(self.store.directory.readers)
        self.telemetry = Telemetry()
        limits = self.limits
        self._readers, self._viewers, self._writers = map(
            anyio.CapacityLimiter, (limits.num_threads, limits.num_view_threads, limits.max_uploads)
        )

    async def read(self, function: Callable[[Unpack[_Arguments]], _Result], *arguments: Unpack[_Arguments]) -> _Result:
        """Run what reads the store, in a thread."""
        try:
            return await run_sync(function, *arguments, limiter=self._readers)
        except EntryMissingError:
            self.telemetry.misses.inc()
            raise
        except EntryDamagedError:
            self.telemetry.damaged.inc()
            raise

    async def change(
        self, function: Callable[[Unpack[_Arguments]], _Result], *arguments: Unpack[_Arguments]
    ) -> _Result:
        """Run what changes the cache, in a thread. It ends in any case."""
        return await run_sync(function, *arguments, limiter=self._writers)

    async def view(self, function: Callable[[Unpack[_Arguments]], _Result], *arguments: Unpack[_Arguments]) -> _Result:
        """Run what reads whole manifests, or is for a person: few threads, so that trainers need not wait for it."""
        return await run_sync(function, *arguments, limiter=self._viewers)

    async def may_write(self, request: Request) -> None:
        """A dependency of routes that change the cache. RequestRefused without the writing token, or if none can."""
        self.access.check(request.scope["latentcache.role"], Role.WRITE)
        if self.store.read_only:
            raise RequestRefused("this server opened the cache for reading only", status=403)

    def close(self) -> None:
        """Close the cache."""
        self.store.close()
        if self._reading is not None:
            self._reading.close()


class Telemetry:
    """The counters of one server, for Prometheus, in `registry`."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()

        def counter(name: str, what: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"latentcache_{name}", what, labels, registry=registry)

        self.requests = counter("requests", "Requests, by route, method and status.", ("route", "method", "status"))
        self.hits = counter("hits", "Requested entries that were there.")
        self.misses = counter("misses", "Requested entries that were not there.")
        self.damaged = counter("damaged", "Requested entries that were damaged.")
        self.added = counter("added", "Entries that were added.")
        what = "Time until a request was answered whole."
        self.seconds = Histogram("latentcache_request_seconds", what, ["route"], registry=registry)
        self.in_progress = Gauge("latentcache_requests_in_progress", "Requests under way.", registry=registry)
