"""Masked images for denoisers that inpaint: their latents, their keys, batches of them, and the loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import EulerDiscreteScheduler, UNet2DConditionModel
from diffusers.image_processor import VaeImageProcessor
from helpers.photo_files import write_photo
from helpers.tiny_configs import config_of_dataset
from helpers.tiny_models import tiny_denoiser, tiny_encoders, tiny_folder
from PIL import Image
from precaching import row_of

from latentcache import BucketBatchSampler, LatentCache, LatentDataset, LatentLoader
from latentcache.config import Config, ImagesConfig, ModelConfig
from latentcache.dataset.images import decode, prepare
from latentcache.errors import ConfigError, ModelError
from latentcache.families import family_named
from latentcache.models.denoiser import load_denoiser
from latentcache.precache.run import run_precache
from latentcache.validation.loss import validation_loss
from latentcache.validation.sample_images import PromptEmbeddings, denoise

SIZE = (80, 144)
SCHEDULER = EulerDiscreteScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")


def masks_of(folder: Path, **settings: Any) -> dict[str, Any]:
    return {"mask": {"path": f"{folder}/masks", **settings}}


def write_mask(path: Path, seed: int) -> None:
    """Greys, and a white square: half of it is masked by either rule."""
    values = np.random.default_rng(seed).integers(0, 256, SIZE, dtype=np.uint8)
    values[10:40, 20:90] = 255
    path.parent.mkdir(exist_ok=True)
    Image.fromarray(values).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number, name in enumerate("ab"):
        write_photo(tmp_path / f"photos/{name}.png", number, SIZE).with_suffix(".txt").write_text(f"photo {name}")
        write_mask(tmp_path / f"masks/{name}.png", number)
    return tmp_path


def config_of(folder: Path, family: str = "sdxl", **dataset: Any) -> Config:
    data = {"role": "validation", "flip": True, **masks_of(folder, inpaint="hard"), **dataset}
    model = {"path": str(tiny_folder(family)), "family": family}
    return config_of_dataset(folder, {"model": model, "validation.num_timesteps": 2}, **data)


def cached(folder: Path, family: str = "sdxl", **dataset: Any) -> Config:
    config = config_of(folder, family, **dataset)
    assert run_precache(config).num_refused == 0
    return config


def inpainting(family: str = "sdxl") -> Any:
    """A denoiser of 9 channels."""
    torch.manual_seed(0)
    return UNet2DConditionModel.from_config(tiny_denoiser(family).config, in_channels=9).eval().requires_grad_(False)


@pytest.mark.parametrize(("inpaint", "kind"), [("hard", "file"), ("soft", "alpha")])
def test_a_masked_image_is_what_its_trainer_encodes(folder: Path, inpaint: str, kind: str) -> None:
    values = np.asarray(Image.open(folder / "masks/a.png"))
    if kind == "alpha":
        image = Image.open(folder / "photos/a.png").convert("RGB")
        image.putalpha(Image.fromarray(values))
        image.save(folder / "photos/a.png")
    where = {"alpha": True} if kind == "alpha" else {"path": f"{folder}/masks"}
    config = cached(folder, mask={**where, "inpaint": inpaint}, variations=2)
    row, vae = row_of(config, "a.png"), tiny_encoders("sdxl")["vae"]
    pixels = decode((folder / "photos/a.png").read_bytes(), "a.png", ImagesConfig(min_side=8))
    assert [ref.role for ref in row.parts_of()] == ["mask", "masked image"]
    for crop in range(2):
        for image_ref in (ref for ref in row.images if ref.crop == crop):
            geometry = image_ref.geometry
            part = row.parts_of(crop, flip=geometry.flip)[-1]
            assert part.geometry == geometry
            (top, left), (height, width) = geometry.crop_top_left, geometry.target_size
            mask = Image.fromarray(values).resize(geometry.resized_size[::-1], Image.Resampling.BOX)
            mask = mask.crop((left, top, left + width, top + height))
            if geometry.flip:
                mask = mask.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            seen = prepare(pixels, geometry)
            if inpaint == "hard":  # diffusers: pipeline_stable_diffusion_xl_inpaint.py
                processor = VaeImageProcessor(do_normalize=False, do_binarize=True, do_convert_grayscale=True)
                binary = processor.preprocess(mask, height=height, width=width)
                given = VaeImageProcessor().preprocess(Image.fromarray(seen)) * (binary < 0.5)
            else:  # OneTrainer: mgds, GenerateMaskedConditioningImage.py
                share = torch.from_numpy(np.asarray(mask, np.float32) / 255)
                scaled = torch.from_numpy(seen.copy()).movedim(-1, 0)[None].float() / 255
                given = (scaled * (1 - share) + 0.5 * share) * 2 - 1
            with torch.no_grad():
                expected = vae.encode(given).latent_dist.mode()[0]
            with LatentCache(config.cache) as cache:
                entry = cache.get(part.key)
            assert list(entry.tensors) == ["latents"]
            torch.testing.assert_close(entry.tensors["latents"], expected, rtol=0, atol=5e-5)
            assert entry.record.identity["masking"]["rule"] == inpaint


def test_a_batch_has_masked_latents_that_are_scaled_as_its_latents_are(folder: Path) -> None:
    config = cached(folder)
    dataset = LatentDataset(config.cache, flips=True)
    sampler = BucketBatchSampler(dataset, 2, shuffle=False)
    with LatentCache(config.cache) as cache, LatentLoader(sampler, device="cpu", scaled=True) as loader:
        for number, batch in enumerate(loader):
            flip = number == 1
            keys = [row_of(config, name).parts_of(flip=flip)[-1].key for name in batch["sample_id"]]
            stored = torch.stack([cache.get(key).tensors["latents"] for key in keys])
            scaling = cache.scaling(cache.manifest("photos"))
            assert torch.equal(batch["masked_latents"], scaling.apply(stored))
            assert batch["masked_latents"].shape == batch["latents"].shape == (2, 4, 8, 16)
            assert batch["mask"].shape == (2, 1, 8, 16)
            same = cache.batch(batch["sample_id"], device="cpu", scaled=True, flip=flip)
            assert torch.equal(same["masked_latents"], batch["masked_latents"])
            assert not torch.equal(batch["masked_latents"], batch["latents"])


@pytest.mark.parametrize("name", ["sdxl", "sd15"])
def test_a_denoiser_that_inpaints_is_given_latents_mask_and_masked_latents(folder: Path, name: str) -> None:
    config, family, unet = cached(folder, name), family_named(name), inpainting(name)
    folder_of_unet = folder / "unet-inpainting"
    unet.save_pretrained(folder_of_unet)
    model = ModelConfig(path=str(tiny_folder(name)), family=name)
    loaded = load_denoiser(folder_of_unet, dtype=torch.float32, model=model)
    assert family.inpaints(loaded) and not family.inpaints(tiny_denoiser(name))
    with LatentCache(config.cache) as cache:
        batch = cache.batch(["a.png", "b.png"], device="cpu", scaled=True)
        noisy, timesteps = torch.randn(batch["latents"].shape), torch.tensor([10, 900])
        joined = torch.cat([noisy, batch["mask"] / 255, batch["masked_latents"]], dim=1)  # the order of diffusers
        conditions = family.conditions(loaded, noisy, batch)
        expected = loaded(joined, timesteps, **conditions, return_dict=False)[0]
        assert torch.equal(family.predict(loaded, noisy, timesteps, batch), expected)
        plain = tiny_denoiser(name).eval()
        assert family.predict(plain, noisy, timesteps, batch).shape == noisy.shape, "another one takes latents alone"
        del batch["masked_latents"]
        with pytest.raises(ModelError, match=r"inpaints: its 9 channels .* the batch has none\. Set `inpaint`"):
            family.predict(loaded, noisy, timesteps, batch)
        report = validation_loss(loaded, cache, scheduler=SCHEDULER, settings=config.validation)
        assert set(report.by_sample["photos"]) == {"a.png", "b.png"}


def test_the_validation_loss_depends_on_the_masked_images_and_names_their_lack(folder: Path) -> None:
    unet, losses = inpainting(), []
    config = cached(folder, **masks_of(folder))
    with LatentCache(config.cache) as cache:
        with pytest.raises(ConfigError, match=r"its 9 channels .* photos has none\. Set `inpaint` of the dataset's"):
            validation_loss(unet, cache, scheduler=SCHEDULER, settings=config.validation)
        embeds = cache.prompt("", device="cpu")
    with pytest.raises(ConfigError, match="generates with a mask and a masked image, and prompts have none"):
        denoise(unet, SCHEDULER, [PromptEmbeddings("a cat", "", embeds, embeds)], config.validation)
    added = run_precache(config_of(folder), dry_run=True).misses_by_reason
    assert added == {"masked image: new": 4}, "and nothing else is encoded again"
    for inpaint in ("hard", "soft"):
        config = cached(folder, **masks_of(folder, inpaint=inpaint))
        with LatentCache(config.cache) as cache:
            losses.append(validation_loss(unet, cache, scheduler=SCHEDULER, settings=config.validation))
    hard, soft = losses
    assert hard.loss != soft.loss
    datasets = [each.measurement_settings.datasets for each in losses]
    assert datasets[0] != datasets[1], "two losses of other masked images are not comparable"
