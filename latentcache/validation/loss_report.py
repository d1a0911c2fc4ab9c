"""The values of a validation loss: estimates, the report, and the comparison of two reports. They need no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from latentcache.errors import ConfigError


class Losses(Protocol):
    """What can be compared: a LossReport, or what was read from a metrics.json."""

    @property
    def footing(self) -> Mapping[str, Any]: ...

    @property
    def by_sample(self) -> Mapping[str, Mapping[str, float]]: ...


def paired_difference(report: Losses, other: Losses) -> Estimate:
    """The mean of `report` minus `other`, sample by sample, over the samples that both have.

    Its standard error is that of the differences: far smaller than that of either mean, because what makes a sample
    hard is in both. ConfigError names what differs when the two do not stand on the same footing.
    """
    differences = list(_footing_differences(report.footing, other.footing))
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


def mean_of(values: Sequence[float]) -> float:
    """The mean in float64, whatever the order: NaN of no values, and if one is not finite."""
    if not values or not all(map(math.isfinite, values)):
        return math.nan
    return math.fsum(values) / len(values)


def _footing_differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    """What differs, in words. Of the datasets those count that are in both."""
    for name in sorted((one.keys() | other.keys()) - {"datasets"}):
        if one.get(name) != other.get(name):
            yield f"{name} is {one.get(name)!r} in one and {other.get(name)!r} in the other"
    datasets, others = one.get("datasets", {}), other.get("datasets", {})
    for name in sorted(datasets.keys() & others.keys()):
        if datasets[name] != others[name]:
            yield f"dataset {name} has other samples, captions or encoders in one than in the other"


def _to_null(value: float) -> float | None:
    return None if math.isnan(value) else value


def _from_null(value: float | None) -> float:
    return math.nan if value is None else value


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean with its standard error, std(ddof=1) / sqrt(num).

    `standard_error` is None where it cannot be told: of fewer than two values, or if one is not finite. Then, and of
    no values, the mean is NaN.
    """

    mean: float
    standard_error: float | None
    num: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        num, mean = len(values), mean_of(values)
        if num < 2 or math.isnan(mean):
            return cls(mean, None, num)
        variance = math.fsum((value - mean) ** 2 for value in values) / (num - 1)
        return cls(mean, math.sqrt(variance / num), num)

    def to_json(self) -> dict[str, Any]:
        """JSON has no NaN: a mean that is NaN is null."""
        return {"mean": _to_null(self.mean), "standard_error": self.standard_error, "num": self.num}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Estimate:
        return cls(_from_null(value["mean"]), value["standard_error"], value["num"])


@dataclass(frozen=True, slots=True)
class TimestepBin:
    """The loss at timesteps `first` <= t < `end`, in steps of the training schedule: over all samples."""

    first: int
    end: int
    loss: Estimate

    def to_json(self) -> dict[str, Any]:
        return {"first": self.first, "end": self.end, "loss": self.loss.to_json()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TimestepBin:
        return cls(value["first"], value["end"], Estimate.from_json(value["loss"]))


@dataclass(frozen=True, slots=True)
class SkippedSample:
    """A sample that could not be read, and why."""

    dataset: str
    sample_id: str
    reason: str

    def to_json(self) -> dict[str, str]:
        return {"dataset": self.dataset, "sample_id": self.sample_id, "reason": self.reason}


@dataclass(frozen=True, slots=True)
class LossReport:
    """What `validation_loss` found. `footing` is JSON: all that two reports must share to be compared.

    A sample's loss is the mean over its timesteps, `loss` the mean over samples: a sample of two datasets counts in
    each. `by_sample` goes by dataset, then sample_id. `skipped` lists the samples that are in no mean.
    """

    footing: Mapping[str, Any]
    loss: Estimate
    by_timestep: tuple[TimestepBin, ...]
    by_dataset: Mapping[str, Estimate]
    by_sample: Mapping[str, Mapping[str, float]]
    skipped: tuple[SkippedSample, ...]

    def to_json(self) -> dict[str, Any]:
        """JSON has no NaN: losses that are NaN are null."""
        return {
            "footing": dict(self.footing),
            "loss": self.loss.to_json(),
            "by_timestep": [part.to_json() for part in self.by_timestep],
            "by_dataset": {name: loss.to_json() for name, loss in self.by_dataset.items()},
            "by_sample": {
                name: {sample_id: _to_null(loss) for sample_id, loss in losses.items()}
                for name, losses in self.by_sample.items()
            },
            "skipped": [sample.to_json() for sample in self.skipped],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> LossReport:
        return cls(
            footing=value["footing"],
            loss=Estimate.from_json(value["loss"]),
            by_timestep=tuple(TimestepBin.from_json(part) for part in value["by_timestep"]),
            by_dataset={name: Estimate.from_json(loss) for name, loss in value["by_dataset"].items()},
            by_sample={
                name: {sample_id: _from_null(loss) for sample_id, loss in losses.items()}
                for name, losses in value["by_sample"].items()
            },
            skipped=tuple(SkippedSample(**sample) for sample in value["skipped"]),
        )
