"""Verify, rebuild, prune and compact a cache in a directory. Each of them may be interrupted or killed at any moment.

Each takes a `DiskStore` or a path. StoreBusyError: a writer or another of these operations works on the cache. The
fields of a report say what was done or, with `dry_run`, what would be done.

Copying entries is crash-safe: the new pack is sealed, the index is switched in one transaction, and then the old pack
is deleted. After a crash before the switch, the next opening adds the new pack as one without live entries.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np

from latentcache.errors import EntryDamagedError, EntryMissingError, PackError, StoreBusyError, StoreError
from latentcache.identity import key_names
from latentcache.store.base import Report
from latentcache.store.directory import CacheDirectory
from latentcache.store.disk import DiskStore
from latentcache.store.entry import OwnedEntry
from latentcache.store.layout import Location
from latentcache.store.pack import HEADER_BYTES, WholePack, new_pack_id, write_pack
from latentcache.store.table import LocationTable
from latentcache.store.writer import PACK_BYTES, PACK_ENTRIES, PackBuffer
from latentcache.utils.durable_files import system_errors
from latentcache.utils.locks import is_read_since, locked
from latentcache.utils.progress import Progress

logger = logging.getLogger("latentcache")

MAX_DEAD_FRACTION = 0.3
SMALL_FILE_BYTES = PACK_BYTES // 4
SMALL_ENTRIES = PACK_ENTRIES // 4
"""A pack is rewritten if more of its payload is dead, or if it is below both sizes and there are others to join."""
StoreOrPath = DiskStore | str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class VerifyReport(Report):
    """What was read and what is damaged.

    `damaged`: key -> reason, newly found. `known_damaged`: found earlier and not stored again since. `unreadable`:
    pack -> reason.
    """

    num_entries: int
    num_packs: int
    bytes_read: int
    damaged: dict[str, str]
    known_damaged: dict[str, str]
    unreadable: dict[str, str]

    @property
    def ok(self) -> bool:
        """Whether nothing is damaged or unreadable."""
        return not self.damaged and not self.known_damaged and not self.unreadable


@dataclass(frozen=True, slots=True)
class RebuildReport(Report):
    """The numbers of entries and packs found. `unreadable`: file -> reason."""

    num_entries: int
    num_packs: int
    unreadable: dict[str, str]


@dataclass(frozen=True, slots=True)
class PruneReport(Report):
    """Entries removed and the size of their values; packs that were left empty and the size of their files."""

    num_entries: int
    num_bytes: int
    num_packs: int
    file_bytes: int
    file_bytes_left: int
    """Size of all remaining pack files."""
    dry_run: bool


@dataclass(frozen=True, slots=True)
class CompactReport(Report):
    """Packs and file sizes before and after, entries copied, and damaged entries (key -> reason), which were not."""

    num_packs_before: int
    num_packs_after: int
    file_bytes_before: int
    file_bytes_after: int
    num_entries: int
    damaged: dict[str, str]
    unreadable: dict[str, str]
    dry_run: bool


def verify(
    store: StoreOrPath, *, subset: tuple[int, int] | None = None, progress: Progress | None = None
) -> VerifyReport:
    """Check every entry's digest and record, and that index and packs agree. Damaged entries become misses.

    `subset=(n, t)` checks only the n-th of t parts of the packs, 1 <= n <= t; together the parts cover all packs. A
    read-only store is checked but not changed.
    """
    with DiskStore.opened(store) as disk, nullcontext() if disk.read_only else disk.lock("verify", shared=True):
        if disk.read_only:
            disk.reload()
        table = disk.table
        known, live = table.damaged(), table.live_sizes()
        packs = packs_in_subset(disk.directory.pack_sizes().keys() | table.packs.keys(), subset)
        progress = progress or Progress()
        progress.start("verify packs", len(packs))
        damaged, unreadable = _check(disk, packs, progress)
        progress.finish()
        read = [live[pack] for pack in packs if pack in live]
        return VerifyReport(
            num_entries=sum(num for num, _ in read),
            num_packs=len(packs),
            bytes_read=sum(num_bytes for _, num_bytes in read),
            damaged=damaged,
            known_damaged=known,
            unreadable=unreadable,
        )


def packs_in_subset(packs: Iterable[str], subset: tuple[int, int] | None) -> list[str]:
    """The ids of the packs in the n-th of t parts, by default of all packs. StoreError unless 1 <= n <= t."""
    part, num_parts = subset or (1, 1)
    if not 1 <= part <= num_parts:
        raise StoreError(f"subset {part}/{num_parts}: give n/t with 1 <= n <= t")
    return sorted([pack for pack in packs if int(pack[:8], 16) % num_parts == part - 1])


def verify_entries(disk: DiskStore, keys: Collection[str]) -> dict[str, str]:
    """Check only these entries, like `verify`. Returns the reasons of damaged ones, which are misses from now on.

    Missing entries are skipped. StoreError for an invalid key, or if a pack cannot be read now.
    """
    disk.reload()
    disk.release({found.pack.id for found in disk.look_up(list(keys)) if found is not None})
    damaged: dict[str, str] = {}
    for key in keys:
        try:
            disk.rows([key])
            disk.record(key)
        except EntryDamagedError as error:
            damaged[key] = error.reason
        except EntryMissingError:
            continue
    return damaged


def _check(disk: DiskStore, packs: Iterable[str], progress: Progress) -> tuple[dict[str, str], dict[str, str]]:
    """Check the entries of these packs against their digests and records, and mark damaged ones.

    Returns the reasons of damaged entries, by key, and of unreadable packs.
    """
    found: dict[str, tuple[Location, str]] = {}
    unreadable: dict[str, str] = {}
    for pack in packs:
        path, entries, problem = disk.directory.pack_path(pack), disk.table.entries_in(pack), ""
        try:
            whole = WholePack.in_file(path)
            problems = ((location, whole.problem(key, location)) for key, location in entries.items())
            found |= {key: (at, why) for key, (at, why) in zip(entries, problems, strict=True) if why is not None}
        except PackError as error:
            steps = "To replace it, run `latentcache precache CONFIG`, then `latentcache compact`."
            if pack not in disk.table.packs:
                steps = "It is not in the index: encode its entries again, then delete the file."
            unreadable[pack] = f"{error} {steps}"
            problem = f"its pack cannot be read: {error}"
        except FileNotFoundError:
            problem = f"its pack is gone: {path}"
            if entries:
                unreadable[pack] = f"{path}: is gone"
        except StoreError as error:
            unreadable[pack] = str(error)  # it cannot be read now, which says nothing about its entries
        if problem:
            found |= {key: (location, problem) for key, location in entries.items()}
        progress.advance()
    if found:
        disk.mark_damaged(found)
    return {key: why for key, (_, why) in found.items()}, unreadable


def rebuild(store: StoreOrPath) -> RebuildReport:
    """Rebuild the index from the packs' headers. Entries that were removed but not compacted away reappear.

    Damage that was found before is forgotten; the next read detects it again.
    """
    with DiskStore.opened(store) as disk, locked(disk.directory.lock, "rebuild", shared=False):
        refused = disk.rebuild_index()
        unreadable = {str(disk.directory.pack_path(pack)): str(error) for pack, error in refused.items()}
        return RebuildReport(len(disk.table), len(disk.table.packs), unreadable)


def prune(
    store: StoreOrPath,
    keep: np.ndarray | Callable[[], np.ndarray],
    *,
    max_bytes: int | None = None,
    dry_run: bool = False,
) -> PruneReport:
    """Remove all entries whose keys are not in `keep`, and the packs left empty. `compact` frees the other space.

    `keep` is uint8 [n, 32], or a function that returns it and is called once writers are locked out. With `max_bytes`,
    entries are removed only until the packs fit, from the least recently used packs first, and partly emptied packs are
    rewritten at once. Entries in `keep` always stay, even if they exceed the limit. StoreBusyError while a reader runs
    that started before the manifests last changed, since it may need the entries that they had. A dry run ignores such
    readers.
    """
    with DiskStore.opened(store) as disk, nullcontext() if dry_run else disk.lock("prune", shared=False):
        kept = keep() if callable(keep) else keep
        if not dry_run:
            _check_readers(disk.directory)
        unneeded, sizes = disk.table.without(kept), disk.directory.pack_sizes()
        live, others = (defaultdict(lambda: (0, 0), table.live_sizes()) for table in (disk.table, unneeded))
        num_removed, removed_bytes, gone, bytes_left = 0, 0, set[str](), sum(sizes.values())
        limit = -1 if max_bytes is None else max_bytes
        for pack in sorted(disk.table.packs, key=disk.directory.last_use):
            if bytes_left <= limit:
                break
            if pack not in disk.table.packs:  # it had no live entries, and rewriting another pack deleted it
                gone.add(pack)
                continue
            layout, (num_others, others_bytes) = disk.table.packs[pack], others[pack]
            is_all = others[pack] == live[pack]
            # Rewriting a pack frees the values that are removed or dead, minus the new pack's header.
            rewritten = layout.payload_bytes - (live[pack][1] - others_bytes) - HEADER_BYTES
            frees = layout.file_bytes if is_all else rewritten
            if max_bytes is not None and frees <= 0:
                continue
            num_removed, removed_bytes = num_removed + num_others, removed_bytes + others_bytes
            gone |= {pack} if is_all else set()
            bytes_left -= frees if is_all or max_bytes is not None else 0
            if num_others and not dry_run:
                disk.remove(unneeded.entries_in(pack))  # all at once as text, millions of keys would take a gigabyte
            if max_bytes is not None and not dry_run:
                rewrite(disk, {pack}, {}, {})
                # Measured: ragged entries may differ from their pack's mean, and a file may not be deletable now.
                bytes_left = sum(disk.directory.pack_sizes().values())
        if not dry_run:
            disk.drop_empty(gone)
            gone -= disk.table.packs.keys()
            if max_bytes is None and (damaged := disk.table.damaged()):
                disk.remove(damaged.keys() - set(key_names(kept)))
            bytes_left = sum(disk.directory.pack_sizes().values())
        return PruneReport(
            num_entries=num_removed,
            num_bytes=removed_bytes,
            num_packs=len(gone),
            file_bytes=sum(sizes.get(pack, 0) for pack in gone),
            file_bytes_left=bytes_left,
            dry_run=dry_run,
        )


def _check_readers(directory: CacheDirectory) -> None:
    with system_errors(directory.manifests):
        changed_ns = directory.manifests.stat().st_mtime_ns if directory.manifests.exists() else 0
    if is_read_since(directory.readers, changed_ns):
        raise StoreBusyError(
            directory.path,
            "a process that reads this cache began before the manifests last changed, so it may need entries that they "
            "no longer have. Nothing is removed; try again when that process has ended.",
        )


def compact(store: StoreOrPath, *, dry_run: bool = False) -> CompactReport:
    """Rewrite small packs, and packs with many dead entries, into full ones, and delete packs without live entries.

    Each entry is verified as it is copied; a damaged one is marked instead. With `dry_run` nothing is read, and the
    figures after are estimates. Readers may run meanwhile: packs that they have mapped stay readable.
    """
    with DiskStore.opened(store) as disk, nullcontext() if dry_run else disk.lock("compact", shared=False):
        chosen = _to_rewrite(disk.table)
        before = disk.directory.pack_sizes()
        damaged: dict[str, str] = {}
        unreadable: dict[str, str] = {}
        if dry_run:
            num_copied, payload_bytes = (sum(each) for each in zip((0, 0), *chosen.values(), strict=True))
            num_new = max(-(-payload_bytes // PACK_BYTES), -(-num_copied // PACK_ENTRIES))
            gone = (disk.table.empty_packs() | chosen.keys()) & before.keys()
            num_after = len(before) - len(gone) + num_new
            bytes_after = sum(before.values()) - sum(before[pack] for pack in gone) + payload_bytes
        else:
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
            dry_run=dry_run,
        )


def _to_rewrite(table: LocationTable) -> dict[str, tuple[int, int]]:
    """The packs to rewrite, with the number of live entries in each and the size of their values."""
    wasteful, small = dict[str, tuple[int, int]](), dict[str, tuple[int, int]]()
    for pack, (num, live_bytes) in table.live_sizes().items():
        layout = table.packs[pack]
        if live_bytes < (1 - MAX_DEAD_FRACTION) * layout.payload_bytes:
            wasteful[pack] = num, live_bytes
        elif layout.file_bytes < SMALL_FILE_BYTES and num < SMALL_ENTRIES:
            small[pack] = num, live_bytes
    return wasteful | small if len(small) > 1 or wasteful else wasteful


def rewrite(disk: DiskStore, chosen: Collection[str], damaged: dict[str, str], unreadable: dict[str, str]) -> int:
    """Copy the live entries of these packs into new ones, and delete each old pack once it has no live entries.

    Adds the reasons of damaged entries to `damaged`, by key, and of unreadable packs to `unreadable`. Returns how many
    entries were copied.
    """
    copies, num_copied = _copies(disk, chosen, damaged, unreadable), 0
    while True:
        buffer = PackBuffer()  # first, since the entries of the last buffer keep their packs mapped
        disk.drop_empty()
        buffer.fill(copies)
        if not buffer.entries:
            disk.drop_empty()
            return num_copied
        row = write_pack(disk.directory.new_pack_path(new_pack_id()), list(buffer.entries.values()))
        num_copied += disk.move(row, chosen)


def _copies(
    disk: DiskStore, chosen: Collection[str], damaged: dict[str, str], unreadable: dict[str, str]
) -> Iterator[OwnedEntry]:
    """Yield the live, intact entries of these packs."""
    for pack in chosen:
        if not (entries := disk.table.entries_in(pack)):  # all of them were removed meanwhile
            continue
        try:
            whole = WholePack.in_file(disk.directory.pack_path(pack))
        except (StoreError, FileNotFoundError) as error:
            unreadable[pack] = str(error)  # left as it is: `verify` marks its entries
            continue
        for key, location in entries.items():
            entry = whole.entry(key, location)
            if isinstance(entry, str):
                disk.mark_damaged({key: (location, entry)})
                damaged[key] = entry
            else:
                yield entry
