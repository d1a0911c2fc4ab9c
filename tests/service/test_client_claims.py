"""Which client makes which entries: claims of clients, of other processes, and of clients that are gone."""

from __future__ import annotations

import subprocess
import sys

import pytest
from helpers.serving import serving_here
from service_samples import entry, fill

from latentcache.service import client_claims
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
