"""The commands that take a config, those that manage a cache, and `doctor`."""

from __future__ import annotations

import json
import logging
import os
import threading
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from latentcache.cli.options import (
    CACHE_DEFAULTS,
    CONFIG_DEFAULTS,
    AsJson,
    CachePath,
    LocalTarget,
    OfCache,
    OfConfig,
    StoredTarget,
    Strict,
    Switch,
    Target,
)
from latentcache.cli.output import DONE, DONE_WITH_FAULTS, finish, precache_text, row_text, shown_text, upkeep_text
from latentcache.cli.remote_commands import prune_bucket
from latentcache.config import location_of
from latentcache.config_file import number_of_bytes
from latentcache.errors import ConfigError
from latentcache.location import kind_of

logger = logging.getLogger("latentcache")

GRACE_H = 24.0
Hours = Annotated[float, Parameter(help="For a bucket: how many hours to keep packs that are no longer needed.")]


def precache(
    config: Path,
    *,
    dry_run: Switch = False,
    verify_sources: Switch = False,
    ray: str | None = None,
    strict: Strict = False,
    verbose: Switch = False,
    options: OfConfig = CONFIG_DEFAULTS,
) -> int:
    """Encode everything that is not cached yet. Run it again after any change.

    Args:
        config: The config: YAML, TOML or JSON. See configs/ for complete examples.
        dry_run: Report hits, misses by reason, bytes and time, but encode and write nothing.
        verify_sources: Read and hash every image, even if it looks unchanged.
        ray: Encode on the Ray cluster at HOST:PORT. `auto` finds a running one, or starts one on this machine.
        verbose: List all refused samples, not just five per reason, and the devices and dtypes used.
    """
    from latentcache.utils.progress import Progress
    from latentcache.utils.signals import stop_on_signals

    # Must be set before torch is loaded: by default its idle threads spin, and take CPU time from the decoders.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from latentcache.precache.run import run_precache

    if ray is not None:
        from latentcache.scaleout.ray import precache as on_ray

        run_precache = partial(on_ray, address=ray)
    loaded = options.load(config)
    stop = threading.Event()
    with stop_on_signals(stop) as caught:
        report = run_precache(
            loaded, dry_run=dry_run, verify_sources=verify_sources, progress=Progress(shown=True), stop=stop
        )
    is_lacking = bool(report.manifests_waiting) and report.world_size == 1  # with several ranks the last writes them
    has_own_cache = options.settings is not None and getattr(options.settings, "cache", None) is not None
    text = precache_text(report, loaded.cache.path if has_own_cache else config, verbose=verbose)
    code = finish(report, options.as_json, has_faults=is_lacking or (strict and bool(report.num_refused)), text=text)
    return 128 + caught[0] if report.interrupted and caught else code


def validate(
    config: Path,
    *,
    denoiser: Annotated[str | None, Parameter(name=("--denoiser", "--unet"))] = None,
    lora: str | None = None,
    lora_scale: float = 1.0,
    dtype: str = "auto",
    step: int | None = None,
    against: Path | None = None,
    options: OfConfig = CONFIG_DEFAULTS,
) -> int:
    """Measure a checkpoint's validation loss and sample images from the cache. No text encoder is loaded.

    Args:
        config: The config that the cache was made with. Its datasets with role validation are measured.
        denoiser: UNet or transformer: a diffusers folder, its own folder, a .safetensors checkpoint, a checkpoint
            of train_lora.py, or a hub id. Default: the model's own.
        lora: LoRA to load on top: a file or folder written by diffusers or kohya.
        lora_scale: Strength of the LoRA.
        dtype: Dtype of the denoiser: float32, float16, bfloat16 or auto (the family's on an accelerator, float32 on
            the CPU).
        step: Training step of the checkpoint; results go to this subfolder of validation.path. Default: read from
            the LoRA, the checkpoint, or its file name; 0 for the model's own denoiser.
        against: metrics.json of another checkpoint. Also report the difference in loss, sample by sample.
    """
    from latentcache.utils.progress import Progress
    from latentcache.validation.checkpoint_validation import validate as validate_checkpoint

    found = validate_checkpoint(
        options.load(config),
        denoiser=denoiser,
        lora=lora,
        lora_scale=lora_scale,
        dtype=dtype,
        step=step,
        against=against,
        progress=Progress(shown=True),
    )
    loss = found.report.loss
    return finish(found, options.as_json, has_faults=loss is not None and bool(loss.skipped))


def explain(sample: str, /, config: Path | None = None, *, options: OfConfig = CONFIG_DEFAULTS) -> int:
    """Explain why a sample is a hit or a miss, and list its entries.

    Args:
        sample: The sample_id: a path relative to the dataset's folder, or the key in a tar or table.
        config: The config with the sample's dataset.
    """
    from latentcache.precache.explanation import explain as explain_sample

    if config is None:
        raise ConfigError("give the config with the sample's dataset: latentcache explain SAMPLE CONFIG")
    found = explain_sample(options.load(config), sample)
    return finish(found, options.as_json, has_faults=False)


def status(target: Target = None, /, *, strict: Strict = False, options: OfCache = CACHE_DEFAULTS) -> int:
    """Show the entries, bytes, manifests and damage of a cache."""
    from latentcache.loading.status import status as describe

    found = describe(options.cache(target))
    has_faults = bool(found.num_damaged or found.num_lost or (strict and found.num_refused))
    return finish(found, options.as_json, has_faults=has_faults)


