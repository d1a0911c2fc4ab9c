"""What all exports to shards share: round trips, scaling, dtypes, folders, sizes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pyarrow.parquet as pq
import pytest
import torch
import yaml
from foreign_samples import FACTOR, image, pairs, text
from helpers.photo_files import write_photo
from shard_samples import any_entry, assert_equal, cache_of, entries, items, reimported

from latentcache.errors import ConfigError, ReadOnlyError, SampleError, StoreError
from latentcache.identity import caption_digest
from latentcache.interop.formats import mds, parquet, webdataset
from latentcache.interop.readers import ForeignImage
from latentcache.loading.cache import LatentCache
from latentcache.types import Entry

READABLE = pytest.mark.parametrize("module", [webdataset, mds], ids=["webdataset", "mds"])
ALL = pytest.mark.parametrize("module", [webdataset, mds, parquet], ids=["webdataset", "mds", "parquet"])


@READABLE
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_an_import_of_an_export_has_the_same_bits(tmp_path: Path, module: ModuleType, dtype: torch.dtype) -> None:
    cache = cache_of(items(dtype))
    report = module.export(cache, "foreign", tmp_path / "shards", shard_bytes=1 << 14)
    assert (report.num_images, report.num_texts, report.skipped) == (4, 4, [])
    again, imported = reimported(module.read(tmp_path / "shards"))
    assert_equal(again, cache)
    assert (imported.num_samples, imported.num_unverified, imported.refused) == (3, 8, [])
    files = [path for path in (tmp_path / "shards").rglob("*") if path.is_file()]
    assert report.num_files == len(files) and report.bytes_written == sum(path.stat().st_size for path in files)
    assert not [path for path in files if path.name.endswith(".tmp")]


@READABLE
def test_records_repeat_what_was_declared(tmp_path: Path, module: ModuleType) -> None:
    module.export(cache_of(items()), "foreign", tmp_path / "shards")
    again, report = reimported(module.read(tmp_path / "shards"))
    stated = any_entry(again).record.identity["imported"]["declared"]
    assert (stated["vae"], stated["scaled"], stated["output"]) == ("not known: imported from test", False, "sample")
    assert any_entry(again).record.identity["trust"] == "unverified"
    assert again.manifest("foreign").common["imported"]["declared"] == stated == report.declared
    assert "declared  vae: not known" in report.to_text()
    strict = LatentCache(store=again.store, manifests=again.manifests)
    with pytest.raises(SampleError, match="unverified"):
        strict.batch(["a.png"], device="cpu")


@READABLE
def test_scaled_latents_say_so_and_come_back_unscaled(tmp_path: Path, module: ModuleType) -> None:
    cache = cache_of(items())
    module.export(cache, "foreign", tmp_path / "shards", scaled=True)
    assert json.loads((tmp_path / "shards/latentcache.json").read_text())["latents"].startswith("scaled")
    foreign = module.read(tmp_path / "shards")
    found = next(iter(foreign.items()))
    assert found.is_scaled
    again, _ = reimported(foreign)
    for name, (_, tensors) in entries(again).items():
        for field, tensor in tensors.items():
            torch.testing.assert_close(tensor, entries(cache)[name][1][field], rtol=1e-6, atol=1e-6)


@ALL
def test_a_dtype_is_converted_or_refused_by_rule(tmp_path: Path, module: ModuleType) -> None:
    cache = cache_of(items(torch.bfloat16))
    report = module.export(cache, "foreign", tmp_path / "kept")
    assert any("bfloat16 was written as float32" in note for note in report.notes)
    module.export(cache, "foreign", tmp_path / "half", dtype=torch.float16)
    for folder, name in (("kept", "float32"), ("half", "float16")):
        found = json.loads((tmp_path / folder / "latentcache.json").read_text())["dtypes"]
        assert set(map(tuple, found.values())) == {(name,)}
    with pytest.raises(ConfigError, match="numpy has no others"):
        module.export(cache, "foreign", tmp_path / "brain", dtype=torch.bfloat16)
    assert not (tmp_path / "brain").exists()


@ALL
def test_what_a_dtype_cannot_hold_is_skipped(tmp_path: Path, module: ModuleType) -> None:
    large = image("large.png")
    large.latents[0, 0, 0] = 1e6
    cache = cache_of([large, text("large.png"), *pairs("b.png", "c.png")])
    report = module.export(cache, "foreign", tmp_path / "shards", dtype=torch.float16)
    assert [(refusal.sample_id, refusal.reason) for refusal in report.skipped] == [("large.png", "bad-output")]
    assert "give --dtype float32" in report.skipped[0].detail and report.num_images == 2


@READABLE
def test_scaled_bfloat16_loses_no_bits(tmp_path: Path, module: ModuleType) -> None:
    cache = cache_of(items(torch.bfloat16))
    module.export(cache, "foreign", tmp_path / "shards", scaled=True)
    for item in module.read(tmp_path / "shards").items():
        if isinstance(item, ForeignImage):
            _, stored = entries(cache)[item.sample_id, item.geometry.flip]
            assert torch.equal(item.latents, stored["latents"].float() * FACTOR)


@READABLE
def test_a_draw_from_bfloat16_moments_is_not_rounded(
    tmp_path: Path, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = cache_of(items(torch.bfloat16)[2:])
    get = cache.get

    def with_moments(key: str) -> Entry:
        entry = get(key)
        if (latents := entry.tensors.get("latents")) is None:
            return entry
        return replace(entry, tensors={"moments": torch.cat([latents, torch.zeros_like(latents)])})

    monkeypatch.setattr(cache, "get", with_moments)
    module.export(cache, "foreign", tmp_path / "shards", seed=1)
    found = next(item for item in module.read(tmp_path / "shards").items() if isinstance(item, ForeignImage))
    assert found.output == "sample" and found.latents.dtype is torch.float32
    assert not torch.equal(found.latents, found.latents.bfloat16().float())


@ALL
def test_scaling_that_rounds_float16_is_noted(tmp_path: Path, module: ModuleType) -> None:
    cache = cache_of(items(torch.float16))
    plain = module.export(cache, "foreign", tmp_path / "plain")
    scaled = module.export(cache, "foreign", tmp_path / "scaled", scaled=True)
    assert plain.notes == {} and [count for note, count in scaled.notes.items() if "rounded to float16" in note] == [4]
    assert module.export(cache, "foreign", tmp_path / "full", scaled=True, dtype=torch.float32).notes == {}


@ALL
def test_a_caption_that_is_not_utf_8_is_skipped(tmp_path: Path, module: ModuleType) -> None:
    cache = cache_of([*pairs("a.png", "c.png"), image("b.png"), text("b.png", caption="half \ud83d a pair")])
    report = module.export(cache, "foreign", tmp_path / "shards")
    (refusal,) = report.skipped
    assert (refusal.sample_id, refusal.reason, refusal.detail) == ("b.png", "unreadable", "a caption is not UTF-8")
    assert report.num_images == 2


def test_what_was_stated_stays_in_its_cell_of_the_card(tmp_path: Path) -> None:
    """A statement may be that of other people's shards."""
    parquet.export(cache_of(items()), "foreign", tmp_path / "plain")
    webdataset.export(cache_of(items()), "foreign", tmp_path / "shards")
    file = tmp_path / "shards/latentcache.json"
    described = json.loads(file.read_text())
    described["declaration"]["vae"] = "of mine |\n| licence | MIT |\n\n# Mine"
    file.write_text(json.dumps(described))
    again, _ = reimported(webdataset.read(tmp_path / "shards"))
    parquet.export(again, "foreign", tmp_path / "card")
    text, plain = ((tmp_path / name / "README.md").read_text() for name in ("card", "plain"))
    assert "| VAE | of mine \\| \\| licence \\| MIT \\| # Mine |\n" in text
    assert len(text.splitlines()) == len(plain.splitlines())


