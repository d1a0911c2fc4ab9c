"""Pack order: packs one after the other, each sample once, every rank its own, the same for a seed, and a resume."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from loading import TENSORS, ids, plain
from torch.utils.data import DataLoader

from latentcache import BucketBatchSampler, DiskStore, LatentDataset, LatentLoader
from latentcache.dataset.manifest import Manifest
from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.dataset.row_table import Ref, Row
from latentcache.errors import SampleError, StoreError
from latentcache.identity import key_of
from latentcache.loading.pack_order import Places
from latentcache.store import MemoryStore, upkeep
from latentcache.types import Crop, Entry, Geometry, Record, Size

SIZES = (Size(64, 64), Size(48, 80))


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
                (Ref(keys["image"], geometry),),
                (Ref.of_text(f"number {number // 2}", keys["text"]),),
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
