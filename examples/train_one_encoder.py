"""Train one of SDXL's two text encoders, with the cached output of the other, which is never loaded.

Run `python scripts/quickstart.py` first: it creates the photos that the config names. Cached embeddings have the
columns of both encoders side by side; each step replaces the trained encoder's columns by live ones.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler

from latentcache import BucketBatchSampler, LatentDataset, LatentLoader, load_config, run_precache
from latentcache.models.tiny import tiny_photos_pipeline

NUM_STEPS = 4


def main() -> None:
    torch.manual_seed(0)
    config = load_config("configs/quickstart.yaml")
    run_precache(config)  # encodes what is not cached yet: nothing on a second run

    pipe = tiny_photos_pipeline()  # yours; only its first text encoder is used
    unet, tokenizer, scheduler = pipe.unet, pipe.tokenizer, DDPMScheduler.from_config(pipe.scheduler.config)
    encoder = pipe.text_encoder.requires_grad_(True).train()
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-4)

    dataset = LatentDataset(config.cache.path, config.datasets[0].name, caption="random")
    columns = dataset.facts.family.text_columns("prompt_embeds", {"text_encoder": encoder})["text_encoder"]
    with LatentLoader(BucketBatchSampler(dataset, batch_size=4, seed=0), device=unet, scaled=True) as loader:
        for step, batch in zip(range(1, NUM_STEPS + 1), loader.forever(), strict=False):
            tokens = tokenizer(batch["caption"], padding="max_length", truncation=True, return_tensors="pt").input_ids
            live = encoder(tokens.to(encoder.device), output_hidden_states=True).hidden_states[-2]  # SDXL's layer
            texts = batch["prompt_embeds"].clone()
            if step == 1:
                print(f"before training, live and cached differ by {(live - texts[..., columns]).abs().max():.0e}")
            texts[..., columns] = live

            latents = batch["latents"]
            noise = torch.randn_like(latents)
            timesteps = torch.randint(1000, (len(latents),), device=latents.device)
            conditions = {"text_embeds": batch["pooled_prompt_embeds"], "time_ids": batch["add_time_ids"]}
            noisy = scheduler.add_noise(latents, noise, timesteps)
            predicted = unet(noisy, timesteps, texts, added_cond_kwargs=conditions).sample
            loss = F.mse_loss(predicted.float(), scheduler.get_velocity(latents, noise, timesteps).float())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {step}: loss {loss.item():.4f}, encoder 1 has columns {columns.start} to {columns.stop}")


if __name__ == "__main__":
    main()
