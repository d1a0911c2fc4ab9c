"""What a family says of the parts of its models (classes, weights and settings that count), and what trainers write."""

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
    """One part of a model. `class_name` names its library too, as `diffusers.AutoencoderKL`.

    `weights` are the first parts of the names of those weights that its outputs depend on. `settings` are the names of
    those settings of its config, as `text_config.hidden_act`, but for what shapes of weights show; of a processor those
    by which it reads images. A file in the layout of the model's authors is converted as one of the class `layout`,
    with these first parts of names `renamed`; by default as one of its own class. `needs` is a package that the class
    cannot be made without. `inside` is how its names begin in a file of the denoiser, which has it inside.
    `rule` is how statistics of a VAE of video scale its latents. An `optional` part is one that some of the family's
    models have. A part of another one, as the first layers of a denoiser, has that one's `folder`: it is a
    module of the same class with settings `changed`, and of the folder's weights it has its own.
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
    """The class of this name, which begins with its library: `diffusers.AutoencoderKL`. ModelError if it has none."""
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
"""Settings of an encoder of T5 or UMT5 that its outputs depend on (transformers' modeling_t5.py)."""
LLM_SETTINGS = tuple(
    f"text_config.{name}"
    for name in (
        *("head_dim", "hidden_act", "max_window_layers", "num_attention_heads", "num_key_value_heads"),
        *("rms_norm_eps", "rope_parameters", "sliding_window", "use_sliding_window"),
    )
)
"""The same of the language model of Qwen2.5-VL, Qwen3-VL and Mistral 3 (transformers' modeling files of these)."""

QWEN3_SETTINGS = (
    *("is_encoder_decoder", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings"),
    *("rms_norm_eps", "use_cache", "tie_word_embeddings", "rope_parameters", "attention_bias", "use_sliding_window"),
    *("sliding_window", "max_window_layers", "layer_types", "pad_token_id", "bos_token_id", "eos_token_id"),
)
"""Settings of a Qwen3. With those that change nothing: their keys were made so."""


def layers_below(stack: str, number: int) -> tuple[str, ...]:
    """How the weights of a language model are named that states below this layer depend on: `stack` comes first."""
    return (f"{stack}embed_tokens.", *(f"{stack}layers.{layer}." for layer in range(number)))


VAE_WEIGHTS = ("encoder.", "quant_conv.")
"""Of a VAE only these make latents. A finetuned decoder gives the same latents."""
KL_SETTINGS = (
    *("in_channels", "down_block_types", "block_out_channels", "layers_per_block", "act_fn", "latent_channels"),
    *("norm_num_groups", "use_quant_conv", "mid_block_add_attention"),
)
KL_VAE = Part("vae", "diffusers.AutoencoderKL", VAE_WEIGHTS, KL_SETTINGS)
"""An AutoencoderKL. How its latents are scaled is a field of its own in an identity."""


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
"""The defaults of diffusers' AutoencoderKLWan and AutoencoderKLQwenImage, which are the same."""


@dataclass(frozen=True, slots=True)
class TrainerFiles:
    """How the cache of another trainer has this family.

    The names of files say `architecture`, and the metadata `title`, where there is some. `is_scaled`: latents are. The
    names of texts' files end with `text_suffix`, and `texts` maps the names in them to fields. `has_resolutions`: names
    in files of latents end with the resolution. `has_mask`: that in a file of a text says which rows are padding.
    `needs_control`: the trainer trains it with a control image only.
    """

    architecture: str
    title: str = ""
    is_scaled: bool = False
    texts: Mapping[str, str] = field(default_factory=dict)
    text_suffix: str = ""
    has_resolutions: bool = False
    has_mask: bool = True
    needs_control: bool = False
