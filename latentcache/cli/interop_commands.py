"""The commands `import` and `export`: caches of other trainers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from latentcache.cli.options import AsJson, Switch
from latentcache.cli.output import finish
from latentcache.config import BucketsConfig, CacheConfig, Config, location_of
from latentcache.config_file import load_config, number_of_bytes, parse_buckets
from latentcache.dataset.samples import MAX_CAPTION_BYTES, CaptionError, captions_in_text, read_range
from latentcache.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from latentcache.interop.verification import Verification

FORMATS = {
    "kohya": "kohya",
    "musubi": "musubi",
    "simpletuner": "simpletuner",
    "ai-toolkit": "ai_toolkit",
    "diffusion-pipe": "diffusion_pipe",
    "onetrainer": "onetrainer",
    "webdataset": "webdataset",
    "mds": "mds",
    "parquet": "parquet",
}
"""Format -> its module in `interop.formats`. `read(root, *, ...)` reads a cache; `export(cache, name, folder, *, ...)`
writes one, and some modules lack it. Their keyword arguments are the options of that format."""

_NO_FLAGS = ("tokenize", "progress")
"""Arguments of these functions that are no options."""

# The longer name first: cyclopts would take it for a key of the shorter one.
_CACHE_HELP = "The cache's directory, or its URL."
CacheFolder = Annotated[str | None, Parameter(name=("--cache.path", "--cache"), help=_CACHE_HELP)]
FromConfig = Annotated[Path | None, Parameter(name="--config", help="A config: names the cache, and the models.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions:
    """What an import does with the entries."""

    name: str | None = None
    """Name of the manifest. Default: that of the config's only dataset, else that of the format."""
    role: Literal["train", "validation"] | None = None
    """What the dataset is for. Default: what the config says of it, else train."""
    repeats: int | None = None
    """How often an epoch visits each sample. Default: what the config says of it, else 1."""
    dtype: Literal["float32", "float16", "bfloat16"] | None = None
    """The dtype that is stored. Default: that of the files, float32 for scaled latents; with --verify that of the
    config."""
    verify: str | None = None
    """Encode so many entries of each kind again, or `all`; equal ones become verified. Needs --config."""
    seed: int = 0
    """Chooses the entries that are encoded again."""
    tolerance: float | None = None
    """Largest absolute difference that counts as equal. Default: by dtype."""
    no_scale_check: Switch = False
    """Do not compare the latents' standard deviation with the family's: they are of another VAE."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderOptions:
    """How a format is read. Each format has some of these."""

    family: str | None = None
    """The model family of the files, of trainers that train several. Default: the one that they say."""
    images: Path | None = None
    """The images' folder. kohya: if the images are not next to the files."""
    caption_extension: str | None = None
    """Suffix of the caption files next to the images. Default: .txt."""
    captions: Path | None = None
    """A text file of further captions, one a line, for formats that name files by a hash of the caption."""
    text_cache: Path | None = None
    """simpletuner: the text cache, if it is in another folder."""
    metadata: Path | None = None
    """simpletuner: aspect_ratio_bucket_metadata_ID.json."""
    recorded_root: str | None = None
    """Where the images' folder was when the cache was made, if it was moved since."""
    trigger: str | None = None
    """ai-toolkit: the trigger word of the training."""
    variation: int | None = None
    """onetrainer: the number of the variation, from 0."""
    declaration: Path | None = None
    """webdataset, mds: a YAML file that states what the latents are. Default: the description in an export of ours."""
    area: int | None = None
    """kohya: of a file with several resolutions, take the one nearest to so many pixels. Default: the largest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriterOptions:
    """How a format is written. Each format has some of these."""

    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """simpletuner, ai-toolkit, musubi: dtype of the latents. Default: bfloat16, of musubi float32. webdataset, mds,
    parquet: of all tensors, float16 or float32. Default: as they are stored, bfloat16 as float32."""
    scaled: Switch = False
    """webdataset, mds, parquet: write latents as the denoiser expects them. Default: unscaled, as they are stored."""
    shard_bytes: str | None = None
    """webdataset, mds, parquet: size of a file, e.g. 512MiB. Default: 256MiB, of mds 64MiB."""
    caption_extension: str | None = None
    """ai-toolkit: suffix of the caption files next to the images. Default: .txt."""
    buckets: str | None = None
    """The buckets of the training, if the cache was not made with its rule: settings of `buckets` by name, as
    resolution=1024,max_side=2048. Default: those of the cache, else the trainer's own for that area."""
    with_resolution: Switch = False
    """kohya: write the newer names, which have a resolution. Releases before March 2026 do not find those."""
    seed: int | None = None
    """Export a draw of the moments with this seed. Default: their mean."""
    overwrite: Switch = False
    """Replace files that exist already."""


