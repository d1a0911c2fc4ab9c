"""What a location names: a cache's directory, a bucket of an object store, a service, or a dataset of the hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from typing_extensions import Unpack

from latentcache.config import RETRY_S, RemoteOptions
from latentcache.errors import RemoteError
from latentcache.location import HUB, SERVICE_SCHEMES

if TYPE_CHECKING:
    from latentcache.dataset.manifest_folder import Manifests
    from latentcache.remote.store import RemoteStore
    from latentcache.remote.transport import Transport

Kind = Literal["directory", "bucket", "service", "hub"]


def kind_of(location: Path | str) -> Kind:
    """The kind of what `config.location_of` gave."""
    if isinstance(location, Path):
        return "directory"
    if location.startswith(HUB):
        return "hub"
    return "service" if location.partition("://")[0] in SERVICE_SCHEMES else "bucket"


def open_transport(url: str, *, token: str | None = None, retry_s: float = RETRY_S) -> Transport:
    """The files of the cache of a bucket or a service. RemoteError."""
    # Only what is used is imported: each needs a package of its own.
    if kind_of(url) == "service":
        from latentcache.remote.service import ServiceTransport

        return ServiceTransport(url, token=token, retry_s=retry_s)
    from latentcache.remote.bucket import BucketTransport

    return BucketTransport.open(url, retry_s=retry_s)


def snapshot(url: str, local: str | Path | None = None) -> Path:
    """The directory of a cache on the hub, for reading: huggingface_hub fetches what is not here, below `local`.

    RemoteError: it cannot be had.
    """
    from huggingface_hub import snapshot_download

    from latentcache.remote.tier import folder_of

    folder = folder_of(url, local) / "hub"
    repository, _, revision = url.removeprefix(HUB).partition("@")
    wanted = ["CACHE.json", "packs/**", "manifests/*"]
    try:
        found = snapshot_download(
            repository, repo_type="dataset", revision=revision or None, cache_dir=folder, allow_patterns=wanted
        )
    except (OSError, ValueError) as error:  # its own errors are among these
        step = "Check the name, the network, and the token (`hf auth login`); `hf upload` puts a cache there."
        raise RemoteError(url, f"cannot be fetched: {type(error).__name__}: {error!s:.300}", step) from error
    return Path(found)


def open_remote(
    url: str, *, read_only: bool | None = None, create: bool = False, **options: Unpack[RemoteOptions]
) -> tuple[RemoteStore, Manifests]:
    """The store and the manifests of the cache at `url`. The options are those of `CacheConfig`.

    `create` makes a bucket a cache if it is none yet. StoreError if there is no cache; RemoteError.
    """
    from latentcache.remote.manifests import RemoteManifests
    from latentcache.remote.store import RemoteStore

    local = options.get("local")
    transport = open_transport(url, token=options.get("token"), retry_s=options.get("retry_s", RETRY_S))
    if not (create and read_only):  # what is to be made, and may not, is empty
        transport.check(create=create)
    store = RemoteStore(transport, read_only=read_only, local=local, local_max_bytes=options.get("local_max_bytes"))
    return store, RemoteManifests(transport, read_only=bool(read_only))
