"""A trainer that reads its cache from a service: this machine needs no photos, no encoders and no copy of the cache.

On the machine with the cache, run `latentcache serve cache/quickstart`. Here, pass the URL that it prints:

    python examples/remote_trainer.py http://127.0.0.1:8765

If the server needs a token, set the variable LATENTCACHE_TOKEN. What the first epoch reads is kept in
cache/remote-tier, so the second epoch does not use the network.
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler

from latentcache import BucketBatchSampler, LatentCache, LatentDataset, LatentLoader
from latentcache.models.tiny import tiny_denoiser

NUM_EPOCHS = 2
LOCAL = {"local": "cache/remote-tier", "local_max_bytes": 50 * 10**9, "retry_s": 60.0}


def main(url: str) -> None:
    torch.manual_seed(0)
    with LatentCache(url) as cache:
        name = cache.dataset_names()[0]
        print(f"{url} has {len(cache.sample_ids())} samples; training on {name}")
    unet, scheduler = tiny_denoiser(), DDPMScheduler()  # yours, on its device
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-4)
    dataset = LatentDataset(url, name, caption="random", **LOCAL)
    sampler = BucketBatchSampler(dataset, batch_size=4, seed=0)
    with dataset.cache, LatentLoader(sampler, device=unet, scaled=True) as loader:
        for epoch in range(NUM_EPOCHS):
            loader.set_epoch(epoch)
            for batch in loader:
                latents = batch["latents"]
                noise, timesteps = torch.randn_like(latents), torch.randint(1000, (len(latents),))
                conditions = {"text_embeds": batch["pooled_prompt_embeds"], "time_ids": batch["add_time_ids"]}
                noisy = scheduler.add_noise(latents, noise, timesteps)
                predicted = unet(noisy, timesteps, batch["prompt_embeds"], added_cond_kwargs=conditions).sample
                loss = F.mse_loss(predicted.float(), noise.float())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            print(f"epoch {epoch}: loss of the last batch {loss.item():.4f}")


if __name__ == "__main__":
    main(sys.argv[1])
