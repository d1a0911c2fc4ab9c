"""FarIndex: which entries the packs of a cache hold that is elsewhere. It is made of what the packs say themselves."""

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
"""How long a list of packs is trusted for the keys that it has; a writer trusts it as long for those that it lacks."""
_HEAD_BYTES = 64 << 10  # read first of a pack: its header, and the keys and digests of a thousand entries

logger = logging.getLogger("latentcache")


class FarIndex:
    """Which entries there are, and where: `table`. Threads may share it.

    The row of a pack is read in the `tier` if the pack is here, else by one or two small requests. What a pack lists
    counts as there: a key cannot name a wrong value. Copies of an entry lie in several packs now and then; the one in
    the largest pack counts, on all machines, and those in packs that are listed for removal last. Packs that are gone
    leave the tier. RemoteError.
    """

    def __init__(self, transport: Transport, tier: Tier | None = None):
        self._transport, self._tier = transport, tier
        self._lock = threading.RLock()
        self.table = LocationTable()
        self.sizes: dict[str, int] = {}
        """Bytes of each pack whose entries are known, by id."""
        self.leaving: dict[str, int] = {}
        """The packs that are listed for removal, and the bytes of their notes: see `removals_in`."""
        self.unreadable: dict[str, str] = {}
        """Why the entries of other packs are not known."""
        self._warned: set[str] = set()
        self._leaving_keys: set[str] = set()
        self._rows: dict[str, PackRow] = {}
        """What packs list, so that each is asked once: 48 bytes an entry."""
        self._damaged: dict[str, dict[int, str]] = {}
        """Rows of packs whose entries this process found damaged, and why."""
        self._listed_at = -math.inf

    # Looking up

    def refresh(self, max_age_s: float = 0.0) -> None:
        """Bring the table to what is there now, unless it was done in the last seconds.

        Packs whose headers could not be read are asked again: they may have been damaged on their way.
        """
        with self._lock:
            began = time.monotonic()
            if began - self._listed_at < max_age_s:
                return
            # Removals first: for a pack that is on the list by then its new ones are among the packs.
            listed = removals_in(self._transport).items()
            there = {pack: each.num_bytes for pack, each in packs_in(self._transport).items()}
            leaving = {pack: note.num_bytes for pack, note in listed if pack in there}
            is_first = self._listed_at == -math.inf
            known = self._tier.packs() if is_first and self._tier is not None else self.sizes.keys()
            gone = known - there.keys()
            if there != self.sizes or leaving != self.leaving:
                self.unreadable = {}
                self._rebuild(there, leaving)
            self._listed_at = began
            if gone and there and self._tier is not None:  # a place that lists nothing at all may be the wrong one
                self._tier.remove(gone)

    def find(self, keys: Collection[str], max_age_s: float = 0.0) -> set[str]:
        """Find which of the keys are there, and stay: what lies only in packs that are listed for removal is not found.

        Where the cache has an index of its own that is asked, and only damage that this process found is left out.
        Elsewhere: a writer that counted on such an entry would lose it with its pack. So it stores it once more, and no
        manifest is written that needs a pack which an earlier look showed to be on a list. The packs are listed at most
        once a minute for keys that are known, and, if it was not done in the last `max_age_s`, for others.
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
        """Where the entries lie, None for those that are not there. Those of packs that go are read until they go."""
        found = self.table.look_up(keys)
        if None in found:
            self.refresh()
            found = self.table.look_up(keys)
        return found

    def row(self, pack: str, num_bytes: int) -> PackRow:
        """The row of a pack with so many bytes, without what this process found damaged.

        PackError; FileNotFoundError: it is not there.
        """
        row = self._rows.get(pack)
        if row is None and self._tier is not None:
            with suppress(FileNotFoundError, StoreError):  # what is damaged here is read there
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
        """Note a pack that was sent just now. Until packs are listed again its copies of entries count here."""
        with self._lock:
            self._rows[row.pack.id] = row
            self.table.drop(row.names())
            self.table.add([row])
            self.sizes[row.pack.id] = row.pack.file_bytes
            self._leaving_keys -= set(row.names())

    def lose(self, pack: str, row: int, problem: str) -> None:
        """For this process a row of a pack that is damaged there is gone, and another copy counts if there is one."""
        with self._lock:
            self._damaged.setdefault(pack, {})[row] = problem
            key = self._rows[pack].keys[row]
            if sum((each.keys == key).all(1).any() for each in self._rows.values()) > 1:
                self._rebuild(self.sizes, self.leaving)
            else:  # at once, where many are lost
                self.table.mark(self._rows[pack].key(row), problem)

    def _rebuild(self, sizes: Mapping[str, int], leaving: dict[str, int]) -> None:
        """Make the table of these packs; what cannot be read is left out, with a warning, and asked for again.

        After an error all is as it was.
        """
        rows, refusals = list[PackRow](), list[RemoteError]()
        for (pack, _), found in in_threads(self._row_or_reason, sizes.items()):
            if isinstance(found, PackRow):
                rows.append(found)
            elif found is not None:
                if str(found) not in self._warned:  # it is tried again whenever packs are listed
                    logger.warning("%s Its entries are missing.", found)
                self._warned.add(str(found))
                self.unreadable[pack] = str(found)
                refusals += [found] if isinstance(found, RemoteError) else []
        if refusals and len(refusals) == len(sizes) and not self.sizes:
            raise refusals[0]
        # Full packs first: what a compaction copied that died counts in its new pack. Damaged ones last.
        rows.sort(key=lambda row: (leaving.get(row.pack.id, -1), -row.pack.file_bytes, row.pack.id))
        drop_copies(rows)
        going = [key_names(row.keys[row.live]) for row in rows if row.pack.id in leaving]
        table = LocationTable(rows)
        # Before the table: a writer that finds a key there must see that it goes.
        self.leaving, self._leaving_keys = leaving, set(chain.from_iterable(going))
        self.table, self.sizes = table, {row.pack.id: row.pack.file_bytes for row in rows}
        # Of a list: another thread may change the dict.
        self._rows = {pack: row for pack, row in list(self._rows.items()) if pack in self.sizes}

    def _row_or_reason(self, listed: tuple[str, int]) -> PackRow | PackError | RemoteError | None:
        """The row of a pack, why it cannot be read, or None for one that is gone since it was listed."""
        try:
            return self.row(*listed)
        except FileNotFoundError:
            return None
        except PackError as error:
            return error
        except RemoteError as error:
            if error.status != FORBIDDEN:
                raise
            return error  # of this pack alone, as of an archived one


def _reading(transport: Transport, name: str, num_bytes: int) -> Read:
    """Reads a pack of so many bytes from its start to the last that was asked for, in few requests."""
    head = b""

    def read(offset: int, number: int) -> bytes:
        nonlocal head
        if len(head) < min(offset + number, num_bytes):
            end = min(max(_HEAD_BYTES, offset + 2 * number), num_bytes)  # what comes next is about as long
            head += transport.read(name, len(head), end - len(head))[0]
        return head[offset : offset + number]

    return read
