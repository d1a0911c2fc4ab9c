"""SimpleTuner's caches of other families than SDXL: what is read, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.foreign_files import split
from helpers.foreign_samples import imported
from helpers.simpletuner_files import (
    CAPTIONS,
    CASES,
    HAS_POOLED,
    WIDTH,
    latents_of,
    own_rows,
    pooled_of,
    simpletuner_text,
    write_images,
    write_simpletuner,
)

from latentcache.errors import ConfigError
from latentcache.families import family_named
from latentcache.interop.formats import simpletuner
from latentcache.interop.formats.simpletuner import SimpleTunerCache
from latentcache.interop.scaling import published_scaling
from latentcache.types import Size

ZERO_PADDED = torch.cat([torch.ones(1, 9, WIDTH), torch.zeros(1, 503, WIDTH)], dim=1)
"""As SimpleTuner's `t5_padding: zero` makes it: not what diffusers' FLUX.1 attends to."""


def written(folder: Path, family: str) -> SimpleTunerCache:
    """SimpleTuner's cache of two photos, as a reader."""
    write_images(folder / "images")
    write_simpletuner(folder / "made", family)
    return SimpleTunerCache(folder / "made/vae", images=folder / "images", text_cache=folder / "made/text")


@pytest.mark.parametrize("family", sorted(CASES))
def test_a_cache_is_imported_unscaled_with_the_rows_that_are_stored_here(tmp_path: Path, family: str) -> None:
    foreign = written(tmp_path, family)
    assert foreign.family == family
    cache, report = imported(foreign)
    manifest, declared = cache.manifest("foreign"), family_named(family)
    assert manifest.common["family"] == family and cache.scaling(manifest) == published_scaling(family)
    assert (report.num_images, report.num_samples, report.refused) == (2, 2, [])
    for seed, (stem, caption) in enumerate(sorted(CAPTIONS.items())):
        row = manifest.rows[f"{stem}.png"]
        (ref,) = row.images
        latents, expected = cache.get(ref.key).tensors["latents"], latents_of(family, seed)
        assert ref.geometry.target_size == Size(64, 96)
        frames = [1] if declared.latent.is_video else []
        assert latents.shape == (CASES[family].channels, *frames, 8, 12)
        assert torch.equal(cache.scaling(manifest).apply(latents).bfloat16().reshape(expected.shape), expected)
        output = cache.get(ref.key).record.identity["imported"]["output"]
        assert output == ("mean" if family == "wan" else "sample")
        (text,) = row.captions
        entry = cache.get(text.key)
        fields = {"prompt_embeds": own_rows(family, seed)}
        fields |= {"pooled_prompt_embeds": pooled_of(seed)} if family in HAS_POOLED else {}
        assert text.text == caption and entry.tensors.keys() == fields.keys()
        assert all(torch.equal(entry.tensors[name], value) for name, value in fields.items())
        assert entry.ragged == (frozenset() if family in ("sd15", "flux") else {"prompt_embeds"})


def test_texts_of_another_model_are_refused_by_its_name(tmp_path: Path) -> None:
    written(tmp_path, "z-image")
    for path in list((tmp_path / "made/text").iterdir()):
        (path.parent / path.name.replace("z_image", "wan")).write_bytes(path.read_bytes())
    folders: dict[str, Any] = {"images": tmp_path / "images", "text_cache": tmp_path / "made/text"}
    with pytest.raises(ConfigError, match="of z-image, wan, and a manifest holds one family: give --family"):
        SimpleTunerCache(tmp_path / "made/vae", **folders)
    found, texts, refusals = split(SimpleTunerCache(tmp_path / "made/vae", **folders, family="z-image"))
    assert len(found) == len(texts) == 2
    assert {refusal.detail for refusal in refusals} == {"it is a text of wan, not of z_image (z-image)"}
    with pytest.raises(ConfigError, match="how simpletuner lays out files of the family flux2 is not known"):
        SimpleTunerCache(tmp_path / "made/vae", **folders, family="flux2")


@pytest.mark.parametrize(
    ("family", "shape", "words"),
    [
        ("flux", (4, 8, 12), "4 channels, and those of flux have 16: name its family"),
        ("wan", (16, 3, 8, 12), "3 latent frames: images alone are imported"),
        ("wan", (48, 1, 8, 12), "48 channels"),
        ("qwen-image", (16, 1, 8, 12), "it must be float32, float16 or bfloat16 with 3 dimensions"),
    ],
)
def test_latents_of_another_form_are_refused(tmp_path: Path, family: str, shape: tuple[int, ...], words: str) -> None:
    foreign = written(tmp_path, family)
    torch.save(torch.ones(shape), tmp_path / "made/vae" / simpletuner.latent_name("cat.png"))
    found, _, refusals = split(foreign)
    assert [image.sample_id for image in found] == ["dog.png"] and words in refusals[0].detail


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("qwen-image", {"attention_masks": torch.ones(1, 3)}, "its mask is [1, 3], for 8 rows"),
        ("qwen-image", {"attention_masks": [1, 1]}, "its mask is list, for 8 rows"),
        ("qwen-image", {"prompt_embeds": torch.ones(2, 8, WIDTH)}, "it holds 2 captions"),
        ("qwen-image", {"prompt_embeds": torch.ones(8, WIDTH)}, "with 3 dimensions"),
        ("flux", {"prompt_embeds": ZERO_PADDED}, "its padding is zeros"),
        ("qwen-image", {"attention_masks": torch.zeros(1, 8)}, "prompt_embeds is torch.bfloat16 [0, 8]"),
    ],
    ids=["mask", "list", "two", "dimensions", "zeros-for-padding", "no-row"],
)
def test_texts_of_another_form_or_recipe_are_refused(
    tmp_path: Path, family: str, changes: dict[str, Any], words: str
) -> None:
    foreign = written(tmp_path, family)
    path = tmp_path / "made/text" / simpletuner.text_name(CAPTIONS["cat"], CASES[family].model)
    torch.save(simpletuner_text(family, 0) | changes, path)
    _, report = imported(foreign)
    assert report.num_texts == 1 and words in report.refused[0].detail
