"""The page over HTTP: what it answers, what it escapes, whom it lets in, and how large the first view is."""

from __future__ import annotations

import http.client
import io
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import pytest
from helpers.hostile_texts import HOSTILE
from helpers.page_caches import COMMON
from helpers.page_server import LONG_CAPTION, page_of, photo_cache
from helpers.photo_files import write_photo
from PIL import Image

from latentcache.config_file import parse_config
from latentcache.dataset.manifest import Manifest
from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.dataset.row_table import CaptionRef, Row
from latentcache.identity import digest
from latentcache.precache.run import run_precache
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


def test_the_overview_says_what_the_cache_holds(base: str) -> None:
    text = fetch(base, "/").text
    for shown in ("Usable samples42of 43", "Refused1", "photos", "held-out", "validation", "Damaged entries0"):
        assert shown in text.replace("\n", ""), shown
    assert "Nothing is lost or damaged" in fetch(base, "/health").text


def test_the_gallery_is_paged_searched_and_filtered(base: str) -> None:
    page = fetch(base, "/gallery")
    assert len([tag for tag, attributes in page.elements if attributes.get("class") == "tile"]) == 24
    assert "43 samples" in page.text
    more = next(attributes for _, attributes in page.elements if attributes.get("class") == "more")
    rest = fetch(base, str(more["hx-get"]))
    assert len([tag for tag, attributes in rest.elements if attributes.get("class") == "tile"]) == 19
    found = fetch(base, "/gallery?search=number+17&dataset=photos&state=")
    assert found.headers["hx-replace-url"] == "/gallery?search=number%2017&dataset=photos"
    assert "1 sample" in found.text
    assert "017.png" in found.text
    refused = fetch(base, "/gallery?state=refused")
    assert "broken.jpg" in refused.text
    assert "truncated: the JPEG data ends" in refused.text
    nothing = fetch(base, "/gallery?search=zz+%3Czz&dataset=photos&state=")
    assert 'Nothing matches "zz <zz" with dataset "photos"' in nothing.text.replace("\n", "")
    assert ("a", {"class": "button plain", "href": "/gallery"}) in nothing.elements


def ids(base: str, **filters: str) -> list[str]:
    """All sample_ids that match, page by page."""
    found: list[str] = []
    path: str | None = url("/gallery", **filters)
    while path is not None:
        page = fetch(base, path)
        assert page.status == 200
        links = [str(attributes["href"]) for _, attributes in page.elements if attributes.get("class") == "tile"]
        assert len(links) <= 24
        found += [query_of(link.partition("?")[2].encode())["id"] for link in links]
        path = next(
            (attributes["hx-get"] for _, attributes in page.elements if attributes.get("class") == "more"), None
        )
    return found


def test_every_sample_is_there_once_and_search_finds_each_word(base: str) -> None:
    photos = [f"{number:03d}.png" for number in range(40)]
    assert ids(base) == ["000.png", "001.png", *photos, "broken.jpg"]
    assert ids(base, dataset="photos", search="RED 17") == ["017.png"]
    assert ids(base, dataset="photos", search="a STREET at") == ["001.png"]
    assert ids(base, search="BROKEN") == ["broken.jpg"]
    assert ids(base, search="street house") == []
    assert ids(base, dataset="photos", search="red") == [name for name in photos if name != "001.png"]


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
        states = {state: ids(base, state=state) for state in FILTERS}
        assert states == {
            "refused": ["broken.jpg"],
            "damaged": ["005.png"],
            "missing": ["004.png"],
            "unverified": ["002.png"],
            "no caption": ["003.png"],
            "caption cut off": ["001.png", "001.png"],  # also in the dataset held-out
        }
        overview = fetch(base, "/").text.replace("\n", "")
        assert "Usable samples8of 9" in overview and "Refused1" in overview and "Without a caption1" in overview
        assert "Caption cut off2" in overview
        assert "kohya" in overview
        health = fetch(base, "/health").text.replace("\n", "")
        for shown in ("Samples that lack an entry2", "Damaged entries1", "Unverified samples1", "Refused samples1"):
            assert shown in health, shown
        assert "the JPEG data ends after 12,345 bytes" in health and "a bit <b>flipped</b>" in health
        assert "the entry is not there" in health and "latentcache precache CONFIG" in health
        assert "Nothing is lost" not in health

        # A manifest that is replaced is read again, and one that is damaged hides no other.
        folder.write(replace(manifest, rows={"000.png": manifest.rows["000.png"]}))
        assert ids(base, dataset="photos") == ["000.png"]
        (folder.path / "held-out.safetensors").write_bytes(b"no manifest")
        assert ids(base, dataset="photos") == ["000.png"]
        assert fetch(base, "/gallery").status == 409
        for path in ("/", "/health"):
            assert "held-out.safetensors" in fetch(base, path).text


