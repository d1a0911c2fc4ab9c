"""The text stage: tokenize | encode | store, each in its thread.

One thread tokenizes ahead, the main thread runs the encoders, and a background thread stores the results. Where copies
overlap the computation, a batch is launched before the results of the last one are fetched.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from latentcache.devices.transfer import Download, transfer_to
from latentcache.errors import DeviceError, ImageRefused
from latentcache.families.base import MASK, inference
from latentcache.models.offloading import encoders_placed
from latentcache.models.running import BatchRunner, float32_precision, pinned_numerics, text_settings
from latentcache.models.vae import problem_flags, problem_names
from latentcache.precache.encodings import text_dtypes
from latentcache.precache.report import Failure, RunContext, storing_worker, timed
from latentcache.precache.tasks import TextTask
from latentcache.store.entry import DTYPES
from latentcache.types import Entry
from latentcache.utils.concurrency import BackgroundWorker, bounded_map

logger = logging.getLogger("latentcache")

GROUPS_AHEAD = 3
"""Groups of captions that are tokenized ahead of the encoders."""
MAX_RETRIES = 64
"""Captions that wait to be encoded again in float32: the encoders are placed once for so many."""
_FLAGS, _LOST = "problem flags", "numbers that were lost"


@dataclass(frozen=True, slots=True)
class TextItem:
    """A caption that is ready to be encoded: as the family tokenized it, with `num_tokens`."""

    task: TextTask
    tokens: Any


class TextStage:
    """Encodes captions as the family does. The text encoders always return to where they were.

    Those that the device has no room for run there layer by layer, which the report says.

    A caption whose tokens wait, or whose outputs are not stored yet, costs some hundred kilobytes: at most
    GROUPS_AHEAD + 1 groups of tokens and BATCHES_TO_STORE + 2 batches of outputs are in memory, and the tokens of
    MAX_RETRIES captions and a few batches more, which are encoded again in float32.
    """

    def __init__(self, context: RunContext):
        self._context = context
        self._family = context.encodings.family
        self._placement = context.encodings.text_encoders
        self._compiles = context.encode.compile and self._family.compiles_text
        self._transfer = transfer_to(self._placement.device)
        self._parts: dict[str, Any] = {}
        self._parts_ahead: dict[str, Any] = {}
        self._retries: deque[tuple[TextItem, str]] = deque()
        """Captions with bad outputs, and their problem, from the background thread to the main one."""

    def run(self, batches: Sequence[Sequence[TextTask]]) -> None:
        """Encode the batches, each of one recipe."""
        context, placement = self._context, self._placement
        runner: BatchRunner[TextItem, dict[str, torch.Tensor]] = BatchRunner(
            "text_encoder", placement.batch_size, placement.device
        )
        with ExitStack() as stack:
            with timed(context.report, "load"):
                encoders = context.models.text_encoders(placement.dtype)
                tokenizers = context.models.tokenizers()
                self._parts = {**encoders, **tokenizers}
                # Tokenizing ahead must not change how the encoding's own calls pad and cut.
                self._parts_ahead = {**encoders, **context.models.tokenizers_ahead()}
                context.report.placement |= stack.enter_context(encoders_placed(encoders, placement.device))
            if self._compiles != context.encode.compile:
                message = "encode.compile is without effect on text encoders of %s: single layers of them are read"
                logger.warning(message, self._family.name)
            context.progress.start("encode captions", sum(map(len, batches)))
            stack.enter_context(timed(context.report, "text"))
            stack.enter_context(text_settings([*encoders.values()], compile=self._compiles))
            executor = stack.enter_context(ThreadPoolExecutor(1, "latentcache-tokenize"))
            worker = stack.enter_context(storing_worker(placement.device))
            groups = self._groups(batches, executor)
            limit = self._family.token_limit(self._parts, context.encodings.text.settings)
            num_ahead = int(self._transfer.overlaps)
            for items, outputs in runner.run_ahead(
                groups, partial(self._launch, self._parts), Download.wait, context.refuse, num_ahead=num_ahead
            ):
                context.report.num_truncated_captions += sum(item.tokens.num_tokens > limit for item in items)
                worker.call(self._store, items, outputs)
                context.progress.advance(len(items))
                if len(self._retries) >= MAX_RETRIES:
                    self._retry(worker)
                if context.is_stopped():
                    break
            worker.finish()
            self._retry(worker)
        context.progress.finish()

    def _groups(self, batches: Iterable[Sequence[TextTask]], executor: ThreadPoolExecutor) -> Iterator[list[TextItem]]:
        """The batches with their tokens, tokenized a few groups ahead."""
        for batch, made in bounded_map(
            executor, self._tokens, filter(None, map(self._context.claim, batches)), GROUPS_AHEAD
        ):
            refused, tokens = made.result()
            for key, failure in refused.items():
                self._context.fail(key, failure)
                self._context.progress.advance(1)
            left = [task for task in batch if task.key not in refused]
            if left:
                yield [TextItem(task, each) for task, each in zip(left, tokens, strict=True)]

    def _tokens(self, batch: Sequence[TextTask]) -> tuple[dict[str, Failure], Sequence[Any]]:
        """Why texts cannot be read, by key, since a control image of theirs cannot; and the tokens of the others."""
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

    def _retry(self, worker: BackgroundWorker) -> None:
        """Encode captions with bad outputs again, in float32, one at a time."""
        if not self._retries:
            return
        context, device = self._context, self._placement.device
        # Loaded again, or copies: a cast does not restore weights that were rounded to half precision.
        encoders = context.models.text_encoders(torch.float32)
        launch = partial(self._launch, {**self._parts, **encoders})
        runner: BatchRunner[TextItem, dict[str, torch.Tensor]] = BatchRunner("text_encoder", 1, device)
        try:
            with encoders_placed(encoders, device) as notes:
                context.report.placement |= {f"{name} in float32": note for name, note in notes.items()}
                while self._retries:
                    item, note = self._retries.popleft()
                    for items, outputs in runner.run_ahead(
                        [[item]], launch, Download.wait, context.refuse, num_ahead=0
                    ):
                        worker.call(self._store, items, outputs, note)
        except DeviceError as error:  # they are twice as large: the other captions are encoded all the same
            while self._retries:
                item, note = self._retries.popleft()
                context.fail(item.task.key, Failure("out-of-memory", f"{note}, but {error}"))

    def _launch(self, parts: Mapping[str, Any], items: Sequence[TextItem]) -> Download:
        """Start a batch: what is stored of it, and flags of its problems.

        The host does not wait for them: on an accelerator the checks cost nothing, on the host several times a copy.
        """
        recipe = items[0].task.identity.encoding.settings  # a batch has one: it is formed by it
        # Tokens that are uploaded here are not copied on the stream that computes, after all that was launched on it.
        with inference(self._placement.device), pinned_numerics():
            made = self._family.encode_text(
                parts, [item.tokens for item in items], recipe, upload=self._transfer.upload
            )
        masks = {name + MASK: made[name + MASK] for name in made if name + MASK in made}
        dtypes = text_dtypes(self._context.encodings.text, [name for name in made if name not in masks])
        tensors = {name: made[name].to(dtype) for name, dtype in dtypes.items()}
        flags = torch.stack([problem_flags(tensor.float()) for tensor in tensors.values()])
        counts = [_num_lost(made[name], dtype) for name, dtype in dtypes.items() if dtype.itemsize == 1]
        lost = {_LOST: torch.stack(counts).sum(0)} if counts else {}
        return self._transfer.download({**tensors, **masks, _FLAGS: flags, **lost})

    def _store(self, items: Sequence[TextItem], outputs: Mapping[str, torch.Tensor], note: str | None = None) -> None:
        """Store a batch. Captions with bad outputs wait for a retry in float32, or fail; `note` is a retry's."""
        context = self._context
        encoding = context.encodings.text
        computed_dtype = encoding.compute_dtype if note is None else "float32"
        tensors = {name: tensor.cpu() for name, tensor in outputs.items()}
        problems = [problem_names(flags) for flags in tensors.pop(_FLAGS)]
        lost = tensors.pop(_LOST).tolist() if _LOST in tensors else [0] * len(items)
        masks = {name: tensors.pop(name + MASK) for name in list(tensors) if name + MASK in tensors}
        for number, item in enumerate(items):
            task = item.task
            problem, detail = next((names[number] for names in problems if names[number]), None), ""
            if problem is not None and computed_dtype != "float32":
                reason = f"the text encoders gave {problem} in {computed_dtype}: encoded again in float32"
                logger.warning("caption %r: %s", task.caption, reason)
                self._retries.append((item, reason))
                continue
            if problem is not None:
                computed = f"computed in float32 and stored as {encoding.store_dtype}"
                detail = f"the text encoders gave {problem} for caption {task.caption!r}, {computed}"
            elif lost[number]:
                dtype = encoding.store_dtype
                detail = (
                    f"{lost[number]} numbers of the embedding of caption {task.caption!r} are larger than "
                    f"{torch.finfo(DTYPES[dtype]).max:g}, which is all that {dtype} holds; set "
                    "encode.text_store_dtype to bfloat16"
                )
            if detail:
                context.fail(task.key, Failure("bad-output", detail))
                continue
            record = task.record(
                models={part: context.models.origin(part) for part in self._family.names("text_encoder")},
                device=str(self._placement.device),
                computed_dtype=computed_dtype,
                float32_precision=float32_precision(self._placement.device),
                compiled=self._compiles and note is None,
                num_tokens=item.tokens.num_tokens,
                note=note,
            )
            kept = {
                name: tensor[number][masks[name][number]] if name in masks else tensor[number]
                for name, tensor in tensors.items()
            }
            context.store(Entry(record, kept, frozenset(masks)))
            context.report.num_retried_in_float32 += note is not None


def _num_lost(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """How many numbers of each item [B, ...] are outside of the range of `dtype`: int64 [B], where the tensor is.

    A conversion to an 8-bit float makes them its largest number (torch 2.13), or NaN (before).
    """
    return (~(tensor.abs() <= torch.finfo(dtype).max)).flatten(1).sum(1)
