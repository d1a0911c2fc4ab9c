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
from latentcache.interop.exporting import Export, ExportSample
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


def copy(
    samples: list[ExportSample], folder: Path, change: Any = lambda tensor: tensor, output: Any = "mean", **of: str
) -> Foreign:
    """These samples as a foreign cache, their values changed."""
    items: list[ForeignItem] = []
    for each in samples:
        name, image_path = each.row.sample_id, folder / each.row.sample_id
        for flip, latents in ((False, each.latents), (True, each.flipped)):
            if latents is not None:
                geometry = replace(each.geometry, flip=flip)
                items.append(ForeignImage(name, "f", image_path, change(latents), False, output, geometry))
        for caption, entry in each.captions:
            tensors = {field: change(tensor) for field, tensor in entry.tensors.items()}
            items.append(ForeignText((name,), "f", caption, **tensors))
    return Foreign(items, **of)


def samples_of(config: Config, seed: int | None = None) -> list[ExportSample]:
    """The samples of a cache; with a seed their latents are draws of its moments."""
    with LatentCache(config.cache.path) as cache:
        samples = list(Export("", cache, "photos", "", {}, families={"sdxl"}, takes=()).samples())
        if seed is None:
            return samples
        generator = torch.Generator().manual_seed(seed)
        moments = [cache.get(sample.row.images[0].key).tensors["moments"] for sample in samples]
        drawn = [latents_from_moments(each[None], generator)[0] for each in moments]
        return [replace(sample, latents=latents) for sample, latents in zip(samples, drawn, strict=True)]


@pytest.fixture
def target(make_config: Callable[..., Config], tmp_path: Path) -> Config:
    """A config over the same photos, with an empty cache of its own."""
    return make_config(**{"cache.path": tmp_path / "target", "datasets.0.flip": True})


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> list[ExportSample]:
    """What the tiny SDXL gives for the photos, with flipped twins."""
    folder = tmp_path_factory.mktemp("origin")
    write_photos(folder / "photos")
    config = tiny_config(folder, **{"datasets.0.flip": True})
    run_precache(config)
    return samples_of(config)


def verified(config: Config, foreign: Any, **options: Any) -> ImportReport:
    with open_workspace(config.cache) as workspace:
        verification = Verification(config, **{"num_entries": "all", **options})
        return import_cache(foreign, workspace, name="photos", scale_check=False, verification=verification)


def compared(report: ImportReport) -> dict[str, tuple[int, int]]:
    """By kind, how many entries were compared, and how many are equal."""
    return {kind: (found.num_compared, found.num_equal) for kind, found in report.differences.items()}


NO_TEXTS = "texts were not compared: encode.text of the config is none"


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
    target: Config,
    samples: list[ExportSample],
    photos: Path,
    encode: dict[str, Any],
    num_entries: Any,
    expected: dict[str, tuple[int, int]],
) -> None:
    config = target.model_copy(update={"encode": target.encode.model_copy(update=encode)})
    report = verified(config, copy(samples, photos), num_entries=num_entries)
    assert report.unequal == [] and compared(report) == expected
    assert max(found.largest_share for found in report.differences.values()) < 1
    assert report.notes == ({} if "text" in expected else {NO_TEXTS: 1})
    with LatentCache(config.cache.path) as cache:
        assert cache.store.stats().num_packs == 1, "nothing is stored but the import"
        with pytest.raises(SampleError, match="unverified"):
            cache.batch(["a.png"], device="cpu")


