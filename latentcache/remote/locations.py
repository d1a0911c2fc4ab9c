"""What a location names: a cache's directory, a bucket of an object store, or a service."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from typing_extensions import Unpack

from latentcache.cache_config import SERVICE_SCHEMES, CacheConfig, RemoteOptions, location_of

if TYPE_CHECKING:
    from latentcache.dataset.manifest_folder import Manifests
    from latentcache.remote.fetching_store import FetchingStore

Kind = Literal["directory", "bucket", "service"]


def parse_location(value: str | os.PathLike[str] | CacheConfig) -> tuple[Kind, Path | str]:
    """What kind of place this names, and its path or URL. `file://` is a directory.

    StoreError, which names what is allowed, for another scheme, and for a URL that has a password.
    """
    location = location_of(value)
    return kind_of(location), location


def kind_of(location: Path | str) -> Kind:
    """The kind of what `cache_config.location_of` gave."""
    if isinstance(location, Path):
        return "directory"
    return "service" if location.partition("://")[0] in SERVICE_SCHEMES else "bucket"


def open_remote(
    url: str, *, read_only: bool | None = None, create: bool = False, **options: Unpack[RemoteOptions]
) -> tuple[FetchingStore, Manifests]:
    """The store and the manifests of the bucket or service at `url`. The options are those of `CacheConfig`.

    `create` makes a bucket a cache if it is none yet. StoreError if there is no cache; RemoteError.
    """
    if kind_of(url) == "service":
        # Only what is used is imported: each needs a package of its own.
        from latentcache.remote.remote_manifests import RemoteManifests
        from latentcache.remote.remote_store import RemoteStore

        service = RemoteStore(url, read_only=read_only, **options)
        return service, RemoteManifests(service.http)
    from latentcache.remote.bucket_manifests import BucketManifests
    from latentcache.remote.bucket_store import BucketStore

    store = BucketStore(url, read_only=read_only, create=create, **options)
    return store, BucketManifests(store.bucket, read_only=store.read_only)
