"""From host buffers to the requesting device, beside the training step where the device can do that."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from latentcache.loading.batch import Batch

MAX_IN_FLIGHT = 2
"""Batches whose copies may be under way at once."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A batch on its way to the device. Before it is used it goes through `Transfer.receive`."""

    batch: Batch
    event: Any = None


class Transfer(Protocol):
    """`send` runs in the thread that reads, `receive` in the one that trains."""

    device: torch.device
    pin: bool
    reason: str
    """Why batches travel in this way."""

    def send(self, read: Callable[[], Batch], place: Callable[[Batch], Batch]) -> Sent:
        """Move the tensors of the batch that `read` gives to the device, and let `place` finish it there."""

    def receive(self, sent: Sent) -> Batch:
        """The batch, safe to use on the current stream of this thread."""

    def finish(self) -> None:
        """Wait until nothing reads the host batches any more. For the thread that sends."""


def transfer_to(device: torch.device) -> Transfer:
    """How batches get to this device: on a stream of their own where the device's module has streams."""
    if device.type == "cpu":
        return DirectTransfer(device, "the batch is used where it was read")
    module = torch.get_device_module(device)
    missing = [name for name in ("Stream", "stream", "current_stream") if not hasattr(module, name)]
    if missing:
        # Without streams a copy from pinned memory cannot run beside the step, so there is nothing to pin for.
        reason = f"{device.type} has no streams ({', '.join(missing)} missing): copies are made in the reading thread"
        return DirectTransfer(device, reason)
    return StreamTransfer(device, module)


class DirectTransfer:
    """The copy has ended when `send` returns."""

    pin = False

    def __init__(self, device: torch.device, reason: str):
        self.device, self.reason = device, reason

    def send(self, read: Callable[[], Batch], place: Callable[[Batch], Batch]) -> Sent:
        return Sent(place(read()))

    def receive(self, sent: Sent) -> Batch:
        return sent.batch

    def finish(self) -> None:
        """Nothing is under way."""


class StreamTransfer:
    """Copies from pinned memory run on a stream of their own, with all that `place` does after them.

    A host buffer stays lent until the copy from it has ended. The memory of the tensors that are handed over is not
    given to others before the stream that received them is done with them (`Tensor.record_stream`).
    """

    pin = True

    def __init__(self, device: torch.device, module: Any):
        self.device = device
        self.reason = f"{device.type} has streams: copies from pinned memory run beside the training step"
        self._module = module
        self._stream = module.Stream(device=device)
        self._under_way: deque[tuple[Any, Batch]] = deque()

    def send(self, read: Callable[[], Batch], place: Callable[[Batch], Batch]) -> Sent:
        while self._under_way and (len(self._under_way) >= MAX_IN_FLIGHT or self._under_way[0][0].query()):
            self._under_way[0][0].synchronize()
            self._under_way.popleft()
        with self._module.stream(self._stream):
            host = read()
            moved = {name: _moved(value, self.device) for name, value in host.items()}
            copied = self._stream.record_event()
            self._under_way.append((copied, host))
            batch = place(moved)
            return Sent(batch, self._stream.record_event())

    def receive(self, sent: Sent) -> Batch:
        current = self._module.current_stream(self.device)
        current.wait_event(sent.event)
        for tensor in tensors_of(sent.batch):
            tensor.record_stream(current)
        return sent.batch

    def finish(self) -> None:
        self._stream.synchronize()
        self._under_way.clear()


def tensors_of(batch: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors of a batch."""
    return [value for value in batch.values() if isinstance(value, torch.Tensor)]


def _moved(value: Any, device: torch.device) -> Any:
    return value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value
