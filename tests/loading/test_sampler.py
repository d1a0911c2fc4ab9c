"""The bucket sampler: each rank's share, whole epochs, and resuming where a run stopped."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from latentcache.errors import StoreError
from latentcache.identity import seed_of
from latentcache.loading.choices import Choices
from latentcache.loading.sampler import BucketBatchSampler, Places, noise_generator, order_generator
from latentcache.types import Bucket


@dataclass
class Items:
    """Items in bucket number `buckets[index]` and, if packs are given, in pack number `packs[index]`."""

    buckets: list[int]
    packs: list[int] | None = None
    name: str = "numbers"
    choices: Choices = field(default_factory=Choices)

    def __len__(self) -> int:
        return len(self.buckets)

    def bucket(self, index: int) -> Bucket:
        return Bucket(64 * (1 + self.buckets[index]), 64)

    def groups(self) -> np.ndarray:
        return np.array(self.buckets, np.int64)

    def places(self) -> Places | None:
        if self.packs is None:
            return None
        return Places(np.array(self.packs, np.int64), np.arange(len(self.packs)), f"{self.packs}")

    def drawn(self) -> dict[str, Any]:
        return self.choices.state()

    def identity(self) -> str:
        return f"{self.name} {self.buckets}"


RANDOM = st.lists(st.integers(0, 3), max_size=40).map(Items)
IN_PACKS = st.lists(st.tuples(st.integers(0, 2), st.integers(-1, 9)), max_size=60).map(
    lambda items: Items([bucket for bucket, _ in items], [pack for _, pack in items])
)
DATASETS = st.one_of(RANDOM, IN_PACKS)


def drawn(sampler: BucketBatchSampler) -> list[list[tuple[int, int]]]:
    return [[(int(item), item.draw) for item in batch] for batch in sampler]


def made(dataset: Any, *arguments: Any, **options: Any) -> BucketBatchSampler:
    """The sampler. Examples whose epoch has no batch are refused, and skipped."""
    try:
        return BucketBatchSampler(dataset, *arguments, **options)
    except StoreError as error:
        assert "items has no batch" in str(error)
        reject()


NUM = st.integers(1, 4)


@settings(max_examples=80)
@given(DATASETS, NUM, st.booleans(), st.booleans(), st.integers(-(2**70), 2**70), NUM, NUM)
def test_an_epoch(dataset, batch_size, shuffle, drop_last, seed, world_size, window) -> None:  # type: ignore[no-untyped-def]
    options = {"shuffle": shuffle, "drop_last": drop_last, "seed": seed, "window": window}
    whole = list(made(dataset, batch_size, **options))
    items = [item for batch in whole for item in batch]
    assert len(set(items)) == len(items) and (drop_last or len(items) == len(dataset))
    assert all(len({dataset.bucket(item) for item in batch}) == 1 and len(batch) <= batch_size for batch in whole)
    assert not drop_last or all(len(batch) == batch_size for batch in whole)
    ranks = [{"rank": rank, "world_size": world_size} for rank in range(world_size)]
    samplers = [made(dataset, batch_size, **rank, **options) for rank in ranks]
    shares = [list(sampler) for sampler in samplers]
    dealt = [batch for step in zip(*shares, strict=True) for batch in step]
    assert len(dealt) == len(whole) // world_size * world_size
    assert drawn(samplers[0]) == drawn(samplers[0]) and len(shares[0]) == len(samplers[0])
    if dataset.packs is None:
        assert dealt == whole[: len(dealt)]
        return
    assert all(len({dataset.bucket(item) for item in batch}) == 1 and len(batch) <= batch_size for batch in dealt)
    dealt_items = [item for batch in dealt for item in batch]
    assert len(set(dealt_items)) == len(dealt_items), "no rank has those of another"


@settings(max_examples=60)
@given(DATASETS, NUM, st.integers(1, 3), st.integers(0, 12))
def test_a_resume_goes_on_where_the_run_stopped(dataset, batch_size, world_size, stop) -> None:  # type: ignore[no-untyped-def]
    def share(rank: int) -> BucketBatchSampler:
        return made(dataset, batch_size, seed=3, rank=rank, world_size=world_size, window=2)

    first, expected, taken = [share(rank) for rank in range(world_size)], [], 0
    for sampler in first:
        sampler.set_epoch(4)
        expected.append(drawn(sampler))
        taken = sum(1 for _ in zip(range(min(stop, len(sampler))), sampler, strict=False))
    states = [json.loads(json.dumps(sampler.state_dict())) for sampler in first]
    assert all(state == states[0] for state in states), "any rank's state is that of all"
    for rank in range(world_size):
        other = share(rank)
        other.load_state_dict(states[0])
        assert other.state_dict() == states[0] and other.epoch == 4
        other.set_epoch(4)  # as every loop does
        assert drawn(other) == expected[rank][taken:]
        assert drawn(other) == expected[rank], "the next iteration is a whole epoch again"


def test_packs_are_shuffled_and_few_are_open() -> None:
    num_packs, per_pack, window = 60, 64, 5
    dataset = Items([0] * num_packs * per_pack, np.repeat(np.arange(num_packs), per_pack).tolist())
    sampler = BucketBatchSampler(dataset, 4, seed=1, window=window, world_size=2)
    packs = [[dataset.packs[item] for item in batch.numbers] for batch in sampler.plan(0)]
    flat = [pack for batch in packs for pack in batch]
    first = {pack: flat.index(pack) for pack in flat}
    last = {pack: len(flat) - flat[::-1].index(pack) for pack in flat}
    most_open = max(sum(first[pack] <= at < last[pack] for pack in first) for at in range(0, len(flat), 16))
    assert 3 <= most_open <= window + 1
    assert len(first) == num_packs // 2, "a rank reads its own packs only"
    assert sorted(first, key=first.__getitem__) != sorted(first), "packs come in random order"
    mixed = [len(set(batch)) for batch in packs[40:-40]]
    assert np.mean(mixed) > 2.5, "the rows of a batch come from several packs"
    assert packs != [[dataset.packs[item] for item in batch.numbers] for batch in sampler.plan(1)]
    in_turn = BucketBatchSampler(dataset, 4, shuffle=False)
    assert [item for batch in in_turn for item in batch] == list(range(len(dataset)))


FEW = Items([0, 0, 0, 1, 1])


def choosing(*arguments: Any, **options: Any) -> Items:
    return replace(FEW, choices=Choices(*arguments, **options))


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (FEW, {"batch_size": 3}, r"batch_size \(2 there, 3 here\)\."),
        (FEW, {"seed": 2}, r"seed \(1 there, 2 here\)"),
        (FEW, {"shuffle": False}, r"shuffle \(True there, False here\)"),
        (FEW, {"drop_last": True}, r"drop_last"),
        (Items([0, 0, 0, 1, 0]), {}, r"dataset \('numbers"),
        (Items(FEW.buckets, [0, 0, 1, 1, 2]), {}, r"packs \(None there, .*, window \(None there, 16"),
        (FEW, {"world_size": 2}, r"world_size \(1 there, 2 here\).*set_epoch\(0\)"),
        (choosing(1, flips=True), {}, r"caption \(0 there, 1 here\), flips \('fixed' there, 'random' here"),
        (choosing("random", crops="random"), {}, r"caption .*, crops \('first' there, 'random' here"),
        (choosing(0, 0.1, "zeros"), {}, r"caption_dropout \(0\.0 .* 0\.1 here\), dropout_to \(None there, 'zeros'"),
    ],
)
def test_the_state_of_another_run_is_refused_by_name(dataset: Items, options: dict[str, Any], message: str) -> None:
    state = BucketBatchSampler(FEW, 2, seed=1).state_dict()  # type: ignore[arg-type]
    other = BucketBatchSampler(dataset, **{"batch_size": 2, "seed": 1, **options})  # type: ignore[arg-type]
    before = other.state_dict()
    with pytest.raises(StoreError, match=message):
        other.load_state_dict(state)
    assert other.state_dict() == before


def test_what_is_no_state_and_no_sampler_is_refused() -> None:
    sampler = BucketBatchSampler(FEW, 2)  # type: ignore[arg-type]
    state = sampler.state_dict()
    for broken in ({}, state | {"position": -1}, state | {"epoch": "1"}, state | {"position": True}):
        with pytest.raises(StoreError, match="give what state_dict"):
            sampler.load_state_dict(broken)
    with pytest.raises(StoreError, match=r"version \(0 there, 1 here\)"):
        sampler.load_state_dict(state | {"version": 0})
    for options in ({"window": 0}, {"batch_size": 0}, {"rank": 1}, {"rank": -1}):
        with pytest.raises(StoreError, match=f"{next(iter(options))} is .*; it must be at least"):
            BucketBatchSampler(FEW, **{"batch_size": 2, **options})  # type: ignore[arg-type]


def test_seeds_do_not_collide() -> None:
    pairs = [(seed, epoch) for seed in range(-20, 21) for epoch in range(50)] + [(0, 1_000_003), (1, 0), (2**70, 0)]
    assert len({seed_of("order", *pair) for pair in pairs}) == len(set(pairs))
    assert seed_of("order", 1, 23) != seed_of("order", 12, 3) and seed_of("order", 1) != seed_of("visits", 1)
    orders = {tuple(order_generator(*pair).permutation(30).tolist()) for pair in pairs}
    assert len(orders) == len(set(pairs))
    first = {noise_generator(0, 0, position).get_state().numpy().tobytes() for position in range(200)}
    assert len(first) == 200
