"""The schema of a config. Unknown settings are errors, and a checked config is immutable.

Relative paths in a config are relative to the working directory, as in every trainer.
"""

from __future__ import annotations

import difflib
import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    StringConstraints,
    field_validator,
    model_validator,
)

from latentcache.errors import StoreError
from latentcache.families import DEFAULT, DEFAULT_REPOSITORY, FamilyName
from latentcache.location import CacheLocation, cache_location
from latentcache.utils.durable_files import expanded
from latentcache.utils.wording import counted

TOKEN_VARIABLE, WRITE_TOKEN_VARIABLE = "LATENTCACHE_TOKEN", "LATENTCACHE_WRITE_TOKEN"
"""Environment variables with the tokens of a service: one grants read access, the other read and write access."""
PROMPTS_PREFIX = "validation-prompts"
"""Prefix of the manifests that hold cached validation prompts. Reserved: no dataset's name may start with it."""
MAX_REPEATS = 1_000_000
"""Upper bound for `repeats`. A larger value is a typo, and an epoch's order would not fit into memory."""
MAX_VARIANTS = 1000
"""Upper bound for the variants of one caption. Each variant is an entry."""
RETRY_S = 30.0
"""How long a request that gets no response is retried."""

WINDOWS_DEVICE = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])\Z", re.IGNORECASE)


def _no_device(name: str) -> str:
    if WINDOWS_DEVICE.match(name):
        raise ValueError(f"{name!r} is a reserved device name on Windows and cannot name a file: choose another name")
    return name


Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"), AfterValidator(_no_device)]
UserText = Annotated[str, AfterValidator(os.path.expanduser)]
"""A path or a hub id. A leading `~` is expanded."""
UserPath = Annotated[Path, AfterValidator(expanded)]
DTYPE_ALIASES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
Alias = BeforeValidator(lambda name: DTYPE_ALIASES.get(name, name) if isinstance(name, str) else name)
DtypeName = Annotated[Literal["auto", "float32", "float16", "bfloat16"], Alias]
Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _encodable(prompt: str) -> str:
    prompt.encode()  # raises ValueError for a lone surrogate: tokenizers accept UTF-8 only
    return prompt


Prompt = Annotated[str, AfterValidator(_encodable)]


class Section(BaseModel):
    """A section of the config. The docstrings of its fields are what the reference and `--help` show."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class RemoteOptions(TypedDict, total=False):
    """Options for a cache in a bucket or behind a service: see `CacheConfig`. `token` defaults to LATENTCACHE_TOKEN."""

    token: str | None
    local: str | Path | None
    local_max_bytes: int | None
    retry_s: float


def check_options(options: Mapping[str, Any], function: Callable[..., Any]) -> None:
    """Raise TypeError for an option that RemoteOptions lacks, and suggest the closest name."""
    for name in options.keys() - RemoteOptions.__annotations__.keys():
        known = [*inspect.signature(function).parameters, *RemoteOptions.__annotations__]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(known)}"
        raise TypeError(f"{function.__qualname__.split('.')[0]} has no option {name!r}{hint}")


class CacheConfig(Section):
    """Where the cache is, how large it may grow, and which entries may be used."""

    # A pasted URL may contain a password.
    model_config = ConfigDict(hide_input_in_errors=True)

    path: CacheLocation = Path("cache", DEFAULT)
    """Where the cache is: a directory, a bucket (`s3://BUCKET/PREFIX`, `gs://`, `az://`), the URL of a service
    (`latentcache serve`), or read-only `hf://datasets/USER/NAME`. Several datasets, models and runs can share it."""
    salt: str = ""
    """Part of every key. Change it to invalidate all existing entries."""
    max_bytes: Annotated[ByteSize, Field(ge=0)] | None = None
    """Size limit of the packs, e.g. 50GB or 50GiB. After each run `precache` removes entries that no manifest refers
    to, least recently used first, until the packs fit. null: nothing is removed."""
    unverified: bool = False
    """Also train and validate on imported entries that have not been verified."""
    local: UserPath | None = None
    """For a bucket or service: local folder that keeps the packs that were read; processes can share it. null: a
    folder for this cache alone in the user's cache folder (`XDG_CACHE_HOME` or `~/.cache`)."""
    local_max_bytes: Annotated[ByteSize, Field(ge=0)] | None = None
    """Size limit of one cache's packs in `local`, e.g. 50GB. The least recently used packs are evicted first. null: no
    limit. Reading in random order needs room for all packs of the dataset, or packs are downloaded over and over; pack
    order (`LatentLoader`) does not."""
    retry_s: float = Field(RETRY_S, gt=0, allow_inf_nan=False)
    """For a bucket or service: how many seconds to retry a request that gets no response."""

    def remote_options(self) -> RemoteOptions:
        """The options for a bucket or a service. A config holds no token: that comes from LATENTCACHE_TOKEN."""
        return RemoteOptions(local=self.local, local_max_bytes=self.local_max_bytes, retry_s=self.retry_s)


