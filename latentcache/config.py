"""All settings, as one schema: unknown ones are errors, and nothing changes once it was checked.

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
"""Of the environment: the token of a service that allows reading, and the one that allows writing too."""
PROMPTS_PREFIX = "validation-prompts"
"""First part of the names of the manifests of cached validation prompts. No dataset's name may have it."""
MAX_REPEATS = 1_000_000
"""Upper bound for `repeats`: larger values are typos, and an epoch's order would not fit into memory."""
MAX_VARIANTS = 1000
"""Upper bound for the texts that are made of one caption: each is an entry."""
RETRY_S = 30.0
"""For so long a request is tried again that is not answered."""

WINDOWS_DEVICE = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])\Z", re.IGNORECASE)


def _no_device(name: str) -> str:
    if WINDOWS_DEVICE.match(name):
        raise ValueError(f"{name!r} names a device under Windows, where no file can have it: choose another name")
    return name


Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"), AfterValidator(_no_device)]
UserText = Annotated[str, AfterValidator(os.path.expanduser)]
"""A path or a hub id; `~` is the home directory."""
UserPath = Annotated[Path, AfterValidator(expanded)]
DTYPE_ALIASES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
Alias = BeforeValidator(lambda name: DTYPE_ALIASES.get(name, name) if isinstance(name, str) else name)
DtypeName = Annotated[Literal["auto", "float32", "float16", "bfloat16"], Alias]
Share = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def _encodable(prompt: str) -> str:
    prompt.encode()  # a lone surrogate is a ValueError: tokenizers take UTF-8 only
    return prompt


Prompt = Annotated[str, AfterValidator(_encodable)]


class Section(BaseModel):
    """A section of the config. Docstrings of its fields are their descriptions, in the reference and in `--help`."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class RemoteOptions(TypedDict, total=False):
    """How a bucket or a service is used: see `CacheConfig`. `token` is by default that of LATENTCACHE_TOKEN."""

    token: str | None
    local: str | Path | None
    local_max_bytes: int | None
    retry_s: float


def check_options(options: Mapping[str, Any], function: Callable[..., Any]) -> None:
    """TypeError for an option that is not in RemoteOptions, with what there is that is spelled alike."""
    for name in options.keys() - RemoteOptions.__annotations__.keys():
        known = [*inspect.signature(function).parameters, *RemoteOptions.__annotations__]
        near = difflib.get_close_matches(name, known, n=1)
        asked = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(known)}"
        raise TypeError(f"{function.__qualname__.split('.')[0]} has no option {name!r}{asked}")


class CacheConfig(Section):
    """Where the cache is, and which entries may be used."""

    # A path may be a URL into which somebody pasted a password.
    model_config = ConfigDict(hide_input_in_errors=True)

    path: CacheLocation = Path("cache", DEFAULT)
    """Directory of the cache, the URL of a bucket (`s3://BUCKET/PREFIX`, `gs://`, `az://`), or of a service
    (`latentcache serve`). Several datasets, models and runs may share one."""
    salt: str = ""
    """Part of every key. Another salt makes all entries that exist a miss."""
    max_bytes: Annotated[ByteSize, Field(ge=0)] | None = None
    """Bytes of packs, e.g. 50GB or 50GiB. After a run `precache` removes what is beyond: of what no manifest refers to,
    the longest unused first. Default: nothing is removed."""
    unverified: bool = False
    """Train and validate on imported entries too that were not verified."""
    local: UserPath | None = None
    """Where the cache is elsewhere: a folder of this machine for the packs that are read. Processes may share it.
    Default: one in the user's cache folder (`XDG_CACHE_HOME` or `~/.cache`), of this cache alone."""
    local_max_bytes: Annotated[ByteSize, Field(ge=0)] | None = None
    """Bytes of packs of one cache in `local`, e.g. 50GB. Beyond it the longest unused go first. Default: nothing is
    removed. Random order needs the room of all packs that are read: with less, packs are fetched again and again.
    Pack order (`LatentLoader`) does not."""
    retry_s: float = Field(RETRY_S, gt=0, allow_inf_nan=False)
    """Where the cache is a bucket or a service: for so long a request is tried again that is not answered."""

    def remote_options(self) -> RemoteOptions:
        """How a bucket or a service is used. The token is not part of a config: it comes from LATENTCACHE_TOKEN."""
        return RemoteOptions(local=self.local, local_max_bytes=self.local_max_bytes, retry_s=self.retry_s)


