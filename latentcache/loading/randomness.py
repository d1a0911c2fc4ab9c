"""Every random choice of training's data: derived from what it is for, the seed, the epoch and the position alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from latentcache.identity import canonical_json, digest


class Visit(int):
    """The number of an item, and `draw` (63 random bits) for the choices that are made anew at each visit.

    It is the plain number to everything else, also on its way to a DataLoader's workers.
    """

    draw: int = 0

    @classmethod
    def of(cls, index: int, draw: int) -> Visit:
        visit = cls(index)
        visit.draw = draw
        return visit


def seed_of(purpose: str, *parts: int) -> int:
    """The first 64 bits of the BLAKE3 digest of purpose and parts as canonical JSON. Any integers will do.

    Sums and products of seed and epoch, as are usual, give one seed to several pairs of them.
    """
    return int(digest(canonical_json([purpose, *parts]))[:16], 16)


def noise_generator(seed: int, epoch: int, position: int) -> torch.Generator:
    """The CPU generator that the latents of the batch at `position` of the epoch are drawn with.

    On the CPU, because its numbers are the same whatever the device. torch keeps 32 bits of a CPU generator's seed,
    so that two batches that lie far apart may, rarely, share their noise.
    """
    return torch.Generator("cpu").manual_seed(seed_of("latents", seed, epoch, position))


def order_generator(seed: int, epoch: int) -> np.random.Generator:
    """What an epoch is shuffled with. numpy's, because it keeps all 64 bits of its seed."""
    return np.random.default_rng(seed_of("order", seed, epoch))


def visits(items: Sequence[int], seed: int, epoch: int, position: int) -> list[Visit]:
    """The items of the batch at `position` of the epoch, each with a draw of its own."""
    draws = np.random.default_rng(seed_of("visits", seed, epoch, position)).integers(1 << 63, size=len(items))
    return [Visit.of(item, draw) for item, draw in zip(items, draws.tolist(), strict=True)]
