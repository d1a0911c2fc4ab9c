"""What the values of a cache depend on: the modules before it, which are connected by names.

mgds looks a value up by name, from the requesting module backwards, and continues after None. A module requests the
names in its settings `..._name`, `..._names` and `..._map`, by mgds' convention, and those of `get_inputs()`. The walk
ends at values that identify themselves: files, texts, and the settings of concepts.

Modules of mgds are recognised by class name. All others are described by class name and constructor settings, and are
assumed to depend on the variation and to draw random numbers, hence on the position. A module's values must follow from
these and from its inputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from latentcache.utils.nested import named_leaves

CONCEPTS = frozenset({"ConceptPipelineModule", "SettingsPipelineModule", "CollectPaths"})
"""Modules that provide the user's settings. Each requested setting counts by its value."""

PATHS: Mapping[str, str] = {"CollectPaths": "path_out_name", "ModifyPath": "out_name"}
"""Modules that provide paths of files, and the setting with the name of the path. Files count by their bytes."""

TEXTS = frozenset(
    {
        *("CapitalizeTags", "DropTags", "GetFilename", "LoadMultipleTexts", "LoadText", "ReplaceText"),
        *("SelectInput", "SelectRandomText", "ShuffleTags"),
    }
)
"""Modules that provide texts, at the cost of reading a text file. Texts count as they are."""

TEXT_VALUES = frozenset({("Tokenize", "in_name")})
"""(module, setting) that requests a text, whichever module provides it."""