def import_foreign(
    root: Path,
    /,
    *,
    source: Annotated[str, Parameter(name="--from")],
    cache: CacheFolder = None,
    config: FromConfig = None,
    options: Annotated[ImportOptions | None, Parameter(name="*")] = None,
    reader: Annotated[ReaderOptions | None, Parameter(name="*", group="Reading")] = None,
    as_json: AsJson = False,
) -> int:
    """Import the cache of another trainer. Its entries are unverified, until encoding gives the same values.

    Args:
        root: The folder of the foreign cache.
        source: Its format: kohya, musubi, simpletuner, ai-toolkit, diffusion-pipe, onetrainer, webdataset or mds.
    """
    from latentcache.interop.importing import DatasetUse, import_cache
    from latentcache.precache.workspace import open_workspace
    from latentcache.store.entry import DTYPES
    from latentcache.utils.progress import ShownProgress

    options = options or ImportOptions()
    loaded = None if config is None else load_config(config)
    datasets = [] if loaded is None else [each for each in loaded.datasets if options.name in (None, each.name)]
    dataset = datasets[0] if len(datasets) == 1 else None
    read = _format("--from", source, reader or ReaderOptions(), loaded)
    foreign = read(root)
    use = DatasetUse() if dataset is None else DatasetUse(dataset.role, dataset.repeats)
    with open_workspace(_cache_config(cache, loaded)) as workspace:
        report = import_cache(
            foreign,
            workspace,
            name=options.name or (dataset.name if dataset is not None else source),
            use=DatasetUse(options.role or use.role, use.repeats if options.repeats is None else options.repeats),
            store_dtype=None if options.dtype is None else DTYPES[options.dtype],
            scale_check=not options.no_scale_check,
            verification=_verification(options, loaded),
            progress=ShownProgress(),
        )
    return finish(report, as_json, has_faults=report.has_faults)


def export_foreign(
    root: Path,
    /,
    *,
    target: Annotated[str, Parameter(name="--to")],
    cache: CacheFolder = None,
    config: FromConfig = None,
    manifest: str | None = None,
    unverified: Switch = False,
    writer: Annotated[WriterOptions | None, Parameter(name="*", group="Writing")] = None,
    as_json: AsJson = False,
) -> int:
    """Export a dataset of the cache to another trainer's format, or to shards.

    Args:
        root: The folder to write to. kohya: the images' folder, or one laid out like it. webdataset, mds, parquet: a
            new one.
        target: The format: kohya, musubi, simpletuner, ai-toolkit, webdataset, mds or parquet.
        manifest: The dataset. Default: the only one.
        unverified: Also export entries that were imported and not verified.
    """
    from latentcache.loading.cache import LatentCache
    from latentcache.utils.progress import ShownProgress

    loaded = None if config is None else load_config(config)
    export = _format("--to", target, writer or WriterOptions(), loaded)
    with LatentCache(_cache_config(cache, loaded).model_copy(update={"unverified": unverified})) as opened:
        names = opened.dataset_names()
        if manifest is None and len(names) != 1:
            raise ConfigError(f"which dataset? Give --manifest; there are: {', '.join(names) or 'none'}")
        report = export(opened, manifest or names[0], root, progress=ShownProgress())
    return finish(report, as_json, has_faults=report.has_faults)


