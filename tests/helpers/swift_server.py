"""A real S3 server on loopback: OpenStack Swift with its S3 interface, from the installed package, in processes."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import obstore
from obstore.store import S3Store

KEY_ID, SECRET, REGION = "test:tester", "secret-of-the-tests", "us-east-1"
START_S = 40.0
_PIPELINE = "catch_errors gatekeeper healthcheck cache listing_formats s3api tempauth bulk slo copy proxy-server"
_STORAGE = """[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
user = {user}
swift_dir = {folder}
devices = {folder}/devices
mount_check = false
workers = 0
log_level = WARNING
log_to_console = true
[pipeline:main]
pipeline = {kind}-server
[app:{kind}-server]
use = egg:swift#{kind}
recon_cache_path = {folder}/recon
"""
_PROXY = f"""[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {{port}}
user = {{user}}
swift_dir = {{folder}}
workers = 0
log_level = WARNING
log_to_console = true
[pipeline:main]
pipeline = {_PIPELINE}
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
[filter:s3api]
use = egg:swift#s3api
location = {REGION}
s3_acl = false
check_bucket_owner = false
[filter:cache]
use = egg:swift#memcache
memcache_servers =
[filter:tempauth]
use = egg:swift#tempauth
user_test_tester = {SECRET} .admin
"""


@dataclass(frozen=True)
class SwiftServer:
    """A server that runs. `environment` is what clients need to find it."""

    port: int

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    def environment(self) -> Mapping[str, str]:
        """The variables that AWS's own tools take too."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": KEY_ID,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": REGION,
            "AWS_ALLOW_HTTP": "true",
        }

    def make_bucket(self, name: str) -> None:
        """Make a bucket: obstore makes none, and signs the request for one."""
        url = obstore.sign(self.store(name), "PUT", "", timedelta(minutes=1))
        with urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=10):
            pass

    def store(self, bucket: str, prefix: str | None = None) -> S3Store:
        """obstore's own client of a bucket, for looking behind ours."""
        return S3Store(
            bucket,
            prefix=prefix,
            endpoint=f"http://127.0.0.1:{self.port}",
            access_key_id=KEY_ID,
            secret_access_key=SECRET,
            region=REGION,
            client_options={"allow_http": True},
        )


def _folder() -> Path:
    """A place for the server's files: Swift keeps what it knows of an object in extended attributes."""
    tried = {}
    for place in (tempfile.gettempdir(), "/dev/shm", "/var/tmp", str(Path.home()), str(Path.cwd())):
        try:
            with tempfile.NamedTemporaryFile(dir=place) as file:
                os.setxattr(file.name, "user.swift.metadata", b"x" * 200)
            return Path(tempfile.mkdtemp(prefix="swift-", dir=place))
        except OSError as error:
            tried[place] = str(error)
    raise AssertionError(f"Swift needs a folder with user extended attributes, and none of these has them: {tried}")


def _free_ports(num: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(num)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _configured(folder: Path) -> dict[str, int]:
    """Write the files of a server with one device and one copy of each object. Returns the ports, by kind."""
    kinds = ("account", "container", "object", "proxy")
    ports = dict(zip(kinds, _free_ports(len(kinds)), strict=True))
    user = subprocess.run(["id", "-un"], check=True, capture_output=True, text=True).stdout.strip()
    for name in ("devices/d1", "recon"):
        (folder / name).mkdir(parents=True)
    hashes = "[swift-hash]\nswift_hash_path_suffix = tests\n[storage-policy:0]\nname = one\ndefault = yes\n"
    (folder / "swift.conf").write_text(hashes, encoding="ascii")
    for kind, port in ports.items():
        text = (_PROXY if kind == "proxy" else _STORAGE).format(port=port, user=user, folder=folder, kind=kind)
        if kind == "proxy":
            named = set(_PIPELINE.split()) - {"proxy-server", "s3api", "cache", "tempauth"}
            text += "".join(f"[filter:{name}]\nuse = egg:swift#{name}\n" for name in sorted(named))
        (folder / f"{kind}-server.conf").write_text(text, encoding="ascii")
        if kind == "proxy":
            continue
        builder = [_program("swift-ring-builder"), str(folder / f"{kind}.builder")]
        for step in (["create", "2", "1", "1"], ["add", f"r1z1-127.0.0.1:{port}/d1", "1"], ["rebalance"]):
            done = subprocess.run([*builder, *step], capture_output=True, text=True, check=False)
            assert done.returncode < 2, done.stdout + done.stderr  # 1 is a warning: there is one device
    return ports


def _end_with_parent() -> None:
    """Ask Linux to end this process when the one that started it is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def _program(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


@contextmanager
def swift_serving() -> Iterator[SwiftServer]:
    """A server for the block. What its processes print is shown where it does not start."""
    folder = _folder()
    ports = _configured(folder)
    log = folder / "log"
    processes = []
    with log.open("wb") as printed:
        for kind in ports:
            command = [_program(f"swift-{kind}-server"), str(folder / f"{kind}-server.conf")]
            processes.append(subprocess.Popen(command, stdout=printed, stderr=printed, preexec_fn=_end_with_parent))
    try:
        server = SwiftServer(ports["proxy"])
        _wait_for(server, processes, log)
        yield server
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(20)
        subprocess.run(["rm", "-rf", str(folder)], check=True)


def _wait_for(server: SwiftServer, processes: list[subprocess.Popen[bytes]], log: Path) -> None:
    end = time.monotonic() + START_S
    problem: Exception | None = None
    while time.monotonic() < end and all(process.poll() is None for process in processes):
        try:
            server.make_bucket("probe")
            return
        except OSError as error:
            problem = error
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            time.sleep(0.1)
    raise AssertionError(f"Swift did not start ({problem}):\n{log.read_text(errors='replace')}")
