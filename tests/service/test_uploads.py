"""Packs and manifests that are uploaded: taken whole, or not at all."""

from __future__ import annotations

import errno
import json
import os
import signal
from dataclasses import replace

import pytest
import torch
from helpers.remote_samples import assert_same, entries_by_key, entries_of, fill, make_manifest
from helpers.serving import TOKEN, serving, serving_here, wait_until
from hypothesis import given, settings
from hypothesis import strategies as st

from latentcache.dataset.manifest import manifest_bytes
from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.identity import canonical_json
from latentcache.service import manifests
from latentcache.store import DiskStore
from latentcache.store.entry import OwnedEntry, own_entry
from latentcache.store.pack import new_pack_id, pack_buffers
from latentcache.store.upkeep import verify


def image(number):
    return entries_of(number)[0]


def pack(entries):
    """A pack's id and bytes."""
    owned = [each if isinstance(each, OwnedEntry) else own_entry(each) for each in entries]
    name = new_pack_id()
    return name, b"".join(pack_buffers(name, owned)[2])


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving_here(fill(tmp_path_factory.mktemp("uploads") / "cache", range(4)), token=TOKEN) as server:
        yield server


def files(cache):
    """All files of packs and manifests."""
    found = [each for folder in ("packs", "manifests") for each in (cache / folder).rglob("*") if each.is_file()]
    return sorted(map(str, found))


def found(server, keys):
    return server.post("/v1/entries:find", {"keys": keys}).json()["found"]


def test_a_pack_is_added_once(server):
    new = entries_by_key(range(100, 102))
    name, data = pack([*new.values(), image(0)])
    assert found(server, list(new)) == []
    answer = server.put(f"/v1/packs/{name}", data)
    assert (answer.status, answer.json()) == (201, {"num_added": 3})
    assert found(server, list(new)) == list(new) and server.get(f"/v1/packs/{name}").body == data
    again = server.put(f"/v1/packs/{name}", data)
    assert (again.status, again.json()) == (200, {"num_added": 0})
    assert server.put(f"/v1/packs/{new_pack_id()}", data).json() == {"num_added": 0}, "of another name"
    with DiskStore(server.cache, read_only=True) as store:
        for key, entry in new.items():
            assert_same(store.get(key), entry)


class Forger(OwnedEntry):
    def digest(self):
        return b"0" * 16


def liars():
    """Packs whose digests fit, and that lie all the same."""
    honest = own_entry(image(200))
    yield replace(honest, record=own_entry(image(201)).record), "identity gives another key"
    deep = b'{"identity":' + b"[" * 5000 + b"]" * 5000 + b',"provenance":{}}'
    large = canonical_json({"identity": json.loads(honest.record)["identity"], "provenance": {"x": "y" * (2 << 20)}})
    records = [(b"{", "entry"), (b"[]", "not a record"), (deep, "not a record"), (large, "its record has")]
    for record, problem in records:
        yield replace(honest, record=record), problem
    yield Forger(honest.key, honest.kind, honest.record, honest.values), "digest"


@pytest.mark.parametrize(("liar", "problem"), [*liars()], ids=[*"abcdef"])
def test_a_pack_that_lies_is_refused_and_leaves_nothing(server, liar, problem):
    before = files(server.cache)
    name, data = pack([image(202), liar])
    assert problem in server.put(f"/v1/packs/{name}", data).problem(422, "PackError")["detail"]
    assert files(server.cache) == before and found(server, [image(202).record.key]) == []


WHOLE = pack(entries_of(300))[1]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, len(WHOLE) - 1), st.integers(1, 255), st.booleans())
def test_no_changed_byte_is_sealed(server, at, flip, cut):
    data = WHOLE[:at] if cut else WHOLE[:at] + bytes([WHOLE[at] ^ flip]) + WHOLE[at + 1 :]
    answer = server.put(f"/v1/packs/{new_pack_id()}", data)
    if answer.status != 201:
        answer.problem(422, "PackError")
        return
    with DiskStore(server.cache) as store:  # only padding, of the header or of a gap, is of no account
        assert not cut and not verify(store).damaged
        assert store.remove([each.record.key for each in entries_of(300)]) == answer.json()["num_added"] == 2


