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
from latentcache.families import DEFAULT, DEFAULT_REPOSITORY, FAMILIES, family_named, sdxl
from latentcache.families.base import Family
from latentcache.families.parts import class_named
from latentcache.families.qwen_image import NUM_DROPPED
from latentcache.families.texts import unpadded
from latentcache.models.model_loader import LoadedModels, ModelLoader
from latentcache.models.vae import vae_facts
from latentcache.types import Crop, Geometry, Size

KLEIN, DEV, QWEN, KREA, QWEN_21, ERNIE, IDEOGRAM = map(
    family_named, ("flux2", "flux2-dev", "qwen-image", "krea2", "qwen-image-21", "ernie-image", "ideogram4")
)
TEXT = "a red cat on the table"


def encoded(family: Family, parts: dict[str, Any], *texts: str, **settings: Any) -> dict[str, torch.Tensor]:
    with torch.no_grad():
        return family.encode_text(parts, family.tokenize(parts, texts), family.text_recipe(**settings))


def test_naming_the_families_imports_no_torch() -> None:
    """Anima's is named in a process where no test stands in for what its denoiser needs."""
    code = "import sys; from latentcache.families import family_named as named"
    code += "; print('torch' in sys.modules, named('anima').denoiser_needs)"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert found == "False torchvision\n"
    assert family_named(DEFAULT).repositories[0] == DEFAULT_REPOSITORY


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
    for each in map(family_named, FAMILIES):
        fields = {field: each.text_columns(field, encoders).keys() for field in each.fields}
        assert all(names and names <= set(each.names("text_encoder")) for names in fields.values()), each.name
    assert family_named("flux").text_columns("prompt_embeds", {}) == {"text_encoder_2": slice(None)}
    assert family_named("flux").text_columns("pooled_prompt_embeds", {}) == {"text_encoder": slice(None)}
    with pytest.raises(ModelError, match=r"has no field 'latents' of texts; it has .*_"):
        family.text_columns("latents", {})


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
        ("qwen-image", "max_length", 1025, "takes 1024 tokens at most"),
        ("wan", "max_length", 513, "takes 512 tokens at most"),
        ("ideogram4", "max_length", 2049, "takes 2048 tokens at most"),
        ("qwen-image-21", "max_length", 100, "cuts no text"),
        ("qwen-image-edit", "max_length", 100, "cuts no text"),
        *(("sdxl", "max_length", length, f"is {length}, but .* 75 or 77 .*150 .*225") for length in (1, 76, 151, 227)),
        ("krea2", "padding", "keep", "krea2 does not read padding"),
        ("z-image", "padding", "keep", "z-image does not read padding"),
        ("flux", "padding", "drop", "padding is drop, but flux attends to padding"),
        ("sd15", "padding", "drop", "padding is drop, but sd15 attends to padding"),
        ("flux", "clip_skip", 1, "flux has no clip_skip"),
    ],
)
def test_settings_that_a_family_does_not_have_are_refused(name: str, setting: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        family_named(name).text_recipe(**{setting: value})
    assert caught.value.key == f"encode.{setting}"


def test_a_class_of_a_newer_release_is_named() -> None:
    with pytest.raises(ModelError, match=r"diffusers [\d.]+ has no SomethingNewer, .*pip install --upgrade diffusers"):
        class_named("diffusers.SomethingNewer")


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
    parts = tiny_model(QWEN.name)
    prefix = QWEN.rendered(parts, "a text").partition("a text")[0]
    assert len(parts["tokenizer"](prefix).input_ids) == NUM_DROPPED
    assert diffusers.QwenImagePipeline(*[None] * 5).prompt_template_encode_start_idx == NUM_DROPPED
    vocab = {symbol: index for index, symbol in enumerate(byte_symbols())}
    other = transformers.Qwen2Tokenizer(vocab=vocab, merges=[])
    for family in (QWEN, KREA):
        with pytest.raises(ModelError, match=f"into \\d+ tokens, but the pipeline drops {NUM_DROPPED}"):
            encoded(family, {**parts, "tokenizer": other}, "cat")
    parts = tiny_model(QWEN_21.name)
    parts["processor"].chat_template = "{% for message in messages %}{{ message.role }}{% endfor %}"
    with pytest.raises(ModelError, match=r"cuts the system prompt into \d+ tokens, but the pipeline drops 1\. Name"):
        encoded(QWEN_21, parts, "cat")


def test_an_item_does_not_depend_on_the_texts_of_the_others() -> None:
    """The pipeline places the images of a batch after its longest text, and so gives each another prediction."""
    parts, generator = tiny_model(QWEN_21.name), torch.Generator().manual_seed(0)
    batch = encoded(QWEN_21, parts, TEXT, "cat", "a red cat")
    lengths = batch["prompt_embeds_mask"].sum(1).tolist()
    assert lengths[1] < lengths[2] < lengths[0]
    noisy, timesteps = torch.randn(3, 64, 1, 4, 6, generator=generator), torch.tensor([900.0, 500.0, 100.0])
    found = QWEN_21.predict(parts["transformer"].requires_grad_(True), noisy, timesteps, batch)
    for number, length in enumerate(lengths):
        only = slice(number, number + 1)
        own = {"prompt_embeds": batch["prompt_embeds"][only, :length]}
        assert torch.equal(found[only], QWEN_21.predict(parts["transformer"], noisy[only], timesteps[only], own))
    found.square().mean().backward()
    assert parts["transformer"].proj_out.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("text", ["a <|image_pad|>cat", "<|video_pad|>a cat<|image_pad|>"])
def test_a_placeholder_of_an_image_is_not_read_where_there_is_none(text: str) -> None:
    parts = tiny_model(QWEN_21.name)
    assert QWEN_21.rendered(parts, text) == QWEN_21.rendered(parts, "a cat")
    assert torch.equal(*encoded(QWEN_21, parts, text, "a cat")["prompt_embeds"])


# ERNIE-Image


def test_ernie_image_adds_its_own_epsilon_to_variances() -> None:
    vae = tiny_model(ERNIE.name)["vae"]
    assert vae.config.batch_norm_eps == 1e-4
    found = LoadedModels(family=ERNIE, vae=vae).vae_facts()
    assert found.scaling.std == tuple(torch.sqrt(vae.bn.running_var + 1e-5).tolist())
    assert found.scaling != vae_facts(vae).scaling


def test_ernie_image_has_a_row_for_an_empty_text() -> None:
    parts = tiny_model(ERNIE.name)
    made, live = encoded(ERNIE, parts, TEXT, ""), ERNIE.pipeline(**parts).encode_prompt([TEXT, ""], "cpu")
    assert ERNIE.tokenize(parts, [""])[0].num_tokens == 0 and made["prompt_embeds_mask"][1].sum() == 1
    assert torch.equal(made["prompt_embeds"][1, :1], live[1])


# Ideogram 4


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


def test_ideogram_predicts_what_its_pipeline_does_with_longer_padding() -> None:
    """Rows of a text are those of any padding, to the last bit; a prediction has other shapes: 1e-6."""
    parts, texts = tiny_model(IDEOGRAM.name), ["cat", TEXT]
    batch = encoded(IDEOGRAM, parts, *texts)
    embeds, positions, segments, roles = IDEOGRAM.pipeline(**parts).encode_prompt(texts, 4, 4, 512, "cpu")
    for number, rows in enumerate(unpadded(batch)):
        assert torch.equal(rows, embeds[number, 512 - len(rows) : 512])
    timesteps = torch.tensor([900.0, 400.0])
    noise = torch.randn(2, 16, 128, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        live = parts["transformer"](
            torch.nn.functional.pad(noise, (0, 0, 512, 0)),
            timestep=1 - timesteps / 1000,
            encoder_hidden_states=embeds,
            position_ids=positions,
            segment_ids=segments,
            indicator=roles,
        ).sample[:, 512:]
        found = IDEOGRAM.predict(parts["transformer"], IDEOGRAM.final_latents(noise, 64, 64), timesteps, batch)
    torch.testing.assert_close(found, -IDEOGRAM.final_latents(live, 64, 64), rtol=0, atol=3e-6)
