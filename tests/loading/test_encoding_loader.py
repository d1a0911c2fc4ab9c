"""A loader that encodes what its cache lacks: the batches of a complete cache, each entry made once."""

from __future__ import annotations

import shutil
from collections.abc import Set
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from helpers.pack_damage import damage
from loading import config_of, lose_image, plain

from latentcache import BucketBatchSampler, DiskStore, LatentDataset, LatentLoader, LoadedModels, Report, run_precache
from latentcache.errors import ConfigError, SampleError
from latentcache.models.tiny import tiny_parts


class Encoder:
    """`run_precache` with a trainer's models; records the keys requested and counts the entries made."""

    def __init__(self, folder: Path, seed: int = 0):
        self.run = partial(run_precache, config_of(folder), models=LoadedModels(**tiny_parts(seed=seed)))
        self.asked: list[frozenset[str]] = []
        self.num_encoded = 0

    def __call__(self, *, only: Set[str]) -> Report:
        self.asked.append(frozenset(only))
        report = self.run(only=only)
        self.num_encoded += report.num_encoded
        return report


def dataset_of(folder: Path) -> LatentDataset:
    return LatentDataset(folder / "cache", flips=True, caption="random")


def loader_of(dataset: LatentDataset, **options: Any) -> LatentLoader:
    return LatentLoader(BucketBatchSampler(dataset, 3, seed=5), device="cpu", scaled=True, **options)


def batches_of(loader: LatentLoader) -> list[dict[str, Any]]:
    return [plain(batch) for batch in loader]


def all_keys(dataset: LatentDataset) -> list[str]:
    return sorted(dataset.cache.manifest("photos").keys())


@pytest.mark.parametrize(("prefetch", "every"), [(0, 1), (2, 2)])
def test_a_pruned_cache_gives_the_batches_of_a_complete_one(folder: Path, prefetch: int, every: int) -> None:
    dataset = dataset_of(folder)
    expected = batches_of(loader_of(dataset))
    before = {path: path.read_bytes() for path in (folder / "cache" / "manifests").glob("*")}
    lost = all_keys(dataset)[::every]
    assert dataset.cache.store.remove(lost) == len(lost) > 4
    encode = Encoder(folder)
    with loader_of(dataset, prefetch=prefetch, encode=encode) as loader:
        for epoch in (0, 1):
            loader.set_epoch(epoch)
            assert (batches_of(loader) == expected) == (epoch == 0), "the second epoch draws others"
    assert encode.asked == [frozenset(lost)] and encode.num_encoded == len(lost)
    assert dataset.missing() == set() and not loader.refused
    assert {path: path.read_bytes() for path in before} == before
    assert encode.run(dry_run=True).num_misses == 0


def test_it_waits_for_a_compaction(folder: Path) -> None:
    dataset = dataset_of(folder)
    expected = batches_of(loader_of(dataset))
    lose_image(dataset, "c.png")
    with ThreadPoolExecutor(1) as executor, DiskStore(folder / "cache") as store:
        with store.lock("compact", shared=False):
            found = executor.submit(batches_of, loader_of(dataset, encode=Encoder(folder)))
            assert not wait([found], timeout=2).done
        assert found.result(60) == expected


def test_entries_that_are_lost_in_the_middle_are_encoded_when_they_are_met(folder: Path) -> None:
    dataset = dataset_of(folder)
    expected = batches_of(loader_of(dataset))
    encode = Encoder(folder)
    with loader_of(dataset, prefetch=1, encode=encode) as loader:
        batches = loader.forever()
        got = [plain(next(batches)) for _ in range(2)]
        assert encode.asked == []
        lost = all_keys(dataset)
        dataset.cache.store.remove(lost)
        got += [plain(next(batches)) for _ in range(3)]
        state = loader.state_dict()
        got += [plain(next(batches)) for _ in range(4)]
    assert got[:7] == expected and (state["epoch"], state["position"]) == (0, 5)
    assert len(encode.asked) == 1 and encode.num_encoded == len(lost), "all that is missing, in one pass"


def test_a_damaged_entry_is_made_again_once_or_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = batches_of(loader_of(dataset_of(folder)))

    def damage_image() -> str:
        with dataset_of(folder).cache as cache:
            key = cache.row("c.png")[1].images[0].key
            damage(folder / "cache", cache.get(key).tensors["moments"].numpy().tobytes())
        return key

    for damaged in ("raise", "skip"):
        key, encode = damage_image(), Encoder(folder)
        loader = loader_of(dataset_of(folder), damaged=damaged, encode=encode)
        assert batches_of(loader) == expected
        assert encode.asked == [{key}] and encode.num_encoded == 1 and not loader.skipped
    damage_image()
    encode = Encoder(folder)
    with monkeypatch.context() as patch:
        patch.setattr("os.access", lambda *_: False)
        dataset = dataset_of(folder)  # a reader that cannot write the mark by which the entry is made again
    batches = iter(loader_of(dataset, encode=encode))
    with pytest.raises(SampleError, match=r"'c\.png': is damaged.*latentcache verify"):
        list(batches)
    assert len(encode.asked) == 1 and encode.num_encoded == 0
    with pytest.raises(SampleError, match=r"c\.png"):
        next(batches)  # not the end of the epoch


