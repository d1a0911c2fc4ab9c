"""The route that encodes prompts that are not cached, with the models of the config that the server was given."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse, Response
from typing_extensions import override

from latentcache.errors import EncoderBusyError, EntryDamagedError, EntryMissingError, RequestRefused
from latentcache.precache.memo import Memo
from latentcache.precache.tasks import TextTask
from latentcache.precache.workspace import Workspace
from latentcache.service.auth import Role
from latentcache.service.miss_encoder import COUNTED, MissEncoder
from latentcache.service.packs import OCTETS, pack_answer
from latentcache.service.state import ServiceState
from latentcache.store import DiskStore

MAX_PROMPTS = 32
"""In one request. Their keys are a header of the answer."""
MAX_CHARACTERS = 1 << 14
"""Of a prompt: more than the encoders of any family read."""
MAX_REQUESTS = 32
"""Requests that wait for the encoder at once: others must find room on the server."""
KEYS_HEADER = "Latentcache-Keys"

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
    wanted: Annotated[Literal["pack", "keys"], Field(alias="return")] = "pack"


def encode_router(state: ServiceState) -> APIRouter:
    """`prompts:encode`, with the models of the config in the settings.

    They are identified before this returns. The lifespan of the router ends with the encoder's.
    Raises ConfigError, DeviceError, ModelError, StoreError.
    """
    encoder, close = _opened(state)

    @contextlib.asynccontextmanager
    async def lifespan(app: object) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await asyncio.to_thread(close)

    state.telemetry.registry.register(_EncoderCollector(encoder))
    store, requests = state.store, asyncio.Semaphore(MAX_REQUESTS)
    router = APIRouter(prefix="/v1", tags=["encode"], lifespan=lifespan)

    @router.post("/prompts:encode", responses=_ANSWER, response_class=Response)
    async def encode_prompts(body: PromptsToEncode, request: Request) -> Response:
        """The entries of these prompts, as a pack. What is not cached is encoded and stored first.

        Where the server has a writing token, what is not cached needs it.

        The header `Latentcache-Keys` has the key of each prompt, with commas between them; equal prompts share one.
        With `"return": "keys"` the answer is `{"entries": [{"key", "cached"}]}`, where `cached` says whether the entry
        was there before.
        """

        def tasks_of() -> list[TextTask]:
            return [encoder.prompt(prompt.text, negative=prompt.negative) for prompt in body.prompts]

        tasks = await state.read(tasks_of)
        all_keys = [task.key for task in tasks]
        keys = list(dict.fromkeys(all_keys))
        if num_missing := len(keys) - len(await state.read(store.find, keys)):
            _check_may_store(state, request, num_missing)
            if requests.locked():
                raise EncoderBusyError(f"{MAX_REQUESTS} requests wait for the encoder", retry_after_s=1)
        missing = await encoded(tasks)
        try:
            await state.read(_check_whole, store, keys)
        except (EntryDamagedError, EntryMissingError):
            # Reading found damage, which is a miss now; or a prune was faster.
            missing |= await encoded(tasks)
        if body.wanted == "keys":
            return JSONResponse({"entries": [{"key": key, "cached": key not in missing} for key in all_keys]})
        return await pack_answer(state, keys, {KEYS_HEADER: ",".join(all_keys)})

    async def encoded(tasks: Sequence[TextTask]) -> set[str]:
        """Wait until all entries are there. Returns the keys of those that were not."""
        futures = await state.read(encoder.submit, tasks)
        if futures:  # what is there waits for nobody
            async with requests:
                await asyncio.gather(*map(asyncio.wrap_future, futures.values()))
        return set(futures)

    return router


def _opened(state: ServiceState) -> tuple[MissEncoder, Callable[[], None]]:
    """The encoder, and what closes it."""
    assert state.settings.encode is not None
    with contextlib.ExitStack() as opened:
        memo = opened.enter_context(contextlib.closing(Memo(state.store.path / "memo")))
        workspace = Workspace(state.store, state.manifests, memo, state.store.path)
        encoder = MissEncoder(state.settings.encode, workspace, idle_s=state.settings.idle_s)
        memo.flush()  # the digests of the weights, whatever becomes of this process
        opened.enter_context(encoder)
        return encoder, opened.pop_all().close


def _check_may_store(state: ServiceState, request: Request, num_missing: int) -> None:
    """RequestRefused for entries that are not there and a client that may only read: they would stay for good."""
    if state.access.writing_token is None or request.scope["latentcache.role"] >= Role.WRITE:
        return  # without a writing token, whoever may read is served by --encode
    step = "Send the writing token, or let a client that has it request them once"
    detail = f"{num_missing} of these entries are not cached, and storing them needs the writing token"
    raise RequestRefused(detail, status=403, next_step=step)


def _check_whole(store: DiskStore, keys: Sequence[str]) -> None:
    """Read entries and their records. EntryMissingError, EntryDamagedError."""
    store.rows(keys)
    for key in keys:
        store.record(key)


class _EncoderCollector(Collector):
    """What an encoder counts, for Prometheus."""

    def __init__(self, encoder: MissEncoder):
        self._encoder = encoder

    @override
    def collect(self) -> Iterator[Metric]:
        for name, what in COUNTED.items():
            yield CounterMetricFamily(f"latentcache_encoder_{name}", what, self._encoder.counts[name])
        waiting = "Entries that wait or are being encoded."
        yield GaugeMetricFamily("latentcache_encoder_queue", waiting, self._encoder.num_waiting)
        what = "Whether the encoders are on the device."
        yield GaugeMetricFamily("latentcache_encoder_loaded", what, float(bool(self._encoder.loaded)))
