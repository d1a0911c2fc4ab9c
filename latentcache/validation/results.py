"""What one validation found, its results on disk (a folder for each step), and its log in an experiment tracker.

A tracker has the methods of TensorBoard's SummaryWriter, or those of a Weights & Biases run.
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
from latentcache.utils.durable_files import (
    sweep_temporaries,
    sync_folder,
    typed_errors,
    write_sealed,
)
from latentcache.utils.json_document import plain, to_bytes
from latentcache.validation.metrics import (
    METRICS_NAME,
    LossReport,
    loss_fields,
    read_history,
    step_folder,
)
from latentcache.validation.pictures import caption_of, image_png, loss_plot, png_bytes, sample_grid
from latentcache.validation.sample_images import SampleImage

GRID_NAME, PLOT_NAME = "samples.png", "loss.png"
SCALAR, SAMPLES = "validation/loss", "validation/samples"
_OUR_PICTURES = re.compile(r"sample-\d{2,}\.png|samples\.png|loss\.png")

logger = logging.getLogger("latentcache")


def checked_step(step: int) -> int:
    """The step as an int. ConfigError if it is no whole number, or below 0."""
    try:
        number = operator.index(step)
    except TypeError as error:
        raise ConfigError(f"a validation of step {step!r}: a step is a whole number") from error
    if number < 0:
        raise ConfigError(f"a validation of step {number}: steps are counted from 0")
    return number


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """The outcome of the validation of one step."""

    step: int
    loss: LossReport | None = None
    """None: the loss was not measured."""
    images: tuple[SampleImage, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Wall time by stage."""
    placement: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Phase -> parts of the model that were on the device in it."""
    notes: tuple[str, ...] = ()
    num_filled: int = 0
    """Entries that were not cached and had to be encoded first."""

    def to_json(self, folder: Path | None = None) -> dict[str, Any]:
        """The document of metrics.json, without NaN and infinity, which are null there.

        The images' paths are file names in the step's folder, which may be moved; with `folder` they are joined to it.
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
        """The report for people."""
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
    """The files of one step. `grid` is None without images, `plot` without a loss or without matplotlib."""

    folder: Path
    metrics: Path
    images: tuple[Path, ...]
    grid: Path | None
    plot: Path | None


def image_name(number: int) -> str:
    """The file name of a step's image `number`, counted from 0."""
    return f"sample-{number:02d}.png"


def prepare_folder(folder: Path) -> None:
    """Make the folder of results: called before a validation, because afterwards a failure would cost its results.

    ReadOnlyError or another StoreError names what cannot be written.
    """
    with typed_errors(folder, 0):
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))


def write_results(report: ValidationReport, folder: Path) -> ResultPaths:
    """Write `<folder>/<step>/`: `sample-00.png` and so on, their grid samples.png, loss.png, and metrics.json.

    The step's folder has six digits. metrics.json is the last: a folder that has one is complete. The results of an
    earlier validation of this step are replaced whole. Other files are left alone.
    StorageFullError, ReadOnlyError or another StoreError names what cannot be written.
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
    """Write the results, then log them to the tracker at their step, if there is one. Returns the final report too.

    Logged are `validation/loss`, `validation/loss/<dataset>`, `validation/loss_by_timestep/<first>` and, with images,
    `validation/samples`: the grid for TensorBoard, each image with its caption for W&B. An error of the tracker must
    not end a training: it is logged with its traceback, and the report and metrics.json have a note of it. TensorBoard
    keeps float32. W&B drops what is logged at a step below one that it has seen, so let the training loop log with
    `step=` too. ConfigError for an object that is no tracker, before anything is written; StoreError as in
    `write_results`.
    """
    log = tracker_log(tracker)
    paths = write_results(report, folder)
    if log is None:
        return report, paths
    try:
        log(report)
    except Exception as error:  # a tracker writes to disks and networks, in code that is not ours
        name = type(tracker).__name__
        logger.exception("step %d: %s failed to log the validation", report.step, name)
        note = f"{name} failed to log this validation: {type(error).__name__}: {error}"
        report = replace(report, notes=(*report.notes, note))
        write_sealed(paths.metrics, to_bytes(report.to_json()))
    return report, paths


def scalars(report: ValidationReport) -> dict[str, float]:
    """Tag -> value: the numbers of metrics.json, NaN where it has null. Empty where no loss was measured."""
    loss = report.loss
    if loss is None:
        return {}
    values = {SCALAR: loss.loss.mean}
    values |= {f"{SCALAR}/{dataset}": estimate.mean for dataset, estimate in loss.by_dataset.items()}
    return values | {f"{SCALAR}_by_timestep/{part.first}": part.mean for part in loss.by_timestep}


def tracker_log(tracker: Any) -> Callable[[ValidationReport], None] | None:
    """What logs a report, or None for no tracker. ConfigError for an object that is none."""
    if tracker is None:
        return None
    if hasattr(tracker, "add_scalar") and hasattr(tracker, "add_image"):
        return partial(_log_to_tensorboard, tracker)
    if hasattr(tracker, "log") and not isinstance(tracker, logging.Logger):
        return partial(_log_to_wandb, tracker)
    raise ConfigError(
        f"a tracker of type {type(tracker).__module__}.{type(tracker).__qualname__} is not supported: pass a "
        "torch.utils.tensorboard.SummaryWriter (or what has its add_scalar and add_image), or a Weights & Biases run "
        "(or what has its log(mapping, step=...)); accelerate's are in get_tracker(name, unwrap=True)"
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
