"""A whole dataset in memory, on the CPU or on a device, from which batches are gathered by `index_select`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
import torch

from latentcache.devices.placement import free_memory
from latentcache.errors import EntryDamagedError, EntryMissingError, SampleError, StoreError
from latentcache.families.base import MASK
from latentcache.loading.batch import BufferPool
from latentcache.loading.sample import UNREAD, SampleReader, SampleRef, metadata_of
from latentcache.store.base import DTYPES, Description, dtype_name
from latentcache.store.stacking import Empty, fill_padded, mask_of, new_tensor, padded_length, without_lengths
from latentcache.types import Batch, Padding
from latentcache.utils.host_memory import free_host_memory

CHUNK_BYTES = 32 << 20
"""Read at once on the way to a device."""
FREE_SHARE = 0.9
"""The part of the free memory that may be taken. The rest is for what training itself needs next."""

Group = tuple[tuple[tuple[str, tuple[str, tuple[int, ...]]], ...], tuple[tuple[str, Padding], ...]]
"""What entries of one table have in common: name, dtype name and shape of each field, and the rules of those that are
padded, whose shapes lack the length."""


class Table:
    """Entries of one group, on a device. A field is [n, *shape].

    One that is padded is [1 + rows, *rest]: a row of padding, then the rows of all entries. `spans` has the first of an
    entry's and their number, by field and the entry's place in the table.
    """

    def __init__(self, group: Group, descriptions: Sequence[Description], device: torch.device):
        fields, self.padding = group[0], dict(group[1])
        self.tensors: dict[str, torch.Tensor] = {}
        self.spans: dict[str, dict[int, tuple[int, int]]] = {name: {} for name in self.padding}
        self._ends = dict.fromkeys(self.padding, 1)
        for name, (dtype, shape) in fields:
            num_rows = len(descriptions)
            if name in self.padding:
                num_rows = 1 + sum(description[name][1][0] for description in descriptions)
            self.tensors[name] = torch.empty((num_rows, *shape), dtype=DTYPES[dtype], device=device)
        for name, rule in self.padding.items():
            self.tensors[name][0].fill_(rule.value)

    def whole_rows(self, start: int, num: int) -> dict[str, torch.Tensor]:
        """The memory of some entries' fields, but for those that are padded."""
        return {name: tensor[start : start + num] for name, tensor in self.tensors.items() if name not in self.padding}

    def add(self, start: int, read: Batch) -> None:
        """Take entries that were read, from this place on. `whole_rows` may hold their bytes already."""
        for name, value in read.items():
            if name not in self.padding:
                target = self.tensors[name][start : start + len(value)]
                if target.data_ptr() != value.data_ptr():
                    target.copy_(value)
                continue
            for number, tensor in enumerate(value, start):
                first = self._ends[name]
                self._ends[name] = first + len(tensor)
                self.tensors[name][first : first + len(tensor)].copy_(tensor)
                self.spans[name][number] = first, len(tensor)

    def shape(self, name: str, rows: Sequence[int], sample_ids: Sequence[str]) -> tuple[int, ...]:
        """That of a field of a batch."""
        rest = self.tensors[name].shape[1:]
        if name not in self.padding:
            return len(rows), *rest
        lengths = [self.spans[name][row][1] for row in rows]
        return len(rows), padded_length(sample_ids, name, lengths, self.padding[name]), *rest

    def gather(self, rows: Sequence[int], sample_ids: Sequence[str], empty: Empty | None) -> Batch:
        """A batch of these entries, of new memory or that of `empty`."""
        batch: Batch = {}
        for name, tensor in self.tensors.items():
            shape = self.shape(name, rows, sample_ids)
            index = np.array(rows, np.int64)
            if name in self.padding:
                rule, spans = self.padding[name], [self.spans[name][row] for row in rows]
                index = np.empty(shape[:2], np.int64)
                fill_padded(index, [np.arange(first, first + num)[None] for first, num in spans], rule, np.array(0))
                batch[f"{name}{MASK}"] = mask_of([num for _, num in spans], shape[1], rule).to(tensor.device)
            where = torch.from_numpy(index.reshape(-1)).to(tensor.device)
            if empty is None:
                batch[name] = tensor.index_select(0, where).view(shape)
            else:
                batch[name], _ = new_tensor(dtype_name(tensor), shape, empty)
                torch.index_select(tensor, 0, where, out=batch[name].view(len(where), *tensor.shape[1:]))
        return batch


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
        entries: dict[str, SampleRef] = {}
        for ref in refs:
            for key in ref.keys:
                if key not in entries:
                    entries[key] = SampleRef(ref.sample_id, (key,), facts=ref.facts)
        groups: dict[Group, list[tuple[SampleRef, Description]]] = {}
        reader.store.find(entries)  # one look-up for all that are not in memory
        for key, entry in entries.items():
            try:
                found = reader.store.describe(key)
            except (EntryMissingError, EntryDamagedError) as error:
                self._lose(error, [entry])
                continue
            padding = tuple((name, rule) for name, rule in entry.facts.padding if name in found)
            group = tuple(without_lengths(found, dict(padding)).items()), padding
            groups.setdefault(group, []).append((entry, found))
        self.num_bytes = sum(_entry_bytes(found) for members in groups.values() for _, found in members)
        free = free_host_memory() if device.type == "cpu" else free_memory(device)
        if free is not None and self.num_bytes > free * FREE_SHARE:
            raise self._no_room(f"but on {device} {free / 1e9:.3f} GB are free, of which {FREE_SHARE:.0%} may be taken")
        for group, members in groups.items():
            self._load(group, members)

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

    def _load(self, group: Group, members: list[tuple[SampleRef, Description]]) -> None:
        try:
            table = Table(group, [found for _, found in members], self.device)
        except torch.OutOfMemoryError as error:
            raise self._no_room(f"which do not fit into the memory of {self.device}") from error
        step = max(1, CHUNK_BYTES // max(_entry_bytes(found) for _, found in members))
        for start in range(0, len(members), step):
            self._load_chunk(table, start, [entry for entry, _ in members[start : start + step]])

    def _load_chunk(self, table: Table, start: int, entries: list[SampleRef]) -> None:
        while entries:
            rows = table.whole_rows(start, len(entries)) if self.device.type == "cpu" else None
            try:
                read = self._reader.entries(entries, out=rows, pad=False)
            except (EntryMissingError, EntryDamagedError) as error:
                self._lose(error, entries)
                entries = [entry for entry in entries if entry.keys[0] not in self._lost]
                continue
            table.add(start, read)
            for number, entry in enumerate(entries):
                self._places[entry.keys[0]] = table, start + number
                entry.rows = UNREAD  # its arrays would keep packs mapped
            return

    def gather(self, refs: Sequence[SampleRef], *, pool: BufferPool | None = None) -> Batch:
        """The tensors of these samples on `device`, stacked and padded, and their metadata. Shapes must be equal.

        They are written to a buffer of `pool` if `device` is the CPU.
        """
        names = [name for name, _ in refs[0].parts]
        for ref in refs:
            if [name for name, _ in ref.parts] != names:
                pair = f"samples {refs[0].sample_id!r} and {ref.sample_id!r}"
                raise StoreError(f"{pair} have different parts: {names} and {[name for name, _ in ref.parts]}")
        parts = [self._rows(keys, refs) for keys in zip(*[ref.keys for ref in refs], strict=True)]
        sample_ids, empty = [ref.sample_id for ref in refs], None
        if pool is not None and self.device.type == "cpu":
            shapes = [
                (tensor.dtype, table.shape(name, rows, sample_ids))
                for table, rows in parts
                for name, tensor in table.tensors.items()
            ]
            empty = pool.borrow([dtype.itemsize * math.prod(shape) for dtype, shape in shapes])
        batch: Batch = {}
        fields = [None] * (len(parts) - len(names)) + names
        for name, (table, rows) in zip(fields, parts, strict=True):
            found = table.gather(rows, sample_ids, empty)
            batch |= found if name is None else dict(zip([name], found.values(), strict=True))
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


def _entry_bytes(description: Description) -> int:
    return sum(DTYPES[dtype].itemsize * math.prod(shape) for dtype, shape in description.values())
