"""RemoteStore: the entries of a cache that is elsewhere, read from whole packs on this disk.

keys -> FarIndex (which pack, which row) -> Tier (the pack's file here, fetched if need be) -> PackReader -> arrays
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

_MAX_LOOKS = 20  # for an entry whose pack does not come or goes again, or that only a reader finds damaged

logger = logging.getLogger("latentcache")


class RemoteStore(PackReader):
    """A `base.Store` in a bucket, a service or a folder, which `transport` reads. Threads and processes may share it.

    Packs are fetched whole and kept in `local`, by default in the user's cache folder, up to `local_max_bytes`. An
    entry is compared with its digest when this process first reads it. What does not fit is fetched once more; then
    another pack may have the entry; then it is damaged, and a miss for this process. `read_only` None: as the transport
    allows, which is asked when it matters. RemoteError: the other end does not answer, or refuses.
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
    def read_only(self) -> bool:  # type: ignore[override]  # nobody sets it, and a service is asked only if need be
        return not self.transport.is_writable() if self._read_only is None else self._read_only

    def check_writable(self) -> None:
        """ReadOnlyError if it was opened for reading, or may not be written."""
        self.check_open()
        if self._read_only:
            raise ReadOnlyError(self.url, "is open for reading only here: open it without read_only=True")
        self.transport.check_writable()

    # Writing

    @override
    def writer(self) -> Writer:
        self.check_writable()
        return Writer(self._upload, nullcontext(), partial(self.find, max_age_s=LISTED_S))

    def _upload(self, entries: Sequence[OwnedEntry]) -> tuple[int, int]:
        # The list of packs may be a minute old: at worst an entry is stored twice.
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
        """StoreError: packs are immutable, and no index is there that could say that a row does not count."""
        for key in keys:
            check_key(key)
        self.check_open()
        raise StoreError(
            f"{self.url}: entries elsewhere cannot be removed one by one; `latentcache prune` removes what no manifest "
            "needs, of a service where its directory is"
        )

    # Looking up

    @override
    def find(self, keys: Iterable[str], *, max_age_s: float = 0.0) -> set[str]:
        """Find which of the keys have entries. For those that are not known packs are listed, unless they just were."""
        self.check_open()
        return self.index.find([check_key(key) for key in dict.fromkeys(keys)], max_age_s)

    @override
    def can_tell(self) -> bool:
        if self.transport.find([]) is not None:
            return True  # the other end has an index of its own, and is asked
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
        """Where an entry lies that is not what was stored, or raise that it is damaged or gone."""
        pack = location.pack.id
        with self._repairing:
            self.invalidate([location])
            if num_looks <= _MAX_LOOKS and not self.tier.has(pack):  # another process made room, or it is gone there
                self.index.refresh()
            elif pack not in self._fetched_again:
                logger.warning("%s: entry %s in pack %s: %s. It is fetched again.", self.url, key, pack, problem)
                self._fetched_again.add(pack)
                self.tier.fetch(pack, again=True)
            else:
                self.release([pack])
                if num_looks > 1:  # else another thread fetched it again just now
                    logger.warning("%s: entry %s in pack %s is damaged: %s", self.url, key, pack, problem)
                    self.index.lose(pack, location.row, problem)
            return self.locate([key])[0]

    @override
    def close(self) -> None:
        """End what is on its way. What was returned stays readable, and packs stay on this disk."""
        super().close()
        self.tier.close()
        self.transport.close()


def open_remote(
    url: str, *, read_only: bool | None = None, create: bool = False, **options: Unpack[RemoteOptions]
) -> tuple[RemoteStore, Manifests]:
    """The store and the manifests of the cache at `url`. The options are those of `CacheConfig`.

    `create` makes a bucket a cache if it is none yet. StoreError if there is no cache; RemoteError.
    """
    local = options.get("local")
    transport = open_transport(url, token=options.get("token"), retry_s=options.get("retry_s", RETRY_S))
    if not (create and read_only):  # what is to be made, and may not, is empty
        transport.check(create=create)
    store = RemoteStore(transport, read_only=read_only, local=local, local_max_bytes=options.get("local_max_bytes"))
    return store, RemoteManifests(transport, read_only=bool(read_only))


def open_cache(
    location: Path | str, *, read_only: bool | None = None, **options: Unpack[RemoteOptions]
) -> tuple[Store, Manifests, Path | str]:
    """The store and the manifests of a cache that exists, and where they are: one on the hub is read from a directory.

    `read_only` None: where the directory cannot be written, or the other end takes no writes. As `open_remote`.
    """
    if kind_of(location) == "hub":
        location, read_only = snapshot(str(location), options.get("local")), True
    if isinstance(location, str):
        return *open_remote(location, read_only=read_only, **options), location
    if read_only is None:
        # A reader that may write marks damage at once, so that the next precache fixes it.
        read_only = not os.access(location, os.W_OK)
    return DiskStore(location, read_only=read_only, create=False), ManifestFolder(location / "manifests"), location
