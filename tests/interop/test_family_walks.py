"""Datasets of several families through shards: exported, imported and verified; and what shards have no place for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pyarrow.parquet as pq
import pytest
import torch
from foreign_samples import Foreign
from helpers.family_walks import WALKS, assert_same_entry, clips, photos, walked

from latentcache.config import Config
from latentcache.dataset.buckets import fit
from latentcache.interop.formats import mds, musubi, parquet, webdataset
from latentcache.interop.importing import import_cache
from latentcache.interop.readers import ForeignImage, ForeignText
from latentcache.interop.verification import Verification
from latentcache.loading.cache import LatentCache
from latentcache.precache.workspace import Workspace
from latentcache.store.entry import as_array
from latentcache.types import Size

pytestmark = pytest.mark.families

READABLE = pytest.mark.parametrize("module", [webdataset, mds], ids=["webdataset", "mds"])
SHARDS = pytest.mark.parametrize("module", [webdataset, mds, parquet], ids=["webdataset", "mds", "parquet"])
MEAN = {"image_output": "mean", "text_store_dtype": "float32"}


@pytest.fixture(scope="module", params=["flux", "flux2", "z-image", "qwen-image", "wan"])
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Of Wan clips of 9, 9 and 5 frames and a still image of one bucket; all are mirrored too."""
    data = clips if request.param == "wan" else photos
    return walked(tmp_path_factory.mktemp(request.param), request.param, data, **MEAN)


@READABLE
def test_shards_come_back_as_the_entries_that_precache_made(config: Config, module: ModuleType, tmp_path: Path) -> None:
    workspace = Workspace()
    with LatentCache(config.cache.path) as cache:
        manifest = cache.manifest("walk")
        num_images, num_texts = (sum(len(getattr(row, kind)) for row in manifest.rows.values()) for kind in _KINDS)
        exported = module.export(cache, "walk", tmp_path / "shards")
        assert (exported.num_images, exported.num_texts, exported.skipped) == (num_images, num_texts, [])
        foreign = module.read(tmp_path / "shards", images=config.datasets[0].source.path)
        verification = Verification(config, num_entries="all")
        report = import_cache(foreign, workspace, name="walk", scale_check=False, verification=verification)
        assert not report.refused and not report.unequal and report.num_unverified == 0, report.to_text()
        found = LatentCache(store=workspace.store, manifests=workspace.manifests)
        assert found.scaling(found.manifest("walk")) == cache.scaling(manifest)
        for row in found.manifest("walk").rows.values():
            ours = manifest.rows[row.sample_id]
            # Their keys too: a precache finds them.
            assert (row.images, row.captions) == (ours.images, ours.captions)
            for key in row.keys():
                assert_same_entry(workspace.store.get(key), cache.get(key))


_KINDS = ("images", "captions")


@READABLE
def test_scaled_shards_come_back_unscaled(config: Config, module: ModuleType, tmp_path: Path) -> None:
    workspace = Workspace()
    with LatentCache(config.cache.path) as cache:
        module.export(cache, "walk", tmp_path / "shards", scaled=True)
        report = import_cache(module.read(tmp_path / "shards"), workspace, name="walk", scale_check=False)
        assert not report.refused
        found = LatentCache(store=workspace.store, manifests=workspace.manifests, unverified=True)
        for row in cache.manifest("walk").rows.values():
            for flip in (False, True):
                one, other = (each.batch([row.sample_id], device="cpu", flip=flip) for each in (found, cache))
                torch.testing.assert_close(one["latents"], other["latents"], rtol=1e-5, atol=1e-5)
                assert one["target_size"] == other["target_size"]


def test_a_table_has_the_numbers_of_each_sample(config: Config, tmp_path: Path) -> None:
    with LatentCache(config.cache.path) as cache:
        parquet.export(cache, "walk", tmp_path / "table")
        rows = [row for file in sorted((tmp_path / "table/data").iterdir()) for row in pq.read_table(file).to_pylist()]
        assert {row["sample_id"] for row in rows} == set(cache.manifest("walk").rows)
        for row in rows:
            ours = cache.manifest("walk").rows[row["sample_id"]]
            for name, ref in zip(("geometry", "geometry_flipped"), ours.images, strict=True):
                stated = {side: value for side, value in row[name].items() if value is not None}
                assert stated == ref.geometry.to_json(), "of a clip with its number of frames"
            for field, ref in (("latents", ours.images[0]), ("prompt_embeds", ours.captions[0])):
                stored = cache.get(ref.key).tensors[field]
                assert row[f"{field}_shape"] == list(stored.shape)
                assert row[field] == as_array(stored).tobytes()


