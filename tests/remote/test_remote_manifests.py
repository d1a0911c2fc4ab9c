"""Manifests elsewhere: read, replaced as a whole, and never replaced unseen, in a bucket as on a service."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from helpers.far_caches import Far
from helpers.relay import Relay
from helpers.remote_samples import make_manifest

from latentcache.dataset.manifest import Manifest
from latentcache.dataset.manifest_folder import update_manifest
from latentcache.errors import DatasetError, ReadOnlyError, RemoteError, StoreBusyError
from latentcache.remote.manifests import RemoteManifests
from latentcache.remote.service import ServiceTransport
from latentcache.remote.transfer import transfer
from latentcache.remote.transport import ANY_VERSION, Listed


def files_of(far: Far) -> set[str]:
    """The files of manifests, and of notes of runs, that are there, but for the one that is locked."""
    if far.folder is not None:
        return {file.name for file in (far.folder / "manifests").glob("*") if file.name != ".lock"}
    return {name.removeprefix("manifests/") for name in far.transport().list("manifests")}


def make(*numbers: int, name: str = "photos") -> Manifest:
    rows = make_manifest(numbers=range(max(numbers) + 1)).rows
    return replace(make_manifest(name), rows={f"{number}.png": rows[f"{number}.png"] for number in numbers})


def ids(manifest: Manifest | None) -> set[int]:
    assert manifest is not None
    return {int(sample_id.removesuffix(".png")) for sample_id in manifest.rows}


def test_what_was_written_is_read_and_replaced_as_a_whole(far: Far) -> None:
    manifests, reader = far.manifests(), RemoteManifests(far.transport(), read_only=True)
    for call in (lambda: reader.write(make(1)), lambda: reader.begin("photos")):
        with pytest.raises(ReadOnlyError):
            call()
    assert files_of(far) == set() and manifests.names() == [] and manifests.read("photos") is None
    manifests.begin("photos")
    [note] = files_of(far)
    assert note.startswith("photos+") and note.endswith(".unfinished") and manifests.names() == []
    manifests.write(make(1, 2))
    manifests.write(make(7, name="my.photos"))
    assert files_of(far) == {"photos.safetensors", "my.photos.safetensors"}
    assert far.manifests().read("photos") == make(1, 2) and far.manifests().names() == ["my.photos", "photos"]
    manifests.write(make(2, 3))
    assert manifests.read("photos") == make(2, 3), "1 is gone: this writer knew of it"
    far.manifests().write(make(4))
    assert manifests.read("photos") == make(4)


def test_writers_that_read_the_same_lose_nothing(far: Far) -> None:
    far.manifests().write(make(1))
    first, second = far.manifests(), far.manifests()
    assert ids(first.read("photos")) == ids(second.read("photos")) == {1}
    first.write(make(1, 2))
    for _ in range(2):
        with pytest.raises(StoreBusyError, match="another client replaced the manifest photos"):
            second.write(make(1, 3))
    assert ids(second.read("photos")) == {1, 2}
    second.write(make(1, 2, 3))
    assert first.read("photos") == make(1, 2, 3)
    second.write(make(9))
    first.write(make(9))  # equal: as when ranks end together
    assert ids(far.manifests().read("photos")) == {9}
    assert first.read("other") is None
    second.write(make(4, name="other"))
    with pytest.raises(StoreBusyError):
        first.write(make(2, name="other"))
    assert far.manifests().read("other") == make(4, name="other")


def test_many_writers_at_once_lose_nothing(far: Far) -> None:
    """Each adds its samples one by one, as machines do that push to one place."""

    def with_one(manifests: RemoteManifests, number: int) -> Manifest:
        there = manifests.read("photos")
        return make(number, *(() if there is None else ids(there)))

    def add(first: int) -> None:
        manifests = far.manifests()
        for number in range(first, first + 4):
            update_manifest(manifests, partial(with_one, manifests, number))

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(add, (0, 10, 20)))
    assert ids(far.manifests().read("photos")) == {10 * a + b for a in range(3) for b in range(4)}


def test_a_damaged_manifest_is_named_and_replaced(far: Far) -> None:
    manifests = far.manifests()
    manifests.write(make(1))
    if far.folder is not None:
        path = far.folder / "manifests" / "photos.safetensors"
        path.write_bytes(path.read_bytes().replace(b"1.png", b"2.png"))
    else:
        name, transport = "manifests/photos.safetensors", far.transport()
        transport.write(name, bytes(transport.read(name)[0]).replace(b"1.png", b"2.png"), version=ANY_VERSION)
    with pytest.raises(DatasetError, match="its digest differs"):
        manifests.read("photos")
    manifests.write(make(3))
    assert manifests.read("photos") == make(3)


@pytest.mark.parametrize("name", ["../../odd", "/tmp/odd", "", "..", "a\\..\\odd", "odd\n", "a" * 101])
def test_a_name_that_would_be_a_path_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A pull from a service that somebody else runs would write outside of the cache."""
    files = {f"manifests/{name}.safetensors": Listed(0)}
    monkeypatch.setattr(ServiceTransport, "list", lambda self, folder: files if folder == "manifests" else {})
    with pytest.raises(RemoteError, match="is not a valid name"):
        transfer("http://127.0.0.1:9", tmp_path / "a" / "cache")
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_damaged_transfer_of_a_manifest_is_fetched_again(relay: Relay, token: str) -> None:
    manifests = RemoteManifests(ServiceTransport(relay.url, token=token, retry_s=5))
    faults = [True]
    relay.change = lambda path, status, data: (
        data.replace(b"caption 3", b"caption 4") if faults and faults.pop() else data
    )
    assert manifests.read("served") == make_manifest()
    assert relay.routes() == ["manifests/served"] * 2
