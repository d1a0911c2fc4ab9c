"""Models whose blocks a trainer swaps: a phase runs them in the mode for inference, and leaves that for training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from helpers.phase_training import Training
from helpers.runner_runs import runner_for, validation_config

from latentcache import LatentCache, run_precache
from latentcache.config import Config
from latentcache.errors import PhaseError
from latentcache.phases.phases import Phase

CPU = torch.device("cpu")


class Swapper:
    """What moves blocks. In training a forward takes the first blocks away, until the backward."""

    def __init__(self, *, is_known: bool = True) -> None:
        self.mode, self.is_away, self.is_known = "training", False, is_known
        self.events, self.fails_at = list[str](), ""

    @property
    def forward_only(self) -> bool:
        """The mode, as both trainers name it; a model may keep its own elsewhere."""
        return self.is_known and self.mode == "inference"

    def switch(self, mode: str) -> None:
        assert self.mode != mode, "a trainer switches there and back"
        self.mode, self.is_away = mode, False
        self.events.append(mode)
        if mode == self.fails_at:
            raise MemoryError("no room for the blocks")

    def run(self, forward: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        if self.is_away:
            raise RuntimeError("the weights of blocks.0 are on the CPU")
        made = forward(*arguments, **options)
        if self.mode == "training":
            self.is_away = True
            if made[0].requires_grad:
                made[0].register_hook(lambda _: setattr(self, "is_away", False))
        return made


class SwappedUNet(UNet2DConditionModel):
    """A UNet with the two methods of musubi-tuner's and sd-scripts' models."""

    swapper: Swapper

    def switch_block_swap_for_inference(self) -> None:
        self.swapper.switch("inference")

    def switch_block_swap_for_training(self) -> None:
        self.swapper.switch("training")

    def forward(self, *arguments: Any, **options: Any) -> Any:
        return self.swapper.run(super().forward, *arguments, **options)


def swapped(training: Training, *, is_known: bool = True) -> Swapper:
    """Let the blocks of the run's UNet be swapped from now on."""
    swapper = Swapper(is_known=is_known)
    training.unet.__class__ = SwappedUNet
    training.unet.swapper = swapper
    return swapper


def forward(training: Training) -> None:
    training.predict(training.latents, training.latents, torch.tensor([1, 2]))


def assert_goes_on(variant: str, validate: Callable[[Training, Swapper], None]) -> None:
    """A run with this in the middle is the run without it, bit by bit."""
    expected, found = Training(CPU, variant).run(), Training(CPU, variant)
    swapper = swapped(found)
    found.run(lambda training: validate(training, swapper))
    assert swapper.mode == "training"
    assert (found.losses, found.draws) == (expected.losses, expected.draws)
    ours, theirs = found.tensors(), expected.tensors()
    assert len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("variant", ["plain", "ema", "schedule-free"])
def test_forwards_follow_each_other_and_training_goes_on(variant: str) -> None:
    def validate(training: Training, swapper: Swapper) -> None:
        for phase in ("validate", "sample"):
            with training.phases.enter(phase):
                assert swapper.mode == "inference"
                for _ in range(3):
                    forward(training)
            assert swapper.mode == "training"
        assert swapper.events == ["inference", "training"] * 2

    assert_goes_on(variant, validate)


@pytest.mark.parametrize("is_known", [True, False])
def test_the_outermost_phase_alone_switches(is_known: bool) -> None:
    training = Training(CPU)
    swapper = swapped(training, is_known=is_known)
    with training.phases.enter("validate"):
        with training.phases.enter(Phase(on_device=())), training.phases.enter("sample"):
            forward(training)
        with training.phases.lend("vae"):
            forward(training)
        assert swapper.events == ["inference"]
    assert swapper.events == ["inference", "training"]


def test_a_phase_that_trains_or_parks_the_model_does_not_switch() -> None:
    training = Training(CPU)
    swapper = swapped(training)
    for phase in ("train", Phase(on_device=("vae",))):
        with training.phases.enter(phase):
            assert swapper.mode == "training"
    with training.phases.lend("vae"):  # while the model is trained
        assert swapper.events == []


def test_a_model_that_was_switched_before_stays_so() -> None:
    training = Training(CPU)
    swapper = swapped(training)
    training.unet.switch_block_swap_for_inference()
    with training.phases.enter("validate"):
        forward(training)
    assert swapper.events == ["inference"]


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_a_switch_that_fails_is_an_error_and_all_else_is_put_back(mode: str) -> None:
    training = Training(CPU)
    swapper = swapped(training)
    swapper.fails_at = mode
    expected = (MemoryError, "no room") if mode == "inference" else (PhaseError, "BlockSwap: MemoryError: no room")
    with pytest.raises(expected[0], match=expected[1]), training.phases.enter("validate"):
        assert mode == "training", "the phase was not entered"
    assert training.phases.current == "train" and training.unet.training
    assert swapper.events == ["inference", "training"]


def test_a_validation_of_a_swapped_model(make_config: Callable[..., Config], photos: Path) -> None:
    """Its loss and images take many forwards, none of which has a backward."""
    config = validation_config(make_config, photos)
    run_precache(config)
    with LatentCache(config.cache.path) as cache:
        plain = runner_for(Training(CPU), cache, config).run(1)
        training = Training(CPU)
        swapper = swapped(training)
        report = runner_for(training, cache, config).run(1)
    assert plain is not None and report is not None and report.loss == plain.loss and len(report.images) == 1
    assert report.images[0].image.tobytes() == plain.images[0].image.tobytes()
    assert swapper.events == ["inference", "training"] * 2
