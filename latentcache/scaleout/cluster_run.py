"""The driver of a run on a Ray cluster: tasks decode, encoders encode and seal; how far each batch is, is noted here.

Ray retries nothing by itself: it would go on for ever with an image that kills its process, and could not say which
image it was. So all retries are here. Whose process dies twice while it is decoded or encoded is refused by name.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import (
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)

from latentcache.config import RayConfig
from latentcache.errors import ClusterError, LatentCacheError
from latentcache.precache.encoding_stage import RunContext
from latentcache.precache.report import Failure
from latentcache.precache.tasks import ImageTask, Task
from latentcache.scaleout.messages import EncoderAnswer, Problem, decode_image
from latentcache.scaleout.ray_encoder import without_source

CALLS_AHEAD = 2
"""Batches that an encoder has: the one that it encodes, and the next, whose pixels are brought to it meanwhile."""
MAX_DEATHS = 10
"""Encoders that die one after the other, and none finishes a batch in between: the machines are ill, not the images."""
MAX_LOSSES = 5
"""Times that a batch is decoded again because its pixels were lost: the nodes that did so do not reach the encoders."""
NUM_STRIKES = 2
DEATHS = (WorkerCrashedError, OutOfMemoryError, NodeDiedError, LocalRayletDiedError, ObjectLostError)
"""Of the process that decodes, or of its node."""
POLL_S = 1.0
"""The longest time until `stop` and the time limits are looked at."""
LAST_SEAL_S = 30.0
"""After an error, for the encoders to seal what they have."""

logger = logging.getLogger("latentcache")


@dataclass(slots=True, eq=False)
class RayBatch:
    """A batch of the plan. `pixels` are those of its images that were decoded, by key."""

    tasks: list[Task]
    pixels: dict[str, Any] = field(default_factory=dict)
    num_decoding: int = 0
    num_losses: int = 0
    """Times that the pixels did not reach their encoder."""


@dataclass(slots=True, eq=False)
class ActiveEncoder:
    """An encoder as the driver sees it."""

    actor: Any
    arrival: Any
    """The answer that says where it runs. None once it has come."""
    start: Any
    """The answer that comes when it has identified its models. None once it has come."""
    place: str = "an encoder that has not started"
    calls: deque[tuple[Any, RayBatch | None]] = field(default_factory=deque)
    """Answers to come, in order, and the batch of each; None for a call of `seal`."""
    unsealed: list[RayBatch] = field(default_factory=list)
    bytes_written: int = 0


class ClusterRun:
    """One run. `new_encoder` requests an encoder from the cluster, of which there are `num_encoders` at once, at most.

    `missing` says what the cluster lacks, for the error where nothing can run.
    """

    def __init__(
        self,
        batches: Iterable[Sequence[Task]],
        context: RunContext,
        find: Callable[[Iterable[str]], set[str]],
        settings: RayConfig,
        num_encoders: int,
        new_encoder: Callable[[], Any],
        missing: Callable[[], ClusterError],
    ):
        self._context, self._find, self._settings, self._missing = context, find, settings, missing
        self._num_encoders, self._new_encoder = num_encoders, new_encoder
        self._decode: Any = ray.remote(num_cpus=settings.decode_cpus, num_returns=2, max_retries=0)(decode_image)
        self._todo = deque(RayBatch(list(tasks)) for tasks in batches)
        self._decoding: dict[Any, tuple[RayBatch, ImageTask]] = {}
        """The answers of decoding tasks that are to come."""
        self._ready: deque[RayBatch] = deque()
        self._encoders: list[ActiveEncoder] = []
        self._sources: dict[int, Any] = {}
        self._strikes: Counter[str] = Counter()
        self._sealed: set[str] = set()
        self._num_arrived = self._num_deaths = 0
        self._begun_at = self._active_at = time.monotonic()

    def run(self) -> None:
        """Encode everything. Errors of the encoders are raised here; ClusterError where nothing can run."""
        progress, report = self._context.progress, self._context.report
        progress.start("encode", sum(len(batch.tasks) for batch in self._todo))
        try:
            while self._has_work():
                self._request_encoders()
                self._decode_ahead()
                self._call_encoders()
                self._take(self._answers())
                self._check_time()
        finally:
            self._close()
            report.num_encoded += len(self._sealed)
            progress.finish()

    def _has_work(self) -> bool:
        if self._context.is_stopped():
            self._todo.clear()
            self._ready.clear()
            self._decoding.clear()
        waiting = self._todo or self._ready or self._decoding
        return bool(waiting) or any(each.calls or each.unsealed for each in self._encoders)

    # What is begun

    def _request_encoders(self) -> None:
        waiting = len(self._todo) + len(self._ready) + len(self._decoding)
        while len(self._encoders) < min(self._num_encoders, waiting):
            actor = self._new_encoder()
            self._encoders.append(ActiveEncoder(actor, actor.where.remote(), actor.start.remote()))

    def _decode_ahead(self) -> None:
        """Begin to decode the next batches, so that each encoder has one more than those that it was given."""
        ahead = (CALLS_AHEAD + 1) * self._num_encoders
        batches_decoding = {id(batch) for batch, _ in self._decoding.values()}
        while self._todo and len(batches_decoding) + len(self._ready) < ahead:
            batch = self._todo.popleft()
            images = [task for task in batch.tasks if isinstance(task, ImageTask)]
            for task in images:
                self._begin_decoding(batch, task)
            if images:
                batches_decoding.add(id(batch))
            else:
                self._ready.append(batch)

    def _call_encoders(self) -> None:
        started = [each for each in self._encoders if each.start is None]
        for num_calls in range(CALLS_AHEAD):
            for encoder in started:
                if len(encoder.calls) == num_calls and self._ready:
                    self._call(encoder, self._ready.popleft())
        if not (self._todo or self._ready or self._decoding):
            for encoder in started:
                if encoder.unsealed and not encoder.calls:
                    encoder.calls.append((encoder.actor.seal.remote(), None))

    def _begin_decoding(self, batch: RayBatch, task: ImageTask) -> None:
        if id(task.source) not in self._sources:
            self._sources[id(task.source)] = ray.put(task.source)
        source = self._sources[id(task.source)]
        pixels, problem = self._decode.remote(task.identity, task.sample, source, task.images)
        batch.pixels[task.key] = pixels
        batch.num_decoding += 1
        self._decoding[problem] = (batch, task)

    def _call(self, encoder: ActiveEncoder, batch: RayBatch) -> None:
        tasks = [without_source(task) for task in batch.tasks]
        pixels = [batch.pixels[task.key] for task in batch.tasks if isinstance(task, ImageTask)]
        encoder.calls.append((encoder.actor.encode.remote(tasks, *pixels), batch))

    # What has come

    def _answers(self) -> list[Any]:
        """The answers that have come. Waits for one, but not for long."""
        awaited = list(self._decoding)
        for encoder in self._encoders:
            awaited += [each for each in (encoder.arrival, encoder.start) if each is not None]
            awaited += [encoder.calls[0][0]] if encoder.calls else []
        if not awaited:
            return []
        if not ray.wait(awaited, num_returns=1, timeout=POLL_S, fetch_local=False)[0]:
            return []
        come: list[Any] = ray.wait(awaited, num_returns=len(awaited), timeout=0, fetch_local=False)[0]
        return come

    def _take(self, answers: Iterable[Any]) -> None:
        for answer in answers:
            self._active_at = time.monotonic()
            if answer in self._decoding:
                self._take_pixels(answer)
                continue
            for encoder in list(self._encoders):
                if answer in (encoder.arrival, encoder.start) or (encoder.calls and answer == encoder.calls[0][0]):
                    self._take_answer(encoder, answer)

    def _take_pixels(self, answer: Any) -> None:
        batch, task = self._decoding.pop(answer)
        batch.num_decoding -= 1
        try:
            problem: Problem | None = ray.get(answer)
        except DEATHS as error:
            if self._strike(task, "decoded it", error):
                self._begin_decoding(batch, task)
                return
            problem = None
            batch.tasks.remove(task)
        except RayError as error:
            raise _cause(error) from error
        if problem is not None:
            self._refuse(task, Failure(*problem))
            batch.tasks.remove(task)
        if not batch.num_decoding and batch.tasks:
            self._ready.append(batch)

    def _take_answer(self, encoder: ActiveEncoder, answer: Any) -> None:
        try:
            value = ray.get(answer)
        except RayTaskError as error:
            if not isinstance(error.cause, ObjectLostError):
                raise _cause(error) from error
            self._decode_again(encoder, error.cause)
            return
        except RayError as error:  # also for a long answer that was lost with the encoder's node
            self._bury(encoder, error)
            return
        if answer == encoder.arrival:
            encoder.arrival, encoder.place = None, value
            self._num_arrived += 1
        elif answer == encoder.start:
            encoder.start = None
        else:
            self._take_batch(encoder, value)

    def _take_batch(self, encoder: ActiveEncoder, answer: EncoderAnswer) -> None:
        report, (_, batch) = self._context.report, encoder.calls.popleft()
        self._num_deaths = 0
        for task in () if batch is None else batch.tasks:
            if task.key in answer.problems:
                self._context.fail(task.key, Failure(*answer.problems[task.key]))
        self._sealed |= answer.sealed
        report.bytes_written += answer.bytes_written - encoder.bytes_written
        encoder.bytes_written = answer.bytes_written
        report.num_truncated_captions += answer.num_truncated_captions
        report.num_retried_in_float32 += answer.num_retried_in_float32
        if batch is not None:
            self._context.progress.advance(len(batch.tasks))
            left: list[Task] = [task for task in batch.tasks if task.key not in answer.problems]
            encoder.unsealed.append(RayBatch(left))
        for unsealed in encoder.unsealed:
            unsealed.tasks = [task for task in unsealed.tasks if task.key not in self._sealed]
        encoder.unsealed = [unsealed for unsealed in encoder.unsealed if unsealed.tasks]

    # What was lost

    def _decode_again(self, encoder: ActiveEncoder, error: ObjectLostError) -> None:
        """The pixels of an encoder's next batch were on a node that is gone, or that it does not reach."""
        _, batch = encoder.calls.popleft()
        assert batch is not None  # only pixels are lost
        if batch.num_losses == MAX_LOSSES:
            raise ClusterError(
                encoder.place,
                f"the pixels of a batch were lost {MAX_LOSSES + 1} times on their way there ({_first_line(error)})",
                "All nodes must reach each other at all of Ray's ports; Ray's logs on that machine say more.",
            )
        self._todo.appendleft(RayBatch(batch.tasks, num_losses=batch.num_losses + 1))

    def _bury(self, encoder: ActiveEncoder, error: RayError) -> None:
        """Give the work of a dead encoder to the others: what it had not sealed, and what waited for it.

        What it was encoding is encoded alone from now on, so that one image at most dies with the next.
        """
        self._encoders.remove(encoder)
        with suppress(RayError):
            ray.kill(encoder.actor)  # where only the connection to it was lost
        logger.warning("%s died: %s", encoder.place, _first_line(error))
        self._num_deaths += 1
        if self._num_deaths > max(MAX_DEATHS, 2 * self._num_encoders):
            raise ClusterError(
                encoder.place,
                f"{self._num_deaths} encoders died one after the other, and none finished a batch ({error})",
                "Look into Ray's logs on that machine; memory that runs out is the usual cause.",
            )
        batches = [batch for _, batch in encoder.calls if batch is not None]
        running = batches[0] if encoder.calls and encoder.calls[0][1] is not None else None
        again = [*encoder.unsealed, *batches]
        found = self._find(task.key for batch in again for task in batch.tasks)
        self._sealed |= found
        self._context.progress.advance(-sum(len(batch.tasks) for batch in encoder.unsealed))
        for batch in again:
            left = [task for task in batch.tasks if task.key not in found]
            if batch is running:
                alone = [RayBatch([task]) for task in left if self._strike(task, "encoded it", error)]
                self._todo.extendleft(alone)
            elif left:
                self._todo.append(RayBatch(left))
            self._context.progress.advance(len(batch.tasks) - len(left))

    def _strike(self, task: Task, what: str, error: RayError) -> bool:
        """Note that a process died with this entry, and return whether it is tried again; otherwise it is refused."""
        self._strikes[task.key] += 1
        if self._strikes[task.key] < NUM_STRIKES:
            return True
        path = task.sample.path if isinstance(task, ImageTask) else None
        detail = f"the process that {what} died {NUM_STRIKES} times ({_first_line(error)})"
        self._refuse(task, Failure("crashed", detail, path))
        return False

    def _refuse(self, task: Task, failure: Failure) -> None:
        self._context.fail(task.key, failure)
        self._context.progress.advance(1)

    # Time limits, and the end

    def _check_time(self) -> None:
        """ClusterError where nothing runs, and nothing has come for `wait_s`. An encoder may take its time."""
        now, settings = time.monotonic(), self._settings
        if any(each.arrival is None and (each.start is not None or each.calls) for each in self._encoders):
            self._active_at = now
        too_few = self._num_arrived < min(settings.min_encoders, self._num_encoders)
        if now - (self._begun_at if too_few else self._active_at) > settings.wait_s and self._has_work():
            raise self._missing()

    def _close(self) -> None:
        """End the encoders; where there was an error, they seal what they have."""
        sealing = [each.actor.seal.remote() for each in self._encoders if each.start is None and each.unsealed]
        if sealing:
            ray.wait(sealing, num_returns=len(sealing), timeout=LAST_SEAL_S)
        for encoder in self._encoders:
            with suppress(RayError):
                ray.kill(encoder.actor)


def _cause(error: RayError) -> LatentCacheError:
    """The error of a process of the cluster, as it would be raised here."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, LatentCacheError):
        return cause
    logger.error("%s", error)  # with the traceback of that process
    return ClusterError(
        "a process of the cluster",
        f"failed: {type(cause).__name__}: {_first_line(cause)}",
        "All nodes need latentcache in the same version, and the dataset at the same path; the log has the traceback.",
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
