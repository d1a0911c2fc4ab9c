"""The page in Chromium: scrolling, searching, without scripts, narrow, and looked at by axe.

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
from helpers.page_server import photo_cache
from helpers.serving import serving_here
from playwright.sync_api import Browser, Page, expect, sync_playwright

from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.dataset.row_table import Ref
from latentcache.service.page.views import url

pytestmark = pytest.mark.extended

CHROMIUM = Path("/usr/bin/chromium")
# The second line: no connection of Chromium's own, which would fail here, and write to its log.
ARGUMENTS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
AXE = gzip.decompress((Path(__file__).parent / "axe.min.js.gz").read_bytes()).decode()
VIEW, PHONE = {"width": 1200, "height": 800}, {"width": 390, "height": 844}
SAMPLE = url("/sample", dataset="photos", id="001.png")
LEFT = ("htmx:sendAbort, ", "htmx:afterRequest, ")
"""What htmx writes when a page is left while it loads: no fault. One that failed says `htmx:sendError` besides."""


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
    with serving_here(folder / "cache", writes=False, show_photos=True) as running:
        yield running.url


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
        page.on("console", lambda said: None if said.text.startswith(LEFT) else faults.append(f"console: {said.text}"))
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


def show_all(page: Page, num_tiles: int) -> None:
    """Scroll to the end until no tile is left to load: new ones may be laid out after the key."""
    found = [tiles(page).count()]
    while found[-1] < num_tiles and len(found) < 40:
        page.keyboard.press("End")
        page.wait_for_timeout(250)
        found.append(tiles(page).count())
    assert found[-1] == num_tiles and found[0] == 24, found


def test_the_gallery_loads_more_while_scrolling(open_page: OpenPage, base: str) -> None:
    page = open_page(base, "/gallery")
    expect(tiles(page)).to_have_count(24)
    page.wait_for_load_state("networkidle")
    assert page.evaluate("[...document.images].every(image => !image.complete || image.naturalWidth > 0)")
    # A pixel for each latent's row and column.
    assert page.evaluate("document.images[1].naturalWidth * 8 == document.images[1].getAttribute('width')")
    show_all(page, 63)
    assert page.locator(".more").count() == 0


def test_search_and_filters_work_while_typing(open_page: OpenPage, base: str) -> None:
    page = open_page(base, "/gallery")
    status = page.get_by_role("status")
    page.get_by_label("Search captions and ids").press_sequentially("number 17")
    expect(status).to_have_text("1 sample")
    assert page.url == f"{base}/gallery?search=number%2017"
    page.get_by_label("Search captions and ids").fill("")
    page.get_by_label("State").select_option("refused")
    expect(status).to_have_text("1 sample: cannot be used for training")
    page.get_by_label("State").select_option("")
    page.get_by_label("Dataset").select_option("held-out")
    expect(status).to_have_text("2 samples")
    tiles(page).first.click()
    expect(page.get_by_role("heading", level=1)).to_have_text("000.png")
    page.go_back()
    expect(status).to_have_text("2 samples")


def test_it_works_without_scripts(open_page: OpenPage, base: str) -> None:
    page = open_page(base, "/gallery", java_script_enabled=False)
    page.get_by_label("Search captions and ids").fill("house")
    page.get_by_role("button", name="Search").click()
    expect(page.get_by_role("status")).to_have_text("60 samples")
    page.get_by_role("link", name="More samples").click()
    expect(tiles(page)).to_have_count(24)
    tiles(page).last.click()
    expect(page.get_by_role("heading", level=2).first).to_have_text("Photo and cached latents")


def test_on_a_phone(open_page: OpenPage, base: str) -> None:
    """Nothing is wider than the screen, and the filters are folded until one is set."""
    page = open_page(base, "/", viewport=PHONE, has_touch=True, is_mobile=True)
    for path in ("/", SAMPLE, "/health", "/gallery"):
        page.goto(path)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], path
        ends = page.evaluate("[...document.querySelectorAll('header nav a')].map(a => a.getBoundingClientRect().right)")
        assert ends and max(ends) <= PHONE["width"], path
    expect(page.get_by_label("State")).to_be_hidden()
    page.get_by_text("Filters").click()
    page.get_by_label("State").select_option("refused")
    expect(page.get_by_role("status")).to_have_text("1 sample: cannot be used for training")
    page.reload()
    expect(page.get_by_label("State")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_violation(open_page: OpenPage, base: str, scheme: str) -> None:
    """Every rule in light; in dark those of contrast, since the rest is the same."""
    found, options, paths = [], "{runOnly: ['color-contrast']}", ["/", "/gallery?search=7", SAMPLE, "/health"]
    if scheme == "light":
        options, paths = "{}", [*paths, "/login", "/gallery?state=refused", "/sample?dataset=photos&id=broken.jpg"]
    page = open_page(base, color_scheme=scheme, bypass_csp=True)
    red = int(page.evaluate("getComputedStyle(document.body).backgroundColor")[4:].partition(",")[0])
    assert (red > 128) is (scheme == "light")
    for path in paths:
        page.goto(path)
        page.evaluate(AXE)
        for fault in page.evaluate(f"axe.run({options})")["violations"]:
            nodes = [node["html"] for node in fault["nodes"]]
            found.append(f"{path}: {fault['id']}: {fault['help']}: {nodes[:3]}")
    assert found == []


def test_hostile_texts_do_nothing(open_page: OpenPage, tmp_path: Path) -> None:
    manifest = photo_cache(tmp_path, 2)
    row = manifest.rows["000.png"]
    rows = {text: replace(row, sample_id=text, captions=(Ref.of_text(text, row.captions[0].key),)) for text in HOSTILE}
    ManifestFolder(tmp_path / "cache" / "manifests").write(replace(manifest, rows=rows))
    with serving_here(tmp_path / "cache", writes=False, show_photos=True) as running:
        page = open_page(running.url, "/gallery?dataset=photos")
        show_all(page, len(HOSTILE))
        assert HOSTILE[0] in page.locator("a.tile .caption").all_inner_texts()
        assert page.evaluate("window.harmed") is None
        shown_at = [str(tiles(page).nth(number).get_attribute("href")) for number in range(0, 40, 8)]
        for path in shown_at:
            page.goto(path)
            page.wait_for_timeout(100)  # handlers run after it has loaded
            assert page.evaluate("window.harmed") is None
