"""The mask stage: masks are read, prepared and stored. No model takes part."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import chain

import torch

from latentcache.dataset.images import decode
from latentcache.dataset.masks import luma, prepare_mask
from latentcache.errors import ImageRefused
from latentcache.identity import digest
from latentcache.precache.plan import MaskTask
from latentcache.precache.report import Failure, RunContext
from latentcache.provenance import Provenance
from latentcache.types import Entry, Record
from latentcache.utils.concurrency import bounded_map


class MaskStage:
    """Makes masks in threads. At most twice as many are in memory as there are threads."""

    def __init__(self, context: RunContext):
        self._context = context

    def run(self, batches: Sequence[Sequence[MaskTask]]) -> int:
        """Make the masks of these batches, and return how many were done."""
        context, num_done = self._context, 0
        num_workers = context.encode.num_workers
        num_threads = (os.cpu_count() or 1) if num_workers == "auto" else num_workers
        context.progress.start("make masks", sum(map(len, batches)))
        with ExitStack() as stack:
            executor = stack.enter_context(ThreadPoolExecutor(num_threads, "latentcache-mask"))
            tasks: Iterable[MaskTask] = chain.from_iterable(filter(None, map(context.claim, batches)))
            masks = stack.enter_context(closing(bounded_map(executor, mask_of, tasks, 2 * num_threads)))
            for task, made in masks:
                try:
                    context.store(Entry(_record(task), {"mask": made.result()}))
                    num_done += 1
                except ImageRefused as refused:
                    context.fail(task.key, Failure(refused.reason, refused.detail, refused.path))
                context.progress.advance(1)
                if context.is_stopped():
                    break
        context.progress.finish()
        return num_done


def mask_of(task: MaskTask) -> torch.Tensor:
    """The mask, uint8 [1, h, w]. Its file's bytes are hashed, so that it fits its key. Raises ImageRefused."""
    data, identity = task.source.read(task.sample), task.identity
    if digest(data) != identity.source:
        raise ImageRefused(task.sample.path, "changed", "the file changed during the run; run precache again")
    pixels = decode(data, task.sample.path, task.images, alpha_only=task.is_alpha)
    values = pixels if task.is_alpha else luma(pixels)
    return torch.from_numpy(prepare_mask(values, identity.preparation.geometry, identity.downscale))


def _record(task: MaskTask) -> Record:
    provenance = Provenance(
        sample_id=task.sample.sample_id,
        source_path=task.sample.path,
        models={},
        device="cpu",
        computed_dtype="uint8",
    )
    return Record(task.key, "mask", task.identity.to_json(), provenance.to_json())
