"""Routes about packs: their files as they are, and packs that are uploaded."""

from __future__ import annotations

import os
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Request
from fastapi.responses import Response
from pydantic import BaseModel

from latentcache.errors import RequestRefused
from latentcache.service.context import ServiceContext
from latentcache.service.problems import problems
from latentcache.service.responses import OCTETS, file_answer
from latentcache.service.uploads import body_chunks, length_of
from latentcache.store.exchange import take_pack, take_sealed
from latentcache.utils.durable_files import open_to_read

PackId = Annotated[
    str, Path(pattern="^[0-9a-f]{32}$", description="The pack's id.", examples=["3f9c2a7be1d84f0c9a1b2c3d4e5f6a7b"])
]


class PackFacts(BaseModel):
    """One pack: the bytes of its file, and the entries that were written into it."""

    id: str
    num_bytes: int
    num_entries: int


class PackList(BaseModel):
    """All packs."""

    packs: list[PackFacts]


class Taken(BaseModel):
    """Entries of an uploaded pack that were not there before."""

    num_added: int


def pack_router(context: ServiceContext) -> APIRouter:
    """The routes below `/v1/packs`."""
    router = APIRouter(prefix="/v1", tags=["packs"])
    file = {description: {"description": text, "content": {OCTETS: {}}} for description, text in _FILE.items()}

    @router.get("/packs", responses=problems())
    async def packs() -> PackList:
        """The packs that there are."""
        return await context.call(_packs, context)

    @router.head("/packs/{pack}", include_in_schema=False)
    @router.get("/packs/{pack}", response_class=Response, responses={**file, **problems(304, 416)})
    async def pack(pack: PackId, request: Request) -> Response:
        """The file of a pack. It never changes, so caches may keep it for ever. One Range may be requested."""
        fd = await context.call(_open, context, pack, discard=os.close)
        headers = {
            "ETag": f'"{pack}"',
            "Accept-Ranges": "bytes",
            # A shared cache in between knows no tokens.
            "Cache-Control": f"{'public' if context.access.is_open else 'private'}, max-age=31536000, immutable",
        }
        return file_answer(context, pack, fd, headers, request.headers)

    @router.put(
        "/packs/{pack}",
        dependencies=[Depends(context.may_write)],
        status_code=201,
        openapi_extra={"requestBody": {"required": True, "content": {OCTETS: {}}}},
        responses={200: {"model": Taken, "description": "The pack is there already."}, **problems(507)},
    )
    async def put(pack: PackId, request: Request, response: Response) -> Taken:
        """Add a pack. It is checked whole before it is sealed: format, digests, keys that follow from identities."""
        num_added, is_new = await context.change(_take, context, pack, request)
        if not is_new:
            response.status_code = 200
        context.telemetry.added.inc(num_added)
        return Taken(num_added=num_added)

    return router


_FILE: dict[int | str, str] = {200: "The whole file.", 206: "The range that was requested."}


def _packs(context: ServiceContext) -> PackList:
    catalog = context.store.catalog
    with catalog.current() as table:
        packs = sorted(table.packs.items())
    return PackList(
        packs=[PackFacts(id=name, num_bytes=each.file_bytes, num_entries=each.num_entries) for name, each in packs]
    )


def _open(context: ServiceContext, pack: str) -> int:
    try:
        return open_to_read(context.store.directory.pack_path(pack))
    except FileNotFoundError:
        step = "`GET /v1/packs` lists those that there are"
        raise RequestRefused(f"there is no pack {pack}", status=404, met=pack, next_step=step) from None


def _take(context: ServiceContext, pack: str, request: Request) -> tuple[int, bool]:
    """Add a pack: how many entries are new, and whether its file is.

    If it was there the body is read to its end all the same: a client sends it before it listens.
    """
    chunks = body_chunks(request)
    if context.store.directory.pack_path(pack).exists():
        for _ in chunks:
            pass
        return take_sealed(context.store, pack), False
    return take_pack(context.store, pack, chunks, length_of(request)), True
