"""The app of `latentcache serve`: the check of every request, and the routes about the cache as a whole."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any, Literal

import anyio
from fastapi import APIRouter, Depends, FastAPI
from fastapi.security import HTTPBearer
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import latentcache
from latentcache.errors import RequestRefused
from latentcache.loading.status import status_of
from latentcache.service.auth import Role, bearer_token, cookie_of
from latentcache.service.errors import RESPONSES, add_handlers, problem_of
from latentcache.service.manifests import manifest_router
from latentcache.service.packs import length_of, pack_router
from latentcache.service.page.routes import Pages, page_router
from latentcache.service.page.views import STATIC
from latentcache.service.state import ServiceSettings, ServiceState
from latentcache.store.cut_captions import CutCaptions
from latentcache.utils.json_document import to_bytes

API = "/v1/"
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE"})
PUBLIC = frozenset({"/v1/healthz", "/v1/openapi.json"})
"""Paths of the API that need no token. Routes outside of the API check it themselves."""


def create_app(settings: ServiceSettings) -> FastAPI:
    """The app that serves a cache, which stays open until the app's lifespan ends. StoreError, ReadOnlyError.

    Also ConfigError, DeviceError and ModelError if the settings have a config.
    """
    state = ServiceState(settings)
    try:
        return _app_of(state)
    except BaseException:
        state.close()
        raise


def _app_of(state: ServiceState) -> FastAPI:
    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with contextlib.closing(state):
            yield

    app = FastAPI(
        title="latentcache",
        version=latentcache.__version__,
        description="One cache of VAE latents and text embeddings for several trainers and machines.",
        openapi_url="/v1/openapi.json",
        docs_url=None,  # these pages load scripts from other servers
        redoc_url=None,
        lifespan=lifespan,
        responses=RESPONSES,
    )
    pages = Pages(state)
    add_handlers(app, pages.wrong_address)
    app.mount("/static", StaticFiles(directory=STATIC))

    @app.get("/v1/healthz", tags=["cache"])
    async def healthz() -> dict[Literal["status", "version"], str]:
        """Whether the server is up. Needs no token."""
        return {"status": "ok", "version": latentcache.__version__}

    routers = [_cache_router, pack_router, manifest_router]
    if state.settings.encode is not None:
        # Imports diffusers, which other servers do not need.
        from latentcache.service.encode import encode_router

        routers.append(encode_router)
    # `Gate` checks the token; this only declares it in the OpenAPI document.
    token = Depends(HTTPBearer(description="The reading or the writing token.", auto_error=False))
    for router in routers:
        app.include_router(router(state), dependencies=[token])
    app.include_router(page_router(state, pages), dependencies=[token])
    app.add_middleware(Gate, state=state)
    return app


def _cache_router(state: ServiceState) -> APIRouter:
    router, captions = APIRouter(prefix="/v1", tags=["cache"]), CutCaptions(state.store)

    @router.get("/status", response_model=dict[str, Any])
    async def status() -> Response:
        """The output of `latentcache status --json`: entries, bytes, manifests and damage."""
        found = await state.view(status_of, state.store, state.manifests, state.store.path, captions)
        return Response(to_bytes(found.to_json()), media_type="application/json")

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """The server's metrics."""
        return Response(generate_latest(state.telemetry.registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    return router


class Gate:
    """The outermost middleware: it authenticates requests, limits them and their bodies, and counts them.

    Requests beyond `Limits.max_requests` are queued in FIFO order, and get a 503 after `queue_s`. FastAPI's
    `max_body_size` is not used: it bypasses the error handlers, so clients would get plain text in place of a problem
    document. Neither it nor uvicorn ends an upload that stalls.
    """

    def __init__(self, app: ASGIApp, *, state: ServiceState):
        self._app, self._state = app, state
        self._turns = asyncio.Semaphore(state.limits.max_requests)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an HTTP request; pass everything else on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange, telemetry = _Exchange(scope, receive, send, self._state), self._state.telemetry
        with telemetry.in_progress.track_inprogress():
            start = time.monotonic()
            try:
                async with self._turn(scope):
                    exchange.check_size(exchange.length)
                    await self._app(scope, exchange.receive, exchange.send)
            except RequestRefused as error:
                if exchange.status:
                    raise
                await problem_of(error)(scope, receive, exchange.send)
            except Exception:
                exchange.status = exchange.status or 500  # Starlette sends the response
                raise
            finally:
                # The route's template, not the path, so that the number of time series is bounded.
                route = getattr(scope.get("route"), "path", "none")
                method = scope["method"] if scope["method"] in METHODS else "other"
                telemetry.requests.labels(route, method, str(exchange.status)).inc()
                telemetry.seconds.labels(route).observe(time.monotonic() - start)

    @contextlib.asynccontextmanager
    async def _turn(self, scope: Scope) -> AsyncIterator[None]:
        """Hold one of the turns for the block. RequestRefused if the request is not allowed, or the server is busy."""
        access, limits, headers, path = self._state.access, self._state.limits, Headers(scope=scope), scope["path"]
        access.check_host(headers.get("host"), headers.get("origin"))
        session = cookie_parser(headers.get("cookie", "")).get(cookie_of(scope))
        role = scope["latentcache.role"] = access.role(bearer_token(headers.get("authorization")), session)
        if path.startswith(API) and path not in PUBLIC:
            access.check(role, Role.READ)
        if path in PUBLIC or role < Role.READ:
            # A health check works on a busy server, and a request without a token takes nobody's turn.
            yield
            return
        try:
            with anyio.fail_after(limits.queue_s):
                await self._turns.acquire()
        except TimeoutError:
            num, step = limits.max_requests, "Retry in a few seconds"
            detail = f"the server was busy for {limits.queue_s:g} s; it handles {num} requests at once"
            raise RequestRefused(detail, status=503, allowed=num, next_step=step, retry_after_s=1) from None
        try:
            yield
        finally:
            self._turns.release()


class _Exchange:
    """`receive` and `send` of one request, for the app. RequestRefused if the body is too large, or stalls."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, state: ServiceState):
        self._receive, self._send, self._stall_s = receive, send, state.limits.stall_s
        self._max_bytes = state.limits.max_body_bytes
        if scope["method"] == "PUT":
            self._max_bytes = state.limits.max_upload_bytes
        elif scope["path"].endswith("images:encode"):
            self._max_bytes = state.limits.max_images_bytes
        self._num_bytes, headers = 0, Headers(scope=scope)
        self.length = length_of(headers)
        """The Content-Length; 0 without one. uvicorn has checked that it is a number."""
        self._is_read = "transfer-encoding" not in headers and not self.length
        """Whether the whole body was received."""
        self.status = 0
        """The status of the response; 0 until it is sent."""

    def check_size(self, num_bytes: int) -> None:
        """RequestRefused if a body of this size is too large."""
        if num_bytes > self._max_bytes:
            detail = f"the body has {num_bytes:,} bytes or more; at most {self._max_bytes:,} are allowed"
            step = "Send a smaller body"
            raise RequestRefused(detail, status=413, met=num_bytes, allowed=self._max_bytes, next_step=step)

    async def receive(self) -> Message:
        """The next part of the body."""
        if self._is_read or self.status:  # the app waits for the client to disconnect
            return await self._receive()
        try:
            with anyio.fail_after(self._stall_s):
                message = await self._receive()
        except TimeoutError:
            detail = f"no byte of the body arrived for {self._stall_s:g} s"
            raise RequestRefused(detail, status=408, allowed=self._stall_s, next_step="Send it again") from None
        self._is_read = message["type"] == "http.request" and not message.get("more_body")
        self._num_bytes += len(message.get("body", b""))
        self.check_size(self._num_bytes)
        return message

    async def send(self, message: Message) -> None:
        """Send a part of the response."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message["headers"], (b"x-content-type-options", b"nosniff")]
            if not self._is_read:  # the rest of the body is not read, so the connection cannot be reused
                headers.append((b"connection", b"close"))
            message = {**message, "headers": headers}
        await self._send(message)
