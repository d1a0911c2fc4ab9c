"""The rows of the index, as a store needs them: entries, packs and damage, held in memory and kept in step."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from latentcache.errors import IndexDamagedError, ReadOnlyError, StoreBusyError, StoreError
from latentcache.store.base import is_key
from latentcache.store.directory import CacheDirectory
from latentcache.store.index import Index, Transaction
from latentcache.store.location import Location, PackSize, Spec, count_specs, is_pack_id, looks_like_location
from latentcache.store.lock import locked
from latentcache.store.pack import Header
from latentcache.store.recovery import DAMAGED_PREFIX, PACK_PREFIX, Scan, scan_packs

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
        self.packs: dict[str, PackSize] = {}
        self.markers: dict[str, str] = {}
        # Text until it is needed: reading a million locations at once takes seconds, and they are larger.
        self._entries: dict[str, str | Location] = {}
        # Damage that a reader found and may not write down: the row's text, and the reason.
        self._unwritten: dict[str, tuple[str, str]] = {}
        self.index: Index | None = self._open_for_reading() if read_only else self._open_for_writing()
        # Memory and the index change together, and a fork waits for it. Without an index nothing is read again.
        self._lock: AbstractContextManager[Any] = nullcontext() if self.index is None else self.index.lock

    def _open_for_reading(self) -> Index | None:
        try:
            index = Index(self.directory.index, read_only=True)
            self._load(index.items())
            return index
        except (IndexDamagedError, ReadOnlyError) as error:
            # ReadOnlyError: a dead writer's change waits to be rolled back, which would be a write.
            logger.warning("%s Reading the packs' headers instead; nothing is written.", error)
            self._take(scan_packs(self.directory, self.directory.pack_sizes()))
            return None

    def _open_for_writing(self) -> Index:
        try:
            index = Index(self.directory.index)
            self._load(index.items())
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
                self._load(index.items())
                return index
            except IndexDamagedError:
                aside = self.directory.path / f"index.damaged-{uuid.uuid4().hex[:8]}"
                self.directory.index.rename(aside)
            index = Index(self.directory.index)
            logger.warning("%s It was moved to %s (delete it when you like) and is made anew now.", error, aside.name)
            self._load({})
            return index

    def _load(self, rows: Mapping[str, str]) -> None:
        entries: dict[str, str | Location] = {}
        packs, markers = {}, {}
        for name, value in rows.items():
            if is_key(name) and looks_like_location(value):
                entries[name] = value
            elif name.startswith(DAMAGED_PREFIX):
                markers[name.removeprefix(DAMAGED_PREFIX)] = value
            elif name.startswith(PACK_PREFIX):
                pack = name.removeprefix(PACK_PREFIX)
                packs[pack] = self._pack_size(pack, value)
            else:
                raise IndexDamagedError(self.directory.index, f"row {name!r:.80} = {value!r:.80}")
        for key, (text, reason) in self._unwritten.items():
            if entries.get(key) == text:
                markers[key] = reason
                del entries[key]
        self._entries, self.packs, self.markers = entries, packs, markers

    def _pack_size(self, pack: str, text: str) -> PackSize:
        try:
            if not is_pack_id(pack):
                raise ValueError(f"not a pack: {pack!r:.80}")
            return PackSize.from_text(text)
        except ValueError as error:
            raise IndexDamagedError(self.directory.index, str(error)) from error

    def _take(self, scan: Scan) -> None:
        self.packs.update(scan.packs)
        self._entries.update(scan.locations)
        self.markers.update(scan.damaged)
        for reason in scan.unreadable.values():
            logger.warning("%s Its entries are missing.", reason)

    def _reconcile(self, index: Index) -> None:
        """Bring index and packs together: take in sealed packs that have no row, mark what lies in lost ones."""
        # Rows first, then files: a pack that another writer seals from here on is in neither.
        known = dict(self.packs)
        sizes = self.directory.pack_sizes()
        unknown = sizes.keys() - known.keys()
        if unknown:
            scan = scan_packs(self.directory, unknown)
            for path, reason in scan.unreadable.items():
                advice = "" if Path(path).stem in scan.unreachable else "; delete it, or move it elsewhere"
                logger.warning("%s Its entries are missing%s.", reason, advice)
            if scan.packs:
                logger.info("%s: took in %d packs that the index did not know", self.directory.path, len(scan.packs))
            stale = [DAMAGED_PREFIX + key for key in scan.locations if key in self.markers]
            index.add_many(scan.rows(), remove=stale)
            self._load(index.items())
        lost = {p for p, size in known.items() if sizes.get(p) != size.file_bytes and self._is_lost(p, size)}
        if lost:
            self._mark_lost(index, lost)

    def _is_lost(self, pack: str, size: PackSize) -> bool:
        try:
            return self.directory.pack_size(pack) != size.file_bytes
        except StoreError as error:
            logger.warning("%s", error)
            return False

    def _mark_lost(self, index: Index, lost: Collection[str]) -> None:
        gone = {key: location for key, location in self.locations().items() if location.pack in lost}
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
        self._load(index.items())

    def _location(self, key: str, value: str | Location) -> Location:
        if isinstance(value, Location):
            return value
        try:
            return Location.from_text(value)
        except ValueError as error:
            raise IndexDamagedError(self.directory.index, f"row {key}: {error}") from error

    def reload(self) -> None:
        """Read all rows again."""
        if self.index is not None:
            with self._lock:
                self._load(self.index.items())

    def find(self, keys: Iterable[str]) -> set[str]:
        """Those that are there, in memory or in the index."""
        wanted = set(keys)
        entries = self._entries
        found = {key for key in wanted if key in entries}
        missing = wanted - found
        if missing and self.index is not None:
            with self._lock:
                rows = self.index.get_many(missing)
                rows = {key: text for key, text in rows.items() if self._unwritten.get(key, ("",))[0] != text}
                self._entries.update(rows)
                for key in rows:
                    self.markers.pop(key, None)
            found |= rows.keys()
        return found

    def refresh(self, keys: Iterable[str]) -> set[str]:
        """Those that the index has now: what memory says of these keys is corrected."""
        wanted = set(keys)
        with self._lock:
            self.forget(wanted)
            return self.find(wanted)

    def locate(self, key: str) -> Location | None:
        """Where the entry lies, or None if it is not there."""
        value = self._entries.get(key)
        if isinstance(value, Location):
            return value
        with self._lock:
            self.find([key])
            value = self._entries.get(key)
            if value is None:
                return None
            location = self._entries[key] = self._location(key, value)
        return location

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
        for key in keys:
            self._entries.pop(key, None)

    def locations(self) -> dict[str, Location]:
        """All entries, by key, oldest first."""
        return {key: self._location(key, value) for key, value in list(self._entries.items())}

    def specs(self) -> tuple[list[tuple[Spec, int]], int]:
        """How many entries of each spec there are, and how many are damaged. The index is counted, and not kept."""
        if self.index is None:
            return count_specs(_text(value) for value in list(self._entries.values())), len(self.markers)
        damaged = set(self._unwritten)
        try:
            counts = count_specs(self._live_texts(self.index, damaged))
        except ValueError as error:
            raise IndexDamagedError(self.directory.index, str(error)) from error
        return counts, len(damaged)

    def _live_texts(self, index: Index, damaged: set[str]) -> Iterator[str]:
        """The locations of entries that are there now; the keys of those that are damaged are left in `damaged`."""
        for page in index.pages():
            for name, text in page:
                if name.startswith(DAMAGED_PREFIX):
                    damaged.add(name.removeprefix(DAMAGED_PREFIX))
                elif name not in self._unwritten and not name.startswith(PACK_PREFIX):
                    yield text
                elif name in self._unwritten and self._unwritten[name][0] != text:
                    damaged.discard(name)  # it was replaced since
                    yield text

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
            return list(self._entries)

    def add_pack(self, header: Header) -> int:
        """Record a new pack and those of its entries that are not there yet. Returns how many were not."""
        index = self._writable()
        with self._lock:
            markers = index.get_many(DAMAGED_PREFIX + key for key in header.locations)
            scan = Scan(locations=dict(header.locations), packs={header.pack: header.size})
            added = index.add_many(scan.rows(), remove=list(markers))
            self.packs[header.pack] = header.size
            new = {key: location for key, location in header.locations.items() if key in added}
            self._entries.update(new)
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
            self._entries.update(moved)
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

    def _writable(self) -> Index:
        if self.index is None or self.read_only:
            raise ReadOnlyError(self.directory.path)
        return self.index

    def close(self) -> None:
        if self.index is not None:
            self.index.close()


def _text(value: str | Location) -> str:
    return value if isinstance(value, str) else value.to_text()


def mark_row(rows: Transaction, key: str, reason: str) -> None:
    """Replace an entry's row by a marker."""
    rows.remove(key)
    rows.put(DAMAGED_PREFIX + key, reason[:_MAX_REASON_CHARS].encode("utf-8", "replace").decode())
