"""Verify, rebuild, prune and compact a cache in a directory. Each may be stopped, or die, at any moment.

Each takes a `DiskStore` or a path. StoreBusyError: a writer, or another of these, works on the cache. A report's
fields are what was done or, with `dry_run`, what would be.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from shutil import rmtree
from typing import Any

from latentcache.errors import IndexDamagedError, PackError, ReadOnlyError, StoreError, UnsafeStoreError
from latentcache.store.base import check_key, is_key
from latentcache.store.compaction import CompactReport, compact
from latentcache.store.directory import CacheDirectory
from latentcache.store.disk import DiskStore
from latentcache.store.index import Index
from latentcache.store.location import Location, looks_like_location
from latentcache.store.lock import locked
from latentcache.store.pack import check_payload, map_pack, read_header
from latentcache.store.recovery import scan_packs
from latentcache.store.rows import DAMAGED_PREFIX, PACK_PREFIX

__all__ = [
    "CompactReport",
    "PruneReport",
    "RebuildReport",
    "VerifyReport",
    "compact",
    "prune",
    "rebuild",
    "verify",
]

StoreOrPath = DiskStore | str | os.PathLike[str]
Progress = Callable[[int, int], None]
"""Called with the number of packs done, and of all."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """`damaged`: key -> reason, found now. `known_damaged`: found earlier and not mended since. `unreadable`: pack ->
    reason. `orphans`: packs that the index lacks."""

    num_entries: int
    num_packs: int
    bytes_read: int
    damaged: dict[str, str]
    known_damaged: dict[str, str]
    unreadable: dict[str, str]
    orphans: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.damaged and not self.known_damaged and not self.unreadable

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"orphans": list(self.orphans), "ok": self.ok}


@dataclass(frozen=True, slots=True)
class RebuildReport:
    """`damaged`: key -> reason, of entries that no pack holds whole. `unreadable`: file -> reason."""

    num_entries: int
    num_packs: int
    damaged: dict[str, str]
    unreadable: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class PruneReport:
    """Entries removed and their payload; packs that held nothing else, and the bytes of their files."""

    num_entries: int
    num_bytes: int
    num_packs: int
    file_bytes: int
    dry_run: bool

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def verify(
    store: StoreOrPath, *, subset: tuple[int, int] | None = None, progress: Progress | None = None
) -> VerifyReport:
    """Read every entry and check its digest, its record, and that index and packs agree. Damaged ones become misses.

    `subset=(n, t)` takes the n-th of t parts of the packs, 1 <= n <= t; all t parts are all packs. A read-only store
    is checked but not changed.
    """
    if subset is not None and not 1 <= subset[0] <= subset[1]:
        raise StoreError(f"subset {subset[0]}/{subset[1]}: give n/t with 1 <= n <= t")
    with DiskStore.opened(store) as disk, nullcontext() if disk.read_only else disk.lock_shared("verify"):
        if disk.read_only:
            disk.catalog.reload()
        known = dict(disk.catalog.markers)
        sizes, live = disk.directory.pack_sizes(), disk.catalog.by_pack()
        packs = sorted(pack for pack in sizes.keys() | live.keys() if _in_subset(pack, subset))
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
            bytes_read += sum(location.num_bytes for location in entries.values())
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
            orphans=tuple(pack for pack in packs if pack in sizes and pack not in disk.catalog.packs),
        )


def _in_subset(pack: str, subset: tuple[int, int] | None) -> bool:
    return subset is None or int(pack[:8], 16) % subset[1] == subset[0] - 1


def _verify_pack(
    directory: CacheDirectory, pack: str, entries: Mapping[str, Location]
) -> tuple[dict[str, str], str | None]:
    path = directory.pack_path(pack)
    try:
        header = read_header(path)
        data = map_pack(path, header.size.file_bytes)
    except (PackError, UnsafeStoreError) as error:
        return dict.fromkeys(entries, f"its pack cannot be read: {error}"), str(error)
    except FileNotFoundError:
        return dict.fromkeys(entries, f"its pack is gone: {path}"), f"{path}: is gone" if entries else None
    except StoreError as error:
        return {}, str(error)  # it cannot be read now: that says nothing about its entries
    problems = {}
    for key, location in entries.items():
        if header.locations.get(key) != location:
            problems[key] = "its pack's header and the index do not agree; `latentcache rebuild` may bring it back"
        elif (problem := check_payload(data, key, location)) is not None:
            problems[key] = problem
    return problems, None


def rebuild(store: StoreOrPath) -> RebuildReport:
    """Make the index anew from the packs' headers. Entries that were removed but not compacted away come back.

    Of two packs with one key the one whose payload verifies is taken. Entries marked as damaged are read again.
    """
    directory = store.directory if isinstance(store, DiskStore) else CacheDirectory(store, create=False)
    with locked(directory.lock, "rebuild", shared=False):
        directory.sweep()
        for leftover in directory.path.glob("index.replaced-*"):
            rmtree(leftover)
        entries, markers, packs = _old_rows(directory)
        scan = scan_packs(directory, directory.pack_sizes(), markers.keys())
        # A pack that cannot be read now may be whole: what the old index says of it stays.
        kept = {
            key: text
            for key, text in entries.items()
            if key not in scan.locations and any(pack in text for pack in scan.unreachable)
        }
        kept |= {PACK_PREFIX + pack: packs[pack] for pack in scan.unreachable & packs.keys()}
        lost = dict.fromkeys(entries, "no pack that can be read holds it") | markers | scan.damaged
        lost = {key: reason for key, reason in lost.items() if key not in scan.locations and key not in kept}
        aside = directory.path / f"index.replaced-{uuid.uuid4().hex[:8]}"
        if directory.index.is_symlink():
            directory.index.unlink()
        elif directory.index.exists():
            # A death from here on leaves no index, or an empty one: the next opening fills it from the packs.
            directory.index.rename(aside)
        rows = scan.rows() | kept | {DAMAGED_PREFIX + key: reason for key, reason in lost.items()}
        Index(directory.index).add_many(rows)
        if aside.exists():
            rmtree(aside)
    if isinstance(store, DiskStore):
        store.catalog.reload()
    return RebuildReport(len(scan.locations), len(scan.packs), lost, scan.unreadable)


def _old_rows(directory: CacheDirectory) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """The entries, the damage, and the packs that the index to be replaced knows of."""
    try:
        rows = Index(directory.index, read_only=True).items()
    except (IndexDamagedError, ReadOnlyError):
        return {}, {}, {}  # it is replaced because it cannot be read
    entries = {name: text for name, text in rows.items() if is_key(name) and looks_like_location(text)}
    markers = {
        key: reason
        for name, reason in rows.items()
        if name.startswith(DAMAGED_PREFIX) and is_key(key := name.removeprefix(DAMAGED_PREFIX))
    }
    packs = {name.removeprefix(PACK_PREFIX): text for name, text in rows.items() if name.startswith(PACK_PREFIX)}
    return entries, markers, packs


def prune(
    store: StoreOrPath, keep: Collection[str] | Callable[[], Collection[str]], *, dry_run: bool = False
) -> PruneReport:
    """Remove the entries whose keys are not in `keep`, and packs in which nothing is left. `compact` frees the rest.

    If `keep` is a function, it is asked when no writer can add to the cache any more.
    """
    with DiskStore.opened(store) as disk, nullcontext() if dry_run else disk.lock_exclusive("prune"):
        kept = {check_key(key) for key in (keep() if callable(keep) else keep)}
        catalog = disk.catalog
        gone = {key: location for key, location in catalog.locations().items() if key not in kept}
        live = {pack for pack, entries in catalog.by_pack().items() if entries.keys() - gone.keys()}
        empty = catalog.packs.keys() - live
        sizes = disk.directory.pack_sizes()
        if not dry_run:
            catalog.remove([*gone, *(key for key in catalog.markers if key not in kept)])
            catalog.drop_packs(empty)
            disk.release(empty)
            catalog.save()
        return PruneReport(
            num_entries=len(gone),
            num_bytes=sum(location.num_bytes for location in gone.values()),
            num_packs=len(empty),
            file_bytes=sum(sizes.get(pack, 0) for pack in empty),
            dry_run=dry_run,
        )
