"""Copies between the host and a device, which overlap the computation if the device has streams.

A `Transfer` works in both directions. Precaching uploads pixels and tokens and downloads results; loading sends batches
from the thread that reads them to the thread that trains. Uploads and downloads have a stream each. A download waits
for the computation of its results, so on a shared stream the next upload would wait behind it and overlap nothing.
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
"""Upper bound of the batches whose copies are in flight at once."""


@dataclass(frozen=True, slots=True)
class Copies:
    """Values whose tensors are being copied to the device or the host; `event` marks the end of the copies.

    Use `Transfer.receive` before using values that were sent, and `wait` before using values that were downloaded.
    """

    values: Batch
    event: Any = None

    def wait(self) -> Batch:
        """Wait for the copies and return the values. Errors of the device are raised here."""
        if self.event is not None:
            self.event.synchronize()
        return self.values


def transfer_to(device: torch.device) -> Transfer:
    """A transfer to and from this device, on separate streams if its backend has streams.

    All transfers of a device share its streams. Each sender of batches needs a transfer of its own.
    """
    if device.type == "cpu":
        return Transfer(device)
    module = torch.get_device_module(device)
    if not all(hasattr(module, name) for name in ("Stream", "Event", "stream", "current_stream")):
        # Without streams no copy overlaps the computation, so pinning memory would gain nothing.
        return Transfer(device)
    return StreamTransfer(device, module)


_streams: dict[tuple[int, Any, torch.device], tuple[Any, Any]] = {}


def _streams_of(device: torch.device, module: Any) -> tuple[Any, Any]:
    """This process's streams for uploads to a device and for downloads from it.

    They are shared because torch's allocator caches memory per stream: each further stream would hold on to more.
    """
    device = with_index(device)
    key = os.getpid(), module.Stream, device  # a fork needs its own streams; a lock could be inherited locked
    if key not in _streams:
        _streams.setdefault(key, (module.Stream(device=device), module.Stream(device=device)))
    return _streams[key]


class Transfer:
    """Synchronous copies: each has ended when its call returns."""

    overlaps = False
    """Whether copies overlap the computation, so that pinned memory and launching one batch ahead pay off."""

    def __init__(self, device: torch.device):
        self.device = device
        self._pins = self.overlaps

    def host_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """New CPU memory for an upload, pinned if that helps. After the first failure to pin, nothing is pinned."""
        if self._pins:
            try:
                return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
            except RuntimeError as error:
                # Locked memory may be limited. Copies from pageable memory are slower, but correct.
                logger.warning("host memory cannot be pinned, so copies will be slower: %s", error)
                self._pins = False
        return torch.empty(shape, dtype=dtype, device="cpu")

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a CPU tensor to the device, for use on the current stream. The host does not wait.

        The caller must not write to `tensor` afterwards: the copy may still be in flight.
        """
        return tensor.to(self.device)

    def download(self, tensors: Mapping[str, torch.Tensor]) -> Copies:
        """Copy tensors of the current stream to the host. The host waits only in `wait`; the device keeps computing."""
        return Copies({name: tensor.cpu() for name, tensor in tensors.items()})

    def send(self, read: Callable[[], Batch], place: Callable[[Batch], Batch]) -> Copies:
        """Copy the batch that `read` returns to the device, and let `place` finish it there.

        Call this in the thread that reads, and `receive` in the thread that trains.
        """
        return Copies(place(read()))

    def receive(self, sent: Copies) -> Batch:
        """The batch, safe to use on the current stream of this thread."""
        return sent.values

    def finish(self) -> None:
        """Wait until no copy reads the host batches any more. Call this in the thread that sends."""


class StreamTransfer(Transfer):
    """Asynchronous copies on streams of their own, to and from pinned memory. `place` runs on the uploads' stream.

    The device's allocator reuses a tensor's memory only after the stream that received it is done with it
    (`Tensor.record_stream`). torch's pinned-memory allocator tracks copies from the tensors of `host_memory`, but not
    from tensors over NumPy views of them, so `send` keeps host batches until the copies from them have ended.
    """

    overlaps = True

    def __init__(self, device: torch.device, module: Any):
        super().__init__(device)
        self._module = module
        self._uploads, self._downloads = _streams_of(device, module)
        self._in_flight: deque[tuple[Any, Batch]] = deque()

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
        while self._in_flight and (len(self._in_flight) >= MAX_IN_FLIGHT or self._in_flight[0][0].query()):
            self._in_flight[0][0].synchronize()
            self._in_flight.popleft()
        with self._module.stream(self._uploads):
            host = read()
            moved = {
                name: value.to(self.device, non_blocking=True) if isinstance(value, torch.Tensor) else value
                for name, value in host.items()
            }
            self._in_flight.append((self._sleeping_event(self._uploads), host))
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
        self._in_flight.clear()

    def _pass_to_current_stream(self, tensors: Iterable[torch.Tensor], event: Any) -> None:
        current = self._module.current_stream(self.device)
        current.wait_event(event)
        for tensor in tensors:
            tensor.record_stream(current)

    def _sleeping_event(self, stream: Any) -> Any:
        """Record an event whose `synchronize` blocks the thread instead of spinning, as CUDA's does by default."""
        try:
            event = self._module.Event(blocking=True)
        except TypeError:  # not every backend has this option
            event = self._module.Event()
        event.record(stream)
        return event