def location_of(value: str | os.PathLike[str] | CacheConfig) -> Path | str:
    """Return a directory as Path, or a URL as str. Raises StoreError for what `cache_location` refuses."""
    if isinstance(value, CacheConfig):
        return value.path
    try:
        return cache_location(os.fspath(value))
    except ValueError as error:
        raise StoreError(str(error)) from error


RuleName = Literal["latentcache", "kohya", "simpletuner", "onetrainer", "diffusers"]
SETTINGS_OF_RULE: dict[str, frozenset[str]] = {
    "latentcache": frozenset({"area", "step", "max_aspect"}),
    "kohya": frozenset({"resolution", "step", "square", "min_side", "max_side", "upscale"}),
    "simpletuner": frozenset({"resolution", "step", "square", "resolution_type"}),
    "onetrainer": frozenset({"resolution", "step", "square"}),
    "diffusers": frozenset({"resolution", "sizes", "resample"}),
}
"""The settings of `buckets` that each rule reads."""
_MAX_SIDE = 16384

Side = Annotated[int, Field(ge=8, le=_MAX_SIDE)]


def _check_settings(section: Section, choice: str, chosen: str, settings: Mapping[str, frozenset[str]]) -> None:
    """Raise ValueError for a setting that only another value of this choice reads: it would have no effect."""
    known = settings[chosen]
    for name in sorted(frozenset().union(*settings.values()) - known):
        if getattr(section, name) != type(section).model_fields[name].default:
            raise ValueError(f"{name} is not a setting of {choice} {chosen}; it has {', '.join(sorted(known))}")


