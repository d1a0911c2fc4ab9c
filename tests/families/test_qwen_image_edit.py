"""Qwen-Image-Edit and Qwen-Image 2.1: texts that are read with control images, which the denoiser is given too."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from helpers.family_runs import CONTROL, SIDE, TEXTS, family_config, family_run, loaded_models, recorded
from helpers.photo_files import write_photo
from helpers.tiny_models import randomised, tiny_folder, tiny_model
from PIL import Image

from latentcache import LatentCache
from latentcache.config import Config
from latentcache.config_file import parse_config
from latentcache.errors import ConfigError, ModelError
from latentcache.families import family_named
from latentcache.families.base import Family
from latentcache.families.scaling import latents_from_moments
from latentcache.models.model_loader import ModelLoader
from latentcache.models.vae import vae_facts
from latentcache.precache.prompts import cache_prompts
from latentcache.precache.run import run_precache
from latentcache.precache.workspace import open_workspace
from latentcache.service.miss_encoder import MissEncoder

EDIT, EDIT_21 = family_named("qwen-image-edit"), family_named("qwen-image-21-edit")
PIPELINE = importlib.import_module("diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus")


@pytest.fixture(scope="module")
def parts() -> dict[str, Any]:
    return tiny_model(EDIT.name)


def picture(seed: int, height: int = 64, width: int = 96) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def encoded(parts: dict[str, Any], texts: list[str], images: list[list[np.ndarray]]) -> dict[str, torch.Tensor]:
    tokens = EDIT.tokenize_with_control(parts, texts, images)
    with torch.no_grad():
        return EDIT.encode_text(parts, tokens, EDIT.text_recipe())


def rows(made: dict[str, torch.Tensor], number: int = 0) -> torch.Tensor:
    return made["prompt_embeds"][number][made["prompt_embeds_mask"][number]]


def test_the_recipe_is_that_of_the_pipeline(parts: dict[str, Any]) -> None:
    pipeline, recipe = EDIT.pipeline(**parts), EDIT.text_recipe()
    assert recipe["num_dropped"] == pipeline.prompt_template_encode_start_idx
    assert recipe["control_area"] == PIPELINE.CONDITION_IMAGE_SIZE
    assert recipe["control_resample"] == pipeline.image_processor.config.resample
    prefix = pipeline.prompt_template_encode.partition("{}")[0]
    assert len(parts["processor"].tokenizer(prefix).input_ids) == recipe["num_dropped"]


def test_texts_are_read_with_their_pictures_as_the_whole_pipeline_does_it(
    parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pipeline's own call: with one control image, and with two of other shapes."""
    monkeypatch.setattr(PIPELINE, "VAE_IMAGE_SIZE", SIDE**2)
    pipeline, given = EDIT.pipeline(**parts), []
    encode = pipeline.encode_prompt
    monkeypatch.setattr(
        pipeline, "encode_prompt", lambda *args, **rest: (made := encode(*args, **rest), given.append(made))[0]
    )
    images = [[picture(0)], [picture(1, 128, 64), picture(2, 64, 64)]]
    texts = ["cat", "a red cat on the table"]
    for text, group in zip(texts, images, strict=True):
        shown: Any = [Image.fromarray(each) for each in group]
        pipeline(shown, text, height=SIDE, width=SIDE, num_inference_steps=1, output_type="latent")
    together = encoded(parts, texts, images)
    assert together["prompt_embeds_mask"].sum(1).tolist() == [len(made[0]) for made, _ in given]
    for number, (live, mask) in enumerate(given):
        assert mask is None and torch.equal(rows(together, number), live[0])
        assert torch.equal(rows(encoded(parts, texts[number : number + 1], images[number : number + 1])), live[0])
    # 196 rows of a picture of 384x384, and those of the words.
    assert 196 < len(rows(together)) < 196 + 40 < 2 * 196 < len(rows(together, 1))


def test_another_picture_gives_another_text_and_their_order_counts(parts: dict[str, Any]) -> None:
    one, other, third = (rows(encoded(parts, ["cat"], [[picture(seed)]])) for seed in (0, 1, 1))
    assert one.shape == other.shape and (one - other).abs().max() > 1e-2 and torch.equal(other, third)
    pair = [picture(0), picture(1)]
    assert not torch.equal(rows(encoded(parts, ["cat"], [pair])), rows(encoded(parts, ["cat"], [pair[::-1]])))


