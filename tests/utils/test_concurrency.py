"""Work in another thread loses no error; and what stops a run."""

from __future__ import annotations

import runpy
import signal
import threading

import pytest

from latentcache.errors import StoreError
from latentcache.utils import signals
from latentcache.utils.concurrency import BackgroundWorker


def test_each_error_comes_up_and_the_other_calls_are_made() -> None:
    made, gate = list[int](), threading.Event()

    def call(number: int) -> None:
        gate.wait(10)
        if number in (1, 3):
            raise StoreError(f"full {number}")
        made.append(number)

    with pytest.raises(StoreError, match="full 1") as caught, BackgroundWorker(10, "test") as worker:
        for number in range(5):
            worker.call(call, number)
        gate.set()
    assert made == [0, 2, 4] and any("full 3" in note for note in caught.value.__notes__)
    with pytest.raises(ZeroDivisionError) as interrupted, BackgroundWorker(10, "test") as worker:
        for number in range(2, 4):
            worker.call(call, number)
        raise ZeroDivisionError
    assert made == [0, 2, 4, 2] and any("full 3" in note for note in interrupted.value.__notes__)


def test_ctrl_break_of_windows_stops_a_run_as_ctrl_c_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "SIGBREAK", signal.SIGUSR1, raising=False)
    stop_on_signals = runpy.run_path(str(signals.__file__))["stop_on_signals"]
    for number in (signal.SIGINT, signal.SIGBREAK):
        stop = threading.Event()
        with stop_on_signals(stop) as caught:
            signal.raise_signal(number)
        assert stop.is_set() and caught == [number]
