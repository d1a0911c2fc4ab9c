"""The rows of the index, as a store needs them: which entries there are, and what changes them."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from latentcache.errors import IndexDamagedError, ReadOnlyError, StoreBusyError, StoreError
from latentcache.store.directory import CacheDirectory
from latentcache.store.entries import Found
from latentcache.store.index import Index, Transaction
from latentcache.store.location import Location, PackSize, Spec
from latentcache.store.lock import locked
from latentcache.store.mirror import Mirror
from latentcache.store.pack import Header
from latentcache.store.recovery import Scan, lost_packs, scan_unknown
from latentcache.store.rows import DAMAGED_PREFIX, PACK_PREFIX

logger = logging.getLogger("latentcache")

_MAX_REASON_CHARS = 500


class Catalog:
    """Which entries there are and where they lie.

    A key that is not in memory is looked up in the index: another process may have added it. A damaged index is moved
    aside and made anew from the packs; a reader that may not write does so in memory.
    """

    def __init__(self, directory: CacheDirectory, *, read_only: bool):
        self.directory = directory
        self.read_only = read_only
        self.mirror = Mirror(directory)
        self.index: Index | None = self._open_for_reading() if read_only else self._open_for_writing()
        # Memory and the index change together, and a fork waits for it. Without an index nothing is read again.
        self._lock: AbstractContextManager[Any] = nullcontext() if self.index is None else self.index.lock
        self.save()

    @property
    def packs(self) -> dict[str, PackSize]:
        """The packs that the index knows."""
        return self.mirror.packs

    @property
    def markers(self) -> dict[str, str]:
        """Why each damaged entry is one, by key."""
        return self.mirror.markers

    def _open_for_reading(self) -> Index | None:
        try:
            index = Index(self.directory.index, read_only=True)
            self.mirror.load(index)
            self.mirror.take_sealed()
            return index
        except (IndexDamagedError, ReadOnlyError) as error:
            # ReadOnlyError: a dead writer's change waits to be rolled back, which would be a write.
            logger.warning("%s Reading the packs' headers instead; nothing is written.", error)
            self.mirror.take_packs()
            return None

    def _open_for_writing(self) -> Index:
        try:
            index = Index(self.directory.index)
            self.mirror.load(index)
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
                self.mirror.load(index)
                return index
            except IndexDamagedError:
                aside = self.directory.path / f"index.damaged-{uuid.uuid4().hex[:8]}"
                self.directory.index.rename(aside)
            index = Index(self.directory.index)
            logger.warning("%s It was moved to %s (delete it when you like) and is made anew now.", error, aside.name)
            self.mirror.load(index)
            return index

    def _reconcile(self, index: Index) -> None:
        """Bring index and packs together: take in sealed packs that have no row, mark what lies in lost ones."""
        # Again: since memory was filled, and until this lock was taken, a compaction may have moved what it holds.
        self.mirror.load(index)
        # Rows first, then files: a pack that another writer seals from here on is in neither.
        known = dict(self.packs)
        sizes = self.directory.pack_sizes()
        scan = scan_unknown(self.directory, sizes.keys() - known.keys())
        if scan.packs:
            logger.info("%s: took in %d packs that the index did not know", self.directory.path, len(scan.packs))
            stale = [DAMAGED_PREFIX + key for key in scan.locations if key in self.markers]
            index.add_many(scan.rows(), remove=stale)
            self.mirror.load(index)
        lost = lost_packs(self.directory, known, sizes)
        if lost:
            self._mark_lost(index, lost)

    def _mark_lost(self, index: Index, lost: Collection[str]) -> None:
        gone = self.mirror.entries.locations(lost)
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
        self.mirror.load(index)

    def reload(self) -> None:
        """Bring memory to where the index is now."""
        if self.index is None:
            return
        with self._lock:
            self.mirror.load(self.index)
            if self.read_only:
                self.mirror.take_sealed()

    def find(self, keys: Iterable[str]) -> set[str]:
        """Those that are there, in memory or in the index. StoreError for one that is no key."""
        wanted = list(keys)
        found = self.mirror.entries.find(wanted)
        missing = set(wanted) - found if len(found) < len(wanted) else set()
        if missing:
            with self._lock:
                # Nothing is on its way in memory now, and another thread may have brought them.
                index, entries = self.index, self.mirror.entries
                found |= entries.find(list(missing)) if index is None else self.mirror.find_in(index, missing)
        return found

    def refresh(self, keys: Iterable[str]) -> set[str]:
        """Those that the index has now: what memory says of these keys is corrected."""
        wanted = set(keys)
        with self._lock:
            self.forget(wanted)
            return self.find(wanted)

    def look_up(self, keys: Sequence[str]) -> Found:
        """Where the entries lie, in memory or in the index. StoreError for one that is no key."""
        found = self.mirror.entries.look_up(keys)
        if found.missing():
            with self._lock:
                self.find(keys)
                found = self.mirror.entries.look_up(keys)
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

    @property
    def version(self) -> object:
        """As long as it is the same object, entries that were found lie where they did."""
        return self.mirror.entries.version

    def forget(self, keys: Iterable[str]) -> None:
        """Drop keys from memory only."""
        with self._lock:
            self.mirror.drop(keys)

    def locations(self) -> dict[str, Location]:
        """All entries, by key, oldest first."""
        with self._lock:  # another thread may be looking one up again: it must not be missing here
            return self.mirror.entries.locations()

    def specs(self) -> tuple[list[tuple[Spec, int]], int]:
        """How many entries of each spec the index has now, and how many are damaged."""
        with self._lock:
            self.reload()
            return self.mirror.entries.specs(), len(self.markers)

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
            return self.mirror.entries.keys()

    def add_pack(self, header: Header) -> int:
        """Record a new pack and those of its entries that are not there yet. Returns how many were not."""
        index = self._writable()
        with self._lock:
            markers = index.get_many(DAMAGED_PREFIX + key for key in header.locations)
            if markers:
                self.forget_snapshot()
            scan = Scan(locations=dict(header.locations), packs={header.pack: header.size})
            added = index.add_many(scan.rows(), remove=list(markers))
            self.packs[header.pack] = header.size
            new = {key: location for key, location in header.locations.items() if key in added}
            self.mirror.put(new)
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
            self.mirror.put(moved)
            self.forget_snapshot()
        return len(moved)

    def mark(self, damaged: Mapping[str, tuple[Location, str]]) -> None:
        """Make damaged entries misses, with their reason, unless their rows have changed."""
        if self.read_only:
            with self._lock:
                for key, (location, reason) in damaged.items():
                    self.mirror.unwritten[key] = (location.to_text(), reason)
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
            self.forget_snapshot()

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
        self.forget_snapshot()

    def _writable(self) -> Index:
        if self.index is None or self.read_only:
            raise ReadOnlyError(self.directory.path)
        return self.index

    def save(self) -> None:
        """Write a snapshot for those who open the cache later, if the last one lacks much. Errors are logged."""
        if self.index is not None and not self.read_only:
            try:
                self.mirror.save(self.index)
            except StoreError as error:
                logger.warning("no snapshot of the index was written: %s", error)

    def forget_snapshot(self) -> None:
        """As `Mirror.forget_snapshot`."""
        self.mirror.forget_snapshot()

    def close(self) -> None:
        if self.index is not None:
            self.save()
            self.index.close()


def mark_row(rows: Transaction, key: str, reason: str) -> None:
    """Replace an entry's row by a marker."""
    rows.remove(key)
    rows.put(DAMAGED_PREFIX + key, reason[:_MAX_REASON_CHARS].encode("utf-8", "replace").decode())
