"""Which entries there are, and what changes that: a table in memory over the index, whose rows are those of packs."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from latentcache.errors import (
    IndexDamagedError,
    PackError,
    ReadOnlyError,
    StorageFullError,
    StoreBusyError,
    StoreError,
)
from latentcache.store.directory import CacheDirectory
from latentcache.store.entry import is_pack_id
from latentcache.store.index import Index, Position, Reading, Transaction, process_lock
from latentcache.store.layout import Location, PackRow
from latentcache.store.pack import read_row
from latentcache.store.table import LocationTable
from latentcache.utils.durable_files import remove_whole, typed_errors
from latentcache.utils.locks import locked

logger = logging.getLogger("latentcache")

PACK_PREFIX = "pack:"
_MAX_REASON_CHARS = 500


class Catalog:
    """Which entries there are and where they lie.

    A key that is not in memory makes it catch up with the index: another process may have added the entry. A damaged
    index is removed and made again from the packs; a reader that may not write does so in memory.
    """

    def __init__(self, directory: CacheDirectory, *, read_only: bool):
        self.directory = directory
        self.read_only = read_only
        self.table = LocationTable()
        """Where entries are, and why others are damaged, as far as memory knows."""
        self._position: Position | None = None
        self.index: Index | None = None
        """None for a reader that can use none: memory then has what the packs say, and nothing is read again."""
        # Memory and the index change together, and a fork waits for it.
        self._lock = process_lock
        try:
            self.index = Index(directory.index, read_only=read_only)
            self.reload()
        except (IndexDamagedError, ReadOnlyError) as error:
            # ReadOnlyError: a dead writer's change waits to be rolled back, which would be a write.
            if read_only:
                self._read_packs(error)
            elif isinstance(error, IndexDamagedError):
                self._replace(error)
            else:
                raise
        if not read_only:
            self._reconcile()

    # Opening

    def _read_packs(self, error: StoreError) -> None:
        logger.warning("%s The packs' headers are read instead; nothing is written.", error)
        self.index = None
        rows, refused = read_rows(self.directory, self.directory.pack_sizes())
        self.table = LocationTable(rows.values())
        for reason in refused.values():
            logger.warning("%s Its entries are missing.", reason)

    def _replace(self, error: IndexDamagedError) -> None:
        operation = "replacing a damaged index"
        with (
            locked(self.directory.path / "index.lock", operation, shared=False, wait=True),
            locked(self.directory.lock, operation, shared=True, is_brief=True),
        ):
            try:
                # Another process may have replaced it while this one waited.
                self._start_over()
                return
            except IndexDamagedError:
                logger.warning("%s It is removed, and made again from the packs.", error)
                self._make_anew()

    def _make_anew(self) -> dict[str, StoreError]:
        """Make a new index of what the packs say. Returns why some cannot be read, by pack.

        After a death in between the next opening adds what is lacking.
        """
        aside = self.directory.path / f"index.replaced-{uuid.uuid4().hex[:8]}"
        with typed_errors(self.directory.index, 0), suppress(FileNotFoundError):
            self.directory.index.rename(aside)
        with suppress(StoreError):  # an opening sweeps what is left of it
            remove_whole(aside)
        self._start_over()
        return self._take_in()

    def _start_over(self) -> None:
        self.table, self._position = LocationTable(), None
        self.index = Index(self.directory.index)
        self.reload()

    def _reconcile(self) -> None:
        try:
            with locked(self.directory.lock, "opening the cache", shared=True, is_brief=True):
                self.directory.sweep()
                for error in self._take_in().values():
                    advice = "; `latentcache compact` puts it aside" if is_damage(error) else ""
                    logger.warning("%s Its entries are missing%s.", error, advice)
        except StoreBusyError as error:
            logger.info("%s Packs that the index does not know yet are added at the next opening.", error)
        except StorageFullError as error:
            logger.warning("%s", error)  # what is there can be read all the same, and removed

    def _take_in(self) -> dict[str, StoreError]:
        """Forget the packs that are gone, and add those that the index lacks. Returns why others cannot be read."""
        # Rows first, then files: a pack that another writer seals from here on is in neither.
        self.reload()
        known = {pack: layout.file_bytes for pack, layout in self.table.packs.items()}
        sizes = self.directory.pack_sizes()
        found, refused = read_rows(self.directory, sizes.keys() - known.keys())
        # First what is lost: a copy of it that was found counts then.
        if lost := self.directory.lost_packs(known, sizes):
            num_lost = sum([num for pack, (num, _) in self.table.live_sizes().items() if pack in lost])
            with self._changing() as rows:
                for pack in lost:
                    rows.remove(PACK_PREFIX + pack)
            message = "%s: %d packs are gone or have another size; %d entries are lost"
            logger.warning(message, self.directory.path, len(lost), num_lost)
        if found:
            with self._changing() as rows:
                for row in found.values():
                    self._add_row(rows, row)
            logger.info("%s: added %d packs that the index did not know", self.directory.path, len(found))
        return refused

    def rebuild(self) -> dict[str, StoreError]:
        """Put what the packs say in the place of the index's rows, while the caller keeps all writers away.

        Readers see the old rows, or the new ones. What the index says of a pack that cannot be read now stays.

        Returns:
            Why packs could not be read, by pack.
        """
        if self.index is None or self.read_only:
            raise ReadOnlyError(self.directory.path)
        if not self.directory.index.exists():
            return self._make_anew()
        sizes = self.directory.pack_sizes()
        found, refused = read_rows(self.directory, sizes)
        try:
            with self._changing() as rows:
                known = {pack: layout.file_bytes for pack, layout in self.table.packs.items()}
                damaged = {pack for pack, error in refused.items() if is_damage(error)}
                gone = (self.directory.lost_packs(known, sizes) | damaged) & known.keys() - found.keys()
                stay = known.keys() - found.keys() - gone
                kept = {key for _, entries in self.table.by_pack(stay) for key in entries} if stay else set[str]()
                for pack in gone:
                    rows.remove(PACK_PREFIX + pack)
                for row in found.values():
                    row.live &= [key not in kept for key in row.names()]
                    rows.put(PACK_PREFIX + row.pack.id, row.to_bytes())
        except IndexDamagedError:
            return self._make_anew()
        unlisted = {pack: StoreError(f"{self.directory.pack_path(pack)}: cannot be read now") for pack in stay}
        return unlisted | refused

    # Catching up

    def reload(self) -> None:
        """Bring memory to where the index is now."""
        if self.index is not None:
            with self._lock, self.index.reading(self._position) as reading:
                self._apply(reading)

    def _apply(self, reading: Reading) -> None:
        # All rows are a table of their own first: other threads look at this one without the lock.
        table = LocationTable() if reading.is_whole else self.table
        table.add(parsed_row(name, value, self.directory) for name, value in reading.rows)
        self.table, self._position = table, reading.position

    @contextmanager
    def current(self) -> Iterator[LocationTable]:
        """The table, as the index is now. It does not change while the block runs."""
        with self._lock:
            self.reload()
            yield self.table

    # Looking up

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

    def look_up(self, keys: Sequence[str]) -> list[Location | None]:
        """Where the entries lie, None for those that are not there. StoreError for what is no key."""
        found = self.table.look_up(keys)
        return self.relocate(keys) if None in found else found

    def relocate(self, keys: Sequence[str]) -> list[Location | None]:
        """Look keys up as the index says now: a compaction may have moved the entries."""
        with self.current() as table:
            return table.look_up(keys)

    # Changing

    @contextmanager
    def _changing(self) -> Iterator[Transaction]:
        """A transaction on the index. Memory is what the index has while the block runs, and after it."""
        if self.index is None or self.read_only:
            raise ReadOnlyError(self.directory.path)
        with self._lock:
            with self.index.transaction() as rows:
                self._apply(rows.reading(self._position))
                yield rows
                position = rows.reading(self._position).position
            # After the commit: what was rolled back must not be in memory.
            self.table.drop_packs([name.removeprefix(PACK_PREFIX) for name in rows.changed])
            left = [(name, value) for name, value in rows.changed.items() if value is not None]
            self.table.add(parsed_row(name, value, self.directory) for name, value in left)
            self._position = position

    def seal(self, row: PackRow) -> int:
        """Record a new pack, and those of its entries that are not there yet. Returns how many were not."""
        with self._changing() as rows:
            return self._add_row(rows, row)

    def _add_row(self, rows: Transaction, row: PackRow) -> int:
        """Add a pack's row, with the entries that are live in no other pack. Returns how many are."""
        name = PACK_PREFIX + row.pack.id
        if (value := rows.get(name)) is not None:  # another process took it in
            return int(parsed_row(name, value, self.directory).live.sum())
        drop_known(row, self.table)
        rows.put(name, row.to_bytes())
        return int(row.live.sum())

    def move(self, row: PackRow, old: Mapping[str, Location]) -> int:
        """Point entries to their copies in a new pack, in one transaction, but for those that changed meanwhile."""
        with self._changing() as rows:
            left: dict[str, list[int]] = {}
            for number, (key, now) in enumerate(zip(row.names(), self.table.look_up(row.names()), strict=True)):
                row.live[number] = now is not None and now.place == old[key].place
                if row.live[number]:
                    left.setdefault(old[key].pack.id, []).append(old[key].row)

            def change(changed: PackRow) -> None:
                changed.live[left[changed.pack.id]] = False

            self._rewrite(rows, left, change)
            rows.put(PACK_PREFIX + row.pack.id, row.to_bytes())
            return int(row.live.sum())

    def mark(self, damaged: Mapping[str, tuple[Location, str]]) -> None:
        """Make damaged entries misses, with their reason, unless they have changed."""
        short = {
            key: (location, reason[:_MAX_REASON_CHARS].encode("ascii", "backslashreplace").decode())
            for key, (location, reason) in damaged.items()
        }
        if self.read_only:
            with self._lock:
                for key, (_, reason) in short.items():
                    self.table.mark(key, reason)
            return

        def change(row: PackRow) -> None:
            for key, (location, reason) in short.items():
                at = location.row
                if location.pack.id == row.pack.id and at < len(row.live) and row.live[at] and row.key(at) == key:
                    row.live[at] = False
                    row.reasons[at] = reason

        with self._changing() as rows:
            self._rewrite(rows, {location.pack.id for location, _ in short.values()}, change)

    def remove(self, keys: Collection[str]) -> int:
        """Remove entries, and the reasons of damaged ones. Returns how many entries there were."""
        with self._changing() as rows:
            own: dict[str, list[int]] = {}
            for location in filter(None, self.table.look_up(list(keys))):
                own.setdefault(location.pack.id, []).append(location.row)
            gone = set(keys)

            def change(row: PackRow) -> None:
                row.live[own.get(row.pack.id, [])] = False
                row.reasons = {at: reason for at, reason in row.reasons.items() if row.key(at) not in gone}

            self._rewrite(rows, own.keys() | self.table.packs_with_reasons(gone), change)
            return sum(map(len, own.values()))

    def _rewrite(self, rows: Transaction, packs: Collection[str], change: Callable[[PackRow], None]) -> None:
        for pack in packs:
            name = PACK_PREFIX + pack
            if (value := rows.get(name)) is not None:
                row = parsed_row(name, value, self.directory)
                change(row)
                rows.put(name, row.to_bytes())

    def drop_empty(self, packs: Collection[str] | None = None) -> set[str]:
        """Delete the packs, of `packs` if given, in which no entry is live, and return them.

        The file goes first, so that a crash leaves a row that the next call sees. So does a file that cannot go now.
        """
        with self.current() as table:  # no other thread changes memory between the look and the removal
            empty = table.empty_packs()
            if packs is not None:
                empty &= set(packs)
            gone = {pack for pack in empty if self.directory.remove_pack(pack)}
            if gone:
                with self._changing() as rows:
                    for pack in gone:
                        rows.remove(PACK_PREFIX + pack)
            return gone

    def close(self) -> None:
        """Nothing is open between calls; afterwards changes are refused."""
        if self.index is not None:
            self.index.close()


