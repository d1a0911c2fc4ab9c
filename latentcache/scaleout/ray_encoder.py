"""An encoder of a Ray cluster: a process with the models on its device, which seals packs of its own."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
from typing_extensions import override

from latentcache.config import Config
from latentcache.dataset.samples import Sample, SampleSource
from latentcache.errors import ModelError
from latentcache.precache.encodings import Encodings, load_models
from latentcache.precache.preparation import TextKeys
from latentcache.precache.report import Failure
from latentcache.precache.serving_models import ServingModels
from latentcache.precache.tasks import ImageTask, Task, TextTask
from latentcache.precache.workspace import open_workspace
from latentcache.scaleout.messages import EncoderAnswer, Problem
from latentcache.store.writer import Writer
from latentcache.types import Kind, Refusal


class DecodedElsewhere(SampleSource):
    """The dataset of an image that comes as pixels. It can be neither listed nor read here."""

    @override
    def samples(self) -> Iterator[Sample | Refusal]:
        return iter(())

    @override
    def read(self, sample: Sample) -> bytes:
        raise AssertionError(f"{sample.path} was decoded by another process")


_DECODED = DecodedElsewhere()


def without_source(task: Task) -> Task:
    """The task as an encoder gets it: a dataset of many tars is larger than its pixels."""
    return replace(task, source=_DECODED) if isinstance(task, ImageTask) else task


class RayEncoder:
    """Encodes batches with the models of `config`, and seals what it made in the config's cache.

    Call `start` first. Keys and bytes are those of `planned`. `num_cpus` and GPUs are Ray's matter.
    """

    def __init__(self, config: Config, planned: Encodings):
        self._config, self._planned = config, planned
        self._models: ServingModels
        self._texts: TextKeys
        self._writer: Writer
        self._open = ExitStack()
        self._unsealed: set[str] = set()
        self._kind: Kind = "text"

    def where(self) -> str:
        """Names this process, for people."""
        return f"process {os.getpid()} on {socket.gethostname()}"

    def start(self) -> None:
        """Open the cache and identify the models. ModelError where they are not those of the plan."""
        workspace = self._open.enter_context(open_workspace(self._config.cache))
        memo = workspace.memo
        models = load_models(self._config.model, memo)
        self._models = ServingModels(self._config, models, memo)
        here, planned = self._models.encodings, self._planned
        for part, one, other in (("vae", here.image, planned.image), ("text_encoder", here.text, planned.text)):
            if one != other:
                raise ModelError(
                    f"{part}: the encoder of {self._config.model.path} in {self.where()} computes other entries than "
                    f"those that were planned: {one} in place of {other}. Give all nodes the same model and versions.",
                    part=part,
                )
        self._texts = TextKeys(here.family, models.tokenizers, here.text, "")
        self._writer = self._open.enter_context(workspace.store.writer())

    def encode(self, tasks: list[Task], *pixels: np.ndarray) -> EncoderAnswer:
        """Encode entries of one batch; of images with their pixels, in this order."""
        problems: dict[str, Problem] = {}

        def fail(key: str, failure: Failure) -> None:
            problems[key] = (failure.reason, failure.detail, failure.path)

        kind = tasks[0].kind
        if kind != self._kind:
            self._models.unload()  # the encoders of the other kind leave the device
            self._kind = kind
        tasks = [task for task in tasks if not isinstance(task, TextTask) or self._reads_as_planned(task, fail)]
        if not tasks:
            return replace(self._answer(), problems=problems)
        by_key = {task.key: each for task, each in zip(tasks, pixels, strict=kind == "image")}
        counted = self._models.encode(tasks, self._writer.add, fail, lambda task: by_key[task.key])
        self._unsealed |= {task.key for task in tasks} - problems.keys()
        return replace(
            self._answer(),
            problems=problems,
            num_truncated_captions=counted.num_truncated_captions,
            num_retried_in_float32=counted.num_retried_in_float32,
        )

    def _reads_as_planned(self, task: TextTask, fail: Callable[[str, Failure], None]) -> bool:
        """Whether the tokenizer gets here what the key was made of: other versions clean and render texts otherwise."""
        if self._texts.source(task.caption) == task.identity.source:
            return True
        detail = (
            f"{self.where()} gives its tokenizer another text for caption {task.caption!r} than the driver has in the "
            "key. Install the same versions of diffusers, transformers and, where one node has it, ftfy on all nodes"
        )
        fail(task.key, Failure("bad-caption", detail))
        return False

    def seal(self) -> EncoderAnswer:
        """Make all durable that was encoded."""
        self._writer.seal()
        return self._answer()

    def _answer(self) -> EncoderAnswer:
        sealed = self._unsealed - self._writer.pending()
        self._unsealed -= sealed
        return EncoderAnswer(sealed=frozenset(sealed), bytes_written=self._writer.bytes_written)
