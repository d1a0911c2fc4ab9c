"""Requests to a service: connections that are kept, retries inside a stated time, and its problems as our errors."""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn, cast
from urllib.parse import urlsplit

import urllib3

from latentcache.cache_config import TOKEN_VARIABLE
from latentcache.errors import (
    DatasetError,
    EntryDamagedError,
    EntryMissingError,
    ReadOnlyError,
    RemoteError,
    StorageFullError,
    StoreError,
)
from latentcache.utils.json_document import to_bytes

RETRY_S = 30.0
CONNECT_S = 5.0
FIRST_DELAY_S, MAX_DELAY_S = 0.1, 2.0
"""Before the second attempt, and the most before any; each wait is drawn from the upper half of it."""
MAX_BUSY_DELAY_S = 20.0
"""The same where a service is busy, and each attempt sends a pack."""
ATTEMPTS = 3
"""That fit into the time for retries, where a service accepts a connection and then says nothing: a kept connection
may lead to a machine that is gone."""
UPLOAD_BUSY_S = 600.0
"""For so long an upload is tried again that a service refuses with 503: it takes nothing while `compact` works."""
UPLOAD_ANSWER_S = 300.0
"""A service checks and seals what was uploaded before it answers."""
MAX_BYTES = 8 << 30
"""Of an answer. A pack has some 64 MiB, and the manifest of a million samples about 1 GiB."""
MAX_CONNECTIONS = 8
"""That are kept."""
_PASSING = {408, 429, 502, 503, 504}
"""What a service, or a proxy before it, answers while it is overloaded or starts."""
_START = "Start the server, `latentcache serve CACHE`, or check the URL"
_LATER = "Wait until the server has less to do"
_UNAUTHORIZED, _FORBIDDEN, _BUSY = 401, 403, 503

logger = logging.getLogger("latentcache")

MakeBody = Callable[[], Iterable[bytes | memoryview]]
"""Gives the parts of a body, again for each attempt."""


class ServiceAnswer:
    """What a service answered: its status, its headers (a name in any case), and its bytes."""

    def __init__(self, url: str, status: int, headers: Mapping[str, str], data: bytes):
        self.url, self.status, self.headers, self.data = url, status, headers, data


@contextmanager
def understood(answer: ServiceAnswer) -> Iterator[Any]:
    """The answer's document. RemoteError if it is none, or if the block does not find in it what it needs."""
    try:
        yield json.loads(answer.data)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise strange_answer(answer.url, f"a document that is not what was requested ({error!r:.200})") from error


