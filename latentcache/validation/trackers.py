"""Publishing a validation: its files, and an experiment tracker.

Known are TensorBoard's SummaryWriter, a Weights & Biases run, and accelerate's wrappers of both.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from latentcache.errors import ConfigError
from latentcache.utils.durable_files import write_sealed
from latentcache.utils.json_document import to_bytes
from latentcache.validation.grid import caption_of, sample_grid
from latentcache.validation.results import ResultPaths, ValidationReport, write_results

SCALAR, SAMPLES = "validation/loss", "validation/samples"

logger = logging.getLogger("latentcache")


def publish(report: ValidationReport, folder: Path, tracker: Any = None) -> tuple[ValidationReport, ResultPaths]:
    """Write the results, then log them to the tracker, if there is one (see `log_to`). Returns the final report too.

    A tracker that fails loses nothing: its note is in the report and in metrics.json. ConfigError for an object that
    is no tracker, before anything is written; StoreError as in `write_results`.
    """
    check_tracker(tracker)
    paths = write_results(report, folder)
    logged = log_to(tracker, report)
    if logged is not report:
        write_sealed(paths.metrics, to_bytes(logged.to_json()))
    return logged, paths


def check_tracker(tracker: Any) -> None:
    """ConfigError for an object that is no tracker: before a run, so that it is found before the work is done."""
    _logging_of(tracker)


def log_to(tracker: Any, report: ValidationReport) -> ValidationReport:
    """Log the report at its step, and return it.

    Logged are `validation/loss`, `validation/loss/<dataset>`, `validation/loss_by_timestep/<first>` and, with images,
    `validation/samples`: the grid for TensorBoard, each image with its caption for W&B. An error of the tracker must
    not end a training: it is logged with its traceback, and the returned report has a note of it. ConfigError for an
    object that is no tracker; None logs nothing. TensorBoard keeps float32. W&B drops what is logged at a step below
    one that it has seen, so let the training loop log with `step=` too.
    """
    log = _logging_of(tracker)
    if log is None:
        return report
    try:
        log(report)
    except (
        Exception
    ) as error:  # a tracker writes to disks and networks, in code that is not ours: any error is possible
        name = type(_unwrapped_tracker(tracker)).__name__
        logger.exception("step %d: %s failed to log the validation", report.step, name)
        note = f"{name} failed to log this validation: {type(error).__name__}: {error}"
        return replace(report, notes=(*report.notes, note))
    return report


def scalars(report: ValidationReport) -> dict[str, float]:
    """Tag -> value: the numbers of metrics.json, NaN where it has null. Empty where no loss was measured."""
    loss = report.loss
    if loss is None:
        return {}
    values = {SCALAR: loss.loss.mean}
    values |= {f"{SCALAR}/{dataset}": estimate.mean for dataset, estimate in loss.by_dataset.items()}
    return values | {f"{SCALAR}_by_timestep/{part.first}": part.mean for part in loss.by_timestep}


def _logging_of(tracker: Any) -> Callable[[ValidationReport], None] | None:
    """What logs a report, or None for a tracker that logs nothing. ConfigError for any other object."""
    tracker = _unwrapped_tracker(tracker)
    if tracker is None:
        return None
    if callable(getattr(tracker, "add_scalar", None)) and callable(getattr(tracker, "add_image", None)):
        return partial(_log_to_tensorboard, tracker)
    if _logs_mappings(tracker):
        return partial(_log_to_wandb, tracker)
    raise ConfigError(
        f"a tracker of type {type(tracker).__module__}.{type(tracker).__qualname__} is not supported: pass a "
        "torch.utils.tensorboard.SummaryWriter (or what has its add_scalar and add_image), a Weights & Biases run (or "
        "what has its log(mapping, step=...)), or accelerate's tracker of either; None logs nothing"
    )


def _unwrapped_tracker(tracker: Any) -> Any:
    """The tracker inside of accelerate's wrapper. None in an accelerate process that is not the main one."""
    # accelerate's trackers have `tracker`; in processes where they were not started it raises AttributeError.
    inner = getattr(tracker, "tracker", None)
    return tracker if inner is None and not hasattr(tracker, "main_process_only") else inner


def _logs_mappings(tracker: Any) -> bool:
    """Whether its `log` takes a mapping and a step. A logging.Logger has a `log` of another kind."""
    try:
        inspect.signature(tracker.log).bind({}, step=0)
    except (AttributeError, TypeError, ValueError):
        return False
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
