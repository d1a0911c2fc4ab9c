"""MemoryStore, the CPU tier: entries in memory, gone when the process ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext

from typing_extensions import override

from latentcache.errors import EntryMissingError, StoreError
from latentcache.store.base import Store, StoreStats
from latentcache.store.entry import EntryArrays, OwnedEntry, check_key, record_of
from latentcache.store.writer import Writer
from latentcache.types import Entry


class MemoryStore(Store):
    """A `base.Store` in memory."""

    read_only = False

    def __init__(self) -> None:
        self._entries: dict[str, OwnedEntry] | None = {}

    @property
    def _open(self) -> dict[str, OwnedEntry]:
        if self._entries is None:
            raise StoreError("the store is closed and its entries are gone; make a new one")
        return self._entries

    @override
    def writer(self) -> Writer:
        return Writer(self._seal, nullcontext(), self.find)

    def _seal(self, entries: Sequence[OwnedEntry]) -> tuple[int, int]:
        new = [entry for entry in entries if entry.key not in self._open]
        self._open.update({entry.key: entry for entry in new})
        return len(new), sum(entry.num_bytes for entry in new)

    @override
    def find(self, keys: Iterable[str]) -> set[str]:
        return {key for key in keys if check_key(key) in self._open}

    @override
    def keys(self) -> Iterator[str]:
        return iter(list(self._open))

    def _stored(self, key: str) -> OwnedEntry:
        stored = self._open.get(check_key(key))
        if stored is None:
            raise EntryMissingError(key)
        return stored

    @override
    def get(self, key: str) -> Entry:
        from latentcache.store.batch import own_tensors  # imports torch

        entry = self._stored(key)
        return own_tensors(record_of(key, entry.kind, entry.record), entry.values, entry.ragged)

    @override
    def rows(self, keys: Sequence[str]) -> list[EntryArrays]:
        return [self._stored(key).values for key in keys]

    def prefetch(self, keys: Iterable[str], *, whole_packs: bool = False) -> None:
        """A no-op: everything is in memory."""
        _ = self._open

    @override
    def remove(self, keys: Iterable[str]) -> int:
        return sum([self._open.pop(check_key(key), None) is not None for key in dict.fromkeys(keys)])

    def damaged(self) -> dict[str, str]:
        """Always empty: entries in memory are not verified."""
        return {}

    @override
    def stats(self) -> StoreStats:
        entries = self._open.values()
        return StoreStats(
            num_entries=dict(Counter(entry.kind for entry in entries)),
            num_damaged=0,
            num_packs=0,
            payload_bytes=sum(entry.num_bytes for entry in entries),
            file_bytes=0,
        )

    def close(self) -> None:
        """Drop all entries."""
        self._entries = None
