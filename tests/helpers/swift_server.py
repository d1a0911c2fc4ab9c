"""A real S3 server on loopback: OpenStack Swift with its S3 API, from the installed package.

It runs in one process, with this module as its program. Objects are kept in memory, their listings in a folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import obstore
from obstore.store import S3Store

KEY_ID, SECRET, REGION = "test:tester", "secret-of-the-tests", "us-east-1"
_STORAGE = {"account": "account", "container": "container", "object": "mem_object"}
"""Kind of server -> the name of its app."""
_FILTERS = "catch_errors gatekeeper healthcheck memcache listing_formats s3api tempauth bulk slo copy"
_OPTIONS = {
    "s3api": f"location = {REGION}\ns3_acl = false\ncheck_bucket_owner = false\n",
    "tempauth": f"user_test_tester = {SECRET} .admin\n",
}


@dataclass(frozen=True)
class SwiftServer:
    """A running server. `environment` has what clients need to connect."""

    port: int

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    def environment(self) -> Mapping[str, str]:
        """The environment variables of AWS's own tools."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": KEY_ID,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": REGION,
            "AWS_ALLOW_HTTP": "true",
        }

    def make_bucket(self, name: str) -> None:
        """Create a bucket with a presigned request, as obstore cannot create one."""
        url = obstore.sign(self.store(name), "PUT", "", timedelta(minutes=1))
        with urllib.request.urlopen(urllib.request.Request(url, method="PUT"), timeout=10):
            pass

    def store(self, bucket: str, prefix: str | None = None) -> S3Store:
        """obstore's own client for a bucket, to inspect what ours did."""
        return S3Store(
            bucket,
            prefix=prefix,
            endpoint=f"http://127.0.0.1:{self.port}",
            access_key_id=KEY_ID,
            secret_access_key=SECRET,
            region=REGION,
            client_options={"allow_http": True},
        )


@contextmanager
def swift_serving() -> Iterator[SwiftServer]:
    """Run a server during the block."""
    with tempfile.TemporaryDirectory(prefix="swift-") as folder:
        command = [sys.executable, "-W", "ignore", __file__, folder]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                yield SwiftServer(int(process.stdout.readline()))
            finally:
                process.kill()


def _serve(folder: Path) -> None:
    """Serve until the parent process ends, with one device and one copy of each object."""
    import eventlet
    from eventlet import wsgi
    from swift.common import utils
    from swift.common.ring.builder import RingBuilder
    from swift.common.wsgi import loadapp

    utils.monkey_patch()
    parent = os.getppid()
    utils.SWIFT_CONF_FILE = str(folder / "swift.conf")
    hashes = "[swift-hash]\nswift_hash_path_suffix = tests\n[storage-policy:0]\nname = one\ndefault = yes\n"
    (folder / "swift.conf").write_text(hashes, encoding="ascii")
    (folder / "devices" / "d1").mkdir(parents=True)
    default = f"[DEFAULT]\nswift_dir = {folder}\ndevices = {folder}/devices\nmount_check = false\n"
    texts = {}
    for kind, name in _STORAGE.items():
        texts[kind] = (
            f"[pipeline:main]\npipeline = app\n[app:app]\nuse = egg:swift#{name}\nrecon_cache_path = {folder}\n"
        )
    texts["proxy"] = f"[pipeline:main]\npipeline = {_FILTERS} proxy-server\n"
    texts["proxy"] += "[app:proxy-server]\nuse = egg:swift#proxy\naccount_autocreate = true\n"
    for name in _FILTERS.split():
        texts["proxy"] += f"[filter:{name}]\nuse = egg:swift#{name}\n{_OPTIONS.get(name, '')}"
    for kind, text in texts.items():
        listener = eventlet.listen(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        if kind in _STORAGE:
            ring = RingBuilder(part_power=2, replicas=1, min_part_hours=1)
            ring.add_dev({"region": 1, "zone": 1, "ip": "127.0.0.1", "port": port, "device": "d1", "weight": 1})
            ring.rebalance()
            ring.get_ring().save(str(folder / f"{kind}.ring.gz"))
        (folder / f"{kind}.conf").write_text(default + text, encoding="ascii")
        app = loadapp(str(folder / f"{kind}.conf"), allow_modify_pipeline=False)
        eventlet.spawn(wsgi.server, listener, app, log_output=False)
    print(port, flush=True)  # the proxy is the last
    while os.getppid() == parent:
        eventlet.sleep(1)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))
