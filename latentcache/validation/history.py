"""What earlier validations left behind: the losses of all steps in a folder of results."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from latentcache.errors import ConfigError, StoreError, UnsafeStoreError
from latentcache.utils.durable_files import open_regular
from latentcache.utils.json_document import plain
from latentcache.validation.loss import Estimate, LossReport, TimestepBin

METRICS_NAME = "metrics.json"

logger = logging.getLogger("latentcache")


def step_folder(step: int) -> str:
    """The name of a step's folder: six digits, so that a file browser lists steps in order; longer from a million."""
    return f"{step:06d}"


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """The losses of one validated step."""

    step: int
    loss: Estimate
    by_timestep: tuple[TimestepBin, ...]
    footing: Mapping[str, Any]
    """In the `plain` form. Only steps with equal footings may be compared."""

    @classmethod
    def of(cls, step: int, loss: LossReport) -> MeasuredStep:
        return cls(step, loss.loss, loss.by_timestep, plain(loss.footing))


@dataclass(frozen=True, slots=True)
class SampleLosses:
    """The loss of each sample, by dataset, that a metrics.json holds: what `paired_difference` compares."""

    footing: Mapping[str, Any]
    by_sample: Mapping[str, Mapping[str, float]]


def read_losses(path: Path) -> SampleLosses:
    """The samples' losses in this metrics.json. ConfigError if it cannot be read, or no loss was measured."""
    try:
        metrics = _Losses.model_validate(json.loads(path.read_bytes()))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"is no metrics.json of a validation with a loss ({_cause(error)}); name one in validation.path/<step>/",
            source=str(path),
        ) from error
    by_sample = {
        name: {sample_id: math.nan if loss is None else loss for sample_id, loss in losses.items()}
        for name, losses in metrics.loss_by_sample.items()
    }
    return SampleLosses(metrics.footing.model_dump(), by_sample)


def read_history(folder: Path) -> tuple[MeasuredStep, ...]:
    """The steps in a folder of results whose loss was measured, in order of their steps.

    A metrics.json that is damaged, that another program wrote, that is a link, or that lies in the folder of another
    step is logged and left out. A folder without one is no result: its writer was stopped, or it holds something else.
    """
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return ()
    except OSError as error:
        logger.warning("%s: earlier validations cannot be listed, and are left out: %s", folder, error)
        return ()
    found = []
    for name in names:
        path = folder / name / METRICS_NAME
        if not os.path.lexists(path):
            continue
        try:
            measured = _read(path)
        except (StoreError, OSError, ValueError, RecursionError) as error:
            logger.warning("%s: not the result of a validation, left out: %s", path, _cause(error))
            continue
        if measured is not None:
            found.append(measured)
    return tuple(sorted(found, key=lambda measured: measured.step))


def same_footing(
    history: Sequence[MeasuredStep], footing: Mapping[str, Any]
) -> tuple[tuple[MeasuredStep, ...], tuple[MeasuredStep, ...]]:
    """The steps that were measured on this footing, and the others: they do not belong in one curve."""
    wanted = plain(footing)
    same = tuple(measured for measured in history if measured.footing == wanted)
    return same, tuple(measured for measured in history if measured.footing != wanted)


_Count = Annotated[int, Field(ge=0, le=2**53)]
"""Larger numbers have no place on a plot's axis."""


class _Figures(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")
    loss: float | None
    standard_error: float | None
    num: _Count


class _Bin(_Figures):
    first: _Count
    end: _Count


class _Metrics(BaseModel):
    """What a history needs of metrics.json. `footing` is null where no loss was measured."""

    model_config = ConfigDict(strict=True, extra="ignore")
    step: _Count
    loss: float | None
    loss_standard_error: float | None
    loss_by_timestep: list[_Bin]
    num_samples: _Count
    footing: dict[str, Any] | None


class _Footing(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")
    datasets: dict[str, str]


class _Losses(BaseModel):
    """What a comparison needs of metrics.json."""

    model_config = ConfigDict(strict=True, extra="ignore")
    footing: _Footing
    loss_by_sample: dict[str, dict[str, float | None]]


def _read(path: Path) -> MeasuredStep | None:
    with open(open_regular(path), "rb") as file:
        metrics = _Metrics.model_validate(json.loads(file.read()))
    if path.parent.name != step_folder(metrics.step):
        raise ValueError(f"it is of step {metrics.step}, whose folder is {step_folder(metrics.step)}")
    if metrics.footing is None:
        return None
    bins = tuple(
        TimestepBin(part.first, part.end, _estimate(part.loss, part.standard_error, part.num))
        for part in metrics.loss_by_timestep
    )
    loss = _estimate(metrics.loss, metrics.loss_standard_error, metrics.num_samples)
    return MeasuredStep(metrics.step, loss, bins, metrics.footing)


def _estimate(mean: float | None, standard_error: float | None, num: int) -> Estimate:
    return Estimate(math.nan if mean is None else mean, standard_error, num)


def _cause(error: Exception) -> str:
    if isinstance(error, UnsafeStoreError):
        return "it, or its folder, is a link or no regular file"
    if isinstance(error, ValidationError):
        return "; ".join(f"{'.'.join(map(str, found['loc']))}: {found['msg']}" for found in error.errors()[:3])
    return str(error) or type(error).__name__