@READABLE
def test_an_image_is_found_by_its_own_name(tmp_path: Path, module: ModuleType) -> None:
    r"""Archives of Windows that were unpacked elsewhere leave files such as `sub\a.png`."""
    names = ("sub\\a.png", "b.png")
    for number, name in enumerate(names):
        write_photo(tmp_path / "photos" / name, number, (80, 160))
    module.export(cache_of(pairs(*names)), "foreign", tmp_path / "shards")
    found = [each for each in module.read(tmp_path / "shards", images=tmp_path / "photos").items()]
    latents = [each for each in found if isinstance(each, ForeignImage)]
    assert {(each.sample_id, each.image_path) for each in latents} == {
        (name, tmp_path / "photos" / name) for name in names
    }


@READABLE
def test_a_caption_that_is_not_known_is_not_taken_for_the_empty_one(tmp_path: Path, module: ModuleType) -> None:
    cache = cache_of([image("a.png"), text("a.png", caption=None), image("b.png"), text("b.png", caption="")])
    module.export(cache, "foreign", tmp_path / "shards")
    again, report = reimported(module.read(tmp_path / "shards"))
    assert_equal(again, cache)
    assert report.num_unknown_captions == 1
    for found in (again, cache):
        rows = found.manifest("foreign").rows
        sources = {name: found.get(row.captions[0].key).record.identity["source"] for name, row in rows.items()}
        assert sources == {"a.png": None, "b.png": caption_digest("")}