def test_an_empty_cache_says_what_to_run(tmp_path: Path) -> None:
    with DiskStore(tmp_path / "empty"):
        pass
    with page_of(tmp_path / "empty") as base:
        for path in ("/", "/gallery"):
            assert "Run latentcache precache CONFIG" in fetch(base, path).text
        assert "Nothing to fix" in fetch(base, "/health").text


def test_a_sample_shows_photo_crop_captions_and_records(base: str) -> None:
    page = fetch(base, url("/sample", dataset="photos", id="001.png"))
    assert LONG_CAPTION in page.text
    assert "92 tokens with begin and end" in page.text
    assert "the last 15 tokens cut off" in page.text
    assert "a street at night" in page.text
    assert "hit 3 entries are cached." in page.text
    assert "The file has the bytes that were encoded" in page.text
    assert '"provenance"' in page.text
    image = next(attributes for tag, attributes in page.elements if tag == "image")
    shown = Image.open(io.BytesIO(fetch(base, str(image["href"])).body))
    assert (shown.format, shown.size) == ("WEBP", (192, 128))
    crop = [attributes for tag, attributes in page.elements if attributes.get("class") == "crop"]
    assert [float(str(crop[0][name])) for name in ("x", "y", "width", "height")] == [0.0, 6.0, 192.0, 115.4]
    refused = fetch(base, url("/sample", dataset="photos", id="broken.jpg")).text
    assert "Refused: truncated" in refused
    assert "latentcache precache CONFIG" in refused


def test_a_sample_shows_its_control_image_and_its_mask(tmp_path: Path) -> None:
    for number, name in enumerate(("after", "before")):
        write_photo(tmp_path / name / "a.png", number, (64, 64))
    dataset = {
        "name": "pairs",
        "source": {"path": tmp_path / "after"},
        "images": {"min_side": 8},
        "buckets": {"area": 64 * 64, "step": 32},
        "control": {"path": tmp_path / "before"},
        "mask": "alpha",
    }
    cache, model = {"path": tmp_path / "cache"}, {"path": "tiny"}
    run_precache(parse_config({"cache": cache, "datasets": [dataset], "model": model, "encode": {"device": "cpu"}}))
    with page_of(tmp_path / "cache") as base:
        page = fetch(base, url("/sample", dataset="pairs", id="a.png"))
        assert "control 1: the cached latents of 64x64" in page.text
        assert "mask: one weight for each latent of 64x64" in page.text and '"kind": "mask"' in page.text
        [shown] = [each for tag, each in page.elements if tag == "img" and "control 1" in str(each.get("alt"))]
        assert fetch(base, str(shown["src"])).status == 200


def test_a_photo_that_changed_or_went_is_said_so(tmp_path: Path) -> None:
    photo_cache(tmp_path, 3)
    (tmp_path / "photos" / "002.png").unlink()
    other = tmp_path / "photos" / "000.png"
    other.write_bytes((tmp_path / "photos" / "001.png").read_bytes())
    with page_of(tmp_path / "cache", show_photos=True) as base:
        changed = fetch(base, url("/sample", dataset="photos", id="000.png"))
        assert "The file has other bytes than those that were encoded" in changed.text
        assert "entries are cached." not in changed.text
        gone = fetch(base, url("/sample", dataset="photos", id="002.png"))
        assert "No such file" in gone.text
        assert "image" not in {tag for tag, _ in gone.elements}
        assert fetch(base, url("/photo", dataset="photos", id="002.png")).status == 404


def test_photos_are_images_and_only_with_the_setting(tmp_path: Path) -> None:
    """A client that may write manifests chooses the paths."""
    secret, pipe = tmp_path / "secret.png", tmp_path / "pipe.png"
    secret.write_text("a secret", encoding="ascii")
    import os

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
        captions = (CaptionRef(text, row.captions[0].key), CaptionRef("", row.captions[0].key))
        refusal = Refusal(text, text, "corrupt", text) if number % 5 == 4 else None
        rows[text] = Row(text, text, row.source, row.images, captions, refusal)
    ManifestFolder(folder / "cache" / "manifests").write(Manifest("photos", "train", 1, COMMON, rows))
    with page_of(folder / "cache", show_photos=True) as base:
        yield base, list(rows)


def test_hostile_texts_are_shown_and_do_nothing(hostile: tuple[str, list[str]]) -> None:
    base, texts = hostile
    assert len(texts) >= 50
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


