"""diffusion-pipe's latent cache: database and shards written here, as the format's description says."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import torch
from helpers.foreign_files import Bomb, damaged, items_quietly, latents_of, reasons, saved, split, write
from helpers.photo_files import write_photo
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from latentcache.errors import ConfigError, DatasetError
from latentcache.families import family_named
from latentcache.interop.formats import diffusion_pipe
from latentcache.interop.formats.diffusion_pipe import NOTE_DERIVED, NOTE_MASK, NOTE_NO_IMAGE
from latentcache.interop.importing import import_cache
from latentcache.interop.readers import ForeignImage
from latentcache.loading.cache import LatentCache
from latentcache.precache.workspace import Workspace
from latentcache.types import Crop, Geometry, Refusal, Size

LATENTS = [latents_of(1, 96, 64), latents_of(2, 96, 64), latents_of(3, 96, 64)]


def item(latents: Any, path: Any, **changes: Any) -> dict[str, Any]:
    return {"latents": latents, "mask": None, "image_spec": [None, path], "caption": ["a red car"]} | changes


def write_cache(folder: Path, shards: list[list[bytes]]) -> Path:
    """A `latents` folder: blobs one after another in shards, and their offsets in the database."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "metadata.db"
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("CREATE TABLE fingerprint(value)")
        connection.execute("INSERT INTO fingerprint VALUES ('d3adb33f')")
        connection.execute("CREATE TABLE items(shard, shard_index)")
        for shard, blobs in enumerate(shards):
            connection.execute(f"CREATE TABLE shard_{shard}(offset, size)")
            offset = 0
            for index, blob in enumerate(blobs):
                connection.execute("INSERT INTO items VALUES (?, ?)", (shard, index))
                connection.execute(f"INSERT INTO shard_{shard} VALUES (?, ?)", (offset, len(blob)))
                offset += len(blob)
            write(folder / f"shard_{shard}.bin", b"".join(blobs))
    return path


def change(folder: Path, *statements: str) -> None:
    with closing(sqlite3.connect(folder / "metadata.db")) as connection, connection:
        for statement in statements:
            connection.execute(statement)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Three photos of 120 x 64 pixels."""
    for number, name in enumerate(["a.png", "b.png", "sub/c.png"]):
        write_photo(tmp_path / "images" / name, number, (120, 64))
    return tmp_path / "images"


@pytest.fixture
def folder(images: Path) -> Path:
    """A cache in the images' folder, as diffusion-pipe keeps it: two shards."""
    folder = images / "cache/sdxl/cache_0.667x64x96x1/latents"
    blobs = [
        saved(item(latents, str(images / name)))
        for latents, name in zip(LATENTS, ["a.png", "b.png", "sub/c.png"], strict=True)
    ]
    write_cache(folder, [blobs[:2], blobs[2:]])
    return folder


def test_items_name_their_images(images, folder):
    found, texts, refusals = split(diffusion_pipe.read(images, images=images))
    assert texts == [] and refusals == []
    assert [image.sample_id for image in found] == ["a.png", "b.png", "sub/c.png"]
    for image, latents in zip(found, LATENTS, strict=True):
        assert torch.equal(image.latents, latents)
        assert (image.is_scaled, image.output, image.note) == (True, "sample", NOTE_DERIVED)
        assert image.image_path == images / image.sample_id
        assert image.geometry == Geometry(Size(120, 64), Size(120, 64), Crop(12, 0), Size(96, 64))


@pytest.mark.parametrize("root", ["", "cache", "cache/sdxl", "cache/sdxl/cache_0.667x64x96x1/latents"])
def test_any_folder_above_is_enough(images, folder, root):
    assert len(split(diffusion_pipe.read(images / root, images=images))[0]) == 3


def test_images_that_were_moved_are_found_below_the_recorded_root(images, folder, tmp_path):
    moved = images.rename(tmp_path / "moved")
    found = split(diffusion_pipe.read(moved, images=moved))[0]
    assert [image.image_path for image in found] == [None] * 3
    found = split(diffusion_pipe.read(moved, images=moved, recorded_root=str(images)))[0]
    assert [image.image_path for image in found] == [moved / "a.png", moved / "b.png", moved / "sub/c.png"]


def test_without_images_the_bucket_stands_for_their_size(images, folder):
    found, _, refusals = split(diffusion_pipe.read(folder))
    assert refusals == []
    assert [image.sample_id for image in found] == [
        f"{str(images)[1:]}/{name}" for name in ("a.png", "b.png", "sub/c.png")
    ]
    assert {image.geometry for image in found} == {Geometry(Size(96, 64), Size(96, 64), Crop(0, 0), Size(96, 64))}
    assert {(image.image_path, image.note) for image in found} == {(None, NOTE_NO_IMAGE)}