@ALL
def test_an_export_goes_to_a_new_folder(tmp_path: Path, module: ModuleType) -> None:
    cache = cache_of(items())
    (tmp_path / "other").write_text("")
    with pytest.raises(StoreError, match="is not empty"):
        module.export(cache, "foreign", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
    with pytest.raises(StoreError, match="no manifest 'nonsense'"):
        module.export(cache, "nonsense", tmp_path / "new")
    with pytest.raises(ConfigError, match="a shard of 1 bytes"):
        module.export(cache, "foreign", tmp_path / "new", shard_bytes=1)
    with pytest.raises(SampleError, match="unverified"):
        module.export(LatentCache(store=cache.store, manifests=cache.manifests), "foreign", tmp_path / "new")
    assert not (tmp_path / "new").exists()


@ALL
def test_what_was_cut_short_has_no_index(tmp_path: Path, module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = cache_of(items())
    get, calls = cache.get, iter(range(6))

    def fails(*arguments: object, **options: object) -> object:
        if next(calls, None) is None:
            raise ReadOnlyError(tmp_path)
        return get(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(cache, "get", fails)
    with pytest.raises(ReadOnlyError):
        module.export(cache, "foreign", tmp_path / "shards", shard_bytes=1 << 12)
    left = {path.name for path in (tmp_path / "shards").rglob("*") if path.is_file()}
    assert left and not left & {"index.json", "latentcache.json", "README.md", ".info.json", "index.sqlite"}
    assert not [name for name in left if name.startswith(".") and name.endswith(".tmp")]


def test_parquet_has_the_bytes_and_a_card(tmp_path: Path) -> None:
    cache = cache_of(items(torch.float16))
    parquet.export(cache, "foreign", tmp_path / "shards", shard_bytes=1 << 14)
    files = sorted((tmp_path / "shards/data").iterdir())
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    assert len(files) > 1 and files[0].name == "train-00000.parquet"
    for row in rows:
        latents = torch.frombuffer(bytearray(row["latents"]), dtype=getattr(torch, row["latents_dtype"]))
        expected_geometry, expected = entries(cache)[row["sample_id"], False]
        assert torch.equal(latents.reshape(row["latents_shape"]), expected["latents"])
        assert row["geometry"] == expected_geometry.to_json() and row["scaled"] is False
        assert row["captions"][0] == row["caption"]
    assert [row["sample_id"] for row in rows if row["latents_flipped"] is not None] == ["a.png"]
    assert [len(row["captions"]) for row in rows] == [2, 1, 1]
    _, head, text = (tmp_path / "shards/README.md").read_text().split("---\n", 2)
    front = yaml.safe_load(head)
    assert front["license"] == "unknown"
    assert front["configs"][0]["data_files"] == [{"split": "train", "path": "data/train-*.parquet"}]
    assert "**Latents are unscaled" in text and "| samples, latents, texts | 3, 4, 4 |" in text
    assert "not known: imported from test" in text
