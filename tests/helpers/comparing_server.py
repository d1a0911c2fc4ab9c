"""An object store over HTTP that compares before it replaces: by ETags as S3 does, by generations as Google's does."""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest
from helpers.relay import running

_numbers = itertools.count()


class ComparingServer(ThreadingHTTPServer):
    """`objects`: bytes and generation, by path. A generation is the time at which it was written, in ns since 1970."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[str, tuple[bytes, int]] = {}
        self.generation = 0
        self.lock = threading.Lock()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that waited for too long is gone: nothing is printed. What a test expects it asks for."""

    def environment(self, scheme: str) -> dict[str, str]:
        """What leads obstore to this server for URLs s3:// or gs://."""
        url = f"http://127.0.0.1:{self.server_port}"
        if scheme == "s3":
            keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}
            return {**keys, "AWS_ENDPOINT_URL": url, "AWS_ALLOW_HTTP": "true"}
        account = {"gcs_base_url": url, "disable_oauth": True, "client_email": "", "private_key": ""}
        key = json.dumps({**account, "private_key_id": ""})
        return {"GOOGLE_SERVICE_ACCOUNT_KEY": key, "GOOGLE_ALLOW_HTTP": "true"}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ComparingServer

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed."""

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _path(self) -> str:
        return unquote(urlsplit(self.path).path)

    def do_PUT(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with self.server.lock:
            there = self.server.objects.get(self._path())
            generation = self.headers.get("x-goog-if-generation-match")
            is_other = generation is not None and int(generation) != (there[1] if there else 0)
            is_other |= self.headers.get("If-None-Match") == "*" and there is not None
            tag = self.headers.get("If-Match")
            if tag is not None and there is None:
                return self._answer(404)
            if is_other or (tag is not None and there is not None and tag != _tag(there[0])):
                return self._answer(412)
            self.server.generation = max(self.server.generation + 1, time.time_ns())
            self.server.objects[self._path()] = data, self.server.generation
            return self._answer(200, ETag=_tag(data), x_goog_generation=str(self.server.generation))

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        if "list-type" in query:
            return self._answer(200, self._listed(query.get("prefix", [""])[0]), Content_Type="application/xml")
        there = self.server.objects.get(self._path())
        if there is None:
            return self._answer(404)
        data, generation = there
        headers = {"ETag": _tag(data), "x_goog_generation": str(generation)}
        headers["Last_Modified"] = formatdate(generation / 1e9, usegmt=True)
        asked = self.headers.get("Range")
        if asked is None:
            return self._answer(200, data, **headers)
        first, last = (int(each) for each in asked.removeprefix("bytes=").split("-"))
        last = min(last, len(data) - 1)
        headers["Content_Range"] = f"bytes {first}-{last}/{len(data)}"
        return self._answer(206, data[first : last + 1], **headers)

    def do_DELETE(self) -> None:
        with self.server.lock:
            self.server.objects.pop(self._path(), None)
        self._answer(204)

    def _listed(self, prefix: str) -> bytes:
        folder, found = f"{self._path().rstrip('/')}/", ""
        for path, (data, generation) in sorted(self.server.objects.items()):
            if path.startswith(folder + prefix):
                at = datetime.fromtimestamp(generation / 1e9, timezone.utc).isoformat(timespec="milliseconds")
                found += f"<Contents><Key>{escape(path.removeprefix(folder))}</Key><LastModified>{at}</LastModified>"
                found += f"<ETag>{escape(_tag(data))}</ETag><Size>{len(data)}</Size></Contents>"
        text = f"<ListBucketResult><IsTruncated>false</IsTruncated>{found}</ListBucketResult>"
        return f'<?xml version="1.0" encoding="UTF-8"?>{text}'.encode()


def _tag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


@pytest.fixture
def object_server() -> Iterator[ComparingServer]:
    """An object store over HTTP that compares before it replaces."""
    with running(server := ComparingServer()):
        yield server


@pytest.fixture
def s3_url(object_server: ComparingServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty place on it, which the environment leads to."""
    for name, value in object_server.environment("s3").items():
        monkeypatch.setenv(name, value)
    return f"s3://team/{next(_numbers)}/cache"
