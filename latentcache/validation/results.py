"""The report of one validation, its files (a folder per step), and its log in an experiment tracker.

A tracker is an object with the methods of TensorBoard's SummaryWriter or of a Weights & Biases run.
"""

from __future__ import annotations

import errno
import logging
import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from latentcache.errors import ConfigError
from latentcache.utils.durable_files import sweep_temporaries, sync_folder, typed_errors, write_sealed
from latentcache.utils.json_document import plain, to_bytes
from latentcache.validation.metrics import METRICS_NAME, LossReport, loss_fields, read_history, step_folder
from latentcache.validation.pictures import caption_of, image_png, loss_plot, png_bytes, sample_grid
from latentcache.validation.sample_images import SampleImage

GRID_NAME, PLOT_NAME = "samples.png", "loss.png"
SCALAR, SAMPLES = "validation/loss", "validation/samples"
_OUR_PICTURES = re.compile(r"sample-\d{2,}\.png|samples\.png|loss\.png")

logger = logging.getLogger("latentcache")


def checked_step(step: int) -> int:
    """The step as an int. Raises ConfigError unless it is a whole number from 0 up."""
    try:
        number = operator.index(step)
    except TypeError as error:
        raise ConfigError(f"the step of a validation is {step!r}; it must be a whole number") from error
    if number < 0:
        raise ConfigError(f"the step of a validation is {number}; it must be 0 or higher")
    return number


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """The result of validating one step."""

    step: int
    loss: LossReport | None = None
    """None if the loss was not measured."""
    images: tuple[SampleImage, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Wall time by stage."""
    placement: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The model's parts on the device, by phase."""
    notes: tuple[str, ...] = ()
    num_filled: int = 0
    """How many entries were not cached and had to be encoded first."""

    def to_json(self, folder: Path | None = None) -> dict[str, Any]:
        """The document of metrics.json. NaN and infinity become null.

        Image paths are relative to the step's folder, so that it can be moved. With `folder` they are joined to it.
        """
        images = [
            {
                "prompt": sample.prompt,
                "negative_prompt": sample.negative_prompt,
                "seed": sample.seed,
                "path": str((folder or Path()) / image_name(number)),
                "tiled": sample.tiled,
            }
            for number, sample in enumerate(self.images)
        ]
        document: dict[str, Any] = plain(
            {
                "step": self.step,
                "folder": None if folder is None else str(folder),
                **loss_fields(self.loss),
                "images": images,
                "num_filled": self.num_filled,
                "placement": self.placement,
                "seconds": {stage: round(seconds, 3) for stage, seconds in self.seconds.items()},
                "notes": self.notes,
            }
        )
        return document

    def to_text(self) -> str:
        """The report as text."""
        lines = [f"step      {self.step}", *_loss_lines(self.loss), f"images    {len(self.images)}"]
        if self.num_filled:
            lines.append(f"encoded   {self.num_filled} entries that were not cached")
        lines += [
            f"{phase:<9} {', '.join(parts) or 'nothing'} on the device" for phase, parts in self.placement.items()
        ]
        if self.seconds:
            lines.append(f"seconds   {', '.join(f'{stage} {value:.2f}' for stage, value in self.seconds.items())}")
        return "\n".join([*lines, *(f"note      {note}" for note in self.notes)])


def _loss_lines(loss: LossReport | None) -> Iterator[str]:
    if loss is None:
        yield "loss      not measured"
        return
    yield f"loss      {loss.loss.to_text()}"
    if len(loss.by_dataset) > 1:
        yield from (f"          {name}: {estimate.to_text()}" for name, estimate in loss.by_dataset.items())
    for part in loss.by_timestep:
        yield f"          timesteps {part.first} to {part.end - 1}: {part.to_text()}"
    if loss.skipped:
        yield f"skipped   {len(loss.skipped)}"
    yield from (f"          {sample.dataset}: {sample.sample_id}: {sample.reason}" for sample in loss.skipped)


@dataclass(frozen=True, slots=True)
class ResultPaths:
    """The files of one step. `grid` is None without images, `plot` without a loss or matplotlib."""

    folder: Path
    metrics: Path
    images: tuple[Path, ...]
    grid: Path | None
    plot: Path | None


def image_name(number: int) -> str:
    """File name of a step's image; numbers start at 0."""
    return f"sample-{number:02d}.png"


def prepare_folder(folder: Path) -> None:
    """Create the folder of results. A validation calls it first, so that a failure costs no results.

    Raises ReadOnlyError or another StoreError naming what cannot be written.
    """
    with typed_errors(folder, 0):
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))


