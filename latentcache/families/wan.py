"""Wan 2.1 and 2.2: text to video, and still images as videos of one frame.

A14B of 2.2 has two denoisers, each for a range of timesteps: `model.denoiser` says which one is trained and validated.
Validation images would need both and are refused. TI2V-5B has its own VAE (48 channels, 16x downscale); its pipeline
passes a timestep per token (`expand_timesteps`), which for text to video are all equal. Image to video is the family
`wan-i2v`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from typing_extensions import override

from latentcache.families.base import MASK, Caption, Encoded, Family, LatentSpace, TextField, TimestepSampling
from latentcache.families.parts import T5_SETTINGS, VAE_WEIGHTS, WAN_VAE, Part, TrainerFiles
from latentcache.types import Padding

_VAE_SETTINGS = (
    *("base_dim", "decoder_base_dim", "z_dim", "dim_mult", "num_res_blocks", "attn_scales", "temperal_downsample"),
    *("dropout", "is_residual", "in_channels", "patch_size", "scale_factor_temporal", "scale_factor_spatial"),
)
_ROWS = 512
"""Rows of a text for the denoiser. It takes no mask, so a different number of zero rows changes the result."""


class Wan(Family):
    """UMT5 with zeros after the text's own rows. Latents have frames and are the posterior's mean."""

    name = "wan"
    pipeline_name = "WanPipeline"
    pipeline_names: ClassVar[tuple[str, ...]] = ("WanVideoToVideoPipeline",)
    repositories = (
        *(f"Wan-AI/Wan2.1-T2V-{size}-Diffusers" for size in ("1.3B", "14B")),
        *(f"Wan-AI/Wan2.2-{size}-Diffusers" for size in ("T2V-A14B", "TI2V-5B")),
    )
    trainer_files = {
        "simpletuner": TrainerFiles("wan", has_mask=False),
        "musubi": TrainerFiles("wan", "wan", is_scaled=True, texts={"varlen_t5": "prompt_embeds"}),
    }
    parts = {
        "vae": Part("vae", "diffusers.AutoencoderKLWan", VAE_WEIGHTS, _VAE_SETTINGS),
        "text_encoder": Part("text_encoder", "transformers.UMT5EncoderModel", settings=T5_SETTINGS),
        "tokenizer": Part("tokenizer", "transformers.T5TokenizerFast"),
    }
    denoiser_class, second_denoiser = "diffusers.WanTransformer3DModel", "transformer_2"
    latent = LatentSpace(16, is_video=True, draws=False, others={48: 16}, published=WAN_VAE)
    has_clips = True
    patch = 2
    fields = {"prompt_embeds": TextField("text_dim", Padding(length=_ROWS), (4096,))}
    max_length = longest = _ROWS
    timesteps = TimestepSampling("logit_normal", shift=3.0)  # recommended for 480p by musubi-tuner's documentation

    @override
    def rendered(self, parts: Mapping[str, Any], text: str) -> str:
        """Cleaned by diffusers, which also repairs Unicode if ftfy is installed."""
        from diffusers.pipelines.wan.pipeline_wan import prompt_clean

        cleaned: str = prompt_clean(text)
        return cleaned

    @override
    def encode_text(self, parts: Mapping[str, Any], texts: Sequence[Caption], recipe: Mapping[str, Any]) -> Encoded:
        embeds, _ = self.pipeline_texts(parts, texts, recipe, do_classifier_free_guidance=False)
        embeds = torch.nn.functional.pad(embeds, (0, 0, 0, _ROWS - embeds.shape[1]))
        lengths = torch.tensor([[min(text.num_tokens, recipe["max_length"])] for text in texts])
        return {"prompt_embeds": embeds, f"prompt_embeds{MASK}": (torch.arange(_ROWS) < lengths).to(embeds.device)}

    @override
    def text_shapes(self, parts: Mapping[str, Any], recipe: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        return super().text_shapes(parts, {"max_length": _ROWS})

    @override
    def encode_image(self, vae: Any, pixels: torch.Tensor) -> torch.Tensor:
        """One at a time, like the pipelines: the last bits do not depend on the batch, and clips are large."""
        return torch.cat([super(Wan, self).encode_image(vae, each[None]) for each in pixels])

    @override
    def pipeline(self, **parts: Any) -> Any:
        """Like `Family.pipeline`. Without a VAE, TI2V-5B's would get the other models' downscale factor."""
        made, denoiser = super().pipeline(**parts), parts.get("transformer")
        factor = None if denoiser is None else self.latent.others.get(denoiser.config.in_channels)
        if factor is not None:
            made.vae_scale_factor_spatial = factor
            made.register_to_config(expand_timesteps=True)
        return made

    @override
    def pipeline_kwargs(self, embeds: Mapping[str, Any], negative: Mapping[str, Any] | None) -> dict[str, Any]:
        """Like `Family.pipeline_kwargs`, for a single frame. The pipeline's default is 81."""
        return {**super().pipeline_kwargs(embeds, negative), "num_frames": 1}


FAMILY = Wan()
