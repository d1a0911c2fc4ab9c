"""The page in Chromium: scrolling, searching, hostile texts, and looked at by axe.

Nothing may be written to the console, and nothing requested from elsewhere. Where Chromium is not installed these tests
fail: `apt-get install chromium` (scripts/test.py does it).
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.hostile_texts import HOSTILE
from helpers.page_caches import COMMON
from helpers.page_server import page_of, photo_cache
from playwright.sync_api import Browser, Page, expect, sync_playwright

from latentcache.dataset.manifest import Manifest
from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.dataset.row_table import CaptionRef, Row
from latentcache.service.page.text import url

pytestmark = pytest.mark.page

CHROMIUM = Path("/usr/bin/chromium")
# The second line: no connection of Chromium's own, which would fail here, and write to its log.
ARGUMENTS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
AXE = gzip.decompress((Path(__file__).parent / "axe.min.js.gz").read_bytes()).decode()
VIEW = {"width": 1200, "height": 800}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if not CHROMIUM.exists():
        pytest.fail(f"{CHROMIUM} is not installed: apt-get install chromium", pytrace=False)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("browser")
    photo_cache(folder, 60)
    with page_of(folder / "cache", show_photos=True) as base:
        yield base


OpenPage = Callable[..., Page]


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """Opens a page. At the end nothing may have gone wrong in any of them."""
    faults: list[str] = []
    contexts = []

    def open_page(base: str, path: str = "/", **options: Any) -> Page:
        # axe's script is not one of the page's: the page alone is loaded under its own policy.
        context = browser.new_context(base_url=base, **{"viewport": VIEW, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(15_000)
        page.on("console", lambda message: faults.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: faults.append(f"error: {error}"))
        page.on("dialog", lambda dialog: faults.append(f"dialog: {dialog.message}"))
        page.on("request", lambda request: None if request.url.startswith(base) else faults.append(request.url))
        page.goto(path)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert faults == []


def tiles(page: Page) -> Any:
    return page.locator("a.tile")


def images_loaded(page: Page) -> bool:
    """Whether each picture that is on the screen has its pixels."""
    return bool(page.evaluate("[...document.images].every(image => !image.complete || image.naturalWidth > 0)"))


def test_the_gallery_loads_more_while_scrolling(open_page: OpenPage, base: str) -> None:
    page = open_page(base, "/gallery")
    expect(tiles(page)).to_have_count(24)
    page.wait_for_load_state("networkidle")
    assert images_loaded(page)
    # A pixel for each latent's row and column.
    assert page.evaluate("document.images[1].naturalWidth * 8 == document.images[1].getAttribute('width')")
    for count in (48, 63):
        page.keyboard.press("End")
        expect(tiles(page)).to_have_count(count)
    assert page.locator(".more").count() == 0
    page.wait_for_load_state("networkidle")
    assert images_loaded(page)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_violation(open_page: OpenPage, base: str, scheme: str) -> None:
    """Every rule in light; in dark those of contrast, since the rest is the same."""
    found = []
    options = "{}" if scheme == "light" else "{runOnly: ['color-contrast']}"
    paths = ["/", "/gallery", url("/sample", dataset="photos", id="001.png"), "/health"]
    if scheme == "light":
        paths += ["/login", "/gallery?state=refused", "/sample?dataset=photos&id=broken.jpg"]
    for path in paths:
        page = open_page(base, path, color_scheme=scheme, bypass_csp=True)
        page.wait_for_load_state("networkidle")
        page.evaluate(AXE)
        result = page.evaluate(f"axe.run({options})")
        for fault in result["violations"]:
            nodes = [node["html"] for node in fault["nodes"]]
            found.append(f"{path}: {fault['id']}: {fault['help']}: {nodes[:3]}")
    assert found == []


def test_hostile_texts_do_nothing(open_page: OpenPage, tmp_path: Path) -> None:
    row = photo_cache(tmp_path, 2).rows["000.png"]
    rows = {text: replace(row, sample_id=text, captions=(CaptionRef(text, row.captions[0].key),)) for text in HOSTILE}
    manifest = Manifest("photos", "train", 1, COMMON, dict[str, Row](rows))
    ManifestFolder(tmp_path / "cache" / "manifests").write(manifest)
    with page_of(tmp_path / "cache", show_photos=True) as base:
        page = open_page(base, "/gallery?dataset=photos")
        page.keyboard.press("End")
        expect(tiles(page)).to_have_count(len(HOSTILE))
        shown = page.locator("a.tile .caption").all_inner_texts()
        assert HOSTILE[0] in shown
        assert page.evaluate("window.harmed") is None
        for text in HOSTILE[::8]:
            tile = tiles(page).nth(HOSTILE.index(text))
            tile.hover()
            page.goto(str(tile.get_attribute("href")))
            page.wait_for_load_state("networkidle")
            assert page.evaluate("window.harmed") is None
            page.go_back()
            page.keyboard.press("End")
            expect(tiles(page)).to_have_count(len(HOSTILE))
