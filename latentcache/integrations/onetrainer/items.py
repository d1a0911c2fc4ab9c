"""The items of a pipeline: how they are grouped, what identifies each, and the key under which its values are cached.

Balancing, repeats, samples and variations are counted as in mgds' VariationSorting.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from latentcache.dataset.samples import Signature
from latentcache.errors import PipelineError
from latentcache.identity import canonical_json, caption_digest, digest, key_of
from latentcache.integrations.onetrainer.description import describe, plain_settings
from latentcache.integrations.onetrainer.upstream import (
    DRAWS,
    RECOGNISED,
    ModuleInput,
    Upstream,
    class_name,
    input_names,
)
from latentcache.provenance import provenance_json
from latentcache.types import Kind

SCHEMA = "onetrainer/1"
REPEATS, SAMPLES = "REPEATS", "SAMPLES"

GetValue = Callable[[str, int], Any]
"""The value of a name for an input index, at variation 0."""

# Groups


@dataclass(frozen=True, slots=True)
class GroupNames:
    """The names of the values that group a pipeline's items. Without `variations` all items are one group."""

    variations: str | None
    balancing: str | None
    balancing_strategy: str | None
    group: tuple[str, ...]
    enabled: str | None

    def names(self) -> tuple[str, ...]:
        """All names that are set."""
        names = (self.enabled, self.variations, self.balancing, self.balancing_strategy, *self.group)
        return tuple(name for name in names if name is not None)


