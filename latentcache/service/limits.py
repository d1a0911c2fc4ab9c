"""How much a request may take, of memory, time and the server's attention, and what refuses the others."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from weakref import WeakValueDictionary

from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from latentcache.errors import RequestRefused
from latentcache.service.access import Access, Role, bearer_token, cookie_of
from latentcache.service.problems import problem_of
from latentcache.service.telemetry import Telemetry

API = "/v1/"
LOGIN = "/login"
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE"})
PUBLIC = frozenset({"/v1/healthz", "/v1/openapi.json"})
"""Paths of the API that need no token. What lies outside of the API asks for one itself."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one request may take, and all of them together."""

    max_body_bytes: int = 4 << 20
    """Of a request that is JSON."""
    max_images_bytes: int = 128 << 20
    """Of a request with images to encode."""
    max_upload_bytes: int = 2 << 30
    """Of a pack or a manifest."""
    max_keys: int = 16384
    """In one request."""
    max_requests: int = 64
    """Under way at once, with a token or where none is needed. Others wait their turn. One address has half of them."""
    queue_s: float = 5.0
    """For which a request waits its turn: less than the time after which a client asks again."""
    max_client_requests: int = 256
    """Of one address, under way or waiting: a machine may have several trainers with several workers each."""
    max_strangers: int = 16
    """Requests under way at once that have no token: pages to log in."""
    max_login_bytes: int = 8 << 10
    """Of a form with a token."""
    login_s: float = 5.0
    """For the whole of it."""
    max_uploads: int = 4
    """Under way at once; they are requests too, and wait their turn."""
    num_threads: int = 8
    """That read the store."""
    num_view_threads: int = 2
    """That make pages and pictures, search manifests, and count for `status`."""
    answer_s: float = 120.0
    """Until an answer begins. Uploads and encoding have no such limit: others hold for them."""
    stall_s: float = 30.0
    """For which a client may neither send nor take any byte."""
    min_body_rate: int = 16 << 10
    """Bytes of a body that have to come each second, after the first `stall_s`."""
    header_s: float = 20.0
    """For the line and the headers of a request, from their first byte to their last."""
    idle_s: float = 75.0
    """For which a connection may be open without a request."""

    def of(self, method: str, path: str) -> tuple[int, float | None]:
        """The bytes that a request's body may have, and the time until its answer begins; None: as long as it takes."""
        if path == LOGIN:
            return self.max_login_bytes, self.login_s
        if method == "PUT":
            return self.max_upload_bytes, None
        if path.endswith(":encode"):
            return (self.max_images_bytes if path.endswith("images:encode") else self.max_body_bytes), None
        return self.max_body_bytes, self.answer_s


class Gate:
    """The outermost part of the app: it refuses requests, lets them wait, and bounds their bodies and their time.

    What one client does too much of is a 429. Where all of them together are too much, those that came first go first,
    and who waited too long gets a 503. The requests of one address wait for each other before they wait for others'.
    """

    def __init__(self, app: ASGIApp, *, access: Access, limits: Limits, telemetry: Telemetry):
        self._app, self._access, self._limits, self._telemetry = app, access, limits, telemetry
        self._num = Counter[str]()
        # Uploads first: one that waits takes no other request's turn.
        self._turns = {
            "uploads": asyncio.Semaphore(limits.max_uploads),
            "requests": asyncio.Semaphore(limits.max_requests),
        }
        # By address, as long as requests of it are under way.
        self._own_turns = WeakValueDictionary[str, asyncio.Semaphore]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, or pass on what is none."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = _GuardedRequest(scope, receive, send, self._limits, self._telemetry)
        start, kinds = time.monotonic(), Counter[str]()
        with self._telemetry.in_progress.track_inprogress():
            try:
                kinds = self._admit(scope)
                self._num += kinds
                with ExitStack() as held:
                    await self._take_turns(scope, kinds, held)
                    await request.run(self._app)
            except RequestRefused as error:
                await request.refuse(error)
            except Exception:
                request.status = request.status or 500  # the app's outermost part answers it
                raise
            finally:
                self._num -= kinds
                # The template of the path, not the path: the number of series is bounded.
                route = getattr(scope.get("route"), "path", "none")
                method = scope["method"] if scope["method"] in METHODS else "other"
                self._telemetry.requests.labels(route, method, str(request.status)).inc()
                self._telemetry.seconds.labels(route).observe(time.monotonic() - start)

    def _admit(self, scope: Scope) -> Counter[str]:
        """What the request counts as. RequestRefused if it may not be made, or not now."""
        headers = Headers(scope=scope)
        self._access.check_host(headers.get("host"), headers.get("origin"))
        session = cookie_parser(headers.get("cookie", "")).get(cookie_of(scope))
        role = self._access.role(bearer_token(headers.get("authorization")), session)
        scope["latentcache.role"] = role
        path = scope["path"]
        if path in PUBLIC:
            return Counter()  # a monitor learns that a busy server is alive
        if path.startswith(API):
            self._access.check(role, Role.READ)
        limits = self._limits
        if role < Role.READ:
            self._check_number("requests without a token", limits.max_strangers, 503)
            return Counter(["requests without a token"])
        own = _own(scope)
        self._check_number(own, limits.max_client_requests, 429)
        return Counter([own, "requests", *(["uploads"] if scope["method"] == "PUT" else [])])

    def _check_number(self, what: str, allowed: int, status: int) -> None:
        if (num := self._num[what] + 1) > allowed:
            raise _too_many(f"{num} {what} at once", status, num, allowed)

    async def _take_turns(self, scope: Scope, kinds: Counter[str], held: ExitStack) -> None:
        """Wait until there is room for what the request counts as, which it has until `held` is left."""
        limits, own = self._limits, _own(scope)
        wanted = [(what, turns, getattr(limits, f"max_{what}"), 503) for what, turns in self._turns.items()]
        if own in kinds:
            share = (limits.max_requests + 1) // 2
            wanted.insert(0, (own, self._own_turns.setdefault(own, asyncio.Semaphore(share)), share, 429))
        try:
            async with asyncio.timeout(limits.queue_s):
                for turn in wanted:
                    what, turns, allowed, status = turn
                    if what in kinds:
                        await turns.acquire()
                        held.callback(turns.release)
        except TimeoutError:
            num = self._num[what]
            raise _too_many(f"{num} {what} at once for {limits.queue_s:g} s", status, num, allowed) from None


