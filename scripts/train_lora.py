"""Train a LoRA of any model family from cached data alone, with validation in the middle, checkpoints and resume.

    latentcache precache CONFIG
    python -m latentcache.train_lora CONFIG --steps 1000 --validate_every 100
    latentcache validate CONFIG --lora lora

It needs `pip install 'latentcache[encode,lora]'`; in a checkout it is scripts/train_lora.py. Read it from top to bottom
and copy what you need. While it trains, neither the VAE nor a text encoder is on the device.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import threading
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from cyclopts import App, Parameter
from diffusers.training_utils import cast_training_params
from peft import LoraConfig
from tqdm import tqdm

from latentcache import (
    BucketBatchSampler,
    Config,
    LatentCache,
    LatentCacheError,
    LatentDataset,
    LatentLoader,
    Phases,
    ValidationRunner,
    errors,
    load_checkpoint,
    load_config,
    masked_errors,
    run_precache,
    save_checkpoint,
)
from latentcache.integrations.diffusers import (
    NoiseSchedule,
    check_controls,
    check_fits,
    denoised_share,
    load_denoiser,
    load_scheduler,
    lora_settings,
    save_lora,
    stop_on_signals,
    validation_parts,
)

FUSED = ("cpu", "cuda", "mps", "xpu")
"""Device types with fused optimizer kernels in torch."""
DTYPES = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

Switch = Annotated[bool, Parameter(negative="")]


@dataclass(frozen=True, slots=True)
class Options:
    """The flags. Choices made each time a sample is read (captions, flips, dropout) are in the config's `train`."""

    steps: int = 1000
    rank: int = 8
    learning_rate: float = 1e-4
    batch_size: int = 4
    validate_every: int = 0
    """Number of steps between validations. 0: only at the end."""
    checkpoint_every: int = 0
    """Number of steps between checkpoints. 0: only at the end."""
    out: Path = Path("lora")
    denoiser: str = ""
    """File, folder or hub id that replaces the model's own denoiser."""
    resume: Switch = False
    """Continue from the checkpoint in --out."""
    mixed_precision: Literal["auto", "no", "fp16", "bf16"] = "auto"
    """auto: bf16 or fp16 on an accelerator, no on the CPU."""
    gradient_checkpointing: Switch = False
    """Recompute activations in the backward pass: less memory, slower; for cards below 24 GB."""
    seed: int = 0
    device: str = "auto"
    encode: Switch = False
    """Before training, encode entries that are missing or damaged. Loads the VAE and text encoders for that."""


DEFAULTS = Options()
AllOptions = Annotated[Options, Parameter(name="*")]
AsJson = Annotated[bool, Parameter(name="--json", negative="", help="Print one JSON document.")]
app = App(help=__doc__, help_format="plaintext", result_action="return_value")


def train(config: Config, options: Options, *, stop: threading.Event | None = None) -> dict[str, Any]:
    """Train, validate and save the LoRA in `out`. Returns the results as plain data.

    Setting `stop` ends the run after the current step. A resumed run is bit-identical to an uninterrupted one, and
    validation does not change the training. Seeds torch's global generator.

    Raises:
        ConfigError, StoreError, ModelError, DeviceError, CheckpointError: See `latentcache.errors`.
    """
    stop = stop or threading.Event()
    options = replace(options, out=Path(os.path.expanduser(options.out)))  # no shell expands --out=~/lora
    training = Training(config, options)
    runner = training.validation_runner()
    first = training.load() if options.resume else 0
    bar = tqdm(range(first + 1, options.steps + 1), desc="train", initial=first, total=options.steps)
    step, losses, validations, lora = first, [], [], None
    with training.loader as loader:  # leaving the block ends the thread that prefetches
        for step, batch in zip(bar, loader.forever(), strict=False):
            losses.append(training.step(batch))
            bar.set_postfix(loss=f"{losses[-1]:.4f}")
            last = stop.is_set() or step == options.steps
            if last or is_due(step, options.checkpoint_every):
                training.save(step)
            if last:
                break
            if runner is not None and is_due(step, options.validate_every):
                validations.append(validate(runner, step))
    interrupted = stop.is_set()
    if not interrupted:
        # Save before the last validation, which may fail.
        lora = save_lora(training.denoiser, options.out, family=training.family, step=step)
        if runner is not None:
            validations.append(validate(runner, step))
    return {
        "step": step,
        "resumed_from": first,
        "interrupted": interrupted,
        "losses": losses,
        "device": str(training.device),
        "dtype": str(training.dtype).removeprefix("torch."),
        "on_device": sorted(training.phases.on_device()),
        "validations": validations,
        "checkpoint": str(training.checkpoint),
        "lora": lora and str(lora),
    }


