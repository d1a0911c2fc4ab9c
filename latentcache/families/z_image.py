"""Z-Image: base and Turbo, and what was finetuned from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from typing_extensions import override

from latentcache.errors import ConfigError
from latentcache.families.base import (
    KL_VAE,
    QWEN3_SETTINGS,
    Caption,
    Encoded,
    Family,
    LatentSpace,
    Part,
    TextField,
    Upload,
)
from latentcache.families.hidden_states import HiddenStates
from latentcache.types import Padding


class ZImage(Family):
    """Qwen3's penultimate layer for the rows of a text in the chat template; the denoiser pads with a row it learned.

    It takes lists, whose items have their own lengths: of texts [n, D], of latents [C, 1, h, w].
    """

    name = "z-image"
    pipeline_name = "ZImagePipeline"
    pipeline_names = ("ZImageImg2ImgPipeline", "ZImageInpaintPipeline", "ZImageControlNet*")
    repositories = ("Tongyi-MAI/Z-Image", "Tongyi-MAI/Z-Image-Turbo")
    parts = {
        "vae": KL_VAE,
        "text_encoder": Part("text_encoder", "transformers.Qwen3Model", settings=QWEN3_SETTINGS),
        "tokenizer": Part("tokenizer", "transformers.Qwen2Tokenizer"),
    }
    denoiser_class = "diffusers.ZImageTransformer2DModel"
    unused_weights = ("norm_final.weight",)
    latent = LatentSpace(16)
    patch = 2
    fields = {"prompt_embeds": TextField("cap_feat_dim", Padding(), (2560,))}
    max_length = 512
    renders = True

    @override
    def text_recipe(self, *, negative: bool = False, **settings: Any) -> dict[str, Any]:
        if settings.get("padding") == "keep":
            message = f"padding is keep, but {self.name} has no padding to keep: its pipeline drops it. Set it to auto"
            raise ConfigError(message, key="encode.padding")
        return super().text_recipe(negative=negative, **settings)

    @override
    def rendered(self, parts: Mapping[str, Any], text: str) -> str:
        """As `ZImagePipeline._encode_prompt` has it: the user's turn, and thinking on."""
        message = [{"role": "user", "content": text}]
        tokenizer = parts["tokenizer"]
        found: str = tokenizer.apply_chat_template(
            message, tokenize=False, add_generation_prompt=True, enable_thinking=True
        )
        return found

    @override
    def encode_text(
        self, parts: Mapping[str, Any], texts: Sequence[Caption], recipe: Mapping[str, Any], *, upload: Upload = None
    ) -> Encoded:
        encoder = parts["text_encoder"]
        states = HiddenStates(encoder, {-2: f"layers.{encoder.config.num_hidden_layers - 2}"})
        pipeline = self.pipeline(text_encoder=states, tokenizer=parts["tokenizer"])
        rows, _ = pipeline.encode_prompt(
            [text.text for text in texts],
            device=encoder.device,
            do_classifier_free_guidance=False,
            max_sequence_length=recipe["max_length"],
        )
        lengths = torch.tensor([len(row) for row in rows])
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = torch.arange(padded.shape[1]) < lengths[:, None]
        return {"prompt_embeds": padded, "prompt_embeds_mask": mask.to(padded.device)}

    @override
    def text_shapes(self, parts: Mapping[str, Any], recipe: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        return {"prompt_embeds": (recipe["max_length"], parts["text_encoder"].config.hidden_size)}

    @override
    def conditions(self, denoiser: Any, noisy: torch.Tensor, batch: Mapping[str, Any]) -> dict[str, Any]:
        return {"cap_feats": _rows(batch)}

    @override
    def predict(
        self, denoiser: Any, noisy: torch.Tensor, timesteps: torch.Tensor, batch: Mapping[str, Any]
    ) -> torch.Tensor:
        """As `Family.predict`. Its own time runs from noise (0) to image (1), and so does its velocity."""
        latents = list(noisy.unsqueeze(2).unbind())
        conditions = self.conditions(denoiser, noisy, batch)
        found = denoiser(latents, (1000 - timesteps) / 1000, **conditions, return_dict=False)[0]
        return -torch.stack(found).squeeze(2)

    @override
    def pipeline_kwargs(self, embeds: Mapping[str, Any], negative: Mapping[str, Any] | None) -> dict[str, Any]:
        texts = {"prompt_embeds": _rows(embeds)}
        return texts | ({} if negative is None else {"negative_prompt_embeds": _rows(negative)})

    @override
    def uses_negative(self, guidance_scale: float) -> bool:
        return guidance_scale > 0


def _rows(batch: Mapping[str, Any]) -> list[torch.Tensor]:
    """The texts of a padded batch, each [n, D]."""
    pairs = zip(batch["prompt_embeds"], batch["prompt_embeds_mask"], strict=True)
    return [embeds[mask] for embeds, mask in pairs]


FAMILY = ZImage()
