"""The staleness matrix: every input of a key, changed alone, is a miss with its reason; everything else is a hit."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.photo_files import write_photo
from helpers.tiny_models import tiny_encoders
from PIL import Image

import latentcache.identity as fingerprint
from latentcache.config import Config
from latentcache.families import family_named
from latentcache.families.sdxl import FAMILY as SDXL
from latentcache.models.model_loader import LoadedModels
from latentcache.models.tiny import tiny_parts
from latentcache.precache import plan as planner
from latentcache.precache import preparation as preparations
from latentcache.precache import prompts
from latentcache.precache.report import Report
from latentcache.precache.run import run_precache
from latentcache.types import Geometry


@dataclass(frozen=True)
class Change:
    """One input changed alone. `fields` are the fields of the identities that carry it."""

    name: str
    fields: tuple[str, ...]
    reason: str
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    edit: Callable[[Path], None] | None = None
    models: Callable[[dict[str, Any]], None] | None = None
    patch: Callable[[pytest.MonkeyPatch], None] | None = None
    base: dict[str, Any] = dataclasses.field(default_factory=dict)
    prepare: Callable[[Path], None] | None = None
    family: str = "sdxl"


def one_pixel(photos: Path) -> None:
    image = Image.open(photos / "a.png")
    image.putpixel((3, 4), (1, 2, 3))
    image.save(photos / "a.png")


def exif_turn(photos: Path) -> None:
    image = Image.open(photos / "a.png")
    exif = image.getexif()
    exif[0x0112] = 3
    image.save(photos / "a.png", exif=exif)


def caption_byte(photos: Path) -> None:
    (photos / "b.txt").write_text("a blue cat\n")


def new_photo(photos: Path) -> None:
    write_photo(photos / "new.png", 77)


def only_a_clip(photos: Path) -> None:
    """Ten frames of a tenth of a second."""
    shutil.rmtree(photos)
    photos.mkdir()
    frames = [Image.new("RGB", (96, 96), (20 * number, 0, 0)) for number in range(10)]
    frames[0].save(photos / "a.gif", save_all=True, append_images=frames[1:], duration=100)


def rule_of_frames(**changes: Any) -> dict[str, Any]:
    return {"datasets.0.frames": {"count": 9, "fps": 10, **changes}}


def one_bit(part: str) -> Callable[[dict[str, Any]], None]:
    def change(parts: dict[str, Any]) -> None:
        weight = next(parts[part].parameters())  # of the VAE: its encoder's first convolution
        weight.data.view(torch.int32).reshape(-1)[0] ^= 1

    return change


def config_of(part: str, name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(parts: dict[str, Any]) -> None:
        config = parts[part].config
        if hasattr(config, "to_dict"):
            setattr(config, name, value)
        else:
            parts[part].register_to_config(**{name: value})

    return change


def tokenizer_of(part: str) -> Callable[[dict[str, Any]], None]:
    def change(parts: dict[str, Any]) -> None:
        parts[part].model_max_length = 76

    return change


def policy(name: str, value: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Policies that have one value today: another release may have another."""
    genuine = preparations.preparation_policy

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(preparations, "preparation_policy", lambda images: genuine(images) | {name: value})

    return patch


def geometry(**changes: Any) -> Callable[[pytest.MonkeyPatch], None]:
    genuine = preparations.BucketRule.geometry

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            preparations.BucketRule, "geometry", lambda *a, **k: dataclasses.replace(genuine(*a, **k), **changes)
        )

    return patch


def schema(monkeypatch: pytest.MonkeyPatch) -> None:
    for identity in (fingerprint.ImageIdentity, fingerprint.TextIdentity):
        init = identity.__init__
        monkeypatch.setattr(
            identity, "__init__", lambda self, *a, _init=init, **k: _init(self, *a, **{"schema": 2, **k})
        )
    for module in (planner, prompts):
        monkeypatch.setattr(module, "SCHEMA", 2)


def kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """No input changes a kind; the key must hold it all the same, or an image could be taken for a caption."""
    for identity in (fingerprint.ImageIdentity, fingerprint.TextIdentity):
        to_json = identity.to_json
        monkeypatch.setattr(identity, "to_json", lambda self, _json=to_json: _json(self) | {"kind": "other"})


