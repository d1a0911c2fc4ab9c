"""What all formats share: damage that is refused, samples that are left out, values, and files that are whole."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.foreign_files import damaged, items_quietly, saved, write
from helpers.foreign_samples import Foreign, image, imported, of_family, pairs, text
from helpers.kohya_files import dialect_a, latents_name, npz_of
from helpers.photo_files import write_photo
from helpers.tiny_models import tiny_folder
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from latentcache.config import Config
from latentcache.dataset.row_table import Ref
from latentcache.errors import ReadOnlyError
from latentcache.interop.exporting import NOTE_FIRST_CAPTION
from latentcache.interop.formats import kohya, musubi, webdataset
from latentcache.interop.formats.kohya import KohyaCache
from latentcache.interop.formats.simpletuner import SimpleTunerCache, latent_name
from latentcache.interop.readers import ForeignImage
from latentcache.loading.cache import LatentCache
from latentcache.precache.run import run_precache
from latentcache.types import Refusal

SAVED = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(0))
PLAIN = saved(SAVED)
LATENT_FILES = {
    "npz": (latents_name("a", 320, 160), npz_of(dialect_a(0, 320, 160, (128, 64), latents=SAVED.numpy()))),
    "pt": (latent_name("a.png"), PLAIN),
    "gzip": (latent_name("a.png"), gzip.compress(PLAIN, mtime=0)),
}
FILES = pytest.mark.parametrize("module", [kohya, musubi], ids=["kohya", "musubi"])
ALL = pytest.mark.parametrize("module", [kohya, musubi, webdataset], ids=["kohya", "musubi", "webdataset"])


def cache_for(module: Any, *sample_ids: str) -> LatentCache:
    """Samples of a family that the format can hold."""
    if module is musubi:
        return imported(Foreign(of_family("z-image", *sample_ids), family="z-image"))[0]
    return imported(Foreign(pairs(*sample_ids), "kohya"))[0]


def latents_in(module: Any, folder: Path) -> list[torch.Tensor]:
    """The latents in the files of an export, as they are there, by name."""
    if module is webdataset:
        found = []
        for path in sorted(folder.glob("*.tar")):
            with tarfile.open(path) as tar:
                members = [member for member in tar if ".latents" in member.name]
                data = [tar.extractfile(member).read() for member in members]  # type: ignore[union-attr]
                found += [torch.from_numpy(np.load(io.BytesIO(each))) for each in data]
        return found
    if module is musubi:
        files = [load_file(path) for path in sorted(folder.rglob("*.safetensors")) if "_te." not in path.name]
    else:
        files = [dict(np.load(path)) for path in sorted(folder.rglob("*.npz")) if "_te_" not in path.name]
    return [torch.as_tensor(file[name]) for file in files for name in file if name.startswith("latents")]


@settings(max_examples=50)
@given(data=st.data(), kind=st.sampled_from(sorted(LATENT_FILES)))
def test_a_damaged_file_is_refused_or_read_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, kind: str
) -> None:
    """Some bytes of a zip have no meaning, and those of its directory can be repaired by chance: never the values."""
    folder, (name, whole) = tmp_path_factory.mktemp("damaged"), LATENT_FILES[kind]
    write_photo(folder / "a.png", 0, (160, 320))
    write(folder / name, data.draw(damaged(whole)))
    reader = KohyaCache(folder) if kind == "npz" else SimpleTunerCache(folder, images=folder)
    for item in items_quietly(reader):
        assert isinstance(item, Refusal | ForeignImage)
        if isinstance(item, ForeignImage):
            assert torch.equal(item.latents, SAVED) and item.geometry.original_size == (160, 320)


@ALL
def test_what_cannot_be_exported_is_listed_and_the_rest_exported(tmp_path: Path, module: Any) -> None:
    """Nor is a file written outside of the folder."""
    role, outside = "mask" if module is musubi else "control 1", ["../up.png", "/abs.png", "a/../../up.png"]
    cache = cache_for(module, *outside, "half \ud83d.png", "no-image.png", "no-text.png", "part.png", "whole.png")
    manifest = cache.manifest("foreign")
    rows = dict(manifest.rows)
    image_of, row = rows["no-image.png"].images[0], rows["part.png"]
    part = Ref(row.images[0].key, row.images[0].geometry, "unverified", role, "0" * 64)
    cache.manifests.write(replace(manifest, rows=rows | {"part.png": replace(row, parts=(part,))}))
    cache.refresh()
    cache.store.remove(cache.store.find([image_of.key, rows["no-text.png"].captions[0].key]))
    report = module.export(cache, "foreign", tmp_path / "in" / "out")
    details = {each.sample_id: each.detail for each in report.skipped}
    assert {each.sample_id: each.reason for each in report.skipped} == {
        **dict.fromkeys([*outside, "half \ud83d.png"], "unreadable"),
        **dict.fromkeys(["no-image.png", "no-text.png"], "missing"),
        "part.png": "has-parts",
    }
    assert "its name is not UTF-8" in details["half \ud83d.png"] and "leads out of the folder" in details["/abs.png"]
    assert "for which the format has no place" in details["part.png"]
    assert (report.num_images, report.num_texts, report.num_unread) == (1, 1, 2)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files and {path.parent for path in files} == {tmp_path / "in" / "out"}
    half = [*pairs("a.png"), image("b.png"), text("b.png", caption="half \ud83d a pair")]
    report = kohya.export(imported(Foreign(half, "kohya"))[0], "foreign", tmp_path / "captions")
    assert [(each.sample_id, each.detail) for each in report.skipped] == [("b.png", "a caption is not UTF-8")]


@ALL
def test_the_mean_of_moments_is_written(make_config: Callable[..., Config], tmp_path: Path, module: Any) -> None:
    family = {"model.path": tiny_folder("z-image")} if module is musubi else {}
    config = make_config(**family, **{"validation.prompts": [], "datasets.0.flip": True})
    run_precache(config)
    with LatentCache(config.cache.path) as cache:
        twins = [row.images for row in cache.manifest("photos").rows.values()]
        refs = [ref for pair in twins for ref in pair if module is not musubi or not ref.geometry.flip]
        moments = [cache.get(ref.key).tensors["moments"] for ref in refs]
        means = [each[: len(each) // 2].float() for each in moments]
        report = module.export(cache, "photos", tmp_path / "out")
        assert report.notes.get(NOTE_FIRST_CAPTION, 0) == int(module is not webdataset)
        written = latents_in(module, tmp_path / "out")
    assert len(written) == len(means) == (5 if module is musubi else 10)
    assert all(any(torch.equal(latents, mean) for mean in means) for latents in written)


@FILES
def test_files_that_are_there_stay_unless_asked_for(tmp_path: Path, module: Any) -> None:
    cache = cache_for(module, "a.png")
    module.export(cache, "foreign", tmp_path)
    files = sorted(path for path in tmp_path.iterdir())
    files[0].write_bytes(b"mine")
    again = module.export(cache, "foreign", tmp_path)
    assert files[0].read_bytes() == b"mine" and again.num_files == 0
    assert {each.reason for each in again.skipped} == {"duplicate"} and "give --overwrite" in again.to_text()
    assert {each.path for each in again.skipped} == set(map(str, files))
    assert module.export(cache, "foreign", tmp_path, overwrite=True).skipped == []
    assert files[0].read_bytes() != b"mine"


@ALL
def test_a_full_disk_ends_the_export_and_leaves_no_half_file(
    tmp_path: Path, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = cache_for(module, "a.png", "b.png")
    get, calls = cache.get, iter(range(2))

    def fails(*arguments: Any, **options: Any) -> Any:
        if next(calls, None) is None:
            raise ReadOnlyError(tmp_path)
        return get(*arguments, **options)

    monkeypatch.setattr(cache, "get", fails)
    with pytest.raises(ReadOnlyError):
        module.export(cache, "foreign", tmp_path / "out")
    left = {path.name for path in (tmp_path / "out").rglob("*")}
    assert not {name for name in left if name.endswith(".tmp")} and "latentcache.json" not in left
