"""What diffusers' SDXL training scripts and its SDXL pipelines take, out of the cache; and diffusers' SDXL itself.

The scripts are `train_text_to_image_sdxl.py` and `train_text_to_image_lora_sdxl.py` of diffusers' examples, as they
were in August 2026. The names of a batch, its types, and how it is used are theirs.

For a trainer of one's own, of any family: `load_denoiser` (of SDXL `load_unet`) and `load_scheduler` give the model of
the config's `model` section, refusing what diffusers would accept with a warning; `check_fits` (of SDXL
`check_conditioning`) says whether it takes what is cached; `validation_parts` what a ValidationRunner needs next to
them; `NoiseSchedule` and `Family` the timesteps, the targets and the call of the denoiser; `check_controls` whether it
is given the control images; `save_lora` and `lora_settings` are for what was trained.
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
"""The names of the sizes in a batch of the scripts, and in LatentDataset."""


def load_unet(path: str | Path | None = None, *, dtype: torch.dtype, model: ModelConfig | None = None) -> Any:
    """SDXL's UNet at `path`, as `load_denoiser` loads it."""
    return load_denoiser(path, dtype=dtype, model=model, family=family_named("sdxl"))


def check_conditioning(unet: Any, prompt_embeds_dim: int, pooled_dim: int) -> None:
    """ModelError unless the UNet takes prompt_embeds [B, T, D] and pooled_prompt_embeds [B, P] of these D and P."""
    shapes = dict(zip(TEXT_FIELDS, ((prompt_embeds_dim,), (pooled_dim,)), strict=True))
    check_fits(unet, family_named("sdxl"), shapes)


