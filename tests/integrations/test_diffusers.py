"""Diffusers' SDXL scripts and pipelines, fed from the cache, compute what they compute live."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator, cpu_offload
from accelerate.data_loader import BatchSamplerShard
from diffusers import StableDiffusionXLPipeline
from helpers.photo_files import write_photo
from helpers.tiny_configs import tiny_config
from helpers.tiny_models import tiny_pipeline
from packaging.version import Version
from PIL import Image
from torch.utils.data import DataLoader

from latentcache import LatentCache, LatentDataset
from latentcache.integrations.diffusers import PrecomputedDataset, collate, data_loader, prompt_kwargs, time_ids
from latentcache.models.tiny import tiny_denoiser
from latentcache.precache.run import run_precache

# Sizes that need no resize, so that the live path needs none; d and e are cropped. Each identifies its sample.
SIZES = {"a.png": (96, 96), "b.png": (64, 128), "c.png": (128, 64), "d.png": (96, 120), "e.png": (96, 98)}
SAMPLE_OF = {size: name for name, size in SIZES.items()}
CROPS = {"d.png": (0, 12), "e.png": (0, 1)}
CAPTIONS = {name: f"photo {name[0]} of a house" for name in SIZES}
PROMPTS = ["a red house", "a blue car in the rain"]
NAMES = {"model_input", "prompt_embeds", "pooled_prompt_embeds", "original_sizes", "crop_top_lefts", "target_sizes"}
forks = pytest.mark.filterwarnings("ignore:This process.*is multi-threaded, use of fork:DeprecationWarning")


@pytest.fixture(scope="module")
def make_cache(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that makes a cache of the five photos, with flips, and of the prompts, once for each setting."""
    made: dict[str, Path] = {}

    def make(image_output: str = "moments", text_dtype: str = "float32") -> Path:
        settings = image_output + text_dtype
        if settings not in made:
            folder = tmp_path_factory.mktemp("cache")
            for number, (name, size) in enumerate(SIZES.items()):
                path = write_photo(folder / "photos" / name, number, size)
                path.with_suffix(".txt").write_text(CAPTIONS[name], encoding="utf-8")
            encode = {"encode.image_output": image_output, "encode.text_dtype": text_dtype}
            run_precache(tiny_config(folder, **encode, **{"datasets.0.flip": True, "validation.prompts": PROMPTS}))
            made[settings] = folder / "cache"
        return made[settings]

    return make


