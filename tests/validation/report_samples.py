"""Reports as a validation makes them, with numbers that differ from step to step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image

from latentcache.validation.history import MeasuredStep
from latentcache.validation.loss import Estimate, LossReport, SkippedSample, TimestepBin
from latentcache.validation.sample_images import SampleImage
from latentcache.validation.validation_report import ValidationReport

FOOTING = {"prediction_type": "epsilon", "num_timesteps": 2, "seed": 0, "snr_gamma": None, "schedule": "ab12"}


def losses(step: int = 100, *, footing: dict[str, object] = FOOTING, nan: bool = False) -> LossReport:
    """Five samples of two datasets at two timesteps; one was skipped."""
    values = np.random.default_rng(step).random(5)
    values[0] = np.nan if nan else values[0]
    by_sample = {"photos": {f"{n}.png": float(v) for n, v in enumerate(values[:3])}}
    by_sample["faces"] = {f"{n}.png": float(v) for n, v in enumerate(values[3:])}
    return LossReport(
        footing=footing,
        loss=Estimate.of(values.tolist()),
        by_timestep=(
            TimestepBin(0, 500, Estimate.of((values * 2).tolist())),
            TimestepBin(500, 1000, Estimate.of((values / 3).tolist())),
        ),
        by_dataset={name: Estimate.of(list(found.values())) for name, found in by_sample.items()},
        by_sample=by_sample,
        skipped=(SkippedSample("photos", "broken.png", "damaged"),),
    )


def measured(step: int, *, footing: dict[str, object] = FOOTING, nan: bool = False) -> MeasuredStep:
    return MeasuredStep.of(step, losses(step, footing=footing, nan=nan))


def image(
    number: int = 0, size: tuple[int, int] = (64, 48), prompt: str = "a red house", negative: str | None = "ugly"
) -> SampleImage:
    """Noise of `size` (height, width), so that no two places in a grid look the same."""
    pixels = np.random.default_rng(number).integers(0, 256, (*size, 3), dtype=np.uint8)
    return SampleImage(prompt, negative, 40 + number, Image.fromarray(pixels), tiled=number == 1)


def report(step: int = 100, *, num_images: int = 2, nan: bool = False, notes: Sequence[str] = ()) -> ValidationReport:
    return ValidationReport(
        step=step,
        loss=losses(step, nan=nan),
        images=tuple(image(number, prompt=f"prompt {number}") for number in range(num_images)),
        seconds={"loss": 1.23456, "sample": 2.0},
        placement={"validate": ("unet",), "sample": ("unet", "vae")},
        notes=tuple(notes),
        num_filled=3,
    )
