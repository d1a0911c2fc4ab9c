"""The text stage: one thread tokenizes ahead of the main thread, which runs the text encoders."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from typing import Any

import torch

from latentcache.devices.transfer import Copies
from latentcache.errors import ImageRefused
from latentcache.families.base import MASK, inference
from latentcache.models.running import encoders_placed, pinned_numerics
from latentcache.models.vae import problem_flags, problem_names
from latentcache.precache.encoding_stage import EncodingStage, Item, RunContext
from latentcache.precache.encodings import text_dtypes
from latentcache.precache.report import Failure, timed
from latentcache.precache.tasks import Task
from latentcache.store.batch import DTYPES
from latentcache.types import Entry
from latentcache.utils.concurrency import bounded_map

GROUPS_AHEAD = 3
"""Groups of captions that are tokenized ahead of the encoders."""
_FLAGS, _LOST = "problem flags", "numbers that were lost"


class TextStage(EncodingStage):
    """Encodes captions as the family does.

    Encoders that the device has no room for run there layer by layer, which the report says.

    A caption whose tokens wait, or whose outputs are not stored yet, costs some hundred kilobytes: at most
    GROUPS_AHEAD + 1 groups of tokens and BATCHES_TO_STORE + 2 batches of outputs are in memory, and the tokens of
    `max_retries` captions and a few batches more, which are encoded again in float32.
    """

    part, encoder, max_retries = "text_encoder", "the text encoders", 64

    def __init__(self, context: RunContext):
        super().__init__(context, context.encodings.text_encoders)
        self._family = context.encodings.family
        self._parts_ahead: dict[str, Any] = {}
        self._limit = 0
        self._stated_limit: int | None = None
        """Tokens that the text encoders read; and for records, where they are fewer than the family's usual number."""
        self._cut: set[str] = set()
        """The samples that count as cut: one counts once, however many variants its caption has."""

    def run(self, batches: Sequence[Sequence[Task]]) -> None:
        """Encode the batches, each of one recipe."""
        context, family = self._context, self._family
        with ExitStack() as stack:
            with timed(context.report, "load"):
                parts = self._place(stack, self._placement.dtype)
                # Tokenizing ahead must not change how the encoding's own calls pad and cut.
                self._parts_ahead = {**parts, **context.models.tokenizers_ahead()}
            context.progress.start("encode captions", sum(map(len, batches)))
            stack.enter_context(timed(context.report, "text"))
            executor = stack.enter_context(ThreadPoolExecutor(1, "latentcache-tokenize"))
            settings = context.encodings.text.settings
            self._limit = family.token_limit(parts, settings)
            self._stated_limit = self._limit if self._limit < family.token_limit({}, settings) else None
            self._encode(parts, self._groups(batches, executor), nullcontext)
        context.progress.finish()

    def _place(self, stack: ExitStack, dtype: torch.dtype) -> dict[str, Any]:
        encoders = self._context.models.text_encoders(dtype)
        notes = stack.enter_context(encoders_placed(encoders, self._placement.device))
        ending = "" if dtype == self._placement.dtype else " in float32"
        self._context.report.placement |= {f"{name}{ending}": note for name, note in notes.items()}
        return {**encoders, **self._context.models.tokenizers()}

    def _groups(self, batches: Iterable[Sequence[Task]], executor: ThreadPoolExecutor) -> Iterator[list[Item]]:
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
                yield [Item(task, each) for task, each in zip(left, tokens, strict=True)]

    def _tokens(self, batch: Sequence[Task]) -> tuple[dict[str, Failure], Sequence[Any]]:
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

    def _launch(self, models: Any, items: Sequence[Item]) -> Copies:
        """Start a batch: what is stored of it, and flags of its problems.

        The host does not wait for them: on an accelerator the checks cost nothing, on the host several times a copy.
        """
        recipe = items[0].task.identity.encoding.settings  # a batch has one: it is formed by it
        with inference(self._placement.device), pinned_numerics():
            tokens = [item.data for item in items]
            made = self._family.encode_text(models, tokens, recipe)
        masks = {name + MASK: made[name + MASK] for name in made if name + MASK in made}
        dtypes = text_dtypes(self._context.encodings.text, [name for name in made if name not in masks])
        tensors = {name: made[name].to(dtype) for name, dtype in dtypes.items()}
        zero = {name for name, field in self._family.fields.items() if field.may_be_zero}
        flags = [problem_flags(tensor.float(), may_be_zero=name in zero) for name, tensor in tensors.items()]
        counts = [_num_lost(made[name], dtype) for name, dtype in dtypes.items() if dtype.itemsize == 1]
        lost = {_LOST: torch.stack(counts).sum(0)} if counts else {}
        return self._transfer.download({**tensors, **masks, _FLAGS: torch.stack(flags), **lost})

    def _store(self, items: Sequence[Item], outputs: Mapping[str, torch.Tensor], note: str | None = None) -> None:
        context, encoding = self._context, self._context.encodings.text
        dtypes = (encoding.compute_dtype if note is None else "float32", encoding.store_dtype)
        tensors = {name: tensor.cpu() for name, tensor in outputs.items()}
        problems = [problem_names(flags) for flags in tensors.pop(_FLAGS)]
        lost = tensors.pop(_LOST).tolist() if _LOST in tensors else [0] * len(items)
        masks = {name: tensors.pop(name + MASK) for name in list(tensors) if name + MASK in tensors}
        encoders = self._family.names("text_encoder")
        for number, item in enumerate(items):
            caption = item.task.caption
            problem = next((names[number] for names in problems if names[number]), None)
            if self._is_bad(item, problem, dtypes, f"caption {caption!r}"):
                continue
            if lost[number]:
                detail = (
                    f"{lost[number]} numbers of the embedding of caption {caption!r} are larger than "
                    f"{torch.finfo(DTYPES[dtypes[1]]).max:g}, which is all that {dtypes[1]} holds; set "
                    "encode.text_store_dtype to bfloat16"
                )
                context.fail(item.task.key, Failure("bad-output", detail))
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
                context.report.add_truncated(sample_id)


def _num_lost(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """How many numbers of each item [B, ...] are outside of the range of `dtype`: int64 [B], where the tensor is.

    A conversion to an 8-bit float makes them its largest number (torch 2.13), or NaN (before).
    """
    return (~(tensor.abs() <= torch.finfo(dtype).max)).flatten(1).sum(1)
