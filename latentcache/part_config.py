"""The settings of a dataset's further parts: control images and masks, and where their files are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, model_validator

from latentcache.bucket_config import SECTION
from latentcache.cache_config import UserPath

MAX_CONTROLS = 16
"""Of a sample. Models of edits read some few."""


def _one_name(text: str) -> str:
    if "/" in text or "\0" in text:
        raise ValueError(f"{text!r} leads to another folder; give `path`")
    return text


class PartConfig(BaseModel):
    """Where a part of each sample is: a file that is named as the image is, or a column."""

    model_config = SECTION

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
