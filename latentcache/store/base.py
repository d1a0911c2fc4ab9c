"""What every store promises."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from typing_extensions import Self

from latentcache.errors import StoreError
from latentcache.store.entry import Description, EntryArrays
from latentcache.types import Entry, Record

if TYPE_CHECKING:
    from latentcache.store.writer import Writer


class Report:
    """A dataclass of counts, sizes and reasons."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON, and `ok` where a report says so."""
        fields: dict[str, Any] = asdict(self)  # type: ignore[call-overload]  # each report is a dataclass
        return fields | ({"ok": self.ok} if hasattr(self, "ok") else {})


@dataclass(frozen=True, slots=True)
class StoreStats(Report):
    """Counts and sizes of a store. `payload_bytes` are those of live entries, `file_bytes` those of the packs."""

    num_entries: dict[str, int]
    num_damaged: int
    num_packs: int
    payload_bytes: int
    file_bytes: int


class Closing(Protocol):
    """Something that has files or memory to release."""

    def close(self) -> None:
        """Release them. Using the object afterwards is a StoreError."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class Store(Closing, Protocol):
    """Immutable entries by key. Keys are 64 lower-case hexadecimal digits, anything else is a StoreError.

    EntryMissingError: there is no such entry. EntryDamagedError: its bytes are not those that were stored; it counts
    as absent (`find`) until it is added again.
    """

    read_only: bool

    def writer(self) -> Writer:
        """A context manager that adds entries in the background. ReadOnlyError, StoreBusyError."""

    def add(self, entries: Iterable[Entry]) -> int:
        """Add entries and return how many are new. Durable on return. Entries that are there stay as they are."""
        with self.writer() as writer:
            for entry in entries:
                writer.add(entry)
        return writer.num_added

    def find(self, keys: Iterable[str]) -> set[str]:
        """Find which of the keys have entries."""

    def can_tell(self) -> bool:
        """Whether what `find` does not find is not there. False where packs exist that could not be read."""
        return True

    def get(self, key: str) -> Entry:
        """The entry, with CPU tensors that the caller owns. EntryMissingError, EntryDamagedError."""

    def record(self, key: str) -> Record:
        """What the entry is and how it was made, without its tensors. EntryMissingError, EntryDamagedError."""
        return self.get(key).record

    def describe(self, key: str) -> Description:
        """Each field's dtype name and shape. EntryMissingError, EntryDamagedError."""
        return dict(self.rows([key])[0].description)

    def rows(self, keys: Sequence[str]) -> list[EntryArrays]:
        """The verified arrays of each entry; keys may repeat. EntryMissingError, EntryDamagedError.

        The arrays keep their memory alive by reference, also after the entry was removed or the store was closed.
        `batch.read_batch` makes batches of them.
        """

    def prefetch(self, keys: Iterable[str], *, whole_packs: bool = False) -> None:
        """These entries are read soon: a store that reads from a disk may bring them into memory meanwhile.

        `whole_packs`: so is all that lies in their packs. It waits for nothing, and passes over what is not there.
        """

    def places(self, keys: Sequence[str]) -> tuple[list[str], np.ndarray]:
        """Where entries lie, for who reads them in that order.

        Args:
            keys: The entries' keys.

        Returns:
            Ids of packs, and for each key int64 [n, 2]: the number of its pack in the list (an id may be there twice),
            and its row in the pack; -1 and -1 for an entry that is not there.

        Raises:
            StoreError: The store has no packs.
        """
        raise StoreError(
            f"{type(self).__name__} does not say which packs its entries lie in: use order='random', or pull the "
            "cache to a directory for order='packs'"
        )

    def keys(self) -> Iterator[str]:
        """The keys of all entries that are there now."""

    def remove(self, keys: Iterable[str]) -> int:
        """Remove entries and return how many there were. `upkeep.compact` frees their space."""

    def damaged(self) -> dict[str, str]:
        """Entries known to be damaged, with the reason, until they are added again or removed."""

    def stats(self) -> StoreStats:
        """Counts and sizes."""
