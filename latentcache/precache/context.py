"""What the stages of one run share."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from latentcache.config import EncodeConfig
from latentcache.errors import EncodeError
from latentcache.models.model_loader import Models
from latentcache.precache.encodings import Encodings
from latentcache.precache.failures import Fault
from latentcache.precache.report import Report
from latentcache.types import Entry
from latentcache.utils.concurrency import BackgroundWorker
from latentcache.utils.progress import Progress

BATCHES_TO_STORE = 2
"""Batches that wait to be stored, or are being stored."""


@dataclass(frozen=True, slots=True)
class Job:
    """One run while it encodes. `report`, `progress` and `stop` are for the main thread.

    `keep` takes each finished entry, in a background thread; `fault` takes (key, fault), from both threads.
    """

    encode: EncodeConfig
    encodings: Encodings
    models: Models
    keep: Callable[[Entry], None]
    fault: Callable[[str, Fault], None]
    report: Report
    progress: Progress
    stop: threading.Event

    def is_stopped(self) -> bool:
        """Whether to leave the rest to the next run."""
        self.report.interrupted |= self.stop.is_set()
        return self.report.interrupted

    def refuse(self, key: str, error: EncodeError) -> None:
        """One item does not fit into memory alone."""
        self.fault(key, Fault("out-of-memory", str(error)))


def storing_worker(device: torch.device) -> BackgroundWorker:
    """Stores results in the background while `device` encodes; at once, without a thread, where that is the CPU."""
    return BackgroundWorker(BATCHES_TO_STORE, "storing", in_thread=device.type != "cpu")


@contextmanager
def timed(report: Report, stage: str) -> Iterator[None]:
    """Add the time spent inside to the report's stage."""
    started = time.monotonic()
    try:
        yield
    finally:
        report.seconds[stage] = report.seconds.get(stage, 0.0) + time.monotonic() - started
