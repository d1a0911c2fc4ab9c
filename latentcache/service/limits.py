"""How much a request may take, of memory, time and the server's attention, and what refuses the others."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from latentcache.errors import RequestRefused
from latentcache.service.access import COOKIE, Access, Role, bearer_token
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
    max_answer_bytes: int = 256 << 20
    """Of the entries that one request returns: they are in memory until the client has read them."""
    max_keys: int = 16384
    """In one request."""
    max_requests: int = 64
    """Under way at once, with a token or where none is needed."""
    max_strangers: int = 16
    """Requests under way at once that have no token: pages to log in."""
    max_login_bytes: int = 8 << 10
    """Of a form with a token."""
    login_s: float = 5.0
    """For the whole of it."""
    max_uploads: int = 4
    """Under way at once; they are requests too."""
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
    """The outermost part of the app: it refuses requests, counts them, and bounds their bodies and their time."""

    def __init__(self, app: ASGIApp, *, access: Access, limits: Limits, telemetry: Telemetry):
        self._app, self._access, self._limits, self._telemetry = app, access, limits, telemetry
        self._num = Counter[str]()

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
        session = cookie_parser(headers.get("cookie", "")).get(COOKIE)
        role = self._access.role(bearer_token(headers.get("authorization")), session)
        scope["latentcache.role"] = role
        path = scope["path"]
        if path in PUBLIC:
            return Counter()  # a monitor learns that a busy server is alive
        if path.startswith(API):
            self._access.check(role, Role.READ)
        limits = self._limits
        if role < Role.READ:
            allowed = {"requests without a token": limits.max_strangers}
        else:
            allowed = {"requests": limits.max_requests}
            if scope["method"] == "PUT":
                allowed["uploads"] = limits.max_uploads
        for what, most in allowed.items():
            if (num := self._num[what] + 1) > most:
                detail = f"{num} {what} at once, and {most} are allowed"
                raise RequestRefused(
                    detail, status=503, met=num, allowed=most, next_step="Retry a little later", retry_after_s=1
                )
        return Counter(allowed.keys())


class _GuardedRequest:
    """One request: `receive` and `send` as the app sees them. A limit that is reached becomes the answer."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: Limits, telemetry: Telemetry):
        self._scope, self._receive, self._send, self._limits = scope, receive, send, limits
        self._telemetry = telemetry
        self._max_bytes, self._answer_s = limits.of(scope["method"], scope["path"])
        self._num_bytes, self._waited_s = 0, 0.0
        self._refusal: RequestRefused | None = None
        self._timer: asyncio.Timeout | None = None
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
