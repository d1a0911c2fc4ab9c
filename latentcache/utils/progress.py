"""Progress of a run: a bar on a terminal, one log line every few seconds elsewhere."""

from __future__ import annotations

import logging
import sys
import time

from tqdm import tqdm
from typing_extensions import override

LOG_INTERVAL_S = 10.0

logger = logging.getLogger("latentcache")


class Progress:
    """Shows how far a run is. Stages follow one another. This one shows nothing."""

    def start(self, stage: str, total: int | None) -> None:
        """Begin a stage of `total` steps, or of an unknown number."""

    def advance(self, count: int = 1) -> None:
        """Add steps of the stage."""

    def finish(self) -> None:
        """End the stage, if there is one."""


class BarProgress(Progress):
    """A bar on stderr."""

    _bar: tqdm | None = None

    @override
    def start(self, stage: str, total: int | None) -> None:
        self.finish()
        self._bar = tqdm(desc=stage, total=total, file=sys.stderr, dynamic_ncols=True)

    @override
    def advance(self, count: int = 1) -> None:
        if self._bar is not None:
            self._bar.update(count)

    @override
    def finish(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class LogProgress(Progress):
    """A log line when a stage starts, every `interval_s` seconds, and when it ends."""

    _stage: str | None = None
    _total: int | None = None
    _done = 0
    _started = _logged = 0.0

    def __init__(self, interval_s: float = LOG_INTERVAL_S):
        self._interval_s = interval_s

    @override
    def start(self, stage: str, total: int | None) -> None:
        self.finish()
        self._stage, self._total, self._done = stage, total, 0
        self._started = self._logged = time.monotonic()

    @override
    def advance(self, count: int = 1) -> None:
        self._done += count
        if time.monotonic() - self._logged >= self._interval_s:
            self._log()

    @override
    def finish(self) -> None:
        if self._stage is not None:
            self._log()
            self._stage = None

    def _log(self) -> None:
        self._logged = time.monotonic()
        elapsed_s = max(self._logged - self._started, 1e-9)
        rate = self._done / elapsed_s
        text = f"{self._stage}: {self._done}"
        if self._total is not None:
            text += f" of {self._total}"
        text += f", {rate:.1f}/s"
        if self._total is not None and 0 < self._done < self._total:
            text += f", {(self._total - self._done) / rate:.0f} s left"
        logger.info(text)


def default_progress() -> Progress:
    """A bar when stderr is a terminal, log lines otherwise."""
    return BarProgress() if sys.stderr.isatty() else LogProgress()
