"""Variants of captions: sd-scripts' rule, and what each of them depends on."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

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
    state = random.getstate()
    made = variants_of("ohwx, a, b, c, d, e", rule)
    assert made == ("ohwx, a, b, c, d, e", "ohwx, a, b, c, d", "ohwx, d, a, b, c", "ohwx, e, a, d, b, c")
    assert variants_of(made[0], rule.model_copy(update={"variants": 7}))[:4] == made, "more begin with the same"
    assert random.getstate() == state, "Python's own stream is left alone"
