"""Routes that encode what is not cached, with the models of the server's config."""

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
"""Most prompts in one request: the response has their keys in a header."""
MAX_CHARACTERS = 1 << 14
"""Longest prompt, in characters; no family's encoders read more."""
MAX_REQUESTS = 32
"""Requests that may wait for the encoder at once, which leaves room for other requests."""
MAX_IMAGES = 8
"""Images received at once: each may be large, and is held in memory."""
KEYS_HEADER, IMAGES_HEADER = "Latentcache-Keys", "Latentcache-Images"

Return = Literal["pack", "keys"]
_ANSWER: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "A pack of the distinct entries, or JSON if `return` is `keys`.",
        "content": {OCTETS: {}, "application/json": {}},
    }
}


class PromptToEncode(BaseModel):
    """A prompt, encoded as it is: nothing is stripped."""

    model_config = ConfigDict(extra="forbid", strict=True)

    text: Annotated[str, Field(max_length=MAX_CHARACTERS)]
    negative: bool = False
    """Some families encode negative prompts differently: with CLIP alone, clip_skip is for positive prompts only."""


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
    """The routes `prompts:encode` and `images:encode`, with the models of the config in the settings.

    The models are identified before this returns. The encoder is closed when the router's lifespan ends.
    Raises ConfigError, DeviceError, ModelError, StoreError.
    """
    assert state.settings.encode is not None
    registry = state.telemetry.registry
    with contextlib.ExitStack() as opened:
        memo = opened.enter_context(contextlib.closing(Memo(state.store.path / "memo")))
        workspace = Workspace(state.store, state.manifests, memo, state.store.path)
        encoder = MissEncoder(state.settings.encode, workspace, idle_s=state.settings.idle_s, registry=registry)
        memo.flush()  # keep the digests of the weights even if this process is killed
        opened.enter_context(encoder)
        to_close = opened.pop_all()

    @contextlib.asynccontextmanager
    async def lifespan(app: object) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await asyncio.to_thread(to_close.close)

    waiting = "Entries queued or being encoded."
    Gauge("latentcache_encoder_queue", waiting, registry=registry).set_function(lambda: encoder.num_waiting)
    loaded = Gauge("latentcache_encoder_loaded", "Whether encoders are on the device.", ["kind"], registry=registry)
    for kind in get_args(Kind):
        loaded.labels(kind).set_function(partial(_is_loaded, encoder, kind))
    entries, receiving = _Requested(state, encoder), asyncio.Semaphore(MAX_IMAGES)
    router = APIRouter(prefix="/v1", tags=["encode"], lifespan=lifespan)
    options: dict[str, Any] = {"responses": _ANSWER, "response_class": Response}

    @router.post("/prompts:encode", **options)
    async def encode_prompts(body: PromptsToEncode, request: Request) -> Response:
        """The entries of these prompts, as a pack. Entries that are not cached are encoded and stored first.

        If the server has a writing token, a request for entries that are not cached needs it.

        The header `Latentcache-Keys` has the key of each prompt, separated by commas; equal prompts share one.
        With `"return": "keys"` the response is `{"entries": [{"key", "cached"}]}`, where `cached` says whether the
        entry was cached before.
        """
        asked = [(prompt.text, prompt.negative) for prompt in body.prompts]
        tasks = await state.read(lambda: [encoder.prompt(text, negative=negative) for text, negative in asked])
        headers = {KEYS_HEADER: ",".join(task.key for task in tasks)}
        return await entries.answer(request, tasks, [{"key": task.key} for task in tasks], body.wanted, headers)

    content = {"content": {"image/*": {"schema": {"type": "string", "format": "binary"}}}, "required": True}

    @router.post("/images:encode", openapi_extra={"requestBody": content}, **options)
    async def encode_image(
        request: Request,
        dataset: Annotated[str | None, Query(description="The dataset whose settings prepare the image.")] = None,
        name: Annotated[str, Query(max_length=1000, description="The image's file name, for messages.")] = "",
        wanted: Annotated[Return, Query(alias="return")] = "pack",
    ) -> Response:
        """The entries of the image in the body, as a pack: the image and, if the dataset flips, its mirrored twin.

        If the server has a writing token, a request for an image that is not cached needs it.

        The image is prepared as `precache` prepares images of the dataset, by default the only one of the config. The
        header `Latentcache-Images` is a JSON list with the key and the geometry of each entry; with `return=keys` the
        response is that list, as `{"entries": [...]}` with `cached` for each.
        """
        async with receiving:
            data = await request.body()
        images = await state.read(partial(encoder.image, data, dataset=dataset, name=name))
        facts = [{"key": ref.key, **ref.geometry.to_json()} for ref, _ in images]
        tasks = [task for _, task in images]
        return await entries.answer(request, tasks, facts, wanted, {IMAGES_HEADER: json.dumps(facts)})

    return router


class _Requested:
    """Returns entries, encoding those that are not cached, and limits the requests that wait for the encoder."""

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
        """The entries of these tasks, or their `facts` if `wanted` is `keys`. RequestRefused, EncoderBusyError."""
        keys, store = list(dict.fromkeys(task.key for task in tasks)), self._state.store
        if num_missing := len(keys) - len(await self._state.read(store.find, keys)):
            self._check_may_store(request, num_missing)
            if self._requests.locked():
                raise EncoderBusyError(f"{MAX_REQUESTS} requests wait for the encoder", retry_after_s=1)
        missing = await self._encode(tasks)
        try:
            data = await self._state.read(_pack_of, store, keys)
        except (EntryDamagedError, EntryMissingError):
            # The read has found damage, which is now a miss; or `prune` has removed an entry.
            missing |= await self._encode(tasks)
            data = await self._state.read(_pack_of, store, keys)
        self._state.telemetry.hits.inc(len(keys) - len(missing))
        self._state.telemetry.misses.inc(len(missing))
        if wanted == "keys":
            return JSONResponse({"entries": [{**each, "cached": each["key"] not in missing} for each in facts]})
        return Response(data, headers=dict(headers), media_type=OCTETS)

    def _check_may_store(self, request: Request, num_missing: int) -> None:
        """RequestRefused if entries are missing and the client may only read: encoding would fill the disk for good."""
        if self._state.access.writing_token is None or request.scope["latentcache.role"] >= Role.WRITE:
            return  # without a writing token, --encode serves everyone who may read
        step = "Send the writing token, or request them once from a client that has it"
        detail = f"{num_missing} of these entries are not cached, and storing them needs the writing token"
        raise RequestRefused(detail, status=403, next_step=step)

    async def _encode(self, tasks: Sequence[Task]) -> set[str]:
        """Wait until all entries are cached. Returns the keys of those that were not."""
        futures = await self._state.read(self._encoder.submit, tasks)
        if futures:  # a request whose entries are all cached does not wait
            async with self._requests:
                await asyncio.gather(*map(asyncio.wrap_future, futures.values()))
        return set(futures)


def _pack_of(store: DiskStore, keys: Sequence[str]) -> bytes:
    """A pack of these entries. EntryMissingError, EntryDamagedError."""
    return b"".join(pack_buffers(new_pack_id(), [own_entry(store.get(key)) for key in keys])[2])


def _is_loaded(encoder: MissEncoder, kind: Kind) -> float:
    return float(kind == encoder.loaded)
