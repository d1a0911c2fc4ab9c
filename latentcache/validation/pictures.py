"""The pictures of a validation as PNG: its sample images, their grid, and the plot of its loss."""

from __future__ import annotations

import io
import json
import logging
import math
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from latentcache.validation.metrics import Estimate, LossReport
from latentcache.validation.sample_images import SampleImage

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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

SIZE_INCHES, DPI = (11.0, 4.5), 110
MAX_DRAWN = 1e30
"""A larger loss is shown as a gap, like NaN: near the limit of floats no axis can be laid out."""
MAX_TICKS = 32
"""More than matplotlib's locator puts on an axis of this size."""
CURRENT_COLOUR, EARLIER_COLOUR = "tab:blue", "tab:gray"

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
    while True:
        lines = textwrap.wrap(visible, num_chars, max_lines=max_lines, placeholder="…")
        if num_chars == 1 or all(font.getlength(line) <= width for line in lines):
            return lines
        num_chars -= 1


def loss_plot(step: int, loss: LossReport, history: Mapping[int, LossReport] | None = None) -> bytes:
    """A PNG of two panels: loss over steps, with one standard error to each side, and loss over timestep bins.

    The curve has the steps of `history` that were measured with the settings of `loss`; the title says how many were
    not. The second panel compares `loss` with the first step of the curve. A loss that is not finite is a gap.
    matplotlib's global settings, its backend among them, are read but never set.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    earlier = {number: report for number, report in (history or {}).items() if number != step}
    comparable = {
        n: report for n, report in earlier.items() if report.measurement_settings == loss.measurement_settings
    }
    curve = dict(sorted((comparable | {step: loss}).items()))
    first = min(curve)
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        # A letter that the user's chosen font lacks is no reason to lose the plot, where warnings are errors.
        warnings.filterwarnings("ignore", category=UserWarning)
        figure = Figure(figsize=SIZE_INCHES, dpi=DPI, layout="constrained")
        canvas = FigureCanvasAgg(figure)
        over_steps, over_timesteps = figure.subplots(1, 2)
        _draw_steps(over_steps, curve, step, len(earlier) - len(comparable))
        _draw_timesteps(over_timesteps, {first: curve[first], step: loss})
        _without_latex(figure)
        canvas.print_png(buffer)  # type: ignore[no-untyped-call]  # matplotlib's backends are not annotated
    return buffer.getvalue()


def _draw_steps(axes: Axes, curve: Mapping[int, LossReport], current: int, num_others: int) -> None:
    from matplotlib.ticker import MaxNLocator

    steps = list(curve)
    means, errors = _drawn([report.loss for report in curve.values()])
    axes.plot(steps, means, marker="o", markersize=3, color=CURRENT_COLOUR)
    axes.fill_between(steps, means - errors, means + errors, color=CURRENT_COLOUR, alpha=0.2, linewidth=0)
    axes.plot([current], [means[steps.index(current)]], marker="o", markersize=7, color=CURRENT_COLOUR)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    left_out = f" ({num_others} measured otherwise, left out)" if num_others else ""
    _label(axes, "step", f"validation loss over steps{left_out}", means)


def _draw_timesteps(axes: Axes, reports: Mapping[int, LossReport]) -> None:
    """The bins of these steps; the last is the current one."""
    for step, report in reports.items():
        means, errors = _drawn(report.by_timestep)
        axes.errorbar(
            [(part.first + part.end) / 2 for part in report.by_timestep],
            means,
            yerr=errors,
            xerr=[(part.end - part.first) / 2 for part in report.by_timestep],
            fmt="o",
            markersize=3,
            color=CURRENT_COLOUR if step == list(reports)[-1] else EARLIER_COLOUR,
            label=f"step {step}",
        )
    axes.legend(fontsize="small")
    drawn = [_drawn(report.by_timestep)[0] for report in reports.values()]
    _label(axes, "timestep", "validation loss over timesteps", np.concatenate(drawn))


def _drawn(estimates: Sequence[Estimate]) -> tuple[np.ndarray, np.ndarray]:
    """Means, and the half heights of their bands or bars: none where the standard error is unknown."""
    rows = [(estimate.mean, estimate.standard_error or 0.0) for estimate in estimates]
    values = np.array(rows, dtype=float).reshape(-1, 2)
    values[~(np.abs(values) < MAX_DRAWN)] = math.nan
    return values[:, 0], values[:, 1]


def _label(axes: Axes, xlabel: str, title: str, means: np.ndarray) -> None:
    axes.set_title(title, fontsize="medium")
    axes.set_xlabel(xlabel)
    axes.set_ylabel("loss")
    axes.grid(alpha=0.3)
    if not np.isfinite(means).any():
        axes.text(0.5, 0.5, "no finite loss", transform=axes.transAxes, ha="center", va="center")


def _without_latex(figure: Figure) -> None:
    """A user's `text.usetex`, set for papers, must not fail a validation on a machine without LaTeX."""
    from matplotlib.text import Text

    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            axis.get_major_ticks(MAX_TICKS)  # ticks are made when they are needed, with the user's setting
    for text in figure.findobj(Text):
        text.set_usetex(False)
