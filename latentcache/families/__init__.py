"""Model families: what each one's encoders return and what its denoiser expects. One file is one family.

A file is imported when its family is named, and imports diffusers and transformers only when a model is run.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import TYPE_CHECKING, Literal, get_args

from latentcache.errors import ModelError

if TYPE_CHECKING:
    from latentcache.families.base import Family

FamilyName = Literal["sdxl", "sd15", "flux", "chroma", "z-image", "wan", "qwen-image", "krea2", "flux2", "flux2-dev"]
FAMILIES: tuple[FamilyName, ...] = get_args(FamilyName)
DEFAULT: FamilyName = FAMILIES[0]
"""That of caches and models that name none: those of the first versions."""
DEFAULT_REPOSITORY = "stabilityai/stable-diffusion-xl-base-1.0"
"""The first of the default family's `repositories`, for those who do not import its file."""

DENOISERS = ("unet", "transformer")
"""The names that denoisers have among the parts of a training."""


@cache
def family_named(name: str) -> Family:
    """The family of this name. ModelError, naming those that there are, for another one."""
    if name not in FAMILIES:
        raise ModelError(f"there is no model family {name!r}; there are {', '.join(FAMILIES)}", part="model")
    found: Family = importlib.import_module(f"latentcache.families.{name.replace('-', '_')}").FAMILY
    return found


def family_of_denoiser(denoiser: object) -> Family:
    """The first family whose denoiser is of this class; that of DEFAULT for a class that is not known."""
    made = (family_named(name) for name in FAMILIES)
    class_name = type(denoiser).__name__
    return next((each for each in made if each.denoiser_class.endswith(f".{class_name}")), family_named(DEFAULT))


def family_of_pipeline(class_name: str) -> Family | None:
    """The family that a pipeline of diffusers of this class generates with; None for a class that is not known."""
    for name in FAMILIES:
        family = family_named(name)
        if class_name in (family.pipeline_name, *family.pipeline_names):
            return family
    return None


def unread_controls(family: Family) -> str | None:
    """Why training of this family ignores control images, for messages; None where its denoiser is given them."""
    if family.reads_controls:
        return None
    readers = ", ".join(name for name in FAMILIES if family_named(name).reads_controls)
    return f"the denoiser of {family.name} is not given them (that of {readers} is)"
