"""What one validation found, as one document."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from latentcache.errors import ConfigError
from latentcache.utils.json_document import plain

if TYPE_CHECKING:
    from latentcache.validation.loss import Estimate, LossReport
    from latentcache.validation.sample_images import SampleImage


def checked_step(step: int) -> int:
    """The step as an int. ConfigError if it is no whole number, or below 0."""
    try:
        number = operator.index(step)
    except TypeError as error:
        raise ConfigError(f"a validation of step {step!r}: a step is a whole number") from error
    if number < 0:
        raise ConfigError(f"a validation of step {number}: steps are counted from 0")
    return number


def image_name(number: int) -> str:
    """The file name of a step's image `number`, counted from 0."""
    return f"sample-{number:02d}.png"


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

    def to_json(self, folder: Path | None = None) -> dict[str, Any]:
        """The `--json` document of `latentcache validate`, and metrics.json. All of it is valid JSON: a loss that is
        NaN or infinite is null, and then `footing` still says that it was measured.

        `images[].path` are file names in the step's folder, which may be moved; with `folder` they are joined to it.
        """
        loss = self.loss
        return plain(
            {
                "step": self.step,
                "folder": None if folder is None else str(folder),
                "loss": loss and loss.loss.mean,
                "loss_standard_error": loss and loss.loss.standard_error,
                "loss_by_timestep": [
                    {"first": part.first, "end": part.end, **_figures(part.loss)} for part in loss.by_timestep
                ]
                if loss
                else [],
                "loss_by_dataset": {name: _figures(found) for name, found in loss.by_dataset.items()} if loss else {},
                "num_samples": loss.loss.num if loss else 0,
                "images": self._images_json(folder),
                "skipped": [
                    {"dataset": sample.dataset, "sample_id": sample.sample_id, "reason": sample.reason}
                    for sample in (loss.skipped if loss else ())
                ],
                "footing": loss and loss.footing,
                "loss_by_sample": loss.by_sample if loss else {},
                "num_filled": self.num_filled,
                "placement": self.placement,
                "seconds": {stage: round(seconds, 3) for stage, seconds in self.seconds.items()},
                "notes": self.notes,
            }
        )

    def _images_json(self, folder: Path | None) -> list[dict[str, Any]]:
        return [
            {
                "prompt": sample.prompt,
                "negative_prompt": sample.negative_prompt,
                "seed": sample.seed,
                "path": str((folder or Path()) / image_name(number)),
                "tiled": sample.tiled,
            }
            for number, sample in enumerate(self.images)
        ]

    def to_text(self) -> str:
        """The report for people."""
        lines = [f"step      {self.step}"]
        if self.loss is None:
            lines.append("loss      not measured")
        else:
            lines.append(f"loss      {format_estimate(self.loss.loss)}")
            if len(self.loss.by_dataset) > 1:
                lines += [f"          {name}: {format_estimate(found)}" for name, found in self.loss.by_dataset.items()]
            lines += [
                f"          timesteps {part.first} to {part.end - 1}: {format_estimate(part.loss)}"
                for part in self.loss.by_timestep
            ]
            if self.loss.skipped:
                lines.append(f"skipped   {len(self.loss.skipped)}")
            lines += [
                f"          {sample.dataset}: {sample.sample_id}: {sample.reason}" for sample in self.loss.skipped
            ]
        lines.append(f"images    {len(self.images)}")
        if self.num_filled:
            lines.append(f"encoded   {self.num_filled} entries that were not cached")
        lines += [
            f"{phase:<9} {', '.join(parts) or 'nothing'} on the device" for phase, parts in self.placement.items()
        ]
        if self.seconds:
            lines.append(f"seconds   {', '.join(f'{stage} {value:.2f}' for stage, value in self.seconds.items())}")
        lines += [f"note      {note}" for note in self.notes]
        return "\n".join(lines)


def format_estimate(found: Estimate) -> str:
    """A mean with its standard error, for people."""
    error = "" if found.standard_error is None else f" ± {found.standard_error:.2g}"
    return f"{found.mean:.6g}{error} ({found.num} sample{'' if found.num == 1 else 's'})"


def _figures(found: Estimate) -> dict[str, float | int | None]:
    return {"loss": found.mean, "standard_error": found.standard_error, "num": found.num}
