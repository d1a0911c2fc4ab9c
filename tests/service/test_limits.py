"""Each limit is a clear answer, and a client that takes its time takes it from nobody else."""

from __future__ import annotations

import json
import resource
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace

import pytest
from helpers.serving import serving_here
from service_samples import entry, fill

from latentcache.service import pack_routes
from latentcache.service.limits import Limits
from latentcache.store import DiskStore

LIMITS = Limits(
    max_body_bytes=4096,
    max_upload_bytes=100_000,
    max_keys=20,
    max_requests=4,
    max_uploads=1,
    answer_s=2.0,
    stall_s=1.0,
    header_s=1.0,
    idle_s=3.0,
)


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


def test_many_keys_are_refused(server):
    answer = server.post("/v1/entries:find", {"keys": ["0" * 64] * 21})
    assert answer.status == 413 and (answer.json()["met"], answer.json()["allowed"]) == (21, 20)
    assert "several parts" in answer.json()["next_step"]


def test_a_body_that_stalls_is_a_408(server):
    start = time.monotonic()
    status, problem = problem_in(raw(server, POST + b"Content-Length: 20\r\n\r\n{"))
    assert status == 408 and problem["allowed"] == 1.0 and 0.9 < time.monotonic() - start < 10


def test_a_body_that_drips_is_a_408(server):
    """A byte now and then is no stall, and would hold a place for ever."""
    head = f"PUT /v1/packs/{'ee' * 16} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {server.write_token}\r\n"
    with socket.create_connection(server.address, timeout=20) as client:
        client.sendall(head.encode() + b"Content-Length: 50000\r\n\r\n")
        client.settimeout(0.1)
        start, answer = time.monotonic(), b""
        while not answer and time.monotonic() - start < 10:
            client.sendall(b"1")
            with suppress(TimeoutError):
                answer = client.recv(1 << 16)
        client.settimeout(10)
        while part := client.recv(1 << 16):  # the body may come after the head; then the server closes
            answer += part
        status, problem = problem_in(answer)
        assert status == 408 and "bytes per second" in problem["allowed"]


