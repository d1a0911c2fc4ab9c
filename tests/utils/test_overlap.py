"""The thread behind: in order, bounded, and its errors are never lost."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from latentcache.config import Config
from latentcache.errors import StoreError
from latentcache.precache import image_stage as images
from latentcache.precache.run import run_precache
from latentcache.store.writer import PackWriter
from latentcache.types import Entry
from latentcache.utils.overlap import NICENESS, Behind, step_back


def test_calls_are_made_in_order_in_one_other_thread() -> None:
    made, threads = [], set()

    def call(number: int) -> None:
        threads.add(threading.get_ident())
        made.append(number)

    with Behind(3, "test") as behind:
        for number in range(50):
            behind.call(call, number)
        behind.finish()
        assert made == list(range(50))
    assert len(threads) == 1 and threading.get_ident() not in threads


def test_no_more_than_size_wait() -> None:
    given, done, most = 0, 0, 0

    def slow() -> None:
        nonlocal done
        time.sleep(0.002)
        done += 1

    with Behind(2, "test") as behind:
        for _ in range(30):
            behind.call(slow)
            given += 1
            most = max(most, given - done)
    assert done == 30 and 1 <= most <= 2


def test_an_error_comes_up_and_nothing_is_called_after_it() -> None:
    made = []

    def call(number: int) -> None:
        if number == 1:
            raise StoreError("full")
        made.append(number)

    behind = Behind(10, "test")
    with pytest.raises(StoreError, match="full"), behind:
        for number in range(5):
            behind.call(call, number)
    assert made == [0]


def test_the_first_error_is_reported_and_the_second_is_noted(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise StoreError("full")

    with pytest.raises(ZeroDivisionError) as caught, Behind(2, "test") as behind:
        behind.call(fail)
        raise ZeroDivisionError
    assert any("full" in note for note in caught.value.__notes__) and "full" in caplog.text


def test_an_error_of_the_call_that_an_interrupt_met_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()

    def fail() -> None:
        release.wait(10)
        raise StoreError("full")

    def interrupt(self: Future[None], timeout: float | None = None) -> None:
        monkeypatch.undo()
        release.set()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught, Behind(1, "test") as behind:
        behind.call(fail)
        monkeypatch.setattr(Future, "result", interrupt)
        behind.call(fail)
    assert any("full" in note for note in getattr(caught.value, "__notes__", []))


def test_what_was_handed_over_is_seen_to_after_an_error() -> None:
    made = []
    with pytest.raises(ZeroDivisionError), Behind(4, "test") as behind:
        for number in range(4):
            behind.call(lambda number: (time.sleep(0.005), made.append(number)), number)
        raise ZeroDivisionError
    assert made == [0, 1, 2, 3]


def test_a_size_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Behind(0, "test")


def test_calls_that_are_not_to_be_beside_are_made_at_once_by_the_caller() -> None:
    made = []

    def fail() -> None:
        raise StoreError("full")

    with pytest.raises(StoreError, match="full"), Behind(2, "test", beside=False) as behind:
        for number in range(3):
            behind.call(lambda number: made.append((number, threading.get_ident())), number)
            assert made[-1] == (number, threading.get_ident())
        behind.finish()
        behind.call(fail)
    assert len(made) == 3


def test_on_a_cpu_entries_are_kept_in_the_main_thread_and_decoders_step_back(
    make_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    stepped: set[str] = set()
    kept: set[str] = set()
    add = PackWriter.add

    def spy(self: PackWriter, entry: Entry) -> None:
        kept.add(threading.current_thread().name)
        add(self, entry)

    monkeypatch.setattr(images, "step_back", lambda: stepped.add(threading.current_thread().name))
    monkeypatch.setattr(PackWriter, "add", spy)
    assert run_precache(make_config()).num_encoded > 0
    assert stepped and all(name.startswith("latentcache-decode") for name in stepped)
    assert kept == {threading.current_thread().name}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")
def test_a_thread_that_steps_back_lowers_its_own_priority_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    own, found = niceness(), []

    def call() -> None:
        step_back()
        found.append(niceness())
        monkeypatch.setattr(os, "setpriority", lambda *_: (_ for _ in ()).throw(PermissionError("not here")))
        step_back()  # a sandbox that forbids it stops no run

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert found == [min(own + NICENESS, 19)] and niceness() == own
