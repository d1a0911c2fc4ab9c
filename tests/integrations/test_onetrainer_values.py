"""Values of a pipeline as fields of entries, and back."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from latentcache.errors import PipelineError
from latentcache.integrations.onetrainer.values import PLAIN_FIELD, fields_of, values_of

_plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
    max_leaves=10,
).filter(lambda value: value is not None)


@settings(suppress_health_check=[HealthCheck.too_slow])  # the text strategy is slow to draw on a busy machine
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
