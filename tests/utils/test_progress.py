"""A bar on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import sys

import pytest

from latentcache.utils.progress import ShownProgress


@pytest.mark.parametrize(("interval_s", "num_lines"), [(0, 4), (3600, 2)])
def test_log_lines_tell_rate_and_time_left(caplog: pytest.LogCaptureFixture, interval_s: int, num_lines: int) -> None:
    caplog.set_level(logging.INFO, "latentcache")
    progress = ShownProgress(interval_s)
    progress.start("encode images", 4)
    progress.advance(2)
    progress.advance(2)
    progress.finish()
    progress.finish()  # the end of a run, after that of its last stage
    lines = [record.message for record in caplog.records]
    assert len(lines) == num_lines and lines[0].startswith("encode images: 0 of 4, ")
    assert lines[-1].startswith("encode images: 4 of 4, ") and lines[-1].endswith(" left")


def test_a_terminal_gets_a_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    progress = ShownProgress()
    progress.advance()  # before a stage: nothing to show
    progress.start("encode images", 2)
    progress.advance(2)
    progress.finish()
    captured = capsys.readouterr()
    assert captured.out == "" and "encode images: 100%" in captured.err
