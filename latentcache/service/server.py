"""The process of `latentcache serve`: its address, and who may access it there."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import signal
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from latentcache.errors import ConfigError
from latentcache.service.app import create_app
from latentcache.service.auth import Access
from latentcache.service.state import ServiceSettings
from latentcache.utils.signals import STOPPING, handlers_kept

_GRACE_S = 30
_IDLE_S = 75
"""Keep-alive: how long a connection stays open without a request."""
_BACKLOG = 2048
_MAX_PORT = 65535


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where a server listens. `port` 0 takes a free one. `certfile` and `keyfile` are for TLS.

    ConfigError for a port out of range.
    """

    host: str = "127.0.0.1"
    port: int = 8765
    certfile: Path | None = None
    keyfile: Path | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= _MAX_PORT:
            raise ConfigError(f"{self.port} is not a port; give 1 to {_MAX_PORT}, or 0 for a free one", source="--port")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it. ConfigError for a host without an address."""
        return all(ipaddress.ip_address(address).is_loopback for address in self._addresses())

    def _addresses(self) -> list[str]:
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except (OSError, UnicodeError) as error:
            step = "give an address of this machine, e.g. 127.0.0.1"
            message = f"{self.host!r:.200} is not an address to listen on: {error}; {step}"
            raise ConfigError(message, source="--host") from error
        return [str(each[4][0]).partition("%")[0] for each in found]

    def listen(self) -> socket.socket:
        """A listening socket. ConfigError if the address is in use, or not this machine's."""
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
        """The URL for clients, with the port that the socket has."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.certfile else 'http'}://{host}:{port}"


def access_for(address: Address, reading_token: str | None, writing_token: str | None) -> Access:
    """The access rules of a server at this address. ConfigError if other machines can reach it without a token."""
    if address.is_loopback:
        is_open = reading_token is None
        # A token also protects against pages of other sites, so with one a proxy may use any name.
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


def serve(settings: ServiceSettings, address: Address, announce: Callable[[str], None]) -> int:
    """Serve a cache until Ctrl-C or SIGTERM. Returns the signal's number; raises what `make_server` raises.

    `announce` is called with the URL as soon as clients can connect.
    """
    server, listener = make_server(settings, address)
    # uvicorn finishes the current requests, then raises the signals again, which would end the process.
    caught: list[int] = []

    def stop(number: int, frame: object) -> None:
        caught.append(number)
        server.should_exit = True  # for a signal that comes before uvicorn has set its handlers

    with handlers_kept(*STOPPING), listener:
        for number in STOPPING:
            signal.signal(number, stop)
        announce(address.url(listener.getsockname()[1]))
        asyncio.run(server.serve(sockets=[listener]))
    return caught[-1] if caught else signal.SIGTERM


def make_server(settings: ServiceSettings, address: Address) -> tuple[uvicorn.Server, socket.socket]:
    """A server of a cache, and its listening socket.

    ConfigError if the address or the certificate cannot be used; raises what `create_app` raises.
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
        ws="none",
        lifespan="on",
        log_config=None,
        log_level=logging.WARNING,
        access_log=False,
        # Makes the page's cookie Secure behind a TLS proxy, which is on this machine or in FORWARDED_ALLOW_IPS.
        proxy_headers=True,
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=_IDLE_S,
        timeout_graceful_shutdown=_GRACE_S,
        ssl_certfile=address.certfile,
        ssl_keyfile=address.keyfile,
    )
    return uvicorn.Server(config), listener
