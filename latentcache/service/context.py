"""What the routes of one server share: its settings, the cache, and threads for what blocks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

import anyio
from fastapi import Request

from latentcache.config import Config
from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.errors import EntryDamagedError, EntryMissingError, RequestRefused, StoreError
from latentcache.precache.workspace import Workspace
from latentcache.service.access import Access, Role
from latentcache.service.limits import Limits
from latentcache.service.manifest_views import ManifestViews
from latentcache.service.page_settings import PageSettings
from latentcache.service.telemetry import Telemetry
from latentcache.store.disk import DiskStore
from latentcache.utils.locks import ReadersLock

_RELEASE_S = 60.0
logger = logging.getLogger("latentcache")

_Result = TypeVar("_Result")
_Arguments = TypeVarTuple("_Arguments")


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
    page: PageSettings = field(default_factory=PageSettings)


class ServiceContext:
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
        self.views = ManifestViews(self.manifests)
        self.telemetry = Telemetry()
        self._readers = asyncio.Semaphore(self.limits.num_threads)
        self._viewers = asyncio.Semaphore(self.limits.num_view_threads)
        self._writers = asyncio.Semaphore(self.limits.max_uploads)
        self._running = set[asyncio.Task[Any]]()

    async def call(
        self,
        function: Callable[[*_Arguments], _Result],
        *arguments: *_Arguments,
        discard: Callable[[_Result], None] | None = None,
    ) -> _Result:
        """Run what reads the store, in a thread. If the request is given up, `discard` gets what nobody waits for."""
        try:
            return await self._run(self._readers, discard, function, *arguments)
        except EntryMissingError:
            self.telemetry.misses.inc()
            raise
        except EntryDamagedError:
            self.telemetry.damaged.inc()
            raise

    async def change(self, function: Callable[[*_Arguments], _Result], *arguments: *_Arguments) -> _Result:
        """Run what changes the cache, in a thread. It ends in any case."""
        return await self._run(self._writers, None, function, *arguments)

    async def view(self, function: Callable[[*_Arguments], _Result], *arguments: *_Arguments) -> _Result:
        """Run what reads whole manifests, or is for a person: few threads, so that trainers need not wait for it."""
        return await self._run(self._viewers, None, function, *arguments)

    async def _run(
        self,
        threads: asyncio.Semaphore,
        discard: Callable[[_Result], None] | None,
        function: Callable[[*_Arguments], _Result],
        *arguments: *_Arguments,
    ) -> _Result:
        """Run a function in one of the threads. The thread of a request that is given up goes on, and counts."""
        await threads.acquire()

        async def run() -> _Result:
            try:
                return await anyio.to_thread.run_sync(function, *arguments)
            finally:
                threads.release()

        def end(task: asyncio.Task[_Result]) -> None:
            nonlocal discard
            self._running.discard(task)
            if not task.cancelled() and task.exception() is None and given_up and discard is not None:
                discard(task.result())
                discard = None

        given_up = False
        task = asyncio.create_task(run())
        self._running.add(task)
        task.add_done_callback(end)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            given_up = True
            if task.done():
                end(task)
            raise

    async def may_write(self, request: Request) -> None:
        """A dependency of routes that change the cache. RequestRefused without the writing token, or if none can."""
        self.access.check(request.scope["latentcache.role"], Role.WRITE)
        if self.store.read_only:
            raise RequestRefused("this server opened the cache for reading only", status=403)

    async def release_packs(self) -> None:
        """Release packs that were removed meanwhile, as long as the server runs."""
        while True:
            try:
                await self.call(self.store.release_gone)
            except StoreError as error:
                logger.warning("%s", error)
            except Exception:
                logger.exception("removed packs were not released; it is tried again")
            await anyio.sleep(_RELEASE_S)

    def close(self) -> None:
        """Close the cache."""
        self.store.close()
        if self._reading is not None:
            self._reading.close()