@SHARDS
@pytest.mark.parametrize("family", [name for name in WALKS if name != "wan"])
def test_samples_with_control_images_or_masks_are_listed(
    walks: Callable[[str], Config], family: str, module: ModuleType, tmp_path: Path
) -> None:
    with LatentCache(walks(family).cache.path) as cache:
        report = module.export(cache, "walk", tmp_path / "shards")
        assert [each.sample_id for each in report.skipped] == list(cache.manifest("walk").rows)
    names = "control 1, mask" if family in ("flux", "flux2") else "mask"
    assert {each.reason for each in report.skipped} == {"has-parts"}
    assert {each.detail for each in report.skipped} == {f"it has {names}, for which the format has no place"}
    assert report.num_images == 0 and not (tmp_path / "shards").exists()


@SHARDS
def test_texts_with_a_mask_of_their_padding_are_listed(tmp_path: Path, module: ModuleType) -> None:
    config = walked(tmp_path, "chroma", photos, padding="keep")
    with LatentCache(config.cache.path) as cache:
        report = module.export(cache, "walk", tmp_path / "shards")
        assert [each.sample_id for each in report.skipped] == list(cache.manifest("walk").rows)
    detail = "its texts have prompt_attention_mask, for which shards have no place: precache with encode.padding drop"
    assert {(each.reason, each.detail) for each in report.skipped} == {("unsupported-format", detail)}


def test_a_format_with_a_place_for_control_images_has_none_for_masks(
    walks: Callable[[str], Config], tmp_path: Path
) -> None:
    with LatentCache(walks("flux").cache.path) as cache:
        report = musubi.export(cache, "walk", tmp_path / "files")
    assert {each.detail for each in report.skipped} == {"it has mask, for which the format has no place"}
    assert {each.reason for each in report.skipped} == {"has-parts"} and report.num_images == 0


@pytest.fixture(scope="module")
def walks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Config]:
    """The walk of a family, which is made once."""
    made: dict[str, Config] = {}

    def walk(family: str) -> Config:
        if family not in made:
            made[family] = walked(tmp_path_factory.mktemp(family), family)
        return made[family]

    return walk


@pytest.mark.parametrize(
    ("family", "num_frames", "detail"),
    [
        ("wan", 5, "it has 3 latent frames, but its geometry has num_frames 5, which makes 2"),
        ("wan", None, "it has 3 latent frames, but its geometry has no num_frames, which makes 1"),
        ("qwen-image", 9, "its geometry has num_frames 9, but models of qwen-image take no clips"),
    ],
)
def test_a_clip_of_other_frames_than_are_stated_is_refused(family: str, num_frames: int | None, detail: str) -> None:
    latents = torch.randn(16, 3, 8, 16, generator=torch.Generator().manual_seed(1))
    geometry = fit(Size(80, 160), Size(64, 128))
    clip = ForeignImage("b.gif", "b.bin", None, latents, True, "mean", replace(geometry, num_frames=num_frames))
    still = replace(clip, sample_id="a.png", latents=latents[:, :1].clone(), geometry=geometry)
    good = replace(clip, sample_id="c.gif", geometry=replace(geometry, num_frames=9))
    items = [still, clip, *([good] if family == "wan" else [])]
    texts = [ForeignText((each.sample_id,), "text", "a cat", torch.ones(5, 8), None) for each in items]
    report = import_cache(Foreign([*items, *texts], family=family, keeps_padding=False), Workspace(), name="foreign")
    assert [(each.sample_id, each.reason) for each in report.refused] == [("b.gif", "corrupt")]
    assert report.refused[0].detail == detail
    assert report.num_samples == len(items) - 1
