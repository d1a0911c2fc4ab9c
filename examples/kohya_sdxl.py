"""SDXL in kohya's sd-scripts on cached data, without a fork of sd-scripts and without files beside the images.

Copy this file into the sd-scripts folder, name your cache in `make_batches`, and run the usual script there:

    accelerate launch sdxl_train_network.py --dataset_class kohya_sdxl.CachedSdxl --resolution 1024,1024
        --cache_latents --cache_text_encoder_outputs --network_train_unet_only ...

sd-scripts still loads the text encoders and the VAE once, and parks them, but encodes nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from library.train_util import MinimalDataset

from latentcache import BucketBatchSampler, CachedBatches, LatentDataset


def make_batches() -> CachedBatches:
    """The batches to train on. Their latents are unscaled: sd-scripts scales them."""
    dataset = LatentDataset("cache/quickstart", "photos", caption="random")
    return CachedBatches(BucketBatchSampler(dataset, batch_size=4, seed=0), dtype=torch.float32)


class CachedSdxl(MinimalDataset):
    """A dataset for `load_arbitrary_dataset` of sd-scripts. Each item is a whole batch."""

    def __init__(self, tokenizer: Any, max_token_length: int | None, resolution: Any, debug_dataset: bool):
        super().__init__(resolution, 1.0, debug_dataset)
        self.batches = make_batches()
        sampler = self.batches.sampler
        self.batch_size, self.num_train_images, self.img_count = sampler.batch_size, *2 * [len(sampler.dataset)]

    def set_current_epoch(self, epoch: int) -> None:
        """Called by the collator after an epoch's first batch was read, so that batch belongs to the previous epoch."""
        self.batches.set_epoch(epoch)
        super().set_current_epoch(epoch)

    def is_latent_cacheable(self) -> bool:
        return True

    def is_text_encoder_output_cacheable(self, cache_supports_dropout: bool = False) -> bool:
        return True

    def new_cache_latents(self, model: Any, accelerator: Any) -> None:
        """Everything is cached."""

    def new_cache_text_encoder_outputs(self, models: Any, accelerator: Any) -> None:
        """Everything is cached."""

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> dict[str, Any]:
        batch = self.batches[number]
        both, pooled, sizes = batch["prompt_embeds"], batch["pooled_prompt_embeds"], batch["add_time_ids"]
        # The second encoder's hidden states are as wide as its pooled output; the other columns are the first one's.
        clip_l, clip_g = both.split([both.shape[-1] - pooled.shape[-1], pooled.shape[-1]], dim=-1)
        return {
            "latents": batch["latents"],
            "text_encoder_outputs_list": [clip_l, clip_g, pooled],
            "original_sizes_hw": sizes[:, 0:2],
            "crop_top_lefts": sizes[:, 2:4],
            "target_sizes_hw": sizes[:, 4:6],
            "captions": batch["caption"],
            "loss_weights": batch["loss_weight"],
            "alpha_masks": batch["mask"][:, 0] / 255 if "mask" in batch else None,
            "custom_attributes": [{} for _ in both],
            "images": None,
            "input_ids_list": None,
        }