REFUSED = {
    "vanished": (r"'c\.png': has no entry.*cannot be encoded \(missing\).*To fix it: replace .*c\.png", "c.png"),
    "new image": (r"'c\.png': has no entry.*cannot be encoded \(changed\).*To fix it: run `latentcache prec", "c.png"),
    "new caption": (r"'sub/e\.png': has no entry.*cannot be encoded \(changed\)", "sub/e.png"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_encoded_is_named_at_its_batch_and_never_replaced(folder: Path, what: str) -> None:
    dataset, photo = dataset_of(folder), folder / "photos" / "c.png"
    expected = batches_of(loader_of(dataset))
    message, name = REFUSED[what]
    row = dataset.cache.row(name)[1]
    lost = [ref.key for ref in (row.captions if what == "new caption" else row.images)]
    dataset.cache.store.remove(lost)
    if what == "vanished":
        photo.unlink()
    elif what == "new image":
        shutil.copy(folder / "photos" / "d.png", photo)
    else:
        (folder / "photos" / "sub" / "e.txt").write_text("another tree", encoding="utf-8")
    bad = next(i for i, batch in enumerate(expected) if name in batch["sample_id"])
    encode = Encoder(folder)
    loader = loader_of(dataset, encode=encode)
    for _ in range(2):
        batches = iter(loader)
        assert [plain(next(batches)) for _ in range(bad)] == expected[:bad], "the batches before it do not change"
        with pytest.raises(SampleError, match=message):
            next(batches)
    assert len(encode.asked) == 1 and encode.num_encoded == 0, "not tried again in each epoch"
    with loader_of(dataset, encode=encode, damaged="skip") as skipping:
        seen = {name for batch in skipping for name in batch["sample_id"]}
        assert name not in seen and len(seen) == 4 and "cannot be encoded" in skipping.skipped[name]


def test_the_empty_text_that_dropout_reads_is_encoded_too(folder: Path) -> None:
    dataset = LatentDataset(folder / "cache", caption_dropout=0.5)
    expected = batches_of(loader_of(dataset))
    assert any("" in batch["caption"] for batch in expected)
    key = dataset.cache.cached_prompt("").keys[0]
    assert dataset.cache.store.remove([key]) == 1 and key in dataset.missing()
    encode = Encoder(folder)
    assert batches_of(loader_of(dataset, encode=encode)) == expected
    assert encode.asked == [{key}] and encode.num_encoded == 1


def test_other_models_and_another_dataset_encode_nothing(folder: Path, tmp_path: Path) -> None:
    dataset = dataset_of(folder)
    lose_image(dataset, "c.png")
    encode = Encoder(folder, seed=1)
    with pytest.raises(SampleError, match=r"c\.png.*\(changed\): its image, its caption, the models or the settings"):
        list(loader_of(dataset, encode=encode))
    assert encode.num_encoded == 0
    other = config_of(folder, **{"cache.path": tmp_path / "other"})
    with pytest.raises(ConfigError, match=r"1 of 1 entries to encode are in no manifest of photos in .*other"):
        iter(loader_of(dataset, encode=partial(run_precache, other, models=LoadedModels(**tiny_parts()))))


def test_ranks_share_the_work(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")  # splitting by rank would leave half to a rank that lacks nothing
    monkeypatch.setenv("WORLD_SIZE", "2")
    datasets = [dataset_of(folder) for _ in range(2)]
    samplers = [BucketBatchSampler(datasets[rank], 2, seed=5, rank=rank, world_size=2) for rank in range(2)]
    expected = [batches_of(LatentLoader(each, device="cpu", scaled=True)) for each in samplers]
    lost = all_keys(datasets[0])
    datasets[0].cache.store.remove(lost)
    encoders = [Encoder(folder) for _ in range(2)]

    def train(rank: int) -> list[dict[str, Any]]:
        with LatentLoader(samplers[rank], device="cpu", scaled=True, encode=encoders[rank]) as loader:
            return batches_of(loader)

    with ThreadPoolExecutor(2) as executor:
        assert list(executor.map(train, range(2))) == expected
    assert sum(encode.num_encoded for encode in encoders) == len(lost), "each entry was made by one of them"
