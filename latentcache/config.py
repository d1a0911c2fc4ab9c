"""One schema for YAML, TOML and JSON. Unknown settings are errors. Precedence: flag > environment > file > default.

Relative paths in a config are relative to the working directory, as in every trainer.
"""

from __future__ import annotations

import difflib
import logging
import os
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    Field,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from latentcache.bucket_config import SECTION, BucketsConfig
from latentcache.cache_config import TOKEN_VARIABLE, WRITE_TOKEN_VARIABLE, CacheConfig, UserPath
from latentcache.config_file import from_text, merge, merge_datasets, read_file
from latentcache.errors import ConfigError
from latentcache.families import DEFAULT_REPOSITORY, FamilyName
from latentcache.frames_config import FramesConfig
from latentcache.part_config import MAX_CONTROLS, ControlConfig, MaskConfig, PartConfig, as_list, as_section
from latentcache.ray_config import RayConfig

ENV_PREFIX = "LATENTCACHE_"
TOKEN_VARIABLES = (TOKEN_VARIABLE, WRITE_TOKEN_VARIABLE)
"""These are secrets, not settings: no config has them."""
PROMPTS_PREFIX = "validation-prompts"
"""First part of the names of the manifests of cached validation prompts. No dataset's name may have it."""

MAX_REPEATS = 1_000_000
"""Of a dataset in an epoch: more is a slip, and an epoch's order would not fit into memory."""

Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
UserText = Annotated[str, AfterValidator(os.path.expanduser)]
"""A path or a hub id; `~` is the home directory."""
DtypeName = Literal["auto", "float32", "float16", "bfloat16"]

logger = logging.getLogger("latentcache")


def _encodable(prompt: str) -> str:
    prompt.encode()  # a lone surrogate is a ValueError: tokenizers take UTF-8 only
    return prompt


Prompt = Annotated[str, AfterValidator(_encodable)]


class _Section(BaseModel):
    model_config = SECTION


class SourceConfig(_Section):
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


class ImagesConfig(_Section):
    """How images are decoded, and which are refused."""

    alpha_colour: str = Field("#ffffff", pattern=r"^#[0-9a-fA-F]{6}$")
    """Transparent images are composited on this colour (#rrggbb)."""
    animated: Literal["refuse", "first-frame"] = "refuse"
    """What to do with an animation (GIF, PNG, WebP, AVIF, JPEG XL) and with the pages of a TIFF. Further pictures of an
    MPO, and smaller copies and masks in a TIFF, do not count."""
    max_pixels: int = Field(100_000_000, ge=1)
    """Images with more pixels are refused before they are decoded. 100 megapixels let medium-format cameras pass, and
    cost 300 MB per decoding thread."""
    max_aspect: float = Field(8.0, ge=1.0)
    """Images longer than this many times their shorter side are refused: the crop to a bucket keeps too little."""
    min_side: int = Field(16, ge=1)
    """Images with a shorter side are refused, in pixels."""


class DatasetConfig(_Section):
    """One dataset."""

    name: Name
    """Name of the manifest: letters, digits, dash, underscore."""
    role: Literal["train", "validation"] = "train"
    """What the dataset is for; stored in its manifest."""
    repeats: int = Field(1, ge=1, le=MAX_REPEATS)
    """How often an epoch visits each sample. Costs no space."""
    source: SourceConfig
    """Where the samples are."""
    buckets: BucketsConfig = BucketsConfig()
    """The sizes that images are resized and cropped to."""
    images: ImagesConfig = ImagesConfig()
    """How images are decoded, and which are refused."""
    frames: FramesConfig | None = None
    """Families of video: animated files (GIF, PNG, WebP) and videos become clips of these frames. null: each image is
    one frame, and `images.animated` says what becomes of animated ones."""
    flip: bool = False
    """Also cache each image mirrored left to right, as its own entry."""
    control: Annotated[tuple[ControlConfig, ...], BeforeValidator(as_list), Field(max_length=MAX_CONTROLS)] = ()
    """Control images of each sample, such as what an edit begins with; one may stand without a list."""
    mask: Annotated[MaskConfig | None, BeforeValidator(as_section)] = None
    """How much each place of the image counts in the loss; `alpha`: the image's alpha channel."""

    @property
    def part_files(self) -> tuple[PartConfig, ...]:
        """The further parts that have files or columns of their own: control images, then the mask."""
        return self.control if self.mask is None or self.mask.alpha else (*self.control, self.mask)

    @model_validator(mode="after")
    def _parts_fit_the_source(self) -> DatasetConfig:
        for part in self.part_files:
            part.check_kind(self.source.kind)
        small = [
            control.area for control in self.control if (control.area or self.buckets.step**2) < self.buckets.step**2
        ]
        if small:
            raise ValueError(f"area of control is {small[0]}; one bucket of step {self.buckets.step} has more")
        if self.frames is not None and (self.control or self.mask):
            raise ValueError("frames makes clips, which have no control images and no masks; leave one out")
        columns = [part.column for part in self.part_files]
        if self.source.kind == "webdataset":  # whose endings have no case
            columns = [column and column.lower() for column in columns]
        files = [(part.path, part.suffix, column) for part, column in zip(self.part_files, columns, strict=True)]
        if len(set(files)) < len(files):
            raise ValueError("two of control and mask are the same file; give another suffix, path or column")
        return self


