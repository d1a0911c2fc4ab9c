"""Precaching on a Ray cluster: `precache(config, address="auto")`, or `latentcache precache CONFIG --ray auto`."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from latentcache.config import Config, RayConfig
from latentcache.dataset.samples import SampleSource
from latentcache.devices.placement import current_accelerator
from latentcache.errors import ClusterError, ConfigError, LatentCacheError, ModelError
from latentcache.models.files import first_line
from latentcache.precache.encodings import Encodings, load_models
from latentcache.precache.preparation import TextKeys
from latentcache.precache.report import Failure, Report
from latentcache.precache.run import run_precache
from latentcache.precache.serving_models import ServingModels
from latentcache.precache.stages import RunContext
from latentcache.precache.tasks import Plan, Shard, Task
from latentcache.precache.workspace import Workspace, open_workspace
from latentcache.store.writer import Writer
from latentcache.types import Entry, Kind
from latentcache.utils.extras import naming_extras
from latentcache.utils.progress import Progress
from latentcache.utils.signals import handlers_kept

RAY_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",  # no usage reports to Ray's makers
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the new behaviour for processes without a GPU, without Ray's warning
}

CONNECT_S = 60.0
"""Timeout of the connection to the head node."""
MAX_ATTEMPTS = 3
"""Encoders that may die with the same call before the run fails: the cause is then an image, or the machines."""
MAX_BATCHES = 16
"""Most batches in a call, which is also the most that the death of an encoder loses. Those of 1024 x 1024 images make
about one pack."""
POLL_S = 1.0
"""Longest time between two checks of `stop` and of the timeouts."""
LAST_SEAL_S = 30.0
"""Time that encoders have after an error to seal what they have encoded."""

Work = list[list[tuple[Task, int]]]
"""Batches of one kind. A task of an image has no source, but the number of its source."""
Answer = tuple[dict[str, Failure], Report]
"""The result of a call: entries that cannot be encoded, by key, and counts. The other entries are stored, except those
that a stop has skipped."""

logger = logging.getLogger("latentcache")


class RayEncoder:
    """Encodes batches with the models of `config`, and seals the entries in the config's cache.

    Keys and bytes are those of `planned`. `sources` are the datasets that images are read from. Call `where` first: it
    returns as soon as the process runs. The first `encode` identifies the models, so that its caller gets their errors.
    """

    def __init__(self, config: Config, planned: Encodings, sources: Sequence[SampleSource]):
        self._config, self._planned, self._sources = config, planned, sources
        self._stop = threading.Event()
        self._workspace: Workspace | None = None
        self._kind: Kind = "text"

    def where(self) -> str:
        """A description of this process for messages."""
        return f"process {os.getpid()} on {socket.gethostname()}"

    def stop(self) -> None:
        """Skip the rest of the current call, and seal what is done. To be called from another thread."""
        self._stop.set()

    def encode(self, work: Work) -> Answer:
        """Encode and seal those entries of these batches that the cache does not have yet.

        Raises ModelError if the models are not those of the plan.
        """
        if self._workspace is None:
            self._workspace = self._start()
        batches = [
            [replace(task, source=self._sources[number]) if task.kind != "text" else task for task, number in batch]
            for batch in work
        ]
        groups = {task.key: number for number, batch in enumerate(batches) for task in batch}
        found = self._workspace.store.find(groups)  # stored by an encoder that died during this call
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
        """Encode the tasks into the writer, in the planned batches."""

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
                    f"{part}: the encoder of {self._config.model.path} in {self.where()} differs from the planned one: "
                    f"{one}, but planned is {other}. Give all nodes the same model, and the same versions of packages.",
                    part=part,
                )
        self._texts = TextKeys(here.family, models.tokenizers, here.text, "")
        return workspace

    def _reads_as_planned(self, task: Task, problems: dict[str, Failure]) -> bool:
        """Whether the tokenizer's input is the one in the key: other versions may clean or render texts differently."""
        if self._texts.source(task.caption) == task.identity.source:
            return True
        detail = (
            f"for caption {task.caption!r} the tokenizer in {self.where()} gets another text than on the planning "
            "machine. Install the same versions of diffusers and transformers on all nodes, and ftfy on all or none"
        )
        problems[task.key] = Failure("bad-caption", detail)
        return False