def location_of(value: str | os.PathLike[str] | CacheConfig) -> Path | str:
    """The directory (a Path) or the URL (text) that a caller gives. StoreError for what `cache_location` refuses."""
    if isinstance(value, CacheConfig):
        return value.path
    try:
        return cache_location(os.fspath(value))
    except ValueError as error:
        raise StoreError(str(error)) from error


RuleName = Literal["latentcache", "kohya", "simpletuner", "onetrainer", "diffusers"]
_SETTINGS_OF_RULE: dict[str, frozenset[str]] = {
    "latentcache": frozenset({"area", "step", "max_aspect"}),
    "kohya": frozenset({"resolution", "step", "square", "min_side", "max_side", "upscale"}),
    "simpletuner": frozenset({"resolution", "step", "square", "resolution_type"}),
    "onetrainer": frozenset({"resolution", "step", "square"}),
    "diffusers": frozenset({"resolution", "sizes", "resample"}),
}
_MAX_SIDE = 16384

Side = Annotated[int, Field(ge=8, le=_MAX_SIDE)]


def settings_of(rule: str) -> frozenset[str]:
    """The names of the settings that a rule has."""
    return _SETTINGS_OF_RULE[rule]


def _check_settings(section: Section, choice: str, chosen: str, settings: Mapping[str, frozenset[str]]) -> None:
    """ValueError for a setting that another value of this choice has: it would have no effect."""
    known = settings[chosen]
    for name in sorted(frozenset().union(*settings.values()) - known):
        if getattr(section, name) != type(section).model_fields[name].default:
            raise ValueError(f"{name} is no setting of {choice} {chosen}; it has {', '.join(sorted(known))}")


class BucketsConfig(Section):
    """The sizes that images are resized and cropped to. Each rule has some of these settings."""

    rule: RuleName = "latentcache"
    """Whose buckets. A trainer can use exported latents only if they have the buckets that it would make itself."""
    area: int = Field(1024 * 1024, ge=64, le=_MAX_SIDE**2)
    """`latentcache`: largest number of pixels of a bucket; 1048576 for models of 1024x1024."""
    max_aspect: float = Field(2.0, ge=1.0, le=64.0)
    """`latentcache`: longest side of a bucket divided by its shortest, at most."""
    resolution: int = Field(1024, ge=64, le=_MAX_SIDE)
    """All other rules: the trainer's resolution, the side of its square in pixels. An area of 1.0 in SimpleTuner is
    1000. `latentcache`: without `area`, the side of a square of that area."""
    step: int = Field(64, ge=8, le=1024, multiple_of=8)
    """Height and width of a bucket are multiples of this many pixels. `diffusers` has none."""
    square: bool = False
    """`kohya` (no enable_bucket), `simpletuner` (crop_aspect square), `onetrainer` (no aspect_ratio_bucketing): every
    image is cropped to one square."""
    min_side: Side = 256
    """`kohya`: min_bucket_reso."""
    max_side: Side = 1024
    """`kohya`: max_bucket_reso. Trainings at 1024 often have 2048."""
    upscale: bool = True
    """`kohya`: false is bucket_no_upscale: small images are cropped and never enlarged."""
    resolution_type: Literal["pixel_area", "pixel"] = "pixel_area"
    """`simpletuner`: whether the resolution is that of a square of the bucket's area, or the shorter side."""
    sizes: tuple[tuple[Side, Side], ...] = ()
    """`diffusers`: aspect_ratio_buckets, each [height, width]; images are resized to them, also out of proportion.
    Without any, every image is cropped to one square."""
    resample: Literal["lanczos", "bilinear"] | None = None
    """`diffusers`: image_interpolation_mode. null: lanczos, and bilinear for `sizes`, as the scripts have it."""

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
        _check_settings(self, "rule", self.rule, _SETTINGS_OF_RULE)
        if self.resolution < self.step and not self.square:
            raise ValueError(f"resolution is {self.resolution}; it must be at least step, {self.step}")
        if self.rule == "latentcache" and self.area < self.step**2:
            raise ValueError(f"area is {self.area}; one bucket of {self.step}x{self.step} needs {self.step**2}")
        sides = (self.step, self.min_side, self.resolution, self.max_side)
        if self.rule == "kohya" and self.upscale and not self.square and sorted(sides) != list(sides):
            raise ValueError("kohya needs step {} <= min_side {} <= resolution {} <= max_side {}".format(*sides))
        return self