def test_wrong_addresses_are_pages_with_a_reason(base: str) -> None:
    for path, status, reason in [
        ("/gallery?dataset=../../etc", 404, "no dataset '../../etc'"),
        ("/galery", 404, "there is no page at this address"),
        ("/sample?dataset=photos&id=nope", 404, "is not in dataset photos"),
        ("/sample?dataset=photos", 422, "has a dataset and an id"),
        ("/gallery?state=lost", 422, "one of refused"),
        ("/gallery?start=-1", 422, "the number of a sample"),
        ("/gallery?search=%ff", 422, "not UTF-8"),
        ("/gallery?" + "a=b&" * 50, 422, "too long"),
        (f"/gallery?search={'x' * 600}", 422, "at most 500"),
        ("/sample/reasons?dataset=photos&id=001.png", 422, "known with a config"),
    ]:
        page = fetch(base, path)
        assert page.status == status, path
        assert reason in page.text, path
        if page.elements:
            assert_inert(page)
    assert fetch(base, "/gallery?start=999999").text.count("no samples") == 0
    assert fetch(base, "/static/..%2fpage_text.py").status == 404
    assert fetch(base, "/static/page.py").status == 404
    for path in (
        "/v1/thumbnails/xyz.webp",
        f"/v1/thumbnails/{'0' * 64}.webp",
        f"/v1/thumbnails/{'0' * 64}.webp?side=9",
    ):
        answer = fetch(base, path)
        assert answer.status in (404, 422)
        assert answer.headers["content-type"] == "application/problem+json"


def test_static_files_are_there_for_all(base: str) -> None:
    for name, kind in (("page.css", "text/css"), ("htmx.min.js", "javascript"), ("favicon.svg", "image/svg+xml")):
        found = fetch(base, static(name))
        assert found.status == 200 and kind in found.headers["content-type"] and found.body
        assert fetch(base, static(name), **{"If-None-Match": found.headers["etag"]}).status == 304


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


def test_two_servers_of_a_machine_keep_their_sessions_apart(folder: Path) -> None:
    """A browser sends the cookies of a host to all of its ports."""
    cookies: list[str] = []
    accesses = [Access(reading_token=token, is_open=False) for token in (TOKEN, OTHER)]
    with page_of(folder / "cache", access=accesses[0]) as one, page_of(folder / "cache", access=accesses[1]) as other:
        for base, token in ((one, TOKEN), (other, OTHER)):
            answer = fetch(base, "/login", "POST", urlencode({"token": token}).encode())
            cookies.append(answer.headers["set-cookie"].partition(";")[0])
        jar = dict(cookie.split("=", 1) for cookie in cookies)  # the later one in the place of one of that name
        sent = "; ".join(f"{name}={value}" for name, value in jar.items())
        assert [fetch(base, "/v1/packs", Cookie=sent).status for base in (one, other)] == [200, 200]


def test_a_sample_without_an_image_is_shown_as_one(tmp_path: Path) -> None:
    manifest = photo_cache(tmp_path, 2)
    rows = {name: replace(row, images=()) for name, row in manifest.rows.items()}
    ManifestFolder(tmp_path / "cache" / "manifests").write(replace(manifest, rows=rows))
    with page_of(tmp_path / "cache") as base:
        for path in ("/", "/gallery"):
            page = fetch(base, path)
            assert page.status == 200 and "no image" in page.text


def test_health_of_many_samples_takes_little_memory(tmp_path: Path) -> None:
    """It made sets of all keys: a gigabyte for three million."""
    manifest = photo_cache(tmp_path, 2)
    first = manifest.rows["000.png"]
    rows = {}
    for number in range(20_000):
        images = (replace(first.images[0], key=digest(b"image %d" % number)),)
        rows[str(number)] = replace(first, sample_id=str(number), images=images)
    ManifestFolder(tmp_path / "cache" / "manifests").write(replace(manifest, rows=rows))
    with page_of(tmp_path / "cache") as base:
        assert fetch(base, "/health").status == 200  # the manifest is in memory now
        tracemalloc.start()
        text = fetch(base, "/health").text
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert "20,000" in text and peak < 75 * 20_000, peak


def test_a_run_that_is_not_finished_is_named(tmp_path: Path) -> None:
    photo_cache(tmp_path, 4)
    folder = ManifestFolder(tmp_path / "cache" / "manifests")
    folder.begin("photos")
    with page_of(tmp_path / "cache") as base:
        for path in ("/", "/health"):
            assert "Not finished yet" in fetch(base, path).text
        folder.end("photos")
        assert "Not finished yet" not in fetch(base, "/").text


def test_the_views_of_a_large_cache_are_small_and_read_its_manifest_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_samples = 20_000
    clean = photo_cache(tmp_path, 1)
    row = clean.rows["000.png"]
    rows = {f"{n:06d}.png": replace(row, sample_id=f"{n:06d}.png") for n in range(num_samples)}
    ManifestFolder(tmp_path / "cache" / "manifests").write(Manifest("photos", "train", 1, COMMON, rows))
    whole, real = [], ManifestFolder.read
    monkeypatch.setattr(ManifestFolder, "read", lambda manifests, name: whole.append(name) or real(manifests, name))
    with page_of(tmp_path / "cache") as base:
        for path in ("/", "/gallery"):
            page = fetch(base, path)
            assert len(page.body) < 32_000
            assert f"{num_samples + 1:,}" in page.text
        assert "1 sample" in fetch(base, "/gallery?search=012345").text
        assert sorted(whole) == ["held-out", "photos"]
