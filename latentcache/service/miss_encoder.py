"""Encodes requested entries that are not cached: once per key, in batches, in one thread for all requests."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter
from typing_extensions import override

from latentcache.config import Config
from latentcache.dataset.clips import probe_clip
from latentcache.dataset.manifest import Manifest, prompts_name
from latentcache.dataset.row_table import Ref, Row, RowTable
from latentcache.dataset.samples import Sample, SampleSource
from latentcache.errors import (
    ConfigError,
    EncodeError,
    EncoderBusyError,
    ImageRefused,
    LatentCacheError,
    ReadOnlyError,
    StoreError,
)
from latentcache.identity import digest, short
from latentcache.models.model_loader import Models
from latentcache.precache.encodings import load_models
from latentcache.precache.preparation import Preparations
from latentcache.precache.prompts import add_prompts, prompt_keys, prompt_row, prompt_task, prompts_common
from latentcache.precache.report import Failure
from latentcache.precache.serving_models import ServingModels
from latentcache.precache.tasks import Task
from latentcache.precache.workspace import Workspace
from latentcache.store.base import Closing
from latentcache.types import Kind, Refusal

IDLE_S = 300.0
"""Seconds without a miss after which the models leave the device."""
MAX_WAITING = 1024
"""Most entries in the queue."""
MAX_WAITING_BYTES = 256 << 20
"""Most bytes of images in the queue."""
ROUND_SIZES: Mapping[Kind, int] = {"text": 64, "image": 16}
"""Entries that are encoded, stored as one pack and returned together."""
CLOSED_S, BUSY_S = 5, 2
"""Seconds after which a client may retry: if the service is shutting down, and if its queue is full."""
_WAIT_S, _RETRY_S = 2.0, 60.0
"""Seconds until new prompts are added to their manifest, so that many are added at once, and until a retry."""

logger = logging.getLogger("latentcache")


_COUNTED: Mapping[str, str] = {
    "hits": "Entries requested from the encoder that were cached.",
    "misses": "Entries requested from the encoder that were not cached, whether or not they were queued already.",
    "entries": "Entries encoded.",
    "failures": "Entries that could not be encoded.",
    "turned_away": "Requests rejected because the queue was full.",
}
"""The Prometheus counters of an encoder."""


class UploadedImages(SampleSource):
    """Uploaded images: each sample's locator is its bytes. They cannot be listed."""

    @override
    def samples(self) -> Iterator[Sample | Refusal]:
        return iter(())

    @override
    def read(self, sample: Sample) -> bytes:
        data: bytes = sample.locator
        return data


@dataclass(slots=True, eq=False)
class _Miss:
    """An entry that is queued or being encoded. `tasks` all request it; the first one is encoded."""

    tasks: list[Task]
    future: Future[None]

    @property
    def key(self) -> str:
        return self.tasks[0].key

    @property
    def kind(self) -> Kind:
        return self.tasks[0].kind

    @property
    def num_bytes(self) -> int:
        """Size of the image's file; 0 for a prompt."""
        task = self.tasks[0]
        return 0 if task.kind == "text" else len(task.sample.locator)


