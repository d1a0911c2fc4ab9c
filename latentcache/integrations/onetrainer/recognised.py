"""The modules of mgds that are recognised by their class's name, and what is special about each.

All others are described by their class's name and the settings of their constructor. Their values are taken to depend
on the variation, and on the position if they draw random numbers. A module's values must follow from these and from its
inputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import CodeType
from typing import Any

CONCEPTS = frozenset({"ConceptPipelineModule", "SettingsPipelineModule", "CollectPaths"})
"""They give the user's settings. Each setting that is requested counts by its value."""

PATHS: Mapping[str, str] = {"CollectPaths": "path_out_name", "ModifyPath": "out_name"}
"""They give paths of files, under the name in this setting. Files count by their bytes."""

TEXTS = frozenset(
    {
        *("CapitalizeTags", "DropTags", "GetFilename", "LoadMultipleTexts", "LoadText", "ReplaceText"),
        *("SelectInput", "SelectRandomText", "ShuffleTags"),
    }
)
"""They give texts, which cost reading a file of text. Texts count as they are."""

TEXT_VALUES = frozenset({("Tokenize", "in_name")})
"""Settings of modules that request a text, from any module."""

DRAWS: Mapping[str, str] = {
    "AspectBucketing": "",
    "RandomBrightness": "enabled_in_name",
    "RandomCircularMaskShrink": "enabled_in_name",
    "RandomContrast": "enabled_in_name",
    "RandomFlip": "enabled_in_name",
    "RandomHue": "enabled_in_name",
    "RandomLatentMaskRemove": "",
    "RandomMaskRotateCrop": "enabled_in_name",
    "RandomRotate": "enabled_in_name",
    "RandomSaturation": "enabled_in_name",
    "ScaleCropImage": "enable_crop_jitter_in_name",
    "SingleAspectCalculation": "",
}
"""They draw random numbers for a variation and an index: those with a setting here only if the value of that name is
true, bucketing only among several resolutions, and RandomLatentMaskRemove always."""

RECOGNISED = (
    CONCEPTS
    | PATHS.keys()
    | TEXTS
    | DRAWS.keys()
    | {
        *("CalcAspect", "EncodeClipText", "EncodeVAE", "GenerateImageLike", "GenerateMaskedConditioningImage"),
        *("ImageToVideo", "LoadImage", "NormalizeImageChannels", "RescaleImageChannels", "SampleVAEDistribution"),
        *("ScaleImage", "SelectFirstInput", "Tokenize"),
    }
)
"""Their values depend on the variation only through random numbers."""

KEPT_AS: Mapping[tuple[str, str], str | None] = {
    ("EncodeVAE", "sample_mode"): None,
    ("LoadImage", "channels"): "mode",
    ("AspectBucketing", "target_resolution_in_name"): "target_resolutions_in_name",
    ("SingleAspectCalculation", "target_resolution_in_name"): "target_resolutions_in_name",
    ("RandomLatentMaskRemove", "before_cache_fun"): None,
}
"""The attribute in which a constructor's parameter is kept, where it has another name; None: it is not used."""

CONSTANTS: Mapping[str, tuple[str, ...]] = {"AspectBucketing": ("all_possible_input_aspects",)}
"""Attributes of classes that another release or a user may set otherwise, and that change a module's values."""

_MISSING = object()


def class_name(module: Any) -> str:
    """The name of the module's class."""
    return type(module).__name__


def constructor_settings(module: Any) -> dict[str, Any]:
    """The values that the module's constructor took, which the module keeps as `name` or `_name`; and its CONSTANTS.

    A parameter that the module does not keep is left out; `unkept_settings` names it.
    """
    values = {name: _kept(module, name) for name in _parameters(module)}
    values |= {name: getattr(module, name, _MISSING) for name in CONSTANTS.get(class_name(module), ())}
    return {name: value for name, value in values.items() if value is not _MISSING}


def unkept_settings(module: Any) -> list[str]:
    """Parameters of the constructor whose values cannot be seen."""
    return [name for name in _parameters(module) if _kept(module, name) is _MISSING]


def draws_random_numbers(module: Any) -> bool:
    """Whether code of the module's class, or of a class it derives from, uses `_get_rand`."""
    if class_name(module) in RECOGNISED:
        return class_name(module) in DRAWS
    return any(
        "_get_rand" in _names(code)
        for parent in type(module).__mro__
        for value in vars(parent).values()
        for code in _codes(value)
    )


def _parameters(module: Any) -> list[str]:
    parameters = list(inspect.signature(type(module).__init__).parameters.values())[1:]
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    known = [parameter.name for parameter in parameters if parameter.kind not in variadic]
    return [name for name in known if KEPT_AS.get((class_name(module), name), name) is not None]


def _kept(module: Any, name: str) -> Any:
    attribute = KEPT_AS.get((class_name(module), name)) or name
    values = vars(module)
    return values.get(
        attribute, values.get(f"_{attribute}", values.get(f"_{class_name(module)}__{attribute}", _MISSING))
    )


def _codes(value: Any) -> list[CodeType]:
    for _ in range(3):  # property, staticmethod and functools wrappers
        value = getattr(value, "fget", None) or getattr(value, "__wrapped__", None) or value
    code = getattr(getattr(value, "__func__", value), "__code__", None)
    return [code] if isinstance(code, CodeType) else []


def _names(code: CodeType) -> set[str]:
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _names(constant)
    return found
