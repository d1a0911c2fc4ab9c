"""The mask stage: masks are read, prepared and stored. No model takes part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import chain

import torch

from latentcache.errors import ImageRefused
from latentcache.precache.encoding_stage import RunContext
from latentcache.precache.report import Failure
from latentcache.precache.tasks import ImageTask, num_threads
from latentcache.types import Entry
from latentcache.utils.concurrency import bounded_map


class MaskStage:
    """Makes masks in threads. At most twice as many are in memory as there are threads."""

    def __init__(self, context: RunContext):
        self._context = context

    def run(self, batches: Sequence[Sequence[ImageTask]]) -> None:
        """Make the masks of these batches."""
        context, threads = self._context, num_threads(self._context.encode)
        context.progress.start("make masks", sum(map(len, batches)))
        with ExitStack() as stack:
            executor = stack.enter_context(ThreadPoolExecutor(threads, "latentcache-mask"))
            tasks: Iterable[ImageTask] = chain.from_iterable(filter(None, map(context.claim, batches)))
            for task, made in stack.enter_context(closing(bounded_map(executor, ImageTask.pixels, tasks, 2 * threads))):
                try:
                    record = task.record(models={}, device="cpu", computed_dtype="uint8")
                    context.store(Entry(record, {"mask": torch.from_numpy(made.result())}))
                except ImageRefused as refused:
                    context.fail(task.key, Failure(refused.reason, refused.detail, refused.path))
                context.progress.advance(1)
                if context.is_stopped():
                    break
        context.progress.finish()
