"""Verify, prune and compact a cache that is elsewhere while others read it.

`prune` and `compact` write new packs first. Then a small file in `removals/` lists the packs that they stand for, or
that no manifest needs. A later run deletes these packs, when the list is older than the grace time and no manifest
needs what only they have. So a reader that listed the packs before reads them to the end, and a push that counted on
one of them loses nothing. A run that dies leaves entries in two packs, of which the next one lists the older packs.
"""

from __future__ import annotations

import json
import logging
import math
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any

import numpy as np

from latentcache.errors import PackError, RemoteError, StoreError
from latentcache.remote.bucket import FORBIDDEN, PROBES, BucketTransport
from latentcache.remote.index import FarIndex
from latentcache.remote.manifests import RemoteManifests
from latentcache.remote.service import ServiceTransport
from latentcache.remote.tier import rows_folder
from latentcache.remote.transport import ANY_VERSION, Transport, packs_in, read_pack
from latentcache.store.base import OwnedEntry, is_pack_id
from latentcache.store.catalog import drop_known
from latentcache.store.directory import DAMAGED, pack_name
from latentcache.store.exchange import part_of, problems_of
from latentcache.store.layout import Location, PackRow
from latentcache.store.location_table import LocationTable
from latentcache.store.pack import WholePack, new_pack_id, pack_buffers, read_pack_bytes
from latentcache.store.upkeep import VerifyReport, choose, full_packs

REMOVALS = "removals"

logger = logging.getLogger("latentcache")


# Verifying


