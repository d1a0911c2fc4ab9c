"""Importing any foreign cache: unscaled, unverified, returned only on request, verified, and replaced by precache."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.foreign_samples import STD, Foreign, image, imported, pairs, text
from helpers.photo_files import write_photo, write_photos
from helpers.tiny_configs import tiny_config
from helpers.tiny_models import tiny_encoders

from latentcache.config import CacheConfig, Config
from latentcache.dataset.row_table import Row
from latentcache.errors import ConfigError, DatasetError, SampleError, StoreError
from latentcache.families import family_named
from latentcache.families.scaling import latents_from_moments
from latentcache.identity import caption_digest, digest, key_of
from latentcache.interop.importing import import_cache
from latentcache.interop.readers import ForeignImage, ForeignItem, ForeignText
from latentcache.interop.reports import ImportReport
from latentcache.interop.verification import Verification
from latentcache.loading.cache import LatentCache
from latentcache.loading.dataset import LatentDataset
from latentcache.models.model_loader import LoadedModels
from latentcache.models.tiny import tiny_parts
from latentcache.precache.explanation import explain
from latentcache.precache.run import run_precache
from latentcache.precache.workspace import Workspace, open_workspace
from latentcache.types import Refusal


def into(workspace: Workspace, *items: Any, **options: Any) -> ImportReport:
    return import_cache(Foreign(items), workspace, name="foreign", **options)


def rows_of(workspace: Workspace) -> dict[str, Row]:
    manifest = workspace.manifests.read("foreign")
    assert manifest is not None
    return dict(manifest.rows)


def test_an_unscaled_import_keeps_every_bit_and_says_what_it_is(tmp_path: Path) -> None:
    photo = write_photo(tmp_path / "a.png", 0, (80, 160))
    plain, twin = image("a.png", image_path=photo), image("a.png", flip=True, image_path=photo)
    words = text("a.png", caption="a photo", dtype=torch.float16)
    workspace = Workspace()
    report = into(workspace, twin, plain, words)
    assert (report.num_samples, report.num_images, report.num_flipped, report.num_texts) == (1, 2, 1, 1)
    row = rows_of(workspace)["a.png"]
    assert row.path == str(photo) and row.source == digest(photo.read_bytes()) and not row.is_verified
    for ref, item in zip(row.images, (plain, twin), strict=True):
        entry = workspace.store.get(ref.key)
        assert ref.geometry == item.geometry and torch.equal(entry.tensors["latents"], item.latents)
        identity = entry.record.identity
        assert identity["trust"] == "unverified" and identity["geometry"] == item.geometry.to_json()
        assert identity["source"] == row.source and key_of(identity) == ref.key
        about = {"format": "test", "output": "sample", "dtype": "float32"}
        assert identity["imported"] == about | {"digest": identity["imported"]["digest"]}
        assert entry.record.provenance["source_path"] == item.path
    entry = workspace.store.get(row.captions[0].key)
    assert entry.tensors["prompt_embeds"].dtype is torch.float16
    assert torch.equal(entry.tensors["prompt_embeds"], words.prompt_embeds)
    assert entry.record.identity["source"] == caption_digest("a photo") and row.captions[0].text == "a photo"


def test_latents_of_other_frames_or_channels_than_the_family_has_are_refused() -> None:
    geometry = image("a").geometry
    still, clip = (torch.randn(16, frames, 8, 16) for frames in (1, 3))
    for family, good, bad in (("wan", still, clip), ("wan", still, still[:, 0]), ("flux", still[:, 0], still[:4, 0])):
        items = [image(name, latents=each, is_scaled=True) for name, each in (("a", bad), ("b", good))]
        report = import_cache(Foreign(items, family=family), Workspace(), name="foreign")
        assert [refusal.sample_id for refusal in report.refused] == ["a"] and report.num_images == 1
        assert f"does not fit a bucket of {geometry.target_size} of {family}" in report.refused[0].detail


def test_unknown_captions_and_shared_captions() -> None:
    workspace = Workspace()
    texts = [text("a", "b", caption=None), text("b", caption="x"), text("b", caption="x")]
    report = into(workspace, image("a"), image("b"), *texts)
    assert report.num_unknown_captions == 1 and report.num_samples == 2
    rows = rows_of(workspace)
    assert [ref.text for ref in rows["a"].captions] == [""] and [ref.text for ref in rows["b"].captions] == ["", "x"]
    assert rows["a"].captions[0].key == rows["b"].captions[0].key
    assert workspace.store.get(rows["a"].captions[0].key).record.identity["source"] is None


@pytest.mark.parametrize(
    ("item", "reason", "detail"),
    [
        (image("x", latents=torch.full((4, 8, 16), math.nan)), "bad-output", "nan"),
        (image("x", latents=torch.zeros(4, 8, 16)), "bad-output", "all-zero"),
        (image("x", latents=torch.randn(4, 16, 8)), "corrupt", "does not fit a bucket of 64x128"),
        (image("x", latents=torch.randn(8, 8, 16)), "corrupt", "a batch holds one form"),
        (image("x", latents=torch.randn(4, 8, 16).half()), "corrupt", "--name"),
        (image("a"), "duplicate", "only the first is imported"),
        (text(), "missing", "no sample has this caption"),
        (text("a", width=80), "corrupt", "a batch holds one form"),
        (replace(text("a"), prompt_embeds=torch.randn(77)), "corrupt", "the shapes"),
        (replace(text("a"), pooled_prompt_embeds=torch.full((40,), math.nan)), "bad-output", "nan"),
        (
            # Stored in the dtype of prompt_embeds, it overflows.
            replace(text("a", dtype=torch.float16), pooled_prompt_embeds=torch.full((40,), 1e6)),
            "bad-output",
            "pooled_prompt_embeds holds inf",
        ),
        (Refusal("x", "/x", "truncated", "ends early"), "truncated", "ends early"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_items_are_listed_and_the_others_imported(item: Any, reason: str, detail: str) -> None:
    workspace = Workspace()
    report = into(workspace, *pairs("a"), item, *pairs("b"))
    assert report.num_samples == 2
    assert [(refusal.reason, detail in refusal.detail) for refusal in report.refused] == [(reason, True)]
    assert set(rows_of(workspace)) == {"a", "b"}
    assert report.to_json()["num_refused"] == 1 and "refused   1" in report.to_text()


def test_incomplete_samples_are_listed_and_not_returned() -> None:
    items = [*pairs("a"), image("b"), text("c"), image("d", flip=True), text("d")]
    cache, report = imported(Foreign(items))
    incomplete = [(item.sample_id, item.detail.split()[1]) for item in report.incomplete]
    assert incomplete == [("b", "text"), ("c", "image"), ("d", "image")]
    assert cache.sample_ids() == ["a"]
    with pytest.raises(SampleError, match="no text entry was imported"):
        cache.row("b")


@pytest.mark.parametrize(
    ("is_scaled", "std", "met", "expected"),
    [(False, 1.0, r"is 1(\.0\d)?\b|is 0\.9", "about 7.68"), (True, STD, r"is 7\.\d", "about 1 |about 1[.]")],
    ids=["unscaled-claimed", "scaled-claimed"],
)
def test_latents_of_another_scale_are_refused(is_scaled: bool, std: float, met: str, expected: str) -> None:
    items = [image(f"{number}", is_scaled=is_scaled, std=std) for number in range(65)]
    workspace = Workspace()
    for given in (items, items[:1]):  # checked after the first 64, and at the end
        with pytest.raises(DatasetError, match=met) as caught:
            into(workspace, *given)
        assert re.search(expected, str(caught.value)) and "--no-scale-check" in str(caught.value)
    assert workspace.manifests.names() == []
    assert into(workspace, *items, scale_check=False).num_images == 65
    # Some outliers, such as white images, do not matter: the median counts.
    odd = [image(f"{number}", is_scaled=True, std=1.0 if number > 30 else 20.0) for number in range(100)]
    assert into(Workspace(), *odd).num_images == 100


def test_an_interrupted_import_removes_nothing_of_another_one(tmp_path: Path) -> None:
    class Interrupted(Foreign):
        def items(self) -> Any:
            yield from super().items()
            with open_workspace(CacheConfig(path=tmp_path / "cache")) as meanwhile:  # stores the same entries
                import_cache(Foreign(pairs("a", "b")), meanwhile, name="second")
            raise KeyboardInterrupt

    with open_workspace(CacheConfig(path=tmp_path / "cache")) as workspace:
        into(workspace, *pairs("a"))
        with pytest.raises(KeyboardInterrupt):
            import_cache(Interrupted(pairs("a", "b", "c")), workspace, name="other")
        assert workspace.manifests.names() == ["foreign", "second"]
        for name in workspace.manifests.names():
            manifest = workspace.manifests.read(name)
            assert manifest is not None and workspace.store.find(manifest.keys()) == manifest.keys()


def test_an_import_replaces_only_an_import_and_never_with_nothing(config: Config) -> None:
    with open_workspace(config.cache) as workspace:
        into(workspace, *pairs("a"))
        into(workspace, *pairs("b"))
        assert set(rows_of(workspace)) == {"b"}
        with pytest.raises(StoreError, match="photos was made by precache"):
            import_cache(Foreign(pairs("a")), workspace, name="photos")
        with pytest.raises(StoreError, match="nothing was imported: the folder has no files of a test cache"):
            into(workspace)
        refused = Refusal("", "/foreign", "missing", "there is no index")
        report = into(workspace, refused)
        assert report.refused == [refused]
        assert "manifest  none written: nothing was imported" in report.to_text()
        assert set(rows_of(workspace)) == {"b"}


def test_unverified_samples_are_returned_only_on_request(tmp_path: Path) -> None:
    path = tmp_path / "cache"
    with open_workspace(CacheConfig(path=path)) as workspace:
        into(workspace, *pairs("a", "b"))
    with LatentCache(path) as cache:
        key = cache.manifest("foreign").rows["a"].images[0].key
        for request in (
            lambda: cache.batch(["a"], device="cpu"),
            lambda: cache.restricted("foreign").row("a"),
            lambda: LatentDataset(path, "foreign"),
            lambda: cache.get(key),
        ):
            with pytest.raises(SampleError, match=r"sample 'a': .* is unverified.*precache.*--verify.*unverified"):
                request()
    with LatentCache(path, unverified=True) as cache:
        assert cache.batch(["a", "b"], device="cpu")["latents"].shape == (2, 4, 8, 16)
        assert cache.restricted("foreign").row("a")[1].sample_id == "a"
        assert cache.get(key).tensors["latents"].shape == (4, 8, 16)
    dataset = LatentDataset(path, "foreign", unverified=True)
    assert len(dataset) == 2 and dataset[1]["latents"].shape == (4, 8, 16)


def test_precache_replaces_what_was_imported(make_config: Any, photos: Path, run_json: Any) -> None:
    config, names = make_config(), ("a.png", "b.png", "gone.png")
    items = [image(each, image_path=photos / each) for each in names] + [text(*names, caption="a red house")]
    with open_workspace(config.cache) as workspace:
        report = import_cache(Foreign(items), workspace, name="photos")
        assert report.notes == {"image could not be read: No such file or directory": 1}
        imported_keys = set(workspace.store.keys())
    assert "imported, unverified" in explain(config, "a.png").to_text()
    report = run_precache(config, dry_run=True)
    assert report.num_hits == 0
    # Two images, the caption that they share, and the two others that these samples have now.
    assert report.misses_by_reason["imported, unverified"] == 5
    assert report.misses_by_reason["new"] == report.num_misses - 5
    assert run_precache(config).num_encoded == report.num_misses
    with LatentCache(config.cache.path) as cache:
        assert cache.batch(["a.png"], device="cpu")["latents"].shape[0] == 1
        assert cache.manifest("photos").imported_from is None
        assert imported_keys <= set(cache.store.keys())
    assert run_json("prune", config.cache.path)[0] == 0
    with LatentCache(config.cache.path) as cache:
        assert imported_keys.isdisjoint(cache.store.keys())
    assert run_precache(config).num_misses == 0


def test_prompts_of_an_imported_dataset(make_config: Callable[..., Config]) -> None:
    config, other = make_config(), make_config(**{"datasets.0.name": "other"})
    with open_workspace(config.cache) as workspace:
        into(workspace, *pairs("a"))
    run_precache(other, models=LoadedModels(family=family_named("sd15"), **tiny_encoders("sd15")))
    with (
        LatentCache(config.cache.path, manifest="foreign") as cache,
        pytest.raises(SampleError, match=r"prompt.*is not cached"),
    ):
        cache.prompt("", device="cpu")
    run_precache(config)
    # The encoders of an import are unknown, so the cache's only prompts of its family are used.
    with LatentCache(config.cache.path, manifest="foreign") as cache:
        assert cache.prompt("", device="cpu")["prompt_embeds"].shape == (1, 77, 72)


# Verification

Items = list[ForeignItem]


def items_of(config: Config, images: Path, seed: int | None = None, output: Any = "mean") -> Items:
    """A cache's entries as items of a foreign one; with a seed the latents are draws from the moments."""
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
    """A config for the same photos, with its own empty cache."""
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
    """What the tiny SDXL encodes for the photos, with flips."""
    return items_of(origin, photos)


