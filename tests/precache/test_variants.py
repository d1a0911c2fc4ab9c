"""Variants of captions: sd-scripts' rule, and what a run encodes of them, why, and what it costs."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from latentcache import LatentCache, LatentDataset
from latentcache.config import CaptionsConfig, Config
from latentcache.dataset.samples import variants_of, varied
from latentcache.loading.sampler import Visit, Visits
from latentcache.loading.status import show
from latentcache.precache.explanation import explain
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


def test_other_variants_and_other_captions_say_so(make: Make, photos: Path) -> None:
    config = make()
    run_precache(config)
    rule = config.datasets[0].captions
    for change in ({"variants": 7}, {"seed": 1}, {"keep": 2}, {"drop": 0.3}):
        report = run_precache(make({**rule.model_dump(), **change}), dry_run=True)
        assert [*report.misses_by_reason] == ["new variant of the caption"]
    assert texts_of(make({**rule.model_dump(), "variants": 7}), "b.png")[:NUM] == [*variants_of(f"blue, {TAGS}", rule)]
    assert run_precache(config).num_misses == 0
    run_precache(make({}))
    assert run_precache(config, dry_run=True).num_misses == 0, "the caption alone is part of it"

    (photos / "a.txt").write_text(f"green, {TAGS}\na street at night, rain")
    num_texts = len(set(variants_of(f"green, {TAGS}", rule)))
    assert run_precache(config).misses_by_reason == {"caption changed": num_texts}


def test_the_caption_is_shown_once(make: Make) -> None:
    config = make()
    before = explain(config, "b.png")
    assert "3 variants  miss: new" in before.to_text()
    assert [each["variant"] for each in before.datasets[0]["entries"]] == [0, 0, 1, 2, 3]
    run_precache(config)
    [shown] = show(config.cache.path, "a.png")["datasets"]
    assert [each["text"] for each in shown["captions"]] == [TAGS, "a street at night, rain"]
    assert shown["variants"] == NUM and len(shown["entries"]) == 3


# The rule


def rule_of(**settings: Any) -> CaptionsConfig:
    """A rule of these settings, also where a config would refuse it: the table has rules that change nothing."""
    return CaptionsConfig.model_construct(**{**CaptionsConfig().model_dump(), **settings})


def test_the_rule_is_that_of_sd_scripts() -> None:
    """`process_caption` of sd-scripts 48d368f made the table, after `random.seed(seed)`."""
    table = json.loads((Path(__file__).parents[1] / "dataset/data/kohya_captions.json").read_text(encoding="utf-8"))
    num_changed = 0
    for settings, by_caption in zip(table["settings"], table["texts"], strict=True):
        for caption, by_seed in zip(table["captions"], by_caption, strict=True):
            for seed, text in zip(table["seeds"], by_seed, strict=True):
                assert varied(caption, rule_of(**settings), random.Random(seed)) == text, (settings, caption, seed)
                num_changed += text != caption
    assert num_changed > 300


def test_texts_stay_what_they_are() -> None:
    """Another stream would encode all variants of everybody again."""
    rule = CaptionsConfig(variants=4, shuffle=True, keep=1, drop=0.25)
    state = random.getstate()
    made = variants_of("ohwx, a, b, c, d, e", rule)
    assert made == ("ohwx, a, b, c, d, e", "ohwx, a, b, c, d", "ohwx, d, a, b, c", "ohwx, e, a, d, b, c")
    assert variants_of(made[0], rule.model_copy(update={"variants": 7}))[:4] == made, "more begin with the same"
    assert random.getstate() == state, "Python's own stream is left alone"
