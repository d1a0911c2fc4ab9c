"""Models whose blocks a trainer swaps: a phase runs them in the mode for inference, and leaves that for training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from helpers.phase_runs import assert_as_without, predict
from helpers.phase_training import Training

from latentcache.errors import PhaseError
from latentcache.phases.phases import Phase

CPU = torch.device("cpu")


class Swapper:
    """The mode, and whether the first blocks are away."""

    def __init__(self) -> None:
        self.mode, self.is_away, self.fails_at = "training", False, ""
        self.is_known, self.forward_only = True, False
        """Whether the mode can be seen, as both trainers name it; a model may keep its own elsewhere."""
        self.events = list[str]()

    def switch(self, mode: str) -> None:
        assert self.mode != mode, "a trainer switches there and back"
        self.mode, self.is_away, self.forward_only = mode, False, self.is_known and mode == "inference"
        self.events.append(mode)
        if mode == self.fails_at:
            raise MemoryError("no room for the blocks")


class SwappedUNet(UNet2DConditionModel):
    """A UNet with the methods of musubi-tuner's and sd-scripts'. In training a forward takes blocks away until the
    backward."""

    swapper: Swapper

    def switch_block_swap_for_inference(self) -> None:
        self.swapper.switch("inference")

    def switch_block_swap_for_training(self) -> None:
        self.swapper.switch("training")

    def forward(self, *arguments: Any, **options: Any) -> Any:
        if self.swapper.is_away:
            raise RuntimeError("the weights of blocks.0 are on the CPU")
        made = super().forward(*arguments, **options)
        if self.swapper.mode == "training":
            self.swapper.is_away = True
            made.sample.register_hook(lambda _: setattr(self.swapper, "is_away", False))
        return made


class Swapped(Training):
    def wrap(self) -> None:
        self.unet.__class__ = SwappedUNet
        self.swapper = self.unet.swapper = Swapper()


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("variant", ["ema", "schedule-free"])
def test_forwards_follow_each_other_and_training_goes_on(variant: str, is_known: bool) -> None:
    def validate(training: Swapped) -> None:
        training.swapper.is_known = is_known
        for phase in ("validate", "sample"):
            with training.phases.enter(phase):
                predict(training)
                with training.phases.enter(Phase(on_device=())), training.phases.enter("sample"):
                    predict(training)
                with training.phases.lend("vae"):
                    predict(training)
                assert training.swapper.mode == "inference"
            assert training.swapper.mode == "training"
        assert training.swapper.events == ["inference", "training"] * 2, "the outermost phase alone switches"

    assert_as_without(validate, CPU, variant, Swapped)


def test_a_phase_that_trains_or_parks_the_model_or_finds_it_switched_does_not_switch() -> None:
    training = Swapped(CPU)
    for phase in ("train", Phase(on_device=("vae",))):
        with training.phases.enter(phase):
            assert training.swapper.mode == "training"
    with training.phases.lend("vae"):  # while the model is trained
        assert training.swapper.events == []
    training.unet.switch_block_swap_for_inference()
    with training.phases.enter("validate"):
        predict(training)
    assert training.swapper.events == ["inference"]


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_a_switch_that_fails_is_an_error_and_all_else_is_put_back(mode: str) -> None:
    training = Swapped(CPU)
    training.swapper.fails_at = mode
    expected = (MemoryError, "no room") if mode == "inference" else (PhaseError, "BlockSwap: MemoryError: no room")
    with pytest.raises(expected[0], match=expected[1]), training.phases.enter("validate"):
        assert mode == "training", "the phase was not entered"
    assert training.phases.current == "train" and training.unet.training
    assert training.swapper.events == ["inference", "training"]
