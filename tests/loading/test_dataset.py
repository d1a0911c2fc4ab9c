"""Datasets: choices at each visit, the same for every way of reading; joined manifests, refusals, and pack order."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3
from helpers.ragged_samples import on_disk
from helpers.remote_samples import COMMON as SERVED
from helpers.remote_samples import make_cache, make_manifest
from torch.utils.data import DataLoader

from latentcache import BucketBatchSampler, CachedBatches, DiskStore, LatentCache, LatentDataset, LatentLoader
from latentcache.dataset.manifest import Manifest, prompts_name
from latentcache.dataset.manifest_folder import ManifestFolder
from latentcache.dataset.row_table import Ref, Row, RowTable
from latentcache.errors import SampleError, StoreError
from latentcache.families import family_named
from latentcache.identity import key_of
from latentcache.loading.choices import Choices, Chooser
from latentcache.loading.dataset import Order
from latentcache.loading.sampler import Places, Visit, Visits
from latentcache.store import MemoryStore
from latentcache.store.upkeep import compact
from latentcache.types import Crop, Entry, Geometry, Record, Refusal, Size, prompt_id

COMMON: dict[str, Any] = {
    "schema": 1,
    "salt": "",
    "text_encoding": {},
    "image_encoding": {"scaling_factor": 0.5, "shift_factor": None},
}
NUM, VARIANTS = 18, 4
EMPTY = -1.0
WEIGHTS = (1, 0, 3)
ALL = {"caption": "random", "flips": "random", "caption_dropout": 0.3}
"""All random choices at once."""
SCALED: dict[str, Any] = {"scaled": True}
HALF = {"dtype": torch.bfloat16}


def entry_of(kind: str, value: float, **fields: tuple[int, ...]) -> Entry:
    """An entry whose numbers all identify it."""
    identity = {"kind": kind, "value": value, "fields": sorted(fields)}
    dtypes = {"mask": torch.uint8}
    tensors = {name: torch.full(shape, value, dtype=dtypes.get(name, torch.float32)) for name, shape in fields.items()}
    return Entry(Record(key_of(identity), kind, identity, {}), tensors)  # type: ignore[arg-type]


def text_of(value: float) -> Entry:
    return entry_of("text", value, prompt_embeds=(3, 8), pooled_prompt_embeds=(8,))


def rows_of(first: int, variants: int, entries: list[Entry]) -> dict[str, Row]:
    """Samples in two buckets with one to three lines, a control image and a mask, and the mirrored entries of all."""
    rows = {}
    for number in range(first, first + NUM):
        size = Size(16, 16) if number % 3 else Size(16, 24)
        cells = size.height // 8, size.width // 8
        images, parts = list[Ref](), list[Ref]()
        for flip in (False, True):
            value = float(2 * number + flip)
            geometry = Geometry(size, Size(16, size.width + 8), Crop(0, 3), size, flip)
            image = entry_of("image", value, latents=(4, *cells))
            control = entry_of("image", 1000 + value, latents=(4, 2, 2))
            mask = entry_of("mask", value, mask=(1, *cells))
            of_control = replace(geometry, target_size=Size(16, 16))
            images.append(Ref(image.record.key, geometry))
            parts.append(Ref(control.record.key, of_control, "verified", "control 1", "c" * 64))
            parts.append(Ref(mask.record.key, geometry, "verified", "mask", "d" * 64))
            entries += [image, control, mask]
        parts.sort(key=lambda part: part.role)
        lines = range(1000 * number, 1000 * number + 100 * (1 + number % 3), 100)
        numbers = [line + variant for line in lines for variant in range(variants)]
        texts = [text_of(each) for each in numbers]
        captions = [Ref.of_text(f"{each}", text.record.key) for each, text in zip(numbers, texts, strict=True)]
        entries += texts
        rows[f"{number}"] = Row(f"{number}", f"{number}", None, tuple(images), tuple(captions), None, tuple(parts))
    return rows


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path, entries = tmp_path_factory.mktemp("choices") / "cache", [text_of(EMPTY)]
    manifests = [
        Manifest("main", "train", 2, COMMON, rows_of(0, VARIANTS, entries), variants=VARIANTS),
        Manifest("class", "train", 1, COMMON, rows_of(NUM, 1, entries), weights=WEIGHTS, loss_weight=0.25),
    ]
    prompt = Row(prompt_id(""), prompt_id(""), None, (), (Ref.of_text("", entries[0].record.key),))
    manifests.append(Manifest(prompts_name(COMMON), "prompts", 1, COMMON, {prompt.sample_id: prompt}))
    with DiskStore(path) as store:
        for at in range(0, len(entries), 40):
            store.add(entries[at : at + 40])
    for manifest in manifests:
        ManifestFolder(path / "manifests").write(manifest)
    return path


def sampler_of(path: Path, **choices: Any) -> Any:
    return BucketBatchSampler(LatentDataset(path, ["main", "class"], **(ALL | choices)), 4, seed=3)


def seen(batches: Iterable[dict[str, Any]]) -> list[list[tuple[str, str, int]]]:
    """Sample, caption and flip of each row, taken from the strings and from all tensors, which must agree."""
    found = []
    for batch in batches:
        found.append([])
        for at, (name, caption) in enumerate(zip(batch["sample_id"], batch["caption"], strict=True)):
            [value] = set(batch["latents"][at].flatten().tolist())
            assert value // 2 == int(name)
            flip = int(value % 2)
            assert set(batch["control_latents_1"][at].flatten().tolist()) == {1000 + value}
            assert set(batch["mask"][at].flatten().tolist()) == {value}
            assert batch["add_time_ids"][at].tolist()[2:4] == [0, 5 if flip else 3], "the crop as it is seen"
            text = {*batch["prompt_embeds"][at].flatten().tolist(), *batch["pooled_prompt_embeds"][at].tolist()}
            assert text == ({float(caption)} if caption else text & {EMPTY, 0.0}) and len(text) == 1
            assert caption or text == {EMPTY if batch.get("to") != "zeros" else 0.0}
            assert batch["dataset"][at] == ("main" if int(name) < NUM else "class")
            assert batch["loss_weight"][at] == (1.0 if int(name) < NUM else 0.25)
            found[-1].append((name, caption, flip))
    return found


def loader_of(sampler: BucketBatchSampler, **options: Any) -> LatentLoader:
    return LatentLoader(sampler, device="cpu", **options)


@pytest.mark.parametrize("order", ["random", "packs"])
def test_workers_and_the_ways_of_reading_choose_alike(path: Path, order: str) -> None:
    state = torch.get_rng_state()
    sampler = sampler_of(path, order=order)
    sampler.set_epoch(3)
    expected = seen(loader_of(sampler))
    rows = [row for batch in expected for row in batch]
    assert Counter(name for name, *_ in rows) == {f"{n}": 2 if n < NUM else 1 for n in range(2 * NUM)}
    assert len(rows) == 3 * NUM == len(sampler.dataset) and len({flip for *_, flip in rows}) == 2
    assert 0 < sum(not caption for _, caption, _ in rows) < len(rows)
    assert torch.equal(torch.get_rng_state(), state), "nothing is drawn from the global generator"
    assert seen(loader_of(sampler, prefetch=0)) == expected
    batches = CachedBatches(sampler)
    assert seen(batches[number] for number in range(len(batches))) == expected
    for num_workers in (0, 2):
        dataset = sampler.dataset
        made = DataLoader(dataset, batch_sampler=sampler, num_workers=num_workers, collate_fn=dataset.collate)
        assert seen(made) == expected, num_workers


def test_choices_stay_what_they_were(path: Path) -> None:
    """Recorded digests: if any draw changed, resumed runs would train on other data."""
    for epoch, (digest, first) in {
        0: ("9f3746aae11f5e94", [("21", "21000", 0), ("9", "", 1), ("6", "6002", 0), ("0", "", 0)]),
        3: ("d15def141e83a38a", [("3", "3002", 0), ("9", "", 1), ("6", "6003", 0), ("9", "", 0)]),
    }.items():
        sampler = sampler_of(path)
        sampler.set_epoch(epoch)
        rows = seen(loader_of(sampler))
        assert rows[0] == first
        assert blake3(json.dumps(rows).encode()).hexdigest()[:16] == digest


def test_an_item_sees_each_variant_before_one_comes_again(path: Path) -> None:
    """With two repeats, two epochs are one cycle of four variants."""
    sampler = sampler_of(path, caption_dropout=0.0)
    orders = set()
    for start in range(0, 8, 2):
        texts: dict[str, list[int]] = {}
        for epoch in (start, start + 1):
            sampler.set_epoch(epoch)
            for name, caption, _ in (row for batch in seen(loader_of(sampler)) for row in batch):
                texts.setdefault(name, []).append(int(caption))
        main = {name: found for name, found in texts.items() if int(name) < NUM}
        assert all(sorted(text % 100 for text in found) == [0, 1, 2, 3] for found in main.values())
        orders |= {tuple(text % 100 for text in found) for found in main.values()}
        lines = Counter(text % 1000 // 100 for name, found in texts.items() if int(name) >= NUM for text in found)
        assert not lines[1], "a line without weight is not drawn"
    assert len(orders) > 4, "another order for each item and cycle"


def test_a_numbered_caption_is_the_line_itself_and_companions_follow_their_image(path: Path) -> None:
    sampler = sampler_of(path, caption=0, flips=True, caption_dropout=0.0)
    rows = [row for batch in seen(loader_of(sampler)) for row in batch]
    assert len(rows) == 6 * NUM and {int(caption) % 1000 for _, caption, _ in rows} == {0}
    assert Counter(flip for *_, flip in rows) == {0: 3 * NUM, 1: 3 * NUM}
    with LatentCache(path) as cache:
        assert cache.batch(["2"], device="cpu", caption=2)["caption"] == ["2200"]
        with pytest.raises(SampleError, match="'1': has 2 captions, but number 2 was requested"):
            cache.batch(["1"], device="cpu", caption=2)
        plain, scaled, half = (cache.batch(["2"], device="cpu", **each) for each in ({}, SCALED, SCALED | HALF))
        for name in ("latents", "control_latents_1"):
            assert torch.equal(scaled[name], 0.5 * plain[name]) and torch.equal(half[name], scaled[name].bfloat16())
        assert all(torch.equal(each["mask"], plain["mask"]) for each in (scaled, half))
    item = LatentDataset(path, "main", caption=1)[5]
    assert item["caption"] == "5100" and item["dataset"] == "main" and item["loss_weight"].dtype == torch.float32


def test_choices_have_their_rates_and_are_independent() -> None:
    num, lines, variants, num_crops = 200_000, 3, 8, 3
    items = np.arange(num) % 2_000
    draws = (np.random.default_rng(11).integers(0, 2**63 - 1, num)).astype(np.int64)
    visits = Visits(items, draws, np.arange(num) // 2_000, np.full(num, 7, np.uint64))

    def chosen(choices: Choices, manifest: Manifest) -> Any:
        """Caption entries, crops, flips, and dropped captions."""
        counts, nothing = np.full(num, lines * manifest.variants), np.zeros(num, np.int64)
        return Chooser(manifest, choices).choose(visits, counts, items, nothing, np.full(num, num_crops))

    manifest = Manifest("m", "train", 1, COMMON, {}, variants=variants)
    whole = Choices("random", flips=True, crops="random")
    entries, crops, flips, dropped = chosen(replace(whole, caption_dropout=0.1), manifest)
    assert abs(flips.mean() - 0.5) < 0.004 and abs(dropped.mean() - 0.1) < 0.0025, "3.7 standard deviations"
    cells = np.bincount(((entries * num_crops + crops) * 2 + flips) * 2 + dropped, minlength=288)
    expected = np.tile([0.9, 0.1], 144) * num / 144
    assert ((cells - expected) ** 2 / expected).sum() < 375, "287 degrees of freedom: one of 3,000 is above"
    found, _, flips, _ = chosen(whole, replace(manifest, weights=(0.2, 0, 0.5, 0.3), variants=1))
    assert abs((found == 0).mean() - 2 / 7) < 0.004 and not (found == 1).any() and found.max() == 2
    assert abs(flips[found == 0].mean() - 0.5) < 0.008


def test_random_flips_leave_out_a_dataset_without_mirrored_images(path: Path, tmp_path: Path) -> None:
    shutil.copytree(path, tmp_path / "cache")
    folder = ManifestFolder(tmp_path / "cache/manifests")
    manifest = folder.read("class")
    assert manifest is not None
    plain = [
        replace(row, images=row.images[:1], parts=tuple(part for part in row.parts if not part.geometry.flip))
        for row in manifest.rows.values()
    ]
    folder.write(manifest.with_rows({row.sample_id: row for row in plain}))
    sampler = sampler_of(tmp_path / "cache")
    rows = [row for batch in seen(loader_of(sampler)) for row in batch]
    assert {(int(name) >= NUM, flip) for name, _, flip in rows} == {(False, 0), (False, 1), (True, 0)}
    with pytest.raises(SampleError, match="has no flipped entry"):
        LatentDataset(tmp_path / "cache", "class", flips="random")
    folder.write(manifest)  # mirrored since: the rest of the epoch would draw otherwise
    with pytest.raises(StoreError, match=r"run: flips \('random in main' there, 'random' here\).*set_epoch"):
        sampler_of(tmp_path / "cache").load_state_dict(sampler.state_dict())


def test_plain_numbers_follow_the_global_generator(path: Path) -> None:
    drawn, plain = LatentDataset(path, "main", flips="random", caption="random"), LatentDataset(path, "main")
    assert drawn.identity() == plain.identity() and len(drawn) == len(plain), "the items stay the same"
    assert LatentDataset(path, "main", flips=True).identity() != plain.identity()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first = [(item["latents"].max().item(), item["caption"]) for item in (drawn[2] for _ in range(60))]
        torch.manual_seed(0)
        assert [(item["latents"].max().item(), item["caption"]) for item in (drawn[2] for _ in range(60))] == first
    assert {flip for flip, _ in first} == {4.0, 5.0}
    assert {caption for _, caption in first} == {f"{2000 + 100 * line + n}" for line in range(3) for n in range(4)}


def test_a_caption_that_is_dropped_to_zeros_leaves_exact_zeros(path: Path) -> None:
    for share in (0.3, 1.0):
        sampler = sampler_of(path, dropout_to="zeros", caption_dropout=share)
        batches = [batch | {"to": "zeros"} for batch in loader_of(sampler)]
        dropped = [caption == "" for batch in seen(batches) for _, caption, _ in batch]
        assert all(dropped) if share == 1 else any(dropped) and not all(dropped)
        dataset = sampler.dataset
        made = DataLoader(dataset, batch_sampler=sampler, collate_fn=dataset.collate)
        assert seen(batch | {"to": "zeros"} for batch in made) == seen(batches)
    empty = seen(loader_of(sampler_of(path)))
    assert seen(b | {"to": "zeros"} for b in loader_of(sampler_of(path, dropout_to="zeros"))) == empty


def test_choices_that_there_are_not_are_refused(path: Path, tmp_path: Path) -> None:
    ragged = on_disk(tmp_path / "ragged", "wan", [3, 5])
    with pytest.raises(StoreError, match=r"each text of wan has a length of its own.*use 'empty'"):
        LatentDataset(ragged, "ragged", caption_dropout=0.1, dropout_to="zeros")
    with pytest.raises(SampleError, match="'prompt: ': is not cached"):
        LatentDataset(ragged, "ragged", caption_dropout=0.1)
    assert len(LatentDataset(ragged, "ragged", caption_dropout=0.0, dropout_to="zeros")) == 2
    edits = on_disk(tmp_path / "edits", "qwen-image-edit", [3, 5])
    with pytest.raises(StoreError, match=r"qwen-image-edit reads each text with control images.*set it to 0"):
        LatentDataset(edits, "ragged", caption_dropout=0.1)
    with LatentCache(path) as cache:
        manifest = cache.manifest("class")  # of samples with up to three captions
        for weights in ((1.0,), (0.0, 0.0, 1.0)):
            cache.manifests.write(replace(manifest, name="weighted", weights=weights))
            assert len(LatentDataset(path, "weighted")) == NUM, "a numbered caption needs no weights"
            with pytest.raises(StoreError, match=rf"weighted has {len(weights)} caption weights, but samples"):
                LatentDataset(path, "weighted", caption="random")


def test_zeros_leave_no_mask_of_a_caption_that_was_not_there_at_first(tmp_path: Path) -> None:
    """Padded texts of Chroma have a mask, which zeros would not change: refused, if need be only on read."""
    recipe = family_named("chroma").text_recipe(padding="keep")
    text = entry_of("text", 1.0, prompt_embeds=(3, 8), prompt_attention_mask=(3,))
    image = entry_of("image", 1.0, latents=(16, 2, 2))
    size = Size(16, 16)
    refs = (Ref(image.record.key, Geometry(size, size, Crop(0, 0), size)),), (Ref.of_text("a", text.record.key),)
    common = COMMON | {"family": "chroma", "text_encoding": recipe}
    message = r"each text of chroma has a length of its own.*by its mask"
    with DiskStore(tmp_path) as store:
        store.add([image])
        manifest = Manifest("m", "train", 1, common, {"a": Row("a", "a", None, *refs)})
        ManifestFolder(tmp_path / "manifests").write(manifest)
        dataset = LatentDataset(tmp_path, caption_dropout=1.0, dropout_to="zeros")
        store.add([text])
    with pytest.raises(StoreError, match=message):
        _ = dataset[0]
    with pytest.raises(StoreError, match=message):
        LatentDataset(tmp_path, caption_dropout=1.0, dropout_to="zeros")
    assert LatentDataset(tmp_path)[0]["prompt_attention_mask"].tolist() == [1, 1, 1]


def test_companions_of_other_shapes_and_roles_are_in_other_batches(path: Path, tmp_path: Path) -> None:
    """In joined datasets a mask is not taken for a control image, nor a mirrored twin for a second one."""
    path = shutil.copytree(path, tmp_path / "own")
    with DiskStore(path) as store, LatentCache(path) as cache:
        wide = entry_of("image", 1.0, latents=(4, 2, 3))
        of_wide = Geometry(Size(16, 24), Size(16, 24), Crop(0, 0), Size(16, 24))
        store.add([wide])
        whole = cache.manifest("main")
        kept = {  # of each: the control image and its twin, the mask and its twin
            "twins": lambda parts: parts[:2],
            "two": lambda parts: (parts[0], parts[0]),
            "masked": lambda parts: (parts[0], parts[2]),
            "mask": lambda parts: parts[2:],
            "wide": lambda parts: (replace(parts[0], key=wide.record.key, geometry=of_wide),),
        }
        for name, chosen in kept.items():
            rows = {sample_id: replace(row, parts=chosen(row.parts)) for sample_id, row in whole.rows.items()}
            cache.manifests.write(replace(whole, name=name, rows=RowTable.of(rows), repeats=1))
        dataset = LatentDataset(path, [*kept])
        batches = list(loader_of(BucketBatchSampler(dataset, 4, seed=1)))
        assert sorted(name for batch in batches for name in batch["dataset"]) == sorted([*kept] * NUM)
        assert all(len({*batch["dataset"]}) == 1 for batch in batches)
        for other in range(1, 5):
            with pytest.raises(StoreError, match=r"the parts of samples '1' .* differ: batch them"):
                dataset.__getitems__([1, other * NUM + 1])


# Joined manifests, and what a dataset refuses ------------------------------------------------------------------------


def test_joined_manifests_keep_to_their_own_images(folder: Path) -> None:
    with LatentCache(path := folder / "cache") as cache:
        manifest = cache.manifest("photos")
        rows = {name: row for name, row in manifest.rows.items() if name != "a.png"}
        cache.manifests.write(replace(manifest.with_rows(rows), name="other"))
    names = ["photos", "other", "photos"]
    for flips in (True, False, ["other"], "photos"):
        mirrored = set(names) if flips is True else {flips} if isinstance(flips, str) else set(flips or ())
        parts = [LatentDataset(path, name, flips=name in mirrored) for name in names]
        alone = [part[index] for part in parts for index in range(len(part))]
        joined = LatentDataset(path, names, flips=flips)
        assert len(joined) == len(alone) and joined.bucket(-1) == parts[-1].bucket(-1)
        for beyond in (len(alone), -len(alone) - 1):
            with pytest.raises(IndexError, match=f"of {len(alone)}"):
                joined.bucket(beyond)
        for index, expected in enumerate([*alone, alone[-1]]):
            found = joined[index if index < len(alone) else -1]
            assert found["sample_id"] == expected["sample_id"], index
            assert torch.equal(found["moments"], expected["moments"]), index
    assert found["target_size"].tolist() == [64, 128] and found["target_size"].dtype == torch.int64


NO_SHARES = (-0.1, 1.1, math.nan, "1", None)


@pytest.mark.parametrize(
    ("names", "options", "error", "message"),
    [
        *(("served", {"caption": each}, StoreError, rf"caption is {each!r}; it must be") for each in ("rnd", -1, None)),
        *(("served", {"caption_dropout": each}, StoreError, "it must be a number from 0 to 1") for each in NO_SHARES),
        ("served", {"dropout_to": "zero"}, StoreError, "dropout_to is 'zero'; it must be one of empty, zeros"),
        ("served", {"order": "pack"}, StoreError, "order is 'pack'; it must be one of random, packs"),
        ("served", {"flips": "photo"}, StoreError, "flips names photo; the manifests are served"),
        ("served", {"flips": True}, SampleError, "has no flipped entry"),
        ("served", {"flips": "random"}, SampleError, "has no flipped entry"),
        (None, {}, StoreError, "name the manifest; there are: other, served"),
        ([], {}, StoreError, "name the manifest; there are: other, served"),
        ("served", {"caption_dropuot": 0.1}, TypeError, "no option 'caption_dropuot'; did you mean 'caption_dropout'"),
    ],
)
def test_what_a_dataset_cannot_give_is_refused_when_it_is_made(
    tmp_path: Path, names: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    path = make_cache(tmp_path)
    ManifestFolder(path / "manifests").write(make_manifest("other"))
    with pytest.raises(error, match=message):
        LatentDataset(path, names, **options)


@pytest.mark.parametrize("order", ["random", "packs"])
def test_a_manifest_in_which_all_is_refused_has_no_items(tmp_path: Path, order: Order) -> None:
    path = make_cache(tmp_path)
    refusal = Refusal("x.png", "x.png", "truncated", "ends too early")
    rows = {"x.png": Row("x.png", "x.png", None, (), (), refusal)}
    ManifestFolder(path / "manifests").write(Manifest("refused", "train", 3, SERVED, rows))
    for names, num_items in ((["refused"], 0), (["served", "refused"], 48), (["refused", "served"], 48)):
        dataset = LatentDataset(path, names, order=order)
        with LatentLoader(BucketBatchSampler(dataset, 4), device="cpu") as loader:
            assert sum(len(batch["sample_id"]) for batch in loader) == len(dataset) == num_items


def test_a_sample_without_captions_is_named_when_one_is_drawn(folder: Path) -> None:
    with LatentCache(path := folder / "cache") as cache:
        manifest = cache.manifest("photos")
        rows = dict(manifest.rows) | {"b.png": replace(manifest.rows["b.png"], captions=())}
        cache.manifests.write(manifest.with_rows(rows))
    dataset = LatentDataset(path, caption="random")
    assert dataset[0]["sample_id"] == "a.png"
    for number in (1, Visit.of(1, 7)):
        with pytest.raises(SampleError, match=r"'b\.png': has 0 captions, but number 0 was requested"):
            dataset[number]


# The order of packs --------------------------------------------------------------------------------------------------


def in_packs(path: Path) -> BucketBatchSampler:
    return BucketBatchSampler(LatentDataset(path, order="packs"), 4, seed=2, window=2)


def test_a_store_without_packs_is_refused() -> None:
    with pytest.raises(StoreError, match=r"MemoryStore has no packs .* order='random'"):
        Places.of(MemoryStore(), [])


def test_a_resume_goes_on_after_other_entries_came_and_is_refused_after_the_packs_changed(tmp_path: Path) -> None:
    path = make_cache(tmp_path)
    first = in_packs(path)
    whole = [list(batch) for batch in first]
    assert sorted(item for batch in whole for item in batch) == list(range(48))
    for _ in zip(range(5), first, strict=False):
        state = first.state_dict()
    with DiskStore(path) as store:
        for number in range(8):  # ids are random, so some sort between the existing ones
            identity = {"other": number}
            store.add([Entry(Record(key_of(identity), "image", identity, {}), {"moments": torch.zeros(8, 8, 16)})])
        again = in_packs(path)
        again.load_state_dict(state)
        assert [list(batch) for batch in again] == whole[5:]
        dataset = LatentDataset(path, order="packs")
        images = [dataset.cache.row(f"{number}.png")[1].images[0].key for number in range(48)]
        assert dataset.places().rows.tolist() == [place.row for place in store.look_up(images) if place is not None]
        store.remove([LatentDataset(path).cache.row("0.png")[1].images[0].key])
        running = in_packs(path)
        order = [list(batch) for batch in running]
        compact(store)
    with pytest.raises(StoreError, match=r"packs \('[0-9a-f]{64}' there, '[0-9a-f]{64}' here\).*set_epoch\(0\)"):
        in_packs(path).load_state_dict(state)
    assert sorted(item for batch in order for item in batch) == list(range(48)), "a loss is met when it is read"
    with LatentLoader(running, device="cpu", damaged="skip") as loader:
        found = {name for batch in loader for name in batch["sample_id"]}
    assert found == {f"{number}.png" for number in range(1, 48)} and loader.skipped.keys() == {"0.png"}
