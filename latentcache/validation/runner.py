"""Validation in the middle of training: loss, sample images and results on disk; training continues as it was."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch

from latentcache.config import Config
from latentcache.devices.placement import dtype_of
from latentcache.devices.tensor_location import hooks_by_path
from latentcache.errors import ConfigError
from latentcache.loading.cache import LatentCache
from latentcache.models.part_identity import check_frozen
from latentcache.models.unet import check_conditioning
from latentcache.phases.model_parts import why_sharded
from latentcache.phases.phases import Phases
from latentcache.utils.progress import Progress
from latentcache.validation.cold_cache import ColdCacheFiller
from latentcache.validation.loss import check_loss_settings, validation_loss
from latentcache.validation.metrics import LossReport
from latentcache.validation.results import ResultPaths, ValidationReport, checked_step, prepare_folder
from latentcache.validation.sample_images import (
    PromptEmbeddings,
    SampleImage,
    decode_samples,
    denoise,
    prompt_embeddings,
    scheduler_copy,
)
from latentcache.validation.trackers import check_tracker, publish


class ValidationRunner:
    """Measures the validation loss and samples images from the cache, and restores training afterwards.

    `parts` are those of the training: `unet`, and `scheduler`, whose config is read; `vae` for images; `optimizer`,
    `scaler` and `ema` if the training has them, so that they are restored; `text_encoder`, `text_encoder_2`,
    `tokenizer` and `tokenizer_2` only to encode what is not cached yet. Modules may be wrapped (DDP, torch.compile,
    accelerate). `config` names the validation sets (`role: validation`) and has the settings under `validation`.
    `phases` is the training's own switch; by default there is a new one, on the device of the UNet. A UNet whose blocks
    are swapped needs it, with `immovable=("unet",)`. `writer` is a TensorBoard SummaryWriter or a W&B run. `autocast`
    is the dtype that training computes in under autocast.

    With several processes call `run` in all of them. The first process validates and returns the report; the others
    return None at once, unless the UNet is sharded (FSDP, ZeRO-3): then its forwards need every process. The others
    wait in the next step of the training: `init_process_group(timeout=)` has to be longer than a validation, and NCCL's
    10 minutes may not be.

    Raises ConfigError for parts, config or a writer that it cannot use, TrainableEncoderError when a text encoder is
    trained: its cached embeddings would be those of an earlier step.
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
    ):
        missing = [name for name in ("unet", "scheduler") if parts.get(name) is None]
        if missing:
            given = ", ".join(name for name, part in parts.items() if part is not None) or "none"
            raise ConfigError(
                f"validation needs the parts unet and scheduler; {', '.join(missing)} is missing of {given}"
            )
        check_tracker(writer)
        self.parts, self.cache, self.config = dict(parts), cache, config
        self.phases = phases or Phases({k: v for k, v in parts.items() if v is not None}, device=parts["unet"])
        for name in ("text_encoder", "text_encoder_2", "vae"):
            if self.phases.has(name):
                check_frozen(name, self.phases.module(name))
        self._writer, self._autocast, self._progress = writer, autocast, progress
        self._filler = ColdCacheFiller(self.parts, cache, config, self.phases)
        self._check_settings()
        self.paths: ResultPaths | None = None
        """The files of the last `run`."""

    def run(self, step: int) -> ValidationReport | None:
        """Validate at this step of the training, write `validation.path/<step>/`, and log to the writer.

        Validation sets and prompts that are not cached are encoded first, if the encoders are among the parts. Samples
        that cannot be read are skipped and listed. Raises ConfigError for a step that is no whole number from 0,
        StoreError (with the command to run) for what is not cached and cannot be encoded, StoreError for results that
        cannot be written, and PhaseError if training could not be restored. Training is restored after every error.
        """
        rank, step = _rank(), checked_step(step)
        if rank and why_sharded(self.phases.module("unet")) is None:
            return None
        if not rank:
            prepare_folder(self.config.validation.path)
        timer, placement = _Timer(), {}
        self._filler.num_filled = 0
        notes = [f"{name} is not moved: {why}" for name, why in self.phases.not_moved().items()]
        loss: LossReport | None = None
        images: tuple[SampleImage, ...] = ()
        with self.phases.enter("validate"):
            with timer.stage("fill"):
                notes += self._filler.fill_datasets()
                # Before the loss, which takes minutes: a missing prompt must not cost its result.
                embeddings = self._embeddings() if self._samples_images() else []
            self._check_conditioning()
            if self.measures_loss():
                placement["validate"] = tuple(sorted(self.phases.on_device()))
                with timer.stage("loss"):
                    loss = self._loss()
        if embeddings:
            with self.phases.enter("sample"):
                placement["sample"] = tuple(sorted(self.phases.on_device()))
                images = self._images(embeddings, timer)
        elif self.config.validation.prompts:
            notes.append("no images: the vae is not among the parts")
        report = ValidationReport(step, loss, images, timer.seconds, placement, tuple(notes), self._filler.num_filled)
        if rank:
            return report
        report, self.paths = publish(report, self.config.validation.path, self._writer)
        return report

    def measures_loss(self) -> bool:
        """Whether the config or, without one of its own, the cache has a validation set."""
        if any(dataset.role == "validation" for dataset in self.config.datasets):
            return True
        return any(self.cache.manifest(name).role == "validation" for name in self.cache.dataset_names())

    def _samples_images(self) -> bool:
        return bool(self.config.validation.prompts) and self.phases.has("vae")

    def _check_settings(self) -> None:
        """Checks that need no forward: the first validation, hours later, would find the same errors."""
        validation, scheduler = self.config.validation, self.parts["scheduler"]
        if self.measures_loss():
            check_loss_settings(scheduler, validation, self._autocast)
        elif not validation.prompts:
            raise ConfigError(
                "there is nothing to validate: give a dataset the role validation, or name validation.prompts",
                key="validation.prompts",
            )
        if self._samples_images():
            scheduler_copy(scheduler, validation.scheduler)

    def _loss(self) -> LossReport:
        names = [dataset.name for dataset in self.config.datasets if dataset.role == "validation"]
        return validation_loss(
            self.phases.module("unet"),
            self.cache,
            scheduler=self.parts["scheduler"],
            datasets=names or None,
            settings=self.config.validation,
            autocast=self._autocast,
            device=self._device(),
            progress=self._progress,
        )

    def _own_cache(self) -> LatentCache:
        """The cache as the config's datasets see it: others in it may come from other text encoders."""
        cached = self.cache.manifests.names()
        own = next((dataset.name for dataset in self.config.datasets if dataset.name in cached), None)
        return self.cache if own is None else self.cache.restricted(own)

    def _embeddings(self) -> list[PromptEmbeddings]:
        validation = self.config.validation
        return prompt_embeddings(
            self._own_cache(),
            validation.prompts,
            validation.negative_prompt,
            device=self._device() or self.phases.module("unet"),
            dtype=dtype_of(self.phases.module("unet")),
            encode=None if self._filler.obstacle else self._filler.fill_prompts,
        )

    def _images(self, embeddings: list[PromptEmbeddings], timer: _Timer) -> tuple[SampleImage, ...]:
        unet, settings = self.phases.module("unet"), self.config.validation
        with timer.stage("sample"), self._autocasting():
            latents = denoise(unet, self.parts["scheduler"], embeddings, settings, device=self._device())
        with timer.stage("decode"), self.phases.lend("vae"):
            return tuple(decode_samples(self.phases.module("vae"), latents, embeddings, settings))

    def _device(self) -> torch.device | None:
        """Where a UNet with swapped blocks runs, whose weights are on several devices. None: where its weights are."""
        unet = self.phases.module("unet")
        spread = len({tensor.device for tensor in chain(unet.parameters(), unet.buffers())}) > 1
        return self.phases.device if spread and not hooks_by_path(unet) else None

    def _autocasting(self) -> AbstractContextManager[Any]:
        if self._autocast is None:
            return nullcontext()
        return torch.autocast(self.phases.device.type, dtype=self._autocast, cache_enabled=False)

    def _check_conditioning(self) -> None:
        """Check that the UNet fits the cached embeddings: its own error would be a matrix product deep inside."""
        unet = self.phases.module("unet")
        widths = self._own_cache().text_widths()
        if widths is not None and hasattr(unet, "config"):
            check_conditioning(unet, *widths)


def _rank() -> int:
    distributed = torch.distributed  # some builds of torch have none of it
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


class _Timer:
    """Wall time by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started
