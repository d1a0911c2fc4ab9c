"""The plot of the losses: drawn for any numbers, and matplotlib is left as it was."""

from __future__ import annotations

import itertools
import math
import runpy
import sys
import warnings

import matplotlib
import pytest
from helpers.report_samples import SETTINGS, losses, opened
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

from latentcache.validation import pictures as plots
from latentcache.validation.metrics import Estimate, LossReport, TimestepBin
from latentcache.validation.pictures import loss_plot


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are drawn, to look at what is in them."""
    made: list[Figure] = []
    real = Figure.__init__

    def remember(figure: Figure, *arguments: object, **options: object) -> None:
        real(figure, *arguments, **options)
        made.append(figure)

    monkeypatch.setattr(Figure, "__init__", remember)
    return made


def test_the_curve_has_every_step_of_these_settings_with_its_band(figures: list[Figure]) -> None:
    stale = losses(200).model_copy(update={"loss": Estimate(mean=99.0, standard_error=None, num=1)})
    elsewhere = losses(50, settings=SETTINGS.model_copy(update={"seed": 1}))
    current = losses(200)
    history = {300: losses(300), 100: losses(100), 200: stale, 50: elsewhere}
    picture = opened(loss_plot(200, current, history))
    assert picture.size == (1210, 495)
    over_steps, over_timesteps = figures[0].axes
    curve = over_steps.lines[0]
    expected = [losses(step).loss for step in (100, 200, 300)]
    assert list(curve.get_xdata()) == [100, 200, 300]
    assert list(curve.get_ydata()) == [loss.mean for loss in expected]
    corners = over_steps.collections[0].get_paths()[0].vertices[:, 1]
    assert min(corners) == pytest.approx(min(loss.mean - loss.standard_error for loss in expected))
    assert max(corners) == pytest.approx(max(loss.mean + loss.standard_error for loss in expected))
    assert list(over_steps.lines[1].get_xdata()) == [200]
    assert "1 measured otherwise, left out" in over_steps.get_title()
    labels = [text.get_text() for text in over_timesteps.get_legend().get_texts()]
    assert labels == ["step 100", "step 200"]
    drawn = [container.lines[0].get_xydata().tolist() for container in over_timesteps.containers]
    for points, report in zip(drawn, (losses(100), current), strict=True):
        assert points == [[(part.first + part.end) / 2, part.mean] for part in report.by_timestep]


def test_the_first_step_is_compared_with_nothing(figures: list[Figure]) -> None:
    opened(loss_plot(100, losses(100)))
    assert len(figures[0].axes[1].containers) == 1
    assert "otherwise" not in figures[0].axes[0].get_title()


numbers = st.floats() | st.sampled_from([math.nan, math.inf, -math.inf, 0.0, 1e308, -1e308, 5e-324])
errors = st.none() | numbers.map(abs).filter(lambda error: not math.isnan(error))
steps = st.integers(0, 2**53)


@st.composite
def reports(draw: st.DrawFn) -> LossReport:
    edges = sorted(draw(st.sets(st.integers(0, 1000), min_size=2, max_size=4)))
    bins = [
        TimestepBin(mean=draw(numbers), standard_error=draw(errors), num=draw(st.integers(1, 9)), first=a, end=b)
        for a, b in itertools.pairwise(edges)
    ]
    loss = Estimate(mean=draw(numbers), standard_error=draw(errors), num=draw(st.integers(1, 9)))
    return losses().model_copy(update={"loss": loss, "by_timestep": tuple(bins[draw(st.integers(0, 1)) :])})


@settings(max_examples=12, deadline=None)
@given(steps, reports(), st.dictionaries(steps, reports(), max_size=3))
def test_any_numbers_can_be_drawn(step: int, current: LossReport, history: dict[int, LossReport]) -> None:
    opened(loss_plot(step, current, history))


def test_losses_that_are_not_finite_are_gaps_and_said_so(figures: list[Figure]) -> None:
    opened(loss_plot(100, losses(100, nan=True)))
    assert [text.get_text() for text in figures[0].axes[0].texts] == ["no finite loss"]
    opened(loss_plot(200, losses(200), {100: losses(100, nan=True)}))
    assert not list(figures[1].axes[0].texts) and math.isnan(figures[1].axes[0].lines[0].get_ydata()[0])


def test_matplotlib_is_imported_only_when_something_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # importing it is an ImportError now
    module = runpy.run_path(str(plots.__file__))
    with pytest.raises(ImportError, match="matplotlib"):
        module["loss_plot"](1, losses(1))


def test_no_trace_is_left_in_matplotlib_or_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    monkeypatch.setitem(matplotlib.rcParams, "lines.linewidth", 7.0)
    monkeypatch.setitem(matplotlib.rcParams, "font.family", ["no such font anywhere"])
    backend = matplotlib.get_backend(auto_select=False)
    before, filters = matplotlib.rcParams.copy(), list(warnings.filters)
    opened(loss_plot(1, losses(1), {0: losses(0)}))
    assert matplotlib.get_backend(auto_select=False) == backend
    assert matplotlib.rcParams.copy() == before and list(warnings.filters) == filters


def test_a_setting_for_latex_needs_no_latex(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(matplotlib.rcParams, "text.usetex", True)
    far = losses(1).model_copy(update={"loss": Estimate(mean=3e7, standard_error=1e-9, num=2)})
    opened(loss_plot(1, far, {0: losses(0), 123_456_789: losses(123_456_789)}))


def test_a_letter_that_the_font_lacks_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Figure.subplots

    def with_a_strange_title(figure: Figure, *arguments: object, **options: object) -> object:
        figure.suptitle("日本語")
        return real(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "subplots", with_a_strange_title)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        opened(loss_plot(1, losses(1)))
        with pytest.raises(UserWarning):
            warnings.warn("still an error afterwards", UserWarning, stacklevel=1)