class FramesConfig(Section):
    """Which frames of an animated file become a clip. Files with one frame stay images."""

    count: int = Field(81, ge=1, le=100_000)
    """Frames of a clip, at most. What the VAE would drop is left out before: it takes 1, 5, 9, ... where one latent
    frame is made of four. A shorter file gives the most that it has."""
    fps: float | None = Field(16.0, gt=0, le=1000, allow_inf_nan=False)
    """Frames a second, as the model was trained with: frames of the file are repeated or left out. null: each frame of
    the file, whatever its time."""
    start: Literal["first", "middle"] = "first"
    """Where a clip lies in a longer file: at its beginning, or in its middle."""


MAX_CONTROLS = 16
"""Of a sample. Models of edits read some few."""


def _one_name(text: str) -> str:
    if "/" in text or "\0" in text:
        raise ValueError(f"{text!r} leads to another folder; give `path`")
    return text


class PartConfig(Section):
    """Where a part of each sample is: a file that is named as the image is, or a column."""

    path: UserPath | None = None
    """`folder`, `imagefolder`: a folder with files that are named as the images: `sub/cat.png` for `sub/cat.jpg`. null:
    the folder of the images."""
    suffix: Annotated[str, AfterValidator(_one_name)] = ""
    """`folder`, `imagefolder`: what the part's name has more than the image's: `_1` for `cat_1.png`."""
    column: str | None = Field(None, min_length=1)
    """`imagefolder`: the column of metadata.jsonl with the part's file_name. `parquet`: the column with the encoded
    image. `webdataset`: what stands before the ending: `control` for `cat.control.png`."""

    @model_validator(mode="after")
    def _name_the_part(self) -> PartConfig:
        is_by_name = self.path is not None or bool(self.suffix)
        if self.column is not None and is_by_name:
            raise ValueError("give column, or path and suffix, not both")
        if self.column is None and not is_by_name and not getattr(self, "alpha", False):
            raise ValueError("give path, suffix or column: where it is")
        return self

    def check_kind(self, kind: str) -> None:
        """ValueError where a source of this kind has no such part."""
        if self.column is not None and kind == "folder":
            raise ValueError("column is no setting for a source of kind folder; give path or suffix")
        if (self.path is not None or self.suffix) and kind not in ("folder", "imagefolder"):
            raise ValueError(f"path and suffix are no settings for a source of kind {kind}; give column")


class ControlConfig(PartConfig):
    """A control image of each sample: what an edit begins with. It is stored as latents."""

    area: int | None = Field(None, ge=64, le=1 << 28)
    """Pixels of its own bucket at most, in the steps of `buckets`. null: it is resized and cropped as its image is."""


class MaskConfig(PartConfig):
    """The mask of each sample: how much each place counts in the loss. White counts."""

    alpha: bool = False
    """Take the image's own alpha channel, as kohya's alpha_mask does. An image without one counts everywhere."""
    inpaint: Literal["hard", "soft"] | None = None
    """For denoisers that inpaint (9 channels): also cache the latents of the image without what the mask covers.
    `hard`: grey where the mask is half white or more, as diffusers' pipelines have it. `soft`: the whiter, the greyer,
    as OneTrainer has it."""

    @model_validator(mode="after")
    def _one_mask(self) -> MaskConfig:
        if self.alpha and (self.path is not None or self.suffix or self.column is not None):
            raise ValueError("alpha is the image's own channel; leave out path, suffix and column")
        return self


def as_list(settings: Any) -> Any:
    """One section in place of a list of sections is a list of one."""
    return [settings] if isinstance(settings, Mapping) else settings


def as_section(mask: Any) -> Any:
    """The word `alpha` in place of a section is the section with `alpha`."""
    return {"alpha": True} if mask == "alpha" else mask


