"""The random choices at each visit of an item: caption, flip and crop, and whether the caption is dropped.

All of them come from the visit's 63-bit draw, taken apart so that no choice depends on another:

    draw = ((rest * crops + crop) * 2 + flip) * lines + line       dropped if rest modulo 2**20 is below p * 2**20
    draw = ((rest * crops + crop) * 2 + flip) * 2**20 + point      if lines have weights: the point falls in a share

The variants of a line are not drawn but dealt: each n visits of an item see all n variants once, in a new order.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any, Literal, get_args

import numpy as np

from latentcache.config import Crops, DropoutTo
from latentcache.dataset.manifest import Manifest
from latentcache.errors import StoreError
from latentcache.loading.sampler import Visits

_POINTS = 1 << 20


@dataclass(frozen=True, slots=True)
class Choices:
    """What a dataset draws at each visit, and what is fixed: see `LatentDataset`. StoreError for an unknown value.

    `flips` is whether each visit draws between the image and the mirrored image.
    """

    caption: int | Literal["random"] = 0
    caption_dropout: float = 0.0
    dropout_to: DropoutTo = "empty"
    flips: bool = False
    crops: Crops = "first"

    def __post_init__(self) -> None:
        if self.caption != "random" and not (isinstance(self.caption, int) and self.caption >= 0):
            raise StoreError(f"caption is {self.caption!r}; it must be an integer of at least 0, or 'random'")
        if not (isinstance(self.caption_dropout, int | float) and 0 <= self.caption_dropout <= 1):
            raise StoreError(f"caption_dropout is {self.caption_dropout!r}; it must be a number from 0 to 1")
        if self.dropout_to not in get_args(DropoutTo):
            raise StoreError(f"dropout_to is {self.dropout_to!r}; it must be one of {', '.join(get_args(DropoutTo))}")
        if self.crops not in get_args(Crops):
            raise StoreError(f"crops is {self.crops!r}; it must be one of {', '.join(get_args(Crops))}")

    @property
    def draws(self) -> bool:
        """Whether anything is drawn at a visit."""
        return self.caption == "random" or self.flips or self.caption_dropout > 0 or self.crops == "random"

    def state(self) -> dict[str, Any]:
        """What a resumed run must have in common with the saved one: numbers and strings."""
        flips, dropout_to = "random" if self.flips else "fixed", self.dropout_to if self.caption_dropout else None
        dropout = {"caption_dropout": self.caption_dropout, "dropout_to": dropout_to}
        return {"caption": self.caption, "flips": flips, "crops": self.crops, **dropout}


class Chooser:
    """Makes the choices for visits of a manifest's samples: lines by their weights, variants in turn."""

    def __init__(self, manifest: Manifest, choices: Choices):
        self.choices, self.variants = choices, manifest.variants
        self._name, self._repeats = manifest.name, manifest.repeats
        self._shares = np.cumsum(np.array(manifest.weights, np.float64))
        strides = [stride for stride in range(1, self.variants + 1) if gcd(stride, self.variants) == 1]
        self._strides = np.array(strides)

    def check(self, counts: np.ndarray) -> None:
        """StoreError if lines cannot be drawn from samples with these numbers of caption entries: integers [n]."""
        num_weights = len(self._shares) if self.choices.caption == "random" else 0
        for num_lines in np.unique(counts // self.variants).tolist() if num_weights else ():
            if num_lines > num_weights or (num_lines and not self._shares[num_lines - 1]):
                raise StoreError(
                    f"manifest {self._name} has {num_weights} caption weights, but samples with {num_lines} captions: "
                    f"these need {num_lines} weights that are not all 0. Correct `weights` of the dataset and run "
                    "`latentcache precache CONFIG` again"
                )

    def lines(self, draws: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The line that each draw selects among the first `counts`, and the rest of each draw: int64 [n]."""
        if not len(self._shares):
            rest, lines = np.divmod(draws, counts)
            return lines, rest
        rest, points = np.divmod(draws, _POINTS)
        return self._shares.searchsorted(points / _POINTS * self._shares[counts - 1], side="right"), rest

    def deal(self, visits: Visits, items: np.ndarray, repeats: np.ndarray) -> np.ndarray:
        """The number of each visit's variant: int64 [n]. Every `variants` successive visits of an item see them all.

        `items` are item numbers without repeats; `repeats` are the repeats that the visits are of, from 0.
        """
        num = self.variants
        if num == 1:
            return np.zeros(len(items), np.int64)
        cycles, steps = np.divmod(visits.epochs * self._repeats + repeats, num)
        mixed = _mixed(_mixed(visits.seeds ^ items.astype(np.uint64)) + cycles.astype(np.uint64))
        starts, others = (mixed >> np.uint64(32)).astype(np.int64), (mixed % np.uint64(1 << 32)).astype(np.int64)
        # A stride that is coprime to `num` steps through all numbers below it, in another order.
        return np.asarray((starts + steps * self._strides[others % len(self._strides)]) % num)

    def fixed_captions(self, num: int) -> np.ndarray:
        """The caption entry's number for `num` visits if captions are not drawn: int64 [num]."""
        return np.full(num, self.choices.caption * self.variants)

    def choose(
        self, visits: Visits, counts: np.ndarray, items: np.ndarray, repeats: np.ndarray, crops: np.ndarray | int = 1
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The choices of these visits: caption entries, crops, which are mirrored, and which captions are dropped.

        `counts` are how many caption entries the items' samples have; a sample without any gets entry 0. See `deal` for
        `items` and `repeats`. `crops` are how many crops to draw from.
        """
        rest, caption = visits.draws, self.choices.caption
        if caption == "random":
            lines, rest = self.lines(rest, np.maximum(counts // self.variants, 1))
            captions = lines * self.variants + self.deal(visits, items, repeats)
        else:
            captions = self.fixed_captions(len(items))
        rest, flips = np.divmod(rest, 2)
        rest, chosen = np.divmod(rest, crops)
        dropped = rest % _POINTS < self.choices.caption_dropout * _POINTS
        return captions, chosen, (flips > 0) & self.choices.flips, dropped


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """Hash each number with the finaliser of SplitMix64, a bijection: uint64 [n]."""
    numbers = numbers + np.uint64(0x9E3779B97F4A7C15)
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    numbers ^= numbers >> np.uint64(31)
    return numbers