def test_the_recipe_says_how_tokens_of_images_are_numbered(parts: dict[str, Any]) -> None:
    """In diffusers 0.42.1 the encoder does not learn which tokens are of images."""
    model, given = parts["text_encoder"].model, dict[str, Any]()
    hook = model.register_forward_pre_hook(lambda module, args, options: given.update(options), with_kwargs=True)
    made = encoded(parts, ["cat"], [[picture(0)]])
    hook.remove()
    gets_types = given["mm_token_type_ids"] is not None
    assert EDIT.text_recipe()["image_positions"] == ("rows and columns" if gets_types else "text")
    if not gets_types:
        names = ("input_ids", "attention_mask", "pixel_values", "image_grid_thw")
        arguments = {name: given[name] for name in names}
        of_images = (arguments["input_ids"] == parts["text_encoder"].config.image_token_id).int()
        with torch.no_grad():
            output = model(**arguments, mm_token_type_ids=of_images, output_hidden_states=True)
        by_place = output.hidden_states[-1][0, 64:]
        assert by_place.shape == rows(made).shape and (by_place - rows(made)).abs().max() > 1e-2


@pytest.mark.parametrize("text", ["a <|image_pad|>cat", "<|video_pad|>a cat<|image_pad|>"])
def test_a_caption_that_names_a_placeholder_is_read_without_it(parts: dict[str, Any], text: str) -> None:
    assert EDIT.rendered(parts, text) == EDIT.rendered(parts, "a cat")
    both = encoded(parts, [text, "a cat"], [[picture(0)]] * 2)
    assert torch.equal(*both["prompt_embeds"])


@pytest.mark.parametrize("name", [EDIT.name, "qwen-image-21"])
def test_a_text_has_no_length_to_set(name: str) -> None:
    with pytest.raises(ConfigError, match="cuts no text") as raised:
        family_named(name).text_recipe(max_length=100)
    assert raised.value.key == "encode.max_length"


# The key


def test_how_the_processor_prepares_images_is_its_identity(parts: dict[str, Any]) -> None:
    other, own = tiny_model(EDIT.name), parts["processor"].image_processor
    read = other["processor"].image_processor

    def is_same() -> bool:
        one, two = (loaded_models(EDIT, each).identity("processor", torch.float32) for each in (parts, other))
        return one == two

    read._processor_class, read.processor_class = "Other", "Other"
    assert is_same(), "names do not count"
    for name, value in (("size", {"shortest_edge": 3136, "longest_edge": 200704}), ("image_mean", (0.5, 0.5, 0.5))):
        setattr(read, name, value)
        assert not is_same(), name
        setattr(read, name, getattr(own, name))
        assert is_same()


def edit_control(folder: Path) -> None:
    write_photo(folder / "controls/0.png", 99, CONTROL)