class MissEncoder(Closing):
    """Finds the entries of prompts and images in a cache, and encodes those that are missing. Thread-safe; `close` it.

    Keys and bytes are those of a precache run with `config`. The sources of its datasets are not read; of its `cache`
    only `salt` and `max_bytes` are used. An entry is stored before it is returned. Prompts are added to the manifest of
    prompts some seconds later. If the process is killed before that, later requests find their entries, but `prune`
    may remove them. Images are in no manifest. `models` are by default those of the config. After `idle_s` seconds
    without a miss they leave the device, and the cache is pruned to `max_bytes`. `registry` gets the counters.

    Raises ConfigError, DeviceError, ModelError; ReadOnlyError for a store that cannot be written.
    """

    def __init__(
        self,
        config: Config,
        workspace: Workspace,
        *,
        models: Models | None = None,
        idle_s: float = IDLE_S,
        registry: CollectorRegistry | None = None,
    ):
        if workspace.store.read_only:
            raise ReadOnlyError(workspace.path or "cpu store", "encoding on a miss stores entries: open it for writing")
        if not idle_s > 0:
            raise ConfigError(f"--idle-s is {idle_s}; give a number of seconds above 0")
        self._workspace, self._idle_s, self._max_bytes = workspace, idle_s, config.cache.max_bytes
        logger.info("identifying the models of %s; unknown files are read once", config.model.path)
        models = models or load_models(config.model, workspace.memo)
        self._models = ServingModels(config, models, workspace.memo)
        encodings, salt = self._models.encodings, config.cache.salt
        self._prompt_keys = prompt_keys(encodings, models, salt)
        self._common = prompts_common(encodings, salt)
        self._datasets = {each.name: (each, Preparations(each, encodings, salt)) for each in config.datasets}
        self._uploads = UploadedImages()
        self._changed = threading.Condition()
        self._waiting: list[_Miss] = []
        self._under_way: dict[str, _Miss] = {}
        self._is_closed = False
        self._counts = {
            name: Counter(f"latentcache_encoder_{name}", what, registry=registry) for name, what in _COUNTED.items()
        }
        self._new_rows: dict[str, Row] = {}
        """Prompts that are stored, but not in their manifest yet."""
        self._due_at = math.inf
        """When they are added to it, by the monotonic clock."""
        self._thread = threading.Thread(target=self._run, name="latentcache-encode", daemon=True)
        self._thread.start()

    # Requests

    def prompt(self, text: str, *, negative: bool = False) -> Task:
        """The task for a prompt, encoded as it is. EncodeError for text that is not valid Unicode."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            detail = f"prompt {text!r:.80} is not Unicode text ({error.reason} at character {error.start})"
            raise EncodeError(detail, part="tokenizer", problem="bad-caption") from error
        return prompt_task(text, self._prompt_keys, negative=negative)

    def image(self, data: bytes, *, dataset: str | None = None, name: str = "") -> list[tuple[Ref, Task]]:
        """The tasks for an image, prepared as those of a dataset: it and, if the dataset flips, its mirrored twin.

        `dataset` may be None if the config has only one. `name` is the image's file name, for messages and the record;
        its suffix must match the format. ConfigError for an unknown dataset; ImageRefused if the image's header is bad.
        """
        if dataset is None and len(self._datasets) == 1:
            [dataset] = self._datasets
        if dataset is None or dataset not in self._datasets:
            known = ", ".join(self._datasets)
            raise ConfigError(f"dataset is {dataset!r}; name the dataset whose settings prepare the image: {known}")
        chosen, preparations = self._datasets[dataset]
        source = digest(data)
        name = name or f"uploaded image {short(source)}"
        size, num_frames = probe_clip(data, name, chosen.images, chosen.frames)
        sample, found = Sample(name, name, locator=data), []
        for shape in preparations.shapes([size], num_frames, name):
            key, identity = shape.image_key(source), preparations.identity(shape.role, source, shape.geometry)
            task = Task(key, identity, sample, self._uploads, chosen.images)
            found.append((Ref(key, shape.geometry), task))
        return found

    def submit(self, tasks: Iterable[Task]) -> dict[str, Future[None]]:
        """Queue the entries that are not cached. Returns by key a future that is done when the entry is stored.

        The future raises ImageRefused, or for a prompt EncodeError, with the reason that precache gives if the entry
        cannot be encoded; ModelError, DeviceError or StoreError if nothing can be encoded now. It cannot be cancelled.
        Raises EncoderBusyError if the queue has no room for all of them, and after `close`.
        """
        by_key: dict[str, list[Task]] = {}
        for task in tasks:
            by_key.setdefault(task.key, []).append(task)
        present = self._workspace.store.find(by_key)
        with self._changed:
            missing = {key: same for key, same in by_key.items() if key not in present}
            new = {key: _Miss(same, Future()) for key, same in missing.items() if key not in self._under_way}
            self._check_room(new.values())
            self._counts["hits"].inc(len(present))
            self._counts["misses"].inc(len(missing))
            for key in missing.keys() - new.keys():
                self._under_way[key].tasks += missing[key]
            for miss in new.values():
                miss.future.set_running_or_notify_cancel()  # one caller must not cancel it for the others
            self._under_way |= new
            self._waiting += new.values()
            self._changed.notify_all()
            return {key: self._under_way[key].future for key in missing}

    def _check_room(self, new: Collection[_Miss]) -> None:
        if self._is_closed:
            raise EncoderBusyError("the service is shutting down", retry_after_s=CLOSED_S)
        num, num_bytes = len(self._waiting) + len(new), sum(miss.num_bytes for miss in (*self._waiting, *new))
        if new and (num > MAX_WAITING or (num_bytes > MAX_WAITING_BYTES and self._waiting)):
            self._counts["turned_away"].inc()
            raise EncoderBusyError(
                f"{len(self._waiting)} entries are queued for encoding, and there is no room for {len(new)} more "
                f"(at most {MAX_WAITING} entries, and {MAX_WAITING_BYTES:,} bytes of images)",
                retry_after_s=BUSY_S,
            )

    @property
    def num_waiting(self) -> int:
        """Entries that are queued or being encoded."""
        return len(self._under_way)

    @property
    def loaded(self) -> Kind | None:
        """The kind whose encoders are on the device; None if neither is."""
        return self._models.loaded

    def close(self) -> None:
        """Finish the entries that are being encoded, refuse the queued ones, and free the models."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    # The thread that encodes

    def _run(self) -> None:
        """Encode queued entries until the encoder is closed. Unload the models after `idle_s` without a miss."""
        idle_at = math.inf
        while not self._is_closed:
            misses = self._take(min(idle_at, self._due_at))
            try:
                if misses:
                    self._finish(misses, self._encode(misses))
                    idle_at = time.monotonic() + self._idle_s
                is_idle = time.monotonic() >= idle_at
                if is_idle:
                    idle_at = math.inf
                    self._models.unload()
                if is_idle or time.monotonic() >= self._due_at:
                    self._write_prompts()
                if is_idle and self._max_bytes is not None:
                    self._workspace.prune(self._max_bytes)
            except Exception as error:
                logger.exception("the encoding thread continues with the next request")
                self._due_at = time.monotonic() + _RETRY_S
                self._refuse([miss for miss in misses if miss.key in self._under_way], error)
        try:
            self._write_prompts()
            self._models.close()
        finally:
            with self._changed:
                self._waiting.clear()
                left = list(self._under_way.values())
            self._refuse(left, EncoderBusyError("the service is shutting down", retry_after_s=CLOSED_S))

    def _refuse(self, misses: Sequence[_Miss], error: Exception) -> None:
        self._finish(misses, {miss.key: error for miss in misses})

    def _take(self, until: float) -> list[_Miss]:
        """Wait for the next misses, of one kind, in FIFO order. Empty at the time `until`, and after `close`."""
        with self._changed:
            while not self._waiting and not self._is_closed and (left := until - time.monotonic()) > 0:
                self._changed.wait(min(left, threading.TIMEOUT_MAX))
            if not self._waiting or self._is_closed:
                return []
            kind = self._waiting[0].kind
            taken = [miss for miss in self._waiting if miss.kind == kind][: ROUND_SIZES[kind]]
            self._waiting = [miss for miss in self._waiting if miss not in taken]
            return taken

    def _encode(self, misses: Sequence[_Miss]) -> dict[str, Exception]:
        """Encode and store. Returns the errors of entries that failed, by key."""
        tasks = {miss.key: miss.tasks[0] for miss in misses}
        errors = self._encode_together(tasks)
        if len(tasks) > 1 and any(not isinstance(error, LatentCacheError) for error in errors.values()):
            # An entry that breaks the encoder must not fail the others.
            for key in list(errors):
                del errors[key]
                errors |= self._encode_together({key: tasks[key]})
        return errors

    def _encode_together(self, tasks: Mapping[str, Task]) -> dict[str, Exception]:
        store, errors = self._workspace.store, dict[str, Exception]()
        problem: Exception | None = None

        def fail(key: str, failure: Failure) -> None:
            errors[key] = _refusal(tasks[key], failure)

        try:
            missing = tasks.keys() - store.find(tasks)  # some may have been added since
            if missing:
                with store.writer() as writer:
                    self._models.encode([tasks[key] for key in tasks if key in missing], writer.add, fail)
        except Exception as error:
            logger.warning("encoding %d requested entries failed: %s", len(tasks), error)
            problem = error
        try:
            # After an error too, since some entries may have been stored before it.
            missing = tasks.keys() - store.find(tasks)
        except StoreError as error:
            missing, problem = set(tasks), error
        for key in missing - errors.keys():
            errors[key] = problem or StoreError(f"entry {key} was removed right after it was encoded; request it again")
        return errors

    def _finish(self, misses: Sequence[_Miss], errors: Mapping[str, Exception]) -> None:
        with self._changed:
            for miss in misses:
                del self._under_way[miss.key]
            self._counts["entries"].inc(len(misses) - len(errors))
            self._counts["failures"].inc(len(errors))
        for miss in misses:
            if error := errors.get(miss.key):
                miss.future.set_exception(error)
                continue
            rows = {task.sample.sample_id: prompt_row(task) for task in miss.tasks if task.kind == "text"}
            if rows and not self._new_rows:
                self._due_at = time.monotonic() + _WAIT_S
            self._new_rows |= rows
            miss.future.set_result(None)

    def _write_prompts(self) -> None:
        """Add new prompts to their manifest. A failure is logged, and retried later."""
        self._due_at = math.inf
        if not self._new_rows:
            return
        try:
            name, rows = prompts_name(self._common), RowTable.of(self._new_rows)
            add_prompts(self._workspace, Manifest(name, "prompts", 1, self._common, rows), always=False)
        except LatentCacheError as error:
            self._due_at = time.monotonic() + _RETRY_S
            message = "%d encoded prompts could not be added to the manifest of prompts, which is retried: %s"
            logger.error(message, len(self._new_rows), error)
            return
        self._new_rows = {}


def _refusal(task: Task, failure: Failure) -> LatentCacheError:
    if task.kind == "text":
        detail = f"{task.sample.sample_id}: {failure.detail}"
        return EncodeError(detail, part="text_encoder", problem=failure.reason)
    return ImageRefused(failure.path or task.sample.path, failure.reason, failure.detail)
