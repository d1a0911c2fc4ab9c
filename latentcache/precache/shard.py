"""This process's share of the work: batches that do not depend on what is already cached.

A batch is formed over hits and misses alike, in the order of the dataset. So all ranks agree on the batches at any
time, every miss has exactly one owner, and a run of several ranks encodes the same batches as a single process, which
gives the same bytes.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from latentcache.errors import ConfigError

Task = TypeVar("Task")


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `world_size` processes that share one cache.

    `local_rank` chooses the device among those of a machine; None leaves it to torch. `launch` distinguishes
    one launch of the ranks from another, if the launcher names it.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int | None = None
    launch: str = ""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Shard:
        """RANK, WORLD_SIZE and LOCAL_RANK, as torchrun sets them; one process without them. Raises ConfigError."""
        environ = os.environ if environ is None else environ
        texts = {name: environ.get(name, default) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"))}
        if "LOCAL_RANK" in environ:
            texts["LOCAL_RANK"] = environ["LOCAL_RANK"]
        for name, text in texts.items():
            if not text.isdecimal():
                raise ConfigError(f"{text!r} is not a number; torchrun sets it, or unset it", source=name)
        rank, world_size = int(texts["RANK"]), int(texts["WORLD_SIZE"])
        if not 0 <= rank < world_size:
            raise ConfigError(f"RANK {rank} must be at least 0 and less than WORLD_SIZE {world_size}", source="RANK")
        local_rank = int(texts["LOCAL_RANK"]) if "LOCAL_RANK" in texts else None
        launch = environ.get("TORCHELASTIC_RUN_ID") or environ.get("SLURM_JOB_ID") or ""
        return cls(rank, world_size, local_rank, launch)


class Batches(Generic[Task]):
    """Collects this shard's tasks into batches. Members of a batch share their group, such as a bucket."""

    def __init__(self, shard: Shard):
        self._shard = shard
        self._open: dict[Hashable, list[Task | None]] = {}
        self._whole: list[list[Task]] = []
        self._partial: dict[Hashable, list[Task]] = {}
        self._sizes: dict[Hashable, int] = {}
        self._num_closed = 0

    def add(self, group: Hashable, size: int, task: Task | None) -> None:
        """Add the next member of `group`, whose batches have `size` members. None is a hit: it takes a place."""
        self._sizes[group] = size
        members = self._open.setdefault(group, [])
        members.append(task)
        if len(members) == size:
            self._close(group)

    def finish(self) -> list[list[Task]]:
        """All batches of this shard, in order."""
        for group in list(self._open):
            self._close(group)
        for group, tasks in self._partial.items():
            size = self._sizes[group]
            self._whole += [tasks[start : start + size] for start in range(0, len(tasks), size)]
        self._partial.clear()
        return self._whole

    def _close(self, group: Hashable) -> None:
        members = self._open.pop(group)
        owner = self._num_closed % self._shard.world_size
        self._num_closed += 1
        tasks = [task for task in members if task is not None]
        if owner != self._shard.rank or not tasks:
            return
        if len(tasks) == len(members):
            self._whole.append(tasks)
        else:
            # Batches with hits are joined, or a small addition to a large dataset would be encoded one image at a time.
            self._partial.setdefault(group, []).extend(tasks)
