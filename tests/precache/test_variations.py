"""Further crops of each image: where they lie, what they cost, what they share, and what their keys depend on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.photo_files import write_mask, write_photo
from helpers.tiny_configs import config_of_dataset
from PIL import Image
from precaching import rows_of, run

from latentcache import BucketBatchSampler, LatentCache, LatentDataset
from latentcache.config import Config, ImagesConfig
from latentcache.dataset.images import decode, prepare, prepare_mask
from latentcache.dataset.row_table import Ref, Row
from latentcache.errors import StoreError
from latentcache.loading.sampler import Visit, Visits
from latentcache.loading.status import status
from latentcache.models.model_loader import LoadedModels
from latentcache.models.tiny import tiny_denoiser, tiny_part, tiny_parts
from latentcache.models.vae import encode_images
from latentcache.precache.explanation import explain
from latentcache.types import Crop, Size
from latentcache.validation.loss import validation_loss

SQUARE = {"rule": "diffusers", "resolution": 64}
SIZES = {"wide.png": (80, 144), "high.png": (150, 70), "square.png": (96, 96)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A wide image, a high one, and a square one that a square bucket takes whole.

    Each has its mask, a control image that lies on it, and one of other proportions.
    """
    for number, (name, size) in enumerate(SIZES.items()):
        write_photo(tmp_path / "photos" / name, number, size).with_suffix(".txt").write_text(f"photo {number}")
        write_photo(tmp_path / "before" / name, 10 + number, size)
        write_photo(tmp_path / "style" / name, 20 + number, (100, 90))
        write_mask(tmp_path / "masks" / name, number, size)
    return tmp_path


def config_of(folder: Path, *, parts: bool = False, **dataset: Any) -> Config:
    data = {"buckets": SQUARE, "role": "validation"} | dataset
    if parts:
        data |= {"control": [{"path": folder / "before"}, {"path": folder / "style"}]}
        data |= {"mask": {"path": folder / "masks"}}
    return config_of_dataset(folder, **data)


def of_crop(row: Row, crop: int) -> list[Ref]:
    return [ref for ref in row.images if ref.crop == crop]


def test_further_crops_are_entries_of_their_own_and_the_first_one_stays(folder: Path) -> None:
    plain = config_of(folder, flip=True, parts=True)
    run(plain)
    before, items = rows_of(plain), LatentDataset(plain.cache, flips=True)
    config = config_of(folder, flip=True, parts=True, variations=4, variations_seed=5)
    report = run(config)
    # Of two images 3 further crops, mirrored too: the image, its control image and its mask.
    added = {"variation added": 12, "control 1: variation added": 12, "mask: variation added": 12}
    assert report.misses_by_reason == added
    assert run(config).num_misses == 0
    same = LatentDataset(config.cache, flips=True)
    assert (len(same), same.identity()) == (len(items), items.identity()), "crops change no item"
    for name, row in rows_of(config).items():
        assert (len(row.images), {ref.crop for ref in row.images}, len(row.parts)) == (8, {*range(4)}, 24)
        assert of_crop(row, 0) == [*before[name].images], "the first crop is today's, with today's keys"
        assert tuple(ref for ref in row.parts if ref.crop == 0) == before[name].parts
        assert [ref.geometry.flip for ref in row.images] == [False, True] * 4
        assert {ref.geometry.target_size for ref in row.images} == {Size(64, 64)}, "all lie in one bucket"
        keys = {ref.key for ref in row.images}
        assert len(keys) == (2 if name == "square.png" else 8), "without a margin there is one crop"
        for crop in range(4):
            plain_ref, mirrored = of_crop(row, crop)
            for flip, ref in ((False, plain_ref), (True, mirrored)):
                parts = {ref.role: ref for ref in row.parts_of(crop, flip=flip)}
                assert list(parts) == ["control 1", "control 2", "mask"]
                assert parts["control 1"].geometry == parts["mask"].geometry == ref.geometry, "they lie on the image"
        assert len({ref.key for ref in row.parts if ref.role == "control 2"}) == 2, "it moves with no crop"
    found = status(config.cache).store["num_entries"]
    assert found["mask"] == 2 * 8 + 2 and found["image"] == 2 * found["mask"] + 3 * 2


