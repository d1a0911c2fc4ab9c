"""The body of a request as an iterator of a thread: an upload is written by one function, which may block."""

from __future__ import annotations

from collections.abc import Iterator

import anyio
from fastapi import Request
from starlette.requests import ClientDisconnect

from latentcache.errors import RequestRefused


def body_chunks(request: Request) -> Iterator[bytes]:
    """The parts of the body, for a thread of `ServiceContext.change`. RequestRefused if the client goes away."""
    stream = request.stream()
    while True:
        try:
            chunk = anyio.from_thread.run(anext, stream, None)
        except ClientDisconnect:
            raise RequestRefused("the client went away before the body was whole", status=400) from None
        if chunk is None:
            return
        yield chunk


def length_of(request: Request) -> int:
    """The Content-Length of a request, 0 where it has none."""
    text = request.headers.get("content-length", "0")
    return int(text) if text.isdecimal() else 0
