"""The plot of a validation: its loss over the steps so far, and over the timesteps of the schedule."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from latentcache.validation.metrics import Estimate, LossReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SIZE_INCHES, DPI = (11.0, 4.5), 110
MAX_DRAWN = 1e30
"""A larger loss is shown as a gap, like NaN: near the limit of floats no axis can be laid out."""
MAX_TICKS = 32
"""More than matplotlib's locator puts on an axis of this size."""
CURRENT_COLOUR, EARLIER_COLOUR = "tab:blue", "tab:gray"


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
    means = [_drawable(report.loss.mean) for report in curve.values()]
    errors = [_error(report.loss) for report in curve.values()]
    axes.plot(steps, means, marker="o", markersize=3, color=CURRENT_COLOUR)
    lower = [mean - error for mean, error in zip(means, errors, strict=True)]
    upper = [mean + error for mean, error in zip(means, errors, strict=True)]
    axes.fill_between(steps, lower, upper, color=CURRENT_COLOUR, alpha=0.2, linewidth=0)
    axes.plot([current], [_drawable(curve[current].loss.mean)], marker="o", markersize=7, color=CURRENT_COLOUR)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    left_out = f" ({num_others} measured otherwise, left out)" if num_others else ""
    axes.set_title(f"validation loss over steps{left_out}", fontsize="medium")
    axes.set_xlabel("step")
    _finish(axes, means)


def _draw_timesteps(axes: Axes, reports: Mapping[int, LossReport]) -> None:
    """The bins of these steps; the last is the current one."""
    *_, current = reports
    drawn: list[float] = []
    for step, report in reports.items():
        bins = report.by_timestep
        means = [_drawable(part.mean) for part in bins]
        axes.errorbar(
            [(part.first + part.end) / 2 for part in bins],
            means,
            yerr=[_error(part) for part in bins],
            xerr=[(part.end - part.first) / 2 for part in bins],
            fmt="o",
            markersize=3,
            color=CURRENT_COLOUR if step == current else EARLIER_COLOUR,
            label=f"step {step}",
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


def _error(loss: Estimate) -> float:
    """The half height of a band or bar; none is drawn where the standard error is unknown."""
    return 0.0 if loss.standard_error is None else _drawable(loss.standard_error)
