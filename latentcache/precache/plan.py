"""The work of a run: all samples as manifests, and this process's misses in batches."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from latentcache.config import ImagesConfig
from latentcache.dataset.manifest import CaptionRef, ImageRef, Manifest, Row
from latentcache.dataset.samples import Sample, SampleSource
from latentcache.identity import ImageIdentity, TextEncoding, TextIdentity, caption_digest
from latentcache.precache.encodings import TEXT_BATCH_SIZE, Encodings
from latentcache.precache.shard import Batches, Shard
from latentcache.store.base import Store
from latentcache.types import Refusal


@dataclass(frozen=True, slots=True)
class ImageTask:
    """One image entry to encode."""

    key: str
    identity: ImageIdentity
    sample: Sample
    source: SampleSource
    images: ImagesConfig


@dataclass(frozen=True, slots=True)
class TextTask:
    """One text entry to encode. Sample and path are those of the first sample with this caption."""

    key: str
    identity: TextIdentity
    caption: str
    sample_id: str
    path: str


@dataclass(slots=True)
class Plan:
    """The plan of a run. Counts are those of the whole dataset, the batches are this shard's share."""

    manifests: list[Manifest] = field(default_factory=list)
    image_batches: list[list[ImageTask]] = field(default_factory=list)
    text_batches: list[list[TextTask]] = field(default_factory=list)
    num_samples: int = 0
    num_hits: int = 0
    num_missing_captions: int = 0
    refused: list[Refusal] = field(default_factory=list)
    misses_by_reason: Counter[str] = field(default_factory=Counter)
    miss_bytes: int = 0
    reasons: dict[str, str] = field(default_factory=dict)
    """Key of each miss -> why it is one."""

    @property
    def num_misses(self) -> int:
        """Misses of the whole dataset, in entries."""
        return self.misses_by_reason.total()

    @property
    def num_captions_to_encode(self) -> int:
        """Captions of this shard."""
        return sum(map(len, self.text_batches))

    @property
    def num_pixels_to_encode(self) -> int:
        """Pixels of this shard's images, after the crop."""
        tasks = (task for batch in self.image_batches for task in batch)
        return sum(math.prod(task.identity.preparation.target_size) for task in tasks)


class PlanBuilder:
    """Sorts entries into hits and misses. Each key counts once: equal images and equal captions are one entry."""

    def __init__(self, store: Store, encodings: Encodings, salt: str, shard: Shard):
        self.plan = Plan()
        self.damaged = store.damaged()
        self.encodings = encodings
        self.salt = salt
        self._store = store
        self._seen: set[str] = set()
        self._images: Batches[ImageTask] = Batches(shard)
        self._texts: Batches[TextTask] = Batches(shard)

    def find(self, keys: Iterable[str]) -> set[str]:
        """Those of the keys that are in the store."""
        return self._store.find(set(keys) - self._seen)

    def add_image(
        self,
        ref: ImageRef,
        present: set[str],
        why: Callable[[], str],
        task: Callable[[], ImageTask],
    ) -> None:
        """Count an image entry. `why` and `task` are called for misses only: a plan may have millions of hits."""
        if ref.key in self._seen:
            return
        self._seen.add(ref.key)
        bucket = ref.geometry.target_size
        is_hit = ref.key in present
        self._count(ref.key, is_hit, why, self.encodings.image_bytes(bucket))
        self._images.add(bucket, self.encodings.image_group_size, None if is_hit else task())

    def add_text(
        self, row: Row, ref: CaptionRef, encoding: TextEncoding, present: set[str], why: Callable[[], str]
    ) -> None:
        """Count a text entry."""
        if ref.key in self._seen:
            return
        self._seen.add(ref.key)
        is_hit = ref.key in present
        self._count(ref.key, is_hit, why, self.encodings.text_bytes)
        task = None
        if not is_hit:
            identity = TextIdentity(caption_digest(ref.text), encoding, self.salt)
            task = TextTask(ref.key, identity, ref.text, row.sample_id, row.path)
        self._texts.add(encoding.clip_skip, TEXT_BATCH_SIZE, task)

    def finish(self) -> Plan:
        """The plan with this shard's batches."""
        self.plan.image_batches = self._images.finish()
        self.plan.text_batches = self._texts.finish()
        return self.plan

    def _count(self, key: str, is_hit: bool, why: Callable[[], str], num_bytes: int) -> None:
        if is_hit:
            self.plan.num_hits += 1
            return
        reason = why()
        self.plan.reasons[key] = reason
        self.plan.misses_by_reason[reason] += 1
        self.plan.miss_bytes += num_bytes
