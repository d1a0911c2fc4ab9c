"""The page over HTTP: what it answers, what it escapes, and whom it lets in."""

from __future__ import annotations

import http.client
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import pytest
from helpers.hostile_texts import HOSTILE
from helpers.page_caches import COMMON
from helpers.page_server import LONG_CAPTION, page_of, photo_cache
from PIL import Image

from latentcache.dataset.manifest import Manifest
from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.dataset.row_table import Ref, Row
from latentcache.service.auth import Access
from latentcache.service.page.text import query_of, static, url
from latentcache.service.page.views import FILTERS
from latentcache.store import DiskStore
from latentcache.types import Refusal

TOKEN, OTHER = "read-" * 5, "write" * 5
PAGES = ("/", "/gallery", "/health", "/login")


@dataclass
class Page:
    """An answer, parsed."""

    status: int
    headers: dict[str, str]
    body: bytes
    text: str = ""
    """What a reader sees."""
    elements: list[tuple[str, dict[str, str | None]]] = field(default_factory=list)


class _Parser(HTMLParser):
    def __init__(self, page: Page):
        super().__init__()
        self._page = page
        self.feed(page.body.decode())
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._page.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self._page.text += data


def fetch(base: str, path: str, method: str = "GET", body: bytes | None = None, **headers: str) -> Page:
    parts = urlsplit(base)
    connection = http.client.HTTPConnection(str(parts.hostname), parts.port, timeout=60)
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        page = Page(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
    finally:
        connection.close()
    if page.headers.get("content-type", "").startswith("text/html") and method != "HEAD":
        _Parser(page)
    return page


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    photo_cache(folder)
    return folder


@pytest.fixture(scope="module")
def base(folder: Path) -> Iterator[str]:
    with page_of(folder / "cache", show_photos=True) as url:
        yield url


def test_every_page_is_whole_and_allows_nothing_from_elsewhere(base: str) -> None:
    sample = url("/sample", dataset="photos", id="001.png")
    for path in (*PAGES, sample, "/gallery?search=red", "/gallery?start=24", "/gallery?state=no+caption"):
        page = fetch(base, path)
        assert page.status == 200, path
        assert page.headers["content-security-policy"].startswith("default-src 'self'; object-src 'none'"), path
        assert page.headers["x-content-type-options"] == "nosniff", path
        assert page.headers["cache-control"] == "no-store", path
        assert_inert(page)
        assert fetch(base, path, "HEAD").body == b""
    assert fetch(base, "/static/..%2fpage_text.py").status == 404


def assert_inert(page: Page) -> None:
    """No script but ours, no style or script in the page itself, no address but ours."""
    for tag, attributes in page.elements:
        assert tag not in {"style", "iframe", "object", "embed", "base", "template"}
        assert not any(name.startswith("on") or name in {"style", "srcdoc"} for name in attributes), (tag, attributes)
        assert not any(name.startswith(("hx-on", "data-hx")) for name in attributes), (tag, attributes)
        for name in ("href", "src", "action", "hx-get", "xlink:href"):
            value = attributes.get(name)
            if value is not None:
                assert value.startswith(("/", "#")) and not value.startswith("//"), (tag, value)
        if tag == "script":
            assert str(attributes["src"]).startswith("/static/htmx.min.js?v=")


def tiles(page: Page) -> list[str]:
    """The sample_ids on a page of the gallery."""
    assert page.status == 200
    links = [str(attributes["href"]) for _, attributes in page.elements if attributes.get("class") == "tile"]
    return [query_of(link.partition("?")[2].encode())["id"] for link in links]


def test_the_gallery_is_paged_searched_and_filtered(base: str) -> None:
    page = fetch(base, "/gallery")
    more = next(attributes for _, attributes in page.elements if attributes.get("class") == "more")
    rest = fetch(base, str(more["hx-get"]))
    photos = [f"{number:03d}.png" for number in range(40)]
    assert tiles(page) + tiles(rest) == ["000.png", "001.png", *photos, "broken.jpg"] and len(tiles(rest)) == 19
    assert tiles(fetch(base, "/gallery?search=RED+17&dataset=photos&state=")) == ["017.png"]
    assert "truncated: the JPEG data ends" in fetch(base, "/gallery?state=refused").text
    assert "Nothing matches" in fetch(base, "/gallery?search=zz+%3Czz").text


def test_samples_are_found_by_what_is_wrong_with_them(tmp_path: Path) -> None:
    manifest = photo_cache(tmp_path, 6)
    rows = dict(manifest.rows)
    image, caption = rows["002.png"].images[0], rows["003.png"].captions[0]
    rows["002.png"] = replace(rows["002.png"], images=(replace(image, trust="unverified"),))
    rows["003.png"] = replace(rows["003.png"], captions=(replace(caption, text=""),))
    folder = ManifestFolder(tmp_path / "cache" / "manifests")
    folder.write(Manifest("photos", "train", 1, {**COMMON, "imported": {"format": "kohya"}}, rows))
    with DiskStore(tmp_path / "cache") as store:
        store.remove([rows["004.png"].captions[0].key])
        damaged = rows["005.png"].images[0].key
        [location] = store.look_up([damaged])
        assert location is not None
        store.mark_damaged({damaged: (location, "a bit <b>flipped</b>")})
    with page_of(tmp_path / "cache") as base:
        states = {state: tiles(fetch(base, url("/gallery", state=state))) for state in FILTERS}
        assert states == {
            "refused": ["broken.jpg"],
            "damaged": ["005.png"],
            "missing": ["004.png"],
            "unverified": ["002.png"],
            "no caption": ["003.png"],
            "caption cut off": ["001.png", "001.png"],  # also in the dataset held-out
        }
        health = fetch(base, "/health").text.replace("\n", "")
        assert "Samples that lack an entry2" in health and "Damaged entries1" in health
        damaged = fetch(base, url("/sample", dataset="photos", id="005.png"))
        assert "a bit <b>flipped</b>" in damaged.text
        # A manifest that is replaced is read again, and one that is damaged hides no other.
        folder.write(replace(manifest, rows={"000.png": manifest.rows["000.png"]}))
        (folder.path / "held-out.safetensors").write_bytes(b"no manifest")
        assert tiles(fetch(base, "/gallery?dataset=photos")) == ["000.png"]
        assert fetch(base, "/gallery").status == 409
        assert "held-out.safetensors" in fetch(base, "/health").text


def test_a_sample_shows_photo_crop_captions_and_records(base: str) -> None:
    page = fetch(base, url("/sample", dataset="photos", id="001.png"))
    assert LONG_CAPTION in page.text
    assert "92 tokens with begin and end" in page.text
    assert "the last 15 tokens cut off" in page.text
    assert "hit 3 entries are cached." in page.text
    image = next(attributes for tag, attributes in page.elements if tag == "image")
    shown = Image.open(io.BytesIO(fetch(base, str(image["href"])).body))
    assert (shown.format, shown.size) == ("WEBP", (192, 128))
    crop = [attributes for tag, attributes in page.elements if attributes.get("class") == "crop"]
    assert [float(str(crop[0][name])) for name in ("x", "y", "width", "height")] == [0.0, 6.0, 192.0, 115.4]


def test_photos_are_images_and_only_with_the_setting(tmp_path: Path) -> None:
    """A client that may write manifests chooses the paths."""
    secret, pipe = tmp_path / "secret.png", tmp_path / "pipe.png"
    secret.write_text("a secret", encoding="ascii")
    os.mkfifo(pipe)
    rows = {
        name: Row(name, str(path), None, (), ())
        for name, path in {"a": secret, "b": pipe, "c": Path("/dev/zero"), "d": tmp_path, "e": Path("x\0y")}.items()
    }
    with DiskStore(tmp_path / "cache") as store:
        ManifestFolder(store.path / "manifests").write(Manifest("photos", "train", 1, COMMON, rows))
    with page_of(tmp_path / "cache", show_photos=True) as base:
        for name in rows:
            answer = fetch(base, url("/photo", dataset="photos", id=name))
            assert answer.status == 404, name
            assert b"a secret" not in answer.body
            assert fetch(base, url("/sample", dataset="photos", id=name)).status == 200
    with page_of(tmp_path / "cache") as base:
        assert 'value="stale"' not in fetch(base, "/gallery").text
        assert fetch(base, "/gallery?state=stale").status == 422
        assert fetch(base, url("/photo", dataset="photos", id="a")).status == 403
        assert "shows no photos" in fetch(base, url("/sample", dataset="photos", id="a")).text


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[str]]]:
    """A cache whose sample_ids, captions, paths and refusals do harm where they are not escaped."""
    folder = tmp_path_factory.mktemp("hostile")
    clean = photo_cache(folder, 1)
    row = clean.rows["000.png"]
    rows = {}
    for number, text in enumerate(HOSTILE):
        captions = (Ref.of_text(text, row.captions[0].key), Ref.of_text("", row.captions[0].key))
        refusal = Refusal(text, text, "corrupt", text) if number % 5 == 4 else None
        rows[text] = Row(text, text, row.source, row.images, captions, refusal)
    ManifestFolder(folder / "cache" / "manifests").write(Manifest("photos", "train", 1, COMMON, rows))
    with page_of(folder / "cache", show_photos=True) as base:
        yield base, list(rows)


