"""Packs and manifests that are uploaded: taken whole, or not at all."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import socket
import time
from dataclasses import replace

import pytest
import torch
from helpers.serving import TOKEN, serving, serving_here
from hypothesis import given, settings
from hypothesis import strategies as st
from service_samples import entry, fill, manifest

from latentcache.dataset.manifest import manifest_bytes
from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.identity import canonical_json
from latentcache.service.state import Limits
from latentcache.store import DiskStore
from latentcache.store.entry import OwnedEntry, own_entry
from latentcache.store.pack import new_pack_id, pack_buffers
from latentcache.store.upkeep import verify


def pack(entries):
    """A pack's id and bytes."""
    owned = [each if isinstance(each, OwnedEntry) else own_entry(each) for each in entries]
    name = new_pack_id()
    return name, b"".join(pack_buffers(name, owned)[2])


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return fill(tmp_path_factory.mktemp("uploads") / "cache")


@pytest.fixture(scope="module")
def server(cache):
    with serving_here(cache.path, token=TOKEN) as server:
        yield server


def files(path):
    """All files of packs and manifests."""
    found = [each for folder in ("packs", "manifests") for each in (path / folder).rglob("*") if each.is_file()]
    return sorted(str(each.relative_to(path)) for each in found)


def test_a_pack_is_added_once(cache, server):
    new = [entry(100), entry(101, kind="text", length=3)]
    name, data = pack([*new, cache.entries[0]])
    keys = [each.record.key for each in new]
    assert server.post("/v1/entries:find", {"keys": keys}).json() == {"found": []}
    answer = server.put(f"/v1/packs/{name}", data)
    assert (answer.status, answer.json()) == (201, {"num_added": 2})
    assert server.post("/v1/entries:find", {"keys": keys}).json() == {"found": keys}
    assert server.get(f"/v1/packs/{name}").body == data
    again = server.put(f"/v1/packs/{name}", data)
    assert (again.status, again.json()) == (200, {"num_added": 0})
    # Other names, the same entries: nothing is new.
    assert server.put(f"/v1/packs/{new_pack_id()}", data).json() == {"num_added": 0}
    with DiskStore(cache.path, read_only=True) as store:
        for each in new:
            found = store.get(each.record.key)
            assert found.record == each.record and found.ragged == each.ragged
            assert all(torch.equal(found.tensors[field], tensor) for field, tensor in each.tensors.items())


def liars():
    """Packs whose digests fit, and that lie all the same."""
    honest = own_entry(entry(200))
    other = own_entry(entry(201))
    wrong = replace(honest, record=other.record)
    yield "another entry's record", [wrong], "identity gives another key"
    yield "no JSON", [replace(honest, record=b"{")], "entry"
    yield "no record", [replace(honest, record=b"[]")], "not a record"
    deep = b'{"identity":' + b"[" * 5000 + b"]" * 5000 + b',"provenance":{}}'
    yield "deep JSON", [replace(honest, record=deep)], "not a record"
    large = canonical_json({"identity": json.loads(honest.record)["identity"], "provenance": {"x": "y" * (2 << 20)}})
    yield "a large record", [replace(honest, record=large)], "its record has"

    class Forger(OwnedEntry):
        def digest(self):
            return b"0" * 16

    forged = Forger(honest.key, honest.kind, honest.record, honest.values)
    yield "a wrong digest", [forged], "digest"


@pytest.mark.parametrize(("entries", "problem"), [case[1:] for case in liars()], ids=[case[0] for case in liars()])
def test_a_pack_that_lies_is_refused_and_leaves_nothing(cache, server, entries, problem):
    before = files(cache.path)
    name, data = pack([entry(202), *entries])
    answer = server.put(f"/v1/packs/{name}", data)
    assert answer.status == 422 and answer.json()["kind"] == "PackError" and problem in answer.json()["detail"]
    assert files(cache.path) == before
    assert server.post("/v1/entries:find", {"keys": [entry(202).record.key]}).json() == {"found": []}


WHOLE = pack([entry(300), entry(301, kind="text", length=2)])[1]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, len(WHOLE) - 1), st.integers(1, 255), st.booleans())
def test_no_changed_byte_is_sealed(server, cache, at, flip, cut):
    data = WHOLE[:at] if cut else WHOLE[:at] + bytes([WHOLE[at] ^ flip]) + WHOLE[at + 1 :]
    answer = server.put(f"/v1/packs/{new_pack_id()}", data)
    if answer.status == 201:  # only padding, of the header or of a gap, is of no account
        with DiskStore(cache.path) as store:
            assert not cut and not verify(store).damaged
            assert (
                store.remove([entry(300).record.key, entry(301, kind="text", length=2).record.key])
                == answer.json()["num_added"]
                == 2
            )
    else:
        assert answer.status == 422 and answer.json()["kind"] == "PackError"


