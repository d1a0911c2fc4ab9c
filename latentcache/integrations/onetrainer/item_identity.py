"""What identifies each item of a pipeline, and so the key under which its values are cached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from latentcache.identity import canonical_json, caption_digest, digest, key_of
from latentcache.integrations.onetrainer.description import describe, plain_settings
from latentcache.integrations.onetrainer.recognised import (
    DRAWS,
    RECOGNISED,
    class_name,
    draws_random_numbers,
)
from latentcache.integrations.onetrainer.source_files import FileDigests
from latentcache.integrations.onetrainer.upstream import ModuleInput, Upstream, input_names
from latentcache.provenance import provenance_json
from latentcache.types import Kind

SCHEMA = "onetrainer/1"


@dataclass(frozen=True, slots=True)
class Item:
    """One item to cache: its key, and what the key follows from. `files` are (path, signature when it was read).

    `passed` are the values that are passed through and not stored.
    """

    variation: int
    index: int
    key: str
    identity: Mapping[str, Any]
    files: tuple[tuple[str, str | None], ...]
    texts: tuple[str, ...]
    passed: Mapping[str, Any]

    @property
    def name(self) -> str:
        """For messages: the first file, else the text."""
        return self.files[0][0] if self.files else repr(self.texts[0]) if self.texts else f"item {self.index}"


@dataclass(frozen=True, slots=True)
class _Settings:
    """The settings of one concept that upstream modules request: their values, and one digest of all."""

    digest: str | None
    values: Mapping[ModuleInput, Any]


class ItemReader:
    """Reads each item (variation, input index) of a pipeline: its identity, and the key of its values of `names`.

    The identity is made of: the modules that make the values, the bytes of the item's files, its texts, the settings of
    its concept that those modules request, and the random numbers that they draw. A path is not part of it. The place
    of an item counts only where a module draws random numbers for it, or may depend on the variation.
    """

    def __init__(self, upstream: Upstream, names: Sequence[str], provenance: Mapping[str, Any], files: FileDigests):
        self.upstream = upstream
        self.kind: Kind = "text" if upstream.texts and not upstream.files else "image"
        self.pipeline = {
            "modules": [describe(module, provenance) for module in upstream.modules],
            "provenance": dict(provenance),
        }
        self._pipeline_digest = digest(canonical_json([self.pipeline, sorted(names)]))
        self._file_digests = files
        self._variation_counts = any(map(_depends_on_variation, upstream.modules))
        drawing = [module for module in upstream.modules if draws_random_numbers(module)]
        self._drawing = [(module, {name for _, name in input_names(module)}) for module in drawing]
        self._settings_by_concept: dict[tuple[int, ...], tuple[list[Any], _Settings]] = {}

    def read(self, variation: int, index: int) -> Item:
        """One item. Raises what reading its files and making its texts raises."""
        passed = {each: each.value(variation, index) for each in self.upstream.passed}
        files = []
        file_digests = []
        for each in self.upstream.files:
            path = passed[each] if each in passed else each.value(variation, index)
            file_digest, signature = (None, None) if path is None else self._file_digests(path)
            file_digests.append(file_digest)
            files.append((str(path), signature))
        texts = [each.value(variation, index) for each in self.upstream.texts]
        settings = self._settings(variation, index)
        identity: dict[str, Any] = {"kind": self.kind, "schema": SCHEMA, "pipeline": self._pipeline_digest}
        if file_digests:
            identity["files"] = file_digests
        if texts:
            named = zip(self.upstream.texts, texts, strict=True)
            identity["texts"] = [_text_digest(each.name, text) for each, text in named]
        if settings.digest:
            identity["settings"] = settings.digest
        if self._variation_counts:
            identity["variation"] = variation
        if numbers := self._random_numbers(variation, index, settings.values):
            identity["random"] = numbers
        return Item(
            variation=variation,
            index=index,
            key=key_of(identity),
            identity=identity,
            files=tuple(files),
            texts=tuple(map(str, texts)),
            passed={each.name: path for each, path in passed.items()},
        )

    def name_of(self, variation: int, index: int) -> str:
        """The path of an item that could not be read, for messages; else its number."""
        paths = (*self.upstream.passed, *self.upstream.files)
        return str(paths[0].value(variation, index)) if paths else f"item {index}"

    def provenance(self, item: Item) -> dict[str, Any]:
        """How an item's entry was made."""
        return provenance_json(
            made_by="onetrainer",
            source_paths=[path for path, _ in item.files],
            texts=[text[:1000] for text in item.texts],
            pipeline=self.pipeline,
        )

    def _settings(self, variation: int, index: int) -> _Settings:
        """The settings of the item's concept. Items of one concept share one dict, which is described once."""
        inputs = self.upstream.settings
        if not inputs:
            return _Settings(None, {})
        roots = {each.root: ModuleInput(each.module, each.root).value(variation, index) for each in inputs}
        concept = tuple(map(id, roots.values()))
        if concept not in self._settings_by_concept:
            values = {each: plain_settings(each.name, _descend(roots, each.name)) for each in inputs}
            pairs = sorted(([each.name, value] for each, value in values.items()), key=canonical_json)
            settings = _Settings(digest(canonical_json(pairs)), values)
            # The dicts are kept, so that no other object gets their ids.
            self._settings_by_concept[concept] = list(roots.values()), settings
        return self._settings_by_concept[concept][1]

    def _random_numbers(self, variation: int, index: int, settings: Mapping[ModuleInput, Any]) -> list[str]:
        """What stands for the random numbers of the modules that draw some for this item."""
        numbers = []
        for module, names in self._drawing:
            if _draws(module, {each.name: value for each, value in settings.items() if each.name in names}):
                numbers.append(f"{class_name(module)} {module._get_rand(variation, index).getrandbits(64):016x}")
        return numbers


def _text_digest(name: str, value: Any) -> Any:
    if isinstance(value, str):
        return caption_digest(value)
    return {"json": digest(canonical_json(plain_settings(name, value)))}


def _depends_on_variation(module: Any) -> bool:
    """Whether a module may give other values for another variation, apart from the random numbers of its place."""
    if class_name(module) == "SampleVAEDistribution":
        return bool(module.mode != "mean")  # it draws from torch's global stream
    return class_name(module) not in RECOGNISED


def _draws(module: Any, settings: Mapping[str, Any]) -> bool:
    """Whether the module draws random numbers for an item with these settings. In doubt it does."""
    name = class_name(module)
    if name not in DRAWS:
        return True
    if name in ("AspectBucketing", "SingleAspectCalculation"):
        resolutions = [value for value in settings.values() if isinstance(value, str)]
        return any("," in value for value in resolutions) or not resolutions
    enabled_in_name = getattr(module, DRAWS[name], None) if DRAWS[name] else None
    return bool(settings.get(str(enabled_in_name), True))


def _descend(roots: Mapping[str, Any], name: str) -> Any:
    """The value of a name with dots, as mgds looks it up: None where a part is not there."""
    value: Any = roots
    for part in name.split("."):
        if part not in value:
            return None
        value = value[part]
    return value
