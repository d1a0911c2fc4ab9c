"""Requests that ask for more than they may have, or that stall."""

from __future__ import annotations

import json
import socket
import time
from contextlib import ExitStack
from dataclasses import replace

import pytest
from helpers.remote_samples import fill
from helpers.serving import TOKEN, serving_here, wait_until

from latentcache.service.auth import SESSION_S, Access, Role
from latentcache.service.state import Limits


def test_without_the_right_token_nothing_is_read_or_written(served):
    given = [{}, *({"Authorization": f"Bearer {token}"} for token in ("x" * 32, TOKEN[:-1], TOKEN + "x", ""))]
    given += [{"Authorization": f"{scheme} {TOKEN}"} for scheme in ("Basic", "bearerx")]
    for path in ("status", "metrics", "packs", "manifests", "none"):
        for headers in given:
            answer = served.get(f"/v1/{path}", token=None, headers=headers)
            answer.problem(401)
            assert answer.headers["www-authenticate"] == "Bearer" and TOKEN not in answer.body.decode()
    before = sorted(map(str, served.cache.rglob("*")))
    writes = [("PUT", f"packs/{'4' * 32}"), ("PUT", "manifests/photos"), ("POST", "verify")]
    writes += [(method, "manifests/photos/unfinished") for method in ("PUT", "DELETE")]
    for method, path in writes:
        for token, status in ((TOKEN, 403), (None, 401), ("x" * 32, 401)):
            assert served.request(method, f"/v1/{path}", {"keys": []}, token=token).status == status, path
    assert sorted(map(str, served.cache.rglob("*"))) == before


