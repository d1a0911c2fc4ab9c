"""The validation loss. The noise and timesteps of a sample never change, so that two checkpoints can be compared."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch

from latentcache.config import ValidationConfig
from latentcache.devices.placement import device_of, dtype_of
from latentcache.errors import ConfigError, ModelError, SampleError, StoreError
from latentcache.families.base import MASK, Family
from latentcache.identity import canonical_json, digest, seed_of
from latentcache.loading.batch import to_device
from latentcache.loading.cache import LatentCache
from latentcache.loading.sample import SampleRef, no_texts
from latentcache.models.running import uncached_autocast
from latentcache.types import Batch, Padding
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
"""Largest relative difference of a sample's loss between two batch sizes, by the dtype of the denoiser or of autocast.

Kernels round differently for other batch sizes. Measured with tiny UNets on a CPU, batch sizes 1 to 16: 8e-7 in
float32 and 3e-4 in float16. Ten times that is allowed, because other devices have other kernels. bfloat16 rounds
eight times as coarsely as float16. With TF32, float32 is as coarse as float16.
"""

LOOK_AHEAD = 32
"""Samples that are prefetched at once."""

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
    """The mean squared error of the denoiser's prediction on cached samples, without any encoder.

    `datasets` names manifests; by default all with the role `validation` (StoreError if there are none). `scheduler`
    is a NoiseSchedule, or what `NoiseSchedule.of` reads one from. Of `settings` the timesteps, the seed, `snr_gamma`
    and the batch size count. The mean of the stored moments and the first caption are used, and masks count as in
    `masked_errors`. Noise depends on seed, sample_id and timestep alone, and the timesteps on seed and sample_id: one
    from each of `num_timesteps` equal parts of what is used of the schedule, so that many samples cover each part.

    The denoiser is used where it is and in the mode it is in: call its `eval()` first, and give the plain module, not
    DDP's. Inputs go to its device; name a `device` where its blocks are swapped, so that it lies on several.
    `autocast` is float16 or bfloat16; with None a surrounding autocast stays in force. Gradients are off. Two runs with
    one batch size on one machine are equal to the last bit (if cudnn.benchmark is off: it picks kernels by time); see
    BATCH_SIZE_TOLERANCE for others.

    A sample that is missing or damaged is skipped, logged and listed. If none is left, the first SampleError is
    raised. A loss that is not finite is NaN, and so is each mean that it is in. ConfigError for settings that the
    schedule does not allow, and for control images that the denoiser is not given (`check_controls`), and for one that
    inpaints where masked images are lacking; StoreError for datasets of several model families.
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
    """The schedule, and the parts of it that are measured. ConfigError for settings that cannot be used."""
    schedule = NoiseSchedule.of(scheduler)
    if settings.snr_gamma is not None:
        schedule.snr(torch.zeros(1, dtype=torch.int64))  # flow has none
    if autocast not in (None, torch.float16, torch.bfloat16):
        raise ConfigError(f"autocast is {autocast}; torch.float16, torch.bfloat16 or None are allowed")
    first, parts = schedule.used.start, strata(len(schedule.used), settings.num_timesteps)
    return schedule, tuple(range(first + part.start, first + part.stop) for part in parts)


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
    """The cache restricted to one manifest: a sample_id may be in several. StoreError without images, or texts."""
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
        raise StoreError(f"the datasets are of several model families, {family.name} and {others}: measure each alone")
    return family


def _data_digest(view: LatentCache, name: str) -> str:
    """What the measured samples resolve to: it changes with any sample, part, first caption, VAE or text encoder."""
    rows = [row for row in view.manifest(name).rows.values() if row.refusal is None]
    images = {row.sample_id: [ref.key for ref in row.images if ref.crop == 0 and not ref.geometry.flip] for row in rows}
    captions = {row.sample_id: [ref.key for ref in row.captions[:1]] for row in rows}
    parts = {row.sample_id: [ref.key for ref in row.parts_of()] for row in rows if row.parts}
    return digest(canonical_json([images, captions, *([parts] if parts else [])]))


@dataclass(frozen=True, slots=True)
class _TimestepSample:
    """A pair of a sample (a batch of one, on the device) and an index of the schedule."""

    sample_id: str
    index: int
    sample: Batch


def _announced(view: LatentCache, refs: Sequence[SampleRef]) -> Iterator[SampleRef]:
    """The samples, of which some are always said to be read soon."""
    for at in range(0, len(refs), LOOK_AHEAD):
        view.prefetch(refs[at : at + LOOK_AHEAD])
        yield from refs[at : at + LOOK_AHEAD]


