"""The page over HTTP: what it answers, what it escapes, and whom it lets in."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest
import torch
from helpers.hostile_texts import HOSTILE
from helpers.page_server import LONG_CAPTION, photo_cache
from helpers.photo_files import write_photo
from helpers.remote_samples import COMMON, entries_of, make_entry
from helpers.serving import TOKEN, Answer, RunningServer, serving_here
from helpers.tiny_models import tiny_encoders, tiny_model
from PIL import Image

from latentcache.dataset.manifest import Manifest
from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.dataset.row_table import Ref, Row, RowTable
from latentcache.errors import EntryMissingError, RequestRefused, StoreError
from latentcache.families import family_named, sdxl
from latentcache.identity import key_of
from latentcache.models.model_loader import LoadedModels
from latentcache.models.vae import vae_facts
from latentcache.precache.run import run_precache
from latentcache.service.page.thumbnails import Thumbnails
from latentcache.service.page.vae_decoder import VaeDecoder
from latentcache.service.page.views import FILTERS, document, query_of, static, time, url
from latentcache.store import DiskStore, MemoryStore
from latentcache.types import Entry, Record, Refusal


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
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("page")
    photo_cache(folder)
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


def test_the_gallery_is_paged_searched_and_filtered(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    genuine, parsed = RowTable.row, list[int]()
    monkeypatch.setattr(RowTable, "row", lambda self, number: parsed.append(number) or genuine(self, number))
    page = fetch(server, "/gallery")
    more = next(attributes for _, attributes in page.elements if attributes.get("class") == "more")
    assert ("a", {"href": more["hx-get"]}) in page.elements, "without scripts"
    rest = fetch(server, more["hx-get"]).tiles()
    photos = [f"{number:03d}.png" for number in range(40)]
    assert page.tiles() + rest == ["000.png", "001.png", *photos, "broken.jpg"] and len(rest) == 19
    assert fetch(server, "/gallery?search=RED+17&dataset=photos&state=").tiles() == ["017.png"]
    assert fetch(server, "/gallery?search=house&start=48").tiles() == []
    assert fetch(server, "/gallery?search=red&state=caption+cut+off").tiles() == []
    assert "No sample matches" in fetch(server, "/gallery?search=zz+%3Czz").text
    assert "truncated: the JPEG data ends" in fetch(server, "/gallery?state=refused").text
    assert len(parsed) == 24 + 19 + 1 + 1, "no row that is not shown"


def test_samples_are_found_by_what_is_wrong_with_them(tmp_path: Path) -> None:
    manifest = photo_cache(tmp_path, 6)
    rows = dict(manifest.rows)
    image, caption = rows["002.png"].images[0], rows["003.png"].captions[0]
    rows["002.png"] = replace(rows["002.png"], source=None, images=(replace(image, trust="unverified"),))
    rows["003.png"] = replace(rows["003.png"], captions=(replace(caption, text=""),))
    rows["broken.jpg"] = replace(rows["broken.jpg"], captions=rows["004.png"].captions)
    folder = ManifestFolder(tmp_path / "cache" / "manifests")
    folder.write(replace(manifest, rows=rows, common={**COMMON, "imported": {"format": "kohya"}}))
    with DiskStore(tmp_path / "cache") as store:
        store.remove([rows["004.png"].captions[0].key])
        damaged = rows["005.png"].images[0].key
        [location] = store.look_up([damaged])
        assert location is not None
        store.mark_damaged({damaged: (location, "a bit <b>flipped</b>")})
    with serving_here(tmp_path / "cache", writes=False, show_photos=True) as server:
        assert {state: fetch(server, url("/gallery", state=state)).tiles() for state in FILTERS} == {
            "refused": ["broken.jpg"],
            "damaged": ["005.png"],
            "missing": ["004.png"],
            "unverified": ["002.png"],
            "no caption": ["003.png"],
            "caption cut off": ["001.png", "001.png"],  # also in the dataset held-out
        }
        health = fetch(server, "/health").text.replace("\n", "")
        assert "Incomplete samples2show missing or damaged" in health and "Damaged entries1" in health
        assert "since it was encoded is not known" in fetch(server, url("/sample", dataset="photos", id="002.png")).text
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
    assert "92 tokens, including" in page.text and "the last 15 tokens cut off" in page.text
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
        assert "does not show photos" in fetch(server, url("/sample", dataset="photos", id="a")).text


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


def test_a_server_with_a_token_asks_for_it(served: RunningServer) -> None:
    def log_in(form: bytes, **headers: str) -> Answer:
        return served.post("/login", form, token=None, headers=headers)

    for path in ("/", "/gallery", "/nothing", "/sample?dataset=photos&id=1.png", "/photo?dataset=photos&id=1.png"):
        page = fetch(served, path, 401, token=None)
        assert "Log in" in page.text and "photos" not in page.text and str(served.cache) not in page.text
    assert served.get(static("page.css"), token=None).status == 200
    for wrong in (b"token=wrong", b"token=", b"", b"\xff", b"token=" + b"x" * 8000):
        assert log_in(wrong).status == 403
    assert log_in(f"token={TOKEN}".encode(), Origin="http://elsewhere.example").status == 403
    cookie = log_in(urlencode({"token": f" {TOKEN} "}).encode()).headers["set-cookie"]
    assert "SameSite=lax" in cookie, "a link from another site leads to the page"
    page = fetch(served, "/", token=None, headers={"Cookie": cookie.partition(";")[0]})
    assert "photos" in page.text and "Log out" in page.text


def test_values_of_uploaded_records_that_cannot_be_shown() -> None:
    for text in ("0001-01-01T00:00:00+14:00", "9999-12-31T23:59:59-14:00", "yesterday"):
        assert time(text) == text
    assert document(json.loads("[" * 700 + "]" * 700)) == "nested too deeply to be shown"


# Its pictures, and what it knows with a config: why a sample is a miss, and where captions are cut.

assert sdxl.FAMILY.latent.preview is not None
PREVIEW = sdxl.FAMILY.latent.preview
LONG = "a red house " * 40


def sample_page(server: RunningServer, name: str, **more: Any) -> str:
    return server.get(url("/sample", dataset="photos", id=name, **more)).body.decode()


def test_reasons_and_cut_captions(make_config: Any, photos: Path) -> None:
    (photos / "b.txt").write_text(LONG, encoding="utf-8")
    config = make_config()
    run_precache(config)
    (photos / "c.txt").write_text("another caption\n", encoding="utf-8")
    with serving_here(config.cache.path, writes=False, config=config) as server:
        waiting = sample_page(server, "c.png")
        asks = url("/sample", dataset="photos", id="c.png", reasons=1)
        assert "caption changed" not in waiting and f'hx-get="{escape(asks)}"' in waiting
        page = sample_page(server, "c.png", reasons=1)
        assert "caption changed" in page and "Checking what" not in page and page.count(">hit<") == 1
        page = sample_page(server, "b.png", reasons=1)
        assert ">hit</span> 2 entries are cached as the config requires." in page
        cut = page.partition('<s class="cut">')[2].partition("</s>")[0]
        # 77 tokens, of which two are begin and end: 25 times "a red house", one token a word or more.
        assert cut and LONG.strip().endswith(cut) and len(cut) < len(LONG) - 75
        assert "decoded by the VAE" in sample_page(server, "b.png")
    with serving_here(config.cache.path, writes=False, config=make_config(**{"encode.clip_skip": 1})) as server:
        assert "clip skip changed (0 -&gt; 1)" in sample_page(server, "a.png", reasons=1)


@pytest.mark.parametrize("name", ["sdxl", "flux2", "qwen-image", "qwen-image-21", "wan"])  # one for each rule
def test_the_vae_of_each_family_decodes_its_latents_alone(name: str, make_config: Any) -> None:
    """An odd number of rows is what halving a picture may leave; joined in pairs, the last one has no partner."""
    family, vae = family_named(name), tiny_model(name)["vae"]
    decoder = VaeDecoder(make_config(), LoadedModels(family=family, **tiny_encoders(name)))
    assert decoder.downscale == family.latent.downscale
    latents = torch.randn(family.latent.channels, 9, 8, generator=torch.Generator().manual_seed(0))
    pixels, scaling = decoder(latents), vae_facts(vae, family).scaling
    rows = 8 if scaling.rule == "batch_norm" else 9
    frame = latents[None, :, None] if family.latent.is_video else latents[None, :, :rows]
    with torch.no_grad():
        whole = vae.decode(frame, return_dict=False)[0][0]
    decoded = whole[:, 0] if family.latent.is_video else whole
    expected = ((decoded / 2 + 0.5).clamp(0, 1) * 255).round().byte().movedim(0, -1).numpy().astype(int)
    # Scaling and its inverse round, and a random VAE may take a shade from one to the next.
    side, channels = family.latent.downscale, 4 if name.startswith("qwen-image-21") else 3
    assert pixels.shape == expected.shape == (rows * side, 8 * side, channels)
    assert np.abs(pixels.astype(int) - expected).max() <= 1 and pixels.std() > 1
    # FLUX.1, Z-Image, Qwen-Image and Wan all have 16 channels, and only the first two have one VAE.
    shape = tuple(frame.shape[1:])
    own: dict[str, Any] = {"scaling_factor": scaling.scaling_factor, "shift_factor": scaling.shift_factor}
    own["vae"] = {"class_name": type(vae).__name__}
    assert decoder.takes({"encoding": own}, shape) and decoder.takes({"imported": {"format": "musubi"}}, shape)
    for other in ({"scaling_factor": 1.5305}, {"vae": {"class_name": "AutoencoderOther"}}, {"vae": "?"}):
        assert not decoder.takes({"encoding": own | other}, shape), other
    assert not decoder.takes({"encoding": own}, (3, *shape[1:]))


def thumbnails_of(*entries: Entry) -> Thumbnails:
    store = MemoryStore()
    store.add(entries)
    return Thumbnails(store)


def test_latents_moments_and_imported_entries_give_the_photo_and_another_vae_no_colours(tmp_path: Path) -> None:
    """SD 1.5 has as many channels as SDXL, and another factor: SDXL's map would give wrong colours."""
    photo = Image.open(write_photo(tmp_path / "a.png", 1, (256, 384))).convert("RGB")
    small = np.asarray(photo.resize((48, 32), Image.Resampling.BOX), dtype=np.float32)
    weights, biases = (torch.tensor(values, dtype=torch.float32) for values in (PREVIEW.weights, PREVIEW.biases))
    scaled = torch.einsum("hwr,cr->chw", torch.from_numpy(small) - biases, torch.linalg.pinv(weights))
    latents, identity = scaled / PREVIEW.scaling_factor, {"kind": "image", "imported": {"format": "kohya"}}
    for entry in (
        make_entry("image", 1, {"latents": latents}),
        make_entry("image", 2, {"moments": torch.cat([latents, torch.full_like(latents, -8.0)]).half()}),
        Entry(Record(key_of(identity), "image", identity, {}), {"latents": latents}),
    ):
        data, way = thumbnails_of(entry).webp(entry.record.key)
        image = Image.open(io.BytesIO(data))
        assert (image.format, image.size, way) == ("WEBP", (48, 32), "linear")
        assert np.abs(np.asarray(image.convert("RGB"), dtype=np.float32) - small).mean() < 8
    fields = {"latents": ("float32", (4, 3, 5))}
    for factor, way in ((0.5, "channels"), ("x", "channels"), (PREVIEW.scaling_factor, "linear")):
        assert thumbnails_of().way({"encoding": {"scaling_factor": factor}}, fields) == way


def test_what_has_no_thumbnail_is_refused() -> None:
    text, flat = entries_of(1)[1], make_entry("image", 1, {"latents": torch.ones(16, 2)})
    thumbnails = thumbnails_of(text, flat)
    for key, error, what in (
        ("0" * 64, EntryMissingError, "0{64}"),
        ("../../etc/passwd", StoreError, "not a key"),
        (text.record.key, RequestRefused, "of kind text"),
        (flat.record.key, RequestRefused, r"\[C, h, w\]"),
    ):
        with pytest.raises(error, match=what):
            thumbnails.webp(key)