@pytest.mark.parametrize(
    "buckets", [{"area": 64 * 64, "step": 64}, {"rule": "kohya", "resolution": 64, "square": True}, SQUARE]
)
def test_what_is_encoded_is_the_crop_and_its_mirror_image(folder: Path, buckets: dict[str, Any]) -> None:
    """Of every rule the time ids of a mirrored crop are those of what is seen."""
    config = config_of(folder, buckets=buckets, flip=True, variations=3, mask={"path": folder / "masks"})
    run(config)
    vae, row = tiny_parts()["vae"], rows_of(config)["wide.png"]
    path = folder / "photos/wide.png"
    pixels = decode(path.read_bytes(), "wide.png", ImagesConfig(min_side=8))
    values = np.asarray(Image.open(folder / "masks/wide.png"))
    with LatentCache(config.cache) as cache:
        for crop in (1, 2):
            upright, mirrored = (ref.geometry for ref in of_crop(row, crop))
            spare = upright.resized_size.width - 64
            assert 0 <= upright.crop_top_left.left <= spare and spare > 20
            assert mirrored.seen_crop == Crop(upright.crop_top_left.top, spare - upright.crop_top_left.left)
            for flip, ref in enumerate(of_crop(row, crop)):
                entry = cache.get(ref.key)
                seen = prepare(pixels, upright, entry.record.identity["preparation"]["resample"])
                seen = seen[:, ::-1] if flip else seen
                moments = encode_images(vae, np.ascontiguousarray(seen)[None])[0]
                torch.testing.assert_close(entry.tensors["moments"], moments, rtol=0, atol=1e-5)
                [part] = row.parts_of(crop, flip=bool(flip))
                mask = cache.get(part.key).tensors["mask"].numpy()
                expected = prepare_mask(values, upright, 8)
                assert np.array_equal(mask, expected[..., ::-1] if flip else expected)


def test_a_crop_depends_on_the_seed_the_image_and_its_number_alone(folder: Path) -> None:
    config = config_of(folder, variations=2)
    run(config)
    first = rows_of(config)
    more = config_of(folder, variations=3)
    assert run(more, dry_run=True).misses_by_reason == {"variation added": 2}
    run(more)
    for name, row in rows_of(more).items():
        assert row.images[:2] == first[name].images, "more variations keep those that there are"
    mirrored = run(config_of(folder, variations=3, flip=True), dry_run=True)
    assert mirrored.misses_by_reason == {"flip added": 2 * 3 + 1}
    other = run(config_of(folder, variations=3, variations_seed=1), dry_run=True)
    assert sum(other.misses_by_reason.values()) >= 3, "by chance one may lie where another one did"
    assert all(reason.startswith("crop changed (") for reason in other.misses_by_reason)
    (folder / "photos/wide.png").rename(folder / "photos/renamed.png")
    (folder / "photos/wide.txt").rename(folder / "photos/renamed.txt")
    assert run(more, dry_run=True).num_misses == 0
    write_photo(folder / "photos/high.png", 77, SIZES["high.png"])
    assert run(more, dry_run=True).misses_by_reason == {"image changed": 3}


def test_a_crop_may_lie_at_either_edge_and_not_beyond(tmp_path: Path) -> None:
    write_photo(tmp_path / "photos/narrow.png", 1, (64, 66))
    config = config_of(tmp_path, variations=32)
    run(config)
    assert {ref.geometry.crop_top_left for ref in rows_of(config)["narrow.png"].images} == {(0, 0), (0, 1), (0, 2)}


