"""Groups of a pipeline's items, against the formula and against mgds' own VariationSorting."""

from __future__ import annotations

import math
from typing import Any

import torch
from helpers.pipeline_host import host
from hypothesis import given
from hypothesis import strategies as st

from latentcache.integrations.onetrainer.items import GroupNames, make_groups


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.booleans(), st.floats(0, 5), st.sampled_from(["REPEATS", "SAMPLES"])),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 4),
    st.integers(0, 5),
)
def test_groups_are_counted_as_variation_sorting_counts(
    items: list[tuple[int, bool, float, str]], variations: int, epoch: int
) -> None:
    """Against the formula written out: local = k + epoch * out, variation = local // n % variations."""
    columns = {"group": 0, "on": 1, "balancing": 2, "strategy": 3}

    def get_value(name: str, index: int) -> Any:
        return variations if name == "variations" else items[index][columns[name]]

    names = GroupNames("variations", "balancing", "strategy", ("group",), "on")
    expected = []
    for group in dict.fromkeys(group for group, on, *_ in items if on):
        indices = [index for index, item in enumerate(items) if item[0] == group and item[1]]
        _, _, balancing, strategy = items[indices[0]]
        out = math.floor(len(indices) * balancing) if strategy == "REPEATS" else int(balancing)
        for k in range(out):
            local = k + epoch * out
            expected.append((local // len(indices) % variations, indices[local % len(indices)]))
    groups = make_groups(names, len(items), get_value)
    assert groups.inputs(epoch) == expected and len(groups) == len(expected)


_group = st.sampled_from([None, True, 1, 1.0, "1", [1], {"x": 1, "y": 2}, {"y": 2, "x": 1}])

_concepts = st.lists(
    st.fixed_dictionaries(
        {
            "group": _group,
            "on": st.sampled_from([True, 1, 0, None, ""]),
            "balancing": st.integers(0, 7) | st.floats(0, 5),
            "strategy": st.sampled_from(["REPEATS", "SAMPLES"]),
            "variations": st.integers(1, 4),
        }
    ),
    min_size=1,
    max_size=4,
)


@given(_concepts, st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(1, 5))
def test_groups_are_those_of_the_real_variation_sorting(
    concepts: list[dict[str, Any]], owners: list[int], num_epochs: int
) -> None:
    """What mgds' own module gives in each epoch: uncached names are joined to cached ones by position."""
    mgds = host("mgds")
    rows = [concepts[owner % len(concepts)] for owner in owners]

    class Source(mgds.PipelineModule, mgds.RandomAccessPipelineModule):  # type: ignore[misc,name-defined]
        def length(self) -> int:
            return len(rows)

        def get_inputs(self) -> list[str]:
            return []

        def get_outputs(self) -> list[str]:
            return ["concept", "place"]

        def get_item(self, variation: int, index: int, name: str | None = None) -> dict[str, Any]:
            return {"concept": rows[index], "place": index}

    sorting = mgds.VariationSorting(["place"], "concept.balancing", "concept.strategy", ["concept.group"], "concept.on")
    mgds.LoadingPipeline(torch.device("cpu"), [Source(), sorting], 1, 42, mgds.PipelineState(1))
    sorting.start(0)

    def get_value(name: str, index: int) -> Any:
        return rows[index][name.partition(".")[2]] if "." in name else rows[index]

    names = GroupNames("concept.variations", "concept.balancing", "concept.strategy", ("concept.group",), "concept.on")
    groups = make_groups(names, len(rows), get_value)
    assert len(groups) == sorting.length()
    for epoch in range(num_epochs):
        expected = [sorting.get_item(epoch, position, "place")["place"] for position in range(sorting.length())]
        assert [index for _, index in groups.inputs(epoch)] == expected
