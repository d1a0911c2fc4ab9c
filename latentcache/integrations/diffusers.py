"""Cached inputs for diffusers' SDXL training scripts and pipelines, and the model parts that a trainer needs.

The scripts are `train_text_to_image_sdxl.py` and `train_text_to_image_lora_sdxl.py` in diffusers' examples, as of
August 2026. Batches have the names and types that these scripts use.

For your own trainer, of any family, `load_denoiser` (`load_unet` for SDXL) and `load_scheduler` load the model of the
config's `model` section, and refuse what diffusers would accept with a warning. `check_fits` (`check_conditioning` for
SDXL) checks that the denoiser fits the cached tensors, and `check_controls` that it gets the control images.
`NoiseSchedule` and `Family` have the timesteps, the targets and the denoiser's call. `validation_parts` loads what else
a ValidationRunner needs. `save_lora`, `load_lora` and `lora_settings` are for the trained weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline
from torch.utils.data import DataLoader, Dataset, Sampler

from latentcache.config import Config, ModelConfig
from latentcache.devices.placement import DeviceLike, device_named, device_of
from latentcache.errors import ConfigError, ModelError, StoreError
from latentcache.families import family_named
from latentcache.families.base import Family
from latentcache.identity import seed_of
from latentcache.loading.batch import IMAGE_FIELDS, TEXT_FIELDS, to_device
from latentcache.loading.cache import LatentCache
from latentcache.loading.dataset import LatentDataset
from latentcache.loading.sample import no_texts
from latentcache.loading.sampler import BucketBatchSampler, Visit
from latentcache.models.denoiser import check_fits, load_denoiser, load_scheduler
from latentcache.models.files import denoised_share
from latentcache.models.lora import load_lora, lora_settings, save_lora
from latentcache.models.vae import text_dtype, vae_dtype
from latentcache.precache.encodings import load_models
from latentcache.types import Batch, Size
from latentcache.utils.signals import stop_on_signals
from latentcache.validation.loss_parts import check_controls
from latentcache.validation.noise_schedule import NoiseSchedule
from latentcache.validation.runner import validation_sets
from latentcache.validation.sample_images import prompt_embeddings

__all__ = [
    "Family",
    "NoiseSchedule",
    "PrecomputedDataset",
    "check_conditioning",
    "check_controls",
    "check_fits",
    "collate",
    "data_loader",
    "denoised_share",
    "load_denoiser",
    "load_lora",
    "load_scheduler",
    "load_unet",
    "lora_settings",
    "prompt_kwargs",
    "save_lora",
    "stop_on_signals",
    "time_ids",
    "validation_parts",
]

SIZES = {"original_sizes": "original_size", "crop_top_lefts": "crop_top_left", "target_sizes": "target_size"}
"""Name of each size in the scripts' batches -> its name in LatentDataset."""


def load_unet(path: str | Path | None = None, *, dtype: torch.dtype, model: ModelConfig | None = None) -> Any:
    """Load SDXL's UNet: `load_denoiser` for this family."""
    return load_denoiser(path, dtype=dtype, model=model, family=family_named("sdxl"))


def check_conditioning(unet: Any, prompt_embeds_dim: int, pooled_dim: int) -> None:
    """Raise ModelError unless the UNet takes prompt_embeds [B, T, D] and pooled_prompt_embeds [B, P] of these sizes."""
    shapes = dict(zip(TEXT_FIELDS, ((prompt_embeds_dim,), (pooled_dim,)), strict=True))
    check_fits(unet, family_named("sdxl"), shapes)


