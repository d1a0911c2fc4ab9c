"""ServiceTransport: the packs and manifests of a service over HTTP, and the prompts that it encodes."""

from __future__ import annotations

import json
import logging
import os
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import PurePosixPath
from typing import Any, NoReturn
from urllib.parse import quote, urlsplit

import urllib3
from typing_extensions import override

from latentcache.config import RETRY_S, TOKEN_VARIABLE
from latentcache.dataset.manifest_folder import SUFFIX, UNFINISHED
from latentcache.errors import DatasetError, ReadOnlyError, RemoteError, StorageFullError, StoreError
from latentcache.remote.transport import ANY_VERSION, FORBIDDEN, NUM_THREADS, Listed, Transport
from latentcache.store.directory import pack_name
from latentcache.store.entry import check_key, is_pack_id
from latentcache.utils.json_document import to_bytes

KEYS = 4096
"""Maximum number of keys per request."""
ENCODE_S = 600.0
"""Response timeout for encoding a prompt: the service loads its models first."""
UPLOAD_ANSWER_S = 300.0
"""Response timeout for uploads and verification: the service reads and checks the data before it responds."""
_CONNECT_S = 5.0
_FIRST_DELAY_S, _MAX_DELAY_S = 0.1, 2.0
_ATTEMPTS = 3  # number of attempts that fit into the retry time if the service accepts connections but never responds
_MAX_CONNECTIONS = NUM_THREADS  # kept alive; urllib3 logs a warning for each connection beyond that
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_PASSING = (408, 429, 502, 503, 504)  # the service, or a proxy in front of it, is overloaded or starting
_PARTIAL, _UNAUTHORIZED, _MISSING, _CHANGED = 206, 401, 404, 412

logger = logging.getLogger("latentcache")


