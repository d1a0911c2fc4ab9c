"""DiskStore: packs in a directory, an index of them on disk, and a table of the index in memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np
from typing_extensions import override

from latentcache.errors import (
    IndexDamagedError,
    PackError,
    ReadOnlyError,
    StorageFullError,
    StoreBusyError,
    StoreError,
)
from latentcache.identity import sortable
from latentcache.store.directory import CacheDirectory
from latentcache.store.entry import OwnedEntry
from latentcache.store.index import Index, Position, Rows, Transaction, process_lock
from latentcache.store.layout import Location, PackRow, drop_copies
from latentcache.store.pack import WholePack, new_pack_id, read_row, write_pack
from latentcache.store.reader import PackReader
from latentcache.store.table import LocationTable
from latentcache.store.writer import Writer
from latentcache.utils.durable_files import expanded, remove_whole, sealed_file, system_errors, write_all
from latentcache.utils.locks import locked

_MAX_REASON_CHARS = 500

logger = logging.getLogger("latentcache")


class DiskStore(PackReader):
    """A `base.Store` in a directory. Processes and threads may share the directory; forks may share the store.

    `read_only` writes nothing at all, so it works without write access. `create=False` requires that the cache exists.
    StoreError, SchemaError, ReadOnlyError as for `CacheDirectory`.

    On a key that is not in memory the store catches up with the index, since another process may have added the entry.
    Opening a store for writing rebuilds a damaged index from the packs, adds packs that a dead writer sealed, and
    removes that writer's half-written files. A reader without write access rebuilds the index in memory only.
    """

    def __init__(self, path: str | os.PathLike[str], *, read_only: bool = False, create: bool = True):
        super().__init__(str(path))
        self.read_only = read_only
        self._table: LocationTable
        self._position: Position | None
        self._index: Index | None
        """None for a reader whose index is unusable: the table then holds what the packs listed at opening."""
        with system_errors(Path(path)):
            self.directory = CacheDirectory(path, create=create, read_only=read_only)
            self.path = self.directory.path
            try:
                self._open()
            except (IndexDamagedError, ReadOnlyError) as error:
                # ReadOnlyError: a dead writer's transaction must be rolled back first, which would be a write.
                if read_only:
                    # A snapshot from the hub has no index.
                    level = logging.WARNING if self.directory.index.exists() else logging.INFO
                    logger.log(level, "%s Reading the packs' headers instead; nothing is written.", error)
                    self._read_packs()
                elif isinstance(error, IndexDamagedError):
                    self._remove_index(error)
                    self._open()
                else:
                    raise

    @classmethod
    @contextmanager
    def opened(cls, store: DiskStore | str | os.PathLike[str]) -> Iterator[DiskStore]:
        """Yield the store itself, or one opened for the block: read-only if the directory is not writable."""
        path = store.path if isinstance(store, DiskStore) else expanded(store)
        with system_errors(path):
            if isinstance(store, DiskStore):
                yield store
                return
            with cls(path, create=False, read_only=path.exists() and not os.access(path, os.W_OK)) as disk:
                yield disk

    # Opening

    def _open(self) -> None:
        self._begin()
        if self.read_only:
            self.reload()
            return
        try:
            with locked(self.directory.lock, "opening the cache", shared=True, is_brief=True):
                self.directory.sweep()
                for error in self._reconcile().values():
                    advice = " Delete it once they are encoded again." if isinstance(error, PackError) else ""
                    logger.warning("%s Its entries are missing.%s", error, advice)
        except StoreBusyError as error:
            logger.info("%s Packs that are not in the index yet are added at the next opening.", error)
            self.reload()
        except StorageFullError as error:
            logger.warning("%s", error)  # existing entries can still be read and removed

    def _begin(self) -> None:
        """Start with an empty table, and create an empty index if there is none. `_reconcile` fills both."""
        self._table, self._position = LocationTable(), None
        self._index = Index(self.directory.index, read_only=self.read_only)

    def _read_packs(self) -> None:
        self._index = None
        rows, refused = read_rows(self.directory, self.directory.pack_sizes())
        self._table = LocationTable(rows.values())
        for reason in refused.values():
            logger.warning("%s Its entries are missing.", reason)

    def _remove_index(self, error: IndexDamagedError) -> None:
        operation = "replacing a damaged index"
        with (
            locked(self.path / "index.lock", operation, shared=False, wait=True),
            locked(self.directory.lock, operation, shared=True, is_brief=True),
        ):
            try:
                self._begin()
                self.reload()  # another process may have replaced it meanwhile
            except IndexDamagedError:
                logger.warning("%s It is removed and rebuilt from the packs.", error)
                remove_whole(self.directory.index)

    def _reconcile(self, *, anew: bool = False) -> dict[str, StoreError]:
        """Drop missing packs from the index, and add those that it lacks; with `anew`, replace the rows of all packs.

        The caller locks out upkeep, or with `anew` all writers. Readers see the index before or after the change.

        Returns:
            Why packs could not be read, by pack. The row of a pack that cannot be read now stays.
        """
        # Rows before files: a pack that another writer seals from here on is in neither.
        self.reload()
        known = {pack: layout.file_bytes for pack, layout in self.table.packs.items()}
        sizes = self.directory.pack_sizes()
        found, refused = read_rows(self.directory, sizes if anew else sizes.keys() - known.keys())
        gone = {pack for pack, num_bytes in known.items() if sizes.get(pack) != num_bytes}
        gone |= {pack for pack, error in refused.items() if isinstance(error, PackError)} & known.keys()
        if not gone and not found:
            return refused
        lost = gone - found.keys()
        num_lost = sum([num for pack, (num, _) in self.table.live_sizes().items() if pack in lost])
        with self._changing() as rows:
            for pack in lost:
                rows.remove(pack)
            if not anew:  # another process may have added some of them meanwhile
                found = {pack: row for pack, row in found.items() if pack not in self.table.packs}
            stay = self.table.packs.keys() - lost - found.keys()
            for row in found.values():
                if stay:
                    places = self.table.look_up(row.names())
                    row.live &= [place is None or place.pack.id not in stay for place in places]
                rows.put(row)
        if lost:
            message = "%s: %d packs are missing or changed in size; %d entries are lost"
            logger.warning(message, self.path, len(lost), num_lost)
        if found:
            logger.info("%s: added %d packs to the index", self.path, len(found))
        return refused

    def rebuild_index(self) -> dict[str, StoreError]:
        """Rebuild the index from the packs, while the caller locks out all writers: see `_reconcile`."""
        if self.read_only:
            raise ReadOnlyError(self.path)
        self.release(list(self._maps))  # so that each entry is verified again
        if self.directory.index.exists():
            with suppress(IndexDamagedError):
                return self._reconcile(anew=True)
        remove_whole(self.directory.index)
        self._begin()
        return self._reconcile()

    # Looking up

    @property
    @override
    def table(self) -> LocationTable:
        self.check_open()
        return self._table

    @contextmanager
    @override
    def current(self) -> Iterator[LocationTable]:
        with process_lock:  # the table and the index change together, and a fork waits for the lock
            self.reload()
            yield self.table

    def reload(self) -> None:
        """Bring the table up to date with the index."""
        if self._index is not None:
            with process_lock, self._index.reading() as rows:
                self._catch_up(rows)

    def _catch_up(self, rows: Rows) -> None:
        position, is_whole, found = rows.since(self._position)
        # A full reload builds a new table: other threads read the current one without the lock.
        table = LocationTable() if is_whole else self._table
        table.add(found)
        self._table, self._position = table, position
        if is_whole:  # an unlinked file takes up space as long as it is mapped
            self.release(self._maps.copy().keys() - table.packs.keys())

    @override
    def find(self, keys: Iterable[str], *, again: bool = False) -> set[str]:
        """The keys that have entries, in memory or in the index. StoreError for an invalid key.

        `again`: always read the index, because another process may have removed an entry or marked it as damaged.
        """
        keys = list(keys)
        found = set() if again else self.table.find(keys)
        if len(found) < len(set(keys)):
            with self.current() as table:
                found = table.find(keys)
        return found

    @override
    def has(self, keys: np.ndarray) -> np.ndarray:
        return np.asarray(self.places(keys)[1][:, 0] >= 0)

    @override
    def look_up(self, keys: Sequence[str]) -> list[Location | None]:
        found = self.table.look_up(keys)
        if None in found:
            with self.current() as table:
                found = table.look_up(keys)
        return found

    @override
    def pack_sizes(self) -> dict[str, int]:
        return self.directory.pack_sizes()

    # Reading

    @override
    def path_of(self, pack: str) -> Path:
        return self.directory.pack_path(pack)

    @override
    def bring(self, packs: set[str]) -> None:
        if not self.read_only:
            for pack in packs - self._maps.keys():
                self.directory.note_use(pack)

    @override
    def relocate(self, key: str, location: Location, problem: str, num_looks: int) -> Location:
        """The entry's new location if the index has one. Otherwise mark the entry as damaged and raise."""
        self.invalidate([location])
        self.reload()
        [moved] = self.locate([key])  # another process may have removed it, or found it damaged
        if (moved.pack.id, moved.row) != (location.pack.id, location.row):
            return moved
        self.mark_damaged({key: (location, problem)})
        raise self._damaged_error(key, problem)

    # Writing

    @contextmanager
    def lock(self, operation: str, *, shared: bool, wait: bool = False) -> Iterator[None]:
        """Lock out upkeep while the block runs, or all writers if not `shared`.

        StoreBusyError if the lock is taken; with `wait`, block until it is free.
        """
        if self.read_only:
            raise ReadOnlyError(self.path)
        with locked(self.directory.lock, operation, shared=shared, wait=wait):
            self.reload()  # the table may be older than the lock; from here on nothing is removed or moved
            yield

    @override
    def writer(self) -> Writer:
        if self.read_only:
            raise ReadOnlyError(self.path)
        # Not `self.lock`, which reloads the table: `seal` looks up each pack's keys in the index anyway.
        return Writer(
            self.seal,
            locked(self.directory.lock, "writing entries", shared=True),
            partial(self.find, again=True),
            self.directory.claims,
        )

    def seal(self, entries: Sequence[OwnedEntry]) -> tuple[int, int]:
        """Store entries durably in one pack, while the caller holds `lock`: see `writer.SealEntries`."""
        keys = [entry.key for entry in entries]
        # Another process may have removed keys that are in memory. `add_row` checks the keys that are not.
        present = self.find(keys, again=True) if self.table.find(keys) else set()
        new = [entry for entry in entries if entry.key not in present]
        if not new:
            return 0, 0
        row = write_pack(self.directory.new_pack_path(new_pack_id()), new)
        if not (num_added := self.add_row(row)):  # other processes stored the same entries meanwhile
            self.drop_empty([row.pack.id])
            return 0, 0
        return num_added, row.pack.file_bytes

    def take_pack(
        self, pack: str, chunks: Iterable[bytes | memoryview], num_bytes: int, *, row: PackRow | None = None
    ) -> int:
        """Write a pack that was transferred, check all of it, and seal it. Returns how many entries are new.

        `chunks` are the pack's bytes and are always read to the end; `num_bytes` is their expected number, for the
        message of StorageFullError. PackError unless each payload matches its digest and each key its record; pass
        `row` if the pack was checked before. Nothing is left behind after an error, including one from `chunks`. A
        pack in the index stays as it is. A file of its name that is not in the index, left by a crash, is replaced.
        ReadOnlyError; StoreBusyError while upkeep works on the cache.
        """
        if self.knows(pack):
            for _ in chunks:
                pass
            return 0
        path = self.directory.new_pack_path(pack)
        with ExitStack() as held:
            with sealed_file(path, num_bytes) as fd:
                for part in chunks:
                    write_all(fd, part)
                # The mapped pack gets no name here: Windows renames no mapped file.
                row = row or WholePack.in_file(path, fd).checked_row(path)
                # From here on upkeep must not see a pack that is not in the index.
                held.enter_context(self.lock("taking a pack", shared=True))
            return self.add_row(row)

    def knows(self, pack: str) -> bool:
        """Whether the pack is in the index."""
        with self.current() as table:
            return pack in table.packs

    # Changing the index

    @contextmanager
    def _changing(self) -> Iterator[Transaction]:
        """A transaction on the index. The table is in sync with the index inside the block and after it."""
        if self._index is None or self.read_only:
            raise ReadOnlyError(self.path)
        with process_lock:
            with self._index.transaction() as rows:
                self._catch_up(rows)
                yield rows
                position = rows.since(self._position)[0]
            # After the commit, so that the table never has changes that were rolled back.
            self.table.drop_packs(rows.changed)
            self.table.add(row for row in rows.changed.values() if row is not None)
            self._position = position

    def add_row(self, row: PackRow) -> int:
        """Add a new pack to the index. Entries that are live in another pack stay there. Returns how many are new."""
        with self._changing() as rows:
            if (there := rows.get(row.pack.id)) is not None:  # another process added it
                return int(there.live.sum())
            keys = row.names()
            known = self.table.find(keys)
            row.live &= [key not in known for key in keys]
            rows.put(row)
            return int(row.live.sum())

    def move(self, row: PackRow, sources: Collection[str]) -> int:
        """Repoint entries to their copies in a new pack, in one transaction, if they are still in the sources.

        Returns how many entries were repointed.
        """
        with self._changing() as rows:
            left: dict[str, list[int]] = {}
            for number, now in enumerate(self.table.look_up(row.names())):
                row.live[number] = now is not None and now.pack.id in sources
                if now is not None and row.live[number]:
                    left.setdefault(now.pack.id, []).append(now.row)
            for changed in _changed(rows, left):
                changed.live[left[changed.pack.id]] = False
            rows.put(row)
            return int(row.live.sum())

    def mark_damaged(self, damaged: Mapping[str, tuple[Location, str]]) -> None:
        """Turn damaged entries into misses and record the reasons, unless the entries have changed meanwhile.

        A failure to write this is logged, not raised: the caller has an error of its own to report.
        """
        # Even if nothing can be written: the entries are verified again, and fail again.
        self.invalidate([location for location, _ in damaged.values()])
        by_pack: dict[str, list[tuple[str, int, str]]] = {}
        for key, (location, reason) in damaged.items():
            short = reason[:_MAX_REASON_CHARS].encode("ascii", "backslashreplace").decode()
            by_pack.setdefault(location.pack.id, []).append((key, location.row, short))
            if self.read_only:
                with process_lock:
                    self.table.mark(key, short)
        if self.read_only:
            return
        try:
            with self._changing() as rows:
                for row in _changed(rows, by_pack):
                    for key, at, reason in by_pack[row.pack.id]:
                        if at < len(row.live) and row.live[at] and row.key(at) == key:
                            row.live[at], row.reasons[at] = False, reason
        except StoreError as error:
            logger.warning("%s: %d damaged entries could not be marked: %s", self.path, len(damaged), error)

    @override
    def remove(self, keys: Iterable[str]) -> int:
        """Remove entries, and what is recorded of damaged ones. Returns how many entries existed."""
        gone = set(keys)
        with self._changing() as rows:
            own: dict[str, list[int]] = {}
            for location in filter(None, self.table.look_up(list(gone))):
                own.setdefault(location.pack.id, []).append(location.row)
            for row in _changed(rows, own.keys() | self.table.packs_with_reasons(gone)):
                row.live[own.get(row.pack.id, [])] = False
                row.reasons = {at: reason for at, reason in row.reasons.items() if row.key(at) not in gone}
            return sum(map(len, own.values()))

    def drop_empty(self, packs: Collection[str] | None = None) -> set[str]:
        """Delete the packs without live entries, or those among `packs`, and return them.

        The file is deleted before its row: after a crash, or if the file cannot be deleted now, the next call retries.
        """
        with self.current() as table:  # no other thread changes the table between check and removal
            empty = table.empty_packs()
            if packs is not None:
                empty &= set(packs)
            self.release(empty)  # first, because Windows keeps mapped files
            gone = {pack for pack in empty if self.directory.remove_pack(pack)}
            if gone:
                with self._changing() as rows:
                    for pack in gone:
                        rows.remove(pack)
        return gone


