"""Handling of Ctrl-C and SIGTERM: a run seals finished work before it stops, and restores state before it exits."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

STOPPING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGBREAK") if hasattr(signal, name))
"""The signals that stop a run. SIGBREAK is Ctrl-Break, which only Windows has."""
logger = logging.getLogger("latentcache")


@contextmanager
def handlers_kept(*numbers: int) -> Iterator[None]:
    """Restore the handlers of these signals after the block, whatever code in it sets."""
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            with suppress(TypeError, ValueError):  # the handler was not set from Python, or this is not the main thread
                signal.signal(number, handler)


@contextmanager
def stop_on_signals(stop: threading.Event) -> Iterator[list[int]]:
    """Set `stop` and list the signal on the first Ctrl-C or SIGTERM; raise KeyboardInterrupt on the second one."""
    caught: list[int] = []

    def handle(number: int, frame: object) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)
        stop.set()
        logger.warning("stopping: finishing the work in progress; press Ctrl-C again to stop at once")

    if threading.current_thread() is not threading.main_thread():
        yield caught
        return
    with handlers_kept(*STOPPING):
        for number in STOPPING:
            signal.signal(number, handle)
        yield caught


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Defer Ctrl-C: its handler is called once, at the end of the block. Only the main thread receives it."""
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
