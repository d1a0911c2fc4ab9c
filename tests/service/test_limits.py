"""Each limit is a clear answer, and a client that takes its time takes it from nobody else."""

from __future__ import annotations

import json
import socket
import time
from contextlib import ExitStack
from dataclasses import replace

import pytest
from helpers.serving import serving_here
from service_samples import fill

from latentcache.service.state import Limits

LIMITS = Limits(max_body_bytes=4096, max_upload_bytes=100_000, max_requests=4, max_uploads=1, stall_s=1.0)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return fill(tmp_path_factory.mktemp("limits") / "cache")


@pytest.fixture(scope="module")
def server(cache):
    with serving_here(cache.path, LIMITS) as server:
        yield server


def raw(server, data, *, then=b"", wait=0.0):
    """Send bytes, and return what comes until the server closes."""
    with socket.create_connection(server.address, timeout=20) as client:
        client.sendall(data)
        time.sleep(wait)
        if then:
            client.sendall(then)
        return read(client)


def read(client):
    answer = b""
    while part := client.recv(1 << 16):
        answer += part
    return answer


def problem_in(answer):
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"application/problem+json" in head, answer
    return int(head.split()[1]), json.loads(body)


POST = b"POST /v1/entries:find HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def test_a_large_body_is_refused_by_its_length_and_by_its_bytes(server):
    body = b'{"keys":["' + b"0" * 5000 + b'"]}'
    answer = server.post("/v1/entries:find", body, headers={"Content-Type": "application/json"})
    assert answer.status == 413 and answer.json()["allowed"] == 4096 and answer.json()["met"] == len(body)
    chunked = b"Transfer-Encoding: chunked\r\n\r\n" + b"%x\r\n%b\r\n" % (len(body), body)
    status, problem = problem_in(raw(server, POST + chunked))  # without the end: it is not waited for
    assert status == 413 and problem["allowed"] == 4096 and "Send less" in problem["next_step"]
    answer = server.put("/v1/packs/" + "0" * 32, b"0" * 100_001)
    assert answer.status == 413 and answer.json()["allowed"] == 100_000


def test_a_body_that_stalls_is_a_408(server):
    start = time.monotonic()
    status, problem = problem_in(raw(server, POST + b"Content-Length: 20\r\n\r\n{"))
    assert status == 408 and problem["allowed"] == 1.0 and 0.9 < time.monotonic() - start < 10


def test_an_upload_that_stalls_leaves_nothing(server, cache):
    path = cache.path / "packs" / "ef" / f"{'ef' * 16}.safetensors"
    head = f"PUT /v1/packs/{'ef' * 16} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {server.write_token}\r\n"
    status, _ = problem_in(raw(server, head.encode() + b"Content-Length: 2000\r\n\r\n123"))
    assert status == 408
    deadline = time.monotonic() + 10
    while list(path.parent.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def holding(stack, server, *, method="POST", path="/v1/entries:find"):
    """Begin a request whose body does not come, and return its connection."""
    client = stack.enter_context(socket.create_connection(server.address, timeout=20))
    head = f"Host: localhost\r\nAuthorization: Bearer {server.write_token}\r\n"
    client.sendall(f"{method} {path} HTTP/1.1\r\n{head}Content-Length: 20\r\n\r\n{{".encode())
    time.sleep(0.1)
    return client


def test_requests_at_once_are_bounded(cache):
    with serving_here(cache.path, replace(LIMITS, stall_s=20, queue_s=0.2)) as server:
        with ExitStack() as stack:
            holding(stack, server, method="PUT", path=f"/v1/packs/{'aa' * 16}")
            assert server.get("/v1/packs").status == 200
            for _ in range(LIMITS.max_requests - 1):
                holding(stack, server)
            busy = server.get("/v1/packs")
            assert busy.status == 503 and busy.headers["retry-after"] == "1" and busy.json()["allowed"] == 4
            assert "requests were under way for 0.2 s" in busy.json()["detail"]
            assert server.get("/v1/healthz").status == 200
        assert server.get("/v1/packs").status == 200
