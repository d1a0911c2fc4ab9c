"""Every miss has one owner, however much is cached; a fresh run of several ranks has the batches of a single one.

That a rank which plans late leaves the work of others alone: test_run.py.
"""

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


def test_the_environment_names_the_shard() -> None:
    assert Shard.from_environment({}) == Shard(0, 1)
    torchrun = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "abc"}
    assert Shard.from_environment(torchrun) == Shard(5, 8, 1, "abc")
    assert Shard.from_environment({**torchrun, "LOCAL_WORLD_SIZE": "4"}) == Shard(5, 8, 1, "abc", 4)
    for wrong, message in (
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK: 'x' is not a number"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "less than WORLD_SIZE 2"),
        ({"RANK": "1"}, "less than WORLD_SIZE 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            Shard.from_environment(wrong)
