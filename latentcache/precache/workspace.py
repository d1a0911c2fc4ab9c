"""The places that a run reads and writes: the store, the manifests, and the memo of what it may forget."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from latentcache.config import CacheConfig
from latentcache.dataset.manifest_folder import ManifestFolder, ManifestMemory, Manifests, keys_in_use
from latentcache.errors import DatasetError, IndexDamagedError, ReadOnlyError, StoreError
from latentcache.identity import digest
from latentcache.remote.locations import kind_of, open_remote, snapshot
from latentcache.store.base import Store
from latentcache.store.disk import DiskStore
from latentcache.store.index import Index
from latentcache.store.memory import MemoryStore
from latentcache.store.upkeep import prune
from latentcache.utils.durable_files import make_folder, remove_whole, typed_errors
from latentcache.utils.locks import locked

T = TypeVar("T")
FLUSH_ROWS = 1000
_CHECKSUM_BYTES = 8

logger = logging.getLogger("latentcache")


@dataclass(slots=True)
class Workspace:
    """A store, its manifests, and the memo.

    For a cache in CPU memory make one, pass it to `run_precache`, then pass its store and manifests to `LatentCache`.
    """

    store: Store = field(default_factory=MemoryStore)
    manifests: Manifests = field(default_factory=ManifestMemory)
    memo: MutableMapping[str, str] = field(default_factory=dict)
    path: Path | str | None = None
    """The directory, or the URL of a bucket or a service."""

    def __enter__(self) -> Workspace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def in_use(self) -> AbstractContextManager[Any]:
        """A lock for the time of a run: no process prunes or compacts the cache meanwhile."""
        if isinstance(self.store, DiskStore) and not self.store.read_only:
            return self.store.lock("precache", shared=True)
        return nullcontext()

    def prune(self, max_bytes: int) -> None:
        """Remove what no manifest refers to, the longest unused first, until the packs have at most so many bytes.

        Where that cannot be done now, because another process works on the cache or a run is not finished, it is
        logged, and left to the next run.
        """
        if isinstance(self.path, str):
            logger.warning("cache.max_bytes is left to %s: run `latentcache prune` where its directory is", self.path)
        if not isinstance(self.store, DiskStore) or not isinstance(self.manifests, ManifestFolder):
            return
        try:
            if sum(self.store.directory.pack_sizes().values()) <= max_bytes:
                return  # without reading the manifests
            report = prune(self.store, partial(keys_in_use, self.manifests), max_bytes=max_bytes)
        except (StoreError, DatasetError) as error:
            logger.warning("cache.max_bytes is left to the next run: %s", error)
            return
        if report.num_entries:
            removed = "cache.max_bytes: removed %d entries that no manifest refers to; the packs have %s bytes now"
            logger.info(removed, report.num_entries, f"{report.file_bytes_left:,}")
        if report.file_bytes_left > max_bytes:
            message = "cache.max_bytes is %s, but the packs have %s bytes, and manifests refer to all of them"
            logger.warning(message, f"{max_bytes:,}", f"{report.file_bytes_left:,}")

    def close(self) -> None:
        """Close the memo and the store."""
        if isinstance(self.memo, Memo):
            self.memo.close()
        self.store.close()


def open_workspace(config: CacheConfig, *, read_only: bool = False) -> Workspace:
    """The workspace of this config. `read_only` writes nothing: a cache that does not exist yet is an empty one."""
    path = config.path
    if isinstance(path, str) and config.store == "disk":
        if kind_of(path) != "hub":
            return _of_url(path, config, read_only=read_only)
        if not read_only:
            raise ReadOnlyError(path, "nothing is written to the hub: precache a directory, and `hf upload` sends it")
        path = snapshot(path, config.local)
    path = Path(path)
    is_empty = not path.exists() or (path.is_dir() and not any(path.iterdir()))
    if config.store == "cpu" or (read_only and is_empty):
        return Workspace()
    store = DiskStore(path, read_only=read_only)
    return Workspace(store, ManifestFolder(path / "manifests"), Memo(path / "memo", read_only=read_only), path)


def _of_url(url: str, config: CacheConfig, *, read_only: bool) -> Workspace:
    from latentcache.remote.tier import folder_of

    with ExitStack() as stack:
        store, manifests = open_remote(url, read_only=read_only or None, create=True, **config.remote_options())
        stack.callback(store.close)
        if not read_only:
            store.check_writable()
        # What a run may forget is this machine's: digests of its files, and failures of the ranks that run on it.
        folder = folder_of(store.url, config.local)
        if not read_only:
            with typed_errors(folder, 0):
                make_folder(folder)
        workspace = Workspace(store, manifests, Memo(folder / "memo", read_only=read_only), store.url)
        stack.pop_all()
        return workspace


class Memo(MutableMapping[str, str]):
    """Text by name, in memory and in an index on disk: digests of files, sizes of entries, rates, ranks' failures.

    Rows are written in groups, and by `flush` and `close`. Names may be any text, also paths with broken encodings: the
    index stores their digests. Each row has a checksum, and one that does not fit is none. A damaged memo is removed,
    whenever that is noticed; then files are read again. Threads may share one.
    """

    def __init__(self, path: str | Path, *, read_only: bool = False):
        self._lock = threading.Lock()
        self._new: dict[str, str] = {}
        self._path, self._read_only = Path(path), read_only
        self._index: Index | None = None
        self._rows: dict[str, str] = {}
        if read_only and not os.path.lexists(path):
            return
        try:
            self._index = Index(path, read_only=read_only)
        except (IndexDamagedError, ReadOnlyError) as error:
            self._replace(error)
        self._rows = _texts(self._using(lambda index: index.items()) or {})

    def __getitem__(self, name: str) -> str:
        return self._rows[_row_of(name)]

    def __setitem__(self, name: str, value: str) -> None:
        row = _row_of(name)
        with self._lock:
            if self._rows.get(row) == value:
                return
            self._rows[row] = self._new[row] = value
            if len(self._new) >= FLUSH_ROWS:
                self._flush()

    def __delitem__(self, name: str) -> None:
        row = _row_of(name)
        with self._lock:
            del self._rows[row]
            self._new.pop(row, None)
            if not self._read_only:
                self._using(lambda index: index.remove_many([row]))

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def reread(self, names: Iterable[str]) -> dict[str, str]:
        """The texts of those names that any process has written by now."""
        rows = {_row_of(name): name for name in names}
        with self._lock:
            found = self._rows if self._index is None else _texts(self._using(lambda index: index.get_many(rows)) or {})
        return {name: found[row] for row, name in rows.items() if row in found}

    def flush(self) -> None:
        """Write the new rows. A memo that was opened for reading has them in memory only."""
        with self._lock:
            self._flush()

    def close(self) -> None:
        """Write the new rows and close the index."""
        self.flush()
        if self._index is not None:
            self._index.close()

    def _flush(self) -> None:
        if self._new and not self._read_only:
            new = {row: _sealed(row, value) for row, value in self._new.items()}
            self._using(lambda index: index.replace_many(new))
        self._new = {}

    def _using(self, use: Callable[[Index], T]) -> T | None:
        """What `use` gives with the index, or with a new one if it is damaged. None if there is none."""
        for is_first in (True, False):
            if self._index is None:
                return None
            try:
                return use(self._index)
            except (IndexDamagedError, ReadOnlyError) as error:
                self._replace(error, unless_replaced=is_first)
        return None if self._index is None else use(self._index)

    def _replace(self, error: IndexDamagedError | ReadOnlyError, *, unless_replaced: bool = True) -> None:
        if self._read_only:
            # Also where a dead writer's change waits to be rolled back, which would be a write.
            logger.warning("memo of digests not used: %s", error)
            self._index = None
        elif isinstance(error, ReadOnlyError):
            raise error
        else:
            self._index = _replaced(self._path, error, unless_replaced)


def look_up(path: Path, name: str) -> str | None:
    """What the memo at `path` has by this name now; None too where it cannot be read. Nothing else of it is read."""
    row = _row_of(name)
    try:
        return _texts(Index(path, read_only=True).get_many([row])).get(row)
    except (IndexDamagedError, ReadOnlyError) as error:
        logger.debug("memo not read: %s", error)
        return None


def _replaced(path: Path, error: IndexDamagedError, unless_replaced: bool) -> Index:
    """A new memo in place of a damaged one, or the one that another process put there meanwhile."""
    with locked(path.with_name(f"{path.name}.lock"), "replacing a damaged memo", shared=False, wait=True):
        if unless_replaced:
            with suppress(IndexDamagedError):
                index = Index(path)
                index.items()
                return index
        logger.warning("memo of digests removed, files will be read again: %s: %s", error.path, error.detail)
        remove_whole(path)
        return Index(path)


def _row_of(name: str) -> str:
    return digest(name.encode("utf-8", "surrogatepass"))


def _sealed(row: str, text: str) -> bytes:
    """A row's value: a checksum of its name and text, then the text."""
    data = text.encode()
    return xxhash.xxh3_64(row.encode() + data).digest() + data


def _texts(rows: Mapping[str, bytes]) -> dict[str, str]:
    """What the rows say that are as they were written."""
    texts = ((row, value[_CHECKSUM_BYTES:].decode("utf-8", "replace")) for row, value in rows.items())
    return {row: text for row, text in texts if rows[row] == _sealed(row, text)}
