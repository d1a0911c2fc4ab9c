"""Shards of other families than the first: frames, scaling by channel, texts of natural length, pooled ones."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from foreign_samples import Foreign
from shard_samples import DECLARATION, assert_equal, cache_of, reimported

from latentcache.dataset.buckets import fit
from latentcache.errors import ConfigError
from latentcache.families import family_named
from latentcache.interop.declaration import parse_declaration
from latentcache.interop.foreign_family import published_scaling, spread_of
from latentcache.interop.formats import mds, parquet, webdataset
from latentcache.interop.importing import import_cache
from latentcache.interop.readers import ForeignImage, ForeignItem, ForeignText
from latentcache.loading.cache import LatentCache
from latentcache.precache.workspace import Workspace
from latentcache.types import Size

READABLE = pytest.mark.parametrize("module", [webdataset, mds], ids=["webdataset", "mds"])
EACH = pytest.mark.parametrize("family", ["wan", "krea2", "z-image", "flux"])


def items_of(family: str) -> list[ForeignItem]:
    """Three samples with texts of 5 to 7 rows; of FLUX.1 of 6, with pooled ones."""
    found: list[ForeignItem] = []
    declared, geometry = family_named(family), fit(Size(80, 160), Size(64, 128))
    for number, name in enumerate(("a.png", "b.png", "sub/c.png")):
        generator = torch.Generator().manual_seed(number)
        frames = [1] if declared.latent.is_video else []
        latents = torch.randn(16, *frames, 8, 16, generator=generator)
        found.append(ForeignImage(name, f"{name}.bin", None, latents, True, "mean", geometry))
        rows = 6 if family == "flux" else 5 + number
        embeds = torch.randn(rows, *([3] if family == "krea2" else []), 8, generator=generator).bfloat16()
        pooled = torch.randn(4, generator=generator).bfloat16() if "pooled_prompt_embeds" in declared.fields else None
        found.append(ForeignText((name,), f"{name}.text", f"of {name}", embeds, pooled))
    return found


def cache_for(family: str) -> LatentCache:
    workspace = Workspace()
    foreign = Foreign(items_of(family), family=family, keeps_padding=family == "flux")
    report = import_cache(foreign, workspace, name="foreign")
    assert not report.refused and report.num_samples == 3
    return LatentCache(store=workspace.store, manifests=workspace.manifests, unverified=True)


@EACH
@READABLE
def test_an_import_of_an_export_is_of_the_same_family(tmp_path: Path, module: ModuleType, family: str) -> None:
    cache = cache_for(family)
    report = module.export(cache, "foreign", tmp_path / "shards")
    assert (report.num_images, report.num_texts, report.skipped) == (3, 3, [])
    again, imported = reimported(module.read(tmp_path / "shards"), store_dtype=None)
    assert not imported.refused
    manifest, expected = (each.manifest("foreign") for each in (again, cache))
    assert {name: manifest.common.get(name) for name in ("family", "scaling", "image_encoding", "text_encoding")} == {
        name: expected.common.get(name) for name in ("family", "scaling", "image_encoding", "text_encoding")
    }
    for row in manifest.rows.values():
        other = expected.rows[row.sample_id]
        for ours, theirs in ((row.images[0], other.images[0]), (row.captions[0], other.captions[0])):
            left, right = again.get(ours.key), cache.get(theirs.key)
            assert left.ragged == right.ragged and left.tensors.keys() == right.tensors.keys()
            for field, tensor in left.tensors.items():  # numpy has no bfloat16
                assert torch.equal(tensor, right.tensors[field].float())


@READABLE
def test_texts_are_padded_to_the_length_of_their_encoding(tmp_path: Path, module: ModuleType) -> None:
    """Chroma's are padded to all of it: with more rows the last bits differ."""
    stated = {"family": "chroma", "text_encoders": "t5", "keeps_padding": False, "max_length": 256}
    fields = {"latents": "latents.npy", "prompt_embeds": "prompt_embeds.npy"}
    declaration = parse_declaration(DECLARATION | stated | {"fields": fields}, "test")
    workspace = Workspace()
    foreign = Foreign(items_of("chroma"), family="chroma", keeps_padding=False, declaration=declaration)
    assert not import_cache(foreign, workspace, name="foreign").refused
    cache = LatentCache(store=workspace.store, manifests=workspace.manifests, unverified=True)
    module.export(cache, "foreign", tmp_path / "shards")
    again, _ = reimported(module.read(tmp_path / "shards"))
    for each in (cache, again):
        assert each.batch(["a.png"], device="cpu")["prompt_embeds"].shape == (1, 256, 8)