def _format(
    flag: Literal["--from", "--to"], name: str, options: ReaderOptions | WriterOptions, config: Config | None
) -> Callable[..., Any]:
    """`read` or `export` of a format, with these options. ConfigError for options that it does not have, or needs."""
    action = "read" if flag == "--from" else "export"
    modules = {each: import_module(f"latentcache.interop.formats.{module}") for each, module in FORMATS.items()}
    functions = {each: getattr(module, action) for each, module in modules.items() if hasattr(module, action)}
    if name not in functions:
        raise ConfigError(f"{flag} is {name!r}; use one of {', '.join(functions)}")
    parameters = inspect.signature(functions[name]).parameters.values()
    known = {each.name: each for each in parameters if each.kind is each.KEYWORD_ONLY}
    # A switch that is off counts as not given.
    given = {option: value for option, value in asdict(options).items() if value is not None and value is not False}
    for option in given:
        if option not in known:
            allowed = ", ".join(_flag(each) for each in sorted(known) if each not in _NO_FLAGS) or "none"
            raise ConfigError(f"{_flag(option)} is no option of {flag} {name}; its options are: {allowed}")
    for option, parse in _PARSERS.items():
        if option in given:
            given[option] = parse(given[option], name)
    if config is not None and "tokenize" in known:
        # For formats without captions, whose texts are paired with captions by their tokens.
        from latentcache.interop.formats.onetrainer import tokenize_with
        from latentcache.precache.encodings import load_models

        given["tokenize"] = tokenize_with(next(iter(load_models(config.model, {}).tokenizers().values())))
    for option, parameter in known.items():
        if parameter.default is parameter.empty and option not in given:
            raise ConfigError(f"{flag} {name} needs {_flag(option)}")
    return partial(functions[name], **given)


def _buckets(text: str, rule: str) -> BucketsConfig:
    pairs = [pair.partition("=")[::2] for pair in text.split(",")]
    settings = {setting.strip(): value.strip() for setting, value in pairs}
    return parse_buckets({"rule": rule, **settings}, source="--buckets")


def _dtype(name: str, _: str) -> torch.dtype:
    from latentcache.store.entry import DTYPES

    return DTYPES[name]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _lines(path: Path) -> tuple[str, ...]:
    """The captions in a file, one a line."""
    try:
        return captions_in_text(read_range(str(path), 0, MAX_CAPTION_BYTES + 1))
    except (OSError, CaptionError) as error:
        raise ConfigError(f"cannot be used: {error}", source=f"--captions {path}") from error


_PARSERS: dict[str, Callable[[Any, str], Any]] = {
    "shard_bytes": lambda text, _: number_of_bytes(text, "--shard-bytes"),
    "captions": lambda path, _: _lines(path),
    "buckets": _buckets,
    "dtype": _dtype,
}
"""Option -> its value, from what was given and the format's name."""


def _cache_config(flag: str | None, config: Config | None) -> CacheConfig:
    """Where the cache is: the flag, else the config."""
    if config is not None:
        return config.cache if flag is None else config.cache.model_copy(update={"path": location_of(flag)})
    if flag is None:
        raise ConfigError("which cache? Give --cache DIR or --config")
    return CacheConfig(path=location_of(flag))


def _verification(options: ImportOptions, config: Config | None) -> Verification | None:
    from latentcache.interop.verification import Verification

    if options.verify is None:
        return None
    if config is None:
        raise ConfigError("--verify encodes entries again, and needs --config for the models")
    if options.verify != "all" and not (options.verify.isdecimal() and int(options.verify) > 0):
        raise ConfigError(f"--verify is {options.verify!r}; give a number of entries, or all")
    num_entries: int | Literal["all"] = "all" if options.verify == "all" else int(options.verify)
    return Verification(config, None, num_entries, options.seed, options.tolerance)
