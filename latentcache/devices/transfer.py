"""Copies between host and device that run beside the computation, where the device can do that."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

import torch

logger = logging.getLogger("latentcache")


class Download(Protocol):
    """Results on their way to the host."""

    def wait(self) -> dict[str, torch.Tensor]:
        """The CPU tensors. Errors of the device come up here."""


class Copies(Protocol):
    """Copies between the host and one device, for one thread and its current stream."""

    device: torch.device
    are_beside: bool
    """Whether copies run beside the computation: then it pays to launch the next batch before the last is fetched."""
    reason: str

    def host(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Fresh CPU memory for an upload, pinned where that helps."""

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """The CPU tensor on the device, for use on the current stream. The host does not wait; leave its memory be."""

    def download(self, tensors: Mapping[str, torch.Tensor]) -> Download:
        """Bring tensors of the current stream to the host. The host waits in `wait`, and the device does not."""


def copies_with(device: torch.device) -> Copies:
    """How to copy to and from this device: on a stream of their own where the device's module has streams."""
    if device.type == "cpu":
        return DirectCopies(device, "the CPU computes where the host's memory is")
    module = torch.get_device_module(device)
    missing = [name for name in ("Stream", "Event", "stream", "current_stream") if not hasattr(module, name)]
    if missing:
        return DirectCopies(device, f"{device.type} has no streams ({', '.join(missing)} missing)")
    return StreamCopies(device, module)


class DirectCopies:
    """Each copy has ended when the call returns."""

    are_beside = False

    def __init__(self, device: torch.device, reason: str):
        self.device, self.reason = device, reason

    def host(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.device)

    def download(self, tensors: Mapping[str, torch.Tensor]) -> Download:
        return _Done({name: tensor.cpu() for name, tensor in tensors.items()})


class StreamCopies:
    """Copies between the device and pinned memory run on a stream of their own.

    torch's allocator of pinned memory hands a block out again only when the copies that use it have ended, and
    `record_stream` makes the device's allocator do the same. So nothing needs to be held until then.
    """

    are_beside = True

    def __init__(self, device: torch.device, module: Any):
        self.device = device
        self.reason = f"{device.type} has streams: copies run beside the computation"
        self._module = module
        self._stream = module.Stream(device=device)
        self._pin = True

    def host(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if self._pin:
            try:
                return torch.empty(shape, dtype=dtype, pin_memory=True)
            except RuntimeError as error:
                # Locked memory may be limited. Copies from other memory are slower, and right.
                logger.warning("host memory cannot be pinned, so copies will be slower: %s", error)
                self._pin = False
        return torch.empty(shape, dtype=dtype)

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._module.stream(self._stream):
            moved = tensor.to(self.device, non_blocking=True)
            copied = self._stream.record_event()
        current = self._module.current_stream(self.device)
        current.wait_event(copied)
        moved.record_stream(current)
        return moved

    def download(self, tensors: Mapping[str, torch.Tensor]) -> Download:
        self._stream.wait_event(self._module.current_stream(self.device).record_event())
        copied = {}
        with self._module.stream(self._stream):
            for name, tensor in tensors.items():
                host = self.host(tuple(tensor.shape), tensor.dtype)
                copied[name] = host.copy_(tensor, non_blocking=True)
                tensor.record_stream(self._stream)
            event = self._sleeping_event()
            event.record(self._stream)
        return _OnStream(copied, event)

    def _sleeping_event(self) -> Any:
        """An event for which the host sleeps: by default CUDA's spin, on a core that could decode."""
        try:
            return self._module.Event(blocking=True)
        except TypeError:  # not every backend has the choice
            return self._module.Event()


class _Done:
    def __init__(self, tensors: dict[str, torch.Tensor]):
        self._tensors = tensors

    def wait(self) -> dict[str, torch.Tensor]:
        return self._tensors


class _OnStream:
    def __init__(self, tensors: dict[str, torch.Tensor], event: Any):
        self._tensors, self._event = tensors, event

    def wait(self) -> dict[str, torch.Tensor]:
        self._event.synchronize()
        return self._tensors
