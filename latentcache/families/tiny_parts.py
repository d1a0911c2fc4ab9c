"""Parts of tiny models: tokenizers and encoders that are built in code, with random weights, and need no download.

Statistics of latents are uneven on purpose, so that an error in their scaling shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

SIDE = 64
"""Pixels of the images that tiny models are made for."""
CHANNEL_MEANS = tuple(round(0.9 * (-1) ** i * (i % 5) / 3 - 0.1, 4) for i in range(16))
CHANNEL_STDS = tuple(round(1.1 + 0.37 * ((i * 7) % 5), 4) for i in range(16))
"""Uneven statistics for VAEs that have them for each of their 16 channels."""

_T5_WORDS = ("▁a", "▁cat", "▁red", "▁on", "▁the", "▁table", "▁cats", "▁of", "▁in")
_QWEN_SPECIALS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"),
    "<|video_pad|>",
)
# Of the system prompts that the pipelines drop by a fixed number of tokens: 34, and 64 for editing.
_QWEN_WORDS = [
    "system",
    "user",
    "assistant",
    "Describe",
    "'s",
    "Ġ(",
    "),",
    "Ġthe",
    "Ġimage",
    "Ġby",
    "Ġdetailing",
    "Ġcolor",
    "Ġshape",
    "Ġsize",
    "Ġtexture",
    "Ġquantity",
    "Ġtext",
    "Ġspatial",
    "Ġrelationships",
    "Ġof",
    "Ġobjects",
    "Ġand",
    "Ġbackground",
    "color",
    "Ġkey",
    "Ġfeatures",
    "Ġinput",
    "Ġthen",
    "Ġexplain",
    "Ġhow",
    "Ġuser",
    "Ġinstruction",
    "Ġshould",
    "Ġalter",
    "Ġor",
    "Ġmodify",
    "Ġa",
    "Ġnew",
    "Ġthat",
    "Ġmeets",
    "Ġrequirements",
    "Ġwhile",
    "Ġmaintaining",
    "Ġconsistency",
    "Ġwith",
    "Ġoriginal",
    "Ġwhere",
    "Ġappropriate",
    "ĠGenerate",
]
_CHAT_TEMPLATE = (  # Qwen3's, reduced: the user's turn, the generation prompt, an empty block where thinking is off
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The global generator of the CPU begins with this seed inside, and is as it was afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def frozen(parts: Mapping[str, Any]) -> dict[str, Any]:
    """The parts with all modules in eval mode and frozen."""
    for part in parts.values():
        if isinstance(part, torch.nn.Module):
            part.eval().requires_grad_(False)
    return dict(parts)


def randomised(module: torch.nn.Module, seed: int) -> torch.nn.Module:
    """The module with every parameter random, of a size that lets texts and conditions through.

    Some models begin with gates of zero, or with memory that is not set: their outputs would depend on nothing.
    """
    with torch.no_grad(), seeded(seed):
        for part in module.modules():
            for name, parameter in part.named_parameters(recurse=False):
                if parameter.ndim >= 2:
                    fan_in = 1 if isinstance(part, torch.nn.Embedding) else parameter[0].numel()
                    parameter.normal_(0, fan_in**-0.5)
                else:
                    parameter.normal_(0 if name == "bias" else 1, 0.1)
    return module


def byte_symbols() -> list[str]:
    """The printable stand-ins for the 256 bytes, in the order of CLIP's vocabulary (OpenAI's `bytes_to_unicode`)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    num_others = 256 - len(printable)
    return [chr(code) for code in printable] + [chr(256 + index) for index in range(num_others)]


def clip_tokenizer(**options: Any) -> Any:
    """A CLIP tokenizer over 512 byte tokens and two special ones, of 77 tokens a text."""
    from transformers import CLIPTokenizer

    symbols = byte_symbols()
    tokens = [*symbols, *(symbol + "</w>" for symbol in symbols), "<|startoftext|>", "<|endoftext|>"]
    vocab = {token: index for index, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocab, merges=[], model_max_length=77, **options)


def clip_text_model(tokenizer: Any, width: int, class_name: str = "CLIPTextModel", **options: Any) -> Any:
    """A CLIP text encoder of two layers."""
    import transformers

    size = len(tokenizer)
    config = transformers.CLIPTextConfig(
        vocab_size=size,
        hidden_size=width,
        intermediate_size=width * 2,
        projection_dim=width,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=77,
        bos_token_id=size - 2,
        eos_token_id=size - 1,
        pad_token_id=size - 1,
        **options,
    )
    return getattr(transformers, class_name)(config)


def t5_tokenizer() -> Any:
    """A T5 tokenizer over letters and a few words, of 512 tokens a text."""
    import transformers

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -3.0)]
    pieces += [(word, -2.0) for word in _T5_WORDS] + [(chr(code), -5.0) for code in range(33, 127)]
    tokenizer_class: Any = transformers.T5TokenizerFast  # type: ignore[attr-defined]  # made when asked for
    return tokenizer_class(vocab=pieces, extra_ids=0, model_max_length=512)


