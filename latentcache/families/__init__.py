"""Model families: what each one's encoders return and what its denoiser expects, one file per family.

A family's file is imported when the family is first requested, and imports diffusers and transformers lazily.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import TYPE_CHECKING, Literal, get_args

from latentcache.errors import ModelError

if TYPE_CHECKING:
    from latentcache.families.base import Family
    from latentcache.families.parts import Part

FamilyName = Literal[
    "sdxl",
    "sd15",
    "flux",
    "chroma",
    "z-image",
    "wan",
    "qwen-image",
    "qwen-image-edit",
    "krea2",
    "flux2",
    "flux2-dev",
    "anima",
    "anima-states",
    "qwen-image-21",
    "wan-i2v",
    "qwen-image-21-edit",
    "ernie-image",
    "ideogram4",
    "ideogram4-projected",
]
FAMILIES: tuple[FamilyName, ...] = get_args(FamilyName)
Rule = Literal["factor", "mean_std", "divided", "batch_norm"]
"""How latents are scaled for the denoiser: see `scaling.Scaling`."""
DEFAULT: FamilyName = FAMILIES[0]
"""The family of caches and models that name none, such as caches of the first versions."""
DEFAULT_REPOSITORY = "stabilityai/stable-diffusion-xl-base-1.0"
"""The first of the default family's `repositories`, for callers that should not import its file."""

DENOISERS = ("unet", "transformer")
"""The part names under which a trainer passes its denoiser."""


@cache
def family_named(name: str) -> Family:
    """The family of this name. ModelError, listing the known names, if there is none."""
    if name not in FAMILIES:
        raise ModelError(f"there is no model family {name!r}; there are {', '.join(FAMILIES)}", part="model")
    found: Family = importlib.import_module(f"latentcache.families.{name.replace('-', '_')}").FAMILY
    return found


def family_of_denoiser(denoiser: object) -> Family:
    """The family whose denoiser has this class and config; the family DEFAULT for an unknown class.

    Families that share another one's denoiser (editors, and families with a `whole`) count as that other one: LoRAs
    are the same. ModelError, listing the candidates, if the config still fits several families.
    """
    class_name, config = type(denoiser).__name__, getattr(denoiser, "config", {})
    found = [each for each in map(family_named, FAMILIES) if each.denoiser_class.endswith(f".{class_name}")]
    found = [each for each in found if not each.text_reads_control and each.whole is None] or found
    if len(found) > 1:
        found = [each for each in found if each.check_settings(config) is None] or found
    if len(found) > 1:
        names = ", ".join(each.name for each in found)
        raise ModelError(
            f"{found[0].denoiser}: a {class_name} with this config may be of several families: {names}. Name its own: "
            'family=family_named("NAME"), of latentcache.families.',
            part=found[0].denoiser,
        )
    return found[0] if found else family_named(DEFAULT)


def parts_of(class_name: str) -> list[Part]:
    """Every family's description of a part of this class."""
    found = [part for each in map(family_named, FAMILIES) for part in each.parts.values()]
    return [part for part in found if part.class_name.endswith(f".{class_name}")]


def settings_of(class_name: str) -> tuple[str, ...] | None:
    """The config settings that matter for a part of this class, in any family; None for an unknown class."""
    named = [part.settings for part in parts_of(class_name)]
    return tuple({name: None for settings in named for name in settings}) if named else None


def unread_controls(family: Family) -> str | None:
    """Why training this family ignores control images, for messages; None if its denoiser reads them."""
    if family.reads_controls:
        return None
    readers = ", ".join(name for name in FAMILIES if family_named(name).reads_controls)
    return f"the denoiser of {family.name} does not read them (that of {readers} does)"
