"""Ray encoders without a model. A file named `fatal` kills every encoder that gets it, `unlucky` only the first."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from typing_extensions import override

from latentcache.precache.report import Report
from latentcache.precache.workspace import Workspace, open_workspace
from latentcache.scaleout.ray import RayEncoder
from latentcache.types import Entry, Record

ENCODE_S = 0.05


class QuickEncoder(RayEncoder):
    """Stores zeros after a short wait, and logs each entry to `encoded.txt` next to the cache."""

    @override
    def _start(self) -> Workspace:
        self._folder = Path(self._config.cache.path).parent
        return open_workspace(self._config.cache)

    @override
    def _encode(
        self, tasks: list[Any], groups: dict[str, int], writer: Any, problems: dict[str, Any], made: set[str]
    ) -> Report:
        for task in tasks:
            if self._stop.is_set():
                break
            time.sleep(ENCODE_S / 2)
            path = task.sample.path
            if "fatal" in path and task.kind == "image":
                os.kill(os.getpid(), signal.SIGKILL)
            if "unlucky" in path and task.kind == "image":
                try:
                    (self._folder / "was-unlucky").touch(exist_ok=False)
                    writer.seal()  # as when a pack is full in the middle of a call
                    os.kill(os.getpid(), signal.SIGKILL)
                except FileExistsError:
                    pass
            writer.add(Entry(Record(task.key, task.kind, task.identity.to_json(), {}), {"zeros": torch.zeros(4)}))
            made.add(task.key)
            with (self._folder / "encoded.txt").open("a") as log:
                log.write(f"{task.key}\n")
        return Report()


class FaultyEncoder(QuickEncoder):
    """An encoder with a bug."""

    @override
    def _encode(self, *given: Any) -> Report:
        raise TypeError("a fault of an encoder")
