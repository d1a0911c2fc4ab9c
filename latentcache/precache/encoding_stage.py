"""What the stages of images and texts share: batches are launched ahead, and bad outputs are made again in float32.

The main thread runs the encoders; a background thread checks and stores the results. Where copies overlap the
computation, the next batch is launched before the results of the last one are fetched, so that the device has work
while the host copies and checks. On a CPU the main thread stores the results.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from latentcache.config import EncodeConfig
from latentcache.devices.placement import Placement
from latentcache.devices.transfer import Copies, transfer_to
from latentcache.errors import DeviceError, EncodeError
from latentcache.models.model_loader import Models
from latentcache.models.running import BatchRunner, float32_precision
from latentcache.precache.encodings import TextEncodings
from latentcache.precache.report import Failure, Report
from latentcache.precache.tasks import Task
from latentcache.types import Entry, Record
from latentcache.utils.concurrency import BackgroundWorker
from latentcache.utils.progress import Progress

BATCHES_TO_STORE = 2
"""Batches that wait to be stored, or are being stored."""

logger = logging.getLogger("latentcache")


@dataclass(frozen=True, slots=True)
class RunContext:
    """One run while it encodes.

    The background thread calls `store` with each finished entry; it and the main thread call `fail` with the key of an
    entry that could not be made. Images need `Encodings`.
    """

    encode: EncodeConfig
    encodings: TextEncodings
    models: Models
    store: Callable[[Entry], None]
    fail: Callable[[str, Failure], None]
    report: Report
    progress: Progress
    stop: threading.Event
    claim: Callable[[Sequence[Any]], Sequence[Any]] = lambda batch: batch
    """Called with each batch of tasks before it is begun. Returns those that this process should do."""

    def is_stopped(self) -> bool:
        """Whether the rest is left to the next run."""
        self.report.interrupted |= self.stop.is_set()
        return self.report.interrupted

    def refuse(self, item: Any, error: EncodeError) -> None:
        """Note that the entry of `item.task` does not fit into memory, not even alone."""
        self.fail(item.task.key, Failure("out-of-memory", str(error)))


@dataclass(frozen=True, slots=True)
class Item:
    """An entry that is ready to be encoded: its task, and the pixels of its image or its tokens."""

    task: Any
    data: Any


class EncodingStage(ABC):
    """Encodes tasks of one kind on the device of `placement`. Models always return to where they were."""

    part: ClassVar[str]
    encoder: ClassVar[str]
    """The model in messages."""
    max_retries: ClassVar[int]
    """Entries that wait to be encoded again in float32: the encoder is placed once for so many."""

    def __init__(self, context: RunContext, placement: Placement):
        self._context, self._placement = context, placement
        self._transfer = transfer_to(placement.device)
        self._retries: deque[tuple[Item, str]] = deque()
        """Entries with bad outputs, and their problem, from the background thread to the main one."""

    @abstractmethod
    def _place(self, stack: ExitStack, dtype: torch.dtype) -> Any:
        """The models for `_launch`, on the device until the stack is closed. DeviceError where they do not fit."""

    @abstractmethod
    def _launch(self, models: Any, items: Sequence[Item]) -> Copies:
        """Start a batch. The host does not wait for its results."""

    @abstractmethod
    def _store(self, items: Sequence[Item], outputs: Mapping[str, torch.Tensor], note: str | None = None) -> None:
        """Store a batch; `note` is that of a retry in float32. Runs in the background thread."""

    def _fetch(self, download: Copies) -> Mapping[str, torch.Tensor]:
        return download.wait()

    def _encode(
        self, models: Any, groups: Iterable[Iterable[Item]], waiting: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Encode and store all groups; `waiting` is entered while results wait to be stored."""
        context, placement = self._context, self._placement
        num_ahead = int(self._transfer.overlaps)
        with BackgroundWorker(BATCHES_TO_STORE, "storing", in_thread=placement.device.type != "cpu") as worker:
            for items, outputs in self._batches(models, groups, placement.batch_size, num_ahead):
                with waiting():
                    worker.call(self._store, items, outputs)
                context.progress.advance(len(items))
                if len(self._retries) >= self.max_retries:
                    self._retry(worker)
                if context.is_stopped():
                    break
            with waiting():
                worker.finish()
            self._retry(worker)

    def _batches(
        self, models: Any, groups: Iterable[Iterable[Item]], batch_size: int, num_ahead: int
    ) -> Iterator[tuple[Sequence[Item], Mapping[str, torch.Tensor]]]:
        """Batches with their outputs; entries that do not fit into memory are refused."""
        runner: BatchRunner[Item, Mapping[str, torch.Tensor]]
        runner = BatchRunner(self.part, batch_size, self._placement.device)
        launch = partial(self._launch, models)
        return runner.run_ahead(groups, launch, self._fetch, self._context.refuse, num_ahead=num_ahead)

    def _retry(self, worker: BackgroundWorker) -> None:
        """Encode entries with bad outputs again, in float32, one at a time."""
        if not self._retries:
            return
        try:
            with ExitStack() as stack:
                # Loaded again, or a copy: a cast does not restore weights that were rounded to half precision.
                models = self._place(stack, torch.float32)
                while self._retries:
                    item, note = self._retries.popleft()
                    for items, outputs in self._batches(models, [[item]], 1, 0):
                        worker.call(self._store, items, outputs, note)
        except DeviceError as error:  # it is twice as large: the other entries are encoded all the same
            while self._retries:
                item, note = self._retries.popleft()
                self._context.fail(item.task.key, Failure("out-of-memory", f"{note}, but {error}"))

    def _is_bad(
        self, item: Item, problem: str | None, dtypes: tuple[str, str], named: str, path: str | None = None
    ) -> bool:
        """Whether an output cannot be stored: then its entry waits for a retry in float32, or fails.

        `dtypes` are those in which it was computed, and would be stored. `named` is the entry in messages, `path` that
        of an image.
        """
        if problem is None:
            return False
        if dtypes[0] != "float32":
            reason = f"{self.encoder} gave {problem} in {dtypes[0]}: encoded again in float32"
            logger.warning("%s: %s", named, reason)
            self._retries.append((item, reason))
        else:
            shown = "" if path else f" for {named}"
            detail = f"{self.encoder} gave {problem}{shown}, computed in float32 and stored as {dtypes[1]}"
            self._context.fail(item.task.key, Failure("bad-output", detail, path))
        return True

    def _record(self, item: Item, parts: Iterable[str], computed_dtype: str, note: str | None, **made: Any) -> Record:
        """The record of an entry that these parts of the model made."""
        self._context.report.num_retried_in_float32 += note is not None
        task: Task = item.task
        return task.record(
            models={part: self._context.models.origin(part) for part in parts},
            device=str(self._placement.device),
            computed_dtype=computed_dtype,
            float32_precision=float32_precision(self._placement.device),
            note=note,
            **made,
        )
