"""From packs back to rows of an index."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from latentcache.errors import PackError, StoreError, UnsafeStoreError
from latentcache.store.directory import CacheDirectory
from latentcache.store.layout import Location, locate
from latentcache.store.location_table import PackRow
from latentcache.store.pack import check_payload, map_pack, read_head

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


def scan_packs(directory: CacheDirectory, packs: Iterable[str], suspects: Collection[str] = ()) -> Scan:
    """Read the headers, keys and digests of packs.

    Of two packs with one key, the one whose payload verifies is taken. The payload of `suspects` is verified too; a
    suspect that no pack has whole is damaged.
    """
    scan = Scan()
    first: dict[str, str] = {}
    doubtful: dict[str, list[str]] = {}
    for pack in sorted(packs):
        path = directory.pack_path(pack)
        try:
            head = read_head(path)
        except StoreError as error:
            scan.unreadable[str(path)] = str(error)
            if not isinstance(error, (PackError, UnsafeStoreError)):
                scan.unreachable.add(pack)
            continue
        except FileNotFoundError:
            continue  # compacted away since it was listed
        scan.rows[pack] = PackRow.of(head)
        for key in head.names():
            before = first.setdefault(key, pack)
            if before != pack or key in suspects:
                doubtful.setdefault(key, [before]).append(pack)
    for key, found in doubtful.items():
        _decide(directory, scan, key, list(dict.fromkeys(found)), is_suspect=key in suspects)
    return scan


def _decide(directory: CacheDirectory, scan: Scan, key: str, packs: list[str], *, is_suspect: bool) -> None:
    """Leave the key live in one of the packs: the first that verifies."""
    problems: dict[str, str] = {}
    unclear: list[str] = []
    chosen = None
    for pack in packs:
        row = scan.rows[pack]
        at = row.row_of(key)
        assert at is not None
        row.live[at] = False
        try:
            problem = payload_problem(directory, key, locate(row.pack, at, row.digests[at].tobytes()))
        except StoreError as error:
            unclear.append(pack)
            problem = str(error)
        if problem is None:
            chosen = pack
            break
        problems[pack] = problem
    for pack in packs[len(problems) + 1 :] if chosen is not None else ():
        row = scan.rows[pack]
        row.live[row.row_of(key)] = False
    if chosen is None and unclear and not is_suspect:
        chosen = unclear[0]  # verified when it is read
    row = scan.rows[chosen or packs[0]]
    at = row.row_of(key)
    assert at is not None
    if chosen is None:
        row.reasons[at] = problems[packs[0]]
    else:
        row.live[at] = True


def scan_unknown(directory: CacheDirectory, packs: Collection[str]) -> Scan:
    """Read the packs that the index does not know. Those that cannot be read are warned of."""
    scan = scan_packs(directory, packs)
    for path, reason in scan.unreadable.items():
        advice = "" if Path(path).stem in scan.unreachable else "; delete it, or move it elsewhere"
        logger.warning("%s Its entries are missing%s.", reason, advice)
    return scan


def payload_problem(directory: CacheDirectory, key: str, location: Location) -> str | None:
    """Why an entry's bytes are not those that were stored, or None if they are. Reads them.

    A plain StoreError: they cannot be read now, which says nothing about them.
    """
    path = directory.pack_path(location.pack.id)
    try:
        data = map_pack(path, location.end)
    except (PackError, UnsafeStoreError) as error:
        return str(error)
    except FileNotFoundError:
        return f"its pack is gone: {path}"
    return check_payload(data, key, location)