def _own(scope: Scope) -> str:
    """What requests of the same address count as."""
    address = (scope.get("client") or ("an unknown address",))[0]
    return f"requests of {address}"


def _too_many(detail: str, status: int, num: int, allowed: int) -> RequestRefused:
    step = "Retry a little later"
    return RequestRefused(
        f"{detail}, and {allowed} are allowed", status=status, met=num, allowed=allowed, next_step=step, retry_after_s=1
    )


class _GuardedRequest:
    """One request: `receive` and `send` as the app sees them. A limit that is reached becomes the answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: Limits, telemetry: Telemetry):
        self._scope, self._receive, self._send, self._limits = scope, receive, send, limits
        self._telemetry = telemetry
        self._max_bytes, self._answer_s = limits.of(scope["method"], scope["path"])
        self._num_bytes, self._waited_s = 0, 0.0
        self._refusal: RequestRefused | None = None
        self._timer: asyncio.Timeout | None = None
        headers = Headers(scope=scope)
        self._is_read = "transfer-encoding" not in headers and headers.get("content-length", "0") == "0"
        """Whether the whole body has come."""
        self.status = 0
        """Of the answer, once it began."""

    async def run(self, app: ASGIApp) -> None:
        """Let the app answer."""
        given = Headers(scope=self._scope).get("content-length", "0")
        if given.isdecimal() and int(given) > self._max_bytes:
            raise self._too_large(int(given))
        try:
            async with asyncio.timeout(self._answer_s) as self._timer:
                await app(self._scope, self.receive, self.send)
        except TimeoutError:
            if not self._timer or not self._timer.expired():
                raise
            detail = f"no answer within {self._answer_s:g} s"
            raise RequestRefused(
                detail, status=503, allowed=self._answer_s, next_step="Retry, or request less"
            ) from None
        except Exception as error:
            if self._refusal is not None and not self.status:
                raise self._refusal from error
            raise
        if self._refusal is not None and not self.status:
            raise self._refusal

    async def receive(self) -> Message:
        """The next part of the body. Once a limit is reached the client is as good as gone."""
        if self._refusal is not None:
            return {"type": "http.disconnect"}
        start = time.monotonic()
        try:
            async with asyncio.timeout(self._limits.stall_s if not self.status else None):
                message = await self._receive()
        except TimeoutError:
            detail = f"no byte of the body came for {self._limits.stall_s:g} s"
            self._refusal = RequestRefused(detail, status=408, allowed=self._limits.stall_s)
            return {"type": "http.disconnect"}
        self._is_read |= message["type"] == "http.request" and not message.get("more_body")
        self._num_bytes += (num := len(message.get("body", b"")))
        self._telemetry.received_bytes.inc(num)
        if self._num_bytes > self._max_bytes:
            self._refusal = self._too_large(self._num_bytes)
            return {"type": "http.disconnect"}
        # Only while the server waited: what it does with the bytes is not the client's time.
        self._waited_s += time.monotonic() - start
        rate = self._limits.min_body_rate
        if message.get("more_body") and self._num_bytes < rate * (self._waited_s - self._limits.stall_s):
            detail = f"{self._num_bytes:,} bytes of the body came in {self._waited_s:.0f} s"
            self._refusal = RequestRefused(detail, status=408, allowed=f"{rate:,} bytes per second")
            return {"type": "http.disconnect"}
        return message

    def _too_large(self, num_bytes: int) -> RequestRefused:
        detail = f"the body has {num_bytes:,} bytes or more, and {self._max_bytes:,} are allowed"
        return RequestRefused(detail, status=413, met=num_bytes, allowed=self._max_bytes, next_step="Send less at once")

    async def send(self, message: Message) -> None:
        """Send a part of the answer, unless a limit was reached before it began."""
        if self._refusal is not None and not self.status:
            return  # the app answers that it cannot read the body; `run` says why
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message["headers"], (b"x-content-type-options", b"nosniff")]
            if not self._is_read:  # what is left of the body is not read, and no next request waits behind it
                headers.append((b"connection", b"close"))
            message = {**message, "headers": headers}
            if self._timer is not None:
                self._timer.reschedule(None)  # from here on the client sets the pace
        else:
            self._telemetry.sent_bytes.inc(len(message.get("body", b"")))
        await self._send(message)

    async def refuse(self, error: RequestRefused) -> None:
        """Answer with the error, if no answer began."""
        if self.status:
            raise error
        self._refusal = self._timer = None
        await problem_of(error)(self._scope, self._receive, self.send)
