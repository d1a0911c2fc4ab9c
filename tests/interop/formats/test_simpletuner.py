"""SimpleTuner's caches: files as the format's description says, written here without this project's exporter."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.foreign_files import embeds_of, latents_of, saved, split, write
from helpers.foreign_samples import imported
from helpers.photo_files import write_photo

from latentcache.errors import ConfigError
from latentcache.families import family_named
from latentcache.interop.formats import simpletuner
from latentcache.interop.formats.simpletuner import NOTE_ORDER, SimpleTunerCache
from latentcache.interop.importing import published_scaling
from latentcache.types import Crop, Geometry, Size

# By `printf %s img_001 | sha256sum` and `printf %s "a red car" | md5sum`.
FIRST = "2b05a7816660a96479b5d8fcb640093e053bc4db36bfa70cd3fc3b46f4ebb9e0.pt"
SECOND = "bc14585be662cc7fa631b1aea2a50ed1b9f00895e19c47e6ca7f25ed1ef549b1.pt"
CAR = "cdf3d2f001ecf09dac1f88186986323e-sdxl.pt"
BEAR = "5058f419e63e00abf48e8d28c1bbb74a-sdxl.pt"
EMPTY = "d41d8cd98f00b204e9800998ecf8427e-sdxl.pt"

LATENTS = latents_of(1, 96, 64, torch.bfloat16)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """img_001.png, 120 x 64 pixels, "a red car"; sub/img_002.png, 96 x 128, "ein Bär"."""
    folder = tmp_path / "images"
    write_photo(folder / "img_001.png", 0, (120, 64)).with_suffix(".txt").write_text("a red car\n")
    write_photo(folder / "sub/img_002.png", 1, (96, 128)).with_suffix(".txt").write_text("ein Bär", encoding="utf-8")
    return folder


@pytest.fixture
def vae(tmp_path: Path) -> Path:
    """A VAE cache with a latent for each, of 96 x 64 and 64 x 96 pixels."""
    write(tmp_path / "vae" / FIRST, saved(LATENTS))
    write(tmp_path / "vae/sub" / SECOND, saved(latents_of(2, 64, 96, torch.bfloat16)))
    return tmp_path / "vae"


def record(original, resized, target, crop):
    names = ("original_size", "intermediary_size", "target_size", "crop_coordinates")
    return dict(zip(names, map(list, (original, resized, target, crop)), strict=True)) | {"aspect_bucket": 0.67}


def write_metadata(folder: Path, records: dict[str, object], name: str = "mine") -> Path:
    return write(folder / f"aspect_ratio_bucket_metadata_{name}.json", json.dumps(records).encode())


@pytest.mark.parametrize("wrap", [lambda data: data, gzip.compress], ids=["plain", "gzip"])
def test_files_are_found_by_hashes_in_both_wrappings_and_payloads(images, vae, tmp_path, wrap):
    """Of an image's stem below the same sub folder, and of a caption; a text is a dict or a tuple."""
    write(vae / FIRST, wrap(saved(LATENTS)))
    (car, car_pooled), (bear, bear_pooled), (empty, empty_pooled) = (embeds_of(seed) for seed in range(3))
    texts = tmp_path / "text"
    write(texts / CAR, wrap(saved({"prompt_embeds": car[None], "pooled_prompt_embeds": car_pooled})))
    write(texts / BEAR, wrap(saved((bear[None], bear_pooled[None]))))
    write(texts / EMPTY, saved((empty[None], empty_pooled[None])))
    found, found_texts, refusals = split(SimpleTunerCache(vae, images=images, text_cache=texts))
    assert refusals == []
    assert [image.sample_id for image in found] == ["img_001.png", "sub/img_002.png"]
    first = found[0]
    assert torch.equal(first.latents, LATENTS) and first.latents.dtype == torch.bfloat16
    assert (first.is_scaled, first.output) == (True, "sample")
    assert (first.path, first.image_path) == (str(vae / FIRST), images / "img_001.png")
    by_caption = {text.caption: text for text in found_texts}
    assert by_caption.keys() == {"", "a red car", "ein Bär"} and by_caption[""].sample_ids == ()
    for caption, sample_id, embeds, pooled in [
        ("a red car", "img_001.png", car, car_pooled),
        ("ein Bär", "sub/img_002.png", bear, bear_pooled),
    ]:
        assert by_caption[caption].sample_ids == (sample_id,)
        assert torch.equal(by_caption[caption].prompt_embeds, embeds)
        assert torch.equal(by_caption[caption].pooled_prompt_embeds, pooled)


