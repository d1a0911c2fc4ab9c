"""Weights whose memory another tensor shares: parking them would part the two. Mapped files are no such memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from accelerate import init_empty_weights
from helpers.phase_training import Training

from latentcache.models.tiny import tiny_parts
from latentcache.phases.phases import Phase, Phases

CPU = torch.device("cpu")
FILL = Phase(on_device=())


@pytest.fixture
def sides(device: torch.device) -> tuple[torch.device, torch.device]:
    """Where training is, and where parts are parked. A view on the simulated device has storage of its own."""
    return (CPU, device) if device.type == "sim" else (device, CPU)


def over_all(net: torch.nn.Linear, flat: torch.Tensor) -> None:
    """As DeepSpeed ZeRO-1 and 2, and Apex, have it."""
    net.weight.data, net.bias.data = flat[:6].view(2, 3), flat[6:]


def over_one(net: torch.nn.Linear, flat: torch.Tensor) -> None:
    """A buffer that one weight fills."""
    net.weight.data = flat.view(2, 3)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("lay", "num"), [(over_all, 8), (over_one, 6)])
def test_what_a_flat_buffer_writes_is_in_the_weights_after_a_phase(
    lay: Callable[..., None], num: int, frozen: bool, nested: bool, sides: tuple[torch.device, torch.device]
) -> None:
    here, park = sides
    net = torch.nn.Linear(3, 2).to(here)
    flat = torch.zeros(num, device=here)
    lay(net, flat)
    phases = Phases({"unet": net}, device=here, park=park)
    phases.start("train")
    if nested:
        with phases.enter("validate"):
            net.requires_grad_(not frozen)
            with phases.enter(FILL):
                torch.nn.Module.to(net, torch.float64)
    else:
        net.requires_grad_(not frozen)
        with phases.enter(FILL):
            pass
    flat.fill_(7)
    assert (net.weight == 7).all()
    assert phases.not_moved() == {
        "unet": "weight shares its memory with another tensor, such as an optimizer's flat buffer or a kept state_dict"
    }


@pytest.mark.parametrize("owner", ["waiting gradients", "an open phase"])
def test_weights_of_a_training_are_parked(owner: str, sides: tuple[torch.device, torch.device]) -> None:
    here, park = sides
    training = Training(here)
    phases = Phases(training.parts, device=here, park=park)
    phases.start("train")
    training.step()
    if owner == "waiting gradients":
        training.predict(
            training.latents.to(here), torch.ones(1, device=here), torch.tensor([5, 6], device=here)
        ).sum().backward()
        assert phases.not_moved() == {}
        with phases.enter(FILL):
            assert phases.on_device() == frozenset()
    else:
        with phases.enter("validate"), phases.enter(FILL):
            assert phases.on_device() == frozenset() and phases.not_moved() == {}
        assert phases.not_moved() == {}
    assert next(training.unet.parameters()).device == here


def from_safetensors(path: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(path)


def from_a_flat_buffer(path: Path) -> dict[str, torch.Tensor]:
    """Of which nobody knows what it is for. What is parked is given back in its own memory."""
    state = from_safetensors(path)
    flat = torch.cat([values.flatten() for values in state.values()])
    parts = flat.split([values.numel() for values in state.values()])
    return {name: part.view(values.shape) for (name, values), part in zip(state.items(), parts, strict=True)}


@pytest.mark.parametrize("load", [from_safetensors, from_a_flat_buffer])
def test_a_part_that_was_loaded_without_a_copy_is_lent_and_given_back(
    load: Callable[[Path], dict[str, torch.Tensor]], tmp_path: Path, device: torch.device
) -> None:
    """The tensors lie in the file, in order, and the caller may still hold them."""
    path = tmp_path / "vae.safetensors"
    vae = tiny_parts(1)["vae"]
    safetensors.torch.save_file(vae.state_dict(), path)
    with init_empty_weights():
        vae = type(vae).from_config(vae.config)
    state: Any = load(path)
    vae.load_state_dict(state, assign=True)
    memory = [parameter.data_ptr() for parameter in vae.parameters()]
    phases = Phases({"unet": torch.nn.Linear(3, 2), "vae": vae.requires_grad_(False)}, device=device)
    phases.start("train")
    assert phases.not_moved() == {}
    with phases.lend("vae"):
        assert phases.on_device() == {"unet", "vae"}
        assert vae(torch.zeros(1, 3, 64, 64, device=device)).sample.device == device
    assert phases.on_device() == {"unet"}
    assert [parameter.data_ptr() for parameter in vae.parameters()] == memory
