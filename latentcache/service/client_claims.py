"""Which client makes which entries: claims that end when their client does not come back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from latentcache.utils.locks import Claims

MAX_CLAIMS = 1 << 13
"""Of all clients. What is claimed beyond is everybody's: it may be made twice. The system walks through the claims of a
process for each new one: so many take 2 s, and twice as many take 10 s."""


@dataclass(slots=True)
class _Owner:
    """A client, the time at which its claims end, and their keys."""

    until: float
    keys: set[str] = field(default_factory=set)


class ClientClaims:
    """Keys whose entries clients are about to make, so that other clients need not. Any thread may use it.

    The claims of a client end together, so many seconds after its last request. They are claims of this process too
    (`locks.Claims`, of the file at `path`): other servers of the cache and `precache` on this machine respect them, and
    theirs are respected. Nothing is kept: after a restart nobody has a claim.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic):
        self._path, self._clock = path, clock
        self._lock = threading.Lock()
        self._owners: dict[str, _Owner] = {}
        self._holders: dict[str, str] = {}
        self._files: Claims | None = None

    def take(self, name: str, keys: Iterable[str], ttl_s: float) -> set[str]:
        """Claim those keys that nobody else has claimed, for the client of this name, and return them. StoreError."""
        with self._lock:
            self._end_old()
            holders = {key: self._holders.get(key) for key in keys}
            mine = {key for key, holder in holders.items() if holder == name}
            free = [key for key, holder in holders.items() if holder is None]
            num_left = max(0, MAX_CLAIMS - len(self._holders))
            if self._files is None:
                self._files = Claims(self._path)
            taken = self._files.take(free[:num_left])
            owner = self._owners.setdefault(name, _Owner(0.0))
            owner.until = self._clock() + ttl_s
            owner.keys |= taken
            self._holders |= dict.fromkeys(taken, name)
            return mine.union(taken, free[num_left:])

    def release(self, name: str, keys: Iterable[str] | None) -> None:
        """Other clients may claim these keys of a client, or all of its keys, from now on."""
        with self._lock:
            if (owner := self._owners.get(name)) is not None:
                self._release(owner, owner.keys.copy() if keys is None else owner.keys.intersection(keys))
            if owner is not None and not owner.keys:
                del self._owners[name]

    def end_old(self) -> None:
        """End the claims of clients that did not come back: other processes may wait for them."""
        with self._lock:
            self._end_old()

    def _end_old(self) -> None:
        now = self._clock()
        for name in [name for name, owner in self._owners.items() if owner.until <= now]:
            owner = self._owners.pop(name)
            self._release(owner, owner.keys.copy())

    def _release(self, owner: _Owner, keys: set[str]) -> None:
        owner.keys -= keys
        for key in keys:
            del self._holders[key]
        if self._files is not None:
            self._files.release(keys)

    def close(self) -> None:
        """Nobody has a claim any more."""
        with self._lock:
            if self._files is not None:
                self._files.close()
            self._files, self._owners, self._holders = None, {}, {}
