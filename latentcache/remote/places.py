"""What packs and manifests move between: the directory of a cache, a bucket, or a service."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Protocol

from typing_extensions import override

from latentcache.dataset.manifest_folder import ManifestFolder, ManifestMemory, Manifests
from latentcache.errors import StoreError
from latentcache.remote.locations import kind_of, parse_location
from latentcache.store.base import Closing
from latentcache.store.disk import DiskStore
from latentcache.store.exchange import take_checked
from latentcache.store.layout import PackRow
from latentcache.store.pack import PackRecords, map_pack, read_row


class Place(Closing, Protocol):
    """Packs, and the manifests over them. `name` is how a user calls it. Threads may share it.

    StoreError where something cannot be done now; RemoteError where what is far away does not answer.
    """

    name: str
    manifests: Manifests
    leaving: Collection[str] = ()
    """Of the packs that `packs` listed last: those that go soon, since other packs have what is needed of them."""

    def packs(self) -> dict[str, int]:
        """The bytes of each pack that is there now, by its id."""

    def row(self, pack: str) -> PackRow:
        """A pack's layout, keys and digests; live are the entries in use. FileNotFoundError: it is gone. PackError."""

    def find(self, keys: Iterable[str]) -> set[str]:
        """Those of the keys whose entries are there, and not known as damaged."""

    def read(self, pack: str) -> bytes | memoryview:
        """The bytes of a pack, unchecked. FileNotFoundError if it is gone."""

    def take(self, records: PackRecords, data: bytes | memoryview) -> None:
        """Store a pack, as a whole or not at all. The caller has compared its bytes, `data`, with its digests."""


class FarPlace(Place, Protocol):
    """A place on another machine, which can be verified only from here."""

    def damaged(self) -> dict[str, str]:
        """Why entries are damaged, of those that it knows of."""

    def live(self) -> set[str] | None:
        """The keys of all entries. None: what its packs hold is there."""

    def confirmed(self, suspects: Mapping[str, str], unreadable: Iterable[str]) -> dict[str, str]:
        """Those of the entries that were found damaged, with the reason, which it finds so too.

        `unreadable`: packs that do not even say what they hold.
        """


class DirectoryPlace(Place):
    """The directory of a cache. `is_target`: it is written, and made if it is not there.

    With `dry_run` nothing is made or written: what is not there holds nothing.
    """

    def __init__(self, path: Path, *, is_target: bool, dry_run: bool = False):
        self.name = str(path)
        self._store: DiskStore | None = None
        self.manifests: Manifests = ManifestMemory()
        is_new = not path.exists() or (path.is_dir() and not any(path.iterdir()))
        if not (is_target and dry_run and is_new):
            self._store = DiskStore(path, read_only=dry_run or not is_target, create=is_target)
            self.manifests = ManifestFolder(self._store.directory.manifests)

    @property
    def _disk(self) -> DiskStore:
        if self._store is None:
            raise StoreError(f"{self.name}: there is no cache here")
        return self._store

    @override
    def packs(self) -> dict[str, int]:
        if self._store is None:
            return {}
        self._store.catalog.reload()
        return {pack: layout.file_bytes for pack, layout in self._store.catalog.table.packs.copy().items()}

    @override
    def row(self, pack: str) -> PackRow:
        row = read_row(self._disk.directory.pack_path(pack))
        places = self._disk.catalog.table.look_up(row.names())
        row.live[:] = [place is not None and place.pack.id == pack for place in places]
        return row

    @override
    def find(self, keys: Iterable[str]) -> set[str]:
        return set() if self._store is None else self._store.find(keys)

    @override
    def read(self, pack: str) -> memoryview:
        # Only what the index says: what may follow a pack's own bytes is not sent.
        layout = self._disk.catalog.table.packs.get(pack)
        if layout is None:
            raise FileNotFoundError(pack)
        return map_pack(self._disk.directory.pack_path(pack), layout.file_bytes).data

    @override
    def take(self, records: PackRecords, data: bytes | memoryview) -> None:
        take_checked(self._disk, records, data)

    def close(self) -> None:
        """Release the directory."""
        if self._store is not None:
            self._store.close()


def open_place(
    location: str | Path, *, is_target: bool = False, dry_run: bool = False, near: Place | None = None
) -> Place:
    """The place that a user names: a directory, or the URL of a bucket or a service. `is_target`: it is sent to.

    `near`: see `open_far_place`. StoreError for what is no cache, and no place for one. ReadOnlyError for a target that
    cannot be written.
    """
    found = parse_location(location)[1]
    if isinstance(found, Path):
        return DirectoryPlace(found, is_target=is_target, dry_run=dry_run)
    return open_far_place(found, is_target=is_target, dry_run=dry_run, near=near)


def open_far_place(
    url: str,
    *,
    is_target: bool = False,
    dry_run: bool = False,
    near: Place | None = None,
    retry_s: float | None = None,
) -> FarPlace:
    """As `open_place`, of a bucket or a service.

    `near` is a place from which a pack's row is read faster, where both have the pack. A request that is not answered
    is tried again for `retry_s` seconds.
    """
    # These import urllib3 and obstore, which only they need.
    if kind_of(url) == "bucket":
        from latentcache.remote.bucket_place import BucketPlace

        return BucketPlace(url, is_target=is_target, dry_run=dry_run, near=near, retry_s=retry_s)
    from latentcache.remote.service_place import ServicePlace

    place = ServicePlace(url, retry_s=retry_s)
    if is_target and not dry_run:
        place.check_writable()
    return place
