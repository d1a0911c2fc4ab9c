"""The stages of a run: masks, texts and images. Batches are launched ahead; bad outputs are recomputed in float32.

The main thread runs the encoders. Before it, threads decode images, or one thread tokenizes; after it, a background
thread checks and stores the results. If copies overlap the computation, the next batch is launched before the results
of the last one are fetched, so that the device is busy while the host copies and checks. On a CPU, the main thread
stores the results.

Memory is bounded, whatever the dataset's size. With T decoding threads, groups of G images (`image_group_size`) and
batches of B, at most `T + G + 5 B` decoded images of bucket size (3 bytes a pixel) are alive: T + G decoded ahead, and
B each in the batch being formed, in the one launched before it, in the two being stored or waiting for it, and in the
queue of retries in float32. In addition, each decoding thread holds a full-size image, and the writer two packs. Clips
come after all images, in batches of one, with CLIPS_AHEAD decoded ahead: at most 7 are alive, of 3 bytes per pixel of
each frame. While a clip is decoded, its file and one full-size frame are in memory.

A caption that is tokenized or whose outputs are not stored yet takes some hundred kilobytes. At most GROUPS_AHEAD + 1
groups of tokens and BATCHES_TO_STORE + 2 batches of outputs are in memory, and the tokens of `max_retries` captions and
a few batches more that wait for a retry in float32.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain, tee
from typing import Any, ClassVar

import numpy as np
import torch

from latentcache.config import EncodeConfig
from latentcache.dataset.images import as_picture
from latentcache.devices.placement import Placement, placed
from latentcache.devices.transfer import Copies, transfer_to
from latentcache.errors import DeviceError, EncodeError, ImageRefused
from latentcache.families.base import CONDITION, MASK, PICTURE, inference
from latentcache.models.model_loader import Models
from latentcache.models.running import BatchRunner, encoders_placed, float32_precision, pinned_numerics
from latentcache.models.vae import encode_images, first_frames, keep_output, problem_flags, problem_names
from latentcache.precache.encodings import Encodings, TextEncodings, text_dtypes
from latentcache.precache.report import Failure, Report, timed
from latentcache.precache.tasks import Task, num_threads
from latentcache.store.batch import DTYPES
from latentcache.types import Entry, Record
from latentcache.utils.concurrency import BackgroundWorker, bounded_map
from latentcache.utils.progress import Progress

BATCHES_TO_STORE = 2
"""Batches that are being stored or wait for it."""
CLIPS_AHEAD = 2
"""Clips decoded ahead of the encoder: 81 frames of 480x832 take 97 MB."""
GROUPS_AHEAD = 3
"""Groups of captions tokenized ahead of the encoders."""
_FLAGS = "problem flags"

logger = logging.getLogger("latentcache")


@dataclass(frozen=True, slots=True)
class RunContext:
    """The context of the encoding stages of a run.

    The background thread calls `store` with each finished entry; both it and the main thread call `fail` with the key
    of an entry that could not be made. `encodings` must be `Encodings` for images.
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
    """Called with each batch of tasks before it starts. Returns the tasks that this process should do."""

    def is_stopped(self) -> bool:
        """Whether to stop and leave the rest to the next run."""
        self.report.interrupted |= self.stop.is_set()
        return self.report.interrupted


@dataclass(frozen=True, slots=True)
class Item:
    """An entry that is ready to be encoded: its task, and its pixels or tokens."""

    task: Any
    data: Any


