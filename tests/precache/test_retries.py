"""Entries that are not finite in half precision are made again in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from latentcache import LatentCache
from latentcache.config import Config
from latentcache.errors import DeviceError
from latentcache.models.model_loader import LoadedModels
from latentcache.models.tiny import tiny_parts
from latentcache.precache.run import run_precache

Make = Callable[..., Config]

BAD = "a blue car"


def test_a_vae_that_does_not_fit_in_float32_costs_its_images_alone(
    make_config: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended the run, when it was placed for the retry."""
    parts = tiny_parts()
    with torch.no_grad():
        parts["vae"].encoder.conv_in.weight.mul_(1e6)
    models = LoadedModels(**parts)
    genuine = models.vae

    def vae(dtype: torch.dtype) -> Any:
        if dtype == torch.float32:
            raise DeviceError("the VAE does not fit")
        return genuine(dtype)

    monkeypatch.setattr(models, "vae", vae)
    settings = {"encode.vae_dtype": "float16", "encode.store_dtype": "float32"}
    report = run_precache(make_config(**settings), models=models)
    assert [refusal.reason for refusal in report.refused] == ["out-of-memory"] * 5
    assert report.num_encoded == 7 and "encoded again in float32, but the VAE" in report.refused[0].detail


def overflowing(dtypes: tuple[torch.dtype, ...]) -> dict[str, Any]:
    """Parts whose second text encoder gives NaN for the caption BAD in these dtypes."""
    parts = tiny_parts()
    bad = parts["tokenizer_2"](BAD, padding="max_length", max_length=77, return_tensors="pt").input_ids[0]

    def spoil(module: torch.nn.Module, given: Any, options: dict[str, Any], made: torch.Tensor) -> torch.Tensor:
        ids = options.get("input_ids", given[0] if given else None)
        is_bad = (ids == bad).all(1)[:, None, None]
        return torch.where(is_bad, torch.nan, made).to(made.dtype) if made.dtype in dtypes else made

    [embeddings] = (each for name, each in parts["text_encoder_2"].named_modules() if name.endswith("embeddings"))
    embeddings.register_forward_hook(spoil, with_kwargs=True)
    return parts


def test_a_text_that_is_not_finite_is_encoded_again_in_float32(make_config: Make, tmp_path: Path) -> None:
    settings = {"encode.text_store_dtype": "float32"}
    half = make_config(**settings, **{"encode.text_dtype": "float16"})
    single = make_config(**settings, **{"cache.path": tmp_path / "single"})
    parts = overflowing((torch.float16,))
    report = run_precache(half, models=LoadedModels(**parts))
    assert (report.num_retried_in_float32, report.num_refused) == (1, 0)
    assert "1 entry encoded again in float32" in report.to_text() and not parts["text_encoder_2"].training
    run_precache(single)
    with LatentCache(half.cache) as cache, LatentCache(single.cache) as other:
        for name in ("a.png", "b.png", "sub/e.png"):
            for ref, same in zip(cache.row(name)[1].captions, other.row(name)[1].captions, strict=True):
                found, expected, is_bad = cache.get(ref.key), other.get(same.key).tensors, ref.text == BAD
                assert found.record.provenance["computed_dtype"] == ("float32" if is_bad else "float16")
                assert ("encoded again in float32" in found.record.provenance.get("note", "")) == is_bad
                assert all(torch.equal(value, expected[name]) for name, value in found.tensors.items()) == is_bad
    assert run_precache(half, models=LoadedModels(**parts)).num_misses == 0


def test_a_text_that_is_not_finite_in_float32_either_is_refused(make_config: Make) -> None:
    config = make_config(**{"encode.text_dtype": "float16"})
    report = run_precache(config, models=LoadedModels(**overflowing((torch.float16, torch.float32))))
    assert report.num_retried_in_float32 == 0
    assert {refusal.reason for refusal in report.refused} == {"bad-output"}
    assert all("nan" in each.detail and "computed in float32" in each.detail for each in report.refused)
