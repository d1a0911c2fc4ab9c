"""What is particular about one family, or about two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from helpers.family_runs import family_config
from helpers.tiny_models import byte_symbols, tiny_encoders, tiny_model

from latentcache import LatentCache, ValidationRunner
from latentcache.config import Config, ValidationConfig
from latentcache.errors import ConfigError, ModelError
from latentcache.families import FAMILIES, family_named, sdxl
from latentcache.families.base import Family, unpadded
from latentcache.families.qwen_image import NUM_DROPPED
from latentcache.models.model_loader import LoadedModels, ModelLoader
from latentcache.models.vae import vae_facts
from latentcache.precache.run import run_precache
from latentcache.validation import runner
from latentcache.validation.sample_images import PromptEmbeddings, denoise

KLEIN, DEV, QWEN, KREA, QWEN_21 = map(family_named, ("flux2", "flux2-dev", "qwen-image", "krea2", "qwen-image-21"))
TEXT = "a red cat on the table"


def encoded(family: Family, parts: dict[str, Any], *texts: str, **settings: Any) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return family.encode_text(parts, family.tokenize(parts, texts), family.text_recipe(**settings))


def test_columns_of_an_embedding_are_the_outputs_of_its_encoders() -> None:
    family, parts = sdxl.FAMILY, tiny_encoders("sdxl")
    tokens = family.tokenize(parts, ["a red house", "rain"])
    embeds = family.encode_text(parts, tokens, {"clip_skip": 0})["prompt_embeds"]
    encoders = {name: parts[name] for name in family.names("text_encoder")}
    for known in (encoders, *({name: encoder} for name, encoder in encoders.items())):
        columns = family.text_columns("prompt_embeds", known)
        for number, (name, encoder) in enumerate(encoders.items()):
            ids = torch.cat([each.input_ids[number] for each in tokens])
            with torch.no_grad():
                own = encoder(ids, output_hidden_states=True).hidden_states[-2]
            assert torch.equal(embeds[..., columns[name]], own)
    with pytest.raises(ModelError, match="pass text_encoder or text_encoder_2"):
        family.text_columns("prompt_embeds", {})
    flux = family_named("flux")
    assert flux.text_columns("prompt_embeds", {}) == {"text_encoder_2": slice(None)}
    assert flux.text_columns("pooled_prompt_embeds", {}) == {"text_encoder": slice(None)}
    with pytest.raises(ModelError, match=r"has no field 'latents' of texts; it has .*_"):
        flux.text_columns("latents", {})


@pytest.mark.parametrize(("name", "length"), [("qwen-image", 12), ("ernie-image", 4), ("ideogram4", 16), ("wan", 4)])
def test_long_texts_are_cut(name: str, length: int) -> None:
    """A causal encoder gives the rows that are left as it does those of the whole text."""
    family, parts = family_named(name), tiny_model(name)
    whole, cut = (encoded(family, parts, TEXT, max_length=each) for each in (None, length))
    limit = family.token_limit(parts, family.text_recipe(max_length=length))
    assert family.tokenize(parts, [TEXT])[0].num_tokens > limit
    [rows], [all_rows] = unpadded(cut), unpadded(whole)
    assert len(rows) == length < len(all_rows)
    if name == "wan":
        assert not cut["prompt_embeds"][0, length:].any() and cut["prompt_embeds"].shape == (1, 512, 32)
    else:
        torch.testing.assert_close(rows, all_rows[:length], rtol=0, atol=1e-5)


# What is refused


@pytest.mark.parametrize(
    ("name", "setting", "value", "message"),
    [
        ("wan", "max_length", 513, "at most 512 tokens"),
        ("qwen-image-edit", "max_length", 100, "truncates no text"),
        *(("sdxl", "max_length", length, f"is {length}, but .* 75 or 77 .*150 .*225") for length in (1, 151)),
        ("krea2", "padding", "keep", "krea2 does not read padding"),
        ("flux", "padding", "drop", "padding is drop, but flux attends to padding"),
        ("flux", "clip_skip", 1, "flux has no clip_skip"),
    ],
)
def test_settings_that_a_family_does_not_have_are_refused(name: str, setting: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        family_named(name).text_recipe(**{setting: value})
    assert caught.value.key == f"encode.{setting}"


# FLUX.2


def test_statistics_of_a_vae_are_read_in_float32_and_refused_where_they_were_rounded(tmp_path: Path) -> None:
    own, rounded = (tiny_model(KLEIN.name)["vae"] for _ in range(2))
    rounded.to(torch.bfloat16)
    KLEIN.pipeline(**tiny_model(KLEIN.name)).save_pretrained(tmp_path)
    models = ModelLoader(str(tmp_path), family=KLEIN)
    models.vae(torch.bfloat16)
    assert models.vae_facts() == vae_facts(own)
    with pytest.raises(
        ModelError, match=r"statistics .* \(bn\) are torch\.bfloat16.*Load the VAE in float32"
    ) as caught:
        LoadedModels(family=KLEIN, vae=rounded).vae_facts()
    assert caught.value.part == "vae"
    rounded.bn = own.bn
    # Not all facts: older releases of diffusers fill in force_upcast.
    assert LoadedModels(family=KLEIN, vae=rounded).vae_facts().scaling == vae_facts(own).scaling


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
    assert (found == own) == (family is DEV)
    assert own.class_name == ("AutoTokenizer" if family is DEV else "Qwen2Tokenizer")


# Qwen-Image, Krea 2 and Qwen-Image 2.1


def test_the_rows_that_are_dropped_have_to_be_those_of_the_system_prompt() -> None:
    vocab = {symbol: index for index, symbol in enumerate(byte_symbols())}
    other = transformers.Qwen2Tokenizer(vocab=vocab, merges=[])
    for family in (QWEN, KREA):
        with pytest.raises(ModelError, match=f"into \\d+ tokens, but the pipeline drops {NUM_DROPPED}"):
            encoded(family, {**tiny_model(family.name), "tokenizer": other}, "cat")
    parts = tiny_model(QWEN_21.name)
    parts["processor"].chat_template = "{% for message in messages %}{{ message.role }}{% endfor %}"
    with pytest.raises(ModelError, match=r"into \d+ tokens, but the pipeline drops 1\. Use"):
        encoded(QWEN_21, parts, "cat")


# Distilled models of FLUX.2 and Krea 2: their model_index.json gives the pipeline other guidance or another schedule.

SETTINGS = ValidationConfig(height=64, width=64, num_inference_steps=2, guidance_scale=4.0)
DISTILLED = {"is_distilled": True}
NAMES = [name for name in FAMILIES if family_named(name).pipeline_settings]


@pytest.mark.parametrize("name", NAMES)
def test_images_are_those_of_the_distilled_pipeline(name: str) -> None:
    family, parts = family_named(name), tiny_model(name)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    recipe = {**family.text_recipe(), "max_length": 48}
    with torch.no_grad():
        made = family.encode_text(parts, family.tokenize(parts, ["a cat", ""]), recipe)
    positive, negative = ({key: value[part] for key, value in made.items()} for part in (slice(0, 1), slice(1, 2)))
    given = PromptEmbeddings("a cat", "", positive, negative)
    plain, found = (
        denoise(parts["transformer"], scheduler, [given], SETTINGS, family=family, pipeline_settings=settings)[0]
        for settings in ({}, DISTILLED)
    )
    live = family.pipeline(transformer=parts["transformer"], scheduler=scheduler, **DISTILLED)
    options = {"height": 64, "width": 64, "num_inference_steps": 2, "output_type": "latent", "return_dict": False}
    guidance = {"guidance_scale": 1.0} if name == "flux2" else family.guidance_kwargs(4.0)  # ignored, with a warning
    seed = torch.Generator().manual_seed(SETTINGS.seed)
    expected = live(**family.pipeline_kwargs(positive, negative), **options, **guidance, generator=seed)[0]
    assert torch.equal(found, family.final_latents(expected, 64, 64))
    assert not torch.equal(found, plain)


@pytest.mark.extended
def test_a_validation_asks_the_models_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, seen = family_named("krea2"), []
    parts = tiny_model(family.name)
    family.pipeline(**parts, **DISTILLED).save_pretrained(tmp_path / "model")

    def noted(*arguments: Any, **options: Any) -> list[torch.Tensor]:
        seen.append(options["pipeline_settings"])
        return denoise(*arguments, **options)

    monkeypatch.setattr(runner, "denoise", noted)
    validation = {"prompts": ["a cat"], "path": str(tmp_path / "results"), "num_inference_steps": 1}

    def config_of(path: Path) -> Config:
        size = {"height": 64, "width": 64}
        return family_config(tmp_path, {"model.path": str(path), "validation": {**validation, **size}})

    config = config_of(tmp_path / "model")
    run_precache(config)
    with LatentCache(config.cache) as cache:
        assert ValidationRunner(parts, cache, config).run(1).notes == ()
        [note] = ValidationRunner(parts, cache, config_of(tmp_path / "gone.safetensors")).run(2).notes
    assert seen == [DISTILLED, {}]
    assert note.startswith("images are made with the defaults of Krea2Pipeline: ") and "gone.safetensors" in note
