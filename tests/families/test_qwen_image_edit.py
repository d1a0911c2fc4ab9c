"""Qwen-Image-Edit and Qwen-Image 2.1 as an editor: texts that are read with control images.

What encoder and denoiser get of control images is in test_families.py.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.family_runs import CONTROLS, TEXTS, family_config, family_run, loaded_models
from helpers.photo_files import write_photo
from helpers.tiny_models import tiny_folder, tiny_model

from latentcache import LatentCache
from latentcache.config import Config, ImagesConfig
from latentcache.dataset.images import decode, prepare
from latentcache.errors import ConfigError, ModelError, SampleError
from latentcache.families import family_named
from latentcache.models.model_loader import ModelLoader
from latentcache.precache.prompts import cache_prompts
from latentcache.precache.run import run_precache
from latentcache.precache.workspace import open_workspace
from latentcache.service.miss_encoder import MissEncoder
from latentcache.validation.runner import ValidationRunner
from latentcache.validation.sample_images import PromptEmbeddings, prompt_embeddings

EDIT, EDIT_21 = family_named("qwen-image-edit"), family_named("qwen-image-21-edit")


@pytest.fixture(scope="module")
def parts() -> dict[str, Any]:
    return tiny_model(EDIT.name)


def encoded(family: Any, parts: dict[str, Any], *texts: str) -> torch.Tensor:
    """The rows of each text, read with one picture where the family does so."""
    tokens = family.tokenize(parts, texts)
    if family.text_reads_control:
        tokens = family.tokenize_with_control(parts, texts, [[np.full((64, 96, 3), 99, np.uint8)]] * len(texts))
    with torch.no_grad():
        made: torch.Tensor = family.encode_text(parts, tokens, family.text_recipe())["prompt_embeds"]
    return made


def test_the_recipe_says_how_the_encoder_numbers_the_tokens_of_images(parts: dict[str, Any]) -> None:
    """In diffusers 0.42.1 the encoder does not learn which they are."""
    given = dict[str, Any]()
    hook = parts["text_encoder"].model.register_forward_pre_hook(
        lambda module, args, options: given.update(options), with_kwargs=True
    )
    encoded(EDIT, parts, "cat")
    hook.remove()
    gets_types = given["mm_token_type_ids"] is not None
    assert EDIT.text_recipe()["image_positions"] == ("rows and columns" if gets_types else "text")


@pytest.mark.parametrize("name", [EDIT.name, "qwen-image-21"])
def test_a_caption_that_names_a_placeholder_is_read_without_it(name: str) -> None:
    family, parts, texts = family_named(name), tiny_model(name), ["<|video_pad|>a cat<|image_pad|>", "a cat"]
    assert family.rendered(parts, texts[0]) == family.rendered(parts, texts[1])
    assert torch.equal(*encoded(family, parts, *texts))


def test_entries_have_the_slots_of_their_images_as_integers(tmp_path: Path) -> None:
    run = family_run(tmp_path, EDIT_21.name, text_store_dtype="bfloat16")
    batch = run.batch(TEXTS)
    assert batch["image_slots"].dtype == torch.int32 and batch["prompt_embeds"].dtype == torch.bfloat16
    live = EDIT_21.encode_text(run.parts, run.tokenized(TEXTS), run.encodings.text.settings)
    assert torch.equal(batch["image_slots"].long(), live["image_slots"]) and batch["image_slots"].shape == (3, 2)
    # Texts that were read with other images are refused.
    fewer = {name: value for name, value in batch.items() if name != "control_latents_2"}
    with pytest.raises(ModelError, match=r"read with 2 control images, but the batch has 1\. Run `latentcache prec"):
        EDIT_21.predict(run.denoiser, torch.zeros(run.latent_shape(3)), torch.full([3], 500.0), fewer)
    twice = run.batch([TEXTS[0]] * 2)
    twice["image_slots"][1] += 1
    with pytest.raises(ModelError, match=r"have their images at different rows, e\.g\. \[.*Use a batch size of 1"):
        EDIT_21.predict(run.denoiser, torch.zeros(run.latent_shape(2)), torch.full([2], 500.0), twice)
    run.cache.close()


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


def edit_config(folder: Path, control: dict[str, Any] | None = None, **dataset: Any) -> Config:
    changes = {f"datasets.0.control.0.{name}": value for name, value in (control or {}).items()}
    changes |= {f"datasets.0.{name}": value for name, value in dataset.items()}
    return family_config(folder, changes, num_controls=1)


def test_a_text_s_key_has_its_control_image(tmp_path: Path, parts: dict[str, Any]) -> None:
    config, models = edit_config(tmp_path), loaded_models(EDIT, parts)
    for number in range(3):  # one caption: the control images alone distinguish them
        (tmp_path / f"photos/{number}.txt").write_text("make it a winter day")
    assert run_precache(config, models=models).misses_by_reason == {"new": 6, "control 1: new": 3}

    def reasons(**control: Any) -> dict[str, int]:
        changed = edit_config(tmp_path, {"path": tmp_path / "others", **control})
        return run_precache(changed, models=models, dry_run=True).misses_by_reason

    (tmp_path / "controls").rename(tmp_path / "others")
    assert reasons() == {}, "the name of a file does not count"
    assert reasons(area=64 * 64) == {"control 1: bucket changed (96x64 -> 80x48)": 3, "control changed": 3}
    write_photo(tmp_path / "others/0.png", 99, CONTROLS["controls"])
    assert reasons() == {"control 1: image changed": 1, "control changed": 1}


# What is refused


def test_a_sample_without_a_control_image_is_refused_by_name(tmp_path: Path, parts: dict[str, Any]) -> None:
    config, models = edit_config(tmp_path), loaded_models(EDIT, parts)
    (tmp_path / "controls/1.png").unlink()
    [refusal] = run_precache(config, models=models).refused
    assert (refusal.sample_id, refusal.reason) == ("1.png", "missing") and "control 1" in refusal.detail
    with LatentCache(config.cache) as cache:
        batch = cache.batch(["0.png", "2.png"], device="cpu")
        assert cache.dataset_names() == cache.manifests.names() == ["photos"], "no prompts"
    assert batch["control_latents_1"].shape == (2, 16, 1, 12, 8) and len(batch["prompt_embeds"]) == 2
    dataset = config.datasets[0].model_copy(update={"control": ()})
    without = config.model_copy(update={"datasets": (dataset,)})
    with pytest.raises(ConfigError, match="add control to dataset photos"):
        run_precache(without, models=models)


@pytest.mark.parametrize("views", [{"flip": True}, {"variations": 2}], ids=lambda views: next(iter(views)))
def test_views_of_an_image_that_its_captions_are_not_read_with_are_refused(
    views: dict[str, Any], tmp_path: Path, parts: dict[str, Any]
) -> None:
    """A mirrored sample would have the rows of a text that was read with the control image as it was."""
    models, [name], config = loaded_models(EDIT, parts), views, edit_config(tmp_path, **views)
    with pytest.raises(ConfigError, match=f"control images of one view.*remove {name} from dataset photos") as raised:
        run_precache(config, models=models)
    assert raised.value.key == f"datasets.{name}"
    config = config.model_copy(update={"encode": config.encode.model_copy(update={"text": "none"})})
    assert run_precache(config, models=models).num_refused == 0
    with LatentCache(config.cache) as cache:
        assert "prompt_embeds" not in cache.batch(["0.png"], device="cpu")


def test_prompts_are_captions_of_a_validation_set(tmp_path: Path, parts: dict[str, Any]) -> None:
    """Each is read with the control images of its sample, and so is the negative prompt; others are refused."""
    config, models = edit_config(tmp_path, role="validation"), loaded_models(EDIT, parts)
    write_photo(tmp_path / "photos/3.png", 3, (64, 64))
    write_photo(tmp_path / "controls/3.png", 13, CONTROLS["controls"])
    (tmp_path / "photos/3.txt").write_text(TEXTS[1])

    def with_prompts(*prompts: str, negative: str = "") -> Config:
        changes = {"prompts": prompts, "negative_prompt": negative, "path": tmp_path / "results"}
        return config.model_copy(update={"validation": config.validation.model_copy(update=changes)})

    def embeddings(*prompts: str, negative: str = "") -> list[PromptEmbeddings]:
        with LatentCache(config.cache) as cache:
            return prompt_embeddings(cache, prompts, negative, device="cpu", datasets=["photos"])

    assert run_precache(config, models=models).num_encoded == 3 * 4
    with pytest.raises(SampleError, match=r"negative prompt.*is not cached.*latentcache precache"):
        embeddings(TEXTS[1])
    report = run_precache(with_prompts(TEXTS[1], negative="blurry"), models=models)
    assert report.misses_by_reason == {"new": 2}, "the negative prompt of each sample with this caption"
    assert run_precache(with_prompts(TEXTS[1], negative="blurry"), models=models).num_misses == 0
    one, two, again = embeddings(*[TEXTS[1]] * 3, negative="blurry")
    with LatentCache(config.cache) as cache:
        for number, found in (("1", one), ("3", two)):
            row = cache.manifest("photos").rows[f"{number}.png"]
            batch = cache.batch([row.sample_id], device="cpu", scaled=True)
            image = decode((tmp_path / f"controls/{number}.png").read_bytes(), "", ImagesConfig(min_side=8))
            pixels = prepare(image, row.parts[0].geometry)
            with torch.no_grad():
                tokens = EDIT.tokenize_with_control(parts, ["blurry"], [[pixels]])
                live = EDIT.encode_text(parts, tokens, EDIT.text_recipe())
            assert torch.equal(found.negative["prompt_embeds"], live["prompt_embeds"])
            for name in ("prompt_embeds", "control_latents_1"):
                assert torch.equal(found.embeds[name], batch[name]), name
            assert torch.equal(found.negative["control_latents_1"], batch["control_latents_1"])
    assert not torch.equal(one.negative["prompt_embeds"], two.negative["prompt_embeds"])
    assert all(torch.equal(again.tensors()[name], value) for name, value in one.tensors().items())
    with LatentCache(config.cache) as cache:
        cache.store.remove([cache.manifest("photos").rows["1.png"].parts[0].key])
    [found] = embeddings(TEXTS[1], negative="blurry")
    assert torch.equal(found.embeds["control_latents_1"], two.embeds["control_latents_1"]), "the first one is lost"
    # A negative prompt that was read with another control image is none of this one's.
    write_photo(tmp_path / "controls/1.png", 99, CONTROLS["controls"])
    run_precache(config, models=models)
    with pytest.raises(SampleError, match="is not cached"):
        embeddings(TEXTS[1], negative="blurry")
    trained = {**parts, "scheduler": parts["scheduler"]}
    with LatentCache(config.cache) as cache, pytest.raises(ConfigError, match="'a cat' is not a caption") as raised:
        ValidationRunner(trained, cache, with_prompts("a cat"))
    assert raised.value.key == "validation.prompts"
    with open_workspace(config.cache) as workspace:
        with pytest.raises(ConfigError, match="a prompt alone has none"):
            cache_prompts(config, workspace, models, [("a cat", False)], device="cpu")
        with MissEncoder(config, workspace, models=models) as encoder, pytest.raises(ConfigError, match="has none"):
            encoder.prompt("a cat")


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="it is installed")
@pytest.mark.parametrize("family", [EDIT, EDIT_21], ids=lambda family: family.name)
def test_a_processor_without_torchvision_is_refused_with_the_next_step(family: Any) -> None:
    with pytest.raises(ModelError, match=r"^processor: .*needs torchvision\. Install") as raised:
        ModelLoader(tiny_folder(family.name), family=family).tokenizers()
    assert raised.value.part == "processor"
