"""Verify and prune a cache that is elsewhere while others read it.

`prune` writes an empty file in `removals/` for each pack whose entries lie in other packs, or of which no manifest
needs any. Writers take such a pack as absent from then on. A later run deletes it, when it was listed for longer than
the grace time and still has nothing that is needed. So a reader that looked at the packs before reads them to the end;
a push or a precache that counted on one before it was listed ends within the grace time, or has a note, which keeps
`prune` away; and one that looks later sends its entries again.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone

from latentcache.errors import PackError, RemoteError, StoreError
from latentcache.remote.bucket import PROBES, BucketTransport
from latentcache.remote.index import FarIndex
from latentcache.remote.manifests import RemoteManifests
from latentcache.remote.service import ServiceTransport
from latentcache.remote.transport import (
    ANY_VERSION,
    FORBIDDEN,
    REMOVALS,
    Transport,
    in_threads,
    packs_in,
    read_checked,
    removals_in,
)
from latentcache.store.base import Report
from latentcache.store.directory import pack_name
from latentcache.store.pack import new_pack_id
from latentcache.store.upkeep import VerifyReport, packs_in_subset
from latentcache.utils.progress import Progress

_DAMAGED = b"damaged"  # the note of a pack in which entries are damaged: others are empty
_MAX_OFF_S = 900.0  # how far this machine's clock may be from the store's

logger = logging.getLogger("latentcache")


# Verifying


def verify(
    transport: Transport, *, subset: tuple[int, int] | None = None, progress: Progress | None = None
) -> VerifyReport:
    """Fetch every pack and compare its entries with their digests and records, as `store.upkeep.verify` does on a disk.

    What does not fit is fetched once more: it may have been damaged on its way. An entry is damaged that is whole in no
    pack. A service that takes this client's writes then reads these entries on its own disk, and makes those misses
    that it finds damaged too. In a bucket that may be written what is whole of a damaged pack is sent as a new one, and
    the old one is listed for removal: so its damaged entries are misses for all writers. Then precache makes them
    again, or a push brings them. Packs that are listed are not read: what such a damaged pack alone has is known as
    damaged. `subset` and `progress` are those of `store.upkeep.verify`.
    """
    listed = removals_in(transport)  # first: what took the place of these is then among the packs
    staying = packs_in(transport).keys() - listed.keys()
    packs = packs_in_subset(staying, subset)
    suspects, unreadable, good, bytes_read = dict[str, str](), dict[str, str](), set[str](), 0
    progress = progress or Progress()
    progress.start("verify packs", len(packs))
    for pack in packs:
        try:
            keys, problems, num_bytes = _checked(transport, pack, unreadable)
            bytes_read += num_bytes
            good |= keys - problems.keys()
            suspects |= problems
        except RemoteError as error:
            unreadable[pack] = str(error)
            if error.status != FORBIDDEN or len(unreadable) == len(packs):  # of this pack alone, as of an archived one
                raise
        progress.advance()
    progress.finish()
    index, known = FarIndex(transport), dict[str, str]()
    earlier = {pack for pack, note in listed.items() if note.num_bytes}
    if earlier or (suspects and len(packs) < len(staying)):  # their copies may lie in packs of the other parts
        index.refresh()
        elsewhere = [index.row(pack, size) for pack, size in index.sizes.items() if pack in staying.difference(packs)]
        good |= {key for row in elsewhere for key in row.names() if key in suspects}
        # In the table these packs are the last in which a key counts.
        only_there = [(key, pack) for pack in earlier for key in index.table.entries_in(pack)]
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
    )


def _checked(transport: Transport, pack: str, unreadable: dict[str, str]) -> tuple[set[str], dict[str, str], int]:
    """The keys of a pack, why entries are not what was stored, and its bytes. A damaged pack is put on the list.

    Why the pack cannot be read is added to `unreadable`. Nothing of a pack that was compacted away meanwhile.
    """
    try:
        found, problems = read_checked(transport, pack)
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


# Pruning


@dataclass(slots=True)
class PruneReport(Report):
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
    """Entries that no manifest needs, those included that stay because their pack has others."""
    unreadable: dict[str, str] = field(default_factory=dict)


def prune(transport: Transport, *, grace_h: float, unfinished: bool = False, dry_run: bool = False) -> PruneReport:
    """Remove the packs of a bucket of which no manifest needs anything, some hours after they were listed.

    Args:
        transport: The bucket. Others may read and write it meanwhile.
        grace_h: For so many hours after a pack was written, and again after it was listed, it is not removed.
        unfinished: A run that began earlier than that, and did not finish, keeps nothing.
        dry_run: Report only.

    Returns:
        What was listed, and what was removed of what an earlier run had listed.

    Raises:
        StoreError: It is unclear what is needed: there is no manifest, a run has not finished, or the clocks differ.
        DatasetError: A manifest is damaged.
        RemoteError: The bucket does not answer, or refuses.
    """
    transport.check()
    manifests, report = RemoteManifests(transport, read_only=dry_run), PruneReport(transport.url, grace_h, dry_run)
    oldest = datetime.now(timezone.utc) - timedelta(hours=grace_h)  # by this machine's clock
    limit = oldest.timestamp()
    if not dry_run:
        _check_clock(transport)
    listed, written = removals_in(transport), packs_in(transport)
    index = FarIndex(transport)
    index.refresh()
    report.unreadable = dict(index.unreadable)
    # Only now: what a manifest needs was there before it was written. And runs first: they end by writing one.
    in_use = _keys_in_use(transport.url, manifests, [] if unfinished else manifests.unfinished())
    table, sizes = index.table, index.sizes

    # What was listed long enough ago. In the table these packs are the last in which a key counts.
    due = {pack for pack, note in listed.items() if note.modified <= limit} - report.unreadable.keys()
    counts = {pack for pack in due if not in_use.isdisjoint(table.entries_in(pack))}
    removed, needed = due - counts, {pack for pack in counts if not listed[pack].num_bytes}  # damaged: not made again
    if not dry_run:
        # Another run may have removed a pack since, and a push sent it again: then it is younger than its note.
        there = packs_in(transport) if removed else {}
        again = {pack for pack in removed & there.keys() if there[pack].modified > listed[pack].modified}
        transport.remove(map(pack_name, removed - again))
        transport.remove(f"{REMOVALS}/{pack}" for pack in removed | needed)
        removed -= again
    removed &= sizes.keys()
    num_leaving = len(index.leaving)
    report.num_packs, report.num_waiting = len(sizes) - num_leaving, num_leaving - len(removed)
    report.num_removed, report.removed_bytes = len(removed), sum(sizes[pack] for pack in removed)

    # What is to be listed. Younger packs may be of a push that goes on, and are in no manifest yet.
    table.drop_packs(index.leaving.keys() - needed)
    new = table.empty_packs()
    for pack in [pack for pack, each in written.items() if each.modified <= limit]:
        entries = table.entries_in(pack)
        report.num_unused += len(entries.keys() - in_use)
        if entries and in_use.isdisjoint(entries):
            new.add(pack)
    report.num_listed, report.listed_bytes = len(new), sum(sizes[pack] for pack in new)
    if not dry_run:
        list(in_threads(lambda pack: transport.write(f"{REMOVALS}/{pack}", b"", version=ANY_VERSION), sorted(new)))
        transport.remove([name for name, each in transport.list(PROBES).items() if each.modified <= limit])
        if unfinished:
            manifests.give_up(oldest)
    return report


def _check_clock(transport: Transport) -> None:
    """StoreError if this machine's clock is far from the store's: packs would go too early, or never."""
    name = f"{PROBES}/{new_pack_id()}"
    transport.write(name, b"", version=ANY_VERSION)
    now, probe = datetime.now(timezone.utc).timestamp(), transport.list(PROBES).get(name)
    transport.remove([name])
    if probe is not None and abs(off_s := now - probe.modified) > _MAX_OFF_S:  # None: another run removed it
        problem = f"this machine's clock is {off_s:+,.0f} s off the store's, and the grace time compares the two"
        raise StoreError(f"{transport.url}: {problem}. Set the clock, then run the same again")


def _keys_in_use(url: str, manifests: RemoteManifests, runs: list[str]) -> set[str]:
    """The keys of all manifests. StoreError, DatasetError: it is unclear what they need."""
    names = manifests.names()
    if not names:
        raise StoreError(f"{url}: has no manifest, so prune would remove every entry; push one first")
    if runs:
        raise StoreError(
            f"{url}: not finished: {', '.join(runs)}. What was sent for them is in no manifest yet, and would be "
            "removed: run the same push or precache again to finish, or give --unfinished to remove it"
        )
    return {key for manifest in map(manifests.read, names) if manifest is not None for key in manifest.keys()}
