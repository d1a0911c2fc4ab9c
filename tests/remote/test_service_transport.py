"""The connection to a service: retries, tokens, and what a service may answer."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest
from helpers.far_stores import served_store
from helpers.relay import Relay
from helpers.remote_samples import entries_of
from helpers.serving import RunningServer, serving_here

from latentcache.errors import LatentCacheError, ReadOnlyError, RemoteError, StoreError
from latentcache.remote.service import ServiceTransport
from latentcache.service.state import Limits


@pytest.mark.parametrize(
    "url",
    [
        "ftp://host",
        "http://",
        "http://user:secret@host:1",
        "http://host:port",
        "http://host/?a=1",
        "cache",
        "http:/host",
    ],
)
def test_what_is_no_url_of_a_service_is_refused(url: str) -> None:
    with pytest.raises(StoreError, match="is not the URL of a service") as caught:
        served_store(url)
    assert "secret" not in str(caught.value)


def test_a_server_that_is_not_there_is_tried_for_the_stated_time() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    store = served_store(url, retry_s=1.0)
    start = time.monotonic()
    with pytest.raises(RemoteError, match="does not answer") as caught:
        store.find(["0" * 64])
    assert 0.25 < time.monotonic() - start < 5
    assert caught.value.url == url and "latentcache serve" in caught.value.next_step
    assert "cache.retry_s is 1" in str(caught.value)


def test_a_connection_on_which_nothing_comes_is_given_up_for_another_one(relay: Relay, server: RunningServer) -> None:
    never, hung = threading.Event(), [True]
    relay.change = lambda path, status, data: (never.wait(20) and None) if hung and hung.pop() else data
    key = entries_of(0)[0].record.key
    start = time.monotonic()
    with served_store(relay.url, token=server.token, retry_s=12) as store:
        assert store.find([key]) == {key}
    never.set()
    assert relay.num_connections == 2 and 3 < time.monotonic() - start < 12


def test_a_refusal_says_its_next_step_once(served_cache: Path) -> None:
    limits = Limits(max_requests=0, queue_s=0.05)
    with serving_here(served_cache, limits) as server, served_store(server.url, retry_s=0.3) as store:
        with pytest.raises(RemoteError) as caught:
            store.find(["0" * 64])
        step = "Retry a little later"
        assert caught.value.status == 503 and str(caught.value).count(step) == 1
        assert caught.value.next_step.startswith(step) and "are allowed" in caught.value.detail


@pytest.mark.parametrize("token", [None, "wrong"])
def test_a_token_that_the_server_refuses_is_named_as_the_cause(server: RunningServer, token: str | None) -> None:
    with served_store(server.url, token=token) as store:
        with pytest.raises(RemoteError, match="LATENTCACHE_TOKEN") as caught:
            store.stats()
        assert caught.value.status == 401 and (token or "") in ("", "wrong")
        assert token is None or token not in str(caught.value)
        if token is None:
            assert store.read_only
            return
        for call in (lambda: store.read_only, store.writer):
            with pytest.raises(RemoteError, match="refuses this token"):
                call()


@pytest.mark.parametrize(
    ("url", "token", "warns"),
    [
        ("http://192.0.2.1:8765", "secret", True),
        ("http://cache-host", "secret", True),
        ("http://192.0.2.1:8765", None, False),
        ("https://192.0.2.1", "secret", False),
        ("http://127.0.0.1:8765", "secret", False),
        ("http://[::1]:8765", "secret", False),
        ("http://localhost:8765", "secret", False),
    ],
)
def test_a_token_that_anyone_on_the_way_can_read_is_warned_of(
    url: str, token: str | None, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    ServiceTransport(url, token=token).close()
    assert ("without encryption" in caplog.text) == warns and "secret" not in caplog.text


def test_a_reading_token_does_not_write(server: RunningServer) -> None:
    with served_store(server.url, token=server.token) as store:
        assert store.read_only
        for call in (store.writer, lambda: store.add(entries_of(900))):
            with pytest.raises(ReadOnlyError, match="writing token"):
                call()
    store = served_store(server.url, token=server.write_token, read_only=True)
    with store, pytest.raises(ReadOnlyError, match="read_only=True"):
        store.writer()


@pytest.mark.parametrize("answer", [b"", b"[]", b"<html>", b'{"found": 7}', b"[" * 100_000])
def test_strange_answers_are_typed_errors(relay: Relay, server: RunningServer, answer: bytes) -> None:
    relay.change = lambda path, status, data: answer.ljust(len(data))[: len(data)]
    with served_store(relay.url, token=server.token, retry_s=1) as store:
        for call in (
            lambda: store.find(["0" * 64]),
            store.stats,
            lambda: store.describe(entries_of(0)[0].record.key),
            lambda: store.record(entries_of(0)[0].record.key),
            lambda: store.rows([entries_of(0)[0].record.key]),
        ):
            with pytest.raises(LatentCacheError):
                call()
