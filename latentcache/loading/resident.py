"""A whole dataset in memory, on the CPU or on a device, from which batches are gathered by `index_select`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import torch

from latentcache.devices.placement import free_memory
from latentcache.errors import EntryDamagedError, EntryMissingError, SampleError, StoreError
from latentcache.loading.batch import BufferPool
from latentcache.loading.sample import UNREAD, SampleReader, SampleRef, metadata_of
from latentcache.store.base import DTYPES, dtype_name
from latentcache.store.stacking import new_tensor
from latentcache.types import Batch
from latentcache.utils.host_memory import free_host_memory

CHUNK_BYTES = 32 << 20
"""Read at once on the way to a device."""
FREE_SHARE = 0.9
"""The part of the free memory that may be taken. The rest is for what training itself needs next."""

Fields = tuple[tuple[str, tuple[str, tuple[int, ...]]], ...]
"""Name, dtype name and shape of each field of an entry."""
Table = dict[str, torch.Tensor]
"""Entries of one shape: fields [n, *shape]."""


class ResidentEntries:
    """The entries of these samples, each once, in the memory of `device`. `gather` is as that of `SampleReader`.

    Raises StoreError with the figures when they do not fit into the free memory. A sample whose entry is missing or
    damaged is a SampleError here, or with `damaged="skip"` when it is requested.
    """

    def __init__(
        self,
        reader: SampleReader,
        refs: Iterable[SampleRef],
        device: torch.device,
        *,
        damaged: Literal["raise", "skip"] = "raise",
    ):
        self.device = device
        self._reader, self._damaged = reader, damaged
        self._places: dict[str, tuple[Table, int]] = {}
        self._lost: dict[str, SampleError] = {}
        names: dict[str, str] = {}
        for ref in refs:
            for key in ref.keys:
                names.setdefault(key, ref.sample_id)
        by_fields: dict[Fields, list[SampleRef]] = {}
        reader.store.find(names)  # one look-up for all that are not in memory
        for key, sample_id in names.items():
            entry = SampleRef(sample_id, (key,))
            try:
                by_fields.setdefault(tuple(reader.store.describe(key).items()), []).append(entry)
            except (EntryMissingError, EntryDamagedError) as error:
                self._lose(error, [entry])
        self.num_bytes = sum(len(entries) * _entry_bytes(fields) for fields, entries in by_fields.items())
        free = free_host_memory() if device.type == "cpu" else free_memory(device)
        if free is not None and self.num_bytes > free * FREE_SHARE:
            raise self._no_room(f"but on {device} {free / 1e9:.3f} GB are free, of which {FREE_SHARE:.0%} may be taken")
        for fields, entries in by_fields.items():
            self._load(fields, entries)

    def _no_room(self, reason: str) -> StoreError:
        return StoreError(
            f"resident={str(self.device)!r}: the dataset has {self.num_bytes / 1e9:.3f} GB, {reason}: "
            "leave out resident, or train on fewer samples"
        )

    def _lose(self, error: EntryMissingError | EntryDamagedError, entries: Sequence[SampleRef]) -> None:
        """Raise the error as one about the sample, or with `damaged="skip"` keep it for `gather`."""
        named = self._reader.sample_error(error, entries)
        if self._damaged == "raise":
            raise named from error
        self._lost[error.key] = named

    def _load(self, fields: Fields, entries: list[SampleRef]) -> None:
        try:
            table = {
                name: torch.empty((len(entries), *shape), dtype=DTYPES[dtype], device=self.device)
                for name, (dtype, shape) in fields
            }
        except torch.OutOfMemoryError as error:
            raise self._no_room(f"which do not fit into the memory of {self.device}") from error
        step = max(1, CHUNK_BYTES // _entry_bytes(fields))
        for start in range(0, len(entries), step):
            self._load_chunk(table, start, entries[start : start + step])

    def _load_chunk(self, table: Table, start: int, entries: list[SampleRef]) -> None:
        while entries:
            rows = {name: tensor[start : start + len(entries)] for name, tensor in table.items()}
            try:
                read = self._reader.entries(entries, out=rows if self.device.type == "cpu" else None)
            except (EntryMissingError, EntryDamagedError) as error:
                self._lose(error, entries)
                entries = [entry for entry in entries if entry.keys[0] not in self._lost]
                continue
            for name, tensor in read.items():
                if tensor is not rows[name]:
                    rows[name].copy_(tensor)
            for number, entry in enumerate(entries):
                self._places[entry.keys[0]] = table, start + number
                entry.rows = UNREAD  # its arrays would keep packs mapped
            return

    def gather(self, refs: Sequence[SampleRef], *, pool: BufferPool | None = None) -> Batch:
        """The tensors of these samples on `device`, stacked, with their metadata. Their shapes must be equal.

        They are written to a buffer of `pool` if `device` is the CPU.
        """
        parts = [self._rows(keys, refs) for keys in zip(*[ref.keys for ref in refs], strict=True)]
        empty = None
        if pool is not None and self.device.type == "cpu":
            tensors = [tensor for table, _ in parts for tensor in table.values()]
            empty = pool.borrow([tensor[:1].nbytes * len(refs) for tensor in tensors])
        batch: Batch = {}
        for table, rows in parts:
            index = torch.tensor(rows, dtype=torch.int64, device="cpu").to(self.device)
            for name, tensor in table.items():
                if empty is None:
                    batch[name] = tensor.index_select(0, index)
                else:
                    batch[name], _ = new_tensor(dtype_name(tensor), (len(refs), *tensor.shape[1:]), empty)
                    torch.index_select(tensor, 0, index, out=batch[name])
        return batch | metadata_of(*zip(*[(ref.sample_id, ref.caption, ref.layout) for ref in refs], strict=True))

    def prefetch(self, refs: Sequence[SampleRef]) -> None:
        """All is in memory."""

    def _rows(self, keys: Sequence[str], refs: Sequence[SampleRef]) -> tuple[Table, list[int]]:
        for key, ref in zip(keys, refs, strict=True):
            if key in self._lost:
                lost = self._lost[key]
                raise SampleError(ref.sample_id, lost.reason, lost.remedy)
            if self._places[key][0] is not self._places[keys[0]][0]:
                raise StoreError(
                    f"samples {refs[0].sample_id!r} and {ref.sample_id!r} have tensors of different shapes: "
                    "batch them with latentcache.BucketBatchSampler"
                )
        places = [self._places[key] for key in keys]
        return places[0][0], [row for _, row in places]


def _entry_bytes(fields: Fields) -> int:
    return sum(DTYPES[dtype].itemsize * torch.Size(shape).numel() for _, (dtype, shape) in fields)
