"""Numbers as the templates draw them."""

from __future__ import annotations

import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentcache.dataset.buckets import fit
from latentcache.service.charts import ASPECT_BINS, BOX, MAX_BARS, aspect_bars, bucket_bars, crop_box, curve_of
from latentcache.types import Bucket, Size

sizes = st.builds(Size, st.integers(1, 1 << 24), st.integers(1, 1 << 24))
counts = st.dictionaries(sizes, st.integers(1, 10**9), max_size=200)


@given(counts)
def test_bars_have_every_sample_and_fit(found: dict[Size, int]) -> None:
    bars = bucket_bars(found)
    assert len(bars) <= MAX_BARS + 1
    assert sum(bar.count for bar in bars) == sum(found.values())
    assert all(0 <= bar.percent <= 100 for bar in bars)
    assert all(0 <= side <= BOX for bar in bars for side in bar.box)
    aspects = aspect_bars(found)
    assert len(aspects) == ASPECT_BINS
    assert sum(bar.count for bar in aspects) == sum(found.values())
    assert all(0 <= bar.percent <= 100 for bar in aspects)


def test_buckets_go_from_tall_to_wide_and_aspects_have_one_in_the_middle() -> None:
    found = Counter({Size(64, 128): 1, Size(128, 64): 3, Size(96, 96): 2})
    assert [(bar.label, bar.count) for bar in bucket_bars(found)] == [("128x64", 3), ("96x96", 2), ("64x128", 1)]
    numbers = [bar.count for bar in aspect_bars(found)]
    assert numbers[ASPECT_BINS // 4] == 3
    assert numbers[ASPECT_BINS // 2] == 2
    assert numbers[3 * ASPECT_BINS // 4] == 1
    assert aspect_bars(Counter({Size(1000, 1): 1}))[0].count == 1
    assert aspect_bars(Counter({Size(1, 1000): 1}))[-1].count == 1


@given(st.lists(st.tuples(st.floats(), st.floats()), max_size=50), st.booleans())
def test_curves_stay_in_their_box(pairs: list[tuple[float, float]], from_zero: bool) -> None:
    finite = [(x, y) for x, y in pairs if math.isfinite(x) and math.isfinite(y)]
    curve = curve_of([x for x, _ in pairs], [y for _, y in pairs], from_zero=from_zero)
    if len(finite) < 2:
        assert curve is None
        return
    assert curve is not None
    assert len(curve.dots) == len(finite)
    assert all(0 <= value <= 100 for dot in curve.dots for value in dot)
    assert "nan" not in curve.points and "inf" not in curve.points


@given(st.tuples(st.integers(64, 5000), st.integers(64, 5000)), st.sampled_from([(512, 512), (1024, 768), (256, 1024)]))
def test_the_crop_lies_in_the_photo(size: tuple[int, int], bucket: tuple[int, int]) -> None:
    box = crop_box(fit(Size(*size), Bucket(*bucket)).to_json())
    assert box["x"] >= 0 and box["x"] + box["width"] <= size[1] + 0.2
    assert box["y"] >= 0 and box["y"] + box["height"] <= size[0] + 0.2
    assert box["width"] == pytest.approx(size[1], abs=0.2) or box["height"] == pytest.approx(size[0], abs=0.2)
    assert 0 < box["kept"] <= 100