def verify(
    transport: Transport,
    *,
    subset: tuple[int, int] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Fetch every pack and compare its entries with their digests and records, as `store.upkeep.verify` does on a disk.

    What does not fit is fetched once more: it may have been damaged on its way. An entry is damaged that is whole in no
    pack. A service that takes this client's writes then reads these entries on its own disk, and makes those misses
    that it finds damaged too. In a bucket that may be written what is whole of a damaged pack is sent as a new one, and
    the old one is moved to the folder `damaged`: so its damaged entries are misses for all. Then precache makes them
    again, or a push brings them. `subset` and `progress` are those of `store.upkeep.verify`.
    """
    part, num_parts = subset or (1, 1)
    if not 1 <= part <= num_parts:
        raise StoreError(f"subset {part}/{num_parts}: give n/t with 1 <= n <= t")
    packs = sorted([pack for pack in packs_in(transport) if int(pack[:8], 16) % num_parts == part - 1])
    suspects, unreadable = dict[str, str](), dict[str, str]()
    good = set[str]()
    bytes_read = 0
    for number, pack in enumerate(packs, 1):
        try:
            keys, problems, num_bytes = _checked_pack(transport, pack, unreadable)
            bytes_read += num_bytes
            good |= keys - problems.keys()
            suspects |= problems
        except RemoteError as error:
            unreadable[pack] = str(error)
            if error.status != FORBIDDEN or len(unreadable) == len(packs):  # of this pack alone, as of an archived one
                raise
        if progress is not None:
            progress(number, len(packs))
    if suspects and num_parts > 1:  # their copies may lie in packs of the other parts
        index = FarIndex(transport)
        index.refresh()
        elsewhere = [row for row in index.rows() if row.pack.id not in packs]
        good |= LocationTable(elsewhere).find([key for key in suspects if key not in good])
    num_entries = len(good | suspects.keys())
    damaged = {key: problem for key, problem in suspects.items() if key not in good}
    if isinstance(transport, ServiceTransport) and damaged:
        # What its index knows as removed or damaged does not count there.
        if transport.is_writable():
            damaged = transport.verify(sorted(damaged))
        else:
            damaged = {key: damaged[key] for key in transport.find(sorted(damaged))}
    return VerifyReport(
        num_entries=num_entries,
        num_packs=len(packs),
        bytes_read=bytes_read,
        damaged=damaged,
        known_damaged={},
        unreadable=unreadable,
        orphans=(),
    )


def _checked_pack(transport: Transport, pack: str, unreadable: dict[str, str]) -> tuple[set[str], dict[str, str], int]:
    """The keys of a pack, why entries are not what was stored, and the bytes that were fetched.

    Why the pack cannot be read is added to `unreadable`. Nothing of a pack that was compacted away meanwhile.
    """
    bytes_read = 0
    for is_last in (False, True):
        try:
            data = read_pack(transport, pack)
        except FileNotFoundError:
            return set(), {}, bytes_read
        bytes_read += len(data)
        try:
            records = read_pack_bytes(data, pack)
        except PackError as error:
            if is_last:
                unreadable[pack] = str(error)
            continue
        problems = dict(problems_of(records, np.frombuffer(data, np.uint8)))
        if problems and not is_last:
            continue
        names = set(records.row.names())
        if problems and isinstance(transport, BucketTransport):
            try:
                if whole := names - problems.keys():
                    part, copy = part_of(records, np.frombuffer(data, np.uint8), whole)
                    transport.write(pack_name(part.row.pack.id), copy, version=ANY_VERSION)
                transport.move(pack_name(pack), f"{DAMAGED}/{pack}")
            except RemoteError as error:
                logger.warning("the damaged entries of pack %s could not be made misses for others: %s", pack, error)
        return names, problems, bytes_read
    return set(), {}, bytes_read


# Pruning and compacting


@dataclass(slots=True)
class TidyReport:
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


def removals_in(transport: Transport) -> dict[str, tuple[float, list[str]]]:
    """The lists of packs to remove: when each was written, and the packs, by the name of the file."""
    lists = {}
    for name, listed in transport.list(REMOVALS).items():
        try:
            packs = json.loads(bytes(transport.read(name)[0]))["packs"]
            if not all(isinstance(pack, str) and is_pack_id(pack) for pack in packs):
                raise ValueError("it lists what is no pack")
        except FileNotFoundError:
            continue  # another run has done what it says
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            logger.warning("%s/%s is no list of packs (%s), and is left alone", transport.url, name, error)
            continue
        lists[name] = listed.modified, packs
    return lists


def packs_to_go(transport: Transport) -> set[str]:
    """The packs that are listed for removal: other packs have what is needed of them."""
    if not isinstance(transport, BucketTransport):
        return set()
    return {pack for _, packs in removals_in(transport).values() for pack in packs}


def _time_at(transport: Transport, *, dry_run: bool) -> datetime:
    """The time by the clock of the store, which dates its objects; a dry run, which writes none, has only its own."""
    if dry_run:
        return datetime.now(UTC)
    name = f"{PROBES}/{uuid.uuid4().hex}"
    try:
        transport.write(name, b"what time is it", version=ANY_VERSION)
        listed = transport.list(PROBES).get(name)
    finally:
        transport.remove([name])
    if listed is None:
        raise StoreError(f"{transport.url}: {name} is gone right after it was written: run the same again")
    return datetime.fromtimestamp(listed.modified, UTC)


class Tidying:
    """One run of `prune` or `compact` on a bucket. `prune`: entries go that no manifest needs.

    Without `unfinished` a run that began and did not finish keeps what it may need. StoreError: see `run`.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        prune: bool,
        unfinished: bool = False,
        grace_h: float,
        dry_run: bool = False,
    ):
        self._transport = transport
        transport.check()
        self._manifests = RemoteManifests(transport, read_only=dry_run)
        self._prune, self._unfinished = prune, unfinished
        self._oldest = _time_at(transport, dry_run=dry_run) - timedelta(hours=grace_h)
        self.report = TidyReport(transport.url, grace_h, dry_run)

    def run(self) -> TidyReport:
        """Remove what may go, write new packs, and list the old ones. StoreError if it is unclear what is needed."""
        lists, written_at = removals_in(self._transport), packs_in(self._transport)
        index = FarIndex(self._transport, rows_folder(self._transport.url))
        index.refresh()
        self.report.unreadable = dict(index.unreadable)
        rows = {row.pack.id: row for row in index.rows()}
        sizes = {pack: row.pack.file_bytes for pack, row in rows.items()}
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
        removed = self._remove_due(lists, rows, table)
        self.report.num_packs = len(sizes) - len(listed)
        self.report.num_waiting = len(listed) - len(removed)
        if self._prune:
            limit = self._oldest.timestamp()
            old = [pack for pack in table.packs if pack in written_at and written_at[pack].modified <= limit]
            self._drop_unused(rows, old, table)
        chosen, empty = dict(table.by_pack(choose(table))), table.empty_packs()
        gone = sorted(empty | self._rewrite(chosen))
        self.report.num_listed, self.report.listed_bytes = len(gone), sum(sizes[pack] for pack in gone)
        if not self.report.dry_run:
            if gone:
                note = {"listed": datetime.now(UTC).isoformat(timespec="seconds"), "packs": gone}
                name = f"{REMOVALS}/{uuid.uuid4().hex}.json"
                self._transport.write(name, json.dumps(note).encode(), version=ANY_VERSION)
            self._remove_old(PROBES)
            self._remove_old(DAMAGED)
            if self._unfinished:
                self._manifests.give_up(self._oldest)
        return self.report

    def _remove_old(self, folder: str) -> None:
        listed = self._transport.list(folder).items()
        self._transport.remove([name for name, each in listed if each.modified <= self._oldest.timestamp()])

    # What is needed

    @cached_property
    def _in_use(self) -> set[str]:
        """The keys of all manifests. DatasetError for one that is damaged: it is unclear what it needs."""
        read = map(self._manifests.read, self._manifests.names())
        return {key for manifest in read if manifest is not None for key in manifest.keys()}

    @cached_property
    def _runs(self) -> list[str]:
        return [] if self._unfinished else self._manifests.unfinished()

    def _check_prune(self) -> None:
        url = self._transport.url
        if not self._manifests.names():
            raise StoreError(f"{url}: has no manifest, so prune would remove every entry; push one first")
        if self._runs:
            raise StoreError(
                f"{url}: not finished: {', '.join(self._runs)}. What was sent for them is in no manifest yet, and "
                "would be removed: run the same push or precache again to finish, or give --unfinished to remove it"
            )

    def _drop_unused(self, rows: Mapping[str, PackRow], packs: Iterable[str], table: LocationTable) -> None:
        """Make entries dead, in the table, that no manifest needs. Younger packs may be of a push that goes on."""
        for pack in packs:
            unused = [key for key in rows[pack].live_names() if key not in self._in_use]
            table.drop(unused)
            self.report.num_unused += len(unused)

    # Removing

    def _remove_due(
        self, lists: Mapping[str, tuple[float, list[str]]], rows: Mapping[str, PackRow], table: LocationTable
    ) -> set[str]:
        """Remove the packs of lists that are old enough. One that is needed after all is a pack as any other again."""
        gone: set[str] = set()
        for name, (written, packs) in lists.items():
            if written > self._oldest.timestamp():
                continue
            is_done = True
            for pack in packs:
                row = rows.get(pack)
                if row is None:
                    is_done &= pack not in self.report.unreadable  # what cannot be read is left alone
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
                self._transport.remove(map(pack_name, gone.intersection(packs)))
                if is_done:
                    self._transport.remove([name])
        self.report.num_removed = len(gone)
        self.report.removed_bytes = sum(rows[pack].pack.file_bytes for pack in gone)
        return gone

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
            self._transport.write(pack_name(pack), data, version=ANY_VERSION)
            self.report.num_entries += len(batch)
            self.report.num_written += 1
            self.report.written_bytes += len(data)
        return done

    def _copies(self, chosen: Mapping[str, Mapping[str, Location]], done: set[str]) -> Iterator[OwnedEntry]:
        for pack, entries in chosen.items():
            try:
                found = read_pack(self._transport, pack)
                records = read_pack_bytes(found, pack)
            except FileNotFoundError:
                continue  # another run was faster
            except PackError as error:
                self.report.unreadable[pack] = str(error)
                continue
            data, is_whole = np.frombuffer(found, np.uint8), True
            for key, location in entries.items():
                copy = WholePack(records, data).copy(key, location)
                if isinstance(copy, str):
                    self.report.damaged[key], is_whole = copy, False
                else:
                    yield copy
            if is_whole:
                done.add(pack)
