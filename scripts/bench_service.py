"""The HTTP service: bytes per second of packs, and the server's memory with a million entries under load.

    python scripts/bench_service.py              # a table; some minutes and 1 GB of disk
    python scripts/bench_service.py --json       # one document
    python scripts/bench_service.py --tiny       # for correctness only

A sample is a 1024x1024 image's moments and the SDXL embeddings of its caption: two entries, 580 KB. One client reads
whole packs on one connection, in turn with as many constant bytes, which the same process sends by the same uvicorn
without any framework. The page cache is warm.

For memory, a server opens a cache whose index has a million more entries. Clients then read packs, look up keys and
list the packs, all at once. What counts is the process's memory over that of a server of an empty cache:
`anonymous` is what it holds, `resident` has the mapped pages of packs too, which are the page cache's.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from bench_index import make_file, rows
from benchmarking import emit, environment, in_turns, make_parser, parse, ratios, spread

from latentcache.identity import key_of
from latentcache.store import DiskStore
from latentcache.store.index import Index
from latentcache.store.pack import WholePack
from latentcache.types import Entry, Record

NUM_SAMPLES = 512
NUM_INDEXED = 1_000_000
NUM_CLIENTS = 8
LOAD_S = 20.0
GOAL_RATIO, GOAL_MB = 0.7, 400


def entry(kind: str, number: int) -> Entry:
    identity = {"kind": kind, "number": number}
    source = torch.Generator().manual_seed(number)
    if kind == "image":
        tensors = {"moments": torch.randn(8, 128, 128, generator=source).half()}
    else:
        tensors = {
            "prompt_embeds": torch.randn(77, 2048, generator=source).half(),
            "pooled_prompt_embeds": torch.randn(1280, generator=source).half(),
        }
    return Entry(
        Record(key_of(identity), kind, identity, {"made": "by bench_service.py", "path": f"{number}.jpg"}), tensors
    )


def sample_keys(number: int) -> list[str]:
    return [key_of({"kind": kind, "number": number}) for kind in ("image", "text")]


def fill(root: Path, num_samples: int, num_indexed: int) -> None:
    """Samples that can be read, and rows of the index that can only be found."""
    with DiskStore(root) as store:
        for kind in ("image", "text"):
            store.add(entry(kind, number) for number in range(num_samples))
        with Index(store.directory.index).transaction() as transaction:
            for row in rows(0, num_indexed) if num_indexed else ():
                make_file(store, row)
                transaction.put(row)


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

    config = uvicorn.Config(handle, port=0, ws="none", access_log=False, log_level="warning")

    async def main() -> None:
        running = uvicorn.Server(config)
        task = asyncio.create_task(running.serve())
        while not running.started:
            await asyncio.sleep(0.01)
        print(json.dumps({"port": running.servers[0].sockets[0].getsockname()[1]}), flush=True)
        await task

    asyncio.run(main())


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
def served(root: Path) -> Iterator[tuple[int, int]]:
    """A server of its own: its port, and its process id."""
    command = [sys.executable, __file__, "--worker", str(root)]
    where = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
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
    found = {}
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name in ("RssAnon", "VmRSS"):
            found[name] = int(value.split()[0]) * 1024 / 1e6
    return {"anonymous": found["RssAnon"], "resident": found["VmRSS"]}


def packs_of(port: int) -> list[tuple[str, int]]:
    """The packs of samples, which can be read, with their bytes."""
    found = json.loads(Client(port).get("/v1/packs"))["packs"]
    return [(each["id"], each["num_bytes"]) for each in found if Client(port).status(f"/v1/packs/{each['id']}") == 200]


def check(client: Client, pack: str) -> None:
    """What is timed below is right: each entry of a pack has its digest."""
    data = client.get(f"/v1/packs/{pack}")
    assert not list(WholePack.in_memory(pack, data).problems())


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
    }


def under_load(root: Path, num_samples: int, num_indexed: int, seconds: float) -> dict[str, Any]:
    """Memory of a server, before and while clients use it."""
    with tempfile.TemporaryDirectory(dir=root.parent) as folder:
        fill(Path(folder), 0, 0)
        with served(Path(folder)) as (_, pid):
            empty = memory_mb(pid)
    with served(root) as (port, pid):
        opened, peak = memory_mb(pid), {"anonymous": 0.0, "resident": 0.0}
        found_keys = [row.names() for row in rows(0, num_indexed)] if num_indexed else [sample_keys(0)]
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
        "num_entries": num_indexed + 2 * num_samples,
        "num_requests": sum(counts),
        "failures": failures,
        "empty_mb": empty,
        "opened_over_empty_mb": {name: opened[name] - empty[name] for name in empty},
        "peak_over_empty_mb": {name: peak[name] - empty[name] for name in empty},
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    num_samples = 16 if options.tiny else NUM_SAMPLES
    num_indexed, load_s = (9_000, 1.0) if options.tiny else (NUM_INDEXED, LOAD_S)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        root = Path(folder) / "cache"
        fill(root, num_samples, 0)
        with served(root) as (port, _):
            found = {"packs": throughput(port, options.repetitions)}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        root = Path(folder) / "cache"
        fill(root, num_samples, num_indexed)
        memory = under_load(root, num_samples, num_indexed, load_s)
    return {
        "throughput": found,
        "memory": memory,
        "goals": {"ratio": GOAL_RATIO, "peak_over_empty_mb": GOAL_MB},
        **environment(folder=options.folder or tempfile.gettempdir()),
    }


def to_text(report: Mapping[str, Any]) -> str:
    lines = [f"{'':>8}{'MB':>8}{'packs':>16}{'constant':>14}{'ratio':>8}   (goal {GOAL_RATIO})"]
    for what, found in report["throughput"].items():
        read, constant, ratio = (found[name]["median"] for name in ("read_mb_per_s", "constant_mb_per_s", "ratio"))
        lines.append(f"{what:>8}{found['mb_per_request']:8.1f}{read:11.0f} MB/s{constant:9.0f} MB/s{ratio:8.2f}")
    memory = report["memory"]
    opened, peak = memory["opened_over_empty_mb"], memory["peak_over_empty_mb"]
    lines += [
        f"memory with {memory['num_entries']:,} entries over that of an empty cache (goal {GOAL_MB} MB):",
        f"  opened      {opened['anonymous']:6.0f} MB anonymous, {opened['resident']:6.0f} MB resident",
        f"  under load  {peak['anonymous']:6.0f} MB anonymous, {peak['resident']:6.0f} MB resident",
        f"  {memory['num_requests']:,} requests, {len(memory['failures'])} clients failed",
    ]
    return "\n".join(lines)


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        server(sys.argv[2])
        return
    parser = make_parser(__doc__)
    options = parse(parser)
    emit(run(options), options, to_text)


if __name__ == "__main__":
    main()
