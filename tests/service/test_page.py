"""The page over HTTP: what it answers, what it escapes, and whom it lets in."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from helpers.hostile_texts import HOSTILE
from helpers.page_server import LONG_CAPTION, photo_cache
from helpers.remote_samples import COMMON
from helpers.serving import TOKEN, Answer, RunningServer, serving_here
from PIL import Image

from latentcache.dataset.manifest import Manifest
from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.dataset.row_table import Ref, Row
from latentcache.service.page.text import query_of, static, url
from latentcache.service.page.views import FILTERS
from latentcache.store import DiskStore
from latentcache.types import Refusal


class Page(HTMLParser):
    """An answer, parsed. `text`: what a reader sees."""

    def __init__(self, answer: Answer):
        super().__init__()
        self.text, self.elements = "", list[tuple[str, dict[str, Any]]]()
        self.feed(answer.body.decode())
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def tiles(self) -> list[str]:
        """The sample_ids on a page of the gallery."""
        links = [attributes["href"] for _, attributes in self.elements if attributes.get("class") == "tile"]
        return [query_of(link.partition("?")[2].encode())["id"] for link in links]

    def assert_inert(self) -> None:
        """No script but ours, no style or script in the page itself, no address but ours."""
        for tag, attributes in self.elements:
            assert tag not in {"style", "iframe", "object", "embed", "base", "template"}
            assert not any(name.startswith("on") or name in {"style", "srcdoc"} for name in attributes), attributes
            assert not any(name.startswith(("hx-on", "data-hx")) for name in attributes), attributes
            for name in ("href", "src", "action", "hx-get", "xlink:href"):
                value = attributes.get(name)
                assert value is None or (value.startswith(("/", "#")) and not value.startswith("//")), attributes
            if tag == "script":
                assert attributes["src"].startswith("/static/htmx.min.js?v=")


def fetch(server: RunningServer, path: str, status: int = 200, **more: Any) -> Page:
    answer = server.get(path, **more)
    assert answer.status == status, (path, answer.body)
    return Page(answer)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    photo_cache(folder)
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    with serving_here(folder / "cache", writes=False, show_photos=True) as running:
        yield running


def test_every_page_is_whole_and_allows_nothing_from_elsewhere(server: RunningServer) -> None:
    sample = url("/sample", dataset="photos", id="001.png")
    searches = ("/gallery?search=red", "/gallery?start=24", "/gallery?state=no+caption")
    for path in ("/", "/gallery", "/health", "/login", sample, *searches):
        answer = server.get(path)
        assert answer.status == 200, path
        assert answer.headers["content-security-policy"].startswith("default-src 'self'; object-src 'none'"), path
        assert answer.headers["x-content-type-options"] == "nosniff", path
        assert answer.headers["cache-control"] == "no-store", path
        Page(answer).assert_inert()
        assert server.request("HEAD", path).body == b""
    assert server.get("/static/..%2fpage_text.py").status == 404


def test_the_gallery_is_paged_searched_and_filtered(server: RunningServer) -> None:
    page = fetch(server, "/gallery")
    more = next(attributes for _, attributes in page.elements if attributes.get("class") == "more")
    assert ("a", {"href": more["hx-get"]}) in page.elements, "for who has no scripts"
    rest = fetch(server, more["hx-get"]).tiles()
    photos = [f"{number:03d}.png" for number in range(40)]
    assert page.tiles() + rest == ["000.png", "001.png", *photos, "broken.jpg"] and len(rest) == 19
    assert fetch(server, "/gallery?search=RED+17&dataset=photos&state=").tiles() == ["017.png"]
    assert "truncated: the JPEG data ends" in fetch(server, "/gallery?state=refused").text
    assert "Nothing matches" in fetch(server, "/gallery?search=zz+%3Czz").text


def test_samples_are_found_by_what_is_wrong_with_them(tmp_path: Path) -> None:
    manifest = photo_cache(tmp_path, 6)
    rows = dict(manifest.rows)
    image, caption = rows["002.png"].images[0], rows["003.png"].captions[0]
    rows["002.png"] = replace(rows["002.png"], images=(replace(image, trust="unverified"),))
    rows["003.png"] = replace(rows["003.png"], captions=(replace(caption, text=""),))
    folder = ManifestFolder(tmp_path / "cache" / "manifests")
    folder.write(replace(manifest, rows=rows, common={**COMMON, "imported": {"format": "kohya"}}))
    with DiskStore(tmp_path / "cache") as store:
        store.remove([rows["004.png"].captions[0].key])
        damaged = rows["005.png"].images[0].key
        [location] = store.look_up([damaged])
        assert location is not None
        store.mark_damaged({damaged: (location, "a bit <b>flipped</b>")})
    with serving_here(tmp_path / "cache", writes=False) as server:
        assert {state: fetch(server, url("/gallery", state=state)).tiles() for state in FILTERS} == {
            "refused": ["broken.jpg"],
            "damaged": ["005.png"],
            "missing": ["004.png"],
            "unverified": ["002.png"],
            "no caption": ["003.png"],
            "caption cut off": ["001.png", "001.png"],  # also in the dataset held-out
        }
        health = fetch(server, "/health").text.replace("\n", "")
        assert "Samples that lack an entry2" in health and "Damaged entries1" in health
        assert "a bit <b>flipped</b>" in fetch(server, url("/sample", dataset="photos", id="005.png")).text
        # A manifest that is replaced is read again, and one that is damaged hides no other.
        folder.write(replace(manifest, rows={"000.png": manifest.rows["000.png"]}))
        (folder.path / "held-out.safetensors").write_bytes(b"no manifest")
        assert fetch(server, "/gallery?dataset=photos").tiles() == ["000.png"]
        fetch(server, "/gallery", 409)
        assert "held-out.safetensors" in fetch(server, "/health").text


def test_a_sample_shows_photo_crop_captions_and_records(server: RunningServer) -> None:
    page = fetch(server, url("/sample", dataset="photos", id="001.png"))
    assert LONG_CAPTION in page.text and "hit 3 entries are cached." in page.text
    assert "92 tokens with begin and end" in page.text and "the last 15 tokens cut off" in page.text
    image = next(attributes for tag, attributes in page.elements if tag == "image")
    shown = Image.open(io.BytesIO(server.get(image["href"]).body))
    assert (shown.format, shown.size) == ("WEBP", (192, 128))
    crop = next(attributes for _, attributes in page.elements if attributes.get("class") == "crop")
    assert [float(crop[name]) for name in ("x", "y", "width", "height")] == [0.0, 6.0, 192.0, 115.4]


def test_photos_are_images_and_only_with_the_setting(tmp_path: Path) -> None:
    """A client that may write manifests chooses the paths."""
    secret, pipe = tmp_path / "secret.png", tmp_path / "pipe.png"
    secret.write_text("a secret", encoding="ascii")
    os.mkfifo(pipe)
    paths = {"a": secret, "b": pipe, "c": Path("/dev/zero"), "d": tmp_path, "e": Path("x\0y")}
    rows = {name: Row(name, str(path), None, (), ()) for name, path in paths.items()}
    with DiskStore(tmp_path / "cache") as store:
        ManifestFolder(store.path / "manifests").write(Manifest("photos", "train", 1, COMMON, rows))
    with serving_here(tmp_path / "cache", writes=False, show_photos=True) as server:
        for name in rows:
            answer = server.get(url("/photo", dataset="photos", id=name))
            assert answer.status == 404 and b"a secret" not in answer.body, name
            fetch(server, url("/sample", dataset="photos", id=name))
    with serving_here(tmp_path / "cache", writes=False) as server:
        fetch(server, "/gallery?state=stale", 422)
        fetch(server, url("/photo", dataset="photos", id="a"), 403)
        assert "shows no photos" in fetch(server, url("/sample", dataset="photos", id="a")).text


def test_hostile_texts_are_shown_and_do_nothing(tmp_path: Path) -> None:
    """Those of sample_ids, captions, paths and refusals, which do harm where they are not escaped."""
    row, rows = photo_cache(tmp_path, 1).rows["000.png"], {}
    for number, text in enumerate(HOSTILE):
        captions = (Ref.of_text(text, row.captions[0].key), Ref.of_text("", row.captions[0].key))
        refusal = Refusal(text, text, "corrupt", text) if number % 5 == 4 else None
        rows[text] = Row(text, text, row.source, row.images, captions, refusal)
    ManifestFolder(tmp_path / "cache" / "manifests").write(Manifest("photos", "train", 1, COMMON, rows))
    with serving_here(tmp_path / "cache", writes=False, show_photos=True) as server:
        shown = ""
        for start in range(0, len(rows), 24):
            page = fetch(server, url("/gallery", start=start, dataset="photos"))
            page.assert_inert()
            shown += page.text
        assert "<script>" in shown
        for text in rows:
            page = fetch(server, url("/sample", dataset="photos", id=text))
            page.assert_inert()
            visible = text.encode("utf-8", "backslashreplace").decode().replace("\r\n", "\n").replace("\0", "\ufffd")
            assert visible in page.text.replace("\0", "\ufffd").replace("\r\n", "\n"), text
            fetch(server, url("/gallery", search=text[:200])).assert_inert()


def test_a_server_with_a_token_asks_for_it(folder: Path) -> None:
    with serving_here(folder / "cache", token=TOKEN) as server:

        def log_in(form: bytes, **headers: str) -> Answer:
            return server.post("/login", form, token=None, headers=headers)

        for path in ("/", "/gallery", "/sample?dataset=photos&id=001.png", "/photo?dataset=photos&id=001.png"):
            page = fetch(server, path, 401, token=None)
            assert "Log in" in page.text and "photos" not in page.text and "cache <bdi" not in page.text
        assert server.get(static("page.css"), token=None).status == 200
        for wrong in (b"token=wrong", b"token=", b"", b"\xff", b"token=" + b"x" * 8000):
            assert log_in(wrong).status == 403
        assert log_in(f"token={TOKEN}".encode(), Origin="http://elsewhere.example").status == 403
        answer = log_in(urlencode({"token": f" {TOKEN} "}).encode())
        cookie = answer.headers["set-cookie"]
        assert "SameSite=lax" in cookie, "a link from elsewhere leads to the page"
        page = fetch(server, "/", token=None, headers={"Cookie": cookie.partition(";")[0]})
        assert "held-out" in page.text and "Log out" in page.text
