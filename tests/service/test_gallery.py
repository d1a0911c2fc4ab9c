"""What the gallery shows, without HTTP: pages, search, filters, states, and manifests that change or are damaged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.page_caches import COMMON, write_cache
from helpers.photo_files import write_photo

from latentcache.dataset.manifest import Manifest
from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.errors import ConfigError, DatasetError, RequestRefused, SampleError
from latentcache.service.page.summary import health, models_of, overview
from latentcache.service.page.views import PAGE_SIZE, Filters, Gallery, Manifests
from latentcache.store import DiskStore
from latentcache.types import Refusal, Size

NUM_PHOTOS = 30
REFUSED = Refusal("zz.gif", "/nowhere/zz.gif", "animated", "2 frames")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """30 photos in two buckets and one refused file; a validation set of two."""
    sizes = [(192, 128), (128, 192), (128, 192)]
    names = [f"{number:02d}.png" for number in range(NUM_PHOTOS)]
    photos = {name: write_photo(tmp_path / name, number, sizes[number % 3]) for number, name in enumerate(names)}
    captions = {name: [f"a Red house, number {name[:2]}"] for name in photos}
    captions["07.png"] = ["STRASSE bei Nacht", "a street"]
    write_cache(tmp_path / "cache", "photos", photos, captions, refused=[REFUSED])
    few = dict(list(photos.items())[:2])
    write_cache(tmp_path / "cache", "held-out", few, captions, role="validation")
    return tmp_path / "cache"


@pytest.fixture
def gallery(cache: Path) -> Iterator[Gallery]:
    with DiskStore(cache, create=False) as store:
        yield Gallery(store, Manifests(ManifestFolder(cache / "manifests")))


def ids(gallery: Gallery, **filters: str) -> list[str]:
    """All sample_ids that match, page by page."""
    found: list[str] = []
    start: int | None = 0
    while start is not None:
        page = gallery.page(Filters(**filters), start)
        assert len(page.tiles) <= PAGE_SIZE
        found += [tile.row.sample_id for tile in page.tiles]
        start = page.next_start
    return found


def test_pages_have_every_sample_once(gallery: Gallery) -> None:
    first = gallery.page(Filters())
    assert (len(first.tiles), first.next_start, first.num_found) == (PAGE_SIZE, PAGE_SIZE, NUM_PHOTOS + 3)
    every = ["00.png", "01.png", *[f"{number:02d}.png" for number in range(NUM_PHOTOS)], "zz.gif"]
    assert ids(gallery) == every
    assert gallery.page(Filters()) == first


def test_search_finds_each_word_in_captions_and_ids(gallery: Gallery) -> None:
    assert ids(gallery, search="red 17", dataset="photos") == ["17.png"]
    assert ids(gallery, search="straße") == ["07.png"]
    assert ids(gallery, search="A STREET") == ["07.png"]
    assert ids(gallery, search="zz.GIF") == ["zz.gif"]
    assert ids(gallery, search="street house") == []
    assert gallery.page(Filters(search="red", dataset="photos")).num_found == NUM_PHOTOS - 1
    with pytest.raises(ConfigError, match="at most 500"):
        Filters(search="x" * 501)


def test_filters_that_there_are_not_are_refused(gallery: Gallery) -> None:
    assert ids(gallery, dataset="held-out") == ["00.png", "01.png"]
    with pytest.raises(RequestRefused, match=r"no dataset '\.\./x'; there are: held-out, photos"):
        gallery.page(Filters(dataset="../x"))
    with pytest.raises(ConfigError, match="one of refused, damaged"):
        Filters(state="bad")


def test_states_of_samples(gallery: Gallery, cache: Path) -> None:
    store = gallery.store
    rows = gallery.manifests.get("photos").rows
    assert ids(gallery, state="refused") == ["zz.gif"]
    assert ids(gallery, state="missing") == ids(gallery, state="damaged") == []
    store.remove([rows["03.png"].images[0].key])
    assert ids(gallery, state="missing") == ["03.png"]
    assert isinstance(store, DiskStore)
    damaged = rows["04.png"].images[0].key
    location = store.catalog.look_up([damaged])[0]
    assert location is not None
    store.mark_damaged({damaged: (location, "a flipped bit")})
    assert ids(gallery, state="damaged") == ["04.png"]
    assert ids(gallery, state="missing") == ["03.png"]
    tiles = {tile.row.sample_id: tile for tile in gallery.page(Filters(dataset="photos")).tiles}
    assert [tiles[f"0{number}.png"].state for number in (2, 3, 4)] == [None, "missing", "damaged"]

    found = health(store, gallery.manifests)
    assert (found.num_lacking, found.num_damaged, found.num_unused, found.is_well) == (2, 1, 0, False)
    assert [(sample.sample_id, sample.reason) for sample in found.lacking] == [
        ("03.png", "the entry is not there"),
        ("04.png", "a flipped bit"),
    ]
    assert [(sample.sample_id, sample.reason) for sample in found.refused] == [("zz.gif", "animated")]
    assert not found.unused_damage


def test_unverified_samples_are_found(gallery: Gallery, cache: Path) -> None:
    folder = ManifestFolder(cache / "manifests")
    manifest = gallery.manifests.get("photos")
    row = manifest.rows["02.png"]
    imported = replace(row, images=(replace(row.images[0], trust="unverified"),))
    common = {**COMMON, "imported": {"format": "kohya"}}
    folder.write(Manifest("photos", "train", 1, common, {**manifest.rows, "02.png": imported}))
    assert ids(gallery, state="unverified") == ["02.png"]
    assert gallery.manifests.get("photos").imported_from == "kohya"
    assert health(gallery.store, gallery.manifests).num_unverified == 1  # type: ignore[arg-type]


def test_a_manifest_that_is_replaced_is_read_again(gallery: Gallery, cache: Path) -> None:
    before = gallery.manifests.get("held-out")
    assert gallery.manifests.get("held-out") is before
    folder = ManifestFolder(cache / "manifests")
    folder.write(Manifest("held-out", "validation", 1, COMMON, {"00.png": before.rows.row(0)}))
    assert ids(gallery, dataset="held-out") == ["00.png"]
    (cache / "manifests" / "held-out.safetensors").unlink()
    assert gallery.manifests.dataset_names() == ["photos"]


def test_a_damaged_manifest_hides_no_other(gallery: Gallery, cache: Path) -> None:
    (cache / "manifests" / "held-out.safetensors").write_bytes(b"no manifest")
    store = gallery.store
    assert isinstance(store, DiskStore)
    summary = {found.name: found for found in overview(store, gallery.manifests).datasets}
    assert summary["held-out"].manifest is None
    assert "held-out.safetensors" in summary["held-out"].problem
    assert summary["photos"].manifest is not None
    assert ids(gallery, dataset="photos")
    with pytest.raises(DatasetError):
        gallery.page(Filters())
    assert len(health(store, gallery.manifests).problems) == 1


def test_a_sample_and_its_neighbours(gallery: Gallery) -> None:
    _, before, after = gallery.sample("photos", "00.png")
    assert before is None
    assert after is not None
    assert after.sample_id == "01.png"
    _, before, after = gallery.sample("photos", "zz.gif")
    assert before is not None
    assert (before.sample_id, after) == ("29.png", None)
    with pytest.raises(SampleError, match=r"is not in dataset photos"):
        gallery.sample("photos", "nope")


def test_the_overview_counts_and_names_the_models(gallery: Gallery) -> None:
    store = gallery.store
    assert isinstance(store, DiskStore)
    found = overview(store, gallery.manifests)
    assert (found.num_samples, found.num_refused, found.num_uncaptioned) == (NUM_PHOTOS + 3, 1, 0)
    assert found.stats.num_entries == {"image": NUM_PHOTOS, "text": NUM_PHOTOS + 1}
    models = {model.part: model for model in models_of(store, found.datasets)}
    assert models["vae"].names[0].startswith("AutoencoderKL ")
    assert set(models) == {"vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"}
    assert models["vae"].origins == ["stabilityai/stable-diffusion-xl-base-1.0"]


def test_an_empty_cache_has_an_empty_page(tmp_path: Path) -> None:
    with DiskStore(tmp_path / "empty") as store:
        manifests = Manifests(ManifestFolder(store.path / "manifests"))
        page = Gallery(store, manifests).page(Filters())
        assert (page.tiles, page.next_start, page.num_found) == ((), None, 0)
        assert overview(store, manifests).num_samples == 0
        assert health(store, manifests).is_well


def test_bucket_sizes_are_heights_and_widths(gallery: Gallery) -> None:
    row, _, _ = gallery.sample("photos", "00.png")
    assert row.images[0].geometry.original_size == Size(192, 128)
    assert row.images[0].geometry.target_size.height > row.images[0].geometry.target_size.width
