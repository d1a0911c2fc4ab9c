"""From packs back to an index."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from latentcache.errors import PackError, StoreError, UnsafeStoreError
from latentcache.store.directory import CacheDirectory
from latentcache.store.location import Location, PackSize
from latentcache.store.pack import check_payload, map_pack, read_header
from latentcache.store.rows import PACK_PREFIX


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
