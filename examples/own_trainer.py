"""Your own trainer on cached data: SDXL's UNet, a checkpoint, and a resume in the middle of an epoch.

Run `python scripts/quickstart.py` first: it creates the photos that the config names. With your own config and pipeline
this is a complete full fine-tuning, except for mixed precision and a learning rate schedule.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler

from latentcache import (
    BucketBatchSampler,
    Config,
    LatentDataset,
    LatentLoader,
    load_checkpoint,
    load_config,
    run_precache,
    save_checkpoint,
)
from latentcache.models.tiny import tiny_photos_pipeline

NUM_STEPS = 6


def loss_of(unet: torch.nn.Module, scheduler: DDPMScheduler, batch: dict[str, Any]) -> torch.Tensor:
    """The loss of a batch, with the objective that this model was trained on."""
    latents = batch["latents"]
    noise = torch.randn_like(latents)
    timesteps = torch.randint(1000, (len(latents),), device=latents.device)
    noisy = scheduler.add_noise(latents, noise, timesteps)
    conditions = {"text_embeds": batch["pooled_prompt_embeds"], "time_ids": batch["add_time_ids"]}
    predicted = unet(noisy, timesteps, batch["prompt_embeds"], added_cond_kwargs=conditions).sample
    # This model predicts velocity. SDXL itself predicts noise (`prediction_type` "epsilon"), which is then the target.
    return F.mse_loss(predicted.float(), scheduler.get_velocity(latents, noise, timesteps).float())


def make_loader(config: Config, unet: torch.nn.Module) -> LatentLoader:
    """Batches of one bucket each, on the UNet's device, with a random caption for each image."""
    photos = config.datasets[0]
    dataset = LatentDataset(config.cache.path, photos.name, flips=photos.flip, caption="random")
    return LatentLoader(BucketBatchSampler(dataset, batch_size=4, seed=0), device=unet, scaled=True)


def main() -> None:
    torch.manual_seed(0)
    config = load_config("configs/quickstart.yaml")
    report = run_precache(config)  # encodes what is not cached yet: nothing on a second run
    print(f"{report.num_hits} entries were cached, {report.num_encoded} were encoded")

    pipe = tiny_photos_pipeline()  # yours, on its device
    unet, scheduler = pipe.unet.requires_grad_(True), DDPMScheduler.from_config(pipe.scheduler.config)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-4)
    with make_loader(config, unet) as loader:
        for step, batch in zip(range(1, NUM_STEPS + 1), loader.forever(), strict=False):
            loss = loss_of(unet, scheduler, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step}: loss {loss.item():.4f}, {batch['sample_id']}")
        extra = {"loader": loader.state_dict()}
        save_checkpoint("cache/own-trainer", model=unet, optimizer=optimizer, step=NUM_STEPS, extra=extra)

    state = load_checkpoint("cache/own-trainer", model=unet, optimizer=optimizer)  # onto their present devices
    with make_loader(config, unet) as loader:
        loader.load_state_dict(state.extra["loader"])
        print(f"resumed after step {state.step}: next batch: {next(iter(loader))['sample_id']}")


if __name__ == "__main__":
    main()
