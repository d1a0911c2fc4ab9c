"""Host memory that batches are read into, used again and again: fresh memory costs a page fault every 4 KiB."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable

import numpy as np
import torch

from latentcache.devices.transfer import HostMemory
from latentcache.store.base import ALIGNMENT
from latentcache.store.stacking import Empty


class BufferPool:
    """Buffers of one size each, pinned on request, of which batches are made. Any thread may borrow one.

    A buffer returns when no array or tensor shares its memory any more: no view, and none that autograd saved. So who
    has a tensor keeps it valid, and the next batch is written elsewhere: nobody waits for a buffer. At most `num_idle`
    buffers are kept for later.
    """

    def __init__(self, *, pin: bool = False, num_idle: int = 4):
        self.requested_pin = pin
        self._host = HostMemory(pin=pin)
        self.num_allocated = 0
        self._idle: deque[np.ndarray] = deque(maxlen=num_idle)
        self._num_bytes = 0

    def borrow(self, sizes: Iterable[int]) -> Empty:
        """A buffer for arrays of so many bytes each. The result makes these arrays, each on ALIGNMENT bytes."""
        num_bytes = sum([-(-size // ALIGNMENT) * ALIGNMENT for size in sizes])
        # All buffers have the size of the largest batch so far, so that any of them will do for the next one.
        size = self._num_bytes = max(self._num_bytes, num_bytes)
        buffer = self._idle_buffer(size)
        if buffer is None:
            buffer = self._new(size)
        # The arrays refer to this one: numpy passes over arrays whose own base is an array, and this one's is not.
        borrowed = np.frombuffer(buffer.data, np.uint8)
        weakref.finalize(borrowed, self._idle.append, buffer).atexit = False
        start = 0

        def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
            nonlocal start
            array = np.ndarray(shape, dtype, borrowed, start)
            start += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
            return array

        return empty

    def _idle_buffer(self, size: int) -> np.ndarray | None:
        while True:
            try:
                buffer = self._idle.pop()
            except IndexError:
                return None
            if buffer.nbytes >= size:
                return buffer

    def _new(self, size: int) -> np.ndarray:
        self.num_allocated += 1
        return self._host.empty((size,), torch.uint8).numpy()

    @property
    def pin(self) -> bool:
        """Whether new buffers are pinned: as requested, unless pinning failed."""
        return self._host.pin
