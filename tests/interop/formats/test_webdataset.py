"""WebDataset shards: members, values, dtypes and description, also as read by webdataset itself."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.foreign_samples import Foreign, image, imported, of_family, pairs, text

from latentcache.errors import ConfigError
from latentcache.interop.formats import webdataset
from latentcache.interop.importing import published_scaling
from latentcache.interop.readers import ForeignItem
from latentcache.loading.cache import LatentCache

Sample = dict[str, Any]


def items(dtype: torch.dtype = torch.float32) -> list[ForeignItem]:
    """Three samples: one with a flip and two captions, one in a subfolder, one with a non-ASCII name."""
    found: list[ForeignItem] = []
    for name in ("a.png", "sub/b.c.png", "ünï.png"):
        for flip in (False, True) if name == "a.png" else (False,):
            latents = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(len(name) + flip)) * 7.7
            found.append(image(name, latents=latents.to(dtype), flip=flip))
        captions = ("a cat", 'a cät, "sitting"\nor not') if name == "a.png" else (f"of {name}",)
        found += [text(name, caption=caption, dtype=dtype) for caption in captions]
    return found


def cache_of(contents: list[ForeignItem], family: str = "sdxl") -> LatentCache:
    cache, report = imported(Foreign(contents, family=family))
    assert not report.refused
    return cache


def read(folder: Path) -> list[Sample]:
    """The samples of the tars as read by `tarfile` and numpy: `json`, and arrays by member name."""
    samples: dict[str, Sample] = {}
    for path in sorted(folder.glob("shard-*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                key, _, part = member.name.partition(".")
                data = tar.extractfile(member).read()  # type: ignore[union-attr]
                samples.setdefault(key, {})[part] = json.loads(data) if part == "json" else np.load(io.BytesIO(data))
    return list(samples.values())


def assert_equal(found: list[Sample], cache: LatentCache) -> None:
    """Each sample has the tensors of its entries, bit for bit, and their keys."""
    rows = cache.manifest("foreign").rows
    assert [sample["json"]["sample_id"] for sample in found] == list(rows)
    for sample in found:
        facts, row = sample["json"], rows[sample["json"]["sample_id"]]
        assert facts["captions"] == [ref.text for ref in row.captions] and facts["caption"] == facts["captions"][0]
        assert facts["keys"]["captions"] == [ref.key for ref in row.captions]
        expected = {}
        for ref, suffix in zip(row.images, ("", "_flipped"), strict=False):
            assert facts[f"geometry{suffix}"] == ref.geometry.to_json()
            expected[f"latents{suffix}"] = cache.get(ref.key).tensors["latents"]
        for number, ref in enumerate(row.captions):
            named = cache.get(ref.key).tensors
            expected |= {f"{name}_{number}" if number else name: tensor for name, tensor in named.items()}
        assert sample.keys() == {"json", *(f"{name}.npy" for name in expected)}
        for name, tensor in expected.items():
            found_array, wanted = sample[f"{name}.npy"], tensor.float() if tensor.dtype is torch.bfloat16 else tensor
            assert found_array.dtype == wanted.numpy().dtype and np.array_equal(found_array, wanted.numpy()), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_an_export_has_the_same_bits(tmp_path: Path, dtype: torch.dtype) -> None:
    cache = cache_of(items(dtype))
    report = webdataset.export(cache, "foreign", tmp_path / "shards", shard_bytes=1 << 14)
    assert (report.num_images, report.num_texts, report.skipped) == (4, 4, [])
    assert_equal(read(tmp_path / "shards"), cache)
    files = [path for path in (tmp_path / "shards").rglob("*") if path.is_file()]
    shards = 2 if dtype is torch.float16 else 3  # a shard ends with the sample that fills it
    assert sorted(path.name for path in files) == ["latentcache.json", *(f"shard-00000{n}.tar" for n in range(shards))]
    assert report.num_files == len(files) and report.bytes_written == sum(path.stat().st_size for path in files)
    assert any("bfloat16 was written as float32" in note for note in report.notes) == (dtype is torch.bfloat16)


@pytest.mark.parametrize("family", ["wan", "flux"])
def test_any_family_is_exported_with_its_scaling(tmp_path: Path, family: str) -> None:
    cache = cache_of(of_family(family, "a.png", "b.png", "sub/c.png"), family)
    webdataset.export(cache, "foreign", tmp_path / "plain")
    assert_equal(read(tmp_path / "plain"), cache)
    webdataset.export(cache, "foreign", tmp_path / "scaled", scaled=True)
    scaling = published_scaling(family)
    for name, is_scaled in (("plain", False), ("scaled", True)):
        described = json.loads((tmp_path / name / "latentcache.json").read_text())
        assert (described["family"], described["scaled"], described["num_samples"]) == (family, is_scaled, 3)
        assert described["scaling"] == json.loads(json.dumps(scaling.to_json())) and described["output"] == "mean"
        assert described["common"]["text_encoding"]["family"] == family
    for plain, scaled in zip(read(tmp_path / "plain"), read(tmp_path / "scaled"), strict=True):
        expected = scaling.apply(torch.from_numpy(plain["latents.npy"]))
        assert np.array_equal(scaled["latents.npy"], expected.numpy()) and scaled["json"]["scaled"] is True


def test_what_a_dtype_cannot_hold_is_skipped(tmp_path: Path) -> None:
    large = image("large.png")
    large.latents[0, 0, 0] = 1e6
    cache = cache_of([large, text("large.png"), *pairs("b.png"), image("c.png"), text("c.png", caption=None)])
    report = webdataset.export(cache, "foreign", tmp_path, dtype=torch.float16)
    assert [(refusal.sample_id, refusal.reason) for refusal in report.skipped] == [("large.png", "bad-output")]
    assert "give --dtype float32" in report.skipped[0].detail and report.num_images == 2
    # An unknown caption is not written as the empty one.
    assert [sample["json"]["captions"] for sample in read(tmp_path)] == [["of b.png"], [None]]
    with pytest.raises(ConfigError, match="supports float16 and float32"):
        webdataset.export(cache, "foreign", tmp_path / "brain", dtype=torch.bfloat16)


@pytest.mark.extended
@pytest.mark.filterwarnings("ignore")
def test_webdataset_reads_an_export(tmp_path: Path) -> None:
    import webdataset as wds

    cache = cache_of(items(torch.float16))
    webdataset.export(cache, "foreign", tmp_path, shard_bytes=1 << 12)
    found = wds.WebDataset(f"{tmp_path}/shard-{{000000..000002}}.tar", shardshuffle=False).decode()
    assert_equal([{part: sample[part] for part in sample if not part.startswith("__")} for sample in found], cache)
