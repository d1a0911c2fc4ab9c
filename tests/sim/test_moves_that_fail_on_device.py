"""A device without room: the order of moves at both ends of a phase, and parts that stay whole when a move fails."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from latentcache.errors import PhaseError
from latentcache.phases.phases import Phase, Phases

DECODE = Phase(on_device=("vae",))


class Card(TorchDispatchMode):
    """A device on which `room` bytes of tensors fit. `peak` is in bytes."""

    def __init__(self, device: torch.device, room: int):
        super().__init__()
        self.device, self.room, self.peak = device, room, 0

    def used(self) -> int:
        """By all tensors that were made in the test, copies that nobody should keep among them."""
        tensors = [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor)]
        return sum({t.data_ptr(): t.nbytes for t in tensors if t.device == self.device}.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.aten._to_copy.default and kwargs.get("device") == self.device:
            needed = self.used() + args[0].nbytes
            if needed > self.room:
                raise torch.OutOfMemoryError("no room on the device")
            self.peak = max(self.peak, needed)
        return func(*args, **(kwargs or {}))


class Net(torch.nn.Sequential):
    """Two tensors of 64 KiB each."""

    SIZE = 1 << 17

    def __init__(self) -> None:
        super().__init__(*(torch.nn.Linear(128, 128, bias=False) for _ in range(2)))

    def places(self) -> set[str]:
        return {parameter.device.type for parameter in self.parameters()}

    def memory(self) -> list[tuple[torch.device, int]]:
        return [(parameter.device, parameter.data_ptr()) for parameter in self.parameters()]


@pytest.fixture
def run(device: torch.device) -> Iterator[SimpleNamespace]:
    """A trained UNet on the device, a parked VAE, and a card with room for one of them."""
    gc.freeze()  # what was there before is not counted
    run = SimpleNamespace(card=Card(device, Net.SIZE), unet=Net(), vae=Net().requires_grad_(False))
    run.phases = Phases({"unet": run.unet, "vae": run.vae}, device=device)
    with run.card:
        run.phases.start("train")
        yield run
    gc.unfreeze()


def test_a_phase_needs_no_more_room_at_its_end_than_at_its_beginning(run: Any) -> None:
    memory = run.vae.memory()
    with run.phases.enter(DECODE):
        assert run.phases.on_device() == {"vae"}
        with run.phases.enter(Phase(on_device=("unet",))):
            assert run.phases.on_device() == {"unet"}
        assert run.phases.on_device() == {"vae"}
    assert run.phases.on_device() == {"unet"} and run.card.peak == run.card.room
    assert run.vae.memory() == memory


def test_no_room_at_the_end_of_a_phase_leaves_parts_whole_and_place_repairs(run: Any, device: torch.device) -> None:
    values = [parameter.detach().cpu() for parameter in run.unet.parameters()]
    memory = run.vae.memory()
    no_room = pytest.raises(PhaseError, match=r"no room on the device.*call Phases\.place\(\)")
    with no_room as caught, run.phases.enter(DECODE):
        run.unet.eval()
        run.card.room -= 1
    assert len(caught.value.offenders) == 1 and caught.value.offenders[0].startswith("unet: OutOfMemoryError")
    assert run.unet.places() == run.vae.places() == {"cpu"}
    assert run.unet.training and run.phases.current == "train"
    run.card.room += 1
    run.phases.place()
    assert run.unet.places() == {device.type} and run.vae.memory() == memory
    assert all(torch.equal(p.cpu(), v) for p, v in zip(run.unet.parameters(), values, strict=True))


def test_no_room_at_the_beginning_of_a_phase_changes_nothing(run: Any, device: torch.device) -> None:
    memory = run.vae.memory()
    run.card.room += Net.SIZE - 1
    with pytest.raises(torch.OutOfMemoryError), run.phases.lend("vae"):
        pytest.fail("the phase began")
    assert run.unet.places() == {device.type} and run.vae.memory() == memory
    assert run.phases.current == "train"
