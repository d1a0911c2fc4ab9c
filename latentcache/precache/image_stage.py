"""The image stage: decode | encode | store, each in its threads.

Threads decode ahead of the main thread, which runs the VAE; a background thread checks, converts and stores results.
Where copies overlap the computation, the next batch is uploaded and launched before the results of the last one are
fetched, so that the device has work while the host copies and checks. On a CPU the main thread stores the results.

Memory is bounded whatever the dataset's size. With T decoding threads, groups of G images (`image_group_size`) and
batches of B, at most `T + G + 5 B` decoded images are alive, of bucket size (3 bytes a pixel): T + G decoded ahead, and
B each in the batch that is formed, in the one that was launched before it, in the two that are stored or wait for it,
and among those that wait for a retry in float32. In addition each decoding thread has its full-size image, and the
writer two packs. Clips come after all images, in batches of one, CLIPS_AHEAD of them decoded ahead: at most 7 are
alive, of 3 bytes for each pixel of each of their frames. Of a clip that is decoded its file and one frame of full size.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain, tee
from typing import Any

import numpy as np
import torch

from latentcache.devices.placement import placed
from latentcache.devices.transfer import Download, transfer_to
from latentcache.errors import ImageRefused
from latentcache.identity import ImageIdentity
from latentcache.models.running import BatchRunner, float32_precision, vae_settings
from latentcache.models.vae import encode_images, keep_output, problems
from latentcache.precache.encodings import Encodings
from latentcache.precache.report import Failure, RunContext, storing_worker, timed
from latentcache.precache.tasks import ImageTask, num_threads
from latentcache.store.entry import DTYPES
from latentcache.types import Entry
from latentcache.utils.concurrency import BackgroundWorker, bounded_map

CLIPS_AHEAD = 2
"""Clips that are decoded while others are encoded: one of 81 frames of 480x832 has 97 MB."""

logger = logging.getLogger("latentcache")


@dataclass(frozen=True, slots=True)
class ImageItem:
    """An image that is ready to be encoded: its pixels, uint8 [H, W, 3]; those of a clip are [frames, H, W, 3]."""

    task: ImageTask
    pixels: np.ndarray


class ImageStage:
    """Encodes images in batches of one bucket. `decode` gives an image's pixels, by default from its dataset."""

    def __init__(self, context: RunContext, decode: Callable[[ImageTask], np.ndarray] | None = None):
        assert isinstance(context.encodings, Encodings)
        self._decode = decode or ImageTask.pixels
        self._context, self._encodings = context, context.encodings
        self._placement = context.encodings.vae
        self._transfer = transfer_to(self._placement.device)
        self._retries: deque[list[tuple[ImageItem, str]]] = deque()
        """Images of a batch with bad outputs, and their problem, from the background thread to the main one."""

    def run(self, batches: Sequence[Sequence[ImageTask]]) -> None:
        """Encode the batches."""
        context, placement, threads = self._context, self._placement, num_threads(self._context.encode)
        with ExitStack() as stack:
            with timed(context.report, "load"):
                vae = stack.enter_context(placed(context.models.vae(placement.dtype), placement.device))
            context.progress.start("encode images", sum(map(len, batches)))
            stack.enter_context(vae_settings(vae, compile=context.encode.compile))
            decoders = ThreadPoolExecutor(threads, "latentcache-decode")
            stack.enter_context(decoders)
            worker = stack.enter_context(storing_worker(placement.device))
            groups = self._all_groups(batches, decoders, threads + self._encodings.image_group_size)
            stack.callback(groups.close)  # cancels the decoding of what still waits
            for items, moments in self._encoded(vae, groups, placement.batch_size, int(self._transfer.overlaps)):
                with timed(context.report, "write"):
                    worker.call(self._store, items, moments)
                context.progress.advance(len(items))
                self._retry(worker)
                if context.is_stopped():
                    break
            with timed(context.report, "write"):
                worker.finish()
            self._retry(worker)
        context.progress.finish()

    # Decoding threads

    def _all_groups(
        self, batches: Sequence[Sequence[ImageTask]], executor: ThreadPoolExecutor, num_ahead: int
    ) -> Generator[Iterator[ImageItem], None, None]:
        """All groups (`_groups`): of all images, then of all clips, each alone."""
        images = [batch for batch in batches if not _is_clip(batch[0])]
        clips = [[task] for batch in batches if _is_clip(batch[0]) for task in batch]
        yield from self._groups(images, executor, num_ahead)
        yield from self._groups(clips, executor, CLIPS_AHEAD)

    def _groups(
        self, batches: Iterable[Sequence[ImageTask]], executor: ThreadPoolExecutor, num_ahead: int
    ) -> Generator[Iterator[ImageItem], None, None]:
        """The batches' images, each when it is decoded, in order."""
        to_decode, to_encode = tee(filter(None, map(self._context.claim, batches)))
        decoded = bounded_map(executor, self._decode, chain.from_iterable(to_decode), num_ahead)
        try:
            for batch in to_encode:
                if self._context.is_stopped():
                    return
                yield self._decoded(decoded, len(batch))
        finally:
            decoded.close()

    def _decoded(self, decoded: Iterator[tuple[ImageTask, Future[np.ndarray]]], num_images: int) -> Iterator[ImageItem]:
        """The next images, without those that are refused."""
        for _ in range(num_images):
            task, future = next(decoded)
            try:
                with timed(self._context.report, "decode"):
                    pixels = future.result()
                yield ImageItem(task, pixels)
            except ImageRefused as refused:
                self._context.fail(task.key, Failure(refused.reason, refused.detail, refused.path))
                self._context.progress.advance(1)
                if self._context.is_stopped():  # the main thread checks only after a batch
                    return

    # Main thread

    def _encoded(
        self, vae: Any, groups: Iterable[Iterable[ImageItem]], batch_size: int, num_ahead: int
    ) -> Iterator[tuple[Sequence[ImageItem], torch.Tensor]]:
        """Batches of images with their moments; images that do not fit into memory are refused."""
        runner: BatchRunner[ImageItem, torch.Tensor] = BatchRunner("vae", batch_size, self._placement.device)
        launch = partial(self._launch, vae)
        return runner.run_ahead(groups, launch, self._fetch, self._context.refuse, num_ahead=num_ahead)

    def _launch(self, vae: Any, items: Sequence[ImageItem]) -> Download:
        with timed(self._context.report, "encode"):
            pixels = self._transfer.host_memory((len(items), *items[0].pixels.shape), torch.uint8)
            np.stack([item.pixels for item in items], out=pixels.numpy())
            encodings = self._encodings
            moments = encode_images(vae, self._transfer.upload(pixels), encodings.family, encodings.facts)
            return self._transfer.download({"moments": moments})

    def _fetch(self, download: Download) -> torch.Tensor:
        with timed(self._context.report, "encode"):
            return download.wait()["moments"]

    def _retry(self, worker: BackgroundWorker) -> None:
        """Encode images with bad outputs again, in float32, one at a time."""
        while self._retries:
            failed = self._retries.popleft()
            # Loaded again, or a copy: a cast does not restore weights that were rounded to half precision.
            with placed(self._context.models.vae(torch.float32), self._placement.device) as vae:
                for item, note in failed:
                    for items, moments in self._encoded(vae, [[item]], batch_size=1, num_ahead=0):
                        worker.call(self._store, items, moments, note)

    # Background thread

    def _store(self, items: Sequence[ImageItem], moments: torch.Tensor, note: str | None = None) -> None:
        """Store a batch. Images with bad outputs wait for a retry in float32, or are failures; `note` is a retry's."""
        context = self._context
        identity = items[0].task.identity
        assert isinstance(identity, ImageIdentity)
        encoding = context.compared or identity.encoding  # one for the batch: see `Shape.group`
        computed_dtype = encoding.compute_dtype if note is None else "float32"
        seeds = [int(item.task.key[:15], 16) for item in items]  # the key depends on the config's seed and the image
        outputs = keep_output(moments, encoding.output, seeds)
        tensors = {name: tensor.to(DTYPES[encoding.store_dtype]) for name, tensor in outputs.items()}
        found = [problems(tensor) for tensor in (moments, *tensors.values())]
        retries = list[tuple[ImageItem, str]]()
        for number, item in enumerate(items):
            task = item.task
            problem = next((names[number] for names in found if names[number]), None)
            if problem is None:
                record = task.record(
                    models={"vae": context.models.origin(context.models.vae_name)},
                    device=str(self._placement.device),
                    computed_dtype=computed_dtype,
                    float32_precision=float32_precision(self._placement.device),
                    compiled=context.encode.compile and note is None,
                    note=note,
                )
                context.store(Entry(record, {name: tensor[number] for name, tensor in tensors.items()}))
                context.report.num_retried_in_float32 += note is not None
            elif computed_dtype == "float32":
                detail = f"the VAE gave {problem}, computed in float32 and stored as {encoding.store_dtype}"
                context.fail(task.key, Failure("bad-output", detail, task.sample.path))
            else:
                reason = f"the VAE gave {problem} in {computed_dtype}: encoded again in float32"
                logger.warning("%s: %s", task.sample.path, reason)
                retries.append((item, reason))
        if retries:
            self._retries.append(retries)


def _is_clip(task: ImageTask) -> bool:
    return task.identity.preparation.geometry.num_frames is not None
