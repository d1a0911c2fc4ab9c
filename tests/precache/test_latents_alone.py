"""`encode.text: none`: latents are cached, captions are text, and whatever reads cached texts says what to do."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from diffusers import DDPMScheduler
from helpers.photo_files import write_photos
from helpers.tiny_configs import tiny_config
from torch.utils.data import DataLoader

from latentcache import BucketBatchSampler, LatentCache, LatentDataset, LatentLoader, ValidationRunner
from latentcache.config import Config
from latentcache.errors import ConfigError, StoreError
from latentcache.integrations.diffusers import PrecomputedDataset
from latentcache.interop.formats.kohya import export as export_kohya
from latentcache.interop.formats.webdataset import export as export_webdataset
from latentcache.loading.status import show, status
from latentcache.models.model_loader import ModelLoader
from latentcache.models.tiny import tiny_denoiser, tiny_parts
from latentcache.precache.explanation import explain
from latentcache.precache.run import run_precache
from latentcache.validation.loss import validation_loss

Make = Callable[..., Config]

ALONE = {"encode.text": "none", "encode.image_output": "mean"}
WHOLE = {"encode.image_output": "mean", "datasets.0.name": "whole"}


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Makes configs of one cache, in which `photos` has latents alone, and `whole` the same with texts."""
    folder = tmp_path_factory.mktemp("alone")
    (write_photos(folder / "photos") / "b.txt").write_text("a photo of <SKS> in the snow")
    make = partial(tiny_config, folder)
    report = run_precache(make(**ALONE))
    assert report.num_encoded == 5 and report.notes == ["validation.prompts are not cached: encode.text is none"]
    report = run_precache(make(**WHOLE))
    assert (report.num_encoded, report.num_hits) == (5 + 1 + 2, 5), "the captions, the empty one, and two prompts"
    assert [run_precache(make(**each)).num_hits for each in (ALONE, WHOLE)] == [5, 13], "texts may go and come again"
    return make


@pytest.fixture
def alone(make: Make) -> Config:
    return make(**ALONE)


def test_no_text_encoder_is_looked_at(make_config: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any) -> Any:
        raise AssertionError("texts are not encoded")

    for name in ("text", "text_encoders", "tokenizers", "tokenizers_ahead"):
        monkeypatch.setattr(ModelLoader, name, refuse)
    config = make_config(**{"encode.text": "none", "datasets.0.captions": {"variants": 3, "shuffle": True}})
    report = run_precache(config)
    assert (report.num_encoded, report.misses_by_reason, report.bytes_written > 0) == (5, {"new": 5}, True)
    assert run_precache(config).num_hits == 5
    with LatentCache(config.cache.path) as cache:
        assert cache.manifests.names() == ["photos"] and set(cache.store.stats().num_entries) == {"image"}
        row = cache.row("a.png")[1]
        assert [ref.key for ref in row.captions] == [""] * 6 and row.keys() == [row.images[0].key]
        assert cache.batch(["a.png"], device="cpu", caption=1)["caption"] == ["a house in the rain"]


@pytest.mark.parametrize("dropout_to", ["empty", "zeros"])
def test_dropout_leaves_the_latents_alone(alone: Config, dropout_to: Literal["empty", "zeros"]) -> None:
    kept = LatentDataset(alone.cache.path, "photos")
    dropped = LatentDataset(alone.cache.path, "photos", caption_dropout=1.0, dropout_to=dropout_to)
    loaders = [LatentLoader(BucketBatchSampler(each, batch_size=2), device="cpu") for each in (kept, dropped)]
    for batch, without in zip(*loaders, strict=True):
        assert without["caption"] == [""] * len(batch["caption"]) and without.keys() == batch.keys()
        assert without["sample_id"] == batch["sample_id"] and torch.equal(without["latents"], batch["latents"])


def test_a_batch_has_captions_and_no_texts(alone: Config) -> None:
    dataset, whole = (LatentDataset(alone.cache.path, name, caption="random") for name in ("photos", "whole"))
    samplers = [BucketBatchSampler(each, batch_size=2, seed=3) for each in (dataset, whole)]
    num = 0
    for batch, other in zip(*(LatentLoader(each, device="cpu", scaled=True) for each in samplers), strict=True):
        assert batch.keys() == other.keys() - {"prompt_embeds", "pooled_prompt_embeds"}
        assert {"caption", "sample_id", "latents", "add_time_ids", "original_size", "crop_top_left"} <= batch.keys()
        for name in batch.keys() - {"dataset"}:
            here, there = batch[name], other[name]
            assert torch.equal(here, there) if isinstance(here, torch.Tensor) else here == there, name
        num += len(batch["caption"])
    assert num == 5
    items = DataLoader(dataset, batch_sampler=BucketBatchSampler(dataset, batch_size=2), collate_fn=dataset.collate)
    assert all("prompt_embeds" not in dataset.place(batch, device="cpu") for batch in items)


