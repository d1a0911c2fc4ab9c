"""Encode in batches; when memory runs out, halve the batch and go on."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import torch
from accelerate.utils.memory import should_reduce_batch_size

from latentcache.errors import EncodeError

log = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")

# What accelerate's list does not name: cuBLAS and cuDNN workspaces, and the CPU allocator of Windows.
_OUT_OF_MEMORY = ("ALLOC_FAILED", "not enough memory: you tried to allocate", "out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that memory ran out, on an accelerator or on the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    return should_reduce_batch_size(error) or any(text in str(error) for text in _OUT_OF_MEMORY)


def free_cached_memory(device: torch.device) -> None:
    """Collect garbage and give the accelerator's cached blocks back."""
    gc.collect()
    empty_cache = getattr(torch.get_device_module(device), "empty_cache", None)  # the CPU's module has none
    if empty_cache is not None:
        empty_cache()


class BatchRunner(Generic[Item, Result]):
    """Runs `encode` on batches of at most `batch_size` items; `batch_size` is halved whenever memory runs out.

    A reduced size stays: `batch_size` and `num_reductions` tell what was found. `part` names the model in errors.
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
        """Yield each batch of items with what `encode` made of it, in order.

        An item that does not fit alone goes to `on_failure` with its EncodeError (problem `out-of-memory`), and the
        rest goes on; without `on_failure` the error is raised. Other errors of `encode` pass through.
        """
        start = 0
        while start < len(items):
            batch = items[start : start + self.batch_size]
            shortage = None
            try:
                result = encode(batch)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                shortage = str(error).splitlines()[0] if str(error) else type(error).__name__
            if shortage is None:
                yield batch, result
                del result  # else two batches' results are alive while the next one is made
                start += len(batch)
                continue
            # Out of the except block: until then the traceback's frames keep the failed call's tensors alive.
            free_cached_memory(self.device)
            if len(batch) > 1:
                self._reduce(len(batch))
            else:
                self._fail(batch[0], shortage, on_failure)
                start += 1

    def _reduce(self, num_items: int) -> None:
        self.batch_size, self.num_reductions = num_items // 2, self.num_reductions + 1
        log.warning(
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
