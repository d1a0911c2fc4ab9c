"""Who waits for whom: pages do not delay trainers, strangers do not delay clients, and nothing given up is lost."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import ExitStack

import pytest
from helpers.serving import serving_here
from service_samples import fill

from latentcache.service import pack_routes
from latentcache.service.limits import Limits
from latentcache.service.manifest_views import ManifestViews

TOKEN = "a reading token of a test".replace(" ", "-")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return fill(tmp_path_factory.mktemp("threads") / "cache")


def in_background(stack, function, *arguments):
    thread = threading.Thread(target=function, args=arguments)
    thread.start()
    stack.callback(thread.join)


def test_searches_and_pages_do_not_delay_reads(cache, monkeypatch):
    go_on, started = threading.Event(), threading.Semaphore(0)

    def slow(*arguments):
        started.release()
        assert go_on.wait(30)
        return 0, []

    monkeypatch.setattr(ManifestViews, "page", slow)
    with serving_here(cache.path, Limits(num_threads=2)) as server, ExitStack() as stack:
        stack.callback(go_on.set)
        for _ in range(6):
            in_background(stack, server.get, "/v1/manifests/photos/samples?search=x")
        assert started.acquire(timeout=10) and started.acquire(timeout=10)
        assert server.post("/v1/entries:find", {"keys": cache.keys}).json() == {"found": cache.keys}
        assert not started.acquire(blocking=False), "two at once"
        go_on.set()


def test_a_thread_of_a_request_that_was_given_up_counts_on(cache, monkeypatch):
    go_on, num_running = threading.Event(), []

    def slow(store):
        num_running.append(1)
        assert go_on.wait(30)
        return pack_routes.PackList(packs=[])

    monkeypatch.setattr(pack_routes, "_packs", slow)
    with serving_here(cache.path, Limits(num_threads=2, answer_s=0.3)) as server, ExitStack() as stack:
        stack.callback(go_on.set)
        for _ in range(5):
            assert server.get("/v1/packs").status == 503
        assert len(num_running) == 2
        go_on.set()
        assert server.post("/v1/entries:find", {"keys": cache.keys}).status == 200


def test_a_file_that_was_opened_for_nobody_is_closed(cache, monkeypatch):
    opened, whole = [], pack_routes._open

    def slow(*arguments):
        opened.append(whole(*arguments))
        time.sleep(0.6)
        return opened[-1]

    [pack, *_] = [path.stem for path in cache.path.glob("packs/*/*.safetensors")]
    monkeypatch.setattr(pack_routes, "_open", slow)
    with serving_here(cache.path, Limits(answer_s=0.3)) as server:
        assert server.get(f"/v1/packs/{pack}").status == 503
        [fd] = opened
        deadline = time.monotonic() + 10
        while os.path.lexists(f"/proc/self/fd/{fd}") and pack in os.readlink(f"/proc/self/fd/{fd}"):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_logins_that_are_half_sent_delay_no_client(cache):
    limits = Limits(max_requests=4, max_strangers=3, login_s=1.5)
    head = b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 20\r\n\r\ntok"
    with serving_here(cache.path, limits, token=TOKEN) as server, ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(server.address, timeout=20)) for _ in range(8)]
        start = time.monotonic()
        for client in clients:
            client.sendall(head)
        time.sleep(0.2)
        assert server.get("/v1/packs").status == 200
        busy = server.get("/login", token=None)
        assert busy.status == 503 and "without a token" in busy.json()["detail"]
        for client in clients:
            assert client.recv(100).startswith(b"HTTP/1.1 503")
        assert 1.0 < time.monotonic() - start < 10
        assert server.post("/login", b"token=" + b"x" * 9000, token=None).status == 413
        assert server.post("/login", f"token={TOKEN}".encode(), token=None).status == 303


def test_a_fault_is_counted_as_a_500(cache, monkeypatch):
    monkeypatch.setattr(pack_routes, "_packs", lambda context: 1 / 0)
    with serving_here(cache.path, Limits()) as server:
        assert server.get("/v1/packs").status == 500
        counted = server.get("/v1/metrics").body.decode()
        assert 'latentcache_requests_total{method="GET",route="/v1/packs",status="500"} 1.0' in counted
