"""What the stages of one run share."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from latentcache.config import EncodeConfig
from latentcache.errors import EncodeError
from latentcache.models.model_loader import Models
from latentcache.precache.encodings import Encodings
from latentcache.precache.failures import Fault, Faults
from latentcache.precache.report import Report
from latentcache.store.base import Writer
from latentcache.utils.concurrency import BackgroundWorker
from latentcache.utils.progress import Progress

BATCHES_TO_STORE = 2
"""Batches that wait to be stored, or are being stored."""


@dataclass(frozen=True, slots=True)
class Job:
    """One run while it encodes. `report`, `progress` and `stop` are for the main thread, `writer` for the one behind.

    `faults` takes them from both.
    """

    encode: EncodeConfig
    encodings: Encodings
    models: Models
    writer: Writer
    faults: Faults
    report: Report
    progress: Progress
    stop: threading.Event

    def is_stopped(self) -> bool:
        """Whether to leave the rest to the next run."""
        self.report.interrupted |= self.stop.is_set()
        return self.report.interrupted

    def refuse(self, key: str, error: EncodeError) -> None:
        """One item does not fit into memory alone."""
        self.faults.add(key, Fault("out-of-memory", str(error)))


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
