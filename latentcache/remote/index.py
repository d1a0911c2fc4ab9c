"""FarIndex: the entries of a remote cache and their locations, built from the headers of its packs."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from itertools import chain

from latentcache.errors import PackError, RemoteError, StoreError
from latentcache.identity import key_names
from latentcache.remote.tier import Tier
from latentcache.remote.transport import FORBIDDEN, Transport, in_threads, packs_in, removals_in
from latentcache.store.directory import pack_name
from latentcache.store.layout import Location, PackRow, drop_copies
from latentcache.store.pack import Read, read_row, row_in
from latentcache.store.table import LocationTable

LISTED_S = 60.0
"""How long a list of packs stays valid for keys that it has, and in a writer also for keys that it lacks."""
_HEAD_BYTES = 64 << 10  # the first read of a pack covers its header, and the keys and digests of a thousand entries

logger = logging.getLogger("latentcache")


class FarIndex:
    """The entries of a remote cache and their locations, in `table`. It is thread-safe.

    A pack's row is read from the `tier` if the pack is there, otherwise with one or two small requests. An entry
    counts as present once a pack lists it, since a key cannot stand for a wrong value. If several packs have copies of
    an entry, all machines use the largest pack, and packs that are listed for removal last. Packs that were deleted
    leave the tier. RemoteError.
    """

    def __init__(self, transport: Transport, tier: Tier | None = None):
        self._transport, self._tier = transport, tier
        self._lock = threading.RLock()
        self.table = LocationTable()
        self.sizes: dict[str, int] = {}
        """Size of each pack whose row is known, by id."""
        self.leaving: dict[str, int] = {}
        """The packs listed for removal, and the size of their notes: see `removals_in`."""
        self.unreadable: dict[str, str] = {}
        """Why the rows of other packs are not known."""
        self._warned: set[str] = set()
        self._leaving_keys: set[str] = set()
        self._rows: dict[str, PackRow] = {}
        """Cached rows of packs, so that each is requested once: 48 bytes per entry."""
        self._damaged: dict[str, dict[int, str]] = {}
        """For each pack, the rows that this process found damaged, and the reasons."""
        self._listed_at = -math.inf

    # Looking up

    def refresh(self, max_age_s: float = 0.0) -> None:
        """Bring the table up to date, unless that was done in the last `max_age_s` seconds.

        Packs whose headers could not be read are requested again: the transfer may have damaged them.
        """
        with self._lock:
            began = time.monotonic()
            if began - self._listed_at < max_age_s:
                return
            vanished, is_whole = set[str](), False
            while not is_whole:
                # Removals first: the packs that replace a listed one are then among the packs.
                listed = removals_in(self._transport).items()
                there = {pack: each.num_bytes for pack, each in packs_in(self._transport).items()}
                leaving = {pack: note.num_bytes for pack, note in listed if pack in there}
                is_first = self._listed_at == -math.inf
                gone = (self._tier.packs() if is_first and self._tier else self.sizes.keys()) - there.keys()
                if there != self.sizes or leaving != self.leaving:
                    self.unreadable = {}
                    self._rebuild(there, leaving)
                self._listed_at = began
                if gone and there and self._tier is not None:  # an empty listing may come from a wrong URL
                    self._tier.remove(gone)
                # Not if a compaction has moved the entries of a listed pack to a new one, which the next list has.
                unknown = there.keys() - self.sizes.keys() - self.unreadable.keys()
                is_whole, vanished = unknown <= vanished, vanished | unknown

    def find(self, keys: Collection[str], max_age_s: float = 0.0) -> set[str]:
        """The keys whose entries exist and will stay: an entry only in packs that are listed for removal is left out.

        A writer that relied on such an entry would lose it with its pack, so it stores the entry again, and no manifest
        is written that needs a pack which was seen on the list. If the cache has an index of its own, that is queried
        instead, and only damage that this process found is left out. Packs are listed at most once a minute for known
        keys, and for unknown keys unless that was done in the last `max_age_s` seconds.
        """
        if (known := self._transport.find(list(keys))) is not None:
            return known - self.table.damaged().keys()
        self.refresh(LISTED_S)
        found = self.table.find(list(keys)) - self._leaving_keys
        if len(found) < len(set(keys)):
            self.refresh(max_age_s)
            found = self.table.find(list(keys)) - self._leaving_keys
        return found

    def look_up(self, keys: Sequence[str]) -> list[Location | None]:
        """The location of each entry, None if missing. Packs that are listed for removal still count."""
        found = self.table.look_up(keys)
        if None in found:
            self.refresh()
            found = self.table.look_up(keys)
        return found

    def row(self, pack: str, num_bytes: int) -> PackRow:
        """The row of a pack of `num_bytes`, without entries that this process found damaged.

        PackError; FileNotFoundError if the pack does not exist.
        """
        row = self._rows.get(pack)
        if row is None and self._tier is not None:
            with suppress(FileNotFoundError, StoreError):  # a damaged local copy is ignored
                row = read_row(self._tier.path(pack))
        if row is None or row.pack.file_bytes != num_bytes:
            name = pack_name(pack)
            row = row_in(f"{self._transport.url}/{name}", num_bytes, _reading(self._transport, name, num_bytes))[0]
        self._rows[pack] = row
        found, damaged = PackRow.new(row.pack, row.keys, row.digests), self._damaged.get(pack, {})
        found.live[list(damaged)], found.reasons = False, dict(damaged)
        return found

    # Changing

    def add(self, row: PackRow) -> None:
        """Add a pack that was just uploaded. Until packs are listed again, its copies of entries take precedence."""
        with self._lock:
            self._rows[row.pack.id] = row
            self.table.drop(row.names())
            self.table.add([row])
            self.sizes[row.pack.id] = row.pack.file_bytes
            self._leaving_keys -= set(row.names())

    def lose(self, pack: str, row: int, problem: str) -> None:
        """Drop a damaged row of a pack for this process. If another pack has a copy of the entry, use that."""
        with self._lock:
            self._damaged.setdefault(pack, {})[row] = problem
            key = self._rows[pack].keys[row]
            if sum((each.keys == key).all(1).any() for each in self._rows.values()) > 1:
                self._rebuild(self.sizes, self.leaving)
            else:  # cheap, because many entries may be lost
                self.table.mark(self._rows[pack].key(row), problem)

    def _rebuild(self, sizes: Mapping[str, int], leaving: dict[str, int]) -> None:
        """Build the table from these packs. Unreadable ones are left out with a warning, and requested again later.

        After an error nothing has changed.
        """
        rows, refusals = list[PackRow](), list[RemoteError]()
        for (pack, _), found in in_threads(self._row_or_reason, sizes.items()):
            if isinstance(found, PackRow):
                rows.append(found)
            elif found is not None:
                if str(found) not in self._warned:  # the pack is requested again whenever packs are listed
                    logger.warning("%s Its entries are missing.", found)
                self._warned.add(str(found))
                self.unreadable[pack] = str(found)
                refusals += [found] if isinstance(found, RemoteError) else []
        if refusals and len(refusals) == len(sizes) and not self.sizes:
            raise refusals[0]
        # Large packs first: entries that an interrupted compaction copied count in its new pack. Leaving packs last.
        rows.sort(key=lambda row: (leaving.get(row.pack.id, -1), -row.pack.file_bytes, row.pack.id))
        drop_copies(rows)
        going = [key_names(row.keys[row.live]) for row in rows if row.pack.id in leaving]
        table = LocationTable(rows)
        # Set before the table: a writer that finds a key there must see that its pack is leaving.
        self.leaving, self._leaving_keys = leaving, set(chain.from_iterable(going))
        self.table, self.sizes = table, {row.pack.id: row.pack.file_bytes for row in rows}
        # Copied to a list first: another thread may change the dict.
        self._rows = {pack: row for pack, row in list(self._rows.items()) if pack in self.sizes}

    def _row_or_reason(self, listed: tuple[str, int]) -> PackRow | PackError | RemoteError | None:
        """The row of a pack, the error if it cannot be read, or None if it was deleted after it was listed."""
        try:
            return self.row(*listed)
        except FileNotFoundError:
            return None
        except PackError as error:
            return error
        except RemoteError as error:
            if error.status != FORBIDDEN:
                raise
            return error  # concerns only this pack, e.g. an archived one


def _reading(transport: Transport, name: str, num_bytes: int) -> Read:
    """A reader of a pack of `num_bytes` that fetches it front to back, on demand and in few requests."""
    head = b""

    def read(offset: int, number: int) -> bytes:
        nonlocal head
        if len(head) < min(offset + number, num_bytes):
            end = min(max(_HEAD_BYTES, offset + 2 * number), num_bytes)  # the next read is about as long
            head += transport.read(name, len(head), end - len(head))[0]
        return head[offset : offset + number]

    return read
