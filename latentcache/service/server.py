"""The app of `latentcache serve`, and the process that runs it."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import resource
import signal
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import APIRouter, FastAPI
from typing_extensions import override

import latentcache
from latentcache.errors import ConfigError
from latentcache.service.access import Access
from latentcache.service.cache_routes import cache_router
from latentcache.service.connections import protocol_of
from latentcache.service.context import ServiceContext, ServiceSettings
from latentcache.service.entry_routes import entry_router
from latentcache.service.limits import Gate
from latentcache.service.manifest_routes import manifest_router
from latentcache.service.pack_routes import pack_router
from latentcache.service.page_routes import page_router, static_router
from latentcache.service.problems import add_handlers

ROUTERS: tuple[Callable[[ServiceContext], APIRouter], ...] = (
    cache_router,
    entry_router,
    pack_router,
    manifest_router,
    page_router,
    static_router,
)
"""Each gives the routes of one subject. A router with a lifespan is entered before the first request."""
_GRACE_S = 30
_BACKLOG = 2048
_MAX_FILES = 1 << 16
_MAX_PORT = 65535


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where a server listens. `port` 0 takes a free one. `certfile` and `keyfile` are for TLS.

    ConfigError for a port that there is not.
    """

    host: str = "127.0.0.1"
    port: int = 8765
    certfile: Path | None = None
    keyfile: Path | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= _MAX_PORT:
            raise ConfigError(f"{self.port} is no port; give 1 to {_MAX_PORT}, or 0 for a free one", source="--port")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it. ConfigError for a host that has no address."""
        return all(ipaddress.ip_address(address).is_loopback for address in self._addresses())

    def _addresses(self) -> list[str]:
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except (OSError, UnicodeError) as error:
            message = (
                f"{self.host!r:.200} is no address to listen on: {error}; give one of this machine's, e.g. 127.0.0.1"
            )
            raise ConfigError(message, source="--host") from error
        return [str(each[4][0]).partition("%")[0] for each in found]

    def listen(self) -> socket.socket:
        """A socket that listens. ConfigError if that cannot be done."""
        address = self._addresses()[0]
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            return socket.create_server((address, self.port), family=family, backlog=_BACKLOG)
        except OSError as error:
            message = f"cannot listen on {self.host}:{self.port}: {error}; give another --port, or 0 for a free one"
            raise ConfigError(message, source="--port") from error

    def check_certificate(self) -> None:
        """ConfigError if the certificate or its key cannot be used."""
        if self.certfile is None:
            return
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certfile, self.keyfile)
        except OSError as error:  # an SSLError is one
            message = f"{self.certfile} and {self.keyfile} cannot be used for TLS: {error}"
            raise ConfigError(message, source="--ssl-certfile") from error

    def url(self, port: int) -> str:
        """The address for clients, with the port that was taken."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.certfile else 'http'}://{host}:{port}"


def access_for(address: Address, reading_token: str | None, writing_token: str | None) -> Access:
    """Who may do what on a server at this address. ConfigError if others could reach it and no token protects it."""
    if address.is_loopback:
        is_open = reading_token is None
        # A token protects against other sites' pages too, and then a proxy may use any name.
        names = {"localhost", "127.0.0.1", "::1", address.host.lower()}
        hosts = frozenset(names) if is_open else None
        return Access(reading_token=reading_token, writing_token=writing_token, is_open=is_open, hosts=hosts)
    if reading_token is None and writing_token is None:
        raise ConfigError(
            f"{address.host} can be reached from other machines, and no token protects the cache: give --token-file, "
            "or set LATENTCACHE_TOKEN, or serve on 127.0.0.1",
            source="--host",
        )
    return Access(reading_token=reading_token, writing_token=writing_token, is_open=False)


class _DescribedApp(FastAPI):
    """Its OpenAPI document says that requests need a token."""

    @override
    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            document = super().openapi()
            scheme = {"type": "http", "scheme": "bearer", "description": "The reading or the writing token."}
            document["components"]["securitySchemes"] = {"token": scheme}
            document["security"] = [{"token": []}]
        assert self.openapi_schema is not None
        return self.openapi_schema


def create_app(settings: ServiceSettings) -> FastAPI:
    """The app that serves a cache. The cache is open until the app's lifespan ends. StoreError, ReadOnlyError.

    With a config to encode with also ConfigError, DeviceError and ModelError.
    """
    context = ServiceContext(settings)
    try:
        return _app_of(context, settings)
    except BaseException:
        context.close()
        raise


def _app_of(context: ServiceContext, settings: ServiceSettings) -> FastAPI:
    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with contextlib.closing(context):
            repeated = asyncio.create_task(context.release_packs())
            try:
                yield
            finally:
                repeated.cancel()
                await asyncio.wait([repeated])

    app = _DescribedApp(
        title="latentcache",
        version=latentcache.__version__,
        description="One cache of VAE latents and text embeddings for several trainers and machines.",
        openapi_url="/v1/openapi.json",
        docs_url=None,  # their pages load scripts from elsewhere
        redoc_url=None,
        lifespan=lifespan,
    )
    add_handlers(app)
    routers = ROUTERS
    if settings.encode is not None:
        # It imports diffusers, which other servers do not need.
        from latentcache.service.encode_routes import encode_router

        routers += (encode_router,)
    for router in routers:
        app.include_router(router(context))
    app.add_middleware(Gate, access=context.access, limits=context.limits, telemetry=context.telemetry)
    app.state.context = context
    return app


class CacheServer(uvicorn.Server):
    """Says when it answers, and which signals stopped it."""

    def __init__(self, config: uvicorn.Config, announce: Callable[[], None]):
        super().__init__(config)
        self._announce = announce
        self.caught: list[int] = []

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._announce()

    @override
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Finish the requests under way at the first Ctrl-C or SIGTERM; a second Ctrl-C ends them."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(number: int, frame: object) -> None:
            self.caught.append(number)
            self.handle_exit(number, None)

        before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def serve(settings: ServiceSettings, address: Address, announce: Callable[[str], None]) -> int:
    """Serve a cache until Ctrl-C or SIGTERM. Returns the signal's number. As `make_server`."""
    _allow_many_files()
    server, listener = make_server(settings, address, announce)
    with listener:
        asyncio.run(server.serve(sockets=[listener]))
    return server.caught[0] if server.caught else signal.SIGTERM


def make_server(
    settings: ServiceSettings, address: Address, announce: Callable[[str], None]
) -> tuple[CacheServer, socket.socket]:
    """A server of a cache, and the socket on which it is to listen.

    `announce` is called with the URL once it answers. ConfigError if the address or the certificate cannot be used;
    errors of `create_app`.
    """
    listener = address.listen()  # before the models are identified, which takes minutes
    try:
        address.check_certificate()
        app = create_app(settings)
    except BaseException:
        listener.close()
        raise
    config = uvicorn.Config(
        app,
        http=protocol_of(settings.limits),
        ws="none",
        lifespan="on",
        log_config=None,
        log_level=logging.WARNING,
        access_log=False,
        # X-Forwarded-Proto, of a proxy on this machine or in FORWARDED_ALLOW_IPS: the page's cookie is Secure then.
        proxy_headers=True,
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=round(settings.limits.idle_s),
        timeout_graceful_shutdown=_GRACE_S,
        ssl_certfile=address.certfile,
        ssl_keyfile=address.keyfile,
    )
    url = address.url(listener.getsockname()[1])
    return CacheServer(config, lambda: announce(url)), listener


def _allow_many_files() -> None:
    """A connection is a file: by default a process may have 1,024, which idle clients could take up."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