def verified(config: Config, items: Items, format_name: str = "test", **options: Any) -> ImportReport:
    foreign = Foreign(items, format_name)
    with open_workspace(config.cache) as workspace:
        verification = Verification(config, **{"num_entries": "all", **options})
        return import_cache(foreign, workspace, name="photos", scale_check=False, verification=verification)


def compared(report: ImportReport) -> dict[str, tuple[int, int]]:
    """Numbers of compared and of equal entries, by kind."""
    return {kind: (found.num_compared, found.num_equal) for kind, found in report.differences.items()}


ALL = {"image": (10, 10), "text": (5, 5)}
"""Two of the six captions are one entry."""


@pytest.mark.parametrize(
    ("encode", "num_entries", "is_rounded", "expected"),
    [
        ({}, "all", False, ALL),
        ({"image_output": "sample", "store_dtype": "float16"}, "all", False, ALL),
        ({}, "all", True, ALL),
        ({"text": "none"}, "all", False, {"image": (10, 10)}),
        ({}, 2, False, {"image": (2, 2), "text": (2, 2)}),
    ],
)
def test_encoded_entries_are_equal_whatever_the_config_stores(
    target: Config, items: Items, encode: dict[str, Any], num_entries: Any, is_rounded: bool, expected: Any
) -> None:
    """Also if they are rounded in the file, which may be scaled, and not as they are stored."""
    if is_rounded:
        items = changed(items, lambda latents: (latents * 0.13025).bfloat16(), torch.Tensor.half)
        items = [replace(item, is_scaled=True) if isinstance(item, ForeignImage) else item for item in items]
    config = target.model_copy(update={"encode": target.encode.model_copy(update=encode)})
    report = verified(config, items, num_entries=num_entries)
    assert report.unequal == [] and compared(report) == expected
    assert max(found.largest_share for found in report.differences.values()) < 1
    assert not is_rounded or min(found.largest for found in report.differences.values()) > 0
    no_texts = "texts were not compared: the config has encode.text: none"
    assert report.notes == ({} if "text" in expected else {no_texts: 1})
    with LatentCache(config.cache.path) as cache:
        assert cache.store.stats().num_packs == 1, "nothing is stored but the import"
        with pytest.raises(SampleError, match="unverified"):
            cache.batch(["a.png"], device="cpu")


