"""Exports as their users' own packages read them: webdataset, Hugging Face datasets, MosaicML streaming."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.foreign_files import write
from shard_samples import cache_of, declared, entries, items, reimported

from latentcache.interop.formats import mds, parquet, webdataset
from latentcache.loading.cache import LatentCache

pytestmark = pytest.mark.remote

PEERS = Path(__file__).parents[2] / ".venv-peers" / "bin" / "python"
"""An environment of its own: scripts/bootstrap.py says why."""


@pytest.fixture(scope="module")
def cache() -> LatentCache:
    return cache_of(items(torch.float16))


def assert_sample(cache: LatentCache, sample_id: str, latents: np.ndarray, embeds: np.ndarray, caption: str) -> None:
    found = entries(cache)
    np.testing.assert_array_equal(latents, found[sample_id, False][1]["latents"].numpy(), strict=True)
    np.testing.assert_array_equal(embeds, found[sample_id, caption][1]["prompt_embeds"].numpy(), strict=True)


@pytest.mark.filterwarnings("ignore")
def test_webdataset_reads_an_export(cache: LatentCache, tmp_path: Path) -> None:
    import webdataset as wds

    webdataset.export(cache, "foreign", tmp_path, shard_bytes=1 << 12)
    samples = list(wds.WebDataset(f"{tmp_path}/shard-{{000000..000002}}.tar", shardshuffle=False).decode())
    assert [sample["json"]["sample_id"] for sample in samples] == list(cache.manifest("foreign").rows)
    for sample in samples:
        facts = sample["json"]
        assert_sample(cache, facts["sample_id"], sample["latents.npy"], sample["prompt_embeds.npy"], facts["caption"])
        assert facts["scaled"] is False
    assert samples[0]["latents_flipped.npy"].shape == (4, 8, 16)
    assert [len(sample["json"]["captions"]) for sample in samples] == [2, 1, 1]


@pytest.mark.filterwarnings("ignore")
def test_tars_that_webdataset_wrote_are_imported(tmp_path: Path) -> None:
    import webdataset as wds

    latents = np.random.default_rng(0).standard_normal((4, 8, 16)).astype(np.float16)
    (tmp_path / "tars").mkdir()
    with wds.ShardWriter(f"{tmp_path}/tars/%06d.tar", maxcount=2, verbose=False) as sink:
        for number in range(3):
            sink.write({"__key__": f"{number:04}", "npy": latents * (number + 1), "json": {"caption": "a cat"}})
    foreign = webdataset.read(tmp_path / "tars", declaration=declared(tmp_path / "tars", fields={"latents": "npy"}))
    again, report = reimported(foreign, scale_check=False)
    assert (report.num_images, report.refused) == (3, [])
    stored = entries(again)["000001.tar/0002", False][1]["latents"]
    torch.testing.assert_close(stored * 0.13025, torch.from_numpy(latents).float() * 3, rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore")
def test_datasets_loads_an_export_and_reads_its_card(
    cache: LatentCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import datasets
    from huggingface_hub import DatasetCard

    parquet.export(cache, "foreign", tmp_path / "data", shard_bytes=1 << 12)
    loaded = datasets.load_dataset(str(tmp_path / "data"), split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded["sample_id"][:] == list(cache.manifest("foreign").rows)
    for row in loaded:
        arrays = [
            np.frombuffer(row[name], row[f"{name}_dtype"]).reshape(row[f"{name}_shape"])
            for name in ("latents", "prompt_embeds")
        ]
        assert_sample(cache, row["sample_id"], arrays[0], arrays[1], row["caption"])
        assert row["geometry"]["target_size"] == [64, 128]
    card = DatasetCard.load(tmp_path / "data/README.md")
    assert card.data.license == "unknown" and card.data.pretty_name == "foreign"


STREAMING = """
import json, sys, types
import numpy as np
import transformers  # it asks whether torchvision is there
# The image datasets need torchvision; none is used.
sys.modules["streaming.vision"] = types.ModuleType("streaming.vision")
from streaming import MDSWriter, StreamingDataset

folder, out = sys.argv[1:]
dataset = StreamingDataset(local=folder, shuffle=False, batch_size=1, validate_hash="sha256")
rows = [dataset[number] for number in range(len(dataset))]
for number, row in enumerate(rows):
    np.savez(f"{out}/{number}.npz", **{name: row.pop(name) for name in list(row) if isinstance(row[name], np.ndarray)})
    row["scaling_factor"] = float(row["scaling_factor"])
json.dump(rows, open(f"{out}/rows.json", "w"))

latents = np.arange(1, 4097, dtype=np.float16).reshape(4, 32, 32)
columns = {"key": "str", "latents_256": "bytes", "array": "ndarray:float16", "width": "int32", "odd": "pkl"}
with MDSWriter(out=f"{out}/written", columns=columns, hashes=["sha1", "xxh64"], size_limit=20000) as writer:
    for number in range(3):
        sample = {"key": str(number), "latents_256": latents.tobytes(), "array": latents, "width": 256, "odd": {1}}
        writer.write(sample)
"""


def test_mosaicml_streaming_reads_an_export_and_its_shards_are_imported(cache: LatentCache, tmp_path: Path) -> None:
    assert PEERS.exists(), "run scripts/test.py --lane remote, which makes .venv-peers; or bootstrap.install(PEERS)"
    mds.export(cache, "foreign", tmp_path / "mds", shard_bytes=1 << 12)
    out = write(tmp_path / "out/program.py", STREAMING.encode()).parent
    command = [str(PEERS), "-W", "ignore", str(out / "program.py"), str(tmp_path / "mds"), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = json.loads((out / "rows.json").read_text())
    assert [row["sample_id"] for row in rows] == list(cache.manifest("foreign").rows)
    for number, row in enumerate(rows):
        with np.load(out / f"{number}.npz") as arrays:
            assert_sample(cache, row["sample_id"], arrays["latents"], arrays["prompt_embeds"], row["caption"])
            assert len(arrays["prompt_embeds_1"]) == (77 if number == 0 else 0)
        assert row["scaled"] is False and row["geometry"]["target_size"] == [64, 128]

    raw = {"latents_256": {"dtype": "float16", "shape": [4, 32, 32]}}
    for column in ("latents_256", "array"):
        fields = {"latents": column, "sample_id": "key"}
        foreign = mds.read(out / "written", declaration=declared(out / "written", fields=fields, raw=raw, scaled=False))
        again, report = reimported(foreign, scale_check=False)
        assert (report.num_images, report.refused) == (3, [])
        stored = entries(again)["2", False][1]["latents"]
        assert torch.equal(stored, torch.arange(1, 4097).half().reshape(4, 32, 32))
    fields = {"latents": "odd"}
    refused = list(mds.read(out / "written", declaration=declared(out / "written", fields=fields)).items())
    assert {refusal.reason for refusal in refused} == {"unsupported-format"}  # type: ignore[union-attr]
