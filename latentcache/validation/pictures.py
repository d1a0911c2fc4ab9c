"""PNG files of a validation: the sample images, their grid, and the plot of the loss."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from functools import partial

from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo

from latentcache.validation.metrics import LossReport
from latentcache.validation.sample_images import SampleImage

MIN_CELL_WIDTH = 192
"""In pixels, so that the caption under a tiny image stays readable."""
GAP = 8
"""Pixels between images, and around them."""
MAX_LINES = 6
"""Lines of a caption. Longer texts end in an ellipsis."""


def image_png(sample: SampleImage) -> bytes:
    """The image as PNG, with its `prompt`, `negative_prompt` (if any) and `seed` as text chunks."""
    texts = {"prompt": sample.prompt, "negative_prompt": sample.negative_prompt, "seed": str(sample.seed)}
    info = PngInfo()
    for name, text in texts.items():
        if text is not None:
            info.add_itxt(name, _writable(text))
    return png_bytes(sample.image, info)


def png_bytes(image: Image.Image, info: PngInfo | None = None) -> bytes:
    """The image as a PNG file."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG", pnginfo=info)
    return buffer.getvalue()


def caption_of(sample: SampleImage) -> str:
    """Prompt, negative prompt and seed on one line."""
    return f"{_prompts(sample)} | seed {sample.seed}"


def _prompts(sample: SampleImage) -> str:
    return f"{sample.prompt}{f' | negative: {sample.negative_prompt}' if sample.negative_prompt else ''}"


def sample_grid(images: Sequence[SampleImage]) -> Image.Image:
    """All images of a step in rows at full size, each above its seed, prompt and negative prompt.

    The built-in font is Latin only and draws other letters as boxes; each image's own file has the full text. Raises
    ValueError without images.
    """
    if not images:
        raise ValueError("a grid needs at least one image")
    width, height = (max(getattr(sample.image, side) for sample in images) for side in ("width", "height"))
    cell_width = max(width, MIN_CELL_WIDTH)
    size = min(max(width // 36, 12), 28)
    wrap = partial(textwrap.wrap, width=2 * cell_width // size, max_lines=MAX_LINES, placeholder="…")
    captions = [wrap(_writable(f"seed {sample.seed} | {_prompts(sample)}")) for sample in images]
    cell_height = height + GAP + (size + 4) * max(map(len, captions))
    columns = math.ceil(math.sqrt(len(images)))
    rows = math.ceil(len(images) / columns)
    grid = Image.new("RGB", (columns * (cell_width + GAP) + GAP, rows * (cell_height + GAP) + GAP), "white")
    for number, (sample, caption) in enumerate(zip(images, captions, strict=True)):
        cell = Image.new("RGB", (cell_width, cell_height), "white")  # clips a caption that is too wide
        cell.paste(sample.image.convert("RGB"))
        ImageDraw.Draw(cell).text((0, height + GAP // 2), "\n".join(caption), "black", ImageFont.load_default(size))
        row, column = divmod(number, columns)
        grid.paste(cell, (GAP + column * (cell_width + GAP), GAP + row * (cell_height + GAP)))
    return grid


def _writable(text: str) -> str:
    """Escape lone surrogates, which UTF-8 cannot encode."""
    return text.encode("utf-8", "backslashreplace").decode()


def loss_plot(step: int, loss: LossReport, history: Mapping[int, LossReport]) -> bytes | None:
    """Plot the loss over steps, and over timesteps at the first and at this step, with standard errors, as PNG.

    Steps of `history` with other measurement settings are left out. Returns None without matplotlib
    (`pip install latentcache[plots]`).
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        return None
    comparable = {n: found for n, found in history.items() if found.measurement_settings == loss.measurement_settings}
    curve = dict(sorted((comparable | {step: loss}).items()))
    buffer = io.BytesIO()
    with mpl.rc_context({"text.usetex": False}):  # a matplotlibrc may set it, and it needs LaTeX
        figure = Figure(figsize=(11.0, 4.5), dpi=110, layout="constrained")
        over_steps, over_timesteps = figure.subplots(1, 2)
        means = [found.loss.mean for found in curve.values()]
        over_steps.errorbar(
            list(curve), means, [found.loss.standard_error or 0 for found in curve.values()], marker="o"
        )
        over_steps.set(xlabel="step", ylabel="loss", title="validation loss over steps")
        for number in sorted({min(curve), step}):
            bins = curve[number].by_timestep
            centres = [(part.first + part.end) / 2 for part in bins]
            errors = [part.standard_error or 0 for part in bins]
            over_timesteps.errorbar(centres, [part.mean for part in bins], errors, fmt="o", label=f"step {number}")
        over_timesteps.set(xlabel="timestep", ylabel="loss", title="validation loss over timesteps")
        over_timesteps.legend()
        figure.savefig(buffer, format="png")
    return buffer.getvalue()
