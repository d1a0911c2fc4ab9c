"""Routes about entries: which are there, what they are, and their values as packs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Depends, Path, Query
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from latentcache.errors import EntryMissingError, RequestRefused, StoreError
from latentcache.service.answer_memory import AnswerBuffers
from latentcache.service.context import ServiceContext
from latentcache.service.problems import problems
from latentcache.service.responses import OCTETS, BytesResponse
from latentcache.store.base import Description
from latentcache.store.exchange import StoredEntry
from latentcache.store.pack import Document, NamedTensor, new_pack_id, pack_buffers
from latentcache.store.stacking import common_fields
from latentcache.store.upkeep import verify_entries

KEY = "0c9ba9e9ba9be1f9ef6ab1bb9ce9a7bbb9ba4cd3c4a4ba7d9e0ff3a7f1d2c3b4"  # an example
Key = Annotated[str, StringConstraints(pattern="^[0-9a-f]{64}$")]
KeyInPath = Annotated[str, Path(pattern="^[0-9a-f]{64}$", description="The entry's key.", examples=[KEY])]
MAX_PAGE_KEYS = 1 << 16
_PAGE_BYTES = 4096
_MAX_FIELDS = 100


class KeyList(BaseModel):
    """Keys of entries; they may repeat."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [{"keys": [KEY]}]})

    keys: list[Key]


class ReadRequest(KeyList):
    """Entries to return: all of their fields as a pack, or some fields stacked."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"keys": [KEY], "fields": None}, {"keys": [KEY], "fields": ["moments"]}]},
    )

    fields: list[Annotated[str, Field(max_length=100)]] | None = Field(None, min_length=1, max_length=_MAX_FIELDS)


class FoundKeys(BaseModel):
    """Those of the requested keys whose entries are there, each once."""

    found: list[Key]


class Removed(BaseModel):
    """How many entries were removed."""

    num_removed: int


class Damage(BaseModel):
    """Why entries are damaged, by key."""

    damaged: dict[str, str]


class FieldType(BaseModel):
    """Of a field's values: a dtype as torch names it, and a shape."""

    dtype: str
    shape: list[int]


class EntryRecord(BaseModel):
    """What an entry is and how it was made, and its fields. `ragged` names those with a length of the entry's own."""

    key: Key
    kind: str
    identity: dict[str, Any]
    provenance: dict[str, Any]
    fields: dict[str, FieldType]
    ragged: list[str]


_PACK: dict[int | str, dict[str, Any]] = {
    200: {"description": "A pack: a safetensors document with digests.", "content": {OCTETS: {}}}
}


def entry_router(context: ServiceContext) -> APIRouter:
    """The routes about entries: those that read, and those that change them."""
    router = APIRouter(prefix="/v1", tags=["entries"])
    _add_reading(router, context)
    _add_changing(router, context)
    return router


def _add_reading(router: APIRouter, context: ServiceContext) -> None:
    @router.get(
        "/keys",
        response_class=Response,
        responses={200: {"description": "32 bytes each.", "content": {OCTETS: {}}}, **problems()},
    )
    async def keys(
        after: Annotated[str, Query(pattern="^([0-9a-f]{64})?$", description="The last key of the page before.")] = "",
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE_KEYS)] = MAX_PAGE_KEYS,
    ) -> Response:
        """The keys of all entries, ascending, a page at a time. `Latentcache-More: 1` says that there are more."""
        found = await context.call(_keys_after, context, after, limit + 1)
        more = {"Latentcache-More": "1"} if len(found) > limit else {}
        return BytesResponse([found[:limit].tobytes()], more)

    @router.get("/entries/{key}", response_model=EntryRecord, responses=problems(409))
    async def entry(key: KeyInPath) -> Response:
        """The record of an entry, and its fields."""
        return await context.call(_record, context, key)

    @router.get("/entries/{key}/payload", response_class=Response, responses={**_PACK, **problems(409)})
    async def payload(key: KeyInPath) -> Response:
        """The entry as a pack of its own."""
        return await pack_answer(context, [key])

    @router.post("/entries:find", responses=problems())
    async def find(request: KeyList) -> FoundKeys:
        """Which of these entries are there."""
        _check_number(context, request.keys)
        found = await context.call(context.store.find, request.keys)
        context.telemetry.hits.inc(len(found))
        context.telemetry.misses.inc(len(set(request.keys)) - len(found))
        return FoundKeys.model_construct(found=[key for key in dict.fromkeys(request.keys) if key in found])

    @router.post("/entries:read", response_class=Response, responses={**_PACK, **problems(409)})
    async def read(request: ReadRequest) -> Response:
        """Entries in one document.

        Without `fields` a pack of the distinct keys: all fields, the records, and a digest of each entry. With
        `fields` a safetensors document of these alone, a row for each requested key, in that order; its metadata has
        `partial`. A field of natural length is `<field>/values` and `<field>/offsets`. All or nothing: a missing entry
        is a 404.
        """
        _check_number(context, request.keys)
        if request.fields is None:
            return await pack_answer(context, list(dict.fromkeys(request.keys)))
        data = await context.call(_columns, context, request.keys, request.fields)
        context.telemetry.hits.inc(len(request.keys))
        return BytesResponse(data)


