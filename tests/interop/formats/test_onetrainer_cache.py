"""OneTrainer's own cache: files as mgds' DiskCache writes them, written here with torch.save alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.encoding import encode_captions
from helpers.foreign_files import Bomb, damaged, items_quietly, latents_of, reasons, saved, split, write
from helpers.photo_files import write_photo
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from latentcache.config import ImagesConfig
from latentcache.dataset.buckets import fit
from latentcache.dataset.images import decode, prepare
from latentcache.errors import DatasetError
from latentcache.interop.formats import onetrainer as onetrainer_cache
from latentcache.interop.formats.onetrainer import NOTE_AUGMENTED, NOTE_LAYER, NOTE_MASK
from latentcache.interop.importing import import_cache
from latentcache.interop.readers import ForeignImage, ForeignText
from latentcache.loading.cache import LatentCache
from latentcache.models.vae import encode_images
from latentcache.precache.encodings import load_models
from latentcache.precache.workspace import Workspace
from latentcache.types import Crop, Geometry, Refusal, Size

IMAGE_GROUP, TEXT_GROUP = "0a" * 32, "1b" * 32
LATENTS = [latents_of(1, 96, 64, torch.bfloat16), latents_of(2, 64, 96, torch.bfloat16)]
SIZES = {"a.png": (120, 64), "sub/b.png": (96, 130)}
CAPTIONS = {"a.png": "a red car", "sub/b.png": "ein Bär"}


def tokens_of(caption: str) -> list[int]:
    """77 tokens, other ones for each caption, as a tokenizer gives them: begin, text, end, and padding with the end."""
    text = [ord(letter) for letter in caption.lower()[:75]]
    return [49406, *text, *[49407] * (76 - len(text))]


def image_item(latents: Any, original: Any, crop: Any, **changes: Any) -> dict[str, Any]:
    return {"latent_image": latents, "original_resolution": original, "crop_offset": crop} | changes


def text_item(caption: str, seed: int, **changes: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "tokens_1": torch.tensor(tokens_of(caption)),
        "text_encoder_1_hidden_state": torch.randn(77, 768, generator=generator),
        "tokens_2": torch.tensor(tokens_of(caption)),
        "text_encoder_2_hidden_state": torch.randn(77, 1280, generator=generator),
        "text_encoder_2_pooled_state": torch.randn(1280, generator=generator),
    } | changes


def write_group(root: Path, kind: str, items: list[Any], aggregate: list[Any], variation: int = 0) -> Path:
    folder = root / kind / (IMAGE_GROUP if kind == "image" else TEXT_GROUP) / f"variation-{variation}"
    for number, item in enumerate(items):
        write(folder / f"{number}.pt", saved(item))
    write(folder / "aggregate.pt", saved(aggregate))
    return folder


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    for number, (name, size) in enumerate(SIZES.items()):
        photo = write_photo(folder / name, number, size)
        photo.with_suffix(".txt").write_text(CAPTIONS[name], encoding="utf-8")
    return folder


@pytest.fixture
def aggregate(images: Path) -> list[dict[str, Any]]:
    return [
        {"crop_resolution": (96, 64), "image_path": str(images / "a.png")},
        {"crop_resolution": (64, 96), "image_path": str(images / "sub/b.png")},
    ]


@pytest.fixture
def root(tmp_path: Path, aggregate: list[dict[str, Any]]) -> Path:
    """A cache_dir: 120 x 64 cropped from the top, 96 x 130 scaled to 71 x 96 and cropped in the middle; two texts."""
    root = tmp_path / "workspace-cache"
    write_group(
        root, "image", [image_item(LATENTS[0], (120, 64), (0, 0)), image_item(LATENTS[1], (96, 130), (3, 0))], aggregate
    )
    write_group(root, "text", [text_item("a red car", 1), text_item("ein Bär", 2)], [{}, {}])
    return root


def test_images_are_unscaled_means_with_their_crop(images, root):
    found, _, refusals = split(onetrainer_cache.read(root, images=images, tokenize=tokens_of))
    assert refusals == []
    assert [image.sample_id for image in found] == ["a.png", "sub/b.png"]
    for image, latents in zip(found, LATENTS, strict=True):
        assert torch.equal(image.latents, latents) and image.latents.dtype == torch.bfloat16
        assert (image.is_scaled, image.output, image.note) == (False, "mean", NOTE_AUGMENTED)
        assert image.image_path == images / image.sample_id
    assert [image.geometry for image in found] == [
        Geometry(Size(120, 64), Size(120, 64), Crop(0, 0), Size(96, 64)),
        Geometry(Size(96, 130), Size(71, 96), Crop(3, 0), Size(64, 96)),
    ]


def test_texts_are_found_by_their_tokens_wherever_they_lie(images, root):
    """Files came and went since: the positions of the texts are others, and it does not matter."""
    texts = [text_item("ein Bär", 2), text_item("gone", 3), text_item("a red car", 1), text_item("A RED CAR", 1)]
    folder = write_group(root, "text", texts, [{}] * 4)
    _, found, (refusal,) = split(onetrainer_cache.read(root, images=images, tokenize=tokens_of))
    assert [(text.caption, text.sample_ids) for text in found] == [
        ("ein Bär", ("sub/b.png",)),
        ("a red car", ("a.png",)),
    ]
    for text, item in zip(found, (texts[0], texts[2]), strict=True):
        hidden = torch.cat([item["text_encoder_1_hidden_state"], item["text_encoder_2_hidden_state"]], dim=1)
        assert text.prompt_embeds.shape == (77, 2048) and torch.equal(text.prompt_embeds, hidden)
        assert torch.equal(text.pooled_prompt_embeds, item["text_encoder_2_pooled_state"])
        assert text.note == NOTE_LAYER
    assert (refusal.path, refusal.reason) == (str(folder / "1.pt"), "missing")


def test_captions_with_the_same_tokens_share_a_text(images, root):
    write_photo(images / "c.png", 3).with_suffix(".txt").write_text("A red CAR")
    found = split(onetrainer_cache.read(root, images=images, tokenize=tokens_of))[1]
    assert {text.caption: text.sample_ids for text in found} == {
        "a red car": ("a.png",),
        "A red CAR": ("c.png",),
        "ein Bär": ("sub/b.png",),
    }


def test_without_a_tokenizer_texts_are_refused_and_not_taken_by_position(images, root):
    found, texts, (refusal,) = split(onetrainer_cache.read(root, images=images))
    assert len(found) == 2 and texts == []
    assert refusal.reason == "missing" and "--config" in refusal.detail


def test_one_variation_is_chosen_and_the_others_are_listed(images, root, aggregate):
    other = latents_of(7, 96, 64)
    write_group(root, "image", [image_item(other, (120, 64), (24, 0))], aggregate[:1], variation=1)
    found, _, refusals = split(onetrainer_cache.read(root, images=images, tokenize=tokens_of))
    assert len(found) == 2 and reasons(refusals) == ["duplicate"]
    (found,), _, refusals = split(onetrainer_cache.read(root, images=images, variation=1, tokenize=tokens_of))
    assert torch.equal(found.latents, other) and found.geometry.crop_top_left == (24, 0)


def test_images_that_were_moved_are_found_below_the_recorded_root(images, root, tmp_path):
    moved = images.rename(tmp_path / "moved")
    found = split(onetrainer_cache.read(root, images=moved, recorded_root=str(images)))[0]
    assert [image.image_path for image in found] == [moved / "a.png", moved / "sub/b.png"]
    found = split(onetrainer_cache.read(root, images=moved))[0]
    assert [(image.sample_id, image.image_path) for image in found] == [
        (f"{images}/a.png".lstrip("/"), None),
        (f"{images}/sub/b.png".lstrip("/"), None),
    ]
    assert found[0].geometry.original_size == (120, 64)  # the cache says so


def test_paths_of_windows_are_understood(images, root, aggregate):
    aggregate[0]["image_path"] = "D:\\data\\set\\a.png"
    aggregate[1]["image_path"] = "D:\\data\\set\\sub\\b.png"
    write_group(root, "image", [], aggregate)
    found = split(onetrainer_cache.read(root, images=images, recorded_root="D:\\data\\set"))[0]
    assert [image.sample_id for image in found] == ["a.png", "sub/b.png"]


def test_an_image_that_was_replaced_by_one_of_another_size_is_refused(images, root):
    write_photo(images / "a.png", 5, (121, 64))
    found, _, refusals = split(onetrainer_cache.read(root, images=images, tokenize=tokens_of))
    assert [image.sample_id for image in found] == ["sub/b.png"] and reasons(refusals) == ["changed"]


def test_a_mask_is_left_out_and_noted(images, root, aggregate):
    write_group(root, "image", [image_item(LATENTS[0], (120, 64), (0, 0), latent_mask=torch.ones(1, 12, 8))], aggregate)
    assert split(onetrainer_cache.read(root, images=images))[0][0].note == f"{NOTE_AUGMENTED}; {NOTE_MASK}"


@pytest.mark.parametrize(
    ("item", "words"),
    [
        (LATENTS[0], "no dict"),
        (image_item(LATENTS[0][None], (120, 64), (0, 0)), "3 dimensions"),
        ({"latent_image": LATENTS[0]}, "original_resolution is None"),
        (image_item(LATENTS[0], (1, 120, 64), (0, 0)), "original_resolution"),
        (image_item(LATENTS[0], (120.0, 64), (0, 0)), "original_resolution"),
        (image_item(LATENTS[0], (0, 64), (0, 0)), "original_resolution"),
        (image_item(LATENTS[0], (120, 64), (-1, 0)), "crop_offset"),
        (image_item(LATENTS[0], (120, 64), (25, 0)), "leaves the image"),
        (image_item(LATENTS[0], (True, 64), (0, 0)), "original_resolution"),
    ],
    ids=["tensor", "batch", "no-sizes", "three", "float", "zero", "negative", "crop-outside", "bool"],
)
def test_an_item_of_another_form_is_refused(images, root, aggregate, item, words):
    write_group(root, "image", [item], aggregate)
    found, _, (refusal,) = split(onetrainer_cache.read(root, images=images, tokenize=tokens_of))
    assert [image.sample_id for image in found] == ["sub/b.png"]
    assert words in refusal.detail


@pytest.mark.parametrize(
    "line",
    [None, {}, {"image_path": 5, "crop_resolution": (96, 64)}, {"image_path": "/a.png", "crop_resolution": "96x64"}],
    ids=["nothing", "empty", "number", "string"],
)
def test_a_line_of_another_form_is_refused(images, root, aggregate, line):
    write_group(root, "image", [], [line, aggregate[1]])
    found, _, refusals = split(onetrainer_cache.read(root, images=images, tokenize=tokens_of))
    assert [image.sample_id for image in found] == ["sub/b.png"] and reasons(refusals) == ["corrupt"]


def test_a_variation_that_was_not_finished_is_refused_as_a_whole(images, root):
    (root / "image" / IMAGE_GROUP / "variation-0/aggregate.pt").unlink()
    write(root / "text" / TEXT_GROUP / "variation-0/aggregate.pt", saved({"no": "list"}))
    found, texts, refusals = split(onetrainer_cache.read(root, images=images, tokenize=tokens_of))
    assert found == [] and texts == [] and reasons(refusals) == ["missing", "corrupt"]


def test_a_missing_file_is_listed(images, root):
    for kind, group in (("image", IMAGE_GROUP), ("text", TEXT_GROUP)):
        (root / kind / group / "variation-0/0.pt").unlink()
    found, texts, refusals = split(onetrainer_cache.read(root, images=images, tokenize=tokens_of))
    assert (len(found), len(texts)) == (1, 1) and reasons(refusals) == ["missing", "missing"]
    assert refusals[0].sample_id == str(images / "a.png")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"text_encoder_2_hidden_state": None, "text_encoder_2_pooled_state": None}, "encoder that is trained"),
        ({"tokens_1": torch.zeros(77)}, "tokens_1"),
        ({"tokens_1": torch.zeros(1, dtype=torch.int64).expand(1 << 40)}, "more values than the file"),
        ({"tokens_1": torch.zeros(0, dtype=torch.int64)}, "tokens_1"),
        ({"text_encoder_1_hidden_state": torch.zeros(1, 77, 768)}, "2 dimensions"),
        ({"text_encoder_1_hidden_state": torch.zeros(152, 768)}, "152 and 77 tokens"),
        ({"text_encoder_2_pooled_state": "text"}, "is a str"),
    ],
    ids=["trained", "float-tokens", "endless-tokens", "no-tokens", "batch", "lengths", "string"],
)
def test_a_text_of_another_form_is_refused(images, root, changes, words):
    write_group(root, "text", [text_item("a red car", 1, **changes)], [{}])
    _, texts, (refusal,) = split(onetrainer_cache.read(root, images=images, tokenize=tokens_of))
    assert texts == [] and words in refusal.detail


def test_nothing_in_a_file_is_run(images, root, tmp_path):
    bomb = Bomb(tmp_path / "made")
    write_group(root, "image", [bomb], [bomb])
    write_group(root, "text", [bomb], [{}])
    assert reasons(split(onetrainer_cache.read(root, images=images, tokenize=tokens_of))[2]) == ["corrupt", "corrupt"]
    assert not (tmp_path / "made").exists()


def test_a_folder_that_is_no_cache_says_so(tmp_path, root):
    with pytest.raises(DatasetError, match="neither a folder `image` nor `text`"):
        onetrainer_cache.read(tmp_path)
    shutil.rmtree(root / "image")
    assert split(onetrainer_cache.read(root))[0] == []


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_are_refused_or_read_as_they_were(images, root, aggregate, data):
    whole = {
        "image": (saved(image_item(LATENTS[0], (120, 64), (0, 0))), "0.pt"),
        "aggregate": (saved(aggregate), "aggregate.pt"),
        "text": (saved(text_item("a red car", 1)), "0.pt"),
    }
    kind = data.draw(st.sampled_from(sorted(whole)))
    content, name = whole[kind]
    group = f"text/{TEXT_GROUP}" if kind == "text" else f"image/{IMAGE_GROUP}"
    path = root / group / "variation-0" / name
    write(path, data.draw(damaged(content)))
    try:
        items = items_quietly(onetrainer_cache.read(root, images=images, tokenize=tokens_of))
    finally:
        write(path, content)
    assert len(items) == 4 or (kind == "aggregate" and len(items) == 3)
    for item in items:
        match item:
            case ForeignImage():
                assert torch.equal(item.latents, LATENTS[item.sample_id != "a.png"])
            case ForeignText():
                assert item.prompt_embeds.shape == (77, 2048)
            case Refusal():
                assert item.path == str(path)


def test_the_command_line_imports_with_the_tokenizer_of_the_config(run_json, make_config, photos, tmp_path):
    """The tokens are those of the tiny model's tokenizer, and a verified entry is what encoding gives."""
    config_file = tmp_path / "config.yaml"
    config_file.write_text(
        f"""
cache: {{path: {tmp_path / "cache"}}}
datasets:
  - name: photos
    source: {{kind: folder, path: {photos}}}
    images: {{min_side: 8}}
    buckets: {{area: 9216, step: 32}}
model: {{path: tiny}}
encode: {{device: cpu, image_output: mean}}
"""
    )
    models = load_models(make_config().model, {})
    tokenize, parts = onetrainer_cache.tokenize_with(models.tokenizers()["tokenizer"]), models.text(torch.float32)
    items = []
    for caption in ("a blue car", "a tree"):
        encoded = encode_captions(parts, [caption])
        embeds, width = encoded["prompt_embeds"][0], parts["text_encoder"].config.hidden_size
        items.append(
            {
                "tokens_1": torch.tensor(tokenize(caption)),
                "text_encoder_1_hidden_state": embeds[:, :width].clone(),
                "tokens_2": torch.tensor(tokenize(caption)),
                "text_encoder_2_hidden_state": embeds[:, width:].clone(),
                "text_encoder_2_pooled_state": encoded["pooled_prompt_embeds"][0].clone(),
            }
        )
    root = tmp_path / "workspace-cache"
    write_group(root, "text", items, [{}] * 2)
    photo = decode((photos / "b.png").read_bytes(), "b.png", ImagesConfig(min_side=8))
    geometry = fit(Size(80, 144), Size(64, 128))
    pixels = torch.from_numpy(prepare(photo, geometry))[None]
    moments = encode_images(models.vae(torch.float32), pixels)
    content = image_item(moments[0, :4].clone(), (80, 144), tuple(geometry.crop_top_left))
    line = {"crop_resolution": tuple(geometry.target_size), "image_path": str(photos / "b.png")}
    write_group(root, "image", [content], [line])
    code, report = run_json(
        "import", root, "--from", "onetrainer", "--images", photos, "--config", config_file, "--verify", "all",
        "--no-scale-check",
    )  # fmt: skip
    assert report["refused"] == [] and report["unequal"] == []
    # b.png is complete; c.png shares its caption, and sub/e.png has one: both lack the image.
    assert (code, report["num_samples"], report["num_incomplete"], report["num_verified"]) == (1, 1, 2, 4)


def test_a_batch_of_the_import_holds_what_the_files_hold(images, root):
    workspace = Workspace()
    foreign = onetrainer_cache.read(root, images=images, tokenize=tokens_of)
    report = import_cache(foreign, workspace, name="onetrainer", scale_check=False)
    assert (report.num_samples, report.refused, report.incomplete) == (2, [], [])
    cache = LatentCache(store=workspace.store, manifests=workspace.manifests, unverified=True)
    batch = cache.batch(["a.png"], device="cpu")
    assert torch.equal(cache.get(cache.row("a.png")[1].images[0].key).tensors["latents"], LATENTS[0])
    assert batch["prompt_embeds"].shape == (1, 77, 2048)


def test_latents_that_were_scaled_after_all_are_refused_with_both_numbers(images, root):
    """Unscaled latents of SDXL deviate by 7.7; those of the fixture by 1."""
    with pytest.raises(DatasetError, match=r"7\.7"):
        import_cache(onetrainer_cache.read(root, images=images), Workspace(), name="onetrainer")
