"""What the stages of one run share: their context, their clock, and how fast the last run was."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from latentcache.config import EncodeConfig
from latentcache.errors import EncodeError
from latentcache.models.model_loader import Models
from latentcache.precache.encodings import Encodings, dtype_name
from latentcache.precache.failures import Failure
from latentcache.precache.plan import Plan
from latentcache.precache.report import Report
from latentcache.types import Entry
from latentcache.utils.concurrency import BackgroundWorker
from latentcache.utils.progress import Progress

BATCHES_TO_STORE = 2
"""Batches that wait to be stored, or are being stored."""


@dataclass(frozen=True, slots=True)
class RunContext:
    """One run while it encodes.

    Only the main thread uses `report`, `progress` and `stop`. The background thread calls `store` with each finished
    entry, and both call `fail` with the key of an entry that could not be made.
    """

    encode: EncodeConfig
    encodings: Encodings
    models: Models
    store: Callable[[Entry], None]
    fail: Callable[[str, Failure], None]
    report: Report
    progress: Progress
    stop: threading.Event

    def is_stopped(self) -> bool:
        """Whether the rest is left to the next run."""
        self.report.interrupted |= self.stop.is_set()
        return self.report.interrupted

    def refuse(self, key: str, error: EncodeError) -> None:
        """Note that the entry does not fit into memory, not even alone."""
        self.fail(key, Failure("out-of-memory", str(error)))


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


def remember_rate(memo: MutableMapping[str, str], encodings: Encodings, kind: str, seconds: float, amount: int) -> None:
    """Note for `estimate_seconds` that `amount` took so long: captions of kind `text`, pixels of kind `image`."""
    if amount and seconds > 0:
        memo[_rate_name(encodings, kind)] = repr(seconds / amount)


def estimate_seconds(memo: MutableMapping[str, str], encodings: Encodings, plan: Plan) -> float | None:
    """Seconds for this shard's misses, at the rate of the last run with these models on this device.

    None without such a run.
    """
    total = 0.0
    for kind, amount in (("text", plan.num_captions_to_encode), ("image", plan.num_pixels_to_encode)):
        rate = memo.get(_rate_name(encodings, kind))
        if amount and rate is None:
            return None
        total += amount * float(rate or 0.0)
    return round(total, 1)


def _rate_name(encodings: Encodings, kind: str) -> str:
    placement = encodings.vae if kind == "image" else encodings.text_encoders
    part = encodings.image.vae if kind == "image" else encodings.text.text_encoder_2
    return f"rate {kind} {placement.device} {dtype_name(placement.dtype)} {part.name}"
