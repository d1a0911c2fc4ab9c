"""Verify, prune and compact a cache that is elsewhere while others read it.

`prune` and `compact` write new packs first. Then an empty file in `removals/` names each pack that these stand for, or
of which no manifest needs anything. Writers take such a pack as absent from then on. A later run deletes it, when it
was listed for longer than the grace time and has nothing that others lack; `prune` also if no manifest needs what only
it has. So a reader that looked at the packs before reads them to the end; a push or a precache that counted on one
before it was listed ends within the grace time, or has a note, which keeps `prune` away; and one that looks later sends
its entries again. A run that dies leaves entries in two packs, of which the next one lists the older packs.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property, partial
from typing import Any

from latentcache.errors import PackError, RemoteError, StoreError
from latentcache.remote.bucket import PROBES, BucketTransport
from latentcache.remote.index import FarIndex
from latentcache.remote.manifests import RemoteManifests
from latentcache.remote.service import ServiceTransport
from latentcache.remote.tier import rows_folder
from latentcache.remote.transport import (
    ANY_VERSION,
    FORBIDDEN,
    REMOVALS,
    Listed,
    Transport,
    in_threads,
    packs_in,
    read_checked,
    read_pack,
    removals_in,
)
from latentcache.store.directory import pack_name
from latentcache.store.entry import OwnedEntry
from latentcache.store.layout import Location
from latentcache.store.pack import new_pack_id, pack_buffers
from latentcache.store.table import LocationTable
from latentcache.store.upkeep import VerifyReport, checked_subset, choose, full_packs, packs_in_subset

_DAMAGED = b"damaged"  # the note of a pack in which entries are damaged: others are empty
_MAX_OFF_S = 900.0  # how far this machine's clock may be from the store's

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
    the old one is listed for removal: so its damaged entries are misses for all writers. Then precache makes them
    again, or a push brings them. Packs that are listed are not read: what such a damaged pack alone has is known as
    damaged. `subset` and `progress` are those of `store.upkeep.verify`.
    """
    subset = checked_subset(subset)
    listed = removals_in(transport)  # first: what took the place of these is then among the packs
    staying = packs_in(transport).keys() - listed.keys()
    packs = packs_in_subset(staying, subset)
    suspects, unreadable, good, bytes_read = dict[str, str](), dict[str, str](), set[str](), 0
    for number, pack in enumerate(packs, 1):
        try:
            keys, problems, num_bytes = _checked(transport, pack, unreadable)
            bytes_read += num_bytes
            good |= keys - problems.keys()
            suspects |= problems
        except RemoteError as error:
            unreadable[pack] = str(error)
            if error.status != FORBIDDEN or len(unreadable) == len(packs):  # of this pack alone, as of an archived one
                raise
        if progress is not None:
            progress(number, len(packs))
    index, known = FarIndex(transport, rows_folder(transport.url)), dict[str, str]()
    earlier = {pack for pack, note in listed.items() if note.num_bytes}
    if earlier or (suspects and len(packs) < len(staying)):  # their copies may lie in packs of the other parts
        index.refresh()
        elsewhere = [row for row in index.rows() if row.pack.id in staying.difference(packs)]
        good |= LocationTable(elsewhere).find([key for key in suspects if key not in good])
        # In the table these packs are the last in which a key counts.
        only_there = [(key, pack) for pack, entries in index.table.by_pack(earlier) for key in entries]
        known = {key: f"was found damaged in pack {pack}" for key, pack in only_there if key not in suspects}
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
        known_damaged=known,
        unreadable=unreadable,
        orphans=(),
    )


def _checked(transport: Transport, pack: str, unreadable: dict[str, str]) -> tuple[set[str], dict[str, str], int]:
    """The keys of a pack, why entries are not what was stored, and its bytes. A damaged pack is put on the list.

    Why the pack cannot be read is added to `unreadable`. Nothing of a pack that was compacted away meanwhile.
    """
    try:
        found, problems = read_checked(partial(read_pack, transport), pack)
    except FileNotFoundError:
        return set(), {}, 0
    except PackError as error:
        unreadable[pack] = str(error)
        return set(), {}, 0
    keys = set(found.row.names())
    if problems and isinstance(transport, BucketTransport):
        try:
            if whole := keys - problems.keys():
                row, copy = found.part(whole)
                transport.write(pack_name(row.pack.id), copy, version=ANY_VERSION)
            transport.write(f"{REMOVALS}/{pack}", _DAMAGED, version=ANY_VERSION)
        except RemoteError as error:
            logger.warning("the damaged entries of pack %s could not be made misses for others: %s", pack, error)
    return keys, problems, found.data.size


# Pruning and compacting


