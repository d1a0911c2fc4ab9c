"""Caches of ai-toolkit and SimpleTuner of other families than SDXL: what is read, what is written, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.foreign_files import split
from helpers.trainer_files import (
    CAPTIONS,
    CASES,
    HAS_POOLED,
    WIDTH,
    ai_toolkit_text,
    latents_of,
    own_rows,
    pooled_of,
    simpletuner_text,
    write_ai_toolkit,
    write_ai_toolkit_latent,
    write_ai_toolkit_text,
    write_images,
    write_simpletuner,
)
from safetensors.torch import load_file

from latentcache.errors import ConfigError
from latentcache.families import family_named
from latentcache.interop.foreign_family import published_scaling
from latentcache.interop.formats import ai_toolkit, simpletuner
from latentcache.interop.formats.ai_toolkit_texts import WHY_NOT
from latentcache.interop.importing import import_cache
from latentcache.interop.readers import ForeignCache
from latentcache.loading.cache import LatentCache
from latentcache.precache.workspace import Workspace
from latentcache.types import Crop, Size

TRAINERS = ("ai-toolkit", "simpletuner")
EACH = pytest.mark.parametrize("family", sorted(CASES))


def written(trainer: str, folder: Path, family: str) -> ForeignCache:
    """The trainer's cache of two photos, as a reader."""
    write_images(folder)
    if trainer == "ai-toolkit":
        write_ai_toolkit(folder, family)
        return ai_toolkit.read(folder)
    write_simpletuner(folder.parent / "made", family)
    return simpletuner.read(folder.parent / "made/vae", images=folder, text_cache=folder.parent / "made/text")


def imported(foreign: ForeignCache) -> tuple[LatentCache, Any]:
    workspace = Workspace()
    report = import_cache(foreign, workspace, name="foreign")
    return LatentCache(store=workspace.store, manifests=workspace.manifests, unverified=True), report


@pytest.mark.parametrize("trainer", TRAINERS)
@EACH
def test_a_cache_is_imported_unscaled_with_the_rows_that_are_stored_here(tmp_path, trainer, family):
    foreign = written(trainer, tmp_path / "images", family)
    assert foreign.family == family
    cache, report = imported(foreign)
    has_texts = trainer == "simpletuner" or family not in WHY_NOT
    manifest, declared = cache.manifest("foreign"), family_named(family)
    assert manifest.common["family"] == family and cache.scaling(manifest) == published_scaling(family)
    assert report.num_images == 2 and report.num_samples == (2 if has_texts else 0)
    assert [refusal.reason for refusal in report.refused] == [] if has_texts else ["unsupported-format"] * 2
    for seed, (stem, caption) in enumerate(sorted(CAPTIONS.items())):
        row = manifest.rows[f"{stem}.png"]
        (ref,) = row.images
        latents, expected = cache.get(ref.key).tensors["latents"], latents_of(family, seed)
        assert (ref.geometry.target_size, ref.geometry.crop_top_left) == (Size(64, 96), Crop(0, 5))
        is_video = declared.latent.is_video
        assert latents.shape == (CASES[family].channels, *([1] if is_video else []), 8, 12)
        assert torch.equal(cache.scaling(manifest).apply(latents).bfloat16().reshape(expected.shape), expected)
        output = cache.get(ref.key).record.identity["imported"]["output"]
        assert output == ("mean" if (trainer, family) == ("simpletuner", "wan") else "sample")
        if not has_texts:
            continue
        (text,) = row.captions
        entry = cache.get(text.key)
        fields = {"prompt_embeds": own_rows(family, seed)}
        fields |= {"pooled_prompt_embeds": pooled_of(seed)} if family in HAS_POOLED else {}
        assert text.text == caption and entry.tensors.keys() == fields.keys()
        assert all(torch.equal(entry.tensors[name], value) for name, value in fields.items())
        assert entry.ragged == (frozenset() if family in ("sd15", "flux") else {"prompt_embeds"})


