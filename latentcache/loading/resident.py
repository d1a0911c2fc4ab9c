"""A whole dataset held in memory, on the CPU or on a device, from which batches are gathered by `index_select`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from latentcache.devices.placement import free_memory
from latentcache.errors import EntryDamagedError, EntryMissingError, SampleError, StoreError
from latentcache.loading.cache import Allocate, LatentCache
from latentcache.loading.sample import Wanted, facts
from latentcache.store.base import DTYPES
from latentcache.store.stacking import read_batch
from latentcache.types import Batch
from latentcache.utils.host_memory import free_host_memory

CHUNK_BYTES = 32 << 20
"""Read at once on the way to a device."""
FREE_SHARE = 0.9
"""The part of the free memory that may be taken. The rest is for what training itself needs next."""

Shape = tuple[tuple[str, str, tuple[int, ...]], ...]
"""Name, dtype name and shape of each field of an entry."""


@dataclass(frozen=True, slots=True)
class _Table:
    """Entries of one shape: fields [n, *shape]."""

    fields: dict[str, torch.Tensor]


class ResidentEntries:
    """The entries of these samples, each once, in the memory of `device`. `gather` is that of `LatentCache`.

    Raises StoreError with the figures when they do not fit into the free memory. A sample whose entry is missing or
    damaged is a SampleError here, or with `damaged="skip"` when it is asked for.
    """

    def __init__(
        self,
        cache: LatentCache,
        wanted: Iterable[Wanted],
        device: torch.device,
        *,
        damaged: Literal["raise", "skip"] = "raise",
    ):
        self.device = device
        self._places: dict[str, tuple[_Table, int]] = {}
        self._lost: dict[str, SampleError] = {}
        samples = self._by_key(wanted)
        shapes = self._shapes(cache, samples, damaged)
        self.num_bytes = sum(len(keys) * _entry_bytes(shape) for shape, keys in shapes.items())
        self._check_fit()
        for shape, keys in shapes.items():
            self._load(cache, shape, keys, samples, damaged)

    @staticmethod
    def _by_key(wanted: Iterable[Wanted]) -> dict[str, Wanted]:
        samples: dict[str, Wanted] = {}
        for item in wanted:
            for key in (item.image_key, item.caption_key):
                samples.setdefault(key, item)
        return samples

    def _shapes(self, cache: LatentCache, samples: Mapping[str, Wanted], damaged: str) -> dict[Shape, list[str]]:
        shapes: dict[Shape, list[str]] = {}
        cache.store.find(samples)  # one look-up for all that are not in memory
        for key, item in samples.items():
            try:
                with cache.naming([item]):
                    described = cache.store.describe(key)
            except SampleError as error:
                self._lose(key, error, damaged)
                continue
            shapes.setdefault(tuple((name, *spec) for name, spec in described.items()), []).append(key)
        return shapes

    def _lose(self, key: str, error: SampleError, damaged: str) -> None:
        if damaged == "raise":
            raise error
        self._lost[key] = error

    def _check_fit(self) -> None:
        free = free_host_memory() if self.device.type == "cpu" else free_memory(self.device)
        if free is not None and self.num_bytes > free * FREE_SHARE:
            raise StoreError(
                f"resident={str(self.device)!r}: the dataset has {self.num_bytes / 1e9:.3f} GB, but on {self.device} "
                f"{free / 1e9:.3f} GB are free, of which {FREE_SHARE:.0%} may be taken: leave out resident, "
                "or train on fewer samples"
            )

    def _load(
        self, cache: LatentCache, shape: Shape, keys: list[str], samples: Mapping[str, Wanted], damaged: str
    ) -> None:
        try:
            table = _Table(
                {
                    name: torch.empty((len(keys), *size), dtype=DTYPES[dtype], device=self.device)
                    for name, dtype, size in shape
                }
            )
        except torch.OutOfMemoryError as error:
            raise StoreError(
                f"resident={str(self.device)!r}: the dataset has {self.num_bytes / 1e9:.3f} GB, which do not fit "
                f"into the memory of {self.device}: leave out resident, or train on fewer samples"
            ) from error
        step = max(1, CHUNK_BYTES // _entry_bytes(shape))
        for start in range(0, len(keys), step):
            self._load_chunk(cache, table, start, keys[start : start + step], samples, damaged)

    def _load_chunk(
        self,
        cache: LatentCache,
        table: _Table,
        start: int,
        keys: list[str],
        samples: Mapping[str, Wanted],
        damaged: str,
    ) -> None:
        while keys:
            rows = {name: tensor[start : start + len(keys)] for name, tensor in table.fields.items()}
            try:
                read = read_batch(cache.store, keys, out=rows if self.device.type == "cpu" else None)
            except (EntryMissingError, EntryDamagedError) as error:
                bad = error.key
                try:
                    with cache.naming([samples[bad]]):
                        raise
                except SampleError as named:
                    self._lose(bad, named, damaged)
                keys = [key for key in keys if key != bad]
                continue
            if self.device.type != "cpu":
                for name, tensor in read.items():
                    rows[name].copy_(tensor)
            self._places |= {key: (table, start + number) for number, key in enumerate(keys)}
            return

    def gather(self, wanted: Sequence[Wanted], *, allocate: Allocate | None = None) -> Batch:
        """The tensors of these samples on `device`, stacked, with their sizes. Their shapes must be equal.

        `allocate` gives the tensors that they are written to, if `device` is the CPU.
        """
        parts = [self._rows([item.image_key for item in wanted], wanted)]
        parts.append(self._rows([item.caption_key for item in wanted], wanted))
        out: Mapping[str, torch.Tensor] = {}
        if allocate is not None and self.device.type == "cpu":
            named = [(name, tensor) for table, _ in parts for name, tensor in table.fields.items()]
            out = allocate({name: (tensor.dtype, (len(wanted), *tensor.shape[1:])) for name, tensor in named})
        batch: Batch = {}
        for table, rows in parts:
            index = torch.tensor(rows, dtype=torch.int64, device="cpu").to(self.device)
            for name, tensor in table.fields.items():
                if name in out:
                    torch.index_select(tensor, 0, index, out=out[name])
                    batch[name] = out[name]
                else:
                    batch[name] = tensor.index_select(0, index)
        return batch | facts(wanted)

    def prefetch(self, wanted: Iterable[Wanted]) -> None:
        """All is in memory."""

    def _rows(self, keys: Sequence[str], wanted: Sequence[Wanted]) -> tuple[_Table, list[int]]:
        for key in keys:
            if key in self._lost:
                first = next(item for item in wanted if key in (item.image_key, item.caption_key))
                lost = self._lost[key]
                raise SampleError(first.sample_id, lost.reason, lost.remedy)
        places = [self._places[key] for key in keys]
        table = places[0][0]
        for item, (other, _) in zip(wanted, places, strict=True):
            if other is not table:
                raise StoreError(
                    f"samples {wanted[0].sample_id!r} and {item.sample_id!r} have tensors of different shapes: "
                    "batch them with latentcache.loading.sampler.BucketBatchSampler"
                )
        return table, [row for _, row in places]


def _entry_bytes(shape: Shape) -> int:
    return sum(DTYPES[dtype].itemsize * torch.Size(size).numel() for _, dtype, size in shape)
