"""The table of buckets, the assignment and the integers of the resize."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from latentcache.config import BucketsConfig
from latentcache.dataset.buckets import assign, bucket_table, fit
from latentcache.errors import ConfigError
from latentcache.types import Bucket, Size


def table_of(area: int, step: int = 64, max_aspect: float = 2.0) -> tuple[Bucket, ...]:
    return bucket_table(BucketsConfig(area=area, step=step, max_aspect=max_aspect))


SDXL = table_of(1024 * 1024)
sides = st.integers(1, 20_000)
sizes = st.builds(Size, sides, sides)


@pytest.mark.parametrize("area", [1, 64 * 64, 300 * 300, 512 * 512, 768 * 768, 1024 * 1024, 1_500_000])
@pytest.mark.parametrize("step", [8, 64])
def test_no_bucket_is_left_out(area: int, step: int) -> None:
    """Against the definition, by trying all heights and widths."""
    wanted = set()
    for height in range(step, 3000, step):
        for width in range(step, min(2 * height, area // height) + 1, step):
            if height > 2 * width:
                continue
            if (height + step) * width > area or height * (width + step) > area:
                wanted.add(Bucket(height, width))
    if wanted:
        assert set(table_of(area, step, 2.0)) == wanted
    else:
        with pytest.raises((ConfigError, ValidationError)):
            table_of(area, step, 2.0)


@given(sizes)
def test_the_nearest_log_aspect_wins(size: Size) -> None:
    bucket = assign(size, SDXL)

    def distance(candidate: Bucket) -> float:
        return abs(math.log(Fraction(candidate.width * size.height, candidate.height * size.width)))

    assert distance(bucket) <= min(map(distance, SDXL)) + 1e-9


def test_ties_go_to_the_larger_area_then_the_smaller_height() -> None:
    assert assign(Size(500, 500), (Size(512, 512), Size(1024, 1024))) == Size(1024, 1024)
    assert assign(Size(500, 500), (Size(1216, 832), Size(832, 1216))) == Size(832, 1216)


@given(sizes, st.sampled_from(SDXL), st.booleans())
def test_the_resize_covers_the_bucket_and_no_more(size: Size, bucket: Bucket, flip: bool) -> None:
    geometry = fit(size, bucket, flip=flip)
    resized, (top, left) = geometry.resized_size, geometry.crop_top_left
    assert resized.height >= bucket.height and resized.width >= bucket.width
    assert resized.height == bucket.height or resized.width == bucket.width
    # The other side is the exact one, rounded: at most half a pixel off.
    scale = max(Fraction(bucket.height, size.height), Fraction(bucket.width, size.width))
    assert abs(resized.height - size.height * scale) <= Fraction(1, 2)
    assert abs(resized.width - size.width * scale) <= Fraction(1, 2)
    assert 0 <= top <= resized.height - bucket.height and 0 <= left <= resized.width - bucket.width
    assert 0 <= resized.height - bucket.height - 2 * top <= 1
    assert 0 <= resized.width - bucket.width - 2 * left <= 1
    assert all(type(value) is int for value in (*size, *resized, top, left, *geometry.target_size))
    assert (geometry.original_size, geometry.target_size, geometry.flip) == (size, bucket, flip)
