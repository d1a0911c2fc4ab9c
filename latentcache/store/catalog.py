"""Which entries there are, and what changes that: a table in memory over the index, whose rows are those of packs."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain

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
from latentcache.store.index import Index, Position, Rows, Transaction, process_lock
from latentcache.store.layout import Location, PackRow
from latentcache.store.pack import read_row
from latentcache.store.table import LocationTable
from latentcache.utils.durable_files import remove_whole
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
            self._open()
        except (IndexDamagedError, ReadOnlyError) as error:
            # ReadOnlyError: a dead writer's change waits to be rolled back, which would be a write.
            if read_only:
                self._read_packs(error)
            elif isinstance(error, IndexDamagedError):
                self._replace(error)
                self._open()
            else:
                raise

    # Opening

    def _open(self) -> None:
        self.index = Index(self.directory.index, read_only=self.read_only)
        if self.read_only:
            self.reload()
            return
        try:
            with locked(self.directory.lock, "opening the cache", shared=True, is_brief=True):
                self.directory.sweep()
                for error in self.reconcile().values():
                    advice = "; `latentcache compact` puts it aside" if isinstance(error, PackError) else ""
                    logger.warning("%s Its entries are missing%s.", error, advice)
        except StoreBusyError as error:
            logger.info("%s Packs that the index does not know yet are added at the next opening.", error)
            self.reload()
        except StorageFullError as error:
            logger.warning("%s", error)  # what is there can be read all the same, and removed

    def _load(self) -> None:
        self.table, self._position = LocationTable(), None
        self.index = Index(self.directory.index)
        self.reload()

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
                self._load()  # another process may have replaced it while this one waited
            except IndexDamagedError:
                logger.warning("%s It is removed, and made again from the packs.", error)
                self._start_over()

    def _start_over(self) -> None:
        """Begin a new, empty index. After a death before all packs are in it the next opening adds what is lacking."""
        remove_whole(self.directory.index)
        self._load()

    def reconcile(self, *, anew: bool = False) -> dict[str, StoreError]:
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
                rows.remove(PACK_PREFIX + pack)
            if not anew:  # another process may have added some meanwhile
                found = {pack: row for pack, row in found.items() if pack not in self.table.packs}
            stay = self.table.packs.keys() - lost - found.keys()
            for pack, row in found.items():
                if stay:
                    places = self.table.look_up(row.names())
                    row.live &= [place is None or place.pack.id not in stay for place in places]
                rows.put(PACK_PREFIX + pack, row.to_bytes())
        if lost:
            message = "%s: %d packs are gone or have another size; %d entries are lost"
            logger.warning(message, self.directory.path, len(lost), num_lost)
        if found:
            logger.info("%s: added %d packs to the index", self.directory.path, len(found))
        return refused

    def rebuild(self) -> dict[str, StoreError]:
        """Make the index say what the packs say, while the caller keeps all writers away: see `reconcile`."""
        if self.read_only:
            raise ReadOnlyError(self.directory.path)
        if self.directory.index.exists():
            with suppress(IndexDamagedError):
                return self.reconcile(anew=True)
        self._start_over()
        return self.reconcile()

    # Catching up

    def reload(self) -> None:
        """Bring memory to where the index is now."""
        if self.index is not None:
            with self._lock, self.index.reading() as rows:
                self._catch_up(rows)

    def _catch_up(self, rows: Rows) -> None:
        position, is_whole, found = rows.since(self._position)
        # All rows are a table of their own first: other threads look at this one without the lock.
        table = LocationTable() if is_whole else self.table
        table.add(parsed_row(name, value, self.directory) for name, value in found)
        self.table, self._position = table, position

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

    def look_up(self, keys: Sequence[str], *, again: bool = False) -> list[Location | None]:
        """Where the entries lie, None for those that are not there. StoreError for what is no key.

        `again`: look at the index in any case, because a compaction may have moved the entries.
        """
        found: list[Location | None] = [None] if again else self.table.look_up(keys)
        if None in found:
            with self.current() as table:
                found = table.look_up(keys)
        return found

    # Changing

    @contextmanager
    def _changing(self) -> Iterator[Transaction]:
        """A transaction on the index. Memory is what the index has while the block runs, and after it."""
        if self.index is None or self.read_only:
            raise ReadOnlyError(self.directory.path)
        with self._lock:
            with self.index.transaction() as rows:
                self._catch_up(rows)
                yield rows
                position = rows.since(self._position)[0]
            # After the commit: what was rolled back must not be in memory.
            self.table.drop_packs([name.removeprefix(PACK_PREFIX) for name in rows.changed])
            left = [(name, value) for name, value in rows.changed.items() if value is not None]
            self.table.add(parsed_row(name, value, self.directory) for name, value in left)
            self._position = position

    def seal(self, row: PackRow) -> int:
        """Record a new pack, and those of its entries that are live in no other. Returns how many are."""
        name = PACK_PREFIX + row.pack.id
        with self._changing() as rows:
            if (value := rows.get(name)) is not None:  # another process took it in
                return int(parsed_row(name, value, self.directory).live.sum())
            keys = row.names()
            known = self.table.find(keys)
            row.live &= [key not in known for key in keys]
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
            for changed in self._changed(rows, left):
                changed.live[left[changed.pack.id]] = False
            rows.put(PACK_PREFIX + row.pack.id, row.to_bytes())
            return int(row.live.sum())

    def mark(self, damaged: Mapping[str, tuple[Location, str]]) -> None:
        """Make damaged entries misses, with their reason, unless they have changed."""
        by_pack: dict[str, list[tuple[str, int, str]]] = {}
        for key, (location, reason) in damaged.items():
            short = reason[:_MAX_REASON_CHARS].encode("ascii", "backslashreplace").decode()
            by_pack.setdefault(location.pack.id, []).append((key, location.row, short))
        if self.read_only:
            with self._lock:
                for key, _, reason in chain.from_iterable(by_pack.values()):
                    self.table.mark(key, reason)
            return
        with self._changing() as rows:
            for row in self._changed(rows, by_pack):
                for key, at, reason in by_pack[row.pack.id]:
                    if at < len(row.live) and row.live[at] and row.key(at) == key:
                        row.live[at], row.reasons[at] = False, reason

    def remove(self, keys: Collection[str]) -> int:
        """Remove entries, and the reasons of damaged ones. Returns how many entries there were."""
        with self._changing() as rows:
            own: dict[str, list[int]] = {}
            for location in filter(None, self.table.look_up(list(keys))):
                own.setdefault(location.pack.id, []).append(location.row)
            gone = set(keys)
            for row in self._changed(rows, own.keys() | self.table.packs_with_reasons(gone)):
                row.live[own.get(row.pack.id, [])] = False
                row.reasons = {at: reason for at, reason in row.reasons.items() if row.key(at) not in gone}
            return sum(map(len, own.values()))

    def _changed(self, rows: Transaction, packs: Iterable[str]) -> Iterator[PackRow]:
        """The rows of these packs that there are, each to be changed and then written."""
        for pack in packs:
            name = PACK_PREFIX + pack
            if (value := rows.get(name)) is not None:
                row = parsed_row(name, value, self.directory)
                yield row
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


def read_rows(directory: CacheDirectory, packs: Iterable[str]) -> tuple[dict[str, PackRow], dict[str, StoreError]]:
    """The rows of packs, and the errors of those that cannot be read, by pack. A key is live in the first that has it.

    That entry may be the damaged one of two copies: its digest decides when it is read. An error that is no PackError
    says nothing about the pack: the system refused to read it, which may pass.
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
