"""Precaching on a Ray cluster: `precache(config, address="auto")`, as `latentcache precache CONFIG --ray auto` does."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from latentcache.config import Config, RayConfig
from latentcache.errors import ClusterError, ConfigError
from latentcache.precache.encoding_stage import RunContext
from latentcache.precache.report import Report
from latentcache.precache.run import run_precache
from latentcache.precache.tasks import Plan, Shard
from latentcache.scaleout.ray_encoder import RayEncoder
from latentcache.utils.accelerator import current_accelerator
from latentcache.utils.progress import Progress

if TYPE_CHECKING:
    from types import ModuleType

RAY_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",  # Ray would report its use to its makers
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray's new way with processes without a GPU; it warns of the old one
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # pixels of a task that died: its other answer says so already
}

CONNECT_S = 60.0
"""A head that is being started answers within this. Ray alone tries for a quarter of an hour."""

logger = logging.getLogger("latentcache")


def precache(
    config: Config,
    *,
    address: str = "auto",
    dry_run: bool = False,
    verify_sources: bool = False,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> Report:
    """What `run_precache` does, on a Ray cluster: plan here, decode and encode there. Keys and bytes are the same.

    `address` is that of the cluster, HOST:PORT; `auto` takes the one that runs on this machine or that RAY_ADDRESS
    names, and starts one on this machine where there is none. A caller's own connection (`ray.init`) is used, and left.
    Where nothing is to be encoded, Ray is not even started. The section `ray` of the config says what is requested.

    Raises ClusterError where the cluster does not answer, or has not what is requested, and what `run_precache` raises.
    """
    if config.cache.store == "cpu":
        raise ConfigError("is cpu: the memory of one process is no cache of a cluster", key="cache.store")
    shard = Shard.from_environment()
    if shard.world_size > 1:
        raise ConfigError("Ray shares the work by itself: start one process, not one for each GPU", source="WORLD_SIZE")
    cluster = RayCluster(config, address)
    return run_precache(
        cluster.config,
        dry_run=dry_run,
        verify_sources=verify_sources,
        progress=progress,
        stop=stop,
        shard=shard,
        elsewhere=cluster,
    )


class RayCluster:
    """The encoders of a Ray cluster, as `run_precache` takes them. Ray is started by `encode`, not before."""

    encoder: type = RayEncoder
    """The class of the encoders: a benchmark has others."""

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

    def encode(self, plan: Plan, context: RunContext, find: Callable[[Iterable[str]], set[str]]) -> None:
        """Encode the plan's texts and images on the cluster."""
        # It imports ray.
        from latentcache.scaleout.cluster_run import ClusterRun

        # Ray prints what it has to say of dead processes, but stdout is for the report.
        with redirect_stdout(sys.stderr), self._connected():
            batches = [*plan.batches["text"], *plan.batches["image"]]
            num_encoders = min(self._num_encoders(), len(batches))
            encoder = self._ray.remote(**self._requested())(self.encoder)
            planned = self._ray.put(context.encodings)
            ClusterRun(
                batches,
                context,
                find,
                self._settings,
                num_encoders,
                lambda: encoder.remote(self.config, planned),
                self._missing,
            ).run()

    @contextmanager
    def _connected(self) -> Iterator[None]:
        """A connection to the cluster; one that the caller has made stays."""
        ray = self._ray
        if ray.is_initialized():
            yield
            return
        for name, value in RAY_SETTINGS.items():
            os.environ.setdefault(name, value)
        address = None if self._address == "auto" else self._address
        try:
            _wait_for(address or os.environ.get("RAY_ADDRESS", ""))
            with _handlers_kept():
                ray.init(address, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        except Exception as error:  # Ray raises plain ones too, as when its own processes start too slowly
            raise ClusterError(
                self._address,
                f"no connection ({str(error).strip().partition(chr(10))[0]})",
                "Name the address that `ray start --head` printed, HOST:PORT, and run this where it can be reached; "
                "RAY_AUTH_MODE and the token must be those of the cluster.",
            ) from error
        try:
            yield
        finally:
            with _handlers_kept():
                ray.shutdown()

    def _requested(self) -> dict[str, Any]:
        """What each encoder requests."""
        settings = self._settings
        options: dict[str, Any] = {"num_cpus": settings.num_cpus, "num_gpus": self._num_gpus}
        options |= {"max_restarts": 0, "max_task_retries": 0}  # all retries are the driver's
        if settings.accelerator_type is not None:
            options["accelerator_type"] = settings.accelerator_type
        return options

    def _num_encoders(self) -> int:
        """How many encoders are requested. Decoding needs some of the CPUs too."""
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
        num_cpus = sum(node.get("CPU", 0.0) for node in nodes)
        most = sum(room) if settings.max_encoders == "auto" else settings.max_encoders
        if settings.num_cpus and settings.max_encoders == "auto":
            most = min(most, int((num_cpus - settings.decode_cpus) / settings.num_cpus))
        if most < settings.min_encoders or not any(room):
            logger.warning("%s Waiting for %g s.", self._missing(), settings.wait_s)
        return max(settings.min_encoders, most)

    def _missing(self) -> ClusterError:
        settings, has = self._settings, self._ray.cluster_resources()
        names = ("CPU", "GPU", *sorted(name for name in has if name.startswith("accelerator_type:")))
        there = ", ".join(f"{name} {has.get(name, 0.0):g}" for name in names)
        kind = "" if settings.accelerator_type is None else f" of type {settings.accelerator_type}"
        return ClusterError(
            self._address,
            f"{settings.min_encoders} encoders with {self._num_gpus:g} GPUs{kind} and {settings.num_cpus:g} CPUs each, "
            f"and {settings.decode_cpus:g} CPUs to decode, are wanted; all nodes together have {there}, of which other "
            "programs may use some",
            "Add nodes, or change ray.num_gpus, ray.accelerator_type, ray.num_cpus, ray.decode_cpus or "
            "ray.min_encoders; where encoders take all CPUs and leave none to decode, lower ray.max_encoders. Where "
            "machines must start first, raise ray.wait_s.",
        )


def _wait_for(address: str) -> None:
    """Wait until something listens at HOST:PORT; Ray understands other addresses. OSError after CONNECT_S."""
    host, _, port = address.rpartition(":")
    end = time.monotonic() + CONNECT_S
    while port.isdecimal() and "/" not in host:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5.0).close()
            return
        except OSError:
            if time.monotonic() >= end:
                raise
            time.sleep(1.0)


