"""What is particular about one family, or about two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from helpers.tiny_models import byte_symbols, tiny_encoders, tiny_folder, tiny_model

from latentcache import Config, LatentCache, run_precache
from latentcache.errors import ModelError
from latentcache.families import family_named, sdxl
from latentcache.families.base import Family
from latentcache.families.qwen_image import NUM_DROPPED
from latentcache.models.model_loader import LoadedModels, ModelLoader
from latentcache.models.tiny import tiny_pipeline
from latentcache.models.vae import vae_facts
from latentcache.types import Crop, Geometry, Size

KLEIN, DEV, QWEN, KREA = map(family_named, ("flux2", "flux2-dev", "qwen-image", "krea2"))


def test_time_ids_are_in_the_order_of_the_pipeline() -> None:
    pipeline = tiny_pipeline()
    sizes = ((480, 640), (3, 5), (512, 704))
    expected = pipeline._get_add_time_ids(
        *sizes, dtype=pipeline.unet.dtype, text_encoder_projection_dim=pipeline.text_encoder_2.config.projection_dim
    )
    original, crop, target = Size(*sizes[0]), Crop(*sizes[1]), Size(*sizes[2])
    assert expected.tolist() == [sdxl.FAMILY.size_conditions(Geometry(original, original, crop, target))]


@pytest.mark.parametrize("clip_skip", [0, 1, 2])
def test_an_entry_of_sd15_is_the_normed_state_of_that_layer(make_config: Callable[..., Config], clip_skip: int) -> None:
    options = {
        "model.family": "sd15",
        "model.path": tiny_folder("sd15"),
        "encode.text_store_dtype": "float32",
        "encode.batch_size": 1,
    }
    config = make_config(**options, **{"encode.clip_skip": clip_skip})
    assert run_precache(config).num_refused == 0
    parts = tiny_encoders("sd15")
    encoder, text = parts["text_encoder"], "a validation prompt"
    ids = parts["tokenizer"](text, padding="max_length", max_length=77, return_tensors="pt").input_ids
    layers = getattr(encoder, "text_model", encoder)  # transformers before 5.6 has all of it there
    with torch.no_grad():
        state = encoder(ids, output_hidden_states=True).hidden_states[-(clip_skip + 1)]
        expected = layers.final_layer_norm(state)
    with LatentCache(config.cache.path) as cache:
        assert torch.equal(cache.prompt(text, device="cpu")["prompt_embeds"], expected)


def test_latents_are_scaled_by_the_statistics_in_float32(tmp_path: Path) -> None:
    parts = tiny_model(KLEIN.name)
    KLEIN.pipeline(**parts).save_pretrained(tmp_path)
    rounded = tiny_model(KLEIN.name)["vae"].to(torch.bfloat16).float()
    models = ModelLoader(str(tmp_path), family=KLEIN)
    models.vae(torch.bfloat16)
    assert models.vae_facts() == vae_facts(parts["vae"])
    found = models.vae_facts().scaling
    assert found != vae_facts(rounded).scaling
    latents = torch.randn(1, 32, 8, 8, generator=torch.Generator().manual_seed(0))
    bn = parts["vae"].bn
    std = torch.sqrt(bn.running_var.view(1, -1, 1, 1) + parts["vae"].config.batch_norm_eps)
    wanted = (KLEIN.pipeline()._patchify_latents(latents) - bn.running_mean.view(1, -1, 1, 1)) / std
    assert torch.equal(found.apply(latents), wanted)


def test_statistics_that_a_caller_s_vae_rounded_are_refused() -> None:
    vae = tiny_model(KLEIN.name)["vae"].to(torch.bfloat16)
    with pytest.raises(
        ModelError, match=r"statistics .* \(bn\) are torch\.bfloat16.*Load the VAE in float32"
    ) as caught:
        LoadedModels(family=KLEIN, vae=vae).vae_facts()
    assert caught.value.part == "vae"
    vae.bn = tiny_model(KLEIN.name)["vae"].bn
    assert LoadedModels(family=KLEIN, vae=vae).vae_facts() == vae_facts(tiny_model(KLEIN.name)["vae"])


@pytest.mark.parametrize("family", [KLEIN, DEV], ids=lambda family: family.name)
def test_the_class_that_transformers_chooses_for_a_tokenizer_does_not_count(family: Family, tmp_path: Path) -> None:
    """AutoTokenizer of another transformers may return another class for the same files."""
    tokenizer = tiny_model(family.name)["tokenizer"]
    own = LoadedModels(family=family, tokenizer=tokenizer).identity("tokenizer", torch.float32)
    tokenizer.save_pretrained(tmp_path)
    renamed = type("TokenizersBackend2", (type(tokenizer),), {})
    other = renamed.from_pretrained(tmp_path)
    found = LoadedModels(family=family, tokenizer=other).identity("tokenizer", torch.float32)
    assert (found.weights, found.config) == (own.weights, own.config)
    assert (found == own) == (family is DEV) and own.class_name == (
        "AutoTokenizer" if family is DEV else "Qwen2Tokenizer"
    )


def test_the_rows_that_are_dropped_are_those_of_the_system_prompt() -> None:
    parts = tiny_model(QWEN.name)
    prefix = QWEN.rendered(parts, "a text").partition("a text")[0]
    assert len(parts["tokenizer"](prefix).input_ids) == NUM_DROPPED
    assert diffusers.QwenImagePipeline(*[None] * 5).prompt_template_encode_start_idx == NUM_DROPPED
    # The rows of the text and of what follows it: nothing of the prompt before.
    rendered = QWEN.rendered(parts, "cat").removeprefix(prefix)
    made = QWEN.encode_text(parts, QWEN.tokenize(parts, ["cat"]), QWEN.text_recipe())
    assert made["prompt_embeds"].shape[1] == len(parts["tokenizer"](rendered).input_ids)


@pytest.mark.parametrize("family", [QWEN, KREA], ids=lambda family: family.name)
def test_a_tokenizer_that_cuts_the_system_prompt_otherwise_is_refused(family: Any) -> None:
    parts = tiny_model(QWEN.name)
    vocab = {symbol: index for index, symbol in enumerate(byte_symbols())}
    other = transformers.Qwen2Tokenizer(vocab=vocab, merges=[])
    tokens = family.tokenize(parts, ["cat"])
    with pytest.raises(ModelError, match=f"into \\d+ tokens, but the pipeline drops {NUM_DROPPED}"):
        family.encode_text({**parts, "tokenizer": other}, tokens, family.text_recipe())