def show(key_or_sample: str, target: Target = None, /, *, options: OfCache = CACHE_DEFAULTS) -> int:
    """Show what an entry, or each entry of a sample, was made from, by which model, and its fields.

    For the name of a manifest: list its samples, one per line.

    Args:
        key_or_sample: A key or its first 6 or more digits, a sample_id, or the name of a manifest.
    """
    from latentcache.loading.status import opened
    from latentcache.loading.status import show as describe

    store, manifests, _ = opened(options.cache(target))
    with store:
        manifest = manifests.read(key_or_sample) if key_or_sample in manifests.names() else None
        if manifest is not None:
            for line in (row.to_json(manifest.variants) for row in manifest.rows.values()):
                print(json.dumps(line) if options.as_json else row_text(line))
            return DONE
    found = describe(options.cache(target), key_or_sample)
    print(json.dumps(found) if options.as_json else shown_text(found))
    return DONE


def verify(target: Target = None, /, *, subset: str | None = None, options: OfCache = CACHE_DEFAULTS) -> int:
    """Read every entry and compare it with its digest. Damaged entries become misses, which precache encodes again.

    Packs in a bucket or behind a service are downloaded and checked here. With a write token, a service is told which
    entries are damaged.

    Args:
        subset: n/t checks only the n-th of t parts, e.g. 1/7 on Mondays.
    """
    from latentcache.loading.status import verify as verify_cache
    from latentcache.utils.progress import Progress

    cache = options.cache(target)
    part, _, num_parts = (subset or "").partition("/")
    if subset is not None and not (part.isdecimal() and num_parts.isdecimal()):
        raise ConfigError(f"--subset is {subset!r}; give n/t, e.g. 1/7")
    chosen = None if subset is None else (int(part), int(num_parts))
    report = verify_cache(cache, subset=chosen, progress=Progress(shown=True))
    return _finish_upkeep(report, options.as_json)


def rebuild(target: LocalTarget = None, /, *, options: OfCache = CACHE_DEFAULTS) -> int:
    """Rebuild the index of a cache from its packs."""
    from latentcache.store.upkeep import rebuild as rebuild_store

    return _finish_upkeep(rebuild_store(options.path(target)), options.as_json)


def prune(
    target: StoredTarget = None,
    /,
    *,
    dry_run: Switch = False,
    unfinished: Switch = False,
    max_bytes: str | None = None,
    grace: Hours = GRACE_H,
    options: OfCache = CACHE_DEFAULTS,
) -> int:
    """Remove entries that no manifest refers to.

    In a bucket, packs without any other entries are listed first. A run after the grace time removes them.

    Args:
        max_bytes: Remove only as much as needed to shrink the packs to this size, e.g. 50GB or 50GiB, least recently
            used first.
        dry_run: Report how many entries and bytes, but remove nothing.
        unfinished: Also remove what unfinished runs have encoded. Without it, prune refuses until they are finished.
    """
    from latentcache.dataset.manifest_folder import ManifestFolder, keys_in_use
    from latentcache.store.upkeep import prune as prune_store

    location = options.cache(target).path
    if isinstance(location, str) and kind_of(location) == "bucket":
        if max_bytes is not None:
            raise ConfigError("--max-bytes needs a directory: a bucket does not record when its packs were last used")
        return prune_bucket(location, unfinished=unfinished, grace=grace, dry_run=dry_run, as_json=options.as_json)
    path = options.path(target)
    limit = None if max_bytes is None else number_of_bytes(max_bytes, "--max-bytes")
    manifests = ManifestFolder(path / "manifests")
    keep, began = partial(keys_in_use, manifests, unfinished=unfinished), datetime.now(timezone.utc)
    report = prune_store(path, keep, max_bytes=limit, dry_run=dry_run)
    if unfinished and not dry_run:
        manifests.give_up(began)
    code = _finish_upkeep(report, options.as_json)
    if limit is not None and report.file_bytes_left > limit:
        logger.warning(
            "%s: %s bytes are left, but %s are allowed: manifests refer to all of them. Delete the file of a manifest "
            "that you no longer need, or allow more.",
            path,
            f"{report.file_bytes_left:,}",
            f"{limit:,}",
        )
        return DONE_WITH_FAULTS
    return code


def compact(
    target: LocalTarget = None,
    /,
    *,
    dry_run: Switch = False,
    options: OfCache = CACHE_DEFAULTS,
) -> int:
    """Rewrite packs that are small or hold many removed entries, to free disk space.

    Args:
        dry_run: Report what would be rewritten, but write nothing.
    """
    from latentcache.store.upkeep import compact as compact_store

    return _finish_upkeep(compact_store(options.path(target), dry_run=dry_run), options.as_json)


def doctor(
    *,
    device: str = "auto",
    cache_path: CachePath = None,
    deepspeed: Path | None = None,
    training: Switch = False,
    as_json: AsJson = False,
) -> int:
    """Check for causes of device mismatches: versions, driver, devices, the cache's disk.

    Args:
        device: The device that you use: auto, cpu, cuda, cuda:1, mps, xpu, ...
        deepspeed: Also check this DeepSpeed config for settings that are ignored, refused or missing.
        training: Also train a tiny model for one step on the device, and audit where its tensors are.
    """
    from latentcache.doctor.environment import diagnose

    path = None if cache_path is None else location_of(cache_path)
    diagnosis = diagnose(device=device, cache_path=path, deepspeed=deepspeed, training=training)
    return finish(diagnosis, as_json, has_faults=not diagnosis.ok)


def _finish_upkeep(report: Any, as_json: bool) -> int:
    """Print an upkeep report. Damage makes the exit code 1."""
    has_faults = any(getattr(report, name, None) for name in ("damaged", "known_damaged", "unreadable"))
    return finish(report, as_json, has_faults=has_faults, text=upkeep_text(report))


COMMANDS = (precache, validate, status, explain, show, verify, rebuild, prune, compact, doctor)
