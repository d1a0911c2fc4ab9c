"""musubi-tuner on cached data: batches of Qwen-Image (`vl_embed`) and Wan (`t5`), without its two caching scripts.

musubi-tuner has no option for another dataset, but a single method creates it. Start it with a script of your own, in
its environment and beside this file:

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
    """A dataset group for musubi-tuner's trainers. Each item is a whole batch with scaled latents."""

    def __init__(self, path: str, manifest: str, text: str, batch_size: int, seed: int, epoch: Any):
        dataset = LatentDataset(path, manifest, caption="random")
        self.batches = CachedBatches(BucketBatchSampler(dataset, batch_size, seed=seed), scaled=True)
        self.text, self.epoch = text, epoch
        self.batch_size, self.num_train_items, self.datasets = batch_size, len(dataset), [self]

    def set_current_epoch(self, epoch: int, **_: Any) -> None:
        """Ignored: the collator calls it only after an epoch's first batch was read. `epoch` is shared instead."""

    def set_max_train_steps(self, max_train_steps: int) -> None:
        """Ignored: nothing depends on it."""

    def get_metadata(self) -> dict[str, Any]:
        """Entries for the LoRA's metadata."""
        dataset = self.batches.sampler.dataset
        return {"latentcache": [str(dataset.path), *dataset.names], "batch_size": self.batch_size}

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> dict[str, Any]:
        self.batches.set_epoch(self.epoch.value)
        batch = self.batches[number]
        latents = batch["latents"]  # images are [B, C, h, w]: musubi-tuner always has a frame dimension
        latents = latents if latents.ndim == 5 else latents.unsqueeze(2)
        return {"latents": latents, self.text: unpadded(batch, "prompt_embeds"), "timesteps": None}


def build_dataset(path: str, manifest: str, text: str, batch_size: int = 1) -> Callable[..., Any]:
    """Make a `_build_dataset` method for musubi-tuner's `NetworkTrainer` that trains on this cache.

    Args:
        path: The cache directory.
        manifest: The dataset's name.
        text: musubi-tuner's name for the text field: `vl_embed` for Qwen-Image, `t5` for Wan.
        batch_size: Samples per batch.
    """

    def method(self: Any, args: Any) -> tuple[MusubiBatches, Any, Any]:
        from musubi_tuner.training.accelerator_setup import collator_class

        self.num_timestep_buckets = args.num_timestep_buckets
        if self.num_timestep_buckets is not None:
            raise ValueError("--num_timestep_buckets needs musubi-tuner's own dataset: leave it out")
        epoch = Value("i", 0)  # the trainer counts here, and its DataLoader's workers see it
        dataset = MusubiBatches(path, manifest, text, batch_size, args.seed or 0, epoch)
        return dataset, collator_class(epoch, dataset if args.max_data_loader_n_workers == 0 else None), epoch

    return method
