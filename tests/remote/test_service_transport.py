"""The connection to a service: retries, tokens, and what a service may answer."""

from __future__ import annotations

import threading
import time

import pytest
import urllib3
from helpers.relay import Relay
from helpers.remote_samples import entries_of, key_of_image
from helpers.serving import TOKEN, RunningServer, served_store

from latentcache.errors import ReadOnlyError, RemoteError, StorageFullError, StoreError
from latentcache.remote.service import ServiceTransport

ABSENT = "0" * 64


@pytest.mark.parametrize(
    "url",
    ["ftp://host", "http://", "http://user:secret@host:1", "http://host:port", "http://host/?a=1", "cache"],
)
def test_what_is_no_url_of_a_service_is_refused(url: str) -> None:
    with pytest.raises(StoreError, match="is not the URL of a service") as caught:
        served_store(url)
    assert "secret" not in str(caught.value)


def test_a_server_that_is_not_there_is_tried_for_the_stated_time() -> None:
    store, start = served_store("http://127.0.0.1:9", retry_s=0.5), time.monotonic()
    with pytest.raises(RemoteError, match="does not respond") as caught:
        store.find([ABSENT])
    assert 0.25 < time.monotonic() - start < 5
    assert caught.value.url == "http://127.0.0.1:9" and "latentcache serve" in caught.value.next_step
    assert "cache.retry_s is 0.5" in str(caught.value)


def test_a_connection_on_which_nothing_comes_is_given_up_for_another_one(relay: Relay) -> None:
    never, hung = threading.Event(), [True]
    relay.change = lambda path, status, data: (never.wait(20) and None) if hung and hung.pop() else data
    start = time.monotonic()
    with served_store(relay.url, token=TOKEN, retry_s=4) as store:
        assert store.find([key_of_image(0)]) == {key_of_image(0)}
    never.set()
    assert len(relay.requests) == 2 and 1 < time.monotonic() - start < 12


@pytest.mark.parametrize("token", [None, "a-wrong-token"])
def test_a_token_that_the_server_refuses_is_named_as_the_cause(server: RunningServer, token: str | None) -> None:
    with served_store(server.url, token=token) as store:
        with pytest.raises(RemoteError, match="LATENTCACHE_TOKEN") as caught:
            store.stats()
        assert caught.value.status == 401 and "a-wrong-token" not in str(caught.value)
        if token is None:
            assert store.read_only
            return
        for call in (lambda: store.read_only, store.writer):
            with pytest.raises(RemoteError, match="refuses this token"):
                call()


@pytest.mark.parametrize("url", ["http://cache-host:8765", "https://192.0.2.1", "http://[::1]:8765"])
def test_a_token_that_anyone_on_the_way_can_read_is_warned_of(url: str, caplog: pytest.LogCaptureFixture) -> None:
    ServiceTransport(url, token="secret").close()
    assert ("without encryption" in caplog.text) == ("cache-host" in url) and "secret" not in caplog.text


def test_a_reading_token_does_not_write(server: RunningServer) -> None:
    with served_store(server.url, token=TOKEN) as store:
        assert store.read_only
        for call in (store.writer, lambda: store.add(entries_of(900))):
            with pytest.raises(ReadOnlyError, match="writing token"):
                call()
    store = served_store(server.url, token=server.write_token, read_only=True)
    with store, pytest.raises(ReadOnlyError, match="read_only=True"):
        store.writer()


ENDLESS = b'{"packs": [{"id": "%b", "num_bytes": 1e999}]}' % ABSENT[:32].encode()


@pytest.mark.parametrize("answer", [b"<html>", b'{"found": 7}', b"[" * 100_000, ENDLESS], ids=lambda _: "")
def test_strange_answers_are_typed_errors(relay: Relay, answer: bytes) -> None:
    relay.change = lambda path, status, data: answer.ljust(len(data))[: len(data)]
    with served_store(relay.url, token=TOKEN, retry_s=1) as store:
        for call in (lambda: store.find([ABSENT]), store.stats):
            with pytest.raises(RemoteError, match="is not what was requested"):
                call()
        full = urllib3.HTTPResponse(b'{"kind": "StorageFullError", "needed_bytes": "many"}', status=507)
        with pytest.raises(StorageFullError):
            store.transport._refused(full)
