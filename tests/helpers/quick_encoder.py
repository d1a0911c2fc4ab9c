"""Encoders for a Ray cluster that start quickly: they load no model, wait a little and store zeros.

Names of files say what is to happen: `fatal` kills each encoder that gets it, `unlucky` the first one, and `poison`
each process that decodes it.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from latentcache.config import Config
from latentcache.scaleout.messages import EncoderAnswer

ENCODE_S = 0.05


def poison_decoding() -> None:
    """In a new process of the cluster: make `poison` kill it, as a fault of a decoder would."""
    from latentcache.precache import decoding

    whole = decoding.decode

    def decode(data: bytes, path: str, config: Any) -> np.ndarray:
        if "poison" in path:
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(data, path, config)

    decoding.decode = decode


class QuickEncoder:
    """Has the methods of `RayEncoder`. Each entry that it encodes is a line of `encoded.txt` next to the cache."""

    def __init__(self, config: Config, planned: object):
        self._folder, self._path = Path(config.cache.path).parent, Path(config.cache.path)
        self._open, self._unsealed = ExitStack(), set[str]()

    def where(self) -> str:
        return f"process {os.getpid()}"

    def start(self) -> None:
        from latentcache.store import writer
        from latentcache.store.disk import DiskStore

        writer.PACK_AGE_S = 0.5
        self._writer = self._open.enter_context(self._open.enter_context(DiskStore(self._path)).writer())

    def encode(self, tasks: list[Any], *pixels: np.ndarray) -> EncoderAnswer:
        import torch

        from latentcache.types import Entry, Record

        time.sleep(ENCODE_S)
        for task in tasks:
            path = task.sample.path if hasattr(task, "sample") else task.path
            if "fatal" in path and hasattr(task, "sample"):
                os.kill(os.getpid(), signal.SIGKILL)
            if "unlucky" in path and hasattr(task, "sample"):
                try:
                    (self._folder / "was-unlucky").touch(exist_ok=False)
                    os.kill(os.getpid(), signal.SIGKILL)
                except FileExistsError:
                    pass
            record = Record(task.key, task.identity.kind, task.identity.to_json(), {})
            self._writer.add(Entry(record, {"zeros": torch.zeros(4)}))
            with (self._folder / "encoded.txt").open("a") as log:
                log.write(f"{task.key}\n")
            self._unsealed.add(task.key)
        return self._answer()

    def seal(self) -> EncoderAnswer:
        self._writer.seal()
        return self._answer()

    def _answer(self) -> EncoderAnswer:
        sealed = self._unsealed - self._writer.pending()
        self._unsealed -= sealed
        return EncoderAnswer(sealed=frozenset(sealed), bytes_written=self._writer.bytes_written)


class LosingEncoder(QuickEncoder):
    """Says each time that the pixels of its batch were lost, as where its node does not reach the one that has them."""

    def encode(self, tasks: list[Any], *pixels: np.ndarray) -> EncoderAnswer:
        if pixels:
            from ray.exceptions import ObjectFetchTimedOutError

            raise ObjectFetchTimedOutError("00" * 28, "", "")
        return super().encode(tasks)


class LongAnswers(QuickEncoder):
    """Its last answer is longer than what Ray sends directly, as of packs of many small entries: its node keeps it."""

    def seal(self) -> EncoderAnswer:
        answer = super().seal()
        return replace(answer, sealed=answer.sealed | {f"{number:064x}" for number in range(5000)})


class FaultyEncoder(QuickEncoder):
    """Has a fault."""

    def encode(self, tasks: list[Any], *pixels: np.ndarray) -> EncoderAnswer:
        raise TypeError("a fault of an encoder")
