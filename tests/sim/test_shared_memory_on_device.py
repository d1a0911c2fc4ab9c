"""Weights whose memory another tensor shares: parking them would part the two. Mapped files are no such memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from accelerate import init_empty_weights
from helpers.phase_runs import forward
from helpers.phase_training import Training

from latentcache.models.tiny import tiny_parts
from latentcache.phases.phases import Phase, Phases

CPU = torch.device("cpu")
FILL = Phase(on_device=())


@pytest.fixture
def sides(device: torch.device) -> tuple[torch.device, torch.device]:
    """Where training is, and where parts are parked. A view on the simulated device has storage of its own."""
    return (CPU, device) if device.type == "sim" else (device, CPU)


@pytest.mark.parametrize("num", [8, 6])
def test_what_a_flat_buffer_writes_is_in_the_weights_after_a_phase(
    num: int, sides: tuple[torch.device, torch.device]
) -> None:
    """Over all of a layer, as DeepSpeed ZeRO-1 and 2, and Apex, have it, or filled by one weight."""
    here, park = sides
    net, flat = torch.nn.Linear(3, 2).to(here), torch.zeros(num, device=here)
    net.weight.data = flat[:6].view(2, 3)
    if num == 8:
        net.bias.data = flat[6:]
    phases = Phases({"unet": net}, device=here, park=park)
    phases.start("train")
    with phases.enter(FILL):
        pass
    with phases.enter("validate"):
        net.requires_grad_(False)
        with phases.enter(FILL):
            torch.nn.Module.to(net, torch.float64)
    flat.fill_(7)
    assert (net.weight == 7).all()
    assert phases.not_moved() == {
        "unet": "weight shares its memory with another tensor, such as an optimizer's flat buffer or a kept state_dict"
    }


def test_weights_of_a_training_are_parked(sides: tuple[torch.device, torch.device]) -> None:
    """Neither gradients that wait nor an open phase are such a tensor."""
    here, park = sides
    training = Training(here)
    phases = Phases(training.parts, device=here, park=park)
    phases.start("train")
    training.step()
    forward(training).sum().backward()
    assert phases.not_moved() == {}
    with phases.enter("validate"), phases.enter(FILL):
        assert phases.on_device() == frozenset() and phases.not_moved() == {}
    assert next(training.unet.parameters()).device == here


def as_loaded(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return state


def as_a_flat_buffer(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of which nobody knows what it is for. What is parked is given back in its own memory."""
    flat = torch.cat([values.flatten() for values in state.values()])
    parts = flat.split([values.numel() for values in state.values()])
    return {name: part.view(values.shape) for (name, values), part in zip(state.items(), parts, strict=True)}


@pytest.mark.parametrize("laid", [as_loaded, as_a_flat_buffer])
def test_a_part_that_was_loaded_without_a_copy_is_lent_and_given_back(
    laid: Callable[..., dict[str, torch.Tensor]], tmp_path: Path, device: torch.device
) -> None:
    """The tensors lie in the file, in order, and the caller may still hold them."""
    vae = tiny_parts(1)["vae"]
    safetensors.torch.save_file(vae.state_dict(), tmp_path / "vae.safetensors")
    with init_empty_weights():
        vae = type(vae).from_config(vae.config)
    state = laid(safetensors.torch.load_file(tmp_path / "vae.safetensors"))
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
