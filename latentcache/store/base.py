"""The contract that every store implements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from typing_extensions import Self

from latentcache.errors import StoreError
from latentcache.identity import key_names
from latentcache.store.entry import Description, EntryArrays
from latentcache.types import Entry, Record

if TYPE_CHECKING:
    from latentcache.store.writer import Writer


class Report:
    """A dataclass of counts, sizes and reasons."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON, plus `ok` if the report has that property."""
        fields: dict[str, Any] = asdict(self)  # type: ignore[call-overload]  # each report is a dataclass
        return fields | ({"ok": self.ok} if hasattr(self, "ok") else {})


@dataclass(frozen=True, slots=True)
class StoreStats(Report):
    """Counts and sizes of a store. `payload_bytes` counts live entries only; `file_bytes` is the size of all packs."""

    num_entries: dict[str, int]
    num_damaged: int
    num_packs: int
    payload_bytes: int
    file_bytes: int


class Closing(Protocol):
    """An object that holds files or memory until it is closed."""

    def close(self) -> None:
        """Release everything that is held. Using the object afterwards raises StoreError."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class Store(Closing, Protocol):
    """Immutable entries by key. A key is 64 lowercase hexadecimal digits; anything else raises StoreError.

    EntryMissingError: there is no such entry. EntryDamagedError: its bytes are not those that were stored; the entry
    counts as missing (`find`) until it is added again.
    """

    read_only: bool

    def writer(self) -> Writer:
        """Return a context manager that adds entries in the background. ReadOnlyError, StoreBusyError."""

    def add(self, entries: Iterable[Entry]) -> int:
        """Add entries durably and return how many were new. Existing entries are left unchanged."""
        with self.writer() as writer:
            for entry in entries:
                writer.add(entry)
        return writer.num_added

    def find(self, keys: Iterable[str]) -> set[str]:
        """The keys that have entries."""

    def has(self, keys: np.ndarray) -> np.ndarray:
        """Which of these keys have entries: bool [n] for uint8 [n, 32]. As text, keys take three times the memory."""
        names = key_names(keys)
        found = self.find(names)
        return np.array([name in found for name in names], np.bool_)

    def can_tell(self) -> bool:
        """Whether a key that `find` leaves out is certainly missing. False if a pack exists that could not be read."""
        return True

    def get(self, key: str) -> Entry:
        """The entry, with CPU tensors that the caller owns. EntryMissingError, EntryDamagedError."""

    def record(self, key: str) -> Record:
        """The entry's identity and provenance, without its tensors. EntryMissingError, EntryDamagedError."""
        return self.get(key).record

    def describe(self, key: str) -> Description:
        """The dtype name and shape of each field. EntryMissingError, EntryDamagedError."""
        return dict(self.rows([key])[0].description)

    def rows(self, keys: Sequence[str]) -> list[EntryArrays]:
        """The verified arrays of each entry; keys may repeat. EntryMissingError, EntryDamagedError.

        The arrays stay readable after the entry is removed or the store is closed. `batch.stack` stacks them.
        """

    def prefetch(self, keys: Iterable[str], *, whole_packs: bool = False) -> None:
        """Hint that these entries are read soon, so that a store can load them in the background.

        `whole_packs` prefetches the whole packs that hold them. Does not block, and ignores missing entries.
        """

    def places(self, keys: np.ndarray) -> tuple[list[str], np.ndarray]:
        """The pack and row of each entry, for callers that read in pack order.

        Args:
            keys: The entries' keys as digests, uint8 [n, 32], as a manifest's columns hold them.

        Returns:
            Pack ids (one may occur twice), and int64 [n, 2]: for each key the index of its pack in that list and its
            row in the pack, or -1 and -1 if the entry is missing.

        Raises:
            StoreError: The store has no packs.
        """
        raise StoreError(
            f"{type(self).__name__} has no packs to read in order: use order='random', or pull the cache to a "
            "directory for order='packs'"
        )

    def keys(self) -> Iterator[str]:
        """The keys of all current entries."""

    def remove(self, keys: Iterable[str]) -> int:
        """Remove entries and return how many existed. `upkeep.compact` frees their space."""

    def damaged(self) -> dict[str, str]:
        """The reason for each entry known to be damaged, until it is added again or removed."""

    def stats(self) -> StoreStats:
        """Current counts and sizes."""