def test_an_upload_that_stalls_leaves_nothing(server, cache):
    path = cache.path / "packs" / "ef" / f"{'ef' * 16}.safetensors"
    head = f"PUT /v1/packs/{'ef' * 16} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {server.write_token}\r\n"
    status, _ = problem_in(raw(server, head.encode() + b"Content-Length: 2000\r\n\r\n123"))
    assert status == 408
    deadline = time.monotonic() + 10
    while list(path.parent.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("slow", [b"", b"G", b"GET /v1/packs HTTP/1.1\r\nHost: localhost\r\n"])
def test_headers_that_come_slowly_are_a_408(server, slow):
    """A byte now and then does not help: the time counts from the first byte."""
    with socket.create_connection(server.address, timeout=20) as client:
        client.sendall(slow)
        start, answer = time.monotonic(), b""
        client.settimeout(0.3)
        while time.monotonic() - start < 15:
            try:
                part = client.recv(1 << 16)
                answer += part
                if not part:
                    break
            except TimeoutError:
                if slow:
                    client.sendall(b"X")
            except ConnectionError:
                break
        taken = time.monotonic() - start
    if slow:
        assert problem_in(answer)[0] == 408 and taken < 10
    else:
        assert answer == b"" and 2.5 < taken < 10  # nothing came at all: closed without a word


OTHER = "192.0.2.7"
"""The address of another machine: a proxy on this one says whose request it is."""


def holding(stack, server, *, method="POST", path="/v1/entries:find", address="127.0.0.1"):
    """Begin a request whose body does not come, and return its connection."""
    client = stack.enter_context(socket.create_connection(server.address, timeout=20))
    head = f"Host: localhost\r\nAuthorization: Bearer {server.write_token}\r\nX-Forwarded-For: {address}\r\n"
    client.sendall(f"{method} {path} HTTP/1.1\r\n{head}Content-Length: 20\r\n\r\n{{".encode())
    time.sleep(0.1)
    return client


def test_requests_and_uploads_at_once_are_bounded(cache):
    with serving_here(cache.path, replace(LIMITS, stall_s=20, queue_s=0.2)) as server:
        with ExitStack() as stack:
            holding(stack, server, method="PUT", path=f"/v1/packs/{'aa' * 16}")
            second = server.put("/v1/packs/" + "ab" * 16, b"123")
            assert second.status == 503 and "2 uploads at once for 0.2 s" in second.json()["detail"]
            holding(stack, server)
            for _ in range(2):
                holding(stack, server, address=OTHER)
            busy = server.get("/v1/packs", headers={"X-Forwarded-For": "192.0.2.8"})
            assert busy.status == 503 and busy.headers["retry-after"] == "1" and busy.json()["allowed"] == 4
            assert server.get("/v1/healthz").status == 200
        assert server.get("/v1/packs").status == 200


def test_a_request_waits_its_turn(cache):
    """First come, first served: nobody is refused where others soon end."""
    with (
        serving_here(cache.path, replace(LIMITS, stall_s=20, queue_s=20)) as server,
        ThreadPoolExecutor(3) as threads,
        ExitStack() as stack,
    ):
        addresses = ["127.0.0.1", OTHER] * (LIMITS.max_requests // 2)
        holders = [holding(stack, server, address=address) for address in addresses]
        waiting = [threads.submit(server.get, "/v1/packs") for _ in range(3)]
        time.sleep(0.5)
        assert not any(each.done() for each in waiting)
        holders[0].close()
        assert [each.result(10).status for each in waiting] == [200] * 3


def test_one_client_that_takes_too_much_gets_a_429(cache):
    with serving_here(cache.path, replace(LIMITS, stall_s=20, max_client_requests=2)) as server, ExitStack() as stack:
        for _ in range(2):
            holding(stack, server)
        answer = server.get("/v1/packs")
        assert answer.status == 429 and answer.headers["retry-after"] == "1"
        assert answer.json()["detail"].startswith("3 requests of 127.0.0.1 at once, and 2 are allowed")
        assert server.get("/v1/healthz").status == 200
        assert server.get("/v1/packs", headers={"X-Forwarded-For": OTHER}).status == 200


def test_one_client_leaves_room_for_the_others(cache):
    """Its slow requests wait for each other: what it has too many of is a 429, and others are answered at once."""
    limits = replace(LIMITS, stall_s=20, answer_s=20, queue_s=1.0)
    with serving_here(cache.path, limits) as server, ExitStack() as stack:
        holders = [holding(stack, server) for _ in range(LIMITS.max_requests)]
        found = server.post("/v1/entries:find", {"keys": []}, headers={"X-Forwarded-For": OTHER})
        assert found.status == 200
        busy = server.get("/v1/packs")
        assert busy.status == 429 and busy.json()["allowed"] == 2 and busy.headers["retry-after"] == "1"
        assert "requests of 127.0.0.1 at once for 1 s" in busy.json()["detail"]
        holders[0].close()
        assert server.get("/v1/packs").status == 200


def test_a_store_that_does_not_answer_is_a_503(server, monkeypatch):
    wait = threading.Event()
    monkeypatch.setattr(pack_routes, "_packs", lambda context: wait.wait(20))
    start = time.monotonic()
    try:
        answer = server.get("/v1/packs")
        assert answer.status == 503 and answer.json()["allowed"] == 2.0 and answer.headers["retry-after"]
        assert time.monotonic() - start < 10
        assert server.post("/v1/entries:find", {"keys": []}).status == 200  # other threads go on
    finally:
        wait.set()


def test_a_slow_reader_is_dropped_and_delays_nobody(tmp_path):
    entries = [entry(1000 + number, length=200_000) for number in range(6)]  # 2.4 MB each
    with DiskStore(tmp_path / "cache") as store:
        store.add(entries)
        [pack] = store.directory.pack_sizes()
    with (
        serving_here(tmp_path / "cache", Limits(stall_s=1.0)) as server,
        socket.socket() as slow,
    ):
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.settimeout(20)
        slow.connect(server.address)
        slow.sendall(f"GET /v1/packs/{pack} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        start = time.monotonic()
        assert server.get(f"/v1/packs/{pack}").status == 200
        assert time.monotonic() - start < 10
        time.sleep(2.0)
        received = 0
        with pytest.raises(ConnectionError):  # reset: it was not all
            while part := slow.recv(1 << 20):
                received += len(part)
            raise ConnectionError("closed")
        assert received < sum(each.num_bytes for each in entries)


def test_a_thousand_idle_connections_hurt_nobody(served):
    """Also where the server started with the usual limit of 1,024 open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    try:
        with ExitStack() as stack:
            for number in range(1100):
                client = stack.enter_context(socket.create_connection(served.server.address, timeout=20))
                if number % 3 == 0:
                    client.sendall(b"GET /v1/st")
            start = time.monotonic()
            for _ in range(5):
                assert served.server.post("/v1/entries:find", {"keys": served.keys}).status == 200
            assert time.monotonic() - start < 10
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
