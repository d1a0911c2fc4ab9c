"""What memory holds of an index: entries, packs and damage, brought to where the index is."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from latentcache.errors import IndexDamagedError, StoreError
from latentcache.store.directory import CacheDirectory
from latentcache.store.entries import Entries
from latentcache.store.history import Point
from latentcache.store.index import Index
from latentcache.store.location import Location, PackSize
from latentcache.store.recovery import Scan, scan_packs, scan_unknown
from latentcache.store.rows import PACK_PREFIX, read_table, sort_rows
from latentcache.store.snapshot import Snapshot, SnapshotDamagedError, read_snapshot, write_snapshot
from latentcache.utils.durable_files import typed_errors

logger = logging.getLogger("latentcache")

SNAPSHOT_MIN_ROWS = 8192
SNAPSHOT_SHARE = 32
"""A snapshot is written when more than this many entries, and more than 1 in 32, are not in the last one."""
_SPARE_BYTES = 1 << 20


class Mirror:
    """Entries, packs and damage in memory. One thread at a time may change it: whoever holds the index's lock.

    `unwritten` is damage that a reader found and may not write down: the row's text, and the reason.
    """

    def __init__(self, directory: CacheDirectory):
        self.directory = directory
        self.entries = Entries()
        self.packs: dict[str, PackSize] = {}
        self.markers: dict[str, str] = {}
        self.unwritten: dict[str, tuple[str, str]] = {}
        # Keys that were dropped from memory: the index may have them.
        self._doubtful: set[str] = set()
        # What memory holds is what the index held at that moment, and maybe more. None: unknown.
        self._point: Point | None = None
        # How many entries the last snapshot has; 0 when rows were removed or replaced since.
        self._num_saved = 0
        # Whether the snapshot that is there was seen to be of no use.
        self._outdated = False
        # What packs say of which the index knows nothing; a reader's only.
        self._sealed = Scan()

    def load(self, index: Index) -> None:
        """Bring memory to where the index is: by what is new, else by the snapshot and what is new, else by all."""
        with index.lock:
            if not self._catch_up(index) and not (self._restore_snapshot(index) and self._catch_up(index)):
                with index.reading() as reading:
                    assert reading is not None
                    table, self.packs, self.markers = read_table(reading.pages, self.directory.index)
                    self.entries, self._point = Entries(table), reading.point
                self._doubtful.clear()
            if self._doubtful:
                self.find_in(index, set(self._doubtful))
            for key, (text, reason) in self.unwritten.items():
                location = self.entries.get(key)
                if location is not None and location.to_text() == text:
                    self.entries.drop([key])
                    self.markers[key] = reason

    def _catch_up(self, index: Index) -> bool:
        if self._point is None:
            return False
        with index.reading(self._point) as reading:
            if reading is None:
                return False
            for page in reading.pages:
                rows = sort_rows(page, self.directory.index)
                self.entries.put({key: self._location(key, text) for key, text in rows.entries.items()})
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
            logger.warning("%s The index is read instead. It goes when the cache is next written to.", error)
            self._outdated = True
            return False
        except StoreError as error:
            logger.warning("%s The index is read instead.", error)
            return False
        if snapshot is None:
            return False
        with index.reading(snapshot.point) as reading:
            if reading is None:
                logger.info("%s: rows were removed or replaced since; the index is read instead.", path)
                self._outdated = True
                return False
        self.entries, self.packs, self.markers = Entries(snapshot.table), snapshot.packs, snapshot.markers
        self._point, self._num_saved, self._outdated = snapshot.point, len(snapshot.table), False
        self._doubtful.clear()
        return True

    def save(self, index: Index) -> None:
        """Write a snapshot if much is not in the last one. StoreError when that cannot be done.

        One that says nothing true any more goes, if there are too few entries for another.
        """
        with index.lock:
            num_entries = len(self.entries)
            if num_entries - self._num_saved <= max(SNAPSHOT_MIN_ROWS, num_entries // SNAPSHOT_SHARE):
                if self._outdated:
                    with typed_errors(self.directory.snapshot, 0):
                        self.directory.snapshot.unlink(missing_ok=True)
                    self._outdated = False
                return
            self.load(index)
            if self._point is None:
                with index.transaction():
                    pass  # from now on the index keeps a history
                self.load(index)
            assert self._point is not None
            snapshot = Snapshot(self._point, self.entries.fold(), dict(self.packs), dict(self.markers))
            # First: what another thread removes while it is written makes it old.
            self._num_saved, self._outdated = len(snapshot.table), False
        try:
            write_snapshot(self.directory.snapshot, snapshot)
        except StoreError:
            self.forget_snapshot()
            raise

    def find_in(self, index: Index, keys: set[str]) -> set[str]:
        """Look keys up in the index, and keep what it says of them. Returns those that are there."""
        found = self.entries.find(list(keys))
        missing = keys - found
        self._doubtful -= keys
        if not missing:
            return found
        sealed = {key: self._sealed.locations[key] for key in missing & self._sealed.locations.keys()}
        told = index.get_many(missing | {PACK_PREFIX + location.pack for location in sealed.values()})
        # Of a pack that the index knows by now it has the last word: what it lacks was removed.
        rows = {key: place.to_text() for key, place in sealed.items() if PACK_PREFIX + place.pack not in told}
        rows |= {key: text for key, text in told.items() if key in missing}
        rows = {key: text for key, text in rows.items() if self.unwritten.get(key, ("",))[0] != text}
        new = {key: text for key, text in rows.items() if not self.entries.restore(key, text)}
        self.entries.put({key: self._location(key, text) for key, text in new.items()})
        for key in rows:
            self.markers.pop(key, None)
        return found | rows.keys()

    def take_sealed(self) -> None:
        """Take in what a writer sealed that died before the index knew of it: a reader does so in memory.

        Opening for writing tells the index. Without this an entry that one reader saw could be gone for the next: the
        packs are read where a dead writer left a journal, and whoever rolls that back may die before it goes on.
        """
        unknown = self.directory.pack_sizes().keys() - self.packs.keys()
        scan = scan_unknown(self.directory, unknown - self._sealed.packs.keys())
        packs = {pack: size for pack, size in self._sealed.packs.items() if pack in unknown} | scan.packs
        locations = {key: place for key, place in self._sealed.locations.items() if place.pack in packs}
        self._sealed = Scan(locations=locations | scan.locations, packs=packs)
        known = self.entries.find(list(self._sealed.locations))
        for key, location in self._sealed.locations.items():
            if key not in known and self.unwritten.get(key, ("",))[0] != location.to_text():
                self.entries.put({key: location})
                self.markers.pop(key, None)

    def take_packs(self) -> None:
        """Read all from the packs' headers: there is no index that can be read."""
        scan = scan_packs(self.directory, self.directory.pack_sizes())
        self.packs, self.markers = scan.packs, scan.damaged
        self.entries.put(scan.locations)
        self.entries.fold()
        for reason in scan.unreadable.values():
            logger.warning("%s Its entries are missing.", reason)

    def drop(self, keys: Iterable[str]) -> None:
        """Forget entries; the index is asked when they are wanted."""
        self._doubtful.update(self.entries.drop(keys))

    def put(self, locations: Mapping[str, Location]) -> None:
        """Keep what the index has been told."""
        self.entries.put(locations)
        self._doubtful.difference_update(locations)

    def forget_snapshot(self) -> None:
        """Rows were removed or replaced: the next `save` writes a snapshot, or removes it if entries are too few."""
        self._num_saved, self._outdated = 0, True

    def _location(self, key: str, text: str) -> Location:
        try:
            return Location.from_text(text)
        except ValueError as error:
            raise IndexDamagedError(self.directory.index, f"row {key}: {error}") from error
