"""FLUX.2: statistics from the VAE's file, latents as 2x2 patches, texts with their padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.tiny_models import tiny_model

from latentcache.errors import ModelError
from latentcache.families import family_named
from latentcache.families.base import Family
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