@pytest.mark.parametrize("damage", ["flipped", "cut"])
def test_an_upload_takes_the_place_of_a_damaged_file_that_the_index_does_not_know(tmp_path, damage):
    """The server died between the file and the index, and the disk lost bytes: the client's bytes are not at fault."""
    cache, whole = fill(tmp_path / "cache", range(4)), image(901)
    name, data = pack([whole])
    path = cache / "packs" / name[:2] / f"{name}.safetensors"
    path.parent.mkdir(exist_ok=True)
    at = data.index(whole.tensors["moments"].numpy().tobytes())
    with serving_here(cache) as server:
        path.write_bytes(data[: at + 8] if damage == "cut" else data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        server.put(f"/v1/packs/{name}", data[:-1] + bytes([data[-1] ^ 1])).problem(422, "PackError")
        answer = server.put(f"/v1/packs/{name}", data)
        assert (answer.status, answer.json()) == (201, {"num_added": 1})
        assert server.get(f"/v1/packs/{name}").body == data
        assert server.put(f"/v1/packs/{name}", data).status == 200
    with DiskStore(cache, read_only=True) as store:
        assert torch.equal(store.get(whole.record.key).tensors["moments"], whole.tensors["moments"])


def test_a_full_disk_is_a_507(tmp_path, monkeypatch):
    def full(fd, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    cache = fill(tmp_path / "cache", range(4))
    before = files(cache)
    monkeypatch.setattr("latentcache.store.disk.write_all", full)
    monkeypatch.setattr("latentcache.service.manifests.write_all", full)
    name, data = pack([image(1)])
    with serving_here(cache) as server:
        for path, body in ((f"packs/{name}", data), ("manifests/new", manifest_bytes(make_manifest("new")))):
            assert server.put(f"/v1/{path}", body).problem(507, "StorageFullError")["needed_bytes"] >= len(body)
    assert files(cache) == before


def test_a_reading_token_may_not_write(server):
    before = files(server.cache)
    for method, path, body in (
        ("PUT", f"packs/{'4' * 32}", pack([image(400)])[1]),
        ("PUT", "manifests/photos", b"x"),
        ("PUT", "manifests/photos/unfinished", None),
        ("DELETE", "manifests/photos/unfinished", None),
        ("POST", "verify", {"keys": []}),
    ):
        for token, status in ((server.token, 403), (None, 401), ("x" * 32, 401)):
            assert server.request(method, f"/v1/{path}", body, token=token).status == status, path
    assert files(server.cache) == before


def test_manifests_are_replaced_whole_and_guarded(server):
    def lines(num):
        return manifest_bytes(make_manifest("uploaded", range(num)))

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
    whole = make_manifest("uploaded", range(3))
    row = whole.rows["0.png"]
    doubled = manifest_bytes(replace(whole, rows={"one": row, "two": row}))  # its digest fits
    for wrong in (doubled, b"", b"{}", lines(3)[:-1], lines(3).replace(b"caption 0", b"caption 7"), lines(2) * 2):
        answer = server.put(path, wrong)
        assert answer.status == 422 and "uploaded" in answer.json()["detail"], wrong[:50]
    bare = manifest_bytes(replace(whole, rows={"bare": replace(row, sample_id="bare", images=())}))
    assert "sample 'bare' has no image, and no refusal" in server.put(path, bare).problem(422)["detail"]
    assert server.put("/v1/manifests/other-name", lines(3)).status == 422
    assert server.get(path).body == lines(3)
    assert ManifestFolder(server.cache / "manifests").read("uploaded") == whole


def test_a_manifest_that_is_replaced_while_it_is_read_is_sent_as_it_was(server, monkeypatch):
    old, genuine = make_manifest("sent", range(2)), manifests.read_head
    tag = server.put("/v1/manifests/sent", manifest_bytes(old)).headers["etag"]

    def replacing(data, *names):
        monkeypatch.setattr(manifests, "read_head", genuine)
        head = genuine(data, *names)
        ManifestFolder(server.cache / "manifests").write(make_manifest("sent", range(30)))
        return head

    monkeypatch.setattr(manifests, "read_head", replacing)
    answer = server.get("/v1/manifests/sent")
    assert answer.body == manifest_bytes(old) and answer.headers["etag"] == tag
    assert server.get("/v1/manifests/sent", headers={"If-None-Match": tag}).status == 200


def test_a_killed_server_and_a_client_that_goes_away_lose_nothing(tmp_path, capfd):
    cache = fill(tmp_path / "cache", range(4))
    name, data = pack([image(number) for number in range(600, 640)])

    def half_written():
        return [each for each in files(cache) if each.endswith((".tmp", f"{name}.safetensors"))]

    with serving(cache) as server:

        def half():
            rest = f"Content-Length: {len(data)}\r\n\r\n".encode() + data[: len(data) // 2]
            client = server.begin(f"PUT /v1/packs/{name}", rest)
            wait_until(half_written)
            return client

        half().close()  # the client goes away
        wait_until(lambda: not half_written())
        sealed = pack([image(700)])
        assert server.put(f"/v1/packs/{sealed[0]}", sealed[1]).status == 201
        with half():
            os.kill(server.process.pid, signal.SIGKILL)
            server.process.wait(20)
    printed = "".join(capfd.readouterr())
    assert server.token not in printed and server.write_token not in printed
    assert half_written()
    with DiskStore(cache) as store:
        assert set(store.keys()) == {*entries_by_key(range(4)), image(700).record.key}
        assert not verify(store).damaged and not half_written()
