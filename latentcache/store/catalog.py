"""The rows of the index, as a store needs them: entries, packs and damage, held in memory and kept in step."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from latentcache.errors import IndexDamagedError, ReadOnlyError, StoreBusyError, StoreError
from latentcache.store.directory import CacheDirectory
from latentcache.store.entries import Entries, Found
from latentcache.store.history import Point, Reading
from latentcache.store.index import Index, Transaction
from latentcache.store.location import Location, PackSize, Spec
from latentcache.store.lock import locked
from latentcache.store.pack import Header
from latentcache.store.recovery import Scan, lost_packs, scan_packs, scan_unknown
from latentcache.store.rows import DAMAGED_PREFIX, PACK_PREFIX, read_table, sort_rows
from latentcache.store.snapshot import Snapshot, SnapshotDamagedError, read_snapshot, write_snapshot

logger = logging.getLogger("latentcache")

_MAX_REASON_CHARS = 500
SNAPSHOT_MIN_ROWS = 8192
SNAPSHOT_SHARE = 32
"""A snapshot is written when more than this many entries, and more than 1 in 32, are not in the last one."""
_SPARE_BYTES = 1 << 20


class Catalog:
    """Which entries there are and where they lie.

    A key that is not in memory is looked up in the index: another process may have added it. A damaged index is moved
    aside and made anew from the packs; a reader that may not write does so in memory.
    """

    def __init__(self, directory: CacheDirectory, *, read_only: bool):
        self.directory = directory
        self.read_only = read_only
        self.packs: dict[str, PackSize] = {}
        self.markers: dict[str, str] = {}
        self._entries = Entries()
        # Keys that `forget` dropped: the index may have them.
        self._doubtful: set[str] = set()
        # What memory holds is what the index held at that moment, and maybe more. None: unknown.
        self._point: Point | None = None
        # How many entries the last snapshot has; 0 when rows were removed or replaced since.
        self._num_saved = 0
        # Damage that a reader found and may not write down: the row's text, and the reason.
        self._unwritten: dict[str, tuple[str, str]] = {}
        # What packs say of which the index knows nothing; a reader's only.
        self._sealed = Scan()
        self.index: Index | None = self._open_for_reading() if read_only else self._open_for_writing()
        # Memory and the index change together, and a fork waits for it. Without an index nothing is read again.
        self._lock: AbstractContextManager[Any] = nullcontext() if self.index is None else self.index.lock
        self.save()

    def _open_for_reading(self) -> Index | None:
        try:
            index = Index(self.directory.index, read_only=True)
            self._load(index)
            self._take_sealed()
            return index
        except (IndexDamagedError, ReadOnlyError) as error:
            # ReadOnlyError: a dead writer's change waits to be rolled back, which would be a write.
            logger.warning("%s Reading the packs' headers instead; nothing is written.", error)
            self._take_all()
            return None

    def _take_all(self) -> None:
        scan = scan_packs(self.directory, self.directory.pack_sizes())
        self.packs, self.markers = scan.packs, scan.damaged
        self._entries.put(scan.locations)
        self._entries.fold()
        for reason in scan.unreadable.values():
            logger.warning("%s Its entries are missing.", reason)

    def _open_for_writing(self) -> Index:
        try:
            index = Index(self.directory.index)
            self._load(index)
        except IndexDamagedError as error:
            index = self._replace(error)
        try:
            with locked(self.directory.lock, "opening the cache", shared=True):
                self.directory.sweep()
                self._reconcile(index)
        except StoreBusyError as error:
            logger.info("%s Packs that the index does not know yet are taken in at the next opening.", error)
        return index

    def _replace(self, error: IndexDamagedError) -> Index:
        with locked(self.directory.path / "index.lock", "replacing a damaged index", shared=False, wait=True):
            try:
                # Another process may have mended it while this one waited.
                index = Index(self.directory.index)
                self._load(index)
                return index
            except IndexDamagedError:
                aside = self.directory.path / f"index.damaged-{uuid.uuid4().hex[:8]}"
                self.directory.index.rename(aside)
            index = Index(self.directory.index)
            logger.warning("%s It was moved to %s (delete it when you like) and is made anew now.", error, aside.name)
            self._load(index)
            return index

    def _load(self, index: Index) -> None:
        """Bring memory to where the index is: by what is new, else by the snapshot and what is new, else by all."""
        with index.lock:
            if not self._catch_up(index) and not (self._restore_snapshot(index) and self._catch_up(index)):
                with index.reading() as reading:
                    assert reading is not None
                    self._read_all(reading)
                self._doubtful.clear()
            if self._doubtful:
                self._find_in_index(set(self._doubtful))
            for key, (text, reason) in self._unwritten.items():
                location = self._entries.get(key)
                if location is not None and location.to_text() == text:
                    self._entries.drop([key])
                    self.markers[key] = reason

    def _catch_up(self, index: Index) -> bool:
        if self._point is None:
            return False
        with index.reading(self._point) as reading:
            if reading is None:
                return False
            for page in reading.pages:
                rows = sort_rows(page, self.directory.index)
                self._entries.put({key: self._location(key, text) for key, text in rows.entries.items()})
                self.packs |= rows.packs
                self.markers |= rows.markers
            self._point = reading.point
        return True

    def _restore_snapshot(self, index: Index) -> bool:
        self._num_saved = 0
        path = self.directory.snapshot
        try:
            # It sums the database up, so it is the smaller one.
            snapshot = read_snapshot(path, self.directory.index_bytes() + _SPARE_BYTES)
        except SnapshotDamagedError as error:
            logger.warning("%s The index is read instead, and another snapshot is made.", error)
            return False
        except StoreError as error:
            logger.warning("%s The index is read instead.", error)
            return False
        if snapshot is None:
            return False
        with index.reading(snapshot.point) as reading:
            if reading is None:
                logger.info("%s: rows were removed or replaced since; the index is read instead.", path)
                return False
        self._entries, self.packs, self.markers = Entries(snapshot.table), snapshot.packs, snapshot.markers
        self._point, self._num_saved = snapshot.point, len(snapshot.table)
        self._doubtful.clear()
        return True

    def _read_all(self, reading: Reading) -> None:
        table, self.packs, self.markers = read_table(reading.pages, self.directory.index)
        self._entries, self._point = Entries(table), reading.point

    def _save(self, index: Index) -> None:
        """Write a snapshot if much is not in the last one. What keeps it from being written is logged."""
        with index.lock:
            num_entries = len(self._entries)
            if num_entries - self._num_saved <= max(SNAPSHOT_MIN_ROWS, num_entries // SNAPSHOT_SHARE):
                return
            self._load(index)
            if self._point is None:
                with index.transaction():
                    pass  # from now on the index keeps a history
                self._load(index)
            assert self._point is not None
            snapshot = Snapshot(self._point, self._entries.fold(), dict(self.packs), dict(self.markers))
        write_snapshot(self.directory.snapshot, snapshot)
        self._num_saved = len(snapshot.table)

    def _take_sealed(self) -> None:
        """Take in what a writer sealed that died before the index knew of it: a reader does so in memory.

        Opening for writing tells the index. Without this an entry that one reader saw could be gone for the next: the
        packs are read where a dead writer left a journal, and whoever rolls that back may die before it goes on.
        """
        unknown = self.directory.pack_sizes().keys() - self.packs.keys()
        scan = scan_unknown(self.directory, unknown - self._sealed.packs.keys())
        self._sealed.packs |= scan.packs
        self._sealed.locations |= scan.locations
        known = self._entries.find(list(self._sealed.locations))
        for key, location in self._sealed.locations.items():
            if key not in known and self._unwritten.get(key, ("",))[0] != location.to_text():
                self._entries.put({key: location})
                self.markers.pop(key, None)

    def _reconcile(self, index: Index) -> None:
        """Bring index and packs together: take in sealed packs that have no row, mark what lies in lost ones."""
        # Rows first, then files: a pack that another writer seals from here on is in neither.
        known = dict(self.packs)
        sizes = self.directory.pack_sizes()
        scan = scan_unknown(self.directory, sizes.keys() - known.keys())
        if scan.packs:
            logger.info("%s: took in %d packs that the index did not know", self.directory.path, len(scan.packs))
            stale = [DAMAGED_PREFIX + key for key in scan.locations if key in self.markers]
            index.add_many(scan.rows(), remove=stale)
            self._load(index)
        lost = lost_packs(self.directory, known, sizes)
        if lost:
            self._mark_lost(index, lost)

    def _mark_lost(self, index: Index, lost: Collection[str]) -> None:
        gone = self._entries.locations(lost)
        num_lost = 0
        with index.transaction() as rows:
            for key, location in gone.items():
                if rows.get(key) == location.to_text():
                    reason = f"its pack is gone or has another size: {self.directory.pack_path(location.pack)}"
                    mark_row(rows, key, reason)
                    num_lost += 1
            for pack in lost:
                rows.remove(PACK_PREFIX + pack)
        logger.warning(
            "%s: %d packs are gone or damaged; %d entries are lost", self.directory.path, len(lost), num_lost
        )
        self._load(index)

    def _location(self, key: str, text: str) -> Location:
        try:
            return Location.from_text(text)
        except ValueError as error:
            raise IndexDamagedError(self.directory.index, f"row {key}: {error}") from error

    def reload(self) -> None:
        """Bring memory to where the index is now."""
        if self.index is None:
            return
        with self._lock:
            self._load(self.index)
            if self.read_only:
                self._take_sealed()

    def find(self, keys: Iterable[str]) -> set[str]:
        """Those that are there, in memory or in the index. StoreError for one that is no key."""
        wanted = list(keys)
        found = self._entries.find(wanted)
        missing = set(wanted) - found if len(found) < len(wanted) else set()
        if missing:
            with self._lock:
                found |= self._find_in_index(missing)
        return found

    def _find_in_index(self, keys: set[str]) -> set[str]:
        # Nothing is on its way in memory now, and another thread may have brought them.
        found = self._entries.find(list(keys))
        missing = keys - found
        self._doubtful -= keys
        if not missing or self.index is None:
            return found
        sealed = {key: self._sealed.locations[key].to_text() for key in missing & self._sealed.locations.keys()}
        rows = sealed | self.index.get_many(missing)
        rows = {key: text for key, text in rows.items() if self._unwritten.get(key, ("",))[0] != text}
        new = {key: text for key, text in rows.items() if not self._entries.restore(key, text)}
        self._entries.put({key: self._location(key, text) for key, text in new.items()})
        for key in rows:
            self.markers.pop(key, None)
        return found | rows.keys()

    def refresh(self, keys: Iterable[str]) -> set[str]:
        """Those that the index has now: what memory says of these keys is corrected."""
        wanted = set(keys)
        with self._lock:
            self.forget(wanted)
            return self.find(wanted)

    def look_up(self, keys: Sequence[str]) -> Found:
        """Where the entries lie, in memory or in the index. StoreError for one that is no key."""
        found = self._entries.look_up(keys)
        if found.missing():
            with self._lock:
                self.find(keys)
                found = self._entries.look_up(keys)
        return found

    def locate(self, key: str) -> Location | None:
        """Where the entry lies, or None if it is not there."""
        return self.look_up([key])[0]

    def relocate(self, key: str) -> Location | None:
        """Look the key up in the index again: a compaction may have moved the entry."""
        if self.index is None:
            return self.locate(key)
        with self._lock:
            self.forget([key])
            return self.locate(key)

    def reason(self, key: str) -> str | None:
        """Why the entry is damaged, or None."""
        if key not in self.markers and self.index is not None:
            reason = self.index.get(DAMAGED_PREFIX + key)
            if reason is not None:
                self.markers[key] = reason
        return self.markers.get(key)

    def forget(self, keys: Iterable[str]) -> None:
        """Drop keys from memory only."""
        with self._lock:
            self._doubtful.update(self._entries.drop(keys))

    def locations(self) -> dict[str, Location]:
        """All entries, by key, oldest first."""
        return self._entries.locations()

    def specs(self) -> tuple[list[tuple[Spec, int]], int]:
        """How many entries of each spec the index has now, and how many are damaged."""
        with self._lock:
            self.reload()
            return self._entries.specs(), len(self.markers)

    def by_pack(self) -> dict[str, dict[str, Location]]:
        """The entries of each pack that has some."""
        packs: dict[str, dict[str, Location]] = {}
        for key, location in self.locations().items():
            packs.setdefault(location.pack, {})[key] = location
        return packs

    def keys(self) -> list[str]:
        """The keys of all entries that the index has now."""
        with self._lock:
            self.reload()
            return self._entries.keys()

    def add_pack(self, header: Header) -> int:
        """Record a new pack and those of its entries that are not there yet. Returns how many were not."""
        index = self._writable()
        with self._lock:
            markers = index.get_many(DAMAGED_PREFIX + key for key in header.locations)
            self._num_saved = 0 if markers else self._num_saved
            scan = Scan(locations=dict(header.locations), packs={header.pack: header.size})
            added = index.add_many(scan.rows(), remove=list(markers))
            self.packs[header.pack] = header.size
            new = {key: location for key, location in header.locations.items() if key in added}
            self._entries.put(new)
            for marker in markers:
                self.markers.pop(marker.removeprefix(DAMAGED_PREFIX), None)
            return len(new)

    def move(self, header: Header, old: Mapping[str, Location]) -> int:
        """Point entries to their copies in a new pack, in one transaction, but for those that changed meanwhile."""
        index, moved = self._writable(), {}
        with self._lock:
            with index.transaction() as rows:
                rows.put(PACK_PREFIX + header.pack, header.size.to_text())
                for key, location in header.locations.items():
                    if rows.get(key) == old[key].to_text():
                        rows.put(key, location.to_text())
                        moved[key] = location
            self.packs[header.pack] = header.size
            self.forget(header.locations)
            self._entries.put(moved)
            self._doubtful.difference_update(moved)
            self._num_saved = 0
        return len(moved)

    def mark(self, damaged: Mapping[str, tuple[Location, str]]) -> None:
        """Make damaged entries misses, with their reason, unless their rows have changed."""
        if self.read_only:
            with self._lock:
                for key, (location, reason) in damaged.items():
                    self._unwritten[key] = (location.to_text(), reason)
                    self.markers[key] = reason
                self.forget(damaged)
            return
        index = self._writable()
        with self._lock:
            with index.transaction() as rows:
                for key, (location, reason) in damaged.items():
                    if rows.get(key) == location.to_text():
                        mark_row(rows, key, reason)
                        self.markers[key] = reason
            self.forget(damaged)
            self._num_saved = 0

    def remove(self, keys: Collection[str]) -> int:
        """Remove entries and their markers. Returns how many entries there were."""
        index, num_removed = self._writable(), 0
        with self._lock:
            with index.transaction() as rows:
                for key in keys:
                    num_removed += rows.remove(key)
                    rows.remove(DAMAGED_PREFIX + key)
            self.forget(keys)
            for key in keys:
                self.markers.pop(key, None)
            self.forget_snapshot()
        return num_removed

    def drop_packs(self, packs: Collection[str]) -> None:
        """Delete packs that no entry lies in: the file first, so that a crash leaves a row that the next call sees."""
        index = self._writable()
        if not packs:
            return
        for pack in packs:
            self.directory.remove_pack(pack)
            self.packs.pop(pack, None)
        index.remove_many([PACK_PREFIX + pack for pack in packs])
        self._num_saved = 0

    def _writable(self) -> Index:
        if self.index is None or self.read_only:
            raise ReadOnlyError(self.directory.path)
        return self.index

    def save(self) -> None:
        """Write a snapshot for those who open the cache later, if the last one lacks much. Errors are logged."""
        if self.index is not None and not self.read_only:
            try:
                self._save(self.index)
            except StoreError as error:
                logger.warning("no snapshot of the index was written: %s", error)

    def forget_snapshot(self) -> None:
        """The next `save` writes one, if there are entries enough."""
        self._num_saved = 0

    def close(self) -> None:
        if self.index is not None:
            self.save()
            self.index.close()


def mark_row(rows: Transaction, key: str, reason: str) -> None:
    """Replace an entry's row by a marker."""
    rows.remove(key)
    rows.put(DAMAGED_PREFIX + key, reason[:_MAX_REASON_CHARS].encode("utf-8", "replace").decode())
