"""Encode in batches, each launched before the one before it is fetched; when memory runs out, halve the batch.

No thread is involved, so `utils.concurrency` does not serve here: the device itself runs concurrently with the host.
"""

from __future__ import annotations

import gc
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeVar

import torch
from accelerate.utils.memory import should_reduce_batch_size

from latentcache.errors import EncodeError
from latentcache.models.model_files import first_line

logger = logging.getLogger("latentcache")

Item = TypeVar("Item")
Launched = TypeVar("Launched")
Result = TypeVar("Result")

# Messages that accelerate's list lacks: cuBLAS and cuDNN workspaces, and the CPU allocator of Windows.
_OUT_OF_MEMORY = ("ALLOC_FAILED", "not enough memory: you tried to allocate", "out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that memory ran out, on an accelerator or on the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    return should_reduce_batch_size(error) or any(text in str(error) for text in _OUT_OF_MEMORY)


def free_cached_memory(device: torch.device) -> None:
    """Collect garbage and release the accelerator's cached blocks."""
    gc.collect()
    empty_cache = getattr(torch.get_device_module(device), "empty_cache", None)  # the CPU's module has none
    if empty_cache is not None:
        empty_cache()


@dataclass(frozen=True, slots=True)
class _Attempt:
    """The outcome of a call: its value, the message of a shortage of memory, or another error.

    Of a shortage only the message is kept: the frames of its traceback would keep the failed call's tensors alive.
    """

    value: Any = None
    shortage: str | None = None
    error: Exception | None = None

    @property
    def has_failed(self) -> bool:
        return self.shortage is not None or self.error is not None


def _attempt(function: Callable[[Any], Any], argument: Any) -> _Attempt:
    try:
        return _Attempt(function(argument))
    except Exception as error:  # `run_ahead` raises it in its turn
        return _Attempt(shortage=first_line(error)) if is_out_of_memory(error) else _Attempt(error=error)


class _Batches(Generic[Item]):
    """Items of groups, taken a batch at a time; batches that were put back come first."""

    def __init__(self, groups: Iterable[Iterable[Item]]):
        self._groups = iter(groups)
        self._group: Iterator[Item] = iter(())
        self._again: deque[list[Item]] = deque()

    def take(self, size: int) -> list[Item]:
        """The next items of one group, at most `size`; none at the end."""
        if self._again:
            batch = self._again.popleft()
            if batch[size:]:
                self._again.appendleft(batch[size:])
            return batch[:size]
        while not (batch := list(islice(self._group, size))):
            group = next(self._groups, None)
            if group is None:
                break
            self._group = iter(group)
        return batch

    def put_back(self, batches: Iterable[list[Item]]) -> None:
        """Take these next, in this order."""
        self._again.extendleft(reversed(list(batches)))


class BatchRunner(Generic[Item, Result]):
    """Runs `encode` on batches of at most `batch_size` items; `batch_size` is halved whenever memory runs out.

    A reduced size stays: see `batch_size` and `num_reductions`. `part` names the model in errors.
    """

    def __init__(self, part: str, batch_size: int, device: torch.device | str):
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}, but at least 1 is needed")
        self.part, self.batch_size, self.device = part, batch_size, torch.device(device)
        self.num_reductions = 0

    def run(
        self,
        items: Sequence[Item],
        encode: Callable[[Sequence[Item]], Result],
        on_failure: Callable[[Item, EncodeError], None] | None = None,
    ) -> Iterator[tuple[Sequence[Item], Result]]:
        """Yield each batch of items with the result of `encode`, in order: `run_ahead` with none ahead."""
        return self.run_ahead([items], encode, lambda result: result, on_failure, num_ahead=0)

    def run_ahead(
        self,
        groups: Iterable[Iterable[Item]],
        launch: Callable[[Sequence[Item]], Launched],
        fetch: Callable[[Launched], Result],
        on_failure: Callable[[Item, EncodeError], None] | None = None,
        *,
        num_ahead: int = 1,
    ) -> Iterator[tuple[Sequence[Item], Result]]:
        """Yield each batch of items with its result, in order. No batch holds items of two groups.

        `launch` starts a batch on the device and need not wait for it, `fetch` waits for its result. When a batch is
        fetched, `num_ahead` further ones have been launched, so that the device has work meanwhile. Groups and their
        items are taken when they are needed.

        Memory may run out in either call. Batches that were launched after that one are dropped and launched again.
        An item that does not fit alone goes to `on_failure` with its EncodeError (problem `out-of-memory`), and the
        other items are encoded; without `on_failure` the error is raised. Other errors are raised after the results of
        the batches that were launched before.
        """
        batches = _Batches(groups)
        under_way: deque[tuple[list[Item], _Attempt]] = deque()
        while True:
            # After a failure nothing is launched until its turn has come.
            while len(under_way) <= num_ahead and not (under_way and under_way[-1][1].has_failed):
                if not (batch := batches.take(self.batch_size)):
                    break
                under_way.append((batch, _attempt(launch, batch)))
            if not under_way:
                return
            batch, attempt = under_way.popleft()
            if not attempt.has_failed:
                attempt = _attempt(fetch, attempt.value)
            if attempt.error is not None:
                raise attempt.error
            if attempt.shortage is None:
                yield batch, attempt.value
                del attempt  # else one more batch of results is alive while the next ones are computed
                continue
            batches.put_back(launched for launched, _ in under_way)
            under_way.clear()
            free_cached_memory(self.device)
            if len(batch) > 1:
                self._reduce(len(batch))
                batches.put_back([batch])
            else:
                self._fail(batch[0], attempt.shortage, on_failure)

    def _reduce(self, num_items: int) -> None:
        self.batch_size, self.num_reductions = num_items // 2, self.num_reductions + 1
        logger.warning(
            "%s: a batch of %d does not fit in the memory of %s, going on with %d",
            self.part,
            num_items,
            self.device,
            self.batch_size,
        )

    def _fail(self, item: Item, shortage: str, on_failure: Callable[[Item, EncodeError], None] | None) -> None:
        error = EncodeError(
            f"{self.part}: one item alone does not fit in the memory of {self.device} ({shortage}). "
            "Free memory on the device, or use a smaller bucket area or a smaller dtype.",
            part=self.part,
            problem="out-of-memory",
        )
        if on_failure is None:
            raise error
        on_failure(item, error)
