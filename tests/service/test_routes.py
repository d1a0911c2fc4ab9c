"""What the routes answer, by requests to a real server."""

from __future__ import annotations

import json

from helpers.pack_damage import damage
from helpers.remote_samples import assert_same, entries_by_key, fill, make_manifest
from helpers.serving import serving_here

from latentcache.dataset.manifest import manifest_bytes, read_head
from latentcache.loading.status import status
from latentcache.store import DiskStore
from latentcache.store.upkeep import compact

ENTRIES = entries_by_key(range(12))


def test_the_status_is_that_of_the_command(served):
    assert served.get("/v1/status").json() == json.loads(json.dumps(status(served.cache).to_json()))


def test_packs_are_files(served):
    listed = served.get("/v1/packs").json()["packs"]
    assert [pack["num_entries"] for pack in listed] in ([9, 5], [5, 9])
    held = {}
    for pack in listed:
        path = f"/v1/packs/{pack['id']}"
        data = (served.cache / "packs" / pack["id"][:2] / f"{pack['id']}.safetensors").read_bytes()
        answer = served.get(path)
        assert answer.body == data and len(data) == pack["num_bytes"]
        held |= answer.entries()
        etag = answer.headers["etag"]
        assert answer.headers["cache-control"] == "private, max-age=31536000, immutable"
        head = served.request("HEAD", path)
        assert (head.status, head.body, head.headers["content-length"]) == (200, b"", str(len(data)))
        for tags, status_code in ((etag, 304), (f'"other", W/{etag}', 304), ('"other"', 200)):
            assert served.get(path, headers={"If-None-Match": tags}).status == status_code
    served.get(f"/v1/packs/{'0' * 32}").problem(404)
    assert held.keys() == ENTRIES.keys()
    for key, entry in ENTRIES.items():
        assert_same(held[key], entry)


def test_manifests_are_files(served):
    data = manifest_bytes(make_manifest("photos", range(12)))
    [listed] = served.get("/v1/manifests").json()["manifests"]
    answer = served.get("/v1/manifests/photos")
    assert answer.body == data and answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["etag"] == listed["etag"] == f'"{read_head(data, "photos", "it").digest}"'
    assert (listed["name"], listed["role"], listed["num_samples"]) == ("photos", "train", 12)
    assert served.get("/v1/manifests/photos", headers={"If-None-Match": listed["etag"]}).status == 304
    assert "photos" in served.get("/v1/manifests/none").problem(404)["allowed"]


def test_only_what_is_damaged_on_the_disk_becomes_a_miss(tmp_path):
    """Not what another process has moved or removed meanwhile."""
    cache, keys = fill(tmp_path / "cache", range(12)), list(ENTRIES)
    with serving_here(cache) as server:

        def verify(keys, token=server.write_token):
            return server.post("/v1/verify", {"keys": keys}, token=token)

        assert verify([*keys, "0" * 64]).json() == {"damaged": {}}
        for key in (keys[5], keys[7]):
            damage(cache, ENTRIES[key].tensors["moments"].numpy().tobytes())
        assert verify([keys[5]], None).status == 401
        assert verify(["no key"]).status == 422 and verify(["0" * 64] * 16385).status == 422
        assert verify([keys[5], keys[6]]).json()["damaged"].keys() == {keys[5]}
        there = server.post("/v1/entries:find", {"keys": keys}).json()["found"]
        assert there == [key for key in keys if key != keys[5]]
        assert verify([keys[5], keys[7]]).json()["damaged"].keys() == {keys[5], keys[7]}
        with DiskStore(cache) as other:
            other.remove(keys[:2])
            compact(other)
        assert verify(keys[:2] + keys[8:]).json() == {"damaged": {}}
