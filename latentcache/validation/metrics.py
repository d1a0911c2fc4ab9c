"""The numbers of a validation, as metrics.json holds them: estimates and loss reports. Needs no torch.

Reports are read back from metrics.json to plot earlier steps and to compare two checkpoints.
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
"""Bounded, so that float64, and with it a plot's axis, can hold it."""
Loss = Annotated[float, BeforeValidator(lambda value: math.nan if value is None else value)]
"""A loss. NaN is null in the file, because JSON has no NaN."""
Rows = Annotated[tuple[T, ...], Strict(False)]
"""A tuple, which is a list in JSON."""


class _Schema(BaseModel):
    """A frozen part of metrics.json. Types are strict, and fields of later versions are ignored."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore", populate_by_name=True)


class Estimate(_Schema):
    """A mean loss with its standard error, std(ddof=1) / sqrt(num).

    `standard_error` is None for fewer than two values, or if one is not finite. The mean is NaN if a value is not
    finite, or if there are none.
    """

    mean: Loss = Field(alias="loss")
    standard_error: Annotated[float, Field(ge=0)] | None
    num: Count

    @classmethod
    def of(cls, values: Sequence[float], **fields: int) -> Self:
        """Estimate from these values. `fields` are the subclass's own."""
        num, mean = len(values), mean_of(values)
        if num < 2 or math.isnan(mean):
            return cls(mean=mean, standard_error=None, num=num, **fields)
        variance = math.fsum((value - mean) ** 2 for value in values) / (num - 1)
        return cls(mean=mean, standard_error=math.sqrt(variance / num), num=num, **fields)

    def to_text(self) -> str:
        """The mean with its standard error, as text."""
        error = "" if self.standard_error is None else f" ± {self.standard_error:.2g}"
        return f"{self.mean:.6g}{error} ({self.num} sample{'' if self.num == 1 else 's'})"


class TimestepBin(Estimate):
    """The loss of all samples at timesteps `first` <= t < `end`, counted in steps of the training schedule."""

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
    """All that determines the losses besides the denoiser's weights. Only losses with equal settings are comparable.

    `schedule` is the digest of the noise schedule. `datasets` maps each name to the digest of its samples. Settings
    that a later version added are kept and compared too.
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
        """Describe each difference. Datasets that only one of the two has are ignored."""
        mine, theirs = self.model_dump(), other.model_dump()
        for name in sorted((mine.keys() | theirs.keys()) - {"datasets"}):
            if mine.get(name) != theirs.get(name):
                yield f"{name} is {mine.get(name)!r} in one and {theirs.get(name)!r} in the other"
        for name in sorted(self.datasets.keys() & other.datasets.keys()):
            if self.datasets[name] != other.datasets[name]:
                yield f"dataset {name} has other samples, captions or encoders in one than in the other"


class LossReport(_Schema):
    """The result of `validation_loss`, with the field names of metrics.json as aliases.

    A sample's loss is the mean over its timesteps, and `loss` is the mean over samples. A sample in two datasets counts
    twice. `by_sample` maps dataset and sample_id to the loss. `skipped` lists samples that no mean includes.
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
    """The part of a metrics.json that is read back."""

    step: Count


def loss_fields(report: LossReport | None) -> dict[str, Any]:
    """The fields of metrics.json about the loss, all None if none was measured."""
    if report is None:
        return dict.fromkeys(field.alias or name for name, field in LossReport.model_fields.items())
    return report.model_dump(by_alias=True)


def read_losses(path: Path) -> LossReport | None:
    """Read the losses from the metrics.json at `path`. Returns None if that validation measured none.

    Raises MetricsError for a file that is unreadable, damaged, or written by another program.
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
    """The mean in float64, independent of the order. NaN if there are no values, or if one is not finite."""
    if not values or not all(map(math.isfinite, values)):
        return math.nan
    return math.fsum(values) / len(values)


def paired_difference(report: LossReport, other: LossReport) -> Estimate:
    """The mean of `report` minus `other`, paired by sample, over the samples that both have.

    Its standard error is far smaller than that of either mean, because a sample that is hard for one model is hard for
    the other too. Raises ConfigError, naming the differences, if the two have different measurement settings.
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
    """Name of a step's folder: at least six digits, so that names sort in order below a million."""
    return f"{step:06d}"


def read_history(folder: Path) -> dict[int, LossReport]:
    """Read the losses of all steps in a folder of results, in order of step.

    Steps without a loss are left out, and so is a metrics.json in the folder of another step. One that cannot be read
    is left out with a logged warning. A folder without metrics.json is incomplete, or belongs to another program.
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
