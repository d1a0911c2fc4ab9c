"""SimpleTuner's caches: files of the format's specification, written independently of this project."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.foreign_samples import imported, split
from helpers.photo_files import write_photo

from latentcache.families import family_named
from latentcache.interop.formats.simpletuner import NOTE_ORDER, SimpleTunerCache
from latentcache.interop.importing import published_scaling
from latentcache.types import Crop, Geometry, Size

# By `printf %s img_001 | sha256sum` and `printf %s "a red car" | md5sum`.
FIRST = "2b05a7816660a96479b5d8fcb640093e053bc4db36bfa70cd3fc3b46f4ebb9e0.pt"
SECOND = "sub/bc14585be662cc7fa631b1aea2a50ed1b9f00895e19c47e6ca7f25ed1ef549b1.pt"
CAR = "cdf3d2f001ecf09dac1f88186986323e"
BEAR = "5058f419e63e00abf48e8d28c1bbb74a"
EMPTY = "d41d8cd98f00b204e9800998ecf8427e"

CAPTIONS = {"img_001.png": "a red car", "sub/img_002.png": "ein Bär"}
WIDTH = 8
"""Width of the embeddings, instead of the thousands of the published models."""
FAMILIES = ("sdxl", "sd15", "flux", "chroma", "z-image", "qwen-image", "krea2", "wan")
MODELS = {family: "sd1x" if family == "sd15" else family.replace("-", "_") for family in FAMILIES}
"""Family -> SimpleTuner's name for it."""


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def scaled_latents(family: str, number: int) -> torch.Tensor:
    """Latents for a bucket of 96 x 64 pixels, or 64 x 96 for the second sample: [C, h, w], for Wan with one frame."""
    frames = [1] if family == "wan" else []
    return drawn(number, 4 if family in ("sdxl", "sd15") else 16, *frames, *(12, 8)[:: -1 if number else 1])


def own_rows(family: str, number: int) -> torch.Tensor:
    """The embeddings [L, (layers,) D] of a text, with padding only if the family attends to it."""
    num_rows = {"sdxl": 77, "sd15": 77, "flux": 512}.get(family, 5 + number)
    return drawn(number + 40, num_rows, *([12] if family == "krea2" else []), WIDTH)


def pooled_of(number: int) -> torch.Tensor:
    return drawn(number + 80, 6)


def text_of(family: str, number: int) -> dict[str, torch.Tensor]:
    """The content of a text file. Its masks leave out rows that are not zeros."""
    rows = own_rows(family, number)
    if family == "sd15":
        return {"prompt_embeds": rows[None]}
    if family == "sdxl":
        return {"prompt_embeds": rows[None], "pooled_prompt_embeds": pooled_of(number)}
    if family == "flux":
        others = {"time_ids": torch.zeros(512, 3), "attention_masks": (torch.arange(512) < 9).long()[None]}
        return {"prompt_embeds": rows[None], "pooled_prompt_embeds": pooled_of(number), **others}
    if family == "wan":  # its "mask" is not a mask
        zeros = rows.new_zeros(512 - len(rows), WIDTH)
        return {"prompt_embeds": torch.cat([rows, zeros])[None], "attention_masks": torch.ones(1, 512, WIDTH)}
    # T5 and LLMs encode padding too. Krea 2's is before the last five rows.
    length = {"qwen-image": len(rows) + 3}.get(family, 512)
    padding = drawn(number, length - len(rows), *rows.shape[1:])
    last = 5 if family == "krea2" else 0
    first = len(rows) - last
    mask = torch.cat([torch.ones(first), torch.zeros(len(padding)), torch.ones(last)])[None]
    dtype = {"qwen-image": torch.int64, "chroma": torch.bfloat16}.get(family, torch.bool)
    embeds = torch.cat([rows[:first], padding, rows[first:]])[None]
    return {"prompt_embeds": embeds, "attention_mask" if family == "z-image" else "attention_masks": mask.to(dtype)}


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """img_001.png, 120 x 64 pixels, and sub/img_002.png, 96 x 128, with captions; and folders for their cache."""
    for number, (name, size) in enumerate(zip(CAPTIONS, ((120, 64), (96, 128)), strict=True)):
        path = write_photo(tmp_path / "images" / name, number, size)
        path.with_suffix(".txt").write_text(f"{CAPTIONS[name]}\n", encoding="utf-8")
    for name in ("vae/sub", "text"):
        (tmp_path / name).mkdir(parents=True)
    return {"root": tmp_path / "vae", "images": tmp_path / "images", "text_cache": tmp_path / "text"}


