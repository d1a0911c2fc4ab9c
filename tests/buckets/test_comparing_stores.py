"""Stores that compare before they replace, over HTTP: by ETags (S3), and by generations (Google)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers.comparing_server import ComparingServer, comparing_server
from transfers.test_transfers import check, fill, manifest_of

from latentcache.errors import RemoteError
from latentcache.remote.bucket import PROBES, Bucket
from latentcache.remote.bucket_marks import read_marks
from latentcache.remote.bucket_place import BucketPlace
from latentcache.remote.bucket_upkeep import BucketUpkeep
from latentcache.remote.places import open_far_place, open_place
from latentcache.remote.remote_packs import verify_place
from latentcache.remote.transfers import transfer
from latentcache.store.directory import pack_name
from latentcache.store.exchange import part_of
from latentcache.store.pack import read_pack_bytes
from latentcache.store.upkeep import VerifyReport


@pytest.fixture
def server() -> Iterator[ComparingServer]:
    with comparing_server() as server:
        yield server


@pytest.fixture(params=["s3", "gs"])
def url(request: pytest.FixtureRequest, server: ComparingServer, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in server.environment(request.param).items():
        monkeypatch.setenv(name, value)
    return f"{request.param}://team/cache"


def test_an_object_is_replaced_only_if_it_is_the_one_that_was_read(url: str) -> None:
    bucket = Bucket.open(url)
    assert bucket.can_replace and bucket.names("") == {}
    assert bucket.replace("x", b"1", None) and not bucket.replace("x", b"2", None)
    first = bucket.read("x")
    assert first is not None
    assert bucket.replace("x", b"2", first.version) and not bucket.replace("x", b"3", first.version)
    found = bucket.read("x")
    assert found is not None and bytes(found.data) == b"2"


def test_push_and_pull(url: str, tmp_path: Path) -> None:
    here, back = fill(tmp_path / "here", range(8)), tmp_path / "back"
    assert transfer(here, url).manifests == ["photos"]
    fill(here, range(16))
    report = transfer(here, url)
    assert report.ok and report.num_packs == 1 and report.manifests == ["photos"]
    assert transfer(url, back).num_packs == 2
    assert manifest_of(back) == manifest_of(here)
    check(back, range(16))
    assert list(Bucket.open(url).names("manifests")) == ["manifests/photos.safetensors"]


def test_a_pack_of_the_same_id_and_another_size_is_named(url: str, tmp_path: Path) -> None:
    here = fill(tmp_path / "here", range(8))
    with open_place(here) as source, BucketPlace(url, is_target=True) as target:
        (pack,) = source.packs()
        data = source.read(pack)
        records = read_pack_bytes(data, pack)
        target.bucket.put(pack_name(pack), bytes(data[:-1]))
        with pytest.raises(RemoteError, match=f"{len(data) - 1:,} bytes there, and {len(data):,} here.*Remove"):
            target.take(records, data)


def test_a_line_that_is_too_slow_is_named(url: str, server: ComparingServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("latentcache.remote.bucket.UPLOAD_S", 0.2)
    bucket = Bucket.open(url, retry_s=0.1)
    with server.lock, pytest.raises(RemoteError, match="4 Mbit/s"):
        bucket.send("0" * 32, b"x")


def test_a_pack_that_is_refused_does_not_stop_the_rest(url: str, server: ComparingServer, tmp_path: Path) -> None:
    """As of an object that lies in an archive."""
    first, second = fill(tmp_path / "first", range(8)), fill(tmp_path / "second", range(8, 16))
    transfer(first, url)
    (archived,) = Bucket.open(url).packs()
    transfer(second, url)
    server.refused[f"/team/cache/{pack_name(archived)}"] = 403
    bucket = Bucket.open(url)
    reasons: dict[str, str] = {}
    assert len(list(bucket.rows(bucket.packs(), reasons))) == 1
    assert list(reasons) == [archived] and "archived" in reasons[archived]
    report = BucketUpkeep(url, prune=False, grace_h=0).run()
    assert list(report.unreadable) == [archived] and archived in bucket.packs()
    with open_far_place(url) as place:
        found = verify_place(place)
    assert list(found.unreadable) == [archived] and found.num_entries == 9 and not bucket.names("marks")
    for pack in bucket.packs():
        server.refused[f"/team/cache/{pack_name(pack)}"] = 403
    with pytest.raises(RemoteError, match="credentials"):
        list(bucket.rows(bucket.packs()))
    with pytest.raises(RemoteError, match="credentials"), open_far_place(url) as place:
        verify_place(place)


def test_a_damaged_entry_is_marked_by_verify_and_comes_with_the_next_push(
    url: str, server: ComparingServer, tmp_path: Path
) -> None:
    here = fill(tmp_path / "here", range(16))
    transfer(here, url)
    with open_place(here) as source:
        pack = sorted(source.packs())[0]
        key = source.row(pack).names()[3]
        location = source.row(pack).location(3)
    path = f"/team/cache/{pack_name(pack)}"
    data, generation = server.objects[path]
    at = next(start for start, num in location.ranges() if num)
    server.objects[path] = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], generation

    def verify() -> VerifyReport:
        with open_far_place(url) as place:
            return verify_place(place)

    assert verify().damaged.keys() == {key}
    assert verify().known_damaged.keys() == {key}, "who looks next knows"
    report = transfer(here, url)
    assert report.ok and report.num_packs == 1
    again = verify()
    assert again.damaged == {} and again.ok
    back = tmp_path / "back"
    transfer(url, back)
    check(back, range(16))
    assert BucketUpkeep(url, prune=False, grace_h=0).run().damaged == {}


def test_a_copy_in_a_part_that_verify_did_not_read_counts(url: str, server: ComparingServer, tmp_path: Path) -> None:
    """What is whole somewhere is not damaged, and is not marked where it is whole."""
    first = fill(tmp_path / "first", range(8))
    transfer(first, url)
    (pack,) = Bucket.open(url).packs()
    data, generation = server.objects[f"/team/cache/{pack_name(pack)}"]
    records = read_pack_bytes(data, pack)
    part, copy = part_of(records, np.frombuffer(data, np.uint8), set(records.row.names()))
    Bucket.open(url).send(part.row.pack.id, copy)
    key, location = records.row.names()[0], records.row.location(0)
    at = next(start for start, num in location.ranges() if num)
    server.objects[f"/team/cache/{pack_name(pack)}"] = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], generation
    with open_far_place(url) as place:
        assert place.confirmed({key: "its digest differs"}, ()) == {}
    marks = [mark for each in read_marks(Bucket.open(url)).values() for mark in each]
    assert marks == [pack]


def test_a_pull_after_a_compact_fetches_each_entry_once(url: str, tmp_path: Path) -> None:
    here, back = fill(tmp_path / "here", range(16), per_pack=4), tmp_path / "back"
    transfer(here, url)
    with open_place(here) as source:
        old = source.packs()
    assert BucketUpkeep(url, prune=False, grace_h=24).run().num_listed == len(old)
    bucket = Bucket.open(url)
    new = bucket.packs().keys() - old.keys()
    assert len(bucket.packs()) == len(old) + 1
    report = transfer(url, back)
    assert report.ok and report.num_packs == 1
    with open_place(back) as target:
        assert target.packs().keys() == new
    check(back, range(16))
    for pack in new:  # what is only in packs that go comes from there
        bucket.remove_packs([pack])
    assert transfer(url, tmp_path / "other").num_packs == len(old)
    check(tmp_path / "other", range(16))


def test_what_a_killed_probe_left_goes(url: str, tmp_path: Path) -> None:
    transfer(fill(tmp_path / "here", range(8)), url)
    bucket = Bucket.open(url)
    bucket.put(f"{PROBES}/{'0' * 32}", b"1")
    BucketUpkeep(url, prune=False, grace_h=24).run()
    assert bucket.names(PROBES), "its grace time has not passed"
    BucketUpkeep(url, prune=False, grace_h=0).run()
    assert not bucket.names(PROBES)