def part_names(parts: Sequence[PartConfig]) -> tuple[str, ...]:
    """The names of parts in messages: `control 1`, `control 2`, `mask`."""
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
    """`folder`: images with caption files next to them. `imagefolder`: metadata.jsonl. `webdataset`: tar. `parquet`."""
    path: UserPath
    """Folder or file of the dataset."""
    caption_extension: str = ".txt"
    """`folder` only: suffix of the caption files."""
    caption_lines: Literal["each", "joined"] = "each"
    """`folder` only: each line of a caption file that is not empty is a caption; or all are one, joined by a space, as
    ai-toolkit encodes them."""
    caption_columns: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """`imagefolder`, `webdataset`, `parquet`: columns that hold captions. Default: `text`, else `caption`."""
    image_column: str = "image"
    """`parquet` only: the column that holds the encoded image."""

    @model_validator(mode="after")
    def _fit_the_kind(self) -> SourceConfig:
        _check_settings(self, "kind", self.kind, _SETTINGS_OF_KIND)
        return self


class CaptionsConfig(Section):
    """Variants of each caption, whose embeddings are cached beside its own: its tags shuffled, and some dropped."""

    variants: int = Field(1, ge=1, le=MAX_VARIANTS)
    """Texts of each caption. Number 0 is the caption itself; each further one is made of it by the settings below."""
    shuffle: bool = False
    """Shuffle the tags: sd-scripts' shuffle_caption."""
    keep: int = Field(0, ge=0)
    """So many first tags stay where they are: keep_tokens, OneTrainer's keep_tags_count."""
    keep_separator: str | None = Field(None, min_length=1)
    """In place of `keep`, e.g. `|||`: what stands before the first one stays first, and what stands after a second one
    stays last: keep_tokens_separator."""
    separator: str = Field(",", min_length=1)
    """What divides tags: caption_separator. They are joined again by a comma and a space."""
    drop: float = Field(0.0, ge=0, lt=1)
    """Each tag that does not stay is left out with this probability: caption_tag_dropout_rate."""
    secondary_separator: str | None = Field(None, min_length=1)
    """Divides tags that stay together; in a variant `separator` takes its place."""
    weights: Annotated[tuple[Share, ...], Field(min_length=1)] | None = None
    """Where one of a sample's captions is drawn: how often each, in their order (of `caption_columns`, of the lines of
    a file). null: all alike."""
    seed: int = 0
    """Of the variants. Another seed gives other texts."""

    @model_validator(mode="after")
    def _variants_differ(self) -> CaptionsConfig:
        if self.weights is not None and not any(self.weights):
            raise ValueError("weights are all 0, but one caption has to be drawn: give one of them more")
        if self.keep and self.keep_separator:
            raise ValueError("give keep or keep_separator, not both")
        if (self.variants > 1) != (self.shuffle or self.drop > 0):
            raise ValueError(f"variants is {self.variants}; give 2 or more together with shuffle or drop, or neither")
        unused = [name for name in ("keep", "keep_separator", "secondary_separator") if getattr(self, name)]
        if self.variants == 1 and unused:
            raise ValueError(f"variants is 1, the caption itself, which {unused[0]} does not change: give 2 or more")
        return self


class ImagesConfig(Section):
    """How images are decoded, and which are refused."""

    alpha_colour: str = Field("#ffffff", pattern=r"^#[0-9a-fA-F]{6}$")
    """Transparent images are composited on this colour (#rrggbb)."""
    animated: Literal["refuse", "first-frame"] = "refuse"
    """What to do with an animation (GIF, PNG, WebP, AVIF) and with the pages of a TIFF, of which a thumbnail is one.
    Further pictures of an MPO do not count."""
    max_pixels: int = Field(100_000_000, ge=1)
    """Images with more pixels are refused before they are decoded, a JPEG XL after it. 100 megapixels let medium-format
    cameras pass, and cost 300 MB per decoding thread. Pillow itself refuses more than 178,956,970."""
    max_aspect: float = Field(8.0, ge=1.0)
    """Images longer than this many times their shorter side are refused: the crop to a bucket keeps too little."""
    min_side: int = Field(256, ge=1)
    """Images with a shorter side are refused, in pixels."""


