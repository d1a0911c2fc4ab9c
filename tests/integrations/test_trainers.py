"""The examples for sd-scripts and musubi-tuner, and the edits of diffusers' scripts, against recorded facts of each."""

from __future__ import annotations

import ast
import inspect
import json
import sys
import textwrap
from dataclasses import replace
from multiprocessing import Value
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.ragged_samples import on_disk
from torch.utils.data import DataLoader, Dataset

from latentcache import BucketBatchSampler, CachedBatches, LatentCache, LatentDataset, LatentLoader
from latentcache.config import Config

RECORDED = json.loads(Path(__file__).with_name("trainer_signatures.json").read_text(encoding="utf-8"))
EXAMPLES = str(Path(__file__).parents[2] / "examples")


class Collator:
    """Unwraps a batch and announces the epoch to the dataset, as both trainers do."""

    def __init__(self, epoch: Any, dataset: Any):
        self.epoch, self.dataset = epoch, dataset

    def __call__(self, examples: list[dict[str, Any]]) -> dict[str, Any]:
        worker = torch.utils.data.get_worker_info()
        dataset = self.dataset if worker is None else worker.dataset
        dataset.set_current_epoch(self.epoch.value)
        return examples[0]


def module(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> None:
    made = ModuleType(name)
    vars(made).update(attributes)
    monkeypatch.setitem(sys.modules, name, made)


def check_calls(dataset: Any, called: dict[str, list[str]]) -> None:
    """Every method that the trainer calls exists and takes its arguments."""
    for name, parameters in called.items():
        inspect.signature(getattr(dataset, name)).bind(*parameters)


def epochs_of(dataset: Any, epoch: Any, num_workers: int) -> list[list[dict[str, Any]]]:
    """Two epochs as the trainers run them, numbered from 1."""
    workers = {"num_workers": num_workers, "persistent_workers": bool(num_workers)}
    loader = DataLoader(dataset, shuffle=True, collate_fn=Collator(epoch, None if num_workers else dataset), **workers)
    epochs = []
    for number in (1, 2):
        epoch.value = number
        epochs.append(list(loader))
    return epochs


@pytest.fixture
def kohya(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example, imported with a base class that is constructed like sd-scripts' own."""
    recorded = RECORDED["sd-scripts"]

    class MinimalDataset(Dataset[Any]):
        def __init__(self, *given: Any):
            assert len(given) == len(recorded["base_constructed_with"])
            vars(self).update(dict.fromkeys(recorded["base_attributes"], 0), datasets=[self], subsets=[self])

        def set_current_epoch(self, epoch: int) -> None:
            self.current_epoch = epoch

    module(monkeypatch, "library")
    module(monkeypatch, "library.train_util", MinimalDataset=MinimalDataset)
    monkeypatch.syspath_prepend(EXAMPLES)
    import kohya_sdxl

    yield kohya_sdxl
    sys.modules.pop("kohya_sdxl")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_sd_scripts_gets_batches(kohya: Any, config: Config, monkeypatch: Any, num_workers: int) -> None:
    recorded = RECORDED["sd-scripts"]
    with LatentCache(config.cache.path) as cache:
        cache.manifests.write(replace(cache.manifest("photos"), loss_weight=0.25))

    def sampler() -> BucketBatchSampler:
        return BucketBatchSampler(LatentDataset(config.cache.path, "photos", caption="random"), batch_size=2, seed=3)

    monkeypatch.setattr(kohya, "make_batches", lambda: CachedBatches(sampler(), dtype=torch.float32))
    dataset = kohya.CachedSdxl(*dict.fromkeys(recorded["constructed_with"]))
    check_calls(dataset, recorded["called"])
    assert dataset.is_latent_cacheable() and dataset.is_text_encoder_output_cacheable()
    assert dataset.num_train_images == dataset.img_count == 5 and dataset.batch_size == 2
    [_, epoch] = epochs_of(dataset, Value("i", 0), num_workers)
    loader = LatentLoader(sampler(), device="cpu", dtype=torch.float32)
    loader.set_epoch(2)
    expected = {tuple(batch["caption"]): batch for batch in loader}
    seen = 0
    for batch in epoch[1:]:  # a worker learns the epoch with its first batch
        assert {*recorded["batch"]["process_batch"], *recorded["batch"]["call_unet"]} <= batch.keys()
        live = expected[tuple(batch["captions"])]
        clip_l, clip_g, pooled = batch["text_encoder_outputs_list"]
        assert torch.equal(batch["latents"], live["latents"]) and torch.equal(pooled, live["pooled_prompt_embeds"])
        assert torch.equal(torch.cat([clip_l, clip_g], dim=2), live["prompt_embeds"])
        assert clip_g.shape[2] == pooled.shape[1]
        sizes = torch.cat([batch[name] for name in recorded["batch"]["call_unet"]], dim=1)
        assert torch.equal(sizes, live["add_time_ids"])
        assert batch["loss_weights"].tolist() == [0.25] * len(pooled) and batch["alpha_masks"] is None
        seen += len(pooled)
    assert seen >= 3


@pytest.mark.parametrize(("family", "text"), [("qwen-image", "vl_embed"), ("wan", "t5")])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_musubi_tuner_gets_batches_in_its_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: Any, text: str, num_workers: int
) -> None:
    recorded = RECORDED["musubi-tuner"]
    for name in ("musubi_tuner", "musubi_tuner.training"):
        module(monkeypatch, name)
    module(monkeypatch, "musubi_tuner.training.accelerator_setup", collator_class=Collator)
    monkeypatch.syspath_prepend(EXAMPLES)
    from musubi_batches import build_dataset

    lengths = [4, 2, 3, 7]
    path = str(on_disk(tmp_path / "cache", family, lengths))
    trainer = SimpleNamespace()
    args = SimpleNamespace(seed=0, num_timestep_buckets=None, max_data_loader_n_workers=num_workers)
    dataset, collator, epoch = build_dataset(path, "ragged", text, batch_size=2)(trainer, args)
    assert isinstance(collator, Collator) and trainer.num_timestep_buckets is None
    check_calls(dataset, recorded["called"])
    assert all(hasattr(dataset, name) for name in recorded["attributes"]) and dataset.num_train_items == 4
    json.dumps(dataset.get_metadata())
    found: list[int] = []
    for batch in epochs_of(dataset, epoch, num_workers)[0]:
        assert set(recorded["batch"]["qwen" if text == "vl_embed" else "wan"]) == batch.keys()
        assert batch["latents"].ndim == 5 and batch["latents"].shape[2] == 1
        assert len(batch["latents"]) == len(batch[text]) and batch["timesteps"] is None
        found += map(len, batch[text])
    assert sorted(found) == sorted(lengths)
    args.num_timestep_buckets = 10
    with pytest.raises(ValueError, match="num_timestep_buckets"):
        build_dataset(path, "ragged", text)(trainer, args)


# The edits find their lines in the real scripts, and bind the names that the rest of a script uses. The scripts cannot
# be shipped here: `diffusers_scripts.json` records, for one commit, the lines that the edits look for and these names.

ROOT = Path(__file__).parents[2]
RECORD = json.loads(Path(__file__).with_name("diffusers_scripts.json").read_text(encoding="utf-8"))
EACH = pytest.mark.parametrize("name", sorted(RECORD["scripts"]))


@pytest.fixture
def editing(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import edit_diffusers_script

    return edit_diffusers_script


def script_of(lines: list[str]) -> str:
    """The recorded lines in order, each followed by a unique line."""
    return "".join(f"{line}\nbelow {number}\n" for number, line in enumerate(lines))


@EACH
def test_the_edits_find_the_lines_of_the_real_script_and_bind_its_names(editing: ModuleType, name: str) -> None:
    recorded, edits = RECORD["scripts"][name], editing.EDITS[name]
    assert [line for edit in edits for line in (edit.first, edit.end)] == recorded["lines"]
    assert recorded["line_numbers"] == sorted(recorded["line_numbers"])
    text = editing.edited(script_of(recorded["lines"]), name, "the/cache", "photos")
    for number, edit in enumerate(edits):
        assert edit.first not in text.splitlines() and f"below {2 * number}\n" not in text
        assert edit.end in text.splitlines() and f"below {2 * number + 1}\n" in text
    assert "LatentDataset('the/cache', 'photos'" in text
    nodes = [node for edit in edits for node in ast.walk(ast.parse(textwrap.dedent(edit.text)))]
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    assert set(recorded["needed"]) <= bound


@EACH
def test_a_script_with_other_lines_is_refused_by_the_line(
    editing: ModuleType, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded, path = RECORD["scripts"][name], tmp_path / name
    for lines, met in ((recorded["lines"][1:], "no line"), ([recorded["lines"][0], *recorded["lines"]], "2 lines")):
        path.write_text(script_of(lines), encoding="utf-8")
        assert editing.main([str(path), "cache", "photos"]) == 2
        out, err = capsys.readouterr()
        assert out == "" and met in err and recorded["lines"][0].strip() in err and "by hand" in err