def parsed_row(name: str, value: bytes, directory: CacheDirectory) -> PackRow:
    """A row of the index. IndexDamagedError for one that is not that of a pack."""
    pack = name.removeprefix(PACK_PREFIX)
    try:
        if pack == name or not is_pack_id(pack):
            raise ValueError("it names no pack")
        return PackRow.from_bytes(pack, value)
    except ValueError as error:
        raise IndexDamagedError(directory.index, f"row {name!r:.80}: {error}") from error


def is_damage(error: StoreError) -> bool:
    """Whether a pack that could not be read is damaged. Otherwise the system refused to read it, which may pass."""
    return isinstance(error, PackError)


def read_rows(directory: CacheDirectory, packs: Iterable[str]) -> tuple[dict[str, PackRow], dict[str, StoreError]]:
    """The rows of packs, and the errors of those that cannot be read, by pack. A key is live in the first that has it.

    That entry may be the damaged one of two copies: its digest decides when it is read.
    """
    rows: dict[str, PackRow] = {}
    refused: dict[str, StoreError] = {}
    seen: set[bytes] = set()
    for pack in sorted(packs):
        try:
            row = read_row(directory.pack_path(pack))
        except FileNotFoundError:
            continue  # compacted away since it was listed
        except StoreError as error:
            refused[pack] = error
            continue
        keys = [key.tobytes() for key in row.keys]
        row.live[:] = [key not in seen for key in keys]
        seen.update(keys)
        rows[pack] = row
    return rows, refused


def drop_known(row: PackRow, table: LocationTable) -> None:
    """Entries that are live in another pack are not in this one."""
    keys = row.names()
    known = table.find(keys)
    if known:
        row.live &= [key not in known for key in keys]
