"""The process of `latentcache serve`: its address, and who may do what there."""

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
"""A connection may be open so long without a request."""
_BACKLOG = 2048
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
            step = "give one of this machine's, e.g. 127.0.0.1"
            message = f"{self.host!r:.200} is no address to listen on: {error}; {step}"
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


def serve(settings: ServiceSettings, address: Address, announce: Callable[[str], None]) -> int:
    """Serve a cache until Ctrl-C or SIGTERM. Returns the signal's number. As `make_server`.

    `announce` is called with the URL once it listens: whoever connects from then on is answered.
    """
    server, listener = make_server(settings, address)
    # uvicorn finishes the requests under way first; then it raises the signals again, which would end the process.
    caught: list[int] = []

    def stop(number: int, frame: object) -> None:
        caught.append(number)
        server.should_exit = True  # also of a signal that comes before uvicorn has its own handlers

    with handlers_kept(*STOPPING), listener:
        for number in STOPPING:
            signal.signal(number, stop)
        announce(address.url(listener.getsockname()[1]))
        asyncio.run(server.serve(sockets=[listener]))
    return caught[-1] if caught else signal.SIGTERM


def make_server(settings: ServiceSettings, address: Address) -> tuple[uvicorn.Server, socket.socket]:
    """A server of a cache, and the socket on which it listens.

    ConfigError if the address or the certificate cannot be used; errors of `create_app`.
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
        # X-Forwarded-Proto, of a proxy on this machine or in FORWARDED_ALLOW_IPS: the page's cookie is Secure then.
        proxy_headers=True,
        server_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=_IDLE_S,
        timeout_graceful_shutdown=_GRACE_S,
        ssl_certfile=address.certfile,
        ssl_keyfile=address.keyfile,
    )
    return uvicorn.Server(config), listener