@EACH
def test_an_export_to_ai_toolkit_has_the_files_that_it_makes(tmp_path, family):
    cache, _ = imported(written("simpletuner", tmp_path / "images", family))
    report = ai_toolkit.export(cache, "foreign", tmp_path / "out", caption_extension=".none")
    space = {"sd15": "sd15", "wan": "wan21"}.get(family, CASES[family].space)
    write_ai_toolkit(tmp_path / "made", family, space=space)
    notes = [f"texts are not exported: {WHY_NOT[family]}"] if family in WHY_NOT else []
    notes += [f"the names are those for {space}: {OTHERS[family]} does not find them"] if family in OTHERS else []
    assert (report.num_images, report.num_texts) == (2, 0 if family in WHY_NOT else 2)
    assert report.notes.keys() - {ai_toolkit.NOTE_UNUSUAL} == set(notes) and report.skipped == []
    for folder in ("_latent_cache", *(() if family in WHY_NOT else ("_t_e_cache",))):
        made, exported = (
            {path.name: path for path in (tmp_path / each / folder).iterdir()} for each in ("made", "out")
        )
        assert made.keys() == exported.keys()
        for name, path in made.items():
            left, right = load_file(path), load_file(exported[name])
            assert left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)


OTHERS = {"sd15": "sd1", "flux": "flux_kontext", "wan": "wan22_14b"}


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and left.dtype == right.dtype and torch.equal(left, right)


@EACH
def test_what_simpletuner_made_is_exported_again(tmp_path, family):
    cache, _ = imported(written("simpletuner", tmp_path / "images", family))
    report = simpletuner.export(cache, "foreign", tmp_path / "out")
    has_texts = family == "sd15"
    assert (report.num_images, report.num_texts) == (2, 2 if has_texts else 0)
    assert (simpletuner.NOTE_TEXTS in report.notes) is not has_texts
    for name in ("vae", "text") if has_texts else ("vae",):
        before = {path.name: torch.load(path) for path in (tmp_path / "made" / name).iterdir()}
        after = {path.name: torch.load(path) for path in (tmp_path / "out" / name).iterdir()}
        assert before.keys() == after.keys()
        for file, content in before.items():
            if isinstance(content, dict):
                assert same(content["prompt_embeds"], after[file]["prompt_embeds"])
            else:
                assert same(content, after[file])


def test_padding_of_zeros_is_refused_where_the_denoiser_attends_to_it(tmp_path):
    """ai-toolkit's attn_masking and SimpleTuner's t5_padding=zero: other embeddings than diffusers'."""
    write_images(tmp_path)
    tensors, _ = ai_toolkit_text("flux", 0)
    tensors["text_embed"][:, 9:] = 0
    write_ai_toolkit_latent(tmp_path, "cat", "flux1", latents_of("flux", 0))
    write_ai_toolkit_text(tmp_path, "cat", CAPTIONS["cat"], "flux", tensors)
    found, texts, (refusal,) = split(ai_toolkit.read(tmp_path))
    assert len(found) == 1 and texts == []
    assert refusal.reason == "unsupported-format" and "its padding is zeros" in refusal.detail


def test_texts_and_latents_of_kontext_are_flux(tmp_path):
    write_images(tmp_path)
    write_ai_toolkit_latent(tmp_path, "cat", "flux_kontext", latents_of("flux", 0))
    write_ai_toolkit_text(tmp_path, "cat", CAPTIONS["cat"], "flux_kontext", ai_toolkit_text("flux", 0)[0])
    found, (text,), refusals = split(ai_toolkit.read(tmp_path))
    assert len(found) == 1 and refusals == [] and text.caption == CAPTIONS["cat"]


def test_caches_of_two_models_side_by_side_need_a_family(tmp_path):
    write_images(tmp_path)
    for family in ("z-image", "qwen-image"):
        write_ai_toolkit(tmp_path, family)
    with pytest.raises(ConfigError, match=r"of z-image, qwen-image, and a manifest holds one family: give --family"):
        ai_toolkit.read(tmp_path)
    found, texts, refusals = split(ai_toolkit.read(tmp_path, family="qwen-image"))
    assert len(found) == len(texts) == 2
    assert sorted(refusal.reason for refusal in refusals) == ["missing"] * 2 + ["unsupported-format"] * 2
    assert "of 'zimage', version 1; not of qwen-image" in " ".join(refusal.detail for refusal in refusals)


