"""BucketPlace: a bucket that packs and manifests move to, and from."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress

import numpy as np
from typing_extensions import override

from latentcache.dataset.manifest_folder import Manifests
from latentcache.errors import PackError, RemoteError
from latentcache.remote.bucket import Bucket
from latentcache.remote.bucket_manifests import BucketManifests
from latentcache.remote.bucket_marks import marked, read_marks, write_marks
from latentcache.remote.bucket_upkeep import removals_in
from latentcache.remote.places import FarPlace, Place
from latentcache.store.directory import pack_name
from latentcache.store.exchange import part_of
from latentcache.store.layout import PackRow
from latentcache.store.location_table import LocationTable
from latentcache.store.pack import PackRecords, read_pack_bytes, row_problem

logger = logging.getLogger("latentcache")


class BucketPlace(FarPlace):
    """The bucket at `url`. It has no index: what its packs hold is read from them, once, when it matters.

    `near`: see `open_place`. A target is made a cache if it is none yet.
    """

    def __init__(
        self,
        url: str,
        *,
        is_target: bool = False,
        dry_run: bool = False,
        near: Place | None = None,
        retry_s: float | None = None,
    ):
        self.bucket = Bucket.open(url) if retry_s is None else Bucket.open(url, retry_s=retry_s)
        self.name = self.bucket.url
        if not (is_target and dry_run):  # to which there may be nothing yet
            self.bucket.check(create=is_target)
        self.manifests: Manifests = BucketManifests(
            self.bucket, read_only=dry_run or not is_target, source="" if near is None else os.path.abspath(near.name)
        )
        # What is to be removed does not count as there: it is sent again, in packs with other ids.
        self._is_target = is_target
        self._removed: set[str] = set()
        self._marks = read_marks(self.bucket)
        self._marked = {pack for marks in self._marks.values() for pack in marks}
        self._near = near
        self._sizes: dict[str, int] = {}
        self._table: LocationTable | None = None
        self._lock = threading.Lock()

    @override
    def packs(self) -> dict[str, int]:
        listed = {pack for _, packs in removals_in(self.bucket).values() for pack in packs}
        if self._is_target:
            self._removed = listed
        else:
            self.leaving = listed
        self._sizes = {pack: size for pack, size in self.bucket.packs().items() if pack not in self._removed}
        if self._table is not None:
            with self._lock:  # another machine's prune or compact may have removed some
                self._table.drop_packs(self._table.packs.keys() - self._sizes.keys())
        return dict(self._sizes)

    @override
    def row(self, pack: str) -> PackRow:
        return marked(self.bucket.row(pack, self._sizes[pack]), self._marks.values())

    def rows(self) -> Iterable[PackRow]:
        """The rows of all packs. What cannot be read is left out, with a warning."""
        sizes = self.packs()
        if self._near is not None:
            here = self._near.packs()
            alike = [pack for pack, num_bytes in sizes.items() if here.get(pack) == num_bytes]
            for pack in [pack for pack in alike if pack not in self._marked]:  # what is there may be unreadable
                with suppress(PackError, FileNotFoundError):
                    row = self._near.row(pack)
                    row.live[:] = True
                    del sizes[pack]
                    yield row
        yield from (marked(row, self._marks.values()) for row in self.bucket.rows(sizes))

    @override
    def find(self, keys: Iterable[str]) -> set[str]:
        with self._lock:
            if self._table is None:
                self._table = LocationTable(self.rows())
        return self._table.find(list(keys))

    @override
    def read(self, pack: str) -> memoryview:
        found = self.bucket.read(pack_name(pack))
        if found is None:
            raise FileNotFoundError(pack)
        return found.data

    @override
    def take(self, records: PackRecords, data: bytes | memoryview) -> None:
        pack = records.row.pack.id
        if pack in self._removed or pack in self._marked:  # marks outlive a pack that is gone
            records, data = part_of(records, np.frombuffer(data, np.uint8), set(records.row.names()))
        self.bucket.send(records.row.pack.id, data)
        with self._lock:
            if self._table is not None:
                self._table.add([records.row])

    # Verifying

    @override
    def damaged(self) -> dict[str, str]:
        """What readers found so, and marked."""
        return LocationTable(self.rows()).damaged() if self._marks else {}

    @override
    def live(self) -> None:
        """None: what its packs hold is there."""

    @override
    def confirmed(self, suspects: Mapping[str, str], unreadable: Iterable[str]) -> dict[str, str]:
        """Those that are whole in no pack. Copies that are damaged are marked: from then on they are misses for all."""
        marks: dict[str, dict[int, str]] = {pack: {} for pack in unreadable if pack not in self._marked}
        whole = set[str]()
        for row in self.rows() if suspects else ():
            rows = {at: key for at, key in enumerate(row.names()) if key in suspects and row.live[at]}
            if not rows:
                continue
            try:
                data = self.read(row.pack.id)
                records = read_pack_bytes(data, row.pack.id)
            except (PackError, FileNotFoundError):
                continue  # verify has named it, or it is gone
            for at, key in rows.items():
                problem = row_problem(records, np.frombuffer(data, np.uint8), at)
                if problem is None:
                    whole.add(key)
                else:
                    marks.setdefault(row.pack.id, {})[at] = problem
        if marks:
            try:
                write_marks(self.bucket, marks)
            except RemoteError as error:
                logger.warning("damaged entries could not be marked for others: %s", error)
        return {key: problem for key, problem in suspects.items() if key not in whole}

    def close(self) -> None:
        """Nothing is open between calls."""
