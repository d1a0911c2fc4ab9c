"""Sample images as PNG: each on its own, and all of a step in one grid with their prompts and seeds."""

from __future__ import annotations

import io
import json
import logging
import math
import textwrap
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from latentcache.validation.sample_images import SampleImage

MIN_CELL_WIDTH = 192
"""Pixels: a caption under a tiny image must still be readable."""
MAX_PIXELS = 60_000_000
"""Later images are left out of a larger grid: viewers are slow with it, and Pillow warns of a decompression bomb."""
MAX_PROMPT_LINES, MAX_NEGATIVE_LINES = 3, 2
MAX_CAPTION_CHARS = 2000
"""The rest of a longer prompt could not be shown anyway."""
GAP = 8
"""Pixels between images, and around them."""

BACKGROUND, INK, NEGATIVE_INK, SEED_INK = (255, 255, 255), (20, 20, 20), (150, 40, 40), (90, 90, 90)

logger = logging.getLogger("latentcache")

Line = tuple[str, tuple[int, int, int]]
"""A text and its colour (red, green, blue)."""


def sample_grid(images: Sequence[SampleImage]) -> Image.Image:
    """All images of a step in rows, pixel for pixel, each over its prompt, negative prompt and seed.

    Long texts end in an ellipsis. The built-in font has no letters beyond Latin: they are drawn as boxes, and the
    metadata of the files has the text. ValueError without images.
    """
    return _grid(images)[0]


def grid_png(images: Sequence[SampleImage]) -> bytes:
    """`sample_grid` as PNG. Its text `samples` is a JSON list: prompt, negative_prompt, seed, left and top of each."""
    grid, corners = _grid(images)
    if len(corners) < len(images):
        logger.info("the grid shows %d of %d images: more would be too large", len(corners), len(images))
    rows = [
        {
            "prompt": sample.prompt,
            "negative_prompt": sample.negative_prompt,
            "seed": sample.seed,
            "left": left,
            "top": top,
        }
        for sample, (left, top) in zip(images, corners, strict=False)
    ]
    return _png(grid, {"samples": json.dumps(rows)})


def image_png(sample: SampleImage) -> bytes:
    """One image as PNG, with the texts `prompt`, `negative_prompt` (if there is one) and `seed`."""
    texts = {"prompt": sample.prompt, "seed": str(sample.seed)}
    if sample.negative_prompt is not None:
        texts["negative_prompt"] = sample.negative_prompt
    return _png(sample.image, texts)


def caption_of(sample: SampleImage) -> str:
    """Prompt, negative prompt and seed in one line of text."""
    negative = f" | negative: {sample.negative_prompt}" if sample.negative_prompt else ""
    return f"{sample.prompt}{negative} | seed {sample.seed}"


def _png(image: Image.Image, texts: dict[str, str]) -> bytes:
    info = PngInfo()
    for name, text in texts.items():
        # A lone surrogate has no UTF-8: it is written as its escape.
        info.add_itxt(name, text.encode("utf-8", "backslashreplace").decode())
    buffer = io.BytesIO()
    image.save(buffer, "PNG", pnginfo=info)
    return buffer.getvalue()


def _grid(images: Sequence[SampleImage]) -> tuple[Image.Image, list[tuple[int, int]]]:
    """The grid, and (left, top) of each image that it shows."""
    if not images:
        raise ValueError("a grid needs at least one image")
    width = max(sample.image.width for sample in images)
    cell_width = max(width, MIN_CELL_WIDTH)
    font = ImageFont.load_default(min(max(width // 36, 12), 28))
    assert isinstance(font, ImageFont.FreeTypeFont), "Pillow's default font has sizes by FreeType only"
    line_height = sum(font.getmetrics()) + 1
    captions = [_caption(sample, font, cell_width) for sample in images]
    image_height = max(sample.image.height for sample in images)
    cell_height = image_height + max(map(len, captions)) * line_height + GAP
    num = min(len(images), max(1, MAX_PIXELS // (cell_width * cell_height)))
    columns = math.ceil(math.sqrt(num))
    corners = [
        (GAP + number % columns * (cell_width + GAP), GAP + number // columns * (cell_height + GAP))
        for number in range(num)
    ]
    grid = Image.new(
        "RGB", (corners[columns - 1][0] + cell_width + GAP, corners[-1][1] + cell_height + GAP), BACKGROUND
    )
    draw = ImageDraw.Draw(grid)
    for (left, top), sample, caption in zip(corners, images, captions, strict=False):
        grid.paste(sample.image.convert("RGB"), (left, top))
        for line, (text, ink) in enumerate(caption):
            draw.text((left, top + image_height + GAP // 2 + line * line_height), text, ink, font)
    return grid, corners


def _caption(sample: SampleImage, font: ImageFont.FreeTypeFont, width: int) -> list[Line]:
    prompt = wrap(sample.prompt, font, width, MAX_PROMPT_LINES) or ["(empty prompt)"]
    lines = [(line, INK) for line in prompt]
    if sample.negative_prompt:
        negative = wrap(f"negative: {sample.negative_prompt}", font, width, MAX_NEGATIVE_LINES)
        lines += [(line, NEGATIVE_INK) for line in negative]
    seed = f"seed {sample.seed}{', decoded in tiles' if sample.tiled else ''}"
    return [*lines, *((line, SEED_INK) for line in wrap(seed, font, width, 1))]


def wrap(text: str, font: ImageFont.FreeTypeFont, width: int, max_lines: int) -> list[str]:
    """At most `max_lines` lines, each at most `width` pixels wide; an ellipsis ends a text that was cut.

    Line breaks and characters that cannot be printed are spaces. A word wider than a line is broken.
    """
    # Marks that turn the direction of writing are not printable either: no prompt may garble its neighbours.
    visible = "".join(char if char.isprintable() else " " for char in text[:MAX_CAPTION_CHARS])
    if len(text) > MAX_CAPTION_CHARS:
        visible += "…"
    # textwrap counts characters, whose widths differ: as many as fit on average, or fewer.
    num_chars = int(width * len(visible) / max(font.getlength(visible), 1)) + 1
    lines = textwrap.wrap(visible, num_chars)
    while num_chars > 1 and any(font.getlength(line) > width for line in lines[:max_lines]):
        num_chars -= 1
        lines = textwrap.wrap(visible, num_chars)
    if len(lines) <= max_lines:
        return lines
    last = lines[max_lines - 1]
    while last and font.getlength(f"{last}…") > width:
        last = last[:-1].rstrip()
    return [*lines[: max_lines - 1], f"{last}…"]
