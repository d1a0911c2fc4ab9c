"""BucketStore: the entries of a cache in an object store, read by ranges of packs, or whole packs at a time."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
from typing_extensions import Unpack, override

from latentcache.cache_config import RemoteOptions
from latentcache.errors import EntryDamagedError, EntryMissingError, PackError, ReadOnlyError, RemoteError, StoreError
from latentcache.identity import digest
from latentcache.remote.bucket import Bucket, in_threads
from latentcache.remote.bucket_index import BucketIndex
from latentcache.remote.fetching_store import FetchingStore
from latentcache.remote.http import RETRY_S
from latentcache.store.base import Description, EntryArrays, PacksKept, StoreStats, check_key
from latentcache.store.disk import DiskStore
from latentcache.store.layout import OFFSET_BYTES, Location, Pack, PackRow
from latentcache.store.pack import PackRecords, verified_arrays
from latentcache.store.stacking import stack
from latentcache.types import Entry, Record

LISTED_S = 60.0
"""A writer that looks for the keys of its new entries lists the packs no more often than this."""
ATTEMPTS = 4
"""To read an entry that lies elsewhere each time: its pack was compacted away, or its bytes are damaged."""
WHOLE_SHARE = 0.9
"""Of a pack's entries: where so many are wanted they come by one GET, not by ranges."""
_MAX_RECORDS = 8

Places = Mapping[str, Location]
"""Where entries lie, by key."""

logger = logging.getLogger("latentcache")