@pytest.mark.parametrize("keys", ["absolute", "relative", "moved", "windows"])
def test_metadata_give_the_crop(images, vae, keys):
    """Also where the images' folder was elsewhere when the cache was made."""
    root = {"absolute": f"{images}/", "relative": "", "moved": "/workspace/data/", "windows": "C:\\set\\"}[keys]
    write_metadata(
        images,
        {
            f"{root}img_001.png": record((64, 120), (64, 120), (64, 96), (20, 0)),
            f"{root}sub/img_002.png": record((128, 96), (96, 72), (96, 64), (3, 0)),
            f"{root}gone.png": record((8, 8), (8, 8), (8, 8), (0, 0)),
            f"{root}gone/img_001.png": record((64, 120), (64, 120), (64, 96), (0, 0)),
        },
    )
    found, _, refusals = split(SimpleTunerCache(vae, images=images))
    assert refusals == []
    assert [image.geometry for image in found] == [
        Geometry(Size(120, 64), Size(120, 64), Crop(20, 0), Size(96, 64)),
        Geometry(Size(96, 128), Size(72, 96), Crop(3, 0), Size(64, 96)),
    ]
    assert [image.note for image in found] == [None, None]


@pytest.mark.parametrize("order", [1, -1], ids=["left-top", "top-left"])
def test_the_order_of_a_crop_is_that_of_the_records_with_room_for_one(images, vae, order):
    """SimpleTuner writes it as (left, top) or as (top, left), by release and by the way it crops."""
    records = {
        # Room of 24 x 8: it fits both ways.
        "img_001.png": record((64, 120), (72, 120), (64, 96), (2, 4)[::order]),
        "sub/img_002.png": record((128, 96), (96, 72), (96, 64), (0, 3)[::order]),  # room in its height only
    }
    write_metadata(images, records)
    found, _, refusals = split(SimpleTunerCache(vae, images=images))
    assert refusals == []
    assert [tuple(image.geometry.crop_top_left) for image in found] == [(4, 2), (3, 0)]
    assert [image.note for image in found] == [None, None]
    for crop, note in (((2, 4)[::order], NOTE_ORDER), ((0, 0), None)):
        write_metadata(images, {"img_001.png": records["img_001.png"] | {"crop_coordinates": list(crop)}})
        first = split(SimpleTunerCache(vae, images=images))[0][0]
        assert first.geometry.crop_top_left == crop[::-1] and first.note == note


@pytest.mark.parametrize(
    ("changed", "reason", "words"),
    [
        (record((64, 121), (64, 120), (64, 96), (0, 0)), "changed", "the image is 120x64 now, but was 121x64"),
        (record((64, 120), (64, 120), (64, 64), (0, 0)), "corrupt", "does not fit a latent for 96x64"),
        (record((64, 120), (64, 120), (64, 96), (30, 0)), "corrupt", "does not fit"),
        (record((64, 120), (64, 120), (64, 96), (-1, 0)), "corrupt", "no sizes and crop in integers"),
        ([1, 2], "corrupt", "no sizes"),
    ],
    ids=["replaced", "other-bucket", "crop-outside", "negative", "list"],
)
def test_a_record_that_does_not_fit_is_refused(images, vae, changed, reason, words):
    write_metadata(images, {"img_001.png": changed})
    found, _, (refusal,) = split(SimpleTunerCache(vae, images=images))
    assert [image.sample_id for image in found] == ["sub/img_002.png"]
    assert (refusal.sample_id, refusal.reason) == ("img_001.png", reason)
    assert words in refusal.detail


# Other families than SDXL

