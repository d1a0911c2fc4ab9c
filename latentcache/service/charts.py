"""Numbers as the templates draw them: bars in percent of the longest, histograms, and curves in a box of 100 by 100."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from latentcache.types import Size

MAX_BARS = 60
"""The rest of a longer table of bars is one last bar."""
ASPECT_BINS = 24
WIDEST = 4.0
"""The first and last bin of aspects have all that are narrower than 1 : WIDEST, or wider."""
BOX = 24.0
"""The longer side of a bucket's drawing."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A labelled number. `percent` is its share of the largest. `size` is that of a bucket, to be drawn."""

    label: str
    count: int
    percent: float
    size: Size | None = None

    @property
    def box(self) -> tuple[float, float]:
        """Width and height of the bucket's drawing, of which the longer one is BOX."""
        if self.size is None:
            return 0.0, 0.0
        scale = BOX / max(self.size)
        return round(self.size.width * scale, 1), round(self.size.height * scale, 1)


def bucket_bars(counts: Mapping[Size, int]) -> list[Bar]:
    """A bar for each bucket, from tall ones to wide ones."""
    sizes = sorted(counts, key=lambda size: (size.width / size.height, size))
    largest = max(counts.values(), default=1)
    bars = [Bar(str(size), counts[size], percent_of(counts[size], largest), size) for size in sizes]
    if len(bars) <= MAX_BARS:
        return bars
    kept = sorted(
        sorted(bars, key=lambda bar: -bar.count)[:MAX_BARS], key=lambda bar: sizes.index(bar.size or sizes[0])
    )
    rest = sum(bar.count for bar in bars) - sum(bar.count for bar in kept)
    return [*kept, Bar(f"{len(bars) - MAX_BARS} more", rest, min(100.0, percent_of(rest, largest)))]


def aspect_bars(counts: Mapping[Size, int]) -> list[Bar]:
    """How many photos have which width / height, in ASPECT_BINS bins of equal ratio around 1."""
    bins = [0] * ASPECT_BINS
    span = 2 * math.log(WIDEST)
    for size, count in counts.items():
        place = (math.log(size.width / size.height) + math.log(WIDEST)) / span * ASPECT_BINS
        bins[min(ASPECT_BINS - 1, max(0, int(place)))] += count
    largest = max(*bins, 1)
    edges = [WIDEST ** (2 * number / ASPECT_BINS - 1) for number in range(ASPECT_BINS + 1)]
    labels = [f"{low:.2f} to {high:.2f}" for low, high in pairwise(edges)]
    return [Bar(label, count, percent_of(count, largest)) for label, count in zip(labels, bins, strict=True)]


def percent_of(part: float, whole: float) -> float:
    """The share in percent, to two digits; 0 of nothing."""
    return round(100 * part / whole, 2) if whole else 0.0


@dataclass(frozen=True, slots=True)
class Curve:
    """A line through points, as SVG wants them, in a box of 100 by 100 whose y goes down; and its limits."""

    points: str
    area: str
    """As `points`, closed along the bottom."""
    dots: tuple[tuple[float, float], ...]
    low: float
    high: float


def curve_of(xs: Sequence[float], ys: Sequence[float], *, from_zero: bool) -> Curve | None:
    """The curve of these values; those that are not finite are left out. None of fewer than two values."""
    pairs = [(x, y) for x, y in zip(xs, ys, strict=True) if math.isfinite(x) and math.isfinite(y)]
    if len(pairs) < 2:
        return None
    left, right = min(x for x, _ in pairs), max(x for x, _ in pairs)
    low, high = min(y for _, y in pairs), max(y for _, y in pairs)
    if from_zero:
        low = min(0.0, low)
    dots = tuple((_place(x, left, right), round(100 - _place(y, low, high), 2)) for x, y in pairs)
    points = " ".join(f"{x},{y}" for x, y in dots)
    return Curve(points, f"{dots[0][0]},100 {points} {dots[-1][0]},100", dots, low, high)


def _place(value: float, low: float, high: float) -> float:
    span = high / 2 - low / 2  # halved: the difference of two floats may be no float
    return round((value / 2 - low / 2) / span * 100, 2) if span > 0 else 50.0


def crop_box(geometry: Mapping[str, Any]) -> dict[str, float]:
    """The crop in pixels of the photo (x, y, width, height), from a geometry's JSON, and the percent that it keeps."""
    (height, width), (resized_height, resized_width) = geometry["original_size"], geometry["resized_size"]
    (top, left), (target_height, target_width) = geometry["crop_top_left"], geometry["target_size"]
    down, across = height / resized_height, width / resized_width
    box = {"x": left * across, "y": top * down, "width": target_width * across, "height": target_height * down}
    kept = percent_of(box["width"] * box["height"], width * height)
    return {name: round(value, 1) for name, value in box.items()} | {"kept": min(100.0, kept)}
