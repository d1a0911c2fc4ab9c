"""Progress of a run: a bar on a terminal, otherwise a log line every few seconds."""

from __future__ import annotations

import io
import logging
import sys

from tqdm import tqdm
from typing_extensions import override

LOG_INTERVAL_S = 10.0
_OF_TOTAL = "{desc}: {n_fmt} of {total_fmt}, {rate_fmt}, {remaining} left"

logger = logging.getLogger("latentcache")


class Progress:
    """Reports the progress of a run through its stages, if it is `shown`: by a bar on stderr if that is a terminal.

    Otherwise logs a line when a stage starts, at most every LOG_INTERVAL_S, and when it ends.
    """

    def __init__(self, *, shown: bool = False):
        self._is_shown = shown
        self._bar: tqdm | None = None

    def start(self, stage: str, total: int | None) -> None:
        """Start a stage of `total` steps; None means an unknown number."""
        self.finish()
        if self._is_shown and sys.stderr.isatty():
            self._bar = tqdm(desc=stage, total=total, file=sys.stderr, dynamic_ncols=True)
        elif self._is_shown:
            form = "{desc}: {n_fmt}, {rate_fmt}" if total is None else _OF_TOTAL
            steps = {"mininterval": LOG_INTERVAL_S, "miniters": 1}
            self._bar = _LoggedBar(desc=stage, total=total, file=io.StringIO(), bar_format=form, **steps)

    def advance(self, count: int = 1) -> None:
        """Count further steps of the stage as done."""
        if self._bar is not None:
            self._bar.update(count)

    def finish(self) -> None:
        """End the current stage, if any."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class _LoggedBar(tqdm):  # type: ignore[misc]  # tqdm has no types
    @override
    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        logger.info(str(self))