DRAWS: Mapping[str, str] = {
    "AspectBucketing": "",
    "LoadVideo": "",
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
"""Modules that draw random numbers by variation and index: those with a setting here if the value of that name is true,
bucketing if there are several resolutions, LoadVideo for files with its extensions (for others, which LoadImage reads,
it returns None), and RandomLatentMaskRemove always."""

RECOGNISED = (
    CONCEPTS
    | PATHS.keys()
    | TEXTS
    | DRAWS.keys()
    | {
        *("CalcAspect", "EncodeAnimaText", "EncodeClipText", "EncodeGemmaText", "EncodeIdeogramText"),
        *("EncodeLlamaText", "EncodeMistralText", "EncodeQwenText", "EncodeT5Text", "EncodeVAE"),
        *("GenerateImageLike", "GenerateMaskedConditioningImage", "MapData", "PadMaskedTokens", "PruneMaskedTokens"),
        *("ImageToVideo", "LoadImage", "NormalizeImageChannels", "RescaleImageChannels", "SampleVAEDistribution"),
        *("EncodeWuerstchenEffnet", "GenerateDepth", "ScaleImage", "SelectFirstInput"),
        *("ShuffleFluxFillMaskChannels", "Tokenize"),
    }
)
"""Modules whose values depend on the variation only through random numbers."""

KEPT_AS: Mapping[tuple[str, str], str | None] = {
    ("EncodeLlamaText", "all_hidden_state_output_indices"): "max_hidden_state_output_index",
    ("EncodeMistralText", "hidden_state_output_index"): "hidden_state_indexes",
    ("EncodeQwenText", "hidden_state_output_index"): "hidden_state_indexes",
    ("EncodeVAE", "sample_mode"): None,
    ("LoadImage", "channels"): "mode",
    ("AspectBucketing", "target_resolution_in_name"): "target_resolutions_in_name",
    ("SingleAspectCalculation", "target_resolution_in_name"): "target_resolutions_in_name",
    ("RandomLatentMaskRemove", "before_cache_fun"): None,
}
"""(module, constructor parameter) -> the attribute that keeps it, if it has another name; None if it has no effect."""

CONSTANTS: Mapping[str, tuple[str, ...]] = {"AspectBucketing": ("all_possible_input_aspects",)}
"""Class attributes that affect a module's values and may differ between releases."""

MISSING = object()
"""Stands for a parameter that the module does not keep."""

_NAME_SETTINGS = ("name", "names", "map")


def class_name(module: Any) -> str:
    """The name of the module's class."""
    return type(module).__name__


def constructor_settings(module: Any) -> dict[str, Any]:
    """The constructor arguments, as far as the module keeps them as `name` or `_name` (else MISSING), and CONSTANTS."""
    kind = class_name(module)
    found: dict[str, Any] = {}
    for parameter in list(inspect.signature(type(module).__init__).parameters.values())[1:]:
        is_variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        attribute = KEPT_AS.get((kind, parameter.name), parameter.name)
        if attribute is not None and not is_variadic:
            places = (attribute, f"_{attribute}", f"_{kind}__{attribute}")
            found[parameter.name] = next((vars(module)[name] for name in places if name in vars(module)), MISSING)
    constants = {name: getattr(module, name) for name in CONSTANTS.get(kind, ()) if hasattr(module, name)}
    return found | constants


class ModuleInput(NamedTuple):
    """A name, and the module that requests it. The nearest module before that one provides the value."""

    module: Any
    name: str

    def value(self, variation: int, index: int) -> Any:
        """The value for an item, from the pipeline."""
        return self.module._get_previous_item(variation, self.name, index)


class Upstream:
    """What the values of `names`, requested by the module `cache`, depend on.

    `modules` are in pipeline order. The walk ended at the inputs `files`, `texts` and `settings`. `passed` are paths:
    they are passed through unstored, and are not part of an item's identity.
    """

    def __init__(self, cache: Any, names: Sequence[str]):
        self.modules: list[Any] = []
        self.files: list[ModuleInput] = []
        self.texts: list[ModuleInput] = []
        self.settings: list[ModuleInput] = []
        self.passed: list[ModuleInput] = []
        self._cache, self._pipeline = cache, cache.pipeline.modules
        self._end = end = next(position for position, module in enumerate(self._pipeline) if module is cache)
        self._outputs = [frozenset(filter(None, module.get_outputs())) for module in self._pipeline]
        self._needed: set[int] = set()
        for name in names:
            if self._is_path(end, name):
                self.passed.append(ModuleInput(cache, name))
            else:
                self._visit(cache, end, "", name)
        for position in range(end - 1, -1, -1):
            if position in self._needed:
                module = self._pipeline[position]
                self.modules.insert(0, module)
                for setting, name in input_names(module):
                    self._visit(module, position, setting, name)

    def _visit(self, module: Any, position: int, setting: str, name: str) -> None:
        """Note a name that `module` requests in `setting`."""
        producers = self._producers(position, name)
        if not producers:
            return  # the string is not a name, or no module provides it
        producer = class_name(self._pipeline[producers[-1]])
        if producer in TEXTS or (class_name(module), setting) in TEXT_VALUES:
            inputs = self.texts
        elif self._is_path(position, name) or setting == "path_in_name":
            inputs = self.files
        elif producer in CONCEPTS:
            inputs = self.settings
        else:
            # All of them: if one returns None, mgds takes the value of the one before it.
            self._needed.update(producers)
            return
        # If the cache would get the same value, let it request it, so that an input of several modules is read once.
        found = ModuleInput(self._cache if producers == self._producers(self._end, name) else module, name)
        if found not in inputs:
            inputs.append(found)

    def _is_path(self, position: int, name: str) -> bool:
        producers = self._producers(position, name)
        if not producers:
            return False
        module = self._pipeline[producers[-1]]
        return name == getattr(module, PATHS.get(class_name(module), ""), None)

    def _producers(self, position: int, name: str) -> list[int]:
        root = name.partition(".")[0]
        return [number for number in range(position) if root in self._outputs[number]]


def input_names(module: Any) -> Iterator[tuple[str, str]]:
    """Yield (setting, string) for each string that may be a name that the module requests. Not all are names."""
    settings = {
        setting: value
        for setting, value in vars(module).items()
        if not setting.startswith("_") and setting.endswith(_NAME_SETTINGS)
    }
    if class_name(module) not in RECOGNISED:
        settings = constructor_settings(module) | settings | {"get_inputs()": list(module.get_inputs())}
    for setting, value in settings.items():
        if not setting.endswith("out_name"):
            yield from ((setting, leaf) for _, leaf in named_leaves(value, "") if isinstance(leaf, str))
