"""A relay in front of a server: it counts requests and connections, and can damage what goes through."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_DROPPED = {"connection", "transfer-encoding", "content-length", "date", "server"}


class Relay:
    """What went through: `requests` (method, path) in their order, and `num_connections`.

    `change` is given each answer (path, status, bytes) and returns the bytes to send, or None to end the connection.
    `answer` is given each request (method, path) before it is passed on: a status that it returns is the answer.
    """

    def __init__(self, target: tuple[str, int]):
        self.target = target
        self.requests: list[tuple[str, str]] = []
        self.num_connections = 0
        self.change: Callable[[str, int, bytes], bytes | None] | None = None
        self.answer: Callable[[str, str], int | None] | None = None
        self.url = ""

    def routes(self) -> list[str]:
        """The paths without the part that all have, and without queries."""
        return [path.partition("?")[0].removeprefix("/v1/") for _, path in self.requests]


@contextmanager
def relaying(target: tuple[str, int]) -> Iterator[Relay]:
    """A relay to the server at this address, for the block."""
    relay = Relay(target)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            relay.num_connections += 1

        def handle_one_request(self) -> None:
            try:
                super().handle_one_request()
            except ConnectionError:
                self.close_connection = True

        def pass_on(self) -> None:
            relay.requests.append((self.command, self.path))
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if relay.answer is not None and (status := relay.answer(self.command, self.path)) is not None:
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            connection = http.client.HTTPConnection(*relay.target, timeout=30)
            try:
                # With its Host: signatures of requests to object stores are made over it.
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
            length = len(data) if self.command != "HEAD" else answer.headers.get("Content-Length", 0)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(changed)
            self.close_connection |= len(changed) != len(data)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = pass_on

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    relay.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield relay
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
