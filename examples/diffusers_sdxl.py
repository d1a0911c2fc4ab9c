"""diffusers with cached prompts and latents: a pipeline without text encoders, and a training script's data.

Run `python scripts/quickstart.py` first: it creates the photos that the config names.
"""

from __future__ import annotations

from latentcache import LatentCache, LatentDataset, load_config, run_precache
from latentcache.integrations.diffusers import PrecomputedDataset, data_loader, prompt_kwargs, time_ids
from latentcache.models.tiny import tiny_photos_pipeline


def main() -> None:
    config = load_config("configs/quickstart.yaml")
    run_precache(config)
    pipe = tiny_photos_pipeline()  # yours: StableDiffusionXLPipeline.from_pretrained(..., text_encoder=None, ...)

    # The images are bit-identical to those of the pipeline with its text encoders.
    with LatentCache(config.cache.path) as cache:
        inputs = prompt_kwargs(cache, config.validation.prompts[0], config.validation.negative_prompt, device=pipe)
    names = ("height", "width", "num_inference_steps", "guidance_scale")
    image = pipe(**inputs, **{name: getattr(config.validation, name) for name in names}).images[0]
    image.save("cache/diffusers_sdxl.png")

    # The precomputed_dataset and train_dataloader of train_text_to_image_sdxl.py.
    precomputed_dataset = PrecomputedDataset(LatentDataset(config.cache.path, config.datasets[0].name))
    train_dataloader = data_loader(precomputed_dataset, batch_size=4, seed=0)
    for batch in train_dataloader:
        # The script's own loop continues here, with the bucket in the time ids.
        print(tuple(batch["model_input"].shape), batch["original_sizes"], time_ids(batch, device=pipe.unet)[0].tolist())


if __name__ == "__main__":
    main()
