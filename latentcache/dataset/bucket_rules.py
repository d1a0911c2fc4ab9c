"""Bucket rules: how each trainer sizes, resizes and crops an image, as its released code does.

Every rule is tested against tables recorded from the trainer's own functions (tests/dataset/data). Sizes are (height,
width) here; most trainers use (width, height). The order of floating-point operations is the trainer's: another order
gives different buckets for a few sizes in a thousand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from latentcache.config import SETTINGS_OF_RULE, BucketsConfig
from latentcache.dataset.resampling import LANCZOS
from latentcache.errors import ConfigError
from latentcache.types import Bucket, Crop, Geometry, Size


def bucket_table(config: BucketsConfig) -> tuple[Bucket, ...]:
    """All buckets (height, width), sorted.

    Sides are multiples of `step`. Each height gets the largest width with height * width <= `area`, and vice versa, so
    the table is symmetric. The longer side is at most `max_aspect` times the shorter. `area` 1048576 and `step` 64 give
    the usual buckets of 1024x1024 models.

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
    """The bucket with the nearest log aspect ratio. Ties go to the larger area, then to the smaller height.

    The logarithm treats portrait and landscape alike: the transposed size gets the transposed bucket.
    """

    def distance(bucket: Bucket) -> tuple[float, int, int]:
        # The ratio of both aspect ratios, computed from integers so that ties compare equal.
        across, down = bucket.width * size.height, bucket.height * size.width
        return max(across, down) / min(across, down), -bucket.height * bucket.width, bucket.height

    return min(table, key=distance)


