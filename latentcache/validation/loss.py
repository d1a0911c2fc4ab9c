"""The validation loss. Each sample keeps its noise and timesteps, so losses of two checkpoints can be compared."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from latentcache.config import ValidationConfig
from latentcache.devices.placement import device_of, dtype_of
from latentcache.errors import ConfigError, ModelError, SampleError, StoreError
from latentcache.families.base import Family
from latentcache.identity import canonical_json, digest, seed_of
from latentcache.loading.batch import to_device
from latentcache.loading.cache import LatentCache
from latentcache.loading.sample import SampleRef, no_texts
from latentcache.models.running import uncached_autocast
from latentcache.types import Batch
from latentcache.utils.progress import Progress
from latentcache.validation.loss_parts import check_controls, check_masked, masked_errors
from latentcache.validation.metrics import (
    Estimate,
    LossReport,
    MeasurementSettings,
    SkippedSample,
    TimestepBin,
    mean_of,
)
from latentcache.validation.noise_schedule import NoiseSchedule, index_in, strata

BATCH_SIZE_TOLERANCE: Mapping[torch.dtype, float] = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
"""Upper bound of the relative difference of a sample's loss between two batch sizes, by the dtype of the computation.

Kernels round differently at different batch sizes. Tiny UNets on a CPU at batch sizes 1 to 16 differed by 8e-7 in
float32 and 3e-4 in float16. The bounds are ten times that, because other devices use other kernels. bfloat16 is eight
times as coarse as float16. float32 with TF32 is as coarse as float16.
"""

LOOK_AHEAD = 32
"""How many samples to prefetch at once."""

logger = logging.getLogger("latentcache")


def validation_loss(
    denoiser: torch.nn.Module,
    cache: LatentCache,
    *,
    scheduler: Any,
    settings: ValidationConfig | None = None,
    datasets: Sequence[str] | None = None,
    autocast: torch.dtype | None = None,
    device: torch.device | None = None,
    progress: Progress | None = None,
) -> LossReport:
    """Measure the mean squared error of the denoiser's prediction on cached samples, without any encoder.

    The loss uses the mean of the stored moments and the first caption, and weights errors by the mask
    (`masked_errors`). The noise depends only on seed, sample_id and timestep, the timesteps only on seed and sample_id.
    Each sample gets one timestep from each of `num_timesteps` equal parts of the schedule's used range.

    `denoiser` is the plain module, not DDP's wrapper. It keeps its device and its mode, so call its `eval()` first.
    With swapped blocks its weights lie on several devices: then name the `device` that it runs on. `scheduler` is
    anything that `NoiseSchedule.of` takes, `datasets` names manifests (default: all with the role `validation`), and
    `autocast` is float16, bfloat16, or None for the surrounding autocast. Gradients are off.

    Two runs with one batch size on one machine give identical bits unless cudnn.benchmark is on, which picks kernels by
    speed; for other batch sizes see BATCH_SIZE_TOLERANCE. A missing or damaged sample is skipped, logged and listed. A
    loss that is not finite is reported as NaN, and so is every mean that includes it.

    Raises:
        ConfigError: The schedule does not allow the settings, the denoiser does not read the samples' control images,
            or it inpaints and samples have no masked image.
        StoreError: There is nothing to measure, or the datasets belong to several model families.
        SampleError: No sample can be read. It is the error of the first one.
    """
    settings = settings or ValidationConfig()
    schedule = check_loss_settings(scheduler, settings, autocast)
    views = {name: _view(cache, name) for name in _dataset_names(cache, datasets)}
    device, family = device or device_of(denoiser), _family_of(views)
    check_controls(family, cache, views)
    check_masked(denoiser, family, cache, views)
    progress = progress or Progress()
    measurement = _Measurement(denoiser, family, schedule, settings, progress, device=device, autocast=autocast)
    losses = measurement.run(views)
    by_timestep = [row for samples in losses.values() for row in samples.values()]
    by_sample = {name: {key: mean_of(row) for key, row in samples.items()} for name, samples in losses.items()}
    return LossReport(
        measurement_settings=measurement.described({name: _data_digest(view, name) for name, view in views.items()}),
        by_timestep=tuple(
            TimestepBin.of([row[number] for row in by_timestep], first=part.start, end=part.stop)
            for number, part in enumerate(measurement.strata)
        ),
        by_dataset={name: Estimate.of(list(samples.values())) for name, samples in by_sample.items()},
        by_sample=by_sample,
        skipped=tuple(measurement.skipped),
        **Estimate.of([loss for samples in by_sample.values() for loss in samples.values()]).model_dump(),
    )


def check_loss_settings(
    scheduler: Any, settings: ValidationConfig, autocast: torch.dtype | None
) -> tuple[NoiseSchedule, tuple[range, ...]]:
    """Return the schedule and the parts to draw timesteps from. Raises ConfigError for unusable settings."""
    schedule = NoiseSchedule.of(scheduler)
    if settings.snr_gamma is not None:
        schedule.snr(torch.zeros(1, dtype=torch.int64))  # raises for flow matching, which has none
    if autocast not in (None, torch.float16, torch.bfloat16):
        raise ConfigError(f"autocast is {autocast}; torch.float16, torch.bfloat16 or None are allowed")
    first, parts = schedule.used.start, strata(len(schedule.used), settings.num_timesteps)
    return schedule, tuple(range(first + part.start, first + part.stop) for part in parts)


def _dataset_names(cache: LatentCache, datasets: Sequence[str] | None) -> list[str]:
    if datasets is not None:
        if not datasets:
            raise StoreError("datasets is empty: name a manifest, or pass None for all with the role validation")
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
    """Restrict the cache to one manifest. Raises StoreError if it has no images or no cached texts."""
    view = cache.restricted(name)
    if not view.manifest(name).has_texts:
        raise no_texts(f"{name}: the loss is measured with cached texts")
    view.scaling(view.manifest(name))
    return view


def _family_of(views: Mapping[str, LatentCache]) -> Family:
    found = {name: view.manifest(name).family for name, view in views.items()}
    family = next(iter(found.values()))
    others = {name: other.name for name, other in found.items() if other is not family}
    if others:
        raise StoreError(
            f"the datasets belong to several model families, {family.name} and {others}: measure each alone"
        )
    return family


def _data_digest(view: LatentCache, name: str) -> str:
    """Digest of the measured keys: another sample, part, first caption, VAE or text encoder changes it."""
    rows = [row for row in view.manifest(name).rows.values() if row.refusal is None]
    images = {row.sample_id: [ref.key for ref in row.images if ref.crop == 0 and not ref.geometry.flip] for row in rows}
    captions = {row.sample_id: [ref.key for ref in row.captions[:1]] for row in rows}
    parts = {row.sample_id: [ref.key for ref in row.parts_of()] for row in rows if row.parts}
    return digest(canonical_json([images, captions, *([parts] if parts else [])]))


class _Draw(NamedTuple):
    """One sample at one noise level: its row in a batch, and an index of the schedule."""

    row: int
    sample_id: str
    level: int


class _Measurement:
    """One run of `validation_loss`."""

    def __init__(
        self,
        denoiser: torch.nn.Module,
        family: Family,
        schedule: tuple[NoiseSchedule, tuple[range, ...]],
        settings: ValidationConfig,
        progress: Progress,
        *,
        device: torch.device,
        autocast: torch.dtype | None,
    ):
        self.denoiser, self.family, (self.schedule, self.strata) = denoiser, family, schedule
        self.settings, self.progress = settings, progress
        self.device, self.autocast = device, autocast
        self.placed_schedule = self.schedule.to(device)
        self.dtype = dtype_of(denoiser) or torch.float32
        if self.autocast is None and torch.is_autocast_enabled(self.device.type):
            self.autocast = torch.get_autocast_dtype(self.device.type)
        self.skipped: list[SkippedSample] = []
        self.errors: list[SampleError] = []

    def described(self, datasets: dict[str, str]) -> MeasurementSettings:
        """The settings that determine the losses, with the digests of the datasets."""
        return MeasurementSettings(
            prediction_type=self.schedule.prediction_type,
            schedule=self.schedule.digest,
            num_train_timesteps=self.schedule.num_train_timesteps,
            num_timesteps=self.settings.num_timesteps,
            seed=self.settings.seed,
            snr_gamma=self.settings.snr_gamma,
            dtype=str(self.dtype).removeprefix("torch."),
            autocast=None if self.autocast is None else str(self.autocast).removeprefix("torch."),
            datasets=datasets,
        )

    def run(self, views: Mapping[str, LatentCache]) -> dict[str, dict[str, list[float]]]:
        """The loss at each timestep, by dataset and sample_id."""
        losses: dict[str, dict[str, list[float]]] = {}
        num_samples = sum(len(view.sample_ids()) for view in views.values())
        self.progress.start("validation loss", num_samples * len(self.strata))
        try:
            with torch.no_grad(), uncached_autocast(self.device, self.autocast):
                for name, view in views.items():
                    losses[name] = {}
                    for batch, draws in self._batches(name, view):
                        for draw, loss in zip(draws, self._losses(batch, draws), strict=True):
                            losses[name].setdefault(draw.sample_id, []).append(loss)
                        self.progress.advance(len(draws))
        finally:
            self.progress.finish()
        if not any(losses.values()):
            if self.errors:
                raise self.errors[0]
            raise StoreError(
                f"the manifests {', '.join(views)} have no sample: see the refusals in `latentcache precache CONFIG`"
            )
        return losses

    def _batches(self, name: str, view: LatentCache) -> Iterator[tuple[Batch, list[_Draw]]]:
        """Samples of one bucket on the device, and `batch_size` draws from them. The manifest's order has no effect."""
        buckets: dict[tuple[Any, ...], list[SampleRef]] = {}
        for sample_id in sorted(view.sample_ids()):
            try:
                [ref] = view.refs([sample_id])
            except SampleError as error:
                self._skip(name, error)
            else:
                buckets.setdefault((ref.layout.extent, ref.parts), []).append(ref)
        size = self.settings.batch_size
        num = size // math.gcd(size, len(self.strata))  # the fewest samples whose draws fill every batch
        for bucket in (buckets[key] for key in sorted(buckets)):
            for at in range(0, len(bucket), num):
                if at % LOOK_AHEAD < num:
                    view.prefetch(bucket[at : at + LOOK_AHEAD + num])
                refs, batch = self._read(name, view, bucket[at : at + num])
                draws = [draw for row, ref in enumerate(refs) for draw in self._draws(row, ref.sample_id)]
                for first in range(0, len(draws), size):
                    yield batch, draws[first : first + size]

    def _read(self, name: str, view: LatentCache, refs: Sequence[SampleRef]) -> tuple[Sequence[SampleRef], Batch]:
        """The samples that can be read, and their tensors on the device in the denoiser's dtype."""
        while refs:
            try:
                gathered = view.gather(refs, scaled=True)
            except SampleError as error:
                self._skip(name, error)
                [unread] = (ref for ref in refs if ref.sample_id == error.sample_id)
                refs = [ref for ref in refs if ref is not unread]
            else:
                placed = to_device(gathered, self.device, dtype=torch.float32, scaling=refs[0].facts.scaling)
                del placed["loss_weight"]  # for training only: a validation weights all samples alike
                batch = {field: value for field, value in placed.items() if isinstance(value, torch.Tensor)}
                kept = ("latents", "add_time_ids")  # in float32
                own = [field for field in batch if field not in kept and batch[field].is_floating_point()]
                return refs, batch | {field: batch[field].to(self.dtype) for field in own}
        return refs, {}

    def _draws(self, row: int, sample_id: str) -> Iterator[_Draw]:
        offset = seed_of("timesteps", self.settings.seed, sample_id)
        return (_Draw(row, sample_id, index_in(stratum, offset)) for stratum in self.strata)

    def _skip(self, name: str, error: SampleError) -> None:
        logger.warning("validation of %s continues without one sample: %s", name, error)
        self.skipped.append(SkippedSample(dataset=name, sample_id=error.sample_id, reason=error.reason))
        self.errors.append(error)
        self.progress.advance(len(self.strata))

    def _losses(self, batch: Batch, draws: Sequence[_Draw]) -> list[float]:
        """The loss of each draw. It calls the denoiser once, and waits for the device once."""
        rows = torch.tensor([draw.row for draw in draws], device=self.device)
        inputs = {name: tensor[rows] for name, tensor in batch.items()}
        latents = inputs.pop("latents")
        noise = torch.stack([self._noise(draw, latents.shape[1:]) for draw in draws]).to(self.device)
        index = torch.tensor([draw.level for draw in draws])
        placed_index = index.to(self.device)
        noisy = self.placed_schedule.noised(latents, noise, placed_index).to(self.dtype)
        prediction = self.family.predict(self.denoiser, noisy, self.placed_schedule.timesteps[placed_index], inputs)
        target = self.placed_schedule.target(latents, noise, placed_index)
        if prediction.shape != target.shape:
            raise ModelError(
                f"the {self.family.denoiser_word} predicts {list(prediction.shape)} for latents {list(target.shape)}: "
                "it does not fit the VAE of this cache",
                part=self.family.denoiser,
            )
        errors = masked_errors((prediction.float() - target).square(), inputs)
        losses: list[float] = errors.mean(dim=tuple(range(1, errors.ndim))).tolist()
        if self.settings.snr_gamma is not None:
            weights = self.schedule.min_snr_weight(index, self.settings.snr_gamma).tolist()
            losses = [loss * weight for loss, weight in zip(losses, weights, strict=True)]
        return losses

    def _noise(self, draw: _Draw, shape: torch.Size) -> torch.Tensor:
        # On the CPU and one at a time, so that the noise depends on neither the device nor the batch.
        generator = torch.Generator().manual_seed(seed_of("noise", self.settings.seed, draw.sample_id, draw.level))
        return torch.randn(shape, generator=generator, dtype=torch.float32)
