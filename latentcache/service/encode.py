"""Routes that encode what is not cached, with the models of the config that the server was given."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, get_args

from fastapi import APIRouter, Query, Request
from prometheus_client import Gauge
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse, Response

from latentcache.errors import EncoderBusyError, EntryDamagedError, EntryMissingError, RequestRefused
from latentcache.precache.memo import Memo
from latentcache.precache.tasks import Task
from latentcache.precache.workspace import Workspace
from latentcache.service.auth import Role
from latentcache.service.miss_encoder import MissEncoder
from latentcache.service.packs import OCTETS
from latentcache.service.state import ServiceState
from latentcache.store import DiskStore
from latentcache.store.entry import own_entry
from latentcache.store.pack import new_pack_id, pack_buffers
from latentcache.types import Kind

MAX_PROMPTS = 32
"""In one request. Their keys are a header of the answer."""
MAX_CHARACTERS = 1 << 14
"""Of a prompt: more than the encoders of any family read."""
MAX_REQUESTS = 32
"""Requests that wait for the encoder at once: others must find room on the server."""
MAX_IMAGES = 8
"""Images that are received at once, while others wait: each may be large, and is in memory."""
KEYS_HEADER, IMAGES_HEADER = "Latentcache-Keys", "Latentcache-Images"

Return = Literal["pack", "keys"]
_ANSWER: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "A pack of the distinct entries; with `return` keys, JSON.",
        "content": {OCTETS: {}, "application/json": {}},
    }
}


class PromptToEncode(BaseModel):
    """A prompt as it is: nothing is stripped."""

    model_config = ConfigDict(extra="forbid", strict=True)

    text: Annotated[str, Field(max_length=MAX_CHARACTERS)]
    negative: bool = False
    """Some families encode negative prompts otherwise: of those with CLIP alone clip_skip is for positive ones only."""


class PromptsToEncode(BaseModel):
    """The body of `prompts:encode`."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={"examples": [{"prompts": [{"text": "a photo of an astronaut"}], "return": "keys"}]},
    )

    prompts: Annotated[list[PromptToEncode], Field(min_length=1, max_length=MAX_PROMPTS)]
    wanted: Annotated[Return, Field(alias="return")] = "pack"


def encode_router(state: ServiceState) -> APIRouter:
    """`prompts:encode` and `images:encode`, with the models of the config in the settings.

    They are identified before this returns. The lifespan of the router ends with the encoder's.
    Raises ConfigError, DeviceError, ModelError, StoreError.
    """
    assert state.settings.encode is not None
    registry = state.telemetry.registry
    with contextlib.ExitStack() as opened:
        memo = opened.enter_context(contextlib.closing(Memo(state.store.path / "memo")))
        workspace = Workspace(state.store, state.manifests, memo, state.store.path)
        encoder = MissEncoder(state.settings.encode, workspace, idle_s=state.settings.idle_s, registry=registry)
        memo.flush()  # the digests of the weights, whatever becomes of this process
        opened.enter_context(encoder)
        to_close = opened.pop_all()

    @contextlib.asynccontextmanager
    async def lifespan(app: object) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await asyncio.to_thread(to_close.close)

    waiting = "Entries that wait or are being encoded."
    Gauge("latentcache_encoder_queue", waiting, registry=registry).set_function(lambda: encoder.num_waiting)
    loaded = Gauge("latentcache_encoder_loaded", "Whether encoders are on the device.", ["kind"], registry=registry)
    for kind in get_args(Kind):
        loaded.labels(kind).set_function(partial(_is_loaded, encoder, kind))
    entries, receiving = _Requested(state, encoder), asyncio.Semaphore(MAX_IMAGES)
    router = APIRouter(prefix="/v1", tags=["encode"], lifespan=lifespan)
    options: dict[str, Any] = {"responses": _ANSWER, "response_class": Response}

    @router.post("/prompts:encode", **options)
    async def encode_prompts(body: PromptsToEncode, request: Request) -> Response:
        """The entries of these prompts, as a pack. What is not cached is encoded and stored first.

        Where the server has a writing token, what is not cached needs it.

        The header `Latentcache-Keys` has the key of each prompt, with commas between them; equal prompts share one.
        With `"return": "keys"` the answer is `{"entries": [{"key", "cached"}]}`, where `cached` says whether the entry
        was there before.
        """

        def tasks_of() -> list[Task]:
            return [encoder.prompt(prompt.text, negative=prompt.negative) for prompt in body.prompts]

        tasks = await state.read(tasks_of)
        headers = {KEYS_HEADER: ",".join(task.key for task in tasks)}
        return await entries.answer(request, tasks, [{"key": task.key} for task in tasks], body.wanted, headers)

    content = {"content": {"image/*": {"schema": {"type": "string", "format": "binary"}}}, "required": True}

    @router.post("/images:encode", openapi_extra={"requestBody": content}, **options)
    async def encode_image(
        request: Request,
        dataset: Annotated[str | None, Query(description="The dataset as whose image it is prepared.")] = None,
        name: Annotated[str, Query(max_length=1000, description="The image's file name, for messages.")] = "",
        wanted: Annotated[Return, Query(alias="return")] = "pack",
    ) -> Response:
        """The entries of the image in the body, as a pack: it and, if the dataset flips, its mirrored twin.

        Where the server has a writing token, an image that is not cached needs it.

        The image is prepared as `precache` prepares those of the dataset, by default the only one of the config. The
        header `Latentcache-Images` is a JSON list with the key and the geometry of each entry; with `return=keys` that
        is the answer, as `{"entries": [...]}` with `cached` for each.
        """
        async with receiving:
            data = await request.body()
        images = await state.read(partial(encoder.image, data, dataset=dataset, name=name))
        facts = [{"key": ref.key, **ref.geometry.to_json()} for ref, _ in images]
        tasks = [task for _, task in images]
        return await entries.answer(request, tasks, facts, wanted, {IMAGES_HEADER: json.dumps(facts)})

    return router


