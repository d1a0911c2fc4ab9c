"""BucketTransport: the files of a cache under a prefix of an object store, accessed with obstore."""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, TypeVar, cast

from typing_extensions import override

from latentcache.config import RETRY_S
from latentcache.errors import RemoteError
from latentcache.remote.transport import ANY_VERSION, Listed, Transport, in_threads
from latentcache.utils.extras import naming_extras

if TYPE_CHECKING:
    from obstore import ObjectMeta, PutMode, UpdateVersion
    from obstore.store import ObjectStore

PROBES = "probes"
"""Folder for short-lived objects that test the store."""
PART_BYTES = 80 << 20
"""Larger objects are uploaded in sequential parts of this size, others in one request. With parts of 16 MiB, uploads
to a local S3 server took 1.5 times as long."""
UPLOAD_S = 900.0
"""Timeout for one attempt to upload an object or a part. Eight concurrent uploads of PART_BYTES need a bandwidth of
6 Mbit/s to meet it."""
_CONNECT_S, _FIRST_DELAY_S, _MAX_DELAY_S = 5.0, 0.1, 2.0
_ATTEMPTS = 3  # number of attempts that fit into the retry time if the store does not respond at all
_NOT_IMPLEMENTED = 501
_STATUS = re.compile(r"status code: (\d{3})")
_REASON = re.compile(r"<Message>(.*?)</Message>", re.DOTALL)
_STEP = (
    "Check the URL, the endpoint (AWS_ENDPOINT_URL; http needs AWS_ALLOW_HTTP=true), the network, and the credentials. "
    "Give these like to the store's own tools: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
    "GOOGLE_APPLICATION_CREDENTIALS, AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or the machine's role. "
    "Then run the command again; nothing that was stored is lost."
)
_PANIC = "PanicException"  # raised by obstore if its Rust code panics; Python cannot import the class

Result = TypeVar("Result")
_client_pid: int | None = None


