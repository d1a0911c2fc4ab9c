"""The bucket sampler: every rank its share, whole epochs, and a resume that goes on where the run stopped."""

from __future__ import annotations

import copy
import json
import pickle
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from latentcache.errors import StoreError
from latentcache.loading.sampler import BucketBatchSampler, Visit, noise_generator, order_generator, seed_of
from latentcache.types import Bucket


@dataclass
class Numbers:
    """Items that lie in bucket number `buckets[index]`."""

    buckets: list[int]
    name: str = "numbers"

    def __len__(self) -> int:
        return len(self.buckets)

    def bucket(self, index: int) -> Bucket:
        return Bucket(64 * (1 + self.buckets[index]), 64)

    def groups(self) -> np.ndarray:
        return np.array(self.buckets, np.int64)

    def places(self) -> None:
        """They have no packs."""

    def identity(self) -> str:
        return f"{self.name} {self.buckets}"


DATASETS = st.lists(st.integers(0, 3), max_size=40).map(Numbers)


def drawn(sampler: BucketBatchSampler) -> list[list[tuple[int, int]]]:
    return [[(int(item), item.draw) for item in batch] for batch in sampler]


@settings(max_examples=60, deadline=None)
@given(
    DATASETS,
    st.integers(1, 5),
    st.booleans(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(1, 4),
)
def test_an_epoch(dataset, batch_size, shuffle, drop_last, seed, world_size) -> None:  # type: ignore[no-untyped-def]
    options = {"shuffle": shuffle, "drop_last": drop_last, "seed": seed}
    whole = list(BucketBatchSampler(dataset, batch_size, **options))
    items = [item for batch in whole for item in batch]
    assert len(set(items)) == len(items) and (drop_last or len(items) == len(dataset))
    assert all(len({dataset.bucket(item) for item in batch}) == 1 and len(batch) <= batch_size for batch in whole)
    assert not drop_last or all(len(batch) == batch_size for batch in whole)
    samplers = [
        BucketBatchSampler(dataset, batch_size, rank=rank, world_size=world_size, **options)
        for rank in range(world_size)
    ]
    shares = [list(sampler) for sampler in samplers]
    assert len({len(share) for share in shares}) == 1 and len(shares[0]) == len(samplers[0])
    dealt = [batch for step in zip(*shares, strict=True) for batch in step]
    assert dealt == whole[: len(whole) // world_size * world_size]


@settings(max_examples=40, deadline=None)
@given(DATASETS, st.integers(1, 4), st.integers(1, 3), st.integers(0, 12))
def test_a_resume_goes_on_where_the_run_stopped(dataset, batch_size, world_size, stop) -> None:  # type: ignore[no-untyped-def]
    for rank in range(world_size):

        def make(rank: int = rank) -> BucketBatchSampler:
            return BucketBatchSampler(dataset, batch_size, seed=3, rank=rank, world_size=world_size)

        sampler = make()
        sampler.set_epoch(4)
        expected = drawn(sampler)
        first = iter(sampler)
        taken = sum(1 for _, _ in zip(range(min(stop, len(expected))), first, strict=False))
        state = json.loads(json.dumps(sampler.state_dict()))
        other = make()
        other.load_state_dict(state)
        assert other.state_dict() == state and other.epoch == 4
        other.set_epoch(4)  # as every loop does
        assert drawn(other) == expected[taken:]
        assert drawn(other) == expected, "the next iteration is a whole epoch again"


def test_what_does_not_fit_is_refused_by_name() -> None:
    dataset = Numbers([0, 0, 0, 1, 1])
    sampler = BucketBatchSampler(dataset, 2, seed=1)
    state = sampler.state_dict()
    for other, message in (
        (BucketBatchSampler(dataset, 3, seed=1), r"batch_size \(2 there, 3 here\)\."),
        (BucketBatchSampler(dataset, 2, seed=2), r"seed \(1 there, 2 here\)"),
        (BucketBatchSampler(dataset, 2, seed=1, shuffle=False), r"shuffle \(True there, False here\)"),
        (BucketBatchSampler(dataset, 2, seed=1, drop_last=True), r"drop_last"),
        (BucketBatchSampler(Numbers([0, 0, 0, 1, 0]), 2, seed=1), r"dataset \('numbers"),
        (BucketBatchSampler(dataset, 4, seed=5), r"batch_size .*, seed "),
        (BucketBatchSampler(dataset, 2, seed=1, world_size=2), r"world_size \(1 there, 2 here\).*set_epoch\(0\)"),
    ):
        before = other.state_dict()
        with pytest.raises(StoreError, match=message):
            other.load_state_dict(state)
        assert other.state_dict() == before
    for broken in ({}, state | {"position": -1}, state | {"epoch": "1"}, state | {"position": True}):
        with pytest.raises(StoreError, match="give what state_dict"):
            sampler.load_state_dict(broken)
    with pytest.raises(StoreError, match=r"version \(0 there, 1 here\)"):
        sampler.load_state_dict(state | {"version": 0})


def test_seeds_do_not_collide() -> None:
    pairs = [(seed, epoch) for seed in range(-20, 21) for epoch in range(50)] + [(0, 1_000_003), (1, 0), (2**70, 0)]
    assert len({seed_of("order", *pair) for pair in pairs}) == len(set(pairs))
    assert seed_of("order", 1, 23) != seed_of("order", 12, 3) and seed_of("order", 1) != seed_of("visits", 1)
    orders = {tuple(order_generator(*pair).permutation(30).tolist()) for pair in pairs}
    assert len(orders) == len(set(pairs))
    first = {noise_generator(0, 0, position).get_state().numpy().tobytes() for position in range(200)}
    assert len(first) == 200


def test_a_visit_is_a_number_that_travels() -> None:
    visit = Visit.of(7, 2**62)
    for other in (visit, pickle.loads(pickle.dumps(visit)), copy.deepcopy(visit)):
        assert other == 7 and other.draw == 2**62 and hash(other) == hash(7) and [*range(10)][other] == 7