CHANGES = [
    Change("one pixel", ("image.source",), "image changed", edit=one_pixel),
    Change("EXIF turn", ("image.source",), "image changed", edit=exif_turn),
    Change("a new image", ("image.source",), "new", edit=new_photo),
    Change("one caption byte", ("text.source",), "caption changed", edit=caption_byte),
    Change("a new prompt", ("text.source",), "new", settings={"validation.prompts": ["a validation prompt", "b"]}),
    Change("EXIF policy", ("preparation.exif",), "exif policy changed", patch=policy("exif", "ignored")),
    Change("colour policy", ("preparation.colour",), "colour policy changed", patch=policy("colour", "other")),
    Change("decoder", ("preparation.decoder",), "decoder policy changed", patch=policy("decoder", "other")),
    Change("resize filter", ("preparation.resample",), "resample policy changed", patch=policy("resample", "other")),
    Change(
        "alpha colour",
        ("preparation.alpha",),
        "alpha policy changed",
        settings={"datasets.0.images": {"min_side": 8, "alpha_colour": "#000000"}},
    ),
    Change(
        "bucket area",
        ("preparation.target_size", "preparation.resized_size"),
        "bucket changed (96x96 -> 64x64)",
        settings={"datasets.0.buckets": {"area": 64 * 64, "step": 32, "max_aspect": 1.0}},
        base={"datasets.0.buckets": {"area": 96 * 96, "step": 32, "max_aspect": 1.0}},
    ),
    Change(
        "bucket step",
        ("preparation.target_size",),
        "bucket changed",
        settings={"datasets.0.buckets": {"area": 96 * 96, "step": 24}},
    ),
    Change("crop", ("preparation.crop_top_left",), "crop changed", patch=geometry(crop_top_left=(0, 1))),
    Change(
        "resized size", ("preparation.resized_size",), "resized size changed", patch=geometry(resized_size=(99, 178))
    ),
    Change(
        "original size",
        ("preparation.original_size",),
        "original size changed",
        patch=geometry(original_size=(81, 145)),
    ),
    Change("flip", ("preparation.flip",), "flip added", settings={"datasets.0.flip": True}),
    Change(
        "frames of a clip",
        ("preparation.num_frames",),
        "number of frames changed (9 -> 5)",
        settings=rule_of_frames(count=7),
        base=rule_of_frames(),
        prepare=only_a_clip,
        family="wan",
    ),
    Change(
        "frames a second",
        ("preparation.fps",),
        "fps changed (10.0 -> 11.0)",
        settings=rule_of_frames(fps=11),
        base=rule_of_frames(),
        prepare=only_a_clip,
        family="wan",
    ),
    Change(
        "where a clip starts",
        ("preparation.start",),
        "start changed (first -> middle)",
        settings=rule_of_frames(start="middle"),
        base=rule_of_frames(),
        prepare=only_a_clip,
        family="wan",
    ),
    Change("one VAE weight bit", ("image_encoding.vae", "part.weights"), "vae changed (", models=one_bit("vae")),
    Change(
        "VAE config",
        ("image_encoding.vae", "part.config"),
        "vae changed (",
        models=config_of("vae", "norm_num_groups", 4),
    ),
    Change(
        "VAE class",
        ("image_encoding.vae", "part.class_name"),
        "vae changed (",
        models=lambda parts: setattr(
            parts["vae"], "__class__", type("OtherVae", (type(parts["vae"]),), {"__module__": __name__})
        ),
    ),
    Change(
        "scaling factor",
        ("image_encoding.scaling_factor",),
        "scaling factor changed (0.13025 -> 0.18215)",
        models=config_of("vae", "scaling_factor", 0.18215),
    ),
    Change(
        "shift factor",
        ("image_encoding.shift_factor",),
        "shift factor changed (None -> 0.5)",
        models=config_of("vae", "shift_factor", 0.5),
    ),
    Change(
        "VAE dtype",
        ("image_encoding.compute_dtype",),
        "encoder dtype changed (float32 -> bfloat16)",
        settings={"encode.vae_dtype": "bfloat16", "encode.store_dtype": "float32"},
        base={"encode.store_dtype": "float32"},
    ),
    Change(
        "output",
        ("image_encoding.output",),
        "output changed (moments -> mean)",
        settings={"encode.image_output": "mean"},
    ),
    Change(
        "seed of the sample",
        ("image_encoding.seed",),
        "seed changed (0 -> 1)",
        settings={"encode.image_output": "sample", "encode.seed": 1},
        base={"encode.image_output": "sample"},
    ),
    Change(
        "what else a clip has",
        ("image_encoding.condition",),
        "condition changed (first frame, padded -> two frames, padded)",
        patch=lambda patch: patch.setattr(type(family_named("wan-i2v")), "clip_condition", "two frames, padded"),
        base=rule_of_frames(),
        prepare=only_a_clip,
        family="wan-i2v",
    ),
    Change(
        "stored dtype",
        ("image_encoding.store_dtype", "text_encoding.store_dtype"),
        "stored dtype changed (float32 -> float16)",
        settings={"encode.store_dtype": "float16"},
    ),
    Change(
        "text dtype",
        ("text_encoding.compute_dtype",),
        "encoder dtype changed (float32 -> bfloat16)",
        settings={"encode.text_dtype": "bfloat16", "encode.store_dtype": "float32"},
        base={"encode.store_dtype": "float32"},
    ),
    Change("text encoder", ("text_encoding.text_encoder",), "text encoder changed (", models=one_bit("text_encoder")),
    Change(
        "text encoder 2",
        ("text_encoding.text_encoder_2",),
        "text encoder 2 changed (",
        models=one_bit("text_encoder_2"),
    ),
    Change(
        "text encoder's config",
        ("text_encoding.text_encoder", "part.config"),
        "text encoder changed (",
        models=config_of("text_encoder", "hidden_act", "gelu"),
    ),
    Change("tokenizer", ("text_encoding.tokenizer",), "tokenizer changed (", models=tokenizer_of("tokenizer")),
    Change("tokenizer 2", ("text_encoding.tokenizer_2",), "tokenizer 2 changed (", models=tokenizer_of("tokenizer_2")),
    Change("clip skip", ("text_encoding.clip_skip",), "clip skip changed (0 -> 1)", settings={"encode.clip_skip": 1}),
    Change(
        "long texts",
        ("text_encoding.max_length",),
        "max length changed (None -> 225)",
        settings={"encode.max_length": 225},
    ),
    Change(
        "long texts no more",
        ("text_encoding.max_length",),
        "max length changed (225 -> None)",
        settings={"encode.max_length": 77},
        base={"encode.max_length": 225},
    ),
    Change("salt", ("image.salt", "text.salt"), "salt changed ('' -> 'x')", settings={"cache.salt": "x"}),
    Change("schema", ("image.schema", "text.schema"), "schema changed (1 -> 2)", patch=schema),
    Change("kind", ("image.kind", "text.kind"), "entry lost", patch=kind),
]


