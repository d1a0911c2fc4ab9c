"""Answers that are bytes: of memory, or of an open file, sent in parts so that a slow reader fills no buffer."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from latentcache.errors import RequestRefused, StoreError
from latentcache.service.context import ServiceContext

OCTETS = "application/octet-stream"
PART_BYTES = 1 << 20
"""A client has to take so many bytes in `Limits.stall_s`."""
_READ_BYTES = 1 << 20
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")


class OpenFileResponse(Response):
    """Bytes `first` ... `end - 1` of an open file, which it closes. `name` is the file's, for errors."""

    media_type = OCTETS

    def __init__(
        self,
        context: ServiceContext,
        name: str,
        fd: int,
        part: tuple[int, int],
        headers: Mapping[str, str],
        status: int,
    ):
        self._first, self._end = part
        super().__init__(None, status, headers={"Content-Length": str(self._end - self._first), **headers})
        self._context, self._name, self._fd = context, name, fd

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read and send them. StoreError if the file ends early: the client sees that the answer is not whole."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            at = self._end if scope["method"] == "HEAD" else self._first
            while at < self._end:
                data = await self._context.call(os.pread, self._fd, min(_READ_BYTES, self._end - at), at)
                if not data:
                    raise StoreError(f"{self._name}: ends after {at:,} bytes, where {self._end:,} are needed")
                for start in range(0, len(data), PART_BYTES):
                    body = data[start : start + PART_BYTES]
                    at += len(body)
                    await send({"type": "http.response.body", "body": body, "more_body": at < self._end})
            if self._end == self._first or scope["method"] == "HEAD":
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            os.close(self._fd)


def is_known(etag: str, if_none_match: str | None) -> bool:
    """Whether the client says that it has this version."""
    tags = [tag.strip().removeprefix("W/") for tag in (if_none_match or "").split(",")]
    return etag in tags or "*" in tags


def file_answer(
    context: ServiceContext, name: str, fd: int, headers: Mapping[str, str], asked: Mapping[str, str]
) -> Response:
    """The answer to a request for an open file, which is closed after it, or the part of it that was requested.

    `headers` has its ETag, `asked` are those of the request: Range, If-Range and If-None-Match count.
    RequestRefused (416) for a range outside of the file; what is no single range is the whole file, as RFC 9110 says.
    """
    etag, size = headers["ETag"], os.fstat(fd).st_size
    if is_known(etag, asked.get("if-none-match")):
        os.close(fd)
        return Response(None, 304, headers={name: value for name, value in headers.items() if name != "Accept-Ranges"})
    try:
        part = byte_range(asked.get("range"), size) if asked.get("if-range", etag) == etag else None
    except RequestRefused:
        os.close(fd)
        raise
    if part is None:
        return OpenFileResponse(context, name, fd, (0, size), headers, 200)
    shown = {**headers, "Content-Range": f"bytes {part[0]}-{part[1] - 1}/{size}"}
    return OpenFileResponse(context, name, fd, part, shown, 206)


def byte_range(header: str | None, size: int) -> tuple[int, int] | None:
    """The first byte and that after the last of a Range header; None if it has no single range of bytes."""
    match = _RANGE.fullmatch((header or "").replace(" ", ""))
    if match is None or match[0] == "bytes=-":
        return None
    if not match[1]:
        first, end = max(0, size - int(match[2])), size
    else:
        first, end = int(match[1]), min(size, int(match[2]) + 1 if match[2] else size)
        if match[2] and int(match[2]) < first:
            return None
    if first >= end:
        step = "Request a range within the file"
        raise RequestRefused(
            f"the file has no bytes {header!r:.80}", status=416, met=header, allowed=size, next_step=step
        )
    return first, end