class PrecomputedDataset(Dataset[Batch]):
    """Cached items as the `precomputed_dataset` of `train_text_to_image_sdxl.py`: nothing is decoded or encoded.

    An item has CPU tensors in `dtype`: `model_input` [C, h, w], scaled for the UNet, `prompt_embeds` [T, D] and
    `pooled_prompt_embeds` [P]. It also has pairs of integers, height or top first: `original_sizes`, `crop_top_lefts`
    and `target_sizes`, the bucket. All parts of an item belong to the same sample, in any order. The script itself uses
    float32, the LoRA script its `weight_dtype`.

    Stored moments are drawn from anew at each visit. With `data_loader` the draws depend on the seed, the epoch and
    the position only. A plain index draws with torch's global generator. `LatentDataset(..., caption_dropout=...)`
    replaces the script's `proportion_empty_prompts`, and is drawn at each visit too. The script's loss is unweighted,
    so items have neither the mask nor the `loss_weight` of their sample.
    """

    def __init__(self, dataset: LatentDataset, *, dtype: torch.dtype = torch.float32):
        if not dataset.facts.texts:
            raise no_texts(", ".join(dataset.names))
        self.dataset, self.dtype = dataset, dtype

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Batch]:
        """The items of a batch in one read, for a DataLoader. Raises StoreError if they are in several buckets."""
        items = self.dataset.__getitems__(indices)
        return [self._item(item, index) for index, item in zip(indices, items, strict=True)]

    def _item(self, item: Batch, index: int) -> Batch:
        generator = torch.default_generator
        if isinstance(index, Visit):
            generator = torch.Generator().manual_seed(seed_of("diffusers", index.draw))
        fields = {name: item[name][None] for name in IMAGE_FIELDS if name in item}
        scaling, draw = self.dataset.scaling, generator if "moments" in fields else None
        placed = to_device(fields, "cpu", dtype=self.dtype, scaling=scaling, generator=draw)
        made: Batch = {"model_input": placed["latents"][0]}
        made |= {name: item[name].to(self.dtype) for name in TEXT_FIELDS}
        return made | {name: tuple(item[ours].tolist()) for name, ours in SIZES.items()}


def collate(examples: Sequence[Batch]) -> Batch:
    """Stack tensors and list sizes, as the script's `collate_fn` does. StoreError for items of several buckets."""
    buckets = {example["target_sizes"] for example in examples}
    if len(buckets) > 1:
        met = ", ".join(str(Size(*bucket)) for bucket in sorted(buckets))
        raise StoreError(
            f"a batch has one bucket, but these samples are in {met}: batch them with "
            "latentcache.integrations.diffusers.data_loader or latentcache.loading.sampler.BucketBatchSampler"
        )
    batch: Batch = {name: torch.stack([each[name] for each in examples]) for name in ("model_input", *TEXT_FIELDS)}
    return batch | {name: [example[name] for example in examples] for name in SIZES}


def data_loader(
    dataset: PrecomputedDataset,
    batch_size: int,
    *,
    shuffle: bool = True,
    drop_last: bool = False,
    seed: int = 0,
    num_workers: int = 0,
) -> DataLoader[Batch]:
    """The scripts' `train_dataloader`: batches of one bucket each, for `accelerator.prepare` or on its own.

    The n-th iteration is epoch n, with its own order and draws. To resume, call `set_epoch` on what
    `accelerator.prepare` returned, or on `batch_sampler`. Processes of accelerate get equally many whole batches: some
    are repeated at the end of an epoch, or left out with `drop_last`. Batches may be smaller than `batch_size` in the
    middle of an epoch. With accelerate before 1.14 this requires `drop_last`.
    """
    batches = BucketBatchSampler(dataset.dataset, batch_size, shuffle=shuffle, drop_last=drop_last, seed=seed)
    return DataLoader(dataset, batch_sampler=Epochs(batches), collate_fn=collate, num_workers=num_workers)


