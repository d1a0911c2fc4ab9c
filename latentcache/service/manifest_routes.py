"""Routes about manifests: their files, pages of their samples, and the notes of runs that are not finished."""

from __future__ import annotations

import json
import os
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.responses import Response
from pydantic import BaseModel

from latentcache.dataset.manifest_folder import NAME_PATTERN
from latentcache.errors import DatasetError, RequestRefused
from latentcache.service.context import ServiceContext
from latentcache.service.manifest_files import ManifestFacts, ManifestFiles
from latentcache.service.problems import problems
from latentcache.service.responses import OCTETS, file_answer
from latentcache.service.uploads import body_chunks, length_of

MAX_PAGE_SAMPLES = 1000
Name = Annotated[str, Path(pattern=NAME_PATTERN, description="The manifest's name.", examples=["photos"])]
Owner = Annotated[str, Query(pattern="^([0-9a-f]{32})?$", description="Whose run it is: each ends its own note.")]


class ManifestLine(BaseModel):
    """One manifest. One that is damaged has an `error`, and nothing else but its name."""

    name: str
    role: str | None = None
    num_samples: int | None = None
    etag: str | None = None
    error: str | None = None


class ManifestList(BaseModel):
    """All manifests. `unfinished`: when runs began that did not finish, by manifest."""

    manifests: list[ManifestLine]
    unfinished: dict[str, str]


class SamplePage(BaseModel):
    """Some samples, of `total`. Each is an object, as `latentcache show MANIFEST` prints it."""

    total: int
    offset: int
    samples: list[dict[str, Any]]


def manifest_router(context: ServiceContext) -> APIRouter:
    """The routes below `/v1/manifests`: those that read, and those that change them."""
    router = APIRouter(prefix="/v1", tags=["manifests"])
    files = ManifestFiles(context.manifests)
    _add_reading(router, context, files)
    _add_changing(router, context, files)
    return router


def _add_reading(router: APIRouter, context: ServiceContext, files: ManifestFiles) -> None:
    @router.get("/manifests", responses=problems(409))
    async def manifests() -> ManifestList:
        """The manifests that there are."""
        return await context.call(_listed, files)

    @router.get(
        "/manifests/{name}",
        response_class=Response,
        responses={200: {"description": "Its file.", "content": {OCTETS: {}}}, **problems(304, 409, 416)},
    )
    async def manifest(name: Name, request: Request) -> Response:
        """The file of a manifest: safetensors, with the columns of its samples."""
        fd, facts = await context.call(files.open, name, discard=lambda opened: os.close(opened[0]))
        return file_answer(context, name, fd, {"ETag": facts.etag, "Cache-Control": "no-cache"}, request.headers)

    @router.get("/manifests/{name}/samples", responses=problems(409))
    async def samples(
        name: Name,
        offset: Annotated[int, Query(ge=0, le=1 << 40)] = 0,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE_SAMPLES)] = 100,
        search: Annotated[str, Query(max_length=200, description="Part of a sample_id or a caption.")] = "",
    ) -> Response:
        """The samples of a manifest, a page at a time."""
        total, rows = await context.view(context.views.page, name, offset, limit, search)
        # Not by pydantic: a caption may hold lone surrogates, which JSON can say and it refuses.
        document = json.dumps({"total": total, "offset": offset, "samples": [row.to_json() for row in rows]})
        return Response(document, media_type="application/json")


def _add_changing(router: APIRouter, context: ServiceContext, files: ManifestFiles) -> None:
    writes = [Depends(context.may_write)]

    @router.put(
        "/manifests/{name}",
        dependencies=writes,
        openapi_extra={"requestBody": {"required": True, "content": {OCTETS: {}}}},
        responses={201: {"model": ManifestLine, "description": "It is new."}, **problems(412, 507)},
    )
    async def put(name: Name, request: Request, response: Response) -> ManifestLine:
        """Put a manifest in the place of the one of this name. If-Match and `If-None-Match: *` guard against others."""
        conditions, before = request.headers, []

        def allow(etag: str | None) -> None:
            before.append(etag)
            _check_conditions(conditions.get("if-match"), conditions.get("if-none-match"), etag)

        facts = await context.change(files.take, name, body_chunks(request), length_of(request), allow)
        response.status_code = 201 if before == [None] else 200
        response.headers["ETag"] = facts.etag
        return _line(facts)

    @router.put("/manifests/{name}/unfinished", dependencies=writes, status_code=204, responses=problems(507))
    async def begin(name: Name, owner: Owner = "") -> None:
        """Note that a run began to work on the manifest: `latentcache prune` waits until it has finished."""
        await context.change(files.begin, name, owner)

    @router.delete("/manifests/{name}/unfinished", dependencies=writes, status_code=204, responses=problems(507))
    async def end(name: Name, owner: Owner = "") -> None:
        """End the note of a run. A manifest that is put ends the one without an owner by itself."""
        await context.change(files.end, name, owner)


def _listed(files: ManifestFiles) -> ManifestList:
    lines = []
    for name in files.names():
        try:
            lines.append(_line(files.facts(name)))
        except DatasetError as error:
            lines.append(ManifestLine(name=name, error=str(error)))
        except RequestRefused:
            continue  # it is gone since it was listed
    return ManifestList(manifests=lines, unfinished=files.folder.unfinished())


def _line(facts: ManifestFacts) -> ManifestLine:
    return ManifestLine(**facts.to_json())


def _check_conditions(if_match: str | None, if_none_match: str | None, etag: str | None) -> None:
    """RequestRefused (412) if the manifest that is there is not the one that the client means."""
    expected = [tag.strip() for tag in (if_match or "").split(",")]
    differs = if_match is not None and (etag is None or (etag not in expected and "*" not in expected))
    excluded = [tag.strip() for tag in (if_none_match or "").split(",")]
    is_there = if_none_match is not None and etag is not None and (etag in excluded or "*" in excluded)
    if differs or is_there:
        step = "Read it again before you replace it"
        raise RequestRefused(
            "the manifest has changed meanwhile",
            status=412,
            met=etag,
            allowed=if_match or if_none_match,
            next_step=step,
        )