class ServiceConnection:
    """Requests to the service at `url` (http or https, also below a path), with its token if it has one.

    A request that does not get through is tried again for `retry_s` seconds, after waits that grow and are drawn at
    random, so that many clients do not come back at once. Then it is a RemoteError. All requests of a client may be
    repeated: what was done already is not done again. Threads share the connections; a fork makes its own.
    """

    def __init__(self, url: str, *, token: str | None = None, retry_s: float = RETRY_S):
        self.url = checked_url(url)
        self.retry_s = retry_s
        self._token = token or os.environ.get(TOKEN_VARIABLE) or None
        if self._token is not None and not (self._token.isascii() and self._token.isprintable()):
            raise StoreError(f"{self.url}: the token has characters that no header can have; give it as the server has")
        if self._token is not None and not _is_private(self.url):
            step = "use https (the guide of the service shows a proxy), or a tunnel to the server's loopback"
            logger.warning("%s: the token travels without encryption, and others may read it: %s", self.url, step)
        self._closed = threading.Event()
        self._pools: tuple[int, urllib3.PoolManager] | None = None

    def request(
        self,
        method: str,
        route: str,
        *,
        document: object = None,
        body: MakeBody | None = None,
        headers: Mapping[str, str] | None = None,
        also: Iterable[int] = (),
        answer_s: float = 0.0,
        busy_s: float = 0.0,
    ) -> ServiceAnswer:
        """The answer to a request of `/v1/<route>`. An error's is raised, but for those with a status in `also`.

        `document` is sent as JSON, and `body` as bytes, whose Content-Length is then among the headers. An attempt
        ends when no byte comes for a third of `retry_s`, or for `answer_s` where that is more. With
        `busy_s` a service that answers with 503 is asked for so long, if that is more than `retry_s`. RemoteError;
        EntryMissingError, EntryDamagedError, ReadOnlyError and StorageFullError as the service says them.
        """
        self.check_open()
        all_headers = {"Accept-Encoding": "identity", **(headers or {})}
        if self._token is not None:
            all_headers["Authorization"] = f"Bearer {self._token}"
        if document is not None:
            content = to_bytes(document)
            all_headers |= {"Content-Type": "application/json", "Content-Length": str(len(content))}
            body = lambda: [content]  # noqa: E731 - as any other body
        answer = self._until_answered(method, f"{self.url}/v1/{route}", body, all_headers, answer_s, busy_s)
        if answer.status < 300 or answer.status in also:
            return answer
        self._refused(answer)

    def _until_answered(
        self,
        method: str,
        url: str,
        body: MakeBody | None,
        headers: Mapping[str, str],
        answer_s: float,
        busy_s: float,
    ) -> ServiceAnswer:
        """The first answer that is not a passing fault."""
        start = heard_at = time.monotonic()
        delay = FIRST_DELAY_S
        while True:
            left = heard_at + self.retry_s - time.monotonic()
            problem, step, wait_s, is_busy = "", _START, 0.0, False
            try:
                answer = self._once(method, url, body, headers, max(min(left, self.retry_s / ATTEMPTS), answer_s, 1.0))
                if answer.status not in _PASSING:
                    return answer
                detail, step = _told(answer)
                step = step or (_LATER if detail else _START)
                problem = f"answers with {answer.status}: {detail or 'no reason'!s:.300}"
                wait_s = _seconds(answer.headers.get("Retry-After"))
                is_busy = answer.status == _BUSY and busy_s > 0
            except urllib3.exceptions.SSLError as error:
                raise RemoteError(
                    self.url,
                    f"no secure connection: {error}",
                    "Check the URL, and the certificate: SSL_CERT_FILE names the file of an authority of your own.",
                ) from error
            except urllib3.exceptions.HTTPError as error:
                problem = f"does not answer: {_short(error)}"
            if is_busy:
                heard_at = time.monotonic()
            tried_s = time.monotonic() - start
            left = max(self.retry_s, busy_s) - tried_s if is_busy else heard_at + self.retry_s - time.monotonic()
            wait_s = max(wait_s, delay * random.uniform(0.5, 1.0))
            if wait_s >= left:
                raise RemoteError(
                    self.url,
                    f"{problem} (tried for {tried_s:.1f} s, cache.retry_s is {self.retry_s:g})",
                    f"{step}; then run the same again: nothing that was stored is lost.",
                )
            if delay == FIRST_DELAY_S:
                logger.warning("%s: %s; trying again for %.0f s", self.url, problem, left)
            delay = min(2 * delay, MAX_BUSY_DELAY_S if is_busy else MAX_DELAY_S)
            if self._closed.wait(wait_s):
                self.check_open()

    def _once(
        self, method: str, url: str, body: MakeBody | None, headers: Mapping[str, str], timeout_s: float
    ) -> ServiceAnswer:
        response = self._pool.request(
            method,
            url,
            body=None if body is None else cast("Iterable[bytes]", iter(body())),  # it takes views too
            headers=dict(headers),
            timeout=urllib3.Timeout(connect=min(CONNECT_S, timeout_s), read=timeout_s),
            retries=False,
            redirect=False,
            preload_content=False,
        )
        try:
            num_bytes = response.headers.get("Content-Length", "0")
            if num_bytes.isdecimal() and int(num_bytes) > MAX_BYTES:
                raise strange_answer(url, f"{num_bytes} bytes, of which at most {MAX_BYTES:,} are read")
            data = response.read(decode_content=False)
        except BaseException:
            response.close()  # what is left of the answer must not be taken for the next one
            raise
        response.release_conn()
        return ServiceAnswer(url, response.status, response.headers, data)

    @property
    def _pool(self) -> urllib3.PoolManager:
        """This process's connections: a fork must not write to those of its parent."""
        if self._pools is None or self._pools[0] != os.getpid():
            self._pools = os.getpid(), urllib3.PoolManager(num_pools=1, maxsize=MAX_CONNECTIONS, retries=False)
        return self._pools[1]

    def _refused(self, answer: ServiceAnswer) -> NoReturn:
        """Raise the error that the service answered with."""
        problem, (detail, step) = _problem_of(answer), _told(answer)
        kind, key = problem.get("kind"), problem.get("key")
        detail = detail or str(problem.get("title") or f"status {answer.status}")
        if answer.status == _UNAUTHORIZED:
            which = "refuses this token" if self._token else "wants a token"
            give = f"Give the server's: token=... in Python, or the variable {TOKEN_VARIABLE}."
            raise RemoteError(self.url, which, give, status=answer.status, kind=kind)
        if answer.status == _FORBIDDEN or kind == "ReadOnlyError":
            give = f"give the server's writing token: token=... in Python, or the variable {TOKEN_VARIABLE}"
            raise ReadOnlyError(self.url, f"the service does not let this client write ({detail}); {give}")
        if kind == "EntryMissingError" and isinstance(key, str):
            raise EntryMissingError(key)
        if kind == "EntryDamagedError" and isinstance(key, str):
            raise EntryDamagedError(key, str(problem.get("reason") or "the service found it so"))
        if kind == "StorageFullError":
            needed = problem.get("needed_bytes")
            raise StorageFullError(self.url, needed if isinstance(needed, int) else 0)
        if kind in ("DatasetError", "SchemaError"):
            raise DatasetError(self.url, detail)
        step = f"{step or 'Check that client and server are of one version of latentcache'}."
        raise RemoteError(self.url, detail, step, status=answer.status, kind=kind)

    @property
    def has_token(self) -> bool:
        """Whether requests have a token, by the argument or by the environment."""
        return self._token is not None

    def check_open(self) -> None:
        """StoreError if it was closed."""
        if self._closed.is_set():
            raise StoreError(f"{self.url}: the store is closed; open it again")

    def close(self) -> None:
        """Close the connections; requests that wait to be tried again end."""
        self._closed.set()
        if self._pools is not None:
            self._pools[1].clear()