class Epochs(Sampler[list[int]]):
    """The batches of a BucketBatchSampler in a form that accelerate can share among processes. Counts epochs itself.

    The scripts never call `set_epoch`. accelerate calls it on the `sampler` attribute of the batch sampler it wraps.
    """

    def __init__(self, batches: BucketBatchSampler):
        self._batches = batches
        self._epoch = batches.epoch
        self.drop_last = batches.drop_last
        # Given a number, accelerate assumes that only the last batch is smaller: it would drop batches and mix buckets.
        self.batch_size = batches.batch_size if batches.drop_last else None

    @property
    def sampler(self) -> Epochs:
        """This sampler itself, on which accelerate sets the epoch."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        # A generator, so that only reading counts: a DataLoader with workers creates two iterators and reads one.
        self._batches.set_epoch(self._epoch)
        self._epoch += 1
        yield from self._batches


def time_ids(
    batch: Mapping[str, Any],
    *,
    device: DeviceLike,
    dtype: torch.dtype = torch.float32,
    resolution: int | None = None,
) -> torch.Tensor:
    """SDXL's time ids of a batch, [B, 6]: original size, crop and target size, on `device`.

    The target is the bucket, as in SDXL's own training. With `resolution` it is (resolution, resolution), as in the
    scripts' `compute_time_ids`; this is the same for square buckets of that resolution. The scripts use their
    `weight_dtype`, but bfloat16 cannot represent every integer above 256.
    """
    targets = batch["target_sizes"] if resolution is None else [(resolution, resolution)] * len(batch["target_sizes"])
    sizes = zip(batch["original_sizes"], batch["crop_top_lefts"], targets, strict=True)
    rows = [[*original, *crop, *target] for original, crop, target in sizes]
    return torch.tensor(rows, dtype=dtype, device=device_of(device))


def prompt_kwargs(
    cache: LatentCache,
    prompts: str | Sequence[str],
    negative: str | Sequence[str] | None = None,
    *,
    device: DeviceLike | DiffusionPipeline,
    dtype: torch.dtype | None = None,
) -> dict[str, torch.Tensor]:
    """Cached embeddings that replace the prompts of any diffusers SDXL pipeline: `pipe(**prompt_kwargs(...))`.

    Args:
        cache: The cache with the prompts.
        prompts: One text, or several.
        negative: One text for all prompts, or one for each. None does what the pipeline does without a negative
            prompt: zeros, or the empty prompt if its config has `force_zeros_for_empty_prompt` off.
        device: Where the tensors go. A pipeline stands for the device and dtype of its UNet; it needs no text encoder.
        dtype: Overrides the dtype.

    Returns `prompt_embeds` and `negative_prompt_embeds` [B, T, D], `pooled_prompt_embeds` and
    `negative_pooled_prompt_embeds` [B, P]. Raises SampleError for a prompt that is not cached, and ModelError for a
    pipeline whose UNet does not fit.
    """
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    if not texts:
        raise StoreError("prompts is empty; give at least one text")
    unet, requester = None, device
    if isinstance(device, DiffusionPipeline):
        unet = requester = _unet_of(device)
        if negative is None and not device.config.get("force_zeros_for_empty_prompt", True):
            negative = ""
    negatives = [negative] * len(texts) if negative is None or isinstance(negative, str) else list(negative)
    if len(negatives) != len(texts):
        raise StoreError(f"negative has {len(negatives)} texts for {len(texts)} prompts; give one, or one for each")
    found = [
        prompt_embeddings(cache, [text], other, device=requester, dtype=dtype)[0].tensors()
        for text, other in zip(texts, negatives, strict=True)
    ]
    kwargs = {name: torch.cat([tensors[name] for tensors in found]) for name in found[0]}
    if unet is not None:
        check_conditioning(unet, *(kwargs[name].shape[-1] for name in TEXT_FIELDS))
    return kwargs


def _unet_of(pipeline: DiffusionPipeline) -> Any:
    """The pipeline's UNet. ModelError if it has none, or one that is not conditioned like SDXL's."""
    unet = getattr(pipeline, "unet", None)
    if getattr(getattr(unet, "config", None), "addition_embed_type", None) != "text_time":
        detail = f"{type(pipeline).__name__} has no UNet with addition_embed_type 'text_time', as SDXL has"
        raise ModelError(f"{detail}. Give an SDXL pipeline or a device.", part="unet")
    return unet


def validation_parts(config: Config, cache: LatentCache) -> dict[str, Any]:
    """The parts that a ValidationRunner of this config needs besides denoiser and scheduler, on the CPU.

    These are the `vae`, to decode images and to encode missing entries, and the text encoders and tokenizers if the
    cache lacks a sample of a validation set or a prompt. Their dtypes are those that precache uses on `encode.device`,
    so entries that validation adds get the same keys. Raises ModelError, and ConfigError for a config without a
    training set.
    """
    device, models = device_named(config.encode.device), load_models(config.model, {})
    is_cached = _is_validation_cached(config, cache)
    parts: dict[str, Any] = {}
    if config.validation.prompts or not is_cached:
        parts["vae"] = models.vae(vae_dtype(config.encode.vae_dtype, models.vae_facts(), device)[0])
    if not is_cached:
        parts |= models.text(text_dtype(config.encode.text_dtype, models.family, device)[0])
    return parts


def _is_validation_cached(config: Config, cache: LatentCache) -> bool:
    """Whether the cache has everything that validation reads."""
    names = [dataset.name for dataset in config.datasets if dataset.role == "validation"]
    # The training set's prompts: other sets in the cache may come from other text encoders.
    training = [dataset.name for dataset in config.datasets if dataset.role == "train"]
    if not training:
        raise ConfigError("the config has no dataset with `role: train`, and validation reads the prompts of one")
    own = cache.restricted(training[0])
    try:
        tables = [cache.manifest(name).rows for name in names]
        prompts, negative = config.validation.prompts, config.validation.negative_prompt
        prompt_embeddings(own, prompts, negative, device="cpu", datasets=validation_sets(cache, config))
    except StoreError:
        return False
    return not any(len(table.lacking(cache.store.has)) for table in tables)
