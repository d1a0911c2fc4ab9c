"""Z-Image and Z-Image-Turbo, and finetunes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from latentcache.families.base import Caption, Encoded, Family, LatentSpace, TextField, padded, unpadded, user_turn
from latentcache.families.parts import FLUX_VAE, KL_VAE, QWEN3_SETTINGS, Part, TrainerFiles
from latentcache.types import Padding


class ZImage(Family):
    """Qwen3's penultimate layer for a text in the chat template. The denoiser pads with a learned row.

    It takes lists of texts [n, D] and of latents [C, 1, h, w], whose lengths may differ.
    """

    name = "z-image"
    pipeline_name = "ZImagePipeline"
    pipeline_names = ("ZImageImg2ImgPipeline", "ZImageInpaintPipeline", "ZImageControlNet*")
    repositories = ("Tongyi-MAI/Z-Image", "Tongyi-MAI/Z-Image-Turbo")
    trainer_files = {
        "simpletuner": TrainerFiles("z_image"),
        "musubi": TrainerFiles("zi", "z_image", texts={"varlen_llm_embed": "prompt_embeds"}),
    }
    parts = {
        "vae": KL_VAE,
        "text_encoder": Part("text_encoder", "transformers.Qwen3Model", settings=QWEN3_SETTINGS),
        "tokenizer": Part("tokenizer", "transformers.Qwen2Tokenizer"),
    }
    denoiser_class = "diffusers.ZImageTransformer2DModel"
    unused_weights = ("norm_final.weight",)
    latent = LatentSpace(16, published=FLUX_VAE)
    patch = 2
    fields = {"prompt_embeds": TextField("cap_feat_dim", Padding(), (2560,))}
    max_length = 512
    can_keep_padding = False  # the pipeline drops it
    template_needs_tokenizer = True
    no_guidance = 0.0

    @override
    def rendered(self, parts: Mapping[str, Any], text: str) -> str:
        """Like `ZImagePipeline._encode_prompt`: the user turn, thinking on."""
        return user_turn(parts["tokenizer"], text, enable_thinking=True)

    @override
    def encode_text(self, parts: Mapping[str, Any], texts: Sequence[Caption], recipe: Mapping[str, Any]) -> Encoded:
        states = {-2: f"layers.{parts['text_encoder'].config.num_hidden_layers - 2}"}
        rows, _ = self.pipeline_texts(parts, texts, recipe, states, do_classifier_free_guidance=False)
        return padded(rows)

    @override
    def conditions(self, denoiser: Any, noisy: torch.Tensor, batch: Mapping[str, Any]) -> dict[str, Any]:
        return {"cap_feats": unpadded(batch)}

    @override
    def predict(
        self, denoiser: Any, noisy: torch.Tensor, timesteps: torch.Tensor, batch: Mapping[str, Any]
    ) -> torch.Tensor:
        """Like `Family.predict`. The model's time runs from noise (0) to image (1), so its velocity is negated."""
        latents = list(noisy.unsqueeze(2).unbind())
        conditions = self.conditions(denoiser, noisy, batch)
        found = denoiser(latents, (1000 - timesteps) / 1000, **conditions, return_dict=False)[0]
        return -torch.stack(found).squeeze(2)

    @override
    def text_kwargs(self, embeds: Mapping[str, Any]) -> dict[str, Any]:
        return {"prompt_embeds": unpadded(embeds)}


FAMILY = ZImage()
