"""FLUX.2 klein 4B and 9B, base and distilled models. FLUX.2 dev is in `families/flux2_dev.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from typing_extensions import override

from latentcache.families.base import Caption, Encoded, Family, LatentSpace, TextField, user_turn
from latentcache.families.packed import control_latents
from latentcache.families.parts import KL_SETTINGS, QWEN3_SETTINGS, VAE_WEIGHTS, Part, layers_below
from latentcache.families.scaling import patchified

_GUIDANCE = 3.5
"""Distilled guidance during training: the default of diffusers' train_dreambooth_lora_flux2.py."""
_VAE_SETTINGS = (*KL_SETTINGS, "decoder_block_out_channels", "patch_size")
_RENAMED = ("encoder.quant_conv.", "quant_conv."), ("decoder.post_quant_conv.", "post_quant_conv.")
"""VAE weights whose names in the authors' layout differ from AutoencoderKL's."""


class _WithoutStatistics:  # not a Module: the pipeline runs on the device of its first module
    """Stand-in for a pipeline's VAE with identity statistics, so that `output_type="latent"` stays scaled."""

    def __init__(self, channels: int):
        self.bn = SimpleNamespace(running_mean=torch.zeros(channels), running_var=torch.ones(channels))
        self.config = SimpleNamespace(batch_norm_eps=0.0, block_out_channels=(0,) * 4)


class Flux2(Family):
    """Three LLM layers, concatenated for each of 512 tokens including padding, which the denoiser attends to.

    Latents are scaled by the VAE's statistics, with 2x2 patches as channels: [B, 4C, h, w]. Images are encoded to the
    posterior's mean, as in diffusers' train_dreambooth_lora_flux2.py.
    """

    name = "flux2"
    pipeline_name = "Flux2KleinPipeline"
    pipeline_names: ClassVar[tuple[str, ...]] = ("Flux2KleinInpaintPipeline", "Flux2KleinKVPipeline")
    pipeline_settings: ClassVar[tuple[str, ...]] = ("is_distilled",)
    repositories: ClassVar[tuple[str, ...]] = ("black-forest-labs/FLUX.2-klein-base-9B",)
    layers: ClassVar[tuple[int, ...]] = (9, 18, 27)
    """Indices of the hidden states to read, 0 being the embeddings: the pipeline's `text_encoder_out_layers`."""
    stack: ClassVar[str] = "model.layers"
    """Module path of the encoder's layers."""
    parts = {
        "vae": Part("vae", "diffusers.AutoencoderKLFlux2", VAE_WEIGHTS, _VAE_SETTINGS, "AutoencoderKL", _RENAMED),
        # A hidden state is the output of the layer before it. Later layers are not read.
        "text_encoder": Part(
            "text_encoder", "transformers.Qwen3ForCausalLM", layers_below("model.", max(layers)), QWEN3_SETTINGS
        ),
        "tokenizer": Part("tokenizer", "transformers.Qwen2Tokenizer"),
    }
    denoiser_class = "diffusers.Flux2Transformer2DModel"
    denoiser_settings = {"guidance_embeds": False}
    latent, patch = LatentSpace(32, draws=False), 2
    fields: ClassVar[Mapping[str, TextField]] = {"prompt_embeds": TextField("joint_attention_dim", features=(12288,))}
    max_length = 512
    num_joined = len(layers)
    recipe = {"layers": " ".join(map(str, layers))}
    template_needs_tokenizer, can_drop_padding, reads_controls = True, False, True
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0", "to_qkv_mlp_proj")

    @override
    def pipeline(self, **parts: Any) -> Any:
        if parts.get("vae") is None and "transformer" in parts:
            parts["vae"] = _WithoutStatistics(parts["transformer"].config.in_channels)
        return super().pipeline(**parts)

    @override
    def rendered(self, parts: Mapping[str, Any], text: str) -> str:
        """Like the pipeline's `_get_qwen3_prompt_embeds`: no system prompt, thinking off."""
        return user_turn(parts["tokenizer"], text, enable_thinking=False)

    @override
    def encode_text(self, parts: Mapping[str, Any], texts: Sequence[Caption], recipe: Mapping[str, Any]) -> Encoded:
        states = {layer: f"{self.stack}.{layer - 1}" for layer in self.layers}
        embeds, _ = self.pipeline_texts(parts, texts, recipe, states, text_encoder_out_layers=self.layers)
        return {"prompt_embeds": embeds}

    @override
    def conditions(self, denoiser: Any, noisy: torch.Tensor, batch: Mapping[str, Any]) -> dict[str, Any]:
        import diffusers

        embeds, guidance = batch["prompt_embeds"], torch.full([len(noisy)], _GUIDANCE, device=noisy.device)
        ids, controls = [diffusers.Flux2Pipeline._prepare_latent_ids(noisy)], control_latents(batch, noisy)
        if controls:
            of_controls = diffusers.Flux2Pipeline._prepare_image_ids([each[:1] for each in controls])
            ids.append(of_controls.expand(len(noisy), -1, -1))
        return {
            "guidance": guidance if self.denoiser_settings["guidance_embeds"] else None,
            "encoder_hidden_states": embeds,
            "txt_ids": diffusers.Flux2Pipeline._prepare_text_ids(embeds).to(noisy.device),
            "img_ids": torch.cat(ids, dim=1).to(noisy.device),
        }

    @override
    def predict(
        self, denoiser: Any, noisy: torch.Tensor, timesteps: torch.Tensor, batch: Mapping[str, Any]
    ) -> torch.Tensor:
        conditions = self.conditions(denoiser, noisy, batch)
        given = torch.cat([each.flatten(2) for each in (noisy, *control_latents(batch, noisy))], dim=2).transpose(1, 2)
        tokens: torch.Tensor = denoiser(given, timestep=timesteps / 1000, return_dict=False, **conditions)[0]
        return tokens[:, : noisy[0, 0].numel()].transpose(1, 2).reshape(noisy.shape)

    @override
    def final_latents(self, latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """Scaled latents [B, 4C, h, w] from [B, C, 2h, 2w], which `pipeline` left scaled: see _WithoutStatistics."""
        return patchified(latents)


FAMILY = Flux2()