def write_cache(folders: dict[str, Path], family: str) -> None:
    for number, (image, caption) in enumerate(((FIRST, CAR), (SECOND, BEAR))):
        latents = scaled_latents(family, number)
        torch.save(latents.float() if number else latents, folders["root"] / image)  # stored as float32 either way
        torch.save(text_of(family, number), folders["text_cache"] / f"{caption}-{MODELS[family]}.pt")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cache_is_imported_unscaled_with_the_rows_that_are_stored_here(folders: Any, family: str) -> None:
    """Files are found by hashes: of an image's stem in the same subfolder, and of a caption."""
    write_cache(folders, family)
    foreign = SimpleTunerCache(**folders)
    assert foreign.family == family
    cache, report = imported(foreign)
    manifest, declared = cache.manifest("foreign"), family_named(family)
    assert manifest.family is declared and cache.scaling(manifest) == published_scaling(family)
    assert (report.num_images, report.num_samples, report.refused) == (2, 2, [])
    for number, (sample_id, caption) in enumerate(CAPTIONS.items()):
        row = manifest.rows[sample_id]
        (ref,) = row.images
        latents, expected = cache.get(ref.key).tensors["latents"], scaled_latents(family, number)
        assert latents.dtype is torch.float32
        assert latents.shape == (len(expected), *([1] if declared.latent.is_video else []), *expected.shape[-2:])
        assert torch.equal(cache.scaling(manifest).apply(latents).bfloat16().reshape(expected.shape), expected)
        output = cache.get(ref.key).record.identity["imported"]["output"]
        assert output == ("mean" if family == "wan" else "sample")
        (text,) = row.captions
        entry = cache.get(text.key)
        fields = {"prompt_embeds": own_rows(family, number)}
        fields |= {"pooled_prompt_embeds": pooled_of(number)} if family in ("sdxl", "flux") else {}
        assert text.text == caption and entry.tensors.keys() == fields.keys()
        assert all(torch.equal(entry.tensors[name], value) for name, value in fields.items())
        assert entry.ragged == (frozenset() if family in ("sdxl", "sd15", "flux") else {"prompt_embeds"})


def test_files_may_be_gzips_and_texts_tuples(folders: Any) -> None:
    write_cache(folders, "sdxl")
    for name in (CAR, BEAR, EMPTY):
        torch.save((own_rows("sdxl", 2)[None], pooled_of(2)[None]), folders["text_cache"] / f"{name}-sdxl.pt")
    for path in (folders["root"] / FIRST, folders["text_cache"] / f"{CAR}-sdxl.pt"):
        path.write_bytes(gzip.compress(path.read_bytes()))
    found, texts, refusals = split(SimpleTunerCache(**folders))
    assert refusals == [] and [image.sample_id for image in found] == list(CAPTIONS)
    assert torch.equal(found[0].latents, scaled_latents("sdxl", 0))
    sample_ids = {text.caption: text.sample_ids for text in texts}
    assert sample_ids == {"": (), "a red car": ("img_001.png",), "ein Bär": ("sub/img_002.png",)}
    for text in texts:
        assert torch.equal(text.prompt_embeds, own_rows("sdxl", 2))
        assert torch.equal(text.pooled_prompt_embeds, pooled_of(2))


def record(original: Any, resized: Any, target: Any, crop: Any) -> dict[str, Any]:
    names = ("original_size", "intermediary_size", "target_size", "crop_coordinates")
    return dict(zip(names, map(list, (original, resized, target, crop)), strict=True)) | {"aspect_bucket": 0.67}


def with_metadata(folders: Any, records: dict[str, object]) -> SimpleTunerCache:
    """An SDXL cache with these records of the images' sizes."""
    write_cache(folders, "sdxl")
    (folders["images"] / "aspect_ratio_bucket_metadata_mine.json").write_text(json.dumps(records))
    return SimpleTunerCache(**folders)


@pytest.mark.parametrize("root", ["", "/workspace/data/", "C:\\set\\"])
def test_metadata_give_the_crop(folders: Any, root: str) -> None:
    """Also if the images' folder was elsewhere when the cache was made."""
    records = {
        f"{root}img_001.png": record((64, 120), (64, 120), (64, 96), (20, 0)),
        f"{root}sub/img_002.png": record((128, 96), (96, 72), (96, 64), (3, 0)),
        f"{root}gone.png": record((8, 8), (8, 8), (8, 8), (0, 0)),
        f"{root}gone/img_001.png": record((64, 120), (64, 120), (64, 96), (0, 0)),
    }
    found, _, refusals = split(with_metadata(folders, records))
    assert refusals == []
    assert [image.geometry for image in found] == [
        Geometry(Size(120, 64), Size(120, 64), Crop(20, 0), Size(96, 64)),
        Geometry(Size(96, 128), Size(72, 96), Crop(3, 0), Size(64, 96)),
    ]
    assert [image.note for image in found] == [None, None]