def fit(original_size: Size, bucket: Bucket, *, flip: bool = False) -> Geometry:
    """The smallest resize that covers the bucket, then a center crop, in integer arithmetic.

    One side of `resized_size` equals the bucket's. The other is rounded to the nearest integer (halves up) and is never
    smaller than the bucket's. An odd pixel is cut at the bottom or on the right.
    """
    height, width = original_size
    # The side with the larger scale decides: bucket.height / height >= bucket.width / width.
    if bucket.height * width >= bucket.width * height:
        resized = Size(bucket.height, (2 * width * bucket.height + height) // (2 * height))
    else:
        resized = Size((2 * height * bucket.width + width) // (2 * width), bucket.width)
    spare = Size(resized.height - bucket.height, resized.width - bucket.width)
    return Geometry(original_size, resized, Crop(spare.height // 2, spare.width // 2), bucket, flip)


def fit_like(original_size: Size, image: Geometry) -> Geometry:
    """The geometry that aligns a control image of this size with its image, whose geometry is `image`.

    If it has the image's proportions, it is resized and cropped like the image. Otherwise its center fills the bucket.
    """
    if is_alike(original_size, image.original_size):
        return replace(image, original_size=original_size)
    return fit(original_size, image.target_size, flip=image.flip)


def is_alike(size: Size, other: Size) -> bool:
    """Whether both sizes have the same proportions, apart from rounding to whole pixels."""
    return abs(size.height * other.width - size.width * other.height) <= max(sum(size), sum(other))


FitFunction = Callable[[Size], Geometry | None]
"""Gives the geometry of an image of this upright size; None if the trainer has no bucket for it."""

FILTERS_OF_RULE = {
    "latentcache": LANCZOS,
    "kohya": f"opencv-area and {LANCZOS}",
    "simpletuner": "opencv-linear",
    "onetrainer": "bilinear",
    "diffusers": LANCZOS,
}
"""Rule -> its filter (`resampling.FILTERS`), or `shrinking and enlarging`. OneTrainer resizes in floating point, which
differs by at most one 8-bit level; all other rules reproduce the trainer's pixels exactly."""

_ONETRAINER_ASPECTS = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0)
# SimpleTuner maps these megapixels, within 0.05, to the side of a square.
_SIMPLETUNER_SQUARES = {0.25: 512, 0.5: 768, 1.0: 1024, 2.0: 1536, 4.0: 2048}


class BucketRule:
    """A dataset's bucket rule with its settings. Raises ConfigError if they give no bucket at all."""

    def __init__(self, config: BucketsConfig):
        self.config = config
        self._fit = _FIT_FUNCTIONS[config.rule](config)

    def geometry(self, size: Size, *, flip: bool = False) -> Geometry | None:
        """The geometry of an image of this upright size; None if the trainer has no bucket for it."""
        geometry = self._fit(size)
        if geometry is None or not flip:
            return geometry
        (top, left), spare = geometry.crop_top_left, geometry.resized_size.width - geometry.target_size.width
        # diffusers mirrors before cropping; the crop here refers to the unmirrored image.
        mirrors_first = self.config.rule == "diffusers"
        return replace(geometry, crop_top_left=Crop(top, spare - left if mirrors_first else left), flip=True)

    def resample(self, geometry: Geometry) -> str:
        """The filter for this resize; `LANCZOS`, the default, if nothing is resized."""
        return _filter(self.filters, geometry)

    @property
    def filters(self) -> str:
        """The trainer's filter, or `shrinking and enlarging` if it has two."""
        config = self.config  # only the rule diffusers has `resample` and `sizes`
        return config.resample or ("bilinear" if config.sizes else FILTERS_OF_RULE[config.rule])

    def __str__(self) -> str:
        config = self.config
        settings = sorted(SETTINGS_OF_RULE[config.rule])
        names = [name for name in settings if getattr(config, name) not in (False, (), None)]
        return f"{config.rule} ({', '.join(f'{name} {getattr(config, name)}' for name in names)})"


def filter_of_trainer(name: str, geometry: Geometry) -> str:
    """The filter that a trainer used for this resize. An unknown name gets our own filter."""
    return _filter(FILTERS_OF_RULE.get(name, LANCZOS), geometry)


def _filter(filters: str, geometry: Geometry) -> str:
    if geometry.resized_size == geometry.original_size:
        return LANCZOS
    shrinks = all(now <= was for now, was in zip(geometry.resized_size, geometry.original_size, strict=True))
    return filters.split()[0] if shrinks else filters.split()[-1]


def _centred(size: Size, resized: Size, bucket: Bucket) -> Geometry | None:
    """A center crop, an odd pixel cut at the bottom or on the right. None if the image does not cover the bucket."""
    spare = Size(resized.height - bucket.height, resized.width - bucket.width)
    if min(*spare, bucket.height - 1, bucket.width - 1) < 0:
        return None
    return Geometry(size, resized, Crop(spare.height // 2, spare.width // 2), bucket)


def _latentcache(config: BucketsConfig) -> FitFunction:
    table = bucket_table(config)
    return lambda size: fit(size, assign(size, table))


def _kohya(config: BucketsConfig) -> FitFunction:
    """Its `BucketManager`. Without `upscale`, the bucket is the image's own size, shrunk to the area and cropped."""
    if not config.upscale and not config.square:
        return lambda size: _kohya_own_size(size, config)
    side = config.resolution
    table = (Bucket(side, side),) if config.square else _kohya_table(config)
    aspects = [bucket.width / bucket.height for bucket in table]
    known = frozenset(table)

    def place(size: Size) -> Geometry | None:
        aspect = size.width / size.height
        nearest = min(range(len(table)), key=lambda number: abs(aspects[number] - aspect))
        bucket = size if size in known else table[nearest]
        if aspect > bucket.width / bucket.height:
            scale = bucket.height / size.height
        else:
            scale = bucket.width / size.width
        return _centred(size, Size(int(size.height * scale + 0.5), int(size.width * scale + 0.5)), bucket)

    return place


def _kohya_table(config: BucketsConfig) -> Sequence[Bucket]:
    """Its `make_bucket_resolutions`, sorted as there: by width, then by height."""
    step, area = config.step, config.resolution**2
    least, most = config.min_side // step * step, -(-config.max_side // step) * step
    square = config.resolution // step * step
    found = {(square, square)}
    for side in range(least, most + 1, step):
        other = min(most, area // side // step * step)
        if other >= least:
            found |= {(side, other), (other, side)}
    return [Bucket(height, width) for width, height in sorted(found)]


def _kohya_own_size(size: Size, config: BucketsConfig) -> Geometry | None:
    """Its `bucket_no_upscale`."""
    step, area, aspect = config.step, config.resolution**2, size.width / size.height

    def stepped(value: float) -> int:
        return int(value + 0.5) // step * step

    resized = size
    if size.height * size.width > area:
        wide = math.sqrt(area * aspect)
        width, height = stepped(wide), stepped(area / wide)
        if min(width, height) < step or stepped(width / aspect) < step:
            return None
        # Round the side whose rounding changes the aspect least.
        by_width, by_height = width / stepped(width / aspect), stepped(height * aspect) / height
        if abs(by_width - aspect) < abs(by_height - aspect):
            resized = Size(int(width / aspect + 0.5), width)
        else:
            resized = Size(height, int(height * aspect + 0.5))
    return _centred(size, resized, Bucket(resized.height // step * step, resized.width // step * step))


def _simpletuner(config: BucketsConfig) -> FitFunction:
    """Its `TrainingSample`, with a center crop.

    SimpleTuner reuses the first bucket it computes for each aspect, rounded to two digits. So its bucket for a few long
    portraits (1:4 and beyond) depends on the order of the images; here it does not.
    """
    step, square = config.step, config.resolution
    edge, sized = square, _simpletuner_by_edge
    if config.resolution_type == "pixel_area":
        megapixels = config.resolution**2 / 1000**2
        edge, sized = _stepped(int(math.sqrt(megapixels * 1e6)), step), _simpletuner_by_area
        near = (side for known, side in _SIMPLETUNER_SQUARES.items() if abs(megapixels - known) < 0.05)
        square = next(near, 0) or _stepped(math.sqrt(megapixels * 1e6), step)

    def place(size: Size) -> Geometry | None:
        aspect = 1.0 if config.square else round(size.width / size.height, 2)
        if aspect == 0:
            return None
        bucket, resized = sized(size, aspect, edge, step)
        if config.square or round(bucket.width / bucket.height, 2) == 1.0:
            bucket = Bucket(square, square)
            resized = bucket if resized.width < square else resized
        return _centred(size, resized, bucket)

    return place


def _stepped(value: float, step: int) -> int:
    return max(round(value / step) * step, step)


def _of_height(size: Size, height: int) -> Size:
    return Size(height, int(height * (size.width / size.height)))


def _of_width(size: Size, width: int) -> Size:
    return Size(int(width / (size.width / size.height)), width)


def _simpletuner_by_area(size: Size, aspect: float, edge: int, step: int) -> tuple[Bucket, Size]:
    """Its `calculate_new_size_by_pixel_area`: the bucket, and the size before cropping."""
    if aspect == 1.0 and size.width == size.height:
        return Bucket(edge, edge), Size(edge, edge)
    bucket = Bucket(_stepped(edge / math.sqrt(aspect), step), _stepped(edge * math.sqrt(aspect), step))
    resized = _of_width(size, bucket.width) if bucket.width < bucket.height else _of_height(size, bucket.height)
    # Whatever the other side lacks is added to both sides.
    if bucket.width > resized.width:
        more = _of_width(size, bucket.width - resized.width)
    else:
        more = _of_height(size, max(0, bucket.height - resized.height))
    return bucket, Size(resized.height + more.height, resized.width + more.width)


def _simpletuner_by_edge(size: Size, aspect: float, edge: int, step: int) -> tuple[Bucket, Size]:
    """Its `calculate_new_size_by_pixel_edge`: the shorter side of the bucket has `edge` pixels."""
    if size.width < size.height:
        height, width = int(edge / aspect), edge
        bucket = Bucket(_stepped(height, step), _stepped(width, step))
        resized = _of_width(size, max(bucket.width, width))
        return bucket, resized if resized.height >= bucket.height else _of_height(size, bucket.height)
    height, width = edge, int(edge * aspect)
    bucket = Bucket(_stepped(height, step), _stepped(width, step))
    resized = _of_height(size, max(bucket.height, height))
    return bucket, resized if resized.width >= bucket.width else _of_width(size, bucket.width)


def _onetrainer(config: BucketsConfig) -> FitFunction:
    """The `AspectBucketing` and `ScaleCropImage` of mgds, for one resolution, without crop jitter."""
    side, step = config.resolution, config.step
    ratios = [(1.0, aspect) for aspect in _ONETRAINER_ASPECTS]
    shapes = [(h / math.sqrt(h * w) * side, w / math.sqrt(h * w) * side) for h, w in ratios]
    shapes += [(w, h) for h, w in shapes]
    # In set order, as there: of two equally near buckets, the first wins.
    table = list({(round(h / step) * step, round(w / step) * step) for h, w in shapes})
    if config.square:
        table = [(side, side)]

    def place(size: Size) -> Geometry | None:
        aspect = size.height / size.width
        bucket = Bucket(*min(table, key=lambda each: abs(each[0] / each[1] - aspect)))
        if aspect > bucket.height / bucket.width:
            resized = Size(round(size.height * (bucket.width / size.width)), bucket.width)
        else:
            resized = Size(bucket.height, round(size.width * (bucket.height / size.height)))
        return _centred(size, resized, bucket)

    return place


def _diffusers(config: BucketsConfig) -> FitFunction:
    """A square crop, as in train_text_to_image_sdxl.py with --center_crop, or a list of buckets.

    Scripts with --aspect_ratio_buckets resize to the bucket, whatever the image's own aspect, without cropping.
    """
    if not config.sizes:
        return lambda size: _diffusers_square(size, config.resolution)
    table = [Bucket(*size) for size in config.sizes]

    def place(size: Size) -> Geometry:
        # Ties go to the last bucket, as in diffusers' find_nearest_bucket.
        nearest = min(reversed(table), key=lambda each: abs(size.height * each.width - size.width * each.height))
        return Geometry(size, nearest, Crop(0, 0), nearest)

    return place


def _diffusers_square(size: Size, side: int) -> Geometry:
    long = int(side * max(size) / min(size))
    resized = Size(side, long) if size.height <= size.width else Size(long, side)
    # round() as in torchvision's CenterCrop: halves round to even.
    crop = Crop(round((resized.height - side) / 2), round((resized.width - side) / 2))
    return Geometry(size, resized, crop, Bucket(side, side))


_FIT_FUNCTIONS: dict[str, Callable[[BucketsConfig], FitFunction]] = {
    "latentcache": _latentcache,
    "kohya": _kohya,
    "simpletuner": _simpletuner,
    "onetrainer": _onetrainer,
    "diffusers": _diffusers,
}
