"""The text stage: tokenize | encode | store, each in its thread.

One thread tokenizes ahead, the main thread runs the encoders, and a background thread stores the results. Where copies
overlap the computation, a batch is launched before the results of the last one are fetched.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch

from latentcache.devices.placement import Placement, placed
from latentcache.devices.transfer import Download, transfer_to
from latentcache.errors import EncodeError
from latentcache.models.batching import BatchRunner
from latentcache.models.clip import Tokens, encode_tokens, join_tokens, token_limit, tokenize
from latentcache.models.model_loader import Models, TextParts
from latentcache.models.settings import text_settings
from latentcache.models.vae import DTYPES, problem_flags, problem_names
from latentcache.precache.context import RunContext, storing_worker, timed
from latentcache.precache.encodings import TextEncodings
from latentcache.precache.failures import Failure
from latentcache.precache.plan import TextTask
from latentcache.provenance import Provenance
from latentcache.types import Entry, Record
from latentcache.utils.concurrency import bounded_map

GROUPS_AHEAD = 3
"""Groups of captions that are tokenized ahead of the encoders."""


@dataclass(frozen=True, slots=True)
class TextItem:
    """A caption that is ready to be encoded."""

    task: TextTask
    tokens: Tokens


@contextmanager
def placed_texts(models: Models, placement: Placement) -> Iterator[TextParts]:
    """Both text encoders on the placement's device, in its dtype; they always return to where they were."""
    parts = models.text(placement.dtype)
    with placed(parts.text_encoder, placement.device), placed(parts.text_encoder_2, placement.device):
        yield parts


class TextStage:
    """Encodes captions.

    A caption whose tokens wait, or whose outputs are not stored yet, costs some hundred kilobytes: at most
    GROUPS_AHEAD + 1 groups of tokens and BATCHES_TO_STORE + 2 batches of outputs are in memory.
    """

    def __init__(self, context: RunContext):
        self._context = context
        self._placement = context.encodings.text_encoders
        self._transfer = transfer_to(self._placement.device)
        self._parts: TextParts

    def run(self, batches: Sequence[Sequence[TextTask]]) -> tuple[float, int]:
        """Encode the batches, and return how long that took, without loading, and how many captions were done."""
        context, placement = self._context, self._placement
        with ExitStack() as stack:
            with timed(context.report, "load"):
                self._parts = stack.enter_context(placed_texts(context.models, placement))
            context.progress.start("encode captions", sum(map(len, batches)))
            started = time.monotonic()
            with timed(context.report, "text"), text_settings(self._parts, compile=context.encode.compile):
                num_done = self._encode(batches)
            seconds = time.monotonic() - started
        context.progress.finish()
        return seconds, num_done

    def _encode(self, batches: Sequence[Sequence[TextTask]]) -> int:
        context, num_done, limit = self._context, 0, token_limit(self._parts)
        runner: BatchRunner[TextItem, dict[str, torch.Tensor]] = BatchRunner(
            "text_encoder", self._placement.batch_size, self._placement.device
        )
        with (
            ThreadPoolExecutor(1, "latentcache-tokenize") as executor,
            storing_worker(self._placement.device) as worker,
        ):
            results = runner.run_ahead(
                self._groups(batches, executor),
                self._launch,
                lambda download: download.wait(),
                self._out_of_memory,
                num_ahead=int(self._transfer.overlaps),
            )
            for items, outputs in results:
                lengths = [item.tokens.num_tokens[0] for item in items]
                context.report.num_truncated_captions += sum(length > limit for length in lengths)
                worker.call(self._store, [item.task for item in items], outputs, lengths)
                num_done += len(items)
                context.progress.advance(len(items))
                if context.is_stopped():
                    break
        return num_done

    def _groups(self, batches: Iterable[Sequence[TextTask]], executor: ThreadPoolExecutor) -> Iterator[list[TextItem]]:
        """The batches with their tokens, tokenized a few groups ahead."""

        def read(batch: Sequence[TextTask]) -> list[Tokens]:
            return tokenize(self._parts, [task.caption for task in batch]).rows()

        for batch, made in bounded_map(executor, read, batches, GROUPS_AHEAD):
            yield [TextItem(task, tokens) for task, tokens in zip(batch, made.result(), strict=True)]

    def _launch(self, items: Sequence[TextItem]) -> Download:
        tokens = join_tokens([item.tokens for item in items])
        # encode_prompt would copy them on the stream that computes, and wait for all that was launched on it before.
        tokens = replace(
            tokens,
            input_ids=self._transfer.upload(tokens.input_ids),
            input_ids_2=self._transfer.upload(tokens.input_ids_2),
        )
        clip_skip = items[0].task.identity.encoding.clip_skip  # a batch has one: it is formed by it
        made = encode_tokens(self._parts, tokens, clip_skip=clip_skip, device=self._placement.device)
        return self._transfer.download(finished_texts(made, self._context.encodings))

    def _store(self, tasks: Sequence[TextTask], finished: Mapping[str, torch.Tensor], lengths: Sequence[int]) -> None:
        context = self._context
        for task, made in text_entries(
            tasks, finished, lengths, context.encodings, context.models, compiled=context.encode.compile
        ):
            if isinstance(made, Failure):
                context.fail(task.key, made)
            else:
                context.store(made)

    def _out_of_memory(self, item: TextItem, error: EncodeError) -> None:
        self._context.refuse(item.task.key, error)


_FLAGS = "problem flags"


def finished_texts(outputs: Mapping[str, torch.Tensor], encodings: TextEncodings) -> dict[str, torch.Tensor]:
    """What is stored of a batch's outputs, on their device, with the flags of problems that `text_entries` reads.

    The host does not wait for them: on an accelerator the checks cost nothing, on the host several times a copy.
    """
    dtype = DTYPES[encodings.text.store_dtype]
    tensors = {name: tensor.to(dtype) for name, tensor in outputs.items()}
    flags = torch.stack([problem_flags(tensor) for tensor in tensors.values()])
    return {**tensors, _FLAGS: flags}


def text_entries(
    tasks: Sequence[TextTask],
    finished: Mapping[str, torch.Tensor],
    lengths: Sequence[int],
    encodings: TextEncodings,
    models: Models,
    *,
    compiled: bool = False,
) -> Iterator[tuple[TextTask, Entry | Failure]]:
    """What is stored of a batch, or why it cannot be. `finished` is that of `finished_texts`, on any device.

    `lengths` are the captions' numbers of tokens.
    """
    tensors = {name: tensor.cpu() for name, tensor in finished.items()}
    problems = [problem_names(flags) for flags in tensors.pop(_FLAGS)]
    for number, task in enumerate(tasks):
        problem = next((names[number] for names in problems if names[number]), None)
        if problem is not None:
            yield task, Failure("bad-output", f"the text encoders gave {problem} for caption {task.caption!r}")
            continue
        provenance = Provenance(
            sample_id=task.sample_id,
            source_path=task.path,
            models={part: models.origin(part) for part in ("text_encoder", "text_encoder_2")},
            device=str(encodings.text_encoders.device),
            computed_dtype=encodings.text.compute_dtype,
            compiled=compiled,
            num_tokens=lengths[number],
        )
        record = Record(task.key, "text", task.identity.to_json(), provenance.to_json())
        yield task, Entry(record, {name: tensor[number] for name, tensor in tensors.items()})