class BucketTransport(Transport):
    """The objects under a prefix of the object store at `url`.

    The store must support conditional writes (compare-and-swap), as Amazon, Google, Azure, Cloudflare and MinIO do:
    otherwise one of two machines that write a manifest at once would lose its work. obstore retries requests after
    transient failures; its own exceptions never propagate to callers.
    """

    def __init__(self, store: ObjectStore, url: str, *, uploads: ObjectStore | None = None):
        """`uploads` is the same store, with longer timeouts."""
        self.url = url
        self._store, self._uploads = store, uploads or store

    @classmethod
    def open(cls, url: str, *, retry_s: float = RETRY_S) -> BucketTransport:
        """Open the bucket at a URL (`location.BUCKET_SCHEMES`) with the credentials that obstore finds.

        Sends no request. RemoteError if the URL or the environment is incomplete; ExtraMissingError.
        """
        with naming_extras():
            from obstore.exceptions import BaseError
            from obstore.store import from_url
        backoff = {"init_backoff": timedelta(seconds=_FIRST_DELAY_S), "max_backoff": timedelta(seconds=_MAX_DELAY_S)}
        retry = {"max_retries": 1000, "retry_timeout": timedelta(seconds=retry_s), "backoff": backoff}
        # obstore ignores client options in the environment once any are passed.
        plain = any(os.environ.get(f"{owner}_ALLOW_HTTP") == "true" for owner in ("AWS", "GOOGLE", "AZURE"))
        both = {"allow_http": plain, "connect_timeout": timedelta(seconds=_CONNECT_S)}
        # A read timeout also runs while a body is being sent, so uploads have a timeout for the whole request instead.
        stalled = {"read_timeout": timedelta(seconds=max(retry_s / _ATTEMPTS, 1.0)), "timeout": timedelta(hours=1)}
        sending = {"timeout": timedelta(seconds=UPLOAD_S)}
        # S3 reports failures of a bulk delete in a response of status 200, which is not retried.
        own = {"disable_bulk_delete": True} if url.startswith(("s3:", "s3a:")) else {}
        try:
            reading, uploads = [
                from_url(url, retry_config=retry, client_options={**both, **more}, **own)  # type: ignore[call-overload]
                for more in (stalled, sending)
            ]
        except (BaseError, ValueError) as error:
            raise _problem(url, "cannot be opened", error) from error
        return cls(reading, url, uploads=uploads)

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """Turn obstore's errors into RemoteError, except that an object is missing or has another version."""
        global _client_pid
        from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError

        if _client_pid is None:
            _client_pid = os.getpid()
        elif _client_pid != os.getpid():
            raise RemoteError(
                self.url,
                "this process was forked from one that used an object store, whose client does not survive a fork",
                "Start workers with forkserver or spawn, e.g. DataLoader(multiprocessing_context='forkserver'), or use "
                "LatentLoader, which reads ahead without workers.",
            )
        try:
            yield
        except BaseException as error:
            is_of_object = isinstance(error, (FileNotFoundError, AlreadyExistsError, PreconditionError))
            known = isinstance(error, (BaseError, OSError, ValueError, NotImplementedError))
            if (is_of_object and "NoSuchBucket" not in str(error)) or not (known or type(error).__name__ == _PANIC):
                raise
            raise _problem(self.url, what, error) from error

    def _request(self, what: str, request: Callable[[], Result]) -> Result:
        """Send a read request, and retry it if the response is truncated, which obstore does not always do."""
        for is_last in (False, False, True):
            try:
                with self._errors(what):
                    return request()
            except RemoteError as error:
                if is_last or "body error" not in error.detail:
                    raise
        raise AssertionError

    @override
    def list(self, folder: str) -> dict[str, Listed]:
        import obstore

        def request() -> dict[str, Listed]:
            found = chain.from_iterable(obstore.list(self._store, folder, chunk_size=1000))
            return {each["path"]: Listed(each["size"], each["last_modified"].timestamp()) for each in found}

        return self._request(f"{folder} cannot be listed", request)

    @override
    def read(self, name: str, start: int = 0, num_bytes: int | None = None) -> tuple[memoryview, str]:
        import obstore

        def request() -> tuple[memoryview, str]:
            if num_bytes is not None:
                return memoryview(obstore.get_range(self._store, name, start=start, length=num_bytes)), ""
            found = obstore.get(self._store, name)
            return memoryview(found.bytes())[start:], _version_of(found.meta)

        return self._request(f"{name} cannot be read", request)

    @override
    def write(self, name: str, data: bytes | memoryview, *, version: str | None) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        mode: PutMode = "overwrite" if version == ANY_VERSION else "create"
        if version not in (ANY_VERSION, None):
            mode = cast("UpdateVersion", json.loads(version))
        parts = mode == "overwrite" and len(data) > PART_BYTES
        try:
            with self._errors(f"{name} cannot be written"):
                obstore.put(
                    self._uploads, name, data, mode=mode, use_multipart=parts, chunk_size=PART_BYTES, max_concurrency=1
                )
        except (AlreadyExistsError, PreconditionError):
            return False
        except FileNotFoundError:
            if not isinstance(mode, dict):
                raise
            return False  # the version to replace is gone
        return True

    @cached_property
    def _compares(self) -> bool:
        """Whether the store supports conditional writes. Tested once, on a probe object."""
        name = f"{PROBES}/{uuid.uuid4().hex}"
        try:
            self.write(name, b"1", version=ANY_VERSION)
            version = self.read(name)[1]
            compares = version != "" and self.write(name, b"2", version=version)
            return compares and not self.write(name, b"3", version=version)
        except RemoteError as error:
            if error.status == _NOT_IMPLEMENTED or isinstance(error.__cause__, NotImplementedError):
                return False
            raise
        finally:
            self.remove([name])

    @override
    def check_compares(self) -> None:
        if not self._compares:
            raise RemoteError(
                self.url,
                "this object store does not support conditional writes (PUT with If-Match), so two machines that write "
                "at once would lose the work of one",
                "Use a store that does, such as Amazon, Google, Azure, Cloudflare or MinIO, or `latentcache serve`.",
            )

    @override
    def remove(self, names: Iterable[str]) -> None:
        import obstore

        def remove(name: str) -> None:
            with suppress(FileNotFoundError), self._errors(f"{name} cannot be removed"):
                obstore.delete(self._store, name)

        list(in_threads(remove, names))


def _version_of(meta: ObjectMeta) -> str:
    # S3 and Azure compare ETags, Google compares generations.
    parts = {"e_tag": meta["e_tag"], "version": meta["version"]}
    known = {name: part for name, part in parts.items() if part is not None}
    return json.dumps(known) if known else ""


def _problem(url: str, what: str, error: BaseException) -> RemoteError:
    """A RemoteError with the first line of obstore's message; the rest of it repeats that."""
    text = str(error)
    met = text.partition("\n\nDebug source")[0].partition("<?xml")[0].strip(" :\n")
    found, reason = _STATUS.search(text), _REASON.search(text)
    status = None if found is None else int(found[1])
    if reason is not None:
        met = f"status {status}: {reason[1]}"
    return RemoteError(url, f"{what}: {met[:500].rstrip('.')}", _STEP, status=status)
