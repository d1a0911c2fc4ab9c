"""Experiment trackers: TensorBoard's SummaryWriter, a Weights & Biases run, and accelerate's wrappers of both."""

from __future__ import annotations

import inspect
import logging
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from latentcache.errors import ConfigError
from latentcache.validation.grid import caption_of, sample_grid
from latentcache.validation.validation_report import ValidationReport

SCALAR, SAMPLES = "validation/loss", "validation/samples"

Dialect = Literal["tensorboard", "wandb"]

logger = logging.getLogger("latentcache")


def recognise(writer: Any) -> tuple[Dialect, Any] | None:
    """How to speak to a tracker, and the tracker itself: accelerate's wrappers are taken off.

    None: the wrapper of an accelerate process that is not the main one, which logs nothing. ConfigError for any other
    object. Call it before a run, so that a wrong object is found before the work is done.
    """
    # accelerate's trackers have `tracker`; in processes where they were not started it raises AttributeError.
    tracker = getattr(writer, "tracker", None)
    if tracker is None and hasattr(writer, "main_process_only"):
        return None
    tracker = writer if tracker is None else tracker
    if callable(getattr(tracker, "add_scalar", None)) and callable(getattr(tracker, "add_image", None)):
        return "tensorboard", tracker
    if _logs_mappings(tracker):
        return "wandb", tracker
    raise ConfigError(
        f"a tracker of type {type(tracker).__module__}.{type(tracker).__qualname__} is not supported: pass a "
        "torch.utils.tensorboard.SummaryWriter (or what has its add_scalar and add_image), a Weights & Biases run (or "
        "what has its log(mapping, step=...)), or accelerate's tracker of either; None logs nothing"
    )


def log_to(writer: Any, report: ValidationReport) -> ValidationReport:
    """Log the report at its step: `validation/loss`, `validation/loss/<dataset>`, `validation/loss_by_timestep/<first>`
    and, with images, `validation/samples`; the grid for TensorBoard, each image with its caption for W&B.

    Gives the report back. An error of the tracker must not end a training: it is logged with its traceback, and the
    report given back has a note of it. ConfigError for an object that is no tracker. TensorBoard keeps float32; W&B
    drops what is logged at a step below one that it has seen, so let the training loop log with `step=` too.
    """
    found = recognise(writer)
    if found is None:
        return report
    dialect, tracker = found
    try:
        if dialect == "tensorboard":
            _log_to_tensorboard(tracker, report)
        else:
            _log_to_wandb(tracker, report)
    except Exception as error:  # a tracker talks to disks and networks, in code that is not ours: any error is possible
        logger.exception("step %d: %s failed to log the validation", report.step, type(tracker).__name__)
        note = f"{type(tracker).__name__} failed to log this validation: {type(error).__name__}: {error}"
        return replace(report, notes=(*report.notes, note))
    return report


def scalars(report: ValidationReport) -> dict[str, float]:
    """Tag -> value: the numbers of metrics.json, NaN where it has null. Empty where no loss was measured."""
    loss = report.loss
    if loss is None:
        return {}
    found = {SCALAR: loss.loss.mean}
    found |= {f"{SCALAR}/{dataset}": estimate.mean for dataset, estimate in loss.by_dataset.items()}
    return found | {f"{SCALAR}_by_timestep/{part.first}": part.loss.mean for part in loss.by_timestep}


def _logs_mappings(tracker: Any) -> bool:
    log = getattr(tracker, "log", None)
    if not callable(log):
        return False
    try:
        inspect.signature(log).bind({}, step=0)
    except (TypeError, ValueError):
        return False  # another kind of log: a logging.Logger has one too
    return True


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