@pytest.mark.parametrize("order", [1, -1], ids=["left-top", "top-left"])
def test_the_order_of_a_crop_is_that_of_records_that_fit_in_one_order_only(folders: Any, order: int) -> None:
    """SimpleTuner writes it as (left, top) or as (top, left), depending on release and crop mode."""
    records = {
        "img_001.png": record((64, 120), (72, 120), (64, 96), (2, 4)[::order]),  # fits in both orders
        "sub/img_002.png": record((128, 96), (96, 72), (96, 64), (0, 3)[::order]),  # fits in one only
    }
    found, _, refusals = split(with_metadata(folders, records))
    assert refusals == []
    assert [tuple(image.geometry.crop_top_left) for image in found] == [(4, 2), (3, 0)]
    assert [image.note for image in found] == [None, None]
    for crop, note in (((2, 4)[::order], NOTE_ORDER), ((0, 0), None)):
        alone = {"img_001.png": records["img_001.png"] | {"crop_coordinates": list(crop)}}
        first = split(with_metadata(folders, alone))[0][0]
        assert first.geometry.crop_top_left == crop[::-1] and first.note == note


@pytest.mark.parametrize(
    ("changed", "reason", "words"),
    [
        (record((64, 121), (64, 120), (64, 96), (0, 0)), "changed", "the image is 120x64 now, but was 121x64"),
        (record((64, 120), (64, 120), (64, 64), (0, 0)), "corrupt", "does not fit a latent for 96x64"),
        (record((64, 120), (64, 120), (64, 96), (30, 0)), "corrupt", "does not fit"),
        (record((64, 120), (64, 120), (64, 96), (-1, 0)), "corrupt", "no integer sizes and crop"),
        ([1, 2], "corrupt", "no integer sizes"),
    ],
    ids=["replaced", "other-bucket", "crop-outside", "negative", "list"],
)
def test_a_record_that_does_not_fit_is_refused(folders: Any, changed: Any, reason: str, words: str) -> None:
    found, _, (refusal,) = split(with_metadata(folders, {"img_001.png": changed}))
    assert [image.sample_id for image in found] == ["sub/img_002.png"]
    assert (refusal.sample_id, refusal.reason) == ("img_001.png", reason)
    assert words in refusal.detail


ZERO_PADDED = torch.cat([torch.ones(1, 9, WIDTH), torch.zeros(1, 503, WIDTH)], dim=1)
"""Embeddings with SimpleTuner's `t5_padding: zero`, which are not diffusers'."""


@pytest.mark.parametrize(
    ("family", "changed", "words"),
    [
        ("flux", torch.ones(4, 8, 12), "4 channels, but those of flux have 16: give --family"),
        ("wan", torch.ones(16, 3, 8, 12), "3 latent frames: only still images"),
        ("qwen-image", torch.ones(16, 1, 8, 12), "it must be float32, float16 or bfloat16 with 3 dimensions"),
        ("qwen-image", {"attention_masks": torch.ones(1, 3)}, "its mask is [1, 3], for 8 rows"),
        ("qwen-image", {"prompt_embeds": torch.ones(2, 8, WIDTH)}, "it holds 2 captions"),
        ("flux", {"prompt_embeds": ZERO_PADDED}, "its padding is zeros"),
        ("qwen-image", {"attention_masks": torch.zeros(1, 8)}, "prompt_embeds holds all-zero"),
    ],
    ids=["channels", "frames", "dimensions", "mask", "two", "zeros-for-padding", "no-row"],
)
def test_files_of_another_form_or_recipe_are_refused(folders: Any, family: str, changed: Any, words: str) -> None:
    write_cache(folders, family)
    if isinstance(changed, dict):
        torch.save(text_of(family, 0) | changed, folders["text_cache"] / f"{CAR}-{MODELS[family]}.pt")
    else:
        torch.save(changed, folders["root"] / FIRST)
    _, report = imported(SimpleTunerCache(**folders))
    assert report.num_images + report.num_texts == 3 and words in report.refused[0].detail