@READABLE
def test_scaled_latents_come_back_unscaled(tmp_path: Path, module: ModuleType) -> None:
    cache = cache_for("wan")
    module.export(cache, "foreign", tmp_path / "shards", scaled=True)
    described = json.loads((tmp_path / "shards/latentcache.json").read_text())
    assert described["latents"] == "scaled: (latents - mean) / std is done, as the denoiser expects it"
    assert described["declaration"]["fields"].keys().isdisjoint({"pooled_prompt_embeds"})
    again, _ = reimported(module.read(tmp_path / "shards"))
    for row in again.manifest("foreign").rows.values():
        stored = again.get(row.images[0].key).tensors["latents"]
        other = cache.get(cache.manifest("foreign").rows[row.sample_id].images[0].key).tensors["latents"]
        torch.testing.assert_close(stored, other, rtol=1e-5, atol=1e-5)


def test_a_table_has_a_shape_for_each_text(tmp_path: Path) -> None:
    parquet.export(cache_for("krea2"), "foreign", tmp_path)
    assert "shift factor None, mean and std as in latentcache.json." in (tmp_path / "README.md").read_text()
    rows = pq.read_table(next((tmp_path / "data").iterdir())).to_pylist()
    assert [row["prompt_embeds_shape"] for row in rows] == [[5, 3, 8], [6, 3, 8], [7, 3, 8]]
    assert "pooled_prompt_embeds" not in rows[0]
    card = yaml.safe_load((tmp_path / "README.md").read_text().split("---")[1])
    assert card["configs"][0]["data_files"]


WAN = DECLARATION | {"family": "wan", "scaling_factor": 1.0, "fields": {"latents": "latents.npy"}}


@pytest.mark.parametrize(
    ("changes", "detail"),
    [
        ({"family": "sd4"}, "family: Input should be 'sdxl'"),
        ({"max_length": 513}, "max_length is 513, but the pipeline of wan takes 512 tokens at most"),
        ({"max_length": 0}, "max_length: Input should be greater than or equal to 1"),
        ({"rule": "mean_std"}, "mean has 0 numbers and std 0"),
        ({"mean": [0.0] * 16}, "mean has 16 numbers and std 0"),
        ({"mean": [0.0], "std": [0.0]}, "std holds a number that is not above 0"),
        (
            {"fields": {"latents": "l.npy", "prompt_embeds": "p.npy", "pooled_prompt_embeds": "q.npy"}},
            "fields needs prompt_embeds, or no texts",
        ),
    ],
    ids=["family", "longest", "shortest", "rule", "counts", "zero", "fields"],
)
def test_a_declaration_must_fit_its_family(changes: dict[str, object], detail: str) -> None:
    with pytest.raises(ConfigError, match=detail):
        parse_declaration(WAN | changes, "test")


def test_a_declaration_without_a_family_says_what_it_said_before() -> None:
    declared = parse_declaration(DECLARATION | {"fields": {"latents": "latents.npy"}}, "test")
    assert declared.statement().keys() == {*DECLARATION, "shift_factor", "text_encoders"}


def test_published_constants_are_those_of_diffusers() -> None:
    import inspect

    import diffusers

    for name in ("AutoencoderKLWan", "AutoencoderKLQwenImage"):
        defaults = inspect.signature(getattr(diffusers, name).__init__).parameters
        for family in ("wan", "qwen-image", "krea2"):
            scaling = published_scaling(family)
            assert list(scaling.mean) == defaults["latents_mean"].default
            assert list(scaling.std) == defaults["latents_std"].default
    assert spread_of(published_scaling("flux")) == pytest.approx(2.769, abs=1e-3)
    latents = published_scaling("wan").undo(torch.randn(16, 1, 256, 256, generator=torch.Generator().manual_seed(0)))
    assert spread_of(published_scaling("wan")) == pytest.approx(latents.std().item(), rel=1e-2)
    with pytest.raises(ConfigError, match="in the weights of its VAE"):
        published_scaling("flux2")


def test_a_cache_of_the_first_family_is_as_before() -> None:
    from shard_samples import items

    manifest = cache_of(items()).manifest("foreign")
    assert manifest.common["text_encoding"] == {} and not {"family", "scaling"} & manifest.common.keys()
    assert_equal(cache_of(items()), cache_of(items()))