class EncodingStage(ABC):
    """Encodes tasks of one kind on the device of `placement`. Models always return to where they were."""

    part: ClassVar[str]
    encoder: ClassVar[str]
    """The model's name in messages."""
    max_retries: ClassVar[int]
    """Entries to collect before the encoder is placed in float32 to retry them."""

    def __init__(self, context: RunContext, placement: Placement):
        self._context, self._placement = context, placement
        self._transfer = transfer_to(placement.device)
        self._retries: deque[tuple[Item, str]] = deque()
        """Entries with bad outputs and their problems, passed from the background thread to the main thread."""

    @abstractmethod
    def place(self, stack: ExitStack, dtype: torch.dtype | None = None) -> Any:
        """Put the models for `_launch` on the device until the stack closes. Raises DeviceError if they do not fit.

        `dtype` is by default that of the placement.
        """

    @abstractmethod
    def _launch(self, models: Any, items: Sequence[Item]) -> Copies:
        """Start a batch without waiting for its results."""

    @abstractmethod
    def _store(self, items: Sequence[Item], outputs: Mapping[str, torch.Tensor], note: str | None = None) -> None:
        """Store a batch, in the background thread. `note` explains a retry in float32."""

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
        """Yield batches with their outputs. Entries that do not fit into memory even alone are refused."""

        def refuse(item: Item, error: EncodeError) -> None:
            self._context.fail(item.task.key, Failure("out-of-memory", str(error)))

        runner: BatchRunner[Item, Mapping[str, torch.Tensor]]
        runner = BatchRunner(self.part, batch_size, self._placement.device)
        return runner.run_ahead(groups, partial(self._launch, models), self._fetch, refuse, num_ahead=num_ahead)

    def _retry(self, worker: BackgroundWorker) -> None:
        """Retry the entries with bad outputs in float32, one at a time."""
        if not self._retries:
            return
        try:
            with ExitStack() as stack:
                # Reloaded or copied: a cast cannot restore weights that were rounded to half precision.
                models = self.place(stack, torch.float32)
                while self._retries:
                    item, note = self._retries.popleft()
                    for items, outputs in self._batches(models, [[item]], 1, 0):
                        worker.call(self._store, items, outputs, note)
        except DeviceError as error:  # float32 needs twice the memory; the other entries are still encoded
            while self._retries:
                item, note = self._retries.popleft()
                self._context.fail(item.task.key, Failure("out-of-memory", f"{note}, but {error}"))

    def _is_bad(
        self, item: Item, problem: str | None, dtypes: tuple[str, str], named: str, path: str | None = None
    ) -> bool:
        """Whether an output has a problem. If so, its entry is queued for a retry in float32, or fails.

        `dtypes` are the dtypes of computation and storage. `named` names the entry in messages; `path` is an image's.
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
        """The record of an entry made by these parts of the model."""
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


class TextStage(EncodingStage):
    """Encodes captions as the family does.

    Encoders that do not fit on the device run there layer by layer, which the report mentions.
    """

    part, encoder, max_retries = "text_encoder", "the text encoders", 64

    def __init__(self, context: RunContext):
        super().__init__(context, context.encodings.text_encoders)
        self._family = context.encodings.family
        self._parts_ahead: dict[str, Any] = {}
        self._limit = 0
        self._stated_limit: int | None = None
        """Number of tokens that the text encoders read, and the same for records, if below the family's usual limit."""
        self._cut: set[str] = set()
        """Samples counted as truncated. Each counts once, however many variants its caption has."""

    def run(self, batches: Sequence[Sequence[Task]]) -> None:
        """Encode the batches. All tasks of a batch must have the same recipe."""
        context, family = self._context, self._family
        with ExitStack() as stack:
            with timed(context.report, "load"):
                parts = self.place(stack)
                # Separate tokenizers: tokenizing ahead must not change how the encoding's own calls pad and truncate.
                self._parts_ahead = {**parts, **context.models.tokenizers_ahead()}
            context.progress.start("encode captions", sum(map(len, batches)))
            stack.enter_context(timed(context.report, "text"))
            executor = stack.enter_context(ThreadPoolExecutor(1, "latentcache-tokenize"))
            settings = context.encodings.text.settings
            self._limit = family.token_limit(parts, settings)
            self._stated_limit = self._limit if self._limit < family.token_limit({}, settings) else None
            self._encode(parts, self._groups(batches, executor), nullcontext)
        context.progress.finish()

    def place(self, stack: ExitStack, dtype: torch.dtype | None = None) -> dict[str, Any]:
        """Place the text encoders, and return them with the tokenizers."""
        dtype = dtype or self._placement.dtype
        encoders = self._context.models.text_encoders(dtype)
        notes = stack.enter_context(encoders_placed(encoders, self._placement.device))
        ending = "" if dtype == self._placement.dtype else " in float32"
        self._context.report.placement |= {f"{name}{ending}": note for name, note in notes.items()}
        return {**encoders, **self._context.models.tokenizers()}

    def _groups(self, batches: Iterable[Sequence[Task]], executor: ThreadPoolExecutor) -> Iterator[list[Item]]:
        """Yield the batches with their tokens, tokenized a few groups ahead."""
        for batch, made in bounded_map(
            executor, self._tokens, filter(None, map(self._context.claim, batches)), GROUPS_AHEAD
        ):
            refused, tokens = made.result()
            for key, failure in refused.items():
                self._context.fail(key, failure)
                self._context.progress.advance(1)
            left = [task for task in batch if task.key not in refused]
            if left:
                yield [Item(task, each) for task, each in zip(left, tokens, strict=True)]

    def _tokens(self, batch: Sequence[Task]) -> tuple[dict[str, Failure], Sequence[Any]]:
        """Failures, by key, of texts whose control image is unreadable, and the tokens of the other texts."""
        family = self._family
        if not family.text_reads_control:
            return {}, family.tokenize(self._parts_ahead, [task.caption for task in batch])
        refused: dict[str, Failure] = {}
        texts, images = [], []
        for task in batch:
            try:
                pixels = [each.pixels() for each in task.controls]
            except ImageRefused as error:
                refused[task.key] = Failure(error.reason, f"its control image: {error.detail}", error.path)
                continue
            texts.append(task.caption)
            images.append(pixels)
        return refused, family.tokenize_with_control(self._parts_ahead, texts, images) if texts else ()

    def _launch(self, models: Any, items: Sequence[Item]) -> Copies:
        """Start a batch: the tensors to store, and flags of their problems.

        The checks run on the device: there they are free, on the host they would take several times as long as a copy.
        """
        recipe = items[0].task.identity.encoding.settings  # the same for the whole batch
        with inference(self._placement.device), pinned_numerics():
            tokens = [item.data for item in items]
            made = self._family.encode_text(models, tokens, recipe)
        masks = {name + MASK: made[name + MASK] for name in made if name + MASK in made}
        dtypes = text_dtypes(self._context.encodings.text, [name for name in made if name not in masks])
        tensors = {name: made[name].to(dtype) for name, dtype in dtypes.items()}
        zero = {name for name, field in self._family.fields.items() if field.may_be_zero}
        flags = [
            problem_flags(_as_stored(made[name], dtype), may_be_zero=name in zero) for name, dtype in dtypes.items()
        ]
        return self._transfer.download({**tensors, **masks, _FLAGS: torch.stack(flags)})

    def _store(self, items: Sequence[Item], outputs: Mapping[str, torch.Tensor], note: str | None = None) -> None:
        context, encoding = self._context, self._context.encodings.text
        dtypes = (encoding.compute_dtype if note is None else "float32", encoding.store_dtype)
        tensors = {name: tensor.cpu() for name, tensor in outputs.items()}
        problems = [problem_names(flags) for flags in tensors.pop(_FLAGS)]
        masks = {name: tensors.pop(name + MASK) for name in list(tensors) if name + MASK in tensors}
        encoders = self._family.names("text_encoder")
        for number, item in enumerate(items):
            caption = item.task.caption
            problem = next((names[number] for names in problems if names[number]), None)
            if self._is_bad(item, problem, dtypes, f"caption {caption!r}"):
                continue
            kept = {
                name: tensor[number][masks[name][number]] if name in masks else tensor[number]
                for name, tensor in tensors.items()
            }
            counts = {"num_tokens": item.data.num_tokens, "token_limit": self._stated_limit}
            record = self._record(item, encoders, dtypes[0], note, **counts)
            context.store(Entry(record, kept, frozenset(masks)))
            sample_id = item.task.sample.sample_id
            if item.data.num_tokens > self._limit and sample_id not in self._cut:
                self._cut.add(sample_id)
                context.report.add_samples("truncated_captions", [sample_id])


