"""The page in Chromium: one walk through it, also on a phone; and hostile texts.

Nothing may be written to the console, and nothing requested from elsewhere. Where Chromium is not installed these tests
fail: `apt-get install chromium` (scripts/test.py does it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.hostile_texts import HOSTILE
from helpers.page_server import page_of, photo_cache
from playwright.sync_api import Page, expect, sync_playwright

from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.dataset.row_table import Ref
from latentcache.service.page.text import url

pytestmark = pytest.mark.page

CHROMIUM = Path("/usr/bin/chromium")
# The second line: no connection of Chromium's own, which would fail here, and write to its log.
ARGUMENTS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
VIEW, PHONE = {"width": 1200, "height": 800}, {"width": 390, "height": 844}
SAMPLE = url("/sample", dataset="photos", id="001.png")
LEFT = ("htmx:sendAbort, ", "htmx:afterRequest, ")
"""What htmx writes when a page is left while it loads: no fault. One that failed says `htmx:sendError` besides."""


OpenPage = Callable[..., Page]


@pytest.fixture
def open_page() -> Iterator[OpenPage]:
    """Opens a page. At the end nothing may have gone wrong in any of them."""
    if not CHROMIUM.exists():
        pytest.fail(f"{CHROMIUM} is not installed: apt-get install chromium", pytrace=False)
    faults: list[str] = []

    def open_page(base: str, path: str = "/", **options: Any) -> Page:
        page = browser.new_context(base_url=base, **{"viewport": VIEW, **options}).new_page()
        page.set_default_timeout(15_000)
        page.on("console", lambda said: None if said.text.startswith(LEFT) else faults.append(f"console: {said.text}"))
        page.on("pageerror", lambda error: faults.append(f"error: {error}"))
        page.on("dialog", lambda dialog: faults.append(f"dialog: {dialog.message}"))
        page.on("request", lambda request: None if request.url.startswith(base) else faults.append(request.url))
        page.goto(path)
        return page

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        yield open_page
        browser.close()
    assert faults == []


@pytest.fixture
def base(tmp_path: Path) -> Iterator[str]:
    photo_cache(tmp_path, 60)
    with page_of(tmp_path / "cache", show_photos=True) as base:
        yield base


def tiles(page: Page) -> Any:
    return page.locator("a.tile")


def show_all(page: Page, num_tiles: int) -> None:
    """Scroll to the end until no tile is left to load: new ones may be laid out after the key."""
    found = [tiles(page).count()]
    while found[-1] < num_tiles and len(found) < 40:
        page.keyboard.press("End")
        page.wait_for_timeout(250)
        found.append(tiles(page).count())
    assert found[-1] == num_tiles and found[0] == 24, found


def test_a_walk(open_page: OpenPage, base: str) -> None:
    page = open_page(base, "/gallery")
    expect(tiles(page)).to_have_count(24)
    page.wait_for_load_state("networkidle")
    assert page.evaluate("[...document.images].every(image => !image.complete || image.naturalWidth > 0)")
    # A pixel for each latent's row and column.
    assert page.evaluate("document.images[1].naturalWidth * 8 == document.images[1].getAttribute('width')")
    show_all(page, 63)
    assert page.locator(".more").count() == 0
    status, search = page.get_by_role("status"), page.get_by_label("Search captions and ids")
    search.press_sequentially("number 17")
    expect(status).to_have_text("1 sample")
    assert page.url == f"{base}/gallery?search=number%2017"
    search.fill("")
    page.get_by_label("State").select_option("refused")
    expect(status).to_have_text("1 sample: cannot be used, for a stated reason")
    page.get_by_label("State").select_option("")
    page.get_by_label("Dataset").select_option("held-out")
    expect(status).to_have_text("2 samples")
    tiles(page).first.click()
    expect(page.get_by_role("heading", level=1)).to_have_text("000.png")
    page.go_back()
    expect(status).to_have_text("2 samples")
    page = open_page(base, "/", viewport=PHONE, has_touch=True, is_mobile=True)
    for path in ("/", SAMPLE, "/health", "/gallery"):
        page.goto(path)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], path
    expect(page.get_by_label("State")).to_be_hidden()
    page.get_by_text("Filters").click()
    expect(page.get_by_label("State")).to_be_visible()


def test_hostile_texts_do_nothing(open_page: OpenPage, tmp_path: Path) -> None:
    manifest = photo_cache(tmp_path, 2)
    row = manifest.rows["000.png"]
    rows = {text: replace(row, sample_id=text, captions=(Ref.of_text(text, row.captions[0].key),)) for text in HOSTILE}
    ManifestFolder(tmp_path / "cache" / "manifests").write(replace(manifest, rows=rows))
    with page_of(tmp_path / "cache", show_photos=True) as base:
        page = open_page(base, "/gallery?dataset=photos")
        show_all(page, len(HOSTILE))
        assert HOSTILE[0] in page.locator("a.tile .caption").all_inner_texts()
        assert page.evaluate("window.harmed") is None
        for path in [str(tiles(page).nth(number).get_attribute("href")) for number in range(0, 40, 8)]:
            page.goto(path)
            page.wait_for_timeout(100)  # handlers run after it has loaded
            assert page.evaluate("window.harmed") is None
