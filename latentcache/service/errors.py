"""Errors as problem documents (RFC 9457): status, message and fields of an exception."""

from __future__ import annotations

import json
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from latentcache import errors
from latentcache.errors import LatentCacheError, RequestRefused

MEDIA_TYPE = "application/problem+json"
SENT_FIELDS = ("key", "path", "sample_id", "reason", "met", "allowed", "next_step", "part", "problem", "needed_bytes")
"""Attributes of errors that a document carries if they are set."""
STATUSES: dict[type[LatentCacheError], int] = {
    errors.EntryMissingError: 404,
    errors.SampleError: 404,
    errors.EntryDamagedError: 409,
    errors.DatasetError: 409,
    errors.ReadOnlyError: 403,
    errors.PackError: 422,
    errors.ConfigError: 422,
    errors.ImageRefused: 422,
    errors.EncodeError: 422,
    errors.EncoderBusyError: 503,
    errors.DeviceError: 503,
    errors.StorageFullError: 507,
    errors.StoreError: 503,
    LatentCacheError: 500,
}
"""HTTP status by class of error; the first class in the error's MRO that is listed here counts."""
RETRY_AFTER_S = 2
_NUM_FAULTS = 5

_SCHEMA = {
    "type": "object",
    "required": ["type", "title", "status", "detail", "kind"],
    "properties": {
        **{name: {"type": "string"} for name in ("type", "title", "detail", "key", "path", "next_step")},
        "status": {"type": "integer"},
        "kind": {"type": "string", "description": "The class of latentcache.errors."},
        "met": {},
        "allowed": {},
    },
}
RESPONSES: dict[int | str, dict[str, Any]] = {
    "default": {"description": "A problem document.", "content": {MEDIA_TYPE: {"schema": _SCHEMA}}}
}
"""The errors of every route, for the OpenAPI document."""


def problem_of(error: LatentCacheError) -> Response:
    """The response for an error; `type` and `kind` name its class."""
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
    if status == 503:
        headers["Retry-After"] = str(getattr(error, "retry_after_s", None) or RETRY_AFTER_S)
    return Response(json.dumps(document, default=str).encode("ascii"), status, headers, MEDIA_TYPE)


def add_handlers(app: FastAPI, wrong_address: Callable[[Request], Response]) -> None:
    """Make the app answer errors with problem documents, and unknown addresses of pages by `wrong_address`."""

    async def known(request: Request, error: Exception) -> Response:
        assert isinstance(error, LatentCacheError)
        return problem_of(error)

    async def malformed(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        faults = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()[:_NUM_FAULTS]]
        step = "See /v1/openapi.json for what the request needs"
        return problem_of(RequestRefused("; ".join(faults), status=422, next_step=step))

    async def other(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if isinstance(error.__cause__, LatentCacheError):  # raised while FastAPI read the body
            return problem_of(error.__cause__)
        if error.status_code == HTTPStatus.NOT_FOUND and not request.url.path.startswith("/v1/"):
            return wrong_address(request)
        step = "See /v1/openapi.json for the routes and methods"
        detail = f"{request.method} {request.url.path}: {error.detail}"
        answer = problem_of(RequestRefused(detail, status=error.status_code, next_step=step))
        answer.headers.update(error.headers or {})
        return answer

    async def fault(request: Request, error: Exception) -> Response:
        # Starlette raises it again after the response, so that it is logged with its traceback.
        step = "This is a bug in latentcache: please report it with the traceback in the server's log"
        return problem_of(RequestRefused(f"{type(error).__name__} in the server", status=500, next_step=step))

    app.add_exception_handler(LatentCacheError, known)
    app.add_exception_handler(RequestValidationError, malformed)
    app.add_exception_handler(HTTPException, other)
    app.add_exception_handler(Exception, fault)
