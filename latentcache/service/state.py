"""What the routes of a server share: settings, limits, the cache, thread pools and metrics."""

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
    """Limits of one request, and of all of them together."""

    max_body_bytes: int = 4 << 20
    """Largest JSON body or form."""
    max_images_bytes: int = 128 << 20
    """Largest image to encode."""
    max_upload_bytes: int = 2 << 30
    """Largest pack or manifest."""
    max_requests: int = 64
    """Requests handled at once; the others are queued."""
    max_uploads: int = 4
    """Threads that receive uploads."""
    queue_s: float = 5.0
    """How long a request is queued before it gets a 503: less than the timeout of a client."""
    stall_s: float = 30.0
    """How long no byte of a body may arrive before the request is ended: the client may be gone."""
    num_threads: int = 8
    """Threads that read the store."""
    num_view_threads: int = 2
    """Threads that make pages, pictures and `status`. Each may take 300 MB, for a photo of 100 megapixels."""


@dataclass(frozen=True, kw_only=True)
class ServiceSettings:
    """The settings of a server."""

    cache: Path
    """The cache's directory."""
    access: Access = field(default_factory=Access)
    limits: Limits = field(default_factory=Limits)
    writes: bool = False
    """Whether to open the cache for writing, which uploads and encoding need."""
    encode: Config | None = None
    """The config whose models encode prompts and images that are not cached; None encodes nothing."""
    idle_s: float = 300.0
    """Seconds without such a miss after which the models leave the device."""
    config: Config | None = None
    """The config by which the page explains hits and misses, and whose VAE decodes its pictures if that is quick."""
    show_photos: bool = False
    """Whether the page shows the photos at the paths in the manifests. Clients that may write choose these paths."""


class ServiceState:
    """The cache of a server, and how its routes use it. StoreError, ReadOnlyError if the cache cannot be opened."""

    def __init__(self, settings: ServiceSettings):
        self.settings, self.access, self.limits = settings, settings.access, settings.limits
        self.store = DiskStore(settings.cache, read_only=not settings.writes, create=settings.writes)
        self.manifests = ManifestFolder(self.store.path / "manifests")
        if settings.encode is not None and settings.encode.cache.max_bytes is not None:
            # Before there are clients: with readers, nothing can be pruned after a manifest has changed.
            Workspace(self.store, self.manifests).prune(settings.encode.cache.max_bytes)
        # The clients count as readers, so that `prune` keeps what they may need.
        self._reading = None if self.store.read_only else ReadersLock(self.store.directory.readers)
        self.telemetry = Telemetry()
        limits = self.limits
        self._readers, self._viewers, self._writers = map(
            anyio.CapacityLimiter, (limits.num_threads, limits.num_view_threads, limits.max_uploads)
        )

    async def read(self, function: Callable[[Unpack[_Arguments]], _Result], *arguments: Unpack[_Arguments]) -> _Result:
        """Run a function that reads the store in a thread."""
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
        """Run a function that changes the cache in a thread, to its end even if the client disconnects."""
        return await run_sync(function, *arguments, limiter=self._writers)

    async def view(self, function: Callable[[Unpack[_Arguments]], _Result], *arguments: Unpack[_Arguments]) -> _Result:
        """Run a slow function, or one for the page, in one of a few threads: trainers do not wait for it."""
        return await run_sync(function, *arguments, limiter=self._viewers)

    async def may_write(self, request: Request) -> None:
        """Dependency of routes that change the cache. RequestRefused without the writing token, or if read-only."""
        self.access.check(request.scope["latentcache.role"], Role.WRITE)
        if self.store.read_only:
            raise RequestRefused("this server opened the cache read-only", status=403)

    def close(self) -> None:
        """Close the cache."""
        self.store.close()
        if self._reading is not None:
            self._reading.close()


class Telemetry:
    """The Prometheus metrics of one server, in `registry`."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()

        def counter(name: str, what: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"latentcache_{name}", what, labels, registry=registry)

        self.requests = counter("requests", "Requests, by route, method and status.", ("route", "method", "status"))
        self.hits = counter("hits", "Requested entries that were cached.")
        self.misses = counter("misses", "Requested entries that were not cached.")
        self.damaged = counter("damaged", "Requested entries that were damaged.")
        self.added = counter("added", "Entries added by uploads.")
        what = "Time until the response was complete."
        self.seconds = Histogram("latentcache_request_seconds", what, ["route"], registry=registry)
        self.in_progress = Gauge("latentcache_requests_in_progress", "Requests in progress.", registry=registry)
