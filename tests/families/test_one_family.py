"""What is particular about one family, or about two."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers
from helpers.tiny_models import byte_symbols, tiny_encoders, tiny_model, tiny_pipeline

from latentcache.errors import ConfigError, ModelError
from latentcache.families import FAMILIES, family_named, sdxl
from latentcache.families.base import Family
from latentcache.families.parts import class_named
from latentcache.families.qwen_image import NUM_DROPPED
from latentcache.families.texts import unpadded
from latentcache.models.model_loader import LoadedModels, ModelLoader
from latentcache.models.vae import vae_facts
from latentcache.types import Crop, Geometry, Size

KLEIN, DEV, QWEN, KREA, ERNIE, IDEOGRAM = map(
    family_named, ("flux2", "flux2-dev", "qwen-image", "krea2", "ernie-image", "ideogram4")
)
QWEN_21 = family_named("qwen-image-21")


def test_naming_the_families_imports_no_torch() -> None:
    code = "import sys, latentcache.families; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "False\n"


def test_time_ids_are_in_the_order_of_the_pipeline() -> None:
    pipeline = tiny_pipeline()
    sizes = ((480, 640), (3, 5), (512, 704))
    expected = pipeline._get_add_time_ids(
        *sizes, dtype=pipeline.unet.dtype, text_encoder_projection_dim=pipeline.text_encoder_2.config.projection_dim
    )
    original, crop, target = Size(*sizes[0]), Crop(*sizes[1]), Size(*sizes[2])
    assert expected.tolist() == [sdxl.FAMILY.size_conditions(Geometry(original, original, crop, target))]


def test_columns_of_an_embedding_are_the_outputs_of_its_encoders() -> None:
    family, parts = sdxl.FAMILY, tiny_encoders("sdxl")
    tokens = family.tokenize(parts, ["a red house", "rain"])
    embeds = family.encode_text(parts, tokens, {"clip_skip": 0})["prompt_embeds"]
    encoders = {name: parts[name] for name in family.names("text_encoder")}
    widths = [encoder.config.hidden_size for encoder in encoders.values()]
    for known in (encoders, *({name: encoder} for name, encoder in encoders.items())):
        columns = family.text_columns("prompt_embeds", known)
        assert [embeds[..., columns[name]].shape[-1] for name in encoders] == widths and widths[0] != widths[1]
        for number, (name, encoder) in enumerate(encoders.items()):
            ids = torch.cat([each.input_ids[number] for each in tokens])
            with torch.no_grad():
                own = encoder(ids, output_hidden_states=True).hidden_states[-2]
            assert torch.equal(embeds[..., columns[name]], own)
    with pytest.raises(ModelError, match="give text_encoder or text_encoder_2"):
        family.text_columns("prompt_embeds", {})


def test_each_field_of_a_text_has_its_encoder() -> None:
    for family in map(family_named, FAMILIES):
        for field in family.fields:
            columns = family.text_columns(field, {"text_encoder": tiny_encoders("sdxl")["text_encoder"]})
            assert columns and columns.keys() <= set(family.names("text_encoder"))
        with pytest.raises(ModelError, match=r"has no field 'latents' of texts; it has .*_"):
            family.text_columns("latents", {})
    assert family_named("flux").text_columns("prompt_embeds", {}) == {"text_encoder_2": slice(None)}
    assert family_named("flux").text_columns("pooled_prompt_embeds", {}) == {"text_encoder": slice(None)}


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
    expected = vae_facts(tiny_model(KLEIN.name)["vae"])  # in which older releases of diffusers fill in force_upcast
    assert LoadedModels(family=KLEIN, vae=vae).vae_facts().scaling == expected.scaling


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


def test_long_texts_are_cut_as_the_pipeline_cuts_them() -> None:
    parts = tiny_model(QWEN.name)
    recipe = QWEN.text_recipe(max_length=12)
    tokens = QWEN.tokenize(parts, ["a red cat on the table"])
    assert tokens[0].num_tokens > QWEN.token_limit(parts, recipe)
    with torch.no_grad():
        made = QWEN.encode_text(parts, tokens, recipe)
        live, _ = QWEN.pipeline(**parts).encode_prompt(["a red cat on the table"], max_sequence_length=12)
    assert torch.equal(made["prompt_embeds"], live) and made["prompt_embeds"].shape[1] == 12
    with pytest.raises(ConfigError, match="takes 1024 tokens"):
        QWEN.text_recipe(max_length=1025)


@pytest.mark.parametrize("family", [QWEN, KREA, family_named("z-image")], ids=lambda family: family.name)
def test_padding_that_the_denoiser_masks_is_not_kept(family: Any) -> None:
    with pytest.raises(ConfigError, match="does not read padding"):
        family.text_recipe(padding="keep")
    assert not family.text_recipe(padding="drop")["keeps_padding"]


def test_an_item_does_not_depend_on_the_texts_of_the_others() -> None:
    """The pipeline places the images of a batch after its longest text, and so gives each another prediction."""
    parts, generator = tiny_model(QWEN_21.name), torch.Generator().manual_seed(0)
    texts = ["a red cat on the table", "cat", "a red cat"]
    batch = QWEN_21.encode_text(parts, QWEN_21.tokenize(parts, texts), QWEN_21.text_recipe())
    lengths = batch["prompt_embeds_mask"].sum(1).tolist()
    assert lengths[1] < lengths[2] < lengths[0]
    noisy, timesteps = torch.randn(3, 64, 1, 4, 6, generator=generator), torch.tensor([900.0, 500.0, 100.0])
    denoiser = parts["transformer"].requires_grad_(True)
    found = QWEN_21.predict(denoiser, noisy, timesteps, batch)
    for number, length in enumerate(lengths):
        only = slice(number, number + 1)
        own = {"prompt_embeds": batch["prompt_embeds"][only, :length]}
        assert torch.equal(found[only], QWEN_21.predict(denoiser, noisy[only], timesteps[only], own))
    found.square().mean().backward()
    assert denoiser.proj_out.weight.grad.abs().sum() > 0
    with torch.no_grad():
        conditions = QWEN_21.conditions(denoiser, noisy, batch)
        mask, tokens = batch["prompt_embeds_mask"], noisy.flatten(2).transpose(1, 2)
        joined = denoiser(tokens, timestep=timesteps / 1000, encoder_hidden_states_mask=mask, **conditions).sample
    shifted = joined[:, -24:].transpose(1, 2).unflatten(2, (1, 4, 6)) - found
    gaps = shifted.abs().flatten(1).amax(1)
    assert gaps[0] < 1e-5 and gaps[1] > 0.05 and gaps[2] > 0.05


def test_the_system_turn_that_is_dropped_has_to_be_that_of_the_template() -> None:
    parts = tiny_model(QWEN_21.name)
    tokens = QWEN_21.tokenize(parts, ["cat"])
    parts["processor"].chat_template = "{% for message in messages %}{{ message.role }}{% endfor %}"
    with pytest.raises(ModelError, match=r"cuts the system prompt into \d+ tokens, but the pipeline drops 1\. Name"):
        QWEN_21.encode_text(parts, tokens, QWEN_21.text_recipe())


@pytest.mark.parametrize("text", ["a <|image_pad|>cat", "<|video_pad|>a cat<|image_pad|>"])
def test_a_placeholder_of_an_image_is_not_read_where_there_is_none(text: str) -> None:
    parts = tiny_model(QWEN_21.name)
    assert QWEN_21.rendered(parts, text) == QWEN_21.rendered(parts, "a cat")
    made = QWEN_21.encode_text(parts, QWEN_21.tokenize(parts, [text, "a cat"]), QWEN_21.text_recipe())
    assert torch.equal(*made["prompt_embeds"])


def test_ernie_image_adds_its_own_epsilon_to_variances() -> None:
    vae = tiny_model(ERNIE.name)["vae"]
    assert vae.config.batch_norm_eps == 1e-4
    found = LoadedModels(family=ERNIE, vae=vae).vae_facts()
    assert found.scaling.std == tuple(torch.sqrt(vae.bn.running_var + 1e-5).tolist())
    assert found.scaling != vae_facts(vae).scaling


def test_ernie_image_cuts_texts_and_has_a_row_for_an_empty_one() -> None:
    parts, recipe = tiny_model(ERNIE.name), ERNIE.text_recipe(max_length=4)
    text = "a red cat on the table"
    tokens = ERNIE.tokenize(parts, [text, ""])
    assert tokens[0].num_tokens > ERNIE.token_limit(parts, recipe) and tokens[1].num_tokens == 0
    made = ERNIE.encode_text(parts, tokens, recipe)
    assert made["prompt_embeds_mask"].sum(1).tolist() == [4, 1]
    live = ERNIE.pipeline(**parts).encode_prompt([text, ""], "cpu")
    torch.testing.assert_close(
        made["prompt_embeds"][0], live[0][:4], rtol=0, atol=1e-5
    )  # causal: what was cut is after
    assert torch.equal(made["prompt_embeds"][1, :1], live[1])


def test_ideogram_refuses_a_vae_with_statistics_of_flux2() -> None:
    """Both have the same network. The published numbers are nearly alike at the four places of a patch."""
    own, other = tiny_model(IDEOGRAM.name)["vae"], tiny_model(IDEOGRAM.name)["vae"]
    for values in (other.bn.running_mean, other.bn.running_var):
        values.copy_(values.view(4, 32).T.flatten())
    scaling = LoadedModels(family=IDEOGRAM, vae=own).vae_facts().scaling
    assert scaling.mean == tuple(other.bn.running_mean.tolist()), "in the order of FLUX.2"
    with pytest.raises(
        ModelError, match=r"\(bn\) are FLUX\.2's.*Set model\.vae to null or to the model's own"
    ) as raised:
        LoadedModels(family=IDEOGRAM, vae=other).vae_facts()
    assert raised.value.part == "vae"


@pytest.mark.parametrize("max_length", [16, 2048])
def test_ideogram_cuts_texts_that_its_pipeline_refuses(max_length: int) -> None:
    parts, recipe = tiny_model(IDEOGRAM.name), IDEOGRAM.text_recipe(max_length=max_length)
    tokens = IDEOGRAM.tokenize(parts, ["a red cat " * (max_length // 4), "cat"])
    assert tokens[0].num_tokens > IDEOGRAM.token_limit(parts, recipe) > tokens[1].num_tokens
    made = IDEOGRAM.encode_text(parts, tokens[:1], recipe)
    assert made["prompt_embeds"].shape[1] == max_length and made["prompt_embeds_mask"].all()
    with pytest.raises(ConfigError, match="takes 2048 tokens"):
        IDEOGRAM.text_recipe(max_length=2049)


def test_ideogram_predicts_what_its_pipeline_does_with_2048_rows() -> None:
    """Rows of a text are those of the longest padding, to the last bit; a prediction has other shapes: 1e-6."""
    parts = tiny_model(IDEOGRAM.name)
    tokens = IDEOGRAM.tokenize(parts, ["cat", "a red cat on the table"])
    batch = IDEOGRAM.encode_text(parts, tokens, IDEOGRAM.text_recipe())
    pipeline = IDEOGRAM.pipeline(**parts)
    embeds, positions, segments, roles = pipeline.encode_prompt([each.text for each in tokens], 4, 4, 2048, "cpu")
    for number, rows in enumerate(unpadded(batch)):
        assert torch.equal(rows, embeds[number, 2048 - len(rows) : 2048])
    timesteps = torch.tensor([900.0, 400.0])
    noise = torch.randn(2, 16, 128, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        live = parts["transformer"](
            torch.nn.functional.pad(noise, (0, 0, 2048, 0)),
            timestep=1 - timesteps / 1000,
            encoder_hidden_states=embeds,
            position_ids=positions,
            segment_ids=segments,
            indicator=roles,
        ).sample[:, 2048:]
        noisy = IDEOGRAM.final_latents(noise, 64, 64)
        found = IDEOGRAM.predict(parts["transformer"], noisy, timesteps, batch)
    torch.testing.assert_close(found, -IDEOGRAM.final_latents(live, 64, 64), rtol=0, atol=3e-6)


def test_a_class_of_a_newer_release_is_named() -> None:
    with pytest.raises(ModelError, match=r"diffusers [\d.]+ has no SomethingNewer, .*pip install --upgrade diffusers"):
        class_named("diffusers.SomethingNewer")
