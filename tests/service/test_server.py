"""The command `serve`: who may reach it, when it says so, and how it ends."""

from __future__ import annotations

import http.client
import signal
import socket
import ssl
import subprocess
import sys
import time

from helpers.serving import serving, serving_here
from service_samples import entry

from latentcache.store import DiskStore


def refused(run, *arguments):
    code, _, err = run("serve", *arguments)
    assert code == 2
    return err


def test_it_refuses_what_it_cannot_serve(run, tmp_path):
    cache = tmp_path / "cache"
    with DiskStore(cache):
        pass
    assert "no token protects the cache" in refused(run, cache, "--host", "0.0.0.0")
    assert "there is no cache here" in refused(run, "--cache.path", tmp_path / "none")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "give another --port" in refused(run, cache, "--port", taken.getsockname()[1])
    token = tmp_path / "token"
    token.write_text("short\n")
    err = refused(run, cache, "--token-file", token)
    assert "holds no token" in err and "short" not in err
    token.write_text("a" * 32)
    assert "are equal" in refused(run, cache, "--token-file", token, "--write-token-file", token)


def test_a_signal_lets_requests_finish(tmp_path):
    with DiskStore(tmp_path / "cache"):
        pass
    # With tokens from the environment.
    tokens = {"LATENTCACHE_TOKEN": "r" * 20, "LATENTCACHE_WRITE_TOKEN": "w" * 20}
    with serving(tmp_path / "cache", tokens=False, writes=False, environment=tokens) as server:
        assert server.get("/v1/packs", token=None).status == 401
        assert server.get("/v1/packs", token="r" * 20).status == 200
        assert server.get("/v1/packs", token="w" * 20).status == 200
        with socket.create_connection(server.address) as slow:
            head = b"POST /v1/entries:find HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + b"r" * 20
            slow.sendall(head + b"\r\nContent-Type: application/json\r\nContent-Length: 11\r\n\r\n{")
            time.sleep(0.3)
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            assert server.process.poll() is None  # a request is under way
            slow.sendall(b'"keys":[]}')
            answer = b""
            while part := slow.recv(1 << 16):
                answer += part
        assert answer.startswith(b"HTTP/1.1 200 OK") and answer.endswith(b'{"found":[]}')
        assert server.process.wait(20) == 143
        assert not any("r" * 20 in line or "w" * 20 in line for line in server.log)


def test_an_open_server_answers_to_its_own_names_only(tmp_path):
    with DiskStore(tmp_path / "cache"):
        pass
    with serving_here(tmp_path / "cache", writes=False) as server:
        port = server.address[1]
        for host in ("localhost", f"localhost:{port}", f"127.0.0.1:{port}", f"[::1]:{port}", "LOCALHOST."):
            assert server.get("/v1/packs", headers={"Host": host}).status == 200, host
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "localhost.evil.example", ""):
            answer = server.get("/v1/packs", headers={"Host": host})
            assert answer.status == 421 and answer.json()["kind"] == "RequestRefused", host
        assert server.get("/v1/healthz", headers={"Host": "evil.example"}).status == 421
        own = f"http://127.0.0.1:{port}"
        assert server.get("/v1/packs", headers={"Origin": own}).status == 200
        for origin in ("http://evil.example", "null", own + "0"):
            assert server.get("/v1/packs", headers={"Origin": origin}).status == 403, origin
        # What other processes add is found, by a server that only reads too.
        new = entry(1)
        find = {"keys": [new.record.key]}
        assert server.post("/v1/entries:find", find).json() == {"found": []}
        with DiskStore(tmp_path / "cache") as store:
            store.add([new])
        assert server.post("/v1/entries:find", find).json() == {"found": [new.record.key]}
        # Nobody has a writing token.
        answer = server.request("POST", "/v1/verify", {"keys": []})
        assert answer.status == 403 and "--write-token-file" in answer.json()["next_step"]


def test_tls(tmp_path):
    with DiskStore(tmp_path / "cache"):
        pass
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", *subject]
    made = subprocess.run([*command, "-keyout", str(key), "-out", str(certificate)], capture_output=True, check=False)
    assert made.returncode == 0, made.stderr
    with serving_here(tmp_path / "cache", certfile=certificate, keyfile=key) as server:
        assert server.url.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cafile=str(certificate))
        connection = http.client.HTTPSConnection(*server.address, context=context, timeout=20)
        connection.request("GET", "/v1/packs")
        assert connection.getresponse().status == 200
        connection.close()


def test_a_signal_at_once_ends_it(tmp_path):
    """Who waits for its first line may stop it before it has begun to serve."""
    with DiskStore(tmp_path / "cache"):
        pass
    program = (
        "import os, pathlib, signal, sys\n"
        "from latentcache.service.server import Address, access_for, serve\n"
        "from latentcache.service.state import ServiceSettings\n"
        "address = Address(port=0)\n"
        "settings = ServiceSettings(cache=pathlib.Path(sys.argv[1]), access=access_for(address, None, None))\n"
        "print(serve(settings, address, lambda url: os.kill(os.getpid(), signal.SIGTERM)))\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "cache")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, f"{signal.SIGTERM:d}\n")
