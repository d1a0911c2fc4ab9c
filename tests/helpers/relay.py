"""A relay in front of a server that records requests and can alter responses."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_DROPPED = {"connection", "transfer-encoding", "content-length", "date", "server"}


class Relay(ThreadingHTTPServer):
    """A relay to `target`. `requests` records (method, path) in order.

    `change(path, status, bytes)` returns the bytes to send, or None to drop the connection. `answer(method, path)` may
    return a status to answer the request with, instead of passing it on.
    """

    daemon_threads = True

    def __init__(self, target: tuple[str, int]):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target, self.url = target, f"http://127.0.0.1:{self.server_port}"
        self.requests: list[tuple[str, str]] = []
        self.change: Callable[[str, int, bytes], bytes | None] | None = None
        self.answer: Callable[[str, str], int | None] | None = None

    def routes(self) -> list[str]:
        """The requested paths without `/v1/` and query."""
        return [path.partition("?")[0].removeprefix("/v1/") for _, path in self.requests]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Relay

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except ConnectionError:
            self.close_connection = True

    def pass_on(self) -> None:
        relay = self.server
        relay.requests.append((self.command, self.path))
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if relay.answer is not None and (status := relay.answer(self.command, self.path)) is not None:
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        connection = http.client.HTTPConnection(*relay.target, timeout=30)
        try:
            # Keep the Host header: signatures of requests to object stores include it.
            connection.request(self.command, self.path, body, dict(self.headers.items()))
            answer = connection.getresponse()
            status, data, sent = answer.status, answer.read(), answer.getheaders()
        except OSError:
            self.close_connection = True
            return
        finally:
            connection.close()
        changed = data if relay.change is None else relay.change(self.path, status, data)
        if changed is None:
            self.close_connection = True
            return
        self.send_response(status)
        for name, value in sent:
            if name.lower() not in _DROPPED:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(changed)
        self.close_connection |= len(changed) != len(data)

    do_GET = do_PUT = do_POST = do_DELETE = pass_on

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


@contextmanager
def relaying(target: tuple[str, int]) -> Iterator[Relay]:
    """Run a relay to the server at this address during the block."""
    with Relay(target) as relay:
        thread = threading.Thread(target=relay.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield relay
        finally:
            relay.shutdown()
            thread.join(10)
