"""Validation in the middle of training: loss, sample images and results on disk, with training restored afterwards."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from latentcache.config import Config, DatasetConfig
from latentcache.devices.placement import device_named, dtype_of
from latentcache.devices.tensor_location import named_weights, offload_hook_of
from latentcache.errors import ConfigError, ModelError, StoreError
from latentcache.families.base import Family
from latentcache.loading.cache import LatentCache
from latentcache.models.denoiser import check_fits
from latentcache.models.files import family_of, pipeline_settings
from latentcache.models.model_loader import LoadedModels, check_frozen
from latentcache.models.running import uncached_autocast
from latentcache.phases.model_parts import sharded_by
from latentcache.phases.phases import Phase, Phases
from latentcache.precache.prompts import cache_prompts
from latentcache.precache.report import Report
from latentcache.precache.run import run_precache
from latentcache.precache.tasks import Shard
from latentcache.precache.workspace import Workspace, open_workspace
from latentcache.utils.progress import Progress
from latentcache.validation.loss import check_loss_settings, validation_loss
from latentcache.validation.loss_parts import check_controls, check_masked
from latentcache.validation.metrics import LossReport
from latentcache.validation.noise_schedule import WHOLE, NoiseSchedule, Share
from latentcache.validation.results import (
    ResultPaths,
    ValidationReport,
    checked_step,
    prepare_folder,
    publish,
    tracker_log,
)
from latentcache.validation.sample_images import (
    PromptEmbeddings,
    PromptPair,
    SampleImage,
    check_denoiser,
    check_sampling,
    decode_samples,
    denoise,
    pictures_of,
    prompt_embeddings,
)

logger = logging.getLogger("latentcache")

FILL = Phase(on_device=())
"""All movable parts are parked while the cache is filled, because the encoders need the room one after the other."""


class ValidationRunner:
    """Measures the validation loss and samples images from the cache, then restores training.

    With several processes call `run` in all of them. The first one validates and returns the report. The others return
    None at once, unless the denoiser is sharded (FSDP, ZeRO-3), because then its forwards need every process. They wait
    for the first in the next training step, so `init_process_group(timeout=)` must exceed a validation; NCCL's default
    is 10 minutes.

    Args:
        parts: The denoiser by its family's name (`unet` or `transformer`) and the `scheduler`, whose config is read;
            `vae` for images; `optimizer`, `scaler` and `ema`, to restore them; text encoders and tokenizers, only to
            encode what is not cached yet. Modules may be wrapped (DDP, torch.compile, accelerate).
        cache: Has the validation sets and prompts, or gets them.
        config: Names the validation sets (`role: validation`) and has the settings under `validation`. The family is
            its `model.family`, else that of the cached datasets, else that of `model.path`.
        phases: The training's own switch, required for swapped blocks. By default a new one on the denoiser's device.
        writer: A TensorBoard SummaryWriter or a W&B run.
        autocast: The dtype of the training's autocast.
        progress: Shows how much of the loss is measured.
        within: The timesteps that the denoiser is trained for, if a second one has the rest (`denoised_share`).

    Raises:
        ConfigError: The parts, the config or the writer cannot be used, or the denoiser does not read control images.
        TrainableEncoderError: A text encoder is being trained, which makes its cached embeddings stale.
    """

    def __init__(
        self,
        parts: Mapping[str, Any],
        cache: LatentCache,
        config: Config,
        *,
        phases: Phases | None = None,
        writer: Any = None,
        autocast: torch.dtype | None = None,
        progress: Progress | None = None,
        within: Share = WHOLE,
    ):
        self.family = _family(cache, config)
        name = self.family.denoiser
        missing = [needed for needed in (name, "scheduler") if parts.get(needed) is None]
        if missing:
            given = ", ".join(given for given, part in parts.items() if part is not None) or "none"
            raise ConfigError(
                f"validation needs the parts {name} and scheduler; {', '.join(missing)} is missing from {given}"
            )
        if not _rank():  # accelerate creates trackers only in the first process
            tracker_log(writer)
        self.parts, self.cache, self.config = dict(parts), cache, config
        self.phases = phases or Phases({k: v for k, v in parts.items() if v is not None}, device=parts[name])
        for frozen in self.family.parts:
            if self.phases.has(frozen):
                check_frozen(frozen, self.phases.module(frozen))
        self._writer, self._autocast, self._progress, self._within = writer, autocast, progress, within
        self._filler = MissingEntryEncoder(self.parts, cache, config, self.phases, self.family)
        self._check_settings()
        self.paths: ResultPaths | None = None
        """The files written by the last `run`."""

    def run(self, step: int) -> ValidationReport | None:
        """Validate at this training step, write `validation.path/<step>/`, and log to the writer.

        Missing entries are encoded first if the encoders are among the parts. Samples that cannot be read are skipped
        and listed. Training is restored after every error.

        Raises:
            ConfigError: The step is not a whole number from 0 up.
            StoreError: A validation set is not cached and cannot be encoded, or the results cannot be written.
            SampleError: A prompt is not cached and cannot be encoded.
            PhaseError: Training could not be restored.
        """
        rank, step = _rank(), checked_step(step)
        if rank and sharded_by(self._denoiser()) is None:
            return None
        if not rank:
            prepare_folder(self.config.validation.path)
        seconds: dict[str, float] = {}
        placement: dict[str, tuple[str, ...]] = {}
        self._filler.num_filled = 0
        notes = [f"{name} is not moved: {why}" for name, why in self.phases.not_moved().items()]
        loss: LossReport | None = None
        images: tuple[SampleImage, ...] = ()
        with self.phases.enter("validate"):
            with _timed(seconds, "fill"):
                notes += self._filler.encode_datasets()
                # Before the loss takes minutes, which a missing prompt would then cost.
                embeddings = self._embeddings() if self._samples_images() else []
            shapes = self._own_cache().text_shapes()
            if shapes is not None and hasattr(self._denoiser(), "config"):
                check_fits(self._denoiser(), self.family, shapes)  # a mismatch inside a forward is hard to read
            if validation_sets(self.cache, self.config):
                placement["validate"] = tuple(sorted(self.phases.on_device()))
                with _timed(seconds, "loss"):
                    loss = self._loss()
        if embeddings:
            with self.phases.enter("sample"):
                placement["sample"] = tuple(sorted(self.phases.on_device()))
                images = self._images(embeddings, seconds, notes)
        elif self.config.validation.prompts:
            notes.append("no images: the vae is not among the parts")
        report = ValidationReport(step, loss, images, seconds, placement, tuple(notes), self._filler.num_filled)
        if not rank:
            report, self.paths = publish(report, self.config.validation.path, self._writer)
        return report

    def _samples_images(self) -> bool:
        return bool(self.config.validation.prompts) and self.phases.has("vae")

    def _check_settings(self) -> None:
        """Check now all that needs no forward, instead of at the first validation, hours later."""
        validation, scheduler = self.config.validation, self.parts["scheduler"]
        self._check_texts()
        if names := validation_sets(self.cache, self.config):
            check_loss_settings(NoiseSchedule.of(scheduler, self._within), validation, self._autocast)
            check_controls(self.family, self.cache, names, self.config)
            check_masked(self._denoiser(), self.family, self.cache, names)
        elif not validation.prompts:
            raise ConfigError(
                "there is nothing to validate: give a dataset the role validation, or set validation.prompts",
                key="validation.prompts",
            )
        if self._samples_images():
            if self._within != WHOLE:
                raise ConfigError(
                    f"images need all timesteps, and this {self.family.denoiser_word} has those from "
                    f"{self._within[0]} to {self._within[1]} of them; set it to []. Then only the loss is measured",
                    key="validation.prompts",
                )
            check_denoiser(self._denoiser(), self.family)
            if self.family.needed_picture and set(names) <= set(self.cache.manifests.names()):
                views = map(self._own_cache().restricted, names)
                pictures_of(views, validation.prompts, validation.negative_prompt or "", self.family)
            check_sampling(self.phases.module("vae"), scheduler, validation, self.family)

    def _check_texts(self) -> None:
        """Raise ConfigError if the config, or a cached dataset that validation reads texts of, has none."""
        cached, config = self.cache.manifests.names(), self.config
        # Prompts come from the text encoders of the first dataset: see `_own_cache`.
        own = _cached_datasets(self.cache, config)[:1] if self._samples_images() else []
        names = dict.fromkeys([*validation_sets(self.cache, config), *own])
        alone = [name for name in names if name in cached and not self.cache.manifest(name).has_texts]
        if alone or config.encode.text == "none":
            raise ConfigError(
                f"{', '.join(alone) or 'encode.text: none'} gives latents alone, but validation reads cached texts: "
                "validate in the trainer with its live text encoders, or validate with a config of its own that has "
                "encode.text all, other dataset names, and frozen encoders",
                key="encode.text",
            )

    def _loss(self) -> LossReport:
        return validation_loss(
            self._denoiser(),
            self.cache,
            scheduler=NoiseSchedule.of(self.parts["scheduler"], self._within),
            datasets=validation_sets(self.cache, self.config),
            settings=self.config.validation,
            autocast=self._autocast,
            device=self._device(),
            progress=self._progress,
        )

    def _own_cache(self) -> LatentCache:
        """The cache restricted to a dataset of the config, because others may have other text encoders."""
        own = _cached_datasets(self.cache, self.config)
        return self.cache.restricted(own[0]) if own else self.cache

    def _embeddings(self) -> list[PromptEmbeddings]:
        validation = self.config.validation
        return prompt_embeddings(
            self._own_cache(),
            validation.prompts,
            validation.negative_prompt,
            device=self._device() or self._denoiser(),
            dtype=dtype_of(self._denoiser()),
            encode=None if self._filler.blocked_reason else self._filler.encode_prompts,
            datasets=validation_sets(self.cache, self.config),
        )

    def _images(
        self, embeddings: list[PromptEmbeddings], seconds: dict[str, float], notes: list[str]
    ) -> tuple[SampleImage, ...]:
        denoiser, settings, scheduler = self._denoiser(), self.config.validation, self.parts["scheduler"]
        options: dict[str, Any] = {"device": self._device(), "family": self.family, "pipeline_settings": {}}
        try:
            options["pipeline_settings"] = pipeline_settings(self.config.model, self.family)
        except ModelError as error:  # a trainer's config need not name the model
            notes.append(f"images are made with the defaults of {self.family.pipeline_name}: {error}")
        with _timed(seconds, "sample"), uncached_autocast(self.phases.device, self._autocast):
            latents = denoise(denoiser, scheduler, embeddings, settings, **options)
        with _timed(seconds, "decode"), self.phases.lend("vae"):
            return tuple(decode_samples(self.phases.module("vae"), latents, embeddings, settings, self.family))

    def _denoiser(self) -> torch.nn.Module:
        return self.phases.module(self.family.denoiser)

    def _device(self) -> torch.device | None:
        """The device to run on for a denoiser with swapped blocks; None if all its weights are on one device."""
        denoiser = self._denoiser()
        spread = len({tensor.device for _, tensor in named_weights(denoiser)}) > 1
        return self.phases.device if spread and not any(map(offload_hook_of, denoiser.modules())) else None


def validation_sets(cache: LatentCache, config: Config) -> list[str]:
    """Names of the config's validation sets; if it has none, of those in the cache with its datasets' text encoders."""
    if own := [dataset.name for dataset in config.datasets if dataset.role == "validation"]:
        return own
    first = [cache.samples(name).facts.texts for name in _cached_datasets(cache, config)[:1]]
    sets = [name for name in cache.dataset_names() if cache.manifest(name).role == "validation"]
    return [name for name in sets if not first or cache.samples(name).facts.texts in first]


def _cached_datasets(cache: LatentCache, config: Config) -> list[str]:
    """Names of the config's datasets that are cached."""
    cached = cache.manifests.names()
    return [dataset.name for dataset in config.datasets if dataset.name in cached]


