"""Errors as problem documents (RFC 9457): what an exception says, its fields, and the status of the answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from latentcache.errors import (
    ConfigError,
    DatasetError,
    DeviceError,
    EncodeError,
    EncoderBusyError,
    EntryDamagedError,
    EntryMissingError,
    ImageRefused,
    IndexDamagedError,
    LatentCacheError,
    PackError,
    ReadOnlyError,
    RequestRefused,
    SampleError,
    StorageFullError,
    StoreBusyError,
    StoreError,
)

MEDIA_TYPE = "application/problem+json"
SENT_FIELDS = ("key", "path", "sample_id", "reason", "met", "allowed", "next_step", "part", "problem", "offenders")
"""Attributes of errors that a document carries, where an error has them."""
STATUSES: dict[type[LatentCacheError], int] = {
    EntryMissingError: 404,
    SampleError: 404,
    EntryDamagedError: 409,
    DatasetError: 409,
    ReadOnlyError: 403,
    PackError: 422,
    ConfigError: 422,
    ImageRefused: 422,
    EncodeError: 422,
    EncoderBusyError: 503,
    DeviceError: 503,
    StorageFullError: 507,
    StoreBusyError: 503,
    IndexDamagedError: 503,
    StoreError: 503,
    LatentCacheError: 500,
}
"""Of an answer, by error: that of the nearest class. A plain StoreError says that something cannot be read now."""
RETRY_AFTER_S = 2
_NUM_FAULTS = 5


class ProblemResponse(Response):
    """A problem document."""

    media_type = MEDIA_TYPE

    def __init__(self, document: Mapping[str, Any], headers: Mapping[str, str] | None = None):
        content = json.dumps(document, default=str).encode("ascii")
        super().__init__(content, int(document["status"]), headers=headers)


def problem_of(error: LatentCacheError) -> ProblemResponse:
    """The answer that an error gives. `type` and `kind` name its class."""
    kind = type(error)
    status = getattr(error, "status", None)
    if not isinstance(status, int):
        status = next(STATUSES[each] for each in kind.__mro__ if each in STATUSES)
    fields = {name: getattr(error, name, None) for name in SENT_FIELDS}
    document = {
        "type": f"urn:latentcache:{kind.__name__}",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": str(error),
        "kind": kind.__name__,
        **{name: value for name, value in fields.items() if value not in (None, "")},
    }
    headers = {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if status in (429, 503):
        headers["Retry-After"] = str(getattr(error, "retry_after_s", None) or RETRY_AFTER_S)
    if status == 416:
        headers["Content-Range"] = f"bytes */{getattr(error, 'allowed', 0)}"
    return ProblemResponse(document, headers)


def add_handlers(app: FastAPI) -> None:
    """Let the app answer each error with a problem document."""

    async def known(request: Request, error: Exception) -> Response:
        assert isinstance(error, LatentCacheError)
        return problem_of(error)

    async def malformed(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        faults = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:_NUM_FAULTS]]
        step = "The OpenAPI document at /v1/openapi.json says what a request has"
        return problem_of(RequestRefused("; ".join(faults), status=422, next_step=step))

    async def other(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        step = "The OpenAPI document at /v1/openapi.json lists what there is"
        detail = f"{request.method} {request.url.path}: {error.detail}"
        answer = problem_of(RequestRefused(detail, status=error.status_code, next_step=step))
        answer.headers.update(error.headers or {})
        return answer

    async def fault(request: Request, error: Exception) -> Response:
        # Starlette raises it again after the answer, so that it is logged with its traceback.
        step = "It is a fault of latentcache: please report what the server's log says"
        return problem_of(RequestRefused(f"{type(error).__name__} in the server", status=500, next_step=step))

    app.add_exception_handler(LatentCacheError, known)
    app.add_exception_handler(RequestValidationError, malformed)
    app.add_exception_handler(HTTPException, other)
    app.add_exception_handler(Exception, fault)


_PROBLEM_SCHEMA = {
    "type": "object",
    "required": ["type", "title", "status", "detail", "kind"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "kind": {"type": "string", "description": "The class of latentcache.errors."},
        "key": {"type": "string"},
        "path": {"type": "string"},
        "met": {},
        "allowed": {},
        "next_step": {"type": "string"},
    },
}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """What a route's OpenAPI says of these answers, and of those that every route may give."""
    whats = {
        304: "The client has it already.",
        400: "The request cannot be read.",
        401: "The token is missing or wrong.",
        403: "The token may not do this, or the cache cannot be written.",
        404: "There is no such thing.",
        408: "The client sent nothing for too long.",
        409: "It is damaged.",
        412: "It has changed meanwhile.",
        413: "The request, or its answer, is too large.",
        416: "The file has no such range.",
        421: "The Host header names another server.",
        422: "The request is not what the schema says, or what it carries is wrong.",
        429: "Too many requests of this client at once: retry after Retry-After seconds.",
        503: "Too much at once, or not possible now: retry after Retry-After seconds.",
        507: "No space is left.",
    }
    content = {MEDIA_TYPE: {"schema": _PROBLEM_SCHEMA}}
    return {
        status: {"description": whats[status], **({} if status == 304 else {"content": content})}
        for status in sorted({400, 401, 403, 404, 408, 413, 421, 422, 429, 503, *statuses})
    }