def test_entries_with_one_other_value_are_unequal(target: Config, items: Items) -> None:
    def shifted(tensor: torch.Tensor) -> torch.Tensor:
        return tensor + 0.05 * (torch.arange(tensor.numel()) == 7).reshape(tensor.shape)

    report = verified(target, changed(items, shifted, shifted))
    assert [refusal.reason for refusal in report.unequal] == ["unequal"] * 15
    assert all(found.largest == pytest.approx(0.05, abs=1e-3) for found in report.differences.values())
    assert "largest difference 0.05" in report.to_text() and "encoding gives different latents" in report.to_text()


KOHYA = {"rule": "kohya", "resolution": 96, "step": 32, "min_side": 32}


def test_draws_of_resized_images(target: Config, make_config: Any, tmp_path: Path, photos: Path) -> None:
    """They are compared with images resized by the trainer's own filter."""
    parts = tiny_parts()
    with torch.no_grad():  # a posterior as narrow as a real one, so that another filter is far outside of it
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
    # The mean is a draw too.
    report = verified(target, items_of(of_kohya, photos, output="sample"), "kohya", models=models)
    assert report.unequal == [] and compared(report)["image"] == (5, 5)
    # With another filter they are not plausible draws.
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
    assert "the image is 100x80 now (upright), but was 144x80" in details["c.png", "unequal"]
    assert details["sub/e.png", "missing"] == "its caption is unknown, so it cannot be encoded again"
    assert compared(report) == {"image": (4, 4), "text": (4, 4)}
    other = image("d.png", image_path=write_photo(photos / "d.png", 0, (80, 160)), latents=torch.randn(16, 8, 16))
    assert "made with another model" in verified(target, [other]).unequal[0].detail


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
