"""A cache that is not on this disk: the HTTP service, and a loader on it.

    python scripts/bench_service.py                # all parts; some minutes and 3 GB of disk
    python scripts/bench_service.py --part packs   # one part
    python scripts/bench_service.py --json         # one document
    python scripts/bench_service.py --tiny         # for correctness only

Servers and clients share this machine. Samples are those of 1024x1024 in float16: moments, and SDXL's embeddings.

packs     one client reads whole packs on one connection, in turn with as many constant bytes, which the same process
          sends by the same uvicorn without any framework. The page cache is warm
memory    a server of a cache whose index has a million more entries, while clients read packs, look up keys and list
          the packs, all at once: the process's memory over that of a server of an empty cache. `anonymous` is what it
          holds, `resident` has the mapped pages of packs too, which are the page cache's
tier      an epoch of LatentLoader on the service, with a local tier that has all samples, against the cache's own
          directory
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from bench_scale import make_file, rows
from benchmarking import (
    in_turns,
    make_cache,
    make_parser,
    memory_bytes,
    parse,
    ratios,
    run_parts,
    served,
    spread,
)

from latentcache import BucketBatchSampler, LatentDataset, LatentLoader
from latentcache.store import DiskStore
from latentcache.store.index import Index
from latentcache.store.pack import WholePack

NUM_INDEXED = 1_000_000
NUM_CLIENTS = 8
LOAD_S = 20.0
WARM_EPOCHS = 4
BATCH = 16
WANTED = {
    "packs": {"ratio": 0.7},
    "memory": {"peak_over_empty_mb": 400},
    "tier": {"ratio_at_most": 1.1},
}


# The service ----------------------------------------------------------------------------------------------------------


def server(root: str) -> None:
    """Serve a cache, and constant bytes at /constant/<number>. A process of its own runs this."""
    import uvicorn

    from latentcache.service.app import create_app
    from latentcache.service.state import ServiceSettings

    app = create_app(ServiceSettings(cache=Path(root)))
    constants: dict[int, bytes] = {}

    async def handle(scope: Any, receive: Any, send: Any) -> None:
        path = scope.get("path", "")
        if not path.startswith("/constant/"):
            await app(scope, receive, send)
            return
        while (await receive()).get("more_body"):
            pass
        number = int(path.rpartition("/")[2])
        if number not in constants:
            constants[number] = os.urandom(number)
        body = constants[number]
        headers = [(b"content-length", b"%d" % number), (b"content-type", b"application/octet-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    with socket.create_server(("127.0.0.1", 0)) as listening:  # connections wait until the server runs
        print(json.dumps({"port": listening.getsockname()[1]}), flush=True)
        config = uvicorn.Config(handle, ws="none", access_log=False, log_level="warning")
        uvicorn.Server(config).run([listening])


class Client:
    """One connection that stays."""

    def __init__(self, port: int):
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        self.memory = bytearray(1 << 20)

    def read(self, path: str, body: bytes | None = None) -> int:
        """Send a request, read the answer into memory that is used again, and return its bytes."""
        method = "GET" if body is None else "POST"
        self.connection.request(method, path, body, {"Content-Type": "application/json"})
        answer = self.connection.getresponse()
        assert answer.status == 200, answer.read(500)
        num_bytes = 0
        while num := answer.readinto(self.memory):
            num_bytes += num
        return num_bytes

    def status(self, path: str) -> int:
        self.connection.request("HEAD", path)
        answer = self.connection.getresponse()
        answer.read()
        return answer.status

    def get(self, path: str) -> bytes:
        self.connection.request("GET", path)
        return self.connection.getresponse().read()


@contextmanager
def serving(root: Path) -> Iterator[tuple[int, int]]:
    """A server of its own: its port, and its process id."""
    command = [sys.executable, __file__, "--worker", str(root)]
    where = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=where)
    assert process.stdout is not None
    try:
        port = json.loads(process.stdout.readline())["port"]
        Client(port).get("/v1/healthz")
        yield port, process.pid
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def memory_mb(pid: int) -> dict[str, float]:
    """What the process holds now."""
    return {"anonymous": memory_bytes("RssAnon", pid) / 1e6, "resident": memory_bytes("VmRSS", pid) / 1e6}


def packs_of(port: int) -> list[tuple[str, int]]:
    """The packs of samples, which can be read, with their bytes."""
    found = json.loads(Client(port).get("/v1/packs"))["packs"]
    return [(each["id"], each["num_bytes"]) for each in found if Client(port).status(f"/v1/packs/{each['id']}") == 200]


def check(client: Client, pack: str) -> None:
    """What is timed below is right: each entry of a pack has its digest."""
    data = client.get(f"/v1/packs/{pack}")
    assert not list(WholePack.in_memory(pack, data).problems())


def packs(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    make_cache(folder / "cache", options.num_samples, options.scale)
    with serving(folder / "cache") as (port, _):
        return throughput(port, options.repetitions)


def throughput(port: int, repetitions: int) -> dict[str, Any]:
    """MB/s of packs, and of as many constant bytes."""
    client, packs = Client(port), packs_of(port)
    check(client, packs[0][0])
    sizes = [num_bytes for _, num_bytes in packs]

    def read() -> None:
        assert [client.read(f"/v1/packs/{pack}") for pack, _ in packs] == sizes

    def constant() -> None:
        assert [client.read(f"/constant/{size}") for size in sizes] == sizes

    seconds = in_turns({"read": read, "constant": constant}, repetitions, warm=True)
    total_mb = sum(sizes) / 1e6
    return {
        "mb_per_request": total_mb / len(packs),
        "read_mb_per_s": spread([total_mb / each for each in seconds["read"]]),
        "constant_mb_per_s": spread([total_mb / each for each in seconds["constant"]]),
        "ratio": ratios(seconds["constant"], seconds["read"]),
        "wanted": WANTED["packs"],
    }


def memory(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Memory of a server, before and while clients use it."""
    root, num_indexed, seconds = folder / "cache", *((9_000, 1.0) if options.tiny else (NUM_INDEXED, LOAD_S))
    make_cache(root, options.num_samples, options.scale)
    with DiskStore(root) as store, Index(store.directory.index).transaction() as transaction:
        for row in rows(0, num_indexed):
            make_file(store, row)
            transaction.put(row)
    DiskStore(folder / "empty").close()
    with serving(folder / "empty") as (_, pid):
        empty = memory_mb(pid)
    with serving(root) as (port, pid):
        opened, peak = memory_mb(pid), {"anonymous": 0.0, "resident": 0.0}
        found_keys = [row.names() for row in rows(0, num_indexed)]
        packs = packs_of(port)
        stop, counts, failures = threading.Event(), [0] * NUM_CLIENTS, []

        def work(number: int) -> None:
            client, source = Client(port), random.Random(number)
            try:
                while not stop.is_set():
                    client.read(f"/v1/packs/{source.choice(packs)[0]}")
                    client.read("/v1/entries:find", json.dumps({"keys": source.choice(found_keys)[:4096]}).encode())
                    client.get("/v1/packs")
                    counts[number] += 3
            except Exception as error:
                failures.append(repr(error))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(NUM_CLIENTS)]
        for thread in threads:
            thread.start()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            now = memory_mb(pid)
            peak = {name: max(peak[name], now[name]) for name in peak}
            time.sleep(0.05)
        stop.set()
        for thread in threads:
            thread.join()
    return {
        "num_entries": num_indexed + 2 * options.num_samples,
        "num_requests": sum(counts),
        "failures": failures,
        "empty_mb": empty,
        "opened_over_empty_mb": {name: opened[name] - empty[name] for name in empty},
        "peak_over_empty_mb": {name: peak[name] - empty[name] for name in empty},
        "wanted": WANTED["memory"],
    }


