"""Work in other threads: in order, bounded, and errors are never lost."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from latentcache.errors import StoreError
from latentcache.utils.concurrency import BackgroundWorker, Prefetcher, bounded_map


def test_results_are_in_order_and_errors_are_the_consumers() -> None:
    def work(number: int) -> int:
        if number == 3:
            raise ValueError("three")
        return number * 10

    with ThreadPoolExecutor(4) as executor:
        found = []
        for item, future in bounded_map(executor, work, range(6), 3):
            if item == 3:
                with pytest.raises(ValueError, match="three"):
                    future.result()
            else:
                found.append((item, future.result()))
    assert found == [(0, 0), (1, 10), (2, 20), (4, 40), (5, 50)]


def test_no_more_than_size_items_are_ahead() -> None:
    lock, started, taken = threading.Lock(), 0, 0
    most_ahead = 0

    def work(number: int) -> int:
        nonlocal started, most_ahead
        with lock:
            started += 1
            most_ahead = max(most_ahead, started - taken)
        return number

    with ThreadPoolExecutor(4) as executor:
        for _ in bounded_map(executor, work, range(100), 5):
            with lock:
                taken += 1
    assert most_ahead <= 5 + 1  # the one that is being yielded counts too


def test_leaving_early_cancels_what_has_not_started() -> None:
    gate, ran = threading.Event(), []

    def work(number: int) -> int:
        if number:
            gate.wait(10)
        ran.append(number)
        return number

    with ThreadPoolExecutor(1) as executor:
        results = bounded_map(executor, work, range(50), 10)
        next(results)
        results.close()
        gate.set()
    assert len(ran) <= 2


def test_calls_are_made_in_order_in_one_other_thread() -> None:
    made, threads = [], set()

    def call(number: int) -> None:
        threads.add(threading.get_ident())
        made.append(number)

    with BackgroundWorker(3, "test") as worker:
        for number in range(50):
            worker.call(call, number)
        worker.finish()
        assert made == list(range(50))
    assert len(threads) == 1 and threading.get_ident() not in threads


def test_each_error_comes_up_and_the_other_calls_are_made() -> None:
    made, gate = [], threading.Event()

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


def test_an_error_is_raised_once_and_later_calls_are_made() -> None:
    made: list[int] = []
    with BackgroundWorker(3, "test") as worker:
        worker.call(lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            worker.finish()
        worker.finish()
        worker.call(made.append, 1)
    assert made == [1]


def test_an_error_of_the_call_that_an_interrupt_met_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def fail() -> None:
        release.wait(10)
        raise StoreError("full")

    def interrupt(self: Future[None], timeout: float | None = None) -> None:
        monkeypatch.undo()
        release.set()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught, BackgroundWorker(1, "test") as worker:
        worker.call(fail)
        monkeypatch.setattr(Future, "exception", interrupt)
        worker.call(fail)
    assert any("full" in note for note in getattr(caught.value, "__notes__", []))


def test_waiting_calls_are_made_after_an_error_of_the_caller() -> None:
    made = []
    with pytest.raises(ZeroDivisionError), BackgroundWorker(4, "test") as worker:
        for number in range(4):
            worker.call(lambda number: (time.sleep(0.005), made.append(number)), number)
        raise ZeroDivisionError
    assert made == [0, 1, 2, 3]


def test_without_a_thread_calls_are_made_at_once_by_the_caller() -> None:
    made = []

    def fail() -> None:
        raise StoreError("full")

    with pytest.raises(StoreError, match="full"), BackgroundWorker(2, "test", in_thread=False) as worker:
        for number in range(3):
            worker.call(lambda number: made.append((number, threading.get_ident())), number)
            assert made[-1] == (number, threading.get_ident())
        worker.finish()
        worker.call(fail)
    assert len(made) == 3


def test_prefetched_items_come_in_order_and_the_error_after_them_again_and_again() -> None:
    threads: set[int] = set()

    def source() -> Generator[int, None, None]:
        try:
            yield from range(5)
            raise StoreError("lost")
        finally:
            threads.add(threading.get_ident())

    items = Prefetcher(source(), 2)
    assert [next(items) for _ in range(5)] == list(range(5))
    for _ in range(2):
        with pytest.raises(StoreError, match="lost"):
            next(items)
    items.close()
    assert threads and threading.get_ident() not in threads


@pytest.mark.parametrize("ending", ["close", "drop"])
def test_the_prefetching_thread_ends_with_its_consumer_and_closes_the_source(ending: str) -> None:
    closed = threading.Event()

    def source() -> Generator[int, None, None]:
        try:
            while True:
                yield 0
        finally:
            closed.set()

    items = Prefetcher(source(), 3)
    assert next(items) == 0
    if ending == "close":
        items.close()
        with pytest.raises(StopIteration):
            next(items)
    else:
        del items
    assert closed.wait(10)


def prefetching_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "latentcache-prefetch"]


def test_the_prefetching_thread_ends_with_the_source_though_the_consumer_stays() -> None:
    items = Prefetcher((number for number in range(3)), 2)
    assert list(items) == [0, 1, 2]
    for thread in prefetching_threads():
        thread.join(10)
    assert not prefetching_threads()
    assert list(items) == []


class Large:
    """Something that a weak reference can follow."""


def test_closing_releases_what_was_made_and_not_taken() -> None:
    made: weakref.WeakSet[Large] = weakref.WeakSet()

    def large() -> Large:
        made.add(one := Large())
        return one

    items = Prefetcher((large() for _ in itertools.count()), 3)
    next(items)
    items.close()
    assert not made
    assert list(items) == []


def test_closing_in_another_thread_ends_a_consumer_that_waits() -> None:
    waits, goes_on = threading.Event(), threading.Event()

    def source() -> Generator[int, None, None]:
        yield 0
        waits.set()
        assert goes_on.wait(10)
        yield 1
        yield from itertools.count(2)

    items, found = Prefetcher(source(), 2), list[object]()

    def consume() -> None:
        try:
            found.extend(items)
        except BaseException as error:
            found.append(error)

    consumer = threading.Thread(target=consume)
    consumer.start()
    assert waits.wait(10)
    closer = threading.Thread(target=items.close)
    closer.start()
    goes_on.set()
    consumer.join(10)
    closer.join(10)
    assert found in ([0], [0, 1])
    assert list(items) == []


def test_a_thread_goes_on_prefetching_after_the_main_thread_has_ended() -> None:
    program = """
import threading, time
from latentcache.utils.concurrency import Prefetcher

def consume():
    main = threading.main_thread()
    main.join()
    time.sleep(0.05)  # the interpreter waits for this thread now
    print(list(Prefetcher(iter_once(), 2)))

def iter_once():
    yield from range(4)

threading.Thread(target=consume).start()
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (ran.stdout.strip(), ran.stderr) == ("[0, 1, 2, 3]", "")


@pytest.mark.parametrize("ending", ["", "raise SystemExit(3)", "signal.raise_signal(signal.SIGINT)"])
def test_the_process_ends_in_the_middle_of_an_iteration(ending: str) -> None:
    program = f"""
import itertools, signal
from latentcache.utils.concurrency import Prefetcher
signal.signal(signal.SIGINT, signal.default_int_handler)
items = Prefetcher((number for number in itertools.count()), 2)
assert next(items) == 0
{ending}
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == (0 if not ending else 3 if "SystemExit" in ending else -2), ran.stderr
