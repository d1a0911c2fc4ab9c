"""How a family describes the parts of its models (classes, weights, settings), and other trainers' files."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from latentcache.errors import ModelError
from latentcache.families import Rule
from latentcache.families.scaling import Scaling

Role = Literal["vae", "text_encoder", "tokenizer", "image_encoder", "image_processor"]


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a model. `class_name` includes the library, as in `diffusers.AutoencoderKL`.

    `weights` are name prefixes of the weights that its outputs depend on. `settings` are the config settings that they
    depend on, such as `text_config.hidden_act`, except those implied by weight shapes; for a processor, the settings
    for reading images. A file in the authors' layout is converted as class `layout` (default: its own class), after
    name prefixes are `renamed`. `needs` is a package that the class requires. `inside` is its name prefix in a denoiser
    file that includes it. `rule` is how a video VAE's statistics scale latents. An `optional` part is missing in some
    of the family's models. A part of another part, such as a denoiser's first layers, names that one's `folder`: it
    has the same class with settings `changed`, and loads its own share of the folder's weights.
    """

    role: Role
    class_name: str
    weights: tuple[str, ...] = ("",)
    settings: tuple[str, ...] = ()
    layout: str | None = None
    renamed: tuple[tuple[str, str], ...] = ()
    needs: str | None = None
    inside: str | None = None
    rule: Rule = "mean_std"
    optional: bool = False
    folder: str | None = None
    changed: Mapping[str, Any] = field(default_factory=dict)

    def load_class(self) -> Any:
        """The class itself."""
        return class_named(self.class_name)


def class_named(name: str) -> Any:
    """The class with this name, for example `diffusers.AutoencoderKL`. ModelError if the library lacks it."""
    library, _, own = name.partition(".")
    module = importlib.import_module(library)
    if not hasattr(module, own):
        step = f"Install a newer one: pip install --upgrade {library}"
        raise ModelError(f"{library} {module.__version__} has no {own}, which this model needs. {step}", part="model")
    return getattr(module, own)


T5_SETTINGS = (
    *("d_kv", "dense_act_fn", "is_gated_act", "layer_norm_epsilon", "num_heads"),
    *("relative_attention_max_distance", "relative_attention_num_buckets"),
)
"""Settings that the outputs of a T5 or UMT5 encoder depend on (transformers' modeling_t5.py)."""
LLM_SETTINGS = tuple(
    f"text_config.{name}"
    for name in (
        *("head_dim", "hidden_act", "max_window_layers", "num_attention_heads", "num_key_value_heads"),
        *("rms_norm_eps", "rope_parameters", "sliding_window", "use_sliding_window"),
    )
)
"""Settings that the language models in Qwen2.5-VL, Qwen3-VL and Mistral 3 depend on."""

QWEN3_SETTINGS = (
    *("is_encoder_decoder", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings"),
    *("rms_norm_eps", "use_cache", "tie_word_embeddings", "rope_parameters", "attention_bias", "use_sliding_window"),
    *("sliding_window", "max_window_layers", "layer_types", "pad_token_id", "bos_token_id", "eos_token_id"),
)
"""Settings of a Qwen3, including ones without effect, for the sake of existing keys."""


def layers_below(stack: str, number: int) -> tuple[str, ...]:
    """Name prefixes of a language model's embeddings and first `number` layers, each after `stack`."""
    return (f"{stack}embed_tokens.", *(f"{stack}layers.{layer}." for layer in range(number)))


VAE_WEIGHTS = ("encoder.", "quant_conv.")
"""The VAE weights that make latents. A finetuned decoder does not change latents."""
KL_SETTINGS = (
    *("in_channels", "down_block_types", "block_out_channels", "layers_per_block", "act_fn", "latent_channels"),
    *("norm_num_groups", "use_quant_conv", "mid_block_add_attention"),
)
KL_VAE = Part("vae", "diffusers.AutoencoderKL", VAE_WEIGHTS, KL_SETTINGS)
"""An AutoencoderKL. How its latents are scaled is a separate field of an identity."""


FLUX_VAE = Scaling(0.3611, 0.1159)
WAN_VAE = Scaling(
    rule="mean_std",
    mean=(
        *(-0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508),
        *(0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921),
    ),
    std=(
        *(2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743),
        *(3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.916),
    ),
)
"""The defaults of both AutoencoderKLWan and AutoencoderKLQwenImage in diffusers."""


@dataclass(frozen=True, slots=True)
class TrainerFiles:
    """How another trainer's cache stores this family.

    `architecture` is in file names, and `title` in the metadata, if any. `is_scaled`: latents are stored scaled. Text
    files end with `text_suffix`, and `texts` maps their tensor names to fields. `has_resolutions`: tensor names in
    latent files end with the resolution. `has_mask`: the mask in a text file says which rows are padding.
    `needs_control`: the trainer requires a control image for it.
    """

    architecture: str
    title: str = ""
    is_scaled: bool = False
    texts: Mapping[str, str] = field(default_factory=dict)
    text_suffix: str = ""
    has_resolutions: bool = False
    has_mask: bool = True
    needs_control: bool = False