class PrecomputedDataset(Dataset[Batch]):
    """The `precomputed_dataset` of `train_text_to_image_sdxl.py`, from the cache: nothing is decoded or encoded.

    An item is a dict of CPU tensors in `dtype`: `model_input` [C, h, w], scaled as the UNet expects it,
    `prompt_embeds` [T, D], `pooled_prompt_embeds` [P]; and of pairs of integers (height or top first):
    `original_sizes`, `crop_top_lefts`, `target_sizes`, which is the bucket. Every part of an item is that of its own
    sample, in any order. float32 is the dtype of the script itself; the LoRA script computes in its `weight_dtype`.

    Each visit is a new draw from stored moments. With `data_loader`, whose sampler is that of `dataset`, the draws
    follow from the seed, the epoch and the position; a plain item number draws with torch's global generator.
    The script's `proportion_empty_prompts` is `LatentDataset(..., caption_dropout=...)`, drawn at each visit too.
    Its loss counts all rows and places alike: items have neither the mask nor the `loss_weight` of their sample.
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
        """The items of a batch in one read; a DataLoader calls this. StoreError where they lie in several buckets."""
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
    """A batch as the script's `collate_fn` makes it: tensors stacked, sizes as a list of tuples.

    Raises StoreError, which names the sampler to use, for items of several buckets.
    """
    buckets = {example["target_sizes"] for example in examples}
    if len(buckets) > 1:
        met = ", ".join(str(Size(*bucket)) for bucket in sorted(buckets))
        raise StoreError(
            f"a batch has one bucket, but these samples lie in {met}: batch them with "
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
    """The scripts' `train_dataloader`: batches of one bucket each, for `accelerator.prepare` or alone.

    The n-th iteration is epoch n, in an order and with draws of its own. After a resume, `set_epoch` of what
    `accelerator.prepare` returned, or of `batch_sampler`, says with which epoch to go on. Processes of accelerate get
    equally many whole batches: some come twice at the end of an epoch, or, with `drop_last`, are left out. Batches may
    be smaller than `batch_size` in the middle of an epoch; accelerate before 1.14 then needs `drop_last`.
    """
    batches = BucketBatchSampler(dataset.dataset, batch_size, shuffle=shuffle, drop_last=drop_last, seed=seed)
    return DataLoader(dataset, batch_sampler=Epochs(batches), collate_fn=collate, num_workers=num_workers)


class Epochs(Sampler[list[int]]):
    """The batches of a BucketBatchSampler, epoch after epoch, in the form that accelerate distributes to processes.

    The scripts never call `set_epoch`, and accelerate looks for it in `sampler` where it has wrapped this one.
    """

    def __init__(self, batches: BucketBatchSampler):
        self._batches = batches
        self._epoch = batches.epoch
        self.drop_last = batches.drop_last
        # Given a number, accelerate assumes that only the last batch is smaller; it would leave out others, and mix
        # buckets.
        self.batch_size = batches.batch_size if batches.drop_last else None

    @property
    def sampler(self) -> Epochs:
        """This sampler itself: accelerate sets the epoch on it."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[int]]:
        # A generator: a DataLoader with workers creates two iterators and reads one, which must count once.
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
    """SDXL's time ids of a batch, [B, 6]: original size, crop and target size, on the requesting device.

    The target is the bucket, as SDXL was trained. With `resolution` it is (resolution, resolution), as the scripts'
    `compute_time_ids` has it; the two are equal for square buckets of that resolution. The scripts have them in their
    `weight_dtype`, but bfloat16 cannot hold every integer above 256.
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
    """The embeddings that any SDXL pipeline of diffusers takes in place of its prompts: `pipe(**prompt_kwargs(...))`.

    Returns `prompt_embeds` and `negative_prompt_embeds` [B, T, D], `pooled_prompt_embeds` and
    `negative_pooled_prompt_embeds` [B, P] for B prompts (one string: B is 1), on the requesting device. A pipeline
    stands for its UNet's device and dtype, and needs no text encoder. `negative` is one text for all, or one for each.
    None is what the pipeline makes of no negative prompt: zeros, or the embeddings of the empty prompt where its
    config has `force_zeros_for_empty_prompt` off.

    Raises SampleError for a prompt that is not cached, ModelError for a pipeline whose UNet does not take them.
    """
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    if not texts:
        raise StoreError("prompts is empty; it must hold at least one text")
    unet, requester = None, device
    if isinstance(device, DiffusionPipeline):
        unet = requester = _unet_of(device)
        if negative is None and not device.config.get("force_zeros_for_empty_prompt", True):
            negative = ""
    negatives = [negative] * len(texts) if negative is None or isinstance(negative, str) else list(negative)
    if len(negatives) != len(texts):
        raise StoreError(f"negative holds {len(negatives)} texts for {len(texts)} prompts; give one for each, or one")
    found = [
        prompt_embeddings(cache, [text], other, device=requester, dtype=dtype)[0].tensors()
        for text, other in zip(texts, negatives, strict=True)
    ]
    kwargs = {name: torch.cat([tensors[name] for tensors in found]) for name in found[0]}
    if unet is not None:
        check_conditioning(unet, *(kwargs[name].shape[-1] for name in TEXT_FIELDS))
    return kwargs


def _unet_of(pipeline: DiffusionPipeline) -> Any:
    """The UNet that the pipeline denoises with. ModelError if it has none that is conditioned as SDXL's are."""
    unet = getattr(pipeline, "unet", None)
    if getattr(getattr(unet, "config", None), "addition_embed_type", None) != "text_time":
        detail = f"{type(pipeline).__name__} has no UNet with addition_embed_type 'text_time', as SDXL's is"
        raise ModelError(f"{detail}. Give an SDXL pipeline, or name a device.", part="unet")
    return unet


def validation_parts(config: Config, cache: LatentCache) -> dict[str, Any]:
    """The parts that a ValidationRunner of this config needs next to the UNet and its scheduler, on the CPU.

    They are the `vae`, to decode images or to encode what is not cached; and, where the cache lacks a sample of a
    validation set or a prompt, both text encoders and tokenizers. Their dtypes are those of precache, which encodes on
    `encode.device`: entries that validation adds have the keys that precache would give them. Raises ModelError, and
    ConfigError for a config without a training set.
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
    """Whether the cache has all that validation reads."""
    names = [dataset.name for dataset in config.datasets if dataset.role == "validation"]
    # The prompts of the training set: other sets in the cache may come from other text encoders.
    training = [dataset.name for dataset in config.datasets if dataset.role == "train"]
    if not training:
        raise ConfigError("the config has no dataset with the role train, whose prompts validation reads")
    own = cache.restricted(training[0])
    try:
        keys = {key for name in names for key in cache.manifest(name).rows.entry_keys(usable=True)}
        prompt_embeddings(own, config.validation.prompts, config.validation.negative_prompt, device="cpu")
    except StoreError:
        return False
    return len(cache.store.find(keys)) == len(keys)
