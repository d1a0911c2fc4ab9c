"""Routes about packs and the entries in them: files as they are, uploads, which entries are there and whole."""

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
"""In one request."""
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
    304: {"description": "The client has it already."},
}
"""What OpenAPI says of files that come, and of those that are sent."""


class PackFacts(BaseModel):
    """One pack: the bytes of its file, and the entries that were written into it."""

    id: str
    num_bytes: int
    num_entries: int


class KeyList(BaseModel):
    """Keys of entries; they may repeat."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"keys": [KEY]}]})

    keys: Annotated[list[Key], Field(max_length=MAX_KEYS)]


def pack_router(state: ServiceState) -> APIRouter:
    """The routes below `/v1/packs`, and those about entries by their keys: their values come in packs."""
    router = APIRouter(prefix="/v1", tags=["packs"])
    may_write = [Depends(state.may_write)]

    @router.get("/packs")
    async def packs() -> dict[Literal["packs"], list[PackFacts]]:
        """The packs that there are."""
        return {"packs": await state.read(_packs, state)}

    @router.head("/packs/{pack}", include_in_schema=False)
    @router.get("/packs/{pack}", response_class=Response, responses=FILE)
    async def pack(pack: PackId, request: Request) -> Response:
        """The file of a pack. It never changes, so caches may keep it for ever. A Range may be requested."""
        # A shared cache in between knows no tokens.
        cached = f"{'public' if state.access.is_open else 'private'}, max-age=31536000, immutable"
        path = state.store.directory.pack_path(pack)
        status = await state.read(_status_of, path, pack)
        return file_answer(path, status, f'"{pack}"', cached, request)

    @router.put(
        "/packs/{pack}",
        dependencies=may_write,
        status_code=201,
        openapi_extra=UPLOAD,
        responses={200: {"model": dict[Literal["num_added"], int], "description": "The pack is there already."}},
    )
    async def put(pack: PackId, request: Request, response: Response) -> dict[Literal["num_added"], int]:
        """Add a pack. It is checked whole before it is sealed: format, digests, keys that follow from identities.

        The answer is how many of its entries were not there before.
        """
        num_added, is_new = await state.change(_take, state, pack, request)
        if not is_new:
            response.status_code = 200
        state.telemetry.added.inc(num_added)
        return {"num_added": num_added}

    @router.post("/entries:find")
    async def find(request: KeyList) -> dict[Literal["found"], list[Key]]:
        """Which of these entries are there, each once."""
        found = await state.read(state.store.find, request.keys)
        state.telemetry.hits.inc(len(found))
        state.telemetry.misses.inc(len(set(request.keys)) - len(found))
        return {"found": [key for key in dict.fromkeys(request.keys) if key in found]}

    @router.post("/verify", dependencies=may_write)
    async def verify(request: KeyList) -> dict[Literal["damaged"], dict[str, str]]:
        """Read these entries on the server's disk, and mark those that are damaged: they are misses then.

        The answer says why entries are damaged, by key, also of those that were marked before. Entries that are not
        there are not damaged.
        """
        if not request.keys:  # who asks whether it may write
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
        step = "`GET /v1/packs` lists those that there are"
        raise RequestRefused(f"there is no pack {pack}", status=404, met=pack, next_step=step) from None


# Files that are sent and taken


class _StoredFile(FileResponse):
    chunk_size = 1 << 20


def file_answer(path: FilePath, status: os.stat_result, etag: str, cached: str, request: Request) -> Response:
    """A file, the Range of it that was requested, or 304 for a client that has this version.

    `status` is that of the file which `etag` names; `cached` is the Cache-Control.
    """
    headers = {"ETag": etag, "Cache-Control": cached}
    if has_tag(request.headers.get("if-none-match", ""), etag):
        return Response(None, 304, headers)
    return _StoredFile(path, headers=headers, media_type=OCTETS, stat_result=status)


def has_tag(tags: str, etag: str) -> bool:
    """Whether a list of ETags, as a header has it, names this one or all."""
    found = [tag.strip().removeprefix("W/") for tag in tags.split(",")]
    return etag in found or "*" in found


def _take(state: ServiceState, pack: str, request: Request) -> tuple[int, bool]:
    """Add a pack: how many entries are new, and whether it is.

    The body of one that is there is read to its end all the same: a client sends it before it listens.
    """
    is_new = not state.store.knows(pack)
    return state.store.take_pack(pack, body_chunks(request), length_of(request.headers)), is_new


def body_chunks(request: Request) -> Iterator[bytes]:
    """The parts of the body, for a thread of `ServiceState.change`. RequestRefused if the client goes away."""
    stream = request.stream()
    while True:
        try:
            chunk = anyio.from_thread.run(anext, stream, None)
        except ClientDisconnect:
            raise RequestRefused("the client went away before the body was whole", status=400) from None
        if chunk is None:
            return
        yield chunk


def length_of(headers: Mapping[str, str]) -> int:
    """The Content-Length of a request with these headers, 0 where it has none."""
    text = headers.get("content-length", "0")
    return int(text) if text.isdecimal() else 0
