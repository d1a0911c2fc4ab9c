"""Packs and manifests over HTTP: downloads, verification, and uploads, which are taken whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import signal
from dataclasses import replace

import pytest
import torch
from helpers.pack_damage import damage
from helpers.remote_samples import assert_same, entries_by_key, entries_of, fill, make_entry, make_manifest
from helpers.serving import serving, serving_here, wait_until
from hypothesis import given, settings
from hypothesis import strategies as st

from latentcache.dataset.manifest import manifest_bytes, read_head
from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.dataset.row_table import Ref
from latentcache.identity import canonical_json
from latentcache.loading.status import status
from latentcache.service import manifests
from latentcache.store import DiskStore
from latentcache.store.entry import OwnedEntry, own_entry
from latentcache.store.pack import new_pack_id, pack_buffers
from latentcache.store.upkeep import compact, verify

ENTRIES = entries_by_key(range(12))


def image(number):
    return entries_of(number)[0]


def pack(entries):
    """A pack's id and bytes."""
    owned = [each if isinstance(each, OwnedEntry) else own_entry(each) for each in entries]
    name = new_pack_id()
    return name, b"".join(pack_buffers(name, owned)[2])


def files(cache):
    """All files of packs and manifests."""
    found = [each for folder in ("packs", "manifests") for each in (cache / folder).rglob("*") if each.is_file()]
    return sorted(map(str, found))


def found(server, keys):
    return server.post("/v1/entries:find", {"keys": keys}).json()["found"]


def test_the_status_is_that_of_the_command(served):
    """Also where it names a sample, because its caption is cut, whose name is no text."""
    text, row = make_entry("text", "long", {"pooled": torch.ones(3)}, num_tokens=99), make_manifest().rows.row(0)
    row = replace(row, sample_id="\udcff.png", captions=(Ref.of_text("long", text.record.key),))
    with DiskStore(served.cache) as store:
        store.add([text])
    ManifestFolder(served.cache / "manifests").write(make_manifest("odd").with_rows({row.sample_id: row}))
    assert status(served.cache).manifests[0].cut == (row.sample_id,)
    assert served.get("/v1/status").json() == json.loads(json.dumps(status(served.cache).to_json()))


def test_packs_are_added_once_and_downloaded_as_they_are(served):
    new = entries_by_key(range(100, 102))
    name, data = pack([*new.values(), image(0)])
    assert found(served, list(new)) == []
    for status_code, num_added in ((201, 3), (200, 0)):
        answer = served.put(f"/v1/packs/{name}", data)
        assert (answer.status, answer.json()) == (status_code, {"num_added": num_added})
    assert served.put(f"/v1/packs/{new_pack_id()}", data).json() == {"num_added": 0}, "of another name"
    assert found(served, list(new)) == list(new) and served.get(f"/v1/packs/{name}").body == data
    held = {}
    for listed in served.get("/v1/packs").json()["packs"]:
        path = f"/v1/packs/{listed['id']}"
        data = (served.cache / "packs" / listed["id"][:2] / f"{listed['id']}.safetensors").read_bytes()
        answer = served.get(path)
        assert answer.body == data and len(data) == listed["num_bytes"]
        assert len(answer.entries()) == listed["num_entries"]
        held |= answer.entries()
        etag = answer.headers["etag"]
        assert answer.headers["cache-control"] == "private, max-age=31536000, immutable"
        head = served.request("HEAD", path)
        assert (head.status, head.body, head.headers["content-length"]) == (200, b"", str(len(data)))
        for tags, status_code in ((etag, 304), (f'"other", W/{etag}', 304), ('"other"', 200)):
            assert served.get(path, headers={"If-None-Match": tags}).status == status_code
    served.get(f"/v1/packs/{'0' * 32}").problem(404)
    for key, entry in (ENTRIES | new).items():
        assert_same(held[key], entry)


def test_manifests_are_files(served):
    data = manifest_bytes(make_manifest("photos", range(12)))
    listed = next(each for each in served.get("/v1/manifests").json()["manifests"] if each["name"] == "photos")
    answer = served.get("/v1/manifests/photos")
    assert answer.body == data and answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["etag"] == listed["etag"] == f'"{read_head(data, "photos", "it").digest}"'
    assert (listed["role"], listed["num_samples"]) == ("train", 12)
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
        assert found(server, keys) == [key for key in keys if key != keys[5]]
        assert verify([keys[5], keys[7]]).json()["damaged"].keys() == {keys[5], keys[7]}
        with DiskStore(cache) as other:
            other.remove(keys[:2])
            compact(other)
        assert verify(keys[:2] + keys[8:]).json() == {"damaged": {}}


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
def test_a_pack_that_lies_is_refused_and_leaves_nothing(served, liar, problem):
    before = files(served.cache)
    name, data = pack([image(202), liar])
    assert problem in served.put(f"/v1/packs/{name}", data).problem(422, "PackError")["detail"]
    assert files(served.cache) == before and found(served, [image(202).record.key]) == []


