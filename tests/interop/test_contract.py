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
from latentcache.errors import ReadOnlyError, SampleError, StoreError
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
                members = [member for member in tar if member.name.endswith(".latents.npy")]
                data = [tar.extractfile(member).read() for member in members]  # type: ignore[union-attr]
                found += [torch.from_numpy(np.load(io.BytesIO(each))) for each in data]
        return found
    if module is musubi:
        files = [load_file(path) for path in sorted(folder.rglob("*.safetensors")) if "_te." not in path.name]
    else:
        files = [dict(np.load(path)) for path in sorted(folder.rglob("*.npz")) if "_te_" not in path.name]
    return [torch.as_tensor(file[name]) for file in files for name in file if name.startswith("latents")]


@settings(max_examples=60, deadline=None)
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
def test_samples_whose_names_or_captions_are_no_text_are_listed(tmp_path: Path, module: Any) -> None:
    cache = cache_for(module, "half \ud83d.png", "b.png")
    report = module.export(cache, "foreign", tmp_path / "out")
    assert [(each.sample_id, each.reason) for each in report.skipped] == [("half \ud83d.png", "unreadable")]
    assert "its name is not UTF-8" in report.skipped[0].detail and report.num_images == 1
    items = [*pairs("a.png"), image("b.png"), text("b.png", caption="half \ud83d a pair")]
    report = kohya.export(imported(Foreign(items, "kohya"))[0], "foreign", tmp_path / "captions")
    assert [(each.sample_id, each.detail) for each in report.skipped] == [("b.png", "a caption is not UTF-8")]


@pytest.mark.parametrize("sample_id", ["../up.png", "/abs.png", "a/../../up.png"])
def test_no_file_is_written_outside_the_folder(tmp_path: Path, sample_id: str) -> None:
    report = kohya.export(cache_for(kohya, sample_id, "b.png"), "foreign", tmp_path / "in" / "out")
    assert [(each.sample_id, each.reason) for each in report.skipped] == [(sample_id, "unreadable")]
    assert {path.parent for path in tmp_path.rglob("*.npz")} == {tmp_path / "in" / "out"}


@ALL
def test_what_is_lost_or_damaged_is_listed_and_the_rest_exported(tmp_path: Path, module: Any) -> None:
    cache = cache_for(module, "a.png", "b.png", "c.png")
    rows = cache.manifest("foreign").rows
    cache.store.remove(cache.store.find([rows["a.png"].images[0].key]))
    cache.store.remove(cache.store.find([rows["b.png"].captions[0].key]))
    report = module.export(cache, "foreign", tmp_path / "out")
    assert [(each.sample_id, each.reason) for each in report.skipped] == [("a.png", "missing"), ("b.png", "missing")]
    assert (report.num_images, report.num_texts) == (1, 1)


@ALL
def test_what_may_not_be_exported_is_refused_before_a_file_is_written(tmp_path: Path, module: Any) -> None:
    cache = cache_for(module, "a.png")
    with pytest.raises(StoreError, match="no manifest 'nonsense'"):
        module.export(cache, "nonsense", tmp_path / "out")
    strict = LatentCache(store=cache.store, manifests=cache.manifests)
    with pytest.raises(SampleError, match="unverified"):
        module.export(strict, "foreign", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@ALL
def test_the_mean_of_moments_is_written(make_config: Callable[..., Config], tmp_path: Path, module: Any) -> None:
    family = {"model.path": tiny_folder("z-image")} if module is musubi else {}
    config = make_config(**family, **{"validation.prompts": []})
    run_precache(config)
    with LatentCache(config.cache.path) as cache:
        moments = [cache.get(row.images[0].key).tensors["moments"] for row in cache.manifest("photos").rows.values()]
        means = [each[: len(each) // 2].float() for each in moments]
        module.export(cache, "photos", tmp_path / "out")
        written = latents_in(module, tmp_path / "out")
    assert len(written) == len(means) == 5
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


@ALL
def test_samples_with_parts_that_the_format_has_no_place_for_are_listed(tmp_path: Path, module: Any) -> None:
    role = "mask" if module is musubi else "control 1"
    cache = cache_for(module, "a.png", "b.png")
    manifest = cache.manifest("foreign")
    row = manifest.rows["a.png"]
    part = Ref(row.images[0].key, row.images[0].geometry, "unverified", role, "0" * 64)
    cache.manifests.write(replace(manifest, rows={**manifest.rows, "a.png": replace(row, parts=(part,))}))
    cache.refresh()
    report = module.export(cache, "foreign", tmp_path / "out")
    assert [(each.sample_id, each.reason) for each in report.skipped] == [("a.png", "has-parts")]
    assert "for which the format has no place" in report.skipped[0].detail and report.num_images == 1