@pytest.mark.parametrize("head", [f"PUT /v1/packs/{'a' * 32}", "GET /v1/healthz", "POST /v1/nothing", "PUT /login"])
def test_a_connection_ends_with_an_answer_that_did_not_wait_for_the_body(served, head):
    """A client without a token cannot send without end, whether or not the path needs one."""
    with socket.create_connection(served.address, timeout=5) as client:
        client.sendall(f"{head} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        assert b"connection: close" in client.recv(4096).lower()
        chunk, num_taken = b"10000\r\n" + bytes(1 << 16) + b"\r\n", 0
        with pytest.raises(OSError):  # long before this much was sent
            for _ in range(2000):
                client.sendall(chunk)
                num_taken += len(chunk)
    assert num_taken < 16 << 20, "what lies in buffers of the system"


def test_a_session_may_read_and_not_write_and_is_secure_behind_a_proxy_with_tls(served):
    """As the guide's text for nginx sends it. What the proxy says counts where it is on this machine."""

    def with_cookie(cookie, method="GET", path="/v1/packs", body=None):
        return served.request(method, path, body, token=None, headers={"Cookie": f"other=1; {cookie}"}).status

    for token, scheme in ((served.token, "https"), (served.write_token, "http")):
        proxy = {"X-Forwarded-Proto": scheme}
        answer = served.post("/login", f"token={token}".encode(), token=None, headers=proxy)
        assert (answer.status, answer.headers["location"]) == (303, "/")
        cookie, *flags = answer.headers["set-cookie"].split("; ")
        assert ("Secure" in flags) is (scheme == "https") and {"HttpOnly", f"Max-Age={SESSION_S}"} <= set(flags)
        assert token not in cookie and with_cookie(cookie) == 200
        assert with_cookie(cookie, "POST", "/v1/verify", {"keys": []}) == 403
        answer = served.post("/logout", b"", token=None, headers=proxy)
        assert (answer.status, answer.headers["location"]) == (303, "/login")
        assert "Max-Age=0" in answer.headers["set-cookie"]
    for wrong in ("0" * 64, f"99999999999.{'0' * 64}", "", ".", "²."):
        assert with_cookie(f"{cookie.partition('=')[0]}={wrong}") == 401


def test_a_session_ends(monkeypatch):
    access = Access(reading_token="r" * 16, is_open=False)
    session = access.session_of("r" * 16)
    end, _, signature = session.partition(".")
    assert 0 < int(end) - time.time() <= SESSION_S and access.role(None, session) is Role.READ
    later = f"{int(end) + 10**6}.{signature}"
    assert access.role(None, later) is Role.NOTHING, "its end is signed"
    for now, role in ((int(end) - 1, Role.READ), (int(end), Role.NOTHING)):
        monkeypatch.setattr(time, "time", lambda now=now: now)
        assert access.role(None, session) is role


PATHS = [
    *("packs/../CACHE.json", "packs/..%2FCACHE.json", "packs/%2e%2e%2f%2e%2e%2fCACHE.json", "packs/%2Fetc%2Fpasswd"),
    *("packs//etc/passwd", f"packs/{'a' * 31}", f"packs/{'a' * 31}%00", f"packs/{'A' * 32}", "packs/" + "%C3%BC" * 32),
    *("manifests/..%2FCACHE.json", "manifests/..", "manifests/.photos", "manifests/%2e%2e%5cphotos"),
    *("manifests/photos%00", "manifests/photos%0a", f"manifests/{'a' * 300}", "../CACHE.json"),
    "..%2f..%2fetc%2fpasswd",
]


def test_a_path_in_an_id_leads_nowhere(served):
    before = sorted(map(str, served.cache.rglob("*")))
    for path in PATHS:
        for method, token in (("GET", served.token), ("HEAD", served.token), ("PUT", served.write_token)):
            answer = served.request(method, f"/v1/{path}", b"", token=token)  # as it is: http.client cleans nothing up
            assert answer.status in (404, 405, 422), (method, path, answer)
            assert b"root:" not in answer.body and b'"schema"' not in answer.body
    assert sorted(map(str, served.cache.rglob("*"))) == before


# Limits: each is a clear answer

LIMITS = Limits(max_body_bytes=4096, max_upload_bytes=100_000, max_requests=4, max_uploads=1, stall_s=0.3)
FIND = "POST /v1/entries:find"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serving_here(fill(tmp_path_factory.mktemp("limits") / "cache", range(2)), limits=LIMITS) as server:
        yield server


def problem_of(client):
    """Status and problem document of what comes until the server closes."""
    with client:
        head, _, body = b"".join(iter(lambda: client.recv(1 << 16), b"")).partition(b"\r\n\r\n")
    assert b"application/problem+json" in head, head
    return int(head.split()[1]), json.loads(body)


def test_a_large_body_is_refused_by_its_length_and_by_its_bytes(server):
    body = b'{"keys":["' + b"0" * 5000 + b'"]}'
    document = server.post("/v1/entries:find", body, headers={"Content-Type": "application/json"}).problem(413)
    assert (document["allowed"], document["met"]) == (4096, len(body))
    chunked = b"Transfer-Encoding: chunked\r\n\r\n" + b"%x\r\n%b\r\n" % (len(body), body)
    status, problem = problem_of(server.begin(FIND, chunked))  # without the end: it is not waited for
    assert status == 413 and problem["allowed"] == 4096
    assert server.put("/v1/packs/" + "0" * 32, b"0" * 100_001).problem(413)["allowed"] == 100_000


@pytest.mark.parametrize("route", [FIND, f"PUT /v1/packs/{'ef' * 16}"])
def test_a_body_that_stalls_is_a_408_and_leaves_nothing(server, route):
    start = time.monotonic()
    status, problem = problem_of(server.begin(route, b"Content-Length: 2000\r\n\r\n123"))
    assert status == 408 and problem["allowed"] == 0.3 and 0.25 < time.monotonic() - start < 10
    wait_until(lambda: not list((server.cache / "packs").rglob(f"{'ef' * 16}*")))


def test_requests_at_once_are_bounded(server):
    with serving_here(server.cache, limits=replace(LIMITS, stall_s=20, queue_s=0.2)) as server, ExitStack() as stack:

        def hold(route):
            stack.enter_context(server.begin(route, b"Content-Length: 20\r\n\r\n{"))
            time.sleep(0.1)

        hold(f"PUT /v1/packs/{'aa' * 16}")
        assert server.get("/v1/packs").status == 200
        for _ in range(LIMITS.max_requests - 1):
            hold(FIND)
        busy = server.get("/v1/packs")
        assert busy.status == 503 and busy.headers["retry-after"] == "1" and busy.json()["allowed"] == 4
        assert "busy for 0.2 s" in busy.json()["detail"]
        assert server.get("/v1/healthz").status == 200
        stack.close()
        assert server.get("/v1/packs").status == 200