def test_a_recorded_path_is_never_opened_outside_the_images_folder(images, folder, tmp_path):
    outside = write_photo(tmp_path / "outside.png", 9, (200, 200))
    for recorded in (str(outside), f"{images}/../outside.png", "../outside.png"):
        write_cache(folder, [[saved(item(LATENTS[0], recorded))]])
        (only,) = items_quietly(diffusion_pipe.read(folder, images=images))
        if isinstance(only, ForeignImage):
            assert only.image_path is None and only.geometry.original_size == (96, 64)
        else:
            assert "no path of a file" in only.detail


def test_a_mask_is_that_of_the_sample_and_noted(images, folder):
    pixels = torch.rand(96, 64, generator=torch.Generator().manual_seed(2)).half()
    write_cache(folder, [[saved(item(LATENTS[0], str(images / "a.png"), mask=pixels))]])
    (found,), _, _ = split(diffusion_pipe.read(folder, images=images))
    means = torch.nn.functional.interpolate(pixels.float()[None, None], size=(12, 8), mode="area")[0]
    torch.testing.assert_close(found.mask.float() / 255, means, rtol=0, atol=0.501 / 255)
    assert found.note == f"{NOTE_DERIVED}; {NOTE_MASK}"


@pytest.mark.parametrize("mask", [torch.ones(12, 8), torch.ones(96, 64) * 2, torch.ones(1, 96, 64), [1]])
def test_a_mask_of_another_form_is_refused(images, folder, mask):
    write_cache(folder, [[saved(item(LATENTS[0], str(images / "a.png"), mask=mask))]])
    found, _, (refusal,) = split(diffusion_pipe.read(folder, images=images))
    assert found == [] and refusal.reason == "corrupt" and "mask is" in refusal.detail


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (LATENTS[0], "it must be a dict"),
        (item(LATENTS[0][None], "/a.png"), "3 dimensions"),
        (item(None, "/a.png"), "NoneType"),
        (item(LATENTS[0], PurePosixPath("/a.png")), "restricted reader"),
        (item(LATENTS[0], "/a.png", image_spec=["/data/a.tar", "a.png"]), "in the tar"),
        (item(LATENTS[0], "/a.png", image_spec="/a.png"), "image_spec"),
        (item(LATENTS[0], 5), "image_spec"),
        (item(LATENTS[0], ""), "no path of a file"),
        (item(LATENTS[0], "/"), "no path of a file"),
        (item(LATENTS[0], "/a\0.png"), "no path of a file"),
    ],
    ids=["tensor", "batch", "no-latents", "path-object", "tar", "spec-string", "number", "empty", "root", "nul"],
)
def test_an_item_of_another_form_is_refused(images, folder, content, words):
    write_cache(folder, [[saved(content), saved(item(LATENTS[1], str(images / "b.png")))]])
    found, _, (refusal,) = split(diffusion_pipe.read(folder, images=images))
    assert [image.sample_id for image in found] == ["b.png"]
    assert words in refusal.detail


def test_nothing_in_a_blob_is_run(folder, tmp_path):
    write_cache(folder, [[saved(Bomb(tmp_path / "made"))]])
    assert reasons(split(diffusion_pipe.read(folder))[2]) == ["corrupt"]
    assert not (tmp_path / "made").exists()


def test_a_shard_that_was_cut_loses_its_last_items_only(images, folder):
    shard = folder / "shard_0.bin"
    shard.write_bytes(shard.read_bytes()[:-10])
    found, _, (refusal,) = split(diffusion_pipe.read(folder, images=images))
    assert [image.sample_id for image in found] == ["a.png", "sub/c.png"]
    assert refusal.reason == "truncated"


def test_a_missing_shard_is_listed_for_each_of_its_items(images, folder):
    (folder / "shard_0.bin").unlink()
    found, _, refusals = split(diffusion_pipe.read(folder, images=images))
    assert len(found) == 1 and reasons(refusals) == ["missing", "missing"]


@pytest.mark.parametrize(
    "place", ["(-1, 10)", "(0, 0)", "(0, NULL)", "('0', 10)", "(0.5, 10)", "(x'00', 10)"], ids=lambda place: place
)
def test_places_that_are_no_numbers_refuse_the_database(folder, place):
    change(folder, "DELETE FROM shard_1", f"INSERT INTO shard_1 VALUES {place}")
    found, _, refusals = split(diffusion_pipe.read(folder))
    assert found == [] and reasons(refusals) == ["corrupt"]


def test_a_huge_blob_is_refused_before_it_is_read(folder):
    change(folder, f"UPDATE shard_1 SET size = {1 << 62}")
    assert reasons(split(diffusion_pipe.read(folder))[2]) == ["corrupt"]


def test_a_view_or_a_virtual_table_in_place_of_a_shard_is_not_queried(folder):
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS offset, i AS size FROM n"
    change(folder, "DROP TABLE shard_0", "DROP TABLE shard_1", f"CREATE VIEW shard_0 AS {endless}")
    started = time.monotonic()
    (refusal,) = items_quietly(diffusion_pipe.read(folder))
    assert isinstance(refusal, Refusal) and "no table shard" in refusal.detail
    assert time.monotonic() - started < 5


