"""FarIndex: which entries the packs of a cache hold that is elsewhere. It is made of what the packs say themselves."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from latentcache.errors import PackError, RemoteError
from latentcache.remote.transport import Transport, in_threads, packs_in
from latentcache.store.base import is_pack_id
from latentcache.store.directory import pack_name
from latentcache.store.layout import Location, PackRow
from latentcache.store.location_table import LocationTable
from latentcache.store.pack import RangedBytes, row_in

UNREADABLE_S = 60.0
"""A pack whose header could not be read is asked for again after this: it may have been damaged on its way."""
_FORBIDDEN = 403
_KEPT_PACKS = 256  # at once: what was read is not read again where the network ends the rest

logger = logging.getLogger("latentcache")


class FarIndex:
    """Which entries there are, and where: `table`. Threads may share it.

    The rows of packs are read by one or two small requests each, and remembered in the folder `memory` of this disk
    (None: nowhere), which processes may share. What a pack lists counts as there: a key cannot name a wrong value.
    Copies of an entry lie in several packs now and then; the one in the pack with the lowest id counts on all machines.
    `forget` is called with packs that are gone. RemoteError.
    """

    def __init__(
        self,
        transport: Transport,
        memory: Path | None = None,
        forget: Callable[[Collection[str]], None] = lambda packs: None,
    ):
        self._transport, self._memory, self._forget = transport, memory, forget
        self._lock = threading.RLock()
        self.table = LocationTable()
        self.sizes: dict[str, int] = {}
        """Bytes of each pack whose entries are known, by id."""
        self.unreadable: dict[str, str] = {}
        """Why the entries of other packs are not."""
        self._tried_at: dict[str, float] = {}
        self._damaged: dict[str, dict[int, str]] = {}
        """Rows of packs whose entries this process found damaged, and why."""
        self._listed_at = -math.inf

    # Looking up

    def refresh(self, max_age_s: float = 0.0) -> None:
        """Bring the table to what is there now, unless it was done in the last seconds."""
        with self._lock:
            began = time.monotonic()
            if began - self._listed_at < max_age_s:
                return
            there = {pack: listed.num_bytes for pack, listed in packs_in(self._transport).items()}
            gone = {pack for pack, num_bytes in self.sizes.items() if there.get(pack) != num_bytes}
            if self._listed_at == -math.inf:
                gone |= self._remembered().difference(there)
            new = {pack: num_bytes for pack, num_bytes in there.items() if self.sizes.get(pack) != num_bytes}
            for pack in self._tried_at.keys() - there.keys():
                del self._tried_at[pack], self.unreadable[pack]
            late = [pack for pack, tried in self._tried_at.items() if began - tried < UNREADABLE_S]
            rows = list(self._read_rows({pack: size for pack, size in new.items() if pack not in late}))
            is_first, lost = not self.sizes, gone & self.sizes.keys()
            sizes = {pack: num_bytes for pack, num_bytes in self.sizes.items() if pack not in lost}
            sizes |= {row.pack.id: row.pack.file_bytes for row in rows}
            self._drop_remembered(gone)
            if lost:
                self._rebuild(sizes)
            else:
                self._add(rows, is_first=is_first)
                self.sizes = sizes
            self._listed_at = began
            if gone and there:  # a place that lists nothing at all may be the wrong one
                self._forget(gone)

    def find(self, keys: Collection[str], max_age_s: float = 0.0) -> set[str]:
        """Find which of the keys are there. For one that is not known the packs are listed, if not done lately."""
        found = self.table.find(list(keys))
        if len(found) < len(set(keys)):
            self.refresh(max_age_s)
            found = self.table.find(list(keys))
        return found

    def look_up(self, keys: Sequence[str]) -> list[Location | None]:
        """Where the entries lie, None for those that are not there."""
        found = self.table.look_up(keys)
        if None in found:
            self.refresh()
            found = self.table.look_up(keys)
        return found

    def row(self, pack: str, num_bytes: int) -> PackRow:
        """The row of a pack with so many bytes. PackError; FileNotFoundError: it is not there."""
        return self._remembered_row(pack, num_bytes) or _read_row(self._transport, pack, num_bytes)

    def rows(self) -> Iterator[PackRow]:
        """The rows of all packs that are known, by id, without what this process found damaged."""
        return (self._marked(row) for row in self._read_rows(dict(sorted(self.sizes.items()))))

    # Changing

    def add(self, row: PackRow) -> None:
        """Note a pack that was sent just now."""
        with self._lock:
            self._remember(row)
            self.sizes[row.pack.id] = row.pack.file_bytes
            self._add([row], is_first=False)

    def lose(self, pack: str, damaged: Mapping[int, str]) -> None:
        """For this process rows of a pack that are damaged there are gone, and other copies count if there are any."""
        with self._lock:
            self._damaged.setdefault(pack, {}).update(damaged)
            self._rebuild(self.sizes)

    def _marked(self, row: PackRow) -> PackRow:
        if damaged := self._damaged.get(row.pack.id):
            row.live[list(damaged)] = False
            row.reasons = dict(damaged)
        return row

    def _rebuild(self, sizes: Mapping[str, int]) -> None:
        """Make the table of these packs. After an error all is as it was; what was not read is asked for again."""
        rows = without_duplicates(self._marked(row) for row in self._read_rows(sizes))
        self.table, self.sizes = LocationTable(rows), {row.pack.id: row.pack.file_bytes for row in rows}

    def _add(self, rows: Sequence[PackRow], *, is_first: bool) -> None:
        rows = without_duplicates(self._marked(row) for row in rows)
        for row in () if is_first else rows:
            # Which pack has a key must not depend on which one came here first.
            names = row.live_names()
            found = zip(names, self.table.look_up(names), strict=True)
            # The pack itself may be known: another thread listed it before the one that sent it came here.
            there = {key: place for key, place in found if place and place.pack.id != row.pack.id}
            if moved := [key for key, place in there.items() if row.pack.id < place.pack.id]:
                self.table.drop(moved)
            if stay := there.keys() - set(moved):
                row.live &= [key not in stay for key in row.names()]
        self.table.add(rows)

    # The rows of packs

    def _read_rows(self, packs: Mapping[str, int]) -> Iterator[PackRow]:
        """The rows of these packs, those that are remembered first. What cannot be read is left out, with a warning."""
        new = []
        for pack, num_bytes in packs.items():
            row = self._remembered_row(pack, num_bytes)
            if row is None:
                new.append((pack, num_bytes))
            else:
                yield row
        refusals: list[RemoteError] = []
        for first in range(0, len(new), _KEPT_PACKS):
            part = new[first : first + _KEPT_PACKS]
            for (pack, _), found in zip(part, in_threads(self._row_or_reason, part), strict=True):
                if isinstance(found, PackRow):
                    self._remember(found)
                    self._tried_at.pop(pack, None)
                    self.unreadable.pop(pack, None)
                    yield found
                elif found is not None:
                    logger.warning("%s Its entries are missing.", found)
                    self._tried_at[pack], self.unreadable[pack] = time.monotonic(), str(found)
                    refusals += [found] if isinstance(found, RemoteError) else []
        if refusals and len(refusals) == len(packs) and not self.sizes:
            raise refusals[0]

    def _row_or_reason(self, listed: tuple[str, int]) -> PackRow | PackError | RemoteError | None:
        """The row of a pack, why it cannot be read, or None for one that is gone since it was listed."""
        try:
            try:
                return _read_row(self._transport, *listed)
            except PackError:  # it may have been damaged on its way
                return _read_row(self._transport, *listed)
        except FileNotFoundError:
            return None
        except PackError as error:
            return error
        except RemoteError as error:
            if error.status != _FORBIDDEN:
                raise
            return error  # of this pack alone, as of an archived one

    def _remembered(self) -> set[str]:
        if self._memory is None or not self._memory.is_dir():
            return set()
        return {name for name in os.listdir(self._memory) if is_pack_id(name)}

    def _remembered_row(self, pack: str, num_bytes: int) -> PackRow | None:
        with suppress(OSError, ValueError):  # a damaged one is read again
            if self._memory is not None:
                data = (self._memory / pack).read_bytes()
                row = PackRow.from_bytes(pack, data[len(pack) :])
                # The file begins with its pack's id: one that has another's name is not taken for it.
                return row if row.pack.file_bytes == num_bytes and data.startswith(pack.encode()) else None
        return None

    def _remember(self, row: PackRow) -> None:
        """Keep a row on this disk. Where that cannot be done, as on a full one, reading goes on without it."""
        if self._memory is None:
            return
        path = self._memory / row.pack.id
        temporary = path.with_name(f".{row.pack.id}.{os.getpid()}.{threading.get_ident()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(row.pack.id.encode() + row.to_bytes())
            temporary.replace(path)
        except OSError as error:
            logger.warning("%s: what packs say is not kept there from now on: %s", self._memory, error)
            self._memory = None

    def _drop_remembered(self, packs: Iterable[str]) -> None:
        for pack in packs:
            with suppress(OSError):
                if self._memory is not None:
                    (self._memory / pack).unlink()


def _read_row(transport: Transport, pack: str, num_bytes: int) -> PackRow:
    return row_in(pack, _ranged(transport, pack, num_bytes))[0]


def _ranged(transport: Transport, pack: str, num_bytes: int) -> RangedBytes:
    name = pack_name(pack)

    def fetch(start: int, num: int) -> bytes | memoryview:
        num = min(num, num_bytes - start)  # a range that begins beyond the end is an error of some stores
        return transport.read(name, start, num)[0] if num > 0 else b""

    return RangedBytes(f"{transport.url}/{name}", num_bytes, fetch)


def without_duplicates(rows: Iterable[PackRow]) -> Sequence[PackRow]:
    """Rows sorted by the ids of their packs; a key that is live in several is live in the first alone.

    So all machines that see the same packs find an entry in the same one.
    """
    rows = sorted(rows, key=lambda row: row.pack.id)
    if not rows:
        return rows
    words = np.concatenate([np.ascontiguousarray(row.keys[:, :8]).view(np.uint64).ravel() for row in rows])
    order = words.argsort(kind="stable")
    equal = np.flatnonzero(words[order][1:] == words[order][:-1])
    starts = np.cumsum([0, *(len(row.keys) for row in rows)])
    seen = set()
    for position in np.unique(np.concatenate([order[equal], order[equal + 1]])).tolist():
        number = int(starts.searchsorted(position, "right")) - 1
        row, at = rows[number], position - int(starts[number])
        if row.live[at]:
            row.live[at] = row.key(at) not in seen
            seen.add(row.key(at))
    return rows
