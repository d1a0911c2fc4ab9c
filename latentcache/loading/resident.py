"""A whole dataset in memory, on the CPU or on a device, from which batches are gathered by `index_select`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

import torch

from latentcache.devices.placement import free_memory
from latentcache.errors import EntryDamagedError, EntryMissingError, SampleError, StoreError
from latentcache.loading.pinned_pool import BufferPool
from latentcache.loading.sample import SampleRef, metadata_of
from latentcache.loading.sample_reader import SampleReader
from latentcache.store.base import DTYPES, dtype_name
from latentcache.store.stacking import new_tensor, read_batch
from latentcache.types import Batch
from latentcache.utils.host_memory import free_host_memory

CHUNK_BYTES = 32 << 20
"""Read at once on the way to a device."""
FREE_SHARE = 0.9
"""The part of the free memory that may be taken. The rest is for what training itself needs next."""

Shape = tuple[tuple[str, str, tuple[int, ...]], ...]
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
        samples: dict[str, SampleRef] = {}
        for ref in refs:
            samples.setdefault(ref.image_key, ref)
            samples.setdefault(ref.text_key, ref)
        shapes = self._shapes(samples)
        self.num_bytes = sum(len(keys) * _entry_bytes(shape) for shape, keys in shapes.items())
        self._check_fit()
        for shape, keys in shapes.items():
            self._load(shape, keys, samples)

    def _shapes(self, samples: Mapping[str, SampleRef]) -> dict[Shape, list[str]]:
        """The keys of the entries of each shape."""
        shapes: dict[Shape, list[str]] = {}
        self._reader.store.find(samples)  # one look-up for all that are not in memory
        for key, ref in samples.items():
            with self._losing(ref):
                described = self._reader.store.describe(key)
                shapes.setdefault(tuple((name, *spec) for name, spec in described.items()), []).append(key)
        return shapes

    @contextmanager
    def _losing(self, ref: SampleRef) -> Iterator[None]:
        """An error about an entry becomes one about the sample, and with `damaged="skip"` is kept for `gather`."""
        try:
            yield
        except (EntryMissingError, EntryDamagedError) as error:
            named = self._reader.sample_error(error, ref.sample_id)
            if self._damaged == "raise":
                raise named from error
            self._lost[error.key] = named

    def _check_fit(self) -> None:
        free = free_host_memory() if self.device.type == "cpu" else free_memory(self.device)
        if free is not None and self.num_bytes > free * FREE_SHARE:
            raise StoreError(
                f"resident={str(self.device)!r}: the dataset has {self.num_bytes / 1e9:.3f} GB, but on {self.device} "
                f"{free / 1e9:.3f} GB are free, of which {FREE_SHARE:.0%} may be taken: leave out resident, "
                "or train on fewer samples"
            )

    def _load(self, shape: Shape, keys: list[str], samples: Mapping[str, SampleRef]) -> None:
        try:
            table = {
                name: torch.empty((len(keys), *size), dtype=DTYPES[dtype], device=self.device)
                for name, dtype, size in shape
            }
        except torch.OutOfMemoryError as error:
            raise StoreError(
                f"resident={str(self.device)!r}: the dataset has {self.num_bytes / 1e9:.3f} GB, which do not fit "
                f"into the memory of {self.device}: leave out resident, or train on fewer samples"
            ) from error
        step = max(1, CHUNK_BYTES // _entry_bytes(shape))
        for start in range(0, len(keys), step):
            self._load_chunk(table, start, keys[start : start + step], samples)

    def _load_chunk(self, table: Table, start: int, keys: list[str], samples: Mapping[str, SampleRef]) -> None:
        while keys:
            rows = {name: tensor[start : start + len(keys)] for name, tensor in table.items()}
            try:
                read = read_batch(self._reader.store, keys, out=rows if self.device.type == "cpu" else None)
            except (EntryMissingError, EntryDamagedError) as error:
                with self._losing(samples[error.key]):
                    raise
                keys = [key for key in keys if key not in self._lost]
                continue
            if self.device.type != "cpu":
                for name, tensor in read.items():
                    rows[name].copy_(tensor)
            self._places |= {key: (table, start + number) for number, key in enumerate(keys)}
            return

    def gather(self, refs: Sequence[SampleRef], *, pool: BufferPool | None = None) -> Batch:
        """The tensors of these samples on `device`, stacked, with their metadata. Their shapes must be equal.

        They are written to a buffer of `pool` if `device` is the CPU.
        """
        parts = [self._rows([ref.image_key for ref in refs], refs), self._rows([ref.text_key for ref in refs], refs)]
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
        return batch | metadata_of(refs)

    def prefetch(self, refs: Iterable[SampleRef]) -> None:
        """All is in memory."""

    def _rows(self, keys: Sequence[str], refs: Sequence[SampleRef]) -> tuple[Table, list[int]]:
        for key, ref in zip(keys, refs, strict=True):
            if key in self._lost:
                lost = self._lost[key]
                raise SampleError(ref.sample_id, lost.reason, lost.remedy)
        places = [self._places[key] for key in keys]
        table = places[0][0]
        for ref, (other, _) in zip(refs, places, strict=True):
            if other is not table:
                raise StoreError(
                    f"samples {refs[0].sample_id!r} and {ref.sample_id!r} have tensors of different shapes: "
                    "batch them with latentcache.BucketBatchSampler"
                )
        return table, [row for _, row in places]


def _entry_bytes(shape: Shape) -> int:
    return sum(DTYPES[dtype].itemsize * torch.Size(size).numel() for _, dtype, size in shape)