class BucketsConfig(Section):
    """The sizes that images are resized and cropped to. Each rule reads some of these settings."""

    rule: RuleName = "latentcache"
    """Whose bucketing to follow. To export latents to a trainer, choose that trainer: it uses them only if their size
    and crop are what it would have made."""
    area: int = Field(1024 * 1024, ge=64, le=_MAX_SIDE**2)
    """`latentcache`: maximum number of pixels in a bucket. Use 1048576 for models trained at 1024x1024."""
    max_aspect: float = Field(2.0, ge=1.0, le=64.0)
    """`latentcache`: maximum aspect ratio of a bucket, as long side / short side."""
    resolution: int = Field(1024, ge=64, le=_MAX_SIDE)
    """The training resolution in pixels, as in your trainer (an area of 1.0 in SimpleTuner is 1000). With rule
    `latentcache` it is shorthand for `area`: 768 means 768*768."""
    step: int = Field(64, ge=8, le=1024, multiple_of=8)
    """Bucket heights and widths are multiples of this, in pixels (kohya: bucket_reso_steps). Unused by `diffusers`."""
    square: bool = False
    """Crop every image to one square. `kohya`: training without enable_bucket; `simpletuner`: crop_aspect square;
    `onetrainer`: aspect ratio bucketing off."""
    min_side: Side = 256
    """`kohya`: min_bucket_reso."""
    max_side: Side = 1024
    """`kohya`: max_bucket_reso. Often 2048 for training at 1024."""
    upscale: bool = True
    """`kohya`: set to false for bucket_no_upscale: small images are cropped but never enlarged."""
    resolution_type: Literal["pixel_area", "pixel"] = "pixel_area"
    """`simpletuner`: whether `resolution` is the side of a square with the bucket's area, or the shorter side."""
    sizes: tuple[tuple[Side, Side], ...] = ()
    """`diffusers`: aspect_ratio_buckets, each [height, width]. Images are stretched to them, which can distort them.
    Empty: every image is cropped to one square."""
    resample: Literal["lanczos", "bilinear"] | None = None
    """`diffusers`: image_interpolation_mode. null: bilinear with `sizes`, else lanczos, like the scripts."""

    @model_validator(mode="before")
    @classmethod
    def _resolution_as_area(cls, value: Any) -> Any:
        if not isinstance(value, Mapping) or "area" in value or value.get("rule", "latentcache") != "latentcache":
            return value
        side = str(value.get("resolution", ""))
        rest = {name: setting for name, setting in value.items() if name != "resolution"}
        return {**rest, "area": int(side) ** 2} if side.isdecimal() else value

    @model_validator(mode="after")
    def _fit_the_rule(self) -> BucketsConfig:
        _check_settings(self, "rule", self.rule, SETTINGS_OF_RULE)
        if self.resolution < self.step and not self.square:
            raise ValueError(f"resolution is {self.resolution}; it must be at least step, {self.step}")
        if self.rule == "latentcache" and self.area < self.step**2:
            raise ValueError(f"area is {self.area}; one bucket of {self.step}x{self.step} needs {self.step**2}")
        sides = (self.step, self.min_side, self.resolution, self.max_side)
        if self.rule == "kohya" and self.upscale and not self.square and sorted(sides) != list(sides):
            raise ValueError("kohya needs step {} <= min_side {} <= resolution {} <= max_side {}".format(*sides))
        return self


class FramesConfig(Section):
    """Which frames of an animation or video become a clip. Files with a single frame stay images."""

    count: int = Field(81, ge=1, le=100_000)
    """Maximum number of frames in a clip. It is rounded down to what the VAE can encode: 1, 5, 9, ... for Wan. A
    shorter file gives as many frames as it has, rounded down the same way."""
    fps: float | None = Field(16.0, gt=0, le=1000, allow_inf_nan=False)
    """Frame rate that the model was trained at. Frames are repeated or dropped to match it. null: use every frame of
    the file, whatever its timing."""
    start: Literal["first", "middle"] = "first"
    """Which part of a longer file to take: its beginning or its middle."""


MAX_CONTROLS = 16
"""Upper bound for the control images of a sample. Edit models read only a few."""


def _one_name(text: str) -> str:
    if "/" in text or "\0" in text:
        raise ValueError(f"{text!r} leads to another folder; use `path` for that")
    return text


class PartConfig(Section):
    """Where to find an additional image of each sample: a file named after the image, or a column."""

    path: UserPath | None = None
    """`folder`, `imagefolder`: folder whose files have the same names as the images: `sub/cat.png` for `sub/cat.jpg`.
    null: next to the images."""
    suffix: Annotated[str, AfterValidator(_one_name)] = ""
    """`folder`, `imagefolder`: appended to the image's name: `_1` finds `cat_1.png` for `cat.jpg`."""
    column: str | None = Field(None, min_length=1)
    """`imagefolder`: column of metadata.jsonl with the file name. `parquet`: column with the encoded image.
    `webdataset`: the part of the name before the extension, `control` for `cat.control.png`."""

    @model_validator(mode="after")
    def _name_the_part(self) -> PartConfig:
        is_by_name = self.path is not None or bool(self.suffix)
        if self.column is not None and is_by_name:
            raise ValueError("give either column, or path and suffix, not both")
        if self.column is None and not is_by_name and not getattr(self, "alpha", False):
            raise ValueError("give path, suffix or column, to say where the files are")
        return self

    def check_kind(self, kind: str) -> None:
        """Raise ValueError if a source of this kind cannot have this part."""
        if self.column is not None and kind == "folder":
            raise ValueError("column cannot be used with a source of kind folder; give path or suffix")
        if (self.path is not None or self.suffix) and kind not in ("folder", "imagefolder"):
            raise ValueError(f"path and suffix cannot be used with a source of kind {kind}; give column")


