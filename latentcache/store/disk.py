"""DiskStore: packs, and an index over them."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from functools import lru_cache
from itertools import islice
from pathlib import Path

from latentcache.errors import (
    EntryDamagedError,
    EntryMissingError,
    PackError,
    ReadOnlyError,
    StoreError,
    UnsafeStoreError,
)
from latentcache.store.base import Description, EntryArrays, StoreStats, check_key, new_generation
from latentcache.store.catalog import Catalog
from latentcache.store.direct import IO, MEMORY_SHARE, DirectReader, DirectReads, Io, Read
from latentcache.store.directory import CacheDirectory
from latentcache.store.location import Location
from latentcache.store.lock import locked
from latentcache.store.mapped import MappedEntries, arrays_in
from latentcache.store.pack import Header, check_payload, new_pack_id, read_header, write_pack
from latentcache.store.readahead import ReadAhead, ReadAheadMode, advise
from latentcache.store.stacking import read_batch
from latentcache.store.writer import PackWriter, Sealed
from latentcache.types import Entry, Record
from latentcache.utils.host_memory import host_memory

logger = logging.getLogger("latentcache")

_MAX_HEADERS = 32  # a full pack's header is a few MiB
_MAX_PATHS = 1 << 14
_ADD_CHUNK = 1024  # keys looked up at once by `add`


class DiskStore:
    """A `base.Store` in a directory. Processes and threads may share the directory; forks may share the store.

    `read_only` writes nothing at all, so that a directory without write access can be read. `create=False` requires
    that the cache exists. `io` says whether packs are read through the page cache or, whole entries at a time, past it
    (`direct.Io`). `read_ahead` says when `prefetch` asks the system to bring bytes into the page cache
    (`readahead.ReadAhead`). StoreError, SchemaError, ReadOnlyError as for `CacheDirectory`; StoreError for an unknown
    `io`, and at the first read where the file system cannot do `direct`.

    When a store is opened for writing, a damaged index is rebuilt from the packs, packs that a dead writer sealed are
    added to it, and that writer's half-written files are removed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        read_only: bool = False,
        create: bool = True,
        io: Io = "auto",
        read_ahead: ReadAheadMode = "missing",
    ):
        if io not in IO:
            raise StoreError(f"io is {io!r}; it must be one of {', '.join(IO)}")
        self.read_only = read_only
        self.io: Io = io
        self.directory = CacheDirectory(path, create=create, read_only=read_only)
        self.path = self.directory.path
        catalog = Catalog(self.directory, read_only=read_only)
        self._catalog: Catalog | None = catalog
        self._read_header = lru_cache(_MAX_HEADERS)(read_header)
        self._pack_path = lru_cache(_MAX_PATHS)(self.directory.pack_path)
        self._mapped = MappedEntries(self._pack_path)
        self._read_ahead = ReadAhead(read_ahead)
        # The catalog's version, and the generation that stands for it.
        self._generation: tuple[object, int] = object(), new_generation()
        self._direct = DirectReader(self._pack_path, must=io == "direct")
        self._is_direct: bool | None = False if io == "mapped" else None
        # The pack in which an entry was found good as the disk gave it: what the page cache holds may be better.
        self._good_directly: dict[str, str] = {}

    @classmethod
    @contextmanager
    def opened(cls, store: DiskStore | str | os.PathLike[str]) -> Iterator[DiskStore]:
        """The store itself, or one opened for the block: read-only if the directory cannot be written."""
        if isinstance(store, DiskStore):
            yield store
            return
        path = Path(store).expanduser()
        with cls(path, create=False, read_only=path.exists() and not os.access(path, os.W_OK)) as disk:
            yield disk

    def __enter__(self) -> DiskStore:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def catalog(self) -> Catalog:
        """The index's rows, for `upkeep`. StoreError when the store is closed."""
        self._check_open()
        assert self._catalog is not None
        return self._catalog

    def _check_open(self) -> None:
        if self._catalog is None:
            raise StoreError(f"{self.path}: the store is closed; open it again")

    def lock_shared(self, operation: str = "precache") -> AbstractContextManager[None]:
        """Keep rebuild, prune and compact away while the block runs. StoreBusyError if one of them is running."""
        return self._lock(operation, shared=True)

    def lock_exclusive(self, operation: str) -> AbstractContextManager[None]:
        """Keep all writers away while the block runs. StoreBusyError if there is one."""
        return self._lock(operation, shared=False)

    @contextmanager
    def _lock(self, operation: str, *, shared: bool) -> Iterator[None]:
        if self.read_only:
            raise ReadOnlyError(self.path)
        with locked(self.directory.lock, operation, shared=shared):
            # What was in memory may be older than the lock: nothing is removed or moved from here on.
            self.catalog.reload()
            yield

    def writer(self) -> PackWriter:
        if self.read_only:
            raise ReadOnlyError(self.path)
        # Without reading all rows again: each pack that is sealed asks the index for its keys.
        return PackWriter(self._seal, locked(self.directory.lock, "writing entries", shared=True))

    def add(self, entries: Iterable[Entry]) -> int:
        iterator = iter(entries)
        with self.writer() as writer:
            while chunk := list(islice(iterator, _ADD_CHUNK)):
                present = self._present(entry.record.key for entry in chunk)
                for entry in chunk:
                    if entry.record.key not in present:
                        writer.add(entry)
        return writer.num_added

    def _seal(self, entries: Sequence[Entry]) -> Sealed:
        present = self._present(entry.record.key for entry in entries)
        new = [entry for entry in entries if entry.record.key not in present]
        if not new:
            return Sealed(0, 0)
        header = write_pack(self.directory.new_pack_path(new_pack_id()), new)
        num_added = self.catalog.add_pack(header)
        return Sealed(num_added, header.size.file_bytes)

    def _present(self, keys: Iterable[str]) -> set[str]:
        """Those that the index has now. Memory is not enough: another process may have removed or marked an entry."""
        return self.catalog.refresh(keys)

    def find(self, keys: Iterable[str]) -> set[str]:
        return self.catalog.find(keys)

    def keys(self) -> Iterator[str]:
        return iter(self.catalog.keys())

    def describe(self, key: str) -> Description:
        return dict(self._locate(key).description)

    def get(self, key: str) -> Entry:
        return Entry(self.record(key), {name: tensor[0] for name, tensor in read_batch(self, [key]).items()})

    def record(self, key: str) -> Record:
        location = self._locate(key)
        while True:
            header, problem = self._header(location.pack)
            if header is not None and header.locations.get(key) == location:
                return deepcopy(header.records[key])
            problem = problem or "its pack's header and the index do not agree"
            location = self._moved_or_damaged(key, location, problem)

    def _header(self, pack: str) -> tuple[Header | None, str]:
        """A pack's header, or why there is none: the file is gone or is not what was written."""
        path = self.directory.pack_path(pack)
        try:
            return self._read_header(path), ""
        except FileNotFoundError:
            return None, f"its pack is gone: {path}"
        except (PackError, UnsafeStoreError) as error:
            return None, f"its pack's header cannot be read: {error}"

    @property
    def generation(self) -> int | None:
        if self._catalog is None:  # not by the property `catalog`: a small batch is copied in the time of some calls
            self._check_open()
        # `is not False` here and in `prefetch` saves a call: each small batch needs both.
        if self._is_direct is not False and self._direct_reads() is not None:
            return None
        assert self._catalog is not None
        version, known = self._catalog.version, self._generation
        if known[0] is not version:
            known = self._generation = version, new_generation()
        return known[1]

    def rows(self, keys: Sequence[str]) -> list[EntryArrays]:
        found = self.catalog.look_up(keys)
        for number in found.missing():
            raise self._absent(keys[number])
        direct = self._direct_reads()
        if direct is None:
            return self._mapped.rows(keys, found, self._moved_or_damaged)
        locations = {key: location for key, location in zip(keys, found, strict=True) if location is not None}
        arrays = {key: self._read_directly(key, read, direct) for key, read in direct.begin(locations).items()}
        return [arrays[key] for key in keys]

    def _read_directly(self, key: str, read: Read, direct: DirectReads) -> EntryArrays:
        good, pack = self._good_directly, read.location.pack
        if direct.wait(read) and (good.get(key) == pack or check_payload(read.data, key, read.inside) is None):
            good[key] = pack
            return arrays_in(read.data, read.inside)
        # This finds out what is wrong with the entry, or where it is now.
        return self._mapped.verify(key, read.location, self._moved_or_damaged)

    def _direct_reads(self) -> DirectReads | None:
        """This thread's reads past the page cache; None where packs are read through it."""
        if self._is_direct is None:
            decided = self._decided()  # at the first read: before, there may be no packs
            if decided is not None and self._is_direct is None:  # no thread takes back what another decided
                self._is_direct = decided
        return self._direct.mine() if self._is_direct else None

    def _decided(self) -> bool | None:
        """Whether packs are read past the page cache. None: it cannot be said now."""
        packs = dict(self.catalog.packs)
        num_bytes = sum(size.file_bytes for size in packs.values())
        if not packs:
            return None
        if self.io == "auto" and num_bytes <= MEMORY_SHARE * host_memory():
            return False
        direct = self._direct.mine()
        if direct is None:
            return None if self._direct.may_work else False
        for path in map(self._pack_path, packs):
            try:
                reason = direct.refusal(path)
            except (OSError, StoreError):
                continue  # what is wrong with it is said when an entry of it is read
            if reason is None:
                return True
            if self.io == "direct":
                raise StoreError(f"{path}: cannot be read past the page cache: {reason}. Open it with io='mapped'.")
            logger.info("%s: packs are read through the page cache: %s", self.path, reason)
            return False
        return None

    def prefetch(self, keys: Iterable[str]) -> None:
        if self._catalog is None:
            self._check_open()
        direct = self._direct_reads() if self._is_direct is not False else None
        if direct is not None:
            keys = list(keys)
            found = zip(keys, self.catalog.look_up(keys), strict=True)
            direct.ask({key: location for key, location in found if location is not None})
        elif self._read_ahead.should_prefetch():
            advise(
                (self._pack_path(location.pack), offset, num_bytes)
                for location in filter(None, self.catalog.look_up(list(keys)))
                for offset, num_bytes in zip(location.offsets, location.spec.sizes, strict=True)
            )

    def _locate(self, key: str) -> Location:
        location = self.catalog.locate(check_key(key))
        if location is None:
            raise self._absent(key)
        return location

    def _absent(self, key: str) -> StoreError:
        reason = self.catalog.reason(key)
        return EntryMissingError(key) if reason is None else EntryDamagedError(key, reason)

    def _moved_or_damaged(self, key: str, location: Location, problem: str) -> Location:
        """Another place for the entry if the index now has one; otherwise it is damaged, and marked so."""
        self._mapped.verified.pop(key, None)
        self._good_directly.pop(key, None)
        moved = self.catalog.relocate(key)
        if moved is None:
            self._locate(key)  # raises: it was removed, or found damaged, elsewhere
        elif moved != location:
            return moved
        self.mark_damaged({key: (location, problem)})
        raise EntryDamagedError(key, problem)

    def mark_damaged(self, damaged: Mapping[str, tuple[Location, str]]) -> None:
        """Make entries misses from now on. If that cannot be written it is logged: the caller's error comes first."""
        for key in damaged:
            self._good_directly.pop(key, None)
        # Also where nothing can be written: the entries are verified again, and fail.
        self._mapped.invalidate(damaged)
        self._generation = object(), new_generation()
        try:
            self.catalog.mark(damaged)
        except StoreError as error:
            logger.warning("%s: %d damaged entries could not be marked: %s", self.path, len(damaged), error)

    def release(self, packs: Iterable[str]) -> None:
        """Drop packs that were compacted away."""
        gone = set(packs)
        self._mapped.release(gone)
        self._good_directly = {key: pack for key, pack in list(self._good_directly.items()) if pack not in gone}
        self._generation = object(), new_generation()  # last: nothing that lies in them counts from here on

    def remove(self, keys: Iterable[str]) -> int:
        return self.catalog.remove([check_key(key) for key in dict.fromkeys(keys)])

    def damaged(self) -> dict[str, str]:
        self.catalog.reload()
        return dict(self.catalog.markers)

    def stats(self) -> StoreStats:
        specs, num_damaged = self.catalog.specs()
        num_entries: Counter[str] = Counter()
        for spec, count in specs:
            num_entries[spec.kind] += count
        sizes = self.directory.pack_sizes()
        return StoreStats(
            num_entries=dict(num_entries),
            num_damaged=num_damaged,
            num_packs=len(sizes),
            payload_bytes=sum(count * spec.num_bytes for spec, count in specs),
            file_bytes=sum(sizes.values()),
            index_bytes=self.directory.index_bytes(),
        )

    def close(self) -> None:
        """Release files. Arrays and tensors that were returned stay valid."""
        if self._catalog is not None:
            self._catalog.close()
        self._catalog = None
        self._mapped.close()
        self._good_directly.clear()
        self._direct.close()
        self._read_header.cache_clear()
