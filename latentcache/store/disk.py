"""DiskStore: packs, and an index over them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
from typing_extensions import override

from latentcache.errors import ReadOnlyError, StoreError
from latentcache.store.base import StoreStats
from latentcache.store.catalog import Catalog
from latentcache.store.directory import CacheDirectory
from latentcache.store.entry import OwnedEntry, check_key
from latentcache.store.layout import Location
from latentcache.store.pack import new_pack_id, write_pack
from latentcache.store.reader import PackReader
from latentcache.store.writer import Writer
from latentcache.utils.durable_files import system_errors
from latentcache.utils.locks import Claims, locked

logger = logging.getLogger("latentcache")


class DiskStore(PackReader):
    """A `base.Store` in a directory. Processes and threads may share the directory; forks may share the store.

    `read_only` writes nothing at all, so that a directory without write access can be read. `create=False` requires
    that the cache exists. StoreError, SchemaError, ReadOnlyError as for `CacheDirectory`.

    When a store is opened for writing, a damaged index is rebuilt from the packs, packs that a dead writer sealed are
    added to it, and that writer's half-written files are removed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        read_only: bool = False,
        create: bool = True,
    ):
        super().__init__()
        self.read_only = read_only
        with system_errors(Path(path)):
            self.directory = CacheDirectory(path, create=create, read_only=read_only)
            self._catalog: Catalog | None = Catalog(self.directory, read_only=read_only)
        self.path = self.directory.path

    @classmethod
    @contextmanager
    def opened(cls, store: DiskStore | str | os.PathLike[str]) -> Iterator[DiskStore]:
        """The store itself, or one opened for the block: read-only if the directory cannot be written."""
        path = store.path if isinstance(store, DiskStore) else Path(store).expanduser()
        with system_errors(path):
            if isinstance(store, DiskStore):
                yield store
                return
            with cls(path, create=False, read_only=path.exists() and not os.access(path, os.W_OK)) as disk:
                yield disk

    @property
    def catalog(self) -> Catalog:
        """Which entries there are. StoreError when the store is closed."""
        if self._catalog is None:
            raise StoreError(f"{self.path}: the store is closed; open it again")
        return self._catalog

    @override
    def key_index(self) -> Catalog:
        return self.catalog

    @override
    def path_of(self, pack: str) -> Path:
        return self.directory.pack_path(pack)

    @override
    def bring(self, packs: set[str]) -> None:
        if not self.read_only:
            for pack in packs - self._maps.keys():
                self.directory.note_use(pack)

    @contextmanager
    def lock(self, operation: str, *, shared: bool) -> Iterator[None]:
        """Keep upkeep away while the block runs, or (not `shared`) all writers. StoreBusyError if there is one."""
        if self.read_only:
            raise ReadOnlyError(self.path)
        with locked(self.directory.lock, operation, shared=shared):
            # What was in memory may be older than the lock: nothing is removed or moved from here on.
            self.catalog.reload()
            yield

    @override
    def writer(self) -> Writer:
        if self.read_only:
            raise ReadOnlyError(self.path)
        # Without reading all rows again: each pack that is sealed asks the index for its keys.
        return Writer(
            self.seal,
            locked(self.directory.lock, "writing entries", shared=True),
            partial(self.catalog.find, again=True),
            partial(Claims, self.directory.claims),
        )

    def seal(self, entries: Sequence[OwnedEntry]) -> tuple[int, int]:
        """Store entries in one pack, durably, under a lock that the caller has (`lock`): see `writer.SealEntries`."""
        present = self.catalog.table.find([entry.key for entry in entries])
        if present:  # as far as memory knows. What it lacks may be there: the index decides when the pack is sealed
            present = self.catalog.find(present, again=True)
        new = [entry for entry in entries if entry.key not in present]
        if not new:
            return 0, 0
        row = write_pack(self.directory.new_pack_path(new_pack_id()), new)
        return self.catalog.seal(row), row.pack.file_bytes

    @override
    def find(self, keys: Iterable[str]) -> set[str]:
        return self.catalog.find(keys)

    @override
    def places(self, keys: Sequence[str]) -> tuple[list[str], np.ndarray]:
        with self.catalog.current() as table:
            return table.places(keys)

    @override
    def keys(self) -> Iterator[str]:
        with self.catalog.current() as table:
            return iter(table.keys())

    @override
    def relocate(self, key: str, location: Location, problem: str) -> Location:
        """Another place for the entry if the index now has one; otherwise it is damaged, and marked so."""
        self.invalidate([location])
        moved = self.catalog.look_up([key], again=True)[0]
        if moved is None:
            [moved] = self.locate([key])  # it was removed, or found damaged, elsewhere
        if moved.place != location.place:
            return moved
        self.mark_damaged({key: (location, problem)})
        raise self._damaged_error(key, problem)

    def mark_damaged(self, damaged: Mapping[str, tuple[Location, str]]) -> None:
        """Make entries misses from now on. If that cannot be written it is logged: the caller's error comes first."""
        # Also where nothing can be written: they are verified again, and fail.
        self.invalidate([location for location, _ in damaged.values()])
        try:
            self.catalog.mark(damaged)
        except StoreError as error:
            logger.warning("%s: %d damaged entries could not be marked: %s", self.path, len(damaged), error)

    def release_gone(self) -> None:
        """Release the packs that this process or another removed.

        A mapped file takes space after its name is gone: a process that reads for months calls this now and then.
        """
        with self.catalog.current() as table:
            gone = self._maps.copy().keys() - table.packs.keys()
        self.release(gone)

    @override
    def remove(self, keys: Iterable[str]) -> int:
        return self.catalog.remove([check_key(key) for key in dict.fromkeys(keys)])

    @override
    def damaged(self) -> dict[str, str]:
        with self.catalog.current() as table:
            return table.damaged()

    @override
    def stats(self) -> StoreStats:
        with self.catalog.current():
            return self._stats(self.directory.pack_sizes(), self.directory.index_bytes())

    def close(self) -> None:
        """Release files. Tensors that were returned are copies and stay."""
        if self._catalog is not None:
            self._catalog.close()
        self._catalog = None
        self.release_all()