class ControlConfig(PartConfig):
    """A control image of each sample, such as the picture that an edit starts from. It is cached as latents."""

    area: int | None = Field(None, ge=64, le=1 << 28)
    """Maximum number of pixels in its own bucket. null: resize and crop it like its image."""


class MaskConfig(PartConfig):
    """The mask of each sample: how much each pixel counts in the loss. White counts fully, black not at all."""

    alpha: bool = False
    """Use the image's own alpha channel, like kohya's alpha_mask. An image without one counts everywhere."""
    inpaint: Literal["hard", "soft"] | None = None
    """For inpainting models (9 channels): also cache the latents of the masked image. `hard`: grey wherever the mask
    is at least half white, like diffusers. `soft`: blended with grey in proportion to the mask, like OneTrainer."""

    @model_validator(mode="after")
    def _one_mask(self) -> MaskConfig:
        if self.alpha and (self.path is not None or self.suffix or self.column is not None):
            raise ValueError("alpha is the image's own channel; leave out path, suffix and column")
        return self


def as_list(settings: Any) -> Any:
    """Wrap a single section in a list."""
    return [settings] if isinstance(settings, Mapping) else settings


def as_section(mask: Any) -> Any:
    """Expand the shorthand `mask: alpha` to the section that it stands for."""
    return {"alpha": True} if mask == "alpha" else mask


def part_names(parts: Sequence[PartConfig]) -> tuple[str, ...]:
    """Return the names of these parts in messages: `control 1`, `control 2`, `mask`."""
    return tuple("mask" if isinstance(part, MaskConfig) else f"control {at}" for at, part in enumerate(parts, 1))


_COLUMNS = frozenset({"caption_columns"})
_SETTINGS_OF_KIND: dict[str, frozenset[str]] = {
    "folder": frozenset({"caption_extension", "caption_lines"}),
    "imagefolder": _COLUMNS,
    "webdataset": _COLUMNS,
    "parquet": _COLUMNS | {"image_column"},
}


class SourceConfig(Section):
    """Where a dataset's images and captions are."""

    kind: Literal["folder", "imagefolder", "webdataset", "parquet"] = "folder"
    """Layout of the dataset. `folder`: images with caption files next to them. `imagefolder`: images with a
    metadata.jsonl. `webdataset`: tar files. `parquet`: parquet files."""
    path: UserPath
    """Folder or file of the dataset."""
    caption_extension: str = ".txt"
    """`folder`: extension of the caption files."""
    caption_lines: Literal["each", "joined"] = "each"
    """`folder`: `each`: every non-empty line of a caption file is a caption of its own. `joined`: the lines are joined
    with a space into one caption, like ai-toolkit."""
    caption_columns: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """`imagefolder`, `webdataset`, `parquet`: columns with captions. null: `text` if it exists, else `caption`."""
    image_column: str = "image"
    """`parquet`: column with the encoded image."""

    @model_validator(mode="after")
    def _fit_the_kind(self) -> SourceConfig:
        _check_settings(self, "kind", self.kind, _SETTINGS_OF_KIND)
        return self


