"""Verify and prune a remote cache while other processes use it.

`prune` writes an empty file in `removals/` for each pack whose entries are all in other packs or needed by no manifest.
From then on writers treat such a pack as absent. A later run deletes it, once it was listed for longer than the grace
time and if still nothing in it is needed. So readers that listed the packs before can finish reading them. A push or
precache that relied on such a pack either ends within the grace time or has a note, which makes `prune` refuse. A later
one uploads the entries again.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone

import numpy as np

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

_DAMAGED = b"damaged"  # content of the note of a pack with damaged entries; other notes are empty
_MAX_OFF_S = 900.0  # tolerated difference between this machine's clock and the store's

logger = logging.getLogger("latentcache")


# Verifying


def verify(
    transport: Transport, *, subset: tuple[int, int] | None = None, progress: Progress | None = None
) -> VerifyReport:
    """Fetch every pack and check its entries, like `store.upkeep.verify` does on a disk.

    A damaged pack is fetched once more, since the transfer may have damaged it. An entry counts as damaged if no pack
    has an intact copy. A service that accepts writes from this client then checks these entries on its own disk, and
    turns those that are damaged there into misses. In a writable bucket the intact entries of a damaged pack are
    uploaded as a new pack, and the old pack is listed for removal. Its damaged entries are then misses for all writers,
    and precache or a push replaces them. Packs that are listed for removal are not read; entries that only such a
    damaged pack has are `known_damaged`. `subset` and `progress` are those of `store.upkeep.verify`.
    """
    listed = removals_in(transport)  # first: the packs that replace these are then among the packs
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
            if error.status != FORBIDDEN or len(unreadable) == len(packs):  # else only this pack, e.g. an archived one
                raise
        progress.advance()
    progress.finish()
    index, known = FarIndex(transport), dict[str, str]()
    earlier = {pack for pack, note in listed.items() if note.num_bytes}
    if earlier or (suspects and len(packs) < len(staying)):  # copies may be in packs of the other parts
        index.refresh()
        elsewhere = [index.row(pack, size) for pack, size in index.sizes.items() if pack in staying.difference(packs)]
        good |= {key for row in elsewhere for key in row.names() if key in suspects}
        # The table uses a copy in these packs only if no other pack has the key.
        only_there = [(key, pack) for pack in earlier for key in index.table.entries_in(pack)]
        known = {key: f"was found damaged in pack {pack}" for key, pack in only_there if key not in suspects}
    num_entries = len(good | suspects.keys())
    damaged = {key: problem for key, problem in suspects.items() if key not in good}
    if isinstance(transport, ServiceTransport) and damaged:
        # Entries that its index lists as removed or damaged do not count.
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
    """The keys of a pack, the reasons of damaged entries, and its size. Lists a damaged pack for removal.

    The error of an unreadable pack is added to `unreadable`. A pack that was compacted away meanwhile gives nothing.
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
            logger.warning("pack %s has damaged entries, but could not be listed for removal: %s", pack, error)
    return keys, problems, found.data.size


# Pruning


@dataclass(slots=True)
class PruneReport(Report):
    """What was done in a bucket or, with `dry_run`, would be."""

    url: str
    grace_h: float
    dry_run: bool
    num_packs: int = 0
    """Existing packs, without those that had been listed for removal before."""
    num_removed: int = 0
    """Packs that had been listed for removal before, and whose grace time has passed."""
    removed_bytes: int = 0
    num_listed: int = 0
    """Packs newly listed for removal, which a run after the grace time deletes."""
    listed_bytes: int = 0
    num_waiting: int = 0
    """Packs that had been listed before, and whose grace time has not passed."""
    num_unused: int = 0
    """Entries that no manifest needs, including those that stay because their pack has entries in use."""
    unreadable: dict[str, str] = field(default_factory=dict)