def precache(
    config: Config,
    *,
    address: str = "auto",
    dry_run: bool = False,
    verify_sources: bool = False,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> Report:
    """Run `run_precache` on a Ray cluster: plan here, decode and encode there. Keys and bytes are the same.

    `address` is the cluster's HOST:PORT. `auto` connects to the cluster on this machine or in RAY_ADDRESS, or starts
    one on this machine. A connection that the caller has opened (`ray.init`) is used, and stays open. Ray is not
    started if everything is cached. The section `ray` of the config says what each encoder requests.

    Raises ClusterError if the cluster does not answer or lacks the resources, and what `run_precache` raises.
    """
    shard = Shard.from_environment()
    if shard.world_size > 1:
        raise ConfigError("Ray distributes the work itself: start one process, not one per GPU", source="WORLD_SIZE")
    cluster = RayCluster(config, address)
    return run_precache(
        cluster.config,
        dry_run=dry_run,
        verify_sources=verify_sources,
        progress=progress,
        stop=stop,
        shard=shard,
        remote_encoders=cluster,
    )


class RayCluster:
    """The encoders of a Ray cluster, for `run_precache`. Only `encode` starts Ray."""

    encoder: type = RayEncoder
    """The class of the encoders, which tests and benchmarks replace."""

    def __init__(self, config: Config, address: str):
        self._settings, self._address = config.ray, address
        self._ray = _import_ray()
        self.device = _device(config)
        encode = config.encode.model_copy(update={"device": self.device.type})
        self.config = config.model_copy(
            update={"encode": encode, "cache": _absolute_paths(config.cache), "model": _absolute_paths(config.model)}
        )
        num_gpus = config.ray.num_gpus
        self._num_gpus = (0.0 if self.device.type == "cpu" else 1.0) if num_gpus == "auto" else num_gpus

    def encode(self, plan: Plan, context: RunContext) -> None:
        """Encode the plan's texts and images on the cluster."""
        # Ray prints about dead processes, but stdout is for the report.
        with redirect_stdout(sys.stderr), self._connected():
            num_encoders = self._num_encoders()
            sources: dict[int, tuple[int, SampleSource]] = {}
            calls = [work for kind in ("text", "image") for work in _calls(plan.batches[kind], num_encoders, sources)]
            encoder, put = self._ray.remote(**self._requested())(self.encoder), self._ray.put
            shared = [put(context.encodings), put([source for _, source in sources.values()])]
            context.progress.start("encode", sum(len(batch) for work in calls for batch in work))
            try:
                run = _Run(self._ray, calls, context, lambda: encoder.remote(self.config, *shared))
                run.run(self._settings, min(num_encoders, len(calls)), self._missing)
            finally:
                context.progress.finish()

    @contextmanager
    def _connected(self) -> Iterator[None]:
        """Connect to the cluster for the block. A connection that the caller has opened stays open."""
        ray = self._ray
        if ray.is_initialized():
            yield
            return
        address = None if self._address == "auto" else self._address
        try:
            host, _, port = (address or os.environ.get("RAY_ADDRESS", "")).rpartition(":")
            if port.isdecimal() and "/" not in host:  # Ray itself retries for 15 minutes
                socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
            with handlers_kept(signal.SIGTERM):  # the handler that lets a run seal its entries
                ray.init(address, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        except Exception as error:  # Ray raises this class itself, e.g. if its processes start too slowly
            raise ClusterError(
                self._address,
                f"no connection ({first_line(error)})",
                "Give the HOST:PORT that `ray start --head` printed, and run this on a machine that can reach it. "
                "RAY_AUTH_MODE and the token must be those of the cluster.",
            ) from error
        try:
            yield
        finally:
            with handlers_kept(signal.SIGTERM):
                ray.shutdown()

    def _requested(self) -> dict[str, Any]:
        """The options of an encoder: what it requests from Ray."""
        # `_Run` replaces dead encoders, so that the work of a lost node goes to other nodes. Two calls at once let
        # `stop` reach an encoder that is encoding.
        options = {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": 2}
        kind = self._settings.accelerator_type
        kinds = {} if kind is None else {"accelerator_type": kind}
        return options | {"num_cpus": self._settings.num_cpus, "num_gpus": self._num_gpus} | kinds

    def _num_encoders(self) -> int:
        """How many encoders to request."""
        settings: RayConfig = self._settings
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        wanted = {"CPU": settings.num_cpus, "GPU": self._num_gpus}
        if settings.accelerator_type is not None:
            wanted[f"accelerator_type:{settings.accelerator_type}"] = 0.001
        room = [
            min((int(node.get(name, 0.0) / share) for name, share in wanted.items() if share), default=1)
            for node in nodes
        ]
        if not self._num_gpus:
            room = [min(1, number) for number in room]
        most = sum(room) if settings.max_encoders == "auto" else settings.max_encoders
        if not any(room):
            logger.warning("%s Waiting up to %g s.", self._missing(), settings.wait_s)
        return max(1, most)

    def _missing(self) -> ClusterError:
        settings, has = self._settings, self._ray.cluster_resources()
        names = ("CPU", "GPU", *sorted(name for name in has if name.startswith("accelerator_type:")))
        available = ", ".join(f"{name} {has.get(name, 0.0):g}" for name in names)
        kind = "" if settings.accelerator_type is None else f" of type {settings.accelerator_type}"
        return ClusterError(
            self._address,
            f"an encoder needs {self._num_gpus:g} GPUs{kind} and {settings.num_cpus:g} CPUs; all nodes together have "
            f"{available}, some of which other programs may use",
            "Add nodes, or change ray.num_gpus, ray.accelerator_type or ray.num_cpus. If machines have to start first, "
            "raise ray.wait_s.",
        )


class _Run:
    """The calls of one run. Each encoder has one call at a time; if an encoder dies, another one gets its call.

    ray.util.ActorPool does not say which call failed, gives calls to encoders that may never be scheduled, and keeps
    its queue when a run is stopped. Ray's restarts wait for a lost node without a time limit.
    """

    def __init__(self, ray: Any, calls: Sequence[Work], context: RunContext, start: Callable[[], Any]):
        self._ray, self._context, self._start = ray, context, start
        self._todo = deque((work, 0) for work in calls)
        """Calls, each with the number of encoders that died with it."""
        self._starting: dict[Any, Any] = {}
        """Encoders that have not started yet, by the future that is done when they have."""
        self._running: dict[Any, tuple[Any, Work, int]] = {}
        self._idle: list[Any] = []
        self._is_stopping = False

    def run(self, settings: RayConfig, num_encoders: int, missing: Callable[[], ClusterError]) -> None:
        """Run all calls. Raises the errors of encoders, and `missing()` if the cluster has no room for them."""
        for _ in range(num_encoders):
            self._request_encoder()
        active_at = time.monotonic()
        try:
            while self._has_work():
                while self._todo and self._idle:
                    encoder, (work, num_deaths) = self._idle.pop(), self._todo.popleft()
                    self._running[encoder.encode.remote(work)] = encoder, work, num_deaths
                come, _ = self._ray.wait([*self._starting, *self._running], num_returns=1, timeout=POLL_S)
                for answer in come:
                    if answer in self._starting:
                        self._idle.append(self._starting.pop(answer))
                    else:
                        self._take(answer)
                if self._running:
                    active_at = time.monotonic()
                elif self._has_work() and time.monotonic() - active_at > settings.wait_s:
                    raise missing()
        finally:
            self._close()

    def _request_encoder(self) -> None:
        encoder = self._start()
        self._starting[encoder.where.remote()] = encoder

    def _has_work(self) -> bool:
        if self._context.is_stopped():
            self._todo.clear()
            self._stop_encoders()
        return bool(self._todo or self._running)

    def _stop_encoders(self) -> None:
        if not self._is_stopping:
            for encoder, *_ in self._running.values():
                encoder.stop.remote()
        self._is_stopping = True

    def _take(self, answer: Any) -> None:
        """Take the result of a call."""
        encoder, work, num_deaths = self._running.pop(answer)
        try:
            problems, made = self._ray.get(answer)
        except self._ray.exceptions.RayTaskError as error:
            raise _cause(error) from error
        except self._ray.exceptions.RayError as error:
            logger.warning("an encoder died: %s", first_line(error))
            self._ray.kill(encoder)  # in case only the connection was lost
            if num_deaths + 1 == MAX_ATTEMPTS:
                raise _died(work, error) from error
            self._todo.append((work, num_deaths + 1))
            self._request_encoder()
            return
        self._idle.append(encoder)
        for key, failure in problems.items():
            self._context.fail(key, failure)
        self._context.report.add(made)
        self._context.progress.advance(sum(map(len, work)))

    def _close(self) -> None:
        """Kill the encoders, after those that still work have sealed their entries."""
        self._stop_encoders()
        if self._running:
            self._ray.wait(list(self._running), num_returns=len(self._running), timeout=LAST_SEAL_S)
        for encoder in [*self._starting.values(), *self._idle, *(encoder for encoder, *_ in self._running.values())]:
            self._ray.kill(encoder)


def _calls(
    batches: Sequence[Sequence[Task]], num_encoders: int, sources: dict[int, tuple[int, SampleSource]]
) -> Iterator[Work]:
    """The calls for batches of one kind, four or more per encoder if there are enough. Adds their sources to `sources`.

    Each encoder gets a source only once: the file list of a large dataset is larger than the pixels of a batch.
    """
    size = min(MAX_BATCHES, max(1, len(batches) // (4 * num_encoders)))
    for start in range(0, len(batches), size):
        work: Work = []
        for batch in batches[start : start + size]:
            work.append([])
            for task in batch:
                number = 0
                if task.source is not None:
                    number, _ = sources.setdefault(id(task.source), (len(sources), task.source))
                    task = replace(task, source=None)
                work[-1].append((task, number))
        yield work


def _died(work: Work, error: BaseException) -> ClusterError:
    named = work[0][0][0].sample.path
    return ClusterError(
        "its encoders",
        f"{MAX_ATTEMPTS} of them died with the same {sum(map(len, work))} entries, the first of which is of {named} "
        f"({first_line(error)})",
        "Sealed entries are safe: run the same command again. If it fails here again, look into Ray's logs. The usual "
        "cause is too little memory, or an image that crashes the decoder; then `latentcache precache` without --ray "
        "crashes too.",
    )


def _cause(error: Any) -> LatentCacheError:
    """The error of a process of the cluster, as one to raise here."""
    cause = error.cause
    if isinstance(cause, LatentCacheError):
        return cause
    logger.error("%s", error)  # includes the traceback of that process
    return ClusterError(
        "a process of the cluster",
        f"failed: {type(cause).__name__}: {first_line(cause)}",
        "All nodes need the same version of latentcache, and the dataset at the same path; the log has the traceback.",
    )


def _import_ray() -> ModuleType:
    for name, value in RAY_SETTINGS.items():
        os.environ.setdefault(name, value)
    with naming_extras():
        import ray
    return ray


def _device(config: Config) -> torch.device:
    """The device of the encoders. This machine may lack it; Ray gives each encoder its own."""
    name, num_gpus = config.encode.device, config.ray.num_gpus
    if name == "auto":
        has_gpus = num_gpus != "auto" and num_gpus > 0
        found = current_accelerator(built_for=has_gpus)
        if found is not None and num_gpus != 0:
            return found
        if has_gpus:
            return torch.device("cuda")
        if num_gpus != 0:
            logger.warning("this machine has no accelerator, so the encoders use CPUs; set encode.device, e.g. to cuda")
        return torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(
            f"encode.device is {name!r}, which is not a device; use auto, cpu, cuda, ...", key="encode.device"
        ) from error
    if device.index is not None:
        raise ConfigError(
            f"encode.device is {name!r}: leave out the number, since Ray assigns the GPUs", key="encode.device"
        )
    return device


def _absolute_paths(section: Any) -> Any:
    """The section with absolute paths: the encoders have other working directories."""
    changed: dict[str, Any] = {}
    for name in type(section).model_fields:
        value = getattr(section, name)
        is_file = isinstance(value, str) and name in ("path", "vae", "config") and os.path.exists(value)
        if isinstance(value, Path) or is_file:
            changed[name] = type(value)(os.path.abspath(value))
    return section.model_copy(update=changed)
