"""What a cache holds as a whole: its datasets and models, its sizes, and how it grew."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import accumulate
from typing import Any

from latentcache.errors import LatentCacheError, PackError
from latentcache.identity import PartIdentity
from latentcache.service.charts import Curve, curve_of
from latentcache.service.manifest_views import ManifestView, ManifestViews
from latentcache.store.base import StoreStats
from latentcache.store.disk import DiskStore
from latentcache.store.pack import WholePack

GROWTH_POINTS = 40
"""Packs of which the time is read, at most: one of each so many that follow each other."""
LOOKED_AT = 64
"""Samples of a dataset that are asked where the models came from."""


@dataclass(frozen=True, slots=True)
class DatasetSummary:
    """One dataset, and what it was encoded with. `problem` says why its manifest cannot be read."""

    name: str
    view: ManifestView | None
    problem: str = ""

    @property
    def parts(self) -> dict[str, str]:
        """Part of the model -> class and the six digits that name it. Imported datasets name none."""
        found: dict[str, str] = {}
        common = {} if self.view is None else self.view.manifest.common
        for encoding in ("image_encoding", "text_encoding"):
            for part, value in (common.get(encoding) or {}).items():
                if isinstance(value, Mapping):
                    found[part] = f"{value.get('class_name', '')} {_short_name(value)}"
        return found

    @property
    def origins_key(self) -> tuple[str | None, str | None]:
        """The keys of one image and one caption of it: their records name where the models came from."""
        first = [] if self.view is None else self.view.rows.rows(0, LOOKED_AT)
        rows = [row for row in first if row.refusal is None]
        image = next((row.images[0].key for row in rows if row.images), None)
        return image, next((row.captions[0].key for row in rows if row.captions), None)


def _short_name(part: Mapping[str, Any]) -> str:
    try:
        return PartIdentity(**part).name
    except TypeError:
        return "?"


@dataclass(frozen=True, slots=True)
class Overview:
    """The figures of the first view. They need no pack."""

    stats: StoreStats
    datasets: tuple[DatasetSummary, ...]
    num_samples: int


def overview(store: DiskStore, views: ManifestViews) -> Overview:
    """Count what the index and the manifests say. A manifest that is damaged does not hide the others."""
    datasets = []
    for name in views.dataset_names():
        try:
            datasets.append(DatasetSummary(name, views.view(name)))
        except LatentCacheError as error:
            datasets.append(DatasetSummary(name, None, str(error)))
    num_samples = sum(len(found.view.rows) for found in datasets if found.view is not None)
    return Overview(store.stats(), tuple(datasets), num_samples)


def model_origins(store: DiskStore, datasets: Iterable[DatasetSummary]) -> dict[str, set[str]]:
    """Part of a model -> where it was loaded from, as one image and one caption of each dataset say."""
    origins: dict[str, set[str]] = {}
    for dataset in datasets:
        keys = [key for key in dataset.origins_key if key is not None]
        for key in store.find(keys):
            models = store.record(key).provenance.get("models")
            if isinstance(models, Mapping):
                for part, origin in models.items():
                    origins.setdefault(str(part), set()).add(str(origin))
    return origins


@dataclass(frozen=True, slots=True)
class Growth:
    """Bytes of packs over time. `begin` and `end` are the first and the last time (ISO 8601)."""

    curve: Curve
    begin: str
    end: str
    file_bytes: int


class GrowthReader:
    """Reads when packs were made: from the record of one entry each, since their files' times are those of readers.

    Packs are immutable, so each is read once. Threads may share it.
    """

    def __init__(self, store: DiskStore):
        self._store = store
        self._created: dict[str, datetime | None] = {}
        self._lock = threading.Lock()

    def growth(self) -> Growth | None:
        """The growth until now; None of fewer than two packs with a time."""
        packs = list(self._store.catalog.table.packs.values())
        step = max(1, -(-len(packs) // GROWTH_POINTS))
        points = []
        with self._lock:
            for first in range(0, len(packs), step):
                group = packs[first : first + step]
                if (created := self._time_of(group[-1].id)) is not None:
                    points.append((created, sum(pack.file_bytes for pack in group)))
        points.sort()
        times = [created.timestamp() for created, _ in points]
        sizes = list(accumulate(num_bytes for _, num_bytes in points))
        curve = curve_of(times, sizes, from_zero=True)
        return None if curve is None else Growth(curve, points[0][0].isoformat(), points[-1][0].isoformat(), sizes[-1])

    def _time_of(self, pack: str) -> datetime | None:
        if pack not in self._created:
            self._created[pack] = _created(self._store, pack)
        return self._created[pack]


def _created(store: DiskStore, pack: str) -> datetime | None:
    """When the first entry of a pack was made, in UTC; None where its record does not say, or cannot be read."""
    try:
        whole = WholePack.in_file(store.directory.pack_path(pack))
        created = json.loads(whole.json(0))["provenance"]["created"]
        time = datetime.fromisoformat(created)
        return time.astimezone(UTC) if time.tzinfo is not None else None
    except (PackError, OSError, ValueError, LookupError, TypeError):
        return None
