"""The staleness matrix: every input of a key, changed alone, is a miss with its reason; everything else is a hit."""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.photo_files import write_clip, write_mask, write_photo, write_photos
from helpers.tiny_configs import tiny_config
from helpers.tiny_models import tiny_encoders
from PIL import Image

import latentcache.identity as fingerprint
from latentcache.config import Config
from latentcache.families import family_named
from latentcache.families.sdxl import FAMILY as SDXL
from latentcache.models.model_loader import LoadedModels
from latentcache.precache import plan as planner
from latentcache.precache import preparation as preparations
from latentcache.precache import prompts
from latentcache.precache.report import Report
from latentcache.precache.run import run_precache
from latentcache.types import Geometry

Edit = Callable[[Path], object]
COMPANIONS = {
    "datasets.0.control": [{"suffix": "_before"}],
    "datasets.0.mask": {"suffix": "_mask", "inpaint": "hard"},
}
"""Each photo of the matrix has a control image and a mask, and is cached masked too."""
IDENTITIES = (fingerprint.ImageIdentity, fingerprint.MaskIdentity, fingerprint.TextIdentity)


def write_companions(photo: Path, seed: int) -> None:
    with Image.open(photo) as image:
        width, height = image.size
    write_photo(photo.with_stem(f"{photo.stem}_before"), seed, (height // 2, width // 2))
    write_mask(photo.with_stem(f"{photo.stem}_mask"), seed, (height, width))


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report]:
    """The photos with their companions in a folder with their cache, and the report of its run."""
    folder = tmp_path_factory.mktemp("filled")
    for number, photo in enumerate(sorted(write_photos(folder / "photos").rglob("*.png"))):
        write_companions(photo, 100 + number)
    report = run_precache(tiny_config(folder, **COMPANIONS), models=models_of())
    assert report.num_refused == 0 and report.num_encoded == 4 * 5 + 5 + 2
    return folder, report


def models_of(family: str = "sdxl", change: Callable[[dict[str, Any]], object] | None = None) -> LoadedModels:
    parts = tiny_encoders(family)
    if change is not None:
        change(parts)
    return LoadedModels(family=family_named(family), **parts)


@dataclasses.dataclass(frozen=True)
class Change:
    """One input changed alone: of the settings, of the photos, of the models, or of the code.

    `fields` are the fields of the identities that carry it. Each of `reasons` is in a reason of a miss, and there is no
    other. `count` is how many misses there are, where it is known. With `base` the cache is filled with these settings,
    and without companions.
    """

    fields: str
    reasons: str | tuple[str, ...]
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    count: int | None = None
    base: dict[str, Any] | None = None
    edit: Edit | None = None
    models: Callable[[dict[str, Any]], object] | None = None
    patch: Callable[[pytest.MonkeyPatch], object] | None = None
    prepare: Edit | None = None
    family: str = "sdxl"


def one_pixel(photos: Path) -> None:
    image = Image.open(photos / "a.png")
    image.putpixel((3, 4), (1, 2, 3))
    image.save(photos / "a.png")


def new_photo(photos: Path) -> None:
    write_companions(write_photo(photos / "new.png", 77), 77)


def only_a_clip(photos: Path) -> None:
    """Ten frames of a tenth of a second."""
    shutil.rmtree(photos)
    write_clip(photos / "a.gif", 1, (96, 96), num_frames=10)


def rule_of_frames(**changes: Any) -> dict[str, Any]:
    return {"datasets.0.frames": {"count": 9, "fps": 10, **changes}}


def buckets(area: int, step: int = 32, **more: Any) -> dict[str, Any]:
    return {"datasets.0.buckets": {"area": area, "step": step, **more}}


def one_bit(part: str) -> Callable[[dict[str, Any]], None]:
    def change(parts: dict[str, Any]) -> None:
        weight = next(parts[part].parameters())  # of the VAE: its encoder's first convolution
        weight.data.view(torch.int32).reshape(-1)[0] ^= 1

    return change


def configured(part: str, **settings: Any) -> Callable[[dict[str, Any]], None]:
    def change(parts: dict[str, Any]) -> None:
        if hasattr(parts[part].config, "to_dict"):
            parts[part].config.update(settings)
        else:
            parts[part].register_to_config(**settings)

    return change


def shorter(tokenizer: str) -> Callable[[dict[str, Any]], None]:
    return lambda parts: setattr(parts[tokenizer], "model_max_length", 76)


def another_class(parts: dict[str, Any]) -> None:
    vae = parts["vae"]
    vae.__class__ = type("OtherVae", (type(vae),), {"__module__": __name__})


def policy(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Policies that have one value today: another release may have another."""
    genuine = preparations.preparation_policy
    return lambda patch: patch.setattr(preparations, "preparation_policy", lambda each: genuine(each) | {name: "other"})


def geometry(**changes: Any) -> Callable[[pytest.MonkeyPatch], None]:
    rule, genuine = preparations.BucketRule, preparations.BucketRule.geometry
    return lambda patch: patch.setattr(
        rule, "geometry", lambda *size, **more: dataclasses.replace(genuine(*size, **more), **changes)
    )


def downscale(patch: pytest.MonkeyPatch) -> None:
    genuine = preparations.Preparations.__init__

    def patched(self: preparations.Preparations, *arguments: Any) -> None:
        genuine(self, *arguments)
        self.downscale = 16

    patch.setattr(preparations.Preparations, "__init__", patched)


def newer(init: Callable[..., None]) -> Callable[..., None]:
    return lambda self, *given, **more: init(self, *given, **{"schema": 2, **more})


def schema(patch: pytest.MonkeyPatch) -> None:
    for identity in IDENTITIES:
        patch.setattr(identity, "__init__", newer(identity.__init__))
    for module in (planner, prompts):
        patch.setattr(module, "SCHEMA", 2)


def kind(patch: pytest.MonkeyPatch) -> None:
    """No input changes a kind; the key must hold it all the same, or an image could be taken for a caption."""
    for identity in IDENTITIES:
        to_json = identity.to_json
        patch.setattr(identity, "to_json", lambda self, _json=to_json: _json(self) | {"kind": "other"})


def no_masks(photos: Path) -> None:
    for path in photos.rglob("*_mask.png"):
        path.unlink()


def other_condition(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(type(family_named("wan-i2v")), "clip_condition", "two frames, padded")


A_CLIP: dict[str, Any] = {"base": rule_of_frames(), "prepare": only_a_clip, "family": "wan"}
IN_FLOAT32 = {"encode.store_dtype": "float32"}
A_SAMPLE = {"encode.image_output": "sample"}
BLACK = {"datasets.0.images": {"min_side": 8, "alpha_colour": "#000000"}}
ALPHA = {"datasets.0.mask": {"alpha": True, "inpaint": "hard"}}
SOFT = {"datasets.0.mask": {"suffix": "_mask", "inpaint": "soft"}}
OWN_AREA = {"datasets.0.control": [{"suffix": "_before", "area": 64 * 64}]}
OTHER_MASK = ("mask: image changed", "masked image: mask changed")
LARGE, SMALL = (buckets(side * side, max_aspect=1.0) for side in (96, 64))
CHANGES = [
    Change("image.source masking.source", "image changed", edit=one_pixel, count=2),
    Change("image.source", "new", edit=new_photo, count=4),
    Change("image.source", "control 1: image changed", edit=lambda f: write_photo(f / "a_before.png", 8), count=1),
    Change("mask.source", OTHER_MASK, edit=lambda f: write_mask(f / "a_mask.png", 9, (80, 144)), count=2),
    Change("text.source", "caption changed", edit=lambda f: (f / "b.txt").write_text("a blue cat\n"), count=1),
    Change("text.source", "new", {"validation.prompts": ["a validation prompt", "b"]}, count=1),
    Change("preparation.exif masking.preparation", "exif policy changed", patch=policy("exif"), count=20),
    Change("preparation.colour", "colour policy changed", patch=policy("colour"), count=20),
    Change("preparation.decoder", "decoder policy changed", patch=policy("decoder"), count=20),
    Change("preparation.resample", "resample policy changed", patch=policy("resample")),
    Change("preparation.alpha", "alpha policy changed", BLACK, count=20),
    Change("mask.preparation", OTHER_MASK, ALPHA, count=10, edit=no_masks),
    Change("mask.downscale", "mask: downscale changed", patch=downscale, count=5),
    Change("preparation.target_size", "bucket changed (96x96 -> 64x64)", SMALL, base=LARGE),
    Change("preparation.target_size", "control 1: bucket changed", OWN_AREA, count=5),
    Change("preparation.crop_top_left", "crop changed", patch=geometry(crop_top_left=(0, 1))),
    Change("preparation.resized_size", "resized size changed", patch=geometry(resized_size=(99, 178))),
    Change("preparation.original_size", "original size changed", patch=geometry(original_size=(81, 145)), base={}),
    Change("preparation.flip", "flip added", {"datasets.0.flip": True}, count=20),
    Change("preparation.num_frames", "number of frames changed (9 -> 5)", rule_of_frames(count=7), **A_CLIP),
    Change("preparation.fps", "fps changed (10.0 -> 11.0)", rule_of_frames(fps=11), **A_CLIP),
    Change("preparation.start", "start changed (first -> middle)", rule_of_frames(start="middle"), **A_CLIP),
    Change("image_encoding.vae part.weights", "vae changed (", models=one_bit("vae"), count=15),
    Change("image_encoding.vae part.config", "vae changed (", models=configured("vae", norm_num_groups=4), count=15),
    Change("image_encoding.vae part.class_name", "vae changed (", models=another_class, count=15),
    Change("image_encoding.scaling_factor", "(0.13025 -> 0.18215)", models=configured("vae", scaling_factor=0.18215)),
    Change("image_encoding.shift_factor", "(None -> 0.5)", models=configured("vae", shift_factor=0.5)),
    Change("image_encoding.compute_dtype", "encoder dtype", {"encode.vae_dtype": "bfloat16"}, base=IN_FLOAT32),
    Change("image_encoding.output", "output changed (moments -> mean)", {"encode.image_output": "mean"}, count=5),
    Change("image_encoding.seed", "seed changed (0 -> 1)", {"encode.seed": 1}, base=A_SAMPLE, count=5),
    Change("image_encoding.condition", "condition", patch=other_condition, **A_CLIP | {"family": "wan-i2v"}),
    Change("masking.rule", "masked image: inpaint changed (hard -> soft)", SOFT, count=5),
    Change("image_encoding.store_dtype text_encoding.store_dtype", "stored dtype", {"encode.store_dtype": "float16"}),
    Change("text_encoding.compute_dtype", "encoder dtype", {"encode.text_dtype": "bfloat16"}, base=IN_FLOAT32),
    Change("text_encoding.text_encoder", "text encoder changed (", models=one_bit("text_encoder"), count=7),
    Change("text_encoding.text_encoder_2", "text encoder 2 changed (", models=one_bit("text_encoder_2"), count=7),
    Change("text_encoding.tokenizer", "tokenizer changed (", models=shorter("tokenizer"), count=7),
    Change("text_encoding.tokenizer_2", "tokenizer 2 changed (", models=shorter("tokenizer_2"), count=7),
    Change("text_encoding.clip_skip", "clip skip changed (0 -> 1)", {"encode.clip_skip": 1}, count=6),
    Change("text_encoding.max_length", "max length changed (None -> 225)", {"encode.max_length": 225}, count=7),
    Change("text_encoding.max_length", "(225 -> None)", {"encode.max_length": 77}, base={"encode.max_length": 225}),
    Change("image.salt mask.salt text.salt", "salt changed ('' -> 'x')", {"cache.salt": "x"}, count=27),
    Change("image.schema mask.schema text.schema", "schema changed (1 -> 2)", patch=schema, count=27),
    Change("image.kind mask.kind text.kind", "entry lost", patch=kind, count=27),
]


def leaves(prefix: str, identity: type) -> Iterator[str]:
    # controls: see families/test_qwen_image_edit.py; picture: see families/test_wan_i2v.py
    nested = {"geometry", "encoding", "controls", "masking", "picture"} | (
        {"preparation"} if prefix == "image" else set()
    )
    yield from (f"{prefix}.{field.name}" for field in dataclasses.fields(identity) if field.name not in nested)


def test_every_field_of_an_identity_has_a_row() -> None:
    """A field that is added to an identity must get a row above."""
    settings = (*SDXL.names("text_encoder"), *SDXL.names("tokenizer"), *SDXL.text_recipe(max_length=225))
    fields = {
        *leaves("image", fingerprint.ImageIdentity),
        *leaves("mask", fingerprint.MaskIdentity),
        *leaves("masking", fingerprint.Masking),
        *leaves("text", fingerprint.TextIdentity),
        *leaves("preparation", fingerprint.Preparation),
        *leaves("preparation", Geometry),
        *leaves("image_encoding", fingerprint.ImageEncoding),
        *(f"text_encoding.{name}" for name in (*settings, "compute_dtype", "store_dtype")),
        *leaves("part", fingerprint.PartIdentity),
    }
    assert fields == {field for change in CHANGES for field in change.fields.split()}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: f"{change.fields}: {change.reasons}")
def test_each_input_changed_alone_is_a_miss_with_its_reason(
    change: Change, filled: tuple[Path, Report], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config_with = partial(tiny_config, tmp_path)
    if change.base is None:
        shutil.copytree(filled[0], tmp_path, dirs_exist_ok=True)
        first, base = filled[1], COMPANIONS
    else:
        write_photos(tmp_path / "photos")
        if change.prepare is not None:
            change.prepare(tmp_path / "photos")
        base = change.base
        first = run_precache(config_with(**base), models=models_of(change.family))
        assert first.num_refused == 0 and first.num_encoded > 0

    if change.edit is not None:
        change.edit(tmp_path / "photos")
    if change.patch is not None:
        change.patch(monkeypatch)
    models = models_of(change.family, change.models)
    report = run_precache(config_with(**base | change.settings), models=models, dry_run=True)
    assert report.num_misses == sum(report.misses_by_reason.values()) > 0 and report.num_refused == 0
    reasons = (change.reasons,) if isinstance(change.reasons, str) else change.reasons
    assert all(any(each in found for each in reasons) for found in report.misses_by_reason), report.misses_by_reason
    assert all(any(each in found for found in report.misses_by_reason) for each in reasons), report.misses_by_reason
    assert change.count in (None, report.num_misses)
    assert report.num_hits + report.num_misses >= first.num_encoded


SETTINGS: dict[str, Any] = {
    "datasets.0.name": "other",
    "datasets.0.repeats": 7,
    "datasets.0.loss_weight": 0.5,
    "datasets.0.role": "validation",
    "datasets.0.images": {"min_side": 9, "max_pixels": 10_000_000},
    "encode.batch_size": 5,
    "encode.num_workers": 1,
    "encode.device": "cpu:0",
    "encode.seed": 5,  # without a sample
    "model.path": "elsewhere",
}


def plan_of(folder: Path, models: LoadedModels | None = None, **settings: Any) -> Report:
    return run_precache(tiny_config(folder, **COMPANIONS | settings), models=models or models_of(), dry_run=True)


def test_what_changes_no_bytes_is_a_hit(
    filled: tuple[Path, Report], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each edit comes after those before it, and leaves the names of what the next one takes."""
    shutil.copytree(filled[0], tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    photos, settings = tmp_path / "photos", dict[str, Any]()

    def check(num_samples: int = 5) -> None:
        report = plan_of(tmp_path, **settings)
        assert (report.num_misses, report.num_hits, report.num_refused) == (0, 27, 0)
        assert report.num_samples == num_samples

    for path in photos.rglob("*"):
        os.utime(path)
    check()
    shutil.copytree(photos, tmp_path / "copy")
    shutil.rmtree(photos)
    (tmp_path / "copy").rename(photos)
    check()
    for path in photos.glob("a[._]*"):
        path.rename(path.with_name(f"renamed{path.name[1:]}"))
    check()
    for path in photos.glob("renamed*"):  # an equal image under another name
        shutil.copy(path, path.with_name(f"twin{path.name[7:]}"))
    check(num_samples=6)
    for path in photos.rglob("*_before.png"):  # another suffix of companions
        path.rename(path.with_stem(path.stem.replace("_before", "_1")))
    settings["datasets.0.control"] = [{"suffix": "_1"}]
    check(num_samples=6)
    # Captions in another order, and among blank lines and spaces.
    (photos / "renamed.txt").write_text("a house in the rain\na red house\n")
    (photos / "b.txt").write_text("\n  a blue car \n\n")
    check(num_samples=6)
    photos.rename(tmp_path / "moved")
    settings["datasets.0.source"] = {"kind": "folder", "path": "moved"}
    check(num_samples=6)


def test_what_does_not_change_a_value_is_a_hit(filled: tuple[Path, Report], monkeypatch: pytest.MonkeyPatch) -> None:
    """All at once, with the decoder of the VAE, and as another rank."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    models = models_of(change=lambda parts: parts["vae"].decoder.conv_in.weight.data.add_(1))
    report = plan_of(filled[0], models, **SETTINGS)
    assert (report.num_misses, report.num_hits, report.num_refused) == (0, 27, 0)


def test_an_image_changed_within_the_same_time_stamp_is_noticed(
    make_config: Callable[..., Config], photos: Path
) -> None:
    """Digests of files that have just changed are not remembered: they may change again within the clock's step."""
    config = make_config()
    run_precache(config, models=models_of())
    stat = (photos / "a.png").stat()
    one_pixel(photos)
    os.utime(photos / "a.png", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert run_precache(config, models=models_of(), dry_run=True).misses_by_reason == {"image changed": 1}
