"""musubi-tuner on cached data: batches of Qwen-Image (`vl_embed`) and Wan (`t5`), without its two caching scripts.

musubi-tuner has no option for another dataset, but one method that makes it. A start script of your own, in its
environment, with this file beside it, is therefore:

    from musubi_batches import build_dataset
    from musubi_tuner import qwen_image_train_network as script

    script.QwenImageNetworkTrainer._build_dataset = build_dataset("cache/qwen", "photos", "vl_embed")
    script.main()
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import Value
from typing import Any

import torch

from latentcache import BucketBatchSampler, CachedBatches, LatentDataset, unpadded


class MusubiBatches(torch.utils.data.Dataset[dict[str, Any]]):
    """A dataset group as musubi-tuner's trainers use it; each item is a whole batch. Latents are scaled."""

    def __init__(self, path: str, manifest: str, text: str, batch_size: int, seed: int, epoch: Any):
        dataset = LatentDataset(path, manifest, caption="random")
        self.batches = CachedBatches(BucketBatchSampler(dataset, batch_size, seed=seed), scaled=True)
        self.text, self.epoch = text, epoch
        self.batch_size, self.num_train_items, self.datasets = batch_size, len(dataset), [self]

    def set_current_epoch(self, epoch: int, **_: Any) -> None:
        """The collator calls this after the first batch of an epoch is read, which is too late: `epoch` is shared."""

    def set_max_train_steps(self, max_train_steps: int) -> None:
        """Nothing depends on it."""

    def get_metadata(self) -> dict[str, Any]:
        """What the trainer writes into the metadata of the LoRA."""
        dataset = self.batches.sampler.dataset
        return {"latentcache": [str(dataset.path), *dataset.names], "batch_size": self.batch_size}

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> dict[str, Any]:
        self.batches.set_epoch(self.epoch.value)
        batch = self.batches[number]
        latents = batch["latents"]  # of an image [B, C, h, w]: musubi-tuner has a number of frames everywhere
        latents = latents if latents.ndim == 5 else latents.unsqueeze(2)
        return {"latents": latents, self.text: unpadded(batch, "prompt_embeds"), "timesteps": None}


def build_dataset(path: str, manifest: str, text: str, batch_size: int = 1) -> Callable[..., Any]:
    """A method `_build_dataset` of musubi-tuner's `NetworkTrainer`, for batches of this cache.

    Args:
        path: The cache directory.
        manifest: The dataset's name.
        text: What musubi-tuner calls the text: `vl_embed` for Qwen-Image, `t5` for Wan.
        batch_size: Samples in a batch.
    """

    def method(self: Any, args: Any) -> tuple[MusubiBatches, Any, Any]:
        from musubi_tuner.training.accelerator_setup import collator_class

        self.num_timestep_buckets = args.num_timestep_buckets
        if self.num_timestep_buckets is not None:
            raise ValueError("--num_timestep_buckets needs musubi-tuner's own dataset: leave it out")
        epoch = Value("i", 0)  # the trainer counts in it, also for the workers of its DataLoader
        dataset = MusubiBatches(path, manifest, text, batch_size, args.seed or 0, epoch)
        return dataset, collator_class(epoch, dataset if args.max_data_loader_n_workers == 0 else None), epoch

    return method
