"""The plan of a run: the entries to encode, and how its ranks share them.

Batches are formed from hits and misses alike, in the order of the dataset. So all ranks agree on the batches at any
time, every miss has exactly one owner, and several ranks encode the same batches, and so the same bytes, as a single
process.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Hashable, Mapping, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from latentcache.config import EncodeConfig, ImagesConfig
from latentcache.dataset.clips import decode_clip
from latentcache.dataset.images import decode, kept_by, luma, prepare, prepare_mask
from latentcache.dataset.manifest import Manifest
from latentcache.dataset.resampling import BOX
from latentcache.dataset.samples import Sample, SampleSource
from latentcache.errors import ConfigError, ImageRefused
from latentcache.identity import Identity, ImageIdentity, MaskIdentity, TextIdentity, digest
from latentcache.precache.report import Report
from latentcache.provenance import provenance_json
from latentcache.store.base import Store
from latentcache.types import Geometry, Kind, Record

TEXT_BATCH_SIZE = 16
"""Captions per encoder call on an accelerator; more would gain little. On a CPU it is one, because there the last bits
of pooled_prompt_embeds depend on the batch (up to 2e-6), and a caption should give what encode_prompt gives for it
alone."""
MASK_BATCH_SIZE = 64
"""Masks assigned to a rank together."""
_ANY_IMAGES = ImagesConfig()  # one object for all tasks that read no image


def num_threads(encode: EncodeConfig) -> int:
    """The number of threads that `num_workers` gives on this machine."""
    return (os.cpu_count() or 1) if encode.num_workers == "auto" else encode.num_workers


@dataclass(frozen=True, slots=True)
class Task:
    """One entry to encode: an image, a control image, a mask or a text.

    `sample` is the first sample that has the entry; for a companion, the sample of the companion's own file. Images and
    masks are read from `source`. With `is_alpha`, the mask is the alpha channel of its image. `mask` is the file of a
    masked image's mask. `caption` is a text as given; its identity has the digest of what the tokenizer receives.
    `controls` are the images that are read together with a text.
    """

    key: str
    identity: Identity
    sample: Sample
    source: SampleSource | None = None
    images: ImagesConfig = _ANY_IMAGES
    is_alpha: bool = False
    mask: Sample | None = None
    caption: str = ""
    controls: tuple[Task, ...] = ()

    @property
    def kind(self) -> Kind:
        """The entry's kind."""
        return self.identity.kind

    @property
    def geometry(self) -> Geometry | None:
        """The geometry of an image, a control image or a mask; None for a text."""
        return None if isinstance(self.identity, TextIdentity) else self.identity.preparation.geometry

    def record(self, **made: Any) -> Record:
        """The record of an entry that was just made. `made` are further facts for `provenance_json`."""
        provenance = provenance_json(sample_id=self.sample.sample_id, source_path=self.sample.path, **made)
        return Record(self.key, self.kind, self.identity.to_json(), provenance)

    def pixels(self) -> np.ndarray:
        """The encoder's input: uint8 [H, W, 3], for a clip [frames, H, W, 3], for a mask its weights [1, h, w].

        A masked image has a fourth channel: how much of each pixel is kept. The bytes are hashed again, so that the
        entry always matches its key. Raises ImageRefused.
        """
        identity = self.identity
        if isinstance(identity, MaskIdentity):
            weights, geometry = self._weights(self.sample, identity.source), identity.preparation.geometry
            return prepare_mask(weights, geometry, identity.downscale)
        assert isinstance(identity, ImageIdentity), "a text has no pixels"
        preparation = identity.preparation
        data, path = self._data(self.sample, identity.source), self.sample.path
        if preparation.geometry.num_frames is not None:
            return decode_clip(data, path, self.images, preparation)
        pixels = prepare(decode(data, path, self.images), preparation.geometry, preparation.resample)
        if self.mask is None or identity.masking is None:
            return pixels
        weights = self._weights(self.mask, identity.masking.source)
        laid = prepare(weights, identity.masking.preparation.geometry, BOX)
        return np.dstack([pixels, kept_by(laid, identity.masking.rule)])

    def _weights(self, sample: Sample, source: str) -> np.ndarray:
        """Read a mask from this file: uint8 [H, W]."""
        pixels = decode(self._data(sample, source), sample.path, self.images, alpha_only=self.is_alpha)
        return pixels if self.is_alpha else luma(pixels)

    def _data(self, sample: Sample, source: str) -> bytes:
        assert self.source is not None, "a text is not read"
        data = self.source.read(sample)
        if digest(data) != source:
            raise ImageRefused(sample.path, "changed", "the file changed during the run; run precache again")
        return data


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank `rank` of `world_size` processes that share one cache.

    `local_rank` chooses the device on a machine; None leaves it to torch. `launch` identifies this launch of the ranks,
    if the launcher does. `local_world_size` is the number of ranks on this machine; None if unknown.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int | None = None
    launch: str = ""
    local_world_size: int | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Shard:
        """Read RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, as set by torchrun. Defaults to a single process.

        Raises ConfigError.
        """
        environ = os.environ if environ is None else environ
        numbers = {"RANK": 0, "WORLD_SIZE": 1}
        for name in {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"} & environ.keys():
            if not environ[name].isdecimal():
                raise ConfigError(f"{environ[name]!r} is not a number; start with torchrun, or unset it", source=name)
            numbers[name] = int(environ[name])
        rank, world_size = numbers["RANK"], numbers["WORLD_SIZE"]
        if rank >= world_size:
            raise ConfigError(f"RANK {rank} must be at least 0 and less than WORLD_SIZE {world_size}", source="RANK")
        launch = environ.get("TORCHELASTIC_RUN_ID") or environ.get("SLURM_JOB_ID") or ""
        return cls(rank, world_size, numbers.get("LOCAL_RANK"), launch, numbers.get("LOCAL_WORLD_SIZE"))


class Batches:
    """Collects this shard's tasks into batches. The members of a batch share a group, such as a bucket."""

    def __init__(self, shard: Shard):
        self._shard = shard
        self._open: dict[tuple[Hashable, int], list[Task | None]] = defaultdict(list)
        self._closed: list[tuple[tuple[Hashable, int], list[Task | None]]] = []
        """Full batches of this shard that contain a task."""
        self._num_closed = 0

    def add(self, group: Hashable, size: int, task: Task | None) -> None:
        """Add a member to a group with batches of `size`. None is a hit, which only takes a place."""
        members = self._open[group, size]
        members.append(task)
        if len(members) == size:
            self._close((group, size))

    def finish(self) -> list[list[Task]]:
        """All batches of this shard, in order."""
        for group in list(self._open):
            self._close(group)
        whole, partial = list[list[Task]](), defaultdict[tuple[Hashable, int], list[Task]](list)
        for group, members in self._closed:
            tasks = [task for task in members if task is not None]
            if len(tasks) == len(members):
                whole.append(tasks)
            else:
                # Joined, or a small addition to a large dataset would be encoded one image at a time.
                partial[group] += tasks
        for (_, size), tasks in partial.items():
            whole += [tasks[start : start + size] for start in range(0, len(tasks), size)]
        return whole

    def _close(self, group: tuple[Hashable, int]) -> None:
        members, owner = self._open.pop(group), self._num_closed % self._shard.world_size
        self._num_closed += 1
        if owner == self._shard.rank and any(task is not None for task in members):
            self._closed.append((group, members))


class Plan:
    """The plan of a run: sorts entries into hits and misses.

    Each key counts once: equal images or captions share an entry. If keys are `wanted`, all others are ignored. The
    report's counts cover the whole dataset; the batches are this shard's share.
    """

    def __init__(self, store: Store, shard: Shard, report: Report | None = None, wanted: Set[str] | None = None):
        self.store, self.report, self.damaged = store, report or Report(), store.damaged()
        self.manifests: list[Manifest] = []
        self.reasons: dict[str, str] = {}
        """Key of each miss -> its reason."""
        self.batches: dict[Kind, list[list[Any]]] = {}
        """Batches of `Task`s by kind, in encoding order. Set by `finish`."""
        self._wanted = wanted
        self._seen: set[bytes] = set()
        # Texts before images, because the text encoders are released before the VAE needs the memory.
        self._open: dict[Kind, Batches] = {kind: Batches(shard) for kind in ("mask", "text", "image")}

    def is_miss(self, key: str, present: set[str], kind: Kind, group: Hashable, size: int) -> bool:
        """Whether an entry must be encoded. True only for the first call with a key; counts hits.

        `present` are the keys of the chunk that the store has. Batches of the group have `size` members.
        """
        seen = bytes.fromhex(key[:30])  # 120 bits identify a key and take less memory
        if seen in self._seen or (self._wanted is not None and key not in self._wanted):
            return False
        self._seen.add(seen)
        if key not in present:
            return True
        self.report.num_hits += 1
        self._open[kind].add(group, size, None)
        return False

    def add(self, task: Task, group: Hashable, size: int, num_bytes: int, reason: str) -> None:
        """Add a miss."""
        report = self.report
        self.reasons[task.key] = reason
        report.misses_by_reason[reason] = report.misses_by_reason.get(reason, 0) + 1
        report.num_misses += 1
        report.miss_bytes += num_bytes
        self._open[task.kind].add(group, size, task)

    def finish(self) -> Plan:
        """Make the batches, and return the plan."""
        self.batches = {kind: batches.finish() for kind, batches in self._open.items()}
        self._open.clear()
        self._seen.clear()  # a plan is kept while its batches are encoded
        return self
