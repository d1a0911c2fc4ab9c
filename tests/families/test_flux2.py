"""FLUX.2: statistics from the VAE's file, latents as 2x2 patches, texts with their padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny_models import tiny_model

from latentcache.errors import ConfigError, ModelError
from latentcache.families import family_named
from latentcache.families.base import Family
from latentcache.families.scaling import patchified
from latentcache.models.model_loader import LoadedModels, ModelLoader
from latentcache.models.vae import vae_facts

KLEIN, DEV = family_named("flux2"), family_named("flux2-dev")


@pytest.fixture(scope="module", params=[KLEIN, DEV], ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> Family:
    found: Family = request.param
    return found


@pytest.fixture(scope="module")
def parts(family: Family) -> dict[str, Any]:
    return tiny_model(family.name)


def encoded(family: Family, parts: dict[str, Any], texts: list[str], **settings: Any) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return family.encode_text(parts, family.tokenize(parts, texts), family.text_recipe(**settings))


def test_the_key_is_made_of_the_text_in_the_pipelines_template(family: Family, parts: dict[str, Any]) -> None:
    [tokens] = family.tokenize(parts, ["cat"])
    rendered = family.rendered(parts, "cat")
    ids = parts["tokenizer"](rendered).input_ids
    seen: list[list[int]] = []
    hook = (
        parts["text_encoder"]
        .get_input_embeddings()
        .register_forward_pre_hook(lambda module, args: seen.extend(args[0].tolist()))
    )
    encoded(family, parts, ["cat"], max_length=160)
    hook.remove()
    assert len(ids) == tokens.num_tokens and seen[0][: len(ids)] == ids
    assert set(seen[0][len(ids) :]) == {parts["tokenizer"].pad_token_id}


def test_padding_is_stored_because_the_denoiser_attends_to_it(family: Family, parts: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="attends to padding"):
        family.text_recipe(padding="drop")
    assert family.padding("prompt_embeds", family.text_recipe()) is None
    made = encoded(family, parts, ["cat", "a red cat"], max_length=160)
    assert made.keys() == {"prompt_embeds"}
    assert made["prompt_embeds"].shape == (2, *family.text_shapes(parts, {"max_length": 160})["prompt_embeds"])
    last = made["prompt_embeds"][:, -1]
    assert (last[0] - last[1]).abs().max() > 1e-2  # padding rows depend on the text
    noisy, timesteps = torch.randn(2, 128, 4, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([700.0] * 2)
    with torch.no_grad():
        wanted = family.predict(parts["transformer"], noisy, timesteps, made)
        cut = {"prompt_embeds": made["prompt_embeds"][:, :140]}
        assert (family.predict(parts["transformer"], noisy, timesteps, cut) - wanted).abs().max() > 1e-3


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


def test_a_pipeline_without_vae_returns_scaled_latents(family: Family, parts: dict[str, Any]) -> None:
    made = encoded(family, parts, ["cat"], max_length=160)
    generation = {"height": 64, "width": 32, "num_inference_steps": 1, "output_type": "latent", "return_dict": False}
    generation |= family.guidance_kwargs(1.0) | family.pipeline_kwargs(made, None)
    noise = torch.randn(1, 128, 4, 2, generator=torch.Generator().manual_seed(0))

    def final(**vae: Any) -> torch.Tensor:
        pipeline = family.pipeline(transformer=parts["transformer"], scheduler=parts["scheduler"], **vae)
        latents: torch.Tensor = pipeline(**generation, latents=noise)[0]
        return latents

    found = family.final_latents(final(), 64, 32)
    assert found.shape == noise.shape and not torch.equal(found, noise)
    whole = final(vae=parts["vae"])
    if family is DEV:  # whose pipeline returns tokens in any case
        assert torch.equal(family.final_latents(whole, 64, 32), found)
    else:
        assert torch.equal(vae_facts(parts["vae"]).scaling.undo(found), whole)
        assert torch.equal(patchified(final()), found)


def test_klein_has_a_negative_prompt_and_dev_has_guidance_as_an_input(family: Family, parts: dict[str, Any]) -> None:
    noisy = torch.zeros(2, 128, 4, 4)
    conditions = family.conditions(parts["transformer"], noisy, {"prompt_embeds": torch.zeros(2, 7, 48)})
    assert family.uses_negative(4.0) == (family is KLEIN) and not family.uses_negative(1.0)
    assert (conditions["guidance"] is None) == (family is KLEIN)
    assert conditions["img_ids"].shape == (2, 16, 4) and conditions["txt_ids"].shape == (2, 7, 4)


def test_the_class_that_transformers_chooses_for_a_tokenizer_does_not_count(
    family: Family, parts: dict[str, Any], tmp_path: Path
) -> None:
    """AutoTokenizer of another transformers may return another class for the same files."""
    tokenizer = parts["tokenizer"]
    own = LoadedModels(family=family, tokenizer=tokenizer).identity("tokenizer", torch.float32)
    tokenizer.save_pretrained(tmp_path)
    renamed = type("TokenizersBackend2", (type(tokenizer),), {})
    other = renamed.from_pretrained(tmp_path)
    found = LoadedModels(family=family, tokenizer=other).identity("tokenizer", torch.float32)
    assert (found.weights, found.config) == (own.weights, own.config)
    assert (found == own) == (family is DEV) and own.class_name == (
        "AutoTokenizer" if family is DEV else "Qwen2Tokenizer"
    )
