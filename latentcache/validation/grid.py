"""Sample images as PNG: each by itself, and all of a step in one grid with their prompts and seeds."""

from __future__ import annotations

import io
import json
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

if TYPE_CHECKING:
    from latentcache.validation.sample_images import SampleImage

MIN_CELL_WIDTH = 192
"""Pixels: a caption under a tiny image must still be readable."""
MAX_PIXELS = 60_000_000
"""A grid larger than this is slow in viewers, and Pillow warns of it as of a bomb: later images are left out of it."""
MAX_PROMPT_LINES, MAX_NEGATIVE_LINES = 3, 2
MAX_CAPTION_CHARS = 2000
"""Of a longer prompt no more is looked at: it could not be shown anyway."""
GAP = 8

BACKGROUND, INK, NEGATIVE_INK, SEED_INK = (255, 255, 255), (20, 20, 20), (150, 40, 40), (90, 90, 90)

logger = logging.getLogger("latentcache")

Line = tuple[str, tuple[int, int, int]]


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the images of a grid are, in pixels. `num` of the images are shown."""

    num: int
    columns: int
    cell_width: int
    image_height: int
    caption_height: int

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) of the grid, as Pillow counts it."""
        rows = math.ceil(self.num / self.columns)
        return self.columns * (self.cell_width + GAP) + GAP, rows * self._row_height + GAP

    @property
    def _row_height(self) -> int:
        return self.image_height + self.caption_height + GAP

    def corner(self, number: int) -> tuple[int, int]:
        """(left, top) of image `number`. Its caption begins `image_height` below."""
        row, column = divmod(number, self.columns)
        return GAP + column * (self.cell_width + GAP), GAP + row * self._row_height


def sample_grid(images: Sequence[SampleImage]) -> Image.Image:
    """All images of a step in rows, pixel for pixel, each over its prompt, negative prompt and seed.

    Long texts end in an ellipsis. The built-in font has no letters beyond Latin: they are drawn as boxes, and the
    metadata of the files has the text. ValueError without images.
    """
    return _draw(images, *_arrange(images))


def grid_png(images: Sequence[SampleImage]) -> bytes:
    """`sample_grid` as PNG. Its text `samples` is a JSON list: prompt, negative_prompt, seed, left and top of each."""
    layout, captions, font = _arrange(images)
    if layout.num < len(images):
        logger.info("the grid shows %d of %d images: more would be too large", layout.num, len(images))
    rows = []
    for number, sample in enumerate(images[: layout.num]):
        left, top = layout.corner(number)
        texts = {"prompt": sample.prompt, "negative_prompt": sample.negative_prompt, "seed": sample.seed}
        rows.append({**texts, "left": left, "top": top})
    return _png(_draw(images, layout, captions, font), {"samples": json.dumps(rows)})


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


def _arrange(images: Sequence[SampleImage]) -> tuple[Layout, list[list[Line]], ImageFont.FreeTypeFont]:
    if not images:
        raise ValueError("a grid needs at least one image")
    width = max(sample.image.width for sample in images)
    cell_width = max(width, MIN_CELL_WIDTH)
    font = ImageFont.load_default(min(max(width // 36, 12), 28))
    captions = [_caption(sample, font, cell_width) for sample in images]
    caption_height = max(map(len, captions)) * _line_height(font) + GAP
    image_height = max(sample.image.height for sample in images)
    num = min(len(images), max(1, MAX_PIXELS // (cell_width * (image_height + caption_height))))
    columns = math.ceil(math.sqrt(num))
    return Layout(num, columns, cell_width, image_height, caption_height), captions, font


def _draw(
    images: Sequence[SampleImage], layout: Layout, captions: list[list[Line]], font: ImageFont.FreeTypeFont
) -> Image.Image:
    grid = Image.new("RGB", layout.size, BACKGROUND)
    draw = ImageDraw.Draw(grid)
    for number, sample in enumerate(images[: layout.num]):
        left, top = layout.corner(number)
        grid.paste(sample.image.convert("RGB"), (left, top))
        for line, (text, ink) in enumerate(captions[number]):
            draw.text((left, top + layout.image_height + GAP // 2 + line * _line_height(font)), text, ink, font)
    return grid


def _line_height(font: ImageFont.FreeTypeFont) -> int:
    return sum(font.getmetrics()) + 1


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
    lines: list[str] = []
    line = ""
    cut = len(text) > MAX_CAPTION_CHARS
    for piece in _pieces(visible, font, width):
        longer = f"{line} {piece}" if line else piece
        if font.getlength(longer) <= width:
            line = longer
            continue
        lines.append(line)
        line = piece
        if len(lines) == max_lines:
            line, cut = "", True
            break
    lines += [line] if line else []
    if cut and lines:
        lines[-1] = _with_ellipsis(lines[-1], font, width)
    return lines


def _pieces(text: str, font: ImageFont.FreeTypeFont, width: int) -> Iterator[str]:
    """The words; one that is wider than a line in parts that are not."""
    for word in text.split():
        while font.getlength(word) > width and len(word) > 1:
            end = 1
            while end < len(word) and font.getlength(word[: end + 1]) <= width:
                end += 1
            yield word[:end]
            word = word[end:]
        yield word


def _with_ellipsis(line: str, font: ImageFont.FreeTypeFont, width: int) -> str:
    while line and font.getlength(f"{line}…") > width:
        line = line[:-1].rstrip()
    return f"{line}…"
