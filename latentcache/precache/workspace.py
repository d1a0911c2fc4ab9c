"""What a run reads and writes: the store, the manifests, and the memo, which is disposable."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from latentcache.config import CacheConfig
from latentcache.dataset.manifest_folder import ManifestFolder, ManifestMemory, Manifests, keys_in_use
from latentcache.errors import DatasetError, ReadOnlyError, StoreError
from latentcache.location import kind_of
from latentcache.precache.memo import Memo
from latentcache.remote.store import RemoteStore, open_remote
from latentcache.remote.tier import folder_of, snapshot
from latentcache.store.base import Store
from latentcache.store.disk import DiskStore
from latentcache.store.memory import MemoryStore
from latentcache.store.upkeep import prune
from latentcache.utils.durable_files import make_folder, typed_errors

logger = logging.getLogger("latentcache")


@dataclass(slots=True)
class Workspace(AbstractContextManager["Workspace"]):
    """A store, its manifests, and the memo.

    For a cache in CPU memory, pass one to `run_precache`, then pass its store and manifests to `LatentCache`.
    """

    store: Store = field(default_factory=MemoryStore)
    manifests: Manifests = field(default_factory=ManifestMemory)
    memo: Memo = field(default_factory=Memo)
    path: Path | str | None = None
    """The directory, or the URL of a bucket or a service."""

    def __exit__(self, *_: object) -> None:
        self.close()

    def in_use(self, *, wait: bool = False) -> AbstractContextManager[Any]:
        """A lock for the duration of a run, which excludes pruning and compaction. `wait` for these to end."""
        if isinstance(self.store, DiskStore) and not self.store.read_only:
            return self.store.lock("precache", shared=True, wait=wait)
        return nullcontext()

    def prune(self, max_bytes: int) -> None:
        """Evict entries that no manifest refers to, least recently used first, until the packs fit in `max_bytes`.

        If another process is using the cache, or a run is unfinished, logs a warning and leaves it to the next run.
        """
        if isinstance(self.path, str):
            logger.warning("cache.max_bytes is for directories, not for %s: run `latentcache prune` there", self.path)
        if not isinstance(self.store, DiskStore) or not isinstance(self.manifests, ManifestFolder):
            return
        try:
            if sum(self.store.directory.pack_sizes().values()) <= max_bytes:
                return  # without reading the manifests
            report = prune(self.store, partial(keys_in_use, self.manifests), max_bytes=max_bytes)
        except (StoreError, DatasetError) as error:
            logger.warning("cache.max_bytes is deferred to the next run: %s", error)
            return
        if report.num_entries:
            removed = "cache.max_bytes: removed %d entries that no manifest refers to; the packs have %s bytes now"
            logger.info(removed, report.num_entries, f"{report.file_bytes_left:,}")
        if report.file_bytes_left > max_bytes:
            message = "cache.max_bytes is %s, but the packs have %s bytes, and manifests refer to all of them"
            logger.warning(message, f"{max_bytes:,}", f"{report.file_bytes_left:,}")

    def close(self) -> None:
        """Close the memo and the store."""
        try:
            self.memo.close()
        finally:
            self.store.close()


def open_workspace(config: CacheConfig, *, read_only: bool = False) -> Workspace:
    """Open the workspace of this config. With `read_only`, nothing is written, and a missing cache counts as empty."""
    path = config.path
    if isinstance(path, str) and kind_of(path) == "hub":
        if not read_only:
            raise ReadOnlyError(path, "the hub is read-only here: precache into a directory, then use `hf upload`")
        path = snapshot(path, config.local)
    if read_only and isinstance(path, Path) and not (path.is_file() or (path.is_dir() and any(path.iterdir()))):
        return Workspace()
    with ExitStack() as stack:
        store: DiskStore | RemoteStore
        manifests: Manifests
        if isinstance(path, Path):
            store, manifests, folder = DiskStore(path, read_only=read_only), ManifestFolder(path / "manifests"), path
            stack.callback(store.close)
        else:
            store, manifests = open_remote(path, read_only=read_only or None, create=True, **config.remote_options())
            stack.callback(store.close)
            # The memo is local to this machine: digests of its files, and failures of ranks that run on it.
            path, folder = store.url, folder_of(store.url, config.local)
            if not read_only:
                store.check_writable()
                with typed_errors(folder, 0):
                    make_folder(folder)
        workspace = Workspace(store, manifests, Memo(folder / "memo", read_only=read_only), path)
        stack.pop_all()
        return workspace
