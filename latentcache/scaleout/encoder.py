"""An encoder of a Ray cluster: a process with the models on its device, which decodes, encodes and seals packs."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from dataclasses import replace

from latentcache.config import Config
from latentcache.dataset.samples import SampleSource
from latentcache.errors import ModelError
from latentcache.precache.encodings import Encodings, load_models
from latentcache.precache.preparation import TextKeys
from latentcache.precache.report import Failure, Report
from latentcache.precache.serving_models import ServingModels
from latentcache.precache.tasks import Task
from latentcache.precache.workspace import Workspace, open_workspace
from latentcache.store.writer import Writer
from latentcache.types import Entry, Kind

Work = list[list[tuple[Task, int]]]
"""Batches of one kind. Each image comes without its source, and with the source's number."""
Answer = tuple[dict[str, Failure], Report]
"""What became of a call's entries: why some cannot be made, and what was counted. The others are durable, but those
that a stop left."""


class RayEncoder:
    """Encodes batches with the models of `config`, and seals what it made in the config's cache.

    Keys and bytes are those of `planned`. `sources` are the datasets that images are read from. Call `where` first: it
    answers as soon as the process runs. The models are identified by the first `encode`, whose errors reach the caller.
    """

    def __init__(self, config: Config, planned: Encodings, sources: Sequence[SampleSource]):
        self._config, self._planned, self._sources = config, planned, sources
        self._stop = threading.Event()
        self._workspace: Workspace | None = None
        self._kind: Kind = "text"

    def where(self) -> str:
        """Name this process, for people."""
        return f"process {os.getpid()} on {socket.gethostname()}"

    def stop(self) -> None:
        """Leave the rest of the running call to another run: what is done is sealed. Called from another thread."""
        self._stop.set()

    def encode(self, work: Work) -> Answer:
        """Encode and seal what the cache does not have yet of these batches.

        Raises ModelError where the models are not those of the plan.
        """
        if self._workspace is None:
            self._workspace = self._start()
        batches = [[self._with_source(task, number) for task, number in batch] for batch in work]
        groups = {task.key: number for number, batch in enumerate(batches) for task in batch}
        found = self._workspace.store.find(groups)  # by an encoder that died in the middle of this call
        tasks = [task for batch in batches for task in batch if task.key not in found]
        problems, made = dict[str, Failure](), set[str]()
        with self._workspace.store.writer() as writer:
            report = self._encode(tasks, groups, writer, problems, made)
            writer.seal()
            report.num_encoded, report.bytes_written = len(found | made), writer.bytes_written
        return problems, report

    def _encode(
        self, tasks: list[Task], groups: dict[str, int], writer: Writer, problems: dict[str, Failure], made: set[str]
    ) -> Report:
        """Give the entries to the writer, batched as planned."""

        def store(entry: Entry) -> None:
            writer.add(entry)
            made.add(entry.record.key)

        tasks = [task for task in tasks if task.kind != "text" or self._reads_as_planned(task, problems)]
        if not tasks or self._stop.is_set():
            return Report()
        if tasks[0].kind != self._kind:
            self._models.unload()  # the encoders of the other kind leave the device
            self._kind = tasks[0].kind
        return self._models.encode(
            tasks, store, problems.__setitem__, group_of=lambda task: groups[task.key], stop=self._stop
        )

    def _start(self) -> Workspace:
        """Open the cache and identify the models."""
        workspace = open_workspace(self._config.cache)
        models = load_models(self._config.model, workspace.memo)
        self._models = ServingModels(self._config, models, workspace.memo)
        here, planned = self._models.encodings, self._planned
        for part, one, other in (("vae", here.image, planned.image), ("text_encoder", here.text, planned.text)):
            if one != other:
                raise ModelError(
                    f"{part}: the encoder of {self._config.model.path} in {self.where()} computes other entries than "
                    f"those that were planned: {one} in place of {other}. Give all nodes the same model and versions.",
                    part=part,
                )
        self._texts = TextKeys(here.family, models.tokenizers, here.text, "")
        return workspace

    def _with_source(self, task: Task, number: int) -> Task:
        return replace(task, source=self._sources[number]) if task.kind != "text" else task

    def _reads_as_planned(self, task: Task, problems: dict[str, Failure]) -> bool:
        """Whether the tokenizer gets here what the key was made of: other versions clean and render texts otherwise."""
        if self._texts.source(task.caption) == task.identity.source:
            return True
        detail = (
            f"{self.where()} gives its tokenizer another text for caption {task.caption!r} than the driver has in the "
            "key. Install the same versions of diffusers, transformers and, where one node has it, ftfy on all nodes"
        )
        problems[task.key] = Failure("bad-caption", detail)
        return False
