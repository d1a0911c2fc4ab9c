"""Verify, rebuild, prune and compact a cache in a directory. Each may be stopped, or die, at any moment.

Each takes a `DiskStore` or a path. StoreBusyError: a writer, or another of these, works on the cache. A report's
fields are what was done or, with `dry_run`, what would be.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

from latentcache.errors import (
    IndexDamagedError,
    PackError,
    ReadOnlyError,
    StoreBusyError,
    StoreError,
    UnsafeStoreError,
)
from latentcache.store.base import StoreReport, check_key
from latentcache.store.catalog import PACK_PREFIX, drop_known, parsed_row
from latentcache.store.compaction import CompactReport, compact, rewrite
from latentcache.store.directory import CacheDirectory
from latentcache.store.disk import DISAGREE, DiskStore
from latentcache.store.index import GENERATION, Index
from latentcache.store.layout import Location, PackRow
from latentcache.store.location_table import LocationTable
from latentcache.store.pack import HEADER_BYTES, map_pack, read_records, row_problem
from latentcache.store.recovery import Scan, scan_packs
from latentcache.utils.durable_files import remove_whole, system_errors, typed_errors, unreadable
from latentcache.utils.locks import locked, readers_since

__all__ = [
    "CompactReport",
    "PruneReport",
    "RebuildReport",
    "VerifyReport",
    "compact",
    "prune",
    "rebuild",
    "verify",
    "verify_entries",
]

logger = logging.getLogger("latentcache")

StoreOrPath = DiskStore | str | os.PathLike[str]
Progress = Callable[[int, int], None]
"""Called with the number of packs done, and of all."""


@dataclass(frozen=True, slots=True)
class VerifyReport(StoreReport):
    """What was read, and what is wrong.

    `damaged`: key -> reason, found now. `known_damaged`: found earlier and not stored again since. `unreadable`:
    pack -> reason. `orphans`: packs that the index lacks.
    """

    num_entries: int
    num_packs: int
    bytes_read: int
    damaged: dict[str, str]
    known_damaged: dict[str, str]
    unreadable: dict[str, str]
    orphans: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.damaged and not self.known_damaged and not self.unreadable

    @override
    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"orphans": list(self.orphans), "ok": self.ok}


@dataclass(frozen=True, slots=True)
class RebuildReport(StoreReport):
    """`damaged`: key -> reason, of entries that no pack holds whole. `unreadable`: file -> reason."""

    num_entries: int
    num_packs: int
    damaged: dict[str, str]
    unreadable: dict[str, str]


@dataclass(frozen=True, slots=True)
class PruneReport(StoreReport):
    """Entries removed and their payload; packs that held nothing else, and the bytes of their files."""

    num_entries: int
    num_bytes: int
    num_packs: int
    file_bytes: int
    file_bytes_left: int
    """Of all packs, afterwards."""
    dry_run: bool


def verify(
    store: StoreOrPath, *, subset: tuple[int, int] | None = None, progress: Progress | None = None
) -> VerifyReport:
    """Read every entry and check its digest, its record, and that index and packs agree. Damaged ones become misses.

    `subset=(n, t)` takes the n-th of t parts of the packs, 1 <= n <= t; all t parts are all packs. A read-only store
    is checked but not changed.
    """
    part, num_parts = subset or (1, 1)
    if not 1 <= part <= num_parts:
        raise StoreError(f"subset {part}/{num_parts}: give n/t with 1 <= n <= t")
    with DiskStore.opened(store) as disk, nullcontext() if disk.read_only else disk.lock("verify", shared=True):
        if disk.read_only:
            disk.catalog.reload()
        known = disk.catalog.table.damaged()
        sizes, live = disk.directory.pack_sizes(), disk.catalog.table.by_pack()
        packs = sorted([pack for pack in sizes.keys() | live.keys() if int(pack[:8], 16) % num_parts == part - 1])
        found: dict[str, tuple[Location, str]] = {}
        unreadable: dict[str, str] = {}
        num_entries = bytes_read = 0
        for number, pack in enumerate(packs, 1):
            entries = live.get(pack, {})
            problems, pack_problem = _verify_pack(disk.directory, pack, entries)
            found |= {key: (entries[key], problem) for key, problem in problems.items()}
            if pack_problem is not None:
                unreadable[pack] = pack_problem
            num_entries += len(entries)
            bytes_read += sum(location.group.mean_bytes for location in entries.values())
            if progress is not None:
                progress(number, len(packs))
        if found:
            disk.mark_damaged(found)
        return VerifyReport(
            num_entries=num_entries,
            num_packs=len(packs),
            bytes_read=bytes_read,
            damaged={key: problem for key, (_, problem) in found.items()},
            known_damaged=known,
            unreadable=unreadable,
            orphans=tuple(pack for pack in packs if pack in sizes and pack not in disk.catalog.table.packs),
        )


def verify_entries(disk: DiskStore, keys: Collection[str]) -> dict[str, str]:
    """Check these entries alone, as `verify` does. Returns why those are damaged that are: they are misses now.

    What is not there, or moved meanwhile, is not damaged. StoreError for what is no key, or if a pack cannot be read
    now.
    """
    with nullcontext() if disk.read_only else disk.lock("verify", shared=True):
        disk.catalog.reload()
        places: dict[str, dict[str, Location]] = {}
        damaged: dict[str, str] = {}
        for key, location in zip(keys, disk.catalog.look_up(list(keys)), strict=True):
            if location is not None:
                places.setdefault(location.pack.id, {})[key] = location
            elif (reason := disk.catalog.table.reason(key)) is not None:
                damaged[key] = reason
        found: dict[str, tuple[Location, str]] = {}
        for pack, entries in places.items():
            problems, pack_problem = _verify_pack(disk.directory, pack, entries)
            if pack_problem is not None and not problems:
                raise StoreError(pack_problem)
            found |= {key: (entries[key], problem) for key, problem in problems.items()}
        if found:
            disk.mark_damaged(found)
        return damaged | {key: problem for key, (_, problem) in found.items()}


def _verify_pack(
    directory: CacheDirectory, pack: str, entries: Mapping[str, Location]
) -> tuple[dict[str, str], str | None]:
    path = directory.pack_path(pack)
    try:
        records = read_records(path)
        data = map_pack(path, records.row.pack.file_bytes)
    except (PackError, UnsafeStoreError) as error:
        advice = (
            f"{error} `latentcache precache CONFIG`, then `latentcache compact`, encodes its entries and removes it."
        )
        return dict.fromkeys(entries, f"its pack cannot be read: {error}"), advice
    except FileNotFoundError:
        return dict.fromkeys(entries, f"its pack is gone: {path}"), f"{path}: is gone" if entries else None
    except StoreError as error:
        return {}, str(error)  # it cannot be read now: that says nothing about its entries
    problems = {}
    for key, location in entries.items():
        if not records.is_at(key, location):
            problems[key] = f"{DISAGREE}; `latentcache rebuild` may bring it back"
            continue
        if (problem := row_problem(records, data, location.row)) is not None:
            problems[key] = problem
    return problems, None


def rebuild(store: StoreOrPath) -> RebuildReport:
    """Rebuild the index from the packs' headers. Entries that were removed but not compacted away come back.

    Of two packs with one key the one whose payload verifies is taken. Entries marked as damaged are read again.
    """
    with system_errors(Path(store.path if isinstance(store, DiskStore) else store)):
        return _rebuild(store)


def _rebuild(store: StoreOrPath) -> RebuildReport:
    directory = store.directory if isinstance(store, DiskStore) else CacheDirectory(store, create=False, repair=True)
    with locked(directory.lock, "rebuild", shared=False):
        directory.sweep()
        old = _old_rows(directory)
        suspects = {key for row in old.values() for key in row.damaged()}
        scan = scan_packs(directory, directory.pack_sizes(), suspects)
        # A pack that cannot be read now may be whole: what the old index says of it stays.
        kept = {pack: old[pack] for pack in scan.unreachable & old.keys()}
        known = LocationTable(kept.values())
        for row in scan.rows.values():
            drop_known(row, known)
        found = {key for row in [*scan.rows.values(), *kept.values()] for key in row.live_names()}
        lost = _lost(old, scan, found)
        rows = scan.rows | kept | _rows_of_lost(old, scan, lost)
        aside = directory.path / f"index.replaced-{uuid.uuid4().hex[:8]}"
        with typed_errors(directory.index, 0):
            if directory.index.is_symlink():
                directory.index.unlink()
            elif directory.index.exists():
                # A death from here on leaves no index, or an empty one: the next opening fills it from the packs.
                directory.index.rename(aside)
        Index(directory.index).replace_many({PACK_PREFIX + pack: row.to_bytes() for pack, row in rows.items()})
        remove_whole(aside)
    if isinstance(store, DiskStore):
        store.catalog.reload()
    num_live = sum(int(row.live.sum()) for row in scan.rows.values())
    return RebuildReport(num_live, len(scan.rows), lost, scan.unreadable)


def _lost(old: Mapping[str, PackRow], scan: Scan, found: Collection[str]) -> dict[str, str]:
    """Why each entry is lost that the old index knew, or that a pack has damaged, and that no pack has whole."""
    lost = {key: "no pack that can be read has it" for row in old.values() for key in row.live_names()}
    for row in [*old.values(), *scan.rows.values()]:
        lost |= row.damaged()
    return {key: reason for key, reason in lost.items() if key not in found}


def _rows_of_lost(old: Mapping[str, PackRow], scan: Scan, lost: Mapping[str, str]) -> dict[str, PackRow]:
    """Rows without a file for the lost entries of packs that are gone, so that their reasons are not forgotten."""
    rows = {}
    for pack, row in old.items():
        if pack in scan.rows or pack in scan.unreachable:
            continue
        row.reasons = {at: lost[key] for at, key in enumerate(row.names()) if key in lost}
        row.live[:], row.is_gone = False, True
        if row.reasons:
            rows[pack] = row
    return rows


def _old_rows(directory: CacheDirectory) -> dict[str, PackRow]:
    """What the index to be replaced has, by pack. A row that cannot be read is left out: it is replaced for that."""
    rows = {}
    try:
        for name, value in Index(directory.index, read_only=True).items().items():
            if name != GENERATION:
                row = parsed_row(name, value, directory)
                rows[row.pack.id] = row
    except (IndexDamagedError, ReadOnlyError) as error:
        logger.info("%s What it says after %d packs is not used.", error, len(rows))
    return rows


def prune(
    store: StoreOrPath,
    keep: Collection[str] | Callable[[], Collection[str]],
    *,
    max_bytes: int | None = None,
    dry_run: bool = False,
) -> PruneReport:
    """Remove the entries whose keys are not in `keep`, and packs in which nothing is left. `compact` frees the rest.

    If `keep` is a function, it is asked when no writer can add to the cache any more. With `max_bytes` only as much is
    removed as is needed for the packs to have at most so many bytes, from the packs that were used the longest ago.
    Packs of which something stays are rewritten at once. What is in `keep` stays also where that is more.
    StoreBusyError where a reader runs that began before the manifests last changed: it may need what they had. A dry
    run reports what could go once it has ended.
    """
    with DiskStore.opened(store) as disk, nullcontext() if dry_run else disk.lock("prune", shared=False):
        kept = {check_key(key) for key in (keep() if callable(keep) else keep)}
        if not dry_run:
            _check_readers(disk.directory)
        sizes = disk.directory.pack_sizes()
        bytes_left = sum(sizes.values())
        gone: dict[str, Location] = {}
        empty: set[str] = set()
        if max_bytes is None:
            entries = disk.catalog.table.by_pack()
            gone, empty = _remove(disk, entries, disk.catalog.table.packs.keys(), kept, dry_run=dry_run)
            bytes_left -= sum(sizes.get(pack, 0) for pack in empty)
            if not dry_run:
                disk.catalog.remove([key for key in disk.catalog.table.damaged() if key not in kept])
        else:
            # More than once where entries of natural length were larger than their pack's average.
            present = sizes
            while bytes_left > max_bytes:
                entries = disk.catalog.table.by_pack()
                chosen = _longest_unused(disk, entries, present, kept, bytes_left - max_bytes)
                if not chosen:
                    break
                removed, dropped = _remove(disk, entries, chosen.keys(), kept, dry_run=dry_run)
                gone, empty = gone | removed, empty | dropped
                bytes_left -= sum(chosen.values())
                if dry_run:
                    break
                left = disk.catalog.table.by_pack()
                rewrite(disk, {pack: left[pack] for pack in chosen.keys() & left.keys()}, {}, {})
                present = disk.directory.pack_sizes()
                bytes_left = sum(present.values())
        return PruneReport(
            num_entries=len(gone),
            num_bytes=sum(location.group.mean_bytes for location in gone.values()),
            num_packs=len(empty),
            file_bytes=sum(sizes.get(pack, 0) for pack in empty),
            file_bytes_left=bytes_left,
            dry_run=dry_run,
        )


def _remove(
    disk: DiskStore,
    entries: Mapping[str, Mapping[str, Location]],
    packs: Collection[str],
    kept: Collection[str],
    *,
    dry_run: bool,
) -> tuple[dict[str, Location], set[str]]:
    """Remove from these packs, whose `entries` are given, what is not kept, and those in which nothing stays.

    Returns both.
    """
    gone = {key: place for pack in packs for key, place in entries.get(pack, {}).items() if key not in kept}
    empty = {pack for pack in packs if entries.get(pack, {}).keys() <= gone.keys()}
    if not dry_run:
        disk.catalog.remove(list(gone))
        disk.catalog.drop_packs(empty)
        disk.release(empty)
    return gone, empty


def _check_readers(directory: CacheDirectory) -> None:
    since = readers_since(directory.readers)
    if since is None:
        return
    try:
        changed = directory.manifests.stat().st_mtime
    except OSError as error:
        raise unreadable(directory.manifests, error) from error
    if since <= changed:
        raise StoreBusyError(
            directory.path,
            "a process reads this cache that began before the manifests last changed: it may need entries that they do "
            "not have any more. Nothing is removed; try again when it has ended.",
        )


def _longest_unused(
    disk: DiskStore,
    entries: Mapping[str, Mapping[str, Location]],
    sizes: Mapping[str, int],
    kept: Collection[str],
    too_many: int,
) -> dict[str, int]:
    """The packs to take so many bytes from, the longest unused first, and how many bytes that frees of each."""
    table = disk.catalog.table
    chosen: dict[str, int] = {}
    for pack in sorted(table.packs.keys() & sizes.keys(), key=disk.directory.last_use):
        if too_many <= 0:
            break
        stay = [place.group.mean_bytes for key, place in entries.get(pack, {}).items() if key in kept]
        # Of a pack that is rewritten: its values that are removed or dead, but for the header of the new pack.
        frees = table.packs[pack].payload_bytes - sum(stay) - HEADER_BYTES if stay else sizes[pack]
        if frees > 0:
            chosen[pack] = frees
            too_many -= frees
    return chosen