def test_the_plan_the_loss_and_explain_know_which_crop_is_meant(folder: Path) -> None:
    run(config_of(folder))

    def loss() -> Any:
        with LatentCache(config_of(folder).cache) as cache:
            torch.manual_seed(0)
            return validation_loss(tiny_denoiser().eval(), cache, scheduler=tiny_part("scheduler"))

    before = loss()
    config = config_of(folder, variations=3)
    report = run(config)
    assert report.notes == ["photos: 3 crops of each image add 4 entries to 3"] and report.num_encoded == 4
    assert not run(config_of(folder), dry_run=True).notes
    after = loss()
    assert before.loss == after.loss and before.measurement_settings == after.measurement_settings
    crops = [ref.geometry.crop_top_left for ref in rows_of(config)["wide.png"].images]
    text = explain(config, "wide.png", models=LoadedModels(**tiny_parts())).to_text()
    assert all(f"at {crop.top},{crop.left})" in text for crop in crops) and len(set(crops)) == 3


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Five wide images in one bucket with three crops each, mirrored too; and the same images with one."""
    folder = tmp_path_factory.mktemp("crops")
    for number in range(5):
        for write, kind in ((write_photo, "photos"), (write_mask, "masks")):
            write(folder / f"{kind}/{number}.png", number, (64, 140 + 8 * number))
    masks = {"path": folder / "masks"}
    config = config_of(folder, flip=True, variations=3, mask=masks)
    one = type(config.datasets[0])(**config.datasets[0].model_dump() | {"name": "one", "variations": 1})
    config = config.model_copy(update={"datasets": (*config.datasets, one)})
    run(config)
    return config


def test_each_visit_draws_a_crop_with_its_mask_and_time_ids(cached: Config) -> None:
    dataset = LatentDataset(cached.cache, "photos", crops="random", flips="random")
    plain = LatentDataset(cached.cache, "photos")
    assert (len(dataset), dataset.identity()) == (len(plain), plain.identity()) and len(plain) == 5
    sampler = BucketBatchSampler(dataset, 2, seed=3)
    rows, seen = rows_of(cached), set()
    for epoch in range(12):
        sampler.set_epoch(epoch)
        for visits in sampler:
            for visit, item in zip(visits, dataset.__getitems__(visits), strict=True):
                rest, flip = divmod(visit.draw, 2)
                row = rows[item["sample_id"]]
                image = of_crop(row, rest % 3)[flip]
                seen.add((item["sample_id"], rest % 3, flip))
                assert tuple(item["crop_top_left"].tolist()) == image.geometry.seen_crop
                assert item["add_time_ids"][2:4].tolist() == [*image.geometry.seen_crop]
                assert torch.equal(item["moments"], dataset.cache.get(image.key).tensors["moments"])
                [part] = row.parts_of(rest % 3, flip=bool(flip))
                assert torch.equal(item["mask"], dataset.cache.get(part.key).tensors["mask"])
    assert len(seen) > 24, "of 30: each crop of each image, on either side"
    first = plain.__getitems__([*range(5)])
    assert [tuple(item["crop_top_left"].tolist()) for item in first] == [
        rows[item["sample_id"]].images[0].geometry.crop_top_left for item in first
    ]


def test_datasets_of_several_crops_and_of_one_are_read_together(cached: Config) -> None:
    dataset = LatentDataset(cached.cache, ["photos", "one"], crops="random")
    assert dataset.groups().tolist()[:5] == dataset.groups().tolist()[5:], "samples of both share a batch"
    with LatentCache(cached.cache) as cache:
        ones = {ref.key for row in cache.manifest("one").rows.values() for ref in row.images}
    refs = dataset.refs(Visits.of([Visit.of(item, draw, 0, 1) for item in range(10) for draw in range(6)]))
    assert all(ref.keys[0] in ones for ref in refs[30:]) and not all(ref.keys[0] in ones for ref in refs[:30])
    with pytest.raises(StoreError, match="each image of one has one crop: set `variations` of the dataset, then run"):
        LatentDataset(cached.cache, "one", crops="random")
    with pytest.raises(StoreError, match="crops is 'all'; it must be one of first, random"):
        LatentDataset(cached.cache, "photos", crops="all")  # type: ignore[arg-type]
