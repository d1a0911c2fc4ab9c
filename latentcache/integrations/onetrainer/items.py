"""What each item of a pipeline is, and so under which keys its values are kept."""

from __future__ import annotations

import socket
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
from latentcache.integrations.onetrainer.upstream import Asked, Upstream, asked_names
from latentcache.provenance import now, software_versions
from latentcache.types import Kind

SCHEMA = "onetrainer/1"


@dataclass(frozen=True, slots=True)
class Item:
    """One item to cache: its key, and what that follows from. `files` are (path, signature when it was read).

    `live` are the values that are handed through and not stored.
    """

    variation: int
    index: int
    key: str
    identity: Mapping[str, Any]
    files: tuple[tuple[str, str | None], ...]
    texts: tuple[str, ...]
    live: Mapping[str, Any]

    @property
    def name(self) -> str:
        """For messages: the first file, else the text."""
        return self.files[0][0] if self.files else repr(self.texts[0]) if self.texts else f"item {self.index}"


class Items:
    """Gives each (variation, input index) its identity, and so the key of the entry with the values of `names`.

    It is: what the modules are that make its values, the bytes of its files, its texts, the settings of its concept
    that those modules ask for, and what they draw of the random numbers of its place if they draw any. Neither paths
    nor positions are part of it otherwise.
    """

    def __init__(self, upstream: Upstream, names: Sequence[str], provenance: Mapping[str, Any], files: FileDigests):
        self.upstream = upstream
        self.kind: Kind = "text" if upstream.texts and not upstream.files else "image"
        self.pipeline = {
            "modules": [describe(module, provenance) for module in upstream.modules],
            "provenance": dict(provenance),
        }
        self._digest = digest(canonical_json([self.pipeline, sorted(names)]))
        self._files = files
        self._variation_counts = any(map(_counts_variations, upstream.modules))
        drawing = [module for module in upstream.modules if draws_random_numbers(module)]
        self._drawing = [(module, {name for _, name in asked_names(module)}) for module in drawing]
        self._settings: dict[tuple[int, ...], tuple[tuple[Any, ...], tuple[str, Mapping[Asked, Any]]]] = {}

    def item(self, variation: int, index: int) -> Item:
        """The identity of one item. Raises what reading its files and asking for its texts raises."""
        paths: dict[Asked, Any] = {asked: asked.value(variation, index) for asked in self.upstream.live}
        identity: dict[str, Any] = {"kind": self.kind, "schema": SCHEMA, "pipeline": self._digest}
        files, sources = [], []
        for asked in self.upstream.files:
            path = paths[asked] if asked in paths else asked.value(variation, index)
            found, signature = (None, None) if path is None else self._files(path)
            sources.append(found)
            files.append((str(path), signature))
        texts = [asked.value(variation, index) for asked in self.upstream.texts]
        settings, values = self._values(variation, index)
        if sources:
            identity["files"] = sources
        if texts:
            identity["texts"] = [
                _text_digest(asked.name, text) for asked, text in zip(self.upstream.texts, texts, strict=True)
            ]
        if settings:
            identity["settings"] = settings
        if self._variation_counts:
            identity["variation"] = variation
        if self._drawing and (drawn := self._drawn(variation, index, values)):
            identity["random"] = drawn
        live = {asked.name: path for asked, path in paths.items()}
        return Item(variation, index, key_of(identity), identity, tuple(files), tuple(map(str, texts)), live)

    def name_of(self, variation: int, index: int) -> str:
        """For messages about an item that has no identity: its path, if that can be told."""
        paths = (*self.upstream.live, *self.upstream.files)
        return str(paths[0].value(variation, index)) if paths else f"item {index}"

    def provenance(self, item: Item) -> dict[str, Any]:
        """How an item's entries were made."""
        return {
            "made_by": "onetrainer",
            "source_paths": [path for path, _ in item.files],
            "texts": [text[:1000] for text in item.texts],
            "pipeline": self.pipeline,
            "host": socket.gethostname(),
            "created": now(),
            "software": dict(software_versions()),
        }

    def _values(self, variation: int, index: int) -> tuple[str | None, Mapping[Asked, Any]]:
        """Digest and values of the settings that count. Items of one concept share its dict, which is read once."""
        asked = self.upstream.settings
        if not asked:
            return None, {}
        askers = {one.name.partition(".")[0]: one.module for one in asked}
        heads = {head: Asked(module, head).value(variation, index) for head, module in askers.items()}
        marks = tuple(id(value) for value in heads.values())
        known = self._settings.get(marks)
        if known is not None:
            return known[1]
        values = {one: plain_settings(one.name, _descend(heads, one.name)) for one in asked}
        rows = sorted(([one.name, value] for one, value in values.items()), key=canonical_json)
        found = digest(canonical_json(rows)), values
        self._settings[marks] = tuple(heads.values()), found  # held, so that their ids stay theirs
        return found

    def _drawn(self, variation: int, index: int, values: Mapping[Asked, Any]) -> list[str]:
        return [
            f"{class_name(module)} {module._get_rand(variation, index).getrandbits(64):016x}"
            for module, names in self._drawing
            if _draws(module, {asked.name: value for asked, value in values.items() if asked.name in names})
        ]


def _text_digest(name: str, value: Any) -> Any:
    if isinstance(value, str):
        return caption_digest(value)
    return {"json": digest(canonical_json(plain_settings(name, value)))}


def _counts_variations(module: Any) -> bool:
    """Whether a module may give other values for another variation, besides what it draws for its place."""
    if class_name(module) == "SampleVAEDistribution":
        return module.mode != "mean"  # draws from torch's global stream
    return class_name(module) not in RECOGNISED


def _draws(module: Any, values: Mapping[str, Any]) -> bool:
    """Whether the module draws random numbers for an item with these settings. In doubt it does."""
    name = class_name(module)
    if name not in DRAWS:
        return True
    if name in ("AspectBucketing", "SingleAspectCalculation"):
        resolutions = [value for value in values.values() if isinstance(value, str)]
        return any("," in value for value in resolutions) or not resolutions
    asked = getattr(module, DRAWS[name], None) if DRAWS[name] else None
    return bool(values.get(asked, True))


def _descend(heads: Mapping[str, Any], name: str) -> Any:
    """As mgds does it: None where a name is not there."""
    value: Any = heads
    for part in name.split("."):
        if part not in value:
            return None
        value = value[part]
    return value
