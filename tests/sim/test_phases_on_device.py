"""The phase switch on a second device: what moves away comes back, and training goes on bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, cpu_offload_with_hook
from diffusers.training_utils import EMAModel
from helpers.phase_runs import Scenario, assert_as_without, cold, each_in_turn, leave_no_trace, name_of

from latentcache.errors import PhaseError
from latentcache.phases.phases import Phase, Phases

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("variant", "scenario"),
    [("plain", each_in_turn), ("amp", cold), ("schedule-free", cold), ("text-encoder", cold)],
    ids=name_of,
)
def test_training_goes_on_bit_by_bit(variant: str, scenario: Scenario, device: torch.device) -> None:
    """The variants with LoRA and an EMA are those of a validation by the runner."""
    assert_as_without(scenario, device, variant)


@pytest.mark.parametrize("variant", ["amp", "lora"])
def test_all_disturbances_at_once_are_put_back(variant: str, device: torch.device) -> None:
    leave_no_trace(device, variant)


def small_parts(device: torch.device) -> dict[str, Any]:
    """The UNet is trained on the device, the others wait on the CPU."""
    unet, vae = torch.nn.Linear(3, 3).to(device), torch.nn.Linear(3, 3).requires_grad_(False)
    encoder = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)).requires_grad_(False)
    return {"unet": unet, "vae": vae, "encoder": encoder}


def test_sequential_offload_is_refused_on_what_is_trained(device: torch.device) -> None:
    parts = small_parts(device)
    phases = Phases(parts, device=device)
    phases.start("train")
    with phases.enter("validate"):
        cpu_offload(parts["unet"], device)
        with pytest.raises(PhaseError, match="replaces their Parameters"), phases.lend("vae"):
            pytest.fail("the phase began")
    with pytest.raises(PhaseError, match="replaces their Parameters"):
        phases.start("train")


class Params4bit(torch.nn.Parameter):
    """As bitsandbytes has it."""

    __module__ = "bitsandbytes.nn.modules"


def quantised(module: Any, device: torch.device) -> None:
    module[0].weight = Params4bit(module[0].weight.data, requires_grad=False)


def partitioned(module: Any, device: torch.device) -> None:
    for number, parameter in enumerate(module.parameters()):
        parameter.ds_id = number


def sharded(module: Any, device: torch.device) -> None:
    for parameter in module.parameters():
        parameter.device_mesh = None


def hooked(module: Any, device: torch.device) -> None:
    cpu_offload_with_hook(module, device)


@pytest.mark.parametrize(
    ("manage", "reason"),
    [
        (quantised, "is a bitsandbytes Params4bit"),
        (partitioned, "is a partition of DeepSpeed ZeRO-3"),
        (sharded, "is a shard of FSDP"),
        (hooked, "under offload hooks, which move it"),
    ],
)
def test_what_other_software_places_is_left_where_it_is(
    manage: Callable[..., None], reason: str, device: torch.device
) -> None:
    for place in (CPU, device):
        parts = small_parts(device)
        encoder = parts["encoder"].to(place)
        manage(encoder, device)
        phases = Phases(parts, device=device)
        assert list(phases.not_moved()) == ["encoder"] and reason in phases.not_moved()["encoder"]
        before = [tensor.device for tensor in (*encoder.parameters(), *encoder.buffers())]
        phases.start("train")
        with phases.enter(Phase(on_device=("vae",))), phases.lend("encoder"):
            assert "vae" in phases.on_device()
            assert [tensor.device for tensor in (*encoder.parameters(), *encoder.buffers())] == before
        assert [tensor.device for tensor in (*encoder.parameters(), *encoder.buffers())] == before


def test_a_refused_phase_leaves_no_old_values_to_a_later_one(device: torch.device) -> None:
    """Memory that it kept is not put back: the weights have been moved and trained since."""
    parts = small_parts(device)
    unet, ema = parts["unet"], EMAModel([torch.zeros(1)])  # of another model
    phases = Phases({**parts, "ema": ema}, device=device)
    phases.start("train")
    with pytest.raises(PhaseError, match="averages 1 parameters"), phases.enter("validate"):
        pytest.fail("the phase began")
    unet.to(CPU)
    unet.to(device)
    with torch.no_grad():
        unet.weight.fill_(7)
    del phases.parts["ema"]
    with phases.enter("validate"):
        pass
    assert (unet.weight == 7).all()