class CaptionsConfig(Section):
    """Variants of each caption, cached as further texts: with shuffled tags, dropped tags, or both."""

    variants: int = Field(1, ge=1, le=MAX_VARIANTS)
    """Texts per caption. The first is the caption itself; the others are made from it by the settings below."""
    shuffle: bool = False
    """Shuffle the tags, like kohya's shuffle_caption."""
    keep: int = Field(0, ge=0)
    """How many leading tags stay in place (kohya: keep_tokens, OneTrainer: keep_tags_count)."""
    keep_separator: str | None = Field(None, min_length=1)
    """Alternative to `keep`, e.g. `|||`: the text before the first one stays first, and the text after a second one
    stays last (kohya: keep_tokens_separator)."""
    separator: str = Field(",", min_length=1)
    """Separates the tags (kohya: caption_separator). Variants are joined with a comma and a space."""
    drop: float = Field(0.0, ge=0, lt=1)
    """Probability of dropping each tag that is not kept (kohya: caption_tag_dropout_rate)."""
    secondary_separator: str | None = Field(None, min_length=1)
    """Joins tags that must stay together (kohya: secondary_separator). Variants show `separator` in its place."""
    weights: Annotated[tuple[Share, ...], Field(min_length=1)] | None = None
    """Relative frequency of each of a sample's captions when one is drawn at random, in the order of the lines or
    `caption_columns`. null: all equally often."""
    seed: int = 0
    """Seed of the shuffling and dropping. A different seed gives different variants."""

    @model_validator(mode="after")
    def _variants_differ(self) -> CaptionsConfig:
        if self.weights is not None and not any(self.weights):
            raise ValueError("weights are all 0, but one caption has to be drawn: raise one of them")
        if self.keep and self.keep_separator:
            raise ValueError("give keep or keep_separator, not both")
        if (self.variants > 1) != (self.shuffle or self.drop > 0):
            raise ValueError(f"variants is {self.variants}; give 2 or more together with shuffle or drop, or neither")
        unused = [name for name in ("keep", "keep_separator", "secondary_separator") if getattr(self, name)]
        if self.variants == 1 and unused:
            raise ValueError(f"{unused[0]} has no effect while variants is 1, the caption itself: use 2 or more")
        return self


class ImagesConfig(Section):
    """How images are decoded, and which are refused."""

    alpha_colour: str = Field("#ffffff", pattern=r"^#[0-9a-fA-F]{6}$")
    """Background colour for transparent images (#rrggbb)."""
    animated: Literal["refuse", "first-frame"] = "refuse"
    """What to do with animations (GIF, PNG, WebP, AVIF) and with TIFFs of several pages, even if the second page is
    only a thumbnail. Further pictures in an MPO are ignored."""
    max_pixels: int = Field(100_000_000, ge=1)
    """Images with more pixels are refused before decoding (JPEG XL: after it). 100 megapixels are enough for
    medium-format cameras, and take 300 MB per decoding thread. Pillow's own limit is 178,956,970."""
    max_aspect: float = Field(8.0, ge=1.0)
    """Images with a larger aspect ratio (long side / short side) are refused: a bucket would crop away too much."""
    min_side: int = Field(256, ge=1)
    """Images whose short side is smaller, in pixels, are refused."""


