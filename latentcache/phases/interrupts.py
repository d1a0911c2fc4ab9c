"""Ctrl-C while state is being put back: it waits until that is done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def uninterrupted() -> Iterator[None]:
    """SIGINT inside the block is delivered at its end, to whoever handles it. Only the main thread ever gets it."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    caught: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda _, frame: caught.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if caught:
            handler(signal.SIGINT, caught[0])
