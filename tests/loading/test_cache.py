"""Cached values are returned on the requesting device, in its dtype, and never in place of another."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from helpers.pack_damage import damage
from loading import config_of, plain

from latentcache import BucketBatchSampler, LatentCache, LatentDataset, LatentLoader
from latentcache.config import PROMPTS_PREFIX
from latentcache.dataset.manifest import Manifest
from latentcache.dataset.row_table import Ref
from latentcache.errors import EntryDamagedError, EntryMissingError, SampleError, StoreError
from latentcache.identity import key_of
from latentcache.precache.run import run_precache
from latentcache.store import DiskStore
from latentcache.store.upkeep import compact
from latentcache.types import Crop, Entry, Geometry, Record, Refusal, Size

WIDE = ["a.png", "b.png", "sub/e.png"]
MAPS = Path("/proc/self/maps")
needs_maps = pytest.mark.skipif(not MAPS.exists(), reason="needs /proc/self/maps")


def other_rows(cache: LatentCache, **rows: Any) -> None:
    """Write the manifest with these rows replaced."""
    manifest = cache.manifest("photos")
    cache.manifests.write(manifest.with_rows(dict(manifest.rows) | rows))


def test_a_batch_follows_the_requesting_module(cache: LatentCache) -> None:
    unet = torch.nn.Linear(2, 2).to(torch.bfloat16)
    batch = cache.batch(WIDE, device=unet)
    shapes = {"latents": (3, 4, 8, 16), "prompt_embeds": (3, 77, 72), "pooled_prompt_embeds": (3, 40)}
    assert {name: tuple(batch[name].shape) for name in shapes} == shapes
    assert {batch[name].dtype for name in shapes} == {torch.bfloat16}
    assert batch["sample_id"] == WIDE and batch["caption"] == ["a red house", "a blue car", "a tree"]
    assert batch["original_size"] == [(80, 144)] * 3 and batch["target_size"] == [(64, 128)] * 3
    height, width = batch["resized_size"][0]
    assert (height == 64 and width >= 128) or (width == 128 and height >= 64)
    assert batch["add_time_ids"].dtype == torch.float32
    assert batch["add_time_ids"].tolist() == [[80, 144, *crop, 64, 128] for crop in batch["crop_top_left"]]
    assert cache.batch(WIDE, device=unet, dtype=torch.float16)["latents"].dtype == torch.float16
    assert cache.batch(WIDE, device="cpu")["latents"].dtype == torch.float32, "a name keeps the stored one"
    assert cache.batch(WIDE, device=torch.zeros(1, dtype=torch.float16))["prompt_embeds"].dtype == torch.float16
    entry = cache.get(cache.row("a.png")[1].images[0].key, device=unet)
    assert entry.tensors["moments"].dtype == torch.bfloat16
    with pytest.raises(EntryMissingError, match="no such entry"):
        cache.get("0" * 64)


def test_time_ids_hold_what_bfloat16_cannot(cache: LatentCache) -> None:
    row = cache.row("a.png")[1]
    sizes = Size(4097, 3001), Size(1371, 1100), Crop(171, 1), Size(1024, 1024)
    images = tuple(replace(image, geometry=Geometry(*sizes, flip)) for flip, image in enumerate(row.images))
    other_rows(cache, **{"a.png": replace(row, images=images)})
    cache.refresh()
    for flip, left in ((False, 1), (True, 1100 - 1024 - 1)):
        ids = cache.batch(["a.png"], device=torch.nn.Linear(1, 1).bfloat16(), flip=flip)["add_time_ids"]
        assert ids.dtype == torch.float32 and ids.tolist() == [[4097, 3001, 171, left, 1024, 1024]]


def test_moments_are_drawn_with_the_generator_that_is_given_and_scaled(cache: LatentCache) -> None:
    posterior = DiagonalGaussianDistribution(cache.batch(WIDE, device="cpu", output="moments")["moments"])
    state = torch.get_rng_state()
    drawn = cache.batch(WIDE, device="cpu", generator=torch.Generator().manual_seed(3))["latents"]
    assert torch.equal(drawn, posterior.sample(torch.Generator().manual_seed(3)))
    assert torch.equal(torch.get_rng_state(), state), "the global generator is not touched"
    plain, scaled = (cache.batch(WIDE, device="cpu", scaled=flag)["latents"] for flag in (False, True))
    assert torch.equal(plain, posterior.mode())
    assert torch.allclose(scaled, plain * 0.13025, rtol=0, atol=1e-7) and not torch.equal(scaled, plain)


@pytest.mark.parametrize(
    ("names", "options", "error", "message"),
    [
        (["a.png", "c.png"], {}, StoreError, r"lie in 128x64, 64x128: batch them with .*BucketBatchSampler"),
        ([], {}, StoreError, "no samples were requested"),
        (["none.png"], {}, SampleError, r"'none\.png': is in no manifest \(photos\)"),
        (["b.png"], {"caption": 1}, SampleError, r"'b\.png': has 1 caption, but number 1"),
        (WIDE, {"output": "moment"}, StoreError, "output is 'moment'; it must be one of latents, moments"),
        (WIDE, {"output": "moments", "scaled": True}, StoreError, "moments are stored unscaled"),
    ],
)
def test_what_is_no_batch_is_refused(
    cache: LatentCache, names: list[str], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        cache.batch(names, device="cpu", **options)


def test_a_cache_of_latents(folder: Path) -> None:
    run_precache(config_of(folder, **{"datasets.0.name": "other", "encode.image_output": "mean"}))
    path = folder / "cache"
    with LatentCache(path, manifest="other") as cache, LatentCache(path, manifest="photos") as photos:
        latents = cache.batch(WIDE, device="cpu")["latents"]
        assert torch.equal(latents, photos.batch(WIDE, device="cpu")["latents"])
        with pytest.raises(StoreError, match="holds latents, not moments"):
            cache.batch(WIDE, device="cpu", output="moments")
        with pytest.raises(StoreError, match="leave out the generator"):
            cache.batch(WIDE, device="cpu", generator=torch.Generator())
    dataset = LatentDataset(path, ["photos", "other"])
    with pytest.raises(StoreError, match="must have the same fields"):
        dataset.__getitems__([0, len(LatentDataset(path, "photos"))])


def test_a_sample_of_several_manifests_needs_the_name_of_one(cache: LatentCache) -> None:
    cache.manifests.write(replace(cache.manifest("photos"), name="other"))
    with pytest.raises(SampleError, match=r"is in several manifests: other, photos.*manifest=NAME"):
        cache.batch(["a.png"], device="cpu")
    assert cache.path is not None
    with LatentCache(cache.path, manifest="other") as one:
        assert one.batch(["a.png"], device="cpu")["dataset"] == ["other"]
    with pytest.raises(StoreError, match="no manifest 'nothing'; there are: other, photos"):
        LatentCache(cache.path, manifest="nothing")


def test_damage_is_named_and_mended(folder: Path) -> None:
    path = folder / "cache"
    with LatentCache(path) as cache:
        key = cache.row("b.png")[1].images[0].key
        damage(path, cache.get(key).tensors["moments"].numpy().tobytes()[:64])
    with LatentCache(path) as cache:
        with pytest.raises(SampleError, match=r"'b\.png': is damaged: .*run `latentcache precache CONFIG` again"):
            cache.batch(["a.png", "b.png"], device="cpu")
        assert cache.batch(["a.png"], device="cpu")["sample_id"] == ["a.png"]
        with pytest.raises(EntryDamagedError):
            cache.get(key)
    assert run_precache(config_of(folder)).misses_by_reason == {"damaged": 1}
    with LatentCache(path) as cache:
        assert cache.batch(["b.png"], device="cpu")["latents"].isfinite().all()


def test_prompts_whose_manifest_is_gone_are_not_cached_until_it_is_there_and_read(folder: Path) -> None:
    (manifest,) = (folder / "cache" / "manifests").glob(f"{PROMPTS_PREFIX}*")
    with LatentCache(folder / "cache") as cache:
        assert cache.prompt("", device="cpu")["prompt_embeds"].isfinite().all()
        with pytest.raises(SampleError, match=r"is not cached.*validation\.prompts.*run `latentcache precache CONFIG`"):
            cache.prompt("a late idea", device="cpu")
        manifest.unlink()
        run_precache(config_of(folder, **{"validation.prompts": ["a late idea"]}))
        with pytest.raises(SampleError, match="a late idea"):
            cache.prompt("a late idea", device="cpu")
        manifest.unlink()
        cache.refresh()
        with pytest.raises(SampleError, match="is not cached"):
            cache.prompt("", device="cpu")
        run_precache(config_of(folder, **{"validation.prompts": ["a late idea"]}))
        assert cache.prompt("a late idea", device="cpu")["prompt_embeds"].isfinite().all()


# Reading again -------------------------------------------------------------------------------------------------------


def test_the_callers_default_device_moves_nothing(path: Path) -> None:
    def everything() -> list[Any]:
        with LatentCache(path) as cache:
            entry = cache.get(cache.row("a.png")[1].images[0].key)
            found: list[Any] = [plain(entry.tensors), plain(cache.batch(WIDE, device="cpu", output="moments"))]
        sampler = BucketBatchSampler(LatentDataset(path, flips=True, caption="random"), 2, seed=5)
        with LatentLoader(sampler, device="cpu", prefetch=0) as made:
            found.append([plain(batch) for batch in made])
        items = LatentDataset(path, caption="random").__getitems__([0, 1])
        return found + [item["original_size"].tolist() for item in items]

    expected = everything()
    with torch.device("meta"):  # like torch.set_default_device
        assert everything() == expected


def test_a_manifest_that_was_replaced_counts_after_a_refresh(cache: LatentCache) -> None:
    assert cache.batch(WIDE, device="cpu")["caption"] == ["a red house", "a blue car", "a tree"]
    a, b = (cache.row(name)[1] for name in ("a.png", "b.png"))
    key, refusal = a.captions[1].key, Refusal("b.png", "b.png", "corrupt", "a test says so")
    captions = (Ref.of_text("edited", key),)
    other_rows(cache, **{"a.png": replace(a, captions=captions), "b.png": replace(b, refusal=refusal)})
    assert cache.batch(WIDE, device="cpu")["caption"] == ["a red house", "a blue car", "a tree"]
    cache.refresh()
    batch = cache.batch(["a.png"], device="cpu")
    assert batch["caption"] == ["edited"]
    assert torch.equal(batch["prompt_embeds"][0], cache.get(key).tensors["prompt_embeds"])
    with pytest.raises(SampleError, match=r"'b\.png': was refused"):
        cache.batch(WIDE, device="cpu")


def test_what_is_read_during_a_refresh_is_read_again(cache: LatentCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread refreshes the cache between this thread's reading and storing of a manifest."""
    read = cache.manifests.read

    def read_slowly(name: str) -> Manifest | None:
        found = read(name)
        assert found is not None
        cache.manifests.write(replace(found, repeats=7))
        thread = threading.Thread(target=cache.refresh)
        thread.start()
        thread.join()
        return found

    with monkeypatch.context() as patched:
        patched.setattr(cache.manifests, "read", read_slowly)
        assert cache.manifest("photos").repeats != 7
    assert cache.manifest("photos").repeats == 7


