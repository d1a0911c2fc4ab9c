"""The work of a run: all samples as manifests, and this process's misses in batches.

A batch is formed over hits and misses alike, in the order of the dataset. So all ranks agree on the batches at any
time, every miss has exactly one owner, and a run of several ranks encodes the same batches as a single process, which
gives the same bytes.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from latentcache.config import ImagesConfig
from latentcache.dataset.manifest import Manifest
from latentcache.dataset.manifest_row import CaptionRef, ImageRef, PartRef, Row
from latentcache.dataset.samples import Sample, SampleSource
from latentcache.errors import ConfigError
from latentcache.identity import ImageIdentity, MaskIdentity, TextEncoding, TextIdentity
from latentcache.store.base import Store
from latentcache.types import ImageOutput, Refusal

if TYPE_CHECKING:  # it imports diffusers, which a process that takes a part of a plan may do without
    from latentcache.precache.encodings import Encodings

Task = TypeVar("Task")
TEXT_BATCH_SIZE = 16
"""Captions per encoder call on an accelerator: beyond this the encoders gain little. On a CPU it is one: there the
last bits of pooled_prompt_embeds depend on the batch (up to 2e-6), and a caption should give what encode_prompt gives
for it alone."""

MASK_BATCH_SIZE = 64
"""Masks that one rank makes together."""


@dataclass(frozen=True, slots=True)
class ImageTask:
    """One image entry to encode."""

    key: str
    identity: ImageIdentity
    sample: Sample
    source: SampleSource
    images: ImagesConfig


@dataclass(frozen=True, slots=True)
class MaskTask:
    """One mask to be made; it needs no model. `sample` is that of the mask's file, or of the image with its alpha."""

    key: str
    identity: MaskIdentity
    sample: Sample
    source: SampleSource
    images: ImagesConfig
    is_alpha: bool


@dataclass(frozen=True, slots=True)
class TextTask:
    """One text entry to encode. Sample and path are those of the first sample with this caption.

    `caption` is the text as it was given; the source of the identity is the digest of what the tokenizer gets of it.
    `controls` are the images that are read together with it.
    """

    key: str
    identity: TextIdentity
    caption: str
    sample_id: str
    path: str
    controls: tuple[ImageTask, ...] = ()


@dataclass(slots=True)
class Plan:
    """The plan of a run. Counts are those of the whole dataset, the batches are this shard's share."""

    manifests: list[Manifest] = field(default_factory=list)
    image_batches: list[list[ImageTask]] = field(default_factory=list)
    text_batches: list[list[TextTask]] = field(default_factory=list)
    mask_batches: list[list[MaskTask]] = field(default_factory=list)
    num_samples: int = 0
    num_hits: int = 0
    num_missing_captions: int = 0
    num_mostly_cut: int = 0
    mostly_cut: list[str] = field(default_factory=list)
    """See `Report`."""
    refused: list[Refusal] = field(default_factory=list)
    misses_by_reason: Counter[str] = field(default_factory=Counter)
    miss_bytes: int = 0
    reasons: dict[str, str] = field(default_factory=dict)
    """Key of each miss -> why it is one."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `world_size` processes that share one cache.

    `local_rank` chooses the device among those of a machine; None leaves it to torch. `launch` distinguishes
    one launch of the ranks from another, if the launcher names it. `local_world_size` of the ranks run on this machine;
    None where nobody says.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int | None = None
    launch: str = ""
    local_world_size: int | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Shard:
        """RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, as torchrun sets them; one process without them.

        Raises ConfigError.
        """
        environ = os.environ if environ is None else environ
        numbers = {"RANK": 0, "WORLD_SIZE": 1}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            text = environ.get(name)
            if text is not None and not text.isdecimal():
                raise ConfigError(f"{text!r} is not a number; torchrun sets it, or unset it", source=name)
            if text is not None:
                numbers[name] = int(text)
        rank, world_size = numbers["RANK"], numbers["WORLD_SIZE"]
        if rank >= world_size:
            raise ConfigError(f"RANK {rank} must be at least 0 and less than WORLD_SIZE {world_size}", source="RANK")
        launch = environ.get("TORCHELASTIC_RUN_ID") or environ.get("SLURM_JOB_ID") or ""
        return cls(rank, world_size, numbers.get("LOCAL_RANK"), launch, numbers.get("LOCAL_WORLD_SIZE"))


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


class PlanBuilder:
    """Sorts entries into hits and misses. Each key counts once: equal images and equal captions are one entry."""

    def __init__(self, store: Store, salt: str, shard: Shard):
        self.plan = Plan()
        self.damaged = store.damaged()
        self.salt = salt
        self._store = store
        self._seen: set[str] = set()
        self._images: Batches[ImageTask] = Batches(shard)
        self._texts: Batches[TextTask] = Batches(shard)
        self._masks: Batches[MaskTask] = Batches(shard)

    def find(self, keys: Iterable[str]) -> set[str]:
        """Choose the keys that are in the store."""
        return self._store.find(set(keys) - self._seen)

    def add_image(
        self,
        ref: ImageRef | PartRef,
        encodings: Encodings,
        present: set[str],
        why: Callable[[], str],
        task: Callable[[], ImageTask],
        output: ImageOutput | None = None,
    ) -> None:
        """Count an image entry. `why` and `task` are called for misses only: a plan may have millions of hits.

        `output` is that of a control image, where it is another than that of images.
        """
        if ref.key not in self._seen:
            output = output or encodings.image.output
            is_miss = self._is_miss(ref.key, present, why, encodings.image_bytes(ref.geometry, output))
            # A clip alone: a group of them would not fit into memory.
            size = encodings.image_group_size if ref.geometry.num_frames is None else 1
            self._images.add((ref.geometry.extent, output), size, task() if is_miss else None)

    def add_mask(
        self, ref: PartRef, num_bytes: int, present: set[str], why: Callable[[], str], task: Callable[[], MaskTask]
    ) -> None:
        """Count a mask of `num_bytes`. `why` and `task` are called for a miss only."""
        if ref.key not in self._seen:
            is_miss = self._is_miss(ref.key, present, why, num_bytes)
            self._masks.add("mask", MASK_BATCH_SIZE, task() if is_miss else None)

    def add_text(
        self,
        row: Row,
        ref: CaptionRef,
        encoding: TextEncoding,
        num_bytes: int,
        present: set[str],
        why: Callable[[], str],
        identity: Callable[[], TextIdentity],
        controls: Callable[[], tuple[ImageTask, ...]] = tuple,
    ) -> None:
        """Count a text entry of `num_bytes`. `why`, `identity` and `controls` are called for a miss only."""
        if ref.key not in self._seen:
            task = None
            if self._is_miss(ref.key, present, why, num_bytes):
                task = TextTask(ref.key, identity(), ref.text, row.sample_id, row.path, controls())
            self._texts.add(encoding.recipe, TEXT_BATCH_SIZE, task)

    def finish(self) -> Plan:
        """The plan with this shard's batches."""
        self.plan.image_batches = self._images.finish()
        self.plan.text_batches = self._texts.finish()
        self.plan.mask_batches = self._masks.finish()
        return self.plan

    def _is_miss(self, key: str, present: set[str], why: Callable[[], str], num_bytes: int) -> bool:
        self._seen.add(key)
        if key in present:
            self.plan.num_hits += 1
            return False
        reason = self.plan.reasons[key] = why()
        self.plan.misses_by_reason[reason] += 1
        self.plan.miss_bytes += num_bytes
        return True
