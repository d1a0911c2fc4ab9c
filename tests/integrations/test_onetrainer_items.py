"""Values of a pipeline's items as fields of entries, and the groups that items are in."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from latentcache.errors import PipelineError
from latentcache.integrations.onetrainer.items import GroupNames, Groups
from latentcache.integrations.onetrainer.values import PLAIN_FIELD, fields_of, values_of

_plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
    max_leaves=10,
).filter(lambda value: value is not None)


# The text strategy is slow to draw on a busy machine.
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.text(), _plain, max_size=4))
def test_plain_values_come_back_as_they_were(values: dict[str, Any]) -> None:
    fields = fields_of(values)
    assert values_of(fields) == values
    assert repr(values_of(fields)) == repr({name: values[name] for name in values_of(fields)})
    assert fields.keys() == {PLAIN_FIELD}


@pytest.mark.parametrize("value", [None, object(), np.float32(1), {1: "a"}, torch.tensor([1.0, math.nan])])
def test_values_that_cannot_be_kept_are_refused(value: Any) -> None:
    with pytest.raises(PipelineError, match="'name'"):
        fields_of({"name": value})


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
    groups = Groups(names, len(items), get_value)
    assert groups.inputs(epoch) == expected and len(groups) == len(expected)
