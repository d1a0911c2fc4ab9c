"""Results in order, a bounded number ahead, errors left to the consumer."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from latentcache.utils.window import windowed


def test_results_are_in_order_and_errors_are_the_consumers() -> None:
    def work(number: int) -> int:
        if number == 3:
            raise ValueError("three")
        return number * 10

    with ThreadPoolExecutor(4) as executor:
        found = []
        for item, future in windowed(executor, work, range(6), 3):
            if item == 3:
                with pytest.raises(ValueError, match="three"):
                    future.result()
            else:
                found.append((item, future.result()))
    assert found == [(0, 0), (1, 10), (2, 20), (4, 40), (5, 50)]


def test_no_more_than_the_window_is_ahead() -> None:
    lock, started, taken = threading.Lock(), 0, 0
    most_ahead = 0

    def work(number: int) -> int:
        nonlocal started, most_ahead
        with lock:
            started += 1
            most_ahead = max(most_ahead, started - taken)
        return number

    with ThreadPoolExecutor(4) as executor:
        for _ in windowed(executor, work, range(100), 5):
            with lock:
                taken += 1
    assert most_ahead <= 5 + 1  # the one that is being handed over counts too


def test_leaving_early_cancels_what_has_not_started() -> None:
    gate, ran = threading.Event(), []

    def work(number: int) -> int:
        if number:
            gate.wait(10)
        ran.append(number)
        return number

    with ThreadPoolExecutor(1) as executor:
        results = windowed(executor, work, range(50), 10)
        next(results)
        results.close()
        gate.set()
    assert len(ran) <= 2