def test_hostile_texts_are_shown_and_do_nothing(hostile: tuple[str, list[str]]) -> None:
    base, texts = hostile
    shown = ""
    for start in range(0, len(texts), 24):
        page = fetch(base, url("/gallery", start=start, dataset="photos"))
        assert_inert(page)
        shown += page.text
    for text in texts:
        page = fetch(base, url("/sample", dataset="photos", id=text))
        assert page.status == 200, text
        assert_inert(page)
        visible = text.encode("utf-8", "backslashreplace").decode().replace("\r\n", "\n").replace("\0", "\ufffd")
        assert visible in page.text.replace("\0", "\ufffd").replace("\r\n", "\n"), text
        assert {tag for tag, _ in page.elements} <= {
            *("html", "head", "meta", "title", "link", "script", "body", "a", "header", "img", "nav", "main", "div"),
            *("h1", "h2", "p", "bdi", "span", "section", "figure", "svg", "image", "path", "rect", "figcaption", "ul"),
            *("li", "blockquote", "dl", "dt", "dd", "code", "details", "summary", "pre", "footer"),
        }
    for text in texts:
        found = fetch(base, url("/gallery", search=text[:200]))
        assert found.status == 200
        assert_inert(found)
    assert "<script>" in shown


def test_a_server_with_a_token_asks_for_it(folder: Path) -> None:
    access = Access(reading_token=TOKEN, writing_token=OTHER, is_open=False)
    with page_of(folder / "cache", access=access) as base:
        for path in ("/", "/gallery", "/sample?dataset=photos&id=001.png", "/photo?dataset=photos&id=001.png"):
            page = fetch(base, path)
            assert page.status == 401
            assert "Log in" in page.text
            assert "photos" not in page.text and "cache <bdi" not in page.text
        assert fetch(base, "/v1/packs").status == 401
        assert fetch(base, static("page.css")).status == 200
        for wrong in (b"token=wrong", b"token=", b"", b"\xff", b"token=" + b"x" * 8000):
            assert fetch(base, "/login", "POST", wrong).status == 403
        answer = fetch(base, "/login", "POST", urlencode({"token": f" {TOKEN} "}).encode())
        cookie = answer.headers["set-cookie"]
        assert (answer.status, answer.headers["location"]) == (303, "/")
        assert "HttpOnly" in cookie
        assert "SameSite=lax" in cookie, "a link from elsewhere leads to the page"
        assert TOKEN not in cookie
        logged_in = {"Cookie": cookie.partition(";")[0]}
        page = fetch(base, "/", **logged_in).text
        assert "held-out" in page and "Log out" in page
        assert fetch(base, "/v1/packs", **logged_in).status == 200
        assert fetch(base, "/", Authorization=f"Bearer {TOKEN}").status == 200
        assert fetch(base, "/login", "POST", b"token=x", Origin="http://elsewhere.example").status == 403
