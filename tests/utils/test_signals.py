"""What stops a run."""

from __future__ import annotations

import runpy
import signal
import threading

import pytest

from latentcache.utils import signals


def test_ctrl_break_of_windows_stops_a_run_as_ctrl_c_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "SIGBREAK", signal.SIGUSR1, raising=False)
    stop_on_signals = runpy.run_path(str(signals.__file__))["stop_on_signals"]
    for number in (signal.SIGINT, signal.SIGBREAK):
        stop = threading.Event()
        with stop_on_signals(stop) as caught:
            signal.raise_signal(number)
        assert stop.is_set() and caught == [number]
