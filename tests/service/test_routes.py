"""What the routes answer, by requests to a real server."""

from __future__ import annotations

import json

import torch
from helpers.pack_answers import entries_in
from helpers.pack_damage import damage
from helpers.serving import serving_here
from service_samples import fill

from latentcache.dataset.manifest import manifest_bytes, read_head
from latentcache.loading.status import status
from latentcache.store import DiskStore
from latentcache.store.upkeep import compact


def assert_is(found, entry):
    assert found.record == entry.record and found.ragged == entry.ragged
    assert found.tensors.keys() == entry.tensors.keys()
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in entry.tensors.items())


def problem(answer, status, kind):
    assert (answer.status, answer.headers["content-type"]) == (status, "application/problem+json"), answer.body
    document = answer.json()
    assert document["status"] == status and document["kind"] == kind and document["title"] and document["detail"]
    assert document["type"] == f"urn:latentcache:{kind}"
    return document


def test_the_status_is_that_of_the_command(served):
    assert served.server.get("/v1/status").json() == json.loads(json.dumps(status(served.path).to_json()))


def test_entries_are_found(served):
    answer = served.server.post("/v1/entries:find", {"keys": [*served.keys, "0" * 64, served.keys[0]]})
    assert answer.json() == {"found": served.keys}


def test_packs_are_files(served):
    listed = served.server.get("/v1/packs").json()["packs"]
    assert sum(pack["num_entries"] for pack in listed) == 16 and len(listed) == 2
    held = {}
    for pack in listed:
        path = f"/v1/packs/{pack['id']}"
        held |= entries_in(served.server.get(path).body)
        data = (served.path / "packs" / pack["id"][:2] / f"{pack['id']}.safetensors").read_bytes()
        answer = served.server.get(path)
        assert answer.status == 200 and answer.body == data and len(data) == pack["num_bytes"]
        etag = answer.headers["etag"]
        assert answer.headers["cache-control"] == "private, max-age=31536000, immutable"
        head = served.server.request("HEAD", path)
        assert (head.status, head.body, head.headers["content-length"]) == (200, b"", str(len(data)))
        assert served.server.get(path, headers={"If-None-Match": etag}).status == 304
        assert served.server.get(path, headers={"If-None-Match": f'"other", W/{etag}'}).status == 304
        assert served.server.get(path, headers={"If-None-Match": '"other"'}).status == 200
    problem(served.server.get(f"/v1/packs/{'0' * 32}"), 404, "RequestRefused")
    for entry in served.entries:
        assert_is(held[entry.record.key], entry)


def test_manifests_are_files(served):
    data = manifest_bytes(served.manifest)
    [listed] = served.server.get("/v1/manifests").json()["manifests"]
    answer = served.server.get("/v1/manifests/photos")
    assert answer.body == data and answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["etag"] == listed["etag"] == f'"{read_head(data, "photos", "it").digest}"'
    assert (listed["name"], listed["role"], listed["num_samples"]) == ("photos", "train", 12)
    assert served.server.get("/v1/manifests/photos", headers={"If-None-Match": listed["etag"]}).status == 304
    assert "photos" in problem(served.server.get("/v1/manifests/none"), 404, "RequestRefused")["allowed"]


def test_only_what_is_damaged_on_the_disk_becomes_a_miss(tmp_path):
    """Not what another process has moved or removed meanwhile."""
    cache = fill(tmp_path / "cache")
    with serving_here(cache.path) as server:

        def verify(keys, token=server.write_token):
            return server.post("/v1/verify", {"keys": keys}, token=token)

        assert verify([*cache.keys, "0" * 64]).json() == {"damaged": {}}
        with DiskStore(cache.path) as store:
            for number in (5, 7):
                damage(cache.path, store.get(cache.keys[number]).tensors["moments"].numpy().tobytes())
        assert verify([cache.keys[5]], None).status == 401
        assert verify(["no key"]).status == 422 and verify(["0" * 64] * 16385).status == 422
        found = verify([cache.keys[5], cache.keys[6]]).json()["damaged"]
        assert found.keys() == {cache.keys[5]} and "digest" in found[cache.keys[5]]
        there = server.post("/v1/entries:find", {"keys": cache.keys}).json()["found"]
        assert there == [key for key in cache.keys if key != cache.keys[5]]
        assert verify([cache.keys[5], cache.keys[7]]).json()["damaged"].keys() == {cache.keys[5], cache.keys[7]}
        with DiskStore(cache.path) as other:
            other.remove(cache.keys[:2])
            compact(other)
        assert verify(cache.keys[:2] + cache.keys[8:]).json() == {"damaged": {}}