class ModelConfig(_Section):
    """The model whose encoders are used."""

    family: FamilyName | None = None
    """Which model family the parts belong to. null: that of the folder's model_index.json; else the first one,
    which the run says."""
    path: UserText = DEFAULT_REPOSITORY
    """Hub id, diffusers folder, one .safetensors checkpoint, `tiny-photos` (a tiny model in the package, which knows
    the quickstart's photos), or `tiny` (the family's tiny model with random weights, for tests)."""
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


class EncodeConfig(_Section):
    """How images and captions are encoded."""

    device: str = "auto"
    """`auto` (the accelerator if there is one), `cpu`, `cuda`, `cuda:1`, `mps`, ..."""
    vae_dtype: DtypeName = "auto"
    """Computation of the VAE. `auto`: float32 on the CPU, and where the VAE may overflow in float16."""
    text_dtype: DtypeName = "auto"
    """Computation of the text encoders. `auto`: the family's on an accelerator (float16 for CLIP alone, else bfloat16),
    float32 on the CPU."""
    store_dtype: DtypeName = "auto"
    """What is stored. `auto`: the dtype of the computation, bit by bit. float16 halves a float32 cache."""
    text_store_dtype: Literal[DtypeName, "float8_e4m3fn"] = "auto"
    """What is stored of texts. `auto`: `store_dtype`, and if that is auto too bfloat16 for encoders larger than CLIP.
    float8_e4m3fn halves it again, where padding has to be stored: see the family's page for its error."""
    max_length: Annotated[int, Field(ge=1)] | None = None
    """Tokens of a text at most, as the pipeline's max_sequence_length. null: the family's."""
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
    compile: bool = False
    """torch.compile for the encoders. Off: each bucket and batch size costs a compilation, and the last bits differ.
    Text encoders of which single layers are read (LLMs) are never compiled."""


class ValidationConfig(_Section):
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


class Config(_Section):
    """All settings of a run."""

    cache: CacheConfig = CacheConfig()
    datasets: tuple[DatasetConfig, ...]
    model: ModelConfig = ModelConfig()
    encode: EncodeConfig = EncodeConfig()
    validation: ValidationConfig = ValidationConfig()
    ray: RayConfig = RayConfig()

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


def load_config(
    path: str | Path, *, overrides: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
) -> Config:
    """Read a config file and apply the environment and `overrides` (a nested mapping, as flags give it).

    Environment variables are named LATENTCACHE_ and the setting, e.g. LATENTCACHE_CACHE_PATH; the settings of
    `datasets` have none. In `overrides["datasets"]` a dataset goes by its name or its number. Raises ConfigError.
    """
    settings = read_file(Path(path))
    variables = settings_from_environment(os.environ if environ is None else environ)
    given = dict(overrides or {})
    source = str(path)
    if variables or given:
        source += " with variables and flags"
    merge(settings, variables)
    merge_datasets(settings, given.pop("datasets", None) or {}, str(path))
    merge(settings, given)
    return parse_config(settings, source=source)


Checked = TypeVar("Checked", bound=BaseModel)


def parse_config(settings: Mapping[str, Any], *, source: str | None = None) -> Config:
    """Check settings against the schema. Every fault is in the one ConfigError, a line each."""
    return _checked(Config, settings, source)


def parse_buckets(settings: Mapping[str, Any], *, source: str | None = None) -> BucketsConfig:
    """Check the settings of buckets alone, as `parse_config` does."""
    return _checked(BucketsConfig, settings, source)


