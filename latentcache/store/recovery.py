"""From packs back to an index."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from latentcache.errors import PackError, StoreError, UnsafeStoreError
from latentcache.store.directory import CacheDirectory
from latentcache.store.location import Location, PackSize
from latentcache.store.pack import check_payload, map_pack, read_header
from latentcache.store.rows import PACK_PREFIX

logger = logging.getLogger("latentcache")


@dataclass(slots=True)
class Scan:
    """What packs say: one location per key, sizes by pack, and what could not be used, with the reason.

    `unreachable` are the ids of those unreadable packs that may be whole: the system refused to read them.
    """

    locations: dict[str, Location] = field(default_factory=dict)
    packs: dict[str, PackSize] = field(default_factory=dict)
    damaged: dict[str, str] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    unreachable: set[str] = field(default_factory=set)

    def rows(self) -> dict[str, str]:
        """The index rows for it, packs first."""
        rows = {PACK_PREFIX + pack: size.to_text() for pack, size in self.packs.items()}
        return rows | {key: location.to_text() for key, location in self.locations.items()}


def scan_packs(directory: CacheDirectory, packs: Iterable[str], suspects: Collection[str] = ()) -> Scan:
    """Read the headers of packs.

    Of two packs with one key, the one whose payload verifies is taken. The payload of `suspects` is verified too.
    """
    scan = Scan()
    candidates: dict[str, list[Location]] = {}
    for pack in sorted(packs):
        path = directory.pack_path(pack)
        try:
            header = read_header(path)
        except StoreError as error:
            scan.unreadable[str(path)] = str(error)
            if not isinstance(error, (PackError, UnsafeStoreError)):
                scan.unreachable.add(pack)
            continue
        except FileNotFoundError:
            continue  # compacted away since it was listed
        scan.packs[pack] = header.size
        for key, location in header.locations.items():
            candidates.setdefault(key, []).append(location)
    for key, found in candidates.items():
        if len(found) == 1 and key not in suspects:
            scan.locations[key] = found[0]
            continue
        problems, unclear = [], []
        for location in found:
            try:
                problem = payload_problem(directory, key, location)
            except StoreError as error:
                unclear.append(location)
                problem = str(error)
            if problem is None:
                scan.locations[key] = location
                break
            problems.append(problem)
        else:
            if unclear and key not in suspects:
                scan.locations[key] = unclear[0]  # verified when it is read
            else:
                scan.damaged[key] = problems[0]
    return scan


def scan_unknown(directory: CacheDirectory, packs: Collection[str]) -> Scan:
    """Read the headers of packs that the index does not know. Those that cannot be read are warned of."""
    scan = scan_packs(directory, packs)
    for path, reason in scan.unreadable.items():
        advice = "" if Path(path).stem in scan.unreachable else "; delete it, or move it elsewhere"
        logger.warning("%s Its entries are missing%s.", reason, advice)
    return scan


def lost_packs(directory: CacheDirectory, known: Mapping[str, PackSize], sizes: Mapping[str, int]) -> set[str]:
    """Those that the index knows, and that are gone or have another size. `sizes` are those of the files there are.

    A pack of which the system does not say whether it is there is not lost; it is warned of.
    """
    lost = set()
    for pack, size in known.items():
        if sizes.get(pack) == size.file_bytes:
            continue
        try:
            if directory.pack_size(pack) != size.file_bytes:
                lost.add(pack)
        except StoreError as error:
            logger.warning("%s", error)
    return lost


def payload_problem(directory: CacheDirectory, key: str, location: Location) -> str | None:
    """Why an entry's bytes are not those that were stored, or None if they are. Reads them.

    A plain StoreError: they cannot be read now, which says nothing about them.
    """
    path = directory.pack_path(location.pack)
    try:
        data = map_pack(path, location.end)
    except (PackError, UnsafeStoreError) as error:
        return str(error)
    except FileNotFoundError:
        return f"its pack is gone: {path}"
    return check_payload(data, key, location)