def _family(cache: LatentCache, config: Config) -> Family:
    """The config's family, else that of its cached datasets, because a trainer's config need not name the model."""
    cached = _cached_datasets(cache, config)
    if config.model.family is None and cached:
        return cache.manifest(cached[0]).family
    return family_of(config.model)[0]


def _rank() -> int:
    distributed = torch.distributed  # empty in some builds of torch
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


@contextmanager
def _timed(seconds: dict[str, float], stage: str) -> Iterator[None]:
    started = time.monotonic()
    try:
        yield
    finally:
        seconds[stage] = seconds.get(stage, 0.0) + time.monotonic() - started


class MissingEntryEncoder:
    """Encodes entries that validation needs and the cache lacks, unless there is a `blocked_reason`."""

    def __init__(self, parts: Mapping[str, Any], cache: LatentCache, config: Config, phases: Phases, family: Family):
        self._parts, self._cache, self._phases, self._family = parts, cache, phases, family
        self._config = config
        self._device = device_named(config.encode.device)
        if config.encode.device == "auto" and self._device.type == phases.device.type:
            # Of several accelerators take the one that is trained on.
            self._device = phases.device
            encode = config.encode.model_copy(update={"device": str(self._device)})
            self._config = config.model_copy(update={"encode": encode})
        self.num_filled = 0

    @property
    def blocked_reason(self) -> str | None:
        """Why nothing can be encoded: an encoder is missing, or the cache is read-only. None if it can."""
        names = _cached_datasets(self._cache, self._config)
        # An optional part is needed if it made the cached entries: without it every entry would get another key.
        made_by = {part for name in names for part in self._cache.manifest(name).common.get("image_encoding") or ()}
        needed = [name for name, part in self._family.parts.items() if not part.optional or name in made_by]
        missing = [name for name in needed if self._parts.get(name) is None]
        if missing:
            return f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not among the parts to encode it"
        return "this cache is open for reading only" if self._cache.store.read_only else None

    def encode_datasets(self) -> list[str]:
        """Encode the validation sets that the cache lacks, wholly or in part. Returns notes for the report.

        Sets are compared with their manifests only; finding files that changed since is up to precache. Raises
        StoreError, with the command to run, if a whole set is missing and cannot be encoded.
        """
        sets = [dataset for dataset in self._config.datasets if dataset.role == "validation"]
        num_lost = {dataset.name: self._num_lost(dataset) for dataset in sets}
        cold = [dataset for dataset in sets if num_lost[dataset.name] != 0]
        if not cold:
            return []
        if self.blocked_reason:
            absent = ", ".join(dataset.name for dataset in cold if num_lost[dataset.name] is None)
            if absent:
                raise StoreError(
                    f"{self._cache.path or 'cpu store'}: the validation set {absent} is not cached, and "
                    f"{self.blocked_reason}: run `latentcache precache CONFIG`"
                )
            # A few lost samples must not stop a validation: they are skipped and listed.
            return [f"{each.name}: {num_lost[each.name]} samples lack an entry: run precache again" for each in cold]
        names = ", ".join(dataset.name for dataset in cold)
        logger.info("validation set %s is not cached, or incomplete: encoding it", names)
        with self._encoding() as (workspace, models):
            config = self._config.model_copy(update={"datasets": tuple(cold)})
            # Encode everything here: without Shard() the run would leave shares to the other ranks.
            report: Report = run_precache(config, models=models, workspace=workspace, shard=Shard())
        self.num_filled += report.num_encoded
        return [f"{names}: {report.num_refused} refused"] if report.num_refused else []

    def encode_prompts(self, pairs: Sequence[PromptPair]) -> None:
        """Encode these prompts: the `encode` of `prompt_embeddings`."""
        logger.info("%d prompts are not cached: encoding them", len(pairs))
        with self._encoding() as (workspace, models):
            self.num_filled += cache_prompts(self._config, workspace, models, pairs, device=self._device)

    def _num_lost(self, dataset: DatasetConfig) -> int | None:
        """How many samples of the manifest lack an entry; None without a manifest."""
        if dataset.name not in self._cache.manifests.names():
            return None
        return len(self._cache.manifest(dataset.name).rows.lacking(self._cache.store.has))

    @contextmanager
    def _encoding(self) -> Iterator[tuple[Workspace, LoadedModels]]:
        """Yield a workspace and the encoders, with every part parked; then declare the placement again."""
        cache, phases = self._cache, self._phases
        parts: dict[str, Any] = {
            name: phases.module(name) if phases.has(name) else self._parts.get(name) for name in self._family.parts
        }
        models = LoadedModels(family=self._family, **parts)
        with phases.enter(FILL):
            if cache.path is None or isinstance(cache.path, str):
                yield Workspace(cache.store, cache.manifests), models
            else:
                on_disk = self._config.cache.model_copy(update={"path": cache.path})
                # Wait for a compaction of the cache instead of failing the training.
                with open_workspace(on_disk) as workspace, workspace.in_use(wait=True):
                    yield workspace, models
        cache.refresh()
        phases.place()
