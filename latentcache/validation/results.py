"""The results of validations on disk: a folder for each step."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latentcache.errors import UnsafeStoreError
from latentcache.utils.durable_files import (
    sealed_file,
    sweep_temporaries,
    sync_folder,
    typed_errors,
    write_all,
    write_sealed,
)
from latentcache.utils.json_document import to_bytes
from latentcache.validation.grid import grid_png, image_png
from latentcache.validation.history import METRICS_NAME, MeasuredStep, read_history, step_folder
from latentcache.validation.plots import loss_plot
from latentcache.validation.trackers import log_to, recognise
from latentcache.validation.validation_report import ValidationReport, image_name

GRID_NAME, PLOT_NAME = "samples.png", "loss.png"
_OURS = re.compile(r"sample-\d{2,}\.png|samples\.png|loss\.png")


@dataclass(frozen=True, slots=True)
class Paths:
    """The files of one step. `grid` is None without images, `plot` where no loss was measured."""

    folder: Path
    metrics: Path
    images: tuple[Path, ...]
    grid: Path | None
    plot: Path | None


def publish(report: ValidationReport, folder: Path, writer: Any = None) -> tuple[ValidationReport, Paths]:
    """Write the results, then log them to the tracker, if there is one (see `log_to`); also gives the final report.

    A tracker that fails loses nothing: its note is in the report and in metrics.json. ConfigError for an object that
    is no tracker, before anything is written; StoreError as in `write_results`.
    """
    if writer is not None:
        recognise(writer)
    paths = write_results(report, folder)
    if writer is None:
        return report, paths
    logged = log_to(writer, report)
    if logged is not report:
        write_sealed(paths.metrics, to_bytes(logged.to_json()))
    return logged, paths


def prepare_folder(folder: Path) -> None:
    """Make the folder of results. Before a validation: that its results have no place must not be found after it.

    ReadOnlyError or another StoreError names what cannot be written.
    """
    with typed_errors(folder, 0):
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))


def write_results(report: ValidationReport, folder: Path) -> Paths:
    """Write `<folder>/<step>/`: metrics.json, `sample-00.png` and so on, the grid samples.png, and loss.png.

    The step's folder has six digits. All files are written and synced beside their places before the first takes its
    own, metrics.json last: what has a metrics.json is complete. The results of an earlier validation of this step are
    replaced whole, and stay as they were where the new ones cannot be written. Files of others are left alone.
    StorageFullError, ReadOnlyError or another StoreError names what cannot be written.
    """
    step = folder / step_folder(report.step)
    if step.is_symlink():
        raise UnsafeStoreError(step, "is a link; remove it, or choose another validation.path")
    images = tuple(step / image_name(number) for number in range(len(report.images)))
    paths = Paths(
        folder=step,
        metrics=step / METRICS_NAME,
        images=images,
        grid=step / GRID_NAME if images else None,
        plot=step / PLOT_NAME if report.loss is not None else None,
    )
    with typed_errors(step, 0):
        step.mkdir(parents=True, exist_ok=True)
        sync_folder(folder)
    sweep_temporaries(step)
    contents = [(paths.metrics, to_bytes(report.to_json())), *_pictures(report, paths, folder)]
    with ExitStack() as files:
        # Left in reverse order: metrics.json, entered first, takes its place last.
        for path, data in contents:
            fd = files.enter_context(sealed_file(path, len(data)))
            write_all(fd, [data])
            os.fsync(fd)  # so that a full disk is met here, while the earlier results are still in place
        _remove_earlier(paths)
    return paths


def _pictures(report: ValidationReport, paths: Paths, folder: Path) -> Iterator[tuple[Path, bytes]]:
    for path, sample in zip(paths.images, report.images, strict=True):
        yield path, image_png(sample)
    if paths.grid is not None:
        yield paths.grid, grid_png(report.images)
    if paths.plot is not None and report.loss is not None:
        yield paths.plot, loss_plot(MeasuredStep.of(report.step, report.loss), read_history(folder))


def _remove_earlier(paths: Paths) -> None:
    """Take the step's earlier results away: metrics.json first, then the pictures that get no successor."""
    with typed_errors(paths.folder, 0):
        paths.metrics.unlink(missing_ok=True)
        sync_folder(paths.folder)
        kept = {path.name for path in (*paths.images, paths.grid, paths.plot) if path is not None}
        for name in os.listdir(paths.folder):
            if _OURS.fullmatch(name) and name not in kept:
                (paths.folder / name).unlink()
