"""RemoteStore: the entries of a remote cache, read from whole packs on this disk.

keys -> FarIndex (which pack, which row) -> Tier (the pack's file here, fetched on demand) -> PackReader -> arrays
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

from typing_extensions import Unpack, override

from latentcache.config import RETRY_S, RemoteOptions
from latentcache.dataset.manifest_folder import ManifestFolder, Manifests
from latentcache.errors import EntryDamagedError, ReadOnlyError, StoreError
from latentcache.location import kind_of
from latentcache.remote.index import LISTED_S, FarIndex
from latentcache.remote.manifests import RemoteManifests
from latentcache.remote.tier import Tier, snapshot
from latentcache.remote.transport import ANY_VERSION, Transport, open_transport
from latentcache.store.base import Store
from latentcache.store.directory import pack_name
from latentcache.store.disk import DiskStore
from latentcache.store.entry import OwnedEntry, check_key
from latentcache.store.layout import Location
from latentcache.store.pack import new_pack_id, pack_buffers
from latentcache.store.reader import PackReader
from latentcache.store.table import LocationTable
from latentcache.store.writer import Writer

_MAX_LOOKS = 20  # attempts per read while an entry's pack cannot be fetched or is evicted again

logger = logging.getLogger("latentcache")


class RemoteStore(PackReader):
    """A `base.Store` in a bucket or a service, read through `transport`. Threads and processes may share it.

    Packs are fetched whole and kept in `local`, by default the user's cache folder, up to `local_max_bytes`. An entry
    is compared with its digest on its first read in this process. On a mismatch the pack is fetched once more, then
    another pack with the entry is tried; after that the entry is damaged, and a miss for this process. `read_only`
    None: whether the transport can write is determined on demand. RemoteError: the remote fails or refuses.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        read_only: bool | None = None,
        local: str | Path | None = None,
        local_max_bytes: int | None = None,
    ):
        super().__init__(transport.url)
        self.transport, self.url, self._read_only = transport, transport.url, read_only
        self.tier = Tier(transport, local, local_max_bytes, self.release)
        self.index = FarIndex(transport, self.tier)
        self._repairing = threading.RLock()
        self._fetched_again: set[str] = set()

    @property
    @override
    def read_only(self) -> bool:  # type: ignore[override]  # it is never set, and a service is asked only on demand
        return not self.transport.is_writable() if self._read_only is None else self._read_only

    def check_writable(self) -> None:
        """ReadOnlyError if the store was opened for reading, or this client may not write."""
        self.check_open()
        if self._read_only:
            raise ReadOnlyError(self.url, "was opened for reading only: open it without read_only=True to write")
        self.transport.check_writable()

    # Writing

    @override
    def writer(self) -> Writer:
        self.check_writable()
        return Writer(self._upload, nullcontext(), partial(self.find, max_age_s=LISTED_S))

    def _upload(self, entries: Sequence[OwnedEntry]) -> tuple[int, int]:
        # The list of packs may be up to a minute old: at worst an entry is stored twice.
        present = self.find([entry.key for entry in entries], max_age_s=LISTED_S)
        new = [entry for entry in entries if entry.key not in present]
        if not new:
            return 0, 0
        row, num_bytes, buffers = pack_buffers(new_pack_id(), new)
        self.transport.write(pack_name(row.pack.id), b"".join(buffers), version=ANY_VERSION)
        self.index.add(row)
        return len(new), num_bytes

    @override
    def remove(self, keys: Iterable[str]) -> int:
        """Always StoreError: packs are immutable, and there is no index that could mark a row as removed."""
        for key in keys:
            check_key(key)
        self.check_open()
        raise StoreError(
            f"{self.url}: entries of a remote cache cannot be removed one by one; `latentcache prune` removes what no "
            "manifest needs (for a service, run it on the server's directory)"
        )

    # Looking up

    @override
    def find(self, keys: Iterable[str], *, max_age_s: float = 0.0) -> set[str]:
        """The keys that have entries. For unknown keys packs are listed again, at most every `max_age_s` seconds."""
        self.check_open()
        return self.index.find([check_key(key) for key in dict.fromkeys(keys)], max_age_s)

    @override
    def can_tell(self) -> bool:
        if self.transport.find([]) is not None:
            return True  # the remote has an index of its own, which answered
        self.index.refresh(LISTED_S)
        return not self.index.unreadable

    @contextmanager
    @override
    def current(self) -> Iterator[LocationTable]:
        self.check_open()
        self.index.refresh()
        yield self.index.table

    @override
    def pack_sizes(self) -> dict[str, int]:
        return self.index.sizes

    @override
    def keys(self) -> Iterator[str]:
        keys = list(super().keys())
        found = self.transport.find(keys)
        return iter(keys if found is None else [key for key in keys if key in found])

    # Reading

    @override
    def prefetch(self, keys: Iterable[str], *, whole_packs: bool = False) -> None:
        self.check_open()
        found = [place for place in self.index.table.look_up(list(dict.fromkeys(keys))) if place is not None]
        packs = dict.fromkeys(place.pack.id for place in found)
        self.tier.bring_soon(packs)
        here = {pack for pack in packs if self.tier.has(pack)}
        self._advise([place for place in found if place.pack.id in here], whole_packs=whole_packs)

    @property
    @override
    def table(self) -> LocationTable:
        self.check_open()
        return self.index.table

    @override
    def look_up(self, keys: Sequence[str]) -> list[Location | None]:
        self.check_open()
        return self.index.look_up(keys)

    @override
    def path_of(self, pack: str) -> Path:
        if not self.tier.has(pack):
            self.release([pack])
            self.tier.bring([pack])
        return self.tier.path(pack)

    @override
    def bring(self, packs: set[str]) -> None:
        self.tier.bring(packs)

    def _damaged_error(self, key: str, reason: str) -> EntryDamagedError:
        return EntryDamagedError(key, reason, is_marked=False)  # for this process alone

    @override
    def relocate(self, key: str, location: Location, problem: str, num_looks: int) -> Location:
        """The new location of a damaged entry, after fetching its pack again. EntryDamagedError, EntryMissingError."""
        pack = location.pack.id
        with self._repairing:
            self.invalidate([location])
            if num_looks <= _MAX_LOOKS and not self.tier.has(pack):  # evicted by another process, or deleted remotely
                self.index.refresh()
            elif pack not in self._fetched_again:
                logger.warning("%s: entry %s in pack %s: %s. Fetching the pack again.", self.url, key, pack, problem)
                self._fetched_again.add(pack)
                self.tier.fetch(pack, again=True)
            else:
                self.release([pack])
                if num_looks > 1:  # otherwise another thread has just fetched it again
                    logger.warning("%s: entry %s in pack %s is damaged: %s", self.url, key, pack, problem)
                    self.index.lose(pack, location.row, problem)
            return self.locate([key])[0]

    @override
    def close(self) -> None:
        """Cancel pending fetches. Arrays that were returned stay readable, and packs stay on this disk."""
        super().close()
        self.tier.close()
        self.transport.close()


