"""Routes about manifests: downloads and uploads of their files, and notes of unfinished runs."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path as FilePath
from typing import Annotated, BinaryIO

from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel

from latentcache.dataset.manifest import MAX_HEADER_BYTES, read_head, read_manifest
from latentcache.dataset.manifest_folder import NAME_PATTERN, SUFFIX, ManifestFolder
from latentcache.errors import DatasetError, RequestRefused
from latentcache.service.packs import FILE, OCTETS, UPLOAD, body_chunks, has_tag, length_of
from latentcache.service.state import ServiceState
from latentcache.utils.durable_files import make_folder, open_to_read, sealed_file, typed_errors, write_all

Name = Annotated[str, Path(pattern=NAME_PATTERN, description="The manifest's name.", examples=["photos"])]
Owner = Annotated[str, Query(pattern="^([0-9a-f]{32})?$", description="The run's owner, who alone ends its note.")]
_CHUNK_BYTES = 1 << 20
_DAMAGED = '"damaged"'
"""ETag of a damaged manifest: only clients that do not expect a certain version may replace it."""


class ManifestFacts(BaseModel):
    """One manifest. `etag` is the digest of its contents. A damaged manifest has only its name and an `error`."""

    name: str
    role: str | None = None
    num_samples: int | None = None
    etag: str | None = None
    error: str | None = None


class ManifestList(BaseModel):
    """All manifests; `unfinished` says by manifest when runs began that have not finished."""

    manifests: list[ManifestFacts]
    unfinished: dict[str, str]


def manifest_router(state: ServiceState) -> APIRouter:
    """The routes below `/v1/manifests`."""
    router, folder = APIRouter(prefix="/v1", tags=["manifests"]), state.manifests
    may_write = [Depends(state.may_write)]

    @router.get("/manifests")
    async def manifests() -> ManifestList:
        """List the manifests."""
        return await state.read(_listed, folder)

    @router.get("/manifests/{name}", response_class=Response, responses=FILE)
    async def manifest(name: Name, request: Request) -> Response:
        """Download a manifest: a safetensors file with the columns of its samples."""
        facts, file = await state.read(_opened, folder, name)
        headers = {"ETag": str(facts.etag), "Cache-Control": "no-cache"}
        if has_tag(request.headers.get("if-none-match", ""), str(facts.etag)):
            file.close()
            return Response(None, 304, headers)
        # Of the open file: another one may be at its path by now.
        headers["Content-Length"] = str(os.fstat(file.fileno()).st_size)
        return StreamingResponse(_chunks(file), headers=headers, media_type=OCTETS)

    @router.put(
        "/manifests/{name}",
        dependencies=may_write,
        openapi_extra=UPLOAD,
        responses={201: {"model": ManifestFacts, "description": "The manifest is new."}},
    )
    async def put(name: Name, request: Request, response: Response) -> ManifestFacts:
        """Create or replace a manifest. If-Match and `If-None-Match: *` guard against concurrent changes."""
        facts, is_new = await state.change(_take, folder, name, request)
        response.status_code = 201 if is_new else 200
        response.headers["ETag"] = str(facts.etag)
        return facts

    @router.put("/manifests/{name}/unfinished", dependencies=may_write, status_code=204)
    async def begin(name: Name, owner: Owner = "") -> None:
        """Note that a run works on the manifest; `latentcache prune` refuses to run until it has finished."""
        await state.change(folder.begin, name, owner)

    @router.delete("/manifests/{name}/unfinished", dependencies=may_write, status_code=204)
    async def end(name: Name, owner: Owner = "") -> None:
        """Remove the note of a run. Uploading the manifest removes the note without an owner."""
        await state.change(folder.end, name, owner)

    return router


def served_names(folder: ManifestFolder) -> list[str]:
    """The manifests that a request may name, which excludes names that could lead out of the folder."""
    return [name for name in folder.names() if re.fullmatch(NAME_PATTERN, name)]


def _listed(folder: ManifestFolder) -> ManifestList:
    found = [facts for name in served_names(folder) if (facts := _facts(folder, name)) is not None]
    return ManifestList(manifests=found, unfinished=folder.unfinished())


def _opened(folder: ManifestFolder, name: str) -> tuple[ManifestFacts, BinaryIO]:
    """The facts in a manifest's head, and its file, open at the start. RequestRefused, DatasetError."""
    path = folder.file(name)
    try:
        file = os.fdopen(open_to_read(path), "rb")
    except FileNotFoundError:
        known = ", ".join(served_names(folder)) or "none yet"
        raise RequestRefused(f"there is no manifest {name!r}", status=404, met=name, allowed=known) from None
    with ExitStack() as failed:
        failed.enter_context(file)
        num_bytes = min(int.from_bytes(file.read(8), "little"), MAX_HEADER_BYTES)
        file.seek(0)
        facts = _facts_in(file.read(8 + num_bytes), name, path)
        file.seek(0)
        failed.pop_all()
    return facts, file


def _facts(folder: ManifestFolder, name: str) -> ManifestFacts | None:
    """A manifest's facts; None if there is no such manifest."""
    try:
        facts, file = _opened(folder, name)
    except RequestRefused:
        return None
    except DatasetError as error:
        return ManifestFacts(name=name, error=str(error))
    file.close()
    return facts


def _chunks(file: BinaryIO) -> Iterator[bytes]:
    with file:
        while chunk := file.read(_CHUNK_BYTES):
            yield chunk


def _facts_in(data: bytes | memoryview, name: str, path: FilePath) -> ManifestFacts:
    head = read_head(data, name, path)
    return ManifestFacts(name=name, role=head.role, num_samples=head.num_samples, etag=f'"{head.digest}"')


def _take(folder: ManifestFolder, name: str, request: Request) -> tuple[ManifestFacts, bool]:
    """Replace a manifest by the body, and remove the note without an owner. Returns also whether it is new.

    The body is checked completely before it replaces anything. RequestRefused if it is invalid.
    """
    path = folder.path / f"{name}{SUFFIX}"
    with typed_errors(path, 0):
        make_folder(path.parent)
    with ExitStack() as held:
        with sealed_file(path, length_of(request.headers)) as fd:
            for chunk in body_chunks(request):
                write_all(fd, chunk)
            try:
                data = mmap.mmap(fd, 0, access=mmap.ACCESS_READ) if os.fstat(fd).st_size else b""
                read_manifest(data, name, name, whole_check=True)
            except DatasetError as error:
                raise RequestRefused(str(error), status=422) from error
            facts = _facts_in(memoryview(data), name, path)
            del data  # Windows cannot rename a mapped file
            # Of two clients that replace the same version, in any process, only the first succeeds.
            held.enter_context(folder.lock())
            before = _facts(folder, name)
            _check_conditions(request.headers, None if before is None else before.etag or _DAMAGED)
        folder.end(name, "")
    return facts, before is None


def _check_conditions(asked: Mapping[str, str], etag: str | None) -> None:
    """RequestRefused (412) if the current manifest is not the version that the client expects."""
    if_match, if_none_match = asked.get("if-match"), asked.get("if-none-match")
    is_other = if_match is not None and not (etag and has_tag(if_match, etag))
    if is_other or (if_none_match is not None and etag and has_tag(if_none_match, etag)):
        step, allowed = "Download it again before you replace it", if_match or if_none_match
        detail = "the manifest was changed by another client"
        raise RequestRefused(detail, status=412, met=etag, allowed=allowed, next_step=step)