def test_a_computed_column_cannot_make_huge_values(folder):
    change(
        folder,
        "DROP TABLE shard_1",
        "CREATE TABLE shard_1(n, offset AS (zeroblob(1000000000)), size AS (n))",
        "INSERT INTO shard_1(n) VALUES (1)",
    )
    assert reasons(split(diffusion_pipe.read(folder))[2]) == ["corrupt"]


def test_the_folder_is_not_written_to(folder):
    folder.chmod(0o555)
    before = sorted(path.name for path in folder.iterdir())
    try:
        assert len(split(diffusion_pipe.read(folder))[0]) == 3
    finally:
        folder.chmod(0o755)
    assert sorted(path.name for path in folder.iterdir()) == before


def test_a_database_that_is_being_written_is_refused(folder):
    write(folder / "metadata.db-journal", b"something")
    (refusal,) = split(diffusion_pipe.read(folder))[2]
    assert refusal.reason == "unreadable" and "-journal" in refusal.detail


def test_a_folder_without_a_cache_says_so(tmp_path):
    assert reasons(split(diffusion_pipe.read(tmp_path))[2]) == ["missing"]
    with pytest.raises(DatasetError, match="is not a folder"):
        diffusion_pipe.read(tmp_path / "none")


def test_a_path_with_odd_characters_is_opened(images, folder, tmp_path):
    odd = folder.rename(tmp_path / "50% #1? Bär")
    assert len(split(diffusion_pipe.read(odd))[0]) == 3


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_database_raises_nothing(images, folder, tmp_path, data):
    write(tmp_path / "copy/metadata.db", data.draw(damaged((folder / "metadata.db").read_bytes())))
    for shard in folder.glob("shard_*.bin"):
        write(tmp_path / "copy" / shard.name, shard.read_bytes())
    for found in items_quietly(diffusion_pipe.read(tmp_path / "copy", images=images)):
        if isinstance(found, ForeignImage):
            assert any(torch.equal(found.latents, latents) for latents in LATENTS)
        else:
            assert isinstance(found, Refusal)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_shard_is_refused_or_read_as_it_was(images, folder, data):
    blob = saved(item(LATENTS[2], str(images / "sub/c.png")))
    changed = data.draw(damaged(blob).map(lambda damage: damage.ljust(len(blob), b"\0")[: len(blob)]))
    write(folder / "shard_1.bin", changed)
    items = items_quietly(diffusion_pipe.read(folder, images=images))
    assert len(items) == 3
    if isinstance(items[2], ForeignImage):
        assert torch.equal(items[2].latents, LATENTS[2])


def test_the_command_line_imports_latents_that_lack_their_text(run_json, images, folder, tmp_path):
    arguments = ["import", images, "--from", "diffusion-pipe", "--images", images, "--cache", tmp_path / "out"]
    code, report = run_json(*arguments)
    assert (code, report["num_images"], report["num_incomplete"], report["num_refused"]) == (1, 3, 3, 0)
    assert report["notes"] == {NOTE_DERIVED: 3}


FAMILIES = {"flux": "flux", "chroma": "chroma", "qwen_image": "qwen-image", "wan": "wan"}


def write_family(images: Path, model: str, shape: tuple[int, ...]) -> torch.Tensor:
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    write_cache(images / f"cache/{model}/cache_0.667x64x96x1/latents", [[saved(item(latents, str(images / "a.png")))]])
    return latents


@pytest.mark.parametrize("model", FAMILIES)
def test_latents_of_other_families_are_imported_unscaled(images, model):
    family = family_named(FAMILIES[model])
    frames = [1] if family.latent.is_video else []
    latents = write_family(images, model, (16, *frames, 12, 8))
    foreign, workspace = diffusion_pipe.read(images, images=images), Workspace()
    assert foreign.family == family.name
    report = import_cache(foreign, workspace, name="mine")
    assert report.refused == [] and report.num_images == 1
    cache = LatentCache(store=workspace.store, manifests=workspace.manifests, unverified=True)
    (ref,) = cache.manifest("mine").rows["a.png"].images
    entry = cache.get(ref.key)
    torch.testing.assert_close(cache.scaling(cache.manifest("mine")).apply(entry.tensors["latents"]), latents)
    assert entry.record.identity["imported"]["output"] == ("mean" if frames else "sample")
    assert ref.geometry.target_size == Size(96, 64)


def test_caches_of_two_models_need_a_family_and_others_are_refused_by_name(images, folder):
    write_family(images, "flux", (16, 12, 8))
    with pytest.raises(ConfigError, match="are of sdxl, flux, and a manifest holds one family: give --family"):
        diffusion_pipe.read(images, images=images)
    found, _, (refusal,) = split(diffusion_pipe.read(images, images=images, family="flux"))
    assert len(found) == 1 and "of the model sdxl, not of flux" in refusal.detail
    write_family(images / "other", "flux2", (128, 6, 4))
    found, _, (refusal,) = split(diffusion_pipe.read(images / "other"))
    assert found == [] and refusal.reason == "unsupported-format" and "flux2" in refusal.detail