def test_what_is_not_equal_stays_unverified_and_is_encoded(
    target: Config, samples: list[ExportSample], photos: Path
) -> None:
    def shifted(tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor.clone()
        changed.view(-1)[7] += 0.05
        return changed

    report = verified(target, copy(samples, photos, shifted))
    assert len(report.unequal) == 15
    assert {refusal.reason for refusal in report.unequal} == {"unequal"}
    assert all(found.largest == pytest.approx(0.05, abs=1e-3) for found in report.differences.values())
    assert "largest difference 0.05" in report.to_text() and "encoding gives other latents" in report.to_text()
    planned = run_precache(target, dry_run=True)
    # The empty caption of d.png counts as the empty prompt, which is new.
    assert planned.num_hits == 0 and planned.misses_by_reason["imported, unverified"] == 14
    assert "imported, unverified" in explain(target, "a.png").to_text()


def test_rounding_is_equal_where_the_file_is_rounded(target: Config, samples: list[ExportSample], photos: Path) -> None:
    """Scaled latents are rounded as they are in their file, which is not how they are stored."""
    items = [
        replace(item, latents=(item.latents * 0.13025).bfloat16(), is_scaled=True)
        if isinstance(item, ForeignImage)
        else replace(item, **{name: getattr(item, name).half() for name in ("prompt_embeds", "pooled_prompt_embeds")})
        for item in copy(samples, photos).items()
    ]
    report = verified(target, Foreign(items))
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
    drawn = samples_of(of_kohya, seed=3)
    report = verified(target, copy(drawn, photos, output="sample", format="kohya"), models=models)
    found = report.differences["image"]
    assert found.largest_deviations == pytest.approx(1.0, abs=0.1)
    assert (found.num_compared, found.num_equal, found.num_draws) == (5, 0, 5)
    assert report.unequal == []
    assert "5 draws of the posterior, at most" in report.to_text() and "deviations off" in report.to_text()
    # A draw that is the mean is one.
    means = copy(samples_of(of_kohya), photos, output="sample", format="kohya")
    report = verified(target, means, models=models)
    assert report.unequal == [] and compared(report)["image"] == (5, 5)
    # Without that filter they are no draws of what encoding gives: so it was for every trainer.
    report = verified(target, copy(drawn, photos, output="sample"), models=models)
    far = report.differences["image"]
    assert far.num_draws == 0 and far.largest_deviations is not None and far.largest_deviations > 5
    assert len(report.unequal) == 5 and "a draw of the posterior is 1 deviation from its mean" in report.to_text()


def test_what_cannot_be_encoded_again_says_why(target: Config, samples: list[ExportSample], photos: Path) -> None:
    (photos / "a.png").unlink()
    (photos / "b.png").write_bytes((photos / "b.png").read_bytes()[:100])
    write_photo(photos / "c.png", 2, (100, 80))
    items = [
        replace(item, caption=None) if isinstance(item, ForeignText) and item.sample_ids == ("sub/e.png",) else item
        for item in copy(samples, photos).items()
    ]
    report = verified(target, Foreign(items))
    details = {(refusal.sample_id, refusal.reason): refusal.detail for refusal in report.unequal}
    assert "give --images" in details["a.png", "missing"]
    assert ("b.png", "truncated") in details
    assert "the image is 100x80 now (upright), but one of 144x80 was cached" in details["c.png", "unequal"]
    assert details["sub/e.png", "missing"] == "its caption is not known, so it cannot be encoded again"
    assert compared(report) == {"image": (4, 4), "text": (4, 4)}
    of_another = [
        image("d.png", image_path=write_photo(photos / "d.png", 0, (80, 160)), latents=torch.randn(16, 8, 16))
    ]
    assert "it comes from another model" in verified(target, Foreign(of_another)).unequal[0].detail


def test_the_config_must_say_which_images_policy(target: Config, samples: list[ExportSample], photos: Path) -> None:
    named = tuple(target.datasets[0].model_copy(update={"name": name}) for name in ("x", "y"))
    with pytest.raises(ConfigError, match="none of the datasets x, y is named 'photos'"):
        verified(target.model_copy(update={"datasets": named}), copy(samples, photos))


def test_an_encoder_that_gives_nan_verifies_nothing(target: Config, samples: list[ExportSample], photos: Path) -> None:
    components = tiny_parts()
    for module in (components["vae"].quant_conv, components["text_encoder_2"].text_projection):
        torch.nn.init.constant_(module.weight, math.nan)
    report = verified(target, copy(samples, photos), models=LoadedModels(**components))
    assert report.differences == {}
    assert len(report.unequal) == 15 and {refusal.reason for refusal in report.unequal} == {"bad-output"}
    assert all("there is nothing to compare with" in refusal.detail for refusal in report.unequal)
