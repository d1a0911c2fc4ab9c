"""What the routes answer, by requests to a real server."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load

from latentcache.dataset.manifest import manifest_parts, read_head
from latentcache.loading.status import status
from latentcache.store import DiskStore
from latentcache.store.pack import read_entry, read_pack_bytes, verified_arrays


def entries_in(data):
    """The entries of a pack, each compared with its digest."""
    records, array = read_pack_bytes(data, "answer"), np.frombuffer(data, np.uint8)
    found = {}
    for at, key in enumerate(records.row.names()):
        location = records.row.location(at)
        arrays = verified_arrays(array, key, location)
        assert not isinstance(arrays, str), arrays
        found[key] = records.record(at), read_entry(arrays, records, location)
    return found


def assert_is(found, entry):
    record, owned = found
    assert record == entry.record and owned.ragged == entry.ragged and owned.tensors.keys() == entry.tensors.keys()
    assert all(torch.equal(owned.tensors[name], tensor) for name, tensor in entry.tensors.items())


def problem(answer, status, kind):
    assert (answer.status, answer.headers["content-type"]) == (status, "application/problem+json"), answer.body
    document = answer.json()
    assert document["status"] == status and document["kind"] == kind and document["title"] and document["detail"]
    assert document["type"] == f"urn:latentcache:{kind}"
    return document


def test_status_stats_and_damage_are_those_of_the_commands(served):
    assert served.server.get("/v1/status").json() == json.loads(json.dumps(status(served.path).to_json()))
    with DiskStore(served.path, read_only=True) as store:
        assert served.server.get("/v1/stats").json() == store.stats().to_json()
    assert served.server.get("/v1/damaged").json() == {"damaged": {}}


def test_keys_come_in_pages(served):
    found, after = [], ""
    while True:
        answer = served.server.get(f"/v1/keys?limit=5&after={after}")
        assert len(answer.body) % 32 == 0
        found += [answer.body[at : at + 32].hex() for at in range(0, len(answer.body), 32)]
        after = found[-1]
        if answer.headers.get("latentcache-more") != "1":
            break
    assert found == sorted(served.keys)


def test_entries_are_found_and_read_as_packs(served):
    absent = "0" * 64
    answer = served.server.post("/v1/entries:find", {"keys": [*served.keys, absent, served.keys[0]]})
    assert answer.json() == {"found": served.keys}
    data = served.server.post("/v1/entries:read", {"keys": [*served.keys, served.keys[0]], "fields": None}).body
    found = entries_in(data)
    assert found.keys() == set(served.keys)
    for entry in served.entries:
        assert_is(found[entry.record.key], entry)
        [alone] = entries_in(served.server.get(f"/v1/entries/{entry.record.key}/payload").body).values()
        assert_is(alone, entry)


def test_fields_are_stacked_in_the_order_of_the_keys(served):
    images = [served.entries[number] for number in (5, 2, 5, 0)]
    keys = [entry.record.key for entry in images]
    answer = served.server.post("/v1/entries:read", {"keys": keys, "fields": ["moments"]})
    found = load(answer.body)
    assert b'"partial"' in answer.body[:400]
    assert torch.equal(found["moments"], torch.stack([entry.tensors["moments"] for entry in images]))
    texts = [served.entries[number] for number in (14, 12, 15)]
    answer = served.server.post(
        "/v1/entries:read", {"keys": [entry.record.key for entry in texts], "fields": ["hidden", "moments"]}
    )
    found = load(answer.body)
    assert found["hidden/offsets"].tolist() == [0, 3, 4, 8]
    assert torch.equal(found["hidden/values"], torch.cat([entry.tensors["hidden"] for entry in texts]))
    mixed = {"keys": [served.keys[0], served.keys[13]], "fields": ["hidden"]}
    assert (
        "has no field 'hidden'"
        in problem(served.server.post("/v1/entries:read", mixed), 422, "RequestRefused")["detail"]
    )


def test_the_record_of_an_entry(served):
    entry = served.entries[13]
    assert served.server.get(f"/v1/entries/{entry.record.key}").json() == {
        "key": entry.record.key,
        "kind": "text",
        "identity": entry.record.identity,
        "provenance": entry.record.provenance,
        "fields": {
            "hidden": {"dtype": "float32", "shape": [2, 3]},
            "moments": {"dtype": "float16", "shape": [8, 4, 4]},
        },
        "ragged": ["hidden"],
    }


@pytest.mark.parametrize("path", ["entries/{}", "entries/{}/payload"])
def test_an_entry_that_is_not_there_is_a_404(served, path):
    absent = "ab" * 32
    found = problem(served.server.get("/v1/" + path.format(absent)), 404, "EntryMissingError")
    assert found["key"] == absent and "latentcache precache" in found["detail"]


def test_one_missing_entry_fails_the_whole_batch(served):
    body = {"keys": [*served.keys[:3], "cd" * 32], "fields": ["moments"]}
    for request in (body, body | {"fields": None}):
        assert problem(served.server.post("/v1/entries:read", request), 404, "EntryMissingError")["key"] == "cd" * 32


def test_packs_are_files(served):
    listed = served.server.get("/v1/packs").json()["packs"]
    assert sum(pack["num_entries"] for pack in listed) == 16 and len(listed) == 2
    for pack in listed:
        path = f"/v1/packs/{pack['id']}"
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


def test_manifests_are_files(served):
    data = b"".join(manifest_parts(served.manifest))
    [listed] = served.server.get("/v1/manifests").json()["manifests"]
    answer = served.server.get("/v1/manifests/photos")
    assert answer.body == data and answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["etag"] == listed["etag"] == f'"{read_head(data, "photos", "it").digest}"'
    assert (listed["name"], listed["role"], listed["num_samples"]) == ("photos", "train", 12)
    assert served.server.get("/v1/manifests/photos", headers={"If-None-Match": listed["etag"]}).status == 304
    assert "photos" in problem(served.server.get("/v1/manifests/none"), 404, "RequestRefused")["allowed"]


def test_samples_come_in_pages_and_can_be_searched(served):
    rows = [row.to_json() for row in served.manifest.rows.values()]

    def page(query):
        answer = served.server.get(f"/v1/manifests/photos/samples?{query}")
        assert answer.status == 200, answer.body
        return answer.json()

    assert page("") == {"total": 12, "offset": 0, "samples": rows}
    assert page("offset=10&limit=5") == {"total": 12, "offset": 10, "samples": rows[10:]}
    assert page("offset=99") == {"total": 12, "offset": 99, "samples": []}
    assert page("search=RED&offset=1&limit=2") == {"total": 6, "offset": 1, "samples": rows[3:6:2]}
    assert page("search=photo7.jpg")["samples"] == [rows[7]]
    assert page("search=m%C3%BCLLER")["total"] == 12
    assert page("search=/photos/") == {"total": 0, "offset": 0, "samples": []}  # a path is no caption


def test_metrics_count(served):
    def value(name):
        lines = served.server.get("/v1/metrics").body.decode().splitlines()
        [found] = [line.rpartition(" ")[2] for line in lines if line.rpartition(" ")[0] == name] or ["0"]
        return float(found)

    names = {
        "hits": "latentcache_hits_total",
        "misses": "latentcache_misses_total",
        "sent": "latentcache_sent_bytes_total",
        "read": 'latentcache_requests_total{method="POST",route="/v1/entries:read",status="200"}',
        "missing": 'latentcache_requests_total{method="POST",route="/v1/entries:read",status="404"}',
    }
    before = {name: value(series) for name, series in names.items()}
    num_bytes = len(served.server.post("/v1/entries:read", {"keys": served.keys[:3]}).body)
    served.server.post("/v1/entries:read", {"keys": ["0" * 64]})
    served.server.post("/v1/entries:find", {"keys": [*served.keys[:2], "0" * 64]})
    added = {name: value(series) - before[name] for name, series in names.items()}
    assert added.pop("sent") > num_bytes
    assert added == {"hits": 5, "misses": 2, "read": 1, "missing": 1}
    served.server.request("BREW", "/v1/pot")
    assert value('latentcache_requests_total{method="other",route="none",status="404"}') >= 1
