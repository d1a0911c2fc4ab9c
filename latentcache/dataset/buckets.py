"""The size an image is resized and cropped to: the table of buckets, the assignment, the integers of the resize."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from latentcache.config import BucketsConfig
from latentcache.errors import ConfigError
from latentcache.types import Bucket, Crop, Geometry, Size


def bucket_table(config: BucketsConfig) -> tuple[Bucket, ...]:
    """All buckets (height, width), sorted.

    Sides are multiples of `step`. For each height the width is the largest that keeps height * width <= `area`, and
    the other way round; so a taller or a wider bucket would exceed the area. The longest side is at most `max_aspect`
    times the shortest. The table is symmetric. `area` 1048576 and `step` 64 give the buckets of models of 1024x1024.

    Raises ConfigError if no bucket fits.
    """
    area, step, max_aspect = config.area, config.step, config.max_aspect
    buckets = set()
    # The longest side squared is at most max_aspect * area.
    longest = min(area // step, math.isqrt(int(area * max_aspect)))
    for side in range(step, longest + 1, step):
        other = area // side // step * step
        if other and max(side, other) <= max_aspect * min(side, other):
            buckets |= {Bucket(side, other), Bucket(other, side)}
    if not buckets:
        raise ConfigError(
            f"no bucket of at most {area} pixels in steps of {step} has sides within 1 : {max_aspect:g}; "
            "raise max_aspect or area, or lower step",
            key="max_aspect",
        )
    return tuple(sorted(buckets))


def assign(size: Size, table: Sequence[Bucket]) -> Bucket:
    """The bucket whose log aspect ratio is nearest. Of equally near ones, the larger area, then the smaller height.

    The logarithm makes portrait and landscape alike: the transposed size gets the transposed ratio.
    """

    def distance(bucket: Bucket) -> tuple[float, int, int]:
        # The quotient of both aspect ratios, made of integers: of equally far buckets it is the same number.
        across, down = bucket.width * size.height, bucket.height * size.width
        return max(across, down) / min(across, down), -bucket.height * bucket.width, bucket.height

    return min(table, key=distance)


def fit(original_size: Size, bucket: Bucket, *, flip: bool = False) -> Geometry:
    """The smallest resize that covers the bucket, then the crop in the middle. All integers, without floating point.

    One side of `resized_size` equals the bucket's. The other is rounded to the nearest integer (halves up), which
    never falls below the bucket's. The crop leaves the odd pixel at the bottom or on the right.
    """
    height, width = original_size
    # The side that must be enlarged most decides: bucket.height / height >= bucket.width / width.
    if bucket.height * width >= bucket.width * height:
        resized = Size(bucket.height, (2 * width * bucket.height + height) // (2 * height))
    else:
        resized = Size((2 * height * bucket.width + width) // (2 * width), bucket.width)
    spare = Size(resized.height - bucket.height, resized.width - bucket.width)
    return Geometry(original_size, resized, Crop(spare.height // 2, spare.width // 2), bucket, flip)


def fit_like(original_size: Size, image: Geometry) -> Geometry:
    """What becomes of a control image of this size, so that it lies on its image, whose geometry is `image`.

    With the image's proportions it is resized and cropped as that is. Otherwise its middle fills the same bucket.
    """
    if is_alike(original_size, image.original_size):
        return replace(image, original_size=original_size)
    return fit(original_size, image.target_size, flip=image.flip)


def is_alike(size: Size, other: Size) -> bool:
    """Whether both have the same proportions, but for sides that were cut to whole pixels."""
    return abs(size.height * other.width - size.width * other.height) <= max(sum(size), sum(other))
