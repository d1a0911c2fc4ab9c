"""The server: who may reach it, that it does what its OpenAPI document says, and how it ends."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest
import schemathesis
from helpers.remote_samples import entries_of, fill
from helpers.serving import LOOPBACK, serving_here
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from latentcache.service.server import Address, serve
from latentcache.service.state import ServiceSettings
from latentcache.store import DiskStore


@pytest.fixture
def cache(tmp_path):
    DiskStore(tmp_path / "cache").close()
    return tmp_path / "cache"


def test_it_refuses_what_it_cannot_serve(run, tmp_path, cache):
    def refused(*arguments):
        code, _, err = run("serve", *arguments)
        assert code == 2
        return err

    assert "no token protects the cache" in refused(cache, "--host", "0.0.0.0")
    assert "there is no cache here" in refused("--cache.path", tmp_path / "none")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "give another --port" in refused(cache, "--port", taken.getsockname()[1])
    token = tmp_path / "token"
    token.write_text("short\n")
    err = refused(cache, "--token-file", token)
    assert "does not hold a token" in err and "short" not in err
    token.write_text("a" * 32)
    assert "are equal" in refused(cache, "--token-file", token, "--write-token-file", token)


def test_a_signal_lets_requests_finish(cache):
    def client(url):
        parts = urlsplit(url)
        with socket.create_connection((parts.hostname, parts.port)) as slow:
            head = b"POST /v1/entries:find HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            slow.sendall(head + b"Content-Length: 11\r\n\r\n{")
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)
            slow.sendall(b'"keys":[]}')
            return b"".join(iter(lambda: slow.recv(1 << 16), b""))

    with ThreadPoolExecutor(1) as threads:
        requests = []
        code = serve(ServiceSettings(cache=cache), LOOPBACK, lambda url: requests.append(threads.submit(client, url)))
        answer = requests[0].result()
    assert code == signal.SIGTERM
    assert answer.startswith(b"HTTP/1.1 200 OK") and answer.endswith(b'{"found":[]}')


def test_a_signal_at_once_ends_it(cache):
    """A process that waits for its first line may stop it before it has begun to serve."""
    code = serve(ServiceSettings(cache=cache), LOOPBACK, lambda url: os.kill(os.getpid(), signal.SIGTERM))
    assert code == signal.SIGTERM


def test_an_open_server_answers_to_its_own_names_only(cache):
    with serving_here(cache, writes=False) as server:
        port = server.address[1]
        for host in ("localhost", f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}", "LOCALHOST."):
            assert server.get("/v1/packs", headers={"Host": host}).status == 200, host
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "localhost.evil.example", ""):
            server.get("/v1/packs", headers={"Host": host}).problem(421)
        assert server.get("/v1/healthz", headers={"Host": "evil.example"}).status == 421
        own = f"http://127.0.0.1:{port}"
        assert server.get("/v1/packs", headers={"Origin": own}).status == 200
        for origin in ("http://evil.example", "null", own + "0"):
            assert server.get("/v1/packs", headers={"Origin": origin}).status == 403, origin
        answer = server.request("POST", "/v1/verify", {"keys": []})
        assert answer.status == 403 and "--write-token-file" in answer.json()["next_step"], "nobody has one"
        # What another process adds is found.
        find = {"keys": [entry.record.key for entry in entries_of(1)]}
        assert server.post("/v1/entries:find", find).json() == {"found": []}
        with DiskStore(cache) as store:
            store.add(entries_of(1))
        assert server.post("/v1/entries:find", find).json() == {"found": find["keys"]}


def test_tls(tmp_path, cache):
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", *subject]
    subprocess.run([*command, "-keyout", str(key), "-out", str(certificate)], capture_output=True, check=True)
    with serving_here(cache, address=Address(port=0, certfile=certificate, keyfile=key)) as server:
        assert server.url.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cafile=str(certificate))
        with urllib.request.urlopen(f"{server.url}/v1/packs", context=context, timeout=20) as answer:
            assert answer.status == 200


def test_every_route_does_what_it_says(tmp_path):
    """schemathesis makes requests of it, and no answer is a 500."""
    checks = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
    seen = set()
    with serving_here(fill(tmp_path / "cache", range(12))) as server:
        description = schemathesis.openapi.from_url(server.url + "/v1/openapi.json").exclude(path_regex=":encode$")
        headers = {"Authorization": f"Bearer {server.write_token}"}
        for result in description.get_all_operations():
            operation = result.ok()

            @settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck), database=None)
            @given(operation.as_strategy())
            def check(case):
                answer = case.call_and_validate(base_url=server.url, headers=headers, checks=checks, timeout=30)
                seen.add(answer.status_code)

            check()
    assert {200, 404, 422} <= seen and not {401, 403} & seen, seen
