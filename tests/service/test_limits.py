"""Each limit is a clear answer, and a client that takes its time takes it from nobody else."""

from __future__ import annotations

import json
import socket
import time
from contextlib import ExitStack
from dataclasses import replace

import pytest
from helpers.remote_samples import fill
from helpers.serving import serving_here

from latentcache.service.state import Limits

LIMITS = Limits(max_body_bytes=4096, max_upload_bytes=100_000, max_requests=4, max_uploads=1, stall_s=0.3)
FIND = "POST /v1/entries:find"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving_here(fill(tmp_path_factory.mktemp("limits") / "cache", range(2)), limits=LIMITS) as server:
        yield server


def begin(server, route, rest):
    """Begin a request whose body does not come to its end, and return its connection."""
    client = socket.create_connection(server.address, timeout=20)
    head = f"{route} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {server.write_token}\r\n"
    client.sendall(head.encode() + b"Content-Type: application/json\r\n" + rest)
    return client


def problem_of(client):
    """Status and problem document of what comes until the server closes."""
    with client:
        head, _, body = b"".join(iter(lambda: client.recv(1 << 16), b"")).partition(b"\r\n\r\n")
    assert b"application/problem+json" in head, head
    return int(head.split()[1]), json.loads(body)


def test_a_large_body_is_refused_by_its_length_and_by_its_bytes(server):
    body = b'{"keys":["' + b"0" * 5000 + b'"]}'
    answer = server.post("/v1/entries:find", body, headers={"Content-Type": "application/json"})
    assert answer.status == 413 and answer.json()["allowed"] == 4096 and answer.json()["met"] == len(body)
    chunked = b"Transfer-Encoding: chunked\r\n\r\n" + b"%x\r\n%b\r\n" % (len(body), body)
    status, problem = problem_of(begin(server, FIND, chunked))  # without the end: it is not waited for
    assert status == 413 and problem["allowed"] == 4096 and "Send less" in problem["next_step"]
    answer = server.put("/v1/packs/" + "0" * 32, b"0" * 100_001)
    assert answer.status == 413 and answer.json()["allowed"] == 100_000


@pytest.mark.parametrize("route", [FIND, f"PUT /v1/packs/{'ef' * 16}"])
def test_a_body_that_stalls_is_a_408_and_leaves_nothing(server, route):
    start = time.monotonic()
    status, problem = problem_of(begin(server, route, b"Content-Length: 2000\r\n\r\n123"))
    assert status == 408 and problem["allowed"] == 0.3 and 0.25 < time.monotonic() - start < 10
    while [each for each in (server.cache / "packs").rglob("*") if each.name.startswith("ef" * 16)]:
        assert time.monotonic() < start + 10
        time.sleep(0.02)


def test_requests_at_once_are_bounded(server):
    with serving_here(server.cache, limits=replace(LIMITS, stall_s=20, queue_s=0.2)) as server, ExitStack() as stack:

        def hold(route):
            stack.enter_context(begin(server, route, b"Content-Length: 20\r\n\r\n{"))
            time.sleep(0.1)

        hold(f"PUT /v1/packs/{'aa' * 16}")
        assert server.get("/v1/packs").status == 200
        for _ in range(LIMITS.max_requests - 1):
            hold(FIND)
        busy = server.get("/v1/packs")
        assert busy.status == 503 and busy.headers["retry-after"] == "1" and busy.json()["allowed"] == 4
        assert "requests were under way for 0.2 s" in busy.json()["detail"]
        assert server.get("/v1/healthz").status == 200
        stack.close()
        assert server.get("/v1/packs").status == 200
