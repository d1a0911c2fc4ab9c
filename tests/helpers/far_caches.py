"""Empty remote caches, one in a bucket and one behind a service, each behind a relay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.comparing_server import ComparingServer
from helpers.relay import Relay, relaying
from helpers.serving import TOKEN, serving_here

from latentcache.config import TOKEN_VARIABLE
from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.remote.manifests import RemoteManifests
from latentcache.remote.transport import Transport, open_transport, packs_in
from latentcache.store import DiskStore
from latentcache.store.directory import pack_name


@dataclass
class Far:
    """A cache behind a relay, with credentials in the environment. `folder` is the directory of a service's cache."""

    relay: Relay
    url: str
    folder: Path | None = None

    def transport(self) -> Transport:
        return open_transport(self.url, retry_s=5)

    def manifests(self) -> RemoteManifests:
        return RemoteManifests(self.transport())

    def unfinished(self) -> list[str]:
        """Unfinished runs. A service does not list them, so its folder is read."""
        if self.folder is None:
            return self.manifests().unfinished()
        return list(ManifestFolder(self.folder / "manifests").unfinished())

    def packs(self) -> dict[str, bytes]:
        transport = self.transport()
        return {pack: bytes(transport.read(pack_name(pack))[0]) for pack in packs_in(transport)}


@pytest.fixture
def bucket(object_server: ComparingServer, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Far]:
    with relaying(object_server.address) as relay:
        monkeypatch.setenv("AWS_ENDPOINT_URL", relay.url)
        yield Far(relay, s3_url)


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Far]:
    folder = tmp_path / "far"
    DiskStore(folder).close()
    with serving_here(folder, token=TOKEN) as server, relaying(server.address) as relay:
        monkeypatch.setenv(TOKEN_VARIABLE, str(server.write_token))
        yield Far(relay, relay.url, folder)


@pytest.fixture(params=["bucket", "service"])
def far(request: pytest.FixtureRequest) -> Far:
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]
