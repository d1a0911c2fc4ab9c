"""Host memory that batches are read into, used again and again: fresh memory costs a page fault every 4 KiB."""

from __future__ import annotations

import math
import weakref
from collections import deque

import torch

from latentcache.devices.transfer import HostMemory
from latentcache.loading.cache import Shapes
from latentcache.store.base import ALIGNMENT


class BufferPool:
    """Buffers of one size each, lent out as tensors. Any thread may lend.

    The rule: a buffer comes back when no tensor shares its memory any more, neither one that was lent nor a view, nor
    what autograd saved of one. So whoever holds a tensor keeps it valid, and the next batch is written elsewhere: a
    buffer that is out is never waited for. At most `num_idle` buffers are kept for later.
    """

    def __init__(self, *, pin: bool = False, num_idle: int = 4):
        self.wanted_pin = pin
        self._host = HostMemory(pin=pin)
        self.num_allocated = 0
        self._idle: deque[torch.Tensor] = deque(maxlen=num_idle)
        self._num_bytes = 0

    def allocate(self, shapes: Shapes) -> dict[str, torch.Tensor]:
        """A contiguous CPU tensor for each field, all in one buffer. They hold whatever was there before."""
        starts, num_bytes = {}, 0
        for name, (dtype, shape) in shapes.items():
            starts[name] = num_bytes
            num_bytes += -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        flat = self._lend(num_bytes)
        tensors = {}
        for name, (dtype, shape) in shapes.items():
            end = starts[name] + math.prod(shape) * dtype.itemsize
            tensors[name] = flat[starts[name] : end].view(dtype).view(shape)
        return tensors

    def _lend(self, num_bytes: int) -> torch.Tensor:
        # All buffers have the size of the largest batch so far, so that any of them will do for the next one.
        size = self._num_bytes = max(self._num_bytes, num_bytes)
        buffer = self._idle_buffer(size)
        if buffer is None:
            buffer = self._new(size)
        lent = buffer.numpy()[:num_bytes]
        # torch.from_numpy holds `lent` until the last tensor on this memory is gone, whoever holds it.
        weakref.finalize(lent, self._idle.append, buffer).atexit = False
        return torch.from_numpy(lent)

    def _idle_buffer(self, size: int) -> torch.Tensor | None:
        while True:
            try:
                buffer = self._idle.pop()
            except IndexError:
                return None
            if buffer.numel() >= size:
                return buffer

    def _new(self, size: int) -> torch.Tensor:
        self.num_allocated += 1
        return self._host.empty((size,), torch.uint8)

    @property
    def pin(self) -> bool:
        """Whether new buffers are pinned: as wanted, unless pinning failed."""
        return self._host.pin

    def clear(self) -> None:
        """Let go of the buffers that are idle."""
        self._idle.clear()
