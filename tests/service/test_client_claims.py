"""Which client makes which entries: claims of clients, of other processes, and of clients that are gone."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.serving import serving_here
from service_samples import entry, fill

from latentcache.service import client_claims, context
from latentcache.service.client_claims import ClientClaims
from latentcache.service.limits import Limits

KEYS = [entry(number).record.key for number in range(900, 910)]
FIRST, SECOND = "1" * 32, "2" * 32
ELSEWHERE = """
import sys
from pathlib import Path
from latentcache.utils.locks import Claims
print(*Claims(Path(sys.argv[1])).take(sys.argv[2:]))
"""


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def claims(tmp_path, clock):
    claims = ClientClaims(tmp_path / "claims.lock", clock)
    yield claims
    claims.close()


def take_elsewhere(path, keys):
    done = subprocess.run([sys.executable, "-c", ELSEWHERE, path, *keys], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_one_client_has_a_key(claims):
    assert claims.take(FIRST, KEYS[:6], 60) == set(KEYS[:6])
    assert claims.take(SECOND, KEYS, 60) == set(KEYS[6:])
    assert claims.take(FIRST, KEYS, 60) == set(KEYS[:6]), "a client keeps what it has"
    claims.release(FIRST, KEYS[:2])
    claims.release(FIRST, KEYS[6:])  # which it never had
    assert claims.take(SECOND, KEYS, 60) == {*KEYS[:2], *KEYS[6:]}
    claims.release(FIRST, None)
    claims.release("3" * 32, None)
    assert claims.take(SECOND, KEYS, 60) == set(KEYS)


def test_the_claims_of_a_client_that_is_gone_end(claims, clock):
    claims.take(FIRST, KEYS[:2], 60)
    clock.now = 50
    claims.take(FIRST, KEYS[2:4], 60)  # it is there, so all of its claims last
    clock.now = 109
    assert claims.take(SECOND, KEYS, 60) == set(KEYS[4:])
    clock.now = 110
    assert claims.take(SECOND, KEYS, 60) == set(KEYS)
    assert claims.take(FIRST, KEYS, 60) == set()


def test_the_claims_of_a_client_that_is_gone_end_for_other_processes_too(tmp_path, monkeypatch):
    """Also where no client asks for anything any more."""
    monkeypatch.setattr(context, "_CLAIMS_S", 0.1)
    cache = fill(tmp_path / "cache")
    with serving_here(cache.path, Limits()) as server:
        for ttl_s, free in ((60, set()), (1, set(KEYS))):
            claim = {"owner": FIRST, "keys": KEYS, "ttl_s": ttl_s}
            assert server.post("/v1/claims", claim, token=server.write_token).json()["mine"] == KEYS
            until = time.monotonic() + 20
            while (found := take_elsewhere(cache.path / "claims.lock", KEYS)) != free and time.monotonic() < until:
                time.sleep(0.1)
            assert found == free


def test_claims_are_those_of_the_process_too(claims, tmp_path):
    """A precache on the server's machine, or another server of the cache, makes what no client makes."""
    claims.take(FIRST, KEYS[:3], 60)
    claims.take(SECOND, KEYS[3:5], 60)
    assert take_elsewhere(tmp_path / "claims.lock", KEYS) == set(KEYS[5:])
    claims.release(FIRST, KEYS[:1])
    assert take_elsewhere(tmp_path / "claims.lock", KEYS) == {KEYS[0], *KEYS[5:]}
    claims.close()
    assert take_elsewhere(tmp_path / "claims.lock", KEYS) == set(KEYS)


def test_too_many_claims_are_nobodys(claims, monkeypatch):
    monkeypatch.setattr(client_claims, "MAX_CLAIMS", 4)
    assert claims.take(FIRST, KEYS[:4], 60) == set(KEYS[:4])
    assert claims.take(SECOND, KEYS, 60) == set(KEYS[4:]) == claims.take(FIRST, KEYS[4:], 60)


def test_a_client_that_asks_for_too_many_keeps_what_it_has(claims, clock, monkeypatch):
    monkeypatch.setattr(client_claims, "MAX_CLAIMS", 4)
    claims.take(FIRST, KEYS[:4], 60)
    clock.now = 50
    assert claims.take(FIRST, KEYS, 60) == set(KEYS)
    clock.now = 100
    assert claims.take(SECOND, KEYS, 60) == set(KEYS[4:])
    claims.release(FIRST, KEYS[:2])
    assert claims.take(SECOND, KEYS, 60) == {*KEYS[:2], *KEYS[4:]}
    assert claims.take(FIRST, KEYS[:2], 60) == set(), "what fits is claimed"


def test_claims_that_take_long_delay_no_reader(tmp_path, monkeypatch):
    cache, go_on = fill(tmp_path / "cache"), threading.Event()
    monkeypatch.setattr(ClientClaims, "take", lambda self, *arguments: go_on.wait(30) and set())
    with serving_here(cache.path, Limits(num_threads=2)) as server, ThreadPoolExecutor(4) as threads:
        claim = {"owner": FIRST, "keys": KEYS}
        waiting = [threads.submit(server.post, "/v1/claims", claim, token=server.write_token) for _ in range(4)]
        try:
            time.sleep(0.5)
            assert server.post("/v1/entries:read", {"keys": cache.keys}).status == 200
            assert not any(each.done() for each in waiting)
        finally:
            go_on.set()
        assert [each.result(20).status for each in waiting] == [200] * 4


def test_claims_over_http(tmp_path):
    cache = fill(tmp_path / "cache")
    with serving_here(cache.path, Limits(max_keys=20), token="a-token-that-may-read") as server:

        def claim(owner, keys, **more):
            return server.post("/v1/claims", {"owner": owner, "keys": keys, **more}, token=server.write_token)

        assert claim(FIRST, KEYS[:2] * 2, ttl_s=60).json() == {"mine": KEYS[:2], "others": []}
        assert claim(SECOND, KEYS[:3]).json() == {"mine": KEYS[2:3], "others": KEYS[:2]}
        for keys in ([KEYS[0]], None):
            released = {"owner": FIRST, "keys": keys}
            assert server.post("/v1/claims:release", released, token=server.write_token).status == 204
        assert claim(SECOND, KEYS[:3]).json() == {"mine": KEYS[:3], "others": []}
        for wrong in ({"ttl_s": 0}, {"ttl_s": 1e9}, {"ttl_s": "nan"}, {"owner": "x"}, {"keys": ["x"]}, {"more": 1}):
            assert claim(**{"owner": FIRST, "keys": KEYS[:1], **wrong}).status == 422
        assert claim(FIRST, KEYS * 3).status == 413
        for path in ("/v1/claims", "/v1/claims:release"):
            assert server.post(path, {"owner": FIRST, "keys": KEYS}).status == 403
