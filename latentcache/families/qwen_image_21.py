"""Qwen-Image 2.1, text to image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from typing_extensions import override

from latentcache.families.base import MASK, Encoded, Family, LatentSpace, TextField
from latentcache.families.hidden_states import HiddenStates
from latentcache.families.packed import control_latents
from latentcache.families.parts import LLM_SETTINGS, VAE_WEIGHTS, Part
from latentcache.families.qwen_image import PLACEHOLDER, check_prefix, needed_mask, template
from latentcache.types import Padding

_VAE_SETTINGS = (
    *("base_dim", "z_dim", "dim_mult", "num_res_blocks", "attn_scales", "temperal_downsample", "dropout"),
    *("is_residual", "in_channels", "patch_size", "scale_factor_spatial"),
)
_TEMPLATE = "prompt_template_t2i"


class _NoProcessor:
    """Stand-in for the processor that the pipeline needs when it is created."""

    tokenizer = SimpleNamespace(encode=lambda *_: [0])
    apply_chat_template = staticmethod(lambda *_, **__: [[0]])


class QwenImage21(Family):
    """The last layer of Qwen3-VL before its norm, without the system turn's rows; latents with one frame.

    The VAE downscales by 16 and takes a fourth image channel, which is set to opaque. The denoiser places the image
    after the longest text of a batch, so items would depend on each other: only texts of equal length run together.
    """

    name = "qwen-image-21"
    pipeline_name = "QwenImage21Pipeline"
    repositories = ("Qwen/Qwen-Image-2.1",)
    parts = {
        "vae": Part("vae", "diffusers.AutoencoderKLQwenImage21", VAE_WEIGHTS, _VAE_SETTINGS, rule="divided"),
        "text_encoder": Part(
            "text_encoder",
            "transformers.Qwen3VLForConditionalGeneration",
            ("model.language_model.embed_tokens.", "model.language_model.layers."),
            settings=LLM_SETTINGS,
        ),
        "processor": Part("tokenizer", "transformers.Qwen3VLProcessor", needs="torchvision"),
    }
    denoiser_class = "diffusers.QwenImage21Transformer2DModel"
    latent, patch = LatentSpace(64, downscale=16, is_video=True, draws=False), 2
    fields = {"prompt_embeds": TextField("context_in_dim", Padding(), (4096,))}
    recipe = {"layers": "the last, before the norm"}
    max_length, uncut_texts = 512, True
    can_keep_padding = False
    guidance_name = "true_cfg_scale"
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0", "gate_layer", "proj", "out")

    @override
    def pipeline(self, **parts: Any) -> Any:
        return super().pipeline(**{"processor": _NoProcessor(), **parts})

    @override
    def rendered(self, parts: Mapping[str, Any], text: str) -> str:
        return template(self, _TEMPLATE).format(PLACEHOLDER.sub("", text) or " ")

    @override
    def encode_text(self, parts: Mapping[str, Any], texts: Sequence[Any], recipe: Mapping[str, Any]) -> Encoded:
        """Like `Family.encode_text`. ModelError as from `check_prefix`."""
        pipeline = self.text_pipeline(parts)
        prompts = [PLACEHOLDER.sub("", text.text) for text in texts]
        embeds, mask, _ = pipeline.encode_prompt(prompts, device=parts["text_encoder"].device)
        mask = torch.ones(embeds.shape[:2], device=embeds.device) if mask is None else mask
        return {"prompt_embeds": embeds, f"prompt_embeds{MASK}": mask.bool()}

    def text_pipeline(self, parts: Mapping[str, Any]) -> Any:
        """The pipeline for encoding texts. It disables the final norm, so the last state is the last layer's output."""
        encoder, processor = parts["text_encoder"], parts["processor"]
        last = encoder.config.get_text_config().num_hidden_layers - 1
        states = HiddenStates(encoder, {-1: f"language_model.layers.{last}"})
        pipeline = self.pipeline(text_encoder=states, processor=processor)
        system_turn = template(self, _TEMPLATE).partition("<|im_start|>user")[0]
        check_prefix(processor.tokenizer, system_turn, pipeline._drop_idx)
        return pipeline

    @override
    def encode_image(self, vae: Any, pixels: torch.Tensor) -> torch.Tensor:
        """Like `Family.encode_image`, with an opaque fourth channel."""
        return super().encode_image(vae, torch.cat([pixels, torch.ones_like(pixels[:, :1])], dim=1))

    @override
    def conditions(self, denoiser: Any, noisy: torch.Tensor, batch: Mapping[str, Any]) -> dict[str, Any]:
        embeds, (height, width) = batch["prompt_embeds"], noisy.shape[-2:]
        is_slot = torch.zeros(embeds.shape[:2], dtype=torch.bool, device=embeds.device)
        return {
            "encoder_hidden_states": embeds,
            "img_shapes": [[(1, height, width)]] * len(noisy),
            "img_mask": torch.nn.functional.pad(is_slot, (0, height * width // 4), value=True),
        }

    @override
    def predict(
        self, denoiser: Any, noisy: torch.Tensor, timesteps: torch.Tensor, batch: Mapping[str, Any]
    ) -> torch.Tensor:
        mask, embeds = needed_mask(batch), batch["prompt_embeds"]
        lengths = [embeds.shape[1]] * len(noisy) if mask is None else mask.sum(1).tolist()
        read = {name: batch[name] for name in batch if name in self.fields or name.startswith("control_latents_")}
        made, order = list[torch.Tensor](), list[int]()
        for length in sorted(set(lengths)):
            places = [place for place, each in enumerate(lengths) if each == length]
            part, order = {name: value[places] for name, value in read.items()}, order + places
            part["prompt_embeds"] = part["prompt_embeds"][:, :length]
            images = [*(control_latents(part, noisy) if self.reads_controls else ()), noisy[places]]
            tokens = torch.cat([each.flatten(2) for each in images], dim=2).transpose(1, 2)
            conditions = self.conditions(denoiser, noisy[places], part)
            found = denoiser(tokens, timestep=timesteps[places] / 1000, return_dict=False, **conditions)[0]
            made.append(found[:, -noisy[0, 0].numel() :].transpose(1, 2).unflatten(2, noisy.shape[2:]))
        return torch.cat(made)[[order.index(place) for place in range(len(noisy))]]

    @override
    def text_kwargs(self, embeds: Mapping[str, Any]) -> dict[str, Any]:
        return super().text_kwargs(embeds) | {f"prompt_embeds{MASK}": needed_mask(embeds)}

    @override
    def final_latents(self, latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
        found: torch.Tensor = self.pipeline_class._unpack_latents(latents, height, width, self.latent.downscale)
        return found


FAMILY = QwenImage21()