def _add_changing(router: APIRouter, context: ServiceContext) -> None:
    writes = [Depends(context.may_write)]

    @router.post("/entries:remove", dependencies=writes, responses=problems())
    async def remove(request: KeyList) -> Removed:
        """Remove entries. The space is free after `latentcache compact`."""
        _check_number(context, request.keys)
        return Removed(num_removed=await context.change(context.store.remove, request.keys))

    @router.post("/verify", dependencies=writes, responses=problems())
    async def verify(request: KeyList) -> Damage:
        """Read these entries on the server's disk, and mark those that are damaged: they are misses then.

        Entries that are not there are not damaged. The answer also has those that were marked before.
        """
        _check_number(context, request.keys)
        return Damage(damaged=await context.change(verify_entries, context.store, list(dict.fromkeys(request.keys))))


def _check_number(context: ServiceContext, keys: Sequence[str]) -> None:
    """RequestRefused for more keys than a request may have."""
    allowed = context.limits.max_keys
    if len(keys) > allowed:
        detail = f"{len(keys):,} keys in one request, and {allowed:,} are allowed"
        step = "Request them in several parts"
        raise RequestRefused(detail, status=413, met=len(keys), allowed=allowed, next_step=step)


def _keys_after(context: ServiceContext, after: str, limit: int) -> np.ndarray:
    context.store.catalog.reload()
    return context.store.catalog.table.keys_after(after, limit)


def _record(context: ServiceContext, key: str) -> Response:
    # Whatever JSON an identity has, also lone surrogates of a broken file name: pydantic would refuse them.
    record, fields = context.store.record(key), context.store.describe(key)
    [location] = context.store.catalog.look_up([key])
    if location is None:
        raise EntryMissingError(key, "it was removed just now")
    document = {
        "key": key,
        "kind": record.kind,
        "identity": dict(record.identity),
        "provenance": dict(record.provenance),
        "fields": {name: {"dtype": dtype, "shape": list(shape)} for name, (dtype, shape) in fields.items()},
        "ragged": sorted(location.group.ragged),
    }
    return Response(json.dumps(document), media_type="application/json")


async def pack_answer(
    context: ServiceContext, keys: Sequence[str], headers: Mapping[str, str] | None = None
) -> Response:
    """The entries of these distinct keys as a pack. EntryMissingError, EntryDamagedError, RequestRefused."""
    data = await context.call(_pack, context, keys)
    context.telemetry.hits.inc(len(keys))
    return BytesResponse(data, headers)


def _read(context: ServiceContext, keys: Sequence[str]) -> tuple[AnswerBuffers, list[StoredEntry]]:
    """The entries, and a place for the answer with their bytes, for which there is room."""
    if not keys:
        raise RequestRefused("no key was sent", status=422, met=0, allowed="at least 1")
    num_bytes, allowed = context.entries.num_bytes(keys), context.limits.max_answer_bytes
    if num_bytes > allowed:
        detail = f"these entries have about {num_bytes:,} bytes, and {allowed:,} are allowed in one answer"
        step = "Request them in several parts"
        raise RequestRefused(detail, status=413, met=num_bytes, allowed=allowed, next_step=step)
    return context.answers.buffers(num_bytes), context.entries.read(keys)


def _pack(context: ServiceContext, keys: Sequence[str]) -> AnswerBuffers:
    answer, entries = _read(context, keys)
    answer.extend(pack_buffers(new_pack_id(), entries)[2])
    return _in_memory(answer)


def _in_memory(answer: AnswerBuffers) -> AnswerBuffers:
    """The answer, of which each page was touched: buffers may lie in mapped packs, and the event loop may not wait."""
    for buffer in answer:
        if len(buffer) > _PAGE_BYTES:
            np.frombuffer(buffer, np.uint8)[::_PAGE_BYTES].max()
    return answer


def _columns(context: ServiceContext, keys: Sequence[str], fields: Sequence[str]) -> AnswerBuffers:
    answer, entries = _read(context, keys)
    ragged = set().union(*(entry.location.group.ragged for entry in entries)) & set(fields)
    try:
        chosen = common_fields(keys, [_without_lengths(entry) for entry in entries], fields)
    except StoreError as error:
        raise RequestRefused(str(error), status=422) from error
    tensors = []
    for name, (dtype, shape) in chosen.items():
        values = [entry.tensors[name] for entry in entries]
        if name not in ragged:
            tensors.append(NamedTensor(name, dtype, (len(values), *shape), values))
            continue
        offsets = np.cumsum([0, *map(len, values)], dtype=np.dtype("<i8"))
        tensors.append(NamedTensor(f"{name}/values", dtype, (int(offsets[-1]), *shape), values))
        tensors.append(NamedTensor(f"{name}/offsets", "int64", offsets.shape, [offsets]))
    answer.extend(Document.of({"latentcache": "partial", "fields": ",".join(chosen)}, tensors).buffers)
    return _in_memory(answer)


def _without_lengths(entry: StoredEntry) -> Description:
    """The entry's fields; those of natural length without it, so that they differ in nothing else."""
    return {name: (dtype, shape) for name, dtype, shape, _ in entry.spec()[1]}
