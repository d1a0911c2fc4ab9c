"""From packs back to rows of an index."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from latentcache.errors import PackError, StoreError, UnsafeStoreError
from latentcache.store.directory import CacheDirectory
from latentcache.store.layout import Location, PackRow
from latentcache.store.pack import map_pack, read_row, verified_arrays

logger = logging.getLogger("latentcache")


@dataclass(slots=True)
class Scan:
    """What packs say: a row for each, and what cannot be used, with the reason (by file).

    A key is live in one of the rows. `unreachable` are the ids of those unreadable packs that may be whole: the system
    refused to read them.
    """

    rows: dict[str, PackRow] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    unreachable: set[str] = field(default_factory=set)

    def damaged(self) -> dict[str, str]:
        """Why packs cannot be used, by id: those that nothing brings back."""
        packs = {Path(path).stem: reason for path, reason in self.unreadable.items()}
        return {pack: reason for pack, reason in packs.items() if pack not in self.unreachable}


def scan_packs(directory: CacheDirectory, packs: Iterable[str], suspects: Collection[str] = ()) -> Scan:
    """Read the headers, keys and digests of packs.

    Of two packs with one key, the one whose payload verifies is taken. The payload of `suspects` is verified too; a
    suspect that no pack has whole is damaged.
    """
    scan = Scan()
    first: dict[str, tuple[PackRow, int]] = {}
    doubtful: dict[str, list[tuple[PackRow, int]]] = {}
    for pack in sorted(packs):
        path = directory.pack_path(pack)
        try:
            row = read_row(path)
        except StoreError as error:
            scan.unreadable[str(path)] = str(error)
            if not isinstance(error, (PackError, UnsafeStoreError)):
                scan.unreachable.add(pack)
            continue
        except FileNotFoundError:
            continue  # compacted away since it was listed
        scan.rows[pack] = row
        for at, key in enumerate(row.names()):
            before = first.setdefault(key, (row, at))
            if before[0] is not row:
                doubtful.setdefault(key, [before]).append((row, at))
            elif key in suspects:
                doubtful[key] = [before]
    for key, places in doubtful.items():
        _decide(directory, key, places, is_suspect=key in suspects)
    return scan


def _decide(directory: CacheDirectory, key: str, places: list[tuple[PackRow, int]], *, is_suspect: bool) -> None:
    """Leave the key live in one of these places, a row of a pack each: the first that verifies."""
    for row, at in places:
        row.live[at] = False
    problems: list[str] = []
    unclear: list[tuple[PackRow, int]] = []
    for row, at in places:
        try:
            problem = _payload_problem(directory, key, row.location(at))
        except StoreError as error:
            unclear.append((row, at))
            problem = str(error)
        if problem is None:
            row.live[at] = True
            return
        problems.append(problem)
    if unclear and not is_suspect:
        row, at = unclear[0]  # verified when it is read
        row.live[at] = True
    else:
        row, at = places[0]
        row.reasons[at] = problems[0]


def scan_unknown(directory: CacheDirectory, packs: Collection[str]) -> Scan:
    """Read the packs that the index does not know. Those that cannot be read are warned of."""
    scan = scan_packs(directory, packs)
    for path, reason in scan.unreadable.items():
        advice = "" if Path(path).stem in scan.unreachable else "; `latentcache compact` puts it aside"
        logger.warning("%s Its entries are missing%s.", reason, advice)
    return scan


def _payload_problem(directory: CacheDirectory, key: str, location: Location) -> str | None:
    """Why an entry's bytes are not those that were stored, or None if they are. Reads them.

    A plain StoreError: they cannot be read now, which says nothing about them.
    """
    path = directory.pack_path(location.pack.id)
    try:
        found = verified_arrays(map_pack(path, location.end), key, location)
    except (PackError, UnsafeStoreError) as error:
        return str(error)
    except FileNotFoundError:
        return f"its pack is gone: {path}"
    return found if isinstance(found, str) else None
