"""Entries of mapped packs: verified once, and read where they lie."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from latentcache.errors import PackError, UnsafeStoreError
from latentcache.store.base import ARRAY_DTYPES, EntryArrays
from latentcache.store.entries import Found
from latentcache.store.location import Location
from latentcache.store.pack import check_payload, map_pack
from latentcache.utils.durable_files import unreadable

Relocate = Callable[[str, Location, str], Location]
"""Is given an entry that is not what was stored, and why. It returns where the entry lies now, or raises."""


class MappedEntries:
    """Entries of mapped packs, verified when they are first read. `pack_path` gives a pack's file."""

    def __init__(self, pack_path: Callable[[str], Path]):
        self._pack_path = pack_path
        self._maps: dict[str, np.ndarray] = {}
        self.verified: dict[str, str] = {}
        """The pack in which an entry was found good, at some 50 bytes each."""

    def rows(self, keys: Sequence[str], locations: Found, relocate: Relocate) -> list[EntryArrays]:
        """The verified arrays of entries that were looked up: all were found."""
        rows = []
        for key, location in zip(keys, locations, strict=True):
            assert location is not None
            data = self._maps.get(location.pack) if self.verified.get(key) == location.pack else None
            rows.append(self.verify(key, location, relocate) if data is None else arrays_in(data, location))
        return rows

    def verify(self, key: str, location: Location, relocate: Relocate) -> EntryArrays:
        """The entry's arrays, mapped and compared with its digest, where they lie now."""
        while True:
            data, problem = self._map(location)
            if data is not None:
                found = check_payload(data, key, location)
                if found is None:
                    self.verified[key] = location.pack
                    return arrays_in(data, location)
                problem = found
            location = relocate(key, location, problem)

    def _map(self, location: Location) -> tuple[np.ndarray | None, str]:
        """The mapped pack in which the entry lies, or why there is none: the file is gone, or is not what was written.

        A plain StoreError: it cannot be read now, which says nothing about its bytes.
        """
        path = self._pack_path(location.pack)
        data = self._maps.get(location.pack)
        try:
            if data is None:
                return self._maps.setdefault(location.pack, map_pack(path, location.end)), ""
            if path.stat().st_size < location.end:
                # Touching mapped bytes that a truncation took away would kill the process.
                return None, f"its pack was cut short: {path}"
        except FileNotFoundError:
            # A mapped file stays readable after its name is gone.
            return data, f"its pack is gone: {path}"
        except (PackError, UnsafeStoreError) as error:
            return None, str(error)
        except OSError as error:
            raise unreadable(path, error) from error
        return data, ""

    def invalidate(self, keys: Iterable[str]) -> None:
        """Verify these entries again before they are read: they may not be what was stored."""
        for key in keys:
            self.verified.pop(key, None)

    def release(self, packs: Iterable[str]) -> None:
        """Drop the maps of packs that were compacted away."""
        gone = set(packs)
        self.verified = {key: pack for key, pack in list(self.verified.items()) if pack not in gone}
        for pack in gone:
            self._maps.pop(pack, None)

    def close(self) -> None:
        """Drop all maps."""
        self.verified.clear()
        self._maps.clear()


def arrays_in(data: np.ndarray, location: Location) -> EntryArrays:
    """The entry's arrays in `data`, in which it lies as `location` says."""
    fields = zip(location.description.values(), location.offsets, strict=True)
    arrays = [np.ndarray((1, *shape), ARRAY_DTYPES[dtype], data, offset) for (dtype, shape), offset in fields]
    return EntryArrays(location.description, tuple(arrays))
