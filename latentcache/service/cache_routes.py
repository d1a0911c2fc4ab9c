"""Routes about the cache as a whole, and about the server."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import BaseModel

import latentcache
from latentcache.loading.status import status_of
from latentcache.service.context import ServiceContext
from latentcache.service.problems import problems


class ServerHealth(BaseModel):
    """The server answers. `version` is that of latentcache."""

    status: str
    version: str


def cache_router(context: ServiceContext) -> APIRouter:
    """The routes `healthz`, `status` and `metrics`."""
    router = APIRouter(prefix="/v1", tags=["cache"])

    @router.get("/healthz", responses=problems(), openapi_extra={"security": []})
    async def healthz() -> ServerHealth:
        """Whether the server answers. It needs no token."""
        return ServerHealth(status="ok", version=latentcache.__version__)

    @router.get("/status", responses=problems(409))
    async def status() -> dict[str, Any]:
        """What `latentcache status --json` prints: entries, bytes, manifests and damage."""
        return (await context.view(status_of, context.store, context.manifests, context.store.path)).to_json()

    @router.get(
        "/metrics",
        response_class=Response,
        responses={200: {"description": "For Prometheus.", "content": {"text/plain": {}}}, **problems()},
    )
    async def metrics() -> Response:
        """What the server counts."""
        return context.telemetry.answer()

    return router