def prune(transport: Transport, *, grace_h: float, unfinished: bool = False, dry_run: bool = False) -> PruneReport:
    """List packs that no manifest needs for removal, and delete those whose grace time has passed.

    Args:
        transport: The bucket. Other clients may read and write it meanwhile.
        grace_h: A pack stays for this many hours after it was written, and again after it was listed.
        unfinished: Ignore unfinished runs that began longer ago than that.
        dry_run: Report only.

    Returns:
        What was newly listed, and what was deleted of the packs that an earlier run had listed.

    Raises:
        StoreError: It is unclear what is needed: there is no manifest, a run is unfinished, or the clocks differ.
        DatasetError: A manifest is damaged.
        RemoteError: The bucket fails or refuses.
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
    # After the packs, because a manifest is written after its entries; runs first, because they end with a manifest.
    in_use = _keys_in_use(transport.url, manifests, [] if unfinished else manifests.unfinished())
    table, sizes = index.table, index.sizes
    live, unneeded = table.live_sizes(), table.without(in_use).live_sizes()

    # Packs that were listed long enough ago. The table uses their copies only if no other pack has the key.
    due = {pack for pack, note in listed.items() if note.modified <= limit} - report.unreadable.keys()
    counts = {pack for pack in due if live.get(pack) != unneeded.get(pack)}
    removed, needed = due - counts, {pack for pack in counts if not listed[pack].num_bytes}  # damaged: not made again
    if not dry_run:
        # Another run may have deleted a pack and a push may have sent it again: then it is younger than its note.
        there = packs_in(transport) if removed else {}
        again = {pack for pack in removed & there.keys() if there[pack].modified > listed[pack].modified}
        transport.remove(map(pack_name, removed - again))
        transport.remove(f"{REMOVALS}/{pack}" for pack in removed | needed)
        removed -= again
    removed &= sizes.keys()
    num_leaving = len(index.leaving)
    report.num_packs, report.num_waiting = len(sizes) - num_leaving, num_leaving - len(removed)
    report.num_removed, report.removed_bytes = len(removed), sum(sizes[pack] for pack in removed)

    # Packs to be listed now. Younger ones may belong to a running push that has not written its manifest yet.
    table.drop_packs(index.leaving.keys() - needed)
    new = table.empty_packs()
    for pack in table.packs.keys() & {pack for pack, each in written.items() if each.modified <= limit}:
        report.num_unused += unneeded.get(pack, (0, 0))[0]
        if unneeded.get(pack) == live.get(pack):
            new.add(pack)
    report.num_listed, report.listed_bytes = len(new), sum(sizes[pack] for pack in new)
    if not dry_run:
        list(in_threads(lambda pack: transport.write(f"{REMOVALS}/{pack}", b"", version=ANY_VERSION), sorted(new)))
        transport.remove([name for name, each in transport.list(PROBES).items() if each.modified <= limit])
        if unfinished:
            manifests.give_up(oldest)
    return report


def _check_clock(transport: Transport) -> None:
    """StoreError if this machine's clock differs too much from the store's: packs would go too early, or never."""
    name = f"{PROBES}/{new_pack_id()}"
    transport.write(name, b"", version=ANY_VERSION)
    now, probe = datetime.now(timezone.utc).timestamp(), transport.list(PROBES).get(name)
    transport.remove([name])
    if probe is not None and abs(off_s := now - probe.modified) > _MAX_OFF_S:  # None: another run removed it
        problem = f"this machine's clock is {off_s:+,.0f} s off the store's, and the grace time depends on both"
        raise StoreError(f"{transport.url}: {problem}. Set the clock, then run the command again")


def _keys_in_use(url: str, manifests: RemoteManifests, runs: list[str]) -> np.ndarray:
    """The keys of all manifests: uint8 [n, 32]. StoreError, DatasetError: it is unclear which entries they need."""
    names = manifests.names()
    if not names:
        raise StoreError(f"{url}: has no manifest, so prune would remove every entry; push a manifest first")
    if runs:
        raise StoreError(
            f"{url}: not finished: {', '.join(runs)}. Their entries are in no manifest yet and would be removed: run "
            "the same push or precache again to finish, or use --unfinished to give them up"
        )
    return np.concatenate([manifest.rows.entry_keys() for manifest in map(manifests.read, names) if manifest])
