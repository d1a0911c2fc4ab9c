"""The grid: the images pixel for pixel, and any prompts."""

from __future__ import annotations

import json

import pytest
from helpers.report_samples import image, opened
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFont

from latentcache.validation import pictures as grid_module
from latentcache.validation.pictures import caption_of, grid_png, image_png, sample_grid, wrap
from latentcache.validation.sample_images import SampleImage

FONT = ImageFont.load_default(12)
PROMPTS = [
    "",
    " \n\t ",
    "a red house",
    "a house\nin the rain\r\n\x00\x1b[31m",
    "long " * 5000,
    "x" * 50_000,
    "日本語の赤い家" * 40,
    "منزل أحمر",
    "👩‍👩‍👧 e\u0301",
    "\u202eright to left",
    "lone \udcff surrogate",
]


def cut_out(grid: Image.Image, sample: SampleImage, left: int, top: int) -> Image.Image:
    return grid.crop((left, top, left + sample.image.width, top + sample.image.height))


def is_blank(picture: Image.Image) -> bool:
    return picture.getextrema() == ((255, 255),) * 3


@pytest.mark.parametrize("num", [1, 2, 3, 4, 5, 9, 10])
def test_every_image_is_there_pixel_for_pixel_with_its_texts(num: int) -> None:
    samples = [image(n, (24 + 8 * (n % 2), 32), f"prompt {n}", None if n == 1 else "ugly") for n in range(num)]
    grid = opened(grid_png(samples))
    rows = json.loads(grid.text["samples"])
    assert [(row["prompt"], row["negative_prompt"], row["seed"]) for row in rows] == [
        (sample.prompt, sample.negative_prompt, sample.seed) for sample in samples
    ]
    for sample, row in zip(samples, rows, strict=True):
        assert cut_out(grid, sample, row["left"], row["top"]).tobytes() == sample.image.tobytes()
    assert len({(row["left"], row["top"]) for row in rows}) == num
    columns, lines = len({row["left"] for row in rows}), len({row["top"] for row in rows})
    assert columns >= lines > (num - 1) // columns and columns - lines <= 1


def test_the_caption_is_drawn_below_and_within_its_cell() -> None:
    size, texts = (64, 256), {"prompt": "a red house in the rain", "negative": "ugly, blurry"}
    full, no_negative = image(0, size, **texts), image(0, size, texts["prompt"], None)
    grid = sample_grid([full])
    without = sample_grid([no_negative])
    below, below_without = (found.crop((0, 8 + 64, found.width, found.height)) for found in (grid, without))
    assert not is_blank(below) and below.height > below_without.height
    # Red ink is the negative prompt's alone.
    for picture, expected in ((below, True), (below_without, False)):
        assert ((150, 40, 40) in {colour for _, colour in picture.getcolors(1 << 20)}) == expected
    for side in ((0, 0, 8, grid.height), (grid.width - 8, 0, grid.width, grid.height)):
        assert is_blank(grid.crop(side))


def test_captions_differ_with_prompt_and_seed() -> None:
    pictures = {
        sample_grid([found]).tobytes()
        for found in (image(prompt="a red house"), image(prompt="a blue house"), image(1, prompt="a red house"))
    }
    assert len(pictures) == 3


def test_a_large_image_has_a_large_caption_and_a_small_one_a_readable_cell() -> None:
    assert sample_grid([image(0, (8, 8))]).width >= 192
    small, large = (sample_grid([image(0, (size, size), "a house")]) for size in (256, 1024))
    assert large.height - 1024 > 1.8 * (small.height - 256)


@pytest.mark.parametrize("prompt", PROMPTS, ids=range(len(PROMPTS)))
def test_any_prompt_can_be_drawn_and_stored(prompt: str) -> None:
    samples = [image(0, prompt=prompt, negative=prompt), image(1)]
    grid = opened(grid_png(samples))
    assert json.loads(grid.text["samples"])[0]["prompt"] == prompt
    assert grid.height < 64 + 300, "a long prompt must be cut, not make the grid tall"
    single = opened(image_png(samples[0]))
    assert single.text["prompt"] == prompt.encode("utf-8", "backslashreplace").decode()
    assert single.text["seed"] == "40" and single.tobytes() == samples[0].image.tobytes()
    assert "negative_prompt" not in opened(image_png(image(negative=None))).text


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(exclude_categories=()), max_size=300), st.integers(1, 4), st.integers(40, 400))
def test_lines_fit_and_lose_nothing_unless_an_ellipsis_says_so(text: str, max_lines: int, width: int) -> None:
    lines = wrap(text, FONT, width, max_lines)
    assert len(lines) <= max_lines
    assert all(FONT.getlength(line) <= width for line in lines)
    assert all(line.isprintable() for line in lines)
    shown = "".join("".join(lines).split())
    whole = "".join("".join(char if char.isprintable() else " " for char in text).split())
    assert shown == whole or (shown.endswith("…") and whole.startswith(shown[:-1]))


def test_words_are_kept_whole_where_they_fit() -> None:
    text = "several short words that fill some lines of text"
    lines = wrap(text, FONT, 120, 9)
    assert len(lines) > 1 and " ".join(lines) == text


def test_a_grid_that_would_be_too_large_shows_the_first_images(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(grid_module, "MAX_PIXELS", 60_000)
    samples = [image(n) for n in range(9)]
    caplog.set_level("INFO", "latentcache")
    grid = opened(grid_png(samples))
    rows = json.loads(grid.text["samples"])
    assert 0 < len(rows) < 9 and grid.width * grid.height < 100_000 and f"{len(rows)} of 9" in caplog.text
    for sample, row in zip(samples, rows, strict=False):
        assert cut_out(grid, sample, row["left"], row["top"]).tobytes() == sample.image.tobytes()


def test_no_images_make_no_grid() -> None:
    with pytest.raises(ValueError, match="at least one"):
        sample_grid([])


def test_the_line_of_text_for_trackers() -> None:
    assert caption_of(image()) == "a red house | negative: ugly | seed 40"
    assert caption_of(image(negative=None)) == caption_of(image(negative="")) == "a red house | seed 40"
