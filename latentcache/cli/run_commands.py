"""The commands that work on a config's datasets and models: precache, validate, explain, doctor."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

from latentcache.cli.options import CONFIG_DEFAULTS, AsJson, CachePath, OfConfig, Switch, known_cache
from latentcache.cli.output import finish

logger = logging.getLogger("latentcache")


def precache(
    config: Path,
    /,
    *,
    dry_run: Switch = False,
    verify_sources: Switch = False,
    options: OfConfig = CONFIG_DEFAULTS,
) -> int:
    """Encode what is not cached yet.

    Args:
        config: The config: YAML, TOML or JSON. configs/ holds complete examples.
        dry_run: Report hits, misses by reason, bytes and time; encode and write nothing.
        verify_sources: Read and hash every image, also those that look unchanged.
    """
    from latentcache.utils.progress import default_progress
    from latentcache.utils.signals import stop_on_signals

    # Read when torch is loaded. By default its threads wait for each other actively, on a CPU at the decoders' cost.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from latentcache.precache.run import run_precache

    loaded = options.load(config)
    if loaded.cache.store == "cpu" and not dry_run:
        logger.warning("cache.store is cpu: entries live in this process only, and are gone when this command ends")
    stop = threading.Event()
    with stop_on_signals(stop) as caught:
        report = run_precache(
            loaded, dry_run=dry_run, verify_sources=verify_sources, progress=default_progress(), stop=stop
        )
    code = finish(report, options.as_json, has_faults=bool(report.num_refused))
    return 128 + caught[0] if report.interrupted and caught else code


def validate(
    config: Path,
    /,
    *,
    unet: str | None = None,
    lora: str | None = None,
    lora_scale: float = 1.0,
    dtype: str = "auto",
    step: int = 0,
    against: Path | None = None,
    options: OfConfig = CONFIG_DEFAULTS,
) -> int:
    """Measure the validation loss of a checkpoint and sample images, from what is cached: no text encoder is loaded.

    Args:
        config: The config that the cache was made with; its datasets with the role validation are measured.
        unet: The UNet: a diffusers folder, a UNet's own folder, a .safetensors checkpoint, a checkpoint folder of
            train_lora_sdxl.py, or a hub id. Default: the model's own.
        lora: LoRA weights on top of it: the file or folder that diffusers or kohya wrote.
        lora_scale: The strength of the LoRA.
        dtype: Of the UNet: float32, float16, bfloat16, or auto: float16 on an accelerator, float32 on a CPU.
        step: The number of the training's step: the results are kept under it, in a subfolder of validation.path.
        against: The metrics.json of another checkpoint: also report the difference of the losses, sample by sample.
    """
    from latentcache.utils.progress import default_progress
    from latentcache.validation.checkpoint_validation import validate as validate_checkpoint

    found = validate_checkpoint(
        options.load(config),
        unet=unet,
        lora=lora,
        lora_scale=lora_scale,
        dtype=dtype,
        step=step,
        against=against,
        progress=default_progress(),
    )
    loss = found.report.loss
    return finish(found, options.as_json, has_faults=loss is not None and bool(loss.skipped))


def explain(sample: str, /, config: Path, *, options: OfConfig = CONFIG_DEFAULTS) -> int:
    """Why a sample is a hit or a miss, and which entries it has.

    Args:
        sample: Its sample_id: the path relative to the dataset's folder, or its key in a tar or table.
        config: The config that the sample belongs to.
    """
    from latentcache.precache.planner import explain as explain_sample

    found = explain_sample(options.load(config), sample)
    return finish(found, options.as_json, has_faults=found.is_refused)


def doctor(
    *,
    device: str = "auto",
    cache_path: CachePath = None,
    deepspeed: Path | None = None,
    training: Switch = False,
    as_json: AsJson = False,
) -> int:
    """Look for what makes tensors meet on different devices: versions, driver, devices, the cache's disk.

    Args:
        device: The device that is meant: auto, cpu, cuda, cuda:1, mps, xpu, ...
        deepspeed: Check this DeepSpeed config too: settings that are ignored, refused or left to be filled in.
        training: Also train a tiny SDXL for one step on the device, and audit where everything is.
    """
    from latentcache.doctor.environment import diagnose

    diagnosis = diagnose(device=device, cache_path=known_cache(cache_path), deepspeed=deepspeed, training=training)
    return finish(diagnosis, as_json, has_faults=not diagnosis.ok)