class Training:
    """The denoiser (a UNet or a transformer) with its LoRA, its optimizer and the data."""

    def __init__(self, config: Config, options: Options):
        self.config, self.options, self.checkpoint = config, options, options.out / "checkpoint.pt"
        if min(options.steps, options.rank, options.batch_size) < 1:
            raise errors.ConfigError("steps, rank and batch_size must be at least 1")
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise errors.ConfigError(
                "WORLD_SIZE is above 1, but this script trains in a single process: start it without torchrun"
            )
        if not any(dataset.role == "train" for dataset in config.datasets):
            raise errors.ConfigError("training needs a dataset with `role: train`")
        if self.checkpoint.exists() and not options.resume:
            raise errors.CheckpointError(
                self.checkpoint, "belongs to an earlier run: continue it with --resume, or choose another --out"
            )
        check_writable(options.out)
        self.cache = LatentCache(config.cache)
        self.dataset = training_set(config, self.cache)
        # The sampler's seed determines the latents' noise, the caption and the flip of each sample in each epoch.
        sampler = BucketBatchSampler(self.dataset, options.batch_size, seed=options.seed)
        encode = partial(run_precache, config) if options.encode else None
        self.loader = LatentLoader(sampler, device=options.device, dtype=torch.float32, scaled=True, encode=encode)
        self.loader.encode_missing()  # now, before the denoiser is on the device
        self.generator = torch.Generator().manual_seed(options.seed)
        self.device = self.loader.device
        self.dtype = compute_dtype(options.mixed_precision, self.device)
        self.autocast = None if self.dtype is torch.float32 else self.dtype

        # The family knows the denoiser's inputs and which layers get a LoRA. The denoiser is frozen in the compute
        # dtype; the LoRA is trained in float32.
        self.family = self.dataset.facts.family
        check_controls(self.family, self.cache, [dataset.name for dataset in config.datasets], config)
        torch.manual_seed(options.seed)
        self.denoiser = load_denoiser(
            options.denoiser or None, dtype=self.dtype, model=config.model, family=self.family
        )
        sample = self.dataset[0]
        check_fits(self.denoiser, self.family, {name: tuple(sample[name].shape) for name in self.family.fields})
        targets = [*self.family.lora_targets]
        self.denoiser.add_adapter(LoraConfig(r=options.rank, lora_alpha=options.rank, target_modules=targets))
        cast_training_params(self.denoiser, torch.float32)
        if options.gradient_checkpointing:
            self.denoiser.enable_gradient_checkpointing()
        self.denoiser.to(self.device)
        self.parameters = [parameter for parameter in self.denoiser.parameters() if parameter.requires_grad]
        fused = self.device.type in FUSED
        self.optimizer = torch.optim.AdamW(self.parameters, lr=options.learning_rate, fused=fused)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype is torch.float16)
        self.scheduler = load_scheduler(options.denoiser or None, model=config.model, family=self.family)
        # A model with two denoisers (Wan 2.2) trains each of them alone, at its own timesteps.
        self.within = denoised_share(config.model, self.family)
        self.schedule = NoiseSchedule.of(self.scheduler, self.within)

        # A phase says which parts are on the device: in training only the denoiser, while the others stay on the CPU.
        self.parts = {name: getattr(self, name) for name in ("optimizer", "scaler", "scheduler")}
        self.parts |= {self.family.denoiser: self.denoiser, **validation_parts(config, self.cache)}
        self.phases = Phases(self.parts, device=self.device)
        self.phases.start("train")

    def step(self, batch: dict[str, Any]) -> float:
        """One step on a batch from the loader; returns its loss."""
        with torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None):
            loss = self.loss(batch)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.parameters, max_norm=1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss.item()

    def loss(self, batch: dict[str, Any]) -> torch.Tensor:
        """The mean squared error of the denoiser's prediction at a random timestep for each sample.

        It is weighted by masks and by the `loss_weight` of each sample's dataset.
        """
        latents = batch["latents"]
        # Drawn on the CPU, so that every device gets the same numbers.
        noise = torch.randn(latents.shape, generator=self.generator).to(self.device)
        index = self.schedule.draw(self.family.timesteps, len(latents), self.generator)
        noisy = self.schedule.noised(latents, noise, index).to(self.dtype)
        timesteps = self.schedule.timesteps[index].to(self.device)
        predicted = self.family.predict(self.denoiser, noisy, timesteps, batch)
        target = self.schedule.target(latents, noise, index)
        squares = masked_errors(F.mse_loss(predicted.float(), target, reduction="none"), batch)
        weights: torch.Tensor = batch["loss_weight"]
        return (squares * weights.reshape(-1, *[1] * (squares.ndim - 1))).mean()

    def validation_runner(self) -> ValidationRunner | None:
        """The runner, or None if there is nothing to validate and `validate_every` is 0."""
        has_set = any(dataset.role == "validation" for dataset in self.config.datasets)
        if not (has_set or self.config.validation.prompts or self.options.validate_every):
            return None
        options: dict[str, Any] = {"phases": self.phases, "autocast": self.autocast, "within": self.within}
        return ValidationRunner(self.parts, self.cache, self.config, **options)

    def settings(self) -> dict[str, Any]:
        """Settings that must not change when a run is resumed."""
        names = ("learning_rate", "batch_size", "seed")
        return {name: getattr(self.options, name) for name in names} | {"num_items": len(self.dataset)}

    def save(self, step: int) -> None:
        save_checkpoint(
            self.checkpoint,
            model=self.denoiser,
            optimizer=self.optimizer,
            scaler=self.scaler,
            epoch=step // len(self.loader),
            step=step,
            extra={
                "lora": lora_settings(self.denoiser),  # needed to interpret the LoRA's weights
                "settings": self.settings(),
                "generator": self.generator.get_state(),
                "loader": self.loader.state_dict(),
            },
        )

    def load(self) -> int:
        """Load the checkpoint into the tensors that are on the device. Returns the number of steps done."""
        state = load_checkpoint(self.checkpoint, model=self.denoiser, optimizer=self.optimizer, scaler=self.scaler)
        here = self.settings()
        differing = [
            f"{k}: {v} when the run started, {here[k]} now" for k, v in state.extra["settings"].items() if v != here[k]
        ]
        if differing:
            raise errors.CheckpointError(
                self.checkpoint, "cannot be resumed with different settings:", offenders=tuple(differing)
            )
        self.generator.set_state(state.extra["generator"])
        self.loader.load_state_dict(state.extra["loader"])
        return state.step


