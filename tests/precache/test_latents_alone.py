"""`encode.text: none`: latents are cached, captions are text, and whatever reads cached texts says what to do."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from diffusers import DDPMScheduler
from torch.utils.data import DataLoader

from latentcache import BucketBatchSampler, LatentCache, LatentDataset, LatentLoader, LoadedModels, ValidationRunner
from latentcache.config import Config
from latentcache.dataset.manifest import Manifest, manifest_bytes, read_manifest
from latentcache.errors import ConfigError, DatasetError, StoreError
from latentcache.integrations.diffusers import PrecomputedDataset
from latentcache.interop.formats.kohya import export as export_kohya
from latentcache.interop.formats.webdataset import export as export_webdataset
from latentcache.loading.status import show, status
from latentcache.models.model_loader import ModelLoader
from latentcache.models.tiny import tiny_denoiser, tiny_parts
from latentcache.precache.explanation import explain
from latentcache.precache.prompts import cache_prompts
from latentcache.precache.run import run_precache
from latentcache.precache.workspace import open_workspace
from latentcache.validation.loss import validation_loss

FIELDS = ("add_time_ids", "caption", "crop_top_left", "latents", "original_size", "resized_size", "sample_id")


@pytest.fixture
def alone(make_config: Callable[..., Config]) -> Config:
    """A config whose texts are not encoded, and its cache filled."""
    config = make_config(**{"encode.text": "none", "encode.image_output": "mean"})
    report = run_precache(config)
    assert report.num_encoded == 5 and report.notes == ["validation.prompts are not cached: encode.text is none"]
    return config


def test_no_text_encoder_is_looked_at(make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> None:
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
    kept = LatentDataset(alone.cache.path)
    dropped = LatentDataset(alone.cache.path, caption_dropout=1.0, dropout_to=dropout_to)
    loaders = [LatentLoader(BucketBatchSampler(each, batch_size=2), device="cpu") for each in (kept, dropped)]
    for batch, without in zip(*loaders, strict=True):
        assert without["caption"] == [""] * len(batch["caption"]) and without.keys() == batch.keys()
        assert without["sample_id"] == batch["sample_id"] and torch.equal(without["latents"], batch["latents"])


def test_a_batch_has_captions_and_no_texts(alone: Config, make_config: Callable[..., Config]) -> None:
    run_precache(make_config(**{"cache.path": alone.cache.path.parent / "whole", "encode.image_output": "mean"}))
    dataset = LatentDataset(alone.cache.path, caption="random")
    whole = LatentDataset(alone.cache.path.parent / "whole", "photos", caption="random")
    loaders = [
        LatentLoader(BucketBatchSampler(each, batch_size=2, seed=3), device="cpu", scaled=True)
        for each in (dataset, whole)
    ]
    num = 0
    for batch, other in zip(*loaders, strict=True):
        texts = {"prompt_embeds", "pooled_prompt_embeds"}
        assert batch.keys() == other.keys() - texts and set(FIELDS) <= batch.keys()
        assert all(batch[name] == other[name] for name in batch if isinstance(batch[name], list))
        tensors = [name for name in batch if isinstance(batch[name], torch.Tensor)]
        assert all(torch.equal(batch[name], other[name]) for name in tensors) and "add_time_ids" in tensors
        num += len(batch["caption"])
    assert num == 5
    items = DataLoader(dataset, batch_sampler=BucketBatchSampler(dataset, batch_size=2), collate_fn=dataset.collate)
    assert all("prompt_embeds" not in dataset.place(batch, device="cpu") for batch in items)


def test_a_text_encoder_is_trained_on_the_captions_of_a_batch(alone: Config) -> None:
    """The loader goes on as ever while the encoder that reads its captions changes."""
    parts = tiny_parts()
    encoder, tokenizer = parts["text_encoder"].requires_grad_(True), parts["tokenizer"]
    denoiser = torch.nn.Linear(encoder.config.hidden_size, 4)
    optimizer = torch.optim.Adam([*encoder.parameters(), *denoiser.parameters()], lr=1e-2)
    before = {name: value.detach().clone() for name, value in encoder.named_parameters()}
    losses, captions = [], set[str]()
    dataset = LatentDataset(alone.cache.path, caption="random")
    with LatentLoader(BucketBatchSampler(dataset, batch_size=2, seed=3), device=encoder, scaled=True) as loader:
        batches = loader.forever()
        for _ in range(24):
            batch = next(batches)
            ids = tokenizer(batch["caption"], padding="max_length", truncation=True, return_tensors="pt").input_ids
            texts = encoder(ids).last_hidden_state.mean(dim=1)
            loss = (denoiser(texts) - batch["latents"].mean(dim=(2, 3))).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            captions |= {*batch["caption"]}
    assert sum(losses[-6:]) < 0.5 * sum(losses[:6])
    assert {"a red house", "a house in the rain", "a tree"} < captions
    changed = [name for name, value in encoder.named_parameters() if not torch.equal(value, before[name])]
    assert len(changed) > len(before) // 2


def test_whatever_reads_texts_says_what_to_do(alone: Config) -> None:
    remedy = r"encode\.text: none\)\. Encode them live, .*or set encode\.text to all"
    with LatentCache(alone.cache.path) as cache:
        for negative in (False, True):
            with pytest.raises(StoreError, match=f"photos: its texts were not encoded .{remedy}"):
                cache.prompt("", device="cpu", negative=negative)
        with pytest.raises(StoreError, match=remedy):
            validation_loss(tiny_denoiser(), cache, scheduler=DDPMScheduler(), datasets=["photos"])
        assert cache.text_shapes() is None
    with pytest.raises(StoreError, match=remedy):
        PrecomputedDataset(LatentDataset(alone.cache.path))
    with (
        open_workspace(alone.cache) as workspace,
        pytest.raises(ConfigError, match=r"encode\.text is none, so no text"),
    ):
        cache_prompts(alone, workspace, LoadedModels(**tiny_parts()), [("a", False)], device="cpu")


@pytest.mark.parametrize("role", ["train", "validation"])
def test_validation_needs_live_encoders(make_config: Callable[..., Config], role: str) -> None:
    config = make_config(**{"encode.text": "none", "datasets.0.role": role})
    run_precache(config)
    parts = {**tiny_parts(), "unet": tiny_denoiser(), "scheduler": DDPMScheduler()}
    with LatentCache(config.cache.path) as cache:
        with pytest.raises(ConfigError, match=r"^photos gives latents alone.*live text encoders") as raised:
            ValidationRunner(parts, cache, make_config(**{"datasets.0.role": role}))
        assert raised.value.key == "encode.text"
        with pytest.raises(ConfigError, match=r"gives latents alone, but validation reads cached texts"):
            ValidationRunner(parts, cache, config)


def test_manifests_with_and_without_texts_are_not_joined(alone: Config, make_config: Callable[..., Config]) -> None:
    run_precache(make_config(**{"datasets.0.name": "whole", "encode.image_output": "mean"}))
    with pytest.raises(StoreError, match="some of photos, whole have cached texts, others latents alone"):
        LatentDataset(alone.cache.path, ["photos", "whole"])
    with LatentCache(alone.cache.path) as cache:
        with pytest.raises(StoreError, match="say whose"):
            cache.prompt("", device="cpu")
        assert cache.restricted("whole").prompt("", device="cpu")["prompt_embeds"].shape[0] == 1
        with pytest.raises(StoreError, match="not encoded"):
            cache.restricted("photos").prompt("", device="cpu")


def test_texts_may_come_later_and_go_again(alone: Config, make_config: Callable[..., Config]) -> None:
    whole = make_config(**{"encode.image_output": "mean"})
    report = run_precache(whole)
    assert report.misses_by_reason == {"new": 7} and report.num_hits == 5, "4 captions and the empty one; 2 prompts"
    back = run_precache(alone)
    assert (back.num_misses, back.num_hits) == (0, 5)
    assert run_precache(whole, dry_run=True).num_misses == 0


def test_upkeep_knows_of_no_texts(alone: Config, run: Any, run_json: Any, tmp_path: Path) -> None:
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
    report = export_kohya(LatentCache(alone.cache.path), "photos", tmp_path / "kohya")
    assert (report.num_images, report.num_texts) == (5, 0)
    report = export_webdataset(LatentCache(alone.cache.path), "photos", tmp_path / "shards")
    assert (report.num_images, report.num_texts) == (5, 0)
    with tarfile.open(next((tmp_path / "shards").glob("*.tar"))) as tar:
        facts = [json.load(tar.extractfile(each)) for each in tar if each.name.endswith(".json")]  # type: ignore[arg-type]
    assert {each["sample_id"]: each["captions"] for each in facts}["a.png"] == ["a red house", "a house in the rain"]
    assert all(each["keys"]["captions"] == [] for each in facts)


def test_a_file_that_contradicts_itself_is_refused(alone: Config) -> None:
    data = (alone.cache.path / "manifests" / "photos.safetensors").read_bytes()
    manifest = read_manifest(data, "photos", "here", whole_check=True)
    wrong = Manifest("photos", "train", 1, {**manifest.common, "text_encoding": {"clip_skip": 0}}, manifest.rows)
    with pytest.raises(DatasetError, match="a caption has no key"):
        read_manifest(manifest_bytes(wrong), "photos", "here", whole_check=True)


def test_cached_texts_of_a_trained_token_are_refused(
    alone: Config, make_config: Callable[..., Config], photos: Path
) -> None:
    (photos / "b.txt").write_text("a photo of <SKS> in the snow")
    whole = make_config(**{"datasets.0.name": "whole"})
    run_precache(whole)
    with pytest.raises(StoreError, match=r"whole: .* 1 sample .*<sks>.*: b\.png\. .*encode\.text none"):
        LatentDataset(whole.cache.path, "whole", trained_tokens=["<sks>"])
    with pytest.raises(StoreError, match=r"the captions of 2 samples .*: b\.png, c\.png"):
        LatentDataset(whole.cache.path, "whole", trained_tokens=["<sks>", "blue car"])
    assert len(LatentDataset(whole.cache.path, "whole", trained_tokens=["<other>"])) == 5
    run_precache(alone)
    assert len(LatentDataset(whole.cache.path, "photos", trained_tokens=["<sks>"])) == 5, "their texts are live"
