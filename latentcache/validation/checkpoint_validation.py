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
from latentcache.utils.durable_files import expanded
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
    """Validate a denoiser on a config's cached validation sets, without a text encoder, and write the results.

    Args:
        config: The device is its `encode.device`.
        denoiser: Anything that `models.denoiser.load_denoiser` reads. Default: the model's own.
        lora: A LoRA to load on top of it.
        lora_scale: Its strength.
        dtype: The denoiser's. `auto`: the family's (float16 or bfloat16) on an accelerator, float32 on the CPU.
        step: The results go to this step's folder. Default: the LoRA's or denoiser's own (`saved_step`), else 0.
        against: The metrics.json of another checkpoint, to also report the difference of the losses.
        progress: Shows how much of the loss is measured.

    Raises:
        ConfigError: A setting cannot be used, or the step is unknown.
        MetricsError: `against` cannot be read.
        ModelError, DeviceError: The model or its device cannot be used.
        StoreError: A validation set or prompt is not cached.
    """
    other = None if against is None else _losses_in(against)
    device = device_named(config.encode.device)
    # All that needs no model is checked before one is loaded.
    with LatentCache(config.cache) as cache:
        model, family = config.model, family_of(config.model)[0]
        names = validation_sets(cache, config)
        if other is not None and not names:
            raise ConfigError(
                "there is no loss to compare: no dataset of the config or the cache has the role validation",
                source=str(against),
                key="datasets",
            )
        check_controls(family, cache, names, config)
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
        report = runner.run(step)
        assert report is not None and runner.paths is not None, "this is the first process"
    difference = None if other is None or report.loss is None else paired_difference(report.loss, other)
    return CheckpointValidation(report, runner.paths, str(against) if against else None, difference)


@dataclass(frozen=True, slots=True)
class CheckpointValidation:
    """A report and its files, and how the losses differ from those in `against`, paired by sample."""

    report: ValidationReport
    paths: ResultPaths
    against: str | None = None
    difference: Estimate | None = None

    def to_json(self) -> dict[str, Any]:
        """The report as JSON, with full paths of the images."""
        compared = None if self.difference is None else {"against": self.against, **self.difference.model_dump()}
        return self.report.to_json(self.paths.folder) | {"difference": compared}

    def to_text(self) -> str:
        """The report as text."""
        lines = [self.report.to_text()]
        if self.difference is not None:
            sign = "+" if self.difference.mean > 0 else ""
            lines.append(f"against   {self.against}: {sign}{self.difference.to_text()}")
        return "\n".join((*lines, f"results   {self.paths.folder}"))


def _step_of(path: str | None) -> int:
    """The step of a LoRA or a denoiser, 0 for the model's own. Raises ConfigError if it is unknown."""
    if path is None:
        return 0
    step = saved_step(path)
    if step is None:
        raise ConfigError("the step is neither in the file nor in its name: give --step", source=path)
    return step


def _losses_in(path: Path) -> LossReport:
    """Read the losses from a metrics.json, or a link to one. Raises MetricsError, or ConfigError if it has none."""
    loss = read_losses(expanded(path).resolve())
    if loss is None:
        raise ConfigError(
            "that validation measured no loss; name the metrics.json of one that did, in validation.path/<step>/",
            source=str(path),
        )
    return loss


def _dtype(name: str, device: torch.device, family: Family) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else DTYPES[family.text_dtype]
    if name not in DTYPES:
        raise ConfigError(f"--dtype is {name!r}; it must be one of auto, {', '.join(DTYPES)}")
    return DTYPES[name]