def _as_stored(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor as stored in this dtype, back in float32, with infinity for values out of range.

    Conversion to 16 bits gives infinity itself; to 8 bits it saturates (torch 2.13) or gives NaN (before).
    """
    stored = tensor.to(dtype).float()
    return stored if dtype.itemsize > 1 else stored.masked_fill(tensor.abs() > torch.finfo(dtype).max, torch.inf)


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
                models = self.place(stack)
            context.progress.start("encode images", sum(map(len, batches)))
            decoders = ThreadPoolExecutor(threads, "latentcache-decode")
            stack.callback(decoders.shutdown, cancel_futures=True)
            images = [batch for batch in batches if not self._is_clip(batch[0])]
            clips = [[task] for batch in batches if self._is_clip(batch[0]) for task in batch]
            ahead = threads + self._encodings.image_group_size
            groups = chain(self._groups(images, decoders, ahead), self._groups(clips, decoders, CLIPS_AHEAD))
            self._encode(models, groups, lambda: timed(context.report, "write"))
        context.progress.finish()

    @staticmethod
    def _is_clip(task: Task) -> bool:
        return task.geometry is not None and task.geometry.num_frames is not None

    def place(self, stack: ExitStack, dtype: torch.dtype | None = None) -> Any:
        """Place the VAE and the parts that encode first frames, and return both."""
        models, device, dtype = self._context.models, self._placement.device, dtype or self._placement.dtype
        parts = models.picture_parts(dtype) if self._encodings.image.picture else {}
        for module in [models.vae(dtype), *parts.values()]:
            if isinstance(module, torch.nn.Module):
                stack.enter_context(placed(module, device))
        return models.vae(dtype), parts

    # Decoding threads

    def _groups(
        self, batches: Iterable[Sequence[Task]], executor: ThreadPoolExecutor, num_ahead: int
    ) -> Iterator[Iterator[Item]]:
        """Yield the batches, each an iterator over its images, in order as they are decoded."""
        to_decode, to_encode = tee(filter(None, map(self._context.claim, batches)))
        decoded = bounded_map(executor, Task.pixels, chain.from_iterable(to_decode), num_ahead)
        for batch in to_encode:
            if self._context.is_stopped():
                return
            yield self._decoded(decoded, len(batch))

    def _decoded(self, decoded: Iterator[tuple[Task, Future[np.ndarray]]], num_images: int) -> Iterator[Item]:
        """The next images, without the refused ones."""
        for _ in range(num_images):
            task, future = next(decoded)
            try:
                with timed(self._context.report, "decode"):
                    pixels = future.result()
                yield Item(task, pixels)
            except ImageRefused as refused:
                self._context.fail(task.key, Failure(refused.reason, refused.detail, refused.path))
                self._context.progress.advance(1)
                if self._context.is_stopped():  # the main thread checks only after each batch
                    return

    # Main thread

    def _launch(self, models: Any, items: Sequence[Item]) -> Copies:
        with timed(self._context.report, "encode"):
            pixels = self._transfer.host_memory((len(items), *items[0].data.shape), torch.uint8)
            np.stack([item.data for item in items], out=pixels.numpy())
            encodings = self._encodings
            given = self._transfer.upload(pixels)
            kept = given[..., 3:] if given.shape[-1] > 3 else None  # for masked images: see `Task.pixels`
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
        encoding = items[0].task.identity.encoding  # the same for the whole batch: see `Shape.group`
        computed_dtype = encoding.compute_dtype if note is None else "float32"
        seeds = [int(item.task.key[:15], 16) for item in items]  # the key depends on the config's seed and the image
        kept = {**keep_output(moments, encoding.output, seeds), **rest}
        tensors = {name: tensor.to(DTYPES[encoding.store_dtype]) for name, tensor in kept.items()}
        found = [problem_names(problem_flags(tensor)) for tensor in (moments, *tensors.values())]
        parts = ["vae", *(context.models.picture_names if encoding.picture else ())]
        for number, item in enumerate(items):
            problem = next((names[number] for names in found if names[number]), None)
            path, dtypes = item.task.sample.path, (computed_dtype, encoding.store_dtype)
            if not self._is_bad(item, problem, dtypes, path, path):
                record = self._record(item, parts, computed_dtype, note)
                context.store(Entry(record, {name: tensor[number] for name, tensor in tensors.items()}))


class MaskStage:
    """Makes masks in threads, without a model. At most two masks per thread are in memory."""

    def __init__(self, context: RunContext):
        self._context = context

    def run(self, batches: Sequence[Sequence[Task]]) -> None:
        """Make the masks in these batches."""
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