def test_simpletuners_texts_of_another_model_are_refused_by_its_name(tmp_path):
    images = tmp_path / "images"
    written("simpletuner", images, "z-image")
    for path in list((tmp_path / "made/text").iterdir()):
        (path.parent / path.name.replace("z_image", "wan")).write_bytes(path.read_bytes())
    folders = {"images": images, "text_cache": tmp_path / "made/text"}
    with pytest.raises(ConfigError, match="give --family"):
        simpletuner.read(tmp_path / "made/vae", **folders)
    found, texts, refusals = split(simpletuner.read(tmp_path / "made/vae", **folders, family="z-image"))
    assert len(found) == len(texts) == 2
    assert {refusal.detail for refusal in refusals} == {"it is a text of wan, not of z_image (z-image)"}


@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize(
    ("family", "shape", "words"),
    [
        ("flux", (4, 8, 12), "4 channels, and those of flux have 16: name its family"),
        ("wan", (16, 3, 8, 12), "3 latent frames: images alone are imported"),
        ("wan", (48, 1, 8, 12), "48 channels"),
        ("qwen-image", (16, 1, 8, 12), "it must be float32, float16 or bfloat16 with 3 dimensions"),
    ],
)
def test_latents_of_another_form_are_refused(tmp_path, trainer, family, shape, words):
    foreign = written(trainer, tmp_path / "images", family)
    if trainer == "ai-toolkit":
        write_ai_toolkit_latent(tmp_path / "images", "cat", CASES[family].space, torch.ones(shape))
    else:
        name = simpletuner.latent_name("cat.png")
        torch.save(torch.ones(shape), tmp_path / "made/vae" / name)
    found, _, refusals = split(foreign)
    assert [image.sample_id for image in found] == ["dog.png"]
    assert words in refusals[0].detail


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention_masks": torch.ones(1, 3)}, "its mask is [1, 3], for 8 rows"),
        ({"attention_masks": [1, 1]}, "its mask is list, for 8 rows"),
        ({"prompt_embeds": torch.ones(2, 8, WIDTH)}, "it holds 2 captions"),
        ({"prompt_embeds": torch.ones(8, WIDTH)}, "with 3 dimensions"),
    ],
)
def test_simpletuners_texts_of_another_form_are_refused(tmp_path, changes, words):
    foreign = written("simpletuner", tmp_path / "images", "qwen-image")
    path = tmp_path / "made/text" / simpletuner.text_name(CAPTIONS["cat"], "qwen_image")
    torch.save(simpletuner_text("qwen-image", 0) | changes, path)
    _, texts, (refusal,) = split(foreign)
    assert len(texts) == 1 and words in refusal.detail


@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_text_without_any_row_is_refused(tmp_path, trainer):
    """A mask of zeros, and zeros alone: an entry without rows would be the text of nothing."""
    family = {"ai-toolkit": "wan", "simpletuner": "qwen-image"}[trainer]
    foreign = written(trainer, tmp_path / "images", family)
    if trainer == "ai-toolkit":
        tensors = {"text_embed": torch.zeros(1, 512, WIDTH)}
        write_ai_toolkit_text(tmp_path / "images", "cat", CAPTIONS["cat"], CASES[family].space, tensors)
    else:
        path = tmp_path / "made/text" / simpletuner.text_name(CAPTIONS["cat"], "qwen_image")
        made = simpletuner_text(family, 0)
        torch.save(made | {"attention_masks": made["attention_masks"] * 0}, path)
    _, report = imported(foreign)
    assert report.num_texts == 1 and [refusal.reason for refusal in report.refused] == ["corrupt"]


def test_ai_toolkits_krea2_needs_a_multiple_of_its_layers(tmp_path):
    foreign = written("ai-toolkit", tmp_path, "krea2")
    tensors = {"text_embeds": torch.ones(7, 12 * WIDTH + 1)}
    write_ai_toolkit_text(tmp_path, "cat", CAPTIONS["cat"], "krea2", tensors)
    _, texts, (refusal,) = split(foreign)
    assert len(texts) == 1 and "97 features, which are not of 12 layers" in refusal.detail


def test_a_family_that_is_not_known_there_is_named(tmp_path):
    write_images(tmp_path)
    with pytest.raises(ConfigError, match="how ai-toolkit lays out files of the family flux2 is not known"):
        ai_toolkit.read(tmp_path, family="flux2")