WHOLE = pack(entries_of(300))[1]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, len(WHOLE) - 1), st.integers(1, 255), st.booleans())
def test_no_changed_byte_is_sealed(served, at, flip, cut):
    data = WHOLE[:at] if cut else WHOLE[:at] + bytes([WHOLE[at] ^ flip]) + WHOLE[at + 1 :]
    answer = served.put(f"/v1/packs/{new_pack_id()}", data)
    if answer.status != 201:
        answer.problem(422, "PackError")
        return
    with DiskStore(served.cache) as store:  # only padding, of the header or of a gap, is of no account
        assert not cut and not verify(store).damaged
        assert store.remove([each.record.key for each in entries_of(300)]) == answer.json()["num_added"] == 2


@pytest.mark.parametrize("is_cut", [False, True])
def test_an_upload_takes_the_place_of_a_damaged_file_that_the_index_does_not_know(served, is_cut):
    """The server died between the file and the index, and the disk lost bytes: the client's bytes are not at fault."""
    whole = image(900 + is_cut)
    name, data = pack([whole])
    path = served.cache / "packs" / name[:2] / f"{name}.safetensors"
    path.parent.mkdir(exist_ok=True)
    at = data.index(whole.tensors["moments"].numpy().tobytes())
    path.write_bytes(data[: at + 8] if is_cut else data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    served.put(f"/v1/packs/{name}", data[:-1] + bytes([data[-1] ^ 1])).problem(422, "PackError")
    answer = served.put(f"/v1/packs/{name}", data)
    assert (answer.status, answer.json()) == (201, {"num_added": 1})
    assert served.put(f"/v1/packs/{name}", data).status == 200
    assert_same(served.get(f"/v1/packs/{name}").entries()[whole.record.key], whole)


def test_a_full_disk_is_a_507(served, monkeypatch):
    def full(fd, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = files(served.cache)
    monkeypatch.setattr("latentcache.store.disk.write_all", full)
    monkeypatch.setattr("latentcache.service.manifests.write_all", full)
    name, data = pack([image(500)])
    for path, body in ((f"packs/{name}", data), ("manifests/new", manifest_bytes(make_manifest("new")))):
        assert served.put(f"/v1/{path}", body).problem(507, "StorageFullError")["needed_bytes"] >= len(body)
    assert files(served.cache) == before


def test_manifests_are_replaced_whole_and_guarded(served):
    def lines(num):
        return manifest_bytes(make_manifest("uploaded", range(num)))

    path = "/v1/manifests/uploaded"
    first = served.put(path, lines(2), headers={"If-None-Match": "*"})
    assert first.status == 201 and first.json()["num_samples"] == 2
    assert served.put(path, lines(3), headers={"If-None-Match": "*"}).status == 412
    assert served.put(path, lines(3), headers={"If-Match": '"other"'}).status == 412
    assert served.get(path).body == lines(2)
    second = served.put(path, lines(3), headers={"If-Match": first.headers["etag"]})
    assert second.status == 200 and served.get(path).body == lines(3)
    stale = served.put(path, lines(4), headers={"If-Match": first.headers["etag"]})
    assert stale.status == 412 and stale.json()["met"] == second.headers["etag"]
    whole = make_manifest("uploaded", range(3))
    row = whole.rows["0.png"]
    doubled = manifest_bytes(replace(whole, rows={"one": row, "two": row}))  # its digest fits
    for wrong in (doubled, b"", b"{}", lines(3)[:-1], lines(3).replace(b"caption 0", b"caption 7"), lines(2) * 2):
        answer = served.put(path, wrong)
        assert answer.status == 422 and "uploaded" in answer.json()["detail"], wrong[:50]
    bare = manifest_bytes(replace(whole, rows={"bare": replace(row, sample_id="bare", images=())}))
    assert "sample 'bare' has no image, and no refusal" in served.put(path, bare).problem(422)["detail"]
    assert served.put("/v1/manifests/other-name", lines(3)).status == 422
    assert served.get(path).body == lines(3)
    assert ManifestFolder(served.cache / "manifests").read("uploaded") == whole


def test_a_manifest_that_is_replaced_while_it_is_read_is_sent_as_it_was(served, monkeypatch):
    old, genuine = make_manifest("sent", range(2)), manifests.read_head
    tag = served.put("/v1/manifests/sent", manifest_bytes(old)).headers["etag"]

    def replacing(data, *names):
        monkeypatch.setattr(manifests, "read_head", genuine)
        head = genuine(data, *names)
        ManifestFolder(served.cache / "manifests").write(make_manifest("sent", range(30)))
        return head

    monkeypatch.setattr(manifests, "read_head", replacing)
    answer = served.get("/v1/manifests/sent")
    assert answer.body == manifest_bytes(old) and answer.headers["etag"] == tag
    assert served.get("/v1/manifests/sent", headers={"If-None-Match": tag}).status == 200


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
