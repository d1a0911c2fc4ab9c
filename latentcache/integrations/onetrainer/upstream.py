"""What the values of a cache depend on: the modules before it, which are connected by names.

mgds finds a value by its name, from the requesting module backwards, and goes further back where it finds None. The
names that a module requests are those in its settings `..._name`, `..._names` and `..._map`, by mgds' custom, and those
of `get_inputs()`. The walk ends at values that stand for themselves: files, texts, and the settings of concepts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from latentcache.integrations.onetrainer.recognised import (
    CONCEPTS,
    PATHS,
    RECOGNISED,
    TEXT_VALUES,
    TEXTS,
    class_name,
    constructor_settings,
)

_NAME_SETTINGS = ("name", "names", "map")


class ModuleInput(NamedTuple):
    """A name, and the module that requests it: the nearest module before that one gives the value."""

    module: Any
    name: str

    @property
    def root(self) -> str:
        """The part of the name before the first dot: the name of a module's output."""
        return self.name.partition(".")[0]

    def value(self, variation: int, index: int) -> Any:
        """The value for an item, from the pipeline."""
        return self.module._get_previous_item(variation, self.name, index)


@dataclass(slots=True)
class Upstream:
    """What a cache's values depend on. `modules` are in the pipeline's order; at the inputs the walk ended."""

    modules: list[Any] = field(default_factory=list)
    files: list[ModuleInput] = field(default_factory=list)
    texts: list[ModuleInput] = field(default_factory=list)
    settings: list[ModuleInput] = field(default_factory=list)
    passed: list[ModuleInput] = field(default_factory=list)
    """Values that are passed through and not stored: paths, which are not part of an item's identity."""


def walk(
    cache: Any, names: Sequence[str], *, source_path: str | None = None, source_values: Iterable[str] = ()
) -> Upstream:
    """What `names`, requested by the module `cache`, depend on.

    `source_path` is a name whose values are paths of files that count by their bytes, `source_values` are names whose
    values count as they are. Where the walk meets neither, files of `source_path` count for all items.
    """
    return _Walk(cache, source_path, frozenset(source_values)).run(names)


class _Walk:
    def __init__(self, cache: Any, source_path: str | None, source_values: frozenset[str]):
        self._cache, self._modules = cache, cache.pipeline.modules
        self._end = next(position for position, module in enumerate(self._modules) if module is cache)
        self._source_path, self._source_values = source_path, source_values
        self._outputs = [frozenset(filter(None, module.get_outputs())) for module in self._modules]
        self._needed: set[int] = set()
        self._found = Upstream()

    def run(self, names: Sequence[str]) -> Upstream:
        cache, end, found = self._cache, self._end, self._found
        for name in names:
            if self._is_path(end, name):
                found.passed.append(ModuleInput(cache, name))
            else:
                self._visit(cache, end, "", name)
        for position in range(end - 1, -1, -1):
            if position in self._needed:
                module = self._modules[position]
                found.modules.insert(0, module)
                for setting, name in input_names(module):
                    self._visit(module, position, setting, name)
        known = {text.name for text in found.texts}
        for name in sorted(self._source_values - known):
            _add(found.texts, ModuleInput(cache, name))
        if not found.files and not found.texts and self._source_path and self._producers(end, self._source_path):
            _add(found.files, ModuleInput(cache, self._source_path))
        return found

    def _visit(self, module: Any, position: int, setting: str, name: str) -> None:
        """Note a name that `module` requests in `setting`."""
        producers = self._producers(position, name)
        if not producers:
            return  # a string that is no name, or a name that no module gives
        producer = class_name(self._modules[producers[-1]])
        # Where the cache would get the same value it requests it, so that inputs of several modules are read once.
        requester = self._cache if producers == self._producers(self._end, name) else module
        found = ModuleInput(requester, name)
        if name in self._source_values or producer in TEXTS or (class_name(module), setting) in TEXT_VALUES:
            _add(self._found.texts, found)
        elif self._is_path(position, name) or setting == "path_in_name":
            _add(self._found.files, found)
        elif producer in CONCEPTS:
            _add(self._found.settings, found)
        else:
            # All of them: where one gives None, mgds takes the value of the one before it.
            self._needed.update(producers)

    def _is_path(self, position: int, name: str) -> bool:
        if name == self._source_path:
            return True
        producers = self._producers(position, name)
        if not producers:
            return False
        module = self._modules[producers[-1]]
        return name == getattr(module, PATHS.get(class_name(module), ""), None)

    def _producers(self, position: int, name: str) -> list[int]:
        root = name.partition(".")[0]
        return [number for number in range(position) if root in self._outputs[number]]


def input_names(module: Any) -> Iterator[tuple[str, str]]:
    """(setting, name) of each string that may be a name that the module requests; some are none."""
    recognised = class_name(module) in RECOGNISED
    settings = {
        setting: value
        for setting, value in vars(module).items()
        if not setting.startswith("_") and setting.endswith(_NAME_SETTINGS)
    }
    if not recognised:
        settings = constructor_settings(module) | settings | {"get_inputs()": list(module.get_inputs())}
    for setting, value in settings.items():
        if not setting.endswith("out_name"):
            yield from ((setting, name) for name in _strings(value))


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _strings(list(value.values()))
    elif isinstance(value, list | tuple | set | frozenset):
        for item in value:
            yield from _strings(item)


def _add(inputs: list[ModuleInput], found: ModuleInput) -> None:
    if found not in inputs:
        inputs.append(found)