def _changed(rows: Transaction, packs: Iterable[str]) -> Iterator[PackRow]:
    """Yield the existing rows of these packs; each is written after the caller has changed it."""
    for pack in packs:
        if (row := rows.get(pack)) is not None:
            yield row
            rows.put(row)


def read_rows(directory: CacheDirectory, packs: Iterable[str]) -> tuple[dict[str, PackRow], dict[str, StoreError]]:
    """Read packs' rows, and the errors of packs that cannot be read, by pack.

    A key is live in the first of its packs with an intact copy; a single copy is not checked, its digest is on read. An
    error other than PackError says nothing about the pack: the system refused to read it, which may be temporary.
    """
    rows: dict[str, PackRow] = {}
    refused: dict[str, StoreError] = {}
    for pack in sorted(packs):
        try:
            row = read_row(directory.pack_path(pack))
        except FileNotFoundError:
            continue  # compacted away after it was listed
        except StoreError as error:
            refused[pack] = error
            continue
        rows[pack] = row
    keys = {pack: sortable(row.keys) for pack, row in rows.items()}
    names, counts = np.unique(np.concatenate([*keys.values(), np.zeros(0, "S32")]), return_counts=True)
    for pack, own in keys.items() if len(copied := names[counts > 1]) else ():
        with suppress(FileNotFoundError, StoreError):  # found when it is read
            whole, row = WholePack.in_file(directory.pack_path(pack)), rows[pack]
            for at in np.flatnonzero(np.isin(own, copied)).tolist():
                if (problem := whole.problem(row.key(at), row.location(at))) is not None:
                    row.live[at], row.reasons[at] = False, problem
    drop_copies(list(rows.values()))
    return rows, refused
