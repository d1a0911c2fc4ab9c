"""Stores that are elsewhere, opened with the options of a test."""

from __future__ import annotations

from typing import Any

from latentcache.remote.service import ServiceTransport
from latentcache.remote.store import RemoteStore


def served_store(url: str, *, token: str | None = None, retry_s: float = 30.0, **options: Any) -> RemoteStore:
    """The store of a service; `options` are those of `RemoteStore`."""
    return RemoteStore(ServiceTransport(url, token=token, retry_s=retry_s), **options)
