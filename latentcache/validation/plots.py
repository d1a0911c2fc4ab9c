"""The plot of a validation: its loss over the steps so far, and over the timesteps of the schedule."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

from latentcache.validation.history import MeasuredStep, same_footing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from latentcache.validation.loss import Estimate

SIZE_INCHES, DPI = (11.0, 4.5), 110
MAX_DRAWN = 1e30
"""A larger loss is shown as a gap, like NaN: near the limit of floats no axis can be laid out."""
MAX_TICKS = 32
"""More than matplotlib's locator puts on an axis of this size."""
CURRENT_COLOUR, EARLIER_COLOUR = "tab:blue", "tab:gray"


def loss_plot(current: MeasuredStep, history: Sequence[MeasuredStep] = ()) -> bytes:
    """A PNG of two panels: loss over steps, with one standard error to each side, and loss over timestep bins.

    Of `history` those steps that were measured on the footing of `current` form the curve; how many were not, the
    title says. The second panel compares `current` with the first of them. A loss that is not finite is a gap.
    matplotlib's global settings, its backend among them, are read but never set.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    earlier, others = same_footing([m for m in history if m.step != current.step], current.footing)
    curve = sorted([*earlier, current], key=lambda measured: measured.step)
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        # A letter that the user's chosen font lacks is no reason to lose the plot, where warnings are errors.
        warnings.filterwarnings("ignore", category=UserWarning)
        figure = Figure(figsize=SIZE_INCHES, dpi=DPI, layout="constrained")
        canvas = FigureCanvasAgg(figure)
        over_steps, over_timesteps = figure.subplots(1, 2)
        _draw_steps(over_steps, curve, current, len(others))
        _draw_timesteps(over_timesteps, current, curve[0] if curve[0] is not current else None)
        _without_latex(figure)
        canvas.print_png(buffer)
    return buffer.getvalue()


def _draw_steps(axes: Axes, curve: Sequence[MeasuredStep], current: MeasuredStep, num_others: int) -> None:
    from matplotlib.ticker import MaxNLocator

    steps = [measured.step for measured in curve]
    means = [_drawable(measured.loss.mean) for measured in curve]
    errors = [_error(measured.loss) for measured in curve]
    axes.plot(steps, means, marker="o", markersize=3, color=CURRENT_COLOUR)
    lower = [mean - error for mean, error in zip(means, errors, strict=True)]
    upper = [mean + error for mean, error in zip(means, errors, strict=True)]
    axes.fill_between(steps, lower, upper, color=CURRENT_COLOUR, alpha=0.2, linewidth=0)
    axes.plot([current.step], [_drawable(current.loss.mean)], marker="o", markersize=7, color=CURRENT_COLOUR)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    left_out = f" ({num_others} measured otherwise, left out)" if num_others else ""
    axes.set_title(f"validation loss over steps{left_out}", fontsize="medium")
    axes.set_xlabel("step")
    _finish(axes, means)


def _draw_timesteps(axes: Axes, current: MeasuredStep, first: MeasuredStep | None) -> None:
    drawn: list[float] = []
    for measured, colour in ((first, EARLIER_COLOUR), (current, CURRENT_COLOUR)):
        if measured is None:
            continue
        bins = measured.by_timestep
        means = [_drawable(part.loss.mean) for part in bins]
        axes.errorbar(
            [(part.first + part.end) / 2 for part in bins],
            means,
            yerr=[_error(part.loss) for part in bins],
            xerr=[(part.end - part.first) / 2 for part in bins],
            fmt="o",
            markersize=3,
            color=colour,
            label=f"step {measured.step}",
        )
        drawn += means
    axes.set_title("validation loss over timesteps", fontsize="medium")
    axes.set_xlabel("timestep")
    axes.legend(fontsize="small")
    _finish(axes, drawn)


def _finish(axes: Axes, means: Sequence[float]) -> None:
    axes.set_ylabel("loss")
    axes.grid(alpha=0.3)
    if not any(map(math.isfinite, means)):
        axes.text(0.5, 0.5, "no finite loss", transform=axes.transAxes, ha="center", va="center")


def _without_latex(figure: Figure) -> None:
    """A user's `text.usetex`, set for papers, must not fail a validation on a machine without LaTeX."""
    from matplotlib.text import Text

    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            axis.get_major_ticks(MAX_TICKS)  # ticks are made when they are needed, with the user's setting
    for text in figure.findobj(Text):
        text.set_usetex(False)


def _drawable(value: float) -> float:
    return value if abs(value) < MAX_DRAWN else math.nan


def _error(found: Estimate) -> float:
    """The half height of a band or bar; none is drawn where the standard error is unknown."""
    return 0.0 if found.standard_error is None else _drawable(found.standard_error)
