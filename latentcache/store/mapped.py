"""Entries of mapped packs: verified once, and read where they lie."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from latentcache.errors import PackError, UnsafeStoreError
from latentcache.store.base import ARRAY_DTYPES, Source
from latentcache.store.catalog import Catalog
from latentcache.store.entries import Found
from latentcache.store.location import Location
from latentcache.store.pack import check_payload, map_pack
from latentcache.utils.durable_files import unreadable

MAX_READY = 1 << 17
"""Entries whose place in memory is kept for the next batch, at some 300 bytes each. Beyond it all are forgotten, and
looked up again. That an entry was verified is kept for all that were read, at some 50 bytes each."""


class _Ready:
    """Where verified entries can be read, by key. It counts as long as `version` is the catalog's.

    What was taken from it counts as long as it is the store's, also when they are forgotten because there are many.
    """

    __slots__ = ("sources", "version")

    def __init__(self, version: object):
        self.version = version
        self.sources: dict[str, Source] = {}


Elsewhere = Callable[[str, Location, str], Location]
"""Is told of an entry that is not what was stored, and why. It gives another place for it, or raises."""


class MappedEntries:
    """Where the entries of `catalog` can be read. `pack_path` gives a pack's file."""

    def __init__(self, catalog: Catalog, pack_path: Callable[[str], Path]):
        self._catalog = catalog
        self._pack_path = pack_path
        self._maps: dict[str, np.ndarray] = {}
        self._ready = _Ready(object())
        self.verified: dict[str, str] = {}
        """The pack in which an entry was found good."""

    def now(self) -> _Ready:
        """The entries that are there and were verified. What is added to it counts while nothing goes or moves."""
        ready, version = self._ready, self._catalog.version
        # A new one each time, so that a thread that fills the old one does no harm.
        if ready.version is not version:
            ready = self._ready = _Ready(version)
        elif len(ready.sources) >= MAX_READY:
            ready.sources = {}
        return ready

    def known(self, keys: Sequence[str]) -> list[Source] | None:
        """Without looking anything up. None unless all of them are known."""
        ready = self.now().sources
        try:
            return [ready[key] for key in keys]
        except (KeyError, TypeError):
            return None

    def sources(
        self, keys: Sequence[str], locations: Found, packs: Sequence[str], version: object, elsewhere: Elsewhere
    ) -> list[Source]:
        """Those of keys that were looked up while the catalog had this version; `packs` has the pack of each."""
        ready = self.now().sources if version is self._catalog.version else {}
        sources = []
        for number, (key, pack) in enumerate(zip(keys, packs, strict=True)):
            source = ready.get(key)
            if source is None:
                location = locations[number]
                assert location is not None
                data = self._maps.get(pack) if self.verified.get(key) == pack else None
                source = self.verify(key, location, elsewhere) if data is None else source_in(data, location)
                ready[key] = source
            sources.append(source)
        return sources

    def verify(self, key: str, location: Location, elsewhere: Elsewhere) -> Source:
        """The entry's bytes, mapped and compared with its digest, where they lie now."""
        while True:
            data, problem = self._map(location)
            if data is not None:
                found = check_payload(data, key, location)
                if found is None:
                    self.verified[key] = location.pack
                    return source_in(data, location)
                problem = found
            location = elsewhere(key, location, problem)

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

    def distrust(self, keys: Iterable[str]) -> None:
        """These entries may not be what was stored: look at them again, and at where all others lie."""
        for key in keys:
            self.verified.pop(key, None)
        self._ready = _Ready(object())

    def release(self, packs: Iterable[str]) -> None:
        """Let go of packs that were compacted away."""
        gone = set(packs)
        self.verified = {key: pack for key, pack in list(self.verified.items()) if pack not in gone}
        for pack in gone:
            self._maps.pop(pack, None)
        self._ready = _Ready(object())  # last: nothing that lies in them is taken from here on

    def close(self) -> None:
        """Let go of all."""
        self.verified.clear()
        self._ready = _Ready(object())
        self._maps.clear()


def source_in(data: np.ndarray, location: Location) -> Source:
    """Where the entry can be read in `data`, in which it lies as `location` says."""
    fields = zip(location.description.values(), location.offsets, strict=True)
    rows = [np.ndarray((1, *shape), ARRAY_DTYPES[dtype], data, offset) for (dtype, shape), offset in fields]
    return Source(location.description, tuple(rows))