def checked_url(url: str) -> str:
    """The URL without a slash at its end. StoreError for one that does not name a service, or that has a password."""
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        is_good = is_good and "@" not in parts.netloc and not parts.query and not parts.fragment
    except ValueError:
        is_good = False
    if not is_good:
        shown = "a URL with a password" if "@" in url else repr(url[:200])
        raise StoreError(
            f"{shown} is not the URL of a service: give http://HOST:PORT or https://HOST, and the token by token=... "
            f"or {TOKEN_VARIABLE}"
        )
    return url.rstrip("/")


def _is_private(url: str) -> bool:
    """Whether nobody on the way reads what is sent: it is encrypted, or does not leave this machine."""
    parts = urlsplit(url)
    try:
        return parts.scheme == "https" or ipaddress.ip_address(str(parts.hostname)).is_loopback
    except ValueError:
        return parts.hostname == "localhost"


def strange_answer(url: str, what: str) -> RemoteError:
    """The error for an answer that no service of latentcache gives."""
    step = "Check that the URL is that of `latentcache serve`, and that both are of one version of latentcache."
    return RemoteError(url, f"answers with {what}", step)


def _problem_of(answer: ServiceAnswer) -> Mapping[str, Any]:
    """The problem document (RFC 9457); empty for another answer, as a proxy gives it."""
    try:
        found = json.loads(answer.data)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _told(answer: ServiceAnswer) -> tuple[str, str]:
    """What the problem is, and what to do, each without a full stop; empty where the answer does not say it."""
    problem = _problem_of(answer)
    detail, step = (str(problem.get(name) or "").rstrip(".") for name in ("detail", "next_step"))
    return detail.removesuffix(step).rstrip(". "), step


def _seconds(text: str | None) -> float:
    """What Retry-After says in seconds; dates are not read."""
    return float(text) if text is not None and text.isdecimal() else 0.0


def _short(error: Exception) -> str:
    """The message without the object that urllib3 names first."""
    return f"{type(error).__name__}: {str(error).partition('>: ')[2] or error}"[:300]
