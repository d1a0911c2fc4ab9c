"""Stores that compare before they replace, over HTTP: by ETags (S3), and by generations (Google)."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.comparing_server import ComparingServer
from helpers.remote_samples import replace_packs
from transfers.test_transfers import check, fill, manifest_of, packs_of

from latentcache.errors import RemoteError
from latentcache.remote.bucket import BucketTransport
from latentcache.remote.index import FarIndex
from latentcache.remote.transfer import transfer
from latentcache.remote.transport import ANY_VERSION, packs_in, removals_in
from latentcache.remote.upkeep import verify
from latentcache.store.directory import pack_name
from latentcache.store.pack import WholePack, read_row


@pytest.fixture
def url(request: pytest.FixtureRequest, object_server: ComparingServer, monkeypatch: pytest.MonkeyPatch) -> str:
    scheme = getattr(request, "param", "s3")
    for name, value in object_server.environment(scheme).items():
        monkeypatch.setenv(name, value)
    return f"{scheme}://team/cache"


@pytest.mark.parametrize("url", ["s3", "gs"], indirect=True)
def test_push_and_pull(url: str, tmp_path: Path) -> None:
    here, back = fill(tmp_path / "here", range(8)), tmp_path / "back"
    assert transfer(here, url).manifests == ["photos"]
    fill(here, range(16))
    report = transfer(here, url)
    assert report.ok and report.num_packs == 1 and report.manifests == ["photos"]
    assert transfer(url, back).num_packs == 2
    assert manifest_of(back) == manifest_of(here)
    check(back, range(16))
    assert list(BucketTransport.open(url).list("manifests")) == ["manifests/photos.safetensors"]


def test_a_pack_that_is_refused_does_not_stop_the_rest(
    url: str, object_server: ComparingServer, tmp_path: Path
) -> None:
    """As of an object that lies in an archive."""
    first, second = fill(tmp_path / "first", range(8)), fill(tmp_path / "second", range(8, 16))
    transfer(first, url)
    bucket = BucketTransport.open(url)
    (archived,) = packs_in(bucket)
    transfer(second, url)
    object_server.refused[f"/team/cache/{pack_name(archived)}"] = 403
    index = FarIndex(bucket)
    index.refresh()
    assert len(index.sizes) == 1
    assert list(index.unreadable) == [archived] and "archived" in index.unreadable[archived]
    assert archived in packs_in(bucket)
    found = verify(bucket)
    assert list(found.unreadable) == [archived] and found.num_entries == 9
    for pack in packs_in(bucket):
        object_server.refused[f"/team/cache/{pack_name(pack)}"] = 403
    with pytest.raises(RemoteError, match="credentials"):
        FarIndex(bucket).refresh()
    with pytest.raises(RemoteError, match="credentials"):
        verify(bucket)


def broken_at(url: str, object_server: ComparingServer, here: Path, number: int) -> str:
    """Change a bit of an entry of the first pack there. Returns its key."""
    pack = sorted(packs_of(here))[0]
    row = read_row(here / pack_name(pack))
    path, at = f"/team/cache/{pack_name(pack)}", row.location(number).ranges()[0][0]
    data, generation = object_server.objects[path]
    object_server.objects[path] = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], generation
    return row.key(number)


def test_a_copy_in_a_part_that_verify_did_not_read_counts(
    url: str, object_server: ComparingServer, tmp_path: Path
) -> None:
    first = fill(tmp_path / "first", range(8))
    transfer(first, url)
    (pack,) = packs_in(BucketTransport.open(url))
    data, _ = object_server.objects[f"/team/cache/{pack_name(pack)}"]
    for _ in range(8):  # ids are random: some are in other parts
        whole = WholePack.in_memory(pack, data)
        row, copy = whole.part(whole.row.names())
        BucketTransport.open(url).write(pack_name(row.pack.id), copy, version=ANY_VERSION)
    key = broken_at(url, object_server, first, 0)
    reports = [verify(BucketTransport.open(url), subset=(number, 8)) for number in range(1, 9)]
    assert all(report.ok for report in reports) and sum(report.num_packs for report in reports) >= 9
    assert list(removals_in(BucketTransport.open(url))) == [pack] and key


def test_a_pull_fetches_an_entry_once_where_it_lies_in_a_listed_pack_too(url: str, tmp_path: Path) -> None:
    here, back = fill(tmp_path / "here", range(16), per_pack=4), tmp_path / "back"
    transfer(here, url)
    bucket = BucketTransport.open(url)
    old = replace_packs(bucket)
    new = packs_in(bucket).keys() - set(old)
    report = transfer(url, back)
    assert report.ok and report.num_packs == len(new)
    assert packs_of(back).keys() == new
    check(back, range(16))
    bucket.remove(map(pack_name, new))  # what is only in packs that go comes from there
    assert transfer(url, tmp_path / "other").num_packs == len(old)
    check(tmp_path / "other", range(16))