class DatasetConfig(Section):
    """A dataset: where its samples are, and how they are prepared."""

    name: Name
    """Name of the dataset and of its manifest: letters, digits, dashes and underscores."""
    role: Literal["train", "validation"] = "train"
    """What the dataset is for: training, or measuring the validation loss."""
    repeats: int = Field(1, ge=1, le=MAX_REPEATS)
    """How often an epoch visits each sample. Takes no space; a change encodes nothing."""
    loss_weight: Share = 1.0
    """Weight of each sample in the loss, returned with every batch. Often below 1 for class images."""
    source: SourceConfig
    """Where the samples are, and in which layout."""
    buckets: BucketsConfig = BucketsConfig()
    """The sizes that images are resized and cropped to."""
    resolutions: tuple[Annotated[int, Field(ge=64, le=_MAX_SIDE)], ...] = ()
    """Shorthand for the same dataset at several resolutions: `[512, 1024]` makes NAME-512 and NAME-1024, which differ
    in `buckets.resolution` alone. Captions are encoded once."""
    images: ImagesConfig = ImagesConfig()
    """How images are decoded, and which are refused."""
    frames: FramesConfig | None = None
    """For video models: animations (GIF, PNG, WebP) and videos become clips. null: every file is a single image, and
    `images.animated` decides about animations."""
    captions: CaptionsConfig = CaptionsConfig()
    """Caption variants, and how often each of several captions is drawn."""
    flip: bool = False
    """Also cache every image flipped horizontally, as an entry of its own. Doubles the time and space for images."""
    variations: int = Field(1, ge=1, le=1000)
    """Crops per image, each an entry of its own. The first is the crop of `buckets`, the others are at random
    positions. An image that fits its bucket exactly has only one. Masks, and control images with the image's
    proportions, are cropped alike."""
    variations_seed: int = 0
    """Seed of the random crop positions, together with the image's bytes and the number of the crop."""
    control: Annotated[tuple[ControlConfig, ...], BeforeValidator(as_list), Field(max_length=MAX_CONTROLS)] = ()
    """Control images of each sample, such as the picture that an edit starts from. A single one needs no list."""
    mask: Annotated[MaskConfig | None, BeforeValidator(as_section)] = None
    """How much each pixel counts in the loss. `mask: alpha` uses the image's alpha channel."""

    @property
    def part_files(self) -> tuple[PartConfig, ...]:
        """The parts with files or columns of their own: control images, then the mask."""
        return self.control if self.mask is None or self.mask.alpha else (*self.control, self.mask)

    def of_each_resolution(self) -> Iterator[DatasetConfig]:
        """Yield one dataset for each of `resolutions`, or the dataset itself if it lists none."""
        if not self.resolutions:
            yield self
        settings = self.model_dump(exclude_unset=True, exclude={"resolutions"})
        for side in self.resolutions:
            buckets = {**settings.get("buckets", {}), "resolution": side}
            yield DatasetConfig.model_validate({**settings, "name": f"{self.name}-{side}", "buckets": buckets})

    @model_validator(mode="after")
    def _resolutions_fit_the_buckets(self) -> DatasetConfig:
        if self.resolutions and {"area", "resolution", "sizes"} & self.buckets.model_fields_set:
            raise ValueError("resolutions replaces area, resolution and sizes of buckets: remove those")
        if self.resolutions:
            list(self.of_each_resolution())  # reports their errors under the number of this section
        return self

    @model_validator(mode="after")
    def _parts_fit_the_source(self) -> DatasetConfig:
        for part in self.part_files:
            part.check_kind(self.source.kind)
        weights = self.captions.weights
        num_captions = 1 if self.source.caption_lines == "joined" else len(self.source.caption_columns or ())
        if weights is not None and num_captions not in (0, len(weights)):
            found = f"captions.weights has {len(weights)} values, but a sample has {counted(num_captions, 'caption')}"
            raise ValueError(f"{found}: give one for each")
        if self.frames is not None and (self.control or self.mask):
            raise ValueError("frames makes clips, which cannot have control images or masks; remove one of them")
        columns = [part.column for part in self.part_files]
        if self.source.kind == "webdataset":  # extensions in a tar are case-insensitive
            columns = [column and column.lower() for column in columns]
        files = [(part.path, part.suffix, column) for part, column in zip(self.part_files, columns, strict=True)]
        if len(set(files)) < len(files):
            raise ValueError("two of control and mask are the same file; give one another suffix, path or column")
        return self


class ModelConfig(Section):
    """The model whose VAE and text encoders fill the cache."""

    family: FamilyName | None = None
    """The model family. null: read from model_index.json. A single file or a folder without one is treated as
    `sdxl`, and the report says so."""
    path: UserText = DEFAULT_REPOSITORY
    """The model: hub id, diffusers folder, or .safetensors checkpoint. For trials without a download: `tiny-photos` (a
    tiny SDXL that knows the quickstart's photos) or `tiny` (the same with random weights)."""
    vae: UserText | None = None
    """VAE to use instead of the model's own: hub id, folder or .safetensors file."""
    config: UserText | None = None
    """For a .safetensors checkpoint: folder or hub id with its configs and tokenizers. null: diffusers infers it."""
    variant: str | None = None
    """For a hub id or folder: which weight files to load, e.g. `fp16`."""
    revision: str | None = Field(None, min_length=1)
    """For a hub id: commit, tag or branch of `path`. null: the current `main`; a push that changes the weights then
    encodes everything again."""
    denoiser: UserText | None = None
    """For a hub id or folder with several denoisers: subfolder of the one to train and validate. With a
    `boundary_ratio` (Wan 2.2), `transformer_2` handles the timesteps below it. null: the family's default, `unet` or
    `transformer`."""

    @model_validator(mode="after")
    def _revision_of_the_hub(self) -> ModelConfig:
        is_local = self.path.count("/") != 1 or self.path.endswith(".safetensors") or os.path.exists(self.path)
        if self.revision is not None and is_local:
            raise ValueError(f"revision is {self.revision!r}, but {self.path} is not a hub id (owner/name): remove it")
        return self


