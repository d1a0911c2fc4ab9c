"""A bar on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import sys

import pytest

from latentcache.utils.progress import ShownProgress


@pytest.mark.parametrize(("is_terminal", "num_lines"), [(True, 0), (False, 4)])
def test_a_stage_is_a_bar_on_a_terminal_and_lines_elsewhere(
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    is_terminal: bool,
    num_lines: int,
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal, raising=False)
    caplog.set_level(logging.INFO, "latentcache")
    progress = ShownProgress(interval_s=0)
    progress.advance()  # before a stage: nothing to show
    progress.start("encode images", 4)
    progress.advance(2)
    progress.advance(2)
    progress.finish()
    progress.finish()  # the end of a run, after that of its last stage
    lines, shown = [record.message for record in caplog.records], capsys.readouterr()
    assert shown.out == "" and ("encode images: 100%" in shown.err) == is_terminal and len(lines) == num_lines
    if lines:
        assert lines[0].startswith("encode images: 0 of 4, ")
        assert lines[-1].startswith("encode images: 4 of 4, ") and lines[-1].endswith(" left")
