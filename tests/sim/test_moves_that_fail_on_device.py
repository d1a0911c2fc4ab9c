"""A device without room: the order of moves at both ends of a phase, and parts that stay whole when a move fails."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from latentcache.errors import PhaseError
from latentcache.phases.phases import Phase, Phases

CPU = torch.device("cpu")
DECODE = Phase(on_device=("vae",))


class Card(TorchDispatchMode):
    """A device on which `room` bytes of tensors fit, and a host on which `host_room` more do. `peak` is in bytes."""

    def __init__(self, device: torch.device, room: int):
        super().__init__()
        self.device, self.room, self.host_room, self.peak = device, room, 1 << 30, 0

    def used(self) -> int:
        tensors = [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor)]
        return sum({t.data_ptr(): t.nbytes for t in tensors if t.device == self.device}.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.aten._to_copy.default:
            (tensor,), target = args, kwargs.get("device")
            if target == self.device:
                needed = self.used() + tensor.nbytes
                if needed > self.room:
                    raise torch.OutOfMemoryError("no room on the device")
                self.peak = max(self.peak, needed)
            elif target == CPU != tensor.device:
                self.host_room -= tensor.nbytes
                if self.host_room < 0:
                    raise RuntimeError("no room on the host")
        return func(*args, **(kwargs or {}))


class Net(torch.nn.Sequential):
    """Two tensors of 64 KiB each."""

    SIZE = 1 << 17

    def __init__(self) -> None:
        layers = [torch.nn.Linear(128, 128, bias=False) for _ in range(2)]
        super().__init__(*layers)

    def places(self) -> set[str]:
        return {parameter.device.type for parameter in self.parameters()}


@pytest.fixture
def card(device: torch.device) -> Iterator[Card]:
    """With room for one part."""
    gc.collect()
    card = Card(device, 0)
    card.room = card.used() + Net.SIZE
    with card:
        yield card


@pytest.fixture
def parts() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"unet": Net(), "vae": Net().requires_grad_(False)}


@pytest.fixture
def phases(parts: dict[str, Any], device: torch.device, card: Card) -> Phases:
    phases = Phases(parts, device=device)
    phases.start("train")
    return phases


def test_a_phase_needs_no_more_room_at_its_end_than_at_its_beginning(
    phases: Phases, parts: dict[str, Any], card: Card, device: torch.device
) -> None:
    memory = [parameter.data_ptr() for parameter in parts["vae"].parameters()]
    with phases.enter(DECODE):
        assert phases.on_device() == {"vae"}
        with phases.enter(Phase(on_device=("unet",))):
            assert phases.on_device() == {"unet"}
        assert phases.on_device() == {"vae"}
    assert phases.on_device() == {"unet"} and card.peak == card.room
    assert [parameter.data_ptr() for parameter in parts["vae"].parameters()] == memory


def test_no_room_at_the_end_of_a_phase_leaves_parts_whole_and_place_repairs(
    phases: Phases, parts: dict[str, Any], card: Card, device: torch.device
) -> None:
    values = [parameter.detach().cpu() for parameter in parts["unet"].parameters()]
    memory = [parameter.data_ptr() for parameter in parts["vae"].parameters()]
    with (
        pytest.raises(PhaseError, match=r"no room on the device.*call Phases\.place\(\)") as caught,
        phases.enter(DECODE),
    ):
        parts["unet"].eval()
        card.room -= 1
    assert len(caught.value.offenders) == 1 and caught.value.offenders[0].startswith("unet: OutOfMemoryError")
    assert parts["unet"].places() == parts["vae"].places() == {"cpu"}
    assert parts["unet"].training and phases.current == "train"
    card.room += 1
    phases.place()
    assert parts["unet"].places() == {device.type} and parts["vae"].places() == {"cpu"}
    assert all(torch.equal(p.cpu(), v) for p, v in zip(parts["unet"].parameters(), values, strict=True))
    assert [parameter.data_ptr() for parameter in parts["vae"].parameters()] == memory


def test_no_room_at_the_beginning_of_a_phase_changes_nothing(
    phases: Phases, parts: dict[str, Any], card: Card, device: torch.device
) -> None:
    memory = [(tensor.device, tensor.data_ptr()) for tensor in parts["vae"].parameters()]
    card.room += Net.SIZE - 1
    with pytest.raises(torch.OutOfMemoryError), phases.lend("vae"):
        pytest.fail("the phase began")
    assert parts["unet"].places() == {device.type}
    assert [(tensor.device, tensor.data_ptr()) for tensor in parts["vae"].parameters()] == memory
    assert phases.current == "train"
