"""Transport: lists, reads, removes and conditionally writes the files of a remote cache.

A cache has the same files everywhere: `CACHE.json`, `packs/<xx>/<pack>.safetensors` and `manifests/<name>...`. There
are transports for buckets (`bucket.py`), for services (`service.py`), and for directories (in `transfer.py`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
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
"""Maximum number of concurrent small requests of one call."""
ANY_VERSION = "*"
"""For `Transport.write`: overwrite unconditionally."""
FORBIDDEN = 403
"""HTTP status for a file that may not be read, e.g. an archived one, or a client that may not write."""
REMOVALS = "removals"
"""Folder of files that are named after the packs to be removed."""
_PACK_NAME = re.compile(rf"packs/[0-9a-f]{{2}}/([0-9a-f]{{32}}){re.escape(PACK_SUFFIX)}")

Item = TypeVar("Item")
Result = TypeVar("Result")


class Listed(NamedTuple):
    """A file in a listing: its size, and when it was written (Unix time; 0 if unknown)."""

    num_bytes: int
    modified: float = 0.0


class Transport(Closing, Protocol):
    """The files of one cache. `url` identifies it in messages. It is thread-safe.

    RemoteError: the remote fails or refuses. FileNotFoundError: there is no file of this name.
    """

    url: str

    def list(self, folder: str) -> dict[str, Listed]:
        """The files under a folder, by full name."""

    def read(self, name: str, start: int = 0, num_bytes: int | None = None) -> tuple[memoryview, str]:
        """The bytes of a file from `start` on, at most `num_bytes` of them, and the file's version."""

    def write(self, name: str, data: bytes | memoryview, *, version: str | None) -> bool:
        """Write a file atomically. False, and no write, if the current file does not have `version`.

        `version` None requires that there is no file; ANY_VERSION overwrites. For others call `check_compares` first.
        """
        raise ReadOnlyError(self.url)

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, ignoring missing ones."""
        raise ReadOnlyError(self.url)

    def check(self, *, create: bool = False) -> None:
        """StoreError if there is no cache, unless `create` makes one. SchemaError, UnsafeStoreError: `check_mark`."""
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
            raise ReadOnlyError(self.url, "this client may only read; a service requires its writing token for writes")

    def check_compares(self) -> None:
        """RemoteError if the remote does not support conditional writes, which manifests need."""
        return

    def find(self, keys: Sequence[str]) -> set[str] | None:
        """The keys that have entries according to the remote's own index; None if it has none."""
        return None

    def encode_prompt(self, text: str, *, negative: bool) -> str | None:
        """The key of a prompt, which the remote encodes if needed; None if it does not encode."""
        return None


def open_transport(url: str, *, token: str | None = None, retry_s: float = RETRY_S) -> Transport:
    """Open the transport for a bucket or a service. RemoteError."""
    # Imported on demand, because each needs its own package.
    if kind_of(url) == "service":
        from latentcache.remote.service import ServiceTransport

        return ServiceTransport(url, token=token, retry_s=retry_s)
    from latentcache.remote.bucket import BucketTransport

    return BucketTransport.open(url, retry_s=retry_s)


def packs_in(transport: Transport) -> dict[str, Listed]:
    """The existing packs, by id."""
    found = ((_PACK_NAME.fullmatch(name), each) for name, each in transport.list("packs").items())
    return {match[1]: each for match, each in found if match and pack_name(match[1]) == match[0]}


def removals_in(transport: Transport) -> dict[str, Listed]:
    """The packs listed for removal, with their files there. The file of a damaged pack is not empty."""
    found = ((name.removeprefix(f"{REMOVALS}/"), each) for name, each in transport.list(REMOVALS).items())
    return {pack: each for pack, each in found if is_pack_id(pack)}


def read_checked(transport: Transport, pack: str) -> tuple[WholePack, dict[str, str]]:
    """Read a pack and the reasons of its damaged entries, by key. A damaged pack is read twice before it is reported.

    FileNotFoundError if the pack does not exist; PackError if it cannot be parsed.
    """

    def read() -> tuple[WholePack, dict[str, str]]:
        found = WholePack.in_memory(pack, transport.read(pack_name(pack))[0])
        return found, dict(found.problems())

    with suppress(PackError):
        if not (first := read())[1]:
            return first
    return read()


def in_threads(
    function: Callable[[Item], Result], items: Iterable[Item], num_threads: int = NUM_THREADS
) -> Iterator[tuple[Item, Result]]:
    """Yield each item, in order, with the result of `function`. The first error ends the iteration."""
    with (
        ThreadPoolExecutor(num_threads, "latentcache-remote") as executor,
        closing(bounded_map(executor, function, items, 2 * num_threads)) as found,
    ):
        for item, future in found:
            yield item, future.result()
