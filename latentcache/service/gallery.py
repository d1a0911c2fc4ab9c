"""What the gallery shows: samples that match filters, in the order of their manifests, a page at a time."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal, get_args

from latentcache.dataset.manifest_row import Row
from latentcache.errors import ConfigError, SampleError
from latentcache.service.manifest_views import FileState, ManifestView, ManifestViews
from latentcache.store.base import Store
from latentcache.types import Size

PAGE_SIZE = 24
"""Samples that are loaded together while scrolling."""
MAX_SEARCH_CHARS = 500
_CHUNK = 1024
_BUCKET = re.compile(r"(\d{1,8})x(\d{1,8})")

State = Literal["refused", "damaged", "missing", "unverified", "stale"]
STATES: Mapping[State, str] = {
    "refused": "cannot be used, for a stated reason",
    "damaged": "an entry's bytes are not those that were stored",
    "missing": "an entry is not there",
    "unverified": "imported, and not shown to be what encoding gives",
    "stale": "the photo's file changed after it was cached",
}
"""What may be wrong with a sample, the worst first, in words."""


@dataclass(frozen=True, slots=True)
class Filters:
    """Which samples are shown; an empty text lets all pass.

    Each word of `search` must occur in the sample_id or a caption, in upper or lower case. `bucket` is `HxW`.
    """

    search: str = ""
    dataset: str = ""
    bucket: str = ""
    state: str = ""

    def __post_init__(self) -> None:
        if len(self.search) > MAX_SEARCH_CHARS:
            raise ConfigError(f"a search of {len(self.search):,} characters; at most {MAX_SEARCH_CHARS} are allowed")
        if self.bucket and not _BUCKET.fullmatch(self.bucket):
            raise ConfigError(f"bucket {self.bucket!r:.40}: a bucket is HxW, e.g. 1024x1024")
        if self.state and self.state not in get_args(State):
            raise ConfigError(f"state {self.state!r:.40}: one of {', '.join(get_args(State))} is needed")

    @property
    def is_empty(self) -> bool:
        """Whether all samples of the dataset, or of all datasets, are shown."""
        return not (self.search.split() or self.bucket or self.state)

    def to_query(self) -> dict[str, str]:
        """The filters that are set, by name."""
        return {name: value for name in self.__slots__ if (value := getattr(self, name))}


@dataclass(frozen=True, slots=True)
class Tile:
    """A sample in the gallery. `key` is that of its image, None for a refused sample that has none."""

    dataset: str
    sample_id: str
    caption: str
    key: str | None
    size: Size | None
    state: State | None
    detail: str
    """Of a refused sample, why."""


@dataclass(frozen=True, slots=True)
class GalleryPage:
    """Tiles, and the number with which the next page starts; None at the end.

    `num_found` counts all samples that match; None where counting them would take too long.
    """

    tiles: tuple[Tile, ...]
    next_start: int | None
    num_found: int | None


class Gallery:
    """Finds samples. Threads may share it. Numbers of samples count through all datasets that are shown.

    Without `sees_photos` it looks at no photo's file, so no sample is stale: a client that may write manifests chooses
    their paths.
    """

    def __init__(self, store: Store, views: ManifestViews, *, sees_photos: bool):
        self.store, self.views, self._sees_photos = store, views, sees_photos
        self.states = {state: words for state, words in STATES.items() if state != "stale" or sees_photos}
        """Those that a sample may be found in, in words."""

    def page(self, filters: Filters, start: int = 0) -> GalleryPage:
        """PAGE_SIZE samples that match, from number `start` on. ConfigError, DatasetError, StoreError."""
        if filters.state == "stale" and not self._sees_photos:
            raise ConfigError("which photos changed is known where they are shown: start the server with --photos")
        names = [filters.dataset] if filters.dataset else self.views.dataset_names()
        views = [self.views.view(name) for name in names]
        shown = list(islice(self._found(views, filters, start), PAGE_SIZE + 1))
        next_start = shown.pop()[0] if len(shown) > PAGE_SIZE else None
        tiles = self._tiles([(view, row) for _, view, row in shown])
        return GalleryPage(tiles, next_start, self._count(views, filters, start))

    def _count(self, views: Sequence[ManifestView], filters: Filters, start: int) -> int | None:
        if filters.is_empty:
            return sum(len(view.rows) for view in views)
        if start or filters.state == "stale":  # it was counted before, or it takes a look at each file
            return None
        return sum(1 for _ in self._found(views, filters, 0))

    def _found(
        self, views: Sequence[ManifestView], filters: Filters, start: int
    ) -> Iterator[tuple[int, ManifestView, Row]]:
        """Number, view and row of each sample that matches, from number `start` on."""
        words = filters.search.casefold().split()
        size = _BUCKET.fullmatch(filters.bucket)
        bucket = None if size is None else Size(int(size[1]), int(size[2]))
        first = 0
        for view in views:
            for begin in range(max(0, start - first), len(view.rows), _CHUNK):
                chunk = [
                    (first + begin + place, view, row)
                    for place, row in enumerate(view.rows.rows(begin, begin + _CHUNK))
                    if _matches(row, words, bucket)
                ]
                if filters.state:
                    states = self._states(filters.state, view.state, [row for _, _, row in chunk])
                    chunk = [item for item, state in zip(chunk, states, strict=True) if state == filters.state]
                yield from chunk
            first += len(view.rows)

    def _states(self, asked: str, written: FileState, rows: Sequence[Row]) -> list[State | None]:
        """For each row `asked` if it is in this state, whatever else is wrong with it; else another state, or None."""
        match asked:
            case "unverified":
                return ["unverified" if row.refusal is None and not row.is_verified else None for row in rows]
            case "stale":
                return ["stale" if self._is_stale(row, written) else None for row in rows]
            case "refused":
                return ["refused" if row.refusal is not None else None for row in rows]
            case _:
                return self._lacking(rows)

    def _lacking(self, rows: Sequence[Row]) -> list[State | None]:
        """For each row `damaged` or `missing` if it was not refused and lacks an entry, else None."""
        usable = [row for row in rows if row.refusal is None]
        present = self.store.find(dict.fromkeys(key for row in usable for key in row.keys()))
        whole = [row.refusal is not None or present.issuperset(row.keys()) for row in rows]
        if all(whole):
            return [None] * len(rows)
        damaged = self.store.damaged().keys()
        return [
            None if is_whole else "missing" if damaged.isdisjoint(row.keys()) else "damaged"
            for row, is_whole in zip(rows, whole, strict=True)
        ]

    def _tiles(self, shown: Sequence[tuple[ManifestView, Row]]) -> tuple[Tile, ...]:
        lacking = self._lacking([row for _, row in shown])
        return tuple(
            _tile(source.name, row, self._state(row, state, source.state))
            for (source, row), state in zip(shown, lacking, strict=True)
        )

    def sample(self, dataset: str, sample_id: str) -> tuple[ManifestView, Row]:
        """One sample. RequestRefused for an unknown dataset, SampleError for an unknown sample."""
        view = self.views.view(dataset)
        row = view.rows.get(sample_id)
        if row is None:
            raise SampleError(sample_id, f"is not in dataset {dataset}", "look for it in the gallery")
        return view, row

    def state(self, view: ManifestView, row: Row) -> State | None:
        """What is wrong with a sample, the worst first; None if nothing is."""
        return self._state(row, self._lacking([row])[0], view.state)

    def _state(self, row: Row, lacking: State | None, written: FileState) -> State | None:
        """What is wrong with a sample; `lacking` is what the store says of its entries."""
        if row.refusal is not None:
            return "refused"
        if lacking is not None:
            return lacking
        if not row.is_verified:
            return "unverified"
        return "stale" if self._is_stale(row, written) else None

    def _is_stale(self, row: Row, written: FileState) -> bool:
        """Whether the photo's file is there and changed after the manifest was written: by its time, no proof."""
        if not self._sees_photos or row.refusal is not None:
            return False
        try:
            return os.stat(row.path).st_mtime_ns > written.mtime_ns
        except (OSError, ValueError):  # it need not be on this machine, and a tar's member is no file
            return False

    def neighbours(self, view: ManifestView, row: Row) -> tuple[Row | None, Row | None]:
        """The samples before and after this one in its dataset."""
        number = view.rows.number(row.sample_id)
        assert number is not None  # the row is of this view
        before = view.rows.row(number - 1) if number else None
        return before, view.rows.row(number + 1) if number + 1 < len(view.rows) else None

    def buckets(self, dataset: str) -> Counter[Size]:
        """How many samples lie in each bucket, of one dataset or, with an empty name, of all."""
        names = [dataset] if dataset else self.views.dataset_names()
        return sum((self.views.view(name).buckets for name in names), Counter())


def _tile(dataset: str, row: Row, state: State | None) -> Tile:
    image = row.images[0] if row.images else None
    return Tile(
        dataset=dataset,
        sample_id=row.sample_id,
        caption=row.captions[0].text if row.captions else "",
        key=None if image is None else image.key,
        size=None if image is None else image.geometry.target_size,
        state=state,
        detail="" if row.refusal is None else f"{row.refusal.reason}: {row.refusal.detail}",
    )


def _matches(row: Row, words: Sequence[str], bucket: Size | None) -> bool:
    if bucket is not None and not any(ref.geometry.target_size == bucket for ref in row.images):
        return False
    if not words:
        return True
    text = "\n".join([row.sample_id, *(caption.text for caption in row.captions)]).casefold()
    return all(word in text for word in words)
