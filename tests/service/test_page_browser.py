"""The page in Chromium: scrolling, searching, dark and narrow, by keyboard, and looked at by axe.

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
from latentcache.dataset.row_table import Ref, Row
from latentcache.service.page.text import url

pytestmark = pytest.mark.page

CHROMIUM = Path("/usr/bin/chromium")
# The second line: no connection of Chromium's own, which would fail here, and write to its log.
ARGUMENTS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
AXE = gzip.decompress((Path(__file__).parent / "axe.min.js.gz").read_bytes()).decode()
VIEW, PHONE = {"width": 1200, "height": 800}, {"width": 390, "height": 844}
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


def test_search_and_filters_work_while_typing(open_page: OpenPage, base: str) -> None:
    page = open_page(base, "/gallery")
    page.get_by_label("Search captions and ids").press_sequentially("number 17")
    expect(page.get_by_role("status")).to_have_text("1 sample")
    expect(tiles(page)).to_have_count(1)
    assert page.url == f"{base}/gallery?search=number%2017"
    page.get_by_label("Search captions and ids").fill("")
    page.get_by_label("State").select_option("refused")
    expect(page.get_by_role("status")).to_have_text("1 sample: cannot be used, for a stated reason")
    page.get_by_label("State").select_option("")
    page.get_by_label("Dataset").select_option("held-out")
    expect(page.get_by_role("status")).to_have_text("2 samples")
    tiles(page).first.click()
    expect(page.get_by_role("heading", level=1)).to_have_text("000.png")
    page.go_back()
    expect(page.get_by_role("status")).to_have_text("2 samples")


def test_it_works_without_scripts(open_page: OpenPage, base: str) -> None:
    page = open_page(base, "/gallery", java_script_enabled=False)
    page.get_by_label("Search captions and ids").fill("house")
    page.get_by_role("button", name="Search").click()
    expect(page.get_by_role("status")).to_have_text("60 samples")
    page.get_by_role("link", name="More samples").click()
    expect(tiles(page)).to_have_count(24)
    tiles(page).last.click()
    expect(page.get_by_role("heading", level=2).first).to_have_text("The photo, and what is cached of it")


def test_by_keyboard_alone(open_page: OpenPage, base: str) -> None:
    page = open_page(base, "/gallery")

    def focused() -> str:
        return str(page.evaluate("document.activeElement.innerText || document.activeElement.id"))

    page.keyboard.press("Tab")
    assert focused() == "Skip to the content"
    assert page.evaluate("document.activeElement.getBoundingClientRect().left") >= 0
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert focused() == "search"
    page.keyboard.type("number 5")
    page.keyboard.press("Enter")
    expect(page.get_by_role("status")).to_have_text("15 samples")
    for _ in range(4):
        page.keyboard.press("Tab")
    assert "a red house, number 5" in focused()
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("005.png")
    page.get_by_role("link", name="Next").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("006.png")


def test_a_sample_shows_the_photo_next_to_its_latents(open_page: OpenPage, base: str) -> None:
    page = open_page(base, url("/sample", dataset="photos", id="001.png"))
    page.wait_for_load_state("networkidle")
    photo, crop = page.locator("figure image"), page.locator("rect.crop").last
    outer, inner = photo.bounding_box(), crop.bounding_box()
    assert outer is not None
    assert inner is not None
    assert inner["height"] / outer["height"] == pytest.approx(115.4 / 128, abs=0.03)
    assert images_loaded(page)
    page.get_by_text("row of the manifest").click()
    expect(page.locator("details[open] pre")).to_contain_text('"sample_id": "001.png"')


def test_on_a_phone_nothing_is_wider_than_the_screen(open_page: OpenPage, base: str) -> None:
    for path in ("/", "/gallery", url("/sample", dataset="photos", id="001.png"), "/health"):
        page = open_page(base, path, viewport=PHONE, has_touch=True, is_mobile=True)
        page.wait_for_load_state("networkidle")
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], path
        for link in page.locator("header nav a").all():
            box = link.bounding_box()
            assert box is not None
            assert box["x"] + box["width"] <= PHONE["width"], path


def test_on_a_phone_the_filters_are_folded_until_one_is_set(open_page: OpenPage, base: str) -> None:
    wide = open_page(base, "/gallery")
    expect(wide.get_by_text("Filters")).to_be_hidden()
    expect(wide.get_by_label("Dataset")).to_be_visible()
    page = open_page(base, "/gallery", viewport=PHONE)
    expect(page.get_by_label("State")).to_be_hidden()
    page.get_by_text("Filters").click()
    page.get_by_label("State").select_option("refused")
    expect(page.get_by_role("status")).to_have_text("1 sample: cannot be used, for a stated reason")
    page.reload()
    expect(page.get_by_label("State")).to_be_visible()
    page.get_by_label("Search captions and ids").fill("zzzzzz")
    expect(page.get_by_text('Nothing matches "zzzzzz" with state "refused"')).to_be_visible()
    page.get_by_role("link", name="Clear").click()
    expect(tiles(page)).to_have_count(24)


def test_dark_and_light_follow_the_system(open_page: OpenPage, base: str) -> None:
    def brightness(scheme: str) -> int:
        page = open_page(base, "/", color_scheme=scheme)
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(int(part) for part in colour[4:-1].split(","))

    assert brightness("dark") < 100
    assert brightness("light") > 700


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
    rows = {text: replace(row, sample_id=text, captions=(Ref.of_text(text, row.captions[0].key),)) for text in HOSTILE}
    manifest = Manifest("photos", "train", 1, COMMON, dict[str, Row](rows))
    ManifestFolder(tmp_path / "cache" / "manifests").write(manifest)
    with page_of(tmp_path / "cache", show_photos=True) as base:
        page = open_page(base, "/gallery?dataset=photos")
        for count in (48, len(HOSTILE)):
            page.keyboard.press("End")
            expect(tiles(page)).to_have_count(count)
        shown = page.locator("a.tile .caption").all_inner_texts()
        assert HOSTILE[0] in shown
        assert page.evaluate("window.harmed") is None
        shown_at = [str(tiles(page).nth(number).get_attribute("href")) for number in range(0, 40, 8)]
        for path in shown_at:
            page.goto(path)
            page.wait_for_load_state("networkidle")
            assert page.evaluate("window.harmed") is None
