"""A real server process on a cache directory, and requests to it."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from latentcache.config import Config
from latentcache.service.server import Address, access_for, make_server
from latentcache.service.state import Limits, ServiceSettings

START_S = 60.0
TOKEN = "the-reading-token-of-tests"
DEFAULT_LIMITS = Limits()


@dataclass
class Answer:
    """What a server answered. `headers` go by lower-case names."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(repr=False)
class RunningServer:
    """`latentcache serve` as a process. `token` may read, `write_token` may write too; None where there is none."""

    process: subprocess.Popen[str]
    url: str
    token: str | None
    write_token: str | None
    log: list[str] = field(default_factory=list)

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
        """One request on a connection of its own, by default with the reading token. What is no bytes is JSON."""
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

    def get(self, path: str, **more: Any) -> Answer:
        return self.request("GET", path, **more)

    def post(self, path: str, body: Any, **more: Any) -> Answer:
        return self.request("POST", path, body, **more)

    def put(self, path: str, body: Any, **more: Any) -> Answer:
        return self.request("PUT", path, body, **{"token": self.write_token, **more})

    def stop(self, number: int = signal.SIGTERM, timeout: float = 90.0) -> int:
        """Send a signal, and return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout)


@contextmanager
def serving(
    cache: Path,
    *arguments: object,
    tokens: bool = True,
    writes: bool = True,
    port: int = 0,
    environment: Mapping[str, str] | None = None,
) -> Iterator[RunningServer]:
    """Serve a cache directory by a process of its own for the block. `arguments` go to `latentcache serve`.

    `tokens`: reading needs one. `writes`: there is a writing token. The process is stopped in any case; its log is
    printed, so that pytest shows it where a test fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "latentcache", "serve", str(cache), "--port", str(port), "--json"]
        token = secrets.token_urlsafe(24) if tokens else None
        write_token = secrets.token_urlsafe(24) if writes else None
        for flag, text in (("--token-file", token), ("--write-token-file", write_token)):
            if text is not None:
                file = Path(folder) / flag.strip("-")
                file.write_text(text + "\n", encoding="ascii")
                command += [flag, str(file)]
        process = subprocess.Popen(
            [*command, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        log: list[str] = []
        reader = threading.Thread(target=lambda: log.extend(process.stderr or ()), daemon=True)
        reader.start()
        killer = threading.Timer(START_S, process.kill)
        killer.start()
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            killer.cancel()
            if not line:
                process.wait()
                reader.join(5)
                raise AssertionError(f"the server ended with {process.returncode}:\n{''.join(log)}")
            yield RunningServer(process, json.loads(line)["url"], token, write_token, log)
        finally:
            killer.cancel()
            if process.poll() is None:
                process.kill()
            process.wait()
            reader.join(5)
            assert process.stdout is not None and process.stderr is not None
            process.stdout.close()
            process.stderr.close()
            print("".join(log), file=sys.stderr)


@contextmanager
def serving_here(
    cache: Path,
    limits: Limits = DEFAULT_LIMITS,
    *,
    writes: bool = True,
    token: str | None = None,
    encode: Config | None = None,
    certfile: Path | None = None,
    keyfile: Path | None = None,
) -> Iterator[RunningServer]:
    """The same by a thread of this process, with limits of a test's own. Reading needs the `token`, if any.

    `encode` is the config that `--encode` names; then photos are shown too. With `certfile` and `keyfile` by TLS.
    """
    write_token = secrets.token_urlsafe(24) if writes else None
    address = Address(port=0, certfile=certfile, keyfile=keyfile)
    settings = ServiceSettings(
        cache=cache,
        access=access_for(address, token, write_token),
        limits=limits,
        writes=writes or encode is not None,
        encode=encode,
        config=encode,
        show_photos=encode is not None,
    )
    with running_here(settings, address) as url:
        yield RunningServer(None, url, token, write_token)  # type: ignore[arg-type]


@contextmanager
def running_here(settings: ServiceSettings, address: Address) -> Iterator[str]:
    """Serve in a thread of this process for the block. Yields the URL."""
    server, listener = make_server(settings, address)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    with listener:
        thread.start()
        try:
            yield address.url(listener.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join(60)
            assert not thread.is_alive()
