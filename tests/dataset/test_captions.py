"""Variants of captions: sd-scripts' rule, and what each of them depends on."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from latentcache.config import CaptionsConfig
from latentcache.dataset.captions import variants_of, varied


def rule_of(**settings: Any) -> CaptionsConfig:
    """A rule of these settings, also where a config would refuse it: the table has rules that change nothing."""
    return CaptionsConfig.model_construct(**{**CaptionsConfig().model_dump(), **settings})


def test_the_rule_is_that_of_sd_scripts() -> None:
    """`process_caption` of sd-scripts 48d368f made the table, after `random.seed(seed)`."""
    table = json.loads((Path(__file__).parent / "data" / "kohya_captions.json").read_text(encoding="utf-8"))
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
    assert variants_of("ohwx, a, b, c, d, e", rule) == (
        "ohwx, a, b, c, d, e",
        "ohwx, a, b, c, d",
        "ohwx, d, a, b, c",
        "ohwx, e, a, d, b, c",
    )


@given(st.text(st.characters(exclude_categories=["Cs"])), st.integers(2, 6), st.integers(0, 3))
def test_more_variants_begin_with_the_same(caption: str, num: int, seed: int) -> None:
    rule = CaptionsConfig(variants=num, shuffle=True, drop=0.2, seed=seed)
    made = variants_of(caption, rule)
    assert made[0] == caption and len(made) == num
    state = random.getstate()
    assert variants_of(caption, rule.model_copy(update={"variants": num + 3}))[:num] == made
    assert random.getstate() == state, "Python's own stream is left alone"
