"""An imported entry is verified only if encoding gives it; then precache finds it, and otherwise it does not."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from latentcache.config import Config
from latentcache.errors import ConfigError
from latentcache.families.scaling import posterior_std
from latentcache.interop.exporting import Export, ExportSample
from latentcache.interop.importing import import_cache
from latentcache.interop.readers import ForeignImage, ForeignItem, ForeignText
from latentcache.interop.reports import ImportReport
from latentcache.interop.verification import RELATIVE, Verification, compare
from latentcache.loading.cache import LatentCache
from latentcache.models.model_loader import LoadedModels
from latentcache.models.tiny import tiny_parts
from latentcache.precache.explanation import explain
from latentcache.precache.run import run_precache
from latentcache.precache.workspace import open_workspace


@dataclass
class Copy:
    """A cache of ours as a foreign one, its values changed by `change`."""

    samples: list[ExportSample]
    folder: Path
    change: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor
    output: Any = "mean"
    format: str = "copy"
    family: str = "sdxl"

    def items(self) -> Iterator[ForeignItem]:
        for sample in self.samples:
            twins = [(False, sample.latents), (True, sample.flipped)]
            for flip, latents in twins:
                if latents is not None:
                    yield ForeignImage(
                        sample_id=sample.sample_id,
                        path=sample.path,
                        image_path=self.folder / sample.sample_id,
                        latents=self.change(latents),
                        is_scaled=False,
                        output=self.output,
                        geometry=replace(sample.geometry, flip=flip),
                    )
            for caption in sample.captions:
                yield ForeignText(
                    sample_ids=(sample.sample_id,),
                    path=sample.path,
                    caption=caption.text,
                    prompt_embeds=self.change(caption.prompt_embeds),
                    pooled_prompt_embeds=self.change(caption.pooled_prompt_embeds),
                )


def samples_of(config: Config, seed: int | None = None) -> list[ExportSample]:
    with LatentCache(config.cache.path) as cache:
        return list(Export("", cache, "photos", "", {"seed": seed}).samples())


@pytest.fixture
def target(make_config: Callable[..., Config], tmp_path: Path) -> Config:
    """A config over the same photos, with an empty cache of its own, that keeps the mean."""
    return make_config(**{"cache.path": tmp_path / "target", "encode.image_output": "mean", "datasets.0.flip": True})


@pytest.fixture
def samples(make_config: Callable[..., Config], tmp_path: Path) -> list[ExportSample]:
    """What the tiny SDXL gives for the photos, with flipped twins."""
    config = make_config(**{"cache.path": tmp_path / "origin", "datasets.0.flip": True})
    run_precache(config)
    return samples_of(config)


def verified(config: Config, foreign: Any, **options: Any) -> ImportReport:
    with open_workspace(config.cache) as workspace:
        verification = Verification(config, **{"num_entries": "all", **options})
        return import_cache(foreign, workspace, name="photos", scale_check=False, verification=verification)


def test_precache_finds_what_was_verified(target: Config, samples: list[ExportSample], photos: Path) -> None:
    report = verified(target, Copy(samples, photos))
    # 10 latents, and 6 captions of samples, of which two are one entry.
    assert (report.num_verified, report.num_unverified, report.unequal) == (16, 0, [])
    with LatentCache(target.cache.path) as cache:
        assert cache.store.stats().num_packs == 2  # however many entries: one of the import, one of what was verified
    assert {kind: (found.num_compared, found.num_equal) for kind, found in report.differences.items()} == {
        "image": (10, 10),
        "text": (5, 5),
    }
    assert max(found.largest_share for found in report.differences.values()) < 1
    # As it stands it can be trained on ...
    with LatentCache(target.cache.path) as cache:
        batch = cache.batch(["a.png"], device="cpu", caption=1)
        expected = next(sample for sample in samples if sample.sample_id == "a.png")
        assert torch.equal(batch["latents"][0], expected.latents)
        record = cache.store.record(cache.row("a.png")[1].images[0].key)
        assert record.provenance["verification"]["trust"] == "verified"
        assert record.provenance["imported_from"] == "copy" and "imported" not in record.identity
    # ... and a run encodes only what the import did not have: the validation prompts.
    planned = run_precache(target, dry_run=True)
    assert planned.num_hits == 15 and planned.misses_by_reason == {"new": planned.num_misses}
    assert planned.num_misses == 2
    run_precache(target)
    with LatentCache(target.cache.path) as cache:
        assert torch.equal(cache.batch(["a.png"], device="cpu")["latents"][0], expected.latents)


def test_what_is_not_equal_stays_unverified_and_is_encoded(
    target: Config, samples: list[ExportSample], photos: Path
) -> None:
    def shifted(tensor: torch.Tensor) -> torch.Tensor:
        changed = tensor.clone()
        changed.view(-1)[7] += 0.05
        return changed

    report = verified(target, Copy(samples, photos, shifted))
    assert report.num_verified == 0 and len(report.unequal) == 15
    assert {refusal.reason for refusal in report.unequal} == {"unequal"}
    assert all(found.largest == pytest.approx(0.05, abs=1e-3) for found in report.differences.values())
    assert "largest difference 0.05" in report.to_text() and "encoding gives other latents" in report.to_text()
    planned = run_precache(target, dry_run=True)
    # The empty caption of d.png counts as the empty prompt, which is new.
    assert planned.num_hits == 0 and planned.misses_by_reason["imported, unverified"] == 14
    assert "imported, unverified" in explain(target, "a.png").to_text()


def test_rounding_is_equal_where_the_file_is_rounded(target: Config, samples: list[ExportSample], photos: Path) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        report = verified(target, Copy(samples, photos, lambda tensor, dtype=dtype: tensor.to(dtype)))
        assert report.unequal == [] and report.num_verified == 16
        assert max(found.largest for found in report.differences.values()) > 0
        with LatentCache(target.cache.path) as cache:  # stored as the identity says
            assert cache.batch(["a.png"], device="cpu")["latents"].dtype is torch.float32


def test_a_draw_is_compared_with_the_mean_and_the_deviation(
    make_config: Callable[..., Config], target: Config, tmp_path: Path, photos: Path
) -> None:
    config = make_config(**{"cache.path": tmp_path / "origin"})
    run_precache(config)
    drawn = samples_of(config, seed=3)
    report = verified(target, Copy(drawn, photos, output="sample"))
    found = report.differences["image"]
    assert found.num_equal == 0 and found.largest > 0.01
    assert found.largest_deviations == pytest.approx(1.0, abs=0.1)
    assert found.num_draws == 5 and report.unequal == [] and report.num_verified == 6
    assert "5 draws of the posterior, at most" in report.to_text() and "deviations off" in report.to_text()
    with LatentCache(config.cache.path) as cache:
        _, row = cache.row("a.png")
        std = posterior_std(cache.get(row.images[0].key).tensors["moments"][None])
    assert found.largest < 7 * std.max()
    # A draw that is the mean is one.
    assert verified(target, Copy(samples_of(config), photos, output="sample")).differences["image"].num_equal == 5


KOHYA = {"rule": "kohya", "resolution": 96, "step": 32, "min_side": 32}


@pytest.fixture
def of_kohya(make_config: Callable[..., Config], tmp_path: Path) -> Config:
    """A cache of kohya's buckets and of its resize filter, which is not ours."""
    config = make_config(**{"cache.path": tmp_path / "origin", "datasets.0.buckets": KOHYA})
    run_precache(config)
    return config


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
    drawn = Copy(samples_of(of_kohya, seed=3), photos, output="sample", format="kohya")
    report = verified(target, drawn, models=models)
    found = report.differences["image"]
    assert found.largest_deviations == pytest.approx(1.0, abs=0.1)
    assert (found.num_compared, found.num_equal, found.num_draws) == (5, 0, 5)
    assert report.unequal == []
    # Without that filter they are no draws of what encoding gives: so it was for every trainer.
    report = verified(target, replace(drawn, format="copy"), models=models)
    far = report.differences["image"]
    assert far.num_draws == 0 and far.largest_deviations is not None and far.largest_deviations > 5
    assert len(report.unequal) == 5 and "a draw of the posterior is 1 deviation from its mean" in report.to_text()


