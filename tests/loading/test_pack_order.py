"""Pack order: packs one after the other, each sample once, every rank its own, the same for a seed, and a resume."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.pack_damage import damage
from hypothesis import given, settings
from hypothesis import strategies as st
from loading import TENSORS, ids, plain
from torch.utils.data import DataLoader

from latentcache import BucketBatchSampler, DiskStore, LatentDataset, LatentLoader
from latentcache.dataset.manifest import Manifest
from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.dataset.manifest_row import CaptionRef, ImageRef, Row
from latentcache.errors import SampleError, StoreError
from latentcache.identity import key_of
from latentcache.loading.pack_order import Places, spots_ahead
from latentcache.loading.sampler import Visit
from latentcache.store import MemoryStore, upkeep
from latentcache.types import Bucket, Crop, Entry, Geometry, Record, Size

SIZES = (Size(64, 64), Size(48, 80))


@dataclass
class InPacks:
    """Items that lie in bucket number `buckets[index]` and pack number `packs[index]`."""

    buckets: list[int]
    packs: list[int]

    def __len__(self) -> int:
        return len(self.buckets)

    def bucket(self, index: int) -> Bucket:
        return Bucket(64 * (1 + self.buckets[index]), 64)

    def groups(self) -> np.ndarray:
        return np.array(self.buckets, np.int64)

    def identity(self) -> str:
        return f"{self.buckets}"

    def places(self) -> Places:
        packs = np.array(self.packs, np.int64)
        return Places(packs, np.arange(len(packs)), f"{self.packs}")

    def prefetch(self, items: list[int]) -> None:
        assert all(isinstance(item, Visit) for item in items)


ITEMS = st.lists(st.tuples(st.integers(0, 2), st.integers(-1, 9)), max_size=60)
DATASETS = ITEMS.map(lambda items: InPacks([bucket for bucket, _ in items], [pack for _, pack in items]))


def drawn(sampler: BucketBatchSampler) -> list[list[tuple[int, int]]]:
    return [[(int(item), item.draw) for item in batch] for batch in sampler]


@settings(max_examples=60, deadline=None)
@given(
    DATASETS, st.integers(1, 5), st.booleans(), st.booleans(), st.integers(0, 9), st.integers(1, 4), st.integers(1, 4)
)
def test_an_epoch_has_each_sample_once_and_no_rank_those_of_another(  # type: ignore[no-untyped-def]
    dataset, batch_size, shuffle, drop_last, seed, world_size, window
) -> None:
    options = {"shuffle": shuffle, "drop_last": drop_last, "seed": seed, "window": window}
    whole = list(BucketBatchSampler(dataset, batch_size, **options))
    items = [item for batch in whole for item in batch]
    assert len(set(items)) == len(items) and (drop_last or len(items) == len(dataset))
    ranks = [{"rank": rank, "world_size": world_size} for rank in range(world_size)]
    samplers = [BucketBatchSampler(dataset, batch_size, **rank, **options) for rank in ranks]
    shares = [list(sampler) for sampler in samplers]
    dealt = [batch for step in zip(*shares, strict=True) for batch in step]
    assert len(dealt) == samplers[0].num_batches // world_size * world_size and len(whole) == samplers[0].num_batches
    assert all(len({dataset.bucket(item) for item in batch}) == 1 and len(batch) <= batch_size for batch in dealt)
    dealt_items = [item for batch in dealt for item in batch]
    assert len(set(dealt_items)) == len(dealt_items)
    assert drawn(samplers[0]) == drawn(samplers[0])
    plan = list(samplers[0].plan(0))
    for place in range(len(plan)):
        brought = {item for batch in plan[: place + 1] for item in batch.ahead}
        assert brought.issuperset(plan[place].items), "a pack comes with the batch that needs it, or before"
    visits = [item for batch in plan for item in batch.ahead]
    assert sorted((v, v.draw) for v in visits) == sorted((v, v.draw) for batch in plan for v in batch.items)


@settings(max_examples=40, deadline=None)
@given(DATASETS, st.integers(1, 3), st.integers(1, 3), st.integers(0, 12))
def test_a_resume_goes_on_where_the_run_stopped(dataset, batch_size, world_size, stop) -> None:  # type: ignore[no-untyped-def]
    def share(rank: int, state: dict | None = None) -> BucketBatchSampler:
        sampler = BucketBatchSampler(dataset, batch_size, seed=3, rank=rank, world_size=world_size, window=2)
        sampler.set_epoch(4)
        if state is not None:
            sampler.load_state_dict(json.loads(json.dumps(state)))
        return sampler

    expected = [drawn(share(rank)) for rank in range(world_size)]
    first = [share(rank) for rank in range(world_size)]
    done = [[batch for _, batch in zip(range(stop), sampler, strict=False)] for sampler in first]
    states = [sampler.state_dict() for sampler in first]
    assert all(state == states[0] for state in states), "any rank's state is that of all"
    for rank in range(world_size):
        assert drawn(share(rank, states[0])) == expected[rank][len(done[rank]) :]


def test_packs_are_shuffled_and_few_are_open() -> None:
    num_packs, per_pack, window = 60, 64, 5
    dataset = InPacks([0] * num_packs * per_pack, np.repeat(np.arange(num_packs), per_pack).tolist())
    sampler = BucketBatchSampler(dataset, 4, seed=1, window=window, world_size=2)
    packs = [[dataset.packs[item] for item in batch.numbers] for batch in sampler.plan(0)]
    flat = [pack for batch in packs for pack in batch]
    first = {pack: flat.index(pack) for pack in flat}
    last = {pack: len(flat) - flat[::-1].index(pack) for pack in flat}
    most_open = max(sum(first[pack] <= at < last[pack] for pack in first) for at in range(0, len(flat), 16))
    assert 3 <= most_open <= window + 1
    assert len(first) == num_packs // 2, "a rank reads its own packs only"
    assert sorted(first, key=first.__getitem__) != sorted(first), "packs come in random order"
    mixed = [len(set(batch)) for batch in packs[40:-40]]
    assert np.mean(mixed) > 2.5, "the rows of a batch come from several packs"
    assert packs != [[dataset.packs[item] for item in batch.numbers] for batch in sampler.plan(1)]
    in_turn = BucketBatchSampler(dataset, 4, shuffle=False)
    assert [item for batch in in_turn for item in batch] == list(range(len(dataset)))


def test_what_is_to_come_takes_little_memory() -> None:
    num = 20_000
    places = Places(np.arange(num) // 100, np.arange(num) % 100, "")
    batches = [items.tolist() for items in np.random.default_rng(0).permutation(num).reshape(-1, 8)]
    tracemalloc.start()
    try:
        ahead = spots_ahead(places, batches)
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_bytes < 32 * num, "a dataset may have ten million samples"
    assert sum(len(visits) for packs in ahead.values() for visits in packs) == num


def test_a_state_of_other_packs_is_refused_by_name() -> None:
    dataset = InPacks([0, 0, 0, 1, 1], [0, 0, 1, 1, 2])
    state = BucketBatchSampler(dataset, 2).state_dict()
    random = InPacks(dataset.buckets, dataset.packs)
    random.places = lambda: None  # type: ignore[method-assign, assignment, return-value]
    for other, message in (
        (BucketBatchSampler(InPacks(dataset.buckets, [0, 0, 1, 2, 2]), 2), r"packs \('\[0, 0, 1, 1, 2\]' there"),
        (BucketBatchSampler(dataset, 2, window=3), r"window \(16 there, 3 here\)"),
    ):
        with pytest.raises(StoreError, match=message + r".*set_epoch\(0\)"):
            other.load_state_dict(state)
    with pytest.raises(StoreError, match=r"packs \(None there"):
        BucketBatchSampler(dataset, 2).load_state_dict(BucketBatchSampler(random, 2).state_dict())
    with pytest.raises(StoreError, match="window is 0; it must be at least 1 pack"):
        BucketBatchSampler(dataset, 2, window=0)


def make_cache(path: Path, num_packs: int = 6, per_pack: int = 12) -> Path:
    """Samples of two buckets: packs of images, and packs of captions, of which some are shared."""
    generator = torch.Generator().manual_seed(0)
    rows: dict[str, Row] = {}
    entries: dict[str, list[Entry]] = {"image": [], "text": []}
    with DiskStore(path) as store:
        for number in range(num_packs * per_pack):
            size = SIZES[number % 5 == 0]
            shapes = {"image": {"latents": (4, size.height // 8, size.width // 8)}}
            shapes["text"] = {"prompt_embeds": (3, 8), "pooled_prompt_embeds": (8,)}
            keys = {}
            for kind, fields in shapes.items():
                identity = {"kind": kind, "number": number if kind == "image" else number // 2}
                keys[kind] = key_of(identity)
                if kind == "image" or number % 2 == 0:
                    tensors = {name: torch.randn(shape, generator=generator) for name, shape in fields.items()}
                    entries[kind].append(Entry(Record(keys[kind], kind, identity, {}), tensors))  # type: ignore[arg-type]
            geometry = Geometry(size, size, Crop(0, 0), size)
            images, captions = (
                (ImageRef(keys["image"], geometry),),
                (CaptionRef(f"number {number // 2}", keys["text"]),),
            )
            rows[str(number)] = Row(str(number), str(number), None, images, captions)
        for kind in entries:
            for at in range(0, len(entries[kind]), per_pack):
                store.add(entries[kind][at : at + per_pack])
    scaling = {"scaling_factor": 0.13, "shift_factor": None}
    common = {"schema": 1, "salt": "", "text_encoding": {}, "image_encoding": scaling}
    ManifestFolder(path / "manifests").write(Manifest("numbers", "train", 2, common, rows))
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_cache(tmp_path / "cache")


def sampler_of(dataset: LatentDataset, **options: int) -> BucketBatchSampler:
    return BucketBatchSampler(dataset, 4, seed=2, **({"window": 2} | options))


def test_the_loader_and_workers_give_the_same_batches(path: Path) -> None:
    dataset = LatentDataset(path, order="packs", caption="random")
    state = torch.get_rng_state()
    with LatentLoader(sampler_of(dataset), device="cpu", output="latents") as loader:
        batches = [plain(batch) for batch in loader]
    assert torch.equal(torch.get_rng_state(), state), "nothing is drawn from the global generator"
    assert sorted(name for names in ids(batches) for name in names) == sorted([*map(str, range(72))] * 2)
    assert ids(batches) != [*ids(LatentLoader(sampler_of(LatentDataset(path)), device="cpu"))]
    for num_workers in (0, 2):
        loaded = list(DataLoader(dataset, batch_sampler=sampler_of(dataset), num_workers=num_workers))
        assert ids(loaded) == ids(batches)
        assert [plain({name: batch[name] for name in TENSORS}) for batch in loaded] == [
            {name: batch[name] for name in TENSORS} for batch in batches
        ]
    both = LatentDataset(path, dataset.names * 2, order="packs")
    assert len(both.places().packs) == len(both) == 4 * 72
    with pytest.raises(StoreError, match="order is 'pack'; it must be one of random, packs"):
        LatentDataset(path, order="pack")  # type: ignore[arg-type]


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, int, int]]]:
    """The ranges that the system was asked for: name of the file, offset, bytes."""
    ranges: list[tuple[str, int, int]] = []

    def advise(fd: int, offset: int, num_bytes: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        ranges.append((os.readlink(f"/proc/self/fd/{fd}"), offset, num_bytes))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    return ranges


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system takes no advice here")
def test_packs_are_read_by_long_ranges(
    tmp_path: Path, advised: list[tuple[str, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = LatentDataset(make_cache(tmp_path / "cache", 3, 256), order="packs")
    with LatentLoader(sampler_of(dataset), device="cpu") as loader:
        assert sum(len(batch["sample_id"]) for batch in loader) == len(dataset) == 6 * 256
    store = dataset.cache.store
    assert isinstance(store, DiskStore)
    kinds = {str(store.directory.pack_path(name)): pack for name, pack in store.catalog.table.packs.items()}
    assert len(kinds) == 5
    for file, pack in kinds.items():
        ranges = [(start, num) for name, start, num in advised if name == file]
        columns = [(column.start, column.num_rows * column.row_bytes) for g in pack.groups for column in g.columns]
        if pack.groups[0].kind == "image":
            assert max(num for _, num in ranges) >= max(num for _, num in columns) // 4
        else:  # samples of several packs of images share captions
            assert sum(num for _, num in ranges) >= sum(num for _, num in columns)


def test_a_store_without_packs_is_refused() -> None:
    with pytest.raises(StoreError, match=r"MemoryStore does not say which packs .* order='random'"):
        Places.of(MemoryStore(), [])


def test_a_resume_after_other_entries_came_goes_on(path: Path) -> None:
    first = sampler_of(LatentDataset(path, order="packs"))
    whole = [list(batch) for batch in first]
    for _ in zip(range(5), first, strict=False):
        state = first.state_dict()
    for number in range(8):  # ids are random: some come between those that there are
        with DiskStore(path) as store:
            identity = {"kind": "image", "other": number}
            store.add([Entry(Record(key_of(identity), "image", identity, {}), {"latents": torch.zeros(4, 8, 8)})])  # type: ignore[arg-type]
    again = sampler_of(LatentDataset(path, order="packs"))
    again.load_state_dict(state)
    assert [list(batch) for batch in again] == whole[5:]


def test_a_resume_after_the_packs_changed_is_refused(path: Path) -> None:
    with LatentLoader(sampler_of(LatentDataset(path, order="packs")), device="cpu") as loader:
        next(iter(loader))
        state = loader.state_dict()
    again = sampler_of(LatentDataset(path, order="packs"))
    again.load_state_dict(state)
    with DiskStore(path) as store:
        row = LatentDataset(path).cache.row("0")[1]
        store.remove([row.images[0].key])
        running = LatentDataset(path, order="packs")
        order = [list(batch) for batch in sampler_of(running)]
        upkeep.compact(store)
    with pytest.raises(StoreError, match=r"packs \('[0-9a-f]{64}' there, '[0-9a-f]{64}' here\).*set_epoch\(0\)"):
        sampler_of(LatentDataset(path, order="packs")).load_state_dict(state)
    assert sorted(i for batch in order for i in batch) == list(range(144)), "what is lost is met when it is read"
    with LatentLoader(sampler_of(running), device="cpu", damaged="skip") as loader:
        found = {name for batch in loader for name in batch["sample_id"]}
    assert found == {*map(str, range(1, 72))} and loader.skipped.keys() == {"0"}
    with pytest.raises(SampleError, match="'0': has no entry"):
        list(LatentLoader(sampler_of(running), device="cpu"))


def test_a_resume_after_an_image_was_found_damaged_is_refused(path: Path) -> None:
    dataset = LatentDataset(path, order="packs")
    key = dataset.cache.row("0")[1].images[0].key
    with DiskStore(path) as store:
        damage(path, store.get(key).tensors["latents"].numpy().tobytes())
    with LatentLoader(sampler_of(dataset), device="cpu", damaged="skip") as loader:
        assert len(list(loader)) and loader.skipped.keys() == {"0"}
        loader.set_epoch(1)
        next(iter(loader))
        state = loader.state_dict()
    with pytest.raises(StoreError, match=r"packs .*set_epoch\(1\)"):
        sampler_of(LatentDataset(path, order="packs")).load_state_dict(state)
