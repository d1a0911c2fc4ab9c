"""Ctrl-C and SIGTERM: a run seals what is done before it stops, and state is restored before it is interrupted."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

STOPPING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGBREAK") if hasattr(signal, name))
"""SIGBREAK is Ctrl-Break, which Windows alone has."""
logger = logging.getLogger("latentcache")


@contextmanager
def handlers_kept(*numbers: int) -> Iterator[None]:
    """Put the handlers of these signals back at the end of the block, whatever it or a library in it sets."""
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            with suppress(TypeError, ValueError):  # a handler that was not set from Python; not the main thread
                signal.signal(number, handler)


@contextmanager
def stop_on_signals(stop: threading.Event) -> Iterator[list[int]]:
    """The first Ctrl-C or SIGTERM sets `stop` and is listed; a second Ctrl-C interrupts at once."""
    caught: list[int] = []

    def handle(number: int, frame: object) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)
        stop.set()
        logger.warning("stopping: what is begun is finished first (once more stops at once)")

    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    with handlers_kept(*STOPPING):
        for number in STOPPING:
            signal.signal(number, handle)
        yield caught


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let Ctrl-C wait: its handler is called once, at the end of the block. Only the main thread receives it."""
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
