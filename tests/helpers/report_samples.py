"""Reports as a validation makes them, with numbers that differ from step to step."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from PIL import Image

from latentcache.validation.metrics import Estimate, LossReport, MeasurementSettings, SkippedSample, TimestepBin
from latentcache.validation.results import ValidationReport
from latentcache.validation.sample_images import SampleImage

SETTINGS = MeasurementSettings(
    prediction_type="epsilon",
    schedule="ab12",
    num_train_timesteps=1000,
    num_timesteps=2,
    seed=0,
    snr_gamma=None,
    dtype="float32",
    autocast=None,
    datasets={"photos": "cd34", "faces": "ef56"},
)


def losses(step: int = 100, *, settings: MeasurementSettings = SETTINGS, nan: bool = False) -> LossReport:
    """Five samples of two datasets at two timesteps; one was skipped."""
    values = np.random.default_rng(step).random(5)
    values[0] = np.nan if nan else values[0]
    by_sample = {"photos": {f"{n}.png": float(v) for n, v in enumerate(values[:3])}}
    by_sample["faces"] = {f"{n}.png": float(v) for n, v in enumerate(values[3:])}
    return LossReport(
        measurement_settings=settings,
        by_timestep=(
            TimestepBin.of((values * 2).tolist(), first=0, end=500),
            TimestepBin.of((values / 3).tolist(), first=500, end=1000),
        ),
        by_dataset={name: Estimate.of(list(found.values())) for name, found in by_sample.items()},
        by_sample=by_sample,
        skipped=(SkippedSample(dataset="photos", sample_id="broken.png", reason="damaged"),),
        **Estimate.of(values.tolist()).model_dump(),
    )


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


def opened(data: bytes) -> Image.Image:
    """The picture of an image file."""
    picture = Image.open(io.BytesIO(data))
    picture.load()
    return picture
