"""Every miss has one owner, however much is cached; a fresh run of several ranks has the batches of a single one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from latentcache.errors import ConfigError
from latentcache.precache.tasks import Batches, Shard

GROUPS = st.sampled_from(["square", "wide", "tall"])


def batches_of(members: list[tuple[str, int, bool]], shard: Shard, size: int) -> list[list[int]]:
    batches: Batches[int] = Batches(shard)
    for group, number, is_hit in members:
        batches.add(group, size, None if is_hit else number)
    return batches.finish()


@given(st.lists(st.tuples(GROUPS, st.booleans())), st.integers(1, 5), st.integers(1, 4))
def test_every_miss_has_exactly_one_owner(items: list[tuple[str, bool]], size: int, world_size: int) -> None:
    members = [(group, number, is_hit) for number, (group, is_hit) in enumerate(items)]
    shards = [Shard(rank, world_size) for rank in range(world_size)]
    shared = [batch for shard in shards for batch in batches_of(members, shard, size)]
    assert all(0 < len(batch) <= size and len({items[number][0] for number in batch}) == 1 for batch in shared)
    assert sorted(number for batch in shared for number in batch) == [
        number for _, number, is_hit in members if not is_hit
    ]
    fresh = [(group, number, False) for group, number, _ in members]
    shared = [batch for shard in shards for batch in batches_of(fresh, shard, size)]
    assert sorted(shared) == sorted(batches_of(fresh, Shard(), size)), "the batches of a single process"


def test_a_rank_that_starts_late_does_not_take_the_work_of_others() -> None:
    """The first rank has stored its share before the second one plans."""
    members = [("square", number, False) for number in range(12)]
    first = batches_of(members, Shard(0, 2), 2)
    stored = {number for batch in first for number in batch}
    late = batches_of([(g, n, n in stored) for g, n, _ in members], Shard(1, 2), 2)
    assert late == batches_of(members, Shard(1, 2), 2)
    left_over = [("square", number, number % 4 != 0) for number in range(16)]
    assert batches_of(left_over, Shard(), 4) == [[0, 4, 8, 12]], "they are joined"


def test_the_environment_names_the_shard() -> None:
    assert Shard.from_environment({}) == Shard(0, 1)
    assert Shard.from_environment({"RANK": "1", "WORLD_SIZE": "2"}) == Shard(1, 2)
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "abc"}
    assert Shard.from_environment(torchrun) == Shard(5, 8, 1, "abc")
    assert Shard.from_environment({**torchrun, "LOCAL_WORLD_SIZE": "4"}) == Shard(5, 8, 1, "abc", 4)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK: 'x' is not a number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "less than WORLD_SIZE 2"),
        ({"RANK": "1"}, "less than WORLD_SIZE 1"),
    ],
)
def test_a_wrong_environment_is_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Shard.from_environment(environ)
