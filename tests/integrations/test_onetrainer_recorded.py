"""What an edit costs in OneTrainer itself: over every module that its SDXL loader makes, with its default concept.

Each runs in the host of these tests, and in mgds where it can be imported (pipeline_host.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.photo_files import write_photo
from helpers.pipeline_recorded import RECORDED, RecordedSetup, default_concept

NUM = 4
EVERYTHING = Counter(vae=NUM, text_encoder=NUM, text_encoder_2=NUM)


@pytest.fixture
def setup(
    pipeline: SimpleNamespace, tmp_path: Path, folder: Path, parts: dict[str, Any]
) -> Callable[..., RecordedSetup]:
    def make(*, variations: int = 1, **image_settings: Any) -> RecordedSetup:
        concept = default_concept(folder, **image_settings) | {"image_variations": variations}
        settings = {"host": pipeline, "cache_dir": tmp_path / "cache", "concepts": [concept], "parts": parts}
        return RecordedSetup(**settings, resolution="256")

    return make


def rename(folder: Path, old: str, new: str) -> None:
    for suffix in (".png", ".txt"):
        (folder / f"{old}{suffix}").rename(folder / f"{new}{suffix}")


def add(folder: Path, name: str, seed: int) -> None:
    write_photo(folder / f"{name}.png", seed, (96, 64)).with_suffix(".txt").write_text(name, encoding="utf-8")


def test_a_renamed_file_costs_nothing_and_of_added_ones_only_these_are_encoded(
    setup: Callable[..., RecordedSetup], folder: Path
) -> None:
    run = setup(enable_crop_jitter=False).start()
    assert run.encoded == EVERYTHING
    before = run.by_photo()
    rename(folder, "p00", "zz")  # all others stand at another place now
    run = setup(enable_crop_jitter=False).start()
    assert run.encoded == Counter()
    assert torch.equal(run.by_photo()["zz.png"]["latent_image"], before["p00.png"]["latent_image"])
    add(folder, "a", 70)
    add(folder, "p01b", 71)
    assert setup(enable_crop_jitter=False).start().encoded == Counter(vae=2, text_encoder=2, text_encoder_2=2)


def test_variations_without_augmentation_are_one_entry(setup: Callable[..., RecordedSetup]) -> None:
    run = setup(enable_crop_jitter=False, variations=2).start(num_epochs=2)
    assert run.encoded == EVERYTHING


def test_crop_jitter_is_on_by_default_and_makes_the_images_behind_a_new_one_new(
    setup: Callable[..., RecordedSetup], folder: Path
) -> None:
    assert RECORDED["concept"]["image"]["enable_crop_jitter"] is True
    assert setup().start().encoded == EVERYTHING
    assert setup().start().encoded == Counter()
    add(folder, "zz", 70)  # it comes last
    assert setup().start().encoded["vae"] == 1
    add(folder, "p01b", 71)  # three come after it
    run = setup().start()
    assert run.encoded == Counter(vae=4, text_encoder=1, text_encoder_2=1)
