"""Groups of a pipeline's items: balancing, repeats, samples and variations, counted as mgds' VariationSorting does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from latentcache.errors import PipelineError
from latentcache.identity import canonical_json

REPEATS, SAMPLES = "REPEATS", "SAMPLES"

GetValue = Callable[[str, int], Any]
"""The value of a name for an input index, at variation 0."""


def once_per_item(get_value: GetValue) -> GetValue:
    """Values of names with dots, as mgds looks them up, but the part before the first dot is requested once an item."""
    last: dict[str, tuple[int, Any]] = {}

    def get(name: str, index: int) -> Any:
        root, *parts = name.split(".")
        if root not in last or last[root][0] != index:
            last[root] = index, get_value(root, index)
        value = last[root][1]
        for part in parts:
            if part not in value:
                return None
            value = value[part]
        return value

    return get


@dataclass(frozen=True, slots=True)
class GroupNames:
    """The names under which a pipeline says how its items are grouped. Without `variations` all are one group."""

    variations: str | None
    balancing: str | None
    balancing_strategy: str | None
    group: tuple[str, ...]
    enabled: str | None

    def names(self) -> tuple[str, ...]:
        """All of these names."""
        names = (self.enabled, self.variations, self.balancing, self.balancing_strategy, *self.group)
        return tuple(name for name in names if name is not None)


@dataclass(frozen=True, slots=True)
class Group:
    """Input indices that are counted together. An epoch takes `num_out` of them, in turn."""

    indices: tuple[int, ...]
    num_out: int
    variations: int

    def inputs(self, epoch: int) -> Iterator[tuple[int, int]]:
        """(variation, input index) of each output of this epoch, in order."""
        num = len(self.indices)
        for position in range(epoch * self.num_out, (epoch + 1) * self.num_out):
            yield position // num % self.variations, self.indices[position % num]


@dataclass(frozen=True, slots=True)
class Groups:
    """All groups in the order of their first items."""

    groups: tuple[Group, ...]

    def __len__(self) -> int:
        """Outputs of one epoch."""
        return sum(group.num_out for group in self.groups)

    def inputs(self, epoch: int) -> list[tuple[int, int]]:
        """(variation, input index) of each output of this epoch."""
        return [item for group in self.groups for item in group.inputs(epoch)]


def make_groups(names: GroupNames, num_items: int, get_value: GetValue) -> Groups:
    """The groups of a pipeline's items. Strategy and balancing of a group are those of its first item.

    Raises PipelineError for a strategy that is neither REPEATS nor SAMPLES.
    """
    if names.variations is None:
        indices = tuple(range(num_items))
        return Groups((Group(indices, len(indices), 1),) if indices else ())
    roots = tuple(dict.fromkeys(name.partition(".")[0] for name in (*names.group, names.enabled) if name))
    groups: dict[tuple[int, ...], tuple[list[Any], bytes | None]] = {}
    members: dict[bytes, list[int]] = {}
    for index in range(num_items):
        # Items of one concept share one dict, which is read once. It is kept, so that no other object gets its id.
        values = [get_value(root, index) for root in roots]
        concept = tuple(map(id, values))
        if concept not in groups:
            enabled = not names.enabled or get_value(names.enabled, index)
            groups[concept] = (
                values,
                canonical_json([get_value(name, index) for name in names.group]) if enabled else None,
            )
        group = groups[concept][1]
        if group is not None:
            members.setdefault(group, []).append(index)
    return Groups(tuple(_group(names, indices, get_value) for indices in members.values()))


def _group(names: GroupNames, indices: Sequence[int], get_value: GetValue) -> Group:
    first = indices[0]
    variations = get_value(str(names.variations), first)
    balancing = get_value(str(names.balancing), first)
    strategy = get_value(str(names.balancing_strategy), first)
    if strategy == REPEATS:
        num_out = math.floor(len(indices) * balancing)
    elif strategy == SAMPLES:
        num_out = int(balancing)
    else:
        raise PipelineError(f"{names.balancing_strategy} is {strategy!r}; it may be {REPEATS} or {SAMPLES}")
    if not isinstance(variations, int) or variations < 1:
        raise PipelineError(f"{names.variations} is {variations!r}; it is a number from 1")
    return Group(tuple(indices), num_out, variations)
