"""DiskStore: packs in a directory, an index over them, and a table of the index in memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from typing_extensions import override

from latentcache.errors import (
    IndexDamagedError,
    PackError,
    ReadOnlyError,
    StorageFullError,
    StoreBusyError,
    StoreError,
)
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

    `read_only` writes nothing at all, so that a directory without write access can be read. `create=False` requires
    that the cache exists. StoreError, SchemaError, ReadOnlyError as for `CacheDirectory`.

    A key that is not in memory makes the store catch up with the index: another process may have added the entry. When
    a store is opened for writing, a damaged index is removed and made again from the packs (a reader that may not write
    does so in memory), packs that a dead writer sealed are added to it, and that writer's half-written files are
    removed.
    """

    def __init__(self, path: str | os.PathLike[str], *, read_only: bool = False, create: bool = True):
        super().__init__(str(path))
        self.read_only = read_only
        self._table: LocationTable
        self._position: Position | None
        self._index: Index | None
        """None for a reader that can use none: memory then has what the packs said when it was opened."""
        with system_errors(Path(path)):
            self.directory = CacheDirectory(path, create=create, read_only=read_only)
            self.path = self.directory.path
            try:
                self._open()
            except (IndexDamagedError, ReadOnlyError) as error:
                # ReadOnlyError: a dead writer's change waits to be rolled back, which would be a write.
                if read_only:
                    # A snapshot of the hub has no index.
                    level = logging.WARNING if self.directory.index.exists() else logging.INFO
                    logger.log(level, "%s The packs' headers are read instead; nothing is written.", error)
                    self._read_packs()
                elif isinstance(error, IndexDamagedError):
                    self._remove_index(error)
                    self._open()
                else:
                    raise

    @classmethod
    @contextmanager
    def opened(cls, store: DiskStore | str | os.PathLike[str]) -> Iterator[DiskStore]:
        """The store itself, or one opened for the block: read-only if the directory cannot be written."""
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
                    advice = " Delete it when they are encoded again." if isinstance(error, PackError) else ""
                    logger.warning("%s Its entries are missing.%s", error, advice)
        except StoreBusyError as error:
            logger.info("%s Packs that the index does not know yet are added at the next opening.", error)
            self.reload()
        except StorageFullError as error:
            logger.warning("%s", error)  # what is there can be read all the same, and removed

    def _begin(self) -> None:
        """Know nothing yet, and make an empty index if there is none: `_reconcile` adds what it lacks."""
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
                self.reload()  # another process may have replaced it while this one waited
            except IndexDamagedError:
                logger.warning("%s It is removed, and made again from the packs.", error)
                remove_whole(self.directory.index)

    def _reconcile(self, *, anew: bool = False) -> dict[str, StoreError]:
        """Forget the packs that are gone, and add those that the index lacks, or `anew` all that can be read.

        The caller keeps upkeep away, or `anew` all writers. Readers see the index as it was, or as it is then.

        Returns:
            Why packs could not be read, by pack. What the index says of one that cannot be read now stays.
        """
        # Rows first, then files: a pack that another writer seals from here on is in neither.
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
            if not anew:  # another process may have added some meanwhile
                found = {pack: row for pack, row in found.items() if pack not in self.table.packs}
            stay = self.table.packs.keys() - lost - found.keys()
            for row in found.values():
                if stay:
                    places = self.table.look_up(row.names())
                    row.live &= [place is None or place.pack.id not in stay for place in places]
                rows.put(row)
        if lost:
            message = "%s: %d packs are gone or have another size; %d entries are lost"
            logger.warning(message, self.path, len(lost), num_lost)
        if found:
            logger.info("%s: added %d packs to the index", self.path, len(found))
        return refused

    def rebuild_index(self) -> dict[str, StoreError]:
        """Make the index say what the packs say, while the caller keeps all writers away: see `_reconcile`."""
        if self.read_only:
            raise ReadOnlyError(self.path)
        self.release(list(self._maps))  # each entry is verified again
        if self.directory.index.exists():
            with suppress(IndexDamagedError):
                return self._reconcile(anew=True)
        remove_whole(self.directory.index)
        self._begin()
        return self._reconcile()

    # Looking up

    @property
    def table(self) -> LocationTable:
        """Where entries are, and why others are damaged, as far as memory knows. StoreError: the store is closed."""
        self.check_open()
        return self._table

    @contextmanager
    @override
    def current(self) -> Iterator[LocationTable]:
        with process_lock:  # memory and the index change together, and a fork waits for it
            self.reload()
            yield self.table

    def reload(self) -> None:
        """Bring memory to where the index is now."""
        if self._index is not None:
            with process_lock, self._index.reading() as rows:
                self._catch_up(rows)

    def _catch_up(self, rows: Rows) -> None:
        position, is_whole, found = rows.since(self._position)
        # All rows are a table of their own first: other threads look at this one without the lock.
        table = LocationTable() if is_whole else self._table
        table.add(found)
        self._table, self._position = table, position
        if is_whole:  # a mapped file takes space after its name is gone
            self.release(self._maps.copy().keys() - table.packs.keys())

    @override
    def find(self, keys: Iterable[str], *, again: bool = False) -> set[str]:
        """Find which keys are there, in memory or in the index. StoreError for one that is no key.

        `again`: look at the index in any case, because another process may have removed or marked an entry.
        """
        keys = list(keys)
        found = set() if again else self.table.find(keys)
        if len(found) < len(set(keys)):
            with self.current() as table:
                # Nothing is on its way in memory now, and another thread may have brought them.
                found = table.find(keys)
        return found

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
        """Another place for the entry if the index now has one; otherwise it is damaged, and marked so."""
        self.invalidate([location])
        self.reload()
        [moved] = self.locate([key])  # it may have been removed, or found damaged, elsewhere
        if moved.place != location.place:
            return moved
        self.mark_damaged({key: (location, problem)})
        raise self._damaged_error(key, problem)

    # Writing

    @contextmanager
    def lock(self, operation: str, *, shared: bool, wait: bool = False) -> Iterator[None]:
        """Keep upkeep away while the block runs, or (not `shared`) all writers. StoreBusyError if there is one.

        With `wait` the block begins when it has ended.
        """
        if self.read_only:
            raise ReadOnlyError(self.path)
        with locked(self.directory.lock, operation, shared=shared, wait=wait):
            # What was in memory may be older than the lock: nothing is removed or moved from here on.
            self.reload()
            yield

    @override
    def writer(self) -> Writer:
        if self.read_only:
            raise ReadOnlyError(self.path)
        # Without reading all rows again: each pack that is sealed asks the index for its keys.
        return Writer(
            self.seal,
            locked(self.directory.lock, "writing entries", shared=True),
            partial(self.find, again=True),
            self.directory.claims,
        )

    def seal(self, entries: Sequence[OwnedEntry]) -> tuple[int, int]:
        """Store entries in one pack, durably, under a lock that the caller has (`lock`): see `writer.SealEntries`."""
        keys = [entry.key for entry in entries]
        # What memory has may have been removed elsewhere. What it lacks is asked for once, when the row is written.
        present = self.find(keys, again=True) if self.table.find(keys) else set()
        new = [entry for entry in entries if entry.key not in present]
        if not new:
            return 0, 0
        row = write_pack(self.directory.new_pack_path(new_pack_id()), new)
        if not (num_added := self.add_row(row)):  # others stored the same meanwhile
            self.drop_empty([row.pack.id])
            return 0, 0
        return num_added, row.pack.file_bytes

    def take_pack(
        self, pack: str, chunks: Iterable[bytes | memoryview], num_bytes: int, *, row: PackRow | None = None
    ) -> int:
        """Write a pack that came from elsewhere, check it whole, and seal it. Returns how many entries are new.

        `chunks` are its bytes, which are read to their end, and `num_bytes` says how many there should be, for the
        message of StorageFullError. Nothing is sealed unless each payload has its digest and each key follows from its
        record's identity: PackError. `row` is that of a pack that was checked. An error of `chunks` leaves nothing
        either. A pack that the index knows stays as it is; a file of its name that it does not know, as after a death
        between the two, gives way. ReadOnlyError; StoreBusyError while upkeep works on the cache.
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
                row = row or WholePack.in_file(path, fd).checked_row(path)
                # From here on upkeep must not see a pack that the index does not know.
                held.enter_context(self.lock("taking a pack", shared=True))
            return self.add_row(row)

    def knows(self, pack: str) -> bool:
        """Whether the index has this pack."""
        with self.current() as table:
            return pack in table.packs

    # Changing the index

    @contextmanager
    def _changing(self) -> Iterator[Transaction]:
        """A transaction on the index. Memory is what the index has while the block runs, and after it."""
        if self._index is None or self.read_only:
            raise ReadOnlyError(self.path)
        with process_lock:
            with self._index.transaction() as rows:
                self._catch_up(rows)
                yield rows
                position = rows.since(self._position)[0]
            # After the commit: what was rolled back must not be in memory.
            self.table.drop_packs(rows.changed)
            self.table.add(row for row in rows.changed.values() if row is not None)
            self._position = position

    def add_row(self, row: PackRow) -> int:
        """Record a new pack, and those of its entries that are live in no other. Returns how many are."""
        with self._changing() as rows:
            if (there := rows.get(row.pack.id)) is not None:  # another process took it in
                return int(there.live.sum())
            keys = row.names()
            known = self.table.find(keys)
            row.live &= [key not in known for key in keys]
            rows.put(row)
            return int(row.live.sum())

    def move(self, row: PackRow, sources: Collection[str]) -> int:
        """Point entries to their copies from these packs in a new one, in one transaction, if they still lie there."""
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
        """Make entries misses from now on, with their reason, unless they have changed.

        If that cannot be written it is logged: the caller's error comes first.
        """
        # Also where nothing can be written: they are verified again, and fail.
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
        """Remove entries, and the reasons of damaged ones. Returns how many entries there were."""
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
        """Delete the packs, of `packs` if given, in which no entry is live, and return them.

        The file goes first, so that a crash leaves a row that the next call sees. So does a file that cannot go now.
        """
        with self.current() as table:  # no other thread changes memory between the look and the removal
            empty = table.empty_packs()
            if packs is not None:
                empty &= set(packs)
            self.release(empty)  # before: Windows removes no file that is mapped
            gone = {pack for pack in empty if self.directory.remove_pack(pack)}
            if gone:
                with self._changing() as rows:
                    for pack in gone:
                        rows.remove(pack)
        return gone


def _changed(rows: Transaction, packs: Iterable[str]) -> Iterator[PackRow]:
    """The rows of these packs that there are, each to be changed and then written."""
    for pack in packs:
        if (row := rows.get(pack)) is not None:
            yield row
            rows.put(row)


def read_rows(directory: CacheDirectory, packs: Iterable[str]) -> tuple[dict[str, PackRow], dict[str, StoreError]]:
    """The rows of packs, and the errors of those that cannot be read, by pack. A key is live in the first that has it.

    That entry may be the damaged one of two copies: its digest decides when it is read. An error that is no PackError
    says nothing about the pack: the system refused to read it, which may pass.
    """
    rows: dict[str, PackRow] = {}
    refused: dict[str, StoreError] = {}
    for pack in sorted(packs):
        try:
            row = read_row(directory.pack_path(pack))
        except FileNotFoundError:
            continue  # compacted away since it was listed
        except StoreError as error:
            refused[pack] = error
            continue
        rows[pack] = row
    drop_copies(list(rows.values()))
    return rows, refused