@dataclass(slots=True)
class TidyReport:
    """What was done in a bucket or, with `dry_run`, what would be."""

    url: str
    grace_h: float
    dry_run: bool
    num_packs: int = 0
    """Packs that were there, without those that had been listed for removal before."""
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
        self._sizes: Mapping[str, int] = {}
        # By this machine's clock: see `_check_clock`.
        self._oldest = datetime.now(UTC) - timedelta(hours=grace_h)
        self.report = TidyReport(transport.url, grace_h, dry_run)

    def run(self) -> TidyReport:
        """Remove what may go, write new packs, and list the old ones. StoreError if it is unclear what is needed."""
        if not self.report.dry_run:
            self._check_clock()
        listed, written_at = removals_in(self._transport), packs_in(self._transport)
        index = FarIndex(self._transport, rows_folder(self._transport.url))
        index.refresh()
        self.report.unreadable = dict(index.unreadable)
        self._sizes, table = index.sizes, index.table
        # Only now: what a manifest needs was there before it was written. And runs first: they end by writing one.
        _ = self._runs
        if self._prune:
            self._check_prune()
        num_listed = len(index.leaving)
        removed, needed = self._remove_due(listed, table)
        table.drop_packs(index.leaving.keys() - needed)
        self.report.num_packs, self.report.num_waiting = len(self._sizes) - num_listed, num_listed - len(removed)
        if self._prune:
            limit = self._oldest.timestamp()
            # Younger packs may be of a push that goes on.
            old = {pack for pack, each in written_at.items() if each.modified <= limit}
            unused = [key for _, entries in table.by_pack(old) for key in entries.keys() - self._in_use]
            table.drop(unused)
            self.report.num_unused = len(unused)
        chosen, empty = dict(table.by_pack(choose(table))), table.empty_packs()
        gone = dict.fromkeys(empty, b"") | self._rewrite(chosen)
        self.report.num_listed, self.report.listed_bytes = len(gone), sum(self._sizes[pack] for pack in gone)
        if not self.report.dry_run:
            for _ in in_threads(self._list, sorted(gone.items())):
                pass
            probes = self._transport.list(PROBES).items()
            left = [name for name, each in probes if each.modified <= self._oldest.timestamp()]
            self._transport.remove(left)
            if self._unfinished:
                self._manifests.give_up(self._oldest)
        return self.report

    def _check_clock(self) -> None:
        """StoreError if this machine's clock is far from the store's: packs would go too early, or never."""
        name = f"{PROBES}/{new_pack_id()}"
        self._transport.write(name, b"", version=ANY_VERSION)
        now, probe = datetime.now(UTC).timestamp(), self._transport.list(PROBES).get(name)
        self._transport.remove([name])
        if probe is not None and abs(off_s := now - probe.modified) > _MAX_OFF_S:  # None: another run removed it
            problem = f"this machine's clock is {off_s:+,.0f} s off the store's, and the grace time compares the two"
            raise StoreError(f"{self._transport.url}: {problem}. Set the clock, then run the same again")

    def _list(self, gone: tuple[str, bytes]) -> None:
        self._transport.write(f"{REMOVALS}/{gone[0]}", gone[1], version=ANY_VERSION)

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

    # Removing

    def _remove_due(self, listed: Mapping[str, Listed], table: LocationTable) -> tuple[set[str], set[str]]:
        """Remove packs that were listed long enough ago. One that is needed after all is a pack as any other again.

        Returns:
            The packs that were removed, and those that are needed.
        """
        gone, needed = set[str](), set[str]()
        only_there = dict(table.by_pack(listed.keys()))  # in the table these packs are the last in which a key counts
        for pack, note in listed.items():
            # What cannot be read is left alone. Of what is gone already the list says nothing any more.
            if note.modified > self._oldest.timestamp() or pack in self.report.unreadable:
                continue
            entries = only_there.get(pack, {}).keys()
            is_damaged = note.num_bytes > 0  # what it alone has
            if not entries or entries.isdisjoint(self._in_use):
                # Only prune removes what no manifest needs.
                if not entries or is_damaged or (self._prune and not self._runs):
                    gone.add(pack)
            elif not is_damaged:  # else it was not made again yet
                needed.add(pack)
        if not self.report.dry_run:
            notes = gone | needed
            # Another run may have removed a pack since, and a push sent it again: then it is younger than its note.
            there = packs_in(self._transport) if gone else {}
            gone -= {pack for pack in gone & there.keys() if there[pack].modified > listed[pack].modified}
            self._transport.remove(map(pack_name, gone))
            self._transport.remove(f"{REMOVALS}/{pack}" for pack in notes)
        gone &= self._sizes.keys()
        self.report.num_removed = len(gone)
        self.report.removed_bytes = sum(self._sizes[pack] for pack in gone)
        return gone, needed

    # Rewriting

    def _rewrite(self, chosen: Mapping[str, Mapping[str, Location]]) -> dict[str, bytes]:
        """Copy these entries into new packs. Returns the notes of the packs of which all was copied that is whole."""
        if self.report.dry_run:
            self.report.num_entries = sum(map(len, chosen.values()))
            return dict.fromkeys(chosen, b"")
        done: dict[str, bytes] = {}
        for batch in full_packs(self._copies(chosen, done), math.inf):
            pack = new_pack_id()
            data = b"".join(pack_buffers(pack, batch)[2])
            self._transport.write(pack_name(pack), data, version=ANY_VERSION)
            self.report.num_entries += len(batch)
            self.report.num_written += 1
            self.report.written_bytes += len(data)
        return done

    def _copies(self, chosen: Mapping[str, Mapping[str, Location]], done: dict[str, bytes]) -> Iterator[OwnedEntry]:
        for pack, entries in chosen.items():
            try:
                found, problems = read_checked(partial(read_pack, self._transport), pack)
            except FileNotFoundError:
                continue  # another run was faster
            except PackError as error:
                self.report.unreadable[pack] = str(error)
                continue
            lost = dict[str, str]()
            for key, location in entries.items():
                copy = problems.get(key) or found.copy(key, location)
                if isinstance(copy, str):
                    lost[key] = copy
                else:
                    yield copy
            self.report.damaged |= lost
            done[pack] = _DAMAGED if lost else b""
