"""Answers in parts are the bytes that were given, in their order, whatever the sizes of the buffers."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from latentcache.service import responses
from latentcache.service.responses import BytesResponse

SIZES = st.lists(st.integers(0, 700), max_size=12)


@given(sizes=SIZES, part=st.integers(2, 300))
@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_buffers_of_any_sizes_arrive_in_their_order(sizes: list[int], part: int) -> None:
    buffers = [memoryview(bytes((number * 31 + i) % 251 for i in range(size))) for number, size in enumerate(sizes)]
    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    async def receive() -> MutableMapping[str, Any]:
        raise AssertionError("nothing is read")

    before, responses.PART_BYTES = responses.PART_BYTES, part
    try:
        asyncio.run(BytesResponse(buffers)({"type": "http"}, receive, send))
    finally:
        responses.PART_BYTES = before
    start, *bodies = sent
    whole = b"".join(buffers)
    assert b"".join(bytes(body["body"]) for body in bodies) == whole
    assert (b"content-length", str(len(whole)).encode()) in start["headers"]
    assert all(len(body["body"]) <= part for body in bodies)
    assert [body["more_body"] for body in bodies] == [True] * (len(bodies) - 1) + [False]
