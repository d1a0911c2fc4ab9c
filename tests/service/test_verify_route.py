"""`POST /v1/verify`: the server reads entries on its own disk, and only what is damaged there becomes a miss."""

from __future__ import annotations

import pytest
from helpers.serving import serving_here
from service_samples import fill

from latentcache.service.state import Limits
from latentcache.store import DiskStore
from latentcache.store.upkeep import compact, verify_entries


@pytest.fixture
def cache(tmp_path):
    return fill(tmp_path / "cache")


def damage(cache, number):
    """Change a bit of an entry in its pack."""
    with DiskStore(cache.path, read_only=True) as store:
        [location] = store.look_up([cache.keys[number]])
        path = store.directory.pack_path(location.pack.id)
        values = store.get(cache.keys[number]).tensors["moments"].numpy().tobytes()
    data = bytearray(path.read_bytes())
    data[data.index(values) + 5] ^= 1
    path.write_bytes(data)


def test_only_what_is_damaged_on_the_disk_becomes_a_miss(cache):
    with serving_here(cache.path, Limits(max_keys=20)) as server:

        def verify(keys, **more):
            return server.post("/v1/verify", {"keys": keys}, **{"token": server.write_token, **more})

        assert verify([*cache.keys, "0" * 64]).json() == {"damaged": {}}
        damage(cache, 2)
        damage(cache, 13)
        assert verify([cache.keys[2]], token=None).status == 401
        assert verify(["no key"]).status == 422 and verify(["0" * 64] * 21).status == 413
        found = verify([cache.keys[2], cache.keys[3]]).json()["damaged"]
        assert found.keys() == {cache.keys[2]} and "digest" in found[cache.keys[2]]
        there = server.post("/v1/entries:find", {"keys": cache.keys}).json()["found"]
        assert there == [key for key in cache.keys if key != cache.keys[2]]
        assert verify([cache.keys[2], cache.keys[13]]).json()["damaged"].keys() == {cache.keys[2], cache.keys[13]}


def test_entries_that_were_moved_or_removed_are_not_damaged(cache):
    with serving_here(cache.path, Limits()) as server, DiskStore(cache.path) as other:
        assert server.post("/v1/entries:find", {"keys": cache.keys}).status == 200
        other.remove(cache.keys[:3])
        compact(other)
        answer = server.post("/v1/verify", {"keys": cache.keys}, token=server.write_token)
        assert (answer.status, answer.json()) == (200, {"damaged": {}})


def test_a_store_that_can_only_be_read_is_checked_and_keeps_its_entries(cache):
    damage(cache, 4)
    with DiskStore(cache.path, read_only=True) as store:
        assert verify_entries(store, cache.keys).keys() == {cache.keys[4]}
    with DiskStore(cache.path, read_only=True) as store:
        assert store.damaged() == {} and len(store.find(cache.keys)) == len(cache.keys)


def test_a_pack_that_is_gone_is_damage(cache):
    with DiskStore(cache.path) as store:
        for path in cache.path.glob("packs/*/*.safetensors"):
            path.unlink()
        found = verify_entries(store, cache.keys)
        assert found.keys() == set(cache.keys) and all("gone" in reason for reason in found.values())
        assert store.damaged().keys() == set(cache.keys)
