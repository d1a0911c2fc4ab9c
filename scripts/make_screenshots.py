"""Take the pictures of the service's page that docs/ shows: gallery, sample, dark, phone.

`TARGET` is a cache, or a config; default: configs/quickstart.yaml, whose cache scripts/quickstart.py makes. Needs
Debian's Chromium.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
from typing import TYPE_CHECKING

import bootstrap

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
FOLDER = bootstrap.ROOT / "docs" / "images"
WIDE, PHONE = (1200, 860), (390, 780)
MAX_BYTES = 150_000


def take(browser: Browser, base: str, name: str, path: str, size: tuple[int, int], scheme: str = "light") -> None:
    """One picture, `page-<name>.webp`, of at most MAX_BYTES."""
    from PIL import Image

    viewport = {"width": size[0], "height": size[1]}
    page = browser.new_page(base_url=base, viewport=viewport, color_scheme=scheme)  # type: ignore[arg-type]
    assert page.request.get(base).ok  # the address that `browse` says has the token
    answer = page.goto(path)
    assert answer is not None and answer.ok, path
    page.wait_for_load_state("networkidle")
    image = Image.open(io.BytesIO(page.screenshot()))
    page.close()
    file = FOLDER / f"page-{name}.webp"
    for quality in (85, 70, 50, 30):
        image.save(file, "WEBP", quality=quality, method=6)
        if file.stat().st_size <= MAX_BYTES:
            print(f"{file}: {file.stat().st_size:,} bytes")
            return
    raise SystemExit(f"{file} has more than {MAX_BYTES:,} bytes")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", default="configs/quickstart.yaml", help="a cache, or a config")
    parser.add_argument("--sample", default="astronaut.png", help="the sample_id of the sample that is shown")
    parser.add_argument("--dataset", default="photos", help="its dataset")
    arguments = parser.parse_args()
    bootstrap.inside()

    from urllib.parse import quote

    from playwright.sync_api import sync_playwright

    command = [sys.executable, "-m", "latentcache", "browse", arguments.target, "--json", "--no-open"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=bootstrap.ROOT) as server:
        try:
            assert server.stdout is not None
            base = json.loads(server.stdout.readline())["url"]
            sample = f"/sample?dataset={quote(arguments.dataset)}&id={quote(arguments.sample)}"
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
                take(browser, base, "gallery", "/gallery", WIDE)
                take(browser, base, "sample", sample, WIDE)
                take(browser, base, "dark", "/", WIDE, "dark")
                take(browser, base, "phone", "/gallery", PHONE)
                browser.close()
        finally:
            server.terminate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