def _checked(section: type[Checked], settings: Mapping[str, Any], source: str | None) -> Checked:
    try:
        return section.model_validate(settings)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False)
        first = ".".join(str(part) for part in faults[0]["loc"])
        raise ConfigError("\n  ".join(_describe(fault) for fault in faults), source=source, key=first) from None


def _describe(fault: Mapping[str, Any]) -> str:
    """One validation fault as a sentence: setting, value met, what is allowed."""
    # A union adds its member types to the location ("encode.batch_size.constrained-int"): they name no setting.
    location = [part for part in fault["loc"] if isinstance(part, int) or str(part).isidentifier()]
    dotted = ".".join(str(part) for part in location) or "config"
    if fault["type"] == "extra_forbidden":
        return f"{dotted}: unknown setting{suggest(dotted, known_settings())}"
    if fault["type"] == "missing":
        return f"{dotted}: is required"
    if fault["type"] == "value_error":
        message = str(fault["msg"]).removeprefix("Value error, ")
        return f"{dotted}: {message}" if location else message
    return f"{dotted}: {fault['msg']} (met: {fault['input']!r})"


def suggest(word: str, known: typing.Iterable[str], prefix: str = "") -> str:
    """The question whether the nearest known word was meant, or "" when none is near. Numbers in a path stay."""
    parts = word.split(".")
    numbers = [part for part in parts if part.isdigit()]
    pattern = ".".join("N" if part.isdigit() else part for part in parts)
    near = difflib.get_close_matches(pattern, known, n=1, cutoff=0.6)
    if not near:
        return ""
    for number in numbers:
        near[0] = near[0].replace("N", number, 1)
    return f"; did you mean {prefix + near[0]!r}?"


def known_settings(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    """The dotted names of all settings and sections; the number of a dataset is written N."""
    for name, field in section.model_fields.items():
        child = section_of(field.annotation)
        dotted = f"{prefix}{name}"
        yield dotted
        if child is not None:
            yield from known_settings(child, f"{dotted}.N." if is_list(field.annotation) else f"{dotted}.")


def is_list(annotation: Any) -> bool:
    """Whether a field of this annotation holds several values."""
    if typing.get_origin(annotation) is Annotated:
        return is_list(typing.get_args(annotation)[0])
    return typing.get_origin(annotation) in (tuple, list)


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds (one, or a list of them), or None for a plain value."""
    candidates = (annotation, *typing.get_args(annotation))
    return next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)


def number_of_bytes(text: str, source: str) -> int:
    """The number that `50GB` (1000 to the power of 3), `50GiB` (1024) or plain digits say. ConfigError."""
    try:
        return int(TypeAdapter(Annotated[ByteSize, Field(ge=0)]).validate_python(text))
    except ValidationError as error:
        message = f"{text!r} is no number of bytes; give e.g. 50GB, 50GiB or 50000000000"
        raise ConfigError(message, source=source) from error


def is_scalar(annotation: Any) -> bool:
    """Whether one flag or one variable can give the whole value."""
    is_union = typing.get_origin(annotation) in (types.UnionType, typing.Union)
    members = typing.get_args(annotation) if is_union else (annotation,)
    return section_of(annotation) is None and not any(is_list(member) for member in members)


def settings_from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """LATENTCACHE_CACHE_PATH=x gives {"cache": {"path": "x"}}.

    A name that begins with a section's, or is near to a setting's, is a ConfigError if there is no such setting. Any
    other LATENTCACHE_ name may belong to another program: it is ignored with a warning.
    """
    names = {}
    for section_name, field in Config.model_fields.items():
        section = section_of(field.annotation)
        if section is not None and not is_list(field.annotation):
            for name, child in section.model_fields.items():
                if is_scalar(child.annotation):
                    names[f"{section_name}_{name}".upper()] = (section_name, name)
    settings: dict[str, Any] = {}
    for variable in sorted(name for name in environ if name.startswith(ENV_PREFIX) and name not in TOKEN_VARIABLES):
        word = variable.removeprefix(ENV_PREFIX)
        if word in names:
            section_name, name = names[word]
            settings.setdefault(section_name, {})[name] = from_text(environ[variable])
            continue
        near = suggest(word, names, ENV_PREFIX)
        if near or word.partition("_")[0].lower() in Config.model_fields:
            raise ConfigError(f"no such setting{near}", source=variable)
        logger.warning("%s is no setting, and is ignored", variable)
    return settings
