"""The phase switch on a second device: what moves away comes back, and training goes on bit by bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from accelerate import cpu_offload, cpu_offload_with_hook
from helpers.phase_disturbances import DISTURBANCES
from helpers.phase_runs import CASES, assert_as_without, leave_no_trace, name_of
from helpers.phase_training import Training

from latentcache.errors import PhaseError
from latentcache.phases.phases import Phase, Phases

CPU = torch.device("cpu")


@pytest.mark.parametrize(("variant", "scenario"), CASES, ids=name_of)
def test_training_goes_on_bit_by_bit(variant: str, scenario: Callable[[Training], None], device: torch.device) -> None:
    assert_as_without(scenario, device, variant)


@pytest.mark.parametrize("variant", ["amp", "lora", "text-encoder"])
def test_all_disturbances_at_once_are_put_back(variant: str, device: torch.device) -> None:
    leave_no_trace(device, variant, DISTURBANCES)


@pytest.mark.parametrize("is_inside", [True, False])
def test_sequential_offload_is_refused_on_what_is_trained(is_inside: bool, device: torch.device) -> None:
    training = Training(device)
    with pytest.raises(PhaseError, match="replaces their Parameters"):
        if is_inside:
            with training.phases.enter("validate"):
                cpu_offload(training.unet, device)
                with training.phases.lend("vae"):
                    pass
        else:
            cpu_offload(training.unet, device)
            training.phases.start("train")


def test_offload_hooks_and_declared_parts_are_left_where_they_are(device: torch.device) -> None:
    training = Training(device)
    cpu_offload_with_hook(training.parts["vae"], device)
    phases = Phases(training.parts, device=device, immovable=["text_encoder"])
    assert "hooks" in str(phases.not_moved().get("vae"))
    torch.nn.Module.to(training.parts["text_encoder"].embeddings, device)  # as a block swapper does
    with phases.enter(Phase(on_device=("unet", "vae", "text_encoder_2"))):
        assert next(training.parts["vae"].parameters()).device == CPU
        assert training.parts["text_encoder"].embeddings.token_embedding.weight.device == device
        assert training.parts["text_encoder"].final_layer_norm.weight.device == CPU
        assert training.parts["vae"](torch.zeros(1, 3, 64, 64)).sample.device == device
    assert training.parts["text_encoder"].embeddings.token_embedding.weight.device == device
