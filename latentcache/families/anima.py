"""Anima: the denoiser of Cosmos-Predict2 with texts of Qwen3 behind a conditioner, and the VAE of Qwen-Image.

diffusers has only modular blocks for it, which are called here like other families' pipelines.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from typing_extensions import override

from latentcache.errors import ModelError
from latentcache.families.base import MASK, Caption, Encoded, Family, LatentSpace, TextField, TimestepSampling
from latentcache.families.modular import modular_sampler
from latentcache.families.parts import LLM_SETTINGS, Part
from latentcache.families.qwen_image import QwenImage
from latentcache.types import Padding

_ROWS = 512
"""Rows of a text for the denoiser. It takes no mask, so a different number of zero rows changes the result."""
_INSIDE = "llm_adapter."
_BLOCKS = "diffusers.modular_pipelines.anima"
_QWEN3_SETTINGS = tuple(name.removeprefix("text_config.") for name in LLM_SETTINGS)


class Anima(Family):
    """The conditioner's output: a row for each T5 token, computed from Qwen3's last layer, then rows of zeros.

    T5 contributes only its tokenizer. Words unknown to it, such as those in other scripts, have no effect.
    """

    name = "anima"
    pipeline_name = "AnimaModularPipeline"
    repositories = ("circlestone-labs/Anima-Base-v1.0-Diffusers",)
    parts = {
        "vae": QwenImage.parts["vae"],
        "text_encoder": Part("text_encoder", "transformers.Qwen3Model", settings=_QWEN3_SETTINGS),
        "text_conditioner": Part(
            "text_encoder", "diffusers.AnimaTextConditioner", settings=("num_attention_heads",), inside=_INSIDE
        ),
        "tokenizer": Part("tokenizer", "transformers.Qwen2Tokenizer"),
        "t5_tokenizer": Part("tokenizer", "transformers.T5TokenizerFast"),
    }
    denoiser_class = "diffusers.CosmosTransformer3DModel"
    denoiser_needs = "torchvision"
    unused_weights = tuple(net + name for net in ("net.", "") for name in (_INSIDE, "pos_embedder.", "accum_"))
    latent = LatentSpace(16, is_video=True, draws=False)
    patch = 2
    fields = {"prompt_embeds": TextField("text_embed_dim", Padding(length=_ROWS), (1024,), encoder="text_conditioner")}
    max_length = longest = _ROWS
    recipe = {"cut": "conditioner"}
    can_keep_padding, reads_lengths = False, False
    timesteps = TimestepSampling("logit_normal", shift=3.0)
    lora_targets = (*Family.lora_targets, "ff.net.0.proj", "ff.net.2")

    @override
    def tokenize(self, parts: Mapping[str, Any], texts: Sequence[str]) -> Sequence[Caption]:
        """Like `Family.tokenize`. `num_tokens` is the larger of the two tokenizers' counts, as each truncates."""
        tokenizers = [parts[name] for name in self.names("tokenizer")]
        ids = [each([*texts], truncation=False, padding=False, verbose=False).input_ids for each in tokenizers]
        return [Caption(text, max(map(len, both))) for text, *both in zip(texts, *ids, strict=True)]

    def states(self, parts: Mapping[str, Any], texts: Sequence[Caption], recipe: Mapping[str, Any]) -> Encoded:
        """The conditioner's inputs. ModelError for a tokenizer that pads on the left, which would shift positions."""
        for name in self.names("tokenizer"):
            if parts[name].padding_side != "right":
                message = f"{name}: it pads on the left, but the conditioner expects padding on the right."
                raise ModelError(f"{message} Set its padding_side to 'right'.", part=name)
        steps: Any = importlib.import_module(f"{_BLOCKS}.encoders")
        found: Encoded = steps.AnimaTextEncoderStep.encode_prompt(
            SimpleNamespace(**parts),
            [text.text for text in texts],
            prepare_unconditional_embeds=False,
            max_sequence_length=recipe["max_length"],
            device=parts["text_encoder"].device,
        )
        return found

    @override
    def encode_text(self, parts: Mapping[str, Any], texts: Sequence[Caption], recipe: Mapping[str, Any]) -> Encoded:
        """Like `Family.encode_text`. ModelError as from `states`."""
        states = self.states(parts, texts, recipe)
        embeds = conditioned(parts["text_conditioner"], states)
        mask = states["t5_attention_mask"].bool()
        mask = torch.nn.functional.pad(mask, (0, embeds.shape[1] - mask.shape[1]))
        return {"prompt_embeds": embeds, f"prompt_embeds{MASK}": mask}

    @override
    def text_shapes(self, parts: Mapping[str, Any], recipe: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        return {"prompt_embeds": (_ROWS, parts["text_conditioner"].config.target_dim)}

    @override
    def conditions(self, denoiser: Any, noisy: torch.Tensor, batch: Mapping[str, Any]) -> dict[str, Any]:
        sides = [side * self.latent.downscale for side in noisy.shape[-2:]]
        return {**super().conditions(denoiser, noisy, batch), "padding_mask": noisy.new_zeros(1, 1, *sides)}

    @override
    def predict(
        self, denoiser: Any, noisy: torch.Tensor, timesteps: torch.Tensor, batch: Mapping[str, Any]
    ) -> torch.Tensor:
        return super().predict(denoiser, noisy, timesteps / 1000, batch)

    @override
    def pipeline(self, **parts: Any) -> Any:
        """The denoising blocks with these parts, called like other pipelines. They return latents.

        They take `prompt_embeds`, or with a `text_conditioner` its inputs, but no prompts.
        """
        from diffusers.modular_pipelines import SequentialPipelineBlocks

        before, denoise = (importlib.import_module(f"{_BLOCKS}.{name}") for name in ("before_denoise", "denoise"))
        steps = {"text_conditioner": before.AnimaTextConditioningStep} if "text_conditioner" in parts else {}
        steps |= {
            "input": before.AnimaTextInputStep,
            "prepare_latents": before.AnimaPrepareLatentsStep,
            "set_timesteps": before.AnimaSetTimestepsStep,
            "denoise": denoise.AnimaDenoiseStep,
        }
        return modular_sampler(SequentialPipelineBlocks.from_blocks_dict(steps), self.guidance_name, **parts)


def conditioned(conditioner: Any, states: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """`prompt_embeds` [B, 512, D] from the conditioner's inputs."""
    found: torch.Tensor = conditioner(
        source_hidden_states=states["qwen_prompt_embeds"],
        target_input_ids=states["t5_input_ids"],
        target_attention_mask=states["t5_attention_mask"],
        source_attention_mask=states["qwen_attention_mask"],
    )
    return found


FAMILY = Anima()