def training_set(config: Config, cache: LatentCache) -> LatentDataset:
    """The cached samples of the config's training sets. Sets with the role `validation` are never trained on."""
    sets = [dataset for dataset in config.datasets if dataset.role == "train"]
    missing = sorted({dataset.name for dataset in sets} - set(cache.dataset_names()))
    if missing:
        raise errors.StoreError(f"{cache.path}: {', '.join(missing)} is not cached: run `latentcache precache CONFIG`")
    chosen, flipped = config.train, [each.name for each in sets if each.flip]
    found = LatentDataset(
        config.cache,
        [each.name for each in sets],
        flips="random" if chosen.flips == "random" else flipped if chosen.flips == "both" else False,
        caption=chosen.caption,
        caption_dropout=chosen.caption_dropout,
        dropout_to=chosen.dropout_to,
        crops=chosen.crops if any(each.variations > 1 for each in sets) else "first",
    )
    if not found.facts.texts:
        raise errors.ConfigError(
            "encode.text is none, so no caption is cached: set it to all and run `latentcache precache CONFIG` again, "
            "or train the text encoders in a loop of your own (this script does not)",
            key="encode.text",
        )
    if not len(found):
        raise errors.StoreError(f"{cache.path}: all samples were refused; `latentcache precache CONFIG` says why")
    return found


def check_writable(folder: Path) -> None:
    """Check that results can be written, before the first step rather than after the last."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryDirectory(dir=folder).cleanup()
    except OSError as error:
        raise errors.StoreError(f"{folder}: cannot be written: {error}") from error


def is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def compute_dtype(mixed_precision: str, device: torch.device) -> torch.dtype:
    """The dtype for `mixed_precision`. `auto`: float32 on the CPU, else bfloat16 if the device has it, else float16."""
    if mixed_precision != "auto":
        return DTYPES[mixed_precision]
    if device.type == "cpu":
        return torch.float32
    has_bf16 = getattr(torch.get_device_module(device), "is_bf16_supported", None)
    return torch.bfloat16 if has_bf16 and has_bf16(including_emulation=False) else torch.float16


def validate(runner: ValidationRunner, step: int) -> dict[str, Any]:
    """Validate. Returns the report as plain data with the paths of its images, grid and plot."""
    report = runner.run(step)
    assert report is not None and runner.paths is not None, "a single process is the main rank"
    loss = "not measured" if report.loss is None else f"{report.loss.loss.mean:.4f}"
    tqdm.write(f"step {step}: validation loss {loss}; results in {runner.paths.folder}", file=sys.stderr)
    pictures = {"grid": runner.paths.grid, "plot": runner.paths.plot}
    return report.to_json(runner.paths.folder) | {name: path and str(path) for name, path in pictures.items()}


@app.default
def run(config: Path, /, *, options: AllOptions = DEFAULTS, as_json: AsJson = False) -> int:
    """Train, print the results, and return the exit code."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    stop = threading.Event()
    try:
        with stop_on_signals(stop) as caught:
            result = train(load_config(config), options, stop=stop)
    except LatentCacheError as error:
        print(f"train_lora: {error}", file=sys.stderr)
        if as_json:
            print(json.dumps({"error": str(error), "type": type(error).__name__}))
        return 2
    except KeyboardInterrupt:
        print("train_lora: interrupted; the last checkpoint, if any, is intact", file=sys.stderr)
        return 130
    if as_json:
        losses = [loss if math.isfinite(loss) else None for loss in result["losses"]]  # JSON has no NaN
        print(json.dumps(result | {"losses": losses}))
    else:
        last_loss = f"{result['losses'][-1]:.4f}" if result["losses"] else "none: no steps were left"
        print(f"step {result['step']}, loss {last_loss}\ncheckpoint {result['checkpoint']}\nLoRA {result['lora']}")
    return 128 + caught[0] if result["interrupted"] else 0


def main() -> int:
    return int(app(sys.argv[1:]) or 0)  # None after --help


if __name__ == "__main__":
    sys.exit(main())
