"""An object store over HTTP with conditional writes: by ETag like S3, or by generation like Google Cloud Storage."""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from email.utils import formatdate
from xml.sax.saxutils import escape

import pytest
import uvicorn
from helpers.serving import LOOPBACK, in_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_numbers = itertools.count()


class ComparingServer:
    """`objects`: path -> bytes and generation, which is the time of writing in ns since 1970."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.address = address
        self.objects: dict[str, tuple[bytes, int]] = {}
        self._generation = 0

    def environment(self, scheme: str) -> dict[str, str]:
        """The environment that makes obstore use this server for s3:// or gs:// URLs."""
        url = f"http://127.0.0.1:{self.address[1]}"
        if scheme == "s3":
            keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}
            return {**keys, "AWS_ENDPOINT_URL": url, "AWS_ALLOW_HTTP": "true"}
        account = {"gcs_base_url": url, "disable_oauth": True, "client_email": "", "private_key": ""}
        key = json.dumps({**account, "private_key_id": ""})
        return {"GOOGLE_SERVICE_ACCOUNT_KEY": key, "GOOGLE_ALLOW_HTTP": "true"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        path, body = scope["path"], await request.body()
        answers = {"PUT": self._put, "DELETE": self._delete}
        if "list-type" in request.query_params:
            answer = self._listed(f"{path.rstrip('/')}/", request.query_params.get("prefix", ""))
        else:
            answer = answers.get(request.method, self._get)(path, request, body)
        await answer(scope, receive, send)

    def _put(self, path: str, request: Request, body: bytes) -> Response:
        there, tag = self.objects.get(path), request.headers.get("if-match")
        generation = request.headers.get("x-goog-if-generation-match")
        is_other = generation is not None and int(generation) != (there[1] if there else 0)
        is_other |= request.headers.get("if-none-match") == "*" and there is not None
        if tag is not None and there is None:
            return Response(status_code=404)
        if is_other or (tag is not None and there is not None and tag != _tag(there[0])):
            return Response(status_code=412)
        self._generation = max(self._generation + 1, time.time_ns())
        self.objects[path] = body, self._generation
        return Response(headers=self._facts(path))

    def _delete(self, path: str, request: Request, body: bytes) -> Response:
        self.objects.pop(path, None)
        return Response(status_code=204)

    def _get(self, path: str, request: Request, body: bytes) -> Response:
        if path not in self.objects:
            return Response(status_code=404)
        data, headers, asked = self.objects[path][0], self._facts(path), request.headers.get("range")
        if asked is None:
            return Response(data, headers=headers)
        first, last = (int(each) for each in asked.removeprefix("bytes=").split("-"))
        last = min(last, len(data) - 1)
        headers["content-range"] = f"bytes {first}-{last}/{len(data)}"
        return Response(data[first : last + 1], 206, headers)

    def _facts(self, path: str) -> dict[str, str]:
        data, generation = self.objects[path]
        written = formatdate(generation / 1e9, usegmt=True)
        return {"etag": _tag(data), "x-goog-generation": str(generation), "last-modified": written}

    def _listed(self, folder: str, prefix: str) -> Response:
        found = ""
        for path, (data, generation) in sorted(self.objects.items()):
            if path.startswith(folder + prefix):
                at = datetime.fromtimestamp(generation / 1e9, timezone.utc).isoformat(timespec="milliseconds")
                found += f"<Contents><Key>{escape(path.removeprefix(folder))}</Key><LastModified>{at}</LastModified>"
                found += f"<ETag>{escape(_tag(data))}</ETag><Size>{len(data)}</Size></Contents>"
        text = f"<ListBucketResult><IsTruncated>false</IsTruncated>{found}</ListBucketResult>"
        return Response(f'<?xml version="1.0" encoding="UTF-8"?>{text}', media_type="application/xml")


def _tag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


@pytest.fixture
def object_server() -> Iterator[ComparingServer]:
    """An object store over HTTP with conditional writes."""
    with LOOPBACK.listen() as listener:
        store = ComparingServer(listener.getsockname())
        with in_thread(uvicorn.Server(uvicorn.Config(store, lifespan="off", log_config=None)), listener):
            yield store


@pytest.fixture
def s3_url(object_server: ComparingServer, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty prefix on it, with the environment set up."""
    for name, value in object_server.environment("s3").items():
        monkeypatch.setenv(name, value)
    return f"s3://team/{next(_numbers)}/cache"
