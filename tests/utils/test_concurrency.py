"""Work in other threads: in order, bounded, and errors are never lost."""

from __future__ import annotations

import runpy
import signal
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor

import pytest

from latentcache.errors import StoreError
from latentcache.utils import signals
from latentcache.utils.concurrency import BackgroundWorker, Prefetcher, bounded_map


def test_results_come_in_order_a_few_ahead_and_errors_are_the_consumers() -> None:
    started = list[int]()

    def work(number: int) -> int:
        started.append(number)
        return 10 // (number - 3)

    with ThreadPoolExecutor(4) as executor:
        results = bounded_map(executor, work, range(50), 5)
        for number, (item, future) in zip(range(10), results, strict=False):
            assert item == number
            if number == 3:
                with pytest.raises(ZeroDivisionError):
                    future.result()
            else:
                assert future.result() == 10 // (number - 3)
        results.close()
    assert len(started) <= 10 + 5, "what had not started is cancelled"


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


def test_prefetched_items_come_in_order_then_the_error_and_a_dropped_source_is_closed() -> None:
    closed, threads = threading.Event(), set[int]()

    def source(num: int) -> Generator[int, None, None]:
        try:
            yield from range(num)
            raise StoreError("lost")
        finally:
            threads.add(threading.get_ident())
            closed.set()

    items = Prefetcher(source(5), 2)
    assert [next(items) for _ in range(5)] == list(range(5))
    for _ in range(2):
        with pytest.raises(StoreError, match="lost"):
            next(items)
    items.close()
    assert threads and threading.get_ident() not in threads and list(items) == []
    closed.clear()
    items = Prefetcher(source(1_000_000), 2)
    assert next(items) == 0
    del items
    assert closed.wait(10)
    ends = Prefetcher((number for number in range(3)), 2)
    assert list(ends) == [0, 1, 2] and list(ends) == []


def test_ctrl_break_of_windows_stops_a_run_as_ctrl_c_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "SIGBREAK", signal.SIGUSR1, raising=False)
    stop_on_signals = runpy.run_path(str(signals.__file__))["stop_on_signals"]
    for number in (signal.SIGINT, signal.SIGBREAK):
        stop = threading.Event()
        with stop_on_signals(stop) as caught:
            signal.raise_signal(number)
        assert stop.is_set() and caught == [number]
