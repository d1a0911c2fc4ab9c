"""A bar on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import sys

import pytest

from latentcache.utils.progress import ShownProgress


def test_log_lines_tell_rate_and_time_left(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "latentcache")
    progress = ShownProgress(interval_s=0)
    progress.start("encode images", 4)
    progress.advance(2)
    progress.advance(2)
    progress.finish()
    progress.finish()  # the end of a run, after that of its last stage
    lines = [record.message for record in caplog.records]
    assert "encode images: 2 of 4, " in lines[1] and lines[1].endswith(" left")
    assert lines[-1].startswith("encode images: 4 of 4, ")
    caplog.clear()
    rarely = ShownProgress(interval_s=3600)
    rarely.start("plan", None)
    for _ in range(1000):
        rarely.advance()
    rarely.start("next", None)
    assert [record.message.split(",")[0] for record in caplog.records] == [
        "plan: 0 of ?",
        "plan: 1000 of ?",
        "next: 0 of ?",
    ]


def test_a_terminal_gets_a_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    progress = ShownProgress()
    progress.advance()  # before a stage: nothing to show
    progress.start("encode images", 2)
    progress.advance(2)
    progress.finish()
    captured = capsys.readouterr()
    assert captured.out == "" and "encode images: 100%" in captured.err
