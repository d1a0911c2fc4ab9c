"""What the values of a cache depend on: the modules before it, which are connected by names.

mgds finds a value by its name, from the requesting module backwards, and goes further back where it finds None. The
names that a module requests are those in its settings `..._name`, `..._names` and `..._map`, by mgds' custom, and those
of `get_inputs()`. The walk ends at values that stand for themselves: files, texts, and the settings of concepts.

Modules of mgds are recognised by their class's name. All others are described by their class's name and the settings of
their constructor. Their values are taken to depend on the variation and, as if they drew random numbers, on the
position. A module's values must follow from these and from its inputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from latentcache.utils.nested import named_leaves

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
"""They draw random numbers for a variation and an index: those with a setting here only if the value of that name is
true, bucketing only among several resolutions, LoadVideo only for a file with one of its extensions (of others, which
LoadImage reads, it gives None), and RandomLatentMaskRemove always."""

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
"""Their values depend on the variation only through random numbers."""

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
"""The attribute in which a constructor's parameter is kept, where it has another name; None: it is not used."""

CONSTANTS: Mapping[str, tuple[str, ...]] = {"AspectBucketing": ("all_possible_input_aspects",)}
"""Attributes of classes that another release or a user may set otherwise, and that change a module's values."""

MISSING = object()
"""The value of a parameter that the module does not keep."""

_NAME_SETTINGS = ("name", "names", "map")


def class_name(module: Any) -> str:
    """The name of the module's class."""
    return type(module).__name__


def constructor_settings(module: Any) -> dict[str, Any]:
    """The values that the module's constructor took, which the module keeps as `name` or `_name`; and its CONSTANTS.

    The value of a parameter that the module does not keep is MISSING.
    """
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
    """A name, and the module that requests it: the nearest module before that one gives the value."""

    module: Any
    name: str

    def value(self, variation: int, index: int) -> Any:
        """The value for an item, from the pipeline."""
        return self.module._get_previous_item(variation, self.name, index)


class Upstream:
    """What the values of `names`, requested by the module `cache`, depend on.

    `modules` are in the pipeline's order; at the inputs `files`, `texts` and `settings` the walk ended. `passed` are
    values that are passed through and not stored: paths, which are not part of an item's identity.
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
            return  # a string that is no name, or a name that no module gives
        producer = class_name(self._pipeline[producers[-1]])
        if producer in TEXTS or (class_name(module), setting) in TEXT_VALUES:
            inputs = self.texts
        elif self._is_path(position, name) or setting == "path_in_name":
            inputs = self.files
        elif producer in CONCEPTS:
            inputs = self.settings
        else:
            # All of them: where one gives None, mgds takes the value of the one before it.
            self._needed.update(producers)
            return
        # Where the cache would get the same value it requests it, so that inputs of several modules are read once.
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
    """(setting, name) of each string that may be a name that the module requests; some are none."""
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