def test_means_of_the_trainers_filter_are_verified_as_such(
    make_config: Callable[..., Config], target: Config, of_kohya: Config, photos: Path
) -> None:
    report = verified(target, Copy(samples_of(of_kohya), photos, format="kohya"))
    assert report.unequal == [] and (report.num_verified, report.num_unverified) == (11, 0)
    # They are of use to a dataset of kohya's buckets, and to no other.
    settings = {"cache.path": target.cache.path, "encode.image_output": "mean"}
    with_rule = make_config(**settings, **{"datasets.0.buckets": KOHYA})
    assert run_precache(with_rule, dry_run=True).misses_by_reason == {"new": 2}  # the validation prompts
    assert run_precache(make_config(**settings), dry_run=True).num_misses == 5 + 2


def test_only_the_mean_can_be_verified(
    make_config: Callable[..., Config], samples: list[ExportSample], photos: Path
) -> None:
    config = make_config()
    with pytest.raises(ConfigError, match=r"it is auto.*image_output: mean"):
        verified(config, Copy(samples, photos))
    with open_workspace(config.cache) as workspace:
        assert list(workspace.store.keys()) == []  # found out before anything is read


def test_an_encoder_that_gives_nan_verifies_nothing(target: Config, samples: list[ExportSample], photos: Path) -> None:
    components = tiny_parts()
    for module in (components["vae"].quant_conv, components["text_encoder_2"].text_projection):
        torch.nn.init.constant_(module.weight, math.nan)
    report = verified(target, Copy(samples, photos), models=LoadedModels(**components))
    assert (report.num_verified, report.num_unverified) == (0, 16)
    assert {refusal.reason for refusal in report.unequal} == {"bad-output"}
    details = "; ".join(refusal.detail for refusal in report.unequal)
    nothing = "there is nothing to compare with: the "
    assert f"{nothing}VAE gave nan, computed in float32" in details
    assert f"{nothing}text encoders gave nan for caption 'a red house'" in details
    json.dumps(report.to_json(), allow_nan=False)


@given(
    # Below 2**-14 float16 has fewer bits; no latent and no embedding is so small as a whole.
    values=st.lists(st.floats(2.0**-14, 1000, width=32), min_size=1, max_size=20),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
)
def test_rounding_alone_is_never_a_difference(values: list[float], dtype: torch.dtype) -> None:
    encoded = torch.tensor(values)
    found = compare(encoded.to(dtype), encoded, relative=RELATIVE[dtype])
    assert found.share <= 1
    # The allowed difference is small compared to the values: another model's numbers are far away.
    assert compare(encoded * 1.1, encoded, relative=RELATIVE[dtype]).share > 1
