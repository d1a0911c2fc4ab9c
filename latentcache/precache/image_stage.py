"""The image stage: decode | encode | store, each in its threads.

Threads decode ahead of the main thread, which runs the VAE; a background thread checks, converts and stores results.
Where copies overlap the computation, the next batch is uploaded and launched before the results of the last one are
fetched, so that the device never waits for the host. On a CPU the main thread stores the results. Threads that decode
have a lower priority than those that encode.

Memory is bounded whatever the dataset's size. With T decoding threads, groups of G images (`image_group_size`) and
batches of B, at most `T + G + 5 B` decoded images are alive, of bucket size (3 bytes a pixel): T + G decoded ahead, and
B each in the batch that is formed, in the one that was launched before it, in the two that are stored or wait for it,
and among those that wait for a retry in float32. In addition each decoding thread has its full-size image, and the
writer two packs.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from latentcache.dataset.images import decode, prepare
from latentcache.devices.placement import placed
from latentcache.devices.transfer import Download, transfer_to
from latentcache.errors import EncodeError, ImageRefused
from latentcache.identity import digest
from latentcache.models.batching import BatchRunner
from latentcache.models.settings import vae_settings
from latentcache.models.vae import DTYPES, encode_images, keep_output, problems
from latentcache.precache.context import RunContext, storing_worker, timed
from latentcache.precache.failures import Failure
from latentcache.precache.plan import ImageTask
from latentcache.provenance import Provenance
from latentcache.types import Entry, Record
from latentcache.utils.concurrency import BackgroundWorker, bounded_map, lower_priority

logger = logging.getLogger("latentcache")


@dataclass(frozen=True, slots=True)
class ImageItem:
    """An image that is ready to be encoded: its pixels, uint8 [H, W, 3]."""

    task: ImageTask
    pixels: np.ndarray


class ImageStage:
    """Encodes images in batches of one bucket."""

    def __init__(self, context: RunContext):
        self._context = context
        self._placement = context.encodings.vae
        self._transfer = transfer_to(self._placement.device)
        self._retries: deque[tuple[ImageItem, str]] = deque()
        """Images with bad outputs, and their problem, from the background thread to the main one."""

    def run(self, batches: Sequence[Sequence[ImageTask]]) -> tuple[float, int]:
        """Encode the batches, and return how long that took, without loading, and how many pixels were done."""
        context, placement = self._context, self._placement
        with ExitStack() as stack:
            with timed(context.report, "load"):
                vae: Any = stack.enter_context(placed(context.models.vae(placement.dtype), placement.device))
            context.progress.start("encode images", sum(map(len, batches)))
            started = time.monotonic()
            stack.enter_context(vae_settings(vae, compile=context.encode.compile))
            num_pixels = self._encode(vae, batches)
        seconds = time.monotonic() - started
        context.progress.finish()
        return seconds, num_pixels

    def _encode(self, vae: Any, batches: Sequence[Sequence[ImageTask]]) -> int:
        context, num_pixels = self._context, 0
        num_workers = context.encode.num_workers
        num_threads = (os.cpu_count() or 1) if num_workers == "auto" else num_workers
        runner: BatchRunner[ImageItem, torch.Tensor] = BatchRunner(
            "vae", self._placement.batch_size, self._placement.device
        )
        with (
            ThreadPoolExecutor(num_threads, "latentcache-decode", initializer=lower_priority) as executor,
            storing_worker(self._placement.device) as worker,
        ):
            groups = self._groups(batches, executor, num_threads + context.encodings.image_group_size)
            results = runner.run_ahead(
                groups,
                partial(self._launch, vae),
                self._fetch,
                self._out_of_memory,
                num_ahead=int(self._transfer.overlaps),
            )
            try:
                for items, moments in results:
                    with timed(context.report, "write"):
                        worker.call(self._store, items, moments)
                    num_pixels += sum(item.pixels.shape[0] * item.pixels.shape[1] for item in items)
                    context.progress.advance(len(items))
                    self._retry(worker)
                    if context.is_stopped():
                        break
            finally:
                groups.close()  # cancels the decoding of what still waits
            with timed(context.report, "write"):
                worker.finish()
            self._retry(worker)
        return num_pixels

    # Decoding threads

    def _groups(
        self, batches: Iterable[Sequence[ImageTask]], executor: ThreadPoolExecutor, num_ahead: int
    ) -> Generator[Iterator[ImageItem], None, None]:
        """The batches' images, each when it is decoded, in order."""
        batches = list(batches)
        decoded = bounded_map(executor, _decode, (task for batch in batches for task in batch), num_ahead)
        try:
            for batch in batches:
                if self._context.is_stopped():
                    return
                yield self._decoded(decoded, len(batch))
        finally:
            decoded.close()

    def _decoded(self, decoded: Iterator[tuple[ImageTask, Future[np.ndarray]]], num_images: int) -> Iterator[ImageItem]:
        """The next images, without those that are refused."""
        for _ in range(num_images):
            with timed(self._context.report, "decode"):
                task, future = next(decoded)
            try:
                yield ImageItem(task, future.result())
            except ImageRefused as refused:
                self._context.fail(task.key, Failure(refused.reason, refused.detail, refused.path))
                self._context.progress.advance(1)
                if self._context.is_stopped():  # the main thread checks only after a batch
                    return

    # Main thread

    def _launch(self, vae: Any, items: Sequence[ImageItem]) -> Download:
        with timed(self._context.report, "encode"):
            pixels = self._transfer.host_memory((len(items), *items[0].pixels.shape), torch.uint8)
            np.stack([item.pixels for item in items], out=pixels.numpy())
            moments = encode_images(vae, self._transfer.upload(pixels))
            return self._transfer.download({"moments": moments})

    def _fetch(self, download: Download) -> torch.Tensor:
        with timed(self._context.report, "encode"):
            return download.wait()["moments"]

    def _out_of_memory(self, item: ImageItem, error: EncodeError) -> None:
        self._context.refuse(item.task.key, error)

    def _retry(self, worker: BackgroundWorker) -> None:
        """Encode images with bad outputs again, in float32, one at a time."""
        while self._retries:
            item, note = self._retries.popleft()
            # Loaded again, or a copy: a cast does not restore weights that were rounded to half precision.
            with placed(self._context.models.vae(torch.float32), self._placement.device) as vae:
                runner: BatchRunner[ImageItem, torch.Tensor] = BatchRunner("vae", 1, self._placement.device)

                def encode(items: Sequence[ImageItem], vae: torch.nn.Module = vae) -> torch.Tensor:
                    return self._fetch(self._launch(vae, items))

                for items, moments in runner.run([item], encode, self._out_of_memory):
                    worker.call(self._store_retried, items, moments, note)

    # Background thread

    def _store(self, items: Sequence[ImageItem], moments: torch.Tensor) -> None:
        """Store a batch; images with bad outputs wait for a retry in float32, or are failures."""
        computed = self._context.encodings.image.compute_dtype
        for item, outputs, problem in self._finished(items, moments):
            if problem is None:
                self._add(item.task, outputs, computed)
            elif self._placement.dtype == torch.float32:
                self._fail(item.task, problem, computed)
            else:
                note = f"the VAE gave {problem} in {computed}: encoded again in float32"
                logger.warning("%s: %s", item.task.sample.path, note)
                self._retries.append((item, note))

    def _store_retried(self, items: Sequence[ImageItem], moments: torch.Tensor, note: str) -> None:
        for item, outputs, problem in self._finished(items, moments):
            if problem is None:
                self._add(item.task, outputs, "float32", note)
                self._context.report.num_retried_in_float32 += 1
            else:
                self._fail(item.task, problem, "float32")

    def _finished(
        self, items: Sequence[ImageItem], moments: torch.Tensor
    ) -> Iterator[tuple[ImageItem, dict[str, torch.Tensor], str | None]]:
        """Each image with what is stored of its moments, and the problem of these values, if any."""
        encoding = self._context.encodings.image
        seeds = [int(item.task.key[:15], 16) for item in items]  # the key depends on the config's seed and the image
        outputs = keep_output(moments, encoding.output, seeds)
        tensors = {name: tensor.to(DTYPES[encoding.store_dtype]) for name, tensor in outputs.items()}
        found = [problems(tensor) for tensor in (moments, *tensors.values())]
        for number, item in enumerate(items):
            problem = next((names[number] for names in found if names[number]), None)
            yield item, {name: tensor[number] for name, tensor in tensors.items()}, problem

    def _add(
        self, task: ImageTask, outputs: dict[str, torch.Tensor], computed_dtype: str, note: str | None = None
    ) -> None:
        context = self._context
        provenance = Provenance(
            sample_id=task.sample.sample_id,
            source_path=task.sample.path,
            models={"vae": context.models.origin("vae")},
            device=str(self._placement.device),
            computed_dtype=computed_dtype,
            compiled=context.encode.compile and note is None,
            note=note,
        )
        context.store(Entry(Record(task.key, "image", task.identity.to_json(), provenance.to_json()), outputs))

    def _fail(self, task: ImageTask, problem: str, computed_dtype: str) -> None:
        stored = self._context.encodings.image.store_dtype
        detail = f"the VAE gave {problem}, computed in {computed_dtype} and stored as {stored}"
        self._context.fail(task.key, Failure("bad-output", detail, task.sample.path))


def _decode(task: ImageTask) -> np.ndarray:
    """The pixels that the encoder sees. The bytes that are decoded are hashed, so that the entry fits its key."""
    data = task.source.read(task.sample)
    if digest(data) != task.identity.source:
        raise ImageRefused(task.sample.path, "changed", "the file changed during the run; run precache again")
    return prepare(decode(data, task.sample.path, task.images), task.identity.preparation.geometry)
