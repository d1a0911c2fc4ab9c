"""The validations of a folder of results, step by step, as the page shows them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from latentcache.errors import MetricsError, RequestRefused, StoreError
from latentcache.service.charts import Curve, curve_of
from latentcache.utils.durable_files import read_small_file
from latentcache.validation.metrics import GRID_NAME, METRICS_NAME, PLOT_NAME, Metrics, step_folder

MAX_PICTURE_BYTES = 1 << 28
_STEP = re.compile(r"\d{6,18}")
_PICTURE = re.compile(rf"{re.escape(GRID_NAME)}|{re.escape(PLOT_NAME)}|sample-\d{{2,6}}\.png")


@dataclass(frozen=True, slots=True)
class ValidationStep:
    """One validated step. `problem` says why its metrics cannot be read; then `metrics` is None."""

    step: int
    metrics: Metrics | None
    problem: str
    has_grid: bool
    has_plot: bool


def validation_steps(folder: Path) -> list[ValidationStep]:
    """The steps in a folder of results, the last first. A folder that is not there has none. StoreError."""
    try:
        names = sorted((name for name in os.listdir(folder) if _STEP.fullmatch(name)), key=int, reverse=True)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"{folder}: the validations cannot be listed: {error.strerror}") from error
    return [_step(folder, int(name)) for name in names if os.path.lexists(folder / name / METRICS_NAME)]


def _step(folder: Path, step: int) -> ValidationStep:
    files = folder / step_folder(step)
    metrics, problem = None, ""
    try:
        metrics = Metrics.read(files / METRICS_NAME)
    except MetricsError as error:
        problem = str(error)
    return ValidationStep(step, metrics, problem, (files / GRID_NAME).is_file(), (files / PLOT_NAME).is_file())


@dataclass(frozen=True, slots=True)
class LossCurve:
    """The loss from the step `first` to the step `last`."""

    curve: Curve
    first: int
    last: int


def loss_curve(steps: Sequence[ValidationStep]) -> LossCurve | None:
    """The loss over the steps, which go backwards: of those that were measured with the settings of the last one.

    Only losses with equal settings may be compared. None of fewer than two.
    """
    measured = [(each.step, each.metrics) for each in steps if each.metrics and each.metrics.measurement_settings]
    curve = [
        (step, metrics.loss)
        for step, metrics in reversed(measured)
        if metrics.measurement_settings == measured[0][1].measurement_settings
    ]
    line = curve_of([step for step, _ in curve], [loss for _, loss in curve], from_zero=False)
    return None if line is None else LossCurve(line, curve[0][0], curve[-1][0])


def validation_picture(folder: Path, step: int, name: str) -> bytes:
    """A PNG of a step: its grid, its plot, or one of its images. RequestRefused for any other name, or one not there.

    Nothing but pictures of ours is read: no link, and no path.
    """
    if step < 0 or not _PICTURE.fullmatch(name):
        detail = f"step {step} has no picture {name!r:.40}: ask for {GRID_NAME}, {PLOT_NAME} or sample-NN.png"
        raise RequestRefused(detail, status=404)
    try:
        return read_small_file(folder / step_folder(step) / name, MAX_PICTURE_BYTES, "run that validation again")
    except FileNotFoundError as error:
        raise RequestRefused(f"step {step} has no {name} in {folder}", status=404) from error