def open_remote(
    url: str, *, read_only: bool | None = None, create: bool = False, **options: Unpack[RemoteOptions]
) -> tuple[RemoteStore, Manifests]:
    """Open the store and manifests of the cache at `url`. The options are those of `CacheConfig`.

    `create` turns a bucket into a cache if it is not one yet. StoreError if there is no cache; RemoteError.
    """
    local = options.get("local")
    transport = open_transport(url, token=options.get("token"), retry_s=options.get("retry_s", RETRY_S))
    if not (create and read_only):  # a cache that may not be created counts as empty
        transport.check(create=create)
    store = RemoteStore(transport, read_only=read_only, local=local, local_max_bytes=options.get("local_max_bytes"))
    return store, RemoteManifests(transport, read_only=bool(read_only))


def open_cache(
    location: Path | str, *, read_only: bool | None = None, **options: Unpack[RemoteOptions]
) -> tuple[Store, Manifests, Path | str]:
    """Open the store and manifests of an existing cache, and return its location: for the hub, a local directory.

    `read_only` None means read-only if the directory is not writable or the remote refuses writes. See `open_remote`.
    """
    if kind_of(location) == "hub":
        location, read_only = snapshot(str(location), options.get("local")), True
    if isinstance(location, str):
        return *open_remote(location, read_only=read_only, **options), location
    if read_only is None:
        # A reader with write access marks damaged entries at once, so that the next precache repairs them.
        read_only = not os.access(location, os.W_OK)
    return DiskStore(location, read_only=read_only, create=False), ManifestFolder(location / "manifests"), location
