"""Train the tiny SDXL of the quickstart on its twelve photos, from random weights, on one core of a CPU.

    OMP_NUM_THREADS=1 python scripts/train_tiny.py

It writes a diffusers folder, which the package contains and `model.path: tiny-photos` names. The VAE learns to
reconstruct the photos, the text encoders to tell them apart by their captions, and the UNet learns them by heart. So it
shows in seconds, and without a download, what a cache and a validation are for. It is no model of anything else.

One seed gives one set of weights on one machine with one release of torch.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
import torch.nn.functional as F
import transformers
from diffusers import AutoencoderKL, DDPMScheduler, EulerDiscreteScheduler, UNet2DConditionModel
from quickstart import CAPTIONS, copy_photos
from safetensors.torch import load_file
from safetensors.torch import save as serialized

from latentcache.config import BucketsConfig, ImagesConfig
from latentcache.dataset.buckets import assign, bucket_table, fit
from latentcache.dataset.images import decode, prepare
from latentcache.families.sdxl import FAMILY, SCALING_FACTOR
from latentcache.identity import digest
from latentcache.models.files import TINY_PHOTOS_FOLDER
from latentcache.models.tiny import tiny_parts
from latentcache.types import Size

SIDE = 256
TABLES = {
    "buckets": BucketsConfig(area=SIDE * SIDE, step=64, max_aspect=2.0),
    "squares": BucketsConfig(area=SIDE * SIDE, step=SIDE, max_aspect=1.0),
}
"""How the photos are cut: as the quickstart caches them, and as it samples them."""
CROP = 128
LATENT_CHANNELS = FAMILY.latent.channels
HIDDEN_SIZE, HIDDEN_SIZE_2, TIME_EMBED_DIM = 32, 40, 8
"""Widths of the tiny model's text encoders, and of each of its sizes."""
PLAIN_TIME_IDS = [SIDE, SIDE, 0, 0, SIDE, SIDE]
"""What a pipeline gives its UNet for an image of SIDE by SIDE."""
SCHEDULE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
WEIGHT_FILES = ("vae", "unet", "text_encoder", "text_encoder_2")


@dataclass(frozen=True, slots=True)
class Options:
    """The flags."""

    seed: int = 0
    vae_steps: int = 2500
    text_steps: int = 300
    unet_steps: int = 1300


@dataclass(frozen=True, slots=True)
class View:
    """A photo cut to one bucket: pixels float32 [1, 3, H, W] in [-1, 1], and the six time ids."""

    photo: str
    pixels: torch.Tensor
    time_ids: list[int]


# The photos.


def views_of(photos: Path, table: str) -> list[View]:
    """Every photo, decoded, resized and cropped as precaching does it."""
    views = []
    for name in CAPTIONS:
        path = photos / name
        pixels = decode(path.read_bytes(), str(path), ImagesConfig(min_side=16))
        size = Size(*pixels.shape[:2])
        geometry = fit(size, assign(size, bucket_table(TABLES[table])))
        cut = torch.from_numpy(prepare(pixels, geometry)).permute(2, 0, 1)[None].float() / 127.5 - 1
        views.append(View(name, cut, [*size, *geometry.crop_top_left, *geometry.target_size]))
    return views


# Steps, which all three trainings share.


def seeded(seed: int) -> random.Random:
    """A generator of choices, and torch's own from the same seed: no training depends on how long another was."""
    torch.manual_seed(seed)
    return random.Random(seed)


