"""Variants of captions in a run: what is encoded, why, and what it costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from latentcache import LatentCache, LatentDataset
from latentcache.config import Config
from latentcache.dataset.captions import variants_of
from latentcache.loading.sampler import Visit, Visits
from latentcache.precache.run import run_precache
from latentcache.utils.wording import size

Make = Callable[..., Config]

TAGS = "red, house, garden, dog, tree, sky"
NUM = 4


@pytest.fixture
def make(make_config: Make, photos: Path) -> Make:
    """A config with variants of the captions of `photos`, of which two samples share one."""
    for name, text in {"a": f"{TAGS}\na street at night, rain", "b": f"blue, {TAGS}", "c": f"blue, {TAGS}"}.items():
        (photos / f"{name}.txt").write_text(text)

    def made(captions: dict[str, Any] | None = None, **changes: Any) -> Config:
        chosen = {"variants": NUM, "shuffle": True, "keep": 1} if captions is None else captions
        return make_config(**{"datasets.0.captions": chosen, "validation.prompts": [], **changes})

    return made


def texts_of(config: Config, name: str) -> list[str]:
    """The texts of a sample after a run."""
    run_precache(config)
    with LatentCache(config.cache.path) as cache:
        return [ref.text for ref in cache.row(name)[1].captions]


def test_each_caption_has_its_variants_and_equal_ones_are_one_entry(make: Make) -> None:
    config = make()
    dry, first = run_precache(config, dry_run=True), run_precache(config)
    rule = config.datasets[0].captions
    expected = [*variants_of(TAGS, rule), *variants_of("a street at night, rain", rule)]
    assert texts_of(config, "a.png") == expected and len(set(expected)) < len(expected), "two tags have one order here"
    assert texts_of(config, "d.png") == [""] * NUM and texts_of(config, "b.png") == texts_of(config, "c.png")
    distinct = {*expected, *variants_of(f"blue, {TAGS}", rule), "a tree", ""}
    assert first.num_encoded == 5 + len(distinct) + 1, "images, texts, and the negative prompt"
    with LatentCache(config.cache.path) as cache:
        assert cache.manifest("photos").variants == NUM
        batch = cache.batch(["a.png"], device="cpu", caption=1)
        assert batch["caption"] == ["a street at night, rain"], "a line's number is that of the caption itself"
        tensors = cache.get(cache.row("a.png")[1].captions[NUM].key).tensors
        assert torch.equal(batch["prompt_embeds"][0], tensors["prompt_embeds"])
    num_bytes = len(distinct) * sum(tensor.nbytes for tensor in tensors.values())
    # What it costs is said before anything is encoded.
    assert dry.notes == [f"photos: {NUM} variants of 5 captions: {len(distinct)} texts, {size(num_bytes)}"]
    again = run_precache(config)
    assert (again.num_misses, again.num_hits) == (0, first.num_encoded)


def test_equal_captions_keep_the_weight_of_each(make: Make, photos: Path) -> None:
    (photos / "a.txt").write_text("a dog\na dog\na cat")
    (photos / "d.txt").write_text("a cow\na cow")
    assert texts_of(make({}), "a.png") == ["a dog", "a cat"]
    config = make({"weights": [0, 1, 3]})
    assert texts_of(config, "a.png") == ["a dog", "a dog", "a cat"]
    assert run_precache(config).num_misses == 0, "equal texts are one entry all the same"
    for name in ("b", "c", "sub/e"):
        (photos / f"{name}.png").unlink()
    run_precache(config)
    dataset = LatentDataset(config.cache.path, "photos", caption="random")
    visits = [Visit.of(item, point << 10) for item in range(2) for point in range(1 << 10)]
    drawn = Counter(ref.caption for ref in dataset.refs(Visits.of(visits)))
    assert drawn == {"a cow": 1024, "a dog": 256, "a cat": 768}


def test_other_variants_say_so_and_other_reasons_are_as_without(make: Make, photos: Path) -> None:
    config = make()
    run_precache(config)
    rule = config.datasets[0].captions
    for change in ({"variants": 7}, {"seed": 1}, {"keep": 2}, {"drop": 0.3}):
        report = run_precache(make({**rule.model_dump(), **change}), dry_run=True)
        assert [*report.misses_by_reason] == ["new variant of the caption"]
    report = run_precache(make(**{"encode.clip_skip": 1}), dry_run=True)
    assert [*report.misses_by_reason] == ["clip skip changed (0 -> 1)"]

    assert texts_of(make({**rule.model_dump(), "variants": 7}), "b.png")[:NUM] == [*variants_of(f"blue, {TAGS}", rule)]
    assert run_precache(config).num_misses == 0
    with LatentCache(config.cache.path) as cache:
        cache.store.remove([cache.row("b.png")[1].captions[3].key])
    assert run_precache(config).misses_by_reason == {"entry lost": 1}
    run_precache(make({}))
    assert run_precache(config, dry_run=True).num_misses == 0, "the caption alone is part of it"

    (photos / "a.txt").write_text(f"green, {TAGS}\na street at night, rain")
    num_texts = len(set(variants_of(f"green, {TAGS}", rule)))
    assert run_precache(config).misses_by_reason == {"caption changed": num_texts}
