"""The places that a run reads and writes: the store, the manifests, and the memo of digests."""

from __future__ import annotations

from collections.abc import MutableMapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from latentcache.config import CacheConfig
from latentcache.dataset.manifest import ManifestFolder, ManifestMemory, Manifests
from latentcache.precache.scratch import Memo
from latentcache.store.base import Store
from latentcache.store.disk import DiskStore
from latentcache.store.memory import MemoryStore


@dataclass(slots=True)
class Workspace:
    """A store, its manifests, and the memo.

    For a cache in CPU memory make one, pass it to `run_precache`, then pass its store and manifests to `LatentCache`.
    """

    store: Store = field(default_factory=MemoryStore)
    manifests: Manifests = field(default_factory=ManifestMemory)
    memo: MutableMapping[str, str] = field(default_factory=dict)
    path: Path | None = None

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def in_use(self) -> AbstractContextManager[Any]:
        """A lock for the time of a run: no process prunes or compacts the cache meanwhile."""
        if isinstance(self.store, DiskStore) and not self.store.read_only:
            return self.store.lock("precache", shared=True)
        return nullcontext()

    def close(self) -> None:
        """Close the memo and the store."""
        if isinstance(self.memo, Memo):
            self.memo.close()
        self.store.close()


def open_workspace(config: CacheConfig, *, read_only: bool = False) -> Workspace:
    """The workspace of this config. `read_only` writes nothing: a cache that does not exist yet is an empty one."""
    if config.store == "cpu" or (read_only and _is_empty(config.path)):
        return Workspace()
    store = DiskStore(config.path, read_only=read_only)
    manifests = ManifestFolder(config.path / "manifests")
    return Workspace(store, manifests, Memo(config.path / "memo", read_only=read_only), config.path)


def _is_empty(path: Path) -> bool:
    return not path.exists() or (path.is_dir() and not any(path.iterdir()))
