"""The command line: parse, call, print. Results go to stdout, logs and progress to stderr.

Exit codes: 0 done; 1 done, with refusals, damage or errors; 2 could not run; 130, 143 stopped by Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from cyclopts import App, CycloptsError
from pydantic import BaseModel

import latentcache
from latentcache.cli.interop_commands import register
from latentcache.cli.options import AsJson, CachePath, NamedConfig, Settings, Switch, Target
from latentcache.cli.output import DONE, DONE_WITH_FAULTS, fail, finish, print_result
from latentcache.config import load_config, settings_from_environment
from latentcache.errors import ConfigError, LatentCacheError, StoreError

logger = logging.getLogger("latentcache")

app = App(
    name="latentcache",
    help="A device-aware cache of VAE latents and CLIP text embeddings for diffusion fine-tuning.",
    version=latentcache.__version__,
    result_action="return_value",
)
register(app)


@app.command
def precache(
    config: Path,
    /,
    *,
    dry_run: Switch = False,
    verify_sources: Switch = False,
    as_json: AsJson = False,
    settings: Settings = None,
) -> int:
    """Encode what is not cached yet.

    Parameters
    ----------
    config
        The config: YAML, TOML or JSON. configs/ holds complete examples.
    dry_run
        Tell hits, misses by reason, bytes and time; encode and write nothing.
    verify_sources
        Read and hash every image, also those that look unchanged.
    settings
        Any setting of the config; a dataset goes by its name or number.
    """
    from latentcache.utils.progress import default_progress
    from latentcache.utils.signals import stop_on_signals

    # Read when torch is loaded. By default its threads wait for each other actively, on a CPU at the decoders' cost.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from latentcache.precache.run import run_precache

    loaded = load_config(config, overrides=_given(settings))
    if loaded.cache.store == "cpu" and not dry_run:
        logger.warning("cache.store is cpu: entries live in this process only, and are gone when this command ends")
    stop = threading.Event()
    with stop_on_signals(stop) as caught:
        report = run_precache(
            loaded, dry_run=dry_run, verify_sources=verify_sources, progress=default_progress(), stop=stop
        )
    print_result(report.to_json(), report.to_text, as_json)
    if report.interrupted and caught:
        return 128 + caught[0]
    return DONE_WITH_FAULTS if report.num_refused else DONE


@app.command
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
    as_json: AsJson = False,
    settings: Settings = None,
) -> int:
    """Measure the validation loss of a checkpoint and sample images, from what is cached: no text encoder is loaded.

    Parameters
    ----------
    config
        The config that the cache was made with; its datasets with the role validation are measured.
    unet
        The UNet: a diffusers folder, a UNet's own folder, a .safetensors checkpoint, a checkpoint folder of
        train_lora_sdxl.py, or a hub id. Default: the model's own.
    lora
        LoRA weights on top of it: the file or folder that diffusers or kohya wrote.
    lora_scale
        The strength of the LoRA.
    dtype
        Of the UNet: float32, float16, bfloat16, or auto: float16 on an accelerator, float32 on a CPU.
    step
        The number of the training's step: the results are kept under it, in a subfolder of validation.path.
    against
        The metrics.json of another checkpoint: also tell the difference of the losses, sample by sample.
    """
    from latentcache.utils.progress import default_progress
    from latentcache.validation.inference import validate as validate_checkpoint

    found = validate_checkpoint(
        load_config(config, overrides=_given(settings)),
        unet=unet,
        lora=lora,
        lora_scale=lora_scale,
        dtype=dtype,
        step=step,
        against=against,
        progress=default_progress(),
    )
    print_result(found.to_json(), found.to_text, as_json)
    return DONE_WITH_FAULTS if found.report.loss is not None and found.report.loss.skipped else DONE


@app.command
def status(
    target: Target = None,
    /,
    *,
    config: NamedConfig = None,
    as_json: AsJson = False,
    cache_path: CachePath = None,
) -> int:
    """What the cache holds: entries, bytes, manifests, damage."""
    from latentcache.loading.status import status as describe

    found = describe(_cache_of(target, config, cache_path))
    print_result(found.to_json(), found.to_text, as_json)
    return DONE_WITH_FAULTS if found.num_damaged or found.num_lost or found.num_refused else DONE


@app.command
def explain(sample: str, /, config: Path, *, as_json: AsJson = False, settings: Settings = None) -> int:
    """Why a sample is a hit or a miss, and which entries it has.

    Parameters
    ----------
    sample
        Its sample_id: the path relative to the dataset's folder, or its key in a tar or table.
    config
        The config that the sample belongs to.
    """
    from latentcache.precache.explain import explain as explain_sample

    found = explain_sample(load_config(config, overrides=_given(settings)), sample)
    print_result(found.to_json(), found.to_text, as_json)
    return DONE_WITH_FAULTS if found.is_refused else DONE


@app.command
def show(
    key_or_sample: str,
    target: Target = None,
    /,
    *,
    config: NamedConfig = None,
    as_json: AsJson = False,
    cache_path: CachePath = None,
) -> int:
    """The record of an entry, or those of a sample: what it was made from and by, and what it holds.

    Parameters
    ----------
    key_or_sample
        A key, its first digits (at least 6), or a sample_id.
    """
    from latentcache.loading.status import show as describe

    found = describe(_cache_of(target, config, cache_path), key_or_sample)
    print_result(found, lambda: json.dumps(found, indent=2, ensure_ascii=False), as_json)
    return DONE


@app.command
def verify(
    target: Target = None,
    /,
    *,
    config: NamedConfig = None,
    subset: str | None = None,
    as_json: AsJson = False,
    cache_path: CachePath = None,
) -> int:
    """Read every entry and compare it with its digest. Damaged entries become misses: precache mends them.

    Parameters
    ----------
    subset
        n/t reads the n-th of t parts, e.g. 1/7 on Mondays.
    """
    from latentcache.store.disk import DiskStore
    from latentcache.store.upkeep import verify as verify_store
    from latentcache.utils.progress import default_progress

    path = _cache_of(target, config, cache_path)
    progress = default_progress()

    def advance(done: int, total: int) -> None:
        if done == 1:
            progress.start("verify packs", total)
        progress.advance()

    # A cache that cannot be written is checked all the same; only the marks are missing then.
    with DiskStore(path, read_only=not os.access(path, os.W_OK), create=False) as store:
        report = verify_store(store, subset=_subset(subset), progress=advance)
    progress.finish()
    return finish(report, as_json)


@app.command
def rebuild(
    target: Target = None,
    /,
    *,
    config: NamedConfig = None,
    as_json: AsJson = False,
    cache_path: CachePath = None,
) -> int:
    """Make the index anew from the packs."""
    from latentcache.store.upkeep import rebuild as rebuild_store

    return finish(rebuild_store(_cache_of(target, config, cache_path)), as_json)


@app.command
def prune(
    target: Target = None,
    /,
    *,
    config: NamedConfig = None,
    dry_run: Switch = False,
    unfinished: Switch = False,
    as_json: AsJson = False,
    cache_path: CachePath = None,
) -> int:
    """Remove the entries that no manifest refers to.

    Parameters
    ----------
    unfinished
        Also remove what runs that did not finish have encoded. Without it, prune waits until they have.
    dry_run
        Tell how many entries and bytes; remove nothing.
    """
    from latentcache.dataset.manifest import ManifestFolder
    from latentcache.store.upkeep import prune as prune_store

    path = _cache_of(target, config, cache_path)
    manifests = ManifestFolder(path / "manifests")

    def keep() -> set[str]:
        if not manifests.names():
            # An unfinished first run has entries but no manifest yet: everything would go.
            raise StoreError(f"{path}: has no manifest, so prune would remove every entry; finish a precache run first")
        if manifests.unfinished() and not unfinished:
            runs = ", ".join(f"{name} (begun {begun})" for name, begun in manifests.unfinished().items())
            raise StoreError(
                f"{path}: not finished: {runs}. What was encoded for them is in no manifest yet, and would be removed: "
                "run precache again to finish, or give --unfinished to remove it"
            )
        return {key for name in manifests.names() if (manifest := manifests.read(name)) for key in manifest.keys()}

    return finish(prune_store(path, keep, dry_run=dry_run), as_json)


@app.command
def compact(
    target: Target = None,
    /,
    *,
    config: NamedConfig = None,
    dry_run: Switch = False,
    as_json: AsJson = False,
    cache_path: CachePath = None,
) -> int:
    """Rewrite packs that are small or hold much dead weight, and give their space back.

    Parameters
    ----------
    dry_run
        Tell what would be rewritten; write nothing.
    """
    from latentcache.store.upkeep import compact as compact_store

    return finish(compact_store(_cache_of(target, config, cache_path), dry_run=dry_run), as_json)


@app.command
def doctor(
    *,
    device: str = "auto",
    cache_path: CachePath = None,
    deepspeed: Path | None = None,
    training: Switch = False,
    as_json: AsJson = False,
) -> int:
    """Look for what makes tensors meet on different devices: versions, driver, devices, the cache's disk.

    Parameters
    ----------
    device
        The device that is meant: auto, cpu, cuda, cuda:1, mps, xpu, ...
    deepspeed
        Check this DeepSpeed config too: settings that are ignored, refused or left to be filled in.
    training
        Also train a tiny SDXL for one step on the device, and audit where everything is.
    """
    from latentcache.doctor.doctor import diagnose

    diagnosis = diagnose(device=device, cache_path=_known_cache(cache_path), deepspeed=deepspeed, training=training)
    print_result(diagnosis.to_json(), diagnosis.to_text, as_json)
    return DONE if diagnosis.ok else DONE_WITH_FAULTS


def _given(settings: BaseModel | None) -> dict[str, Any]:
    return {} if settings is None else settings.model_dump(exclude_none=True)


def _cache_of(target: Path | None, config: Path | None, cache_path: Path | None) -> Path:
    """The cache that a command is about: a flag, else the target, else the config, else the environment."""
    if cache_path is not None:
        return cache_path.expanduser()
    if target is not None and target.is_dir():
        return target
    file = target or config
    if file is not None:
        if not file.exists():
            raise ConfigError("no such cache directory and no such config", source=str(file))
        return load_config(file).cache.path
    path = _known_cache(None)
    if path is None:
        raise ConfigError("which cache? Give its directory, a config, --cache.path, or set LATENTCACHE_CACHE_PATH")
    return path


def _known_cache(flag: Path | None) -> Path | None:
    """The cache's directory as a flag or the environment gives it."""
    path = flag or settings_from_environment(os.environ).get("cache", {}).get("path")
    return None if path is None else Path(path).expanduser()


def _subset(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    part, _, total = text.partition("/")
    if not (part.isdecimal() and total.isdecimal()):
        raise ConfigError(f"--subset is {text!r}; give n/t, e.g. 1/7")
    return int(part), int(total)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    # Their notes on optional packages are not ours to print; errors still are.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    if isinstance(sys.stdout, TextIOWrapper):
        # A file name need not be text in the terminal's encoding; printing it must not lose a report.
        sys.stdout.reconfigure(errors="backslashreplace")
    as_json = "--json" in arguments
    try:
        result = app(arguments, exit_on_error=False, print_error=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else DONE
    except (LatentCacheError, CycloptsError) as error:
        print(f"latentcache: {error}", file=sys.stderr)
        return fail(error, as_json)
    except KeyboardInterrupt:
        print("latentcache: interrupted; sealed entries are safe", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # Whoever read the output has gone. Python flushes once more at exit: let it flush into nothing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:
        # A fault of ours: not swallowed, but a script must not take Python's exit code 1 for "done, with refusals".
        logger.exception("this should not happen; please report it")
        return fail(error, as_json)


if __name__ == "__main__":
    sys.exit(main())
