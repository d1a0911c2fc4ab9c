"""Validation inside a training loop: the loss on held-out photos, and sample images; training continues undisturbed.

Run `python scripts/quickstart.py` first: it creates the photos that the config names. The parts include encoders, so
the first validation encodes the held-out photos itself. Without encoders, run `latentcache precache` before.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler

from latentcache import (
    BucketBatchSampler,
    LatentCache,
    LatentDataset,
    LatentLoader,
    Phases,
    ValidationRunner,
    load_config,
    run_precache,
)
from latentcache.models.tiny import tiny_photos_pipeline


def main() -> None:
    torch.manual_seed(0)
    config = load_config("configs/quickstart.yaml")
    run_precache(config.model_copy(update={"datasets": config.datasets[:1]}))  # the photos to train on

    pipe = tiny_photos_pipeline()  # yours
    parts = {name: part for name, part in pipe.components.items() if part is not None}
    unet = parts["unet"].requires_grad_(True)
    optimizer = parts["optimizer"] = torch.optim.AdamW(unet.parameters(), lr=1e-3)
    phases = Phases(parts, device="cpu")  # yours: the UNet goes there, and frozen parts are parked on the CPU
    phases.start("train")

    dataset = LatentDataset(config.cache.path, config.datasets[0].name)
    sampler = BucketBatchSampler(dataset, batch_size=4, seed=0)
    noise_schedule = DDPMScheduler.from_config(pipe.scheduler.config)
    with LatentCache(config.cache.path) as cache, LatentLoader(sampler, device=unet, scaled=True) as loader:
        runner = ValidationRunner(parts, cache, config, phases=phases)
        for step, batch in zip(range(1, 7), loader.forever(), strict=False):
            latents = batch["latents"]
            noise, timesteps = torch.randn_like(latents), torch.randint(1000, (len(latents),))
            noisy = noise_schedule.add_noise(latents, noise, timesteps.to(latents.device))
            conditions = {"text_embeds": batch["pooled_prompt_embeds"], "time_ids": batch["add_time_ids"]}
            predicted = unet(noisy, timesteps, batch["prompt_embeds"], added_cond_kwargs=conditions).sample
            target = noise_schedule.get_velocity(latents, noise, timesteps)  # or the noise, if the model predicts noise
            F.mse_loss(predicted.float(), target).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 3 == 0:
                report = runner.run(step)  # leaves weights, optimizer, gradients and random streams unchanged
                print(report.to_text())
                print(f"images, plot and metrics.json: {runner.paths.folder}")


if __name__ == "__main__":
    main()