class _Requested:
    """Entries that are encoded where they are not there. It limits the requests that wait for the encoder."""

    def __init__(self, state: ServiceState, encoder: MissEncoder):
        self._state, self._encoder, self._requests = state, encoder, asyncio.Semaphore(MAX_REQUESTS)

    async def answer(
        self,
        request: Request,
        tasks: Sequence[Task],
        facts: Sequence[Mapping[str, Any]],
        wanted: Return,
        headers: Mapping[str, str],
    ) -> Response:
        """The entries of these tasks, or with `wanted` keys the `facts` of each. RequestRefused, EncoderBusyError."""
        keys, store = list(dict.fromkeys(task.key for task in tasks)), self._state.store
        if num_missing := len(keys) - len(await self._state.read(store.find, keys)):
            self._check_may_store(request, num_missing)
            if self._requests.locked():
                raise EncoderBusyError(f"{MAX_REQUESTS} requests wait for the encoder", retry_after_s=1)
        missing = await self._encode(tasks)
        try:
            data = await self._state.read(_pack_of, store, keys)
        except (EntryDamagedError, EntryMissingError):
            # Reading found damage, which is a miss now; or a prune was faster.
            missing |= await self._encode(tasks)
            data = await self._state.read(_pack_of, store, keys)
        self._state.telemetry.hits.inc(len(keys))
        if wanted == "keys":
            return JSONResponse({"entries": [{**each, "cached": each["key"] not in missing} for each in facts]})
        return Response(data, headers=dict(headers), media_type=OCTETS)

    def _check_may_store(self, request: Request, num_missing: int) -> None:
        """RequestRefused for entries that are not there and a client that may only read: they would stay for good."""
        if self._state.access.writing_token is None or request.scope["latentcache.role"] >= Role.WRITE:
            return  # without a writing token, whoever may read is served by --encode
        step = "Send the writing token, or let a client that has it request them once"
        detail = f"{num_missing} of these entries are not cached, and storing them needs the writing token"
        raise RequestRefused(detail, status=403, next_step=step)

    async def _encode(self, tasks: Sequence[Task]) -> set[str]:
        """Wait until all entries are there. Returns the keys of those that were not."""
        futures = await self._state.read(self._encoder.submit, tasks)
        if futures:  # what is there waits for nobody
            async with self._requests:
                await asyncio.gather(*map(asyncio.wrap_future, futures.values()))
        return set(futures)


def _pack_of(store: DiskStore, keys: Sequence[str]) -> bytes:
    """A pack of these entries. EntryMissingError, EntryDamagedError."""
    return b"".join(pack_buffers(new_pack_id(), [own_entry(store.get(key)) for key in keys])[2])


def _is_loaded(encoder: MissEncoder, kind: Kind) -> float:
    return float(kind == encoder.loaded)