class Groups:
    """Groups of items, in the order of their first items. Each epoch takes the next items of every group.

    The settings of a group are those of its first item. Raises PipelineError for an unknown strategy, or a number of
    variations below 1.
    """

    def __init__(self, names: GroupNames, num_items: int, get_value: GetValue):
        self._groups: list[tuple[Sequence[int], int, int]] = []
        """Input indices, outputs per epoch, variations."""
        if names.variations is None:
            self._groups += [(range(num_items), num_items, 1)] if num_items else []
            return
        members: dict[bytes, list[int]] = {}
        for index in range(num_items):
            if not names.enabled or get_value(names.enabled, index):
                group = canonical_json([get_value(name, index) for name in names.group])
                members.setdefault(group, []).append(index)
        for indices in members.values():
            asked = (names.variations, names.balancing, names.balancing_strategy)
            variations, balancing, strategy = (get_value(str(name), indices[0]) for name in asked)
            if strategy not in (REPEATS, SAMPLES):
                raise PipelineError(f"{names.balancing_strategy} is {strategy!r}; it must be {REPEATS} or {SAMPLES}")
            if not isinstance(variations, int) or variations < 1:
                raise PipelineError(f"{names.variations} is {variations!r}; it must be a whole number of at least 1")
            num_out = math.floor(len(indices) * balancing) if strategy == REPEATS else int(balancing)
            self._groups.append((indices, num_out, variations))

    def __len__(self) -> int:
        """Outputs of one epoch."""
        return sum(num_out for _, num_out, _ in self._groups)

    def inputs(self, epoch: int) -> list[tuple[int, int]]:
        """(variation, input index) of each output of an epoch, in order."""
        return [
            (position // len(indices) % variations, indices[position % len(indices)])
            for indices, num_out, variations in self._groups
            for position in range(epoch * num_out, (epoch + 1) * num_out)
        ]


# Identities


def file_digest(path: str, memo: MutableMapping[str, str]) -> tuple[str | None, Signature | None]:
    """The digest and the signature of a file; (None, None) if it does not exist. Raises OSError if it is unreadable.

    `memo` caches the digest by path and signature. An edited file that got back its old size and mtime has another
    ctime, which programs cannot set. Undetected: a change on a file system without ctime, or with the clock set back
    to the same nanosecond.
    """
    signature = signature_of(path)
    if signature is None:
        return None, None
    name = f"onetrainer-file/1 {signature.to_text()} {os.path.abspath(path)}"
    found = memo.get(name)
    if found is None:
        found = digest(Path(path).read_bytes())
        if signature.is_settled() and signature_of(path) == signature:
            memo[name] = found
    return found, signature


def signature_of(path: str) -> Signature | None:
    """The file's signature, which changes when the file does; None if there is no file."""
    try:
        return Signature.of(os.stat(path))
    except FileNotFoundError:
        return None


@dataclass(frozen=True, slots=True)
class Item:
    """One item to cache: its key, and what the key is computed from.

    `files` are (path, signature at the time of reading). `passed` are the values that are passed through unstored.
    """

    variation: int
    index: int
    key: str
    identity: Mapping[str, Any]
    files: tuple[tuple[str, Signature | None], ...]
    texts: Sequence[Any]
    passed: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The first file or else the text, for messages."""
        return self.files[0][0] if self.files else repr(self.texts[0]) if self.texts else f"item {self.index}"


class ItemReader:
    """Reads the items (variation, input index) of a pipeline: the identity of each, and the key of its `names`.

    The identity consists of the modules that compute the values, the bytes of the item's files, its texts, the settings
    of its concept that these modules request, and the random numbers that they draw. Paths are not part of it. The
    position of an item matters only if a module draws random numbers for it or may depend on the variation.
    """

    def __init__(
        self, upstream: Upstream, names: Sequence[str], provenance: Mapping[str, Any], memo: MutableMapping[str, str]
    ):
        self.upstream, self._memo = upstream, memo
        self.kind: Kind = "text" if upstream.texts and not upstream.files else "image"
        self.pipeline = {
            "modules": [describe(module, provenance) for module in upstream.modules],
            "provenance": dict(provenance),
        }
        self._pipeline_digest = digest(canonical_json([self.pipeline, sorted(names)]))
        self._variation_counts = any(map(_depends_on_variation, upstream.modules))
        self._drawing = [
            (module, {name for _, name in input_names(module)})
            for module in upstream.modules
            if class_name(module) in DRAWS or class_name(module) not in RECOGNISED
        ]

    def read(self, variation: int, index: int) -> Item:
        """Read one item. Raises whatever its files and the modules before the cache raise."""
        passed = {each: each.value(variation, index) for each in self.upstream.passed}
        files: list[tuple[str, Signature | None]] = []
        file_digests: list[str | None] = []
        for each in self.upstream.files:
            path = passed[each] if each in passed else each.value(variation, index)
            found, signature = (None, None) if path is None else file_digest(path, self._memo)
            file_digests.append(found)
            files.append((str(path), signature))
        texts = self.texts(variation, index)
        settings = {each: plain_settings(each.name, each.value(variation, index)) for each in self.upstream.settings}
        identity: dict[str, Any] = {"kind": self.kind, "schema": SCHEMA, "pipeline": self._pipeline_digest}
        if file_digests:
            identity["files"] = file_digests
        if texts:
            identity["texts"] = [
                caption_digest(text)
                if isinstance(text, str)
                else {"json": digest(canonical_json(plain_settings(each.name, text)))}
                for each, text in zip(self.upstream.texts, texts, strict=True)
            ]
        if settings:
            pairs = sorted(([each.name, value] for each, value in settings.items()), key=canonical_json)
            identity["settings"] = digest(canonical_json(pairs))
        if self._variation_counts:
            identity["variation"] = variation
        if numbers := self._random_numbers(variation, index, settings):
            identity["random"] = numbers
        return Item(
            variation=variation,
            index=index,
            key=key_of(identity),
            identity=identity,
            files=tuple(files),
            texts=texts,
            passed={each.name: path for each, path in passed.items()},
        )

    def texts(self, variation: int, index: int) -> list[Any]:
        """The texts of an item: strings, or what a module makes of them."""
        return [each.value(variation, index) for each in self.upstream.texts]

    def name_of(self, variation: int, index: int) -> str:
        """The path or else the number of an item that could not be read, for messages."""
        paths = (*self.upstream.passed, *self.upstream.files)
        return str(paths[0].value(variation, index)) if paths else f"item {index}"

    def provenance(self, item: Item) -> dict[str, Any]:
        """How an item's entry was made."""
        return provenance_json(
            made_by="onetrainer",
            source_paths=[path for path, _ in item.files],
            texts=[str(text)[:1000] for text in item.texts],
            pipeline=self.pipeline,
        )

    def _random_numbers(self, variation: int, index: int, settings: Mapping[ModuleInput, Any]) -> list[str]:
        """The first random number of each module that draws some for this item, which determines the others."""
        numbers = []
        for module, names in self._drawing:
            values = {each.name: value for each, value in settings.items() if each.name in names}
            if class_name(module) == "LoadVideo":  # it draws only for files with its extensions, in any case
                path = str(ModuleInput(module, module.path_in_name).value(variation, index))
                draws = os.path.splitext(path)[1].lower() in module.supported_extensions
            else:
                draws = _draws(module, values)
            if draws:
                numbers.append(f"{class_name(module)} {module._get_rand(variation, index).getrandbits(64):016x}")
        return numbers


def _depends_on_variation(module: Any) -> bool:
    """Whether a module's values may depend on the variation, apart from the random numbers of its position."""
    if class_name(module) == "SampleVAEDistribution":
        return bool(module.mode != "mean")  # it draws from torch's global generator
    return class_name(module) not in RECOGNISED


def _draws(module: Any, settings: Mapping[str, Any]) -> bool:
    """Whether the module draws random numbers for an item with these settings. If unsure, True."""
    name = class_name(module)
    if name not in DRAWS:
        return True
    if name in ("AspectBucketing", "SingleAspectCalculation"):
        resolutions = [value for value in settings.values() if isinstance(value, str)]
        return any("," in value for value in resolutions) or not resolutions
    enabled_in_name = getattr(module, DRAWS[name], None) if DRAWS[name] else None
    return bool(settings.get(str(enabled_in_name), True))
