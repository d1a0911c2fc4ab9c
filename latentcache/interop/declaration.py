"""What the user states of latents that say nothing of themselves: the model, the scaling, the preparation.

Shards of WebDataset and MDS hold numbers and captions. Which VAE gave the numbers, whether they are scaled already and
how the images were prepared stands in a README at best. An import takes it from a declaration: nothing here proves it,
and the records of the entries repeat it as `declared`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from latentcache.config_file import read_file
from latentcache.errors import ConfigError
from latentcache.families import DEFAULT, FamilyName, family_named
from latentcache.families.scaling import Rule, Scaling
from latentcache.identity import canonical_json
from latentcache.utils.json_document import first_fault

DESCRIPTION = "latentcache.json"
"""The file of an export that describes it; its `declaration` is that of these files."""

Stated = Annotated[str, Field(min_length=1)] | Annotated[dict[str, Any], Field(min_length=1)]
"""In the user's own words, or as a document."""
Factor = Annotated[float, Field(gt=0, le=1e9)]
Shift = Annotated[float, Field(ge=-1e9, le=1e9)]
Statistics = Annotated[list[Shift], Field(max_length=4096)]
_MAX_STATEMENT_BYTES = 1 << 14
_UNUSUAL = ("family", "rule", "mean", "std", "keeps_padding", "max_length")
"""Younger than the records of the first family's entries, which are not to change."""
_REMEDY = "docs/howto/import-export.md has an example"


class _Stated(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class RawForm(_Stated):
    """What the bytes of a column are: numbers of `dtype`, row by row, of this shape."""

    dtype: Literal["float16", "float32"]
    shape: Annotated[list[Annotated[int, Field(ge=1, le=1 << 20)]], Field(min_length=1, max_length=8)]


class FieldNames(_Stated):
    """Where a sample has what: a column of MDS; in a tar a member's suffix, as `latents.npy`, or a name in its json."""

    latents: str
    prompt_embeds: str | None = None
    pooled_prompt_embeds: str | None = None
    sample_id: str | None = None
    """Default: the shard and the sample's key or number in it."""
    caption: str | None = None
    """A text, or a list of texts. Of a list the second has its embeddings in `prompt_embeds_1`, and so on."""
    original_size: Annotated[list[str], Field(min_length=2, max_length=2)] | None = None
    """The names of the image's height and width."""
    geometry: str | None = None
    """A latentcache.types.Geometry as JSON, as exports have it. Default: the image was resized to cover the bucket."""


class Declaration(_Stated):
    """What the user states. Scaled latents are `(latents - shift_factor) * scaling_factor`, or as `rule` says."""

    family: FamilyName = DEFAULT
    """The model family that they are for."""
    vae: Stated
    """Which VAE gave the latents."""
    scaled: bool
    """Whether the latents in the files are scaled already."""
    scaling_factor: Factor
    """That of the VAE, also where the latents are not scaled."""
    shift_factor: Shift | None = None
    rule: Rule = "factor"
    """How `mean` and `std` are applied: `families.scaling.Scaling`."""
    mean: Statistics = []
    """Of each channel of latents, where the VAE has it."""
    std: Statistics = []
    output: Literal["mean", "sample"]
    """Whether a latent is the posterior's mean or one draw."""
    preparation: Stated
    """How the images were resized and cropped."""
    text_encoders: Stated | None = None
    keeps_padding: bool = True
    """Whether texts have their padding. Without it each has the rows of its own tokens."""
    max_length: Annotated[int, Field(ge=1)] | None = None
    """Tokens of a text at most, as `encode.max_length`. Default: those of the family."""
    fields: FieldNames
    raw: dict[str, RawForm] = {}
    """Columns of plain bytes."""

    @model_validator(mode="after")
    def _is_short(self) -> Declaration:
        try:
            num_bytes = len(canonical_json(self.statement()))
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
        if num_bytes > _MAX_STATEMENT_BYTES:
            raise ValueError(
                f"it has {num_bytes:,} bytes, and each entry repeats it; {_MAX_STATEMENT_BYTES:,} are allowed"
            )
        return self

    @model_validator(mode="after")
    def _texts_are_whole(self) -> Declaration:
        given = {name for name in ("prompt_embeds", "pooled_prompt_embeds") if getattr(self.fields, name) is not None}
        needed = list(family_named(self.family).fields)
        if given and given != set(needed):
            both = "both " if len(needed) > 1 else ""
            raise ValueError(f"fields needs {both}{' and '.join(needed)}, or {'neither' if both else 'no texts'}")
        if given and self.text_encoders is None:
            raise ValueError("text_encoders is missing: which encoders gave the embeddings?")
        return self

    @model_validator(mode="after")
    def _length_fits(self) -> Declaration:
        try:
            family_named(self.family).text_recipe(max_length=self.max_length)
        except ConfigError as error:
            raise ValueError(str(error)) from error
        return self

    @model_validator(mode="after")
    def _statistics_fit(self) -> Declaration:
        if len(self.mean) != len(self.std) or (self.rule != "factor" and not self.mean):
            raise ValueError(f"mean has {len(self.mean)} numbers and std {len(self.std)}: one for each channel")
        if any(std <= 0 for std in self.std):
            raise ValueError("std holds a number that is not above 0")
        return self

    @property
    def scaling(self) -> Scaling:
        """How scaled latents follow from unscaled ones."""
        return Scaling(self.scaling_factor, self.shift_factor, self.rule, tuple(self.mean), tuple(self.std))

    def statement(self) -> dict[str, Any]:
        """What is repeated in records and manifests: all but where the numbers lie, and what is as usual."""
        usual = {name for name in _UNUSUAL if getattr(self, name) == type(self).model_fields[name].get_default()}
        return self.model_dump(exclude={"fields", "raw", *usual})


def read_declaration(file: Path | None, folder: Path) -> Declaration:
    """The declaration in `file`, or in the description of an export in `folder`. ConfigError names what is missing."""
    path = file or folder / DESCRIPTION
    if not folder.is_dir():
        raise ConfigError("there is no such folder", source=str(folder))
    if file is None and not path.exists():
        needed = ", ".join(name for name, field in Declaration.model_fields.items() if field.is_required())
        raise ConfigError(
            f"{folder} does not say what its latents are. State {needed} in a YAML file, and give it as --declaration; "
            f"{_REMEDY}"
        )
    return parse_declaration(read_file(path) if file else read_file(path).get("declaration"), str(path))


def parse_declaration(value: Any, source: str) -> Declaration:
    """Raises ConfigError, which names all that is missing, or the first that is wrong."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"has no declaration; {_REMEDY}", source=source)
    try:
        return Declaration.model_validate(value)
    except ValidationError as error:
        missing = [".".join(map(str, fault["loc"])) for fault in error.errors() if fault["type"] == "missing"]
        if missing:
            raise ConfigError(
                f"does not state {', '.join(missing)}; {_REMEDY}", source=source, key=missing[0]
            ) from error
        name, _, detail = first_fault(error)
        raise ConfigError(f"{detail}; {_REMEDY}", source=source, key=name) from error
