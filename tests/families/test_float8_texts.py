"""Texts in float8, for families that store padding: the key names it, its error is bounded, and nothing is clipped."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.family_runs import TEXTS, family_config
from helpers.tiny_models import tiny_encoders

from latentcache.errors import ConfigError
from latentcache.families import family_named
from latentcache.models.model_loader import LoadedModels
from latentcache.precache.encodings import choose_encodings
from latentcache.precache.run import run_precache
from latentcache.precache.workspace import Workspace
from latentcache.types import Entry

FLOAT8 = "float8_e4m3fn"
PADDED = ("sdxl", "flux2")
"""Of those that store padding one with a field without rows, and one without."""


def texts_of(folder: Path, models: LoadedModels, dtype: str) -> tuple[dict[str, Entry], Any]:
    """The text entries of a run by their caption's digest, and the report."""
    workspace = Workspace()
    report = run_precache(family_config(folder, text_store_dtype=dtype), models=models, workspace=workspace)
    entries = [workspace.store.get(key) for key in workspace.store.keys()]
    return {entry.record.identity["source"]: entry for entry in entries if entry.record.kind == "text"}, report


@pytest.mark.extended
@pytest.mark.parametrize("name", PADDED)
def test_the_key_names_it_and_the_error_is_that_of_three_bits(name: str, tmp_path: Path) -> None:
    family = family_named(name)
    models = LoadedModels(family=family, **tiny_encoders(name))
    (exact, _), (rounded, report) = (texts_of(tmp_path, models, dtype) for dtype in ("float32", FLOAT8))
    assert not report.refused and exact.keys() == rounded.keys() and len(rounded) >= len(TEXTS)
    for source, entry in rounded.items():
        assert entry.record.identity["encoding"]["store_dtype"] == FLOAT8
        assert entry.record.key != exact[source].record.key
        for field, tensor in entry.tensors.items():
            if not family.fields[field].has_rows:
                assert torch.equal(tensor, exact[source].tensors[field].bfloat16())
                assert entry.record.identity["encoding"][f"{field}_dtype"] == "bfloat16"
                continue
            assert tensor.dtype == torch.float8_e4m3fn
            was, now = exact[source].tensors[field].flatten().double(), tensor.float().flatten().double()
            relative_rms = float((now - was).norm() / was.norm())
            cosine = float(torch.nn.functional.cosine_similarity(now, was, dim=0))
            # A rounding to 4 significant bits is wrong by 1/16 at most, and by 0.026 in the mean of their squares.
            assert 0.01 < relative_rms < 0.04 and cosine > 0.999


def test_where_padding_is_dropped_it_is_refused(tmp_path: Path) -> None:
    models = LoadedModels(family=family_named("z-image"), **tiny_encoders("z-image"))
    with pytest.raises(ConfigError, match="stores no padding, which saves more"):
        choose_encodings(family_config(tmp_path, text_store_dtype=FLOAT8), models, {})


@pytest.mark.parametrize(
    ("factor", "message"),
    [(1e4, "gave inf for .* stored as float8_e4m3fn"), (float("nan"), "gave nan")],
)
def test_numbers_that_it_does_not_hold_are_refused_and_not_clipped(factor: float, message: str, tmp_path: Path) -> None:
    parts = tiny_encoders("flux")
    parts["text_encoder_2"].encoder.final_layer_norm.weight.mul_(factor)
    texts, report = texts_of(tmp_path, LoadedModels(family=family_named("flux"), **parts), FLOAT8)
    assert not texts and {refusal.sample_id for refusal in report.refused} >= {f"{n}.png" for n in range(len(TEXTS))}
    for refusal in report.refused:
        assert refusal.reason == "bad-output"
        assert re.search(message, refusal.detail)