def test_whatever_reads_texts_says_what_to_do(alone: Config) -> None:
    remedy = r"encode\.text: none\)\. Encode them live, .*or set encode\.text to all"
    with LatentCache(alone.cache.path, manifest="photos") as cache:
        for negative in (False, True):
            with pytest.raises(StoreError, match=f"photos: its texts were not encoded .{remedy}"):
                cache.prompt("", device="cpu", negative=negative)
        with pytest.raises(StoreError, match=remedy):
            validation_loss(tiny_denoiser(), cache, scheduler=DDPMScheduler(), datasets=["photos"])
        assert cache.text_shapes() is None
    with pytest.raises(StoreError, match=remedy):
        PrecomputedDataset(LatentDataset(alone.cache.path, "photos"))
    with pytest.raises(StoreError, match="some of photos, whole have cached texts, others latents alone"):
        LatentDataset(alone.cache.path, ["photos", "whole"])
    with LatentCache(alone.cache.path) as cache:
        with pytest.raises(StoreError, match="choose with"):
            cache.prompt("", device="cpu")
        assert cache.restricted("whole").prompt("", device="cpu")["prompt_embeds"].shape[0] == 1


@pytest.mark.parametrize("role", ["train", "validation"])
def test_validation_needs_live_encoders(make_config: Make, role: str) -> None:
    config = make_config(**{"encode.text": "none", "datasets.0.role": role})
    run_precache(config)
    parts = {**tiny_parts(), "unet": tiny_denoiser(), "scheduler": DDPMScheduler()}
    with LatentCache(config.cache.path) as cache:
        with pytest.raises(ConfigError, match=r"^photos gives latents alone.*live text encoders") as raised:
            ValidationRunner(parts, cache, make_config(**{"datasets.0.role": role}))
        assert raised.value.key == "encode.text"
        with pytest.raises(ConfigError, match=r"gives latents alone, but validation reads cached texts"):
            ValidationRunner(parts, cache, config)


def test_upkeep_knows_of_no_texts(make_config: Make, run: Any, run_json: Any, tmp_path: Path) -> None:
    alone = make_config(**ALONE)
    run_precache(alone)
    found = status(alone.cache.path)
    assert (found.num_lost, found.num_unused, found.store["num_entries"]) == (0, 0, {"image": 5})
    assert run("verify", alone.cache.path)[0] == 0
    code, pruned = run_json("prune", alone.cache.path)
    assert code == 0 and pruned["num_entries"] == 0
    [shown] = show(alone.cache.path, "a.png")["datasets"]
    assert [each["text"] for each in shown["captions"]] == ["a red house", "a house in the rain"]
    assert [each["kind"] for each in shown["entries"]] == ["image"]
    assert [each["kind"] for each in explain(alone, "a.png").datasets[0]["entries"]] == ["image"]
    for source, target in ((alone.cache.path, tmp_path / "far"), (tmp_path / "far", tmp_path / "near")):
        assert run("push", source, target)[0] == 0
    with LatentCache(tmp_path / "near") as cache:
        assert cache.batch(["a.png"], device="cpu")["caption"] == ["a red house"]
        for export, folder in ((export_kohya, "kohya"), (export_webdataset, "shards")):
            report = export(cache, "photos", tmp_path / folder)
            assert (report.num_images, report.num_texts) == (5, 0)
    with tarfile.open(next((tmp_path / "shards").glob("*.tar"))) as tar:
        facts = [json.load(tar.extractfile(each)) for each in tar if each.name.endswith(".json")]  # type: ignore[arg-type]
    assert {each["sample_id"]: each["captions"] for each in facts}["a.png"] == ["a red house", "a house in the rain"]
    assert all(each["keys"]["captions"] == [] for each in facts)


def test_cached_texts_of_a_trained_token_are_refused(alone: Config) -> None:
    path = alone.cache.path
    with pytest.raises(StoreError, match=r"whole: .* 1 sample .*<sks>.*: b\.png\. .*encode\.text none"):
        LatentDataset(path, "whole", trained_tokens=["<sks>"])
    with pytest.raises(StoreError, match=r"the captions of 2 samples .*: b\.png, c\.png"):
        LatentDataset(path, "whole", trained_tokens=["<sks>", "blue car"])
    assert len(LatentDataset(path, "whole", trained_tokens=["<other>"])) == 5
    assert len(LatentDataset(path, "photos", trained_tokens=["<sks>"])) == 5, "their texts are live"
