"""Running models: in batches that are halved when memory runs out, layer by layer, with pinned numeric flags.

Each batch is launched before the previous one is fetched. This takes no thread, as the device runs asynchronously.
"""

from __future__ import annotations

import gc
import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain, islice
from typing import Any, Generic, TypeVar

import torch

from latentcache.devices.placement import device_of, free_memory, in_eval_mode, out_of_memory_error, placed
from latentcache.errors import DeviceError, EncodeError
from latentcache.models.files import first_line

logger = logging.getLogger("latentcache")

Item = TypeVar("Item")
Launched = TypeVar("Launched")
Result = TypeVar("Result")

# Messages missing from accelerate's list: cuBLAS and cuDNN workspaces, and the CPU allocator of Windows.
_OUT_OF_MEMORY = ("ALLOC_FAILED", "not enough memory: you tried to allocate", "out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error is an out-of-memory error, on an accelerator or on the CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if not isinstance(error, RuntimeError):
        return False
    from accelerate.utils.memory import should_reduce_batch_size  # lazily: importing accelerate takes a second

    return should_reduce_batch_size(error) or any(text in str(error) for text in _OUT_OF_MEMORY)


def free_cached_memory(device: torch.device) -> None:
    """Collect garbage and empty the accelerator's allocator cache."""
    gc.collect()
    empty_cache = getattr(torch.get_device_module(device), "empty_cache", None)  # the CPU's module has none
    if empty_cache is not None:
        empty_cache()


def _attempt(function: Callable[[Any], Any], argument: Any) -> tuple[Any, Exception | str | None]:
    """The value of a call and None, or None and its error; for an out-of-memory error only its message.

    The traceback's frames would keep the failed call's tensors alive.
    """
    try:
        return function(argument), None
    except Exception as error:  # `run_ahead` raises it in order
        return None, first_line(error) if is_out_of_memory(error) else error


def _taken(waiting: deque[Iterator[Item]], groups: Iterator[Iterable[Item]], size: int) -> list[Item]:
    """Up to `size` next items of one group; empty at the end. `waiting` has requeued batches and a group's rest."""
    while not (waiting and (batch := list(islice(waiting[0], size)))):
        if waiting:
            waiting.popleft()
        elif (group := next(groups, None)) is not None:
            waiting.append(iter(group))
        else:
            return []
    return batch


class BatchRunner(Generic[Item, Result]):
    """Runs batches of at most `batch_size` items; `batch_size` is halved for good whenever memory runs out.

    `part` names the model in errors.
    """

    def __init__(self, part: str, batch_size: int, device: torch.device | str):
        self.part, self.batch_size, self.device = part, batch_size, torch.device(device)

    def run_ahead(
        self,
        groups: Iterable[Iterable[Item]],
        launch: Callable[[Sequence[Item]], Launched],
        fetch: Callable[[Launched], Result],
        on_failure: Callable[[Item, EncodeError], None],
        *,
        num_ahead: int,
    ) -> Iterator[tuple[Sequence[Item], Result]]:
        """Yield each batch of items with its result, in order. A batch never mixes groups.

        `launch` starts a batch on the device asynchronously, `fetch` waits for its result. When a batch is fetched,
        `num_ahead` further ones have been launched to keep the device busy. Groups and items are consumed lazily.

        Memory may run out in either call: batches launched later are then dropped and launched again. An item that
        does not fit alone is passed to `on_failure` with its EncodeError (problem `out-of-memory`), and the rest
        continues. Other errors are raised after the results of earlier batches.
        """
        waiting, groups = deque[Iterator[Item]](), iter(groups)
        under_way: deque[tuple[list[Item], Any, Exception | str | None]] = deque()
        while True:
            # After a failure nothing is launched until it is handled.
            while len(under_way) <= num_ahead and not (under_way and under_way[-1][2] is not None):
                if not (batch := _taken(waiting, groups, self.batch_size)):
                    break
                under_way.append((batch, *_attempt(launch, batch)))
            if not under_way:
                return
            batch, value, problem = under_way.popleft()
            if problem is None:
                value, problem = _attempt(fetch, value)
            if isinstance(problem, Exception):
                raise problem
            if problem is None:
                yield batch, value
                del value  # or one more batch of results would stay alive
                continue
            waiting.extendleft(iter(launched) for launched, _, _ in reversed(under_way))
            under_way.clear()
            free_cached_memory(self.device)
            if len(batch) > 1:
                self.batch_size = len(batch) // 2
                message = "%s: a batch of %d does not fit in the memory of %s, continuing with %d"
                logger.warning(message, self.part, len(batch), self.device, self.batch_size)
                waiting.appendleft(iter(batch))
            else:
                message = (
                    f"{self.part}: a single item does not fit in the memory of {self.device} ({problem}). "
                    "Free memory on the device, or use a smaller bucket area or a smaller dtype."
                )
                on_failure(batch[0], EncodeError(message, part=self.part, problem="out-of-memory"))


@contextmanager
def uncached_autocast(device: torch.device, dtype: torch.dtype | None) -> Iterator[None]:
    """Autocast to `dtype` (None: like the surrounding autocast, if any) without the weight cast cache.

    The cache would miss in-place swaps of EMA weights, and hand training casts that were made without gradients.
    """
    if dtype is None and torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
    if dtype is None:
        yield
        return
    with torch.autocast(device.type, dtype=dtype, cache_enabled=False):
        yield


_pinning = threading.Lock()
_pins: list[ExitStack] = []
"""One per open block of `pinned_numerics`, all the same object. It restores the flags when the last block ends."""


@contextmanager
def pinned_numerics() -> Iterator[None]:
    """Set the flags that change an encoder's results to torch's defaults, whatever a trainer has set.

    The flags are not part of a key, so entries must not depend on them: float32 uses TF32 in CUDA convolutions and
    full precision elsewhere, and float16 is not accumulated in float16. cuDNN's benchmark is off: it times kernels for
    each bucket and batch size, and its choice may differ between runs.

    The flags are global. Blocks in several threads share one pin: the caller's flags are restored when the last block
    ends, also after an error.
    """
    with _pinning:
        _pins.append(_pin() if not _pins else _pins[0])
    try:
        yield
    finally:
        with _pinning:
            undo = _pins.pop()
            if not _pins:
                undo.close()


def float32_precision(device: torch.device) -> dict[str, str]:
    """The precision of float32 operators under `pinned_numerics`, for provenance."""
    return {"matmul": "ieee", "convolution": "tf32" if device.type == "cuda" else "ieee"}


def _pin() -> ExitStack:
    """Pin the flags, and return a stack that restores them."""
    backends: Any = torch.backends
    cudnn, matmul = backends.cudnn, backends.cuda.matmul
    flags: list[tuple[Any, str, Any]] = [(cudnn, "benchmark", False), (matmul, "allow_fp16_accumulation", False)]
    with ExitStack() as undo:
        if hasattr(backends, "fp32_precision"):  # torch 2.9, where mixing these with the older flags raises
            ieee = (matmul, backends.mkldnn.matmul, backends.mkldnn.conv)
            flags += [(cudnn.conv, "fp32_precision", "tf32"), *((owner, "fp32_precision", "ieee") for owner in ieee)]
        else:
            flags += [(cudnn, "allow_tf32", True)]
            undo.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("highest")
        for owner, name, value in flags:
            before = getattr(owner, name, value)  # some versions of torch lack some flags
            if before != value and {before, value} != {"none", "ieee"}:
                undo.callback(_restore, owner, name, before)
                setattr(owner, name, value)
        return undo.pop_all()


def _restore(owner: Any, name: str, before: Any) -> None:
    if name == "fp32_precision":
        owner.fp32_precision = "none"  # inherits, which restores it if the caller set it for all operators
        if owner.fp32_precision == before:
            return
    setattr(owner, name, before)


# Text encoders on the device: whole if they fit, otherwise with some layers on the CPU.

WEIGHTS_SHARE = 0.8
"""Share of the free memory that weights may take. The rest is for activations."""


@contextmanager
def encoders_placed(encoders: Mapping[str, torch.nn.Module], device: torch.device) -> Iterator[dict[str, str]]:
    """The encoders ready to run on `device`, in eval mode; restored afterwards, including parameter identity.

    Yields a note about the placement of each encoder that does not fit as a whole. The smallest are placed first.
    Weights that stay on the CPU are copied for each batch, layer by layer (accelerate's `dispatch_model`), which is
    bit-identical but slower. An already dispatched encoder is not moved. DeviceError if not even the first layer fits.
    """
    notes: dict[str, str] = {}
    with ExitStack() as stack:
        for name, encoder in sorted(encoders.items(), key=lambda item: weight_bytes(item[1])):
            is_dispatched = hasattr(encoder, "hf_device_map")
            free_bytes = None if is_dispatched else _free_bytes(encoder, device)
            if free_bytes is None:
                stack.enter_context(in_eval_mode(encoder) if is_dispatched else placed(encoder, device))
                continue
            left = stack.enter_context(_dispatched(encoder, device, int(free_bytes * WEIGHTS_SHARE)))
            notes[name] = (
                f"{device} layer by layer: {left / 1e9:.3g} of {weight_bytes(encoder) / 1e9:.3g} GB of its weights "
                f"stay on the CPU and are copied for each batch, because {free_bytes / 1e9:.3g} GB are free on {device}"
            )
        yield notes


def weight_bytes(module: torch.nn.Module) -> int:
    """Bytes of the parameters and buffers; tied ones count once."""
    return sum(tensor.nbytes for tensor in chain(module.parameters(), module.buffers()))


def _free_bytes(encoder: torch.nn.Module, device: torch.device) -> int | None:
    """The device's free memory if the encoder, now on the CPU, does not fit there; None if it fits or has moved."""
    if device.type == "cpu" or device_of(encoder).type != "cpu":
        return None
    free_cached_memory(device)
    free_bytes = free_memory(device)
    return None if free_bytes is None or weight_bytes(encoder) <= free_bytes * WEIGHTS_SHARE else free_bytes


@contextmanager
def _dispatched(encoder: torch.nn.Module, device: torch.device, budget: int) -> Iterator[int]:
    """The encoder with up to `budget` bytes of weights on `device`; yields how many bytes stay on the CPU.

    accelerate replaces the encoder's Parameter objects, so the originals are saved and restored.
    """
    from accelerate import dispatch_model, infer_auto_device_map
    from accelerate.hooks import remove_hook_from_submodules

    whole: Any = getattr(encoder, "_no_split_modules", None) or []  # residual connections: not split
    # accelerate names accelerators by number: 0 stands for `device`. Buffers, a few kilobytes, are always on the
    # device: `offload_buffers` leaves them out of the budget.
    sizes: Any = {0: budget, "cpu": sys.maxsize}
    found = infer_auto_device_map(encoder, sizes, no_split_module_classes=list(whole), offload_buffers=True)
    device_map = {name: device if place == 0 else place for name, place in found.items()}
    if device not in device_map.values():
        raise DeviceError(
            f"{type(encoder).__name__} cannot run on {device}, not even layer by layer: its first layer and its "
            f"largest one need more than {budget / 1e9:.3g} GB. Free memory there, or set encode.device: cpu"
        )
    own = [(part, dict(part._parameters), dict(part._buffers)) for part in encoder.modules()]
    with in_eval_mode(encoder):
        try:
            try:
                dispatch_model(encoder, device_map, main_device=device)
            except torch.OutOfMemoryError as error:
                raise out_of_memory_error(encoder, device) from error
            on_device = sum(t.nbytes for t in chain(encoder.parameters(), encoder.buffers()) if t.device == device)
            yield weight_bytes(encoder) - on_device
        finally:
            remove_hook_from_submodules(encoder)
            encoder.__dict__.pop("hf_device_map", None)
            for part, parameters, buffers in own:
                part._parameters.update(parameters)
                part._buffers.update(buffers)