WIDTH = 8
"""Of a row, in place of the thousands of the published models."""
CAPTIONS = {"cat": "a cat", "dog": "a dog that sits"}
MODELS = {
    "sd15": "sd1x",
    "flux": "flux",
    "chroma": "chroma",
    "z-image": "z_image",
    "qwen-image": "qwen_image",
    "krea2": "krea2",
    "wan": "wan",
}
"""Family -> SimpleTuner's word for its texts."""


def scaled_latents(family: str, seed: int) -> torch.Tensor:
    """For a bucket of 64 x 96 pixels: [C, h, w], of Wan with one frame."""
    shape = (4 if family == "sd15" else 16, *([1] if family == "wan" else []), 8, 12)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def own_rows(family: str, seed: int) -> torch.Tensor:
    """The embeddings of a text without padding, or with it where the family attends to it: [L, (layers,) D]."""
    num_rows = {"sd15": 77, "flux": 512}.get(family, 5 + seed)
    shape = (num_rows, *([12] if family == "krea2" else []), WIDTH)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 40)).bfloat16()


def pooled_of(seed: int) -> torch.Tensor:
    return torch.randn(6, generator=torch.Generator().manual_seed(seed + 80)).bfloat16()


def simpletuner_text(family: str, seed: int) -> dict[str, torch.Tensor]:
    """The payload of a text: masks leave other rows out than zeros."""
    rows = own_rows(family, seed)
    if family == "sd15":
        return {"prompt_embeds": rows[None]}
    if family == "flux":
        masks = (torch.arange(512) < 9).long()[None]
        return {
            "prompt_embeds": rows[None],
            "pooled_prompt_embeds": pooled_of(seed),
            "time_ids": torch.zeros(512, 3),
            "attention_masks": masks,
        }
    if family == "wan":  # its mask is no mask
        zeros = rows.new_zeros(512 - len(rows), WIDTH)
        return {"prompt_embeds": torch.cat([rows, zeros])[None], "attention_masks": torch.ones(1, 512, WIDTH)}
    # T5 and LLMs give numbers for padding too. Krea 2's lies before the last five rows.
    length = {"qwen-image": len(rows) + 3}.get(family, 512)
    generator = torch.Generator().manual_seed(seed)
    padding = torch.randn(length - len(rows), *rows.shape[1:], generator=generator).bfloat16()
    last = 5 if family == "krea2" else 0
    first = len(rows) - last
    mask = torch.cat([torch.ones(first), torch.zeros(len(padding)), torch.ones(last)])[None]
    dtype = {"qwen-image": torch.int64, "chroma": torch.bfloat16}.get(family, torch.bool)
    embeds = torch.cat([rows[:first], padding, rows[first:]])[None]
    return {"prompt_embeds": embeds, "attention_mask" if family == "z-image" else "attention_masks": mask.to(dtype)}


def write_simpletuner(folder: Path, family: str) -> None:
    """`folder`/images, a photo of 160 x 96 pixels for each caption, and its cache in `folder`/vae and `folder`/text."""
    for name in ("vae", "text"):
        (folder / name).mkdir()
    for seed, (stem, caption) in enumerate(CAPTIONS.items()):
        write_photo(folder / f"images/{stem}.png", seed, (96, 160)).with_suffix(".txt").write_text(caption)
        name = hashlib.sha256(stem.encode()).hexdigest()
        torch.save(scaled_latents(family, seed), folder / "vae" / f"{name}.pt")
        name = hashlib.md5(caption.encode()).hexdigest()
        torch.save(simpletuner_text(family, seed), folder / "text" / f"{name}-{MODELS[family]}.pt")


ZERO_PADDED = torch.cat([torch.ones(1, 9, WIDTH), torch.zeros(1, 503, WIDTH)], dim=1)
"""As SimpleTuner's `t5_padding: zero` makes it: not what diffusers' FLUX.1 attends to."""


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Any]:
    return {"root": tmp_path / "vae", "images": tmp_path / "images", "text_cache": tmp_path / "text"}


