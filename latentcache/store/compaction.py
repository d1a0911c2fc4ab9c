"""Compact: live entries of wasteful packs are copied into full ones, and the old packs are deleted.

Order, so that a death at any step loses nothing: new pack sealed, index switched in one transaction, old pack
deleted. A new pack without the switch is taken in at the next opening as one that holds nothing live.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

from latentcache.errors import StoreError
from latentcache.store.base import OwnedEntry
from latentcache.store.disk import DISAGREE, DiskStore
from latentcache.store.layout import Location
from latentcache.store.pack import check_payload, map_pack, new_pack_id, read_entry, read_records, write_pack
from latentcache.store.writer import PACK_BYTES, PACK_ENTRIES, PackBuffer

MAX_DEAD_FRACTION = 0.3
SMALL_FILE_BYTES = PACK_BYTES // 4
SMALL_ENTRIES = PACK_ENTRIES // 4
"""A pack is rewritten when more of its payload is dead, or when it is small in both and there are others to join."""


@dataclass(frozen=True, slots=True)
class CompactReport:
    """Packs and bytes of files before and after; entries copied; entries found damaged (key -> reason), not copied."""

    num_packs_before: int
    num_packs_after: int
    file_bytes_before: int
    file_bytes_after: int
    num_entries: int
    damaged: dict[str, str]
    unreadable: dict[str, str]
    dry_run: bool

    def to_json(self) -> dict[str, Any]:
        """The report as JSON."""
        return asdict(self)


def compact(store: DiskStore | str | os.PathLike[str], *, dry_run: bool = False) -> CompactReport:
    """Rewrite packs that are mostly dead, or small, into full ones, and delete those that hold nothing live.

    Each entry is verified as it is copied; damaged ones are marked instead. With `dry_run` the figures after are
    estimates, and nothing is read. Readers may go on: a pack that they have mapped stays readable.
    """
    with DiskStore.opened(store) as disk, nullcontext() if dry_run else disk.lock("compact", shared=False):
        live = disk.catalog.table.by_pack()
        empty = disk.catalog.table.packs.keys() - live.keys()
        chosen = _choose(disk, live)
        before = disk.directory.pack_sizes()
        if dry_run:
            return _estimate(before, empty, chosen)
        disk.catalog.drop_packs(empty)
        copied, damaged, unreadable = _rewrite(disk, chosen)
        after = disk.directory.pack_sizes()
        return CompactReport(
            num_packs_before=len(before),
            num_packs_after=len(after),
            file_bytes_before=sum(before.values()),
            file_bytes_after=sum(after.values()),
            num_entries=copied,
            damaged=damaged,
            unreadable=unreadable,
            dry_run=False,
        )


def _choose(disk: DiskStore, live: Mapping[str, Mapping[str, Location]]) -> dict[str, dict[str, Location]]:
    wasteful, small = {}, {}
    for pack, entries in live.items():
        layout = disk.catalog.table.packs[pack]
        live_bytes = sum(location.num_bytes for location in entries.values())
        if live_bytes < (1 - MAX_DEAD_FRACTION) * layout.payload_bytes:
            wasteful[pack] = dict(entries)
        elif layout.file_bytes < SMALL_FILE_BYTES and len(entries) < SMALL_ENTRIES:
            small[pack] = dict(entries)
    together = wasteful | small
    return together if len(small) > 1 or (small and wasteful) else wasteful


def _estimate(
    before: Mapping[str, int], empty: set[str], chosen: Mapping[str, Mapping[str, Location]]
) -> CompactReport:
    entries = [location for pack in chosen.values() for location in pack.values()]
    payload_bytes = sum(location.num_bytes for location in entries)
    num_new = max(-(-payload_bytes // PACK_BYTES), -(-len(entries) // PACK_ENTRIES))
    gone = [pack for pack in before if pack in empty or pack in chosen]
    return CompactReport(
        num_packs_before=len(before),
        num_packs_after=len(before) - len(gone) + num_new,
        file_bytes_before=sum(before.values()),
        file_bytes_after=sum(before.values()) - sum(before[pack] for pack in gone) + payload_bytes,
        num_entries=len(entries),
        damaged={},
        unreadable={},
        dry_run=True,
    )


def _rewrite(
    disk: DiskStore, chosen: Mapping[str, Mapping[str, Location]]
) -> tuple[int, dict[str, str], dict[str, str]]:
    waiting = {pack: set(entries) for pack, entries in chosen.items()}
    old = {key: location for entries in chosen.values() for key, location in entries.items()}
    damaged: dict[str, str] = {}
    unreadable: dict[str, str] = {}
    copied = 0
    for batch in _full_packs(_copies(disk, chosen, damaged, unreadable)):
        head = write_pack(disk.directory.new_pack_path(new_pack_id()), batch)
        copied += disk.catalog.move(head, old)
        for key in head.names():
            waiting[old[key].pack.id].discard(key)
        _drop_drained(disk, waiting, damaged, unreadable)
    _drop_drained(disk, waiting, damaged, unreadable)
    return copied, damaged, unreadable


def _drop_drained(
    disk: DiskStore, waiting: dict[str, set[str]], damaged: Mapping[str, str], unreadable: Mapping[str, str]
) -> None:
    drained = [pack for pack, keys in waiting.items() if pack not in unreadable and keys <= damaged.keys()]
    for pack in drained:
        del waiting[pack]
    if drained:
        disk.catalog.drop_packs(drained)
        disk.release(drained)


def _copies(
    disk: DiskStore,
    chosen: Mapping[str, Mapping[str, Location]],
    damaged: dict[str, str],
    unreadable: dict[str, str],
) -> Iterator[OwnedEntry]:
    for pack, entries in chosen.items():
        path = disk.directory.pack_path(pack)
        try:
            records = read_records(path)
            data = map_pack(path, records.head.pack.file_bytes)
        except (StoreError, FileNotFoundError) as error:
            unreadable[pack] = str(error)  # left as it is: `verify` marks what it holds
            continue
        for key, location in entries.items():
            problem = check_payload(data, key, location) if records.is_at(key, location) else DISAGREE
            if problem is None:
                yield read_entry(data, records, key, location)
            else:
                disk.mark_damaged({key: (location, problem)})
                damaged[key] = problem


def _full_packs(entries: Iterator[OwnedEntry]) -> Iterator[list[OwnedEntry]]:
    buffer = PackBuffer()
    for entry in entries:
        buffer.add(entry)
        if buffer.is_full():
            yield list(buffer.entries.values())
            buffer = PackBuffer()
    if buffer.entries:
        yield list(buffer.entries.values())
