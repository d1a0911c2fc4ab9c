"""The numbers of a validation: estimates, and the report of a loss, which metrics.json has. They need no torch.

A report is read back from metrics.json for the curve of the earlier steps, and to compare two checkpoints.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, ValidationError, model_validator
from typing_extensions import Self

from latentcache.errors import ConfigError, MetricsError
from latentcache.utils.json_document import first_fault

METRICS_NAME = "metrics.json"

logger = logging.getLogger("latentcache")

T = TypeVar("T")
Count = Annotated[int, Field(ge=0, le=2**53)]
"""Larger numbers have no place on a plot's axis."""
Loss = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
"""JSON has no NaN: a loss that is NaN is null there."""
Rows = Annotated[tuple[T, ...], Strict(False)]
"""A tuple that is a list in JSON."""


class _Schema(BaseModel):
    """Frozen; a value of another type is refused, not converted; fields of later versions are ignored."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", populate_by_name=True)


class Estimate(_Schema):
    """A mean loss with its standard error, std(ddof=1) / sqrt(num).

    `standard_error` is None where it is not defined: of fewer than two values, or if one is not finite. Then, and of
    no values, the mean is NaN.
    """

    mean: Loss = Field(alias="loss")
    standard_error: Annotated[float, Field(ge=0)] | None
    num: Count

    @classmethod
    def of(cls, values: Sequence[float], **fields: int) -> Self:
        """The estimate from these values; `fields` are those that a subclass adds."""
        num, mean = len(values), mean_of(values)
        if num < 2 or math.isnan(mean):
            return cls(mean=mean, standard_error=None, num=num, **fields)
        variance = math.fsum((value - mean) ** 2 for value in values) / (num - 1)
        return cls(mean=mean, standard_error=math.sqrt(variance / num), num=num, **fields)

    def to_text(self) -> str:
        """The mean with its standard error, for people."""
        error = "" if self.standard_error is None else f" ± {self.standard_error:.2g}"
        return f"{self.mean:.6g}{error} ({self.num} sample{'' if self.num == 1 else 's'})"


class TimestepBin(Estimate):
    """The loss at timesteps `first` <= t < `end`, in steps of the training schedule: over all samples."""

    first: Count
    end: Count

    @model_validator(mode="after")
    def _is_in_order(self) -> Self:
        if self.first >= self.end:
            raise ValueError(f"first is {self.first}, which is not below end, {self.end}")
        return self


class SkippedSample(_Schema):
    """A sample that could not be read, and why."""

    dataset: str
    sample_id: str
    reason: str


class MeasurementSettings(_Schema):
    """What determines the losses, except the denoiser's weights. Only losses with equal settings may be compared.

    `schedule` is the digest of the noise schedule. `datasets` maps each name to the digest of its samples. Settings of
    later versions are kept, and compared too.
    """

    model_config = ConfigDict(extra="allow")

    prediction_type: str
    schedule: str
    num_train_timesteps: int
    num_timesteps: int
    seed: int
    snr_gamma: float | None
    dtype: str
    autocast: str | None
    datasets: dict[str, str]

    def differences(self, other: MeasurementSettings) -> Iterator[str]:
        """What differs, in words. Of the datasets those count that are in both."""
        mine, others = self.model_dump(), other.model_dump()
        for name in sorted((mine.keys() | others.keys()) - {"datasets"}):
            if mine.get(name) != others.get(name):
                yield f"{name} is {mine.get(name)!r} in one and {others.get(name)!r} in the other"
        for name in sorted(self.datasets.keys() & other.datasets.keys()):
            if self.datasets[name] != other.datasets[name]:
                yield f"dataset {name} has other samples, captions or encoders in one than in the other"


class LossReport(_Schema):
    """What `validation_loss` found, as metrics.json has it.

    A sample's loss is the mean over its timesteps, `loss` the mean over samples: a sample of two datasets counts in
    each. `by_sample` goes by dataset, then sample_id. `skipped` lists the samples that are in no mean.
    """

    mean: Loss = Field(alias="loss")
    standard_error: Annotated[float, Field(ge=0)] | None = Field(alias="loss_standard_error")
    num: Count = Field(alias="num_samples")
    by_timestep: Rows[TimestepBin] = Field(alias="loss_by_timestep")
    by_dataset: dict[str, Estimate] = Field(alias="loss_by_dataset")
    by_sample: dict[str, dict[str, Loss]] = Field(alias="loss_by_sample")
    skipped: Rows[SkippedSample]
    measurement_settings: MeasurementSettings

    @property
    def loss(self) -> Estimate:
        """The mean over samples, with its standard error."""
        return Estimate(mean=self.mean, standard_error=self.standard_error, num=self.num)


class _MeasuredStep(LossReport):
    """What is read back of a metrics.json."""

    step: Count


def loss_fields(report: LossReport | None) -> dict[str, Any]:
    """The fields of metrics.json about the loss: null where none was measured, as is a loss that is NaN."""
    if report is None:
        return dict.fromkeys(field.alias or name for name, field in LossReport.model_fields.items())
    return report.model_dump(by_alias=True)


def read_losses(path: Path) -> LossReport | None:
    """The losses in the metrics.json at `path`, or None if none was measured.

    MetricsError for a file that cannot be read, that is damaged, or that another program wrote.
    """
    try:
        document = json.loads(path.read_bytes())
        if isinstance(document, dict) and document.get("measurement_settings", "absent") is None:
            return None
        return _MeasuredStep.model_validate(document)
    except ValidationError as error:
        field, value, detail = first_fault(error)
        raise MetricsError(path, detail, field=field, value=value) from error
    except (OSError, ValueError, RecursionError) as error:
        raise MetricsError(path, str(error) or type(error).__name__) from error


def mean_of(values: Sequence[float]) -> float:
    """The mean in float64, independent of the order: NaN of no values, and if one is not finite."""
    if not values or not all(map(math.isfinite, values)):
        return math.nan
    return math.fsum(values) / len(values)


def paired_difference(report: LossReport, other: LossReport) -> Estimate:
    """The mean of `report` minus `other`, sample by sample, over the samples that both have.

    Its standard error is that of the differences: far smaller than that of either mean, because what makes a sample
    hard is in both. ConfigError names what differs when the two were not measured with the same settings.
    """
    differences = list(report.measurement_settings.differences(other.measurement_settings))
    if differences:
        raise ConfigError(
            f"these losses cannot be compared: {'; '.join(differences)}. Measure both models with one config and cache"
        )
    pairs = [
        losses[sample_id] - other.by_sample[dataset][sample_id]
        for dataset, losses in report.by_sample.items()
        for sample_id in losses
        if sample_id in other.by_sample.get(dataset, {})
    ]
    if not pairs:
        raise ConfigError(
            "these losses cannot be compared: no sample was measured in both. Give both the same datasets"
        )
    return Estimate.of(pairs)


def step_folder(step: int) -> str:
    """The name of a step's folder: six digits, so that a file browser lists steps in order; longer from a million."""
    return f"{step:06d}"


def read_history(folder: Path) -> dict[int, LossReport]:
    """The losses of the steps in a folder of results, by step, in order. Steps without a loss are left out.

    So is a metrics.json in the folder of another step, and, with a logged warning, one that cannot be read. A folder
    without one is no result: its writer was stopped, or it is another program's.
    """
    history = {}
    for path in folder.glob(f"*/{METRICS_NAME}"):
        try:
            losses = read_losses(path)
        except MetricsError as error:
            logger.warning("an earlier validation is left out: %s", error)
            continue
        if isinstance(losses, _MeasuredStep) and path.parent.name == step_folder(losses.step):
            history[losses.step] = losses
    return dict(sorted(history.items()))