def _padded(rows: torch.Tensor, length: int, rule: Padding) -> torch.Tensor:
    """Rows [1, L, ...] with padding, [1, length, ...]: as the store pads a batch."""
    at = 0 if rule.side == "left" else rows.shape[1] - rule.num_last
    blank = rows.new_full((1, length - rows.shape[1], *rows.shape[2:]), rule.value)
    return torch.cat([rows[:, :at], blank, rows[:, at:]], dim=1)


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
        rules = {name: field.padding for name, field in family.fields.items() if field.padding is not None}
        self._padded = rules | {f"{name}{MASK}": replace(rule, value=0) for name, rule in rules.items()}
        self.skipped: list[SkippedSample] = []
        self.errors: list[SampleError] = []

    def described(self, datasets: dict[str, str]) -> MeasurementSettings:
        """What determines the losses, with the digests of the datasets."""
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
        """By dataset and sample_id the loss of each timestep."""
        losses: dict[str, dict[str, list[float]]] = {}
        num_samples = sum(len(view.sample_ids()) for view in views.values())
        self.progress.start("validation loss", num_samples * len(self.strata))
        try:
            with torch.no_grad(), uncached_autocast(self.device, self.autocast):
                for name, view in views.items():
                    losses[name], num_skipped = {}, len(self.skipped)
                    for pairs in self._batches(name, view):
                        for pair, loss in zip(pairs, self._losses(pairs), strict=True):
                            losses[name].setdefault(pair.sample_id, []).append(loss)
                        self.progress.advance(len(pairs))
                    self.progress.advance(len(self.strata) * (len(self.skipped) - num_skipped))
        finally:
            self.progress.finish()
        if not any(losses.values()):
            if self.errors:
                raise self.errors[0]
            raise StoreError(
                f"the manifests {', '.join(views)} have no sample: see the refusals in `latentcache precache CONFIG`"
            )
        return losses

    def _batches(self, name: str, view: LatentCache) -> Iterator[list[_TimestepSample]]:
        """Pairs of a sample and a timestep, all of one bucket, parts too. The manifest's order does not count."""
        buckets: dict[tuple[Any, ...], list[SampleRef]] = {}
        for sample_id in sorted(view.sample_ids()):
            try:
                [ref] = view.refs([sample_id])
            except SampleError as error:
                self._skip(name, error)
            else:
                buckets.setdefault((ref.layout.extent, ref.parts), []).append(ref)
        for bucket in sorted(buckets):
            pairs = (pair for ref in _announced(view, buckets[bucket]) for pair in self._pairs(name, view, ref))
            while batch := list(islice(pairs, self.settings.batch_size)):
                yield batch

    def _pairs(self, name: str, view: LatentCache, ref: SampleRef) -> Iterator[_TimestepSample]:
        """The sample at each of its timesteps, read once; nothing if it cannot be read."""
        try:
            sample = self._placed(ref, view.gather([ref], scaled=True))
        except SampleError as error:
            self._skip(name, error)
            return
        offset = seed_of("timesteps", self.settings.seed, ref.sample_id)
        for stratum in self.strata:
            yield _TimestepSample(ref.sample_id, index_in(stratum, offset), sample)

    def _placed(self, ref: SampleRef, batch: Batch) -> Batch:
        """The tensors of a sample as the denoiser takes them, on the device."""
        batch = to_device(batch, self.device, dtype=torch.float32, scaling=ref.facts.scaling)
        del batch["loss_weight"]  # it is for training: the mean of a validation counts all samples alike
        sample = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
        texts = [
            name for name in sample if name not in ("latents", "add_time_ids") and sample[name].is_floating_point()
        ]
        return sample | {name: sample[name].to(self.dtype) for name in texts}

    def _skip(self, name: str, error: SampleError) -> None:
        logger.warning("validation of %s goes on without a sample: %s", name, error)
        self.skipped.append(SkippedSample(dataset=name, sample_id=error.sample_id, reason=error.reason))
        self.errors.append(error)

    def _losses(self, pairs: Sequence[_TimestepSample]) -> list[float]:
        """The loss of each pair: one call of the denoiser, and one wait for the device."""
        names = pairs[0].sample
        inputs = {name: self._joined(name, [pair.sample[name] for pair in pairs]) for name in names}
        latents = inputs.pop("latents")
        noise = torch.stack([self._noise(pair, latents.shape[1:]) for pair in pairs]).to(self.device)
        index = torch.tensor([pair.index for pair in pairs])
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

    def _joined(self, name: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """One batch of these; texts of several lengths are padded to the longest, as the family has it."""
        longest = max(tensor.shape[1] for tensor in tensors)
        if all(tensor.shape[1] == longest for tensor in tensors) or name not in self._padded:
            return torch.cat([*tensors])
        rule = self._padded[name]
        return torch.cat([_padded(tensor, longest, rule) for tensor in tensors])

    def _noise(self, pair: _TimestepSample, shape: torch.Size) -> torch.Tensor:
        # Drawn on the CPU, one pair at a time: the noise depends on no device, no batch and no other sample.
        generator = torch.Generator().manual_seed(seed_of("noise", self.settings.seed, pair.sample_id, pair.index))
        return torch.randn(shape, generator=generator, dtype=torch.float32)
