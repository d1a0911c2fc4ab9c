"""Routes about packs and the entries in them: downloads, uploads, lookups and verification."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal

import anyio
from fastapi import APIRouter, Depends, Path, Request
from fastapi.responses import FileResponse, Response
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from starlette.requests import ClientDisconnect

from latentcache.errors import RequestRefused
from latentcache.service.state import ServiceState
from latentcache.store.upkeep import verify_entries

OCTETS = "application/octet-stream"
MAX_KEYS = 16384
"""Most keys in one request."""
KEY = "0c9ba9e9ba9be1f9ef6ab1bb9ce9a7bbb9ba4cd3c4a4ba7d9e0ff3a7f1d2c3b4"  # an example
PACK = "3f9c2a7be1d84f0c9a1b2c3d4e5f6a7b"
Key = Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]
KeyInPath = Annotated[str, Path(pattern="^[0-9a-f]{64}$", description="The entry's key.", examples=[KEY])]
PackId = Annotated[str, Path(pattern="^[0-9a-f]{32}$", description="The pack's id.", examples=[PACK])]

_CONTENT: dict[str, Any] = {OCTETS: {}}
UPLOAD: dict[str, Any] = {"requestBody": {"required": True, "content": _CONTENT}}
FILE: dict[int | str, dict[str, Any]] = {
    200: {"description": "The whole file.", "content": _CONTENT},
    206: {"description": "The Range that was requested.", "content": _CONTENT},
    304: {"description": "The client has the file already."},
}
"""Uploads and downloads of files, for the OpenAPI document."""


class PackFacts(BaseModel):
    """One pack: the size of its file, and how many entries were written into it."""

    id: str
    num_bytes: int
    num_entries: int


class KeyList(BaseModel):
    """Keys of entries, which may repeat."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"keys": [KEY]}]})

    keys: Annotated[list[Key], Field(max_length=MAX_KEYS)]


def pack_router(state: ServiceState) -> APIRouter:
    """The routes below `/v1/packs`, and those that take keys of entries."""
    router = APIRouter(prefix="/v1", tags=["packs"])
    may_write = [Depends(state.may_write)]

    @router.get("/packs")
    async def packs() -> dict[Literal["packs"], list[PackFacts]]:
        """List the packs."""
        return {"packs": await state.read(_packs, state)}

    @router.head("/packs/{pack}", include_in_schema=False)
    @router.get("/packs/{pack}", response_class=Response, responses=FILE)
    async def pack(pack: PackId, request: Request) -> Response:
        """Download a pack, or a Range of it. A pack never changes, so it may be cached without a time limit."""
        # A shared HTTP cache does not check tokens.
        cached = f"{'public' if state.access.is_open else 'private'}, max-age=31536000, immutable"
        path = state.store.directory.pack_path(pack)
        status = await state.read(_status_of, path, pack)
        headers = {"ETag": f'"{pack}"', "Cache-Control": cached}
        if has_tag(request.headers.get("if-none-match", ""), headers["ETag"]):
            return Response(None, 304, headers)
        return _StoredFile(path, headers=headers, media_type=OCTETS, stat_result=status)

    @router.put(
        "/packs/{pack}",
        dependencies=may_write,
        status_code=201,
        openapi_extra=UPLOAD,
        responses={200: {"model": dict[Literal["num_added"], int], "description": "The pack exists already."}},
    )
    async def put(pack: PackId, request: Request, response: Response) -> dict[Literal["num_added"], int]:
        """Add a pack. Its format, its digests, and that keys match identities are checked before it is sealed.

        The response says how many of its entries are new.
        """
        num_added, is_new = await state.change(_take, state, pack, request)
        if not is_new:
            response.status_code = 200
        state.telemetry.added.inc(num_added)
        return {"num_added": num_added}

    @router.post("/entries:find")
    async def find(request: KeyList) -> dict[Literal["found"], list[Key]]:
        """Which of these entries are cached, each listed once."""
        found = await state.read(state.store.find, request.keys)
        state.telemetry.hits.inc(len(found))
        state.telemetry.misses.inc(len(set(request.keys)) - len(found))
        return {"found": [key for key in dict.fromkeys(request.keys) if key in found]}

    @router.post("/verify", dependencies=may_write)
    async def verify(request: KeyList) -> dict[Literal["damaged"], dict[str, str]]:
        """Read these entries on the server's disk, and mark damaged ones, which become misses.

        The response says by key why entries are damaged, including those that were marked before. Entries that do not
        exist are not listed.
        """
        if not request.keys:  # a client checks whether it may write
            return {"damaged": {}}
        return {"damaged": await state.change(verify_entries, state.store, list(dict.fromkeys(request.keys)))}

    return router


def _packs(state: ServiceState) -> list[PackFacts]:
    with state.store.current() as table:
        packs = sorted(table.packs.items())
    return [PackFacts(id=name, num_bytes=each.file_bytes, num_entries=each.num_entries) for name, each in packs]


def _status_of(path: FilePath, pack: str) -> os.stat_result:
    try:
        return path.stat()
    except FileNotFoundError:
        step = "`GET /v1/packs` lists the packs"
        raise RequestRefused(f"there is no pack {pack}", status=404, met=pack, next_step=step) from None


# Downloads and uploads of files


class _StoredFile(FileResponse):
    chunk_size = 1 << 20


def has_tag(tags: str, etag: str) -> bool:
    """Whether the ETags in a header include this one, or `*`."""
    found = [tag.strip().removeprefix("W/") for tag in tags.split(",")]
    return etag in found or "*" in found


def _take(state: ServiceState, pack: str, request: Request) -> tuple[int, bool]:
    """Add a pack. Returns how many of its entries are new, and whether the pack is.

    The body is read even if the pack exists: clients send all of it before they read the response.
    """
    is_new = not state.store.knows(pack)
    return state.store.take_pack(pack, body_chunks(request), length_of(request.headers)), is_new


def body_chunks(request: Request) -> Iterator[bytes]:
    """The parts of the body, in a thread of `ServiceState.change`. RequestRefused if the client disconnects."""
    stream = request.stream()
    while True:
        try:
            chunk = anyio.from_thread.run(anext, stream, None)
        except ClientDisconnect:
            raise RequestRefused("the client disconnected before the body was complete", status=400) from None
        if chunk is None:
            return
        yield chunk


def length_of(headers: Mapping[str, str]) -> int:
    """The Content-Length of a request with these headers, or 0 if there is none."""
    text = headers.get("content-length", "0")
    return int(text) if text.isdecimal() else 0
