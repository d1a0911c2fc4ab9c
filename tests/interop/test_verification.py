"""A verification says how imported entries differ from what encoding gives."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.foreign_samples import Foreign, image
from helpers.photo_files import write_photo, write_photos
from helpers.tiny_configs import tiny_config

from latentcache.config import Config
from latentcache.errors import ConfigError, SampleError
from latentcache.families.scaling import latents_from_moments
from latentcache.interop.importing import import_cache
from latentcache.interop.readers import ForeignImage, ForeignItem, ForeignText
from latentcache.interop.reports import ImportReport
from latentcache.interop.verification import Verification
from latentcache.loading.cache import LatentCache
from latentcache.models.model_loader import LoadedModels
from latentcache.models.tiny import tiny_parts
from latentcache.precache.explanation import explain
from latentcache.precache.run import run_precache
from latentcache.precache.workspace import open_workspace

Items = list[ForeignItem]


def items_of(config: Config, images: Path, seed: int | None = None, output: Any = "mean") -> Items:
    """What is cached, as items of a foreign cache; with a seed the latents are draws of its moments."""
    items, generator = Items(), None if seed is None else torch.Generator().manual_seed(seed)
    with LatentCache(config.cache.path) as cache:
        for name, row in cache.manifest("photos").rows.items():
            for ref in row.images:
                latents = latents_from_moments(cache.get(ref.key).tensors["moments"][None], generator)[0]
                items.append(ForeignImage(name, "f", images / name, latents, False, output, ref.geometry))
            for caption in row.captions:
                items.append(ForeignText((name,), "f", caption.text, **cache.get(caption.key).tensors))
    return items


def changed(items: Items, of_image: Callable[[torch.Tensor], Any], of_text: Callable[[torch.Tensor], Any]) -> Items:
    """These items with other values."""
    names = ("prompt_embeds", "pooled_prompt_embeds")
    return [
        replace(item, latents=of_image(item.latents))
        if isinstance(item, ForeignImage)
        else replace(item, **{name: of_text(getattr(item, name)) for name in names})
        for item in items
    ]


@pytest.fixture
def target(make_config: Callable[..., Config], tmp_path: Path) -> Config:
    """A config over the same photos, with an empty cache of its own."""
    return make_config(**{"cache.path": tmp_path / "target", "datasets.0.flip": True})


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("origin")
    write_photos(folder / "photos")
    config = tiny_config(folder, **{"datasets.0.flip": True})
    run_precache(config)
    return config


@pytest.fixture
def items(origin: Config, photos: Path) -> Items:
    """What the tiny SDXL gives for the photos, with flipped twins."""
    return items_of(origin, photos)


def verified(config: Config, items: Items, format_name: str = "test", **options: Any) -> ImportReport:
    foreign = Foreign(items, format_name)
    with open_workspace(config.cache) as workspace:
        verification = Verification(config, **{"num_entries": "all", **options})
        return import_cache(foreign, workspace, name="photos", scale_check=False, verification=verification)


def compared(report: ImportReport) -> dict[str, tuple[int, int]]:
    """By kind, how many entries were compared, and how many are equal."""
    return {kind: (found.num_compared, found.num_equal) for kind, found in report.differences.items()}


@pytest.mark.parametrize(
    ("encode", "num_entries", "expected"),
    [
        ({}, "all", {"image": (10, 10), "text": (5, 5)}),  # of 6 captions two are one entry
        ({"image_output": "sample", "store_dtype": "float16"}, "all", {"image": (10, 10), "text": (5, 5)}),
        ({"text": "none"}, "all", {"image": (10, 10)}),
        ({}, 2, {"image": (2, 2), "text": (2, 2)}),
    ],
)
def test_what_encoding_gives_is_equal_whatever_is_stored(
    target: Config, items: Items, encode: dict[str, Any], num_entries: Any, expected: dict[str, tuple[int, int]]
) -> None:
    config = target.model_copy(update={"encode": target.encode.model_copy(update=encode)})
    report = verified(config, items, num_entries=num_entries)
    assert report.unequal == [] and compared(report) == expected
    assert max(found.largest_share for found in report.differences.values()) < 1
    no_texts = "texts were not compared: encode.text of the config is none"
    assert report.notes == ({} if "text" in expected else {no_texts: 1})
    with LatentCache(config.cache.path) as cache:
        assert cache.store.stats().num_packs == 1, "nothing is stored but the import"
        with pytest.raises(SampleError, match="unverified"):
            cache.batch(["a.png"], device="cpu")


def test_what_is_not_equal_stays_unverified_and_is_encoded(target: Config, items: Items) -> None:
    def shifted(tensor: torch.Tensor) -> torch.Tensor:
        return tensor + 0.05 * (torch.arange(tensor.numel()) == 7).reshape(tensor.shape)

    report = verified(target, changed(items, shifted, shifted))
    assert len(report.unequal) == 15
    assert {refusal.reason for refusal in report.unequal} == {"unequal"}
    assert all(found.largest == pytest.approx(0.05, abs=1e-3) for found in report.differences.values())
    assert "largest difference 0.05" in report.to_text() and "encoding gives other latents" in report.to_text()
    planned = run_precache(target, dry_run=True)
    # The empty caption of d.png counts as the empty prompt, which is new.
    assert planned.num_hits == 0 and planned.misses_by_reason["imported, unverified"] == 14
    assert "imported, unverified" in explain(target, "a.png").to_text()


def test_rounding_is_equal_where_the_file_is_rounded(target: Config, items: Items) -> None:
    """Scaled latents are rounded as they are in their file, which is not how they are stored."""
    rounded = changed(items, lambda latents: (latents * 0.13025).bfloat16(), torch.Tensor.half)
    rounded = [replace(item, is_scaled=True) if isinstance(item, ForeignImage) else item for item in rounded]
    report = verified(target, rounded)
    assert report.unequal == [] and compared(report) == {"image": (10, 10), "text": (5, 5)}
    assert min(found.largest for found in report.differences.values()) > 0


KOHYA = {"rule": "kohya", "resolution": 96, "step": 32, "min_side": 32}


def test_draws_of_resized_images_are_compared_with_the_trainers_own_filter(
    target: Config, make_config: Callable[..., Config], tmp_path: Path, photos: Path
) -> None:
    parts = tiny_parts()
    with torch.no_grad():  # a posterior as narrow as the real one's: another filter is far outside it
        parts["vae"].quant_conv.weight[4:].zero_()
        parts["vae"].quant_conv.bias[4:].fill_(-16)
    models = LoadedModels(**parts)
    of_kohya = make_config(**{"cache.path": tmp_path / "origin", "datasets.0.buckets": KOHYA})
    run_precache(of_kohya, models=models)
    drawn = items_of(of_kohya, photos, seed=3, output="sample")
    report = verified(target, drawn, "kohya", models=models)
    found = report.differences["image"]
    assert found.largest_deviations == pytest.approx(1.0, abs=0.1)
    assert (found.num_compared, found.num_equal, found.num_draws) == (5, 0, 5)
    assert report.unequal == []
    assert "5 draws of the posterior, at most" in report.to_text() and "deviations off" in report.to_text()
    # A draw that is the mean is one.
    report = verified(target, items_of(of_kohya, photos, output="sample"), "kohya", models=models)
    assert report.unequal == [] and compared(report)["image"] == (5, 5)
    # Without that filter they are no draws of what encoding gives: so it was for every trainer.
    report = verified(target, drawn, models=models)
    far = report.differences["image"]
    assert far.num_draws == 0 and far.largest_deviations is not None and far.largest_deviations > 5
    assert len(report.unequal) == 5 and "a draw of the posterior is 1 deviation from its mean" in report.to_text()


def test_what_cannot_be_encoded_again_says_why(target: Config, items: Items, photos: Path) -> None:
    (photos / "a.png").unlink()
    (photos / "b.png").write_bytes((photos / "b.png").read_bytes()[:100])
    write_photo(photos / "c.png", 2, (100, 80))
    items = [
        replace(item, caption=None) if isinstance(item, ForeignText) and item.sample_ids == ("sub/e.png",) else item
        for item in items
    ]
    report = verified(target, items)
    details = {(refusal.sample_id, refusal.reason): refusal.detail for refusal in report.unequal}
    assert "give --images" in details["a.png", "missing"]
    assert ("b.png", "truncated") in details
    assert "the image is 100x80 now (upright), but one of 144x80 was cached" in details["c.png", "unequal"]
    assert details["sub/e.png", "missing"] == "its caption is not known, so it cannot be encoded again"
    assert compared(report) == {"image": (4, 4), "text": (4, 4)}
    other = image("d.png", image_path=write_photo(photos / "d.png", 0, (80, 160)), latents=torch.randn(16, 8, 16))
    assert "it comes from another model" in verified(target, [other]).unequal[0].detail


def test_the_config_must_say_which_images_policy(target: Config, items: Items) -> None:
    named = tuple(target.datasets[0].model_copy(update={"name": name}) for name in ("x", "y"))
    with pytest.raises(ConfigError, match="none of the datasets x, y is named 'photos'"):
        verified(target.model_copy(update={"datasets": named}), items)


def test_an_encoder_that_gives_nan_verifies_nothing(target: Config, items: Items) -> None:
    components = tiny_parts()
    for module in (components["vae"].quant_conv, components["text_encoder_2"].text_projection):
        torch.nn.init.constant_(module.weight, math.nan)
    report = verified(target, items, models=LoadedModels(**components))
    assert report.differences == {}
    assert len(report.unequal) == 15 and {refusal.reason for refusal in report.unequal} == {"bad-output"}
    assert all("there is nothing to compare with" in refusal.detail for refusal in report.unequal)