class BucketStore(FetchingStore):
    """A `base.Store` in a bucket: the layout of a cache directory without its index. Threads may share it.

    With `local` what the packs say of themselves is kept in that directory, and packs too: whole ones, where there is
    room for all of the cache (`local_max_bytes`) or most of a pack is wanted. Else, and without `local`, entries are
    read by ranges and nothing is kept. Each is compared with its digest; what does not fit is fetched once more, and is
    then damaged: a miss for all readers, if this one may write. `create` makes the cache if there is none. StoreError
    if there is none; RemoteError: the object store does not answer within `retry_s`, or refuses.
    """

    def __init__(
        self,
        bucket: Bucket | str,
        *,
        read_only: bool | None = None,
        create: bool = False,
        **options: Unpack[RemoteOptions],
    ):
        retry_s = options.get("retry_s", RETRY_S)
        self.bucket = bucket if isinstance(bucket, Bucket) else Bucket.open(bucket, retry_s=retry_s)
        self.url, self.read_only, self._is_closed = self.bucket.url, bool(read_only), False
        if not (create and self.read_only):  # what is to be made, and may not, is empty
            self.bucket.check(create=create)
        super().__init__(read_only=read_only, options=options)
        memory = None if self.tier is None else self.tier.path / f"bucket-{digest(self.url.encode())[:16]}"
        self.index = BucketIndex(self.bucket, memory)
        self._read_records = lru_cache(_MAX_RECORDS)(self._records_of)
        self._not_kept: set[str] = set()
        """Packs that cannot be kept whole, because something in them is damaged."""

    @override
    def check_open(self) -> None:
        if self._is_closed:
            raise StoreError(f"{self.url}: the store is closed; open it again")

    @override
    def check_writable(self) -> None:
        self.check_open()
        if self.read_only:
            raise ReadOnlyError(self.url)

    # Writing

    @override
    def _known(self, keys: Sequence[str]) -> set[str]:
        return self.index.find([check_key(key) for key in keys], LISTED_S)

    @override
    def _send(self, path: Path, row: PackRow) -> int:
        self.bucket.send(path.name, path)
        return self.index.add(row)

    @override
    def remove(self, keys: Iterable[str]) -> int:
        wanted = [check_key(key) for key in dict.fromkeys(keys)]
        self.check_writable()
        num_removed = self.index.remove(wanted)
        if self.tier is not None:
            self.tier.forget(wanted)
        return num_removed

    # Looking up

    @override
    def find(self, keys: Iterable[str]) -> set[str]:
        self.check_open()
        return self.index.find([check_key(key) for key in dict.fromkeys(keys)])

    @property
    def keeps_packs(self) -> PacksKept:
        """As `base.PackedStore.keeps_packs`: in the local directory, or in memory."""
        return "process" if self.tier is None else "machine"

    def places(self, keys: Sequence[str]) -> tuple[list[str], np.ndarray]:
        """As `base.PackedStore.places`."""
        self.find(keys)
        return self.index.table.places(keys)

    @override
    def keys(self) -> Iterator[str]:
        self.check_open()
        self.index.refresh()
        return iter(self.index.table.keys())

    def _locate(self, keys: Sequence[str]) -> dict[str, Location]:
        places = {}
        for key, place in zip(keys, self.index.look_up([check_key(key) for key in keys]), strict=True):
            if place is None:
                reason = self.index.table.reason(key)
                raise EntryMissingError(key) if reason is None else EntryDamagedError(key, reason)
            places[key] = place
        return places

    @override
    def describe(self, key: str) -> Description:
        if (here := self._local(key, DiskStore.describe)) is not None:
            return here
        group = self._locate([key])[key].group
        return dict(self.rows([key])[0].description if group.ragged else group.description)  # lengths are in the pack

    @override
    def record(self, key: str) -> Record:
        if (here := self._local(key, DiskStore.record)) is not None:
            return here
        problem = ""
        for _ in range(ATTEMPTS):
            place = self._locate([key])[key]
            try:
                records = self._read_records(place.pack)
                if records.is_at(key, place):
                    return records.record(place.row)
                problem = "its pack has another entry in its place"
            except FileNotFoundError:
                self.index.refresh()
                continue
            except (PackError, ValueError) as error:
                problem = str(error)
            self._lose({key: (place, problem)})
        raise EntryDamagedError(key, problem or "its pack is gone each time that it is read")

    def _records_of(self, pack: Pack) -> PackRecords:
        return self.bucket.records(pack.id, pack.file_bytes)

    @override
    def get(self, key: str) -> Entry:
        if (here := self._local(key, DiskStore.get)) is not None:
            return here
        record, rows = self.record(key), self.rows([key])
        ragged = self._locate([key])[key].group.ragged
        return Entry(record, {name: tensor[0] for name, tensor in stack([key], rows).items()}, ragged)

    # Reading

    @override
    def _fetch_rows(self, keys: Sequence[str]) -> Mapping[str, EntryArrays]:
        found: dict[str, EntryArrays] = {}
        wanted = list(dict.fromkeys(keys))
        for _ in range(ATTEMPTS):
            groups: dict[str, dict[str, Location]] = {}
            for key, place in self._locate(wanted).items():
                groups.setdefault(place.pack.id, {})[key] = place
            damaged: dict[str, tuple[Location, str]] = {}
            for here, problems in in_threads(self._of_pack, groups.values()):
                found |= here
                damaged |= problems
            if damaged:
                self._lose(damaged)
            wanted = [key for key in wanted if key not in found]
            if not wanted:
                return found
        step = "Run the same again. `latentcache verify` says what is damaged there."
        raise RemoteError(self.url, f"{len(wanted)} entries, as {wanted[0]}, lie elsewhere each time", step)

    def _of_pack(self, places: Places) -> tuple[dict[str, EntryArrays], dict[str, tuple[Location, str]]]:
        """The arrays of entries of one pack, and why others are damaged. Of a pack that is gone there are none."""
        pack = next(iter(places.values())).pack
        found: dict[str, EntryArrays] = {}
        if self._should_keep(pack, places) and self._keep(pack) and self.tier is not None:
            found, _ = self.tier.rows(list(places))
        problems: dict[str, str] = {}
        for _ in range(2):
            rest = {key: place for key, place in places.items() if key not in found}
            if not rest:
                return found, {}
            try:
                data = self._read_ranges(pack, rest)
            except FileNotFoundError:
                self.index.refresh()
                return found, {}
            except PackError as error:
                problems = dict.fromkeys(rest, str(error))
                continue
            read = {key: verified_arrays(data, key, place) for key, place in rest.items()}
            found |= {key: arrays for key, arrays in read.items() if isinstance(arrays, EntryArrays)}
            problems = {key: problem for key, problem in read.items() if isinstance(problem, str)}
        return found, {key: (places[key], problem) for key, problem in problems.items()}

    def _read_ranges(self, pack: Pack, places: Places) -> np.ndarray:
        """Memory in which the bytes of these entries lie as in the pack. What lies between was never touched.

        Where there is little else in the pack, it comes whole.
        """
        if len(places) >= WHOLE_SHARE * pack.num_entries:
            [whole] = self.bucket.ranges(pack.id, [(0, pack.file_bytes)])
            return np.frombuffer(whole, np.uint8)
        data = np.frombuffer(mmap.mmap(-1, max(place.end for place in places.values())), np.uint8)
        self._fill(data, pack, [each for place in places.values() for each in place.ranges()])
        ragged = []
        for place in places.values():
            at = place.row - place.group.first
            for column in place.group.columns:
                if column.offsets_start is not None:
                    first, end = np.ndarray((2,), "<i8", data, column.offsets_start + at * OFFSET_BYTES).tolist()
                    if 0 <= first < end <= column.num_rows:  # else it is damaged, which is found later
                        ragged.append((column.start + first * column.row_bytes, (end - first) * column.row_bytes))
        if ragged:
            self._fill(data, pack, ragged)
        return data

    def _fill(self, data: np.ndarray, pack: Pack, ranges: Sequence[tuple[int, int]]) -> None:
        for (start, num), part in zip(ranges, self.bucket.ranges(pack.id, ranges), strict=True):
            data[start : start + num] = np.frombuffer(part, np.uint8)

    def _should_keep(self, pack: Pack, places: Places) -> bool:
        """Whether to keep the whole pack: it has room, and so has all of the cache or most of it is wanted now."""
        if self.tier is None or pack.id in self._not_kept or not self.tier.has_room(pack.file_bytes):
            return False
        return self.tier.has_room(sum(self.index.sizes.values())) or 2 * len(places) >= pack.num_entries

    def _keep(self, pack: Pack) -> bool:
        """Bring a pack to the local tier. False if it cannot be kept; FileNotFoundError is left to the ranges."""
        assert self.tier is not None
        for _ in range(2):
            try:
                return self.tier.take(pack.id, lambda: self.bucket.chunks(pack.id), pack.file_bytes)
            except FileNotFoundError:
                return False
            except PackError as error:
                logger.warning("%s. It was damaged on its way, or before.", error)
        self._not_kept.add(pack.id)
        return False

    def _lose(self, damaged: Mapping[str, tuple[Location, str]]) -> None:
        """Entries were damaged twice: they are misses from now on, for all readers if this one may write."""
        for key, (place, reason) in damaged.items():
            logger.warning("%s: entry %s in pack %s is damaged: %s", self.url, key, place.pack.id, reason)
        self._read_records.cache_clear()
        try:
            self.index.mark_damaged(damaged.values(), write=not self.read_only)
        except RemoteError as error:
            logger.warning("damaged entries could not be marked for others: %s", error)
            self.index.mark_damaged(damaged.values(), write=False)

    # The whole

    @override
    def damaged(self) -> dict[str, str]:
        self.check_open()
        self.index.refresh()
        return self.index.table.damaged()

    @override
    def stats(self) -> StoreStats:
        damaged, counts = self.damaged(), self.index.table.counts()
        return StoreStats(
            num_entries={kind: num for kind, (num, _) in counts.items()},
            num_damaged=len(damaged),
            num_packs=len(self.index.sizes),
            payload_bytes=sum(num_bytes for _, num_bytes in counts.values()),
            file_bytes=sum(self.index.sizes.values()),
            index_bytes=0,
        )

    def close(self) -> None:
        """End what is on its way."""
        self._is_closed = True
        super().close()
