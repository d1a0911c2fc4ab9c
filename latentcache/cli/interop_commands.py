"""The commands `import` and `export` for the caches of other trainers. Each format is a subcommand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import App, Parameter

from latentcache.cli.options import Dtype, ImportOptions, SourceOptions, Switch
from latentcache.cli.output import finish
from latentcache.config_file import load_config, number_of_bytes, parse_buckets
from latentcache.errors import ConfigError

if TYPE_CHECKING:
    from latentcache.interop.readers import ForeignCache
    from latentcache.interop.reports import ExportReport

import_app = App(
    name="import",
    help="Import the cache of another trainer. Its entries are unverified: precache encodes them again.",
)
export_app = App(name="export", help="Export a dataset of the cache to another trainer's format, or to shards.")

OfImport = Annotated[ImportOptions, Parameter(name="*")]
OfExport = Annotated[SourceOptions, Parameter(name="*")]
IMPORT_DEFAULTS, EXPORT_DEFAULTS = ImportOptions(), SourceOptions()
Overwrite = Annotated[bool, Parameter(negative="", help="Replace existing files.")]


@import_app.command(name="kohya")
def import_kohya(
    root: Path,
    /,
    *,
    images: Path | None = None,
    options: OfImport = IMPORT_DEFAULTS,
) -> int:
    """Import the .npz files of kohya's sd-scripts.

    Args:
        root: Folder with the .npz files.
        images: Folder with the images, if they are not next to the .npz files.
    """
    from latentcache.interop.formats.kohya import KohyaCache

    return _import(partial(KohyaCache, root, images=images), options)


@import_app.command(name="simpletuner")
def import_simpletuner(
    root: Path,
    /,
    *,
    images: Path,
    text_cache: Path | None = None,
    metadata: Path | None = None,
    options: OfImport = IMPORT_DEFAULTS,
) -> int:
    """Import SimpleTuner's VAE and text caches.

    Args:
        root: Folder of the VAE cache (`cache_dir_vae`).
        images: Folder with the images.
        text_cache: Folder of the text cache, if it is a different one.
        metadata: aspect_ratio_bucket_metadata_ID.json, if there are several or it is in another folder.
    """
    from latentcache.interop.formats.simpletuner import SimpleTunerCache

    read = partial(SimpleTunerCache, root, images=images, text_cache=text_cache, metadata=metadata)
    return _import(read, options)


@export_app.command(name="kohya")
def export_kohya(
    root: Path,
    /,
    *,
    with_resolution: Switch = False,
    buckets: str | None = None,
    overwrite: Overwrite = False,
    source: OfExport = EXPORT_DEFAULTS,
) -> int:
    """Export the .npz files of kohya's sd-scripts.

    Args:
        root: The folder with the images, or one with the same layout.
        with_resolution: Put the resolution into the file names, as sd-scripts does since March 2026. Older releases do
            not find such files.
        buckets: Buckets of the training, if the cache was not made with rule kohya: settings of `buckets`, such as
            resolution=1024,max_side=2048. Default: those of the cache, else kohya's defaults for the same area.
    """
    from latentcache.interop.formats import kohya

    chosen = None
    if buckets is not None:
        pairs = [pair.partition("=")[::2] for pair in buckets.split(",")]
        settings = {setting.strip(): value.strip() for setting, value in pairs}
        chosen = parse_buckets({"rule": "kohya", **settings}, source="--buckets")
    export = partial(kohya.export, folder=root, with_resolution=with_resolution, buckets=chosen, overwrite=overwrite)
    return _export(export, source)


@export_app.command(name="musubi")
def export_musubi(
    root: Path,
    /,
    *,
    dtype: Dtype = "float32",
    overwrite: Overwrite = False,
    source: OfExport = EXPORT_DEFAULTS,
) -> int:
    """Export musubi-tuner's files.

    Args:
        root: Folder to write to: your `cache_directory`.
        dtype: Dtype of the latents.
    """
    from latentcache.interop.formats import musubi
    from latentcache.store.batch import DTYPES

    return _export(partial(musubi.export, folder=root, dtype=DTYPES[dtype], overwrite=overwrite), source)


@export_app.command(name="webdataset")
def export_webdataset(
    root: Path,
    /,
    *,
    scaled: Switch = False,
    dtype: Literal["float32", "float16"] | None = None,
    shard_bytes: str = "256MiB",
    source: OfExport = EXPORT_DEFAULTS,
) -> int:
    """Export WebDataset shards: tar files of npy files, for any model family.

    Args:
        root: Folder to write to. It must be new or empty.
        scaled: Write latents scaled, as the denoiser expects them. Default: unscaled, as they are stored.
        dtype: Dtype of all tensors. Default: as stored, but bfloat16 becomes float32.
        shard_bytes: Size of each tar file.
    """
    from latentcache.interop.formats import webdataset
    from latentcache.store.batch import DTYPES

    export = partial(
        webdataset.export,
        folder=root,
        scaled=scaled,
        dtype=None if dtype is None else DTYPES[dtype],
        shard_bytes=number_of_bytes(shard_bytes, "--shard-bytes"),
    )
    return _export(export, source)


def _import(read: Callable[..., ForeignCache], options: ImportOptions) -> int:
    """Import the cache that `read` opens, and print the report."""
    from latentcache.interop.importing import import_cache
    from latentcache.precache.workspace import open_workspace
    from latentcache.utils.progress import Progress

    config = None if options.config is None else load_config(options.config)
    datasets = [] if config is None else [each for each in config.datasets if options.name in (None, each.name)]
    dataset = datasets[0] if len(datasets) == 1 else None
    verification = None
    if options.verify is not None:
        if config is None:
            raise ConfigError("--verify encodes entries again: give --config, which names the model")
        if options.verify != "all" and not (options.verify.isdecimal() and int(options.verify) > 0):
            raise ConfigError(f"--verify is {options.verify!r}; give a number of entries or all")
        from latentcache.interop.verification import Verification

        verification = Verification(config, None, "all" if options.verify == "all" else int(options.verify))
    foreign = read(caption_extension=options.caption_extension, family=options.family)
    with open_workspace(options.cache()) as workspace:
        report = import_cache(
            foreign,
            workspace,
            name=options.name or (dataset.name if dataset is not None else foreign.format),
            dataset=dataset,
            scale_check=not options.no_scale_check,
            verification=verification,
            progress=Progress(shown=True),
        )
    is_lacking = options.strict and bool(report.refused or report.incomplete)
    return finish(report, options.as_json, has_faults=is_lacking or bool(report.unequal))


def _export(export: Callable[..., ExportReport], source: SourceOptions) -> int:
    """Open the cache, export a dataset of it, and print the report."""
    from latentcache.loading.cache import LatentCache
    from latentcache.utils.progress import Progress

    with LatentCache(source.cache().model_copy(update={"unverified": source.unverified})) as cache:
        names = cache.dataset_names()
        if source.manifest is None and len(names) != 1:
            raise ConfigError(f"which dataset? Give --manifest; the cache has: {', '.join(names) or 'none'}")
        report = export(cache, source.manifest or names[0], progress=Progress(shown=True))
    has_faults = bool(report.num_unread or (source.strict and report.skipped))
    return finish(report, source.as_json, has_faults=has_faults)