def t5_model(tokenizer: Any, name: str = "T5", width: int = 32) -> Any:
    """A T5 encoder of two layers, or one of UMT5."""
    import transformers

    config, model = getattr(transformers, f"{name}Config"), getattr(transformers, f"{name}EncoderModel")
    return randomised(
        model(
            config(
                vocab_size=len(tokenizer),
                d_model=width,
                d_kv=8,
                d_ff=64,
                num_layers=2,
                num_heads=4,
                dropout_rate=0.1,
                feed_forward_proj="gated-gelu",
                pad_token_id=0,
                eos_token_id=1,
                decoder_start_token_id=0,
            )
        ),
        2,
    )


def qwen_tokenizer() -> Any:
    """A Qwen tokenizer of bytes. The words of the system prompts are whole tokens: a fixed number is dropped."""
    from transformers import Qwen2Tokenizer

    vocab = {symbol: index for index, symbol in enumerate(byte_symbols())}
    merges: list[tuple[str, str]] = []
    made: Any = Qwen2Tokenizer  # its types say less than it takes
    for word in _QWEN_WORDS:
        pieces = [token.value for token in made(vocab=vocab, merges=merges).backend_tokenizer.model.tokenize(word)]
        for piece in pieces[1:]:
            merges.append((pieces[0], piece))
            pieces[0] += piece
            vocab.setdefault(pieces[0], len(vocab))
    vocab |= {special: len(vocab) + index for index, special in enumerate(_QWEN_SPECIALS)}
    tokenizer = made(vocab=vocab, merges=merges, model_max_length=4096)
    tokenizer.add_special_tokens({"additional_special_tokens": list(_QWEN_SPECIALS[1:])})
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def qwen3_model(tokenizer: Any, num_layers: int, class_name: str) -> Any:
    """A Qwen3 of this class, as `Qwen3Model`."""
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=num_layers,
        head_dim=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    return randomised(getattr(transformers, class_name)(config), 3)


def qwen_vl_model(
    tokenizer: Any, num_layers: int, name: str, class_name: str, text: Mapping[str, Any], vision: Mapping[str, Any]
) -> Any:
    """A Qwen that reads images too: `name` as `Qwen2_5_VL`, with more settings of its two configs."""
    import transformers

    tokens = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    specials = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    config = getattr(transformers, f"{name}Config")(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": num_layers,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 4096,
            "bos_token_id": None,
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            **text,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": 16,
            **vision,
        },
        **dict(zip(tokens, map(tokenizer.convert_tokens_to_ids, specials), strict=True)),
    )
    return randomised(getattr(transformers, class_name)(config), 4)


def qwen_vl_processor(tokenizer: Any) -> Any:
    """A processor of texts and images. That of the library has one of videos too, which needs torchvision."""
    import transformers

    class TinyProcessor(transformers.Qwen2VLProcessor):
        def __init__(self, image_processor: Any, tokenizer: Any, chat_template: str | None = None):
            super().__init__(image_processor, tokenizer, chat_template=chat_template)  # type: ignore[no-untyped-call]

        def check_argument_for_proper_class(self, *_: Any) -> None:  # it looks in a table that needs torchvision
            return None

    return TinyProcessor(transformers.Qwen2VLImageProcessor(), tokenizer)


def image_vae(channels: int, **options: Any) -> Any:
    """An AutoencoderKL of 8 pixels per latent row."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(16, 32, 32, 32),
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        latent_channels=channels,
        norm_num_groups=8,
        sample_size=SIDE,
        **({"force_upcast": False} | options),
    )


def video_vae(class_name: str, seed: int = 0) -> Any:
    """A VAE of this class whose 16 channels have uneven statistics: 8 pixels per latent row."""
    import diffusers

    vae = getattr(diffusers, class_name)(
        base_dim=4,
        z_dim=16,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        latents_mean=list(CHANNEL_MEANS),
        latents_std=list(CHANNEL_STDS),
    )
    return randomised(vae, seed)


def flux2_vae(channels: int, seed: int = 0) -> Any:
    """An AutoencoderKLFlux2 of 8 pixels per latent row, whose batch norm has uneven statistics."""
    from diffusers import AutoencoderKLFlux2

    vae: Any = AutoencoderKLFlux2(
        block_out_channels=(8, 16, 16, 16), latent_channels=channels, norm_num_groups=4, sample_size=SIDE
    )
    randomised(vae, seed)
    with seeded(seed):
        vae.bn.running_mean.normal_(0.3, 1)
        vae.bn.running_var.uniform_(0.2, 3)
    return vae


def flux2_transformer(channels: int, text_width: int, guidance_embeds: bool) -> Any:
    """A denoiser of FLUX.2, of two blocks, for scaled latents of so many channels."""
    from diffusers import Flux2Transformer2DModel

    return Flux2Transformer2DModel(
        in_channels=channels,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=text_width,
        timestep_guidance_channels=32,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=guidance_embeds,
    )


def flow_model(transformer: Any, seed: int, **parts: Any) -> dict[str, Any]:
    """These parts, a transformer whose parameters are made random, and the scheduler of most flow models: frozen."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    return frozen({**parts, "transformer": randomised(transformer, seed), "scheduler": scheduler})
