"""Memory to read into from a disk, used again and again."""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np

from latentcache.utils.host_memory import disk_memory

SLAB_BYTES = 16 << 20
MAX_IDLE_BYTES = 64 << 20
_GRAIN = 1 << 14  # buffers are multiples of it, so that entries of almost equal size can share them


class Slabs:
    """Buffers that start on a page, cut from `disk_memory`. One thread takes them; any thread may drop them.

    A buffer can be taken again when no array shares its memory any more. At most MAX_IDLE_BYTES are kept for that.
    """

    def __init__(self) -> None:
        self._idle: dict[int, list[np.ndarray]] = {}
        self._idle_bytes = 0
        self._slab = np.empty(0, np.uint8)
        self._dropped: deque[np.ndarray] = deque()

    def take(self, num_bytes: int) -> np.ndarray:
        """A flat uint8 array of at least so many bytes. OSError, MemoryError if there is no memory."""
        while self._dropped:
            self._keep(self._dropped.popleft())
        num_bytes = -(-num_bytes // _GRAIN) * _GRAIN
        idle = self._idle.get(num_bytes)
        if idle:
            self._idle_bytes -= num_bytes
            buffer = idle.pop()
        else:
            if self._slab.nbytes < num_bytes:
                self._slab = np.frombuffer(disk_memory(max(SLAB_BYTES, num_bytes)), np.uint8)
            buffer, self._slab = self._slab[:num_bytes], self._slab[num_bytes:]
        # All views refer to this array: numpy passes over arrays whose own base is an array, and this one's is not.
        taken = np.frombuffer(buffer.data, np.uint8)
        weakref.finalize(taken, self._dropped.append, buffer).atexit = False
        return taken

    def _keep(self, buffer: np.ndarray) -> None:
        num_bytes = buffer.nbytes
        if num_bytes > MAX_IDLE_BYTES:
            return
        if self._idle_bytes + num_bytes > MAX_IDLE_BYTES:
            same = self._idle.get(num_bytes, [])  # the next entries may have this size: those of others go first
            self._idle, self._idle_bytes = {num_bytes: same}, num_bytes * len(same)
            if self._idle_bytes + num_bytes > MAX_IDLE_BYTES:
                return
        self._idle.setdefault(num_bytes, []).append(buffer)
        self._idle_bytes += num_bytes
