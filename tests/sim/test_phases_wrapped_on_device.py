"""The phase switch on a second device, with parts that other software places, and weights that other code swaps in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.phase_training import Training

from latentcache.errors import PhaseError
from latentcache.phases.phases import Phase, Phases

CPU = torch.device("cpu")


class Params4bit(torch.nn.Parameter):
    """As bitsandbytes has it."""

    __module__ = "bitsandbytes.nn.modules"


def quantised(module: Any) -> None:
    projection = module.text_projection
    projection.weight = Params4bit(projection.weight.data, requires_grad=False)


def partitioned(module: Any) -> None:
    for number, parameter in enumerate(module.parameters()):
        parameter.ds_id = number


def sharded(module: Any) -> None:
    for parameter in module.parameters():
        parameter.device_mesh = None


def as_it_is(module: Any) -> None:
    """For a part that is declared immovable."""


@pytest.mark.parametrize("is_parked", [True, False])
@pytest.mark.parametrize("manage", [quantised, partitioned, sharded, as_it_is])
def test_what_other_software_places_is_left_where_it_is(
    manage: Callable[[Any], None], is_parked: bool, device: torch.device
) -> None:
    training = Training(device)
    encoder = training.parts["text_encoder_2"]
    place = CPU if is_parked else device
    torch.nn.Module.to(encoder, place)
    manage(encoder)
    phases = Phases(training.parts, device=device, immovable=("text_encoder_2",) if manage is as_it_is else ())
    assert list(phases.not_moved()) == ["text_encoder_2"]

    def places() -> set[torch.device]:
        return {tensor.device for tensor in (*encoder.parameters(), *encoder.buffers())}

    phases.start("train")
    assert places() == {place}
    with phases.enter(Phase(on_device=("vae",))):
        assert places() == {place}
        assert phases.on_device() == ({"vae"} if is_parked else {"vae", "text_encoder_2"})
        with phases.lend("text_encoder_2"):
            assert places() == {place}
    assert places() == {place}


def test_a_refused_phase_leaves_no_old_values_to_a_later_one(device: torch.device) -> None:
    """Memory that it kept is not put back: the weights have been moved and trained since."""
    training = Training(device)
    phases = Phases(training.parts | {"ema": Ema()}, device=device)
    with pytest.raises(PhaseError, match="averages 1 parameters"), phases.enter("validate"):
        pass
    torch.nn.Module.to(training.unet, CPU)
    torch.nn.Module.to(training.unet, device)
    training.step()
    trained = [parameter.detach().clone() for parameter in training.unet.parameters()]
    del phases.parts["ema"]
    with phases.enter("validate"):
        pass
    assert all(torch.equal(a, b) for a, b in zip(training.unet.parameters(), trained, strict=True))


class Ema:
    """Of another model."""

    def __init__(self) -> None:
        self.shadow_params = [torch.zeros(1)]

    def store(self, parameters: Any) -> None: ...

    def copy_to(self, parameters: Any) -> None: ...

    def restore(self, parameters: Any) -> None: ...
