"""Requests of somebody who wants more than he may have."""

from __future__ import annotations

import http.client
import socket
import time

import pytest
from helpers.serving import serving_here
from service_samples import fill

from latentcache.service.auth import SESSION_S, Access, Role
from latentcache.service.state import Limits

READS = ["status", "metrics", "packs", "manifests", "none"]


@pytest.mark.parametrize("path", READS)
def test_without_the_token_nothing_is_read(served, path):
    for token in (None, "x" * 32, served.server.token[:-1], served.server.token + "x", ""):
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        answer = served.server.get(f"/v1/{path}", token=None, headers=headers)
        assert answer.status == 401 and answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["kind"] == "RequestRefused" and served.server.token not in answer.body.decode()
    for scheme in ("Basic", "Token", "bearerx"):
        answer = served.server.get(
            f"/v1/{path}", token=None, headers={"Authorization": f"{scheme} {served.server.token}"}
        )
        assert answer.status == 401


@pytest.mark.parametrize(
    "head",
    [
        f"PUT /v1/packs/{'a' * 32}",  # no token: 401
        "GET /v1/healthz",  # needs none
        "POST /v1/nothing",
        "PUT /login",
    ],
)
def test_a_connection_ends_with_an_answer_that_did_not_wait_for_the_body(served, head):
    """A stranger cannot send for ever: neither much at once, nor a little now and then."""
    with socket.create_connection(served.server.address, timeout=5) as client:
        client.sendall(f"{head} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        assert b"connection: close" in client.recv(4096).lower()
        chunk, num_taken = b"10000\r\n" + bytes(1 << 16) + b"\r\n", 0
        with pytest.raises(OSError):  # long before this much was sent
            for _ in range(2000):
                client.sendall(chunk)
                num_taken += len(chunk)
    assert num_taken < 16 << 20, "what lies in buffers of the system"


def cookie_name(served):
    return f"latentcache_session_{served.server.address[1]}"


def test_a_session_may_read_and_not_write(served):
    access = Access(reading_token=served.server.token, writing_token=served.server.write_token, is_open=False)
    for token in (served.server.token, served.server.write_token):
        session = access.session_of(token)
        assert session is not None and token not in session
        cookie = {"Cookie": f"other=1; {cookie_name(served)}={session}"}
        assert served.server.get("/v1/packs", token=None, headers=cookie).status == 200
        answer = served.server.request("POST", "/v1/verify", {"keys": []}, token=None, headers=cookie)
        assert answer.status == 403
    assert access.session_of("x" * 32) is None
    for wrong in ("0" * 64, f"99999999999.{'0' * 64}", "", ".", "²."):
        cookie = {"Cookie": f"{cookie_name(served)}={wrong}"}
        assert served.server.get("/v1/packs", token=None, headers=cookie).status == 401


def test_a_session_ends(monkeypatch):
    access = Access(reading_token="r" * 16, is_open=False)
    session = access.session_of("r" * 16)
    end, _, signature = session.partition(".")
    assert 0 < int(end) - time.time() <= SESSION_S and access.role(None, session) is Role.READ
    later = f"{int(end) + 10**6}.{signature}"
    assert access.role(None, later) is Role.NOTHING, "its end is signed"
    monkeypatch.setattr(time, "time", lambda: int(end) - 1)
    assert access.role(None, session) is Role.READ
    monkeypatch.setattr(time, "time", lambda: int(end))
    assert access.role(None, session) is Role.NOTHING


def test_the_cookie_is_secure_behind_a_proxy_with_tls(tmp_path):
    """As the guide's text for nginx sends it. What the proxy says counts where it is on this machine."""
    fill(tmp_path / "cache")
    with serving_here(tmp_path / "cache", Limits(), token="r" * 16) as server:
        for path, location in (("/login", "/"), ("/logout", "/login")):
            for scheme in ("https", "http"):
                answer = server.post(path, b"token=rrrrrrrrrrrrrrrr", token=None, headers={"X-Forwarded-Proto": scheme})
                assert (answer.status, answer.headers["location"]) == (303, location)
                flags = answer.headers["set-cookie"].split("; ")
                assert ("Secure" in flags) is (scheme == "https") and "HttpOnly" in flags
                assert f"Max-Age={SESSION_S if path == '/login' else 0}" in flags


PATHS = [
    *("packs/../CACHE.json", "packs/..%2FCACHE.json", "packs/%2e%2e%2f%2e%2e%2fCACHE.json", "packs/%2Fetc%2Fpasswd"),
    *("packs//etc/passwd", f"packs/{'a' * 31}", f"packs/{'a' * 31}%00", f"packs/{'A' * 32}", "packs/" + "%C3%BC" * 32),
    *("manifests/..%2FCACHE.json", "manifests/..", "manifests/.photos", "manifests/%2e%2e%5cphotos"),
    *(
        "manifests/photos%00",
        "manifests/photos%0a",
        f"manifests/{'a' * 300}",
        "../CACHE.json",
        "..%2f..%2fetc%2fpasswd",
    ),
]


@pytest.mark.parametrize("path", PATHS)
def test_a_path_in_an_id_leads_nowhere(served, path):
    before = sorted(map(str, served.path.rglob("*")))
    for method, token in (
        ("GET", served.server.token),
        ("HEAD", served.server.token),
        ("PUT", served.server.write_token),
    ):
        connection = http.client.HTTPConnection(*served.server.address, timeout=20)
        # As it is: neither client nor library may clean it up.
        connection.putrequest(method, f"/v1/{path}", skip_accept_encoding=True)
        connection.putheader("Authorization", f"Bearer {token}")
        connection.putheader("Content-Length", "0")
        connection.endheaders()
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        assert answer.status in (404, 405, 422), (method, answer.status, body)
        assert b"root:" not in body and b'"schema"' not in body
    assert sorted(map(str, served.path.rglob("*"))) == before