class DatasetConfig(Section):
    """One dataset."""

    name: Name
    """Name of the manifest: letters, digits, dash, underscore."""
    role: Literal["train", "validation"] = "train"
    """What the dataset is for; stored in its manifest."""
    repeats: int = Field(1, ge=1, le=MAX_REPEATS)
    """How often an epoch visits each sample. Costs no space."""
    loss_weight: Share = 1.0
    """How much a sample counts in the loss: a batch has it for each row. Class images often count less than 1."""
    source: SourceConfig
    """Where the samples are."""
    buckets: BucketsConfig = BucketsConfig()
    """The sizes that images are resized and cropped to."""
    resolutions: tuple[Annotated[int, Field(ge=64, le=_MAX_SIDE)], ...] = ()
    """Short for several datasets of this one source: `[512, 1024]` makes NAME-512 and NAME-1024, each with that
    `buckets.resolution`. Captions are encoded once. Other settings are the same for all of them."""
    images: ImagesConfig = ImagesConfig()
    """How images are decoded, and which are refused."""
    frames: FramesConfig | None = None
    """Families of video: animated files (GIF, PNG, WebP) and videos become clips of these frames. null: each image is
    one frame, and `images.animated` says what becomes of animated ones."""
    captions: CaptionsConfig = CaptionsConfig()
    """Variants of each caption, and how often each of several captions is drawn."""
    flip: bool = False
    """Also cache each image mirrored left to right, as its own entry."""
    variations: int = Field(1, ge=1, le=1000)
    """Crops of each image. The first is that of `buckets`; the others lie anywhere in the resized image, each an entry
    of its own. An image that its bucket takes whole has one. Its mask and control images of its proportions move
    along."""
    variations_seed: int = 0
    """Seed of the places of further crops, which also depend on the image's bytes and on the number of the crop."""
    control: Annotated[tuple[ControlConfig, ...], BeforeValidator(as_list), Field(max_length=MAX_CONTROLS)] = ()
    """Control images of each sample, such as what an edit begins with; one may stand without a list."""
    mask: Annotated[MaskConfig | None, BeforeValidator(as_section)] = None
    """How much each place of the image counts in the loss; `alpha`: the image's alpha channel."""

    @property
    def part_files(self) -> tuple[PartConfig, ...]:
        """The further parts that have files or columns of their own: control images, then the mask."""
        return self.control if self.mask is None or self.mask.alpha else (*self.control, self.mask)

    def of_each_resolution(self) -> Iterator[DatasetConfig]:
        """The datasets that `resolutions` stands for; this one itself without any."""
        if not self.resolutions:
            yield self
        settings = self.model_dump(exclude_unset=True, exclude={"resolutions"})
        for side in self.resolutions:
            buckets = {**settings.get("buckets", {}), "resolution": side}
            yield DatasetConfig.model_validate({**settings, "name": f"{self.name}-{side}", "buckets": buckets})

    @model_validator(mode="after")
    def _resolutions_fit_the_buckets(self) -> DatasetConfig:
        if self.resolutions and {"area", "resolution", "sizes"} & self.buckets.model_fields_set:
            raise ValueError(
                "resolutions sets the one of each dataset; leave out area, resolution and sizes of buckets"
            )
        if self.resolutions:
            list(self.of_each_resolution())  # the faults of each, under the number of this section
        return self

    @model_validator(mode="after")
    def _parts_fit_the_source(self) -> DatasetConfig:
        for part in self.part_files:
            part.check_kind(self.source.kind)
        weights = self.captions.weights
        num_captions = 1 if self.source.caption_lines == "joined" else len(self.source.caption_columns or ())
        if weights is not None and num_captions not in (0, len(weights)):
            met = f"captions.weights has {len(weights)}, but a sample has {counted(num_captions, 'caption')}"
            raise ValueError(f"{met}: give one for each")
        if self.frames is not None and (self.control or self.mask):
            raise ValueError("frames makes clips, which have no control images and no masks; leave one out")
        columns = [part.column for part in self.part_files]
        if self.source.kind == "webdataset":  # whose endings have no case
            columns = [column and column.lower() for column in columns]
        files = [(part.path, part.suffix, column) for part, column in zip(self.part_files, columns, strict=True)]
        if len(set(files)) < len(files):
            raise ValueError("two of control and mask are the same file; give another suffix, path or column")
        return self


