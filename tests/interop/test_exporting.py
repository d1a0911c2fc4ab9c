"""What no format can write is listed, and the other samples are exported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from foreign_samples import Foreign, image, pairs, text

from latentcache.dataset.buckets import fit
from latentcache.errors import ConfigError
from latentcache.interop.exporting import A_CLIP, NOTE_UNKNOWN
from latentcache.interop.formats import ai_toolkit, kohya, musubi, simpletuner
from latentcache.interop.importing import import_cache
from latentcache.interop.readers import ForeignImage, ForeignText
from latentcache.loading.cache import LatentCache
from latentcache.precache.workspace import Workspace
from latentcache.types import Size


@pytest.mark.parametrize(
    ("module", "sample_id", "detail"),
    [
        (kohya, "x" * 250 + ".png", "its name is too long for a file here"),
        (ai_toolkit, "x" * 250 + ".png", "its name is too long for a file here"),
        (ai_toolkit, "caf\udce9.png", "its name is not UTF-8"),
        (kohya, "half \ud83d.png", "its name is not UTF-8"),
        (simpletuner, "half \ud83d.png", "its name is not UTF-8"),
    ],
    ids=["kohya-long", "ai-toolkit-long", "ai-toolkit-latin-1", "kohya-half", "simpletuner-half"],
)
def test_names_that_the_format_cannot_have_are_listed(
    tmp_path: Path, module: ModuleType, sample_id: str, detail: str
) -> None:
    workspace = Workspace()
    format_name = {kohya: "kohya", simpletuner: "simpletuner", ai_toolkit: "ai-toolkit"}[module]
    items = [image(sample_id), text(sample_id, caption="a cat"), *pairs("b.png")]
    import_cache(Foreign(items, format_name), workspace, name="foreign")
    cache = LatentCache(store=workspace.store, manifests=workspace.manifests, unverified=True)
    report = module.export(cache, "foreign", tmp_path)
    assert {(refusal.sample_id, refusal.reason) for refusal in report.skipped} == {(sample_id, "unreadable")}
    assert detail in report.skipped[0].detail
    assert report.num_images == 1


def cache_of_wan() -> LatentCache:
    """One sample of a family with frames and texts of natural length."""
    latents = torch.randn(16, 1, 8, 16, generator=torch.Generator().manual_seed(1))
    items = [
        ForeignImage("a.png", "a.bin", None, latents, True, "mean", fit(Size(80, 160), Size(64, 128))),
        ForeignText(("a.png",), "a.text", "a cat", torch.ones(5, 8), None),
    ]
    workspace = Workspace()
    import_cache(Foreign(items, family="wan", keeps_padding=False), workspace, name="foreign")
    return LatentCache(store=workspace.store, manifests=workspace.manifests, unverified=True)


def test_a_family_whose_layout_is_not_known_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lays out files of the family wan is not known; it is for sdxl"):
        kohya.export(cache_of_wan(), "foreign", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_sdxl_is_refused_by_a_format_without_it(tmp_path: Path) -> None:
    workspace = Workspace()
    import_cache(Foreign(pairs("a.png")), workspace, name="foreign")
    cache = LatentCache(store=workspace.store, manifests=workspace.manifests, unverified=True)
    with pytest.raises(ConfigError, match="how musubi lays out files of the family sdxl is not known"):
        musubi.export(cache, "foreign", tmp_path / "out")


@pytest.mark.parametrize(("module", "family"), [(simpletuner, "sdxl"), (ai_toolkit, "sdxl"), (musubi, "z-image")])
def test_a_text_without_its_caption_is_not_exported_as_the_empty_one(
    tmp_path: Path, module: ModuleType, family: str
) -> None:
    """The trainers would take it for what they train with where a caption is dropped."""
    items = [image("a.png"), text("a.png", caption=None)]
    if family != "sdxl":
        latents = torch.randn(16, 8, 16, generator=torch.Generator().manual_seed(1))
        items = [replace(items[0], latents=latents), ForeignText(("a.png",), "text", None, torch.ones(5, 8), None)]
    workspace = Workspace()
    foreign = Foreign(items, family=family, keeps_padding=family == "sdxl")
    imported = import_cache(foreign, workspace, name="foreign", scale_check=False)
    assert not imported.refused
    cache = LatentCache(store=workspace.store, manifests=workspace.manifests, unverified=True)
    report = module.export(cache, "foreign", tmp_path / "files")
    assert (report.num_images, report.num_texts, report.notes[NOTE_UNKNOWN]) == (1, 0, 1)
    assert len([path for path in (tmp_path / "files").rglob("*") if path.is_file()]) == 1


@pytest.mark.parametrize("module", [simpletuner, ai_toolkit, musubi])
def test_clips_are_listed_where_only_images_are_read_again(tmp_path: Path, module: ModuleType) -> None:
    latents = torch.randn(16, 3, 8, 16, generator=torch.Generator().manual_seed(1))
    clip, still = image("a.gif", latents=latents), image("b.png", latents=latents[:, :1].clone())
    clip = replace(clip, geometry=replace(clip.geometry, num_frames=9))
    texts = [ForeignText((each.sample_id,), "text", "a cat", torch.ones(5, 8), None) for each in (clip, still)]
    workspace = Workspace()
    foreign = Foreign([clip, still, *texts], family="wan", keeps_padding=False)
    imported = import_cache(foreign, workspace, name="foreign", scale_check=False)
    assert not imported.refused and imported.num_samples == 2
    cache = LatentCache(store=workspace.store, manifests=workspace.manifests, unverified=True)
    report = module.export(cache, "foreign", tmp_path)
    assert [(each.sample_id, each.reason, each.detail) for each in report.skipped] == [("a.gif", *A_CLIP)]
    assert report.num_images == 1