def _word_none(value: Any) -> Any:
    """Accept null for `none`: the flag `--encode.text none` arrives as null."""
    return "none" if value is None else value


class EncodeConfig(Section):
    """How images and captions are encoded."""

    text: Annotated[Literal["all", "none"], BeforeValidator(_word_none)] = "all"
    """`none` (or null): cache latents only, for training the text encoders. Batches then have the captions as text, and
    validation prompts are not encoded either."""
    device: str = "auto"
    """Where the encoders run: `auto` (the accelerator if there is one), `cpu`, `cuda`, `cuda:1`, `mps`, ..."""
    vae_dtype: DtypeName = "auto"
    """Compute dtype of the VAE. `auto`: float32 on the CPU, and for VAEs that can overflow in float16."""
    text_dtype: DtypeName = "auto"
    """Compute dtype of the text encoders. `auto`: float32 on the CPU; on an accelerator float16 for families with CLIP
    only, else bfloat16."""
    store_dtype: DtypeName = "auto"
    """Dtype on disk. `auto`: the compute dtype, unchanged. float16 halves the size of a float32 cache."""
    text_store_dtype: Annotated[Literal["auto", "float32", "float16", "bfloat16", "float8_e4m3fn"], Alias] = "auto"
    """Dtype of text embeddings on disk. `auto`: `store_dtype`; if that is auto too, bfloat16 for encoders larger than
    CLIP. float8_e4m3fn halves it again for families that have to store padding; their page states the error."""
    max_length: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of tokens in a text, like the pipeline's max_sequence_length. null: the family's default. SDXL and
    SD 1.5 also accept 150 and 225, like kohya's max_token_length: embeddings then have 152 or 227 rows."""
    padding: Literal["auto", "drop", "keep"] = "auto"
    """Whether padding tokens are stored. `drop`: no; batches are padded again on read. `keep`: yes. `auto`: drop if
    that gives the same result."""
    batch_size: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """Images per VAE call. Halved automatically when memory runs out."""
    image_output: Literal["auto", "moments", "mean", "sample"] = "auto"
    """What is stored of the VAE's posterior. `moments`: mean and variance; every read draws new latents. `mean`: the
    mean, half the size. `sample`: one seeded draw. `auto`: the mean for families trained with it, else moments."""
    clip_skip: int = Field(0, ge=0)
    """SDXL and SD 1.5: how many of CLIP's last layers to skip, counted like diffusers (0 is the model's default)."""
    seed: int = 0
    """Seed of the draw for `image_output: sample`."""
    num_workers: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """Number of threads that decode images. `auto`: one per core."""


DropoutTo = Literal["empty", "zeros"]
"""What replaces a dropped caption: the cached embedding of the empty text, or zeros."""
Crops = Literal["first", "random"]
"""Which crop to read: that of the bucket rule, or a random one of those cached (`variations` of a dataset)."""


class TrainConfig(Section):
    """What training chooses at each visit of a sample, like the options of `LatentDataset`. Changes encode nothing."""

    caption: Literal["random"] | Annotated[int, Field(ge=0)] = "random"
    """`random`: draw one of the sample's captions and variants. A number: always that caption, counted from 0."""
    caption_dropout: float = Field(0.0, ge=0, le=1)
    """Share of visits without a caption, from 0 to 1, so that the model learns classifier-free guidance."""
    dropout_to: DropoutTo = "empty"
    """What replaces a dropped caption: the embedding of the empty text, like most trainers, or zeros."""
    flips: Literal["both", "random", "none"] = "both"
    """For datasets with `flip: true`. `both`: an epoch has the image and its mirror image, and is twice as long.
    `random`: each visit draws one of them. `none`: never mirrored."""
    crops: Crops = "random"
    """For datasets with `variations`: draw a crop at each visit, or always take that of the bucket rule."""


