"""Wan 2.1 and 2.2: text to video, and still images as videos of one frame.

Of the A14B model of 2.2 the part `transformer` is trained and validated, which its pipeline uses above `boundary_ratio`
of the schedule; `transformer_2`, for what is below it, is left alone: name it as the denoiser of a second run. The VAE
of TI2V-5B (48 channels, 16 pixels a row) is cached as the others', since its numbers are read from its config; its
pipeline gives each token a timestep (`expand_timesteps`), which for text to video are all equal. Image to video is not
covered: it needs latents of the padded clip and, in 2.1, embeddings of CLIP's vision model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from latentcache.errors import ConfigError
from latentcache.families.base import (
    MASK,
    VAE_WEIGHTS,
    Caption,
    Encoded,
    Family,
    LatentSpace,
    Part,
    TextField,
    TimestepSampling,
    Upload,
)
from latentcache.families.tiny_parts import frozen, randomised, seeded, t5_model, t5_tokenizer, video_vae
from latentcache.types import Padding

_ROWS = 512
"""Of a text as the denoiser takes it. It has no mask, so that another number of zeros gives another result."""


class Wan(Family):
    """UMT5 with zeros after the text's own rows. Latents have frames, and are the posterior's mean."""

    name = "wan"
    pipeline_name = "WanPipeline"
    pipeline_names = ("WanVideoToVideoPipeline",)
    repositories = (
        *(f"Wan-AI/Wan2.1-T2V-{size}-Diffusers" for size in ("1.3B", "14B")),
        *(f"Wan-AI/Wan2.2-{size}-Diffusers" for size in ("T2V-A14B", "TI2V-5B")),
    )
    parts = {
        "vae": Part("vae", "diffusers.AutoencoderKLWan", VAE_WEIGHTS),
        "text_encoder": Part("text_encoder", "transformers.UMT5EncoderModel"),
        "tokenizer": Part("tokenizer", "transformers.T5TokenizerFast"),
    }
    denoiser_class = "diffusers.WanTransformer3DModel"
    latent = LatentSpace(16, is_video=True, draws=False)
    has_clips = True
    patch = 2
    fields = {"prompt_embeds": TextField("text_dim", Padding(length=_ROWS), (4096,))}
    max_length = _ROWS
    timesteps = TimestepSampling("logit_normal", shift=3.0)  # as musubi-tuner's documentation advises for 480p

    @override
    def text_recipe(self, *, negative: bool = False, **settings: Any) -> dict[str, Any]:
        if (settings.get("max_length") or 0) > _ROWS:
            message = f"max_length is {settings['max_length']}, but the denoiser takes {_ROWS} rows; set it lower"
            raise ConfigError(message, key="encode.max_length")
        return super().text_recipe(negative=negative, **settings)

    @override
    def rendered(self, parts: Mapping[str, Any], text: str) -> str:
        """Cleaned as diffusers does it; with ftfy, if that is installed, it repairs more texts."""
        from diffusers.pipelines.wan.pipeline_wan import prompt_clean

        cleaned: str = prompt_clean(text)
        return cleaned

    @override
    def encode_text(
        self, parts: Mapping[str, Any], texts: Sequence[Caption], recipe: Mapping[str, Any], *, upload: Upload = None
    ) -> Encoded:
        pipeline = self.pipeline(text_encoder=parts["text_encoder"], tokenizer=parts["tokenizer"])
        embeds, _ = pipeline.encode_prompt(
            [text.text for text in texts],
            do_classifier_free_guidance=False,
            max_sequence_length=recipe["max_length"],
            device=parts["text_encoder"].device,
        )
        embeds = torch.nn.functional.pad(embeds, (0, 0, 0, _ROWS - embeds.shape[1]))
        lengths = torch.tensor([[min(text.num_tokens, recipe["max_length"])] for text in texts])
        return {"prompt_embeds": embeds, f"prompt_embeds{MASK}": (torch.arange(_ROWS) < lengths).to(embeds.device)}

    @override
    def text_shapes(self, parts: Mapping[str, Any], recipe: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        return {"prompt_embeds": (_ROWS, parts["text_encoder"].config.d_model)}

    @override
    def encode_image(self, vae: Any, pixels: torch.Tensor) -> torch.Tensor:
        """One at a time, as its pipelines do: the last bits do not depend on the batch, and clips are large."""
        return torch.cat([super(Wan, self).encode_image(vae, each[None]) for each in pixels])

    @override
    def check_settings(self, settings: Mapping[str, Any]) -> str | None:
        """As `Family.check_settings`. TI2V-5B takes 48 channels."""
        return None if settings.get("in_channels") == 48 else super().check_settings(settings)

    @override
    def pipeline_kwargs(self, embeds: Mapping[str, Any], negative: Mapping[str, Any] | None) -> dict[str, Any]:
        """For one frame, a still image; the pipeline's own default is 81."""
        return {**super().pipeline_kwargs(embeds, negative), "num_frames": 1}

    @override
    def tiny(self, seed: int = 0) -> dict[str, Any]:
        import diffusers

        tokenizer = t5_tokenizer()
        with seeded(seed):
            parts = {
                "vae": video_vae("AutoencoderKLWan", seed),
                "text_encoder": t5_model(tokenizer, "UMT5"),
                "tokenizer": tokenizer,
            }
            transformer = diffusers.WanTransformer3DModel(
                num_attention_heads=2,
                attention_head_dim=16,
                text_dim=32,
                freq_dim=16,
                ffn_dim=32,
                num_layers=2,
                rope_max_seq_len=64,
            )
        scheduler = diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        )
        return frozen({**parts, "transformer": randomised(transformer, seed), "scheduler": scheduler})


FAMILY = Wan()
