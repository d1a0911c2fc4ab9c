"""Samples of several parts in a precache: their entries, keys, refusals, and why they are misses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.photo_files import write_photo
from PIL import Image

import latentcache.identity as fingerprint
from latentcache import LatentCache
from latentcache.config import Config
from latentcache.config_file import parse_config
from latentcache.dataset.masks import luma, prepare_mask
from latentcache.dataset.row_table import Row
from latentcache.errors import ConfigError
from latentcache.families.sdxl import FAMILY as SDXL
from latentcache.loading.status import status, verify
from latentcache.models.model_loader import LoadedModels
from latentcache.models.tiny import tiny_parts
from latentcache.precache.explanation import explain
from latentcache.precache.preparation import Preparations
from latentcache.precache.report import Report
from latentcache.precache.run import run_precache
from latentcache.types import Crop, Geometry, Size

NAMES = ("a", "b")


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """Two images with a control image and a mask each. The control image of b is the image of a."""
    for number, name in enumerate(NAMES):
        write_photo(tmp_path / f"after/{name}.png", number, (80, 144))
        (tmp_path / f"after/{name}.txt").write_text(f"photo {name}")
        write_mask(tmp_path / f"masks/{name}.png", number)
    write_photo(tmp_path / "before/a.png", 7, (40, 72))
    (tmp_path / "before/b.png").write_bytes((tmp_path / "after/a.png").read_bytes())
    return tmp_path


def write_mask(path: Path, seed: int, size: tuple[int, int] = (80, 144)) -> None:
    path.parent.mkdir(exist_ok=True)
    values = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    Image.fromarray(values).save(path)


def config_of(folder: Path, *, encode: dict[str, Any] | None = None, salt: str = "", **dataset: Any) -> Config:
    return parse_config(
        {
            "cache": {"path": folder / "cache", "salt": salt},
            "datasets": [
                {
                    "name": "pairs",
                    "source": {"path": folder / "after"},
                    "buckets": {"area": 96 * 96, "step": 32},
                    "images": {"min_side": 8},
                    "control": {"path": folder / "before"},
                    "mask": {"path": folder / "masks"},
                    **dataset,
                }
            ],
            "model": {"path": "tiny"},
            "encode": {"device": "cpu", "num_workers": 2, **(encode or {})},
        }
    )


def run(config: Config, **options: Any) -> Report:
    return run_precache(config, models=LoadedModels(**tiny_parts()), **options)


def row_of(config: Config, sample_id: str) -> Row:
    with LatentCache(config.cache) as cache:
        return cache.manifest("pairs").rows[sample_id]


def entry_of(config: Config, sample_id: str, name: str, *, flip: bool = False) -> dict[str, torch.Tensor]:
    key = next(ref.key for ref in row_of(config, sample_id).parts_of(flip=flip) if ref.role == name)
    with LatentCache(config.cache) as cache:
        return dict(cache.get(key).tensors)


def test_parts_are_encoded_once_and_a_second_run_encodes_nothing(pairs: Path) -> None:
    config = config_of(pairs)
    first = run(config)
    # Images, captions and the empty prompt; then controls and masks.
    assert (first.num_samples, first.num_refused, first.num_misses) == (2, 0, 2 + 3 + 2 + 2)
    assert first.misses_by_reason == {"new": 5, "control 1: new": 2, "mask: new": 2}
    assert run(config).num_misses == 0
    found = status(config.cache)
    assert found.store["num_entries"] == {"image": 4, "mask": 2, "text": 3}
    assert (found.num_unused, found.num_lost) == (0, 0)
    assert not verify(config.cache).damaged


def test_a_control_image_is_the_mean_of_its_posterior_in_the_bucket_of_its_image(pairs: Path) -> None:
    config = config_of(pairs)
    run(config)
    # The control image of b is the image of a, whose moments have the same mean.
    mean = entry_of(config, "b.png", "control 1")
    with LatentCache(config.cache) as cache:
        moments = cache.get(row_of(config, "a.png").images[0].key).tensors["moments"]
    assert list(mean) == ["latents"]
    torch.testing.assert_close(mean["latents"], moments.chunk(2)[0], rtol=0, atol=1e-6)
    image, control = row_of(config, "a.png").images[0].geometry, row_of(config, "a.png").parts[0].geometry
    assert control == dataclasses.replace(image, original_size=Size(40, 72)), "it lies on its image"


def test_a_control_image_may_have_buckets_of_its_own(pairs: Path) -> None:
    config = config_of(pairs, control={"path": pairs / "before", "area": 64 * 64})
    run(config)
    assert row_of(config, "a.png").parts[0].geometry.target_size == Size(64, 64)
    assert entry_of(config, "a.png", "control 1")["latents"].shape[-2:] == (8, 8)


def test_where_images_are_means_an_equal_image_is_one_entry(pairs: Path) -> None:
    config = config_of(pairs, encode={"image_output": "mean"})
    run(config)
    assert row_of(config, "b.png").parts[0].key == row_of(config, "a.png").images[0].key
    assert status(config.cache).store["num_entries"]["image"] == 3


def test_a_mask_is_the_mean_of_the_squares_of_pixels(pairs: Path) -> None:
    config = config_of(pairs, flip=True)
    run(config)
    [_, part] = row_of(config, "a.png").parts[::2]
    geometry = part.geometry
    values = np.asarray(Image.open(pairs / "masks/a.png"))
    (top, left), (height, width) = geometry.crop_top_left, geometry.target_size
    resized = Image.fromarray(values).resize(geometry.resized_size[::-1], Image.Resampling.BOX)
    cut = torch.from_numpy(np.asarray(resized)[top : top + height, left : left + width].astype(np.float32))
    expected = torch.nn.functional.interpolate(cut[None, None], (height // 8, width // 8), mode="area")[0]
    mask = entry_of(config, "a.png", "mask")["mask"]
    assert mask.dtype == torch.uint8 and mask.shape == (1, height // 8, width // 8)
    assert (mask.float() - expected).abs().max() <= 0.5 + 1e-3
    assert torch.equal(entry_of(config, "a.png", "mask", flip=True)["mask"], mask.flip(-1))


def test_all_parts_are_mirrored_with_their_image(pairs: Path) -> None:
    config = config_of(pairs, flip=True)
    run(config)
    row = row_of(config, "b.png")
    assert [(ref.role, ref.geometry.flip) for ref in row.parts] == [
        *(("control 1", False), ("control 1", True), ("mask", False), ("mask", True))
    ]
    mirrored = entry_of(config, "b.png", "control 1", flip=True)
    with LatentCache(config.cache) as cache:  # the image of a, mirrored, is the mirrored control image of b
        moments = cache.get(row_of(config, "a.png").images[1].key).tensors["moments"]
    torch.testing.assert_close(mirrored["latents"], moments.chunk(2)[0], rtol=0, atol=1e-6)


def test_a_mask_may_be_the_alpha_channel(pairs: Path) -> None:
    alpha = np.random.default_rng(1).integers(0, 256, (80, 144), dtype=np.uint8)
    image = Image.open(pairs / "after/a.png").convert("RGB")
    image.putalpha(Image.fromarray(alpha))
    image.save(pairs / "after/a.png")
    config = config_of(pairs, mask="alpha", control=[])
    report = run(config)
    assert report.num_refused == 0
    geometry = row_of(config, "a.png").images[0].geometry
    assert np.array_equal(entry_of(config, "a.png", "mask")["mask"], prepare_mask(alpha, geometry, 8))
    assert (entry_of(config, "b.png", "mask")["mask"] == 255).all(), "an image without alpha counts everywhere"
    # The colour that the image is composited on does not change its alpha.
    again = run(config_of(pairs, mask="alpha", control=[], images={"min_side": 8, "alpha_colour": "#000000"}))
    assert not any(reason.startswith("mask") for reason in again.misses_by_reason)


def test_luma_is_that_of_pillow() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    assert np.array_equal(luma(pixels), np.asarray(Image.fromarray(pixels).convert("L")))
    with pytest.raises(ValueError, match="pixels are uint8"):
        prepare_mask(luma(pixels), Geometry(Size(1, 1), Size(1, 1), Crop(0, 0), Size(1, 1)), 1)


def corrupt(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("harm", "name", "reason", "message"),
    [
        (Path.unlink, "before/a.png", "missing", "control 1: there is no image a in"),
        (corrupt, "before/a.png", "corrupt", "control 1: "),
        (corrupt, "masks/a.png", "corrupt", "mask: "),
        (lambda path: path.write_bytes(b""), "masks/a.png", "empty", "mask: "),
        (
            lambda path: write_mask(path, 1, (80, 80)),
            "masks/a.png",
            "other-shape",
            "mask: it is 80x80, its image 80x144",
        ),
    ],
)
def test_a_bad_part_refuses_its_sample_by_name_and_nothing_else(
    pairs: Path, harm: Callable[[Path], Any], name: str, reason: str, message: str
) -> None:
    harm(pairs / name)
    config = config_of(pairs)
    report = run(config)
    [refusal] = report.refused
    assert (refusal.sample_id, refusal.reason) == ("a.png", reason) and refusal.detail.startswith(message)
    assert row_of(config, "a.png").refusal == refusal and row_of(config, "b.png").refusal is None
    assert status(config.cache).num_lost == 0
    if reason not in ("missing", "other-shape"):
        assert Path(refusal.path) == pairs / name


def other_control(folder: Path) -> None:
    write_photo(folder / "before/a.png", 8, (40, 72))


def other_mask(folder: Path) -> None:
    write_mask(folder / "masks/a.png", 9)


def one_bit(parts: dict[str, Any]) -> None:
    next(parts["vae"].parameters()).data.view(torch.int32).reshape(-1)[0] ^= 1


CHANGES: list[tuple[str, tuple[str, ...], dict[str, Any], dict[str, int]]] = [
    ("control", (), {"edit": other_control}, {"control 1: image changed": 1}),
    ("mask", ("mask.source",), {"edit": other_mask}, {"mask: image changed": 1}),
    (
        "area of the control",
        (),
        {"dataset": {"control": {"area": 64 * 64}}},
        {"control 1: bucket changed (64x128 -> 64x64)": 2},
    ),
    ("another suffix of the same file", (), {"suffix": "_1"}, {}),
    ("mask's preparation", ("preparation",), {"dataset": {"mask": "alpha"}}, {"mask: ": 2}),
    ("downscale", ("mask.downscale",), {"downscale": 16}, {"mask: downscale changed": 2}),
    ("salt", ("mask.salt",), {"salt": "x"}, {"mask: salt changed": 2}),
    ("schema", ("mask.schema",), {"schema": 2}, {"mask: schema changed": 2}),
    ("kind", ("mask.kind",), {"kind": "other"}, {"mask: entry lost": 2}),
    ("vae", (), {"models": one_bit}, {"control 1: vae changed": 2}),
    ("output of images", (), {"encode": {"image_output": "mean"}}, {"output changed (moments -> mean)": 1}),
]


def test_every_field_of_a_mask_has_a_row() -> None:
    fields = {field.name for field in dataclasses.fields(fingerprint.MaskIdentity)}
    covered = {name.removeprefix("mask.") for _, names, _, _ in CHANGES for name in names}
    assert fields == covered


@pytest.mark.parametrize(("name", "fields", "change", "expected"), CHANGES, ids=[name for name, *_ in CHANGES])
def test_each_input_of_a_part_changed_alone_is_a_miss_with_its_reason(
    name: str,
    fields: tuple[str, ...],
    change: dict[str, Any],
    expected: dict[str, int],
    pairs: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run(config_of(pairs))
    change.get("edit", lambda folder: None)(pairs)
    dataset = dict(change.get("dataset", {}))
    if "area" in dataset.get("control", {}):
        dataset["control"] = {"path": pairs / "before", **dataset["control"]}
    if "suffix" in change:
        for file in NAMES:
            (pairs / f"before/{file}.png").rename(pairs / f"before/{file}{change['suffix']}.png")
        dataset["control"] = {"path": pairs / "before", "suffix": change["suffix"]}
    parts = tiny_parts()
    change.get("models", lambda parts: None)(parts)
    if "downscale" in change:
        genuine = Preparations.__init__

        def patched(self: Preparations, *arguments: Any) -> None:
            genuine(self, *arguments)
            self.downscale = change["downscale"]

        monkeypatch.setattr(Preparations, "__init__", patched)
    if "schema" in change or "kind" in change:
        to_json = fingerprint.MaskIdentity.to_json
        monkeypatch.setattr(
            fingerprint.MaskIdentity,
            "to_json",
            lambda self: to_json(self) | {key: value for key, value in change.items() if key in ("schema", "kind")},
        )
    if "schema" in change:
        monkeypatch.setattr("latentcache.precache.plan.SCHEMA", 2)
    config = config_of(pairs, encode=change.get("encode"), salt=change.get("salt", ""), **dataset)
    report = run_precache(config, models=LoadedModels(**parts), dry_run=True)
    found = report.misses_by_reason
    if name in ("salt", "vae", "schema"):  # they change other entries too
        found = {reason: number for reason, number in found.items() if reason.startswith(tuple(expected))}
    shown = {start: number for start in expected for reason, number in found.items() if reason.startswith(start)}
    assert shown == expected and len(found) == len(expected), report.misses_by_reason


def test_explain_names_the_roles(pairs: Path) -> None:
    config = config_of(pairs)
    run(config)
    other_control(pairs)
    text = explain(config, "a.png", models=LoadedModels(**tiny_parts())).to_text()
    [control] = [line for line in text.splitlines() if "control 1" in line]
    [mask] = [line for line in text.splitlines() if "mask" in line]
    assert "miss: control 1: image changed" in control and "image" in control
    assert "hit" in mask and "(mask, 64x128)" in mask


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """SDXL as a family whose text encoder reads the control images with the text: as words of the caption."""

    def tokenize(family: Any, parts: Any, texts: list[str], images: list[list[np.ndarray]]) -> Any:
        words = [" ".join(f"{each.shape[0]} {int(each.sum())}" for each in group) for group in images]
        return family.tokenize(parts, [f"{text} {more}" for text, more in zip(texts, words, strict=True)])

    monkeypatch.setattr(type(SDXL), "text_reads_control", True)
    monkeypatch.setattr(type(SDXL), "tokenize_with_control", tokenize)


@pytest.mark.usefixtures("reading")
def test_a_damaged_control_image_costs_the_text_of_its_sample_alone(pairs: Path) -> None:
    corrupt(pairs / "before/a.png")
    config = config_of(pairs)
    report = run(config)
    assert [(refusal.sample_id, refusal.reason) for refusal in report.refused] == [("a.png", "corrupt")]
    assert "control image" in report.refused[0].detail and row_of(config, "b.png").refusal is None


@pytest.mark.usefixtures("reading")
def test_a_family_that_reads_control_images_needs_them(pairs: Path) -> None:
    with pytest.raises(ConfigError, match="sdxl reads captions together with control images; give dataset pairs some"):
        run(config_of(pairs, control=[]))
