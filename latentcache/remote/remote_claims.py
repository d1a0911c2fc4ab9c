"""RemoteClaims: which of the entries that a service lacks this client makes."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable

from latentcache.errors import RemoteError
from latentcache.remote.http import ServiceConnection, understood

CLAIM_KEYS = 4096
"""In one request."""

logger = logging.getLogger("latentcache")


class RemoteClaims:
    """As `locks.Claims`, of the clients of a service. RemoteError.

    They end when this client does nothing with them for some minutes: then another one makes these entries too.
    """

    def __init__(self, http: ServiceConnection):
        self._http, self._owner = http, uuid.uuid4().hex
        # Two threads change it, each by one call, which no other one interrupts.
        self._held: set[str] = set()

    def take(self, keys: Iterable[str]) -> set[str]:
        """Claim those keys that no other client has claimed, and return them."""
        taken: set[str] = set()
        wanted = list(keys)
        for start in range(0, len(wanted), CLAIM_KEYS):
            document = {"owner": self._owner, "keys": wanted[start : start + CLAIM_KEYS]}
            with understood(self._http.request("POST", "claims", document=document)) as found:
                taken.update(map(str, found["mine"]))
        self._held.update(taken)
        return taken

    def release(self, keys: Iterable[str]) -> None:
        """Other clients may claim these keys from now on."""
        if held := list(self._held.intersection(keys)):
            self._request_release(held)
            self._held.difference_update(held)

    def close(self) -> None:
        """Release all."""
        if self._held:
            try:
                self._request_release(None)
            except RemoteError as error:
                logger.warning("%s; what this client has claimed is free again in some minutes", error)

    def _request_release(self, keys: list[str] | None) -> None:
        self._http.request("POST", "claims:release", document={"owner": self._owner, "keys": keys})
