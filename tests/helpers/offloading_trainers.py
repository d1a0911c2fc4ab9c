"""Small stand-ins for what trainers use to run a model larger than the device: same attributes, same places, no speed.

Each function prepares a model on the CPU for `device` and gives it back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import linear

NUM_BLOCKS, NUM_SWAPPED = 6, 3


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(4)
        self.up, self.down = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu()) * self.scale


class Denoiser(torch.nn.Module):
    """A trained input layer before frozen blocks, so that gradients pass through all of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inp = torch.nn.Linear(3, 4)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(NUM_BLOCKS)).requires_grad_(False)
        self.out = torch.nn.Linear(4, 2).requires_grad_(False)
        self.around: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for number, block in enumerate(self.blocks):
            if self.around is not None:
                self.around.before(number)
            x = block(x)
            if self.around is not None:
                self.around.after(number)
        return self.out(x)

    def switch_block_swap_for_inference(self) -> None:
        self.around.forward_only = True
        self.around.prepare_block_devices_before_forward()

    def switch_block_swap_for_training(self) -> None:
        self.around.forward_only = False
        self.around.prepare_block_devices_before_forward()


class BlockSwapper:
    """The last blocks' weights are on the CPU; each takes the place of one of the first when that has run."""

    def __init__(self, model: Denoiser, device: torch.device, *, moves_norms: bool):
        self.num_blocks, self.blocks_to_swap, self.device = NUM_BLOCKS, NUM_SWAPPED, device
        self._blocks, self._moves_norms, self.forward_only = [*model.blocks], moves_norms, False
        model.to(device)
        for block in self._blocks:
            block.register_full_backward_hook(self._after_backward)
        self.prepare_block_devices_before_forward()

    def prepare_block_devices_before_forward(self) -> None:
        for number, block in enumerate(self._blocks):
            self._move(block, self.device if number < NUM_BLOCKS - NUM_SWAPPED else torch.device("cpu"))

    def wait_for_block(self, number: int) -> None:
        """All is there: nothing here is asynchronous."""

    before = wait_for_block

    def after(self, number: int) -> None:
        if number < NUM_SWAPPED:
            self._exchange(number, NUM_BLOCKS - NUM_SWAPPED + number)
        elif self.forward_only and number >= NUM_BLOCKS - NUM_SWAPPED:
            self._exchange(number, number - (NUM_BLOCKS - NUM_SWAPPED))

    def _after_backward(self, block: torch.nn.Module, *_: Any) -> None:
        number = self._blocks.index(block)
        if number >= NUM_BLOCKS - NUM_SWAPPED:
            self._exchange(number, number - (NUM_BLOCKS - NUM_SWAPPED))

    def _exchange(self, leaves: int, comes: int) -> None:
        self._move(self._blocks[leaves], torch.device("cpu"))
        self._move(self._blocks[comes], self.device)

    def _move(self, block: torch.nn.Module, device: torch.device) -> None:
        for module in block.modules():
            if isinstance(module, torch.nn.Linear) or (self._moves_norms and hasattr(module, "weight")):
                module.weight.data = module.weight.data.to(device)


def place(module: torch.nn.Module, device: torch.device) -> None:
    """As `module.to`, also while a graph holds its weights, which the simulated device cannot swap then."""
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            parameter.data = parameter.data.to(device)
        part._buffers.update({name: buffer.to(device) for name, buffer in part.named_buffers(recurse=False)})


class BlockStreamer:
    """Whole blocks are on the CPU, and go to the device for as long as they run. It does not say which device."""

    def __init__(self, model: Denoiser, device: torch.device):
        self.block_indices = set(range(NUM_BLOCKS - NUM_SWAPPED, NUM_BLOCKS))
        self.offload_device = torch.device("cpu")
        self._blocks, self._at = [*model.blocks], lambda: device
        model.to(device)
        for number in self.block_indices:
            self._blocks[number].to(self.offload_device)
            for module in self._blocks[number].modules():
                module.register_full_backward_pre_hook(self._before_backward(self._blocks[number]))
            self._blocks[number].register_full_backward_hook(lambda block, *_: place(block, self.offload_device))

    def _before_backward(self, block: torch.nn.Module) -> Callable[..., None]:
        return lambda *_: self.stream_in(block, self._at())

    def stream_in(self, block: torch.nn.Module, device: torch.device) -> None:
        place(block, device)

    def before(self, number: int) -> None:
        if number in self.block_indices:
            self.stream_in(self._blocks[number], self._at())

    def after(self, number: int) -> None:
        if number in self.block_indices:
            place(self._blocks[number], self.offload_device)


class LayerFetcher:
    """The weights of one layer are always on the CPU; its forward copies them."""

    def __init__(self, layer: torch.nn.Linear, device: torch.device):
        self._layer, self._device = layer, device
        layer.to("cpu")
        layer.forward = self.forward
        layer._layer_memory_manager, layer._memory_management_device = self, device

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self._layer.weight.to(self._device), self._layer.bias.to(self._device))


class Conductor:
    """Layers that are fetched and sent away inside the forward that takes the place of their own."""

    def __init__(self, device: torch.device):
        self._place = device

    def before_layer(self, layer: torch.nn.Module) -> None:
        layer.to(self._place)

    def after_layer(self, layer: torch.nn.Module) -> None:
        layer.to("cpu")


class ConductedLayer(torch.nn.Module):
    """A layer's replaced forward."""

    def __init__(self, layer: torch.nn.Module, conductor: Conductor):
        super().__init__()
        self.conductor, self._run, self._layer = conductor, layer.forward, lambda: layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.conductor.before_layer(self._layer())
        x = self._run(x)
        self.conductor.after_layer(self._layer())
        return x


def swapped(device: torch.device, *, moves_norms: bool) -> Denoiser:
    model = Denoiser()
    model.around = BlockSwapper(model, device, moves_norms=moves_norms)
    return model


def streamed(device: torch.device) -> Denoiser:
    model = Denoiser()
    model.around = BlockStreamer(model, device)
    return model


def fetched(device: torch.device) -> Denoiser:
    model = Denoiser().to(device)
    for module in [*model.modules()]:
        if isinstance(module, torch.nn.Linear):
            LayerFetcher(module, device)
    return model


def conducted(device: torch.device) -> Denoiser:
    model, conductor = Denoiser().to(device), Conductor(device)
    for number in range(1, NUM_BLOCKS):
        layer = model.blocks[number]
        layer.forward = ConductedLayer(layer, conductor).forward
        layer.to("cpu")
    return model
