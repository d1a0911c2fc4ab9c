"""A cache that is not on this disk: the HTTP service, a loader on it, push and pull, and the service's page.

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
transfer  `push` and `pull` between a directory and a real S3 server (Swift), against obstore's own PUTs and GETs of the
          same packs, as many at once, to places that are empty. `push` compares every entry with its digest before it
          sends it, and `pull` before it is stored, durably; the GETs keep what came in memory, or write it to files and
          sync these
page      the first view of the page in Chromium, for 100,000 samples and a server that has read nothing yet: until all
          that it shows has arrived. `again` is the same once more, from a browser without a cache; `search` goes
          through all captions
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from bench_scale import make_file, rows
from benchmarking import (
    CHROMIUM,
    in_turns,
    make_cache,
    make_parser,
    memory_bytes,
    parse,
    ratios,
    run_parts,
    seconds_of,
    served,
    spread,
    write_cache,
)

from latentcache import BucketBatchSampler, LatentDataset, LatentLoader
from latentcache.families.sdxl import SCALING_FACTOR
from latentcache.store import DiskStore
from latentcache.store.index import Index
from latentcache.store.pack import WholePack

if TYPE_CHECKING:
    from obstore.store import S3Store
    from playwright.sync_api import Browser

NUM_INDEXED = 1_000_000
NUM_CLIENTS = 8
LOAD_S = 20.0
WARM_EPOCHS = 4
BATCH = 16
S3_BUCKET = "bench"
NUM_PAGED, TINY_PAGED, NUM_PICTURES = 100_000, 500, 64
CHROMIUM_ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
PATHS = {"overview": "/", "gallery": "/gallery"}
WANTED = {
    "packs": {"ratio": 0.7},
    "memory": {"peak_over_empty_mb": 400},
    "tier": {"ratio_at_most": 1.1},
    "transfer": {"push_of_puts": 0.85, "pull_of_gets": 0.85},
}
LAST = """Math.max(...performance.getEntries()
    .map(entry => entry.responseEnd || entry.startTime))"""
"""Milliseconds from the navigation until the last byte of what is on the page has arrived, pictures too."""
SIZES = "performance.getEntries().reduce((sum, entry) => sum + (entry.transferSize || 0), 0)"


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

    with served(cache, log=folder / "server.log") as (url, _):
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


# Push and pull --------------------------------------------------------------------------------------------------------


@contextmanager
def s3_serving() -> Iterator[S3Store]:
    """An empty bucket of a real S3 server on this machine, whose credentials are in the environment.

    It cannot compare before it replaces, which `push` demands; one client alone writes here.
    """
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from helpers.swift_server import swift_serving

    from latentcache.remote.bucket import BucketTransport
    from latentcache.remote.transport import ANY_VERSION

    put = BucketTransport._put
    with (
        patch.object(BucketTransport, "check_compares", lambda bucket: None),
        patch.object(BucketTransport, "_put", lambda bucket, name, data, version: put(bucket, name, data, ANY_VERSION)),
        swift_serving() as server,
    ):
        server.make_bucket(S3_BUCKET)
        os.environ.update(server.environment())
        yield server.store(S3_BUCKET)


def transfer(folder: Path, options: argparse.Namespace) -> dict[str, Any]:  # noqa: C901 - functions of a line or two
    import obstore

    from latentcache.remote.transfer import NUM_THREADS
    from latentcache.remote.transfer import transfer as move_all

    cache, numbers = folder / "cache", itertools.count()
    make_cache(cache, 2 * options.num_samples, options.scale)
    packs = sorted(cache.glob("packs/*/*.safetensors"))

    def moved(source: Any, target: Any) -> None:
        report = move_all(source, target)
        assert report.ok and report.num_packs == len(packs) and report.manifests, report.to_text()

    def at_once(function: Callable[[Path], Any]) -> None:
        with ThreadPoolExecutor(NUM_THREADS) as executor:
            for _ in executor.map(function, packs):
                pass

    def uploaded(upload: Callable[[str], None]) -> float:
        """The seconds that it takes to send all packs to a new place, which is removed afterwards."""
        place = f"round{next(numbers)}"
        taken = seconds_of(partial(upload, place))
        for each in [each for chunk in obstore.list(store, place) for each in chunk]:
            obstore.delete(store, each["path"])
        return taken

    def downloaded(download: Callable[[Path], None]) -> float:
        """As `uploaded`, of what brings them into a new folder."""
        target = folder / f"round{next(numbers)}"
        taken = seconds_of(partial(download, target))
        shutil.rmtree(target)
        return taken

    def put_all(place: str) -> None:
        at_once(lambda path: obstore.put(store, f"{place}/{path.name}", path, use_multipart=False))

    def get(path: Path) -> memoryview:
        return memoryview(obstore.get(store, f"full/packs/{path.stem[:2]}/{path.name}").bytes())

    def get_all(target: Path) -> None:
        target.mkdir()

        def write(path: Path) -> None:
            with (target / path.name).open("wb") as file:
                file.write(get(path))
                file.flush()
                os.fsync(file.fileno())

        at_once(write)

    compared_with = {"puts": "puts", "push": "puts", "gets": "gets", "gets_to_files": "gets", "pull": "gets"}
    methods: dict[str, Callable[[], float]] = {
        "puts": lambda: uploaded(put_all),
        "push": lambda: uploaded(lambda place: moved(cache, f"s3://{S3_BUCKET}/{place}")),
        "gets": lambda: seconds_of(lambda: at_once(get)),
        "gets_to_files": lambda: downloaded(get_all),
        "pull": lambda: downloaded(lambda target: moved(f"s3://{S3_BUCKET}/full", target)),
    }
    with s3_serving() as store:
        moved(cache, f"s3://{S3_BUCKET}/full")
        for method in methods.values():
            method()
        seconds = in_turns(methods, options.repetitions, clock=lambda method: method())
    num_bytes = sum(path.stat().st_size for path in packs)
    return {
        "num_packs": len(packs),
        "num_bytes": num_bytes,
        "gb_per_s": {name: spread([num_bytes / each / 1e9 for each in taken]) for name, taken in seconds.items()},
        "ratio": {name: ratios(seconds[compared_with[name]], taken) for name, taken in seconds.items()},
        "wanted": WANTED["transfer"],
    }


# The page -------------------------------------------------------------------------------------------------------------


def view(browser: Browser, base: str, path: str) -> dict[str, float]:
    """Seconds until everything is there, and the bytes that came, in a browser without a cache."""
    context = browser.new_context(base_url=base, viewport={"width": 1200, "height": 800})
    assert context.request.get(base).ok  # the address that `browse` says has the token
    page = context.new_page()
    answer = page.goto(path)
    assert answer is not None and answer.ok, f"{path}: {answer and answer.status}"
    page.wait_for_load_state("networkidle")
    found = {"s": page.evaluate(LAST) / 1e3, "kb": page.evaluate(SIZES) / 1e3}
    context.close()
    return found


def measure_page(browser: Browser, root: Path) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, path in PATHS.items():
        with served(root, command="browse") as (base, _):
            for when in ("first", "again"):
                for unit, value in view(browser, base, path).items():
                    found[f"{name}_{when}_{unit}"] = value
            if name == "gallery":
                found["search_s"] = view(browser, base, "/gallery?search=number+77")["s"]
    return found


def page(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    from playwright.sync_api import sync_playwright

    num_samples = TINY_PAGED if options.tiny else NUM_PAGED
    embeds = {"prompt_embeds": torch.zeros(1, 8)}
    write_cache(
        folder / "cache",
        num_samples,
        lambda number: {"image": picture(number), "text": embeds},
        num_entries=NUM_PICTURES,  # so that the disk has room for them
    )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_ARGUMENTS)
        rounds = [measure_page(browser, folder / "cache") for _ in range(options.repetitions)]
        browser.close()
    return {"num_samples": num_samples} | {name: spread([each[name] for each in rounds]) for name in rounds[0]}


def picture(number: int) -> dict[str, torch.Tensor]:
    """Moments of a smooth picture of 1024x1024."""
    generator = torch.Generator().manual_seed(number)
    small = torch.randn((1, 8, 16, 16), generator=generator) / SCALING_FACTOR
    return {"moments": torch.nn.functional.interpolate(small, (128, 128), mode="bicubic")[0].half()}


PARTS = {"packs": packs, "memory": memory, "tier": tier, "transfer": transfer, "page": page}


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        server(sys.argv[2])
        return
    options = parse(make_parser(__doc__, PARTS))
    options.num_samples, options.scale = (16, 16) if options.tiny else (512, 1)
    run_parts(PARTS, options)


if __name__ == "__main__":
    main()
