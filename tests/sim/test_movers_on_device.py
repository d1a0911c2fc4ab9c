"""Models whose trainer moves their weights: no false alarms, and weights that were really forgotten are named."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from latentcache import Phases, audit, guard
from latentcache.errors import DeviceError, DeviceMismatchError

CPU = torch.device("cpu")


class Layer(torch.nn.Linear):
    """Returns its input, so its weights can be anywhere."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Denoiser(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
        blocks = (torch.nn.Sequential(OrderedDict(norm=torch.nn.LayerNorm(4), up=Layer(4, 4))) for _ in range(4))
        self.blocks = torch.nn.ModuleList(blocks).requires_grad_(False)
        self.bring: Callable[[Any], object] = lambda block: None
        """Called before each block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            self.bring(block)
            x = block(x)
        return self.out(x)


# What trainers do after `model.to(device)`


def swap_weights(model: Denoiser, device: torch.device) -> None:
    """Block swap of musubi-tuner and sd-scripts: the weights of the last blocks wait on the CPU."""
    model.swapper = SimpleNamespace(wait_for_block=None, blocks_to_swap=2, num_blocks=4, device=device)

    def move(block: Any, to: torch.device = device) -> None:
        block.up.weight.data = block.up.weight.data.to(to)

    model.bring = move
    for block in model.blocks[2:]:
        move(block, CPU)


def stream_blocks(model: Denoiser, device: torch.device) -> None:
    """SimpleTuner: whole blocks wait on the CPU, and it does not reveal their device."""
    model.streamer = SimpleNamespace(stream_in=None, block_indices={2, 3})
    model.bring = lambda block: block.to(device)
    model.blocks[2:].to(CPU)


def fetch_layers(model: Denoiser, device: torch.device) -> None:
    """ai-toolkit: a layer's weights stay on the CPU, and its forward copies them."""
    for block in model.blocks:
        block.up.to(CPU)
        block.up._layer_memory_manager, block.up._memory_management_device = SimpleNamespace(), device


def conduct_blocks(model: Denoiser, device: torch.device) -> None:
    """OneTrainer: a layer's forward is replaced by one that fetches the layer first."""
    for block in model.blocks:
        Conductor(block, device)


class Conductor:
    def __init__(self, layer: torch.nn.Module, device: torch.device):
        self.conductor, self._layer, self._run, self._device = self, layer.to(CPU), layer.forward, device
        layer.forward = self.forward

    def before_layer(self) -> None:
        self._layer.to(self._device)

    def after_layer(self) -> None:
        self._layer.to(CPU)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.before_layer()
        x = self._run(x)
        self.after_layer()
        return x


MOVERS: dict[Callable[[Denoiser, torch.device], None], str] = {
    swap_weights: "inp",
    stream_blocks: "inp",
    fetch_layers: "blocks.2.norm",
    conduct_blocks: "inp",
}
"""Each with a submodule that it does not move."""


@torch.no_grad()
@pytest.mark.parametrize("move", MOVERS)
def test_weights_that_are_moved_pass_and_what_was_forgotten_beside_them_is_named(
    move: Callable[..., None], device: torch.device
) -> None:
    model, inputs = Denoiser().to(device), torch.zeros(5, 4, device=device)
    move(model, device)
    for given in ({}, {"device": device}, {"managed": ["unet.blocks"]}):
        report = audit({"unet": model, "batch": inputs}, **given)
        assert not report.findings, report.to_text()
        assert any("moved by" in note for note in report.notes)
    with guard(model):
        model(inputs)
    assert Phases({"unet": model}, device=device).not_moved()["unet"].startswith("its weights are moved by ")
    assert not audit({"unet": model}, device="cpu").ok, "declared to be parked, and parts of it are on the device"
    forgotten = MOVERS[move]
    model.get_submodule(forgotten).to("cpu")
    report = audit({"unet": model}, device=device)
    assert [each.name for each in report.errors] == [f"{forgotten}.weight", f"{forgotten}.bias"]
    with guard(model), pytest.raises(DeviceMismatchError) as caught:
        model(inputs)
    assert caught.value.module == forgotten.removesuffix(".norm"), "a block gets its norm's input first"


@torch.no_grad()
def test_a_second_forward_under_block_swap_without_a_backward_is_a_real_mismatch(device: torch.device) -> None:
    """The first forward left the first blocks on the CPU."""
    model = Denoiser().to(device)
    swap_weights(model, device)
    model.bring = lambda block: None
    model.blocks[0].up.to(CPU)
    with guard(model), pytest.raises(DeviceMismatchError) as caught:
        model(torch.zeros(5, 4, device=device))
    assert caught.value.module == "blocks.0.up"


def test_what_moves_itself_in_another_way_can_be_named(device: torch.device) -> None:
    model = Denoiser().to(device)
    model.blocks[3].up.to("cpu")
    assert len(audit({"unet": model}, device=device).errors) == 2
    report = audit({"unet": model}, device=device, managed=["unet.blocks"])
    assert report.ok and "2 left where they are, moved by what `managed` names" in report.to_text()
    with guard(model, managed=["blocks"]):
        model(torch.zeros(5, 4, device=device))
    model.inp.to("cpu")
    assert len(audit({"unet": model}, device=device, managed=["unet.blocks"]).errors) == 2
    with pytest.raises(DeviceError, match=r"managed: nothing in the parts is called unet\.block"):
        audit({"unet": model}, managed=["unet.block"])
    with pytest.raises(DeviceError, match="managed: there is no submodule 'block'"), guard(model, managed=["block"]):
        pass
