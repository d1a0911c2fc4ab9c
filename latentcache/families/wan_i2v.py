"""Wan 2.1 and 2.2 A14B, image to video: clips that start with a given picture.

Its denoisers take 36 channels: noised latents, a mask of the given latent frames (4 channels, one per pixel frame), and
the condition, which is the latents of the first frame followed by grey ones. A14B has two denoisers, as in `wan`:
`model.denoiser` says which one is trained. 2.1 has one, which also takes CLIP vision embeddings of the first frame.
TI2V-5B belongs to `wan`. Models that also take the last frame are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from latentcache.errors import ModelError
from latentcache.families import wan
from latentcache.families.base import CONDITION, PICTURE, Caption, Encoded, LatentSpace
from latentcache.families.parts import Part

_VISION = ("hidden_act", "image_size", "layer_norm_eps", "num_attention_heads", "num_hidden_layers", "patch_size")
_IMAGES = (
    *("size", "crop_size", "do_convert_rgb", "do_resize", "resample", "do_center_crop", "do_rescale"),
    *("rescale_factor", "do_normalize", "image_mean", "image_std"),
)
_SUBFRAMES = 4
"""Channels of the mask, one for each pixel frame of a latent frame."""


class WanImageToVideo(wan.Wan):
    """Like `wan`, with the same texts, but only for clips. Their entries also have the padded first frame's latents.

    For models with an image encoder (2.1) they also have its output for the first frame of the prepared clip.
    """

    name = "wan-i2v"
    pipeline_name = "WanImageToVideoPipeline"
    pipeline_names = ()
    repositories = (
        "Wan-AI/Wan2.2-I2V-A14B-Diffusers",
        *(f"Wan-AI/Wan2.1-I2V-14B-{size}-Diffusers" for size in ("480P", "720P")),
    )
    parts = {
        **wan.Wan.parts,
        "image_encoder": Part("image_encoder", "transformers.CLIPVisionModel", settings=_VISION, optional=True),
        "image_processor": Part("image_processor", "transformers.CLIPImageProcessor", settings=_IMAGES, optional=True),
    }
    denoiser_settings = {"in_channels": 36, "pos_embed_seq_len": None}  # set in models that take the last frame
    latent = LatentSpace(16, is_video=True, draws=False)
    clip_condition = "first frame, padded"
    trainer_files = {"musubi": wan.Wan.trainer_files["musubi"]}

    @override
    def encode_text(self, parts: Mapping[str, Any], texts: Sequence[Caption], recipe: Mapping[str, Any]) -> Encoded:
        """With the pipeline of `wan`: this family's own fails without ftfy."""
        return wan.FAMILY.encode_text(parts, texts, recipe)

    @override
    def encode_pictures(self, parts: Mapping[str, Any], pictures: Sequence[Any]) -> torch.Tensor:
        """Like the pipeline: the processor resizes and crops, and the last layer is left out."""
        rows: torch.Tensor = self.pipeline(**parts).encode_image([*pictures], parts["image_encoder"].device)
        return rows

    @override
    def conditions(self, denoiser: Any, noisy: torch.Tensor, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Like `Family.conditions`, with CLIP's rows unless the denoiser's config says that it takes none."""
        found, config = super().conditions(denoiser, noisy, batch), getattr(denoiser, "config", None)
        takes = PICTURE in batch if config is None else config.get("image_dim") is not None
        if takes and PICTURE not in batch:
            message = f"it takes {PICTURE} of first frames, but the batch has none; precache with a model that has an"
            raise ModelError(f"{self.denoiser}: {message} image_encoder", part=self.denoiser)
        return found | ({"encoder_hidden_states_image": batch[PICTURE]} if takes else {})

    @override
    def inputs(self, denoiser: Any, noisy: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
        """36 channels. The mask follows from the shape: only the first latent frame is given."""
        if CONDITION not in batch:
            message = f"the batch has no {CONDITION}, the latents of first frames; precache clips as {self.name}"
            raise ModelError(f"{self.denoiser}: {message}", part=self.denoiser)
        condition = batch[CONDITION].to(noisy.dtype)
        mask = condition.new_zeros(len(condition), _SUBFRAMES, *condition.shape[2:])
        mask[:, :, 0] = 1
        return torch.cat([noisy, mask, condition], dim=1)

    @override
    def sampler(self, **parts: Any) -> Any:
        """The denoising loop of the pipeline, which itself takes no latents of a first frame. They state the size."""
        from diffusers.utils.torch_utils import randn_tensor

        denoiser, scheduler = parts["transformer"], parts["scheduler"]

        @torch.no_grad()
        def run(embeds: Mapping[str, Any], negative: Mapping[str, Any] | None, **options: Any) -> tuple[torch.Tensor]:
            condition, scale = embeds[CONDITION], options["guidance_scale"]
            shape, device, dtype = condition.shape, condition.device, torch.float32
            latents = randn_tensor(shape, generator=options["generator"], device=device, dtype=dtype)
            scheduler.set_timesteps(options["num_inference_steps"], device=device)
            for step in scheduler.timesteps:
                noisy, timesteps = latents.to(condition.dtype), step.expand(1)
                predicted = self.predict(denoiser, noisy, timesteps, embeds)
                if negative is not None:
                    without = self.predict(denoiser, noisy, timesteps, negative)
                    predicted = without + scale * (predicted - without)
                latents = scheduler.step(predicted, step, latents, return_dict=False)[0]
            return (latents,)

        return run

    @override
    def pipeline_kwargs(self, embeds: Mapping[str, Any], negative: Mapping[str, Any] | None) -> dict[str, Any]:
        """The arguments of `sampler`: texts that come with the condition."""
        return {"embeds": embeds, "negative": negative}


FAMILY = WanImageToVideo()
