"""Prune and compact a bucket while others read it: packs are removed only when a grace time has passed.

New packs are written first. Then a small object in `removals/` lists the packs that they stand for, or that no manifest
needs. A later run deletes these packs, when the list is older than the grace time and no manifest needs what only they
have. So a reader that listed the packs before reads them to the end, and a push that counted on one of them loses
nothing. A run that dies leaves entries in two packs, of which the next one lists the older packs.
"""

from __future__ import annotations

import json
import logging
import math
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any

import numpy as np

from latentcache.errors import PackError, StoreError
from latentcache.remote.bucket import PROBES, Bucket
from latentcache.remote.bucket_manifests import BucketManifests
from latentcache.remote.bucket_marks import marked, read_marks, sweep_marks, write_marks
from latentcache.store.base import OwnedEntry, is_pack_id
from latentcache.store.catalog import drop_known
from latentcache.store.directory import pack_name
from latentcache.store.layout import Location, PackRow
from latentcache.store.location_table import LocationTable
from latentcache.store.pack import new_pack_id, pack_buffers, read_entry, read_pack_bytes, verified_arrays
from latentcache.store.upkeep import choose, full_packs

FOLDER = "removals"

logger = logging.getLogger("latentcache")


@dataclass(slots=True)
class BucketReport:
    """What was done in a bucket or, with `dry_run`, what would be."""

    url: str
    grace_h: float
    dry_run: bool
    num_packs: int = 0
    """There were, without those that were listed for removal before."""
    num_removed: int = 0
    """Packs that were listed for removal before, and whose grace time has passed."""
    removed_bytes: int = 0
    num_listed: int = 0
    """Packs that a run after the grace time removes."""
    listed_bytes: int = 0
    num_waiting: int = 0
    """Packs that were listed before, and whose grace time has not passed."""
    num_unused: int = 0
    """Entries that no manifest needs."""
    num_entries: int = 0
    """Entries that were copied into new packs."""
    num_written: int = 0
    written_bytes: int = 0
    damaged: dict[str, str] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON."""
        return asdict(self)


def removals_in(bucket: Bucket) -> dict[str, tuple[datetime, list[str]]]:
    """The lists of packs to remove: when each was written, and the packs, by the name of the object."""
    lists = {}
    for name in bucket.names(FOLDER):
        found = bucket.read(name)
        if found is None:
            continue  # another run has done what it says
        try:
            packs = json.loads(bytes(found.data))["packs"]
            if not all(isinstance(pack, str) and is_pack_id(pack) for pack in packs):
                raise ValueError("it lists what is no pack")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            logger.warning("%s/%s is no list of packs (%s), and is left alone", bucket.url, name, error)
            continue
        lists[name] = found.modified, packs
    return lists


def _time_at(bucket: Bucket, *, dry_run: bool) -> datetime:
    """The time by the clock of the store, which dates its objects; a dry run, which writes none, has only its own."""
    if dry_run:
        return datetime.now(UTC)
    name = f"{PROBES}/{uuid.uuid4().hex}"
    try:
        bucket.put(name, b"what time is it")
        found = bucket.read(name)
    finally:
        bucket.remove([name])
    if found is None:
        raise StoreError(f"{bucket.url}: {name} is gone right after it was written: run the same again")
    return found.modified


class BucketUpkeep:
    """One run on the bucket at `url`. `prune`: entries go that no manifest needs.

    Without `unfinished` a run that began and did not finish keeps what it may need. StoreError: see `run`.
    """

    def __init__(
        self,
        url: str,
        *,
        prune: bool,
        unfinished: bool = False,
        grace_h: float,
        dry_run: bool = False,
    ):
        self._bucket = Bucket.open(url)
        self._bucket.check()
        self._manifests = BucketManifests(self._bucket, read_only=dry_run)
        self._prune, self._unfinished = prune, unfinished
        self._oldest = _time_at(self._bucket, dry_run=dry_run) - timedelta(hours=grace_h)
        self.report = BucketReport(self._bucket.url, grace_h, dry_run)

    def run(self) -> BucketReport:
        """Remove what may go, write new packs, and list the old ones. StoreError if it is unclear what is needed."""
        lists = removals_in(self._bucket)
        sizes, times = self._bucket.packs(), self._bucket.times("packs")
        marks = read_marks(self._bucket)
        rows = {row.pack.id: marked(row, marks.values()) for row in self._bucket.rows(sizes, self.report.unreadable)}
        # Only now: what a manifest needs was there before it was written. And runs first: they end by writing one.
        _ = self._runs
        if self._prune:
            self._check_prune()
        listed = {pack for _, packs in lists.values() for pack in packs} & sizes.keys()
        table = LocationTable()
        # Full packs first: what a run copied that died is live in the new pack.
        for row in sorted(rows.values(), key=lambda row: (-row.pack.file_bytes, row.pack.id)):
            if row.pack.id not in listed:
                drop_known(row, table)
                table.add([row])
        removed = self._remove_due(lists, rows, table, sizes)
        self.report.num_packs = len(sizes) - len(listed)
        self.report.num_waiting = len(listed) - len(removed)
        if self._prune:
            old = [pack for pack in table.packs if (at := times.get(pack_name(pack))) and at <= self._oldest]
            self._drop_unused(rows, old, table)
        chosen, empty = dict(table.by_pack(choose(table))), table.empty_packs()
        done = self._rewrite(chosen)
        gone = sorted(empty | done)
        self.report.num_listed, self.report.listed_bytes = len(gone), sum(sizes[pack] for pack in gone)
        if gone and not self.report.dry_run:
            note = {"listed": datetime.now(UTC).isoformat(timespec="seconds"), "packs": gone}
            self._bucket.put(f"{FOLDER}/{uuid.uuid4().hex}.json", json.dumps(note).encode())
        if not self.report.dry_run:
            sweep_marks(self._bucket, marks)
            self._bucket.remove([name for name, at in self._bucket.times(PROBES).items() if at <= self._oldest])
            if self._unfinished:
                self._manifests.give_up(self._oldest)
        return self.report

    # What is needed

    @cached_property
    def _in_use(self) -> set[str]:
        """The keys of all manifests. DatasetError for one that is damaged: it is unclear what it needs."""
        read = map(self._manifests.read, self._manifests.names())
        return {key for manifest in read if manifest is not None for key in manifest.keys()}

    @cached_property
    def _runs(self) -> list[str]:
        return [] if self._unfinished else sorted(self._manifests.unfinished())

    def _check_prune(self) -> None:
        if not self._manifests.names():
            raise StoreError(f"{self._bucket.url}: has no manifest, so prune would remove every entry; push one first")
        if self._runs:
            raise StoreError(
                f"{self._bucket.url}: not finished: {', '.join(self._runs)}. What was sent for them is in no manifest "
                "yet, and would be removed: run the same push or precache again to finish, or give --unfinished to "
                "remove it"
            )

    def _drop_unused(self, rows: Mapping[str, PackRow], packs: Iterable[str], table: LocationTable) -> None:
        """Make entries dead, in the table, that no manifest needs. Younger packs may be of a push that goes on."""
        for pack in packs:
            unused = [key for key in rows[pack].live_names() if key not in self._in_use]
            table.drop(unused)
            self.report.num_unused += len(unused)

    # Removing

    def _remove_due(
        self,
        lists: Mapping[str, tuple[datetime, list[str]]],
        rows: Mapping[str, PackRow],
        table: LocationTable,
        sizes: Mapping[str, int],
    ) -> set[str]:
        """Remove the packs of lists that are old enough. One that is needed after all is a pack as any other again."""
        gone: set[str] = set()
        due = {name: packs for name, (written, packs) in lists.items() if written <= self._oldest}
        self._drop_damaged([rows[pack] for packs in due.values() for pack in packs if pack in rows], table)
        for name, packs in due.items():
            is_done = True
            for pack in packs:
                row = rows.get(pack)
                if row is None:
                    is_done &= pack not in sizes  # what cannot be read is left alone
                    continue
                if pack in table.packs:
                    continue  # another list has it too, and it was found to be needed
                only_here = set(row.live_names()) - table.find(row.names())
                if only_here and not only_here.isdisjoint(self._in_use):
                    drop_known(row, table)
                    table.add([row])
                elif only_here and (self._runs or not self._prune):
                    is_done = False  # only prune removes what no manifest needs
                else:
                    gone.add(pack)
            if not self.report.dry_run:
                self._bucket.remove_packs(gone.intersection(packs))
                if is_done:
                    self._bucket.remove([name])
        self.report.num_removed, self.report.removed_bytes = len(gone), sum(sizes[pack] for pack in gone)
        return gone

    def _drop_damaged(self, due: Iterable[PackRow], table: LocationTable) -> None:
        """Make copies dead that are not whole, of what lies in these packs too: else the whole ones would go."""
        keys = list({key for row in due for key in row.live_names()})
        copies: dict[str, dict[str, Location]] = {}
        for key, location in zip(keys, table.look_up(keys), strict=True):
            if location is not None:
                copies.setdefault(location.pack.id, {})[key] = location
        for pack, locations in copies.items():
            problems: dict[str, str] = {}
            for _ in range(2):  # it may have been damaged on its way
                found = self._bucket.read(pack_name(pack))
                data = np.frombuffer(b"" if found is None else found.data, np.uint8)
                checked = {key: verified_arrays(data, key, location) for key, location in locations.items()}
                problems = {key: problem for key, problem in checked.items() if isinstance(problem, str)}
                if not problems:
                    break
            table.drop(list(problems))
            self.report.damaged |= problems
            if problems and found is not None and not self.report.dry_run:
                write_marks(self._bucket, {pack: {locations[key].row: why for key, why in problems.items()}})

    # Rewriting

    def _rewrite(self, chosen: Mapping[str, Mapping[str, Location]]) -> set[str]:
        """Copy these entries into new packs. Returns the packs of which all was copied."""
        if self.report.dry_run:
            self.report.num_entries = sum(map(len, chosen.values()))
            return set(chosen)
        done: set[str] = set()
        for batch in full_packs(self._copies(chosen, done), math.inf):
            pack = new_pack_id()
            data = b"".join(pack_buffers(pack, batch)[2])
            self._bucket.send(pack, data)
            self.report.num_entries += len(batch)
            self.report.num_written += 1
            self.report.written_bytes += len(data)
        return done

    def _copies(self, chosen: Mapping[str, Mapping[str, Location]], done: set[str]) -> Iterator[OwnedEntry]:
        for pack, entries in chosen.items():
            found = self._bucket.read(pack_name(pack))
            if found is None:
                continue  # another run was faster
            try:
                records = read_pack_bytes(found.data, pack)
            except PackError as error:
                self.report.unreadable[pack] = str(error)
                continue
            data, is_whole = np.frombuffer(found.data, np.uint8), True
            for key, location in entries.items():
                arrays = verified_arrays(data, key, location)
                if isinstance(arrays, str):
                    self.report.damaged[key], is_whole = arrays, False
                else:
                    yield read_entry(arrays, records, location)
            if is_whole:
                done.add(pack)
