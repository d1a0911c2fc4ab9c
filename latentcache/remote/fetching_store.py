"""FetchingStore: what stores elsewhere have in common, of a service or in a bucket."""

from __future__ import annotations

import tempfile
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from itertools import islice
from pathlib import Path
from typing import TypeVar

from typing_extensions import override

from latentcache.cache_config import RemoteOptions
from latentcache.errors import RemoteError
from latentcache.remote.fetched import FetchAhead
from latentcache.remote.local_tier import LocalTier
from latentcache.store.base import EntryArrays, OwnedEntry, Store, check_key
from latentcache.store.disk import DiskStore
from latentcache.store.layout import PackRow
from latentcache.store.pack import new_pack_id, write_pack
from latentcache.store.writer import PackWriter
from latentcache.types import Entry
from latentcache.utils.durable_files import typed_errors

SETTLED_READS = 8
"""After so many reads in turn that the local tier served alone, what it gives is remembered."""
_ADD_CHUNK = 1024

T = TypeVar("T")


class FetchingStore(Store):
    """A store elsewhere: entries are fetched when they are read, or before, and kept in the local tier if there is one.

    A subclass says how entries are fetched and packs are sent. The options are those of `cache_config.CacheConfig`.
    """

    url: str

    def __init__(self, *, read_only: bool | None, options: RemoteOptions):
        local = options.get("local")
        # A store that is opened for reading alone leaves nothing on this machine either.
        self.tier = None if local is None or read_only else LocalTier(local, options.get("local_max_bytes"))
        self._ahead = FetchAhead(self._fetch_rows)
        self._num_local = 0
        """Reads in turn that the tier's disk served alone."""

    @abstractmethod
    def check_open(self) -> None:
        """StoreError if it was closed."""

    @abstractmethod
    def check_writable(self) -> None:
        """ReadOnlyError if it was opened for reading, or may not be written."""

    @abstractmethod
    def _fetch_rows(self, keys: Sequence[str]) -> Mapping[str, EntryArrays]:
        """The arrays of these entries, from there. EntryMissingError, EntryDamagedError, RemoteError."""

    @abstractmethod
    def _send(self, path: Path, row: PackRow) -> int:
        """Send the pack that lies at `path`, whose name is its id. Returns how many of its entries are new there."""

    def _known(self, keys: Sequence[str]) -> set[str]:
        """As `find`, for keys that a writer would add: one that is there all the same is only stored twice."""
        return self.find(keys)

    def encode_prompts(self, prompts: Sequence[tuple[str, bool]]) -> list[str] | None:
        """The keys of prompts, pairs of a text and whether it is negative; None where they encode nothing there."""
        return None

    # Writing

    @override
    def writer(self) -> PackWriter:
        self.check_writable()
        return PackWriter(self._upload, nullcontext(), lambda keys: self._known(list(keys)))

    @override
    def add(self, entries: Iterable[Entry]) -> int:
        iterator = iter(entries)
        with self.writer() as writer:
            while chunk := list(islice(iterator, _ADD_CHUNK)):
                present = self.find([entry.record.key for entry in chunk])
                for entry in chunk:
                    if entry.record.key not in present:
                        writer.add(entry)
        return writer.num_added

    def _upload(self, entries: Sequence[OwnedEntry]) -> tuple[int, int]:
        present = self._known([entry.key for entry in entries])
        new = [entry for entry in entries if entry.key not in present]
        if not new:
            return 0, 0
        with ExitStack() as stack:
            with typed_errors(Path(tempfile.gettempdir()), 0):
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="latentcache-"))
            path = Path(folder) / new_pack_id()
            row = write_pack(path, new)
            try:
                return self._send(path, row), row.pack.file_bytes
            except RemoteError as error:
                again = "were encoded and not stored: the next `latentcache precache` encodes them again"
                next_step = f"{error.next_step} The last {len(new)} entries {again}."
                raise RemoteError(self.url, error.detail, next_step, status=error.status, kind=error.kind) from error

    # Reading

    def _local(self, key: str, read: Callable[[DiskStore, str], T]) -> T | None:
        """What `read` gives of an entry in the local tier, or None if it is not there."""
        self.check_open()
        return None if self.tier is None else self.tier.local(check_key(key), read)

    @override
    def rows(self, keys: Sequence[str]) -> list[EntryArrays]:
        self.check_open()
        wanted = Counter(check_key(key) for key in keys)
        found = self._ahead.take(wanted)
        is_local = not found
        if self.tier is not None and len(found) < len(wanted):
            here, from_disk = self.tier.rows([key for key in wanted if key not in found])
            if not from_disk and is_local and len(here) == len(wanted):
                self.tier.seal_soon()
            found |= here
            is_local &= from_disk
        missing = [key for key in wanted if key not in found]
        self._num_local = self._num_local + 1 if is_local and not missing else 0
        if missing:
            found |= self._fetch_rows(missing)
        return [found[key] for key in keys]

    @property
    @override
    def generation(self) -> int | None:
        self.check_open()
        return self.tier.disk.generation if self.tier is not None and self._num_local >= SETTLED_READS else None

    @override
    def prefetch(self, keys: Iterable[str]) -> None:
        self.check_open()
        if self.tier is None:
            self._ahead.start(keys)
        elif self._num_local >= SETTLED_READS:
            self.tier.prefetch(keys)
        else:
            self._ahead.start(self.tier.missing(list(dict.fromkeys(keys))))

    def close(self) -> None:
        """End what is on its way. What the local tier has in memory goes to its disk."""
        self._ahead.close()
        if self.tier is not None:
            self.tier.close()
