"""The text stage: tokenize | encode | store, each in its thread.

One thread tokenizes ahead, the main thread runs the encoders, and a background thread stores the results. Where copies
overlap the computation, a batch is launched before the results of the last one are fetched.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from latentcache.devices.placement import placed
from latentcache.devices.transfer import Download, transfer_to
from latentcache.models.clip import Tokens, encode_tokens, join_tokens, token_limit, tokenize
from latentcache.models.model_loader import TextParts
from latentcache.models.running import BatchRunner, text_settings
from latentcache.models.vae import DTYPES, problem_flags, problem_names
from latentcache.precache.plan import TextTask
from latentcache.precache.report import Failure, RunContext, storing_worker, timed
from latentcache.provenance import Provenance
from latentcache.types import Entry, Record
from latentcache.utils.concurrency import bounded_map

GROUPS_AHEAD = 3
"""Groups of captions that are tokenized ahead of the encoders."""
_FLAGS = "problem flags"


@dataclass(frozen=True, slots=True)
class TextItem:
    """A caption that is ready to be encoded."""

    task: TextTask
    tokens: Tokens


class TextStage:
    """Encodes captions. Both text encoders always return to where they were.

    A caption whose tokens wait, or whose outputs are not stored yet, costs some hundred kilobytes: at most
    GROUPS_AHEAD + 1 groups of tokens and BATCHES_TO_STORE + 2 batches of outputs are in memory.
    """

    def __init__(self, context: RunContext):
        self._context = context
        self._placement = context.encodings.text_encoders
        self._transfer = transfer_to(self._placement.device)
        self._parts: TextParts

    def run(self, batches: Sequence[Sequence[TextTask]]) -> int:
        """Encode the batches, each of one clip skip, and return how many captions were done."""
        context, placement, num_done = self._context, self._placement, 0
        runner: BatchRunner[TextItem, dict[str, torch.Tensor]] = BatchRunner(
            "text_encoder", placement.batch_size, placement.device
        )
        with ExitStack() as stack:
            with timed(context.report, "load"):
                self._parts = parts = context.models.text(placement.dtype)
                stack.enter_context(placed(parts.text_encoder, placement.device))
                stack.enter_context(placed(parts.text_encoder_2, placement.device))
            context.progress.start("encode captions", sum(map(len, batches)))
            stack.enter_context(timed(context.report, "text"))
            stack.enter_context(text_settings(parts, compile=context.encode.compile))
            executor = stack.enter_context(ThreadPoolExecutor(1, "latentcache-tokenize"))
            worker = stack.enter_context(storing_worker(placement.device))
            groups, limit = self._groups(batches, executor), token_limit(parts)
            num_ahead = int(self._transfer.overlaps)
            for items, outputs in runner.run_ahead(
                groups, self._launch, lambda download: download.wait(), context.refuse, num_ahead=num_ahead
            ):
                context.report.num_truncated_captions += sum(item.tokens.num_tokens[0] > limit for item in items)
                worker.call(self._store, items, outputs)
                num_done += len(items)
                context.progress.advance(len(items))
                if context.is_stopped():
                    break
        context.progress.finish()
        return num_done

    def _groups(self, batches: Iterable[Sequence[TextTask]], executor: ThreadPoolExecutor) -> Iterator[list[TextItem]]:
        """The batches with their tokens, tokenized a few groups ahead."""

        def read(batch: Sequence[TextTask]) -> list[Tokens]:
            return tokenize(self._parts, [task.caption for task in batch]).rows()

        for batch, made in bounded_map(executor, read, filter(None, map(self._context.claim, batches)), GROUPS_AHEAD):
            yield [TextItem(task, tokens) for task, tokens in zip(batch, made.result(), strict=True)]

    def _launch(self, items: Sequence[TextItem]) -> Download:
        """Start a batch: what is stored of it, and flags of its problems.

        The host does not wait for them: on an accelerator the checks cost nothing, on the host several times a copy.
        """
        tokens = join_tokens([item.tokens for item in items])
        # encode_prompt would copy them on the stream that computes, and wait for all that was launched on it before.
        tokens = replace(
            tokens,
            input_ids=self._transfer.upload(tokens.input_ids),
            input_ids_2=self._transfer.upload(tokens.input_ids_2),
        )
        clip_skip = items[0].task.identity.encoding.clip_skip  # a batch has one: it is formed by it
        made = encode_tokens(self._parts, tokens, clip_skip=clip_skip, device=self._placement.device)
        dtype = DTYPES[self._context.encodings.text.store_dtype]
        tensors = {name: tensor.to(dtype) for name, tensor in made.items()}
        flags = torch.stack([problem_flags(tensor) for tensor in tensors.values()])
        return self._transfer.download({**tensors, _FLAGS: flags})

    def _store(self, items: Sequence[TextItem], outputs: Mapping[str, torch.Tensor]) -> None:
        context = self._context
        tensors = {name: tensor.cpu() for name, tensor in outputs.items()}
        problems = [problem_names(flags) for flags in tensors.pop(_FLAGS)]
        for number, item in enumerate(items):
            task = item.task
            problem = next((names[number] for names in problems if names[number]), None)
            if problem is not None:
                detail = f"the text encoders gave {problem} for caption {task.caption!r}"
                context.fail(task.key, Failure("bad-output", detail))
                continue
            provenance = Provenance(
                sample_id=task.sample_id,
                source_path=task.path,
                models={part: context.models.origin(part) for part in ("text_encoder", "text_encoder_2")},
                device=str(self._placement.device),
                computed_dtype=context.encodings.text.compute_dtype,
                compiled=context.encode.compile,
                num_tokens=item.tokens.num_tokens[0],
            )
            record = Record(task.key, "text", task.identity.to_json(), provenance.to_json())
            context.store(Entry(record, {name: tensor[number] for name, tensor in tensors.items()}))