# A loader on the service ----------------------------------------------------------------------------------------------


def tier(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    cache = folder / "cache"
    make_cache(cache, options.num_samples, options.scale)
    batch_size = 2 if options.tiny else BATCH

    def loader_of(where: Any, **more: Any) -> LatentLoader:
        sampler = BucketBatchSampler(LatentDataset(where, **more), batch_size, seed=0)
        return LatentLoader(sampler, device="cpu", output="moments", prefetch=2)

    def epoch(loader: LatentLoader) -> None:
        loader.set_epoch(0)
        for batch in loader:
            del batch

    with served(cache, folder / "server.log") as url:
        loaders = {"local_cache": loader_of(cache), "local_tier": loader_of(url, local=folder / "local")}
        for loader, _ in itertools.product(loaders.values(), range(WARM_EPOCHS)):
            epoch(loader)
        seconds = in_turns({name: partial(epoch, loader) for name, loader in loaders.items()}, options.repetitions)
        for loader in loaders.values():
            loader.close()
            loader.dataset.cache.close()
    return {
        "num_batches": len(loaders["local_cache"]),
        "seconds": {name: spread(taken) for name, taken in seconds.items()},
        "ratio": ratios(seconds["local_tier"], seconds["local_cache"]),
        "wanted": WANTED["tier"],
    }


PARTS = {"packs": packs, "memory": memory, "tier": tier}


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        server(sys.argv[2])
        return
    options = parse(make_parser(__doc__, PARTS))
    options.num_samples, options.scale = (16, 16) if options.tiny else (512, 1)
    run_parts(PARTS, options)


if __name__ == "__main__":
    main()