def leaves(prefix: str, identity: type) -> Iterator[str]:
    # controls: see test_parts.py; masking: see test_inpainting.py; picture: see families/test_wan_i2v.py
    nested = {"preparation", "geometry", "encoding", "controls", "masking", "picture"}
    yield from (f"{prefix}.{field.name}" for field in dataclasses.fields(identity) if field.name not in nested)


def test_every_field_of_an_identity_has_a_row() -> None:
    """A field that is added to an identity must get a row above."""
    fields = {
        *leaves("image", fingerprint.ImageIdentity),
        *leaves("text", fingerprint.TextIdentity),
        *leaves("preparation", fingerprint.Preparation),
        *leaves("preparation", Geometry),
        *leaves("image_encoding", fingerprint.ImageEncoding),
        *(
            f"text_encoding.{name}"
            for name in (*SDXL.names("text_encoder"), *SDXL.names("tokenizer"), *SDXL.text_recipe(max_length=225))
        ),
        "text_encoding.compute_dtype",
        "text_encoding.store_dtype",
        *leaves("part", fingerprint.PartIdentity),
    }
    covered = {field for change in CHANGES for field in change.fields}
    assert fields == covered


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.name)
def test_each_input_changed_alone_is_a_miss_with_its_reason(
    change: Change, make_config: Callable[..., Config], photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if change.prepare is not None:
        change.prepare(photos)
    base = make_config(**change.base)
    family = family_named(change.family)
    parts = tiny_encoders(change.family)
    first = run_precache(base, models=LoadedModels(family=family, **parts))
    assert first.num_refused == 0 and first.num_encoded > 0

    if change.edit is not None:
        change.edit(photos)
    if change.patch is not None:
        change.patch(monkeypatch)
    parts = tiny_encoders(change.family)
    if change.models is not None:
        change.models(parts)
    models = LoadedModels(family=family, **parts)
    report = run_precache(make_config(**change.base | change.settings), models=models, dry_run=True)
    assert report.num_misses > 0
    reasons = {reason for reason in report.misses_by_reason if change.reason in reason}
    assert reasons == set(report.misses_by_reason), report.misses_by_reason
    assert report.num_hits + report.num_misses >= first.num_encoded


def plan(config: Config, parts: dict[str, Any] | None = None) -> Report:
    return run_precache(config, models=LoadedModels(**(parts or tiny_parts())), dry_run=True)


def touched(photos: Path) -> None:
    for path in photos.rglob("*"):
        os.utime(path)


def renamed(photos: Path) -> None:
    for suffix in (".png", ".txt"):
        (photos / "a").with_suffix(suffix).rename((photos / "renamed").with_suffix(suffix))


def copied(photos: Path) -> None:
    shutil.copytree(photos, photos.parent / "copy")
    shutil.rmtree(photos)
    (photos.parent / "copy").rename(photos)


def duplicated(photos: Path) -> None:
    shutil.copy(photos / "a.png", photos / "twin.png")
    shutil.copy(photos / "a.txt", photos / "twin.txt")


def decoder_of_the_vae(parts: dict[str, Any]) -> None:
    parts["vae"].decoder.conv_in.weight.data += 1


IRRELEVANT: dict[str, dict[str, Any]] = {
    "decoder of the VAE": {"models": decoder_of_the_vae},
    "mtime": {"edit": touched},
    "file name": {"edit": renamed},
    "a copy of the dataset": {"edit": copied},
    "an equal image under another name": {"edit": duplicated},
    "path of the dataset": {"settings": {"datasets.0.source": {"kind": "folder", "path": "moved"}}, "move": True},
    "name of the dataset": {"settings": {"datasets.0.name": "other"}},
    "batch size": {"settings": {"encode.batch_size": 5}},
    "number of threads": {"settings": {"encode.num_workers": 1}},
    "repeats": {"settings": {"datasets.0.repeats": 7}},
    "weight in the loss": {"settings": {"datasets.0.loss_weight": 0.5}},
    "role": {"settings": {"datasets.0.role": "validation"}},
    "device by another name": {"settings": {"encode.device": "cpu:0"}},
    "a refusal limit": {"settings": {"datasets.0.images": {"min_side": 9, "max_pixels": 10_000_000}}},
    "seed without a sample": {"settings": {"encode.seed": 5}},
    "where the config was read": {"settings": {"model.path": "elsewhere"}},
    "rank": {"environ": {"RANK": "1", "WORLD_SIZE": "2"}},
    "caption order": {"edit": lambda photos: (photos / "a.txt").write_text("a house in the rain\na red house\n")},
    "blank lines and spaces": {"edit": lambda photos: (photos / "b.txt").write_text("\n  a blue car \n\n")},
}


@pytest.mark.parametrize("name", IRRELEVANT)
def test_what_does_not_change_a_value_is_a_hit(
    name: str, make_config: Callable[..., Config], photos: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    case = IRRELEVANT[name]
    run_precache(make_config(), models=LoadedModels(**tiny_parts()))
    if "edit" in case:
        case["edit"](photos)
    if case.get("move"):
        photos.rename(tmp_path / "moved")
        monkeypatch.chdir(tmp_path)
    for variable, value in case.get("environ", {}).items():
        monkeypatch.setenv(variable, value)
    parts = tiny_parts()
    case.get("models", lambda parts: None)(parts)
    report = plan(make_config(**case.get("settings", {})), parts)
    assert (report.num_misses, report.misses_by_reason) == (0, {})
    assert report.num_samples >= 5 and report.num_refused == 0


def test_several_causes_are_all_named(make_config: Callable[..., Config], photos: Path) -> None:
    run_precache(make_config(), models=LoadedModels(**tiny_parts()))
    one_pixel(photos)
    report = plan(make_config(**{"encode.image_output": "mean"}))
    assert report.misses_by_reason == {
        "image changed, output changed (moments -> mean)": 1,
        "output changed (moments -> mean)": 4,
    }


def test_an_image_changed_within_the_same_time_stamp_is_noticed(
    make_config: Callable[..., Config], photos: Path
) -> None:
    """Digests of files that have just changed are not remembered: they may change again within the clock's step."""
    config = make_config()
    run_precache(config, models=LoadedModels(**tiny_parts()))
    stat = (photos / "a.png").stat()
    one_pixel(photos)
    os.utime(photos / "a.png", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert plan(config).misses_by_reason == {"image changed": 1}
