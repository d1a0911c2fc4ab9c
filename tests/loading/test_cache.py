"""Cached values are returned on the requesting device, in its dtype, and nothing is returned in place of another."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from helpers.pack_damage import damage

from latentcache import LatentCache
from latentcache.config import PROMPTS_PREFIX, Config
from latentcache.dataset.row_table import Ref
from latentcache.errors import EntryDamagedError, EntryMissingError, SampleError, StoreError
from latentcache.identity import key_of
from latentcache.precache.run import run_precache
from latentcache.types import Crop, Entry, Geometry, Record, Size

WIDE = ["a.png", "b.png", "sub/e.png"]


@pytest.fixture
def cache(config: Config) -> LatentCache:
    with LatentCache(config.cache.path) as cache:
        yield cache


def test_a_batch_follows_the_requesting_module(cache: LatentCache) -> None:
    unet = torch.nn.Linear(2, 2).to(torch.bfloat16)
    batch = cache.batch(WIDE, device=unet)
    assert {name: tuple(batch[name].shape) for name in ("latents", "prompt_embeds", "pooled_prompt_embeds")} == {
        "latents": (3, 4, 8, 16),
        "prompt_embeds": (3, 77, 72),
        "pooled_prompt_embeds": (3, 40),
    }
    assert {batch[name].dtype for name in ("latents", "prompt_embeds", "pooled_prompt_embeds")} == {torch.bfloat16}
    assert batch["add_time_ids"].dtype == torch.float32
    assert batch["sample_id"] == WIDE and batch["caption"] == ["a red house", "a blue car", "a tree"]
    assert cache.batch(WIDE, device=unet, dtype=torch.float16)["latents"].dtype == torch.float16
    assert cache.batch(WIDE, device="cpu")["latents"].dtype == torch.float32, "a name keeps the stored one"
    assert cache.batch(WIDE, device=torch.zeros(1, dtype=torch.float16))["prompt_embeds"].dtype == torch.float16


def test_sizes_are_integers_and_time_ids_float32(cache: LatentCache) -> None:
    batch = cache.batch(WIDE, device=torch.nn.Linear(1, 1).half())
    assert batch["original_size"] == [(80, 144)] * 3 and batch["target_size"] == [(64, 128)] * 3
    assert batch["add_time_ids"].dtype == torch.float32
    rows = [[80, 144, *crop, 64, 128] for crop in batch["crop_top_left"]]
    assert batch["add_time_ids"].tolist() == rows
    height, width = batch["resized_size"][0]
    assert (height == 64 and width >= 128) or (width == 128 and height >= 64)


def test_time_ids_hold_what_bfloat16_cannot(cache: LatentCache) -> None:
    [manifest] = cache.datasets()
    row = manifest.rows["a.png"]
    sizes = Size(4097, 3001), Size(1371, 1100), Crop(171, 1), Size(1024, 1024)
    rows = {}
    for flip in (False, True):
        images = (replace(row.images[0], geometry=Geometry(*sizes, flip)),)
        rows[str(flip)] = replace(row, sample_id=str(flip), images=images)
    cache.manifests.write(manifest.with_rows(rows))
    cache.refresh()
    for flip, left in ((False, 1), (True, 1100 - 1024 - 1)):
        ids = cache.batch([str(flip)], device=torch.nn.Linear(1, 1).bfloat16(), flip=flip)["add_time_ids"]
        assert ids.dtype == torch.float32 and ids.tolist() == [[4097, 3001, 171, left, 1024, 1024]]


def test_moments_are_drawn_with_the_generator_that_is_given(cache: LatentCache) -> None:
    moments = cache.batch(WIDE, device="cpu", output="moments")["moments"]
    posterior = DiagonalGaussianDistribution(moments)
    drawn = cache.batch(WIDE, device="cpu", generator=torch.Generator().manual_seed(3))["latents"]
    assert torch.equal(drawn, posterior.sample(torch.Generator().manual_seed(3)))
    assert torch.equal(cache.batch(WIDE, device="cpu")["latents"], posterior.mode())
    state = torch.get_rng_state()
    cache.batch(WIDE, device="cpu", generator=torch.Generator().manual_seed(4))
    assert torch.equal(torch.get_rng_state(), state), "the global generator is not touched"


def test_scaled_and_unscaled(cache: LatentCache) -> None:
    plain, scaled = (cache.batch(WIDE, device="cpu", scaled=flag)["latents"] for flag in (False, True))
    assert torch.allclose(scaled, plain * 0.13025, rtol=0, atol=1e-7) and not torch.equal(scaled, plain)
    for output in ("moment", "prompt_embeds"):
        with pytest.raises(StoreError, match=f"output is '{output}'; it must be one of latents, moments"):
            cache.batch(WIDE, device="cpu", output=output)
    with pytest.raises(StoreError, match="moments are stored unscaled"):
        cache.batch(WIDE, device="cpu", output="moments", scaled=True)


def test_a_cache_of_latents(make_config: Callable[..., Config]) -> None:
    config = make_config(**{"encode.image_output": "mean"})
    run_precache(config)
    with LatentCache(config.cache.path) as cache:
        assert cache.batch(WIDE, device="cpu")["latents"].shape == (3, 4, 8, 16)
        with pytest.raises(StoreError, match="holds latents, not moments"):
            cache.batch(WIDE, device="cpu", output="moments")
        with pytest.raises(StoreError, match="a generator has no effect"):
            cache.batch(WIDE, device="cpu", generator=torch.Generator())


def test_captions_and_flips(make_config: Callable[..., Config], cache: LatentCache) -> None:
    batch = cache.batch(["a.png"], device="cpu", caption=1)
    assert batch["caption"] == ["a house in the rain"]
    with pytest.raises(SampleError, match=r"'b\.png': has 1 caption, but number 1"):
        cache.batch(["b.png"], device="cpu", caption=1)
    with pytest.raises(SampleError, match=r"has no flipped entry.*set `flip: true`"):
        cache.batch(["b.png"], device="cpu", flip=True)
    config = make_config(**{"datasets.0.flip": True})
    run_precache(config)
    with LatentCache(config.cache.path) as flipped:
        one, other = (flipped.batch(["a.png"], device="cpu", flip=flag)["latents"] for flag in (False, True))
        assert not torch.equal(one, other)


def test_buckets_do_not_mix(cache: LatentCache) -> None:
    with pytest.raises(StoreError, match=r"lie in 128x64, 64x128: batch them with .*BucketBatchSampler"):
        cache.batch(["a.png", "c.png"], device="cpu")
    with pytest.raises(StoreError, match="no samples were requested"):
        cache.batch([], device="cpu")


def test_samples_of_unequal_fields_are_refused_and_named(cache: LatentCache) -> None:
    identity = {"another": "width"}
    fields = {"prompt_embeds": torch.ones(77, 3), "pooled_prompt_embeds": torch.ones(40)}
    cache.store.add([Entry(Record(key_of(identity), "text", identity, {}), fields)])
    [manifest] = cache.datasets()
    rows = dict(manifest.rows)
    rows["b.png"] = replace(rows["b.png"], captions=(Ref.of_text("odd", key_of(identity)),))
    cache.manifests.write(manifest.with_rows(rows))
    cache.refresh()
    unequal = r"equal shapes and dtypes: field 'prompt_embeds' .* in a\.png and .* in b\.png"
    with pytest.raises(StoreError, match=unequal):
        cache.batch(WIDE, device="cpu")
    assert cache.batch(["b.png"], device="cpu")["prompt_embeds"].shape == (1, 77, 3)


def test_unknown_and_ambiguous_samples(make_config: Callable[..., Config], cache: LatentCache) -> None:
    with pytest.raises(SampleError, match=r"'none\.png': is in no manifest \(photos\)"):
        cache.batch(["none.png"], device="cpu")
    other = make_config(**{"datasets.0.name": "other"})
    run_precache(other)
    ambiguous = pytest.raises(SampleError, match=r"is in several manifests: other, photos.*manifest=NAME")
    with LatentCache(other.cache.path) as both, ambiguous:
        both.batch(["a.png"], device="cpu")
    with LatentCache(other.cache.path, manifest="other") as one:
        assert one.batch(["a.png"], device="cpu")["sample_id"] == ["a.png"]
    with pytest.raises(StoreError, match="no manifest 'nothing'; there are: other, photos"):
        LatentCache(other.cache.path, manifest="nothing")


def test_get_places_the_tensors(cache: LatentCache) -> None:
    key = cache.row("a.png")[1].images[0].key
    entry = cache.get(key, device=torch.nn.Linear(1, 1).half())
    assert entry.tensors["moments"].dtype == torch.float16 and entry.record.key == key
    with pytest.raises(EntryMissingError, match="no such entry"):
        cache.get("0" * 64)


def test_damage_is_named_and_mended(config: Config) -> None:
    with LatentCache(config.cache.path) as cache:
        key = cache.row("b.png")[1].images[0].key
        needle = cache.get(key).tensors["moments"].numpy().tobytes()[:64]
    damage(config.cache.path, needle)
    with LatentCache(config.cache.path) as cache:
        with pytest.raises(SampleError, match=r"'b\.png': is damaged: .*run `latentcache precache CONFIG` again"):
            cache.batch(["a.png", "b.png"], device="cpu")
        assert cache.batch(["a.png"], device="cpu")["sample_id"] == ["a.png"]
        with pytest.raises(EntryDamagedError):
            cache.get(key)
    report = run_precache(config)
    assert report.misses_by_reason == {"damaged": 1} and report.num_encoded == 1
    with LatentCache(config.cache.path) as cache:
        assert cache.batch(["b.png"], device="cpu")["latents"].isfinite().all()


def test_a_reader_that_may_not_write_says_how_to_mend(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    with LatentCache(config.cache.path) as cache:
        key = cache.row("b.png")[1].captions[0].key
        needle = cache.get(key).tensors["pooled_prompt_embeds"].numpy().tobytes()[:64]
    damage(config.cache.path, needle)
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    with LatentCache(config.cache.path) as cache:
        assert cache.store.read_only
        with pytest.raises(SampleError, match=r"is damaged: .*`latentcache verify .*`, then run `latentcache precache"):
            cache.batch(["c.png"], device="cpu")


def test_prompts_whose_manifest_is_gone_are_not_cached(config: Config) -> None:
    (manifest,) = (config.cache.path / "manifests").glob(f"{PROMPTS_PREFIX}*")
    manifest.unlink()
    with LatentCache(config.cache.path) as cache:
        with pytest.raises(SampleError, match=r"is not cached.*validation\.prompts.*run `latentcache precache CONFIG`"):
            cache.prompt("", device="cpu")
        assert cache.sample_ids()
    run_precache(config)
    with LatentCache(config.cache.path) as cache:
        assert cache.prompt("", device="cpu")["prompt_embeds"].isfinite().all()


def test_what_another_run_caches_is_seen_after_a_refresh(config: Config, make_config: Callable[..., Config]) -> None:
    with LatentCache(config.cache.path) as cache:
        assert cache.sample_ids() and cache.prompt("", device="cpu")
        with pytest.raises(SampleError, match="a late idea"):
            cache.prompt("a late idea", device="cpu")
        assert run_precache(make_config(**{"validation.prompts": ["a late idea"]})).num_encoded == 1
        with pytest.raises(SampleError, match="a late idea"):
            cache.prompt("a late idea", device="cpu")
        cache.refresh()
        assert cache.prompt("a late idea", device="cpu")["prompt_embeds"].isfinite().all()
        assert cache.batch(WIDE, device="cpu")["latents"].shape[0] == 3
