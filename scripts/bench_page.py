"""The first view of the service's page in Chromium: seconds and bytes, for a cache of 100,000 samples.

    python scripts/bench_page.py               # a minute and 100 MB of disk
    python scripts/bench_page.py --json        # one document
    python scripts/bench_page.py --tiny        # for correctness only

A server is started for each repetition, so that it has read nothing yet; it and Chromium share the machine. `first` is
that view: until all that it shows has arrived (the choices of the list of buckets, which need the whole manifest, are
loaded 3 s later). `again` is the same page once more, from a browser without a cache. `search` is a search through
all captions, which needs the manifest too. The latents are those of 1024x1024 photos, smooth ones; many samples share
one entry, so that the disk has room for them.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from benchmarking import emit, environment, make_parser, parse, spread

from latentcache.dataset.manifest import Manifest
from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.dataset.row_table import CaptionRef, ImageRef, Row
from latentcache.families.sdxl import SCALING_FACTOR
from latentcache.identity import key_of
from latentcache.store import DiskStore
from latentcache.types import Crop, Entry, Geometry, Record, Size

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NUM_SAMPLES, TINY_SAMPLES = 100_000, 500
NUM_ENTRIES = 64
GEOMETRY = Geometry(Size(1500, 1500), Size(1024, 1024), Crop(0, 0), Size(1024, 1024))
CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
PATHS = {"overview": "/", "gallery": "/gallery"}
LAST = """Math.max(...performance.getEntries()
    .map(entry => entry.responseEnd || entry.startTime))"""
"""Milliseconds from the navigation until the last byte of what is on the page has arrived, pictures too."""
SIZES = "performance.getEntries().reduce((sum, entry) => sum + (entry.transferSize || 0), 0)"


def entry(number: int) -> Entry:
    generator = torch.Generator().manual_seed(number)
    small = torch.randn((1, 8, 16, 16), generator=generator) / SCALING_FACTOR
    moments = torch.nn.functional.interpolate(small, (128, 128), mode="bicubic")[0].half()
    identity = {"number": number}
    return Entry(Record(key_of(identity), "image", identity, {}), {"moments": moments})


def build(root: Path, num_samples: int) -> None:
    entries = [entry(number) for number in range(NUM_ENTRIES)]
    with DiskStore(root) as store:
        store.add(entries)
    rows = {}
    for number in range(num_samples):
        key, name = entries[number % NUM_ENTRIES].record.key, f"photos/{number:06d}.jpg"
        caption = CaptionRef(f"a photo of a red house, number {number}, in the evening light of a long summer", key)
        rows[name] = Row(name, f"/data/{name}", key_of({"source": number}), (ImageRef(key, GEOMETRY),), (caption,))
    common = {"schema": 1, "salt": "", "text_encoding": {}}
    common["image_encoding"] = {"scaling_factor": SCALING_FACTOR, "shift_factor": None}
    ManifestFolder(root / "manifests").write(Manifest("photos", "train", 1, common, rows))


@contextmanager
def served(root: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "latentcache", "browse", str(root), "--json", "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()


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


def measure(browser: Browser, root: Path) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, path in PATHS.items():
        with served(root) as base:
            for when in ("first", "again"):
                for unit, value in view(browser, base, path).items():
                    found[f"{name}_{when}_{unit}"] = value
            if name == "gallery":
                found["search_s"] = view(browser, base, "/gallery?search=number+77")["s"]
    return found


def main() -> None:
    parser = make_parser(__doc__)
    options = parse(parser)
    from playwright.sync_api import sync_playwright

    rounds = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        root = Path(folder) / "cache"
        build(root, TINY_SAMPLES if options.tiny else NUM_SAMPLES)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
            rounds = [measure(browser, root) for _ in range(options.repetitions)]
            browser.close()
        where = environment(folder=folder)
    results: dict[str, Any] = {name: spread([each[name] for each in rounds]) for name in rounds[0]}
    num_samples = TINY_SAMPLES if options.tiny else NUM_SAMPLES
    document = {"environment": where, "num_samples": num_samples, "results": results}
    emit(document, options, to_text)


def to_text(document: Mapping[str, Any]) -> str:
    lines = [f"{document['num_samples']:,} samples: median (min to max)"]
    for name, figures in document["results"].items():
        lines.append(f"{name:<20} {figures['median']:9.3f} ({figures['min']:.3f} to {figures['max']:.3f})")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