class ModelConfig(Section):
    """The model whose encoders are used."""

    family: FamilyName | None = None
    """Which model family the parts belong to. null: that of the folder's model_index.json; else the first one,
    which the run says."""
    path: UserText = DEFAULT_REPOSITORY
    """Hub id, diffusers folder, one .safetensors checkpoint, `tiny-photos` (a tiny model in the package, which knows
    the quickstart's photos), or `tiny` (one of the default family with random weights, for trials)."""
    vae: UserText | None = None
    """A VAE to use in place of the model's own: hub id, folder or .safetensors file."""
    config: UserText | None = None
    """For a .safetensors checkpoint: folder or hub id with its configs and tokenizers. Default: diffusers infers it."""
    variant: str | None = None
    """For a hub id or folder: the variant of the weight files, e.g. `fp16`."""
    revision: str | None = Field(None, min_length=1)
    """For a hub id: the commit, tag or branch of `path`. null: what `main` is at the time, so that a push to it may
    encode all again."""
    denoiser: UserText | None = None
    """For a hub id or folder with several denoisers: the folder in it of the one that is trained and validated. Where
    the model's `boundary_ratio` divides the timesteps, `transformer_2` has those below it. null: the family's usual
    one, `unet` or `transformer`."""

    @model_validator(mode="after")
    def _revision_of_the_hub(self) -> ModelConfig:
        is_local = self.path.count("/") != 1 or self.path.endswith(".safetensors") or os.path.exists(self.path)
        if self.revision is not None and is_local:
            raise ValueError(f"revision is {self.revision!r}, but {self.path} is no hub id (owner/name): leave it out")
        return self


def _word_none(value: Any) -> Any:
    """A flag's `none` arrives as null, as that of a setting that may be left out."""
    return "none" if value is None else value


class EncodeConfig(Section):
    """How images and captions are encoded."""

    text: Annotated[Literal["all", "none"], BeforeValidator(_word_none)] = "all"
    """`none`, or null: latents alone, for text encoders that are trained. Captions are in the manifest and in batches
    as text; none is encoded, nor are validation prompts."""
    device: str = "auto"
    """`auto` (the accelerator if there is one), `cpu`, `cuda`, `cuda:1`, `mps`, ..."""
    vae_dtype: DtypeName = "auto"
    """Computation of the VAE. `auto`: float32 on the CPU, and where the VAE may overflow in float16."""
    text_dtype: DtypeName = "auto"
    """Computation of the text encoders. `auto`: the family's on an accelerator (float16 for CLIP alone, else bfloat16),
    float32 on the CPU."""
    store_dtype: DtypeName = "auto"
    """What is stored. `auto`: the dtype of the computation, bit by bit. float16 halves a float32 cache."""
    text_store_dtype: Annotated[Literal["auto", "float32", "float16", "bfloat16", "float8_e4m3fn"], Alias] = "auto"
    """What is stored of texts. `auto`: `store_dtype`, and if that is auto too bfloat16 for encoders larger than CLIP.
    float8_e4m3fn halves it again, where padding has to be stored: see the family's page for its error."""
    max_length: Annotated[int, Field(ge=1)] | None = None
    """Tokens of a text at most, as the pipeline's max_sequence_length. null: the family's. Families with CLIP alone
    also take 150 and 225, in chunks of 75 as with sd-scripts' max_token_length: 152 and 227 rows."""
    padding: Literal["auto", "drop", "keep"] = "auto"
    """Padding of texts. `drop`: stored without it, and padded again in each batch. `keep`: stored with it. `auto`: drop
    where a batch then gives the same result."""
    batch_size: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """Images per encoder call; halved when memory runs out."""
    image_output: Literal["auto", "moments", "mean", "sample"] = "auto"
    """`moments`: the whole posterior, drawn again at each read. `mean`: its mean. `sample`: one seeded draw. `auto`:
    moments, and the mean for families that are trained with it."""
    clip_skip: int = Field(0, ge=0)
    """Families with CLIP alone: layers that are skipped, as diffusers counts them."""
    seed: int = 0
    """Seed of `image_output: sample`."""
    num_workers: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """Threads that decode images. `auto`: one per core."""