CHANGES: dict[str, tuple[Callable[[Path], object], dict[str, Any], dict[str, int]]] = {
    "picture": (edit_control, {}, {"control 1: image changed": 1, "control changed": 1}),
    "file name": (lambda folder: (folder / "controls").rename(folder / "others"), {"path": "others"}, {}),
    "size rule": (
        lambda folder: None,
        {"area": 64 * 64},
        {"control 1: bucket changed (96x64 -> 80x48)": 3, "control changed": 3},
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_text_s_key_has_its_control_image(change: str, tmp_path: Path, parts: dict[str, Any]) -> None:
    config = family_config(tmp_path, with_controls=True)
    for number in range(3):  # one caption: the control images alone distinguish them
        (tmp_path / f"photos/{number}.txt").write_text("make it a winter day")
    models = loaded_models(EDIT, parts)
    assert run_precache(config, models=models).misses_by_reason == {"new": 6, "control 1: new": 3}
    assert run_precache(config, models=models).num_misses == 0
    edit, control, expected = CHANGES[change]
    edit(tmp_path)
    given = config.model_dump(mode="json")
    given["datasets"][0]["control"][0] |= {**control, **({"path": tmp_path / "others"} if "path" in control else {})}
    assert run_precache(parse_config(given), models=models, dry_run=True).misses_by_reason == expected


# What is refused


def tiny_config(folder: Path, **changes: Any) -> Config:
    given = family_config(folder, with_controls=True).model_dump(mode="json")
    given["datasets"][0] |= changes.pop("dataset", {})
    return parse_config(given | changes)


def test_a_sample_without_a_control_image_is_refused_by_name(tmp_path: Path) -> None:
    config, models = tiny_config(tmp_path), loaded_models(EDIT, tiny_model(EDIT.name))
    (tmp_path / "controls/1.png").unlink()
    report = run_precache(config, models=models)
    [refusal] = report.refused
    assert (refusal.sample_id, refusal.reason) == ("1.png", "missing") and "control 1" in refusal.detail
    with LatentCache(config.cache) as cache:
        batch = cache.batch(["0.png", "2.png"], device="cpu")
        assert cache.dataset_names() == cache.manifests.names() == ["photos"], "no prompts"
    assert batch["control_latents_1"].shape == (2, 16, 1, 12, 8) and len(batch["prompt_embeds"]) == 2
    with pytest.raises(ConfigError, match="give dataset photos some"):
        run_precache(tiny_config(tmp_path, dataset={"control": []}), models=models)


@pytest.mark.parametrize("family", [EDIT, EDIT_21], ids=lambda family: family.name)
@pytest.mark.parametrize("views", [{"flip": True}, {"variations": 2}], ids=lambda views: next(iter(views)))
def test_views_of_an_image_that_its_captions_are_not_read_with_are_refused(
    family: Family, views: dict[str, Any], tmp_path: Path
) -> None:
    """A mirrored sample would have the rows of a text that was read with the control image as it was."""
    models, [name] = loaded_models(family, tiny_model(family.name)), views
    with pytest.raises(ConfigError, match=f"control images of one view.*remove {name} of dataset photos") as raised:
        run_precache(tiny_config(tmp_path, dataset=views), models=models)
    assert raised.value.key == f"datasets.{name}"
    config = tiny_config(tmp_path, dataset=views)
    config = config.model_copy(update={"encode": config.encode.model_copy(update={"text": "none"})})
    assert run_precache(config, models=models).num_refused == 0
    with LatentCache(config.cache) as cache:
        assert "prompt_embeds" not in cache.batch(["0.png"], device="cpu")


def test_prompts_are_refused_since_they_have_no_control_image(tmp_path: Path) -> None:
    models = loaded_models(EDIT, tiny_model(EDIT.name))
    with pytest.raises(ConfigError, match=r"qwen-image-edit generates from a prompt and control images") as raised:
        run_precache(tiny_config(tmp_path, validation={"prompts": ["a cat"]}), models=models)
    assert raised.value.key == "validation.prompts"
    config = tiny_config(tmp_path)
    with open_workspace(config.cache) as workspace:
        with pytest.raises(ConfigError, match="a prompt has none"):
            cache_prompts(config, workspace, models, [("a cat", False)], device="cpu")
        with MissEncoder(config, workspace, models=models) as encoder, pytest.raises(ConfigError, match="has none"):
            encoder.prompt("a cat")


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="it is installed")
@pytest.mark.parametrize("name", [EDIT.name, "qwen-image-21", EDIT_21.name])
def test_a_processor_without_torchvision_is_refused_with_the_next_step(name: str) -> None:
    with pytest.raises(ModelError, match=r"^processor: .*needs torchvision\. Install") as raised:
        ModelLoader(tiny_folder(name), family=family_named(name)).tokenizers()
    assert raised.value.part == "processor"


# The denoiser


@pytest.mark.parametrize("zero_cond_t", [False, True], ids=["2509", "2511"])
def test_two_control_images_are_tokens_as_in_the_pipeline(
    zero_cond_t: bool, parts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """2511 takes control images at timestep 0, which its denoiser finds by their shapes."""
    monkeypatch.setattr(PIPELINE, "VAE_IMAGE_SIZE", 64 * 96)
    config = {**parts["transformer"].config, "zero_cond_t": zero_cond_t}
    denoiser = randomised(diffusers.QwenImageTransformer2DModel.from_config(config), 1).eval()
    pipeline = EDIT.pipeline(**{**parts, "transformer": denoiser})
    images, scaling = [picture(0, 64, 96), picture(1, 96, 64)], vae_facts(parts["vae"]).scaling
    monkeypatch.setattr(
        pipeline,
        "_encode_vae_image",
        lambda image, generator: scaling.apply(pipeline.vae.encode(image).latent_dist.mode()),
    )
    noise = torch.randn(1, 16, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    packed = pipeline._pack_latents(noise[:, :, 0], 1, 16, 8, 8)
    size = {"height": SIDE, "width": SIDE, "num_inference_steps": 1, "output_type": "latent"}
    with recorded(denoiser) as calls:
        pipeline([Image.fromarray(each) for each in images], "a cat", latents=packed, **size)
    batch: dict[str, Any] = encoded(parts, ["a cat"], [images])
    for number, image in enumerate(images, 1):
        pixels = pipeline.image_processor.preprocess(Image.fromarray(image)).unsqueeze(2)
        with torch.no_grad():
            batch[f"control_latents_{number}"] = scaling.apply(parts["vae"].encode(pixels).latent_dist.mode())
    timesteps = pipeline.scheduler.timesteps[:1].float()
    with recorded(denoiser) as own, torch.no_grad():
        found = EDIT.predict(denoiser, noise, timesteps, batch)
        swapped = {
            **batch,
            "control_latents_1": batch["control_latents_2"],
            "control_latents_2": batch["control_latents_1"],
        }
        other = EDIT.predict(denoiser, noise, timesteps, swapped)
    assert torch.equal(own[0].arguments["hidden_states"], calls[0].arguments["hidden_states"])
    assert own[0].arguments["img_shapes"] == calls[0].arguments["img_shapes"] == [[(1, 4, 4), (1, 4, 6), (1, 6, 4)]]
    assert torch.equal(own[0].output[0], calls[0].output[0]) and found.shape == noise.shape
    assert (found - other).abs().max() > 1e-3


# Qwen-Image 2.1


def edit_21_call(pictures: list[np.ndarray], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    """The pipeline's own call of the denoiser with these pictures, of its noise, and the batch of what is cached."""
    parts = tiny_model(EDIT_21.name)
    pipeline = EDIT_21.pipeline(**parts)
    module = importlib.import_module(type(pipeline).__module__)
    sizes = {each.shape[1] / each.shape[0]: (each.shape[1], each.shape[0], None) for each in pictures}
    monkeypatch.setattr(module, "calculate_dimensions", lambda area, ratio: sizes[ratio])
    noise = torch.randn(1, 64, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    size = {"height": SIDE, "width": SIDE, "num_inference_steps": 1, "output_type": "latent", "use_kv_cache": False}
    shown: Any = [Image.fromarray(each) for each in pictures]
    with recorded(parts["transformer"]) as calls:
        pipeline("a cat", image=shown, latents=noise.flatten(2).transpose(1, 2), **size)
    scaling = vae_facts(parts["vae"]).scaling
    tokens = EDIT_21.tokenize_with_control(parts, ["a cat"], [pictures])
    batch: dict[str, Any] = EDIT_21.encode_text(parts, tokens, EDIT_21.text_recipe())
    for number, image in enumerate(shown, 1):
        pixels = pipeline.image_processor.preprocess(image).unsqueeze(2)
        with torch.no_grad():
            moments = EDIT_21.encode_image(parts["vae"], pixels)
        batch[f"control_latents_{number}"] = scaling.apply(latents_from_moments(moments))
    return parts["transformer"], calls[0], noise, pipeline.scheduler.timesteps[:1].float(), batch


@pytest.mark.parametrize("num", [1, 2])
def test_control_images_stand_at_their_slots_among_the_text(num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = [picture(0, 64, 96), picture(1, 96, 64)][:num]
    denoiser, call, noise, timesteps, batch = edit_21_call(pictures, monkeypatch)
    with recorded(denoiser) as own, torch.no_grad():
        found = EDIT_21.predict(denoiser, noise, timesteps, batch)
    arguments = own[0].arguments
    for name in ("hidden_states", "img_mask", "timestep"):
        assert torch.equal(arguments[name], call.arguments[name]), name
    assert arguments["img_shapes"] == call.arguments["img_shapes"] == [[*[(1, 4, 6), (1, 6, 4)][:num], (1, 4, 4)]]
    assert torch.equal(own[0].output[0], call.output[0]) and found.shape == noise.shape
    # No row of an image is stored: six slots for each.
    assert batch["prompt_embeds"].shape[1] + 6 * num == call.arguments["encoder_hidden_states"].shape[1]
    assert batch["image_slots"].shape == (1, num)


def test_texts_that_were_read_with_other_images_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    denoiser, _, noise, timesteps, batch = edit_21_call([picture(0)], monkeypatch)
    with pytest.raises(ModelError, match=r"read with 1 control images, but the batch has 2\. Run `latentcache prec"):
        EDIT_21.predict(denoiser, noise, timesteps, {**batch, "control_latents_2": batch["control_latents_1"]})
    twice = {name: torch.cat([batch[name]] * 2) for name in batch}
    twice["image_slots"][1] += 1
    with pytest.raises(ModelError, match=r"of one batch have their images after \[\d+\] and after other rows"):
        EDIT_21.predict(denoiser, torch.cat([noise] * 2), timesteps.repeat(2), twice)


def test_entries_have_the_slots_of_their_images_as_integers(tmp_path: Path) -> None:
    run = family_run(tmp_path, EDIT_21.name, text_store_dtype="bfloat16")
    batch = run.batch(TEXTS)
    assert batch["image_slots"].dtype == torch.int32 and batch["prompt_embeds"].dtype == torch.bfloat16
    live = EDIT_21.encode_text(run.parts, run.tokenized(TEXTS), run.encodings.text.settings)
    assert torch.equal(batch["image_slots"].long(), live["image_slots"]) and batch["image_slots"].shape == (3, 1)
    run.cache.close()