def _import_ray() -> ModuleType:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise ConfigError("precaching on Ray needs it: pip install 'latentcache[ray]'", source="--ray") from error
    return ray


def _device(config: Config) -> torch.device:
    """Where the encoders compute. This machine need not have such a device, and Ray gives each encoder its own."""
    name, num_gpus = config.encode.device, config.ray.num_gpus
    if name == "auto":
        has_gpus = num_gpus != "auto" and num_gpus > 0
        found = current_accelerator(built_for=has_gpus)
        if found is not None and num_gpus != 0:
            return found
        if has_gpus:
            return torch.device("cuda")
        if num_gpus != 0:
            logger.warning("this machine has no accelerator, so that CPUs encode; else set encode.device, e.g. to cuda")
        return torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"{name!r} is unknown; use auto, cpu, cuda, ...", key="encode.device") from error
    if device.index is not None:
        raise ConfigError(f"is {name!r}: on Ray give no number, as Ray chooses the GPU", key="encode.device")
    return device


def _absolute_paths(section: Any) -> Any:
    """The section, its paths on this machine made absolute: the encoders run in other folders."""
    changed: dict[str, Any] = {}
    for name in type(section).model_fields:
        value = getattr(section, name)
        is_file = isinstance(value, str) and name in ("path", "vae", "config") and os.path.exists(value)
        if isinstance(value, Path) or is_file:
            changed[name] = type(value)(os.path.abspath(value))
    return section.model_copy(update=changed)


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """Ray replaces the handler of SIGTERM, by which a run seals what it has."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        with suppress(TypeError):  # a handler that was not set from Python
            signal.signal(signal.SIGTERM, before)
