"""Runs a real server on a cache directory, in a process or thread, and sends requests to it."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvicorn

from latentcache.config import TOKEN_VARIABLE
from latentcache.remote.service import ServiceTransport
from latentcache.remote.store import RemoteStore
from latentcache.service.server import Address, access_for, make_server
from latentcache.service.state import ServiceSettings
from latentcache.store.batch import own_tensors
from latentcache.store.pack import WholePack
from latentcache.types import Entry

TOKEN = "the-reading-token-of-tests"
LOOPBACK = Address(port=0)


@dataclass
class Answer:
    """A response. The names of `headers` are lower-case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def problem(self, status: int, kind: str = "RequestRefused") -> Any:
        """Assert that this is a problem document, and return it."""
        assert (self.status, self.headers["content-type"]) == (status, "application/problem+json"), self.body
        document = self.json()
        assert (document["status"], document["kind"], document["type"]) == (status, kind, f"urn:latentcache:{kind}")
        assert document["title"] and document["detail"]
        return document

    def entries(self) -> dict[str, Entry]:
        """The entries of the pack in the body, by key, each checked against its digest and key."""
        assert self.status == 200, self.body
        whole, found = WholePack.in_memory("answer", self.body), {}
        for at, key in enumerate(whole.row.names()):
            location = whole.row.location(at)
            assert (problem := whole.problem(key, location)) is None, problem
            owned = whole.entry(key, location)
            assert not isinstance(owned, str)
            found[key] = own_tensors(whole.record(at), owned.values, owned.ragged)
        return found


@dataclass(repr=False)
class RunningServer:
    """A server. `token` grants reading, `write_token` also writing. Tokens and `process` may be None."""

    cache: Path
    url: str
    token: str | None
    write_token: str | None
    process: subprocess.Popen[str] | None = None

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.url)
        assert parts.hostname is not None and parts.port is not None
        return parts.hostname, parts.port

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        token: str | None = "",
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Send one request on its own connection, by default with the read token. A body that is not bytes is JSON."""
        token = self.token if token == "" else token
        sent = {} if token is None else {"Authorization": f"Bearer {token}"}
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
            sent["Content-Type"] = "application/json"
        connection = http.client.HTTPConnection(*self.address, timeout=90)
        try:
            connection.request(method, path, body, {**sent, **(headers or {})})
            answer = connection.getresponse()
            return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def begin(self, route: str, rest: bytes) -> socket.socket:
        """Start a request with the write token and an incomplete body. Returns the connection."""
        client = socket.create_connection(self.address, timeout=20)
        head = f"{route} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {self.write_token}\r\n"
        client.sendall(head.encode() + b"Content-Type: application/json\r\n" + rest)
        return client

    def get(self, path: str, **more: Any) -> Answer:
        return self.request("GET", path, **more)

    def post(self, path: str, body: Any, **more: Any) -> Answer:
        return self.request("POST", path, body, **more)

    def put(self, path: str, body: Any, **more: Any) -> Answer:
        return self.request("PUT", path, body, **{"token": self.write_token, **more})


@contextmanager
def serving(cache: Path, *arguments: object, writes: bool = True) -> Iterator[RunningServer]:
    """Run `latentcache serve CACHE ARGUMENTS` during the block, with a read token, and if `writes` a write token."""
    command = [sys.executable, "-m", "latentcache", "serve", str(cache), "--port", "0", "--json", *map(str, arguments)]
    token, write_token = secrets.token_urlsafe(24), secrets.token_urlsafe(24) if writes else ""
    environment = {**os.environ, TOKEN_VARIABLE: token, "LATENTCACHE_WRITE_TOKEN": write_token}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, "the server ended: see what it printed"
            yield RunningServer(cache, json.loads(line)["url"], token, write_token or None, process)
        finally:
            process.kill()


@contextmanager
def serving_here(
    cache: Path, *, token: str | None = None, writes: bool = True, address: Address = LOOPBACK, **settings: Any
) -> Iterator[RunningServer]:
    """The same in a thread of this process, with fields of `ServiceSettings`. Reading needs the `token`, if given."""
    write_token = secrets.token_urlsafe(24) if writes else None
    settings = {"access": access_for(address, token, write_token), "writes": writes or "encode" in settings, **settings}
    server, listener = make_server(ServiceSettings(cache=cache, **settings), address)
    with listener, in_thread(server, listener):
        yield RunningServer(cache, address.url(listener.getsockname()[1]), token, write_token)


@contextmanager
def in_thread(server: uvicorn.Server, listener: socket.socket) -> Iterator[None]:
    """Run a server in a thread during the block."""
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


def served_store(url: str, *, token: str | None = None, retry_s: float = 30.0, **options: Any) -> RemoteStore:
    """The store of a service. `options` go to `RemoteStore`."""
    return RemoteStore(ServiceTransport(url, token=token, retry_s=retry_s), **options)


def wait_until(is_so: Callable[[], object], timeout_s: float = 20) -> None:
    """Wait until a condition holds. Raises AssertionError after `timeout_s`."""
    until = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.02)
