"""The document of a validation: every number that was measured, as valid JSON."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from helpers.report_samples import image, losses, report
from hypothesis import given
from hypothesis import strategies as st

from latentcache.errors import ConfigError
from latentcache.utils.json_document import plain, to_bytes
from latentcache.validation.results import ValidationReport


def read(value: object) -> object:
    """What a strict reader makes of it: NaN and Infinity are not JSON."""

    def refuse(name: str) -> object:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(to_bytes(value).decode(), parse_constant=refuse)


def test_the_document_holds_what_was_measured() -> None:
    found = report()
    assert found.loss is not None
    document = read(found.to_json())
    assert document == found.to_json()
    assert (document["step"], document["num_samples"], document["num_filled"]) == (100, 5, 3)
    values = np.array([loss for samples in found.loss.by_sample.values() for loss in samples.values()])
    assert document["loss"] == pytest.approx(values.mean())
    assert document["loss_standard_error"] == pytest.approx(values.std(ddof=1) / math.sqrt(5))
    assert [(part["first"], part["end"], part["num"]) for part in document["loss_by_timestep"]] == [
        (0, 500, 5),
        (500, 1000, 5),
    ]
    assert document["loss_by_timestep"][0]["loss"] == pytest.approx(2 * values.mean())
    assert document["loss_by_dataset"]["faces"]["loss"] == pytest.approx(values[3:].mean())
    assert document["loss_by_dataset"]["faces"]["num"] == 2
    assert document["loss_by_sample"] == found.loss.by_sample
    assert document["skipped"] == [{"dataset": "photos", "sample_id": "broken.png", "reason": "damaged"}]
    assert document["measurement_settings"] == found.loss.measurement_settings.model_dump()
    assert document["images"][1] == {
        "prompt": "prompt 1",
        "negative_prompt": "ugly",
        "seed": 41,
        "path": "sample-01.png",
        "tiled": True,
    }
    assert document["seconds"] == {"loss": 1.235, "sample": 2.0}
    assert document["placement"] == {"validate": ["unet"], "sample": ["unet", "vae"]}


def test_image_paths_are_joined_to_a_folder_that_is_named() -> None:
    document = report().to_json(Path("results/000100"))
    assert document["folder"] == "results/000100"
    assert [found["path"] for found in document["images"]] == [
        "results/000100/sample-00.png",
        "results/000100/sample-01.png",
    ]


def test_a_loss_that_is_not_finite_is_null_and_still_has_its_settings() -> None:
    document = read(report(nan=True).to_json())
    assert document["loss"] is None and document["loss_by_dataset"]["photos"]["loss"] is None
    assert document["loss_by_sample"]["photos"]["0.png"] is None
    assert document["loss_by_dataset"]["faces"]["loss"] > 0
    assert document["measurement_settings"] is not None


def test_nothing_measured_and_nothing_sampled() -> None:
    document = read(ValidationReport(step=0).to_json())
    assert document["loss"] is None and document["measurement_settings"] is None and document["loss_by_timestep"] == []
    assert document["images"] == [] and document["num_samples"] == 0
    assert "not measured" in ValidationReport(step=0).to_text()


def test_a_step_below_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="-1"):
        ValidationReport(step=-1)


def test_the_text_names_loss_datasets_bins_images_and_notes() -> None:
    found = report(notes=["decoded in tiles: memory is short"])
    assert found.loss is not None
    text = found.to_text()
    assert f"{found.loss.loss.mean:.6g} ± " in text and "(5 samples)" in text
    for part in ("photos: ", "faces: ", "timesteps 0 to 499", "timesteps 500 to 999", "broken.png: damaged"):
        assert part in text
    for part in ("images    2", "encoded   3", "unet, vae on the device", "loss 1.23", "memory is short"):
        assert part in text


def test_the_text_of_one_sample_has_no_standard_error() -> None:
    one = losses()
    alone = one.model_copy(update={"loss": one.loss.model_copy(update={"standard_error": None, "num": 1})})
    line = ValidationReport(step=1, loss=alone).to_text().splitlines()[1]
    assert "±" not in line and line.endswith("(1 sample)")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(st.text(max_size=4), values, max_size=4),
    max_leaves=12,
)


@given(json_values)
def test_any_value_is_written_as_json_and_read_back_equal(value: object) -> None:
    assert read(value) == plain(value)


def test_numpy_numbers_tuples_and_broken_file_names() -> None:
    value = {"a": np.float32(0.5), "b": (np.int64(3), np.float64("inf")), "c": "x\udcff.png", "d": True}
    assert read(value) == {"a": 0.5, "b": [3, None], "c": "x\udcff.png", "d": True}


def test_a_prompt_that_is_not_latin_stays_readable() -> None:
    found = replace(report(), images=(image(prompt="日本語の家"),))
    assert "日本語の家".encode() in to_bytes(found.to_json())
