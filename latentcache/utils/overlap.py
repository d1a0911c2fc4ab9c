"""Threads beside the one that encodes."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

logger = logging.getLogger("latentcache")

NICENESS = 10
"""How much lower the priority of a thread that steps back is: steps of `nice`."""


def step_back() -> None:
    """Let the encoder's threads go before the calling one. Linux alone has priorities of threads."""
    if sys.platform != "linux":
        return
    thread = threading.get_native_id()
    try:
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)
    except OSError as error:  # a sandbox may forbid it, and it is for speed alone
        logger.debug("a decoding thread keeps its priority: %s", error)


class Behind:
    """Calls functions in one thread, in the order in which they were given. Use it in a `with` block.

    With `beside=False` they are called at once, in the caller's thread. That is for encoders on the CPU: there is no
    core left to work behind them, and torch's threads for a second caller would slow down those of the first.
    libgomp counts them all, and when they are more than cores it lets them sleep at each barrier. An error is then the
    caller's at once, and an interrupt can meet a call in its middle.

    At most `size` calls are under way or waiting: `call` blocks until there is room. After a call failed, those behind
    it are not made, and its error comes up at the next `call`, at `finish` or on leaving the block. Leaving waits for
    all calls, on an exception too: what was handed over is seen to.
    """

    def __init__(self, size: int, name: str, *, beside: bool = True):
        if size < 1:
            raise ValueError(f"size is {size}, but at least 1 is needed")
        self._size, self._beside = size, beside
        self._calls: deque[Future[None]] = deque()
        self._has_failed = False
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"latentcache-{name}")

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Hand over a call."""
        if not self._beside:
            function(*arguments)
            return
        while self._calls and (len(self._calls) >= self._size or self._calls[0].done()):
            self._wait()
        self._calls.append(self._executor.submit(self._make, function, arguments))

    def finish(self) -> None:
        """Wait until every call has been made."""
        while self._calls:
            self._wait()

    def _wait(self) -> None:
        """Wait for the first call. An interrupt leaves it, so that its error is not lost."""
        try:
            self._calls[0].result()
        except Exception:
            self._calls.popleft()  # said once
            raise
        self._calls.popleft()

    def _make(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if self._has_failed:
            return
        try:
            function(*arguments)
        except BaseException:
            self._has_failed = True
            raise

    def __enter__(self) -> Behind:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: object) -> None:
        try:
            self.finish()
        except Exception as error:
            if exc is None:
                raise
            # The first error is the one to report; this one must not hide it, nor be lost.
            exc.add_note(f"latentcache: what was encoded before could not be kept either: {error}")
            logger.error("what was encoded before could not be kept: %s", error)
        finally:
            self._executor.shutdown()