@needs_maps
def test_a_closed_cache_releases_what_it_remembered(cache: LatentCache) -> None:
    cache.batch(WIDE, device="cpu")
    assert str(cache.path) in MAPS.read_text()
    cache.close()
    assert str(cache.path) not in MAPS.read_text()


@needs_maps
@pytest.mark.parametrize("own", [True, False], ids=["its own store", "another"])
def test_a_compaction_makes_no_batch_wrong_and_keeps_no_file(path: Path, own: bool) -> None:
    dataset, unread = LatentDataset(path), LatentDataset(path, flips=True)
    loader = LatentLoader(BucketBatchSampler(dataset, 2, seed=5), device="cpu", prefetch=0)

    def everything() -> list[Any]:
        loader.set_epoch(0)
        batches = [plain(dataset.cache.batch([name], device="cpu")) for name in dataset.cache.sample_ids()]
        return [[plain(batch) for batch in loader], batches, [plain(item) for item in dataset]]

    expected = everything()
    with DiskStore(path) as other:
        store = dataset.cache.store if own else other
        assert isinstance(store, DiskStore)
        extra = Record(key_of({"extra": 1}), "text", {"extra": 1}, {})
        store.add([Entry(extra, {"prompt_embeds": torch.ones(1)})])
        assert compact(store).num_packs_after == 1
        assert everything() == expected
        assert [plain(unread[index]) for index in range(5)] == expected[2][:5]
    list(dataset.cache.store.keys())  # looks all keys up again, at their new places
    assert everything() == expected
    lines = MAPS.read_text().splitlines()
    assert not [line for line in lines if str(path) in line and line.endswith("(deleted)")]