@pytest.mark.parametrize("damage", ["flipped", "cut"])
def test_an_upload_takes_the_place_of_a_damaged_file_that_the_index_does_not_know(tmp_path, damage):
    """The server died between the file and the index, and the disk lost bytes: the client's bytes are not at fault."""
    cache = fill(tmp_path / "cache")
    whole = entry(901)
    name, data = pack([whole])
    path = cache.path / "packs" / name[:2] / f"{name}.safetensors"
    path.parent.mkdir(exist_ok=True)
    at = data.index(whole.tensors["moments"].numpy().tobytes())
    with serving_here(cache.path, Limits()) as server:
        path.write_bytes(data[: at + 8] if damage == "cut" else data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        refused = server.put(f"/v1/packs/{name}", data[:-1] + bytes([data[-1] ^ 1]))
        assert refused.status == 422 and refused.json()["kind"] == "PackError"
        answer = server.put(f"/v1/packs/{name}", data)
        assert (answer.status, answer.json()) == (201, {"num_added": 1})
        assert server.get(f"/v1/packs/{name}").body == data
        assert server.put(f"/v1/packs/{name}", data).status == 200
    with DiskStore(cache.path, read_only=True) as store:
        assert torch.equal(store.get(whole.record.key).tensors["moments"], whole.tensors["moments"])


def test_a_full_disk_is_a_507(tmp_path, monkeypatch):
    def full(fd, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    cache = fill(tmp_path / "cache")
    before = files(cache.path)
    monkeypatch.setattr("latentcache.store.disk.write_all", full)
    monkeypatch.setattr("latentcache.service.manifests.write_all", full)
    name, data = pack([entry(1)])
    with serving_here(cache.path, Limits()) as server:
        for path, body in (
            (f"/v1/packs/{name}", data),
            ("/v1/manifests/new", manifest_bytes(cache.manifest)),
        ):
            answer = server.put(path, body)
            assert answer.status == 507 and answer.json()["kind"] == "StorageFullError", path
    assert files(cache.path) == before


def test_a_reading_token_may_not_write(cache, server):
    name, data = pack([entry(400)])
    requests = [
        ("PUT", f"/v1/packs/{name}", data),
        ("PUT", "/v1/manifests/photos", b"x"),
        ("PUT", "/v1/manifests/photos/unfinished", None),
        ("POST", "/v1/verify", {"keys": []}),
    ]
    before = files(cache.path)
    for method, path, body in requests:
        assert server.request(method, path, body, token=server.token).status == 403, path
        assert server.request(method, path, body, token=None).status == 401, path
        assert server.request(method, path, body, token="x" * 32).status == 401, path
    assert files(cache.path) == before


def test_manifests_are_replaced_whole_and_guarded(cache, server):
    def lines(num):
        return manifest_bytes(manifest("uploaded", cache.entries[:num]))

    path = "/v1/manifests/uploaded"
    first = server.put(path, lines(2), headers={"If-None-Match": "*"})
    assert first.status == 201 and first.json()["num_samples"] == 2
    assert server.put(path, lines(3), headers={"If-None-Match": "*"}).status == 412
    assert server.put(path, lines(3), headers={"If-Match": '"other"'}).status == 412
    assert server.get(path).body == lines(2)
    second = server.put(path, lines(3), headers={"If-Match": first.headers["etag"]})
    assert second.status == 200 and server.get(path).body == lines(3)
    stale = server.put(path, lines(4), headers={"If-Match": first.headers["etag"]})
    assert stale.status == 412 and stale.json()["met"] == second.headers["etag"]
    row = next(iter(cache.manifest.rows.values()))
    twice = replace(cache.manifest, name="uploaded", rows={"one": row, "two": row})
    doubled = manifest_bytes(twice)  # its digest fits, and a sample is there twice
    for wrong in (doubled, b"", b"{}", lines(3)[:-1], lines(3).replace(b"number 1", b"number 7"), lines(2) + lines(2)):
        answer = server.put(path, wrong)
        assert answer.status == 422 and "uploaded" in answer.json()["detail"], wrong[:50]
    first = next(iter(cache.manifest.rows.values()))
    bare = replace(cache.manifest, name="uploaded", rows={"bare": replace(first, sample_id="bare", images=())})
    answer = server.put(path, manifest_bytes(bare))
    assert answer.status == 422 and "sample 'bare' has no image, and no refusal" in answer.json()["detail"]
    assert server.put("/v1/manifests/other-name", lines(3)).status == 422
    assert server.get(path).body == lines(3)
    assert ManifestFolder(cache.path / "manifests").read("uploaded") == manifest("uploaded", cache.entries[:3])


def test_unfinished_runs_are_noted(cache, server):
    path = "/v1/manifests/running/unfinished"
    for _ in range(2):
        assert server.put(path, b"").status == 204
    assert list(server.get("/v1/manifests").json()["unfinished"]) == ["running"]
    done = server.put("/v1/manifests/running", manifest_bytes(manifest("running", cache.entries[:1])))
    assert done.status == 201 and server.get("/v1/manifests").json()["unfinished"] == {}


def test_a_killed_server_and_a_client_that_goes_away_lose_nothing(tmp_path):
    cache = fill(tmp_path / "cache")
    name, data = pack([entry(number) for number in range(600, 640)])
    head = "PUT /v1/packs/{} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {}\r\nContent-Length: {}\r\n\r\n"
    with serving(cache.path) as server:

        def half():
            client = socket.create_connection(server.address)
            client.sendall(head.format(name, server.write_token, len(data)).encode() + data[: len(data) // 2])
            deadline = time.monotonic() + 20
            while not any(each.endswith(".tmp") for each in files(cache.path)):
                time.sleep(0.02)
                assert time.monotonic() < deadline
            return client

        half().close()  # the client goes away
        deadline = time.monotonic() + 20
        while any(each.endswith(".tmp") for each in files(cache.path)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not [each for each in files(cache.path) if each.endswith((".tmp", f"{name}.safetensors"))]
        sealed = pack([entry(700)])
        assert server.put(f"/v1/packs/{sealed[0]}", sealed[1]).status == 201
        with half():
            os.kill(server.process.pid, signal.SIGKILL)
            server.process.wait(20)
    assert [each for each in files(cache.path) if each.endswith(".tmp")]
    with DiskStore(cache.path) as store:
        assert set(store.keys()) == {*cache.keys, entry(700).record.key}
        assert not verify(store).damaged
        assert not [each for each in files(cache.path) if each.endswith(".tmp")]
    shutil.rmtree(cache.path)