def write_results(report: ValidationReport, folder: Path) -> ResultPaths:
    """Write `<folder>/<step>/`: sample-00.png and so on, their grid samples.png, loss.png, and metrics.json.

    metrics.json comes last, so a folder that has one is complete. Results of an earlier validation of this step are
    replaced, and other files are left alone. Raises StorageFullError, ReadOnlyError or another StoreError naming
    what cannot be written.
    """
    step = folder / step_folder(checked_step(report.step))
    pictures = {image_name(number): image_png(sample) for number, sample in enumerate(report.images)}
    images = tuple(step / name for name in pictures)
    if images:
        pictures[GRID_NAME] = png_bytes(sample_grid(report.images))
    plot = None if report.loss is None else loss_plot(report.step, report.loss, read_history(folder))
    if plot is not None:
        pictures[PLOT_NAME] = plot
    metrics = step / METRICS_NAME
    with typed_errors(step, 0):
        step.mkdir(parents=True, exist_ok=True)
        sync_folder(folder)
        sweep_temporaries(step)
        metrics.unlink(missing_ok=True)
        sync_folder(step)
        for name in os.listdir(step):
            if _OUR_PICTURES.fullmatch(name) and name not in pictures:
                (step / name).unlink()
    for name, data in pictures.items():
        write_sealed(step / name, data)
    write_sealed(metrics, to_bytes(report.to_json()))
    return ResultPaths(
        folder=step,
        metrics=metrics,
        images=images,
        grid=step / GRID_NAME if images else None,
        plot=step / PLOT_NAME if plot is not None else None,
    )


def publish(report: ValidationReport, folder: Path, tracker: Any = None) -> tuple[ValidationReport, ResultPaths]:
    """Write the results, then log them to the tracker, if any. Returns the final report, and the files.

    The tags are `validation/loss`, `validation/loss/<dataset>`, `validation/loss_by_timestep/<first>` and, with images,
    `validation/samples`: the grid for TensorBoard, captioned images for W&B. A failing tracker does not end a training:
    its traceback is logged, and the report and metrics.json get a note. TensorBoard keeps float32. W&B drops values
    logged at a lower step than before, so the training loop has to log with `step=` too.

    Raises ConfigError for an unsupported tracker, before anything is written, and StoreError as `write_results` does.
    """
    log = tracker_log(tracker)
    paths = write_results(report, folder)
    if log is None:
        return report, paths
    try:
        log(report)
    except Exception as error:  # a tracker's own code may raise anything
        name = type(tracker).__name__
        logger.exception("%s failed to log the validation of step %d", name, report.step)
        note = f"{name} failed to log this validation: {type(error).__name__}: {error}"
        report = replace(report, notes=(*report.notes, note))
        write_sealed(paths.metrics, to_bytes(report.to_json()))
    return report, paths


def scalars(report: ValidationReport) -> dict[str, float]:
    """The losses by tag, empty if none was measured."""
    loss = report.loss
    if loss is None:
        return {}
    values = {SCALAR: loss.loss.mean}
    values |= {f"{SCALAR}/{dataset}": estimate.mean for dataset, estimate in loss.by_dataset.items()}
    return values | {f"{SCALAR}_by_timestep/{part.first}": part.mean for part in loss.by_timestep}


def tracker_log(tracker: Any) -> Callable[[ValidationReport], None] | None:
    """The function that logs a report to this tracker, or None without one. Raises ConfigError for other objects."""
    if tracker is None:
        return None
    if hasattr(tracker, "add_scalar") and hasattr(tracker, "add_image"):
        return partial(_log_to_tensorboard, tracker)
    if hasattr(tracker, "log") and not isinstance(tracker, logging.Logger):
        return partial(_log_to_wandb, tracker)
    raise ConfigError(
        f"a tracker of type {type(tracker).__module__}.{type(tracker).__qualname__} is not supported: pass a "
        "torch.utils.tensorboard.SummaryWriter (or an object with its add_scalar and add_image), or a Weights & Biases "
        "run (or an object with its log(mapping, step=...)); accelerate's are in get_tracker(name, unwrap=True)"
    )


def _log_to_tensorboard(tracker: Any, report: ValidationReport) -> None:
    for tag, value in scalars(report).items():
        tracker.add_scalar(tag, value, report.step)
    if report.images:
        tracker.add_image(SAMPLES, np.array(sample_grid(report.images)), report.step, dataformats="HWC")


def _log_to_wandb(tracker: Any, report: ValidationReport) -> None:
    values: dict[str, Any] = dict(scalars(report))
    if report.images:
        import wandb

        values[SAMPLES] = [wandb.Image(sample.image, caption=caption_of(sample)) for sample in report.images]
    tracker.log(values, step=report.step)
