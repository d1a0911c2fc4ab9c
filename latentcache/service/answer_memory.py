"""The memory that the answers of all clients take together."""

from __future__ import annotations

import threading
import weakref
from collections import deque

from latentcache.errors import RequestRefused


class AnswerBuffers(list[bytes | memoryview]):
    """The bytes of an answer, buffer after buffer."""


class AnswerMemory:
    """Bounds the bytes of the answers that are being made or sent. Any thread may use it."""

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._num_bytes = 0
        # Written without the lock: the collector of garbage may end an answer wherever a thread is.
        self._ended: deque[int] = deque()

    def buffers(self, num_bytes: int) -> AnswerBuffers:
        """An empty answer that counts as so many bytes while it exists. RequestRefused (503) if there is no room."""
        with self._lock:
            while self._ended:
                self._num_bytes -= self._ended.popleft()
            if self._num_bytes + num_bytes > self._max_bytes:
                raise RequestRefused(
                    f"answers of {self._num_bytes:,} bytes are on their way, and this one has {num_bytes:,} more",
                    status=503,
                    met=self._num_bytes + num_bytes,
                    allowed=self._max_bytes,
                    next_step="Retry a little later, or request less at once",
                    retry_after_s=1,
                )
            self._num_bytes += num_bytes
        buffers = AnswerBuffers()
        weakref.finalize(buffers, self._ended.append, num_bytes).atexit = False
        return buffers
