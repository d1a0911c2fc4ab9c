"""The phase switch on a second device: what moves away comes back, and training goes on bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import cpu_offload, cpu_offload_with_hook
from helpers.phase_runs import Scenario, assert_as_without, cold, each_in_turn, leave_no_trace, name_of
from helpers.phase_training import Training

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


def test_sequential_offload_is_refused_on_what_is_trained(device: torch.device) -> None:
    training = Training(device)
    with training.phases.enter("validate"):
        cpu_offload(training.unet, device)
        with pytest.raises(PhaseError, match="replaces their Parameters"), training.phases.lend("vae"):
            pytest.fail("the phase began")
    with pytest.raises(PhaseError, match="replaces their Parameters"):
        training.phases.start("train")


class Params4bit(torch.nn.Parameter):
    """As bitsandbytes has it."""

    __module__ = "bitsandbytes.nn.modules"


def quantised(module: Any, device: torch.device) -> None:
    projection = module.text_projection
    projection.weight = Params4bit(projection.weight.data, requires_grad=False)


def partitioned(module: Any, device: torch.device) -> None:
    for number, parameter in enumerate(module.parameters()):
        parameter.ds_id = number


def sharded(module: Any, device: torch.device) -> None:
    for parameter in module.parameters():
        parameter.device_mesh = None


def declared(module: Any, device: torch.device) -> None:
    """One half is elsewhere, as a block swapper has it."""
    torch.nn.Module.to(module.text_model.embeddings, device)


def hooked(module: Any, device: torch.device) -> None:
    cpu_offload_with_hook(module, device)


@pytest.mark.parametrize(
    ("manage", "reason"),
    [
        (quantised, "is a bitsandbytes Params4bit"),
        (partitioned, "is a partition of DeepSpeed ZeRO-3"),
        (sharded, "is a shard of FSDP"),
        (declared, "declared immovable"),
        (hooked, "under offload hooks, which move it"),
    ],
)
@pytest.mark.parametrize("is_parked", [True, False])
def test_what_other_software_places_is_left_where_it_is(
    manage: Callable[..., None], reason: str, is_parked: bool, device: torch.device
) -> None:
    training = Training(device)
    encoder = training.parts["text_encoder_2"]
    torch.nn.Module.to(encoder, CPU if is_parked else device)
    manage(encoder, device)
    phases = Phases(training.parts, device=device, immovable=("text_encoder_2",) if manage is declared else ())
    assert list(phases.not_moved()) == ["text_encoder_2"] and reason in phases.not_moved()["text_encoder_2"]

    def places() -> list[torch.device]:
        return [tensor.device for tensor in (*encoder.parameters(), *encoder.buffers())]

    before = places()
    phases.start("train")
    with phases.enter(Phase(on_device=("vae",))):
        assert places() == before and "vae" in phases.on_device()
        with phases.lend("text_encoder_2"):
            assert places() == before
    assert places() == before


class Ema:
    """Of another model."""

    def __init__(self) -> None:
        self.shadow_params = [torch.zeros(1)]

    def store(self, parameters: Any) -> None: ...

    copy_to = restore = store


def test_a_refused_phase_leaves_no_old_values_to_a_later_one(device: torch.device) -> None:
    """Memory that it kept is not put back: the weights have been moved and trained since."""
    training = Training(device)
    phases = Phases(training.parts | {"ema": Ema()}, device=device)
    with pytest.raises(PhaseError, match="averages 1 parameters"), phases.enter("validate"):
        pytest.fail("the phase began")
    torch.nn.Module.to(training.unet, CPU)
    torch.nn.Module.to(training.unet, device)
    training.step()
    trained = [parameter.detach().clone() for parameter in training.unet.parameters()]
    del phases.parts["ema"]
    with phases.enter("validate"):
        pass
    assert all(torch.equal(a, b) for a, b in zip(training.unet.parameters(), trained, strict=True))
