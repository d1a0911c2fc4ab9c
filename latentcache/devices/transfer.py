"""Copies between the host and a device, concurrent with the computation where the device has streams.

A `Transfer` serves both directions. Precaching uploads pixels and tokens and downloads results; loading sends batches
from the thread that reads them to the thread that trains. Uploads and downloads have a stream each: a download begins
when the computation of its results has ended, and an upload behind it on one stream would overlap nothing.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from latentcache.devices.tensor_location import with_index
from latentcache.types import Batch

logger = logging.getLogger("latentcache")

MAX_IN_FLIGHT = 2
"""Batches whose copies may be under way at once."""


@dataclass(frozen=True, slots=True)
class Copies:
    """Values of which the tensors are on their way to the device or to the host; `event` ends their copies.

    `Transfer.receive` makes what was sent safe to use, and `wait` what was downloaded.
    """

    values: Batch
    event: Any = None

    def wait(self) -> Batch:
        """The values, once the copies have ended. The host waits, and errors of the device are raised here."""
        if self.event is not None:
            self.event.synchronize()
        return self.values


def transfer_to(device: torch.device) -> Transfer:
    """How to copy to and from this device: on streams of its own where the device's module has streams.

    All transfers of a device share its streams. Whoever sends batches needs a transfer of its own.
    """
    if device.type == "cpu":
        return Transfer(device)
    module = torch.get_device_module(device)
    if not all(hasattr(module, name) for name in ("Stream", "Event", "stream", "current_stream")):
        # Without streams a copy from pinned memory cannot overlap the computation, so nothing is pinned either.
        return Transfer(device)
    return StreamTransfer(device, module)


_streams: dict[tuple[int, Any, torch.device], tuple[Any, Any]] = {}


def _streams_of(device: torch.device, module: Any) -> tuple[Any, Any]:
    """The streams of this process for uploads to a device and for downloads from it.

    torch's allocator gives no memory from one stream to another, so every further stream would keep some of its own.
    """
    device = with_index(device)
    key = os.getpid(), module.Stream, device  # a fork has no streams; and no lock, which it could inherit locked
    if key not in _streams:
        _streams.setdefault(key, (module.Stream(device=device), module.Stream(device=device)))
    return _streams[key]


class Transfer:
    """Copies that have ended when the call returns."""

    overlaps = False
    """Whether copies overlap the computation. Then pinned memory and launching one batch ahead pay off."""

    def __init__(self, device: torch.device):
        self.device = device
        self._pins = self.overlaps

    def host_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Fresh CPU memory for an upload, pinned where that helps. After one failure to pin, nothing is pinned."""
        if self._pins:
            try:
                return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
            except RuntimeError as error:
                # Locked memory may be limited. Copies from other memory are slower, and right.
                logger.warning("host memory cannot be pinned, so copies will be slower: %s", error)
                self._pins = False
        return torch.empty(shape, dtype=dtype, device="cpu")

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """The CPU tensor on the device, for use on the current stream. The host does not wait.

        The caller must not write to `tensor` afterwards, as the copy may still be under way.
        """
        return tensor.to(self.device)

    def download(self, tensors: Mapping[str, torch.Tensor]) -> Copies:
        """Bring tensors of the current stream to the host, which waits in `wait`. The device computes meanwhile."""
        return Copies({name: tensor.cpu() for name, tensor in tensors.items()})

    def send(self, read: Callable[[], Batch], place: Callable[[Batch], Batch]) -> Copies:
        """Move the tensors of the batch that `read` gives to the device, and let `place` finish it there.

        This runs in the thread that reads, and `receive` in the one that trains.
        """
        return Copies(place(read()))

    def receive(self, sent: Copies) -> Batch:
        """The batch, safe to use on the current stream of this thread."""
        return sent.values

    def finish(self) -> None:
        """Wait until no copy reads the host batches any more. For the thread that sends."""


class StreamTransfer(Transfer):
    """Copies between the device and pinned memory run on streams of their own, and `place` runs after those of `send`.

    The device's allocator reuses the memory of a tensor only when the stream that received it is done with it
    (`Tensor.record_stream`). torch's allocator of pinned memory knows the copies that use a block of `host_memory`, but
    not those of an array's tensor in one, so `send` keeps host batches until the copies from them have ended.
    """

    overlaps = True

    def __init__(self, device: torch.device, module: Any):
        super().__init__(device)
        self._module = module
        self._uploads, self._downloads = _streams_of(device, module)
        self._under_way: deque[tuple[Any, Batch]] = deque()

    @override
    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._pins and not tensor.is_pinned():
            tensor = self.host_memory(tuple(tensor.shape), tensor.dtype).copy_(tensor)
        with self._module.stream(self._uploads):
            moved = tensor.to(self.device, non_blocking=True)
            copied = self._uploads.record_event()
        self._pass_to_current_stream([moved], copied)
        return moved

    @override
    def download(self, tensors: Mapping[str, torch.Tensor]) -> Copies:
        self._downloads.wait_event(self._module.current_stream(self.device).record_event())
        copied = {}
        with self._module.stream(self._downloads):
            for name, tensor in tensors.items():
                host = self.host_memory(tuple(tensor.shape), tensor.dtype)
                copied[name] = host.copy_(tensor, non_blocking=True)
                tensor.record_stream(self._downloads)
            event = self._sleeping_event(self._downloads)
        return Copies(copied, event)

    @override
    def send(self, read: Callable[[], Batch], place: Callable[[Batch], Batch]) -> Copies:
        while self._under_way and (len(self._under_way) >= MAX_IN_FLIGHT or self._under_way[0][0].query()):
            self._under_way[0][0].synchronize()
            self._under_way.popleft()
        with self._module.stream(self._uploads):
            host = read()
            moved = {
                name: value.to(self.device, non_blocking=True) if isinstance(value, torch.Tensor) else value
                for name, value in host.items()
            }
            self._under_way.append((self._sleeping_event(self._uploads), host))
            batch = place(moved)
            return Copies(batch, self._uploads.record_event())

    @override
    def receive(self, sent: Copies) -> Batch:
        tensors = (value for value in sent.values.values() if isinstance(value, torch.Tensor))
        self._pass_to_current_stream(tensors, sent.event)
        return sent.values

    @override
    def finish(self) -> None:
        self._uploads.synchronize()
        self._under_way.clear()

    def _pass_to_current_stream(self, tensors: Iterable[torch.Tensor], event: Any) -> None:
        current = self._module.current_stream(self.device)
        current.wait_event(event)
        for tensor in tensors:
            tensor.record_stream(current)

    def _sleeping_event(self, stream: Any) -> Any:
        """Record a blocking event: `synchronize` yields the core. By default CUDA busy-waits."""
        try:
            event = self._module.Event(blocking=True)
        except TypeError:  # not every backend has the choice
            event = self._module.Event()
        event.record(stream)
        return event
