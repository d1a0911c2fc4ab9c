"""The stages of images and of masks. That of images: threads decode ahead of the main thread, which runs the VAE.

Memory is bounded whatever the dataset's size. With T decoding threads, groups of G images (`image_group_size`) and
batches of B, at most `T + G + 5 B` decoded images are alive, of bucket size (3 bytes a pixel): T + G decoded ahead, and
B each in the batch that is formed, in the one that was launched before it, in the two that are stored or wait for it,
and among those that wait for a retry in float32. In addition each decoding thread has its full-size image, and the
writer two packs. Clips come after all images, in batches of one, CLIPS_AHEAD of them decoded ahead: at most 7 are
alive, of 3 bytes for each pixel of each of their frames. Of a clip that is decoded its file and one frame of full size.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from itertools import chain, tee
from typing import Any

import numpy as np
import torch

from latentcache.dataset.images import as_picture
from latentcache.devices.placement import placed
from latentcache.devices.transfer import Copies
from latentcache.errors import ImageRefused
from latentcache.families.base import CONDITION, PICTURE, inference
from latentcache.models.running import pinned_numerics
from latentcache.models.vae import encode_images, first_frames, keep_output, problems
from latentcache.precache.encoding_stage import EncodingStage, Item, RunContext
from latentcache.precache.encodings import Encodings
from latentcache.precache.report import Failure, timed
from latentcache.precache.tasks import Task, num_threads
from latentcache.store.batch import DTYPES
from latentcache.types import Entry
from latentcache.utils.concurrency import bounded_map

CLIPS_AHEAD = 2
"""Clips that are decoded while others are encoded: one of 81 frames of 480x832 has 97 MB."""


class ImageStage(EncodingStage):
    """Encodes images in batches of one bucket."""

    part, encoder, max_retries = "vae", "the VAE", 1

    def __init__(self, context: RunContext):
        assert isinstance(context.encodings, Encodings)
        super().__init__(context, context.encodings.vae)
        self._encodings = context.encodings

    def run(self, batches: Sequence[Sequence[Task]]) -> None:
        """Encode the batches."""
        context, threads = self._context, num_threads(self._context.encode)
        with ExitStack() as stack:
            with timed(context.report, "load"):
                models = self._place(stack, self._placement.dtype)
            context.progress.start("encode images", sum(map(len, batches)))
            decoders = stack.enter_context(ThreadPoolExecutor(threads, "latentcache-decode"))
            groups = self._all_groups(batches, decoders, threads + self._encodings.image_group_size)
            stack.callback(groups.close)  # cancels the decoding of what still waits
            self._encode(models, groups, lambda: timed(context.report, "write"))
        context.progress.finish()

    def _place(self, stack: ExitStack, dtype: torch.dtype) -> Any:
        """The VAE, and the parts that make rows of first frames."""
        models, device = self._context.models, self._placement.device
        parts = models.picture_parts(dtype) if self._encodings.image.picture else {}
        for module in [models.vae(dtype), *parts.values()]:
            if isinstance(module, torch.nn.Module):
                stack.enter_context(placed(module, device))
        return models.vae(dtype), parts

    # Decoding threads

    def _all_groups(
        self, batches: Sequence[Sequence[Task]], executor: ThreadPoolExecutor, num_ahead: int
    ) -> Generator[Iterator[Item], None, None]:
        """All groups (`_groups`): of all images, then of all clips, each alone."""
        images = [batch for batch in batches if not _is_clip(batch[0])]
        clips = [[task] for batch in batches if _is_clip(batch[0]) for task in batch]
        yield from self._groups(images, executor, num_ahead)
        yield from self._groups(clips, executor, CLIPS_AHEAD)

    def _groups(
        self, batches: Iterable[Sequence[Task]], executor: ThreadPoolExecutor, num_ahead: int
    ) -> Generator[Iterator[Item], None, None]:
        """The batches' images, each when it is decoded, in order."""
        to_decode, to_encode = tee(filter(None, map(self._context.claim, batches)))
        decoded = bounded_map(executor, Task.pixels, chain.from_iterable(to_decode), num_ahead)
        try:
            for batch in to_encode:
                if self._context.is_stopped():
                    return
                yield self._decoded(decoded, len(batch))
        finally:
            decoded.close()

    def _decoded(self, decoded: Iterator[tuple[Task, Future[np.ndarray]]], num_images: int) -> Iterator[Item]:
        """The next images, without those that are refused."""
        for _ in range(num_images):
            task, future = next(decoded)
            try:
                with timed(self._context.report, "decode"):
                    pixels = future.result()
                yield Item(task, pixels)
            except ImageRefused as refused:
                self._context.fail(task.key, Failure(refused.reason, refused.detail, refused.path))
                self._context.progress.advance(1)
                if self._context.is_stopped():  # the main thread checks only after a batch
                    return

    # Main thread

    def _launch(self, models: Any, items: Sequence[Item]) -> Copies:
        with timed(self._context.report, "encode"):
            pixels = self._transfer.host_memory((len(items), *items[0].data.shape), torch.uint8)
            np.stack([item.data for item in items], out=pixels.numpy())
            encodings = self._encodings
            given = self._transfer.upload(pixels)
            kept = given[..., 3:] if given.shape[-1] > 3 else None  # of masked images: see `Task.pixels`
            (vae, parts), family, facts = models, encodings.family, encodings.facts
            outputs = {"moments": encode_images(vae, given[..., :3], family, facts, kept=kept)}
            if items[0].task.identity.encoding.condition:
                outputs[CONDITION] = first_frames(vae, given, family, facts)
            if items[0].task.identity.encoding.picture:
                pictures = [as_picture(item.data[0]) for item in items]
                with inference(self._placement.device), pinned_numerics():
                    outputs[PICTURE] = family.encode_pictures(parts, pictures)
            return self._transfer.download(outputs)

    def _fetch(self, download: Copies) -> Mapping[str, torch.Tensor]:
        with timed(self._context.report, "encode"):
            return super()._fetch(download)

    # Background thread

    def _store(self, items: Sequence[Item], outputs: Mapping[str, torch.Tensor], note: str | None = None) -> None:
        context, moments = self._context, outputs["moments"]
        rest = {name: tensor for name, tensor in outputs.items() if name != "moments"}
        encoding = items[0].task.identity.encoding  # one for the batch: see `Shape.group`
        computed_dtype = encoding.compute_dtype if note is None else "float32"
        seeds = [int(item.task.key[:15], 16) for item in items]  # the key depends on the config's seed and the image
        kept = {**keep_output(moments, encoding.output, seeds), **rest}
        tensors = {name: tensor.to(DTYPES[encoding.store_dtype]) for name, tensor in kept.items()}
        found = [problems(tensor) for tensor in (moments, *tensors.values())]
        parts = [context.models.vae_name, *(context.models.picture_names if encoding.picture else ())]
        for number, item in enumerate(items):
            problem = next((names[number] for names in found if names[number]), None)
            path, dtypes = item.task.sample.path, (computed_dtype, encoding.store_dtype)
            if not self._is_bad(item, problem, dtypes, path, path):
                record = self._record(item, parts, computed_dtype, note)
                context.store(Entry(record, {name: tensor[number] for name, tensor in tensors.items()}))


class MaskStage:
    """Makes masks in threads: no model takes part. At most twice as many are in memory as there are threads."""

    def __init__(self, context: RunContext):
        self._context = context

    def run(self, batches: Sequence[Sequence[Task]]) -> None:
        """Make the masks of these batches."""
        context, threads = self._context, num_threads(self._context.encode)
        context.progress.start("make masks", sum(map(len, batches)))
        tasks = chain.from_iterable(filter(None, map(context.claim, batches)))
        with ExitStack() as stack:
            executor = stack.enter_context(ThreadPoolExecutor(threads, "latentcache-mask"))
            for task, made in stack.enter_context(closing(bounded_map(executor, Task.pixels, tasks, 2 * threads))):
                try:
                    record = task.record(models={}, device="cpu", computed_dtype="uint8")
                    context.store(Entry(record, {"mask": torch.from_numpy(made.result())}))
                except ImageRefused as refused:
                    context.fail(task.key, Failure(refused.reason, refused.detail, refused.path))
                context.progress.advance(1)
                if context.is_stopped():
                    break
        context.progress.finish()


def _is_clip(task: Task) -> bool:
    return task.geometry is not None and task.geometry.num_frames is not None