def training(name: str, parameters: Sequence[torch.nn.Parameter], num_steps: int, peak_rate: float) -> Iterator[Any]:
    """Yields `step(loss)` for each step: Adam, whose rate rises for a short time and then falls as a cosine."""
    optimizer = torch.optim.Adam(parameters, betas=(0.9, 0.99))
    start, losses = time.monotonic(), []

    def step(loss: torch.Tensor) -> None:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    for number in range(num_steps):
        warm = min(1.0, (number + 1) / 50)
        rate = peak_rate * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * number / num_steps)))
        optimizer.param_groups[0]["lr"] = rate
        yield step
        if (number + 1) % max(1, num_steps // 40) == 0:
            seconds = time.monotonic() - start
            recent = sum(losses[-100:]) / len(losses[-100:])
            print(f"{name}: step {number + 1} of {num_steps}, loss {recent:.4f}, {seconds:.0f} s", flush=True)


# The VAE.


def train_vae(vae: AutoencoderKL, views: Sequence[View], num_steps: int, draw: random.Random) -> None:
    """Reconstruct crops, and towards the end whole photos: group norms see another image in a crop.

    At first three channels of the latents also have to be the image made small: else colours come late.
    """
    vae.train().requires_grad_(True)
    guided_until, whole_from = num_steps // 8, num_steps * 17 // 20
    for number, step in enumerate(training("vae", list(vae.parameters()), num_steps, 3e-3)):
        if number < whole_from:
            images = torch.cat([crop_of(draw.choice(views).pixels, draw) for _ in range(2)])
        else:
            images = draw.choice(views).pixels
        if draw.random() < 0.5:
            images = images.flip(-1)
        posterior = vae.encode(images).latent_dist
        loss = reconstruction_loss(vae.decode(posterior.sample()).sample, images) + 1e-4 * kl_of(posterior)
        if number < guided_until:
            loss = loss + F.mse_loss(posterior.mean[:, :3], 4 * F.avg_pool2d(images, 8))
        step(loss)
    vae.eval().requires_grad_(False)
    normalize_latents(vae, views)


def crop_of(pixels: torch.Tensor, draw: random.Random) -> torch.Tensor:
    top, left = (draw.randrange(side - CROP + 1) for side in pixels.shape[-2:])
    return pixels[..., top : top + CROP, left : left + CROP]


def reconstruction_loss(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The absolute error of the pixels, and of their differences to neighbours, without which edges are blurred."""
    error = found - wanted
    return error.abs().mean() + error.diff(dim=-1).abs().mean() + error.diff(dim=-2).abs().mean()


def kl_of(posterior: Any) -> torch.Tensor:
    """The divergence from a normal distribution, per number of the latents."""
    divergence: torch.Tensor = posterior.kl().mean() / posterior.mean[0].numel()
    return divergence


@torch.no_grad()
def normalize_latents(vae: AutoencoderKL, views: Sequence[View]) -> None:
    """Give latents times SDXL's scaling factor a mean of 0 and a deviation of 1 in each channel.

    The shift and the factor go into the two 1x1 convolutions next to the latents, so that images do not change.
    """
    means = torch.cat([vae.encode(view.pixels).latent_dist.mean.flatten(2)[0] for view in views], dim=1)
    mean, factor = means.mean(1), 1 / (means.std(1) * SCALING_FACTOR)
    into, out = vae.quant_conv, vae.post_quant_conv
    out.bias += (out.weight[..., 0, 0] * mean).sum(1)
    out.weight /= factor[None, :, None, None]
    into.weight[:LATENT_CHANNELS] *= factor[:, None, None, None]
    into.bias[:LATENT_CHANNELS] -= mean
    into.bias[:LATENT_CHANNELS] *= factor
    into.bias[LATENT_CHANNELS:] += 2 * factor.log()


@torch.no_grad()
def psnr(vae: AutoencoderKL, view: View) -> float:
    """The peak signal-to-noise ratio in dB of a photo that went through the VAE."""
    found = vae.decode(vae.encode(view.pixels).latent_dist.mean).sample.clamp(-1, 1)
    return 10 * math.log10(4 / F.mse_loss(found, view.pixels).item())


# The text encoders.


def train_text(parts: dict[str, Any], num_steps: int, draw: random.Random) -> None:
    """Tell the photos apart by what the UNet is given: the embeddings of a caption, also with words left out of it."""
    encoders = (parts["text_encoder"], parts["text_encoder_2"])
    captions = sorted({tuple(captions) for captions in CAPTIONS.values()})  # two photos share theirs
    sizes, names = (HIDDEN_SIZE, HIDDEN_SIZE_2, HIDDEN_SIZE_2), torch.arange(len(captions))
    heads = torch.nn.ModuleList(torch.nn.Linear(size, len(captions)) for size in sizes)
    trained = [*encoders[0].requires_grad_(True).parameters(), *encoders[1].requires_grad_(True).parameters()]
    for step in training("text", [*trained, *heads.parameters()], num_steps, 2e-3):
        texts = [shortened(draw.choice(choice), captions, draw) for choice in captions]
        guesses = [head(each) for head, each in zip(heads, text_features(parts, texts), strict=True)]
        step(sum(F.cross_entropy(guess, names) for guess in guesses))
    for encoder in encoders:
        encoder.eval().requires_grad_(False)


def text_features(parts: dict[str, Any], texts: Sequence[str]) -> list[torch.Tensor]:
    """Of each encoder's penultimate layer the mean over a caption's tokens, and the pooled output of the second."""
    features = []
    for number in ("", "_2"):
        tokens = parts[f"tokenizer{number}"](texts, padding="max_length", truncation=True, return_tensors="pt")
        outputs = parts[f"text_encoder{number}"](tokens.input_ids, output_hidden_states=True)
        mask = tokens.attention_mask[..., None]
        features.append((outputs.hidden_states[-2] * mask).sum(1) / mask.sum(1))
    return [*features, outputs.text_embeds]


def shortened(caption: str, captions: Sequence[Sequence[str]], draw: random.Random) -> str:
    """The caption, or some words of it in their order, with one at least that no other photo's captions have."""
    words = caption.split()
    own = next(each for each in captions if caption in each)
    others = {word for each in captions if each is not own for text in each for word in text.split()}
    kept = [word for word in words if draw.random() < 0.7]
    return caption if draw.random() < 0.5 or not set(kept) - others else " ".join(kept)


@torch.no_grad()
def embed(parts: dict[str, Any], captions: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """prompt_embeds [B, 77, D] and pooled_prompt_embeds [B, P], by the pipeline's own code."""
    found = FAMILY.pipeline(**parts).encode_prompt(list(captions), device="cpu", do_classifier_free_guidance=False)
    return found[0], found[2]


# The UNet.


def new_unet() -> UNet2DConditionModel:
    """A UNet of four levels, of which the deepest sees a whole photo, and only it has attention."""
    return UNet2DConditionModel(
        sample_size=SIDE // 8,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        layers_per_block=1,
        block_out_channels=(32, 48, 56, 56),
        down_block_types=("DownBlock2D", "DownBlock2D", "DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D", "UpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
        use_linear_projection=True,
        cross_attention_dim=HIDDEN_SIZE + HIDDEN_SIZE_2,
        addition_embed_type="text_time",
        addition_time_embed_dim=TIME_EMBED_DIM,
        projection_class_embeddings_input_dim=6 * TIME_EMBED_DIM + HIDDEN_SIZE_2,
        norm_num_groups=8,
    )


def new_scheduler() -> EulerDiscreteScheduler:
    """SDXL's noise, with v-prediction: from pure noise it gives the photo itself, so a few steps are enough."""
    return EulerDiscreteScheduler(**SCHEDULE, prediction_type="v_prediction", timestep_spacing="trailing")


class Batches:
    """Latents, text and time ids of the photos as the UNet takes them."""

    def __init__(self, parts: dict[str, Any], views: dict[str, list[View]], draw: random.Random):
        self.draw = draw
        self.texts = {name: embed(parts, captions) for name, captions in CAPTIONS.items()}
        self.posteriors: dict[tuple[int, ...], list[tuple[View, Any]]] = {}
        with torch.no_grad():
            for kind, each in views.items():
                for view in each:
                    place = (kind == "squares", *view.pixels.shape[-2:])
                    posterior = parts["vae"].encode(view.pixels).latent_dist
                    self.posteriors.setdefault(place, []).append((view, posterior))
        self.squares = self.posteriors.pop((True, SIDE, SIDE))

    def next(self) -> tuple[torch.Tensor, dict[str, Any]]:
        """Scaled latents [B, 4, h, w] of one size, and what else the UNet is called with."""
        is_square = self.draw.random() < 0.8
        chosen = self.squares if is_square else self.draw.choice(list(self.posteriors.values()))
        latents = torch.cat([posterior.sample() for _, posterior in chosen]) * SCALING_FACTOR
        texts, pooled, ids = [], [], []
        for view, _ in chosen:
            embeddings, pools = self.texts[view.photo]
            row = self.draw.randrange(len(embeddings))
            has_text = float(self.draw.random() >= 0.1)  # without text it learns what guidance steers away from
            texts.append(embeddings[row] * has_text)
            pooled.append(pools[row] * has_text)
            ids.append(PLAIN_TIME_IDS if is_square and self.draw.random() < 0.5 else view.time_ids)
        conditions = {"text_embeds": torch.stack(pooled), "time_ids": torch.tensor(ids, dtype=torch.float32)}
        return latents, {"encoder_hidden_states": torch.stack(texts), "added_cond_kwargs": conditions}


def train_unet(unet: UNet2DConditionModel, batches: Batches, num_steps: int) -> None:
    """Predict the velocity of noised latents, as SDXL's v-prediction models are trained."""
    noising = DDPMScheduler(**SCHEDULE, prediction_type="v_prediction")
    unet.train()
    for step in training("unet", list(unet.parameters()), num_steps, 2e-3):
        latents, conditions = batches.next()
        noise = torch.randn_like(latents)
        timesteps = torch.randint(noising.config.num_train_timesteps, (len(latents),))
        predicted = unet(noising.add_noise(latents, noise, timesteps), timesteps, **conditions).sample
        step(F.mse_loss(predicted, noising.get_velocity(latents, noise, timesteps)))
    unet.eval().requires_grad_(False)


# The whole.


def train(photos: Path, options: Options) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parts of the pipeline, and where they come from."""
    views = {table: views_of(photos, table) for table in TABLES}
    both = [view for each in views.values() for view in each]
    parts = tiny_parts(options.seed)
    train_vae(parts["vae"], both, options.vae_steps, seeded(options.seed))
    train_text(parts, options.text_steps, seeded(options.seed))
    draw = seeded(options.seed)
    unet = new_unet()
    train_unet(unet, Batches(parts, views, draw), options.unet_steps)
    made = {
        "made_by": "scripts/train_tiny.py of latentcache",
        "trained_on": {name: digest((photos / name).read_bytes()) for name in CAPTIONS},
        "photos_from": "the data folder of scikit-image",
        "options": asdict(options),
        "psnr_db": {view.photo: round(psnr(parts["vae"], view), 1) for view in views["buckets"]},
        "versions": {module.__name__: module.__version__ for module in (torch, diffusers, transformers)},
    }
    return parts | {"unet": unet, "scheduler": new_scheduler()}, made


def save(parts: dict[str, Any], made: dict[str, Any], folder: Path) -> None:
    """Write the pipeline as a diffusers folder: float16 weights, whose metadata says where they come from."""
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        new = Path(temporary) / folder.name
        for part in WEIGHT_FILES:
            torch.nn.Module.half(parts[part])
        FAMILY.pipeline(**parts).save_pretrained(new, safe_serialization=True)
        for part in WEIGHT_FILES:
            (file,) = (new / part).glob("*.safetensors")
            tensors = load_file(file)
            if part == "text_encoder":  # as published models have it: transformers 5.5 reads no other names
                tensors = {f"text_model.{name}": tensor for name, tensor in tensors.items()}
            file.write_bytes(serialized(tensors, {"format": "pt", "provenance": json.dumps(made)}))
            file.chmod(0o644)  # safetensors gives its files to their owner alone
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(new, folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in asdict(Options()).items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default: {default}")
    parser.add_argument("--out", type=Path, default=TINY_PHOTOS_FOLDER, help="the folder to write")
    given = vars(parser.parse_args())
    out = given.pop("out")
    torch.set_num_threads(1)  # sums in another number of threads round differently
    with tempfile.TemporaryDirectory() as folder:
        photos = Path(folder) / "photos"
        copy_photos(photos)
        parts, made = train(photos, Options(**given))
    save(parts, made, out)
    print(json.dumps(made, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
