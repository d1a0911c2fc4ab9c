"""Transport: the files of a cache that is elsewhere, listed, read, written on a condition, and removed.

A cache has the same files everywhere: `CACHE.json`, `packs/<xx>/<pack>.safetensors` and `manifests/<name>...`. A bucket
(`bucket.py`) and a service (`service.py`) are transports, and so is a snapshot of the hub.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import NamedTuple, Protocol, TypeVar

from latentcache.config import RETRY_S
from latentcache.errors import PackError, ReadOnlyError, StoreError
from latentcache.location import kind_of
from latentcache.store.base import Closing
from latentcache.store.directory import MARK, check_mark, mark_bytes, pack_name
from latentcache.store.entry import PACK_SUFFIX, is_pack_id
from latentcache.store.pack import WholePack
from latentcache.utils.concurrency import bounded_map

NUM_THREADS = 16
"""Small requests of one call that are on their way at once."""
ANY_VERSION = "*"
"""For `Transport.write`: whatever is there, or nothing, is replaced."""
FORBIDDEN = 403
"""The status of one file that may not be read, as an archived one, or of a client that may not write."""
REMOVALS = "removals"
"""A folder of files that are named by the packs that are to be removed."""
_PACK_NAME = re.compile(rf"packs/[0-9a-f]{{2}}/([0-9a-f]{{32}}){re.escape(PACK_SUFFIX)}")

Item = TypeVar("Item")
Result = TypeVar("Result")


class Listed(NamedTuple):
    """What a listing says of a file: its bytes, and when it was written (seconds since 1970; 0: it does not say)."""

    num_bytes: int
    modified: float = 0.0


class Transport(Closing, Protocol):
    """The files of one cache. `url` names it for people. Threads may share it.

    RemoteError: it does not answer, or refuses. FileNotFoundError: there is no file of this name.
    """

    url: str

    def list(self, folder: str) -> dict[str, Listed]:
        """The files below a folder, by their whole names."""

    def read(self, name: str, start: int = 0, num_bytes: int | None = None) -> tuple[memoryview, str]:
        """The bytes of a file from `start` on, all or so many of them, and its version. Fewer if it ends before."""

    def write(self, name: str, data: bytes | memoryview, *, version: str | None) -> bool:
        """Write a whole file: others see all of it or nothing. False if the one that is there is of another version.

        `version` None: there must be none. ANY_VERSION: it does not matter. Who gives another calls `check_compares`.
        """
        raise ReadOnlyError(self.url)

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; missing ones are ignored."""
        raise ReadOnlyError(self.url)

    def check(self, *, create: bool = False) -> None:
        """StoreError if there is no cache here; `create` makes one. SchemaError, UnsafeStoreError: see `check_mark`."""
        try:
            data, _ = self.read(MARK)
        except FileNotFoundError:
            if not create:
                raise StoreError(
                    f"{self.url}: there is no cache here (no {MARK}). `latentcache push CACHE {self.url}` makes one; "
                    "check the URL."
                ) from None
            self.write(MARK, mark_bytes(), version=ANY_VERSION)
        else:
            check_mark(bytes(data), f"{self.url}/{MARK}", self.url)

    def is_writable(self) -> bool:
        """Whether this client may write."""
        return True

    def check_writable(self) -> None:
        """ReadOnlyError if this client may not write."""
        if not self.is_writable():
            raise ReadOnlyError(self.url, "is open for reading only here; a service needs its writing token for more")

    def check_compares(self) -> None:
        """RemoteError if it cannot compare versions before it replaces a file, which manifests need."""
        return

    def find(self, keys: Sequence[str]) -> set[str] | None:
        """Find which keys have entries, by an index that the cache has itself. None: it has none."""
        return None

    def encode_prompt(self, text: str, *, negative: bool) -> str | None:
        """The key of a prompt, which is encoded there if it is not cached; None where nothing is encoded."""
        return None


def open_transport(url: str, *, token: str | None = None, retry_s: float = RETRY_S) -> Transport:
    """The files of the cache of a bucket or a service. RemoteError."""
    # Only what is used is imported: each needs a package of its own.
    if kind_of(url) == "service":
        from latentcache.remote.service import ServiceTransport

        return ServiceTransport(url, token=token, retry_s=retry_s)
    from latentcache.remote.bucket import BucketTransport

    return BucketTransport.open(url, retry_s=retry_s)


def packs_in(transport: Transport) -> dict[str, Listed]:
    """The packs that are there, by id."""
    found = ((_PACK_NAME.fullmatch(name), each) for name, each in transport.list("packs").items())
    return {match[1]: each for match, each in found if match and pack_name(match[1]) == match[0]}


def removals_in(transport: Transport) -> dict[str, Listed]:
    """The packs that are listed for removal, and their files there, of which one of a damaged pack is not empty."""
    found = ((name.removeprefix(f"{REMOVALS}/"), each) for name, each in transport.list(REMOVALS).items())
    return {pack: each for pack, each in found if is_pack_id(pack)}


def read_checked(transport: Transport, pack: str) -> tuple[WholePack, dict[str, str]]:
    """A pack, and why entries are not what was stored, by key: what does not fit is read once more.

    FileNotFoundError if it is gone; PackError if its records cannot be read.
    """
    for is_last in (False, True):
        try:
            found = WholePack.in_memory(pack, transport.read(pack_name(pack))[0])
            problems = dict(found.problems())
        except PackError:
            if is_last:
                raise
            continue
        if is_last or not problems:
            return found, problems
    raise AssertionError


def in_threads(
    function: Callable[[Item], Result], items: Iterable[Item], num_threads: int = NUM_THREADS
) -> Iterator[tuple[Item, Result]]:
    """Yield each of the items, in their order, with what `function` returns for it. Its error ends it."""
    with (
        ThreadPoolExecutor(num_threads, "latentcache-remote") as executor,
        closing(bounded_map(executor, function, items, 2 * num_threads)) as found,
    ):
        for item, future in found:
            yield item, future.result()
