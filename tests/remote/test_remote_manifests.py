"""Manifests of a service: read, replaced, and never replaced unseen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.relay import Relay
from helpers.remote_samples import make_manifest
from helpers.serving import RunningServer

from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.errors import DatasetError, RemoteError, StoreBusyError
from latentcache.remote.manifests import RemoteManifests
from latentcache.remote.service import ServiceTransport
from latentcache.remote.transfer import transfer
from latentcache.remote.transport import Listed


@pytest.fixture
def folder(served_cache: Path) -> Iterator[ManifestFolder]:
    """The manifests on the server's disk; what a test adds goes again."""
    yield ManifestFolder(served_cache / "manifests")
    for name in ("other", "odd"):
        for file in (served_cache / "manifests").glob(f"{name}*"):
            file.unlink()


def connected(url: str, token: str | None) -> RemoteManifests:
    return RemoteManifests(ServiceTransport(url, token=token, retry_s=5))


@pytest.mark.parametrize("name", ["../../odd", "/tmp/odd", "", "..", "a\\..\\odd", "odd\n", "a" * 101])
def test_a_name_that_would_be_a_path_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A pull from a service that somebody else runs would write outside of the cache."""
    files = {f"manifests/{name}.safetensors": Listed(0)}
    monkeypatch.setattr(ServiceTransport, "list", lambda self, folder: files if folder == "manifests" else {})
    with pytest.raises(RemoteError, match="is no name of a manifest"):
        transfer("http://127.0.0.1:9", tmp_path / "a" / "cache")
    assert not list(tmp_path.rglob("*.safetensors"))


def test_a_manifest_is_noted_and_replaced(server: RunningServer, folder: ManifestFolder) -> None:
    manifests, manifest = connected(server.url, server.write_token), make_manifest("other", 4)
    assert manifests.read("served") == make_manifest() and manifests.read("other") is None
    manifests.begin("other")
    assert list(folder.unfinished()) == ["other"]
    manifests.write(manifest)
    assert folder.read("other") == manifest and folder.unfinished() == {}
    assert manifests.names() == ["other", "served"]
    smaller = make_manifest("other", 2)
    assert manifests.read("other") == manifest
    manifests.write(smaller)
    manifests.write(manifest)  # once more, without having read what was written
    assert folder.read("other") == manifest
    path = folder.path / "other.safetensors"
    path.write_bytes(path.read_bytes().replace(b"caption 0", b"caption 9"))
    with pytest.raises(DatasetError):
        manifests.read("other")
    manifests.write(smaller)  # in the place of a damaged one
    assert folder.read("other") == smaller


def test_what_another_client_wrote_meanwhile_is_not_undone(server: RunningServer, folder: ManifestFolder) -> None:
    mine, theirs = (connected(server.url, server.write_token) for _ in range(2))
    assert mine.read("other") is None
    theirs.write(make_manifest("other", 4))
    for _ in range(2):
        with pytest.raises(StoreBusyError, match="another client replaced the manifest other"):
            mine.write(make_manifest("other", 2))
    assert folder.read("other") == make_manifest("other", 4)
    assert theirs.read("other") == mine.read("other")
    mine.write(make_manifest("other", 2))
    theirs.write(make_manifest("other", 2))  # equal: as when ranks end together
    assert folder.read("other") == make_manifest("other", 2)


def test_a_damaged_transfer_of_a_manifest_is_fetched_again(relay: Relay, server: RunningServer) -> None:
    manifests = connected(relay.url, server.token)
    faults = [True]
    relay.change = lambda path, status, data: (
        data.replace(b"caption 3", b"caption 4") if faults and faults.pop() else data
    )
    assert manifests.read("served") == make_manifest()
    assert relay.routes() == ["manifests/served"] * 2
    relay.change = lambda path, status, data: data.replace(b"caption 3", b"caption 4")
    with pytest.raises(DatasetError, match="its digest differs"):
        manifests.read("served")