class ValidationConfig(Section):
    """How the validation loss is measured, and which images are sampled."""

    prompts: tuple[Prompt, ...] = ()
    """Prompts for sample images. They are cached too, so that sampling needs no text encoder."""
    negative_prompt: Prompt | None = ""
    """Negative prompt for sample images. null: what the pipeline uses without one (zeros, or the empty prompt). The
    empty prompt is always cached."""
    path: UserPath = Path("validation")
    """Folder for the results, with a subfolder per validated step."""
    num_timesteps: int = Field(8, ge=1, le=1000)
    """At how many timesteps per sample the loss is measured: one from each of as many equal parts of the schedule."""
    snr_gamma: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Weight the loss by min-SNR with this gamma (5 is common). null: all timesteps count equally."""
    batch_size: int = Field(4, ge=1)
    """Batch size for measuring the loss. Lower it if memory runs out."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the loss's noise and timesteps, and of the first sample image; image n uses seed + n."""
    height: int = Field(1024, ge=64, multiple_of=8)
    """Height of sample images, in pixels."""
    width: int = Field(1024, ge=64, multiple_of=8)
    """Width of sample images, in pixels."""
    num_inference_steps: int = Field(25, ge=1)
    """Number of sampling steps."""
    guidance_scale: float = Field(5.0, ge=0)
    """CFG scale, as in diffusers. For most models the negative prompt is used above 1."""
    scheduler: str | None = None
    """Sampler: a scheduler class of diffusers, e.g. `DPMSolverMultistepScheduler`. null: the model's own."""


class RayConfig(Section):
    """What a run on a Ray cluster requests (`latentcache precache CONFIG --ray auto`)."""

    num_gpus: Literal["auto"] | Share = "auto"
    """GPUs per encoder. With a fraction several encoders share a GPU. `auto`: 0 if `encode.device` is `cpu`, else 1."""
    accelerator_type: str | None = None
    """Use only GPUs of this type, by Ray's name for it: `A100`, `H100`, `L4`, ..."""
    num_cpus: Share = 1.0
    """CPUs per encoder, which also decodes images (with `encode.num_workers` threads). An encoder on the CPU computes
    with as many threads."""
    max_encoders: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """Number of encoders. More than the cluster has room for makes an autoscaling cluster grow. `auto`: as many as fit
    now; without a GPU, one per node."""
    wait_s: float = Field(180.0, gt=0, allow_inf_nan=False)
    """How many seconds to wait for room for an encoder before the run fails. Raise it if machines must start first."""


class Config(Section):
    """All settings of a run."""

    cache: CacheConfig = CacheConfig()
    datasets: tuple[DatasetConfig, ...]
    model: ModelConfig = ModelConfig()
    encode: EncodeConfig = EncodeConfig()
    train: TrainConfig = TrainConfig()
    validation: ValidationConfig = ValidationConfig()
    ray: RayConfig = RayConfig()

    @field_validator("datasets")
    @classmethod
    def _one_for_each_resolution(cls, datasets: tuple[DatasetConfig, ...]) -> tuple[DatasetConfig, ...]:
        return tuple(each for dataset in datasets for each in dataset.of_each_resolution())

    @model_validator(mode="after")
    def _names_are_unique(self) -> Config:
        names = [dataset.name for dataset in self.datasets]
        if not names:
            raise ValueError("datasets is empty; give at least one dataset")
        for name in names:
            if name.lower().startswith(PROMPTS_PREFIX):
                raise ValueError(f"dataset {name!r}: names that start with {PROMPTS_PREFIX!r} are reserved: rename it")
        # Each name is a file name, and some file systems ignore case.
        twice = sorted({name for name in names if [n.lower() for n in names].count(name.lower()) > 1})
        if twice:
            raise ValueError(f"datasets need different names; used more than once: {', '.join(twice)}")
        return self