def rows_of(batches: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for batch in batches:
        assert batch.keys() == NAMES
        for number in range(len(batch["original_sizes"])):
            yield {name: values[number] for name, values in batch.items()}


def by_sampler(dataset: PrecomputedDataset, which: str) -> Any:
    if which == "shuffle":  # as in the script
        return DataLoader(dataset, shuffle=True, batch_size=1, collate_fn=collate)
    if which == "workers":
        return data_loader(dataset, 2, seed=3, num_workers=2)
    loader = data_loader(dataset, 2, seed=3)
    return Accelerator(cpu=True).prepare(loader) if which == "accelerate" else loader


@forks
@pytest.mark.parametrize("which", ["shuffle", "data_loader", "workers", "accelerate"])
def test_every_part_of_a_row_is_of_one_sample_in_every_epoch(make_cache: Callable[..., Path], which: str) -> None:
    dataset = PrecomputedDataset(LatentDataset(make_cache("mean"), flips=True))
    orders = []
    torch.manual_seed(0)  # so that "shuffle" gives different orders
    with LatentCache(make_cache("mean")) as cache:
        loader = by_sampler(dataset, which)
        for _ in range(3):
            seen = []
            for row in rows_of(loader):
                name = SAMPLE_OF[row["original_sizes"]]
                twins = [cache.batch([name], device="cpu", scaled=True, flip=flip) for flip in (False, True)]
                flips = [torch.equal(row["model_input"], twin["latents"][0]) for twin in twins]
                assert sum(flips) == 1, f"the latents are not those of {name}"
                assert torch.equal(row["prompt_embeds"], twins[0]["prompt_embeds"][0])
                assert torch.equal(row["pooled_prompt_embeds"], twins[0]["pooled_prompt_embeds"][0])
                assert row["crop_top_lefts"] == twins[0]["crop_top_left"][0]
                assert row["target_sizes"] == twins[0]["target_size"][0]
                seen.append((name, flips[1]))
            assert sorted(seen) == sorted((name, flip) for name in SIZES for flip in (False, True))
            orders.append(tuple(seen))
    assert len(set(orders)) == 3


@forks
def test_draws_follow_from_seed_and_epoch_alone(make_cache: Callable[..., Path]) -> None:
    dataset = PrecomputedDataset(LatentDataset(make_cache(), caption="random", caption_dropout=0.5))

    def drawn(num_workers: int, seed: int) -> list[bytes]:
        torch.manual_seed(num_workers)
        before = torch.get_rng_state()
        loader = data_loader(dataset, 2, seed=seed, shuffle=False, num_workers=num_workers)
        epochs = [list(loader) for _ in range(2)]
        if not num_workers:
            # Any DataLoader draws its base seed from the global generator; the dataset draws nothing.
            after = torch.get_rng_state()
            torch.set_rng_state(before)
            assert [list(DataLoader(range(1))) for _ in range(2)]
            assert torch.equal(torch.get_rng_state(), after)
        return [batch["model_input"].numpy().tobytes() for batches in epochs for batch in batches]

    first = drawn(0, seed=1)
    assert drawn(2, seed=1) == first
    assert len(set(first)) == len(first) == 2 * 4, "each visit is a new draw"
    assert not set(drawn(0, seed=2)) & set(first)


IS_OLD = Version(version("accelerate")) < Version("1.14")
NEEDS_DROP_LAST = pytest.mark.skipif(IS_OLD, reason="accelerate before 1.14 shares batches of one size only")


@pytest.mark.parametrize("drop_last", [pytest.param(False, marks=NEEDS_DROP_LAST), True])
def test_processes_of_accelerate_share_whole_batches(make_cache: Callable[..., Path], drop_last: bool) -> None:
    dataset = PrecomputedDataset(LatentDataset(make_cache("mean"), flips=True))
    loaders = [data_loader(dataset, 4, seed=2, drop_last=drop_last) for _ in range(2)]
    shards = [BatchSamplerShard(loader.batch_sampler, 2, rank) for rank, loader in enumerate(loaders)]
    whole = data_loader(dataset, 4, seed=2, drop_last=drop_last).batch_sampler
    assert sorted(map(len, whole)) == ([4] if drop_last else [2, 2, 2, 4])  # buckets of 2, 2 and 6 items
    whole.set_epoch(0)
    orders = []
    for _ in range(3):
        expected, dealt = list(whole), [list(shard) for shard in shards]
        in_order = [batch for pair in zip(*dealt, strict=True) for batch in pair]
        assert in_order == (expected if len(expected) % 2 == 0 else expected[:-1])
        assert all(len({dataset.dataset.bucket(item) for item in batch}) == 1 for batch in in_order)
        orders.append(str(in_order))
    assert len(set(orders)) == (1 if drop_last else 3)  # one batch cannot be shared
    whole.set_epoch(7)
    shards[0].batch_sampler.sampler.set_epoch(7)  # as accelerate's loader does
    assert list(shards[0]) == list(whole)[: len(whole) // 2 * 2 : 2]


def test_a_batch_of_the_script_is_that_of_live_encoded_inputs(make_cache: Callable[..., Path]) -> None:
    """The same as the script's `compute_vae_encodings` and `encode_prompt`."""
    names, whole = ["e.png", "a.png", "d.png"], tiny_pipeline()  # one bucket
    dataset = PrecomputedDataset(LatentDataset(make_cache()))
    torch.manual_seed(5)
    batch = collate([dataset[list(SIZES).index(name)] for name in names])
    assert batch["original_sizes"] == [SIZES[name] for name in names]
    assert batch["crop_top_lefts"] == [CROPS.get(name, (0, 0)) for name in names]
    torch.manual_seed(5)  # the same draws from the posterior
    for number, name in enumerate(names):
        pixels = np.asarray(Image.open(make_cache().parent / "photos" / name).convert("RGB"), dtype=np.float32)
        _, left = CROPS.get(name, (0, 0))
        cropped = torch.from_numpy(pixels[:, left : left + 96]).permute(2, 0, 1)[None]
        with torch.no_grad():
            latents = whole.vae.encode((cropped / 255 - 0.5) / 0.5).latent_dist.sample()
            embeds, _, pooled, _ = whole.encode_prompt(CAPTIONS[name], device="cpu")
        assert torch.equal(batch["model_input"][number], (latents * whole.vae.config.scaling_factor)[0])
        assert torch.equal(batch["prompt_embeds"][number], embeds[0])
        assert torch.equal(batch["pooled_prompt_embeds"][number], pooled[0])


def test_time_ids_by_either_convention() -> None:
    batch = {
        "original_sizes": [(1365, 2049), (300, 400)],
        "crop_top_lefts": [(0, 258), (3, 0)],
        "target_sizes": [(832, 1216), (832, 1216)],
    }
    ours = time_ids(batch, device=tiny_denoiser().bfloat16())
    assert ours.dtype is torch.float32
    assert ours.tolist() == [[1365, 2049, 0, 258, 832, 1216], [300, 400, 3, 0, 832, 1216]]
    theirs = time_ids(batch, device="cpu", resolution=1024, dtype=torch.float64)
    assert theirs.dtype is torch.float64
    assert theirs.tolist() == [[1365, 2049, 0, 258, 1024, 1024], [300, 400, 3, 0, 1024, 1024]]


def without_encoders(pipeline: StableDiffusionXLPipeline) -> StableDiffusionXLPipeline:
    """The same VAE, UNet and scheduler in a pipeline that cannot encode a prompt."""
    lacking = dict.fromkeys(("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))
    kept = {name: getattr(pipeline, name) for name in ("vae", "unet", "scheduler")}
    return StableDiffusionXLPipeline(**kept, **lacking, add_watermarker=False)


def test_prompts_are_those_that_the_pipeline_encodes(make_cache: Callable[..., Path]) -> None:
    """One prompt with and without a negative one, which is zeros or the empty prompt; and a batch."""
    whole, negatives = tiny_pipeline(), ["ugly", ""]
    bare = without_encoders(whole)
    names = ("prompt_embeds", "negative_prompt_embeds", "pooled_prompt_embeds", "negative_pooled_prompt_embeds")

    def encoded(prompt: str, negative: str | None) -> dict[str, torch.Tensor]:
        return dict(zip(names, whole.encode_prompt(prompt, device="cpu", negative_prompt=negative), strict=True))

    def assert_equal(found: dict[str, torch.Tensor], *expected: dict[str, torch.Tensor]) -> None:
        assert found.keys() == set(names)
        assert all(torch.equal(found[name], torch.cat([each[name] for each in expected])) for name in names)

    with LatentCache(make_cache()) as cache:
        for negative, zeros in (("ugly", True), (None, True), (None, False)):
            for pipeline in (whole, bare):
                pipeline.register_to_config(force_zeros_for_empty_prompt=zeros)
            assert_equal(prompt_kwargs(cache, PROMPTS[0], negative, device=bare), encoded(PROMPTS[0], negative))
        # Encoded one by one, because the last bits of a CPU's matrix products depend on the batch.
        expected = map(encoded, PROMPTS, negatives)
        assert_equal(prompt_kwargs(cache, PROMPTS, negatives, device="cpu"), *expected)
        shared = prompt_kwargs(cache, PROMPTS, "ugly", device="cpu")
        assert_equal(shared, *(encoded(prompt, "ugly") for prompt in PROMPTS))
    size: dict[str, Any] = {"height": 64, "width": 96, "num_inference_steps": 1, "output_type": "np"}
    assert bare(**shared, **size).images.shape == (2, 64, 96, 3)


def test_a_pipeline_asks_in_the_dtype_of_its_unet_and_where_it_will_run(make_cache: Callable[..., Path]) -> None:
    whole = tiny_pipeline().to(torch.bfloat16)
    bare, encoded = without_encoders(whole), whole.encode_prompt(PROMPTS[0], device="cpu", negative_prompt="ugly")
    bare.vae.float()  # common, and then pipe.dtype is not the dtype of the UNet
    # As in enable_sequential_cpu_offload, which needs an accelerator.
    cpu_offload(bare.unet, execution_device=torch.device("cpu"))
    assert {parameter.device.type for parameter in bare.unet.parameters()} == {"meta"}
    with LatentCache(make_cache(text_dtype="bfloat16")) as cache:
        kwargs = prompt_kwargs(cache, PROMPTS[0], "ugly", device=bare)
        half = prompt_kwargs(cache, PROMPTS[0], "ugly", device=torch.nn.Linear(1, 1).half())
    assert {(tensor.device.type, tensor.dtype) for tensor in kwargs.values()} == {("cpu", torch.bfloat16)}
    assert torch.equal(kwargs["prompt_embeds"], encoded[0])
    assert torch.equal(kwargs["negative_pooled_prompt_embeds"], encoded[3])
    assert torch.equal(half["prompt_embeds"], encoded[0].half()) and half["prompt_embeds"].dtype is torch.float16


def test_the_lora_script_gets_its_weight_dtype_rounded_once(make_cache: Callable[..., Path]) -> None:
    latents = LatentDataset(make_cache("mean"))
    full, half = PrecomputedDataset(latents), PrecomputedDataset(latents, dtype=torch.bfloat16)
    for whole, item in zip(full, half, strict=True):
        for name in ("model_input", "prompt_embeds", "pooled_prompt_embeds"):
            assert item[name].dtype is torch.bfloat16 and torch.equal(item[name], whole[name].bfloat16())
