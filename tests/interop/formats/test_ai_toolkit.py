"""ai-toolkit's caches: files written here byte by byte, as the format's description says."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers.foreign_files import damaged, embeds_of, items_quietly, latents_of, reasons, split, write
from helpers.photo_files import write_photo
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from latentcache.interop.formats import ai_toolkit
from latentcache.interop.formats.ai_toolkit import NOTE_NO_IMAGE, NOTE_UNUSUAL
from latentcache.interop.importing import import_cache
from latentcache.interop.readers import ForeignImage, ForeignText
from latentcache.loading.cache import LatentCache
from latentcache.precache.run import run_precache
from latentcache.precache.workspace import Workspace
from latentcache.types import Crop, Geometry, Refusal, Size

FACTS = {
    "filename": "img_001.png",
    "scale_to_width": 64,
    "scale_to_height": 120,
    "crop_x": 0,
    "crop_y": 12,
    "crop_width": 64,
    "crop_height": 96,
    "latent_space_version": "sdxl",
    "latent_version": 1,
}
# By `printf %s '{"crop_height": 96, ...}' | openssl md5 -binary | base64 | tr +/ -_ | tr -d =`, keys sorted.
LATENT = "img_001_5ryQDsZO0swoJ8vYVwiTSA.safetensors"
FLIPPED = "img_001_RW6pbaCnqiQI_ilZnKubTA.safetensors"  # scaled to 150 x 80, crop (0, 6), flip_x
CAR = "img_001_b62CWgwt9zGAtHW2fNSz8w.safetensors"  # "a red car,  fast"
CAR_LINE = "img_001_3mz2nccG8va0dx2tPReQOA.safetensors"  # the same and a line end
CAR_TRIGGER = "img_001_KAqWAhfjARQvLieOzRi66w.safetensors"  # "ohwx a red car,  fast"
EMPTY = "A0SpndECLuHvH-6oCFpaVQ.safetensors"
BEAR = "img_001_IzcTV_wrtovOGbo7sHcspQ.safetensors"  # "ein Bär"

LATENTS = latents_of(1, 96, 64, torch.bfloat16)
EMBEDS, POOLED = embeds_of(1, torch.bfloat16)
CODES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.uint8: "U8"}


def safetensors_bytes(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """A safetensors file: the header's length, the header in JSON, the values."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    values = b""
    for name, tensor in tensors.items():
        data = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        offsets = [len(values), len(values) + len(data)]
        header[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        values += data
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + values


def latent_bytes(latents: torch.Tensor, facts: dict[str, object]) -> bytes:
    metadata = {name: value if isinstance(value, str) else json.dumps(value) for name, value in facts.items()}
    metadata |= {"software": '{"name": "ai-toolkit", "version": "0.7"}', "format": "pt"}
    return safetensors_bytes({"latent": latents}, metadata)


TEXT = safetensors_bytes({"text_embed": EMBEDS[None], "pooled_embed": POOLED[None]})


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """img_001.png, 120 x 64 pixels, "a red car, fast", and its latent of 96 x 64 pixels."""
    folder = tmp_path / "images"
    write_photo(folder / "img_001.png", 0, (120, 64)).with_suffix(".txt").write_text("a red car, fast")
    write(folder / "_latent_cache" / LATENT, latent_bytes(LATENTS, FACTS))
    return folder


def test_a_latent_is_described_by_its_metadata(images):
    (found,), texts, refusals = split(ai_toolkit.read(images))
    assert texts == [] and refusals == []
    assert found.sample_id == "img_001.png" and found.image_path == images / "img_001.png"
    assert torch.equal(found.latents, LATENTS) and found.latents.dtype == torch.bfloat16
    assert (found.is_scaled, found.output, found.note) == (True, "sample", None)
    assert found.geometry == Geometry(Size(120, 64), Size(120, 64), Crop(12, 0), Size(96, 64))


def test_a_sub_folder_has_caches_of_its_own(images):
    shutil.copytree(images, images / "sub" / "deep")
    assert [found.sample_id for found in split(ai_toolkit.read(images))[0]] == [
        "img_001.png",
        "sub/deep/img_001.png",
    ]


def test_a_flipped_latent_has_the_crop_of_the_image_that_is_not_flipped(images):
    """ai-toolkit flips, scales, then crops at the left: from the unflipped image's left it is 80 - 64 - 6 away."""
    write_photo(images / "img_001.png", 0, (96, 51))
    facts = FACTS | {"scale_to_width": 80, "scale_to_height": 150, "crop_x": 6, "crop_y": 0, "flip_x": True}
    shutil.rmtree(images / "_latent_cache")
    write(images / "_latent_cache" / FLIPPED, latent_bytes(LATENTS, facts))
    (refusal,) = split(ai_toolkit.read(images))[2]
    assert refusal.reason == "changed"  # the image is not scaled to 150 x 80 for this bucket
    (images / "img_001.png").unlink()
    write_photo(images / "other.png", 0)
    (found,) = split(ai_toolkit.read(images))[0]
    assert found.geometry == Geometry(Size(150, 80), Size(150, 80), Crop(0, 10), Size(96, 64), flip=True)


def test_without_the_image_the_scaled_size_stands_for_its_own(images):
    write_photo(images / "other.png", 1)
    (images / "img_001.png").unlink()
    (found,) = split(ai_toolkit.read(images))[0]
    assert (found.image_path, found.note) == (None, NOTE_NO_IMAGE)
    assert found.geometry.original_size == (120, 64)


def test_an_image_that_was_replaced_by_one_of_another_shape_is_refused(images):
    write_photo(images / "img_001.png", 1, (96, 96))
    found, _, (refusal,) = split(ai_toolkit.read(images))
    assert found == [] and refusal.reason == "changed" and "96x96 now" in refusal.detail


def test_a_file_whose_name_does_not_follow_from_its_metadata_is_refused(images):
    folder = images / "_latent_cache"
    (folder / LATENT).rename(folder / LATENT.replace("img_001", "img_002"))
    found, _, (refusal,) = split(ai_toolkit.read(images))
    assert found == [] and refusal.reason == "changed"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_frames": 81}, "num_frames"),
        ({"flip_y": True}, "upside down"),
        ({"latent_space_version": "flux2"}, "flux2"),
        ({"latent_version": 2}, "version 2"),
        ({"crop_x": -1}, "crop_x is -1"),
        ({"crop_width": 64.0}, "crop_width is 64.0"),
        ({"scale_to_width": True}, "scale_to_width is True"),
        ({"scale_to_height": 1 << 40}, "scale_to_height"),
        ({"crop_y": 60}, "leaves the image"),
        ({"filename": "../img_001.png"}, "names no file"),
        ({"filename": ".."}, "names no file"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_facts_that_do_not_describe_a_plain_sdxl_latent_are_refused(images, changes, words):
    facts = FACTS | changes
    shutil.rmtree(images / "_latent_cache")
    name = LATENT if "filename" in changes else ai_toolkit.latent_name(facts)
    write(images / "_latent_cache" / name, latent_bytes(LATENTS, facts))
    found, _, (refusal,) = split(ai_toolkit.read(images))
    assert found == [] and words in refusal.detail


@pytest.mark.parametrize(
    "data",
    [
        safetensors_bytes({"latent": LATENTS}),
        safetensors_bytes({"latent": LATENTS}, {"filename": "img_001.png", "crop_x": "no json"}),
        latent_bytes(LATENTS[None], FACTS),
        latent_bytes((LATENTS * 255).to(torch.uint8), FACTS),
        latent_bytes(LATENTS, FACTS).replace(b'"latent"', b'"lament"'),
        latent_bytes(LATENTS, FACTS).replace(b"[4, 12, 8]", b"[4,9999,8]"),
        (1 << 40).to_bytes(8, "little") + b"{}",
        b"1234",
    ],
    ids=["no-metadata", "no-json", "batch", "pixels", "no-latent", "larger", "endless-header", "short"],
)
def test_a_file_of_another_form_is_refused(images, data):
    write(images / "_latent_cache" / LATENT, data)
    found, _, refusals = split(ai_toolkit.read(images))
    assert found == [] and len(refusals) == 1


@pytest.mark.parametrize(
    ("name", "caption_file", "trigger"),
    [
        (CAR, "a red car, fast", None),
        (CAR_LINE, "a red car, fast\n", None),
        (CAR_LINE, "a red car, fast\r\n", None),
        (CAR, "a red car, fast\n", None),
        (CAR, "a red car, fast", "ohwx"),
    ],
    ids=["as-it-is", "line-end", "windows-line-end", "stripped", "trigger-not-used"],
)
def test_a_text_is_found_by_the_hash_of_the_caption_file(images, name, caption_file, trigger):
    (images / "img_001.txt").write_bytes(caption_file.encode())
    write(images / "_t_e_cache" / name, TEXT)
    _, (text,), refusals = split(ai_toolkit.read(images, trigger=trigger))
    assert refusals == []
    assert (text.sample_ids, text.caption) == (("img_001.png",), "a red car, fast")
    assert torch.equal(text.prompt_embeds, EMBEDS) and torch.equal(text.pooled_prompt_embeds, POOLED)


def test_a_trigger_word_is_part_of_the_caption(images):
    write(images / "_t_e_cache" / CAR_TRIGGER, TEXT)
    _, (text,), _ = split(ai_toolkit.read(images, trigger="ohwx"))
    assert text.caption == "ohwx a red car, fast"
    (images / "img_001.txt").write_text("[trigger] a red car, fast")
    _, (text,), _ = split(ai_toolkit.read(images, trigger="ohwx"))
    assert text.caption == "ohwx a red car, fast"
    assert reasons(split(ai_toolkit.read(images))[2]) == ["missing"]


def test_non_ascii_captions_are_found(images):
    (images / "img_001.txt").write_text("ein Bär", encoding="utf-8")
    write(images / "_t_e_cache" / BEAR, TEXT)
    assert split(ai_toolkit.read(images))[1][0].caption == "ein Bär"


def test_a_text_of_a_dropped_caption_belongs_to_no_sample(images):
    write(images / "_t_e_cache" / f"img_001_{EMPTY}", TEXT)
    (text,) = split(ai_toolkit.read(images))[1]
    assert (text.caption, text.sample_ids) == ("", ())
    (images / "img_001.txt").unlink()  # then it is the sample's own
    (text,) = split(ai_toolkit.read(images))[1]
    assert (text.caption, text.sample_ids) == ("", ("img_001.png",))


@pytest.mark.parametrize(("trigger", "dropped"), [("ohwx", "ohwx "), (None, "")])
def test_texts_of_dropped_captions_are_noted_and_no_refusals(images, trigger, dropped):
    """With a trigger word ai-toolkit encodes it alone, with a space; it adds one after each comma too."""
    encoded = "a red car,  fast" if trigger is None else "ohwx a red car,  fast"
    for text in (encoded, dropped):
        write(images / "_t_e_cache" / ai_toolkit.text_name("img_001", text), TEXT)
    report = import_cache(ai_toolkit.read(images, trigger=trigger), Workspace(), name="mine")
    assert report.refused == [] and report.num_texts == 1
    assert report.notes == {ai_toolkit.NOTE_DROPPED: 1}


def test_a_caption_of_two_lines_is_one_text(images):
    (images / "img_001.txt").write_text("a red car\nin the rain\n")
    write(images / "_t_e_cache" / ai_toolkit.text_name("img_001", "a red car\nin the rain\n"), TEXT)
    (text,) = split(ai_toolkit.read(images))[1]
    assert (text.caption, text.sample_ids) == ("a red car in the rain", ("img_001.png",))


def test_a_stem_may_hold_dots_and_underscores(images):
    write_photo(images / "a_b.v2_c.png", 1)
    write(images / "_t_e_cache" / f"a_b.v2_c_{EMPTY}", TEXT)
    assert split(ai_toolkit.read(images))[1][0].sample_ids == ("a_b.v2_c.png",)


def test_a_text_of_an_edited_caption_is_refused(images):
    (images / "img_001.txt").write_text("a green car, fast")
    write(images / "_t_e_cache" / CAR, TEXT)
    _, texts, (refusal,) = split(ai_toolkit.read(images))
    assert texts == [] and (refusal.sample_id, refusal.reason) == ("img_001", "missing")


def test_a_text_of_no_image_is_refused(images):
    write(images / "_t_e_cache" / CAR.replace("001", "002"), TEXT)
    write(images / "_t_e_cache" / "short.safetensors", TEXT)
    assert reasons(split(ai_toolkit.read(images))[2]) == ["missing", "missing"]


@pytest.mark.parametrize(
    "tensors",
    [
        {"text_embed": EMBEDS[None]},
        {"text_embed": EMBEDS, "pooled_embed": POOLED[None]},
        {"text_embed": EMBEDS[None].expand(2, 77, 2048), "pooled_embed": POOLED[None].expand(2, 1280)},
    ],
    ids=["no-pooled", "no-batch", "two"],
)
def test_embeddings_of_another_form_are_refused(images, tensors):
    write(images / "_t_e_cache" / CAR, safetensors_bytes(tensors))
    _, texts, refusals = split(ai_toolkit.read(images))
    assert texts == [] and reasons(refusals) == ["corrupt"]


def test_a_caption_file_that_is_not_utf8_is_listed(images):
    (images / "img_001.txt").write_bytes(b"\xff\xfe")
    write(images / "_t_e_cache" / CAR, TEXT)
    assert "bad-caption" in reasons(split(ai_toolkit.read(images))[2])


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_raise_nothing(images, data):
    """safetensors has no checksum: damage among the values gives other values, as in ai-toolkit."""
    write(images / "_latent_cache" / LATENT, data.draw(damaged(latent_bytes(LATENTS, FACTS))))
    write(images / "_t_e_cache" / CAR, data.draw(damaged(TEXT)))
    for item in items_quietly(ai_toolkit.read(images)):
        match item:
            case ForeignImage():
                assert item.latents.ndim == 3 and item.sample_id == "img_001.png"
            case ForeignText():
                assert item.prompt_embeds.ndim == 2
            case Refusal():
                assert item.path and item.detail


# Export


def test_export_writes_what_the_format_says(make_config, photos, tmp_path):
    config, out = make_config(**{"datasets.0.flip": True}), tmp_path / "out"
    run_precache(config)
    with LatentCache(config.cache.path) as cache:
        report = ai_toolkit.export(cache, "photos", out)
        _, row = cache.row("sub/e.png")
        twins = {ref.geometry.flip: (ref.geometry, cache.get(ref.key).tensors["moments"]) for ref in row.images}
        text = cache.get(row.captions[0].key).tensors
    assert (report.num_images, report.num_texts, report.num_files, report.skipped) == (10, 4, 14, [])
    assert report.notes[ai_toolkit.NOTE_LINES] == 1
    for flip, (geometry, moments) in twins.items():
        facts = FACTS | {"filename": "e.png", "scale_to_width": geometry.resized_size.width}
        facts |= {"scale_to_height": geometry.resized_size.height, "crop_y": geometry.crop_top_left.top}
        spare = geometry.resized_size.width - geometry.target_size.width
        facts["crop_x"] = spare - geometry.crop_top_left.left if flip else geometry.crop_top_left.left
        facts |= {"crop_width": geometry.target_size.width, "crop_height": geometry.target_size.height}
        facts |= {"flip_x": True} if flip else {}
        document = json.dumps(facts, sort_keys=True).encode()
        code = base64.urlsafe_b64encode(hashlib.md5(document).digest()).decode()[:22]
        with safe_open(out / "sub/_latent_cache" / f"e_{code}.safetensors", "pt") as file:
            assert list(file.keys()) == ["latent"]
            assert torch.equal(file.get_tensor("latent"), (moments.float()[:4] * 0.13025).bfloat16())
            metadata = file.metadata()
        assert metadata.pop("format") == "pt" and json.loads(metadata.pop("software"))
        assert {name: value if name in ("filename", "latent_space_version") else json.loads(value)
                for name, value in metadata.items()} == facts  # fmt: skip
    (path,) = (out / "sub/_t_e_cache").iterdir()
    # The caption file ends with a line end, which ai-toolkit keeps.
    assert path.name == ai_toolkit.text_name("e", "a tree\n")
    tensors = load_file(path)
    assert torch.equal(tensors["text_embed"], text["prompt_embeds"][None])
    assert torch.equal(tensors["pooled_embed"], text["pooled_prompt_embeds"][None])


def test_export_then_import_gives_the_same_tensors_and_geometry(make_config, photos):
    config, workspace = make_config(**{"datasets.0.flip": True}), Workspace()
    run_precache(config)
    with LatentCache(config.cache.path) as cache:
        ai_toolkit.export(cache, "photos", photos, dtype=torch.float32)
        report = import_cache(ai_toolkit.read(photos), workspace, name="back", scale_check=False)
        assert (report.num_samples, report.num_images, report.num_flipped) == (4, 10, 5)
        assert report.refused == [] and [refusal.sample_id for refusal in report.incomplete] == ["a.png"]
        back = LatentCache(store=workspace.store, manifests=workspace.manifests, unverified=True)
        for sample_id in ("b.png", "c.png", "d.png", "sub/e.png"):
            (_, ours), (_, theirs) = cache.row(sample_id), back.row(sample_id)
            assert [ref.geometry for ref in ours.images] == [ref.geometry for ref in theirs.images]
            assert [ref.text for ref in ours.captions] == [ref.text for ref in theirs.captions]
            for mine, other in zip(ours.images, theirs.images, strict=True):
                mean = cache.get(mine.key).tensors["moments"].float()[:4]
                latents = back.get(other.key).tensors["latents"]
                torch.testing.assert_close(latents, mean, rtol=2.0**-22, atol=0)
            for name, tensor in cache.get(ours.captions[0].key).tensors.items():
                assert torch.equal(back.get(theirs.captions[0].key).tensors[name], tensor)


def test_import_then_export_gives_the_files_back(images, tmp_path):
    write(images / "_t_e_cache" / CAR, TEXT)
    workspace, out = Workspace(), tmp_path / "out"
    assert import_cache(ai_toolkit.read(images), workspace, name="mine").refused == []
    cache = LatentCache(store=workspace.store, manifests=workspace.manifests, unverified=True)
    report = ai_toolkit.export(cache, "mine", out)
    assert report.notes == {} and report.num_files == 2
    for name in (f"_latent_cache/{LATENT}", f"_t_e_cache/{CAR}"):
        before, after = load_file(images / name), load_file(out / name)
        assert before.keys() == after.keys()
        assert all(before[key].dtype == after[key].dtype and torch.equal(before[key], after[key]) for key in before)


def test_a_cache_of_ai_toolkits_buckets_is_exported_under_its_names(make_config, tmp_path):
    """It crops the mirrored image: an odd pixel more lies on the same side of both files' pixels."""
    write_photo(tmp_path / "one/a.png", 9, (80, 134))
    buckets = {"rule": "ai-toolkit", "resolution": 96, "step": 32}
    config = make_config(
        **{"datasets.0.source.path": tmp_path / "one", "datasets.0.buckets": buckets, "datasets.0.flip": True}
    )
    run_precache(config)
    with LatentCache(config.cache.path) as cache:
        report = ai_toolkit.export(cache, "photos", tmp_path / "out")
    assert (report.num_images, report.num_other_buckets, report.notes) == (2, 0, {})
    facts = []
    for path in (tmp_path / "out/_latent_cache").iterdir():
        with safe_open(path, "pt") as file:
            facts.append({name: json.loads(value) for name, value in file.metadata().items() if name[:5] in PLACES})
    # 134 x 80 pixels are scaled to 161 x 96: 65 are cut, of which the odd one on the right.
    assert sorted(facts, key=len) == [
        {"scale_to_width": 161, "scale_to_height": 96, "crop_x": 32, "crop_y": 0, "crop_width": 96, "crop_height": 96},
        {"scale_to_width": 161, "scale_to_height": 96, "crop_x": 32, "crop_y": 0, "crop_width": 96, "crop_height": 96,
         "flip_x": True},
    ]  # fmt: skip


PLACES = ("scale", "crop_", "flip_")


@pytest.mark.parametrize(("width", "num_others"), [(130, 0), (137, 1)], ids=["the-same", "one-column-more"])
def test_what_ai_toolkit_would_scale_otherwise_is_counted(make_config, tmp_path, width, num_others):
    """60 x 137 pixels become 64 x 146.1: 146 here, 147 in ai-toolkit. 60 x 130 become 64 x 138.7: 139 in both."""
    write_photo(tmp_path / "one/a.png", 9, (60, width))
    config = make_config(**{"datasets.0.source.path": tmp_path / "one"})
    run_precache(config)
    with LatentCache(config.cache.path) as cache:
        report = ai_toolkit.export(cache, "photos", tmp_path / "out")
    assert report.num_images == 1 and report.notes.get(NOTE_UNUSUAL, 0) == num_others


def test_a_caption_that_was_edited_since_is_not_exported(config, photos, tmp_path):
    (photos / "b.txt").write_text("a green car")
    (photos / "c.txt").write_bytes(b"\xff")
    with LatentCache(config.cache.path) as cache:
        report = ai_toolkit.export(cache, "photos", tmp_path / "out")
    assert report.notes["the caption file was edited since: its text is not in the cache"] == 1
    assert [(refusal.sample_id, refusal.reason) for refusal in report.skipped] == [("c.png", "bad-caption")]
    assert report.num_texts == 2


def test_joined_lines_are_exported_as_one_text_and_placeholders_not_at_all(make_config, photos, tmp_path):
    """The caption of a.png has two lines. A text with a placeholder is not the one that was encoded."""
    (photos / "a.txt").write_text("a red car, old\nin the rain\n")
    (photos / "b.txt").write_text("[trigger] a blue car")
    config = make_config(**{"datasets.0.source.caption_lines": "joined"})
    run_precache(config)
    with LatentCache(config.cache.path) as cache:
        report = ai_toolkit.export(cache, "photos", tmp_path / "out")
        (ref,) = cache.row("a.png")[1].captions
        embeds = cache.get(ref.key).tensors["prompt_embeds"]
    assert ref.text == "a red car, old in the rain"
    assert ai_toolkit.NOTE_LINES not in report.notes and report.notes[ai_toolkit.NOTE_PLACEHOLDER] == 1
    path = tmp_path / "out/_t_e_cache" / ai_toolkit.text_name("a", "a red car,  old\nin the rain\n")
    assert torch.equal(load_file(path)["text_embed"], embeds[None])
    assert not list((tmp_path / "out/_t_e_cache").glob("b_*"))


def test_the_command_line_imports_and_exports(run_json, config, photos, tmp_path):
    code, report = run_json("export", photos, "--to", "ai-toolkit", "--cache", config.cache.path, "--dtype", "float32")
    assert (code, report["num_images"], report["num_texts"]) == (0, 5, 4)
    code, report = run_json(
        "import", photos, "--from", "ai-toolkit", "--cache", tmp_path / "other", "--no-scale-check"
    )  # fmt: skip
    assert (code, report["num_samples"], report["num_images"], report["num_refused"]) == (1, 4, 5, 0)
