"""Bucket: a cache's layout in an object store. Packs are whole or absent; what is written may be conditional."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

from latentcache.errors import PackError, RemoteError, StoreError
from latentcache.remote.http import CONNECT_S, FIRST_DELAY_S, MAX_DELAY_S, RETRY_S
from latentcache.remote.object_errors import FORBIDDEN, NOT_IMPLEMENTED, PANIC, problem
from latentcache.store.base import PACK_SUFFIX, is_pack_id
from latentcache.store.directory import MARK, check_mark, mark_bytes, pack_name
from latentcache.store.layout import PackRow
from latentcache.store.pack import PackRecords, RangedBytes, records_in, row_in
from latentcache.utils.concurrency import bounded_map

if TYPE_CHECKING:
    from obstore import ObjectMeta, PutMode, UpdateVersion
    from obstore.store import ObjectStore

NUM_THREADS = 16
"""Requests of one call that are on their way at once."""
CHUNK_BYTES = 8 << 20
"""Of a pack that is read whole, in one piece of its stream."""
PART_BYTES = 80 << 20
"""A larger pack is sent in parts of this size, one after the other. Others go in one request: parts of 16 MiB took half
as long again, with a local S3 server."""
PROBES = "probes"
ATTEMPTS = 3
"""To read an answer that broke off; and that fit into the time for retries, where a store says nothing."""
UPLOAD_S = 900.0
"""An attempt to send an object, or one of its parts, ends after this: eight of PART_BYTES that are on their way at
once need a line of 6 Mbit/s."""

Item = TypeVar("Item")
Result = TypeVar("Result")
logger = logging.getLogger("latentcache")

Version = dict[str, str]
"""Of an object: what its store compares before it replaces it."""

_client_pid: int | None = None


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object's bytes, what the store compares before it replaces them (None: it has nothing), and their time."""

    data: memoryview
    version: Version | None
    modified: datetime