class ServiceTransport(Transport):
    """The service at `url` (http or https, optionally with a path), with its token if it has one. Forks may share it.

    A failed request is retried with exponential backoff for `retry_s` seconds, then it raises RemoteError. All
    requests are idempotent.
    """

    def __init__(self, url: str, *, token: str | None = None, retry_s: float = RETRY_S):
        self.url, self._retry_s = _checked_url(url), retry_s
        self._token = token or os.environ.get(TOKEN_VARIABLE) or None
        if self._token is not None and not (self._token.isascii() and self._token.isprintable()):
            raise StoreError(f"{self.url}: the token has characters that HTTP headers cannot have; check its value")
        parts = urlsplit(self.url)
        if self._token is not None and parts.scheme == "http" and parts.hostname not in _LOOPBACK:
            step = "use https (see the proxy in the service guide), or a tunnel to the server's loopback address"
            logger.warning("%s: the token is sent without encryption, so others can read it: %s", self.url, step)
        self._pools: tuple[int, urllib3.PoolManager] | None = None
        self._is_writable: bool | None = None

    # Requests

    def request(
        self,
        method: str,
        route: str,
        *,
        document: object = None,
        body: bytes | memoryview | None = None,
        headers: Mapping[str, str] | None = None,
        also: Sequence[int] = (),
        answer_s: float = 0.0,
    ) -> urllib3.BaseHTTPResponse:
        """Send a request to `/v1/<route>` and return the response. Error statuses raise, except for those in `also`.

        `document` is sent as JSON, `body` as it is. An attempt times out after a third of the retry time without data,
        or after `answer_s` if that is longer. RemoteError, ReadOnlyError, StorageFullError, DatasetError.
        """
        all_headers = {"Accept-Encoding": "identity", **(headers or {})}
        if self._token is not None:
            all_headers["Authorization"] = f"Bearer {self._token}"
        if document is not None:
            body, all_headers["Content-Type"] = to_bytes(document), "application/json"
        url, began, delay_s = f"{self.url}/v1/{route}", time.monotonic(), _FIRST_DELAY_S
        timeout_s = max(self._retry_s / _ATTEMPTS, answer_s, 1.0)
        # Not urllib3's Retry, which bounds attempts, not time: a server that hangs would cost every attempt's timeout.
        while True:
            answer, cause = None, None
            try:
                answer = self._pool.request(
                    method,
                    url,
                    body=body,  # type: ignore[arg-type]  # it takes views too
                    headers=all_headers,
                    timeout=urllib3.Timeout(connect=min(_CONNECT_S, timeout_s), read=timeout_s),
                    retries=False,
                    redirect=False,
                )
            except urllib3.exceptions.SSLError as error:
                step = "Check the URL and the certificate; SSL_CERT_FILE may name the file of your own authority."
                raise RemoteError(self.url, f"no secure connection: {error}", step) from error
            except urllib3.exceptions.HTTPError as error:
                cause = error
            passed_s = time.monotonic() - began
            if passed_s >= self._retry_s or (answer is not None and answer.status not in _PASSING):
                break
            time.sleep(min(delay_s * random.uniform(0.5, 1.5), self._retry_s - passed_s))
            delay_s = min(2 * delay_s, _MAX_DELAY_S)
        if answer is None:
            raise RemoteError(
                self.url,
                f"does not respond: {type(cause).__name__}: {cause!s:.300} (tried for {passed_s:.1f} s, "
                f"cache.retry_s is {self._retry_s:g})",
                "Check the URL, or start the server with `latentcache serve CACHE`. Then run the command again; "
                "nothing that was stored is lost.",
            ) from cause
        if answer.status < 300 or answer.status in also:
            return answer
        self._refused(answer)

    @property
    def _pool(self) -> urllib3.PoolManager:
        """This process's connections: a fork must not use those of its parent."""
        if self._pools is None or self._pools[0] != os.getpid():
            self._pools = os.getpid(), urllib3.PoolManager(num_pools=1, maxsize=_MAX_CONNECTIONS)
        return self._pools[1]

    @contextmanager
    def _understood(self, answer: urllib3.BaseHTTPResponse) -> Iterator[Any]:
        """Yield the response's JSON. RemoteError if it is invalid, or if the block fails to find what it needs."""
        try:
            yield json.loads(answer.data)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            what = f"the response from {answer.url} is not what was requested ({error!r:.200})"
            step = "Check that the URL is a `latentcache serve`, and that client and server have the same version."
            raise RemoteError(self.url, what, step) from error

    def _refused(self, answer: urllib3.BaseHTTPResponse) -> NoReturn:
        """Raise the error in a service's response."""
        try:
            found = json.loads(answer.data)
        except (ValueError, RecursionError):
            found = {}  # not a problem document (RFC 9457): from a proxy
        problem: Mapping[str, Any] = found if isinstance(found, dict) else {}
        kind, step = problem.get("kind"), str(problem.get("next_step") or "").rstrip(".")
        detail = str(problem.get("detail") or problem.get("title") or f"responds with status {answer.status}")
        detail = detail.rstrip(".").removesuffix(step).rstrip(". ")
        if answer.status == _UNAUTHORIZED:
            which = "refuses this token" if self._token else "requires a token"
            give = f"Give the server's token: token=... in Python, or the variable {TOKEN_VARIABLE}."
            raise RemoteError(self.url, which, give, status=answer.status, kind=kind)
        if answer.status == FORBIDDEN or kind == "ReadOnlyError":
            give = f"give the server's writing token: token=... in Python, or the variable {TOKEN_VARIABLE}"
            raise ReadOnlyError(self.url, f"the service does not let this client write ({detail}); {give}")
        if kind == "StorageFullError":
            needed = problem.get("needed_bytes")
            raise StorageFullError(self.url, needed if isinstance(needed, int) else 0)
        if kind in ("DatasetError", "SchemaError"):
            raise DatasetError(self.url, detail)
        step = f"{step or 'Check that client and server have the same version of latentcache'}."
        raise RemoteError(self.url, detail, step, status=answer.status, kind=kind)

    # Files

    @override
    def list(self, folder: str) -> dict[str, Listed]:
        if folder == "packs":
            with self._understood(self.request("GET", "packs")) as document:
                sizes = {each["id"]: int(each["num_bytes"]) for each in document["packs"] if is_pack_id(each["id"])}
                return {pack_name(pack): Listed(num_bytes) for pack, num_bytes in sizes.items()}
        if folder != "manifests":
            return {}
        with self._understood(self.request("GET", "manifests")) as document:
            names = [str(each["name"]) for each in document["manifests"]]
            return {f"manifests/{name}{SUFFIX}": Listed(0) for name in names}

    @override
    def read(self, name: str, start: int = 0, num_bytes: int | None = None) -> tuple[memoryview, str]:
        end = "" if num_bytes is None else start + num_bytes - 1
        headers = {"Range": f"bytes={start}-{end}"} if start or num_bytes is not None else {}
        answer = self.request("GET", _route(name), headers=headers, also=[_MISSING])
        if answer.status == _MISSING:
            raise FileNotFoundError(name)
        data = memoryview(answer.data)
        if headers and answer.status != _PARTIAL:
            data = data[start : None if num_bytes is None else start + num_bytes]
        return data, answer.headers.get("ETag", "")

    @override
    def write(self, name: str, data: bytes | memoryview, *, version: str | None) -> bool:
        headers = {"Content-Type": "application/octet-stream"}
        if version is None:
            headers["If-None-Match"] = "*"
        elif version != ANY_VERSION:
            headers["If-Match"] = version
        answer = self.request(
            "PUT", _route(name), body=data, headers=headers, also=[_CHANGED], answer_s=UPLOAD_ANSWER_S
        )
        return answer.status != _CHANGED

    @override
    def remove(self, names: Iterable[str]) -> None:
        """Remove the notes of runs among these files. Packs stay: `prune` on the server removes them."""
        for name in names:
            if name.endswith(UNFINISHED):
                self.request("DELETE", _route(name))

    @override
    def check(self, *, create: bool = False) -> None:
        """A no-op: a wrong URL shows on the first request."""

    # What only a service offers

    @override
    def is_writable(self) -> bool:
        if self._is_writable is None:
            try:
                self.verify([])  # forbidden with a reading token
                self._is_writable = True
            except ReadOnlyError:
                self._is_writable = False
            except RemoteError as error:
                # A refused token is a mistake, but without one, reading may still be allowed.
                if error.status != _UNAUTHORIZED or self._token is not None:
                    raise
                self._is_writable = False
        return self._is_writable

    @override
    def find(self, keys: Sequence[str]) -> set[str]:
        found: set[str] = set()
        for chunk in _chunks(keys):
            with self._understood(self.request("POST", "entries:find", document={"keys": chunk})) as document:
                found.update(chunk if len(document["found"]) == len(chunk) else document["found"])
        return found

    def verify(self, keys: Sequence[str]) -> dict[str, str]:
        """Let the service check these entries on its disk. Returns the reasons of damaged ones, now misses there."""
        damaged: dict[str, str] = {}
        for chunk in _chunks(keys) or [[]]:
            answer = self.request("POST", "verify", document={"keys": chunk}, answer_s=UPLOAD_ANSWER_S)
            with self._understood(answer) as document:
                damaged |= {str(key): str(reason) for key, reason in document["damaged"].items()}
        return damaged

    @override
    def encode_prompt(self, text: str, *, negative: bool) -> str | None:
        document = {"prompts": [{"text": text, "negative": negative}], "return": "keys"}
        answer = self.request("POST", "prompts:encode", document=document, also=[_MISSING], answer_s=ENCODE_S)
        if answer.status == _MISSING:  # the service runs without `--encode`
            return None
        with self._understood(answer) as found:
            return check_key(found["entries"][0]["key"])

    def close(self) -> None:
        """Close the connections."""
        if self._pools is not None:
            self._pools[1].clear()


def _route(name: str) -> str:
    """The route of a file: `packs/ID`, `manifests/NAME`, or the route of a run's note."""
    path = PurePosixPath(name)
    if path.parts[0] == "packs":
        return f"packs/{path.stem}"
    manifest, _, owner = path.stem.partition("+")
    route = f"manifests/{quote(manifest, safe='')}"
    return f"{route}/unfinished?owner={owner}" if path.suffix == UNFINISHED else route


def _chunks(keys: Sequence[str]) -> list[list[str]]:
    return [list(keys[first : first + KEYS]) for first in range(0, len(keys), KEYS)]


def _checked_url(url: str) -> str:
    """The URL without a trailing slash. StoreError if it is not the URL of a service, or contains a password."""
    with suppress(ValueError):
        parts = urlsplit(url)
        is_plain = "@" not in parts.netloc and not parts.query and not parts.fragment
        if is_plain and parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return url.rstrip("/")
    shown = "a URL with a password" if "@" in url else repr(url[:200])
    raise StoreError(
        f"{shown} is not the URL of a service: give http://HOST:PORT or https://HOST, and the token by token=... "
        f"or {TOKEN_VARIABLE}"
    )
