"""Compact: live entries of wasteful packs are copied into full ones, and the old packs are deleted.

Order, so that a death at any step loses nothing: new pack sealed, index switched in one transaction, old pack
deleted. A new pack without the switch is taken in at the next opening as one that holds nothing live.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

from latentcache.errors import StoreError
from latentcache.store.base import OwnedEntry, StoreReport
from latentcache.store.disk import DISAGREE, DiskStore
from latentcache.store.layout import Location
from latentcache.store.location_table import LocationTable
from latentcache.store.pack import map_pack, new_pack_id, read_entry, read_records, verified_arrays, write_pack
from latentcache.store.recovery import scan_packs
from latentcache.store.writer import PACK_AGE_S, PACK_BYTES, PACK_ENTRIES, PackBuffer

MAX_DEAD_FRACTION = 0.3
SMALL_FILE_BYTES = PACK_BYTES // 4
SMALL_ENTRIES = PACK_ENTRIES // 4
"""A pack is rewritten when more of its payload is dead, or when it is small in both and there are others to join."""


@dataclass(frozen=True, slots=True)
class CompactReport(StoreReport):
    """Packs and bytes of files before and after; entries copied; entries found damaged (key -> reason), not copied.

    `put_aside`: pack -> reason, of packs that cannot be read and in which the index has nothing: they were moved to the
    folder `damaged` of the cache, to be deleted by hand.
    """

    num_packs_before: int
    num_packs_after: int
    file_bytes_before: int
    file_bytes_after: int
    num_entries: int
    damaged: dict[str, str]
    unreadable: dict[str, str]
    put_aside: dict[str, str]
    dry_run: bool


Entries = Mapping[str, Mapping[str, Location]]
"""Where the entries of packs lie: pack -> key -> location."""


def compact(store: DiskStore | str | os.PathLike[str], *, dry_run: bool = False) -> CompactReport:
    """Rewrite packs that are mostly dead, or small, into full ones, and delete those that hold nothing live.

    Packs that cannot be read, and that the index does not know, are moved to the folder `damaged`. Each entry is
    verified as it is copied; damaged ones are marked instead. With `dry_run` the figures after are estimates, and
    nothing is read. Readers may go on: a pack that they have mapped stays readable.
    """
    with DiskStore.opened(store) as disk, nullcontext() if dry_run else disk.lock("compact", shared=False):
        chosen = choose(disk.catalog.table)
        before = disk.directory.pack_sizes()
        damaged: dict[str, str] = {}
        unreadable: dict[str, str] = {}
        # Entries of theirs that are needed were encoded again, or will be: the index does not know these packs.
        put_aside = scan_packs(disk.directory, before.keys() - disk.catalog.table.packs.keys()).damaged()
        if dry_run:
            num_copied, payload_bytes = _size(chosen)
            num_new = max(-(-payload_bytes // PACK_BYTES), -(-num_copied // PACK_ENTRIES))
            gone = (disk.catalog.table.empty_packs() | chosen.keys()) & before.keys() | put_aside.keys()
            num_after = len(before) - len(gone) + num_new
            bytes_after = sum(before.values()) - sum(before[pack] for pack in gone) + payload_bytes
        else:
            for pack in put_aside:
                disk.directory.put_aside(pack)
            num_copied = rewrite(disk, chosen, damaged, unreadable)
            after = disk.directory.pack_sizes()
            num_after, bytes_after = len(after), sum(after.values())
        return CompactReport(
            num_packs_before=len(before),
            num_packs_after=num_after,
            file_bytes_before=sum(before.values()),
            file_bytes_after=bytes_after,
            num_entries=num_copied,
            damaged=damaged,
            unreadable=unreadable,
            put_aside=put_aside,
            dry_run=dry_run,
        )


def _size(entries: Entries) -> tuple[int, int]:
    """How many entries there are, and the bytes of their values."""
    locations = [location for own in entries.values() for location in own.values()]
    return len(locations), sum(location.group.mean_bytes for location in locations)


def choose(table: LocationTable) -> dict[str, Mapping[str, Location]]:
    """The packs that are to be rewritten, with what is live in them."""
    wasteful, small = dict[str, Mapping[str, Location]](), dict[str, Mapping[str, Location]]()
    for pack, entries in table.by_pack().items():
        layout = table.packs[pack]
        _, live_bytes = _size({pack: entries})
        if live_bytes < (1 - MAX_DEAD_FRACTION) * layout.payload_bytes:
            wasteful[pack] = entries
        elif layout.file_bytes < SMALL_FILE_BYTES and len(entries) < SMALL_ENTRIES:
            small[pack] = entries
    return wasteful | small if len(small) > 1 or wasteful else wasteful


def rewrite(disk: DiskStore, chosen: Entries, damaged: dict[str, str], unreadable: dict[str, str]) -> int:
    """Copy these entries, and delete each pack as soon as nothing in it is live. Returns how many were copied."""
    old = {key: location for entries in chosen.values() for key, location in entries.items()}
    num_copied = 0
    _drop_empty(disk)
    for batch in full_packs(_copies(disk, chosen, damaged, unreadable), PACK_AGE_S):
        row = write_pack(disk.directory.new_pack_path(new_pack_id()), batch)
        num_copied += disk.catalog.move(row, old)
        _drop_empty(disk)
    _drop_empty(disk)
    return num_copied


def _drop_empty(disk: DiskStore) -> None:
    empty = disk.catalog.table.empty_packs()
    disk.catalog.drop_packs(empty)
    disk.release(empty)


def _copies(
    disk: DiskStore, chosen: Entries, damaged: dict[str, str], unreadable: dict[str, str]
) -> Iterator[OwnedEntry]:
    for pack, entries in chosen.items():
        path = disk.directory.pack_path(pack)
        try:
            records = read_records(path)
            data = map_pack(path, records.row.pack.file_bytes)
        except (StoreError, FileNotFoundError) as error:
            unreadable[pack] = str(error)  # left as it is: `verify` marks what it holds
            continue
        for key, location in entries.items():
            found = verified_arrays(data, key, location) if records.is_at(key, location) else DISAGREE
            if isinstance(found, str):
                disk.mark_damaged({key: (location, found)})
                damaged[key] = found
            else:
                yield read_entry(found, records, location)


def full_packs(entries: Iterator[OwnedEntry], age_s: float) -> Iterator[list[OwnedEntry]]:
    """The entries in as many as a pack has, or as come in `age_s` seconds. Keys are distinct."""
    buffer = PackBuffer(age_s)
    for entry in entries:
        buffer.add(entry)
        if buffer.is_full():
            yield list(buffer.entries.values())
            buffer = PackBuffer(age_s)
    if buffer.entries:
        yield list(buffer.entries.values())