class Bucket:
    """The objects of a cache below a prefix of an object store: `url` names them. Threads may share it.

    A request that fails in passing is tried again by obstore for `retry_s` seconds; then it is a RemoteError that says
    what was met and the next step. Errors of the obstore package never get out.
    """

    def __init__(
        self, store: ObjectStore, url: str, *, uploads: ObjectStore | None = None, once: ObjectStore | None = None
    ):
        """`uploads` and `once` are the same store: with more time for a request, and without a second attempt."""
        self.url = url
        self._store, self._uploads, self._once = store, uploads or store, once or store

    @classmethod
    def open(cls, url: str, *, retry_s: float = RETRY_S) -> Bucket:
        """The bucket at a URL (`cache_config.BUCKET_SCHEMES`), with the credentials that obstore finds.

        RemoteError if obstore is not installed, or if the URL or the environment lacks something. Nothing is requested.
        """
        try:
            from obstore.exceptions import BaseError
            from obstore.store import from_url
        except ImportError as error:
            step = "pip install 'latentcache[remote]'"
            raise RemoteError(url, "an object store needs the package obstore", step) from error
        backoff = {"init_backoff": timedelta(seconds=FIRST_DELAY_S), "max_backoff": timedelta(seconds=MAX_DELAY_S)}
        retry = {"max_retries": 1000, "retry_timeout": timedelta(seconds=retry_s), "backoff": backoff}
        # obstore takes no client options from the environment once some are given.
        plain = any(os.environ.get(f"{owner}_ALLOW_HTTP") == "true" for owner in ("AWS", "GOOGLE", "AZURE"))
        both = {"allow_http": plain, "connect_timeout": timedelta(seconds=CONNECT_S)}
        # The time without a byte would also count while a body is sent, so that uploads have a whole time instead.
        stalled = {"read_timeout": timedelta(seconds=max(retry_s / ATTEMPTS, 1.0)), "timeout": timedelta(hours=1)}
        sending = {"timeout": timedelta(seconds=UPLOAD_S)}
        # Of several objects S3 names those that were not removed in an answer of status 200: it is not tried again.
        own = {"disable_bulk_delete": True} if url.startswith(("s3:", "s3a:")) else {}
        try:
            reading, uploads, once = [
                from_url(url, retry_config={**retry, **less}, client_options={**both, **more}, **own)  # type: ignore[call-overload]
                for less, more in (({}, stalled), ({}, sending), ({"max_retries": 0}, stalled))
            ]
        except (BaseError, ValueError) as error:
            raise problem(url, "cannot be opened", error) from error
        return cls(reading, url, uploads=uploads, once=once)

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Turn what obstore raises into RemoteError. FileNotFoundError, of an object, gets through."""
        global _client_pid
        from obstore.exceptions import BaseError

        if _client_pid is None:
            _client_pid = os.getpid()
        elif _client_pid != os.getpid():
            raise RemoteError(
                self.url,
                "this process was forked from one that used an object store, whose client cannot go on here",
                "Start workers by forkserver or spawn, as in DataLoader(multiprocessing_context='forkserver'), or use "
                "LatentLoader, which reads ahead without workers.",
            )
        try:
            yield
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise problem(self.url, what, error) from error
            raise
        except BaseException as error:
            known = (BaseError, OSError, ValueError, NotImplementedError)
            if isinstance(error, known) or type(error).__name__ == PANIC:
                raise problem(self.url, what, error) from error
            raise

    def _read(self, what: str, request: Callable[[], Result], attempts: int = ATTEMPTS) -> Result:
        """What a request gives that reads. obstore does not repeat each of those whose answer broke off."""
        try:
            with self._errors(what):
                return request()
        except RemoteError as error:
            if "body error" not in error.detail or attempts == 1:
                raise
        return self._read(what, request, attempts - 1)

    def names(self, folder: str) -> dict[str, int]:
        """The objects below a folder, with their bytes."""
        return {each["path"]: each["size"] for each in self._listed(folder)}

    def times(self, folder: str) -> dict[str, datetime]:
        """The objects below a folder, with the time when each was written."""
        return {each["path"]: each["last_modified"] for each in self._listed(folder)}

    def _listed(self, folder: str) -> list[ObjectMeta]:
        import obstore

        def request() -> list[ObjectMeta]:
            return [each for chunk in obstore.list(self._store, folder, chunk_size=1000) for each in chunk]

        return self._read(f"{folder} cannot be listed", request)

    def read(self, name: str) -> StoredObject | None:
        """An object, or None if there is none."""
        import obstore

        def request() -> StoredObject:
            found = obstore.get(self._store, name)
            return StoredObject(memoryview(found.bytes()), _version_of(found.meta), found.meta["last_modified"])

        with suppress(FileNotFoundError):
            return self._read(f"{name} cannot be read", request)
        return None

    def put(self, name: str, data: bytes) -> None:
        """Write an object, in the place of one that is there."""
        self._put(name, data, "overwrite")

    def create(self, name: str, data: bytes | memoryview | Path) -> bool:
        """Write an object if there is none. Returns False if there is another one.

        A store that cannot compare replaces what is there: it is for objects whose name says what they hold.
        """
        try:
            return self._put(name, data, "create")
        except NotImplementedError:
            return self._put(name, data, "overwrite")

    def replace(self, name: str, data: bytes, version: Version | None) -> bool:
        """Write an object if the one there is of this version, or if there is none (None). False if it is not so.

        Ask `can_replace` before.
        """
        return self._put(name, data, "create" if version is None else cast("UpdateVersion", version))

    def _put(self, name: str, data: bytes | memoryview | Path, mode: PutMode, store: ObjectStore | None = None) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError, NotSupportedError, PreconditionError

        unable: Exception
        try:
            with self._errors(f"{name} cannot be written"):
                try:
                    obstore.put(store or self._uploads, name, data, mode=mode, use_multipart=False)
                    return True
                except (AlreadyExistsError, PreconditionError):
                    # It may be ours: a first attempt arrived, and its answer was lost.
                    found = self.read(name) if isinstance(data, bytes) else None
                    return found is not None and bytes(found.data) == data
                except (NotImplementedError, NotSupportedError) as error:
                    if mode == "overwrite":
                        raise
                    unable = error
        except FileNotFoundError as error:
            if mode in ("overwrite", "create"):
                raise problem(self.url, f"{name} cannot be written", error) from error
            return False  # what should be replaced is gone
        except RemoteError as error:
            if error.status != NOT_IMPLEMENTED or mode == "overwrite":
                raise
            unable = error
        raise NotImplementedError(f"{self.url}: cannot write on a condition") from unable

    @cached_property
    def can_replace(self) -> bool:
        """Whether the store compares before it replaces an object. It is tried out, once, on an object of its own."""
        name = f"{PROBES}/{uuid.uuid4().hex}"
        try:
            self.put(name, b"1")
            first = self.read(name)
            if first is None or first.version is None:
                return False
            with suppress(RemoteError):
                # A store that cannot do it often answers as if it could later: that is not worth the time for retries.
                self._put(name, b"2", cast("UpdateVersion", first.version), self._once)
            self.replace(name, b"2", first.version)
            return not self.replace(name, b"3", first.version)
        except NotImplementedError:
            return False
        finally:
            self.remove([name])

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects. Those that are not there are none to it."""
        import obstore

        def remove(name: str) -> None:
            with suppress(FileNotFoundError), self._errors(f"{name} cannot be removed"):
                obstore.delete(self._store, name)

        list(in_threads(remove, names))

    def check(self, *, create: bool = False) -> None:
        """StoreError if there is no cache here; `create` makes one. SchemaError, UnsafeStoreError: see `check_mark`."""
        found = self.read(MARK)
        if found is None:
            if not create:
                raise StoreError(
                    f"{self.url}: there is no cache here (no {MARK}). `latentcache push CACHE {self.url}` makes one; "
                    "check the URL."
                )
            self.create(MARK, mark_bytes())
        else:
            check_mark(bytes(found.data), f"{self.url}/{MARK}", self.url)

    def packs(self) -> dict[str, int]:
        """Bytes of each pack, by id."""
        sizes = {}
        for name, num_bytes in self.names("packs").items():
            pack = name.rpartition("/")[2].removesuffix(PACK_SUFFIX)
            if is_pack_id(pack) and name == pack_name(pack):
                sizes[pack] = num_bytes
        return sizes

    def row(self, pack: str, num_bytes: int) -> PackRow:
        """A pack's layout, keys and digests, by one or two reads. PackError; FileNotFoundError: it is not there."""
        return row_in(pack, _bytes_of(self, pack, num_bytes))[0]

    def records(self, pack: str, num_bytes: int) -> PackRecords:
        """As `row`, with the records of the entries."""
        return records_in(pack, _bytes_of(self, pack, num_bytes))

    def rows(self, packs: Mapping[str, int], unreadable: dict[str, str] | None = None) -> Iterator[PackRow]:
        """The rows of these packs (with their bytes), many read at once, in their order.

        Those that are gone are left out, and with a warning those that cannot be used: damaged ones, or archived ones,
        which the store refuses. Why is added to `unreadable`. RemoteError if it refuses all of them.
        """
        read = partial(_row_or_reason, self)
        errors: dict[str, PackError | RemoteError] = {}
        for pack, found in zip(packs, in_threads(read, packs.items()), strict=True):
            if isinstance(found, PackRow):
                yield found
            elif found is not None:
                logger.warning("%s Its entries are missing.", found)
                errors[pack] = found
        if unreadable is not None:
            unreadable |= {pack: str(error) for pack, error in errors.items()}
        refusals = [error for error in errors.values() if isinstance(error, RemoteError)]
        if refusals and len(refusals) == len(packs):
            raise refusals[0]

    def ranges(self, pack: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """The bytes of (offset, number of bytes) of a pack, by few requests: neighbours come together.

        PackError if it ends before; FileNotFoundError: it is not there.
        """
        import obstore

        starts, lengths = [start for start, _ in ranges], [num for _, num in ranges]
        found = self._read(
            f"pack {pack} cannot be read",
            lambda: obstore.get_ranges(self._store, pack_name(pack), starts=starts, lengths=lengths),
        )
        parts = [memoryview(part) for part in found]
        for (start, num), part in zip(ranges, parts, strict=True):
            if len(part) != num:
                raise PackError(
                    self._title(pack), f"ends after {start + len(part):,} bytes, {start + num:,} are needed"
                )
        return parts

    def chunks(self, pack: str) -> Iterator[memoryview]:
        """The bytes of a pack, one piece after the other. PackError if it ends early; FileNotFoundError."""
        import obstore

        with self._errors(f"pack {pack} cannot be read"):
            found = obstore.get(self._store, pack_name(pack))
            num_bytes, stream = found.meta["size"], iter(found.stream(CHUNK_BYTES))
        while True:
            with self._errors(f"pack {pack} cannot be read"):
                chunk = next(stream, None)
            if chunk is None:
                break
            num_bytes -= len(chunk)
            yield memoryview(chunk)
        if num_bytes:
            raise PackError(self._title(pack), f"came with {num_bytes:,} bytes less than it has")

    def send(self, pack: str, data: bytes | memoryview | Path) -> bool:
        """Send a pack, or the file of one: others see it whole or not at all. Returns False if it is there already.

        RemoteError if there is one of this id that has another size.
        """
        import obstore

        name, num_bytes = pack_name(pack), data.stat().st_size if isinstance(data, Path) else len(data)
        if num_bytes <= PART_BYTES:
            is_new = self.create(name, data)
        else:
            is_new = self._size(name) is None
            if is_new:
                with self._errors(f"pack {pack} cannot be sent"):
                    obstore.put(self._uploads, name, data, use_multipart=True, chunk_size=PART_BYTES, max_concurrency=1)
        if not is_new and (there := self._size(name) or 0) != num_bytes:
            step = f"Remove the object {name} there, and run the same again."
            raise RemoteError(self.url, f"pack {pack} has {there:,} bytes there, and {num_bytes:,} here", step)
        return is_new

    def _size(self, name: str) -> int | None:
        import obstore

        with suppress(FileNotFoundError), self._errors(f"{name} cannot be read"):
            return obstore.head(self._store, name)["size"]
        return None

    def remove_packs(self, packs: Iterable[str]) -> None:
        """Remove packs. The caller knows that nobody reads them."""
        self.remove(map(pack_name, packs))

    def _title(self, pack: str) -> str:
        return f"{self.url}/{pack_name(pack)}"


def _version_of(meta: ObjectMeta) -> Version | None:
    # S3 and Azure compare tags, Google's store generations.
    parts = {"e_tag": meta["e_tag"], "version": meta["version"]}
    return {name: part for name, part in parts.items() if part is not None} or None


def _row_or_reason(bucket: Bucket, listed: tuple[str, int]) -> PackRow | PackError | RemoteError | None:
    try:
        try:
            return bucket.row(*listed)
        except PackError:  # it may have been damaged on its way
            return bucket.row(*listed)
    except FileNotFoundError:
        return None
    except (PackError, RemoteError) as error:
        if isinstance(error, RemoteError) and error.status != FORBIDDEN:
            raise
        return error


def _bytes_of(bucket: Bucket, pack: str, num_bytes: int) -> RangedBytes:
    title = f"{bucket.url}/{pack_name(pack)}"
    return RangedBytes(title, num_bytes, lambda start, num: bucket.ranges(pack, [(start, num)])[0])


def in_threads(function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """What `function` returns for each of the items, in their order, by NUM_THREADS threads. Its error ends it."""
    with ThreadPoolExecutor(NUM_THREADS, "latentcache-bucket") as executor:
        for _, future in bounded_map(executor, function, items, 2 * NUM_THREADS):
            yield future.result()
