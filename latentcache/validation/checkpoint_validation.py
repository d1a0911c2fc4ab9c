"""Validation of a checkpoint without a trainer: what `latentcache validate` does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from latentcache.config import Config
from latentcache.devices.placement import device_named
from latentcache.errors import ConfigError
from latentcache.families.base import Family
from latentcache.loading.cache import LatentCache
from latentcache.models.denoiser import load_denoiser, load_scheduler
from latentcache.models.files import denoised_share, family_of
from latentcache.models.lora import load_lora, saved_step
from latentcache.models.vae import DTYPES, vae_dtype
from latentcache.phases.phases import Phases
from latentcache.precache.encodings import load_models
from latentcache.utils.progress import Progress
from latentcache.validation.loss_parts import check_controls
from latentcache.validation.metrics import Estimate, LossReport, paired_difference, read_losses
from latentcache.validation.results import ResultPaths, ValidationReport
from latentcache.validation.runner import ValidationRunner, validation_sets


def validate(
    config: Config,
    *,
    denoiser: str | None = None,
    lora: str | None = None,
    lora_scale: float = 1.0,
    dtype: str = "auto",
    step: int | None = None,
    against: Path | None = None,
    progress: Progress | None = None,
) -> CheckpointValidation:
    """Validate a denoiser on the cached validation sets of a config, and write the results.

    `denoiser` is anything that `models.denoiser.load_denoiser` reads, by default the model's own; `lora` a LoRA on
    top of it. The device is `encode.device`, `dtype` that of the denoiser: `auto` is on an accelerator that of the
    family (float16 or bfloat16), float32 on the CPU. No text encoder is loaded. The results are those of `step`, by
    default what the LoRA or the denoiser says (`saved_step`), and 0 for the model's own. `against` is the metrics.json
    of another checkpoint: the result has the difference of the losses. Raises ConfigError, also for a step that nobody
    says, MetricsError, ModelError, DeviceError, and StoreError for what is not cached.
    """
    other = None if against is None else _losses_in(against)
    device = device_named(config.encode.device)
    # Opened first: an empty cache is reported before any model is loaded.
    with LatentCache(config.cache) as cache:
        model, family = config.model, family_of(config.model)[0]
        check_controls(family, cache, validation_sets(cache, config), config)
        loaded = load_denoiser(denoiser, dtype=_dtype(dtype, device, family), model=model, family=family)
        scheduler = load_scheduler(denoiser, model=model, family=family)
        parts: dict[str, Any] = {family.denoiser: loaded, "scheduler": scheduler}
        if lora is not None:
            load_lora(loaded, lora, scale=lora_scale, family=family)
            loaded.requires_grad_(False)
        if step is None:
            step = _step_of(lora or denoiser)
        if config.validation.prompts:
            loader = load_models(model, {})
            parts["vae"] = loader.vae(vae_dtype(config.encode.vae_dtype, loader.vae_facts(), device)[0])
        phases = Phases(parts, device=device)
        within = denoised_share(model, family)
        runner = ValidationRunner(parts, cache, config, phases=phases, progress=progress, within=within)
        if other is not None and not runner.measures_loss():
            raise ConfigError(
                "there is no loss to compare: no dataset of the config or the cache has the role validation",
                source=str(against),
                key="datasets",
            )
        report = runner.run(step)
        assert report is not None and runner.paths is not None, "one process has no other ranks"
    difference = None if other is None or report.loss is None else paired_difference(report.loss, other)
    return CheckpointValidation(report, runner.paths, str(against) if against else None, difference)


@dataclass(frozen=True, slots=True)
class CheckpointValidation:
    """A report and its files; with the mean difference of the losses to those in `against`, sample by sample."""

    report: ValidationReport
    paths: ResultPaths
    against: str | None = None
    difference: Estimate | None = None

    def to_json(self) -> dict[str, Any]:
        """The report's document, its images with paths that open."""
        compared = None if self.difference is None else {"against": self.against, **self.difference.model_dump()}
        return self.report.to_json(self.paths.folder) | {"difference": compared}

    def to_text(self) -> str:
        """The report for people."""
        lines = [self.report.to_text()]
        if self.difference is not None:
            sign = "+" if self.difference.mean > 0 else ""
            lines.append(f"against   {self.against}: {sign}{self.difference.to_text()}")
        return "\n".join((*lines, f"results   {self.paths.folder}"))


def _step_of(path: str | None) -> int:
    """The step of a LoRA or a denoiser; 0 for the model's own. ConfigError where nothing says it."""
    if path is None:
        return 0
    step = saved_step(Path(path))
    if step is None:
        raise ConfigError("says neither inside nor in its name of which step it is: give --step", source=path)
    return step


def _losses_in(path: Path) -> LossReport:
    """The losses in a metrics.json, or a link to one. MetricsError, or ConfigError if it has none."""
    loss = read_losses(path.resolve())
    if loss is None:
        raise ConfigError(
            "is the metrics.json of a validation that measured no loss; name one that did, in validation.path/<step>/",
            source=str(path),
        )
    return loss


def _dtype(name: str, device: torch.device, family: Family) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else DTYPES[family.text_dtype]
    if name not in DTYPES:
        raise ConfigError(f"--dtype is {name!r}, but one of auto, {', '.join(DTYPES)} is needed")
    return DTYPES[name]