DropoutTo = Literal["empty", "zeros"]
"""What takes the place of a dropped caption: the entry of the empty text, or zeros."""
Crops = Literal["first", "random"]
"""The crop of the rule of buckets, or one of all that are cached (`variations` of a dataset)."""


class TrainConfig(Section):
    """What a training chooses at each visit of a sample, as the options of `LatentDataset` do. No key depends on it."""

    caption: Literal["random"] | Annotated[int, Field(ge=0)] = "random"
    """`random`: one of a sample's captions and of its variants; a number: always that caption, from 0."""
    caption_dropout: float = Field(0.0, ge=0, le=1)
    """Share of visits without a caption."""
    dropout_to: DropoutTo = "empty"
    """What a dropped caption becomes: the entry of the empty text, or zeros."""
    flips: Literal["both", "random", "none"] = "both"
    """Of datasets with `flip: true`: `both` sides are items of an epoch, which is twice as long; `random`: each visit
    draws one of them."""
    crops: Crops = "random"
    """Of datasets with `variations`: one of the crops, or always that of the bucket rule."""


class ValidationConfig(Section):
    """What is validated, and how."""

    prompts: tuple[Prompt, ...] = ()
    """Prompts of validation images: cached too, so that sampling needs no text encoder."""
    negative_prompt: Prompt | None = ""
    """The negative prompt of validation images; null: what the pipeline has without one (zeros, or the empty prompt).
    The empty prompt is always cached."""
    path: UserPath = Path("validation")
    """Folder of the results: one subfolder for each validated step."""
    num_timesteps: int = Field(8, ge=1, le=1000)
    """Timesteps of each sample at which the loss is measured: one from each of so many equal parts of the schedule."""
    snr_gamma: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Weight the loss by min-SNR with this gamma (5 is usual); null: every timestep counts the same."""
    batch_size: int = Field(4, ge=1)
    """Noised latents per call of the denoiser when the loss is measured."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the noise and timesteps of the loss, and of the first image; image n has this seed plus n."""
    height: int = Field(1024, ge=64, multiple_of=8)
    """Height of validation images, in pixels."""
    width: int = Field(1024, ge=64, multiple_of=8)
    """Width of validation images, in pixels."""
    num_inference_steps: int = Field(25, ge=1)
    """Steps of the sampler."""
    guidance_scale: float = Field(5.0, ge=0)
    """Classifier-free guidance, as diffusers counts it: above 1 the negative prompt is used."""
    scheduler: str | None = None
    """The sampler: a scheduler class of diffusers, e.g. `DPMSolverMultistepScheduler`. null: the model's own."""


class RayConfig(Section):
    """What a run on a Ray cluster requests of it (`latentcache precache CONFIG --ray auto`)."""

    num_gpus: Literal["auto"] | Share = "auto"
    """GPUs of each encoder; of a fraction several encoders share one. `auto`: none where `encode.device` is `cpu`, else
    one."""
    accelerator_type: str | None = None
    """Only GPUs of this type, as Ray names them: `A100`, `H100`, `L4`, ..."""
    num_cpus: Share = 1.0
    """CPUs of each encoder, which also decodes (`encode.num_workers` threads). One that encodes on the CPU uses as many
    threads."""
    max_encoders: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """Encoders at once. More than the cluster has room for now make it grow, where it can. `auto`: as many as there is
    room for now; of those without a GPU one for each node."""
    wait_s: float = Field(180.0, gt=0, allow_inf_nan=False)
    """For so many seconds the run waits where the cluster has no room for any encoder."""


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
            raise ValueError("datasets: is empty; at least one dataset is needed")
        for name in names:
            if name.lower().startswith(PROMPTS_PREFIX):
                raise ValueError(
                    f"datasets: {name!r} may not begin with {PROMPTS_PREFIX!r}: so do the prompts' manifests"
                )
        # Manifests are files, and some file systems ignore case.
        twice = sorted({name for name in names if [n.lower() for n in names].count(name.lower()) > 1})
        if twice:
            raise ValueError(f"datasets need different names, but {', '.join(twice)} occur twice")
        return self