@pytest.mark.parametrize("family", sorted(MODELS))
def test_a_cache_is_imported_unscaled_with_the_rows_that_are_stored_here(
    tmp_path: Path, folders: dict[str, Any], family: str
) -> None:
    write_simpletuner(tmp_path, family)
    foreign = SimpleTunerCache(**folders)
    assert foreign.family == family
    cache, report = imported(foreign)
    manifest, declared = cache.manifest("foreign"), family_named(family)
    assert manifest.common["family"] == family and cache.scaling(manifest) == published_scaling(family)
    assert (report.num_images, report.num_samples, report.refused) == (2, 2, [])
    for seed, (stem, caption) in enumerate(sorted(CAPTIONS.items())):
        row = manifest.rows[f"{stem}.png"]
        (ref,) = row.images
        latents, expected = cache.get(ref.key).tensors["latents"], scaled_latents(family, seed)
        assert ref.geometry.target_size == Size(64, 96)
        frames = [1] if declared.latent.is_video else []
        assert latents.shape == (declared.latent.channels, *frames, 8, 12)
        assert torch.equal(cache.scaling(manifest).apply(latents).bfloat16().reshape(expected.shape), expected)
        output = cache.get(ref.key).record.identity["imported"]["output"]
        assert output == ("mean" if family == "wan" else "sample")
        (text,) = row.captions
        entry = cache.get(text.key)
        fields = {"prompt_embeds": own_rows(family, seed)}
        fields |= {"pooled_prompt_embeds": pooled_of(seed)} if family == "flux" else {}
        assert text.text == caption and entry.tensors.keys() == fields.keys()
        assert all(torch.equal(entry.tensors[name], value) for name, value in fields.items())
        assert entry.ragged == (frozenset() if family in ("sd15", "flux") else {"prompt_embeds"})


def test_texts_of_another_model_are_refused_by_its_name(tmp_path: Path, folders: dict[str, Any]) -> None:
    write_simpletuner(tmp_path, "z-image")
    for path in list((tmp_path / "text").iterdir()):
        (path.parent / path.name.replace("z_image", "wan")).write_bytes(path.read_bytes())
    with pytest.raises(ConfigError, match="of z-image, wan, and a manifest holds one family: give --family"):
        SimpleTunerCache(**folders)
    found, texts, refusals = split(SimpleTunerCache(**folders, family="z-image"))
    assert len(found) == len(texts) == 2 and refusals == []
    with pytest.raises(ConfigError, match="how simpletuner lays out files of the family flux2 is not known"):
        SimpleTunerCache(**folders, family="flux2")


@pytest.mark.parametrize(
    ("family", "changed", "words"),
    [
        ("flux", torch.ones(4, 8, 12), "4 channels, and those of flux have 16: name its family"),
        ("wan", torch.ones(16, 3, 8, 12), "3 latent frames: images alone are imported"),
        ("qwen-image", torch.ones(16, 1, 8, 12), "it must be float32, float16 or bfloat16 with 3 dimensions"),
        ("qwen-image", {"attention_masks": torch.ones(1, 3)}, "its mask is [1, 3], for 8 rows"),
        ("qwen-image", {"prompt_embeds": torch.ones(2, 8, WIDTH)}, "it holds 2 captions"),
        ("flux", {"prompt_embeds": ZERO_PADDED}, "its padding is zeros"),
        ("qwen-image", {"attention_masks": torch.zeros(1, 8)}, "prompt_embeds holds all-zero"),
    ],
    ids=["channels", "frames", "dimensions", "mask", "two", "zeros-for-padding", "no-row"],
)
def test_files_of_another_form_or_recipe_are_refused(
    tmp_path: Path, folders: dict[str, Any], family: str, changed: Any, words: str
) -> None:
    write_simpletuner(tmp_path, family)
    if isinstance(changed, dict):
        name = simpletuner.text_name(CAPTIONS["cat"], MODELS[family])
        torch.save(simpletuner_text(family, 0) | changed, tmp_path / "text" / name)
    else:
        torch.save(changed, tmp_path / "vae" / simpletuner.latent_name("cat.png"))
    _, report = imported(SimpleTunerCache(**folders))
    assert report.num_images + report.num_texts == 3 and words in report.refused[0].detail
