"""The validation loss: the same noise and timesteps for a sample for ever, so that two checkpoints can be compared."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from latentcache.config import ValidationConfig
from latentcache.devices.placement import device_of, dtype_of
from latentcache.errors import ConfigError, ModelError, SampleError, StoreError
from latentcache.identity import canonical_json, digest
from latentcache.loading.cache import LatentCache
from latentcache.loading.sample import Wanted
from latentcache.types import Bucket
from latentcache.utils.progress import NoProgress, Progress
from latentcache.validation.loss_report import (
    Estimate,
    LossReport,
    SkippedSample,
    TimestepBin,
    mean_of,
    paired_difference,
)
from latentcache.validation.noise_schedule import OFFSET_BITS, NoiseSchedule, index_in, strata

__all__ = [
    "BATCH_SIZE_TOLERANCE",
    "Estimate",
    "LossReport",
    "LossSettings",
    "SkippedSample",
    "TimestepBin",
    "paired_difference",
    "validation_loss",
]

BATCH_SIZE_TOLERANCE: Mapping[torch.dtype, float] = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
"""Largest relative difference of a sample's loss between two batch sizes, by the dtype of the UNet or of autocast.

Kernels round differently for other batch sizes. Measured with tiny UNets on a CPU, batch sizes 1 to 16: 8e-7 in
float32 and 3e-4 in float16. Ten times that is allowed, because other devices have other kernels. bfloat16 rounds
eight times as coarsely as float16. With TF32, float32 is as coarse as float16.
"""

logger = logging.getLogger("latentcache")


def validation_loss(
    unet: torch.nn.Module,
    cache: LatentCache,
    *,
    scheduler: Any,
    datasets: Sequence[str] | None = None,
    settings: LossSettings | None = None,
    progress: Progress | None = None,
    device: torch.device | None = None,
) -> LossReport:
    """The mean squared error of the UNet's prediction on cached samples, without any encoder.

    `datasets` names manifests; by default all with the role `validation` (StoreError if there are none). `scheduler`
    is a diffusers scheduler or its config, and is only read: see `NoiseSchedule.of`. The mean of the stored moments
    and the first caption are used. Noise depends on seed, sample_id and timestep alone, and the timesteps on seed and
    sample_id: one from each of `num_timesteps` equal parts of the schedule, so that many samples cover each part.

    The UNet is used where it is and in the mode it is in: call `unet.eval()` first, and give the plain module, not
    DDP's. Inputs go to its device; name a `device` where its blocks are swapped, so that it lies on several.
    A surrounding autocast stays in force. Gradients are off. Two runs with one batch size on one machine are equal to
    the last bit (if cudnn.benchmark is off: it picks kernels by time); see BATCH_SIZE_TOLERANCE for others.

    A sample that is missing or damaged is skipped, logged and listed. If none is left, the first SampleError is
    raised. A loss that is not finite is NaN, and so is each mean that it is in.
    """
    settings = settings or LossSettings()
    schedule = NoiseSchedule.of(scheduler)
    views = {name: _view(cache, name) for name in _dataset_names(cache, datasets)}
    measurement = _Measurement(unet, schedule, settings, progress or NoProgress(), device or device_of(unet))
    losses = measurement.run(views)
    rows = [row for samples in losses.values() for row in samples.values()]
    by_sample = {name: {key: mean_of(row) for key, row in samples.items()} for name, samples in losses.items()}
    return LossReport(
        footing=measurement.footing() | {"datasets": {name: _data_digest(view, name) for name, view in views.items()}},
        loss=Estimate.of([loss for samples in by_sample.values() for loss in samples.values()]),
        by_timestep=tuple(
            TimestepBin(part.start, part.stop, Estimate.of([row[number] for row in rows]))
            for number, part in enumerate(measurement.strata)
        ),
        by_dataset={name: Estimate.of(list(samples.values())) for name, samples in by_sample.items()},
        by_sample=by_sample,
        skipped=tuple(measurement.skipped),
    )


def _dataset_names(cache: LatentCache, datasets: Sequence[str] | None) -> list[str]:
    if datasets is not None:
        if not datasets:
            raise StoreError("datasets is empty: name a manifest, or give None for all with the role validation")
        return list(datasets)
    roles = {name: cache.manifest(name).role for name in cache.dataset_names()}
    names = [name for name, role in roles.items() if role == "validation"]
    if not names:
        known = ", ".join(f"{name} ({role})" for name, role in roles.items()) or "none yet"
        raise StoreError(
            f"{cache.path or 'cpu store'}: no manifest has the role validation; there are: {known}. Set `role: "
            "validation` for a dataset and run `latentcache precache CONFIG`, or name the datasets to measure"
        )
    return names


def _view(cache: LatentCache, name: str) -> LatentCache:
    """The cache restricted to one manifest: a sample_id may be in several. StoreError for one without images."""
    view = cache.restricted(name)
    view.scaling(view.manifest(name))
    return view


def _data_digest(view: LatentCache, name: str) -> str:
    """What the measured samples resolve to: it changes with any sample, first caption, VAE or text encoder."""
    rows = [row for row in view.manifest(name).rows.values() if row.refusal is None]
    images = {row.sample_id: [ref.key for ref in row.images if not ref.geometry.flip] for row in rows}
    captions = {row.sample_id: [ref.key for ref in row.captions[:1]] for row in rows}
    return digest(canonical_json([images, captions]))


def _seed_of(*parts: str | int) -> int:
    """A seed of 64 bits that the parts determine."""
    return int(digest(canonical_json(parts))[: OFFSET_BITS // 4], 16)


@dataclass(frozen=True, slots=True)
class LossSettings:
    """How the loss is measured. `autocast` is None (float32, or the UNet's dtype), float16 or bfloat16.

    ConfigError for values out of range.
    """

    num_timesteps: int = 8
    seed: int = 0
    snr_gamma: float | None = None
    batch_size: int = 4
    autocast: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("num_timesteps", "batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; at least 1 is needed", key=f"validation.{name}")
        if self.snr_gamma is not None and not (self.snr_gamma > 0 and math.isfinite(self.snr_gamma)):
            raise ConfigError(f"snr_gamma is {self.snr_gamma}; it must be above 0", key="validation.snr_gamma")
        if self.autocast not in (None, torch.float16, torch.bfloat16):
            raise ConfigError(f"autocast is {self.autocast}; torch.float16, torch.bfloat16 or None are allowed")

    def strata(self, schedule: NoiseSchedule) -> tuple[range, ...]:
        """The parts of the schedule that these settings measure. ConfigError for a schedule that they do not fit."""
        if self.snr_gamma is not None:
            schedule.snr(torch.zeros(1, dtype=torch.int64))  # flow has none
        return strata(schedule.num_train_timesteps, self.num_timesteps)

    @classmethod
    def of(cls, config: ValidationConfig, *, autocast: torch.dtype | None = None) -> LossSettings:
        """The settings of a config."""
        return cls(config.num_timesteps, config.seed, config.snr_gamma, config.batch_size, autocast)


@dataclass(frozen=True, slots=True)
class _Pair:
    """One sample (a batch of one on the device) at one index of the schedule."""

    sample_id: str
    index: int
    sample: Mapping[str, torch.Tensor]


class _Measurement:
    """One run of `validation_loss`."""

    def __init__(
        self,
        unet: torch.nn.Module,
        schedule: NoiseSchedule,
        settings: LossSettings,
        progress: Progress,
        device: torch.device,
    ):
        self.unet, self.schedule, self.settings, self.progress = unet, schedule, settings, progress
        self.device = device
        self.dtype = dtype_of(unet) or torch.float32
        self.autocast = settings.autocast
        if self.autocast is None and torch.is_autocast_enabled(self.device.type):
            self.autocast = torch.get_autocast_dtype(self.device.type)
        self.strata = settings.strata(schedule)
        self.skipped: list[SkippedSample] = []
        self.errors: list[SampleError] = []

    def footing(self) -> dict[str, Any]:
        """What determines the losses, besides the UNet's weights and the data."""
        autocast = None if self.autocast is None else str(self.autocast).removeprefix("torch.")
        return {
            "prediction_type": self.schedule.prediction_type,
            "schedule": self.schedule.digest,
            "num_train_timesteps": self.schedule.num_train_timesteps,
            "num_timesteps": self.settings.num_timesteps,
            "seed": self.settings.seed,
            "snr_gamma": self.settings.snr_gamma,
            "dtype": str(self.dtype).removeprefix("torch."),
            "autocast": autocast,
        }

    def run(self, views: Mapping[str, LatentCache]) -> dict[str, dict[str, list[float]]]:
        """By dataset and sample_id the loss of each timestep."""
        losses: dict[str, dict[str, list[float]]] = {}
        num_samples = sum(len(view.sample_ids()) for view in views.values())
        self.progress.start("validation loss", num_samples * len(self.strata))
        try:
            with torch.no_grad(), self._autocasting():
                for name, view in views.items():
                    losses[name] = {}
                    for pairs in self._batches(name, view):
                        for pair, loss in zip(pairs, self._losses(pairs), strict=True):
                            losses[name].setdefault(pair.sample_id, []).append(loss)
                        self.progress.advance(len(pairs))
        finally:
            self.progress.finish()
        if not any(losses.values()):
            if self.errors:
                raise self.errors[0]
            raise StoreError(
                f"the manifests {', '.join(views)} hold no sample: see the refusals in `latentcache precache CONFIG`"
            )
        return losses

    def _autocasting(self) -> AbstractContextManager[Any]:
        if self.autocast is None:
            return nullcontext()
        # A surrounding autocast remembers its casts of the weights. Without its cache the weights are cast as they
        # are now: a swap of EMA weights in place would go unseen, and training would get casts made without grad.
        return torch.autocast(self.device.type, dtype=self.autocast, cache_enabled=False)

    def _batches(self, name: str, view: LatentCache) -> Iterator[list[_Pair]]:
        """Pairs of one bucket, in an order that does not depend on the manifest's."""
        buckets: dict[Bucket, list[str]] = {}
        for sample_id in sorted(view.sample_ids()):
            try:
                geometry = Wanted.of(view.row(sample_id)[1]).geometry
            except SampleError as error:
                self._skip(name, error)
            else:
                buckets.setdefault(geometry.target_size, []).append(sample_id)
        for bucket in sorted(buckets):
            pairs = (pair for sample_id in buckets[bucket] for pair in self._pairs(name, view, sample_id))
            while batch := list(islice(pairs, self.settings.batch_size)):
                yield batch

    def _pairs(self, name: str, view: LatentCache, sample_id: str) -> Iterator[_Pair]:
        """The sample at each of its timesteps, read once; nothing if it cannot be read."""
        try:
            batch = view.batch([sample_id], device=self.device, dtype=torch.float32, scaled=True)
        except SampleError as error:
            self._skip(name, error)
            return
        sample = {
            "latents": batch["latents"],
            "prompt_embeds": batch["prompt_embeds"].to(self.dtype),
            "text_embeds": batch["pooled_prompt_embeds"].to(self.dtype),
            "time_ids": batch["add_time_ids"],
        }
        offset = _seed_of("timesteps", self.settings.seed, sample_id)
        for stratum in self.strata:
            yield _Pair(sample_id, index_in(stratum, offset), sample)

    def _skip(self, name: str, error: SampleError) -> None:
        logger.warning("validation of %s goes on without a sample: %s", name, error)
        self.skipped.append(SkippedSample(name, error.sample_id, error.reason))
        self.errors.append(error)
        self.progress.advance(len(self.strata))

    def _losses(self, pairs: Sequence[_Pair]) -> list[float]:
        """The loss of each pair: one UNet call, and one wait for the device."""
        inputs = {name: torch.cat([pair.sample[name] for pair in pairs]) for name in pairs[0].sample}
        latents = inputs["latents"]
        noise = torch.stack([self._noise(pair, latents.shape[1:]) for pair in pairs]).to(self.device)
        index = torch.tensor([pair.index for pair in pairs])
        prediction = self.unet(
            self.schedule.noised(latents, noise, index).to(self.dtype),
            self.schedule.timestep(index).to(self.device),
            encoder_hidden_states=inputs["prompt_embeds"],
            added_cond_kwargs={name: inputs[name] for name in ("text_embeds", "time_ids")},
            return_dict=False,
        )[0]
        target = self.schedule.target(latents, noise, index)
        if prediction.shape != target.shape:
            raise ModelError(
                f"the UNet predicts {list(prediction.shape)} for latents {list(target.shape)}: it does not fit the VAE "
                "of this cache",
                part="unet",
            )
        losses = (prediction.float() - target).square().mean(dim=(1, 2, 3)).tolist()
        if self.settings.snr_gamma is not None:
            weights = self.schedule.min_snr_weight(index, self.settings.snr_gamma).tolist()
            losses = [loss * weight for loss, weight in zip(losses, weights, strict=True)]
        return losses

    def _noise(self, pair: _Pair, shape: torch.Size) -> torch.Tensor:
        # On the CPU, one pair at a time: so it depends on no device, no batch and no other sample.
        generator = torch.Generator().manual_seed(_seed_of("noise", self.settings.seed, pair.sample_id, pair.index))
        return torch.randn(shape, generator=generator, dtype=torch.float32)
