"""BucketIndex: which entries a bucket holds. No index lies in it: this one is made of what the packs say."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from latentcache.errors import IndexDamagedError, StoreError
from latentcache.remote.bucket import Bucket
from latentcache.remote.bucket_marks import Marks, marked, read_marks, write_marks
from latentcache.store.base import new_generation
from latentcache.store.index import Index
from latentcache.store.layout import Location, PackRow
from latentcache.store.location_table import LocationTable
from latentcache.utils.durable_files import remove_whole

_KEPT_PACKS = 256  # at once: what was read is not read again where the network ends the rest

logger = logging.getLogger("latentcache")


class BucketIndex:
    """Which entries there are, and where: `table`. Threads may share it.

    What packs say is read once and kept in the folder `memory` (of this machine; processes may share it), or in memory.
    Removing entries marks their rows (`bucket_marks`). RemoteError.
    """

    def __init__(self, bucket: Bucket, memory: Path | None = None):
        self._bucket, self._lock = bucket, threading.RLock()
        self.table = LocationTable()
        self.generation = new_generation()
        """Another number after an entry has gone or lies elsewhere."""
        self.sizes: dict[str, int] = {}
        """Bytes of each pack that is there, by id."""
        self._rows: dict[str, bytes] = {}
        self._memory = None if memory is None else _opened(memory)
        self._marks: dict[str, Marks] = {}
        self._unwritten: list[Marks] = []
        self._listed_at = -math.inf

    # Looking up

    def refresh(self, max_age_s: float = 0.0) -> None:
        """Bring memory to what the bucket holds now, unless it did so in the last seconds."""
        with self._lock:
            began = time.monotonic()
            if began - self._listed_at < max_age_s:
                return
            # Before the packs: who moves entries writes the new packs, and then removes the old rows.
            marks = read_marks(self._bucket, self._marks)
            are_marked = marks.keys() != self._marks.keys()
            self._marks = marks
            sizes = self._bucket.packs()
            gone = {pack for pack, num_bytes in self.sizes.items() if sizes.get(pack) != num_bytes}
            new = {pack: num_bytes for pack, num_bytes in sizes.items() if self.sizes.get(pack) != num_bytes}
            rows = list(self._read_rows(new))
            self.sizes, self._listed_at = sizes, began
            if gone or are_marked:
                self._forget(gone - sizes.keys())
                self._rebuild()
            else:
                self._add(rows)

    def find(self, keys: Collection[str], max_age_s: float = 0.0) -> set[str]:
        """Those of the keys that are there. For one that is not known the packs are listed, if not done lately."""
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

    # Changing

    def add(self, row: PackRow) -> int:
        """Note a pack that was sent just now. Returns how many of its entries were not there."""
        with self._lock:
            self._keep([row])
            self.sizes[row.pack.id] = row.pack.file_bytes
            num_new = len(row.keys) - len(self.table.find(row.names()))
            self._add([row])
            return num_new

    def remove(self, keys: Collection[str]) -> int:
        """Remove entries, wherever they lie. Returns how many there were."""
        with self._lock:
            self.refresh()
            num_there = len(self.table.find(list(keys)))
            wanted = set(keys)
            marks: dict[str, dict[int, str]] = {}
            for row in self._known():
                rows = {at: "" for at, key in enumerate(row.names()) if key in wanted}
                if any(row.live[at] or at in row.reasons for at in rows):
                    marks[row.pack.id] = rows
            if marks:
                self._mark(marks, write=True)
            return num_there

    def mark_damaged(self, damaged: Iterable[tuple[Location, str]], *, write: bool) -> None:
        """Make damaged entries misses, for all readers or (not `write`) for this process."""
        marks: dict[str, dict[int, str]] = {}
        for place, reason in damaged:
            marks.setdefault(place.pack.id, {})[place.row] = reason or "damaged"
        with self._lock:
            self._mark(marks, write=write)

    def _mark(self, marks: Marks, *, write: bool) -> None:
        if write:
            self._marks[write_marks(self._bucket, marks)] = marks
        else:
            self._unwritten.append(marks)
        self._rebuild()

    # The rows of packs

    def _read_rows(self, packs: Mapping[str, int]) -> Iterator[PackRow]:
        """The rows of these packs, those that are remembered first."""
        known = {pack: row for pack, row in self._remembered(packs).items() if row.pack.file_bytes == packs[pack]}
        yield from known.values()
        new = [pack for pack in packs if pack not in known]
        for first in range(0, len(new), _KEPT_PACKS):
            rows = list(self._bucket.rows({pack: packs[pack] for pack in new[first : first + _KEPT_PACKS]}))
            self._keep(rows)
            yield from rows

    def _remembered(self, packs: Collection[str]) -> dict[str, PackRow]:
        found: Mapping[str, bytes] = self._rows
        if self._memory is not None:
            try:
                found = self._memory.get_many(packs)
            except IndexDamagedError as error:
                self._memory = _replaced(self._memory.path, error)
                found = {}
        rows = {}
        for pack in packs:
            try:
                if pack in found:
                    rows[pack] = PackRow.from_bytes(pack, found[pack])
            except ValueError as error:
                logger.warning("what is remembered of pack %s is read again: %s", pack, error)
        return rows

    def _keep(self, rows: Sequence[PackRow]) -> None:
        values = {row.pack.id: row.to_bytes() for row in rows}
        if values:
            self._change_memory(lambda memory: memory.replace_many(values))
        if self._memory is None:
            self._rows |= values

    def _change_memory(self, change: Callable[[Index], object]) -> None:
        """Change what this machine's disk keeps. Where it cannot, as a full one, reading goes on without it."""
        try:
            if self._memory is not None:
                change(self._memory)
        except StoreError as error:
            logger.warning("%s. What packs say is not kept there from now on.", error)
            self._memory = None

    def _forget(self, packs: Collection[str]) -> None:
        if packs:
            self._change_memory(lambda memory: memory.remove_many(packs))
        for pack in packs:
            self._rows.pop(pack, None)

    def _known(self) -> list[PackRow]:
        """The rows of all packs, with what was removed or damaged."""
        return [self._marked(row) for row in self._read_rows(self.sizes)]

    def _marked(self, row: PackRow) -> PackRow:
        return marked(row, [*self._marks.values(), *self._unwritten])

    def _rebuild(self) -> None:
        table = LocationTable()
        table.add(without_duplicates(self._known()))
        self.table, self.generation = table, new_generation()

    def _add(self, rows: Sequence[PackRow]) -> None:
        rows = [self._marked(row) for row in rows]
        if len(self.table) and any(self.table.find(row.live_names()) for row in rows):
            self._rebuild()  # which pack has a key must not depend on which one came here first
        else:
            self.table.add(without_duplicates(rows))


def without_duplicates(rows: Iterable[PackRow]) -> Sequence[PackRow]:
    """The same rows, by id of their packs; a key that is live in several is live in the first alone.

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


def _opened(path: Path) -> Index:
    try:
        return Index(path)
    except IndexDamagedError as error:
        return _replaced(path, error)


def _replaced(path: Path, error: IndexDamagedError) -> Index:
    logger.warning("%s is made again, and the packs' headers are read again: %s", path, error)
    remove_whole(path)
    return Index(path)
