"""What one validation found, and its results on disk: a folder for each step."""

from __future__ import annotations

import errno
import operator
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from latentcache.errors import ConfigError, UnsafeStoreError
from latentcache.utils.durable_files import (
    sealed_file,
    sweep_temporaries,
    sync_folder,
    typed_errors,
    write_all,
)
from latentcache.utils.json_document import to_bytes
from latentcache.validation.grid import grid_png, image_png
from latentcache.validation.metrics import (
    METRICS_NAME,
    ImageMetrics,
    LossReport,
    Metrics,
    loss_fields,
    read_history,
    step_folder,
)
from latentcache.validation.plots import loss_plot
from latentcache.validation.sample_images import SampleImage

GRID_NAME, PLOT_NAME = "samples.png", "loss.png"
_OUR_PICTURES = re.compile(r"sample-\d{2,}\.png|samples\.png|loss\.png")


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
    """The outcome of the validation of one step. ConfigError for a step below 0."""

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

    def __post_init__(self) -> None:
        checked_step(self.step)

    def metrics(self, folder: Path | None = None) -> Metrics:
        """All numbers. The images' paths are file names in the step's folder; with `folder` they are joined to it."""
        images = [
            ImageMetrics(
                prompt=sample.prompt,
                negative_prompt=sample.negative_prompt,
                seed=sample.seed,
                path=str((folder or Path()) / image_name(number)),
                tiled=sample.tiled,
            )
            for number, sample in enumerate(self.images)
        ]
        return Metrics(
            step=operator.index(self.step),
            folder=None if folder is None else str(folder),
            **loss_fields(self.loss),
            images=tuple(images),
            num_filled=self.num_filled,
            placement=dict(self.placement),
            seconds={stage: round(seconds, 3) for stage, seconds in self.seconds.items()},
            notes=self.notes,
        )

    def to_json(self, folder: Path | None = None) -> dict[str, Any]:
        """The document of `metrics`."""
        return self.metrics(folder).to_json()

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


def image_name(number: int) -> str:
    """The file name of a step's image `number`, counted from 0."""
    return f"sample-{number:02d}.png"


@dataclass(frozen=True, slots=True)
class ResultPaths:
    """The files of one step. `grid` is None without images, `plot` where no loss was measured."""

    folder: Path
    metrics: Path
    images: tuple[Path, ...]
    grid: Path | None
    plot: Path | None


def prepare_folder(folder: Path) -> None:
    """Make the folder of results: called before a validation, because afterwards a failure would cost its results.

    ReadOnlyError or another StoreError names what cannot be written.
    """
    with typed_errors(folder, 0):
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))


def write_results(report: ValidationReport, folder: Path) -> ResultPaths:
    """Write `<folder>/<step>/`: metrics.json, `sample-00.png` and so on, the grid samples.png, and loss.png.

    The step's folder has six digits. All files are written and synced as temporary siblings before the first is
    renamed. metrics.json is the last: a folder that has one is complete. The results of an earlier validation of this
    step are replaced whole, and stay as they were if the new ones cannot be written. Other files are left alone.
    StorageFullError, ReadOnlyError or another StoreError names what cannot be written.
    """
    step = folder / step_folder(report.step)
    if step.is_symlink():
        raise UnsafeStoreError(step, "is a link; remove it, or choose another validation.path")
    images = tuple(step / image_name(number) for number in range(len(report.images)))
    paths = ResultPaths(
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
        # Renamed in reverse order: metrics.json is entered first and renamed last.
        for path, data in contents:
            fd = files.enter_context(sealed_file(path, len(data)))
            write_all(fd, data)
            os.fsync(fd)  # a full disk raises here, while the earlier results are still in place
        _remove_earlier(paths)
    return paths


def _pictures(report: ValidationReport, paths: ResultPaths, folder: Path) -> Iterator[tuple[Path, bytes]]:
    for path, sample in zip(paths.images, report.images, strict=True):
        yield path, image_png(sample)
    if paths.grid is not None:
        yield paths.grid, grid_png(report.images)
    if paths.plot is not None and report.loss is not None:
        yield paths.plot, loss_plot(report.step, report.loss, read_history(folder))


def _remove_earlier(paths: ResultPaths) -> None:
    """Remove the step's earlier results: metrics.json first, then the pictures that are not replaced."""
    with typed_errors(paths.folder, 0):
        paths.metrics.unlink(missing_ok=True)
        sync_folder(paths.folder)
        kept = {path.name for path in (*paths.images, paths.grid, paths.plot) if path is not None}
        for name in os.listdir(paths.folder):
            if _OUR_PICTURES.fullmatch(name) and name not in kept:
                (paths.folder / name).unlink()
