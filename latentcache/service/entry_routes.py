"""Routes about entries: which are there, and which are whole; and entries as a pack, for routes that encode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from fastapi import APIRouter, Depends, Path
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, StringConstraints

from latentcache.errors import RequestRefused
from latentcache.service.context import ServiceContext
from latentcache.service.problems import problems
from latentcache.service.responses import OCTETS
from latentcache.store.entry import own_entry
from latentcache.store.pack import new_pack_id, pack_buffers
from latentcache.store.upkeep import verify_entries

KEY = "0c9ba9e9ba9be1f9ef6ab1bb9ce9a7bbb9ba4cd3c4a4ba7d9e0ff3a7f1d2c3b4"  # an example
Key = Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]
KeyInPath = Annotated[str, Path(pattern="^[0-9a-f]{64}$", description="The entry's key.", examples=[KEY])]


class KeyList(BaseModel):
    """Keys of entries; they may repeat."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"keys": [KEY]}]})

    keys: list[Key]


class FoundKeys(BaseModel):
    """The requested keys that have entries, each once."""

    found: list[Key]


class Damage(BaseModel):
    """Why entries are damaged, by key."""

    damaged: dict[str, str]


def entry_router(context: ServiceContext) -> APIRouter:
    """The routes about entries by their keys. Their values come in packs."""
    router = APIRouter(prefix="/v1", tags=["entries"])

    @router.post("/entries:find", responses=problems())
    async def find(request: KeyList) -> FoundKeys:
        """Which of these entries are there."""
        _check_number(context, request.keys)
        found = await context.call(context.store.find, request.keys)
        context.telemetry.hits.inc(len(found))
        context.telemetry.misses.inc(len(set(request.keys)) - len(found))
        return FoundKeys.model_construct(found=[key for key in dict.fromkeys(request.keys) if key in found])

    @router.post("/verify", dependencies=[Depends(context.may_write)], responses=problems())
    async def verify(request: KeyList) -> Damage:
        """Read these entries on the server's disk, and mark those that are damaged: they are misses then.

        Entries that are not there are not damaged. The answer also has those that were marked before.
        """
        _check_number(context, request.keys)
        if not request.keys:  # who asks whether it may write
            return Damage(damaged={})
        return Damage(damaged=await context.change(verify_entries, context.store, list(dict.fromkeys(request.keys))))

    return router


def _check_number(context: ServiceContext, keys: Sequence[str]) -> None:
    """RequestRefused for more keys than a request may have."""
    allowed = context.limits.max_keys
    if len(keys) > allowed:
        detail = f"{len(keys):,} keys in one request, and {allowed:,} are allowed"
        step = "Request them in several parts"
        raise RequestRefused(detail, status=413, met=len(keys), allowed=allowed, next_step=step)


async def pack_answer(context: ServiceContext, keys: Sequence[str], headers: Mapping[str, str]) -> Response:
    """The entries of these distinct keys as a pack: those of one request that encodes. Errors of `Store.get`."""
    data = await context.call(_pack, context, keys)
    context.telemetry.hits.inc(len(keys))
    return Response(data, headers=dict(headers), media_type=OCTETS)


def _pack(context: ServiceContext, keys: Sequence[str]) -> bytes:
    entries = [own_entry(context.store.get(key)) for key in keys]
    return b"".join(pack_buffers(new_pack_id(), entries)[2])
