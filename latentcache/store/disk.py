"""DiskStore: packs, and an index over them."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from latentcache.errors import (
    EntryDamagedError,
    EntryMissingError,
    PackError,
    ReadOnlyError,
    StoreError,
    UnsafeStoreError,
)
from latentcache.files import unreadable
from latentcache.store.base import ARRAY_DTYPES, Source, StoreStats, check_key
from latentcache.store.catalog import Catalog
from latentcache.store.directory import CacheDirectory
from latentcache.store.entries import Found
from latentcache.store.gather import stack
from latentcache.store.location import Location
from latentcache.store.lock import locked
from latentcache.store.pack import Header, check_payload, map_pack, new_pack_id, read_header, write_pack
from latentcache.store.readahead import AskAhead, ReadAhead, ask_for
from latentcache.store.writer import PackWriter, Sealed
from latentcache.types import Entry, Record

logger = logging.getLogger("latentcache")

_MAX_HEADERS = 32  # a full pack's header is a few MiB
_MAX_PATHS = 1 << 14
_ADD_CHUNK = 1024  # keys looked up at once by `add`
MAX_READY = 1 << 17
"""Entries whose place in memory is kept for the next batch, at some 300 bytes each. Beyond it all are forgotten, and
looked up again. That an entry was verified is kept for all that were read, at some 50 bytes each."""


@dataclass(frozen=True, slots=True)
class DiskRows:
    """Keys, and where their entries were when they were looked up: all are there. `packs` has the pack of each.

    They are still there while `version` is the catalog's.
    """

    keys: tuple[str, ...]
    packs: tuple[str, ...]
    locations: Found
    version: object


class _Ready:
    """Where verified entries can be read, by key. It counts as long as `version` is the catalog's.

    What was taken from it counts as long as it is the store's, also when they are forgotten because there are many.
    """

    __slots__ = ("sources", "version")

    def __init__(self, version: object):
        self.version = version
        self.sources: dict[str, Source] = {}


class DiskStore:
    """A `base.Store` in a directory. Processes and threads may share the directory; forks may share the store.

    `read_only` writes nothing at all, so that a directory without write access can be read. `create=False` wants the
    cache to be there. `ask_ahead` says when the system is asked to read a batch's bytes before they are copied
    (`readahead.ReadAhead`). StoreError, SchemaError, ReadOnlyError as for `CacheDirectory`.

    A damaged index is made anew from the packs, packs that a dead writer sealed are taken in, and its half-written
    files are removed, when a store is opened for writing.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        read_only: bool = False,
        create: bool = True,
        ask_ahead: AskAhead = "missing",
    ):
        self.read_only = read_only
        self.directory = CacheDirectory(path, create=create, read_only=read_only)
        self.path = self.directory.path
        self._catalog: Catalog | None = Catalog(self.directory, read_only=read_only)
        self._maps: dict[str, np.ndarray] = {}
        self._read_header = lru_cache(_MAX_HEADERS)(read_header)
        self._pack_path = lru_cache(_MAX_PATHS)(self.directory.pack_path)
        self._read_ahead = ReadAhead(ask_ahead)
        # The pack in which an entry was found good.
        self._verified: dict[str, str] = {}
        self._ready = _Ready(object())

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

    def describe(self, key: str) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        source = self._ready_now().sources.get(key) if isinstance(key, str) else None
        return dict(self._locate(key).description if source is None else source.description)

    def get(self, key: str) -> Entry:
        return Entry(self.record(key), {name: tensor[0] for name, tensor in self.read_batch([key]).items()})

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

    def resolve(self, keys: Sequence[str]) -> DiskRows:
        keys = tuple(keys)
        version = self.catalog.version  # first: what goes after the look-up changes it
        found = self.catalog.look_up(keys)
        for number in found.missing():
            raise self._absent(keys[number])
        return DiskRows(keys, found.packs(), found, version)

    @property
    def version(self) -> object:
        return self._ready_now()

    def asks_ahead(self) -> bool:
        return self._read_ahead.wanted()

    def sources(self, keys: Sequence[str]) -> list[Source]:
        known = self._known_sources(keys)
        return self._sources(self.resolve(keys)) if known is None else known

    def read_batch(
        self, keys: Sequence[str], fields: Sequence[str] | None = None, out: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        sources = self._known_sources(keys)
        if sources is None:
            return self.read_rows(self.resolve(keys), fields, out)
        if self._read_ahead.wanted():
            self._ask(self._read_ahead.to_ask_now(keys))
        return stack(keys, sources, fields, out)

    def read_rows(
        self, rows: DiskRows, fields: Sequence[str] | None = None, out: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        self._check_open()
        if self._read_ahead.wanted():
            self._ask(self._read_ahead.to_ask_now(rows.keys))
        # All are found and verified before the first byte is written to `out`.
        return stack(rows.keys, self._sources(rows), fields, out)

    def _known_sources(self, keys: Sequence[str]) -> list[Source] | None:
        """Without looking anything up. None unless all of them are known."""
        ready = self._ready_now().sources
        try:
            return [ready[key] for key in keys]
        except (KeyError, TypeError):
            return None

    def _sources(self, rows: DiskRows) -> list[Source]:
        ready = self._ready_now().sources if rows.version is self.catalog.version else {}
        sources = []
        for number, (key, pack) in enumerate(zip(rows.keys, rows.packs, strict=True)):
            source = ready.get(key)
            if source is None:
                location = rows.locations[number]
                assert location is not None
                data = self._maps.get(pack) if self._verified.get(key) == pack else None
                source = self._verify(key, location) if data is None else _source(data, location)
                ready[key] = source
            sources.append(source)
        return sources

    def _ready_now(self) -> _Ready:
        """The entries that are there and were verified. What is added to it counts while nothing goes or moves."""
        # Not by the property `catalog`: a small batch is copied in the time that some calls take.
        catalog = self._catalog
        if catalog is None:
            self._check_open()
        ready, version = self._ready, catalog.version
        # A new one each time, so that a thread that fills the old one does no harm.
        if ready.version is not version:
            ready = self._ready = _Ready(version)
        elif len(ready.sources) >= MAX_READY:
            ready.sources = {}
        return ready

    def ask_ahead(self, keys: Iterable[str]) -> None:
        if self._catalog is None:
            self._check_open()
        if self._read_ahead.wanted_lately():
            self._ask(self._read_ahead.to_ask(keys))

    def _ask(self, keys: Sequence[str]) -> None:
        found = filter(None, self.catalog.look_up(keys) if keys else ())
        ask_for(
            (self._pack_path(location.pack), offset, num_bytes)
            for location in found
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

    def _verify(self, key: str, location: Location) -> Source:
        """The entry's bytes, mapped and verified, where they lie now. This is done once for each entry."""
        while True:
            data, problem = self._map(location)
            if data is not None:
                problem = check_payload(data, key, location)
                if problem is None:
                    self._verified[key] = location.pack
                    return _source(data, location)
            location = self._moved_or_damaged(key, location, problem)

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

    def _moved_or_damaged(self, key: str, location: Location, problem: str) -> Location:
        """Another place for the entry if the index now has one; otherwise it is damaged, and marked so."""
        self._verified.pop(key, None)
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
            self._verified.pop(key, None)
        self._ready = _Ready(object())  # also where nothing can be written: they are verified again, and fail
        try:
            self.catalog.mark(damaged)
        except StoreError as error:
            logger.warning("%s: %d damaged entries could not be marked: %s", self.path, len(damaged), error)

    def release(self, packs: Iterable[str]) -> None:
        """Let go of packs that were compacted away."""
        gone = set(packs)
        self._verified = {key: pack for key, pack in list(self._verified.items()) if pack not in gone}
        for pack in gone:
            self._maps.pop(pack, None)
        self._ready = _Ready(object())  # last: nothing that lies in them is taken from here on

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
        """Let go of files. Tensors that were handed out are copies and stay."""
        if self._catalog is not None:
            self._catalog.close()
        self._catalog = None
        self._verified.clear()
        self._ready = _Ready(object())
        self._maps.clear()
        self._read_header.cache_clear()


def _source(data: np.ndarray, location: Location) -> Source:
    fields = zip(location.description.values(), location.offsets, strict=True)
    rows = [np.ndarray((1, *shape), ARRAY_DTYPES[dtype], data, offset) for (dtype, shape), offset in fields]
    return Source(location.description, tuple(rows))
