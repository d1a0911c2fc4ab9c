"""Where each entry lies, in memory: a sorted table of most, and a dictionary of what is newer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import overload

import numpy as np

from latentcache.store.location import Location, Spec
from latentcache.store.table import EntryTable, TableBuilder, key_words

_MIN_FOLD = 8192
_CHUNK = 1 << 14
NOWHERE = EntryTable.empty()


class Found(Sequence[Location | None]):
    """What a look-up of many keys gave. Locations are made when they are asked for; later changes do not reach it."""

    __slots__ = ("_newer", "_positions", "_table")

    def __init__(self, table: EntryTable, positions: list[int], newer: Mapping[int, Location]):
        self._table = table
        self._positions = positions
        self._newer = newer

    def __len__(self) -> int:
        return len(self._positions)

    @overload
    def __getitem__(self, number: int) -> Location | None: ...
    @overload
    def __getitem__(self, number: slice) -> list[Location | None]: ...
    def __getitem__(self, number: int | slice) -> Location | list[Location | None] | None:
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        if number in self._newer:
            return self._newer[number]
        position = self._positions[number]
        return None if position < 0 else self._table.location(position)

    def missing(self) -> list[int]:
        """The numbers of the keys that were not found."""
        if not self._positions or min(self._positions) >= 0:
            return []
        return [number for number, position in enumerate(self._positions) if position < 0 and number not in self._newer]

    def packs(self) -> tuple[str, ...]:
        """The pack of each. All must have been found."""
        pack_ids = self._table.pack_ids
        if not self._newer:
            return tuple([pack_ids[number] for number in self._table.packs.take(self._positions).tolist()])
        return tuple([location.pack for location in self if location is not None])


class _View:
    """A table, and which of its entries are hidden: they are gone, or newer elsewhere."""

    __slots__ = ("hidden", "num_hidden", "table")

    def __init__(self, table: EntryTable):
        self.table = table
        self.hidden = np.zeros(len(table), bool)
        self.num_hidden = 0


class Entries:
    """A map of keys to locations. One thread at a time may change it; others may read meanwhile.

    A reader that misses a key must look again while nothing changes: it may have been on its way from one part of
    memory to the other.
    """

    def __init__(self, table: EntryTable = NOWHERE):
        self._view = _View(table)
        self._newer: dict[str, Location] = {}
        self.version = object()
        """Another object after an entry has gone, or lies elsewhere. Entries that are new leave it as it is."""

    def __len__(self) -> int:
        return len(self._view.table) - self._view.num_hidden + len(self._newer)

    @property
    def num_newer(self) -> int:
        """How many entries lie outside the table, or are hidden in it."""
        return len(self._newer) + self._view.num_hidden

    def look_up(self, keys: Sequence[str]) -> Found:
        """Where the keys are. StoreError for one that is no key."""
        view = self._view
        positions = view.table.positions(key_words(keys))
        if view.num_hidden:
            positions = np.where(view.hidden.take(positions, mode="clip"), -1, positions)
        newer = {}
        if self._newer:
            latest = ((number, self._newer.get(key)) for number, key in enumerate(keys))
            newer = {number: location for number, location in latest if location is not None}
        return Found(view.table, positions.tolist(), newer)

    def find(self, keys: Sequence[str]) -> set[str]:
        """Those of the keys that are here."""
        found: set[str] = set()
        for start in range(0, len(keys), _CHUNK):
            chunk = keys[start : start + _CHUNK]
            missing = self.look_up(chunk).missing()
            found.update(chunk)
            found.difference_update([chunk[number] for number in missing])
        return found

    def get(self, key: str) -> Location | None:
        return self._newer.get(key) or self.look_up([key])[0]

    def put(self, locations: Mapping[str, Location]) -> None:
        """Add or replace entries."""
        replaces = not self._newer.keys().isdisjoint(locations)
        # First there, then hidden in the table: at no moment is one missing.
        self._newer.update(locations)
        if self._hide(list(locations)) or replaces:
            self.version = object()
        if self.num_newer > max(_MIN_FOLD, len(self._view.table) // 4):
            self.fold()

    def drop(self, keys: Iterable[str]) -> list[str]:
        """Forget entries. Keys may repeat. Returns those that were here."""
        keys = list(dict.fromkeys(keys))
        here = [key for key in keys if key in self._newer]
        for key in here:
            del self._newer[key]
        dropped = here + self._hide(keys)
        if dropped:
            # Last: what was remembered of them under the version before must not count any more.
            self.version = object()
        return dropped

    def restore(self, key: str, text: str) -> bool:
        """Bring back an entry of the table that was dropped, if `text` is where it lies. True if that was done."""
        view = self._view
        position = int(view.table.positions(key_words([key]))[0])
        if position < 0 or not view.hidden[position] or key in self._newer:
            return False
        if view.table.location(position).to_text() != text:
            return False
        view.hidden[position] = False
        view.num_hidden -= 1
        return True

    def _hide(self, keys: Sequence[str]) -> list[str]:
        """Hide keys in the table. Returns those that it showed."""
        view = self._view
        shown: list[str] = []
        for start in range(0, len(keys) if len(view.table) else 0, _CHUNK):
            chunk = keys[start : start + _CHUNK]
            positions = view.table.positions(key_words(chunk))
            numbers = np.flatnonzero((positions >= 0) & ~view.hidden.take(positions, mode="clip"))
            shown += dict.fromkeys(chunk[number] for number in numbers.tolist())
            view.hidden[positions[numbers]] = True
        view.num_hidden += len(shown)
        return shown

    def _shown(self) -> tuple[EntryTable, np.ndarray]:
        view = self._view
        return view.table, view.table.oldest_first(~view.hidden)

    def keys(self) -> list[str]:
        """All keys, oldest first."""
        table, positions = self._shown()
        return [*table.names(positions), *self._newer]

    def locations(self, packs: Collection[str] | None = None) -> dict[str, Location]:
        """All entries by key, or those that lie in `packs`, oldest first."""
        table, positions = self._shown()
        if packs is not None:
            wanted = [number for number, pack in enumerate(table.pack_ids) if pack in packs]
            positions = positions[np.isin(table.packs[positions], wanted)]
        found = {key: table.location(at) for key, at in zip(table.names(positions), positions.tolist(), strict=True)}
        newer = list(self._newer.items())
        return found | {key: location for key, location in newer if packs is None or location.pack in packs}

    def specs(self) -> list[tuple[Spec, int]]:
        """How many entries of each spec there are. A spec may come more than once."""
        table, positions = self._shown()
        counts = np.bincount(table.specs[positions], minlength=len(table.spec_list)).tolist()
        found = [(spec, count) for spec, count in zip(table.spec_list, counts, strict=True) if count]
        return found + [(location.spec, 1) for location in list(self._newer.values())]

    def fold(self) -> EntryTable:
        """Make one table of all, and return it."""
        table, positions = self._shown()
        newer = self._newer
        if self.num_newer:
            builder = TableBuilder()
            builder.extend_from(table, positions)
            places = ((place.pack, place.digest, place.spec, place.offsets) for place in newer.values())
            builder.extend(list(newer), places)
            table = builder.build()
            # A reader between these two steps misses what was newer, and looks again.
            self._view = _View(table)
            self._newer = {}
        return table
